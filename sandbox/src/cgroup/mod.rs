//! Control groups by their files, on v2, on v1, and on hybrid hosts that have v1 controllers and
//! an empty cgroup2 mount beside them.
//!
//! ```text
//!   make ─► apply ─► entry ─► (the process is cloned into it, or writes itself in) ─► kill ─► unmake
//! ```
//! On v2 a cgroup is one directory; on v1 one in every hierarchy. A hybrid host's cgroup2 mount limits nothing, but
//! processes can be cloned into it, counted in it and killed by it, so containers are put there, too.
//! Every call is a few system calls on a file system without a disk. For the systemd driver see `systemd`.
//! Rules: CRI 3.14 and CRI 3.15; Documentation/admin-guide/cgroup-v2.rst; docs/notes/001-cgroups-rs.md.

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
pub use resources::{DeviceAccess, DeviceRule, HugepageLimit, RareLimits, Resources};
pub use systemd::{Driver, Property, PropertyValue, id_of_scope, scope, slice};

/// Which of the two interfaces sets limits. A hybrid host is v1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// A hierarchy per controller.
    V1,
    /// One for all.
    V2,
}

/// The host's cgroups.
#[derive(Debug)]
pub struct Cgroups {
    layout: Layout,
}

/// v2 controllers that are enabled for containers.
const CONTROLLERS: [&str; 6] = ["cpuset", "cpu", "io", "memory", "hugetlb", "pids"];

impl Cgroups {
    /// Looks at what is mounted.
    ///
    /// # Errors
    /// [`Error::Kernel`] where /proc cannot be read, [`Error::Invalid`] where no cgroup file system is mounted.
    pub fn probe() -> Result<Self, Error> {
        let mountinfo = "/proc/self/mountinfo";
        let text = std::fs::read(mountinfo).map_err(|error| Error::io("read", mountinfo, &error))?;
        Self::from_mountinfo(&String::from_utf8_lossy(&text))
    }

    /// As [`Cgroups::probe`], from the text of a mountinfo file: for a host as it would be with fewer mounts.
    ///
    /// # Errors
    /// [`Error::Invalid`] where no cgroup file system is in it.
    pub fn from_mountinfo(text: &str) -> Result<Self, Error> {
        match Layout::parse(text) {
            Some(layout) => Ok(Self { layout }),
            None => {
                Err(Error::invalid("cgroups", "no cgroup file system is mounted, expected at /sys/fs/cgroup"))
            }
        }
    }

    /// Which interface sets limits.
    pub fn version(&self) -> Version {
        match self.layout {
            Layout::Unified { .. } => Version::V2,
            Layout::Legacy { .. } => Version::V1,
        }
    }

    /// Whether `controller` (`memory`, `cpu`, …) can limit anything here.
    pub fn has_controller(&self, controller: &str) -> bool {
        match &self.layout {
            Layout::Unified { mount } => {
                read(&mount.join("cgroup.controllers")).is_ok_and(|text| has_word(&text, controller))
            }
            Layout::Legacy { .. } => self.layout.hierarchy(controller).is_some(),
        }
    }

    /// Makes the cgroup with its parents in every hierarchy; what is there already stays. On v2 the controllers are
    /// enabled on the way down; one that cannot be (it is not there, or a parent holds processes itself) shows as a
    /// warning of [`Cgroups::apply`].
    ///
    /// # Errors
    /// [`Error::Kernel`] naming the directory. What was made until then is undone by [`Cgroups::unmake`].
    pub fn make(&self, path: &CgroupPath) -> Result<(), Error> {
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

    /// Removes the cgroup with everything below it, in every hierarchy; its parents stay. Not there is success.
    ///
    /// # Errors
    /// [`Error::Kernel`] for the first directory that could not be removed, after all the others were tried. EBUSY
    /// means that processes are still on their way out: try again in a moment.
    pub fn unmake(&self, path: &CgroupPath) -> Result<(), Error> {
        let mut outcome = Ok(());
        for mount in self.mounts() {
            outcome = outcome.and(files::remove_tree(&path.below(mount)));
        }
        outcome
    }

    /// The same for one that [`Cgroups::make_exec`] made.
    ///
    /// # Errors
    /// As [`Cgroups::unmake`].
    pub fn unmake_exec(&self, path: &CgroupPath) -> Result<(), Error> {
        files::remove_tree(&self.tracking_directory(path))
    }

    /// Whether the cgroup is there, in any hierarchy.
    pub fn exists(&self, path: &CgroupPath) -> bool {
        self.mounts().into_iter().any(|mount| path.below(mount).is_dir())
    }

    /// Whether its directory is there by which its processes are found: the one that systemd takes away where it is its own.
    pub fn is_tracked(&self, path: &CgroupPath) -> bool {
        self.tracking_directory(path).is_dir()
    }

    /// Removes the cgroup where nothing is in it any more; one that others still use stays.
    ///
    /// # Errors
    /// [`Error::Kernel`] for anything but "still in use" and "not there".
    pub fn unmake_if_unused(&self, path: &CgroupPath) -> Result<(), Error> {
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

    /// What a container in the cgroup sees at /sys/fs/cgroup.
    pub fn view(&self, path: &CgroupPath, has_cgroup_namespace: bool) -> CgroupMount {
        let (hierarchies, unified) = match &self.layout {
            Layout::Unified { .. } if has_cgroup_namespace => return CgroupMount::Namespaced,
            Layout::Unified { mount } => return CgroupMount::Host(mount.clone()),
            Layout::Legacy { hierarchies, unified } => (hierarchies, unified),
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
        directories.extend(unified.iter().map(|mount| (name_of(mount), path.below(mount))));
        CgroupMount::Legacy { directories, links }
    }

    /// Every mount a cgroup has a directory in.
    fn mounts(&self) -> Vec<&Path> {
        match &self.layout {
            Layout::Unified { mount } => vec![mount],
            Layout::Legacy { hierarchies, unified } => {
                let legacy = hierarchies.iter().map(|hierarchy| hierarchy.mount.as_path());
                legacy.chain(unified.as_deref()).collect()
            }
        }
    }

    /// The directory by which the cgroup's processes are found.
    fn tracking_directory(&self, path: &CgroupPath) -> PathBuf {
        match self.layout.tracking() {
            Tracking::Unified(mount) | Tracking::Legacy(mount) => path.below(mount),
        }
    }
}

/// Mostly the parents are there, and ready: one call.
fn make_leaf(
    mount: &Path,
    path: &CgroupPath,
    after: impl Fn(&Path, &Path) -> Result<(), Error>,
) -> Result<(), Error> {
    let leaf = path.below(mount);
    let made = files::make_directory(&leaf);
    let finished = made.and_then(|()| after(leaf.parent().unwrap_or(mount), &leaf));
    match finished.as_ref().map_err(Error::errno) {
        // A parent is not there, or has nothing to inherit (see `inherit_cpuset`).
        Err(Some(Errno::ENOENT | Errno::ENOSPC)) => make_below(mount, path, |_| (), after),
        _ => finished,
    }
}

/// Makes the directories from the mount down. `before` is told each parent, `after` each parent and child.
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

/// Enables what the parent has for its children, one by one, as one that is refused must not take the others along.
fn enable_controllers(parent: &Path) {
    let file = parent.join("cgroup.subtree_control");
    let (Ok(has), Ok(enabled)) = (read(&parent.join("cgroup.controllers")), read(&file)) else { return };
    for controller in CONTROLLERS {
        if has_word(&has, controller) && !has_word(&enabled, controller) {
            // Not an error here: what is missing is told when a limit needs it.
            let _ = write(&file, &format!("+{controller}"));
        }
    }
}

/// A v1 cpuset starts without CPUs and memory nodes, and takes no process until it has some (ENOSPC, which is the answer here,
/// too, for a parent that has none to give). The first child of a parent gets its own from us; then the parent is told to give
/// them to the others itself (`cgroup.clone_children`, cgroup-v1/cgroups.rst), but for the root, which is everybody's. Each
/// write would have the kernel look at every cpuset of the node.
fn inherit_cpuset(mount: &Path, parent: &Path, child: &Path) -> Result<(), Error> {
    for name in ["cpuset.cpus", "cpuset.mems"] {
        if read(&child.join(name))?.trim().is_empty() {
            let inherited = read(&parent.join(name))?;
            if inherited.trim().is_empty() {
                return Err(Error::kernel("inherit from", parent.join(name).display(), Errno::ENOSPC));
            }
            write(&child.join(name), inherited.trim())?;
            if parent != mount {
                // Where that is refused, each child goes this way.
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

    #[test]
    fn what_a_container_sees() {
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
            directories: ["cpu,cpuacct", "memory", "systemd", "unified"].map(directory).to_vec(),
            links: ["cpu", "cpuacct"].map(|name| (name.to_string(), "cpu,cpuacct".to_string())).to_vec(),
        };
        assert_eq!(hybrid.view(&path, false), expected);
        assert!(hybrid.has_controller("cpuacct") && !hybrid.has_controller("pids"));
    }
}
