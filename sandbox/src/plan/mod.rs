//! Plans: what is asked for a pod, a container or an exec, turned into the bytes of a launch record.
//!
//! ```text
//!   SandboxPlan   ─┐                                   ┌─ the monitor walks it once, before it serves
//!   ContainerPlan ─┼─► checks, order, defaults ─► Op… ─┼─ the container's child, from clone to exec
//!   ExecPlan      ─┘   (pure: no I/O here)             └─ the exec's child
//! ```
//! Every decision about security and order is taken here, so that each rule is a table test without root, and the
//! child only obeys. Paths are checked as text; that they stay inside the container's root is up to the child, which
//! resolves them there (`coracle_wire::Op`).
//! Rules: CRI 3 and CRI 4.

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
    CgroupMount, ContainerPlan, CpuScheduling, DeviceKind, DeviceNode, ExecPlan, Files, FreshKind, Limit,
    MASKED_PATHS, Mount, NamespaceKind, PATH_DEFAULT, PodNamespaces, Process, READONLY_PATHS, Root,
    SandboxPlan, Scheduling, Seccomp, Source,
};

use coracle_wire::Text;

use crate::Error;

/// The pod's setup record, walked by the monitor in the pod's new namespaces.
///
/// # Errors
/// [`Error::Invalid`], naming the field.
pub fn sandbox(plan: &SandboxPlan) -> Result<Vec<u8>, Error> {
    sandbox::compile(plan)
}

/// A container's launch record.
///
/// # Errors
/// [`Error::Invalid`], naming the field.
pub fn container(plan: &ContainerPlan) -> Result<Vec<u8>, Error> {
    container::compile(plan)
}

/// The record with places at which its process waits: `before_root`, when its namespaces are made and its root is mounted
/// but not entered; and always when all is done but becoming the user and exec. Who waits before its root has all of the host's
/// files in view, with which hooks are run in its namespaces (OCI runtime-spec, config.md, createContainer).
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
            // The first of the steps to another user.
            Op::Umask { .. } => waiting.push(&Op::Wait)?,
            _ => {}
        }
        waiting.push(&op)?;
    }
    Ok(waiting.finish())
}

/// Whether a launch record needs the mount namespace of the host: for volumes whose mounts travel, namespaces by path and
/// hooks.
pub fn needs_host(record: &[u8]) -> bool {
    use coracle_wire::Op;
    let needs = |op| matches!(op, Op::OpenTree { from_host: true, .. } | Op::JoinNamespace { .. });
    coracle_wire::walk(record).is_ok_and(|mut ops| ops.any(|op| op.is_ok_and(needs)))
}

/// The record as a monitor whose frames have this version can walk it: without the operations that it does not know
/// ([`coracle_wire::Op::since`]).
///
/// # Errors
/// [`Error::Invalid`]: the record cannot be read, or a build before that version made it and lets an image volume come after
/// the masks, which it could undo.
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

/// Whether operation `index` of `record` failed for what the image has at the path of a mount, a link that leads where no mount
/// may be or a file, and not for what the node lacks.
pub fn is_fault_of_image(record: &[u8], index: u16, errno: i32) -> bool {
    use coracle_wire::Op;
    use nix::errno::Errno;
    let op = coracle_wire::walk(record).ok().and_then(|mut ops| ops.nth(usize::from(index))?.ok());
    match Errno::from_raw(errno) {
        Errno::ELOOP | Errno::ENOTDIR => {
            matches!(op, Some(Op::BindSelf { .. } | Op::Filesystem { .. } | Op::Attach { .. }))
        }
        // An image volume that could not be made, in procfs for one.
        Errno::ENOENT | Errno::EPERM => matches!(op, Some(Op::BindSelf { .. })),
        _ => false,
    }
}

/// The seccomp filter that a launch record installs, for execs into its container.
pub fn filter_of(record: &[u8]) -> Option<Seccomp> {
    coracle_wire::walk(record).ok()?.filter_map(Result::ok).find_map(|op| match op {
        coracle_wire::Op::Seccomp { program, flags } => Some(Seccomp { program: program.to_vec(), flags }),
        _ => None,
    })
}

/// The AppArmor profile of a launch record, for execs into its container.
pub fn apparmor_of(record: &[u8]) -> Option<String> {
    let path = Text::new(crate::lsm::APPARMOR_EXEC);
    coracle_wire::walk(record).ok()?.filter_map(Result::ok).find_map(|op| match op {
        coracle_wire::Op::WriteFile { path: other, data, .. } if other == path => {
            Some(String::from_utf8_lossy(data.strip_prefix(b"exec ")?).into_owned())
        }
        _ => None,
    })
}

/// The SELinux label of a launch record, for execs into its container.
pub fn selinux_of(record: &[u8]) -> Option<String> {
    let path = Text::new(crate::lsm::SELINUX_EXEC);
    coracle_wire::walk(record).ok()?.filter_map(Result::ok).find_map(|op| match op {
        coracle_wire::Op::WriteFile { path: other, data, .. } if other == path => {
            Some(String::from_utf8_lossy(data).into_owned())
        }
        _ => None,
    })
}

/// An exec's launch record. Its leading operations are about the host (`WriteFile`, `Limit`, `GiveStreams`): the child
/// walks them before it enters the container's mount namespace.
///
/// # Errors
/// [`Error::Invalid`], naming the field.
pub fn exec(plan: &ExecPlan) -> Result<Vec<u8>, Error> {
    let mut record = record::Record::new();
    process::join_cgroups(&mut record, &plan.cgroup_joins)?;
    process::oom_score(&mut record, plan.process.oom_score_adj)?;
    process::apparmor(&mut record, plan.process.apparmor.as_deref())?;
    process::selinux(&mut record, plan.process.selinux.as_deref())?;
    // What only the host's root may do, before a user namespace is joined.
    process::limits(&mut record, &plan.process)?;
    if let Some(mappings) = &plan.user_namespace {
        process::give_streams(&mut record, mappings, &plan.process)?;
    }
    process::terminal(&mut record, &plan.process)?;
    process::working_directory(&mut record, &plan.process, false)?;
    process::become_user_and_exec(&mut record, &plan.process)?;
    Ok(record.finish())
}
