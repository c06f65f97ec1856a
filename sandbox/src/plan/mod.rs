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
pub use request::{
    Attributes, CgroupMount, Confinement, ContainerPlan, CpuScheduling, DeviceKind, DeviceNode, ExecPlan,
    Files, FreshKind, KERNEL_CONTROLS, Limit, MASKED_PATHS, Mount, NamespaceKind, PATH_DEFAULT,
    PodNamespaces, Process, ProcessPlan, READONLY_PATHS, Root, SandboxPlan, Scheduling, Seccomp, Source,
};

use coracle_wire::Text;

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

/// Compiles the launch record of a container with the main process `process`.
///
/// # Errors
/// [`Error::Invalid`], naming the field.
pub fn container(plan: &ContainerPlan, process: &ProcessPlan) -> Result<Vec<u8>, Error> {
    container::compile(plan, process)
}

/// Adds points at which the process waits: always before it changes its user and calls exec, and with `before_root`
/// also after its namespaces have been created and its root mounted, before pivot_root. At the latter point the process
/// has access to all of the host's files, which hooks in its namespaces need (OCI runtime-spec, config.md,
/// createContainer).
///
/// # Errors
/// [`Error::Invalid`]: the record cannot be read.
pub fn with_waits(record: &[u8], before_root: bool) -> Result<Vec<u8>, Error> {
    use coracle_wire::Op;
    let damaged = |error: postcard::Error| Error::invalid("launch record", error.to_string());
    let mut waiting = record::Record::new();
    for op in coracle_wire::walk(record).map_err(damaged)? {
        let op = op.map_err(damaged)?;
        match op {
            Op::Unshare { flags } if before_root && flags & container::NEW_MOUNT_NAMESPACE != 0 => {
                let (path, flag) = (Text::new(coracle_wire::HOST_NAMESPACE), container::NEW_MOUNT_NAMESPACE);
                waiting.push(&Op::JoinNamespace { path, flag })?;
            }
            Op::PivotRoot { .. } if before_root => waiting.push(&Op::Wait)?,
            // The first operation of the change to the requested user.
            Op::Umask { .. } => waiting.push(&Op::Wait)?,
            _ => {}
        }
        waiting.push(&op)?;
    }
    Ok(waiting.finish())
}

/// Whether a launch record needs the host's mount namespace: for volumes with mount propagation, namespaces by path,
/// and hooks.
pub fn needs_host(record: &[u8]) -> bool {
    use coracle_wire::Op;
    let needs = |op| matches!(op, Op::OpenTree { from_host: true, .. } | Op::JoinNamespace { .. });
    coracle_wire::walk(record).is_ok_and(|mut ops| ops.any(|op| op.is_ok_and(needs)))
}

/// Adapts a record to a monitor with this frame version: removes the operations that the monitor does not support
/// ([`coracle_wire::Op::since`]).
///
/// # Errors
/// [`Error::Invalid`] if the record cannot be read, or if an older build created it with an image volume after the
/// masks, which the volume could hide.
pub fn for_monitor(record: Vec<u8>, version: u16) -> Result<Vec<u8>, Error> {
    use coracle_wire::Op;
    let damaged = |error: postcard::Error| Error::invalid("launch record", error.to_string());
    let mut known = record::Record::new();
    let mut has_masks = false;
    for op in coracle_wire::walk(&record).map_err(damaged)? {
        let op = op.map_err(damaged)?;
        match op {
            Op::Mask { .. } => has_masks = true,
            Op::BindSelf { path } if has_masks => {
                let path = path.as_cstr().unwrap_or_default().to_string_lossy();
                let why = "was planned by an earlier version of coracle: create the container again";
                return Err(Error::invalid(format!("image volume {path}"), why));
            }
            _ => {}
        }
        if version < coracle_wire::VERSION && op.since() <= version {
            known.push(&op)?;
        }
    }
    Ok(if version < coracle_wire::VERSION { known.finish() } else { record })
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

/// Compiles an exec's launch record. The child executes the leading operations that concern the host (`WriteFile`,
/// `Limit`, `GiveStreams`) before it enters the container's mount namespace.
///
/// # Errors
/// [`Error::Invalid`], naming the field.
pub fn exec(plan: &ExecPlan) -> Result<Vec<u8>, Error> {
    let mut record = record::Record::new();
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
    Ok(record.finish())
}
