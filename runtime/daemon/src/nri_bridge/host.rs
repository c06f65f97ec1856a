//! Services for the NRI dispatcher: tasks and time, the current pods and containers, changes of containers.

use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::time::Duration;

use coracle_base::error::Error;
use coracle_base::log;
use coracle_base::reactor;
use coracle_engine::{Engine, Pods};
use coracle_nri::api;
use coracle_nri::{Host, Level, Snapshot, Task, Verdict};

use super::{limits, view};

/// The dispatcher's reference to the pods, which is set after both were created.
#[derive(Default)]
pub(super) struct Services {
    pods: RefCell<Weak<Pods>>,
}

impl Services {
    pub(super) fn know(&self, pods: Weak<Pods>) {
        *self.pods.borrow_mut() = pods;
    }

    fn pods(&self) -> Option<Rc<Pods>> {
        self.pods.borrow().upgrade()
    }
}

impl Host for Services {
    fn spawn(&self, task: Task) {
        reactor::spawn(task).detach();
    }

    fn sleep(&self, duration: Duration) -> Task {
        Box::pin(reactor::sleep(duration))
    }

    fn snapshot(&self) -> Snapshot {
        let Some(pods) = self.pods() else { return Snapshot::default() };
        let notified_pods = pods.pods().into_iter().filter(|pod| !pod.record().notified.remove);
        let lives = |container: &Rc<coracle_engine::Container>| !container.record().state.is_over();
        let containers = pods.containers();
        let mut converted = Snapshot {
            pods: notified_pods.map(|pod| view::pod(&pod)).collect(),
            containers: containers.iter().filter(|one| lives(one)).map(|one| view::container(one)).collect(),
        };
        // Oldest first, in the order of their events.
        converted.pods.reverse();
        converted.containers.reverse();
        converted
    }

    fn update(&self, update: api::ContainerUpdate) -> Task<Verdict> {
        let verdict = match self.pods() {
            // The computation and the update do not await, so no lock is necessary.
            Some(pods) => apply(&pods, &update),
            None => Verdict::Skipped,
        };
        // An update writes to the disk, and a plugin may send thousands.
        Box::pin(async move {
            reactor::yield_now().await;
            verdict
        })
    }

    fn evict(&self, eviction: api::ContainerEviction) {
        let Some(pods) = self.pods() else { return };
        let Some(container) = pods.container_for_plugin(&eviction.container_id) else { return };
        log::info!("container evicted by an NRI plugin"; ctr = container.id, reason = eviction.reason);
        reactor::spawn(async move {
            if let Err(error) = container.stop(Duration::ZERO).await {
                log::warn!("cannot evict a container"; ctr = container.id, error = error);
            }
        })
        .detach();
    }

    fn log(&self, level: Level, plugin: &str, text: &str) {
        match level {
            Level::Debug => log::debug!("message of an NRI plugin"; plugin = plugin, text = text),
            Level::Info => log::info!("message of an NRI plugin"; plugin = plugin, text = text),
            Level::Warn => log::warn!("message of an NRI plugin"; plugin = plugin, text = text),
            Level::Error => log::error!("message of an NRI plugin"; plugin = plugin, text = text),
        }
    }
}

/// Applies one update. A container that was removed or has exited is not an error of the plugin.
fn apply(pods: &Rc<Pods>, update: &api::ContainerUpdate) -> Verdict {
    let Some(container) = pods.container_for_plugin(&update.container_id) else { return Verdict::Skipped };
    if container.record().state.is_over() {
        return Verdict::Skipped;
    }
    let asked = update.linux.as_ref().and_then(|linux| linux.resources.as_ref());
    let Some(asked) = asked else { return Verdict::Applied };
    let mut wanted = container.record().limits();
    let applied = limits::lay_over(&mut wanted, asked).and_then(|()| container.set_limits(wanted));
    match applied {
        Ok(()) => Verdict::Applied,
        Err(error) => Verdict::Failed(error.to_string()),
    }
}

/// Applies the updates in the answer to another request. If an update fails that must not, the earlier ones are reverted, and
/// its error is returned.
pub(super) fn update_all(engine: &Engine, updates: &[api::ContainerUpdate]) -> Result<(), Error> {
    let Some(pods) = engine.pods() else { return Ok(()) };
    let mut before = Vec::new();
    for update in updates {
        let known = pods.container_for_plugin(&update.container_id);
        before.extend(known.map(|container| (Rc::clone(&container), container.record().limits())));
        match apply(&pods, update) {
            Verdict::Applied | Verdict::Skipped => {}
            Verdict::Failed(why) if update.ignore_failure => {
                log::info!("update by an NRI plugin not applied"; ctr = update.container_id, reason = why);
            }
            Verdict::Failed(why) => {
                before.pop();
                for (container, limits) in before.into_iter().rev() {
                    if let Err(error) = container.set_limits(limits) {
                        log::warn!("cannot revert the update of an NRI plugin"; ctr = container.id, error = error);
                    }
                }
                let text = format!("NRI update of container {:.13} failed: {why}", update.container_id);
                return Err(Error::new(coracle_base::error::Kind::Unknown, text));
            }
        }
    }
    Ok(())
}
