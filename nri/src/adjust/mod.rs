//! Merges the adjustments and updates of plugins: the answers to one CreateContainer or UpdateContainer, in the order
//! of the plugins (NRI 4).
//!
//! ```text
//!   answer ─► check (form) ─► claim (owners, conflicts) ─► merged ─► effective container, sent to the next plugin
//! ```
//! This module applies nothing to the container: the runtime applies `merged` when all plugins have answered.

mod check;
mod effective;
mod owners;

use std::collections::BTreeMap;
use std::rc::Rc;

use prost::Message;

use crate::api;
use crate::plugin::Plugin;
use owners::{Field, Owners};

pub use effective::{apply_to, is_empty, overlay};

/// Maximum length in bytes of the adjustments of one container: the runtime keeps them as long as the container. Kubernetes
/// has the same limit for the annotations of an object.
const ADJUSTMENT_BYTES_MAX: usize = 256 << 10;

/// Maximum length in bytes of the merged resources of one update. The largest value of a cgroup file has one page.
const RESOURCES_BYTES_MAX: usize = 128 << 10;

/// The merged answers of plugins to one request.
pub(crate) struct Merge {
    /// ID of the container.
    id: String,
    /// Whether the request creates the container; updates of this container are then refused. Otherwise the request is
    /// an update of the container.
    is_creation: bool,
    /// The container before any adjustment.
    base: api::Container,
    view: api::Container,
    merged: api::ContainerAdjustment,
    owners: Owners,
    /// The resources of an UpdateContainer request with the changes so far.
    resources: api::LinuxResources,
    has_changed: bool,
    others: BTreeMap<String, Other>,
    /// IDs of other containers with updates, in the order of their first update.
    order: Vec<String>,
}

/// The updates of another container.
#[derive(Clone, Default)]
struct Other {
    resources: api::LinuxResources,
    /// Whether a failure of the updates is ignored; false if one of them must not fail.
    ignore_failure: bool,
    owners: Owners,
}

impl Merge {
    /// Starts a merge for the creation of a container.
    pub(crate) fn new(container: api::Container) -> Self {
        Self {
            id: container.id.clone(),
            is_creation: true,
            base: container.clone(),
            view: container,
            merged: api::ContainerAdjustment::default(),
            owners: Owners::default(),
            resources: api::LinuxResources::default(),
            has_changed: false,
            others: BTreeMap::new(),
            order: Vec::new(),
        }
    }

    /// Starts a merge for an update of a container's resources.
    pub(crate) fn of_update(id: String, asked: api::LinuxResources) -> Self {
        Self {
            is_creation: false,
            resources: asked,
            ..Self::new(api::Container { id, ..Default::default() })
        }
    }

    /// The container as it is sent to the next plugin.
    pub(crate) fn view(&self) -> &api::Container {
        &self.view
    }

    /// The resources as they are sent to the next plugin.
    pub(crate) fn resources(&self) -> &api::LinuxResources {
        &self.resources
    }

    /// Merges one plugin's adjustment. The order of the fields is that of the table in NRI 4.3; it determines which
    /// conflict is reported.
    pub(crate) fn adjust(&mut self, plugin: &str, asked: api::ContainerAdjustment) -> Result<(), String> {
        if is_empty(&asked) {
            return Ok(());
        }
        // Before it is copied.
        let bytes = asked.encoded_len() + self.merged.encoded_len();
        if bytes > ADJUSTMENT_BYTES_MAX {
            return Err(format!("an adjustment of {bytes} bytes, more than {ADJUSTMENT_BYTES_MAX}"));
        }
        check::adjustment(&asked)?;
        let (owners, merged) = (&mut self.owners, &mut self.merged);
        owners.map(Field::Annotations, plugin, &mut merged.annotations, asked.annotations)?;
        owners.list(Field::Mounts, plugin, &mut merged.mounts, asked.mounts, |mount| &mount.destination)?;
        owners.list(Field::Env, plugin, &mut merged.env, asked.env, |variable| &variable.key)?;
        arguments(owners, plugin, &mut merged.args, asked.args)?;
        if let Some(asked) = asked.hooks {
            owners.accumulate(Field::OciHooks, plugin);
            hooks(merged.hooks.get_or_insert_default(), asked);
        }
        if let Some(asked) = asked.linux {
            linux(owners, plugin, merged.linux.get_or_insert_default(), asked)?;
        }
        owners.entries(Field::Rlimits, plugin, &mut merged.rlimits, asked.rlimits, |limit| &limit.r#type)?;
        owners.entries(Field::CdiDevices, plugin, &mut merged.cdi_devices, asked.cdi_devices, |cdi| {
            &cdi.name
        })?;
        // Recomputed from the original container, because a plugin's memory limit must not hide the swap limit of an
        // earlier plugin.
        self.view = self.base.clone();
        apply_to(&mut self.view, &self.merged);
        Ok(())
    }

    /// Merges one plugin's updates.
    pub(crate) fn update(&mut self, plugin: &str, updates: Vec<api::ContainerUpdate>) -> Result<(), String> {
        for update in updates {
            let asked = update.linux.and_then(|linux| linux.resources).unwrap_or_default();
            if update.container_id == self.id && self.is_creation {
                return Err(format!("plugin {plugin:?} asked update of {:?} during creation", self.id));
            }
            let taken = if update.container_id == self.id {
                self.update_own(plugin, &asked)
            } else {
                self.update_other(plugin, &update.container_id, &asked, update.ignore_failure)
            };
            match taken {
                Err(_) if update.ignore_failure => {} // the whole update is dropped
                taken => taken?,
            }
        }
        Ok(())
    }

    fn update_own(&mut self, plugin: &str, asked: &api::LinuxResources) -> Result<(), String> {
        check::resources(asked)?;
        is_short(&self.resources, asked)?;
        let mut owners = self.owners.clone();
        owners.resources(plugin, asked)?;
        self.owners = owners;
        effective::merge(&mut self.resources, asked);
        self.has_changed = true;
        Ok(())
    }

    fn update_other(
        &mut self,
        plugin: &str,
        id: &str,
        asked: &api::LinuxResources,
        ignore_failure: bool,
    ) -> Result<(), String> {
        check::resources(asked)?;
        let known = self.others.get(id).cloned();
        let is_new = known.is_none();
        let mut other = known.unwrap_or_else(|| Other { ignore_failure: true, ..Other::default() });
        is_short(&other.resources, asked)?;
        other.owners.resources(plugin, asked)?;
        effective::merge(&mut other.resources, asked);
        other.ignore_failure &= ignore_failure;
        self.others.insert(id.to_owned(), other);
        if is_new {
            self.order.push(id.to_owned());
        }
        Ok(())
    }

    /// The merged adjustment, and the updates of other containers.
    pub(crate) fn finish(mut self) -> (api::ContainerAdjustment, Vec<api::ContainerUpdate>) {
        let updates = self.updates();
        (std::mem::take(&mut self.merged), updates)
    }

    /// The container's own resources if a plugin has changed them, and the updates of other containers.
    pub(crate) fn finish_update(self) -> (Option<api::LinuxResources>, Vec<api::ContainerUpdate>) {
        let updates = self.updates();
        (self.has_changed.then_some(self.resources), updates)
    }

    fn updates(&self) -> Vec<api::ContainerUpdate> {
        let update = |id: &String| {
            let other = self.others.get(id)?;
            Some(api::ContainerUpdate {
                container_id: id.clone(),
                linux: Some(api::LinuxContainerUpdate { resources: Some(other.resources.clone()) }),
                ignore_failure: other.ignore_failure,
            })
        };
        self.order.iter().filter_map(update).collect()
    }

    /// The request for validators.
    pub(crate) fn validation(
        &self,
        pod: &api::PodSandbox,
        container: &api::Container,
        plugins: &[Rc<Plugin>],
    ) -> api::ValidateContainerAdjustmentRequest {
        let others = self.others.iter().map(|(id, other)| (id.clone(), other.owners.told()));
        let own = (self.id.clone(), self.owners.told());
        let mut owners = BTreeMap::new();
        owners.extend(others.chain([own]));
        let instance = |plugin: &Rc<Plugin>| api::PluginInstance {
            name: plugin.name.clone(),
            index: plugin.index.clone(),
        };
        api::ValidateContainerAdjustmentRequest {
            pod: Some(pod.clone()),
            container: Some(container.clone()),
            adjust: Some(self.merged.clone()),
            update: self.updates(),
            owners: Some(api::OwningPlugins { owners }),
            plugins: plugins.iter().map(instance).collect(),
        }
    }

    /// The plugin that changed a part of the container, for messages.
    pub(crate) fn owner(&self, touched: Touched) -> Option<String> {
        let field = match touched {
            Touched::Hooks => Field::OciHooks,
            Touched::Seccomp => Field::SeccompPolicy,
            Touched::Namespaces => Field::Namespace,
            Touched::Sysctls => Field::Sysctl,
        };
        self.owners.any(field)
    }
}

/// Parts of a container that the built-in validator checks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Touched {
    Hooks,
    Seccomp,
    Namespaces,
    Sysctls,
}

/// Checks the length of merged resources, which are copied for each update of a message.
fn is_short(merged: &api::LinuxResources, asked: &api::LinuxResources) -> Result<(), String> {
    let bytes = merged.encoded_len() + asked.encoded_len();
    match bytes > RESOURCES_BYTES_MAX {
        true => Err(format!("resources of {bytes} bytes, more than {RESOURCES_BYTES_MAX}")),
        false => Ok(()),
    }
}

fn arguments(
    owners: &mut Owners,
    plugin: &str,
    merged: &mut Vec<String>,
    asked: Vec<String>,
) -> Result<(), String> {
    let mut asked = asked.into_iter().peekable();
    if asked.next_if(String::is_empty).is_some() {
        if asked.peek().is_none() {
            return Ok(()); // only the permission to override
        }
        owners.clear(Field::Args, "", plugin);
    }
    if asked.peek().is_some() {
        owners.claim(Field::Args, "", plugin)?;
        *merged = asked.collect();
    }
    Ok(())
}

fn hooks(merged: &mut api::Hooks, asked: api::Hooks) {
    merged.prestart.extend(asked.prestart);
    merged.create_runtime.extend(asked.create_runtime);
    merged.create_container.extend(asked.create_container);
    merged.start_container.extend(asked.start_container);
    merged.poststart.extend(asked.poststart);
    merged.poststop.extend(asked.poststop);
}

fn linux(
    owners: &mut Owners,
    plugin: &str,
    merged: &mut api::LinuxContainerAdjustment,
    asked: api::LinuxContainerAdjustment,
) -> Result<(), String> {
    owners.list(Field::Devices, plugin, &mut merged.devices, asked.devices, |device| &device.path)?;
    if let Some(asked) = &asked.resources {
        owners.resources(plugin, asked)?;
        effective::merge(merged.resources.get_or_insert_default(), asked);
    }
    if !asked.cgroups_path.is_empty() {
        owners.claim(Field::CgroupsPath, "", plugin)?;
        merged.cgroups_path = asked.cgroups_path;
    }
    if asked.oom_score_adj.is_some() {
        owners.claim(Field::OomScoreAdj, "", plugin)?;
        merged.oom_score_adj = asked.oom_score_adj;
    }
    if let Some(asked) = asked.io_priority {
        owners.set_or_clear(Field::IoPriority, plugin, asked.class() == api::IoPrioClass::IoprioClassNone)?;
        merged.io_priority = Some(asked);
    }
    if asked.seccomp_policy.is_some() {
        owners.claim(Field::SeccompPolicy, "", plugin)?;
        merged.seccomp_policy = asked.seccomp_policy;
    }
    namespaces(owners, plugin, &mut merged.namespaces, asked.namespaces)?;
    owners.map(Field::Sysctl, plugin, &mut merged.sysctl, asked.sysctl)?;
    owners.map(Field::LinuxNetDevices, plugin, &mut merged.net_devices, asked.net_devices)?;
    if let Some(asked) = asked.scheduler {
        owners.set_or_clear(
            Field::LinuxSched,
            plugin,
            asked.policy() == api::LinuxSchedulerPolicy::SchedNone,
        )?;
        merged.scheduler = Some(asked);
    }
    if let Some(asked) = asked.rdt {
        rdt(owners, plugin, merged.rdt.get_or_insert_default(), asked)?;
    }
    if asked.memory_policy.is_some() {
        owners.claim(Field::MemoryPolicy, "", plugin)?;
        merged.memory_policy = asked.memory_policy;
    }
    Ok(())
}

/// Merges the namespaces of an adjustment. A removal is claimed, too, so two plugins that change the same type always
/// conflict.
fn namespaces(
    owners: &mut Owners,
    plugin: &str,
    merged: &mut Vec<api::LinuxNamespace>,
    asked: Vec<api::LinuxNamespace>,
) -> Result<(), String> {
    for namespace in asked {
        let kind = namespace.r#type.trim_start_matches('-').to_owned();
        owners.claim(Field::Namespace, &kind, plugin)?;
        merged.retain(|other| other.r#type.trim_start_matches('-') != kind);
        merged.push(namespace);
    }
    Ok(())
}

fn rdt(
    owners: &mut Owners,
    plugin: &str,
    merged: &mut api::LinuxRdt,
    asked: api::LinuxRdt,
) -> Result<(), String> {
    if asked.remove {
        for field in [Field::RdtClosID, Field::RdtSchemata, Field::RdtEnableMonitoring] {
            owners.clear(field, "", plugin);
        }
        *merged = api::LinuxRdt { remove: true, ..api::LinuxRdt::default() };
    }
    if asked.clos_id.is_some() {
        owners.claim(Field::RdtClosID, "", plugin)?;
        (merged.clos_id, merged.remove) = (asked.clos_id, false);
    }
    if asked.schemata.is_some() {
        owners.claim(Field::RdtSchemata, "", plugin)?;
        (merged.schemata, merged.remove) = (asked.schemata, false);
    }
    if asked.enable_monitoring.is_some() {
        owners.claim(Field::RdtEnableMonitoring, "", plugin)?;
        (merged.enable_monitoring, merged.remove) = (asked.enable_monitoring, false);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
