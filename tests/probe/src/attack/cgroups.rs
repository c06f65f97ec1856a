//! The program that the kernel executes as root when a cgroup becomes empty (CVE-2022-0492): `release_agent` and
//! `notify_on_release`, in the mounts of the container and in mounts that it makes itself.

use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

use super::trace::CAREFUL;
use super::verdict;
use crate::see::Outcome;

/// Hierarchies of v1, by their mount options; the last is new.
const HIERARCHIES: [&str; 8] =
    ["devices", "memory", "pids", "rdma", "cpu,cpuacct", "blkio", "freezer", "none,name=attack"];

/// Writes to these files, makes the mounts writable, mounts each hierarchy again, also in a cgroup namespace of its own.
pub(crate) fn all() -> Outcome {
    let folder = "/tmp/attack-cgroups";
    fs::create_dir_all(folder).map_err(|error| format!("make {folder}: {error}"))?;
    walk(Path::new("/sys/fs/cgroup"), 3);
    for place in mounts() {
        let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND;
        verdict(&format!("remount {place}"), mount(None::<&str>, &*place, None::<&str>, flags, None::<&str>));
        walk(Path::new(&place), 1);
    }
    again(folder, "");
    match unshare(CloneFlags::CLONE_NEWCGROUP | CloneFlags::CLONE_NEWNS) {
        Ok(()) => again(folder, " in a namespace of its own"),
        Err(errno) => println!("held cgroup namespace: {errno}"),
    }
    println!("saw the end");
    Ok(0)
}

/// Mount points of cgroups.
fn mounts() -> Vec<String> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let is_cgroup = |line: &&str| line.contains(" - cgroup");
    text.lines().filter(is_cgroup).filter_map(|line| Some(line.split(' ').nth(4)?.to_owned())).collect()
}

fn again(folder: &str, how: &str) {
    for options in HIERARCHIES {
        let made = mount(Some("none"), folder, Some("cgroup"), MsFlags::empty(), Some(options));
        verdict(&format!("mount cgroup {options}{how}"), made);
        if made.is_ok() {
            walk(Path::new(folder), 2);
            let _ = umount2(folder, MntFlags::MNT_DETACH);
        }
    }
}

/// Opens the files for writing in a directory and in those below it; nothing is written.
fn walk(directory: &Path, depth: u32) {
    for name in ["release_agent", "notify_on_release", "cgroup.procs"] {
        let path = directory.join(name);
        if path.exists() {
            let opened = fs::OpenOptions::new().write(true).custom_flags(CAREFUL).open(&path);
            verdict(&format!("write {}", path.display()), opened);
        }
    }
    verdict(&format!("make a cgroup in {}", directory.display()), {
        let child = directory.join("attack");
        fs::create_dir(&child).inspect(|()| drop(fs::remove_dir(&child)))
    });
    let Some(below) = depth.checked_sub(1) else { return };
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        walk(&entry.path(), below);
    }
}
