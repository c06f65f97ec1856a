//! A node of its own for each test: own root, state, socket, cgroup parent, bridge, subnet and lease folder, so that
//! tests run side by side and beside a real daemon. [`Node::stop`] is the point of it: it takes everything down through
//! the CRI and then fails on any mount, cgroup, link, process, lease or file that is left.
//! A test that fails leaves the folder, with the daemon's log in it, and says where; kernel objects go in any case.

use std::fs;
use std::ops::Deref;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::cri::Cri;
use crate::cri::proto::{
    ContainerConfig, ContainerState, ContainerStatus, ContainerStatusRequest, ListPodSandboxRequest,
    VersionRequest,
};
use crate::host::{self, wait_for, wait_until};
use crate::image::{self, Image};
use crate::request;

/// How a node differs from the usual.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Lines added to the configuration file; BRIDGE and SUBNET in it are the node's own.
    pub config: String,
    /// Variables added to the daemon's environment.
    pub environment: Vec<(String, String)>,
    /// Whether a CNI bridge is configured.
    pub bridge: bool,
    /// The root directory, when it is not `FOLDER/root`.
    pub root: Option<PathBuf>,
    /// The state directory, when it is not `FOLDER/state`.
    pub state: Option<PathBuf>,
    /// A program and its first arguments that become the daemon: they are followed by its program and arguments, which
    /// they must exec. Empty: the daemon is started as it is.
    pub wrapper: Vec<String>,
}

/// A running daemon and everything it may touch.
pub struct Node {
    folder: PathBuf,
    root: PathBuf,
    state: PathBuf,
    environment: Vec<(String, String)>,
    wrapper: Vec<String>,
    number: u32,
    binaries: PathBuf,
    daemon: Option<Child>,
    descriptors: Option<u32>,
    cri: Cri,
    threads: Arc<AtomicU64>,
    watched: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
    sampler: Option<JoinHandle<()>>,
    is_stopped: bool,
}

/// The client is what a test wants of a node most: `node.run_pod_sandbox(…)`.
impl Deref for Node {
    type Target = Cri;

    fn deref(&self) -> &Cri {
        &self.cri
    }
}

/// Where the built programs are: `CORACLE_BIN_DIR`, else the release folder of this workspace.
pub fn binaries() -> PathBuf {
    let target = if cfg!(target_arch = "aarch64") { "aarch64" } else { "x86_64" };
    let usual = format!("{}/../target/{target}-unknown-linux-musl/release", env!("CARGO_MANIFEST_DIR"));
    std::env::var_os("CORACLE_BIN_DIR").map_or_else(|| PathBuf::from(usual), PathBuf::from)
}

/// Where nodes have their folders: `CORACLE_TEST_DIR`.
pub fn base() -> PathBuf {
    PathBuf::from(std::env::var("CORACLE_TEST_DIR").unwrap_or("/var/tmp/coracle-tests".into()))
}

impl Node {
    /// A node on which only host-network pods run.
    pub fn start() -> Node {
        Node::with(Options::default())
    }

    /// A node with a CNI bridge of Debian's plugins.
    pub fn with_bridge() -> Node {
        Node::with(Options { bridge: true, ..Options::default() })
    }

    /// A node that differs.
    pub fn with(options: Options) -> Node {
        host::require_root();
        let number = request::fresh();
        let folder = base().join(format!("{}-{number}", std::process::id()));
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(folder.join("cni"))
            .expect("the node's folder");
        let root = options.root.clone().unwrap_or_else(|| folder.join("root"));
        let state = options.state.clone().unwrap_or_else(|| folder.join("state"));
        let mut node = Node {
            cri: Cri::new(&folder.join("run/coracle.sock")),
            binaries: binaries(),
            root,
            state,
            environment: options.environment,
            wrapper: options.wrapper,
            number,
            daemon: None,
            descriptors: None,
            threads: Arc::new(AtomicU64::new(0)),
            watched: Arc::new(AtomicU64::new(0)),
            over: Arc::new(AtomicBool::new(false)),
            sampler: None,
            is_stopped: false,
            folder,
        };
        node.rewrite_config(&options.config);
        if options.bridge {
            node.write_bridge();
        }
        node.sampler = Some(node.sample_threads());
        node.launch();
        node
    }

    /// The folder of everything that is this node's.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// `--root`.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// `--state`.
    pub fn state(&self) -> PathBuf {
        self.state.clone()
    }

    /// `--cni-conf-dir`.
    pub fn cni(&self) -> PathBuf {
        self.folder.join("cni")
    }

    /// Where plugins of tests live; searched before Debian's.
    pub fn plugins(&self) -> PathBuf {
        self.folder.join("plugins")
    }

    /// The socket's path.
    pub fn socket(&self) -> PathBuf {
        self.folder.join("run/coracle.sock")
    }

    /// Where NRI plugins connect.
    pub fn nri(&self) -> PathBuf {
        self.folder.join("nri.sock")
    }

    /// The daemon's log of all its lives.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.join("daemon.log")).unwrap_or_default()
    }

    /// `--cgroup-parent`, unlike any other node's.
    pub fn cgroup_parent(&self) -> String {
        format!("coracle-test-{}-{}", std::process::id(), self.number)
    }

    /// The bridge's name, at most 15 bytes.
    pub fn bridge(&self) -> String {
        format!("ct{}b{}", std::process::id() % 1_000_000, self.number % 1000)
    }

    /// The first three numbers of the bridge's subnet; other processes and other nodes have others.
    pub fn subnet(&self) -> String {
        format!("10.{}.{}", 100 + std::process::id() % 100, self.number % 250)
    }

    /// The daemon's process id.
    pub fn pid(&self) -> i32 {
        self.daemon.as_ref().expect("the daemon runs").id() as i32
    }

    /// The probe's bytes.
    pub fn probe(&self) -> Vec<u8> {
        image::program(&self.binaries)
    }

    /// A folder for logs of pods, made.
    pub fn log_directory(&self, pod: &str) -> String {
        let path = self.folder.join("logs").join(pod);
        fs::create_dir_all(&path).expect("a log directory");
        path.display().to_string()
    }

    /// Starts the daemon and waits until it answers.
    pub fn launch(&mut self) {
        self.spawn();
        wait_until(&format!("the daemon answers; its log is {}/daemon.log", self.folder.display()), || {
            let child = self.daemon.as_mut().expect("just started");
            if let Ok(Some(status)) = child.try_wait() {
                panic!("the daemon ended with {status}:\n{}", self.log());
            }
            self.cri.version(VersionRequest::default()).is_ok()
        });
    }

    /// How many files the next daemon may have open; `None`: as many as this process.
    pub fn limit_descriptors(&mut self, limit: Option<u32>) {
        self.descriptors = limit;
    }

    /// Starts the daemon and does not wait.
    pub fn spawn(&mut self) {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.folder.join("daemon.log"))
            .expect("the daemon's log");
        let limit = self.descriptors.map(|limit| format!("--nofile={limit}"));
        let limit = limit.into_iter().flat_map(|limit| ["prlimit".into(), PathBuf::from(limit)]);
        let wrapper = self.wrapper.iter().map(PathBuf::from);
        let mut words = limit.chain(wrapper).chain([self.binaries.join("coracle")]);
        let child = Command::new(words.next().expect("at least the daemon"))
            .args(words)
            .args(["serve", "--log-level", "debug"])
            .arg("--config")
            .arg(self.folder.join("config.toml"))
            .args(["--listen", &format!("unix://{}", self.socket().display())])
            .arg("--root")
            .arg(&self.root)
            .arg("--state")
            .arg(self.state())
            .args(["--cgroup-parent", &self.cgroup_parent()])
            .args([Path::new("--cni-conf-dir"), &self.cni()])
            .envs(self.environment.iter().cloned())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}: `make build`", self.binaries.display()));
        self.watched.store(u64::from(child.id()), Ordering::Relaxed);
        self.daemon = Some(child);
    }

    /// Ends the daemon as a crash does; pods stay.
    pub fn kill9(&mut self) {
        self.watched.store(0, Ordering::Relaxed);
        if let Some(mut child) = self.daemon.take() {
            child.kill().expect("the daemon is ours to kill");
            child.wait().expect("the daemon is our child");
        }
    }

    /// Ends the daemon politely; pods stay. Panics if it does not go.
    pub fn terminate(&mut self) {
        self.watched.store(0, Ordering::Relaxed);
        let Some(mut child) = self.daemon.take() else { return };
        kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).expect("the daemon is ours to stop");
        let status = wait_for("the daemon ends after SIGTERM", || child.try_wait().expect("it is our child"));
        assert!(status.success(), "the daemon ended with {status}:\n{}", self.log());
    }

    /// A crash, then a new daemon.
    pub fn restart(&mut self) {
        self.kill9();
        self.launch();
    }

    /// Runs `coracle image` with these words against this node, whether or not it succeeds.
    pub fn image_command(&self, words: &[&str]) -> Output {
        Command::new(self.binaries.join("coracle"))
            .arg("image")
            .arg("--config")
            .arg(self.folder.join("config.toml"))
            .arg("--state")
            .arg(self.state())
            .args(words)
            .stdin(Stdio::null())
            .output()
            .expect("the program runs")
    }

    /// Writes an archive and imports it.
    pub fn try_import(&self, archive: &[u8]) -> Result<String, String> {
        let file = self.folder.join(format!("import-{}.tar", request::fresh()));
        fs::write(&file, archive).expect("the archive");
        let output = self.image_command(&["import", &file.display().to_string()]);
        fs::remove_file(&file).expect("the archive is ours");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            Ok(text)
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    }

    /// Imports the probe's image; gives its name.
    pub fn import_probe(&self) -> String {
        let name = "localhost/probe:1";
        let image = Image::probe(&self.probe(), "usual");
        self.try_import(&image.oci_archive(name)).unwrap_or_else(|error| panic!("import: {error}"));
        name.into()
    }

    /// A container's status; panics with the error.
    #[track_caller]
    pub fn container(&self, container_id: &str) -> ContainerStatus {
        let request = ContainerStatusRequest { container_id: container_id.into(), verbose: false };
        let answer = self.container_status(request).unwrap_or_else(|error| panic!("status: {error}"));
        answer.status.expect("an answer without an error has a status")
    }

    /// Waits until a container has exited; gives its status then.
    #[track_caller]
    pub fn exited(&self, container_id: &str) -> ContainerStatus {
        wait_for(&format!("container {container_id} exits"), || {
            let status = self.container(container_id);
            (status.state() == ContainerState::ContainerExited).then_some(status)
        })
    }

    /// The init process of a container on the host, from the verbose status.
    #[track_caller]
    pub fn container_pid(&self, container_id: &str) -> i32 {
        let request = ContainerStatusRequest { container_id: container_id.into(), verbose: true };
        let answer = self.container_status(request).unwrap_or_else(|error| panic!("status: {error}"));
        let info: serde_json::Value =
            serde_json::from_str(&answer.info["info"]).expect("info is JSON, as crictl needs it");
        info["pid"].as_i64().expect("info has a pid") as i32
    }

    /// What a container wrote, without the log format's first three words.
    pub fn output(&self, container_id: &str) -> String {
        let text = fs::read_to_string(self.container(container_id).log_path).unwrap_or_default();
        text.lines().filter_map(|line| line.splitn(4, ' ').nth(3)).map(|line| format!("{line}\n")).collect()
    }

    /// Runs the probe with these words in a new container of a new host-network pod; gives the output and the status,
    /// and takes the pod down again.
    #[track_caller]
    pub fn once(
        &self,
        image: &str,
        words: &[&str],
        change: impl FnOnce(&mut ContainerConfig),
    ) -> (String, ContainerStatus) {
        let mut pod = request::host_pod("once");
        pod.log_directory = self.log_directory(&format!("once-{}", request::fresh()));
        let pod_id = self.run_pod(&pod);
        let mut config = request::container("one", image, words, &pod);
        change(&mut config);
        let id = self.run_container(&pod_id, &config, &pod);
        let status = self.exited(&id);
        let text = self.output(&id);
        self.remove_pod(&pod_id);
        (text, status)
    }

    /// Takes everything down through the CRI, ends the daemon, and fails if anything is left of this node.
    pub fn stop(mut self) {
        if self.daemon.is_none() {
            self.launch();
        }
        let pods = self.list_pod_sandbox(ListPodSandboxRequest::default()).expect("the daemon lists pods");
        for pod in pods.items {
            self.remove_pod(&pod.id);
        }
        wait_until("all children of the daemon have ended", || self.workers().is_empty());
        self.terminate();
        let rests = wait_for_none(|| self.rests());
        assert!(rests.is_empty(), "left behind on the machine:\n{}", rests.join("\n"));
        let threads = self.threads.load(Ordering::Relaxed);
        assert!(threads <= 1, "the daemon was seen with {threads} threads");
        self.sweep();
        self.is_stopped = true;
        fs::remove_dir_all(&self.folder).expect("the node's folder goes");
    }

    /// What is still there and should not be once all pods are gone.
    pub fn rests(&self) -> Vec<String> {
        let name = format!("{}/", self.folder.display());
        let mut rests = Vec::new();
        rests.extend(host::mounts(&name).into_iter().map(|line| format!("mount {line}")));
        let cgroups = host::cgroups_below(&self.cgroup_parent());
        rests.extend(
            cgroups.iter().filter(|path| is_pods(path)).map(|path| format!("cgroup {}", path.display())),
        );
        let links = host::links(&self.bridge());
        rests.extend(
            links.into_iter().filter(|link| *link != self.bridge()).map(|link| format!("link {link}")),
        );
        // A registry in this folder is another value's, which ends it.
        let processes = host::processes(&name)
            .into_iter()
            .filter(|process| {
                !["docker-registry ", "nginx "].iter().any(|own| process.command.starts_with(own))
            })
            .filter(|process| Some(process.pid as u32) != self.daemon.as_ref().map(Child::id));
        rests.extend(processes.map(|process| format!("process {} {}", process.pid, process.command)));
        rests.extend(self.namespaces().into_iter().map(|path| format!("namespace {}", path.display())));
        rests.extend(
            self.pod_processes().into_iter().map(|process| format!("{} {}", process.command, process.pid)),
        );
        rests.extend(self.leases().into_iter().map(|lease| format!("lease {lease}")));
        for (what, place) in [("record", self.root.join("pods")), ("state", self.state().join("pods"))] {
            let entries = fs::read_dir(place).into_iter().flatten().flatten();
            rests.extend(entries.map(|entry| format!("{what} {}", entry.path().display())));
        }
        rests
    }

    /// Network namespaces of this node's pods: named by an id of which the daemon's log speaks, as crictl prints it.
    pub fn namespaces(&self) -> Vec<PathBuf> {
        const PRINTED_DIGITS: usize = 13;
        let log = self.log();
        let Ok(entries) = fs::read_dir("/run/netns") else { return Vec::new() };
        let is_ours = |name: &str| {
            name.strip_prefix("coracle-")
                .and_then(|id| id.get(..PRINTED_DIGITS))
                .is_some_and(|id| log.contains(id))
        };
        entries
            .flatten()
            .filter(|entry| is_ours(&entry.file_name().to_string_lossy()))
            .map(|entry| entry.path())
            .collect()
    }

    /// Addresses that are still held for this node's bridge, of a network in a file or of the default one.
    pub fn leases(&self) -> Vec<String> {
        let folders = [self.folder.join("leases/boat"), self.root.join("networks/coracle")];
        let entries = folders.iter().flat_map(fs::read_dir).flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| name.starts_with("10")).collect()
    }

    /// Processes of `coracle-worker` that this daemon started.
    pub fn workers(&self) -> Vec<host::Process> {
        let Some(daemon) = &self.daemon else { return Vec::new() };
        let parent = u64::from(daemon.id());
        let mut workers = host::processes("coracle-worker");
        workers.retain(|process| host::proc_value(process.pid, "status", "PPid") == Some(parent));
        workers
    }

    /// Monitors of this node's pods.
    pub fn monitors(&self) -> Vec<host::Process> {
        let mut processes = self.pod_processes();
        processes.retain(|process| process.command.starts_with("coracle-pod"));
        processes
    }

    /// The processes of ours that pods have while nothing starts: monitors, and the first processes of PID namespaces that
    /// the containers of a pod share.
    pub fn pod_processes(&self) -> Vec<host::Process> {
        let mut found = Vec::new();
        for root in host::cgroup_roots() {
            let parent = root.join(self.cgroup_parent());
            for folder in host::cgroups_below(&self.cgroup_parent()).into_iter().chain([parent]) {
                let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
                for pid in text.lines().filter_map(|line| line.parse::<i32>().ok()) {
                    let command = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                    let process = host::Process { pid, command: command.trim().to_owned() };
                    let is_ours = ["coracle-pod", "coracle-init"].contains(&process.command.as_str());
                    if is_ours && !found.contains(&process) {
                        found.push(process);
                    }
                }
            }
        }
        found
    }

    /// Another configuration, for the next start or SIGHUP. It may say more under a heading of the usual one.
    pub fn rewrite_config(&self, more: &str) {
        let more = more.replace("BRIDGE", &self.bridge()).replace("SUBNET", &self.subnet());
        let text = crate::config::text(&more, &self.folder);
        fs::write(self.folder.join("config.toml"), text).expect("the node's configuration");
        fs::create_dir_all(self.plugins()).expect("a folder for plugins");
    }

    /// The conflist that a Debian node with containernetworking-plugins would have.
    pub fn write_bridge(&self) {
        let text = serde_json::json!({
            "cniVersion": "1.0.0", "name": "boat",
            "plugins": [
                { "type": "bridge", "bridge": self.bridge(), "isGateway": true, "ipMasq": false,
                  "ipam": { "type": "host-local", "dataDir": self.folder.join("leases"),
                            "ranges": [[{ "subnet": format!("{}.0/24", self.subnet()) }]],
                            "routes": [{ "dst": "0.0.0.0/0" }] } },
                { "type": "portmap", "capabilities": { "portMappings": true } },
            ],
        });
        fs::write(self.cni().join("10-boat.conflist"), text.to_string())
            .expect("the network's configuration");
    }

    /// Looks at the daemon's thread count every few milliseconds for as long as the node lives.
    fn sample_threads(&self) -> JoinHandle<()> {
        const EVERY: Duration = Duration::from_millis(10);
        let (threads, watched, over) = (self.threads.clone(), self.watched.clone(), self.over.clone());
        std::thread::spawn(move || {
            while !over.load(Ordering::Relaxed) {
                let pid = watched.load(Ordering::Relaxed) as i32;
                if pid != 0 {
                    let now = host::proc_value(pid, "status", "Threads").unwrap_or(0);
                    threads.fetch_max(now, Ordering::Relaxed);
                }
                std::thread::sleep(EVERY);
            }
        })
    }

    /// Removes what the node itself made, and, after a failure, what the daemon could not.
    fn sweep(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(sampler) = self.sampler.take() {
            // It only reads numbers; nothing to hear from it.
            let _ = sampler.join();
        }
        // The bridge plugin leaves its bridge for the next pod, by design.
        if Path::new("/sys/class/net").join(self.bridge()).exists() {
            let _ = Command::new("ip").args(["link", "delete", &self.bridge()]).status();
        }
        for folder in host::cgroups_below(&self.cgroup_parent()) {
            let _ = fs::remove_dir(folder);
        }
        for root in host::cgroup_roots() {
            let _ = fs::remove_dir(root.join(self.cgroup_parent()));
        }
    }

    /// Ends every process of a failed test's pods, monitors first, so that nothing is restarted.
    fn end_processes(&self) {
        for monitor in self.monitors() {
            let _ = kill(Pid::from_raw(monitor.pid), Signal::SIGKILL);
        }
        for folder in host::cgroups_below(&self.cgroup_parent()) {
            let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
            for pid in text.lines().filter_map(|line| line.parse().ok()) {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if self.is_stopped {
            return;
        }
        eprintln!("the node's folder, with daemon.log, is left in {}", self.folder.display());
        self.kill9();
        self.end_processes();
        let name = format!("{}/", self.folder.display());
        host::wait_within(Duration::from_secs(2), || self.monitors().is_empty().then_some(()));
        for line in host::mounts(&name).iter().rev() {
            let place = line.split(' ').nth(4).unwrap_or_default();
            let _ = nix::mount::umount2(place, nix::mount::MntFlags::MNT_DETACH);
        }
        for place in self.namespaces() {
            let _ = nix::mount::umount2(&place, nix::mount::MntFlags::MNT_DETACH);
            let _ = fs::remove_file(place);
        }
        self.sweep();
    }
}

/// Whether a cgroup is a pod's or a container's: named by an id, plain or as a scope.
fn is_pods(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let id = name.trim_start_matches("coracle-").trim_end_matches(".scope");
    id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Waits until there is nothing left, or patience ends; gives what is left then.
fn wait_for_none(look: impl Fn() -> Vec<String>) -> Vec<String> {
    host::wait_within(Duration::from_secs(5), || look().is_empty().then(Vec::new)).unwrap_or_else(look)
}
