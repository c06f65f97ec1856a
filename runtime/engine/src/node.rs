//! What pods are made on and with: the kernel and the programs of this node, and the parts of the daemon that the engine stands on.
//! Whoever builds the engine fills it; nothing in it changes afterwards but what is in cells.

use std::cell::{OnceCell, RefCell};
use std::path::PathBuf;
use std::rc::Rc;

use coracle_base::error::{Error, Kind};
use coracle_base::hostpath::HostPaths;
use coracle_base::workers::Workers;
use coracle_images::Images;
use coracle_network::Network;
use coracle_sandbox::base_mount_ns::BaseMountNamespace;
use coracle_sandbox::cgroup::{Cgroups, Driver, slice};
use coracle_sandbox::monitor::Program;

use crate::clock::Clock;
use crate::modules::Modules;
use crate::paths::Paths;

/// All of it.
pub struct Node {
    /// Where records and runtime files are.
    pub paths: Paths,
    /// What this kernel and this boot have.
    pub kernel: Kernel,
    /// The cgroup hierarchies of this kernel.
    pub cgroups: Cgroups,
    /// Where in them pods go.
    pub placement: Placement,
    /// What monitors are started with.
    pub monitors: Monitors,
    /// Attaches pods to their network.
    pub network: PodNetworks,
    /// What containers are made from.
    pub images: Rc<Images>,
    /// Looks at the node's files and devices, and work that must not hold the daemon up.
    pub host: Host,
}

/// What this kernel and this boot have.
pub struct Kernel {
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot: String,
    /// Wall-clock times of records.
    pub clock: Clock,
    /// The daemon's own bounding set as a bit mask: what ALL and privileged mean (CRI 3.3).
    pub capabilities: u64,
    /// Whether pods can have user namespaces of their own, or why not.
    pub user_namespaces: Result<(), String>,
    /// AppArmor and SELinux.
    pub modules: Modules,
    /// Whether mounts can be read-only with all that is below them (`mount_setattr` with AT_RECURSIVE: Linux 5.12).
    pub has_recursive_read_only: bool,
}

/// Where cgroups go.
pub struct Placement {
    /// Who makes cgroups.
    pub driver: Driver,
    /// Parent of the cgroups of pods that name none.
    pub parent: String,
}

impl Placement {
    /// The parent of a pod's cgroups whose request names `asked`; empty: it names none.
    ///
    /// # Errors
    /// `InvalidArgument` for what is no slice where systemd makes cgroups.
    pub(crate) fn parent_of(&self, asked: &str) -> Result<String, Error> {
        if asked.is_empty() {
            return Ok(self.parent.clone());
        }
        match self.driver {
            // The name of a slice is a directory's, too, and it may come without a path.
            Driver::Cgroupfs => Ok(format!("/{}", asked.trim_start_matches('/'))),
            Driver::Systemd => slice(asked).map(|path| path.to_string()).map_err(|error| {
                Error::new(Kind::InvalidArgument, format!("config.linux.cgroup_parent: {error}"))
            }),
        }
    }
}

/// What monitors are started with.
pub struct Monitors {
    /// The program `coracle-pod`, sealed in memory.
    pub program: Program,
    base: OnceCell<BaseMountNamespace>,
}

impl Monitors {
    /// Monitors of this program. Their base mount namespace is made with the first one.
    pub fn new(program: Program) -> Self {
        Self { program, base: OnceCell::new() }
    }

    /// The mount namespace that monitors are started in a copy of, with the directories of `paths`; made with the first monitor.
    pub(crate) fn base(&self, paths: &Paths) -> Result<&BaseMountNamespace, Error> {
        if let Some(base) = self.base.get() {
            return Ok(base);
        }
        let base = BaseMountNamespace::make(&[&paths.root, &paths.state])?;
        Ok(self.base.get_or_init(|| base))
    }
}

/// The network of pods.
pub struct PodNetworks {
    /// The node's CNI network.
    pub cni: Rc<Network>,
    /// The node's range as UpdateRuntimeConfig gave it; empty: not known.
    pub pod_cidr: RefCell<String>,
}

/// The node's files and devices.
pub struct Host {
    /// Starts worker processes.
    pub workers: Rc<Workers>,
    /// Looks at paths that may not answer.
    pub paths: Rc<HostPaths>,
    /// Where CDI spec files are.
    pub cdi_directories: Vec<PathBuf>,
}
