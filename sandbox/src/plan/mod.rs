//! Plans: compile the request for a pod, a container or an exec into a launch record.
//!
//! ```text
//!   SandboxPlan   ─┐                                   ┌─ executed once by the monitor at its start
//!   ContainerPlan ─┼─► checks, order, defaults ─► Op… ─┼─ executed by the container's child, from clone to exec
//!   ExecPlan      ─┘   (pure: no I/O here)             └─ executed by the exec's child
//! ```
//! All decisions about security and order are made in this module, so that each rule can be tested as a table without
//! root; the child only executes operations. Paths are validated as text; the child resolves them inside the
//! container's root (`coracle_wire::Op`). Rules: CRI 3 and CRI 4.

mod container;
mod describe;
mod mount_plan;
mod mounts;
mod overlay;
mod path;
mod process;
mod propagation;
mod record;
mod request;
mod sandbox;
mod sysctl;
#[cfg(test)]
mod tests;

pub use describe::{describe, explain};
pub use propagation::check_propagation;
pub use record::LaunchRecord;
pub use request::{
    Attributes, CgroupMount, Confinement, ContainerPlan, CpuScheduling, DeviceKind, DeviceNode, ExecPlan,
    Files, FreshKind, KERNEL_CONTROLS, Limit, MASKED_PATHS, Mount, NamespaceKind, PATH_DEFAULT,
    PodNamespaces, Process, ProcessPlan, READONLY_PATHS, Root, SandboxPlan, Scheduling, Seccomp, Source,
    Waits,
};

use crate::Error;

/// Compiles the pod's setup record, which the monitor executes in the pod's new namespaces.
///
/// # Errors
/// [`Error::Invalid`], naming the field.
pub fn sandbox(plan: &SandboxPlan) -> Result<Vec<u8>, Error> {
    sandbox::compile(plan)
}

/// The files below /proc/sys, and the values, of the pod's sysctls that its setup record leaves to the time after its network
/// was attached. They are those of the network namespace.
///
/// # Errors
/// [`Error::Invalid`], naming the sysctl.
pub fn network_sysctls(
    sysctls: &[(String, String)],
    namespaces: PodNamespaces,
) -> Result<Vec<(String, String)>, Error> {
    sandbox::network_sysctls(sysctls, namespaces)
}

/// Compiles the launch record of a container with the main process `process`, for a monitor with the frame version
/// `version`: the record has no operation that the monitor does not support ([`coracle_wire::Op::since`]).
///
/// # Errors
/// [`Error::Invalid`], naming the field.
pub fn container(
    plan: &ContainerPlan,
    process: &ProcessPlan,
    version: u16,
    waits: Waits,
) -> Result<LaunchRecord, Error> {
    container::compile(plan, process, record::Record::new(version), waits)
}

/// Checks that a launch record can be compiled, whatever the start of the container will need: errors of a request are those
/// of CreateContainer.
///
/// # Errors
/// [`Error::Invalid`], naming the field.
pub fn check(plan: &ContainerPlan, process: &ProcessPlan) -> Result<(), Error> {
    container(plan, process, coracle_wire::VERSION, Waits::BeforeRootAndUser).map(drop)
}

/// Whether the image caused the failure of operation `index` of `record`: at the path of a mount, the image has a file
/// or a link to a forbidden place.
pub fn is_fault_of_image(record: &[u8], index: u16, errno: i32) -> bool {
    use coracle_wire::Op;
    use nix::errno::Errno;
    let op = coracle_wire::walk(record).ok().and_then(|mut ops| ops.nth(usize::from(index))?.ok());
    match Errno::from_raw(errno) {
        Errno::ELOOP | Errno::ENOTDIR => {
            matches!(op, Some(Op::BindSelf { .. } | Op::Filesystem { .. } | Op::Attach { .. }))
        }
        // The path of an image volume cannot be created, for example in procfs.
        Errno::ENOENT | Errno::EPERM => matches!(op, Some(Op::BindSelf { .. })),
        _ => false,
    }
}

/// Compiles an exec's launch record for a monitor with the frame version `version`. The child executes the leading
/// operations that concern the host (`WriteFile`, `Limit`, `GiveStreams`) before it enters the container's mount namespace.
///
/// # Errors
/// [`Error::Invalid`], naming the field.
pub fn exec(plan: &ExecPlan, version: u16) -> Result<Vec<u8>, Error> {
    let mut record = record::Record::new(version);
    process::join_cgroups(&mut record, &plan.cgroup_joins)?;
    let process = &plan.process.process;
    process::oom_score(&mut record, process.oom_score_adj)?;
    process::labels(&mut record, &plan.process.confinement)?;
    // Operations that only the host's root may do come before the user namespace is joined.
    process::limits(&mut record, &plan.process.limits)?;
    if let Some(mappings) = &plan.user_namespace {
        process::give_streams(&mut record, mappings, process)?;
    }
    process::terminal(&mut record, &plan.process)?;
    process::working_directory(&mut record, process, false)?;
    process::become_user_and_exec(&mut record, &plan.process)?;
    Ok(record.finish().bytes)
}
