//! Where everything of a pod is: every name is derived from ids, before anything is made, so that one intent record is
//! enough to undo a pod whatever happened in between.
//!
//! | path | holds |
//! |---|---|
//! | `ROOT/pods/POD/record` | the pod's record |
//! | `ROOT/pods/POD/{hostname,hosts,resolv.conf}` | files its containers see in /etc |
//! | `ROOT/pods/POD/containers/CTR/record` | a container's record |
//! | `ROOT/pods/POD/containers/CTR/{upper,work}` | its writable layer |
//! | `ROOT/pods/POD/containers/CTR/empty` | stays empty, where it has image volumes |
//! | `STATE/pods/POD/monitor.sock`, `monitor.pid`, `exits/` | the monitor's (see `coracle_sandbox::monitor`) |
//! | `STATE/pods/POD/{shm,root}` | mount points in the monitor's mount namespace |
//! | `STATE/pods/POD/record`, `records/CTR` | notes: what is newer than the records, until the next boot (see `record`) |
//! | `STATE/pods/POD/launch/CTR` | a created container's launch record |
//! | `STATE/pods/POD/bundle/CTR/config.json` | what hooks read of a container, where it has any |
//! | `STATE/pods/POD/started/CTR` | when it was started, and its pid |
//! | `STATE/pods/POD/stopping/CTR` | when a stop that is under way will kill |
//! | `/run/netns/coracle-POD` | the network namespace (32 of the 64 digits), for CNI plugins |
//! | cgroup `PARENT/POD`, `PARENT/CTR` | the monitor's and each container's cgroup |

use std::path::{Path, PathBuf};

use coracle_base::error::{Error, Kind};
use coracle_sandbox::cgroup::{self, CgroupPath};
use coracle_sandbox::{ContainerId, PodId};

/// The two directories everything lies below.
#[derive(Clone, Debug)]
pub struct Paths {
    /// `--root`
    pub root: PathBuf,
    /// `--state`
    pub state: PathBuf,
}

/// Name of a record's file in its directory.
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

    pub(crate) fn launch(&self, pod: PodId) -> PathBuf {
        self.pod_state(pod).join("launch")
    }

    pub(crate) fn records(&self, pod: PodId) -> PathBuf {
        self.pod_state(pod).join("records")
    }

    pub(crate) fn started(&self, pod: PodId) -> PathBuf {
        self.pod_state(pod).join("started")
    }

    pub(crate) fn stopping(&self, pod: PodId) -> PathBuf {
        self.pod_state(pod).join("stopping")
    }

    pub(crate) fn bundle(&self, pod: PodId) -> PathBuf {
        self.pod_state(pod).join("bundle")
    }

    /// Trees on their way out: a rename takes them here, a worker deletes them.
    pub(crate) fn garbage(&self) -> PathBuf {
        self.root.join("garbage")
    }
}

/// The network namespace's file. On `/run/netns`, where plugins in other mount namespaces look for it.
pub fn netns(pod: PodId) -> PathBuf {
    Path::new("/run/netns").join(format!("coracle-{pod:.32}"))
}

/// `PARENT/ID`, or `PARENT/coracle-ID.scope`: what cAdvisor and others recognise as a container's cgroup by its 64 digits.
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
