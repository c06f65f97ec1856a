//! A container as create will make it: what is kept in its record, and what is done with the kernel. Whoever follows the life of
//! pods may still change it.

use std::path::PathBuf;

use coracle_sandbox::cgroup::Resources;
use coracle_sandbox::plan;

use crate::record::ContainerRecord;

/// Everything create needs.
pub struct Resolved {
    /// What is kept of it.
    pub record: ContainerRecord,
    /// Limits and device rules of its cgroup.
    pub resources: Resources,
    /// Complete but for the cgroup's files, which are not there yet.
    pub plan: plan::ContainerPlan,
    /// Files that its process writes itself into, beside those of its cgroup.
    pub joins: Vec<PathBuf>,
    /// Network interfaces of the node that come into its pod, and their names there.
    pub net_devices: Vec<(String, String)>,
}
