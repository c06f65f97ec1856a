//! NRI plugins: the bridge between pods and the dispatcher. NRI's types live in this room and in `nri/`; pods call one
//! function per transition.
//!
//! ```text
//!   pod/ ── Turn ──► view (pod → message) ──► nri::Section ──► plugins
//!                    apply (adjustment → plan, record) ◄──
//!   socket, launch: where plugins come from          host: what the dispatcher asks of us
//! ```
//! A [`Turn`] is the right to tell the next event of one pod; it lasts until what the event announces is true, or undone.
//! Where no plugin listens, nothing is built and nothing is waited for. Rules: docs/nri.md.

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
use coracle_nri::api::{self, Event};
use coracle_nri::{Created, Dispatcher, Failure, Section};

use crate::config;
use crate::pod::record::Limits;
use crate::pod::spec::Resources;
use crate::pod::{Container, Pod, Pods, Resolved};

/// All plugins of this node.
pub(crate) struct Plugins {
    dispatcher: Rc<Dispatcher>,
    host: Rc<host::Bridge>,
    launcher: Rc<launch::Launcher>,
    socket: RefCell<Option<socket::Socket>>,
    settings: RefCell<config::Nri>,
}

/// The right to tell one pod's next event.
pub(crate) struct Turn {
    section: Section,
    pods: Rc<Pods>,
}

/// A container that plugins were asked about, for as long as its creation can still fail.
pub(crate) struct Offer {
    created: Created,
    container: api::Container,
}

impl Plugins {
    /// Without a plugin; [`Plugins::start`] lets them in.
    pub(crate) fn new(settings: &config::Nri) -> Rc<Self> {
        let host = Rc::new(host::Bridge::default());
        let dispatcher =
            Dispatcher::new(Rc::clone(&host) as Rc<dyn coracle_nri::Host>, for_dispatcher(settings));
        Rc::new(Self {
            dispatcher,
            host,
            launcher: Rc::default(),
            socket: RefCell::default(),
            settings: RefCell::new(settings.clone()),
        })
    }

    /// Starts the plugins of the plugin directory, and comes back when each has joined or failed to; then lets others
    /// connect. After recovery, as a plugin that joins is told of everything there is.
    ///
    /// # Errors
    /// Required plugins could not connect, as the socket cannot be made.
    pub(crate) async fn start(self: &Rc<Self>, pods: &Rc<Pods>) -> Result<(), Error> {
        self.host.know(Rc::downgrade(pods));
        let settings = self.settings.borrow().clone();
        self.launcher.start(&self.dispatcher, &settings).await;
        if settings.disable_connections {
            return Ok(());
        }
        match socket::Socket::listen(&settings.socket_path, Rc::clone(&self.dispatcher)) {
            Ok(socket) => *self.socket.borrow_mut() = Some(socket),
            Err(error) if settings.default_validator.required_plugins.is_empty() => {
                log::error!("no plugins can connect"; error = error);
            }
            Err(error) => return Err(error.context("plugins are required")),
        }
        Ok(())
    }

    /// New settings, from the next event on; the socket and the directories stay.
    pub(crate) fn configure(&self, settings: &config::Nri) {
        self.dispatcher.configure(for_dispatcher(settings));
        self.launcher.configure(settings);
        *self.settings.borrow_mut() = settings.clone();
    }

    /// Lets every plugin go.
    pub(crate) async fn stop(&self) {
        self.socket.borrow_mut().take();
        let send_shutdown = self.settings.borrow().send_shutdown;
        self.launcher.stop();
        self.dispatcher.shutdown(send_shutdown).await;
        self.launcher.ended().await;
    }

    /// Every active plugin and what is counted of it.
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

    /// The same, for metrics.
    pub(crate) fn counts(&self) -> Vec<coracle_nri::PluginReport> {
        self.dispatcher.report()
    }

    /// How many were disconnected for a timeout.
    pub(crate) fn kicks(&self) -> u64 {
        self.dispatcher.kicks()
    }

    /// Waits for the turn of a pod's next event.
    pub(crate) async fn turn(&self, pods: &Rc<Pods>, pod: &Pod) -> Turn {
        Turn { section: self.dispatcher.section(&pod.id).await, pods: Rc::clone(pods) }
    }

    /// Whether anybody is asked about a container before it is made.
    pub(crate) fn want_creation(&self) -> bool {
        self.dispatcher.wants_creation()
    }

    /// Whether anybody hears of a container's start, before or after.
    pub(crate) fn want_start(&self) -> bool {
        self.dispatcher.wants(Event::StartContainer) || self.dispatcher.wants(Event::PostStartContainer)
    }

    /// Whether anybody hears of a container's end.
    pub(crate) fn want_container_stop(&self) -> bool {
        self.dispatcher.wants(Event::StopContainer)
    }

    /// Whether anybody hears of a container's removal.
    pub(crate) fn want_container_remove(&self) -> bool {
        self.dispatcher.wants(Event::RemoveContainer)
    }

    /// Whether anybody hears of a pod's end.
    pub(crate) fn want_pod_stop(&self) -> bool {
        self.dispatcher.wants(Event::StopPodSandbox)
    }

    /// Whether anybody hears of a pod's removal.
    pub(crate) fn want_pod_remove(&self) -> bool {
        self.dispatcher.wants(Event::RemovePodSandbox)
    }
}

/// A plugin refused, failed or did not answer: nothing that a client could act on.
fn failed(failure: Failure) -> Error {
    Error::new(Kind::Unknown, failure.to_string())
}

impl Turn {
    fn wants(&self, event: Event) -> bool {
        self.pods.node.plugins.dispatcher.wants(event)
    }

    /// Whether the pod cannot do without some plugin: one that misses its end is worth a warning.
    fn requires(&self, pod: &Pod) -> bool {
        let by_configuration =
            !self.pods.node.plugins.settings.borrow().default_validator.required_plugins.is_empty();
        let is_of_pod = |(key, _): &(String, String)| key.starts_with(coracle_nri::REQUIRED_ANNOTATION);
        by_configuration || pod.record().spec.annotations.iter().any(is_of_pod)
    }

    /// RunPodSandbox: everything of the pod is there, and nobody sees it yet. A refusal has been undone at the plugins.
    pub(crate) async fn run_pod(&self, pod: &Pod) -> Result<(), Error> {
        if self.wants(Event::RunPodSandbox) {
            self.section.run_pod_sandbox(&view::pod(pod)).await.map_err(failed)?;
        }
        Ok(())
    }

    /// The pod could not be made after all.
    pub(crate) async fn undo_run_pod(&self, pod: &Pod) {
        self.section.undo_run_pod_sandbox(&view::pod(pod)).await;
    }

    /// Before the pod's resources change; also where nothing is told afterwards.
    pub(crate) async fn update_pod(
        &self,
        pod: &Pod,
        overhead: Option<&Resources>,
        resources: Option<&Resources>,
    ) -> Result<(), Error> {
        if self.wants(Event::UpdatePodSandbox) {
            let told = |resources: Option<&Resources>| resources.map(limits::of_resources);
            self.section
                .update_pod_sandbox(&view::pod(pod), told(overhead), told(resources))
                .await
                .map_err(failed)?;
        }
        Ok(())
    }

    /// After the pod's resources have changed.
    pub(crate) async fn updated_pod(&self, pod: &Pod) {
        if self.wants(Event::PostUpdatePodSandbox) {
            self.section.post_update_pod_sandbox(&view::pod(pod)).await;
        }
    }

    /// The workload has ended, the sandbox is whole.
    pub(crate) async fn stop_pod(&self, pod: &Pod) {
        if self.wants(Event::StopPodSandbox) || self.requires(pod) {
            self.section.stop_pod_sandbox(&view::pod(pod)).await;
        }
    }

    /// Just before the pod leaves the lists.
    pub(crate) async fn remove_pod(&self, pod: &Pod) {
        if self.wants(Event::RemovePodSandbox) || self.requires(pod) {
            self.section.remove_pod_sandbox(&view::pod(pod)).await;
        }
    }

    /// What is to be changed in a container that is about to be made: done to `resolved`, which nothing has been made from.
    /// Updates of other containers hold when this comes back.
    pub(crate) async fn create(&self, pod: &Pod, resolved: &mut Resolved) -> Result<Offer, Error> {
        let (pod_message, container) = (view::pod(pod), view::resolved(pod, resolved));
        let created = self.section.create_container(&pod_message, &container).await.map_err(failed)?;
        let offer = Offer { created, container };
        let applied = match apply::adjustment(&self.pods, pod, &offer.created.adjustment, resolved).await {
            Ok(()) => host::update_all(&self.pods, &offer.created.updates),
            Err(error) => Err(error.context("NRI CreateContainer failed")),
        };
        match applied {
            Ok(()) => Ok(offer),
            Err(error) => {
                self.undo_create(offer, pod).await;
                Err(error)
            }
        }
    }

    /// It could not be made after all.
    pub(crate) async fn undo_create(&self, offer: Offer, pod: &Pod) {
        self.section.undo_create_container(offer.created, &view::pod(pod), &offer.container).await;
    }

    /// It is in the lists.
    pub(crate) async fn created(&self, container: &Container) {
        if self.wants(Event::PostCreateContainer) {
            self.section.post_create_container(&view::pod(&container.pod), &view::container(container)).await;
        }
    }

    /// Its process is there and waits.
    pub(crate) async fn start(&self, container: &Container) -> Result<(), Error> {
        if self.wants(Event::StartContainer) {
            self.section
                .start_container(&view::pod(&container.pod), &view::container(container))
                .await
                .map_err(failed)?;
        }
        Ok(())
    }

    /// Its program runs.
    pub(crate) async fn started(&self, container: &Container) {
        if self.wants(Event::PostStartContainer) {
            self.section.post_start_container(&view::pod(&container.pod), &view::container(container)).await;
        }
    }

    /// What a container's limits are to become: those asked for, as plugins change them. Updates of other containers hold
    /// when this comes back.
    pub(crate) async fn update(&self, container: &Container, asked: &Resources) -> Result<Limits, Error> {
        let mut wanted = container.record().limits();
        wanted.resources = wanted.resources.updated(asked);
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
            host::update_all(&self.pods, &updated.updates)?;
        }
        Ok(wanted)
    }

    /// The new limits hold.
    pub(crate) async fn updated(&self, container: &Container) {
        if self.wants(Event::PostUpdateContainer) {
            self.section.post_update_container(&view::pod(&container.pod), &view::container(container)).await;
        }
    }

    /// It has ended.
    pub(crate) async fn stop(&self, container: &Container) {
        if self.wants(Event::StopContainer) {
            self.section.stop_container(&view::pod(&container.pod), &view::stopped(container)).await;
        }
    }

    /// Just before its storage goes.
    pub(crate) async fn remove(&self, container: &Container) {
        if self.wants(Event::RemoveContainer) {
            self.section.remove_container(&view::pod(&container.pod), &view::stopped(container)).await;
        }
    }
}

/// The configuration as the dispatcher has it.
fn for_dispatcher(nri: &config::Nri) -> coracle_nri::Settings {
    let validator = &nri.default_validator;
    coracle_nri::Settings {
        runtime_name: nri.runtime_name.clone(),
        runtime_version: format!("v{}", env!("CARGO_PKG_VERSION")),
        registration_timeout: nri.plugin_registration_timeout,
        request_timeout: nri.plugin_request_timeout,
        sync_timeout: nri.plugin_sync_timeout,
        fail_on_timeout: nri.fail_on_plugin_timeout,
        duplicates: match nri.duplicate_policy {
            config::DuplicatePolicy::Replace => coracle_nri::Duplicates::Replace,
            config::DuplicatePolicy::Allow => coracle_nri::Duplicates::Allow,
            config::DuplicatePolicy::Reject => coracle_nri::Duplicates::Reject,
        },
        max_inflight: nri.max_inflight_per_plugin,
        allow_eviction: nri.allow_eviction,
        validator: coracle_nri::DefaultValidator {
            enable: validator.enable,
            reject_oci_hook_adjustment: validator.reject_oci_hook_adjustment,
            reject_runtime_default_seccomp_adjustment: validator.reject_runtime_default_seccomp_adjustment,
            reject_unconfined_seccomp_adjustment: validator.reject_unconfined_seccomp_adjustment,
            reject_custom_seccomp_adjustment: validator.reject_custom_seccomp_adjustment,
            reject_namespace_adjustment: validator.reject_namespace_adjustment,
            reject_sysctl_adjustment: validator.reject_sysctl_adjustment,
            required_plugins: validator.required_plugins.clone(),
            tolerate_missing_plugins_annotation: validator.tolerate_missing_plugins_annotation.clone(),
        },
    }
}
