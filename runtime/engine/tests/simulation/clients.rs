//! The clients of one history: the calls that they made, and the answers that they received. Clients outlive
//! daemons and boots.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Error, Kind};
use coracle_base::reactor;
use coracle_engine::Pods;
use coracle_sandbox::{ContainerId, PodId};

use crate::engine::{container_spec, pod_spec};
use crate::node::Node;
use crate::world::{Process, Role, trace};

/// Time limit of a call, longer than the kubelet's.
const CALL_LIMIT: Duration = Duration::from_secs(600);

/// State of one call, as its client has observed it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Call {
    /// The call was not made, or a newer call has replaced its result.
    #[default]
    None,
    /// The call is being executed.
    Open,
    /// The client disconnected, or the daemon ended, before the answer.
    Unanswered,
    /// The call has succeeded.
    Done,
    /// The call has failed.
    Failed,
}

impl Call {
    /// Whether the call was made and may have had an effect.
    pub(crate) fn was_made(self) -> bool {
        self != Self::None
    }
}

/// A pod sandbox that a client has requested.
#[derive(Clone, Debug, Default)]
pub(crate) struct ToldPod {
    /// The number in the pod's name; a name may be used again after a removal.
    pub(crate) name: u32,
    pub(crate) id: Option<PodId>,
    /// Number of the boot in which the pod was created.
    pub(crate) boot: u32,
    pub(crate) run: Call,
    pub(crate) stop: Call,
    pub(crate) remove: Call,
    /// Whether the name was used again for a newer pod, so that this pod is not requested again.
    pub(crate) is_earlier: bool,
}

/// A container that a client has requested.
#[derive(Clone, Debug, Default)]
pub(crate) struct ToldContainer {
    /// The number in the container's name.
    pub(crate) name: u32,
    /// Index of the container's pod in [`Told::pods`].
    pub(crate) pod: usize,
    pub(crate) id: Option<ContainerId>,
    pub(crate) boot: u32,
    pub(crate) create: Call,
    pub(crate) start: Call,
    pub(crate) stop: Call,
    /// Whether a client has ever asked for its stop.
    pub(crate) was_stopped: bool,
    pub(crate) remove: Call,
    /// Whether the name was used again for a newer container, so that this container is not requested again.
    pub(crate) is_earlier: bool,
}

/// The observations of all clients.
#[derive(Default)]
pub(crate) struct Told {
    pub(crate) pods: Vec<ToldPod>,
    pub(crate) containers: Vec<ToldContainer>,
    /// Number of calls that were made.
    pub(crate) calls: u64,
}

/// One call, with the index of its pod or container.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Action {
    RunPod(usize),
    StopPod(usize),
    RemovePod(usize),
    Create(usize),
    Start(usize),
    /// StopContainer with the container's index and a grace period in seconds.
    Stop(usize, u64),
    Remove(usize),
}

/// The clients and the node on which their daemon runs.
#[derive(Clone)]
pub(crate) struct Clients {
    pub(crate) node: Rc<Node>,
    pub(crate) told: Rc<RefCell<Told>>,
}

impl Clients {
    /// Changes the recorded result of a call.
    fn field<T>(&self, action: Action, change: impl FnOnce(&mut Call) -> T) -> T {
        let mut told = self.told.borrow_mut();
        change(match action {
            Action::RunPod(pod) => &mut told.pods[pod].run,
            Action::StopPod(pod) => &mut told.pods[pod].stop,
            Action::RemovePod(pod) => &mut told.pods[pod].remove,
            Action::Create(container) => &mut told.containers[container].create,
            Action::Start(container) => &mut told.containers[container].start,
            Action::Stop(container, _) => &mut told.containers[container].stop,
            Action::Remove(container) => &mut told.containers[container].remove,
        })
    }

    /// Makes a call; with a `limit`, the client disconnects after that time.
    pub(crate) async fn call(
        self,
        pods: Rc<Pods>,
        action: Action,
        limit: Option<Duration>,
    ) -> Result<(), Error> {
        self.told.borrow_mut().calls += 1;
        trace!(
            self.node.world.borrow_mut(),
            "> {action:?} {}",
            limit.map(|_| "and leaves").unwrap_or_default()
        );
        let before = self.field(action, |call| std::mem::replace(call, Call::Open));
        if let Action::Start(container) = action {
            // A stop before it says nothing any more.
            self.told.borrow_mut().containers[container].stop = Call::None;
        }
        if let Action::Stop(container, _) = action {
            self.told.borrow_mut().containers[container].was_stopped = true;
        }
        let id = self.id(action);
        let answer = reactor::deadline(limit.unwrap_or(CALL_LIMIT), self.execute(&pods, action)).await;
        if self.node.world.borrow().is_daemon_dead {
            // No daemon answers.
            std::future::pending::<()>().await;
        }
        let text = match &answer {
            Ok(Ok(())) => "done".to_owned(),
            Ok(Err(error)) => format!("{error:?}"),
            Err(_) => "unanswered".to_owned(),
        };
        trace!(self.node.world.borrow_mut(), "< {action:?}: {text}");
        let (mut call, result) = match answer {
            Ok(Ok(())) => (Call::Done, Ok(())),
            Ok(Err(error)) => (Call::Failed, Err(error)),
            Err(_) => {
                if limit.is_none() {
                    self.node.world.borrow_mut().broken(format!("{action:?} is not answered"));
                }
                (Call::Unanswered, Err(Error::new(Kind::DeadlineExceeded, "the client has left")))
            }
        };
        // A stop beside a start may have come before it.
        if let Action::Stop(container, _) = action
            && self.told.borrow().containers[container].start == Call::Open
        {
            call = Call::None;
        }
        if id.is_some() && id != self.id(action) {
            return result; // it was about an earlier object of this name
        }
        self.field(action, |field| {
            *field = match (*field, before, call) {
                // What a client was told once holds, whatever a repeated call answers.
                (Call::Done, _, _) | (_, Call::Done, _) => Call::Done,
                // Another call may have succeeded before this one was refused.
                (_, Call::Open | Call::Unanswered, Call::Failed) => Call::Unanswered,
                (_, _, call) => call,
            };
        });
        result
    }

    async fn execute(&self, pods: &Rc<Pods>, action: Action) -> Result<(), Error> {
        let boot = self.node.world.borrow().boot;
        match action {
            Action::RunPod(index) => {
                let spec = pod_spec(self.told.borrow().pods[index].name);
                let id = pods.run(spec).await?;
                let mut told = self.told.borrow_mut();
                let pod = told.pods[index].clone();
                if pod.id.is_some_and(|known| known != id) {
                    // An earlier pod of this name, which is remembered with its containers.
                    let earlier = told.pods.len();
                    let is_its =
                        |container: &&mut ToldContainer| container.pod == index && container.id.is_some();
                    told.containers.iter_mut().filter(is_its).for_each(|container| container.pod = earlier);
                    told.pods[index] = ToldPod { name: pod.name, run: Call::Open, ..ToldPod::default() };
                    told.pods.push(ToldPod { is_earlier: true, ..pod });
                }
                (told.pods[index].id, told.pods[index].boot) = (Some(id), boot);
                Ok(())
            }
            Action::StopPod(index) | Action::RemovePod(index) => {
                let Some(id) = self.told.borrow().pods[index].id else { return Ok(()) };
                if matches!(action, Action::RemovePod(_)) {
                    pods.remove_unread(&id.to_string()).await?;
                }
                match (pods.pod(&id.to_string()), action) {
                    (Ok(pod), Action::StopPod(_)) => pod.stop().await,
                    (Ok(pod), _) => pod.remove().await,
                    (Err(error), _) => absent(error),
                }
            }
            Action::Create(index) => {
                let pod = self.told.borrow().containers[index].pod;
                let id = self.told.borrow().pods[pod].id;
                let id = id.ok_or_else(|| Error::new(Kind::NotFound, "the pod sandbox has no id"))?;
                let pod = pods.pod(&id.to_string())?;
                let spec = container_spec(self.told.borrow().containers[index].name);
                let id = pod.create_container(spec).await?;
                let mut told = self.told.borrow_mut();
                let earlier = told.containers[index].clone();
                if earlier.id.is_some_and(|known| known != id) {
                    let (pod, name) = (earlier.pod, earlier.name);
                    let create = Call::Open;
                    told.containers[index] = ToldContainer { pod, name, create, ..ToldContainer::default() };
                    told.containers.push(ToldContainer { is_earlier: true, ..earlier });
                }
                (told.containers[index].id, told.containers[index].boot) = (Some(id), boot);
                Ok(())
            }
            Action::Start(index) => {
                let id = self.container(index)?;
                pods.container(&id)?.start().await
            }
            Action::Stop(index, grace_s) => {
                let Ok(id) = self.container(index) else { return Ok(()) };
                match pods.container(&id) {
                    Ok(container) => container.stop(Duration::from_secs(grace_s)).await,
                    Err(error) => self.absent_container(index, error),
                }
            }
            Action::Remove(index) => {
                let Ok(id) = self.container(index) else { return Ok(()) };
                match pods.container(&id) {
                    Ok(container) => container.remove().await,
                    Err(error) => self.absent_container(index, error),
                }
            }
        }
    }

    /// Accepts `NotFound` for a container that does not run.
    fn absent_container(&self, index: usize, error: Error) -> Result<(), Error> {
        let id = self.told.borrow().containers[index].id;
        let is_it =
            |process: &Process| !process.is_dying && id.is_some_and(|id| process.role == Role::Main(id));
        let mut world = self.node.world.borrow_mut();
        if error.kind() == Kind::NotFound && world.processes.values().any(is_it) {
            world.broken(format!("a container that runs is not found: {error}"));
        }
        absent(error)
    }

    /// The ID of the object of a call; `None` for calls that create the object and for unknown IDs.
    fn id(&self, action: Action) -> Option<[u8; 32]> {
        let told = self.told.borrow();
        match action {
            Action::RunPod(_) | Action::Create(_) => None,
            Action::StopPod(pod) | Action::RemovePod(pod) => told.pods[pod].id.map(|id| *id.as_bytes()),
            Action::Start(container) | Action::Stop(container, _) | Action::Remove(container) => {
                told.containers[container].id.map(|id| *id.as_bytes())
            }
        }
    }

    fn container(&self, index: usize) -> Result<String, Error> {
        let id = self.told.borrow().containers[index].id;
        let id = id.ok_or_else(|| Error::new(Kind::NotFound, "the container has no id"))?;
        Ok(id.to_string())
    }

    /// Records the end of the daemon: calls in progress get no answer.
    pub(crate) fn daemon_ends(&self) {
        let mut told = self.told.borrow_mut();
        let Told { pods, containers, .. } = &mut *told;
        let of_pods = pods.iter_mut().flat_map(|pod| [&mut pod.run, &mut pod.stop, &mut pod.remove]);
        let of_containers = containers.iter_mut().flat_map(|container| {
            [&mut container.create, &mut container.start, &mut container.stop, &mut container.remove]
        });
        for call in of_pods.chain(of_containers).filter(|call| **call == Call::Open) {
            *call = Call::Unanswered;
        }
    }

    /// Records the IDs in the daemon's lists of objects for which no answer contained an ID.
    pub(crate) fn look(&self, pods: &Rc<Pods>) {
        let boot = self.node.world.borrow().boot;
        let mut told = self.told.borrow_mut();
        for pod in pods.pods() {
            let name = pod.record().spec.name.name.clone();
            let is_it = |known: &&mut ToldPod| known.id.is_none() && format!("pod{}", known.name) == name;
            let is_known = told.pods.iter().any(|known| known.id == Some(pod.id));
            if !is_known && let Some(known) = told.pods.iter_mut().find(is_it) {
                (known.id, known.boot) = (Some(pod.id), boot);
            }
        }
        for container in pods.containers() {
            let name = container.name();
            let pod = told.pods.iter().position(|pod| pod.id == Some(container.pod.id));
            let is_it = |known: &&mut ToldContainer| {
                known.id.is_none() && Some(known.pod) == pod && format!("ctr{}", known.name) == name
            };
            let is_known = told.containers.iter().any(|known| known.id == Some(container.id));
            if !is_known && let Some(known) = told.containers.iter_mut().find(is_it) {
                (known.id, known.boot) = (Some(container.id), boot);
            }
        }
    }
}

/// Accepts `NotFound`, as the CRI service does: an absent object counts as stopped or removed.
pub(crate) fn absent(error: Error) -> Result<(), Error> {
    if error.kind() == Kind::NotFound { Ok(()) } else { Err(error) }
}
