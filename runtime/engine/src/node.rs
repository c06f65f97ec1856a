//! The environment of pods: kernel features and programs of this node, and the parts of the daemon that the
//! engine uses. The caller of the engine creates it; only values in cells change afterwards.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::rc::Rc;

use coracle_base::error::{Error, Kind};
use coracle_base::hostpath::HostPaths;
use coracle_base::store::Slots;
use coracle_base::workers::Workers;
use coracle_images::Images;
use coracle_network::Network;
use coracle_sandbox::base_mount_ns::BaseMountNamespace;
use coracle_sandbox::cgroup::{Cgroups, Driver, slice};
use coracle_sandbox::monitor::Program;

use crate::clock::Clock;
use crate::modules::Modules;
use crate::paths::Paths;

/// The environment of pods and containers.
pub struct Node {
    /// Directories of records and runtime files.
    pub paths: Paths,
    /// Features of the kernel and data of this boot.
    pub kernel: Kernel,
    /// The cgroup hierarchies of this kernel.
    pub cgroups: Cgroups,
    /// The cgroup driver and the parent cgroup of pods.
    pub placement: Placement,
    /// Starts monitors of pods.
    pub monitors: Monitors,
    /// The network of pods.
    pub network: PodNetworks,
    /// The images of containers.
    pub images: Rc<Images>,
    /// Access to the node's files and devices, and worker processes.
    pub host: Host,
}

/// Features of the kernel and data of this boot.
pub struct Kernel {
    /// ID of the boot, from `/proc/sys/kernel/random/boot_id`.
    pub boot: String,
    /// Wall clock for records.
    pub clock: Clock,
    /// Capabilities in the daemon's bounding set, as a bit mask: those of `ALL` and of privileged containers
    /// (CRI 3.3).
    pub capabilities: u64,
    /// Whether pods can have user namespaces; the error is the reason why not.
    pub user_namespaces: Result<(), String>,
    /// State of AppArmor and SELinux on this node.
    pub modules: Modules,
    /// Whether mounts can be recursively read-only (`mount_setattr` with AT_RECURSIVE: Linux 5.12).
    pub has_recursive_read_only: bool,
}

/// The configured location of pods' cgroups.
pub struct Placement {
    /// The cgroup driver: cgroupfs or systemd.
    pub driver: Driver,
    /// Default cgroup parent of pods.
    pub parent: String,
}

impl Placement {
    /// The cgroup parent of a pod that requests `asked`; the default parent if `asked` is empty.
    ///
    /// # Errors
    /// `InvalidArgument` with the systemd driver if `asked` is not a slice.
    pub(crate) fn parent_of(&self, asked: &str) -> Result<String, Error> {
        if asked.is_empty() {
            return Ok(self.parent.clone());
        }
        match self.driver {
            // With cgroupfs, the name of a slice is an ordinary directory, and may come without a leading
            // slash or with one at its end.
            Driver::Cgroupfs => Ok(format!("/{}", asked.trim_matches('/'))),
            Driver::Systemd => slice(asked).map(|path| path.to_string()).map_err(|error| {
                Error::new(Kind::InvalidArgument, format!("config.linux.cgroup_parent: {error}"))
            }),
        }
    }
}

/// The program and the mount namespace for starting monitors.
pub struct Monitors {
    /// The program `coracle-pod`, in a sealed memory file.
    pub program: Program,
    /// Directories with layers outside of the directories of the daemon, which may be absent.
    additional_stores: Vec<PathBuf>,
    base: RefCell<Option<Rc<BaseMountNamespace>>>,
}

impl Monitors {
    /// Creates the starter for this program, with the directories of additional stores. The base mount namespace is created with
    /// the first monitor.
    pub fn new(program: Program, additional_stores: Vec<PathBuf>) -> Self {
        Self { program, additional_stores, base: RefCell::default() }
    }

    /// The mount namespace that each monitor copies; contains the directories of `paths` and the additional stores. Created with the
    /// first monitor or exec, and again after another program has removed or mounted one of the directories.
    pub(crate) fn base(&self, paths: &Paths) -> Result<Rc<BaseMountNamespace>, Error> {
        let current = self.base.borrow().clone().filter(|base| base.is_current());
        if let Some(base) = current {
            return Ok(base);
        }
        let base = Rc::new(BaseMountNamespace::make(&[&paths.root, &paths.state], &self.additional_stores)?);
        *self.base.borrow_mut() = Some(Rc::clone(&base));
        Ok(base)
    }

    /// Opens /dev/null for a standard stream of an exec.
    ///
    /// # Errors
    /// No descriptor is free, or the base mount namespace cannot be made.
    pub(crate) fn null(&self, paths: &Paths) -> Result<OwnedFd, Error> {
        let base = self.base.borrow().clone();
        let base = base.map_or_else(|| self.base(paths), Ok)?;
        Ok(base.open_null()?)
    }
}

/// The network of pods.
pub struct PodNetworks {
    /// The node's CNI network.
    pub cni: Rc<Network>,
    /// The node's pod CIDR from UpdateRuntimeConfig; empty: not set.
    pub pod_cidr: RefCell<String>,
}

/// Access to the node's disks, files and devices.
pub struct Host {
    /// Starts worker processes.
    pub workers: Rc<Workers>,
    /// Accesses paths whose file system may not respond.
    pub paths: Rc<HostPaths>,
    /// Writes the durable records of pods and containers.
    pub records: Rc<Slots>,
    /// Directories of CDI specs.
    pub cdi_directories: Vec<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: a parent with a slash at its end was refused.
    #[test]
    fn a_cgroup_parent_may_have_slashes_around_it() {
        let placement = Placement { driver: Driver::Cgroupfs, parent: "/coracle".to_owned() };
        for (asked, expected) in
            [("", "/coracle"), ("/a/b", "/a/b"), ("a.slice", "/a.slice"), ("/a/b//", "/a/b"), ("/", "/")]
        {
            assert_eq!(placement.parent_of(asked).unwrap(), expected, "{asked:?}");
        }
    }
}
