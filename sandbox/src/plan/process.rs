//! The common part of containers and execs: joining the cgroup, and the last operations from root to the requested
//! program.

use std::path::PathBuf;

use coracle_wire::{Op, Text};

use super::path;
use super::record::{Record, Strings, c_string};
use super::request::{
    Confinement, CpuScheduling, Limit, PATH_DEFAULT, Process, ProcessPlan, Scheduling, Seccomp,
};
use crate::Error;
use crate::lsm::{APPARMOR_EXEC, SELINUX_EXEC, SELINUX_KEYS};
use crate::seccomp;
use crate::userns::UserMappings;

/// File creation mask of every process (CRI 3.9).
const UMASK: u32 = 0o022;

/// Maximum number of directories of `PATH` that are tried; the default has six.
const PATH_PARTS_MAX: usize = 256;

/// Maximum size of a filter in bytes (BPF_MAXINSNS instructions of 8 bytes).
const SECCOMP_BYTES_MAX: usize = 4096 * 8;

/// Adds the operations that join the cgroups. They must be first, so that all later operations are accounted to the
/// cgroup and the process can be killed through it.
pub(super) fn join_cgroups(record: &mut Record, join_files: &[PathBuf]) -> Result<(), Error> {
    for file in join_files {
        let path = path::host("cgroup_joins", file)?;
        record.push(&Op::WriteFile { path: Text::new(&path), data: b"0", optional: false })?;
    }
    Ok(())
}

/// Sets the OOM score adjustment. This must be before capabilities are dropped, because lowering it needs
/// CAP_SYS_RESOURCE. A nested daemon does not have this capability, so a failure is ignored.
pub(super) fn oom_score(record: &mut Record, score: i32) -> Result<(), Error> {
    if !(-1000..=1000).contains(&score) {
        return Err(Error::invalid("oom_score_adj", format!("{score} is not between -1000 and 1000")));
    }
    let path = Text::new(c"/proc/self/oom_score_adj");
    record.push(&Op::WriteFile { path, data: score.to_string().as_bytes(), optional: true })
}

/// Sets the AppArmor profile and the SELinux label, which the kernel applies at exec.
pub(super) fn labels(record: &mut Record, confinement: &Confinement) -> Result<(), Error> {
    apparmor(record, confinement.apparmor.as_deref())?;
    selinux(record, confinement.selinux.as_deref())
}

/// Sets the AppArmor profile through the node's procfs, before the image could have a file at that path.
fn apparmor(record: &mut Record, profile: Option<&str>) -> Result<(), Error> {
    let Some(profile) = profile else { return Ok(()) };
    let data = format!("exec {profile}");
    record.push(&Op::WriteFile { path: Text::new(APPARMOR_EXEC), data: data.as_bytes(), optional: false })
}

/// Sets the SELinux label through the node's procfs. Keys that are created for the container get the label, too; if the
/// policy forbids that, the container cannot use keys.
fn selinux(record: &mut Record, label: Option<&str>) -> Result<(), Error> {
    let Some(label) = label else { return Ok(()) };
    let data = label.as_bytes();
    record.push(&Op::WriteFile { path: Text::new(SELINUX_KEYS), data, optional: true })?;
    record.push(&Op::WriteFile { path: Text::new(SELINUX_EXEC), data, optional: false })
}

/// Sets scheduling attributes, before capabilities are dropped, because some classes and policies need one.
pub(super) fn scheduling(record: &mut Record, scheduling: &Scheduling) -> Result<(), Error> {
    let Scheduling { cpu, io, memory } = scheduling;
    if let Some(CpuScheduling { policy, flags, nice, priority, times }) = *cpu {
        record.push(&Op::Schedule { policy, flags, nice, priority, times })?;
    }
    if let Some((class, level)) = *io {
        record.push(&Op::IoPriority { class, level })?;
    }
    match *memory {
        Some((mode, nodes)) => record.push(&Op::MemoryPolicy { mode, nodes }),
        None => Ok(()),
    }
}

/// Opens the terminal, after the container's devpts has been mounted.
pub(super) fn terminal(record: &mut Record, plan: &ProcessPlan) -> Result<(), Error> {
    if plan.tty { record.push(&Op::Terminal) } else { Ok(()) }
}

pub(super) fn limits(record: &mut Record, limits: &[Limit]) -> Result<(), Error> {
    for limit in limits {
        if limit.soft > limit.hard {
            return Err(Error::invalid(
                "limits",
                format!("soft {} is above hard {}", limit.soft, limit.hard),
            ));
        }
        record.push(&Op::Limit { resource: limit.resource, soft: limit.soft, hard: limit.hard })?;
    }
    Ok(())
}

/// Changes the owner of the standard streams, so that a program can open /dev/stdout, as the log files of many images
/// do.
pub(super) fn give_streams(
    record: &mut Record,
    mappings: &UserMappings,
    process: &Process,
) -> Result<(), Error> {
    let uid = process.identity.uid;
    let host = mappings.users.host_id(uid).ok_or_else(|| unmapped("run_as_user", uid))?;
    record.push(&Op::GiveStreams { uid: host })
}

/// Checks that all groups are mapped in the user namespace, because the kernel's error does not say which group is not.
pub(super) fn check_groups(mappings: &UserMappings, process: &Process) -> Result<(), Error> {
    let identity = &process.identity;
    let mut groups = identity.groups.iter().chain([&identity.gid]);
    match groups.find(|gid| mappings.groups.host_id(**gid).is_none()) {
        Some(gid) => Err(unmapped("supplemental_groups", *gid)),
        None => Ok(()),
    }
}

pub(super) fn unmapped(field: &str, id: u32) -> Error {
    Error::invalid(field, format!("{id} is not mapped in the pod's user namespace"))
}

pub(super) fn working_directory(record: &mut Record, process: &Process, create: bool) -> Result<(), Error> {
    let path = path::container_c("working_dir", &process.working_directory)?;
    record.push(&Op::WorkingDirectory { path: Text::new(&path), create })
}

/// Adds the operations from root with all capabilities to the program. The order follows from their requirements: the
/// bounding set needs CAP_SETPCAP, groups and user need CAP_SETGID and CAP_SETUID, and a filter without no_new_privs
/// needs CAP_SYS_ADMIN, so all these come before capabilities are set. With no_new_privs the filter comes last. The
/// filter then also applies to coracle's own exec, and to the calls that create the second process in the container's
/// PID namespace ([`Op::SpareOwnCalls`]).
pub(super) fn become_user_and_exec(record: &mut Record, plan: &ProcessPlan) -> Result<(), Error> {
    let ProcessPlan { process, confinement, .. } = plan;
    let identity = &process.identity;
    let capabilities = &process.capabilities;
    record.push(&Op::Umask { mask: UMASK })?;
    record.push(&Op::Keyring)?;
    record.push(&Op::BoundingSet { keep: capabilities.bounding })?;
    let gids: Vec<u8> = identity.groups.iter().flat_map(|gid| gid.to_le_bytes()).collect();
    record.push(&Op::Groups { gids: &gids })?;
    if !process.attributes.no_new_privileges {
        load_filter(record, confinement.seccomp.as_ref())?;
    }
    record.push(&Op::User { uid: identity.uid, gid: identity.gid })?;
    record.push(&Op::Capabilities {
        effective: capabilities.effective,
        permitted: capabilities.permitted,
        inheritable: capabilities.ambient, // a capability can only be ambient if it is inheritable
        ambient: capabilities.ambient,
    })?;
    if process.attributes.no_new_privileges {
        record.push(&Op::NoNewPrivileges)?;
        load_filter(record, confinement.seccomp.as_ref())?;
    }
    let candidates = candidates(process)?;
    let arguments = Strings::of("command", &process.arguments)?;
    let environment = Strings::of("environment", &process.environment)?;
    record.push(&Op::Exec {
        candidates: candidates.block(),
        arguments: arguments.block(),
        environment: environment.block(),
    })
}

fn load_filter(record: &mut Record, filter: Option<&Seccomp>) -> Result<(), Error> {
    let Some(Seccomp { program, flags }) = filter else { return Ok(()) };
    if !seccomp::lets_hand_over(program) {
        record.push(&Op::SpareOwnCalls)?;
    }
    if program.is_empty() || program.len() % 8 != 0 || program.len() > SECCOMP_BYTES_MAX {
        return Err(Error::invalid("seccomp", format!("a program of {} bytes is none", program.len())));
    }
    record.push(&Op::Seccomp { program, flags: *flags })
}

/// The candidate paths of the program: the command itself if it contains a slash (relative to the working directory),
/// otherwise one for each directory of the container's `PATH`. Empty and relative components of `PATH` are skipped, as
/// in other runtimes (Go's LookPath), because the working directory is not intended to be searched.
fn candidates(process: &Process) -> Result<Strings, Error> {
    let Some(command) = process.arguments.first().filter(|command| !command.is_empty()) else {
        return Err(Error::invalid("command", "no command specified"));
    };
    // This also limits the size of 256 candidates with a long name.
    c_string("command", path::container("command", command)?.as_bytes())?;
    if command.starts_with('/') {
        return Strings::of("command", [command]);
    }
    if command.contains('/') {
        let directory = path::container("working_dir", &process.working_directory)?;
        return Strings::of("command", [format!("{}/{command}", directory.trim_end_matches('/'))]);
    }
    let search = process.environment.iter().rev().find_map(|variable| variable.strip_prefix(b"PATH="));
    let found = search_paths(search.unwrap_or_default(), command)?;
    if found.is_empty() { search_paths(PATH_DEFAULT.as_bytes(), command) } else { Ok(found) }
}

fn search_paths(search: &[u8], command: &str) -> Result<Strings, Error> {
    let directories = search.split(|byte| *byte == b':').filter(|part| part.starts_with(b"/"));
    let candidates =
        directories.take(PATH_PARTS_MAX).map(|directory| [directory, b"/", command.as_bytes()].concat());
    Strings::of("PATH", candidates)
}
