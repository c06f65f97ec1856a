//! The two compared runtimes, and their resource usage in the kernel's counters.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::PodSandboxConfig;
use coracle_tests::host;
use coracle_tests::image::Image;
use coracle_tests::node::Node;
use coracle_tests::peer::Peer;
use coracle_tests::registry::Registry;

/// Command line of the containers, whose own memory does not count.
const PAYLOAD: &str = "/probe sleep forever";

/// Names of the containers, whose logs have directories of these names.
const CONTAINERS: [&str; 3] = ["one", "echo", "chatter"];

/// Both runtimes.
pub(crate) struct Sides {
    ours: Node,
    theirs: Option<Peer>,
    /// The registry from which both pull.
    pub(crate) registry: Registry,
    // The last field, so that after a failure the daemons end before their child processes.
    cgroup: Cgroup,
}

/// A cgroup by its path in every hierarchy. Its processes are killed on drop.
struct Cgroup(String);

impl Drop for Cgroup {
    fn drop(&mut self) {
        let is_empty = || {
            let pids: Vec<i32> = host::cgroups_below(&self.0).into_iter().flat_map(processes).collect();
            for pid in &pids {
                // Fails if it has already ended.
                let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
            }
            pids.is_empty()
        };
        host::wait_within(Duration::from_secs(5), || is_empty().then_some(()));
        for folder in host::cgroups_below(&self.0) {
            let _ = fs::remove_dir(folder);
        }
        for root in host::cgroup_roots() {
            // It exists only in hierarchies that pods use.
            let _ = fs::remove_dir(root.join(&self.0));
        }
    }
}

/// The processes in a cgroup.
fn processes(folder: PathBuf) -> Vec<i32> {
    let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

/// One of the two runtimes during a measurement.
pub(crate) struct Side<'a> {
    /// Client of the runtime's CRI socket.
    pub(crate) cri: &'a Cri,
    /// Path of the runtime's CRI socket.
    pub(crate) socket: PathBuf,
    cgroup: String,
}

impl Sides {
    /// Starts both runtimes with the same network configuration.
    pub(crate) fn start() -> Sides {
        let ours = Node::with_bridge();
        let registry = Registry::start(ours.folder());
        let theirs = Peer::beside(&ours, Some(&registry));
        let cgroup = Cgroup(format!("coracle-peers-{}", std::process::id()));
        let sides = Sides { ours, theirs: Some(theirs), registry, cgroup };
        sides.adopt();
        sides
    }

    /// The coracle node.
    pub(crate) fn ours(&self) -> &Node {
        &self.ours
    }

    /// The other runtime.
    pub(crate) fn theirs(&self) -> &Peer {
        self.theirs.as_ref().expect("it is there until the end")
    }

    /// Both runtimes, coracle first.
    pub(crate) fn both(&self) -> [Side<'_>; 2] {
        let side = |cri, socket, name| Side { cri, socket, cgroup: format!("{}/{name}", self.cgroup.0) };
        [side(&self.ours, self.ours.socket(), "ours"), side(self.theirs(), self.theirs().socket(), "theirs")]
    }

    /// Calls `what` for both runtimes, coracle first.
    pub(crate) fn each<T>(&self, what: impl FnMut(&Side<'_>) -> T) -> [T; 2] {
        self.both().each_ref().map(what)
    }

    /// Imports an image into both runtimes.
    pub(crate) fn import(&self, image: &Image, name: &str) {
        self.ours.try_import(&image.oci_archive(name)).unwrap_or_else(|error| panic!("import: {error}"));
        self.theirs().import(image, name, Some(&self.registry));
    }

    /// Kills coracle and starts it again; returns the time of the start.
    pub(crate) fn spawn_ours(&mut self) -> Instant {
        self.ours.kill9();
        let begin = Instant::now();
        self.ours.spawn();
        begin
    }

    /// Kills the other runtime and starts it again; returns the time of the start.
    pub(crate) fn spawn_theirs(&mut self) -> Instant {
        let theirs = self.theirs.as_mut().expect("it is there until the end");
        theirs.kill9();
        let begin = Instant::now();
        theirs.spawn();
        begin
    }

    /// Moves both daemons into their cgroups, where all their later child processes are counted.
    pub(crate) fn adopt(&self) {
        for (name, pid) in [("ours", self.ours.pid()), ("theirs", self.theirs().pid())] {
            let folder = accounts().join(&self.cgroup.0).join(name).join("daemon");
            fs::create_dir_all(&folder).expect("a cgroup");
            fs::write(folder.join("cgroup.procs"), pid.to_string()).expect("the daemon joins its cgroup");
        }
    }

    /// Stops both runtimes; fails if any object remains.
    pub(crate) fn stop(mut self) {
        let theirs = self.theirs.take().expect("it is there until the end");
        let folder = theirs.socket().parent().expect("in its folder").to_owned();
        theirs.stop();
        fs::remove_dir_all(folder).expect("the peer's folder goes");
        // Its storage is in the node's folder.
        drop(self.registry);
        self.ours.stop();
        let left: Vec<i32> = host::cgroups_below(&self.cgroup.0).into_iter().flat_map(processes).collect();
        assert!(left.is_empty(), "processes left behind in {}: {left:?}", self.cgroup.0);
    }
}

impl Side<'_> {
    /// Sets the pod's cgroup parent to a cgroup of this runtime, and makes the directories of its containers' logs, like a kubelet.
    pub(crate) fn placed(&self, mut pod: PodSandboxConfig) -> PodSandboxConfig {
        let logs = self.logs();
        for container in CONTAINERS {
            fs::create_dir_all(logs.join(container)).expect("a directory for logs");
        }
        pod.log_directory = logs.display().to_string();
        pod.linux.get_or_insert_default().cgroup_parent = format!("/{}/pods", self.cgroup);
        pod
    }

    /// The directory of the logs of containers.
    pub(crate) fn logs(&self) -> PathBuf {
        self.socket.with_file_name("container-logs")
    }

    /// CPU time of all processes of this runtime so far.
    pub(crate) fn cpu(&self) -> Duration {
        let folder = accounts().join(&self.cgroup);
        if let Ok(text) = fs::read_to_string(folder.join("cpuacct.usage")) {
            return Duration::from_nanos(text.trim().parse().expect("nanoseconds"));
        }
        let text = fs::read_to_string(folder.join("cpu.stat")).expect("the cgroup's account");
        let usage = text.lines().find_map(|line| line.strip_prefix("usage_usec "));
        Duration::from_micros(usage.and_then(|text| text.parse().ok()).expect("microseconds"))
    }

    /// PSS in KiB of all processes of this runtime, except those of containers.
    pub(crate) fn memory_kib(&self) -> u64 {
        let folders = host::cgroups_below(&self.cgroup);
        let folders = folders.into_iter().filter(|folder| folder.starts_with(accounts()));
        folders.flat_map(processes).filter(|pid| !is_payload(*pid)).map(host::pss_kib).sum()
    }
}

fn is_payload(pid: i32) -> bool {
    let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&command).replace('\0', " ").trim() == PAYLOAD
}

/// The hierarchy with CPU accounting: that of version 1, or version 2.
fn accounts() -> PathBuf {
    let roots = host::cgroup_roots();
    let counts = |root: &&PathBuf| root.join("cpuacct.usage").exists();
    roots.iter().find(counts).or(roots.first()).expect("cgroups are mounted").clone()
}
