//! Paths of all files of a pod. They are derived from IDs before anything is created, so one intent record is
//! sufficient to undo a pod.
//!
//! | path | content |
//! |---|---|
//! | `ROOT/pods/POD/record` | the pod's record |
//! | `ROOT/pods/POD/{hostname,hosts,resolv.conf}` | files of its containers in /etc |
//! | `ROOT/pods/POD/containers/CTR/record` | a container's record |
//! | `ROOT/pods/POD/containers/CTR/{upper,work}` | its writable layer |
//! | `ROOT/pods/POD/containers/CTR/empty` | an empty directory, if it has image volumes |
//! | `STATE/pods/POD/monitor.sock`, `monitor.pid`, `exits/` | files of the monitor (see `coracle_sandbox::monitor`) |
//! | `STATE/pods/POD/{shm,root}` | mount points in the monitor's mount namespace |
//! | `STATE/pods/POD/record`, `records/CTR` | notes: newer than the records, until the next boot (see `record`) |
//! | `STATE/pods/POD/plans/CTR` | a container's plan, until it has been started |
//! | `STATE/pods/POD/confinement/CTR` | a container's confinement, which its execs get, too |
//! | `STATE/pods/POD/bundle/CTR/config.json` | the OCI bundle for hooks, if the container has hooks |
//! | `STATE/pods/POD/stopping/CTR` | a stop in progress: the time of SIGKILL, and whether the stop signal is due |
//! | `ROOT/spare/N` | spare files for new records (see `coracle_base::store::Slots`) |
//! | `/run/netns/coracle-POD` | the network namespace (32 of the 64 digits), for CNI plugins |
//! | cgroup `PARENT/POD`, `PARENT/CTR` | the monitor's and each container's cgroup |

use std::path::{Path, PathBuf};

use coracle_base::error::{Error, Kind};
use coracle_sandbox::cgroup::{self, CgroupPath};
use coracle_sandbox::{ContainerId, PodId};

/// The daemon's two top directories.
#[derive(Clone, Debug)]
pub struct Paths {
    /// The directory `--root`.
    pub root: PathBuf,
    /// The directory `--state`.
    pub state: PathBuf,
}

/// File name of a record.
pub(crate) const RECORD: &str = "record";

impl Paths {
    pub(crate) fn pods(&self) -> PathBuf {
        self.root.join("pods")
    }

    pub(crate) fn pod(&self, pod: PodId) -> PathBuf {
        self.pods().join(pod.to_string())
    }

    pub(crate) fn containers(&self, pod: PodId) -> PathBuf {
        self.pod(pod).join("containers")
    }

    pub(crate) fn container(&self, pod: PodId, container: ContainerId) -> PathBuf {
        self.containers(pod).join(container.to_string())
    }

    pub(crate) fn pods_state(&self) -> PathBuf {
        self.state.join("pods")
    }

    pub(crate) fn pod_state(&self, pod: PodId) -> PathBuf {
        self.pods_state().join(pod.to_string())
    }

    pub(crate) fn shm(&self, pod: PodId) -> PathBuf {
        self.pod_state(pod).join("shm")
    }

    pub(crate) fn root_mountpoint(&self, pod: PodId) -> PathBuf {
        self.pod_state(pod).join("root")
    }

    pub(crate) fn plans(&self, pod: PodId) -> PathBuf {
        self.pod_state(pod).join("plans")
    }

    pub(crate) fn confinement(&self, pod: PodId) -> PathBuf {
        self.pod_state(pod).join("confinement")
    }

    pub(crate) fn records(&self, pod: PodId) -> PathBuf {
        self.pod_state(pod).join("records")
    }

    pub(crate) fn stopping(&self, pod: PodId) -> PathBuf {
        self.pod_state(pod).join("stopping")
    }

    pub(crate) fn bundle(&self, pod: PodId) -> PathBuf {
        self.pod_state(pod).join("bundle")
    }

    /// The directory of trees that are to be removed: the daemon renames a tree into it, and a worker removes
    /// it.
    pub(crate) fn garbage(&self) -> PathBuf {
        self.root.join("garbage")
    }
}

/// The file of a pod's network namespace, in `/run/netns`, where plugins in other mount namespaces search for
/// it.
pub fn netns(pod: PodId) -> PathBuf {
    Path::new("/run/netns").join(format!("coracle-{pod:.32}"))
}

/// The cgroup `PARENT/ID`, or `PARENT/coracle-ID.scope`: cAdvisor and other tools recognise a container's
/// cgroup by the 64 digits of its ID.
pub(crate) fn cgroup(parent: &str, is_scope: bool, id: &impl std::fmt::Display) -> Result<CgroupPath, Error> {
    let parent = parent.trim_end_matches('/');
    let path = match is_scope {
        true => format!("{parent}/{}", cgroup::scope(id)),
        false => format!("{parent}/{id}"),
    };
    CgroupPath::parse(&path).map_err(|error| {
        Error::new(Kind::InvalidArgument, format!("config.linux.cgroup_parent: {parent:?}: {error}"))
    })
}
