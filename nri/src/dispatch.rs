//! The dispatcher: who is active, and each event of a pod told to them in order (nri.md 3).
//!
//! An event is told inside a [`Section`], which holds the order of its pod and, shared, the gate. A plugin that joins holds
//! the gate alone, so it hears of every object either by Synchronize or by an event, never by neither (2.5). A section
//! lasts until the caller has made visible what the event announces, or has undone it; nothing in it waits for a
//! workload, an image or a network.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};

use prost::Message;

use crate::adjust::Merge;
use crate::api::{self, Event};
use crate::connection::Outcome;
use crate::fair::{Fair, Permit};
use crate::io::{Host, Level, Verdict};
use crate::join::Joins;
use crate::plugin::{Plugin, Told, bit, method};
use crate::report::PluginReport;
use crate::required::Required;
use crate::settings::Settings;
use crate::validate;

/// Sections that may be open at once: more than a node has pods.
const SECTIONS_MAX: usize = 1 << 20;

/// Why an event failed; its text is what the CRI client reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure(String);

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// What plugins made of a container that is to be created.
pub struct Created {
    /// Of all plugins together.
    pub adjustment: api::ContainerAdjustment,
    /// Of other containers, to be applied before this one is made.
    pub updates: Vec<api::ContainerUpdate>,
    offered: Vec<Rc<Plugin>>,
}

/// What plugins made of an update.
pub struct Updated {
    /// The resources of the container itself; `None`: as they were asked for.
    pub resources: Option<api::LinuxResources>,
    /// Of other containers.
    pub updates: Vec<api::ContainerUpdate>,
}

/// All plugins, and what is under way.
pub struct Dispatcher {
    pub(crate) host: Rc<dyn Host>,
    pub(crate) settings: RefCell<Rc<Settings>>,
    /// In the order in which they are called.
    pub(crate) active: RefCell<Vec<Rc<Plugin>>>,
    /// Union of what they want to hear.
    wanted: Cell<i32>,
    /// Shared by events, exclusive for joins.
    pub(crate) gate: Rc<Fair>,
    /// Of pods with an event under way.
    orders: RefCell<BTreeMap<String, Weak<Fair>>>,
    pub(crate) joins: Joins,
    kicks: Cell<u64>,
}

/// The right to tell one pod's next event.
pub struct Section {
    dispatcher: Rc<Dispatcher>,
    _order: Option<Permit>,
    _gate: Permit,
}

/// How an outcome that is not an answer is taken (nri.md 3.3).
#[derive(Clone, Copy)]
enum Policy<'a> {
    /// It can fail the CRI call.
    Creating(&'a Required),
    /// It cannot.
    Telling,
}

impl Dispatcher {
    /// Without a plugin.
    pub fn new(host: Rc<dyn Host>, settings: Settings) -> Rc<Self> {
        Rc::new(Self {
            host,
            settings: RefCell::new(Rc::new(settings)),
            active: RefCell::default(),
            wanted: Cell::new(0),
            gate: Fair::new(SECTIONS_MAX),
            orders: RefCell::default(),
            joins: Joins::default(),
            kicks: Cell::new(0),
        })
    }

    /// New settings, from the next event on.
    pub fn configure(&self, settings: Settings) {
        *self.settings.borrow_mut() = Rc::new(settings);
    }

    /// Whether any active plugin has subscribed to the event; where none has, nothing need be made for it.
    pub fn wants(&self, event: Event) -> bool {
        self.wanted.get() & bit(event) != 0
    }

    /// Whether there is any plugin, or a pod cannot be created without one: CreateContainer asks then.
    pub fn wants_creation(&self) -> bool {
        self.wants(Event::CreateContainer)
            || self.wants(Event::ValidateContainerAdjustment)
            || self.settings.borrow().validator.enable
    }

    /// Waits for the turn of a pod's next event. Where there is no plugin nobody can hear an order, and while the gate is
    /// held none can come.
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

    fn order(&self, pod: &str) -> Rc<Fair> {
        let known = self.orders.borrow().get(pod).and_then(Weak::upgrade);
        known.unwrap_or_else(|| {
            let order = Fair::new(1);
            let mut orders = self.orders.borrow_mut();
            orders.retain(|_, order| order.strong_count() > 0);
            orders.insert(pod.to_owned(), Rc::downgrade(&order));
            order
        })
    }

    /// Every active plugin, and what is counted of it.
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

    /// How many plugins were disconnected for a timeout.
    pub fn kicks(&self) -> u64 {
        self.kicks.get()
    }

    /// Adds a plugin that has joined, in its place.
    pub(crate) fn activate(&self, plugin: &Rc<Plugin>) {
        let mut active = self.active.borrow_mut();
        let at = active.partition_point(|other| other.index <= plugin.index);
        active.insert(at, Rc::clone(plugin));
        self.count_wanted(&active);
    }

    /// Takes a plugin out.
    pub(crate) fn deactivate(&self, plugin: &Rc<Plugin>) {
        let mut active = self.active.borrow_mut();
        active.retain(|other| !Rc::ptr_eq(other, plugin));
        self.count_wanted(&active);
    }

    fn count_wanted(&self, active: &[Rc<Plugin>]) {
        self.wanted.set(active.iter().fold(0, |events, plugin| events | plugin.events.get()));
    }

    fn subscribed(&self, event: Event) -> Vec<Rc<Plugin>> {
        self.active.borrow().iter().filter(|plugin| plugin.wants(event)).cloned().collect()
    }

    pub(crate) fn log(&self, level: Level, plugin: &Plugin, text: &str) {
        self.host.log(level, &plugin.title(), text);
    }

    /// Disconnects a plugin that did not answer in time.
    pub(crate) fn kick(&self, plugin: &Plugin, what: &str) {
        self.kicks.set(self.kicks.get() + 1);
        self.log(Level::Error, plugin, &format!("{what}: no answer in time, disconnected"));
        plugin.connection.close(&format!("{what}: no answer in time"));
    }

    /// One event at one plugin. `Ok(None)`: no answer, and that is no failure.
    async fn ask<T: Message + Default>(
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

    /// An event that no plugin can stop: each hears of it, whatever the others do.
    async fn tell<T: Message + Default>(&self, plugins: &[Rc<Plugin>], told: &Told<'_>) -> Vec<T> {
        let mut answers = Vec::new();
        for plugin in plugins.iter().filter(|plugin| plugin.wants(told.event)) {
            answers.extend(self.ask(plugin, told, Policy::Telling).await.unwrap_or_default());
        }
        answers
    }

    /// Applies updates whose failure nobody waits for.
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

    /// Evictions that a plugin asks for; most runtimes drop them, so they are opt-in (nri.md 3.8).
    pub(crate) fn evict(&self, plugin: &Plugin, evictions: Vec<api::ContainerEviction>) {
        for eviction in evictions {
            if self.settings.borrow().allow_eviction {
                self.host.evict(eviction);
            } else {
                let text = format!("eviction of container {:.13} is ignored", eviction.container_id);
                self.log(Level::Info, plugin, &text);
            }
        }
    }
}

fn failed(event: Event, plugin: &Plugin, text: &str) -> Failure {
    Failure(format!("NRI {} failed: plugin {:?}: {text}", method(event), plugin.title()))
}

/// The message of an event about a pod, or about a container of it.
macro_rules! told {
    ($event:ident, $request:ident, $pod:expr) => {
        Told {
            event: Event::$event,
            payload: api::$request { pod: Some($pod.clone()) }.encode_to_vec(),
            pod: $pod,
            container: None,
        }
    };
    ($event:ident, $request:ident, $pod:expr, $container:expr) => {
        Told {
            event: Event::$event,
            payload: api::$request { pod: Some($pod.clone()), container: Some($container.clone()) }
                .encode_to_vec(),
            pod: $pod,
            container: Some($container),
        }
    };
}

impl Section {
    /// The last step of RunPodSandbox. A refusal is undone at those that were asked (nri.md 3.5).
    ///
    /// # Errors
    /// The refusal.
    pub async fn run_pod_sandbox(&self, pod: &api::PodSandbox) -> Result<(), Failure> {
        let told = told!(RunPodSandbox, RunPodSandboxRequest, pod);
        let required = self.required(pod);
        // Everyone at first: one that wants only the end hears of it, too, if it stands before the one that refuses.
        let plugins = self.dispatcher.active.borrow().clone();
        for (at, plugin) in plugins.iter().enumerate() {
            if !plugin.wants(Event::RunPodSandbox) {
                continue;
            }
            let asked =
                self.dispatcher.ask::<api::RunPodSandboxResponse>(plugin, &told, Policy::Creating(&required));
            if let Err(failure) = asked.await {
                self.undo_pod(&plugins[..=at], pod).await;
                return Err(failure);
            }
        }
        Ok(())
    }

    /// RunPodSandbox failed after every plugin had accepted it.
    pub async fn undo_run_pod_sandbox(&self, pod: &api::PodSandbox) {
        let plugins = self.dispatcher.active.borrow().clone();
        self.undo_pod(&plugins, pod).await;
    }

    async fn undo_pod(&self, plugins: &[Rc<Plugin>], pod: &api::PodSandbox) {
        let told = told!(StopPodSandbox, StopPodSandboxRequest, pod);
        self.dispatcher.tell::<api::StopPodSandboxResponse>(plugins, &told).await;
        let told = told!(RemovePodSandbox, RemovePodSandboxRequest, pod);
        self.dispatcher.tell::<api::RemovePodSandboxResponse>(plugins, &told).await;
    }

    /// Before anything of the pod's resources is changed.
    ///
    /// # Errors
    /// The refusal.
    pub async fn update_pod_sandbox(
        &self,
        pod: &api::PodSandbox,
        overhead: Option<api::LinuxResources>,
        resources: Option<api::LinuxResources>,
    ) -> Result<(), Failure> {
        let request = api::UpdatePodSandboxRequest {
            pod: Some(pod.clone()),
            overhead_linux_resources: overhead,
            linux_resources: resources,
        };
        let payload = request.encode_to_vec();
        let told = Told { event: Event::UpdatePodSandbox, payload, pod, container: None };
        let required = self.required(pod);
        for plugin in self.dispatcher.subscribed(Event::UpdatePodSandbox) {
            let policy = Policy::Creating(&required);
            self.dispatcher.ask::<api::UpdatePodSandboxResponse>(&plugin, &told, policy).await?;
        }
        Ok(())
    }

    /// After the change is stored.
    pub async fn post_update_pod_sandbox(&self, pod: &api::PodSandbox) {
        let told = told!(PostUpdatePodSandbox, PostUpdatePodSandboxRequest, pod);
        self.tell::<api::PostUpdatePodSandboxResponse>(&told).await;
    }

    /// The workload has ended; the sandbox is whole.
    pub async fn stop_pod_sandbox(&self, pod: &api::PodSandbox) {
        self.warn_of_missing(pod, "StopPodSandbox");
        let told = told!(StopPodSandbox, StopPodSandboxRequest, pod);
        self.tell::<api::StopPodSandboxResponse>(&told).await;
    }

    /// Just before the sandbox leaves the lists.
    pub async fn remove_pod_sandbox(&self, pod: &api::PodSandbox) {
        self.warn_of_missing(pod, "RemovePodSandbox");
        let told = told!(RemovePodSandbox, RemovePodSandboxRequest, pod);
        self.tell::<api::RemovePodSandboxResponse>(&told).await;
    }

    /// Asks what is to be changed in a container, and validates it. A failure is undone at those that were asked.
    ///
    /// # Errors
    /// A refusal, a conflict, a bad value, a rejection.
    pub async fn create_container(
        &self,
        pod: &api::PodSandbox,
        container: &api::Container,
    ) -> Result<Created, Failure> {
        let mut merge = Merge::new(container.clone());
        let mut offered = Vec::new();
        match self.adjust(pod, container, &mut merge, &mut offered).await {
            Ok(()) => {
                let (adjustment, updates) = merge.finish();
                Ok(Created { adjustment, updates, offered })
            }
            Err(failure) => {
                self.undo(&offered, pod, container).await;
                Err(failure)
            }
        }
    }

    async fn adjust(
        &self,
        pod: &api::PodSandbox,
        container: &api::Container,
        merge: &mut Merge,
        offered: &mut Vec<Rc<Plugin>>,
    ) -> Result<(), Failure> {
        let required = self.required(pod);
        let mut told = told!(CreateContainer, CreateContainerRequest, pod, container);
        // As it is before the first call: those that leave meanwhile were there.
        let everyone = self.dispatcher.active.borrow().clone();
        for plugin in &everyone {
            if !plugin.wants(Event::CreateContainer) {
                continue;
            }
            offered.push(Rc::clone(plugin));
            let policy = Policy::Creating(&required);
            let answer = self.dispatcher.ask::<api::CreateContainerResponse>(plugin, &told, policy).await?;
            let Some(answer) = answer else { continue };
            self.dispatcher.evict(plugin, answer.evict);
            let has_changed = answer.adjust.is_some();
            merge
                .adjust(&plugin.title(), answer.adjust.unwrap_or_default())
                .and_then(|()| merge.update(&plugin.title(), answer.update))
                .map_err(|text| failed(Event::CreateContainer, plugin, &text))?;
            if has_changed {
                let (pod, container) = (Some(pod.clone()), Some(merge.view().clone()));
                told.payload = api::CreateContainerRequest { pod, container }.encode_to_vec();
            }
        }
        self.validate(pod, container, merge, &everyone).await
    }

    async fn validate(
        &self,
        pod: &api::PodSandbox,
        container: &api::Container,
        merge: &Merge,
        everyone: &[Rc<Plugin>],
    ) -> Result<(), Failure> {
        let settings = Rc::clone(&self.dispatcher.settings.borrow());
        let mut rejections = Vec::new();
        if settings.validator.enable {
            rejections.extend(validate::by_default(&settings.validator, pod, container, merge, everyone));
        }
        let validators: Vec<_> =
            everyone.iter().filter(|plugin| plugin.wants(Event::ValidateContainerAdjustment)).collect();
        if !validators.is_empty() {
            let request = merge.validation(pod, container, everyone);
            let event = Event::ValidateContainerAdjustment;
            let told = Told { event, payload: request.encode_to_vec(), pod, container: Some(container) };
            rejections.extend(self.ask_validators(&validators, &told).await);
        }
        match rejections.is_empty() {
            true => Ok(()),
            false => Err(Failure(rejections.join("; "))),
        }
    }

    /// All at once; whatever is not a clear yes rejects (nri.md 4.6).
    async fn ask_validators(&self, validators: &[&Rc<Plugin>], told: &Told<'_>) -> Vec<String> {
        let limit = self.dispatcher.settings.borrow().request_timeout;
        let ask = |plugin: &Rc<Plugin>| {
            let plugin = Rc::clone(plugin);
            async move {
                let reason = match plugin.ask::<api::ValidateContainerAdjustmentResponse>(told, limit).await {
                    Outcome::Ok(answer) if !answer.reject => return None,
                    Outcome::Ok(answer) if answer.reason.is_empty() => "unknown rejection reason".to_owned(),
                    Outcome::Ok(answer) => answer.reason,
                    Outcome::Refused(status) => status.message,
                    Outcome::TimedOut => {
                        self.dispatcher.kick(&plugin, method(told.event));
                        format!("no answer within {limit:?}")
                    }
                    Outcome::Lost => "the connection was lost".to_owned(),
                };
                Some(validate::rejected(&plugin.title(), &reason))
            }
        };
        let answers = validate::all(validators.iter().map(|plugin| ask(plugin)).collect()).await;
        answers.into_iter().flatten().collect()
    }

    /// Creation failed after it was offered.
    pub async fn undo_create_container(
        &self,
        created: Created,
        pod: &api::PodSandbox,
        container: &api::Container,
    ) {
        self.undo(&created.offered, pod, container).await;
    }

    async fn undo(&self, offered: &[Rc<Plugin>], pod: &api::PodSandbox, container: &api::Container) {
        let mut stopped = container.clone();
        stopped.set_state(api::ContainerState::ContainerStopped);
        stopped.pid = 0;
        let told = told!(StopContainer, StopContainerRequest, pod, &stopped);
        let answers = self.dispatcher.tell::<api::StopContainerResponse>(offered, &told).await;
        for answer in answers {
            self.dispatcher.apply_logged("StopContainer", answer.update).await;
        }
        let told = told!(RemoveContainer, RemoveContainerRequest, pod, &stopped);
        self.dispatcher.tell::<api::RemoveContainerResponse>(offered, &told).await;
    }

    /// The container is in the lists.
    pub async fn post_create_container(&self, pod: &api::PodSandbox, container: &api::Container) {
        let told = told!(PostCreateContainer, PostCreateContainerRequest, pod, container);
        self.tell::<api::PostCreateContainerResponse>(&told).await;
    }

    /// Its process is there, its program has not begun.
    ///
    /// # Errors
    /// The refusal.
    pub async fn start_container(
        &self,
        pod: &api::PodSandbox,
        container: &api::Container,
    ) -> Result<(), Failure> {
        let told = told!(StartContainer, StartContainerRequest, pod, container);
        let required = self.required(pod);
        for plugin in self.dispatcher.subscribed(Event::StartContainer) {
            let policy = Policy::Creating(&required);
            self.dispatcher.ask::<api::StartContainerResponse>(&plugin, &told, policy).await?;
        }
        Ok(())
    }

    /// Its program runs.
    pub async fn post_start_container(&self, pod: &api::PodSandbox, container: &api::Container) {
        let told = told!(PostStartContainer, PostStartContainerRequest, pod, container);
        self.tell::<api::PostStartContainerResponse>(&told).await;
    }

    /// Before a container's resources change.
    ///
    /// # Errors
    /// A refusal, a conflict, a bad value.
    pub async fn update_container(
        &self,
        pod: &api::PodSandbox,
        container: &api::Container,
        asked: api::LinuxResources,
    ) -> Result<Updated, Failure> {
        let required = self.required(pod);
        let mut merge = Merge::of_update(container.id.clone(), asked);
        for plugin in self.dispatcher.subscribed(Event::UpdateContainer) {
            let request = api::UpdateContainerRequest {
                pod: Some(pod.clone()),
                container: Some(container.clone()),
                linux_resources: Some(merge.resources().clone()),
            };
            let payload = request.encode_to_vec();
            let told = Told { event: Event::UpdateContainer, payload, pod, container: Some(container) };
            let policy = Policy::Creating(&required);
            let answer = self.dispatcher.ask::<api::UpdateContainerResponse>(&plugin, &told, policy).await?;
            let Some(answer) = answer else { continue };
            self.dispatcher.evict(&plugin, answer.evict);
            merge
                .update(&plugin.title(), answer.update)
                .map_err(|text| failed(Event::UpdateContainer, &plugin, &text))?;
        }
        let (resources, updates) = merge.finish_update();
        Ok(Updated { resources, updates })
    }

    /// The new resources hold.
    pub async fn post_update_container(&self, pod: &api::PodSandbox, container: &api::Container) {
        let told = told!(PostUpdateContainer, PostUpdateContainerRequest, pod, container);
        self.tell::<api::PostUpdateContainerResponse>(&told).await;
    }

    /// It has ended, and its exit is stored. What plugins change in other containers then is done, and only logged where
    /// it cannot be.
    pub async fn stop_container(&self, pod: &api::PodSandbox, container: &api::Container) {
        let told = told!(StopContainer, StopContainerRequest, pod, container);
        for answer in self.tell::<api::StopContainerResponse>(&told).await {
            self.dispatcher.apply_logged("StopContainer", answer.update).await;
        }
    }

    /// Just before its storage goes.
    pub async fn remove_container(&self, pod: &api::PodSandbox, container: &api::Container) {
        let told = told!(RemoveContainer, RemoveContainerRequest, pod, container);
        self.tell::<api::RemoveContainerResponse>(&told).await;
    }

    /// Teardown waits for nobody: a plugin that is required and absent has to compare when it comes back (nri.md 6.4, 7).
    fn warn_of_missing(&self, pod: &api::PodSandbox, event: &str) {
        let required = self.required(pod);
        let active = self.dispatcher.active.borrow();
        let missing = required.missing(|name| active.iter().any(|plugin| plugin.is_called(name)));
        if !missing.is_empty() {
            let text = format!(
                "{event} of {}/{}: required plugins do not hear it: {}",
                pod.namespace,
                pod.name,
                missing.join(", ")
            );
            self.dispatcher.host.log(Level::Warn, "", &text);
        }
    }

    async fn tell<T: Message + Default>(&self, told: &Told<'_>) -> Vec<T> {
        let plugins = self.dispatcher.subscribed(told.event);
        self.dispatcher.tell(&plugins, told).await
    }

    fn required(&self, pod: &api::PodSandbox) -> Required {
        Required::of(&self.dispatcher.settings.borrow().validator, pod)
    }
}
