//! Cgroups in all hierarchies: nine of version 1 beside an empty one of version 2 (hybrid), or one of version
//! 2.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use crate::{Outcome, failed};

/// Devices that each container may use (docs/specs/cri.md): the lines that coracle writes to `devices.allow`.
const DEVICES: [&str; 10] = [
    "c *:* m",
    "b *:* m",
    "c 1:3 rwm",
    "c 1:5 rwm",
    "c 1:7 rwm",
    "c 1:8 rwm",
    "c 1:9 rwm",
    "c 5:0 rwm",
    "c 5:2 rwm",
    "c 136:* rwm",
];

/// The hierarchies of this machine, and a parent of this process in each.
#[derive(Debug)]
pub(crate) struct Cgroups {
    /// Mount points of version 1.
    v1: Vec<PathBuf>,
    /// Mount point of version 2.
    v2: PathBuf,
    /// Name of the parent.
    parent: String,
}

/// A pod's or container's cgroup in all hierarchies.
#[derive(Debug)]
pub(crate) struct Cgroup {
    /// Directories of version 1.
    pub(crate) v1: Vec<PathBuf>,
    /// Directory of version 2, which processes are cloned into.
    pub(crate) v2: PathBuf,
}

/// Writes a value with one system call, as the kernel requires.
///
/// # Errors
/// The path with the error of the kernel.
pub(crate) fn write(path: &Path, value: &str) -> Outcome<()> {
    let written =
        OpenOptions::new().write(true).open(path).and_then(|mut file| file.write_all(value.as_bytes()));
    written.map_err(|error| failed(&format!("write {value:?} to {}", path.display()), error))
}

fn make(path: &Path) -> Outcome<()> {
    fs::create_dir(path).map_err(|error| failed(&format!("make {}", path.display()), error))
}

impl Cgroups {
    /// Finds the hierarchies and creates the parent in each.
    ///
    /// # Errors
    /// The error of the kernel; a machine without version 2 is one, because `clone3` needs it.
    pub(crate) fn new(parent: String) -> Outcome<Cgroups> {
        let text =
            fs::read_to_string("/proc/self/mountinfo").map_err(|error| failed("read mountinfo", error))?;
        let points = |kind: &str| -> Vec<PathBuf> {
            let of_kind = text.lines().filter_map(|line| line.split_once(" - "));
            let of_kind = of_kind.filter(|(_, right)| right.split(' ').next() == Some(kind));
            of_kind.filter_map(|(left, _)| left.split(' ').nth(4)).map(PathBuf::from).collect()
        };
        let v2 = points("cgroup2").pop().ok_or("no cgroup of version 2 is mounted")?;
        let cgroups = Cgroups { v1: points("cgroup"), v2, parent };
        for root in cgroups.v1.iter().chain([&cgroups.v2]) {
            let folder = root.join(&cgroups.parent);
            make(&folder)?;
            if folder.join("cpuset.cpus").exists() && cgroups.v1.contains(root) {
                for file in ["cpuset.cpus", "cpuset.mems"] {
                    let all = fs::read_to_string(root.join(file)).map_err(|error| failed(file, error))?;
                    write(&folder.join(file), all.trim())?;
                }
                write(&folder.join("cgroup.clone_children"), "1")?;
            }
        }
        let folder = cgroups.v2.join(&cgroups.parent);
        let available = fs::read_to_string(folder.join("cgroup.controllers")).unwrap_or_default();
        for name in available.split_whitespace() {
            write(&folder.join("cgroup.subtree_control"), &format!("+{name}"))?;
        }
        Ok(cgroups)
    }

    /// Whether controllers are in hierarchies of version 1.
    pub(crate) fn is_hybrid(&self) -> bool {
        !self.v1.is_empty()
    }

    /// Creates a cgroup in every hierarchy.
    ///
    /// # Errors
    /// The error of the kernel.
    pub(crate) fn make(&self, name: &str) -> Outcome<Cgroup> {
        let within = |root: &PathBuf| root.join(&self.parent).join(name);
        let cgroup = Cgroup { v1: self.v1.iter().map(within).collect(), v2: within(&self.v2) };
        cgroup.v1.iter().chain([&cgroup.v2]).try_for_each(|path| make(path))?;
        Ok(cgroup)
    }

    /// Kills all processes of this process's cgroups and removes the cgroups, as far as possible.
    pub(crate) fn sweep(&self) {
        // The caller reaps the processes.
        let _ = write(&self.v2.join(&self.parent).join("cgroup.kill"), "1");
        while nix::sys::wait::wait().is_ok() {}
        for root in self.v1.iter().chain([&self.v2]) {
            remove(&root.join(&self.parent));
        }
    }
}

/// Removes a cgroup with its descendants, as far as possible.
fn remove(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove(&entry.path());
        }
    }
    let _ = fs::remove_dir(folder);
}

impl Cgroup {
    /// Restricts devices, if that is done by a hierarchy of version 1.
    ///
    /// # Errors
    /// The error of the kernel.
    pub(crate) fn restrict_devices(&self) -> Outcome<()> {
        let Some(folder) = self.v1.iter().find(|path| path.starts_with("/sys/fs/cgroup/devices")) else {
            return Ok(());
        };
        write(&folder.join("devices.deny"), "a")?;
        DEVICES.iter().try_for_each(|line| write(&folder.join("devices.allow"), line))
    }

    /// Moves the calling process into the cgroups of version 1.
    ///
    /// # Errors
    /// The error of the kernel.
    pub(crate) fn enter_v1(&self) -> Outcome<()> {
        self.v1.iter().try_for_each(|path| write(&path.join("tasks"), "0"))
    }

    /// Opens the directory for `clone3`.
    ///
    /// # Errors
    /// The error of the kernel.
    pub(crate) fn open(&self) -> Outcome<OwnedFd> {
        let opened = File::open(&self.v2).map(OwnedFd::from);
        opened.map_err(|error| failed(&format!("open {}", self.v2.display()), error))
    }

    /// The cgroup of an exec: a directory of its own in version 2, the container's cgroups in version 1.
    ///
    /// # Errors
    /// The error of the kernel.
    pub(crate) fn exec(&self, name: &str) -> Outcome<Cgroup> {
        let cgroup = Cgroup { v1: self.v1.clone(), v2: self.v2.join(name) };
        make(&cgroup.v2)?;
        Ok(cgroup)
    }

    /// Kills all processes.
    ///
    /// # Errors
    /// The error of the kernel.
    pub(crate) fn kill(&self) -> Outcome<()> {
        write(&self.v2.join("cgroup.kill"), "1")
    }

    /// Removes the cgroup, which must be empty, with those of its execs.
    ///
    /// # Errors
    /// The error of the kernel.
    pub(crate) fn remove(&self, execs: &[String]) -> Outcome<()> {
        let execs = execs.iter().map(|name| self.v2.join(name));
        let all = execs.chain(self.v1.iter().cloned()).chain([self.v2.clone()]);
        all.into_iter().try_for_each(|path| {
            fs::remove_dir(&path).map_err(|error| failed(&format!("remove {}", path.display()), error))
        })
    }
}
