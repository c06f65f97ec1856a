//! The cgroupfs driver for v2, v1, and hybrid hosts, which have v1 controllers and a cgroup2 mount without controllers.
//!
//! ```text
//!   make ─► apply ─► entry ─► (the process is cloned into it, or writes itself in) ─► kill ─► unmake
//! ```
//! On v2 a cgroup is one directory; on v1 there is one in every hierarchy. The cgroup2 mount of a hybrid host has no
//! limits, but it supports CLONE_INTO_CGROUP, listing and `cgroup.kill`, so containers are in it too. Each function
//! makes a few system calls on an in-memory file system. Module `systemd` has the systemd driver. Rules: CRI 3.14 and
//! CRI 3.15; Documentation/admin-guide/cgroup-v2.rst; docs/notes/001-cgroups-rs.md.

mod controllers;
mod detail;
mod devices;
mod files;
mod gauge;
mod layout;
mod limits;
mod path;
mod processes;
mod resources;
mod systemd;

use std::path::{Path, PathBuf};

use nix::errno::Errno;

use crate::Error;
use crate::plan::CgroupMount;
use files::{read, write};
use layout::{Layout, Tracking};

pub use detail::{Detail, DeviceIo, Hugepages, Pressure, Stall};
pub use gauge::{BUFFER_BYTES, Gauge, MemoryUsage, Sample, SwapUsage, Usage};
pub use path::CgroupPath;
pub use processes::Entry;
pub use resources::{DeviceAccess, DeviceRule, Limits, Resources};
pub use systemd::{Driver, Property, PropertyValue, id_of_scope, scope, slice};

/// The cgroup version that sets limits. On a hybrid host this is v1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// Version 1: several hierarchies, each with some controllers.
    V1,
    /// Version 2: one hierarchy for all controllers.
    V2,
}

/// The cgroup hierarchies of the host.
#[derive(Debug)]
pub struct Cgroups {
    layout: Layout,
}

impl Cgroups {
    /// Finds the mounted hierarchies.
    ///
    /// # Errors
    /// [`Error::Kernel`] if /proc cannot be read, [`Error::Invalid`] if no cgroup file system is mounted.
    pub fn probe() -> Result<Self, Error> {
        let mountinfo = "/proc/self/mountinfo";
        let text = std::fs::read(mountinfo).map_err(|error| Error::io("read", mountinfo, &error))?;
        Self::from_mountinfo(&String::from_utf8_lossy(&text))
    }

    /// Finds the hierarchies in the text of a mountinfo file, for tests of a host with fewer mounts.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the text contains no cgroup file system.
    pub fn from_mountinfo(text: &str) -> Result<Self, Error> {
        match Layout::parse(text) {
            Some(layout) => Ok(Self { layout }),
            None => {
                Err(Error::invalid("cgroups", "no cgroup file system is mounted, expected at /sys/fs/cgroup"))
            }
        }
    }

    /// The cgroup version that sets limits on this host.
    pub fn version(&self) -> Version {
        match self.layout {
            Layout::Unified { .. } => Version::V2,
            Layout::Legacy { .. } => Version::V1,
        }
    }

    /// Whether this host has `controller` (`memory`, `cpu`, …).
    pub fn has_controller(&self, controller: &str) -> bool {
        match &self.layout {
            Layout::Unified { mount } => {
                read(&mount.join("cgroup.controllers")).is_ok_and(|text| has_word(&text, controller))
            }
            Layout::Legacy { .. } => self.layout.hierarchy(controller).is_some(),
        }
    }

    /// Creates the cgroup with its parents in every hierarchy; existing ones are kept. On v2 the controllers are
    /// enabled in all parents. A controller that cannot be enabled, because it is missing or because a parent contains
    /// processes, gives a warning of [`Cgroups::apply`].
    ///
    /// # Errors
    /// [`Error::Kernel`] with the directory. [`Cgroups::unmake`] removes the directories that were created.
    pub fn make(&self, path: &CgroupPath) -> Result<(), Error> {
        #[cfg(feature = "simulation")]
        if let Some(node) = crate::simulation::node() {
            return node.make_cgroup(path);
        }
        match &self.layout {
            Layout::Unified { mount } => make_below(mount, path, enable_controllers, |_, _| Ok(())),
            Layout::Legacy { hierarchies, unified } => {
                for hierarchy in hierarchies {
                    if hierarchy.controllers.iter().any(|controller| controller == "cpuset") {
                        let mount = hierarchy.mount.as_path();
                        make_leaf(mount, path, |parent, child| inherit_cpuset(mount, parent, child))?;
                    } else {
                        make_leaf(&hierarchy.mount, path, |_, _| Ok(()))?;
                    }
                }
                unified.iter().try_for_each(|mount| make_leaf(mount, path, |_, _| Ok(())))
            }
        }
    }

    /// Removes the cgroup and its descendants in every hierarchy; its parents are kept. A missing cgroup is success.
    ///
    /// # Errors
    /// [`Error::Kernel`] for the first directory that could not be removed, after all others were tried.
    /// EBUSY means that processes are still exiting, or that another program has moved a process into one of the
    /// hierarchies: the caller must retry, after [`Cgroups::kill_in_all`].
    pub fn unmake(&self, path: &CgroupPath) -> Result<(), Error> {
        #[cfg(feature = "simulation")]
        if let Some(node) = crate::simulation::node() {
            return node.unmake_cgroup(path);
        }
        let mut outcome = Ok(());
        for mount in self.mounts() {
            outcome = outcome.and(files::remove_tree(&path.below(mount)));
        }
        outcome
    }

    /// Removes the cgroup of an exec, which [`Cgroups::make_exec`] created.
    ///
    /// # Errors
    /// The errors of [`Cgroups::unmake`].
    pub fn unmake_exec(&self, path: &CgroupPath) -> Result<(), Error> {
        files::remove_tree(&self.tracking_directory(path))
    }

    /// Whether the cgroup exists in any hierarchy.
    pub fn exists(&self, path: &CgroupPath) -> bool {
        #[cfg(feature = "simulation")]
        if let Some(node) = crate::simulation::node() {
            return node.has_cgroup(path);
        }
        self.mounts().into_iter().any(|mount| path.below(mount).is_dir())
    }

    /// Whether the cgroup exists in the tracking hierarchy; systemd removes it there together with its scope.
    pub fn is_tracked(&self, path: &CgroupPath) -> bool {
        #[cfg(feature = "simulation")]
        if let Some(node) = crate::simulation::node() {
            return node.has_cgroup(path);
        }
        self.tracking_directory(path).is_dir()
    }

    /// Removes the cgroup if it is empty; otherwise keeps it.
    ///
    /// # Errors
    /// [`Error::Kernel`] for errors other than "in use" and "not found".
    pub fn unmake_if_unused(&self, path: &CgroupPath) -> Result<(), Error> {
        #[cfg(feature = "simulation")]
        if let Some(node) = crate::simulation::node() {
            return node.unmake_cgroup_if_unused(path);
        }
        for mount in self.mounts() {
            let directory = path.below(mount);
            match std::fs::remove_dir(&directory) {
                Err(error)
                    if !matches!(
                        error.raw_os_error().map(Errno::from_raw),
                        Some(Errno::EBUSY | Errno::ENOTEMPTY | Errno::ENOENT)
                    ) =>
                {
                    return Err(Error::io("remove cgroup", directory.display(), &error));
                }
                Ok(()) | Err(_) => {}
            }
        }
        Ok(())
    }

    /// The mount at /sys/fs/cgroup of a container in this cgroup.
    pub fn view(&self, path: &CgroupPath, has_cgroup_namespace: bool) -> CgroupMount {
        // Programs take a node for one with v2 if cgroup2 is mounted: the cgroup2 of a hybrid host is not shown (runc).
        let hierarchies = match &self.layout {
            Layout::Unified { .. } if has_cgroup_namespace => return CgroupMount::Namespaced,
            Layout::Unified { mount } => return CgroupMount::Host(mount.clone()),
            Layout::Legacy { hierarchies, .. } => hierarchies,
        };
        let mut directories = Vec::new();
        let mut links = Vec::new();
        for hierarchy in hierarchies {
            let name = name_of(&hierarchy.mount);
            for controller in hierarchy.controllers.iter().filter(|controller| **controller != name) {
                links.push((controller.clone(), name.clone()));
            }
            directories.push((name, path.below(&hierarchy.mount)));
        }
        CgroupMount::Legacy { directories, links }
    }

    /// All mounts in which a cgroup has a directory.
    fn mounts(&self) -> Vec<&Path> {
        match &self.layout {
            Layout::Unified { mount } => vec![mount],
            Layout::Legacy { hierarchies, unified } => {
                let legacy = hierarchies.iter().map(|hierarchy| hierarchy.mount.as_path());
                legacy.chain(unified.as_deref()).collect()
            }
        }
    }

    /// The cgroup's directory in the tracking hierarchy.
    fn tracking_directory(&self, path: &CgroupPath) -> PathBuf {
        match self.layout.tracking() {
            Tracking::Unified(mount) | Tracking::Legacy(mount) => path.below(mount),
        }
    }
}

/// Creates the cgroup's last directory with one call; usually its parents exist. ENOENT if they do not.
fn make_leaf(
    mount: &Path,
    path: &CgroupPath,
    after: impl Fn(&Path, &Path) -> Result<(), Error>,
) -> Result<(), Error> {
    let leaf = path.below(mount);
    let made = files::make_directory(&leaf);
    let finished = made.and_then(|()| after(leaf.parent().unwrap_or(mount), &leaf));
    match finished.as_ref().map_err(Error::errno) {
        // A parent is missing or has an empty cpuset (see `inherit_cpuset`).
        Err(Some(Errno::ENOENT | Errno::ENOSPC)) => make_below(mount, path, |_| (), after),
        _ => finished,
    }
}

/// Creates the directories from the mount down. `before` is called with each parent, `after` with each parent and
/// child.
fn make_below(
    mount: &Path,
    path: &CgroupPath,
    before: impl Fn(&Path),
    after: impl Fn(&Path, &Path) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut parent = mount.to_path_buf();
    for name in path.names() {
        before(&parent);
        let child = parent.join(name);
        files::make_directory(&child)?;
        after(&parent, &child)?;
        parent = child;
    }
    Ok(())
}

/// Enables the parent's controllers for its children, one by one, so that a failure of one does not affect the others.
fn enable_controllers(parent: &Path) {
    let file = parent.join("cgroup.subtree_control");
    let (Ok(has), Ok(enabled)) = (read(&parent.join("cgroup.controllers")), read(&file)) else { return };
    for controller in controllers::of_v2() {
        if has_word(&has, controller) && !has_word(&enabled, controller) {
            // Not an error: a limit that needs the controller gives a warning later.
            let _ = write(&file, &format!("+{controller}"));
        }
    }
}

/// Copies a parent's cpuset to a new v1 child, which has no CPUs and memory nodes and so accepts no processes (ENOSPC;
/// the same error is returned here if the parent has none). Only the first child of a parent is written; then
/// `cgroup.clone_children` makes the kernel copy the values for the others (cgroup-v1/cgroups.rst), except in the root,
/// which coracle does not own. This avoids writes, each of which makes the kernel examine every cpuset of the node.
fn inherit_cpuset(mount: &Path, parent: &Path, child: &Path) -> Result<(), Error> {
    for name in ["cpuset.cpus", "cpuset.mems"] {
        if read(&child.join(name))?.trim().is_empty() {
            let inherited = read(&parent.join(name))?;
            if inherited.trim().is_empty() {
                return Err(Error::kernel("inherit from", parent.join(name).display(), Errno::ENOSPC));
            }
            write(&child.join(name), inherited.trim())?;
            if parent != mount {
                // If this fails, each child is written.
                let _ = write(&parent.join("cgroup.clone_children"), "1");
            }
        }
    }
    Ok(())
}

fn has_word(text: &str, word: &str) -> bool {
    text.split_ascii_whitespace().any(|other| other == word)
}

fn name_of(mount: &Path) -> String {
    mount.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: rdma, misc and dmem were accepted in `unified` but never enabled, so that a limit on them was
    /// refused on hosts that have them.
    #[test]
    fn each_controller_that_a_request_can_limit_is_enabled() {
        let parent = std::env::temp_dir().join(format!("coracle-controllers-{}", std::process::id()));
        std::fs::create_dir_all(&parent).unwrap();
        for controller in ["cpuset", "cpu", "io", "memory", "hugetlb", "pids", "rdma", "misc", "dmem"] {
            let limits = vec![(format!("{controller}.max"), "1".to_owned())];
            let limits = Limits::from(Resources { unified: limits, ..Resources::default() });
            assert!(
                resources::writes(&limits, Version::V2, resources::Now::default()).is_ok(),
                "{controller}"
            );
            std::fs::write(parent.join("cgroup.controllers"), format!("other {controller}\n")).unwrap();
            std::fs::write(parent.join("cgroup.subtree_control"), "").unwrap();
            enable_controllers(&parent);
            let enabled = std::fs::read_to_string(parent.join("cgroup.subtree_control")).unwrap();
            assert_eq!(enabled, format!("+{controller}"));
        }
        std::fs::remove_dir_all(&parent).unwrap();
    }

    /// On v2 a cgroup can lack a controller that the host has, for example because processes are in its parent.
    #[test]
    fn an_error_of_a_missing_limit_names_its_reason() {
        let mount = std::env::temp_dir().join(format!("coracle-missing-{}", std::process::id()));
        let path = CgroupPath::parse("/k").unwrap();
        std::fs::create_dir_all(mount.join("k")).unwrap();
        std::fs::write(mount.join("cgroup.controllers"), "memory rdma\n").unwrap();
        std::fs::write(mount.join("k/cgroup.controllers"), "memory\n").unwrap();
        let cgroups = Cgroups { layout: Layout::Unified { mount: mount.clone() } };
        for (file, reason) in [
            ("misc.max", "this host has no cgroup controller misc"),
            ("rdma.max", "the cgroup controller rdma is not enabled in the parent cgroup"),
            ("memory.nope", "no such file"),
        ] {
            let resources = Resources { unified: vec![(file.into(), "1".into())], ..Resources::default() };
            let error = cgroups.apply(&path, &resources.into()).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
        let pids = Limits { pids_max: 7, ..Limits::default() };
        let expected = "pids.max not applied: this host has no cgroup controller pids";
        assert_eq!(cgroups.apply(&path, &pids).unwrap(), [expected]);
        std::fs::remove_dir_all(&mount).unwrap();
    }

    #[test]
    fn a_container_gets_the_hierarchies_of_its_node() {
        let path = CgroupPath::parse("/k/id").unwrap();
        let v2 = Cgroups { layout: Layout::Unified { mount: "/sys/fs/cgroup".into() } };
        assert_eq!(v2.view(&path, true), CgroupMount::Namespaced);
        assert_eq!(v2.view(&path, false), CgroupMount::Host("/sys/fs/cgroup".into()));
        let text = "1 1 0:1 / /c/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
            1 1 0:2 / /c/memory rw - cgroup cgroup rw,memory\n\
            1 1 0:3 / /c/systemd rw - cgroup cgroup rw,name=systemd\n\
            1 1 0:4 / /c/unified rw - cgroup2 cgroup rw\n";
        let hybrid = Cgroups { layout: Layout::parse(text).unwrap() };
        let directory = |name: &str| (name.to_string(), PathBuf::from(format!("/c/{name}/k/id")));
        let expected = CgroupMount::Legacy {
            // Not the cgroup2 beside them: programs would take the host for one with cgroup v2.
            directories: ["cpu,cpuacct", "memory", "systemd"].map(directory).to_vec(),
            links: ["cpu", "cpuacct"].map(|name| (name.to_string(), "cpu,cpuacct".to_string())).to_vec(),
        };
        assert_eq!(hybrid.view(&path, false), expected);
        assert!(hybrid.has_controller("cpuacct") && !hybrid.has_controller("pids"));
    }
}
