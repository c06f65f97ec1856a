//! Compiles the pod's setup record, which the monitor executes once in the pod's namespaces before it accepts requests.

use coracle_wire::{Op, Propagation, Text};

use super::record::{Record, c_string};
use super::request::{PodNamespaces, SandboxPlan};
use super::{overlay, path, process, sysctl};
use crate::Error;
use crate::userns::UserMappings;

/// Maximum length of a host name in bytes (`__NEW_UTS_LEN`).
const HOST_NAME_BYTES_MAX: usize = 64;

/// Mount flags of the pod's /dev/shm: MS_NOSUID, MS_NODEV, MS_NOEXEC, as in containerd.
const SHM_FLAGS: u64 = 2 | 4 | 8;

/// Sysctls that containerd 2 sets in a pod's network namespace, with their values: low ports and pings need no
/// capability.
const CONVENIENCE: [(&str, &str); 2] =
    [("net.ipv4.ip_unprivileged_port_start", "0"), ("net.ipv4.ping_group_range", "0 2147483647")];

pub(super) fn compile(plan: &SandboxPlan) -> Result<Vec<u8>, Error> {
    let mut record = Record::new(coracle_wire::VERSION);
    if let Some(score) = plan.oom_score_adj {
        process::oom_score(&mut record, score)?;
    }
    // Propagation first: later mounts in this namespace do not propagate to the host, but the host's mounts still
    // propagate here, for volumes that request it.
    record.push(&Op::RootPropagation { propagation: Propagation::Slave })?;
    if plan.shares_pids {
        record.push(&Op::SharedPidNamespace)?;
    }
    if plan.namespaces.ipc {
        let target = path::host("shm_directory", &plan.shm_directory)?;
        record.push(&Op::Tmpfs {
            options: Text::new(&shm_options(plan)?),
            target: Text::new(&target),
            flags: SHM_FLAGS,
        })?;
    }
    if plan.namespaces.uts {
        record.push(&Op::HostName { name: host_name(&plan.host_name)? })?;
    }
    if plan.namespaces.network {
        record.push(&Op::LoopbackUp)?;
    }
    own_sysctls(&mut record, plan, sysctl::is_of_uts)?;
    // Sysctls of the IPC namespace are writable only for the root of its user namespace (Linux, ipc/ipc_sysctl.c), the domain name
    // only for the node's root.
    if let Some((uid, gid)) = plan.user_namespace.as_ref().map(UserMappings::root) {
        record.push(&Op::ActAs { uid, gid })?;
        sysctls(&mut record, plan)?;
        record.push(&Op::ActAs { uid: 0, gid: 0 })?;
    } else {
        sysctls(&mut record, plan)?;
    }
    Ok(record.finish().bytes)
}

fn shm_options(plan: &SandboxPlan) -> Result<std::ffi::CString, Error> {
    let (uid, gid) = plan.user_namespace.as_ref().map_or((0, 0), UserMappings::root);
    let owner = if plan.user_namespace.is_some() { format!(",uid={uid},gid={gid}") } else { String::new() };
    let mut options = format!("mode=1777,size=65536k{owner}").into_bytes();
    overlay::label(plan.label.as_deref(), &mut options);
    c_string("shm", &options)
}

fn host_name(name: &str) -> Result<&[u8], Error> {
    let is_plain = name.bytes().all(|byte| byte.is_ascii_graphic());
    if name.is_empty() || name.len() > HOST_NAME_BYTES_MAX || !is_plain {
        return Err(Error::invalid(
            "hostname",
            format!("{name:?} is not 1 to {HOST_NAME_BYTES_MAX} plain characters"),
        ));
    }
    Ok(name.as_bytes())
}

/// Adds the writes of sysctls: first the convenience sysctls, then the pod's own in their order, except those that
/// [`network_sysctls`] returns; each file is written only once.
fn sysctls(record: &mut Record, plan: &SandboxPlan) -> Result<(), Error> {
    let of_network = network_sysctls(&plan.sysctls, plan.namespaces)?;
    if plan.convenience_sysctls && plan.namespaces.network {
        for (name, value) in CONVENIENCE {
            if name.ends_with("ping_group_range") && plan.user_namespace.is_some() {
                continue; // not all groups of the range are mapped
            }
            let path = sysctl::path(name, plan.namespaces)?;
            if !of_network.iter().any(|(other, _)| *other == path) {
                // Optional, because it was not requested explicitly, and a kernel may lack the file.
                write(record, &path, value, true)?;
            }
        }
    }
    own_sysctls(record, plan, |name| !sysctl::is_of_network(name) && !sysctl::is_of_uts(name))
}

/// Writes the pod's own sysctls that are `wanted`.
fn own_sysctls(record: &mut Record, plan: &SandboxPlan, wanted: impl Fn(&str) -> bool) -> Result<(), Error> {
    for (name, value) in plan.sysctls.iter().filter(|(name, _)| wanted(name)) {
        write(record, &sysctl::path(name, plan.namespaces)?, sysctl::value(name, value)?, false)?;
    }
    Ok(())
}

/// The files and values of the pod's own sysctls that are written after its network was attached, in their order: they may name
/// its interface, and the plugins must not override them. containerd writes them with its pause container, after CNI ADD.
pub(super) fn network_sysctls(
    sysctls: &[(String, String)],
    namespaces: PodNamespaces,
) -> Result<Vec<(String, String)>, Error> {
    let of_network = sysctls.iter().filter(|(name, _)| sysctl::is_of_network(name));
    of_network
        .map(|(name, value)| Ok((sysctl::path(name, namespaces)?, sysctl::value(name, value)?.to_owned())))
        .collect()
}

fn write(record: &mut Record, path: &str, value: &str, optional: bool) -> Result<(), Error> {
    let path = c_string("sysctls", path.as_bytes())?;
    record.push(&Op::WriteFile { path: Text::new(&path), data: value.as_bytes(), optional })
}
