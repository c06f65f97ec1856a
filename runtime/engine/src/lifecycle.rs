//! Who follows the life of pods and containers, and may change or refuse it. The engine asks at fixed points, through one trait:
//! NRI's plugins are behind the daemon's implementation of it, nobody is behind [`NoHooks`]. The engine knows no NRI type.
//!
//! Events of one pod come one after the other: [`LifecycleHooks::begin`] waits for the one under way, and its [`EventGuard`] is
//! held until what the event announces is true, or undone. Events of different pods do not wait for each other.

use std::future::{Future, ready};
use std::pin::Pin;
use std::rc::Rc;

use coracle_base::error::Error;

use crate::container::Resolved;
use crate::record::Limits;
use crate::spec::Resources;
use crate::{Container, Pod, Pods};

/// A future that borrows for `'a` and stays on its thread.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// Events that cost something to prepare, which is left out where nobody wants them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Before a container is made, when it can still be changed.
    CreateContainer,
    /// Before and after a container's program runs.
    StartContainer,
    /// After a container has ended.
    StopContainer,
    /// Before a container's storage goes.
    RemoveContainer,
    /// After a pod's containers have ended, while its sandbox is whole.
    StopPod,
    /// Before a pod leaves the lists.
    RemovePod,
}

/// Follows every pod of the node.
pub trait LifecycleHooks {
    /// Whether anybody wants to hear of `event`. Cheap: asked at every request.
    fn wants(&self, event: Event) -> bool;

    /// Waits until no other event of `pod` is under way.
    fn begin<'a>(&'a self, pods: &'a Rc<Pods>, pod: &'a Pod) -> Pending<'a, Box<dyn EventGuard>>;
}

/// The right to announce one pod's next event, which ends when it is dropped. An error of a method is a refusal: the engine undoes
/// what it has begun.
pub trait EventGuard {
    /// RunPodSandbox: everything of the pod is there, and no client sees it yet.
    fn run_pod<'a>(&'a self, pod: &'a Pod) -> Pending<'a, Result<(), Error>>;
    /// The pod could not be made after [`EventGuard::run_pod`] has accepted it.
    fn undo_run_pod<'a>(&'a self, pod: &'a Pod) -> Pending<'a, ()>;
    /// Before the pod's resources change.
    fn update_pod<'a>(
        &'a self,
        pod: &'a Pod,
        overhead: Option<&'a Resources>,
        resources: Option<&'a Resources>,
    ) -> Pending<'a, Result<(), Error>>;
    /// After the pod's resources have changed.
    fn updated_pod<'a>(&'a self, pod: &'a Pod) -> Pending<'a, ()>;
    /// The workload has ended, the sandbox is whole.
    fn stop_pod<'a>(&'a self, pod: &'a Pod) -> Pending<'a, ()>;
    /// Just before the pod leaves the lists.
    fn remove_pod<'a>(&'a self, pod: &'a Pod) -> Pending<'a, ()>;
    /// Before a container is made: may change `resolved`, from which nothing has been made yet.
    fn create<'a>(&'a self, pod: &'a Pod, resolved: &'a mut Resolved) -> Pending<'a, Result<(), Error>>;
    /// The container that [`EventGuard::create`] has accepted could not be made.
    fn undo_create<'a>(&'a self, pod: &'a Pod) -> Pending<'a, ()>;
    /// The container is in the lists.
    fn created<'a>(&'a self, container: &'a Container) -> Pending<'a, ()>;
    /// The container's process exists and waits before its program.
    fn start<'a>(&'a self, container: &'a Container) -> Pending<'a, Result<(), Error>>;
    /// The container's program runs.
    fn started<'a>(&'a self, container: &'a Container) -> Pending<'a, ()>;
    /// Before a container's limits change from what was `asked` for: gives what they are to become, `wanted` where nobody changes it.
    fn update<'a>(
        &'a self,
        container: &'a Container,
        asked: &'a Resources,
        wanted: Limits,
    ) -> Pending<'a, Result<Limits, Error>>;
    /// The new limits hold.
    fn updated<'a>(&'a self, container: &'a Container) -> Pending<'a, ()>;
    /// The container has ended.
    fn stop<'a>(&'a self, container: &'a Container) -> Pending<'a, ()>;
    /// Just before the container's storage goes.
    fn remove<'a>(&'a self, container: &'a Container) -> Pending<'a, ()>;
}

/// Nobody follows: every event is accepted as it is, and none waits for another.
pub struct NoHooks;

impl LifecycleHooks for NoHooks {
    fn wants(&self, _: Event) -> bool {
        false
    }

    fn begin<'a>(&'a self, _: &'a Rc<Pods>, _: &'a Pod) -> Pending<'a, Box<dyn EventGuard>> {
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
