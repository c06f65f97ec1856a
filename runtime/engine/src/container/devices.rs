//! Devices of a container: host devices given by path, and CDI devices given by name, which add environment
//! variables, mounts and groups.

use std::path::Path;

use coracle_base::error::{Error, Kind};
use coracle_job::{ContainerEdits, DeviceNumbers, EditedDevice, Job, Outcome};
use coracle_sandbox::cgroup::DeviceRule;
use coracle_sandbox::hostpath::Mounts;
use coracle_sandbox::identity::Identity;
use coracle_sandbox::plan;

use super::resolved::Resolved;
use crate::spec::{ContainerSpec, Device, Mount, MountPropagation};
use crate::{Node, Pod};

/// A device that a container gets.
pub(crate) struct GivenDevice {
    /// Device node; [`GivenDevice::node_for`] sets the owner.
    node: plan::DeviceNode,
    /// Permissions of the device cgroup.
    permissions: String,
    /// User ID of the owner; `None`: that of the container's process.
    uid: Option<u32>,
    /// Group ID of the owner; `None`: that of the container's process.
    gid: Option<u32>,
}

impl GivenDevice {
    /// The node in a container whose process has this identity.
    pub(crate) fn node_for(&self, identity: &Identity) -> plan::DeviceNode {
        let owner = (self.uid.unwrap_or(identity.uid), self.gid.unwrap_or(identity.gid));
        plan::DeviceNode { owner, ..self.node.clone() }
    }

    /// The rule of the device cgroup.
    pub(crate) fn rule(&self) -> DeviceRule {
        DeviceRule {
            kind: self.node.kind,
            major: Some(self.node.major),
            minor: Some(self.node.minor),
            access: self.permissions.clone(),
        }
    }
}

impl Node {
    /// Lists the device nodes of a request and of its CDI devices. Of nodes with the same path the first is used:
    /// those of CDI have precedence, and among them the last one, as in other runtimes.
    ///
    /// # Errors
    /// A requested path is not a device, or that of a CDI device without numbers.
    pub(crate) async fn device_nodes(
        &self,
        asked: &[Device],
        edits: &ContainerEdits,
        mounts: &mut Mounts,
    ) -> Result<Vec<GivenDevice>, Error> {
        let mut given = Vec::new();
        for device in edits.devices.iter().rev() {
            let found = self.host.paths.devices(Path::new(&device.host_path), &device.path, mounts).await;
            let nodes = match device.numbers {
                Some(numbers) => vec![numbered(device, numbers, found.as_deref().unwrap_or_default())],
                None => found.map_err(|error| error.context("config.CDI_devices"))?,
            };
            given.extend(nodes.into_iter().map(|node| GivenDevice {
                node: plan::DeviceNode { mode: device.mode.unwrap_or(node.mode), ..node },
                permissions: device.permissions.clone(),
                uid: device.uid,
                gid: device.gid,
            }));
        }
        for device in asked {
            let found = self.host.paths.devices(Path::new(&device.host_path), &device.container_path, mounts);
            let found = found.await.map_err(|error| error.context("config.devices"))?;
            given.extend(found.into_iter().map(|node| GivenDevice {
                node,
                permissions: device.permissions.clone(),
                uid: Some(0),
                gid: Some(0),
            }));
        }
        Ok(given)
    }

    /// Resolves CDI devices; a worker reads the spec files.
    pub(crate) async fn cdi_edits(&self, names: Vec<String>) -> Result<ContainerEdits, Error> {
        if names.is_empty() {
            return Ok(ContainerEdits::default());
        }
        let job = Job::Cdi { names, directories: self.host.cdi_directories.clone() };
        let outcome = self.host.workers.run(job).await;
        match outcome.map_err(|error| Error::from(error).context("config.CDI_devices"))? {
            Outcome::Cdi(edits) => Ok(edits),
            other => Err(Error::new(Kind::Internal, format!("unexpected answer of the worker: {other:?}"))),
        }
    }
}

impl Pod {
    /// Adds CDI devices to a container that is being created, and resolves the container again.
    ///
    /// # Errors
    /// Those of [`Pod::create_container`].
    pub async fn add_devices(&self, names: Vec<String>, resolved: &mut Resolved) -> Result<(), Error> {
        let (id, spec, created_at_ns) =
            (resolved.record.id, resolved.record.spec.clone(), resolved.record.created_at_ns);
        let edits = self.node().cdi_edits(spec.cdi_devices.iter().cloned().chain(names).collect()).await?;
        let on_host = self.node().look_at_host(&spec, &edits).await?;
        *resolved = self.resolve(id, spec, (&edits, on_host))?;
        resolved.record.created_at_ns = created_at_ns;
        Ok(())
    }
}

/// Returns the request with the edits of its devices, except for device nodes (see [`Node::device_nodes`]).
/// Environment variables of the devices are last, so they have precedence.
pub(crate) fn edited(asked: &ContainerSpec, edits: &ContainerEdits) -> ContainerSpec {
    let mut spec = asked.clone();
    let variables = edits.environment.iter();
    spec.environment.extend(variables.map(|(name, value)| (name.clone(), value.clone().into_bytes())));
    spec.mounts.extend(edits.mounts.iter().map(|mount| Mount {
        container_path: mount.container_path.clone(),
        host_path: mount.host_path.clone(),
        readonly: mount.is_read_only,
        selinux_relabel: false,
        propagation: MountPropagation::Private,
        recursive_read_only: false,
        image: None,
        uid_mappings: Vec::new(),
        gid_mappings: Vec::new(),
        options: mount.options.clone(),
    }));
    spec.security.supplemental_groups.extend(&edits.groups);
    spec
}

/// The node of a CDI device whose kind and numbers are given. A node on the host is not necessary; if there is one, it
/// has the mode.
fn numbered(device: &EditedDevice, numbers: DeviceNumbers, on_host: &[plan::DeviceNode]) -> plan::DeviceNode {
    let kind = if numbers.is_block { plan::DeviceKind::Block } else { plan::DeviceKind::Character };
    // The mode of most devices, as in other runtimes.
    let mode = if let [node] = on_host { node.mode } else { 0o666 };
    let DeviceNumbers { major, minor, .. } = numbers;
    plan::DeviceNode { path: device.path.clone(), kind, major, minor, mode, owner: (0, 0) }
}
