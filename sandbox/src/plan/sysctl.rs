//! Sysctls of a pod: the names that the pod may set, depending on its namespaces, and their files below /proc/sys.
//! Rules: CRI 3.12. A sysctl outside of the pod's own namespaces would change the node and is refused.

use std::borrow::Cow;

use super::request::PodNamespaces;
use crate::Error;

/// The file of sysctl `name` relative to /proc/sys. The first separator determines the notation, as in sysctl.d(5):
/// `net.ipv4.conf.eth0/1.forwarding` and `net/ipv4/conf/eth0.1/forwarding` are the same.
///
/// # Errors
/// [`Error::Invalid`] for an invalid name, or a sysctl that is not in a namespace of the pod.
pub(super) fn path(name: &str, namespaces: PodNamespaces) -> Result<String, Error> {
    let field = || format!("sysctl {name:?}");
    let path = relative(name);
    let is_clean = path.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
    if !is_clean || path.bytes().any(|byte| byte.is_ascii_control() || byte == b' ') {
        return Err(Error::invalid(field(), "is not a name"));
    }
    match Owner::of(&path) {
        Some(Owner::Network) if !namespaces.network => {
            Err(Error::invalid(field(), "needs a network namespace of the pod's own"))
        }
        Some(Owner::Ipc) if !namespaces.ipc => {
            Err(Error::invalid(field(), "needs an IPC namespace of the pod's own"))
        }
        Some(Owner::Uts) if !namespaces.uts => {
            Err(Error::invalid(field(), "needs a UTS namespace of the pod's own"))
        }
        Some(_) => Ok(format!("/proc/sys/{path}")),
        None => Err(Error::invalid(field(), "is not of a namespace: it would change the whole node")),
    }
}

/// Whether a sysctl belongs to the network namespace.
pub(super) fn is_of_network(name: &str) -> bool {
    matches!(Owner::of(&relative(name)), Some(Owner::Network))
}

/// Whether a sysctl belongs to the UTS namespace.
pub(super) fn is_of_uts(name: &str) -> bool {
    matches!(Owner::of(&relative(name)), Some(Owner::Uts))
}

/// The name with slashes as separators.
fn relative(name: &str) -> Cow<'_, str> {
    match name.find(['.', '/']).map(|at| name.as_bytes()[at]) {
        Some(b'.') => name.chars().map(swap).collect::<String>().into(),
        _ => name.into(),
    }
}

/// Validates a value and removes surrounding spaces. An empty value changes nothing, as with runc.
///
/// # Errors
/// [`Error::Invalid`] if the value has control characters other than tabs.
pub(super) fn value<'a>(name: &str, value: &'a str) -> Result<&'a str, Error> {
    let value = value.trim();
    if value.bytes().any(|byte| byte.is_ascii_control() && byte != b'\t') {
        return Err(Error::invalid(format!("sysctl {name:?}"), format!("{value:?} is not a value")));
    }
    Ok(value)
}

/// The kind of namespace to which a sysctl belongs.
enum Owner {
    Network,
    Ipc,
    /// The domain name; the name of the host has a field of its own.
    Uts,
}

impl Owner {
    fn of(path: &str) -> Option<Self> {
        let is_ipc = path.starts_with("kernel/shm")
            || path.starts_with("kernel/msg")
            || path == "kernel/sem"
            || path.starts_with("fs/mqueue/");
        match path.split_once('/') {
            Some(("net", _)) => Some(Self::Network),
            _ if is_ipc => Some(Self::Ipc),
            _ if path == "kernel/domainname" => Some(Self::Uts),
            _ => None,
        }
    }
}

fn swap(character: char) -> char {
    match character {
        '.' => '/',
        '/' => '.',
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: PodNamespaces = PodNamespaces { network: true, ipc: true, uts: true };

    #[test]
    fn names_with_dots_and_slashes_become_paths() {
        let table = [
            ("net.ipv4.ip_forward", "/proc/sys/net/ipv4/ip_forward"),
            ("net/ipv4/ip_forward", "/proc/sys/net/ipv4/ip_forward"),
            ("net.ipv4.conf.eth0/1.forwarding", "/proc/sys/net/ipv4/conf/eth0.1/forwarding"),
            ("net/ipv4/conf/eth0.1/forwarding", "/proc/sys/net/ipv4/conf/eth0.1/forwarding"),
            ("kernel.shm_rmid_forced", "/proc/sys/kernel/shm_rmid_forced"),
            ("kernel.msgmax", "/proc/sys/kernel/msgmax"),
            ("kernel.sem", "/proc/sys/kernel/sem"),
            ("fs.mqueue.msg_max", "/proc/sys/fs/mqueue/msg_max"),
            ("kernel.domainname", "/proc/sys/kernel/domainname"),
        ];
        for (name, expected) in table {
            assert_eq!(path(name, OWN).as_deref(), Ok(expected), "{name}");
        }
    }

    #[test]
    fn what_would_change_the_node_is_refused() {
        let names = [
            "",
            "net",
            "kernel",
            "kernel.hostname",
            "kernel.core_pattern",
            "kernel.semaphore",
            "vm.swappiness",
            "fs.file-max",
            "fs.mqueue",
            "net..ipv4",
            "net.ipv4.",
            ".net.ipv4",
            "/net/ipv4/x",
            "net/../kernel/core_pattern",
            "net/./x",
            "net.ipv4.\n",
            "net. ipv4",
            "net.ipv4.x\0",
        ];
        for name in names {
            assert!(path(name, OWN).is_err(), "{name:?}");
        }
    }

    #[test]
    fn the_hosts_namespaces_are_not_touched() {
        let host = PodNamespaces { network: false, ipc: false, uts: false };
        for name in ["net.ipv4.ip_forward", "kernel.shmall", "fs.mqueue.msg_max", "kernel.domainname"] {
            assert!(path(name, host).is_err(), "{name}");
        }
    }

    #[test]
    fn values_are_trimmed_and_one_line() {
        assert_eq!(value("x", " 0  2147483647 \n"), Ok("0  2147483647"));
        assert_eq!(value("x", " "), Ok(""), "which changes nothing");
        for bad in ["1\n2", "1\0"] {
            assert!(value("x", bad).is_err(), "{bad:?}");
        }
    }
}
