//! A machine on which k3s and coracle are installed, in the namespaces of `tests/cluster/namespaces`: coracle is started as its
//! unit starts it, without options and with all of its default paths. `/etc` is an overlay, so that `coracle k3s enable`
//! writes where it does on a real node.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::{
    Container, ContainerState, ListContainersRequest, ListPodSandboxRequest, PodSandbox,
    PodSandboxStatusRequest, VersionRequest,
};
use coracle_tests::{host, node, request};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// coracle's socket, and the directory of its pods' records.
pub(super) const SOCKET: &str = "/run/coracle/coracle.sock";
const RECORDS: &str = "/var/lib/coracle/pods";
/// Directories of the leases of `host-local` and of what the flannel plugin keeps for DEL, in k3s' network `cbr0`.
const LEASES: &str = "/var/lib/cni/networks/cbr0";
const SCRATCH: &str = "/var/lib/cni/flannel";
/// The bridge of flannel's delegate.
pub(super) const BRIDGE: &str = "cni0";

/// The machine; its processes and mounts end with the namespaces.
pub(super) struct Machine {
    pub(super) folder: PathBuf,
    pub(super) cri: Cri,
    daemon: Option<Child>,
    boots: u32,
}

impl Machine {
    /// Prepares the machine; nothing runs yet.
    pub(super) fn new() -> Machine {
        let folder = PathBuf::from(std::env::var_os("CORACLE_CLUSTER").expect("set by the script"));
        let etc = folder.join("etc");
        for name in ["upper", "work"] {
            fs::create_dir_all(etc.join(name)).expect("a directory");
        }
        let layers = format!("lowerdir=/etc,upperdir={0}/upper,workdir={0}/work", etc.display());
        mount(Some("etc"), "/etc", Some("overlay"), MsFlags::empty(), Some(layers.as_str()))
            .expect("an /etc of its own");
        let machine = Machine { folder, cri: Cri::new(Path::new(SOCKET)), daemon: None, boots: 0 };
        // Only the cgroups are below a directory of the test's own, because they are the machine's.
        let parent = machine.cgroup_parent();
        let config =
            format!("log_level = \"debug\"\n[cgroup]\ndriver = \"cgroupfs\"\nparent = \"{parent}\"\n");
        fs::create_dir_all("/etc/coracle").expect("a directory");
        fs::write("/etc/coracle/config.toml", config).expect("a file");
        host::make_kubelet_cgroups(&parent);
        machine
    }

    /// The cgroup that takes the place of the root for the kubelet and coracle.
    pub(super) fn cgroup_parent(&self) -> String {
        format!("coracle-test-{}-1", std::env::var("CORACLE_TEST_ID").expect("set by the script"))
    }

    /// Runs `coracle` with these arguments.
    pub(super) fn coracle(&self, words: &[&str]) -> Output {
        let program = node::binaries().join("coracle");
        Command::new(program).args(words).stdin(Stdio::null()).output().expect("the program runs")
    }

    /// Starts coracle and waits until it answers.
    pub(super) fn start_coracle(&mut self) {
        let log = fs::File::options().create(true).append(true).open(self.folder.join("coracle.log"));
        let child = Command::new(node::binaries().join("coracled"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.expect("a log"))
            .spawn()
            .expect("coracle runs");
        self.daemon = Some(child);
        host::wait_until("coracle answers", || self.cri.version(VersionRequest::default()).is_ok());
    }

    /// Kills coracle; pods continue.
    pub(super) fn kill_coracle(&mut self) {
        let mut child = self.daemon.take().expect("it runs");
        child.kill().expect("it is ours");
        child.wait().expect("our child");
    }

    /// The log of coracle, including its restarts.
    pub(super) fn log(&self) -> String {
        fs::read_to_string(self.folder.join("coracle.log")).unwrap_or_default()
    }

    /// The running container of a static pod, which has only one.
    pub(super) fn running(&self, pod: &str) -> Option<Container> {
        let all = self.cri.list_containers(ListContainersRequest::default()).ok()?.containers;
        all.into_iter().find(|one| {
            one.state() == ContainerState::ContainerRunning
                && one.labels.get("io.kubernetes.pod.name").is_some_and(|name| *name == format!("{pod}-node"))
        })
    }

    /// All pod sandboxes.
    pub(super) fn sandboxes(&self) -> Vec<PodSandbox> {
        self.cri.list_pod_sandbox(ListPodSandboxRequest::default()).expect("coracle answers").items
    }

    /// The address of the pod of this container.
    pub(super) fn address(&self, container: &Container) -> String {
        let pod_sandbox_id = container.pod_sandbox_id.clone();
        let answer = self
            .cri
            .pod_sandbox_status(PodSandboxStatusRequest { pod_sandbox_id, verbose: false })
            .expect("the pod is known");
        answer.status.and_then(|status| status.network).expect("it has a network").ip
    }

    /// Output of the probe with these arguments in a running container, or its error text.
    pub(super) fn exec(&self, container: &Container, words: &[&str]) -> Result<String, String> {
        let answer =
            self.cri.exec_sync(request::exec(&container.id, words, 10)).map_err(|error| error.to_string())?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match answer.exit_code {
            0 => Ok(text(&answer.stdout)),
            _ => Err(text(&answer.stderr)),
        }
    }

    /// Ports of the bridge.
    pub(super) fn ports(&self) -> Vec<String> {
        host::links(BRIDGE).into_iter().filter(|link| link != BRIDGE).collect()
    }

    /// Addresses that are allocated to pods.
    pub(super) fn leases(&self) -> Vec<String> {
        entries(LEASES).into_iter().filter(|name| name.starts_with("10.")).collect()
    }

    /// Objects that must not exist after all pods were removed.
    pub(super) fn leftovers(&self) -> Vec<String> {
        let mut found: Vec<String> =
            self.sandboxes().iter().map(|pod| format!("sandbox {}", pod.id)).collect();
        let namespaces = entries("/run/netns").into_iter().filter(|name| name.starts_with("coracle-"));
        found.extend(namespaces.map(|name| format!("namespace {name}")));
        found.extend(entries(RECORDS).iter().map(|name| format!("record {name}")));
        found.extend(entries("/run/coracle/pods").iter().map(|name| format!("state {name}")));
        found.extend(entries(SCRATCH).iter().map(|name| format!("flannel's file {name}")));
        found.extend(self.leases().iter().map(|address| format!("lease {address}")));
        found.extend(self.ports().iter().map(|link| format!("link {link}")));
        let is_id = |path: &PathBuf| path.file_name().is_some_and(|name| name.len() == 64);
        let cgroups = host::cgroups_below(&self.cgroup_parent()).into_iter().filter(is_id);
        found.extend(cgroups.map(|path| format!("cgroup {}", path.display())));
        let monitors = host::processes("coracle-pod");
        found.extend(monitors.into_iter().map(|process| format!("process {}", process.command)));
        found
    }

    /// Ends what a machine that is switched off loses, and makes its next boot another one: all processes, links, mounts
    /// and everything in `/run`. Files in `/var/lib` and `/etc` stay.
    pub(super) fn reboot(&mut self) {
        self.kill_coracle();
        let parent = self.cgroup_parent();
        host::wait_until("all processes of pods have ended", || {
            let mut pids = host::cgroups_below(&parent).into_iter().flat_map(|folder| {
                let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
                text.lines().filter_map(|line| line.parse().ok()).collect::<Vec<i32>>()
            });
            // One that has ended meanwhile is not an error.
            pids.all(|pid| kill(Pid::from_raw(pid), Signal::SIGKILL).is_err())
        });
        for link in self.ports().iter().map(String::as_str).chain([BRIDGE]) {
            // A port is gone with its peer's namespace.
            let _ = Command::new("ip").args(["link", "delete", link]).stderr(Stdio::null()).status();
        }
        unmount(&["/run/", "/var/lib/kubelet/"]);
        umount2("/run", MntFlags::MNT_DETACH).expect("the script mounted it");
        mount(Some("tmpfs"), "/run", Some("tmpfs"), MsFlags::empty(), Some("mode=0755")).expect("a tmpfs");
        for name in ["netns", "lock"] {
            fs::create_dir(Path::new("/run").join(name)).expect("a directory");
        }
        for folder in host::cgroups_below(&parent) {
            let _ = fs::remove_dir(folder); // a controller of v1 may need a moment; the next kubelet uses it again
        }
        self.boots += 1;
        let boot = self.folder.join("boot_id");
        fs::write(&boot, format!("00000000-0000-4000-8000-{:012}\n", self.boots)).expect("a file");
        mount(Some(&boot), "/proc/sys/kernel/random/boot_id", None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .expect("another boot");
    }

    /// Ends coracle, and removes the cgroups that the kubelet leaves behind.
    pub(super) fn end(mut self) {
        let mut child = self.daemon.take().expect("it runs");
        kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).expect("it is ours");
        let status = host::wait_for("coracle ends", || child.try_wait().expect("our child"));
        assert!(status.success(), "coracle ended with {status}");
        let parent = self.cgroup_parent();
        let roots = host::cgroup_roots().into_iter().map(|root| root.join(&parent));
        for folder in host::cgroups_below(&parent).into_iter().chain(roots) {
            let _ = fs::remove_dir(folder); // the script reports those that remain
        }
    }
}

/// Names in a directory, if it exists.
fn entries(path: &str) -> Vec<String> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Mount points that begin with one of these paths, the deepest first.
pub(super) fn mount_points(prefixes: &[&str]) -> Vec<String> {
    let points = host::mounts("").into_iter().filter_map(|line| line.split(' ').nth(4).map(str::to_owned));
    let mut points: Vec<String> =
        points.filter(|point| prefixes.iter().any(|prefix| point.starts_with(prefix))).collect();
    points.sort();
    points.reverse();
    points
}

/// Unmounts everything whose path begins with one of these, and which is not below a mount of the script's: mounts of the host, such
/// as network namespaces of its own pods, are hidden by those.
fn unmount(prefixes: &[&str]) {
    for point in mount_points(prefixes) {
        let result = umount2(point.as_str(), MntFlags::MNT_DETACH);
        assert!(matches!(result, Ok(()) | Err(Errno::EINVAL | Errno::ENOENT)), "{point}: {result:?}");
    }
}
