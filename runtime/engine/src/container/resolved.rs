//! A resolved container: the content of its record, and the parameters of its creation. Lifecycle hooks may
//! still change it.

use std::path::PathBuf;

use coracle_sandbox::cgroup::DeviceAccess;
use coracle_sandbox::plan;

use crate::record::ContainerRecord;

/// All parameters of a container's creation.
pub struct Resolved {
    /// The record of the container, before it is stored.
    pub record: ContainerRecord,
    /// Devices that the container may open. The limits of its cgroup are in `record`.
    pub devices: DeviceAccess,
    /// The confinement of all processes of the container.
    pub confinement: plan::Confinement,
    /// The plan of the launch record, complete except for the cgroup's files, which do not exist yet. The main
    /// process is in `record`.
    pub plan: plan::ContainerPlan,
    /// Files to which the container's process writes its PID, in addition to those of its cgroup.
    pub joins: Vec<PathBuf>,
    /// Network interfaces of the node that are moved into the pod: name on the node, name in the pod.
    pub net_devices: Vec<(String, String)>,
}
