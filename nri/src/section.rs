//! Delivery of a pod's events to the plugins in order, inside a [`Section`] (NRI 3.1). The caller makes the announced
//! change visible, or undoes it, before the section ends.

use std::rc::Rc;

use prost::Message;

use crate::adjust::Merge;
use crate::api::{self, Event};
use crate::bound::FromPlugin;
use crate::connection::Outcome;
use crate::dispatch::{Dispatcher, Failure, Policy, failed};
use crate::io::Level;
use crate::plugin::{Plugin, Told, method};
use crate::required::Required;
use crate::semaphore::Permit;
use crate::validate;

/// The result of the event CreateContainer.
pub struct Created {
    /// The merged adjustment of all plugins.
    pub adjustment: api::ContainerAdjustment,
    /// Updates of other containers, which must be applied before this container is created.
    pub updates: Vec<api::ContainerUpdate>,
    offered: Vec<Rc<Plugin>>,
}

/// The result of the event UpdateContainer.
pub struct Updated {
    /// The container's resources, changed by plugins; `None`: the requested resources.
    pub resources: Option<api::LinuxResources>,
    /// Updates of other containers.
    pub updates: Vec<api::ContainerUpdate>,
}

/// The exclusive right to send events about one pod.
pub struct Section {
    pub(crate) dispatcher: Rc<Dispatcher>,
    pub(crate) _order: Option<Permit>,
    pub(crate) _gate: Permit,
}

/// Builds the message of an event about a pod or a container.
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
    /// Sends RunPodSandbox, the last step of the RPC. After a refusal, the plugins that were called receive
    /// StopPodSandbox and RemovePodSandbox (NRI 3.5).
    ///
    /// # Errors
    /// The refusal of a plugin.
    pub async fn run_pod_sandbox(&self, pod: &api::PodSandbox) -> Result<(), Failure> {
        let told = told!(RunPodSandbox, RunPodSandboxRequest, pod);
        let required = self.required(pod);
        // All active plugins, because a plugin that subscribes only to Stop or Remove gets these too, if it comes
        // before the refusing one.
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

    /// Sends StopPodSandbox and RemovePodSandbox if RunPodSandbox fails after all plugins had accepted the pod.
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

    /// Sends UpdatePodSandbox, before the pod's resources are changed.
    ///
    /// # Errors
    /// The refusal by a plugin.
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

    /// Sends PostUpdatePodSandbox, after the change has been stored.
    pub async fn post_update_pod_sandbox(&self, pod: &api::PodSandbox) {
        let told = told!(PostUpdatePodSandbox, PostUpdatePodSandboxRequest, pod);
        self.tell::<api::PostUpdatePodSandboxResponse>(&told).await;
    }

    /// Sends StopPodSandbox, after the containers have stopped and before the sandbox is torn down.
    pub async fn stop_pod_sandbox(&self, pod: &api::PodSandbox) {
        self.warn_of_missing(pod, "StopPodSandbox");
        let told = told!(StopPodSandbox, StopPodSandboxRequest, pod);
        self.tell::<api::StopPodSandboxResponse>(&told).await;
    }

    /// Sends RemovePodSandbox, just before the sandbox disappears from lists.
    pub async fn remove_pod_sandbox(&self, pod: &api::PodSandbox) {
        self.warn_of_missing(pod, "RemovePodSandbox");
        let told = told!(RemovePodSandbox, RemovePodSandboxRequest, pod);
        self.tell::<api::RemovePodSandboxResponse>(&told).await;
    }

    /// Sends CreateContainer, merges the adjustments and validates them. After a failure, the plugins that were called
    /// receive StopContainer and RemoveContainer.
    ///
    /// # Errors
    /// A refusal, a conflict, an invalid value, or a rejection by a validator.
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
        // The active plugins before the first call; plugins that disconnect meanwhile still count as present.
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

    /// Calls all validators concurrently; any outcome other than acceptance is a rejection (NRI 4.6). Returns the texts
    /// of the rejections.
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

    /// Sends StopContainer and RemoveContainer if a creation fails after all plugins had accepted the container.
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

    /// Sends PostCreateContainer, after the container has become visible.
    pub async fn post_create_container(&self, pod: &api::PodSandbox, container: &api::Container) {
        let told = told!(PostCreateContainer, PostCreateContainerRequest, pod, container);
        self.tell::<api::PostCreateContainerResponse>(&told).await;
    }

    /// Sends StartContainer, when the process exists and its program has not been executed yet.
    ///
    /// # Errors
    /// The refusal of a plugin.
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

    /// Sends PostStartContainer, when the program is running.
    pub async fn post_start_container(&self, pod: &api::PodSandbox, container: &api::Container) {
        let told = told!(PostStartContainer, PostStartContainerRequest, pod, container);
        self.tell::<api::PostStartContainerResponse>(&told).await;
    }

    /// Sends UpdateContainer, before a container's resources are changed.
    ///
    /// # Errors
    /// A refusal, a conflict, or an invalid value.
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

    /// Sends PostUpdateContainer, after the new resources have been applied.
    pub async fn post_update_container(&self, pod: &api::PodSandbox, container: &api::Container) {
        let told = told!(PostUpdateContainer, PostUpdateContainerRequest, pod, container);
        self.tell::<api::PostUpdateContainerResponse>(&told).await;
    }

    /// Sends StopContainer, after the container has exited and its exit has been stored. Updates of other containers in
    /// the answers are applied; failures of updates are only logged.
    pub async fn stop_container(&self, pod: &api::PodSandbox, container: &api::Container) {
        let told = told!(StopContainer, StopContainerRequest, pod, container);
        for answer in self.tell::<api::StopContainerResponse>(&told).await {
            self.dispatcher.apply_logged("StopContainer", answer.update).await;
        }
    }

    /// Sends RemoveContainer, just before the container's storage is removed.
    pub async fn remove_container(&self, pod: &api::PodSandbox, container: &api::Container) {
        let told = told!(RemoveContainer, RemoveContainerRequest, pod, container);
        self.tell::<api::RemoveContainerResponse>(&told).await;
    }

    /// Logs required plugins that are not connected. Teardown does not wait for them; a plugin synchronizes when it
    /// reconnects (NRI 6.4).
    fn warn_of_missing(&self, pod: &api::PodSandbox, event: &str) {
        let required = self.required(pod);
        let active = self.dispatcher.active.borrow();
        let missing = required.missing(|name| active.iter().any(|plugin| plugin.is_called(name)));
        if !missing.is_empty() {
            let text = format!(
                "{event} of {}/{}: required plugins are not connected: {}",
                pod.namespace,
                pod.name,
                missing.join(", ")
            );
            self.dispatcher.host.log(Level::Warn, "", &text);
        }
    }

    async fn tell<T: FromPlugin>(&self, told: &Told<'_>) -> Vec<T> {
        let plugins = self.dispatcher.subscribed(told.event);
        self.dispatcher.tell(&plugins, told).await
    }

    fn required(&self, pod: &api::PodSandbox) -> Required {
        Required::of(&self.dispatcher.settings.borrow().validator, pod)
    }
}
