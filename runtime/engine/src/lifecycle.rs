//! Lifecycle hooks, which follow pods and containers and may change or refuse them. The engine calls them at
//! fixed points through one trait. The daemon's implementation forwards the calls to NRI plugins; [`NoHooks`]
//! does nothing. The engine has no NRI types.
//!
//! Events of one pod are serialised: [`LifecycleHooks::begin`] waits for the current event, and its
//! [`EventGuard`] is held until the announced change is complete or undone. Events of different pods are
//! independent.

use std::future::{Future, ready};
use std::pin::Pin;

use coracle_base::error::Error;
use coracle_sandbox::cgroup::{Limits, Resources};

use crate::container::Resolved;
use crate::{Container, Pod};

/// A future that borrows for `'a` and stays on its thread.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// Events that are expensive to prepare and therefore omitted if no hook requires them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Before a container is created, when it can still be changed.
    CreateContainer,
    /// Before and after a container's program is started.
    StartContainer,
    /// After a container has exited.
    StopContainer,
    /// Before a container's storage is removed.
    RemoveContainer,
    /// After a pod's containers have exited, while its sandbox still exists.
    StopPod,
    /// Before a pod is removed from the lists.
    RemovePod,
}

/// Hooks for all pods of the node.
pub trait LifecycleHooks {
    /// Whether the hooks require `event`. Called for every request, so it must be cheap.
    fn wants(&self, event: Event) -> bool;

    /// Waits until no other event of `pod` is being processed.
    fn begin<'a>(&'a self, pod: &'a Pod) -> Pending<'a, Box<dyn EventGuard>>;
}

/// Permission to announce one event of a pod, until the value is dropped. If a method returns an error, the
/// operation is refused and the engine undoes it.
pub trait EventGuard {
    /// RunPodSandbox: called when all objects of the pod exist, before clients see the pod.
    fn run_pod<'a>(&'a self, pod: &'a Pod) -> Pending<'a, Result<(), Error>>;
    /// Called if the pod could not become ready after [`EventGuard::run_pod`] accepted it.
    fn undo_run_pod<'a>(&'a self, pod: &'a Pod) -> Pending<'a, ()>;
    /// Called before the pod's resources are changed.
    fn update_pod<'a>(
        &'a self,
        pod: &'a Pod,
        overhead: Option<&'a Resources>,
        resources: Option<&'a Resources>,
    ) -> Pending<'a, Result<(), Error>>;
    /// Called after the pod's resources were changed.
    fn updated_pod<'a>(&'a self, pod: &'a Pod) -> Pending<'a, ()>;
    /// Called when all containers of the pod have exited, while the sandbox still exists.
    fn stop_pod<'a>(&'a self, pod: &'a Pod) -> Pending<'a, ()>;
    /// Called directly before the pod is removed from the lists.
    fn remove_pod<'a>(&'a self, pod: &'a Pod) -> Pending<'a, ()>;
    /// Called before any object of a container is created; may change `resolved`.
    fn create<'a>(&'a self, pod: &'a Pod, resolved: &'a mut Resolved) -> Pending<'a, Result<(), Error>>;
    /// Called if the container that [`EventGuard::create`] accepted could not be created.
    fn undo_create<'a>(&'a self, pod: &'a Pod) -> Pending<'a, ()>;
    /// Called when the container is listed.
    fn created<'a>(&'a self, container: &'a Container) -> Pending<'a, ()>;
    /// Called when the container's process exists and waits before its program.
    fn start<'a>(&'a self, container: &'a Container) -> Pending<'a, Result<(), Error>>;
    /// Called when the container's program is running.
    fn started<'a>(&'a self, container: &'a Container) -> Pending<'a, ()>;
    /// Called before a container's limits are changed because of the request `asked`: returns the new limits,
    /// which are `wanted` unless a hook changes them.
    fn update<'a>(
        &'a self,
        container: &'a Container,
        asked: &'a Resources,
        wanted: Limits,
    ) -> Pending<'a, Result<Limits, Error>>;
    /// Called after the new limits were applied.
    fn updated<'a>(&'a self, container: &'a Container) -> Pending<'a, ()>;
    /// Called when the container has exited.
    fn stop<'a>(&'a self, container: &'a Container) -> Pending<'a, ()>;
    /// Called directly before the container's storage is removed.
    fn remove<'a>(&'a self, container: &'a Container) -> Pending<'a, ()>;
}

/// Hooks that accept every event without change and without waiting.
pub struct NoHooks;

impl LifecycleHooks for NoHooks {
    fn wants(&self, _: Event) -> bool {
        false
    }

    fn begin<'a>(&'a self, _: &'a Pod) -> Pending<'a, Box<dyn EventGuard>> {
        Box::pin(ready(Box::new(NoHooks) as Box<dyn EventGuard>))
    }
}

impl EventGuard for NoHooks {
    fn run_pod<'a>(&'a self, _: &'a Pod) -> Pending<'a, Result<(), Error>> {
        Box::pin(ready(Ok(())))
    }

    fn undo_run_pod<'a>(&'a self, _: &'a Pod) -> Pending<'a, ()> {
        Box::pin(ready(()))
    }

    fn update_pod<'a>(
        &'a self,
        _: &'a Pod,
        _: Option<&'a Resources>,
        _: Option<&'a Resources>,
    ) -> Pending<'a, Result<(), Error>> {
        Box::pin(ready(Ok(())))
    }

    fn updated_pod<'a>(&'a self, _: &'a Pod) -> Pending<'a, ()> {
        Box::pin(ready(()))
    }

    fn stop_pod<'a>(&'a self, _: &'a Pod) -> Pending<'a, ()> {
        Box::pin(ready(()))
    }

    fn remove_pod<'a>(&'a self, _: &'a Pod) -> Pending<'a, ()> {
        Box::pin(ready(()))
    }

    fn create<'a>(&'a self, _: &'a Pod, _: &'a mut Resolved) -> Pending<'a, Result<(), Error>> {
        Box::pin(ready(Ok(())))
    }

    fn undo_create<'a>(&'a self, _: &'a Pod) -> Pending<'a, ()> {
        Box::pin(ready(()))
    }

    fn created<'a>(&'a self, _: &'a Container) -> Pending<'a, ()> {
        Box::pin(ready(()))
    }

    fn start<'a>(&'a self, _: &'a Container) -> Pending<'a, Result<(), Error>> {
        Box::pin(ready(Ok(())))
    }

    fn started<'a>(&'a self, _: &'a Container) -> Pending<'a, ()> {
        Box::pin(ready(()))
    }

    fn update<'a>(
        &'a self,
        _: &'a Container,
        _: &'a Resources,
        wanted: Limits,
    ) -> Pending<'a, Result<Limits, Error>> {
        Box::pin(ready(Ok(wanted)))
    }

    fn updated<'a>(&'a self, _: &'a Container) -> Pending<'a, ()> {
        Box::pin(ready(()))
    }

    fn stop<'a>(&'a self, _: &'a Container) -> Pending<'a, ()> {
        Box::pin(ready(()))
    }

    fn remove<'a>(&'a self, _: &'a Container) -> Pending<'a, ()> {
        Box::pin(ready(()))
    }
}
