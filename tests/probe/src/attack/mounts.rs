//! Mounts: removing masks, mounting kernel file systems again, and both again as root of a user namespace.

use std::fs;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

use super::{files, trace, verdict};
use crate::see::Outcome;

/// File systems that show or change the node.
const KERNEL: [&str; 14] = [
    "proc",
    "sysfs",
    "cgroup",
    "cgroup2",
    "debugfs",
    "tracefs",
    "securityfs",
    "bpf",
    "configfs",
    "fusectl",
    "mqueue",
    "pstore",
    "devtmpfs",
    "binfmt_misc",
];

/// Masked paths of the kubelet that every kernel has.
const MASKED: [&str; 4] = ["/proc/keys", "/proc/interrupts", "/proc/timer_list", "/sys/firmware"];

/// Unmounts everything, makes read-only mounts writable, binds and moves over masks, mounts the kernel's file
/// systems.
pub(crate) fn all() -> Outcome {
    let folder = "/tmp/attack-mounts";
    fs::create_dir_all(folder).map_err(|error| format!("make {folder}: {error}"))?;
    for kind in KERNEL {
        // Its own cgroups are also available in /sys/fs/cgroup.
        let data = (kind == "cgroup").then_some("devices");
        let made = mount(Some("none"), folder, Some(kind), MsFlags::empty(), data);
        verdict(&format!("mount {kind}"), made);
        if made.is_ok() {
            let _ = umount2(folder, MntFlags::MNT_DETACH);
        }
    }
    // Without the masks below it.
    verdict("bind /proc alone", bind("/proc", folder, MsFlags::empty()));
    let whole = bind("/proc", folder, MsFlags::MS_REC);
    verdict("bind /proc", whole);
    let text = fs::read_to_string("/proc/self/mountinfo").map_err(|error| format!("mountinfo: {error}"))?;
    let mounts = text.lines().rev().filter_map(|line| {
        let mut words = line.split(' ').skip(4);
        Some((words.next()?, words.next()?))
    });
    let theirs: Vec<(&str, &str)> = mounts.filter(|(place, _)| !place.starts_with(folder)).collect();
    for (place, _) in theirs.iter().filter(|(_, options)| options.split(',').any(|option| option == "ro")) {
        let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND;
        let changed = mount(None::<&str>, *place, None::<&str>, flags, None::<&str>);
        verdict(&format!("remount {place}"), changed);
    }
    for (place, _) in theirs.iter().filter(|(place, _)| *place != "/") {
        verdict(&format!("umount {place}"), umount2(*place, MntFlags::MNT_DETACH));
    }
    let copies: Vec<String> = MASKED
        .iter()
        .filter_map(|path| path.strip_prefix("/proc"))
        .map(|path| format!("{folder}{path}"))
        .collect();
    if whole.is_ok() {
        files::masks(&copies.iter().map(String::as_str).collect::<Vec<_>>())?;
    }
    files::masks(&MASKED)
}

fn bind(from: &str, to: &str, more: MsFlags) -> nix::Result<()> {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND | more, None::<&str>)
}

/// All attacks as root of a new user and mount namespace, if the kernel permits them.
pub(crate) fn unshared() -> Outcome {
    if let Err(errno) = unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS) {
        println!("held user namespace: {errno}");
        return Ok(0);
    }
    println!("saw a user namespace of its own");
    all()
}

/// Enters a user namespace without mappings and sleeps: an exec that joined it would fail.
pub(crate) fn user_namespace() -> Outcome {
    unshare(CloneFlags::CLONE_NEWUSER).map_err(|errno| format!("unshare: {errno}"))?;
    println!("unshared");
    trace::again(&["true"]);
    crate::act::sleep_forever()
}
