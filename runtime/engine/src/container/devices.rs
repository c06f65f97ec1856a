//! Devices of a container: host devices given by path, and CDI devices given by name, which add environment
//! variables, mounts and groups.

use coracle_base::error::{Error, Kind};
use coracle_job::{ContainerEdits, Job, Outcome};

use super::resolved::Resolved;
use crate::spec::{ContainerSpec, Device, Mount, MountPropagation};
use crate::{Node, Pod, paths};

impl Node {
    /// Resolves CDI devices; a worker reads the spec files.
    pub(crate) async fn cdi_edits(&self, names: Vec<String>) -> Result<ContainerEdits, Error> {
        if names.is_empty() {
            return Ok(ContainerEdits::default());
        }
        let job = Job::Cdi { names, directories: self.host.cdi_directories.clone() };
        let outcome = self.host.workers.run(job, |_, _| ()).await;
        match outcome.map_err(|error| Error::from(error).context("config.CDI_devices"))? {
            Outcome::Cdi(edits) => Ok(edits),
            other => Err(Error::new(Kind::Internal, format!("unexpected answer of the worker: {other:?}"))),
        }
    }
}

impl Pod {
    /// Moves network interfaces of the node into the pod's network namespace.
    pub(crate) async fn take_net_devices(&self, devices: Vec<(String, String)>) -> Result<(), Error> {
        if devices.is_empty() {
            return Ok(());
        }
        let job = Job::TakeNetDevices { netns: paths::netns(self.id), devices };
        match self.node().host.workers.run(job, |_, _| ()).await? {
            Outcome::Moved => Ok(()),
            other => Err(Error::new(Kind::Internal, format!("unexpected answer of the worker: {other:?}"))),
        }
    }

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

/// Returns the request with the edits of its devices. Environment variables of the devices are last, so they
/// have precedence.
pub(crate) fn edited(asked: &ContainerSpec, edits: &ContainerEdits) -> ContainerSpec {
    let mut spec = asked.clone();
    let variables = edits.environment.iter();
    spec.environment.extend(variables.map(|(name, value)| (name.clone(), value.clone().into_bytes())));
    spec.devices.extend(edits.devices.iter().map(|device| Device {
        container_path: device.path.clone(),
        host_path: device.host_path.clone(),
        permissions: device.permissions.clone(),
    }));
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
