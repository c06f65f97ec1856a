//! The dispatcher: the active plugins, and the delivery of each pod's events to them in order (NRI 3).
//!
//! An event is sent inside a [`Section`], which holds the pod's lock and the gate in shared mode. A plugin that joins
//! holds the gate exclusively, so it receives every object either in Synchronize or in an event (NRI 2.5). A section
//! lasts until the caller has made the announced change visible, or has undone it; during a section nothing waits for a
//! workload, an image or a network.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::{Rc, Weak};

use crate::api::{self, Event};
use crate::bound::FromPlugin;
use crate::connection::Outcome;
use crate::io::{Host, Level, Verdict};
use crate::join::Joins;
use crate::plugin::{Plugin, Told, bit, method};
use crate::report::PluginReport;
use crate::required::Required;
use crate::section::Section;
use crate::semaphore::FifoSemaphore;
use crate::settings::Settings;

/// Maximum number of concurrent sections, greater than the number of pods of any node.
const SECTIONS_MAX: usize = 1 << 20;

/// The reason for the failure of an event; the CRI client receives its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure(pub(crate) String);

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// All plugins, and the events in progress.
pub struct Dispatcher {
    pub(crate) host: Rc<dyn Host>,
    pub(crate) settings: RefCell<Rc<Settings>>,
    /// Active plugins, in the order in which they are called.
    pub(crate) active: RefCell<Vec<Rc<Plugin>>>,
    /// Union of the plugins' subscriptions: bit n-1 is event n.
    wanted: Cell<i32>,
    /// Gate between events (shared) and joins of plugins (exclusive).
    pub(crate) gate: Rc<FifoSemaphore>,
    /// Locks of pods with an event in progress.
    orders: RefCell<BTreeMap<String, Weak<FifoSemaphore>>>,
    pub(crate) joins: Joins,
    kicks: Cell<u64>,
}

/// Handling of a plugin's outcome other than an answer (NRI 3.3).
#[derive(Clone, Copy)]
pub(crate) enum Policy<'a> {
    /// The outcome can fail the RPC.
    Creating(&'a Required),
    /// The outcome never fails the RPC.
    Telling,
}

impl Dispatcher {
    /// Creates a dispatcher without plugins.
    pub fn new(host: Rc<dyn Host>, settings: Settings) -> Rc<Self> {
        Rc::new(Self {
            host,
            settings: RefCell::new(Rc::new(settings)),
            active: RefCell::default(),
            wanted: Cell::new(0),
            gate: FifoSemaphore::new(SECTIONS_MAX),
            orders: RefCell::default(),
            joins: Joins::default(),
            kicks: Cell::new(0),
        })
    }

    /// Replaces the settings; they apply to later events.
    pub fn configure(&self, settings: Settings) {
        *self.settings.borrow_mut() = Rc::new(settings);
    }

    /// Whether any active plugin has subscribed to the event. If not, the caller need not prepare a message.
    pub fn wants(&self, event: Event) -> bool {
        self.wanted.get() & bit(event) != 0
    }

    /// Whether CreateContainer must call the dispatcher: there is a plugin, or plugins are required.
    pub fn wants_creation(&self) -> bool {
        self.wants(Event::CreateContainer)
            || self.wants(Event::ValidateContainerAdjustment)
            || self.settings.borrow().validator.enable
    }

    /// Waits until the pod's next event may be sent. Without plugins, the order of events does not matter, and no
    /// plugin can join while the gate is held.
    pub async fn section(self: &Rc<Self>, pod: &impl std::fmt::Display) -> Section {
        if self.active.borrow().is_empty()
            && let Some(gate) = self.gate.try_shared()
        {
            return Section { dispatcher: Rc::clone(self), _order: None, _gate: gate };
        }
        let order = self.order(&pod.to_string()).shared().await;
        let gate = self.gate.shared().await;
        Section { dispatcher: Rc::clone(self), _order: Some(order), _gate: gate }
    }

    fn order(&self, pod: &str) -> Rc<FifoSemaphore> {
        let known = self.orders.borrow().get(pod).and_then(Weak::upgrade);
        known.unwrap_or_else(|| {
            let order = FifoSemaphore::new(1);
            let mut orders = self.orders.borrow_mut();
            orders.retain(|_, order| order.strong_count() > 0);
            orders.insert(pod.to_owned(), Rc::downgrade(&order));
            order
        })
    }

    /// All active plugins with their counters.
    pub fn report(&self) -> Vec<PluginReport> {
        let report = |plugin: &Rc<Plugin>| PluginReport {
            title: plugin.title(),
            events: plugin.events.get(),
            is_legacy: plugin.is_legacy(),
            strays: plugin.connection.strays(),
            calls: plugin.tally.borrow().report(),
        };
        self.active.borrow().iter().map(report).collect()
    }

    /// Number of plugins that were disconnected because of a timeout.
    pub fn kicks(&self) -> u64 {
        self.kicks.get()
    }

    /// Adds a plugin that has joined, at its position in the order of calls.
    pub(crate) fn activate(&self, plugin: &Rc<Plugin>) {
        let mut active = self.active.borrow_mut();
        let at = active.partition_point(|other| other.index <= plugin.index);
        active.insert(at, Rc::clone(plugin));
        self.count_wanted(&active);
    }

    /// Removes a plugin from the active plugins.
    pub(crate) fn deactivate(&self, plugin: &Rc<Plugin>) {
        let mut active = self.active.borrow_mut();
        active.retain(|other| !Rc::ptr_eq(other, plugin));
        self.count_wanted(&active);
    }

    fn count_wanted(&self, active: &[Rc<Plugin>]) {
        self.wanted.set(active.iter().fold(0, |events, plugin| events | plugin.events.get()));
    }

    pub(crate) fn subscribed(&self, event: Event) -> Vec<Rc<Plugin>> {
        self.active.borrow().iter().filter(|plugin| plugin.wants(event)).cloned().collect()
    }

    pub(crate) fn log(&self, level: Level, plugin: &Plugin, text: &str) {
        self.host.log(level, &plugin.title(), text);
    }

    /// Disconnects a plugin that did not answer the call `what` in time.
    pub(crate) fn kick(&self, plugin: &Plugin, what: &str) {
        self.kicks.set(self.kicks.get() + 1);
        self.log(Level::Error, plugin, &format!("{what}: no answer in time, disconnected"));
        plugin.connection.close(&format!("{what}: no answer in time"));
    }

    /// Sends an event to one plugin. `Ok(None)`: the plugin has not answered, and this is not a failure.
    pub(crate) async fn ask<T: FromPlugin>(
        &self,
        plugin: &Rc<Plugin>,
        told: &Told<'_>,
        policy: Policy<'_>,
    ) -> Result<Option<T>, Failure> {
        let (limit, fails_on_timeout) = {
            let settings = self.settings.borrow();
            (settings.request_timeout, settings.fail_on_timeout)
        };
        let was_legacy = plugin.is_legacy();
        let outcome = plugin.ask::<T>(told, limit).await;
        if plugin.is_legacy() && !was_legacy {
            self.log(
                Level::Warn,
                plugin,
                "it was built before v0.12 and gets StateChange in place of newer calls",
            );
        }
        let name = method(told.event);
        let (text, is_failure) = match (outcome, policy) {
            (Outcome::Ok(answer), _) => return Ok(Some(answer)),
            (Outcome::Refused(status), policy) => (status.message, matches!(policy, Policy::Creating(_))),
            (Outcome::TimedOut, policy) => {
                self.kick(plugin, name);
                let is_failure = match policy {
                    Policy::Creating(required) => fails_on_timeout || required.names(plugin),
                    Policy::Telling => false,
                };
                (format!("no answer within {limit:?}"), is_failure)
            }
            (Outcome::Lost, Policy::Creating(required)) => {
                ("the connection was lost".to_owned(), required.names(plugin))
            }
            (Outcome::Lost, Policy::Telling) => ("the connection was lost".to_owned(), false),
        };
        if is_failure {
            return Err(failed(told.event, plugin, &text));
        }
        self.log(Level::Warn, plugin, &format!("{name}: {text}"));
        Ok(None)
    }

    /// Sends an event that cannot fail to `plugins`; returns the answers of those that answered.
    pub(crate) async fn tell<T: FromPlugin>(&self, plugins: &[Rc<Plugin>], told: &Told<'_>) -> Vec<T> {
        let mut answers = Vec::new();
        for plugin in plugins.iter().filter(|plugin| plugin.wants(told.event)) {
            answers.extend(self.ask(plugin, told, Policy::Telling).await.unwrap_or_default());
        }
        answers
    }

    /// Applies updates of containers and logs failures; `what` is the event in the log messages.
    pub(crate) async fn apply_logged(&self, what: &str, updates: Vec<api::ContainerUpdate>) {
        for update in updates {
            let (id, is_ignored) = (update.container_id.clone(), update.ignore_failure);
            if let Verdict::Failed(why) = self.host.update(update).await
                && !is_ignored
            {
                self.host.log(Level::Warn, "", &format!("{what}: update of container {id:.13}: {why}"));
            }
        }
    }

    /// Performs evictions that a plugin requests. Disabled by default, because most runtimes ignore them (NRI 3.8).
    pub(crate) fn evict(&self, plugin: &Plugin, evictions: Vec<api::ContainerEviction>) {
        // Each container once, and one line of the log.
        let mut known = BTreeSet::new();
        let distinct: Vec<_> =
            evictions.into_iter().filter(|eviction| known.insert(eviction.container_id.clone())).collect();
        let Some(first) = distinct.first() else { return };
        if !self.settings.borrow().allow_eviction {
            let text = match distinct.len() {
                1 => format!("eviction of container {:.13} is ignored", first.container_id),
                count => format!("eviction of {count} containers is ignored"),
            };
            return self.log(Level::Info, plugin, &text);
        }
        for eviction in distinct {
            self.host.evict(eviction);
        }
    }
}

pub(crate) fn failed(event: Event, plugin: &Plugin, text: &str) -> Failure {
    Failure(format!("NRI {} failed: plugin {:?}: {text}", method(event), plugin.title()))
}
