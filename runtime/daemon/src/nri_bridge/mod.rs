//! The NRI bridge: connects the engine to the NRI dispatcher. NRI types are used only here and in `nri/`; the
//! engine calls one function per transition.
//!
//! ```text
//! engine ── Guard ──► view (pod → message) ──► nri::Section ──► plugins
//!                    apply (adjustment → plan, record) ◄──
//! socket, launch: connections of plugins           host: services for the dispatcher
//! ```
//! [`NriBridge`] implements the engine's [`LifecycleHooks`]; a [`Guard`] is the permission to send the next
//! event of one pod and lasts until the announced change is complete or undone. Without plugins, no messages
//! are built and nothing waits. Rules: docs/nri.md.

mod apply;
mod host;
mod launch;
mod limits;
mod socket;
mod view;

use std::cell::RefCell;
use std::rc::Rc;

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_engine::lifecycle::{Event as Hook, EventGuard, LifecycleHooks, Pending};
use coracle_engine::{Container, Pod, Pods, Resolved};
use coracle_nri::api::{self, Event};
use coracle_nri::{Created, Dispatcher, Failure, Section};
use coracle_sandbox::cgroup::{Limits, Resources};

use coracle_config as config;

/// The NRI bridge: gives the engine the hooks that ask the plugins, and connects the plugins to the dispatcher.
pub(crate) struct NriBridge {
    dispatcher: Rc<Dispatcher>,
    host: Rc<host::Services>,
    launcher: Rc<launch::Launcher>,
    socket: RefCell<Option<socket::Socket>>,
    settings: Rc<RefCell<config::Nri>>,
}

/// Permission to send the next event of one pod.
struct Guard {
    section: Section,
    dispatcher: Rc<Dispatcher>,
    settings: Rc<RefCell<config::Nri>>,
    /// The container whose creation is being announced; `None` if there is none.
    offer: RefCell<Option<Offer>>,
}

/// A container whose creation the plugins have accepted and which may still fail.
struct Offer {
    created: Created,
    container: api::Container,
}

impl NriBridge {
    /// Creates the bridge without plugins; [`NriBridge::start`] accepts them.
    pub(crate) fn new(settings: &config::Nri) -> Rc<Self> {
        let host = Rc::new(host::Services::default());
        let dispatcher =
            Dispatcher::new(Rc::clone(&host) as Rc<dyn coracle_nri::Host>, for_dispatcher(settings));
        Rc::new(Self {
            dispatcher,
            host,
            launcher: Rc::default(),
            socket: RefCell::default(),
            settings: Rc::new(RefCell::new(settings.clone())),
        })
    }

    /// Starts the plugins of the plugin directory, returns when each has connected or failed, and then accepts external
    /// plugins. Called after recovery, because a connecting plugin receives all pods and containers.
    ///
    /// # Errors
    /// The socket cannot be created although plugins are required.
    pub(crate) async fn start(self: &Rc<Self>, pods: &Rc<Pods>) -> Result<(), Error> {
        self.host.know(Rc::downgrade(pods));
        let settings = self.settings.borrow().clone();
        self.launcher.start(&self.dispatcher, &settings).await;
        if settings.disable_connections {
            return Ok(());
        }
        match socket::Socket::listen(&settings.socket_path, Rc::clone(&self.dispatcher)) {
            Ok(socket) => *self.socket.borrow_mut() = Some(socket),
            Err(error) if settings.dispatcher.validator.required_plugins.is_empty() => {
                log::error!("cannot create the NRI plugin socket, plugins cannot connect until a restart"; error = error);
            }
            Err(error) => return Err(error.context("plugins are required")),
        }
        Ok(())
    }

    /// Applies new settings to later events; the socket and the directories are not changed.
    pub(crate) fn configure(&self, settings: &config::Nri) {
        self.dispatcher.configure(for_dispatcher(settings));
        self.launcher.configure(settings);
        *self.settings.borrow_mut() = settings.clone();
    }

    /// Disconnects all plugins.
    pub(crate) async fn stop(&self) {
        self.socket.borrow_mut().take();
        let send_shutdown = self.settings.borrow().send_shutdown;
        self.launcher.stop();
        self.dispatcher.shutdown(send_shutdown).await;
        self.launcher.ended().await;
    }

    /// Reports all active plugins with their counters.
    pub(crate) fn report(&self) -> serde_json::Value {
        let plugin = |plugin: &coracle_nri::PluginReport| {
            let calls = plugin.calls.iter().map(|call| {
                serde_json::json!({
                    "event": call.event, "ok": call.ok, "error": call.error, "timeout": call.timeout,
                    "lost": call.lost, "totalMicroseconds": u64::try_from(call.total.as_micros()).unwrap_or(u64::MAX),
                    "histogram": call.histogram,
                })
            });
            serde_json::json!({
                "plugin": plugin.title, "events": format!("{:#06x}", plugin.events), "legacy": plugin.is_legacy,
                "strays": plugin.strays, "calls": calls.collect::<Vec<_>>(),
            })
        };
        let plugins = self.dispatcher.report();
        serde_json::json!({
            "plugins": plugins.iter().map(plugin).collect::<Vec<_>>(),
            "kicks": self.dispatcher.kicks(),
        })
    }

    /// Counters of all plugins, for metrics.
    pub(crate) fn counts(&self) -> Vec<coracle_nri::PluginReport> {
        self.dispatcher.report()
    }

    /// Number of plugins that were disconnected because of a timeout.
    pub(crate) fn kicks(&self) -> u64 {
        self.dispatcher.kicks()
    }
}

impl LifecycleHooks for NriBridge {
    fn wants(&self, event: Hook) -> bool {
        match event {
            Hook::CreateContainer => self.dispatcher.wants_creation(),
            Hook::StartContainer => {
                self.dispatcher.wants(Event::StartContainer)
                    || self.dispatcher.wants(Event::PostStartContainer)
            }
            Hook::StopContainer => self.dispatcher.wants(Event::StopContainer),
            Hook::RemoveContainer => self.dispatcher.wants(Event::RemoveContainer),
            Hook::StopPod => self.dispatcher.wants(Event::StopPodSandbox),
            Hook::RemovePod => self.dispatcher.wants(Event::RemovePodSandbox),
        }
    }

    fn begin<'a>(&'a self, pod: &'a Pod) -> Pending<'a, Box<dyn EventGuard>> {
        Box::pin(async move {
            let guard = Guard {
                section: self.dispatcher.section(&pod.id).await,
                dispatcher: Rc::clone(&self.dispatcher),
                settings: Rc::clone(&self.settings),
                offer: RefCell::default(),
            };
            Box::new(guard) as Box<dyn EventGuard>
        })
    }
}

/// The error for a plugin that refused, failed or did not answer. Clients cannot act on it.
fn failed(failure: Failure) -> Error {
    Error::new(Kind::Unknown, failure.to_string())
}

impl Guard {
    fn wants(&self, event: Event) -> bool {
        self.dispatcher.wants(event)
    }

    /// Whether the pod requires plugins, so that a warning is logged if they are not notified of its end.
    fn requires(&self, pod: &Pod) -> bool {
        let by_configuration = !self.settings.borrow().dispatcher.validator.required_plugins.is_empty();
        let is_of_pod = |(key, _): &(String, String)| key.starts_with(coracle_nri::REQUIRED_ANNOTATION);
        by_configuration || pod.record().spec.annotations.iter().any(is_of_pod)
    }
}

impl EventGuard for Guard {
    // After a refusal the dispatcher has undone the event for the other plugins.
    fn run_pod<'a>(&'a self, pod: &'a Pod) -> Pending<'a, Result<(), Error>> {
        Box::pin(async move {
            if self.wants(Event::RunPodSandbox) {
                self.section.run_pod_sandbox(&view::pod(pod)).await.map_err(failed)?;
            }
            Ok(())
        })
    }

    fn undo_run_pod<'a>(&'a self, pod: &'a Pod) -> Pending<'a, ()> {
        Box::pin(async move {
            self.section.undo_run_pod_sandbox(&view::pod(pod)).await;
        })
    }

    fn update_pod<'a>(
        &'a self,
        pod: &'a Pod,
        overhead: Option<&'a Resources>,
        resources: Option<&'a Resources>,
    ) -> Pending<'a, Result<(), Error>> {
        Box::pin(async move {
            if self.wants(Event::UpdatePodSandbox) {
                let converted = |resources: Option<&Resources>| resources.map(limits::of_resources);
                self.section
                    .update_pod_sandbox(&view::pod(pod), converted(overhead), converted(resources))
                    .await
                    .map_err(failed)?;
            }
            Ok(())
        })
    }

    fn updated_pod<'a>(&'a self, pod: &'a Pod) -> Pending<'a, ()> {
        Box::pin(async move {
            if self.wants(Event::PostUpdatePodSandbox) {
                self.section.post_update_pod_sandbox(&view::pod(pod)).await;
            }
        })
    }

    fn stop_pod<'a>(&'a self, pod: &'a Pod) -> Pending<'a, ()> {
        Box::pin(async move {
            if self.wants(Event::StopPodSandbox) || self.requires(pod) {
                self.section.stop_pod_sandbox(&view::pod(pod)).await;
            }
        })
    }

    fn remove_pod<'a>(&'a self, pod: &'a Pod) -> Pending<'a, ()> {
        Box::pin(async move {
            if self.wants(Event::RemovePodSandbox) || self.requires(pod) {
                self.section.remove_pod_sandbox(&view::pod(pod)).await;
            }
        })
    }

    fn create<'a>(&'a self, pod: &'a Pod, resolved: &'a mut Resolved) -> Pending<'a, Result<(), Error>> {
        Box::pin(async move {
            let (pod_message, container) = (view::pod(pod), view::resolved(pod, resolved));
            let created = self.section.create_container(&pod_message, &container).await.map_err(failed)?;
            let applied = match apply::adjustment(pod, &created.adjustment, resolved).await {
                // Updates of other containers are applied before this returns.
                Ok(()) => host::update_all(pod.engine(), &created.updates),
                Err(error) => Err(error.context("NRI CreateContainer failed")),
            };
            self.offer.replace(Some(Offer { created, container }));
            if applied.is_err() {
                self.undo_create(pod).await;
            }
            applied
        })
    }

    fn undo_create<'a>(&'a self, pod: &'a Pod) -> Pending<'a, ()> {
        Box::pin(async move {
            if let Some(Offer { created, container }) = self.offer.take() {
                self.section.undo_create_container(created, &view::pod(pod), &container).await;
            }
        })
    }

    fn created<'a>(&'a self, container: &'a Container) -> Pending<'a, ()> {
        Box::pin(async move {
            if self.wants(Event::PostCreateContainer) {
                self.section
                    .post_create_container(&view::pod(&container.pod), &view::container(container))
                    .await;
            }
        })
    }

    fn start<'a>(&'a self, container: &'a Container) -> Pending<'a, Result<(), Error>> {
        Box::pin(async move {
            if self.wants(Event::StartContainer) {
                self.section
                    .start_container(&view::pod(&container.pod), &view::container(container))
                    .await
                    .map_err(failed)?;
            }
            Ok(())
        })
    }

    fn started<'a>(&'a self, container: &'a Container) -> Pending<'a, ()> {
        Box::pin(async move {
            if self.wants(Event::PostStartContainer) {
                self.section
                    .post_start_container(&view::pod(&container.pod), &view::container(container))
                    .await;
            }
        })
    }

    fn update<'a>(
        &'a self,
        container: &'a Container,
        asked: &'a Resources,
        mut wanted: Limits,
    ) -> Pending<'a, Result<Limits, Error>> {
        Box::pin(async move {
            if self.wants(Event::UpdateContainer) {
                let (pod, message) = (view::pod(&container.pod), view::container(container));
                let updated = self
                    .section
                    .update_container(&pod, &message, limits::of_resources(asked))
                    .await
                    .map_err(failed)?;
                if let Some(resources) = updated.resources {
                    limits::lay_over(&mut wanted, &resources)?;
                }
                // Updates of other containers are applied before this returns.
                host::update_all(container.engine(), &updated.updates)?;
            }
            Ok(wanted)
        })
    }

    fn updated<'a>(&'a self, container: &'a Container) -> Pending<'a, ()> {
        Box::pin(async move {
            if self.wants(Event::PostUpdateContainer) {
                self.section
                    .post_update_container(&view::pod(&container.pod), &view::container(container))
                    .await;
            }
        })
    }

    fn stop<'a>(&'a self, container: &'a Container) -> Pending<'a, ()> {
        Box::pin(async move {
            if self.wants(Event::StopContainer) {
                self.section.stop_container(&view::pod(&container.pod), &view::stopped(container)).await;
            }
        })
    }

    fn remove<'a>(&'a self, container: &'a Container) -> Pending<'a, ()> {
        Box::pin(async move {
            if self.wants(Event::RemoveContainer) {
                self.section.remove_container(&view::pod(&container.pod), &view::stopped(container)).await;
            }
        })
    }
}

/// The settings of the dispatcher, with the version of this program.
fn for_dispatcher(nri: &config::Nri) -> coracle_nri::Settings {
    let runtime_version = format!("v{}", env!("CARGO_PKG_VERSION"));
    coracle_nri::Settings { runtime_version, ..nri.dispatcher.clone() }
}
