//! Verification that the floor's pods are real. [`pod`] checks each measured pod from outside, between the
//! measurements. [`programs`] runs pods whose programs print what they see, and compares it with what a pod of
//! coracle must see.

use std::fs;

use nix::unistd::Pid;

use crate::base::{Base, MARKER};
use crate::cgroups::Cgroup;
use crate::pod::Pod;
use crate::{Network, Outcome, failed};

/// Mounts of a container except those of cgroups: the root, proc, dev, pts, shm, mqueue, sys, and three files.
const MOUNTS: usize = 10;

fn demand(is_right: bool, what: &str) -> Outcome<()> {
    if is_right { Ok(()) } else { Err(format!("the floor is wrong: {what}")) }
}

fn read(pid: Pid, file: &str) -> Outcome<String> {
    let path = format!("/proc/{pid}/{file}");
    fs::read_to_string(&path).map_err(|error| failed(&path, error))
}

fn namespace(pid: &str, kind: &str) -> Outcome<String> {
    let path = format!("/proc/{pid}/ns/{kind}");
    let target = fs::read_link(&path).map_err(|error| failed(&path, error))?;
    Ok(target.display().to_string())
}

/// Checks a container's first process: PID 1 of its PID namespace, namespaces, mounts, cgroups.
///
/// # Errors
/// The first property that is wrong.
pub(crate) fn pod(base: &Base, network: Network, pod: &Pod<'_>) -> Outcome<()> {
    let pid = pod.container.pid;
    let status = read(pid, "status")?;
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
    demand(numbers.split_whitespace().count() == 2, "one PID namespace below that of the node")?;
    demand(numbers.split_whitespace().last() == Some("1"), "PID 1 in its PID namespace")?;
    for kind in ["pid", "mnt", "ipc", "uts", "net"] {
        let is_own = namespace(&pid.to_string(), kind)? != namespace("self", kind)?;
        let must_be = network == Network::Bridge || !["uts", "net"].contains(&kind);
        demand(is_own == must_be, &format!("whether the {kind} namespace is that of the node"))?;
    }
    mounts(&read(pid, "mountinfo")?, base)?;
    cgroups(&read(pid, "cgroup")?, &pod.container_cgroup)
}

fn mounts(text: &str, base: &Base) -> Outcome<()> {
    let root = text.lines().find(|line| line.split(' ').nth(4) == Some("/")).unwrap_or_default();
    demand(root.contains(" - overlay overlay "), "an overlay as the root")?;
    let of_cgroups = text.lines().filter(|line| line.contains(" /sys/fs/cgroup")).count();
    demand(of_cgroups >= if base.cgroups.is_hybrid() { 2 } else { 1 }, "mounts of cgroups")?;
    let all = text.lines().count();
    demand(all == MOUNTS + of_cgroups, &format!("{MOUNTS} mounts and {of_cgroups} of cgroups, not {all}"))
}

fn cgroups(text: &str, cgroup: &Cgroup) -> Outcome<()> {
    let name = cgroup.v2.file_name().unwrap_or_default().to_string_lossy();
    let inside = text.lines().filter(|line| line.ends_with(&format!("/{name}"))).count();
    demand(inside == cgroup.v1.len() + 1, &format!("{name} as the cgroup in each hierarchy: {text}"))
}

/// Runs a pod whose program prints its place, and one in which execs print theirs.
///
/// # Errors
/// The first property that is wrong, with the output.
pub(crate) fn programs(base: &Base, network: Network, number: u32) -> Outcome<()> {
    let mut first = Pod::up(base, network, number, &["see", "place", "mounts", "caps"])?;
    let seen = first.output()?;
    first.down()?;
    let has =
        |text: &str, line: &str| demand(text.lines().any(|one| one == line), &format!("{line}: {text}"));
    has(&seen, "place pid 1")?;
    has(&seen, "caps CapEff 00000000a80425fb")?;
    demand(seen.lines().any(|line| line.starts_with("mounts / ") && line.contains(" overlay ")), &seen)?;
    let mut pod = Pod::up(base, network, number + 1, &["sleep", "forever"])?;
    self::pod(base, network, &pod)?;
    let seen = pod.exec(&["see", "place", "namespaces", "caps"])?;
    has(&seen, "caps CapEff 00000000a80425fb")?;
    demand(!seen.contains("place pid 1\n"), "another process than the container's first")?;
    for kind in ["pid", "mnt", "ipc", "uts", "net"] {
        let theirs = namespace(&pod.container.pid.to_string(), kind)?;
        has(&seen, &format!("namespaces {kind} {theirs}"))?;
    }
    demand(pod.exec(&["cat", "/etc/marker"])? == MARKER, "the layer's file below the root")?;
    demand(pod.exec(&["cat", "/proc/1/cmdline"])? == "/probe\0sleep\0forever\0", "the program as PID 1")?;
    if network == Network::Bridge {
        has(&seen, "place hostname floor")?;
        let gateway = u32::from_ne_bytes(base.gateway.octets());
        let routes = pod.exec(&["cat", "/proc/net/route"])?;
        let route = format!("eth0\t00000000\t{gateway:08X}\t");
        demand(routes.lines().any(|line| line.starts_with(&route)), &format!("{route}: {routes}"))?;
        let addresses = pod.exec(&["cat", "/proc/net/fib_trie"])?;
        demand(addresses.contains(&format!("|-- {}\n", base.address())), &addresses)?;
    }
    pod.down()
}
