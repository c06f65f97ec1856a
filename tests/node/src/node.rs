//! A test node with its own root, state, socket, cgroup parent, bridge, subnet and lease directory, so that
//! tests can run concurrently and beside a real daemon. [`Node::stop`] removes everything through the CRI and
//! then fails if any mount, cgroup, link, process, lease or file remains. A failed test keeps the directory,
//! including the daemon's log, and prints its path; kernel objects are always removed.

mod objects;

use std::fs;
use std::io;
use std::ops::Deref;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::mount::MsFlags;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::cri::Cri;
use crate::cri::proto::{
    ContainerConfig, ContainerStatus, ContainerStatusRequest, ListPodSandboxRequest, VersionRequest,
};
use crate::host::{self, wait_for, wait_until};
use crate::image::{self, Image};
use crate::request;

/// Non-default settings of a node.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Lines that are added to the configuration file; BRIDGE and SUBNET are replaced by the node's own.
    pub config: String,
    /// Variables added to the daemon's environment.
    pub environment: Vec<(String, String)>,
    /// Whether a CNI bridge is configured.
    pub bridge: bool,
    /// The root directory; `None`: `FOLDER/root`.
    pub root: Option<PathBuf>,
    /// The state directory; `None`: `FOLDER/state`.
    pub state: Option<PathBuf>,
    /// Whether `FOLDER/state` is a tmpfs, as the default state directory below /run is on a machine with systemd.
    pub has_tmpfs_state: bool,
    /// A program and its first arguments that start the daemon. The daemon's program and arguments are
    /// appended, which the program must execute. Empty: the daemon is started directly.
    pub wrapper: Vec<String>,
}

/// A running daemon and its environment.
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

/// Gives access to the CRI client: `node.run_pod_sandbox(…)`.
impl Deref for Node {
    type Target = Cri;

    fn deref(&self) -> &Cri {
        &self.cri
    }
}

/// Directory of the built programs: `CORACLE_BIN_DIR`, otherwise the release directory of this workspace.
pub fn binaries() -> PathBuf {
    let target = if cfg!(target_arch = "aarch64") { "aarch64" } else { "x86_64" };
    let usual = format!("{}/../../target/{target}-unknown-linux-musl/release", env!("CARGO_MANIFEST_DIR"));
    std::env::var_os("CORACLE_BIN_DIR").map_or_else(|| PathBuf::from(usual), PathBuf::from)
}

/// Parent directory of the directories of nodes, from `CORACLE_TEST_DIR`.
pub fn base() -> PathBuf {
    PathBuf::from(std::env::var("CORACLE_TEST_DIR").unwrap_or("/var/tmp/coracle-tests".into()))
}

/// Number of this test run in the names of its objects: from `CORACLE_TEST_ID`, otherwise the PID. In a PID
/// namespace the PID is not unique on the machine.
fn run() -> u32 {
    let given = std::env::var("CORACLE_TEST_ID").ok().and_then(|text| text.parse().ok());
    given.unwrap_or_else(std::process::id)
}

impl Node {
    /// Starts a node without CNI configuration.
    pub fn start() -> Node {
        Node::with(Options::default())
    }

    /// Starts a node with a CNI bridge that uses Debian's plugins.
    pub fn with_bridge() -> Node {
        Node::with(Options { bridge: true, ..Options::default() })
    }

    /// Starts a node with these settings.
    pub fn with(options: Options) -> Node {
        host::require_root();
        let number = request::fresh();
        let folder = base().join(format!("{}-{number}", run()));
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(folder.join("cni"))
            .expect("the node's folder");
        let root = options.root.clone().unwrap_or_else(|| folder.join("root"));
        let state = options.state.clone().unwrap_or_else(|| folder.join("state"));
        if options.has_tmpfs_state {
            mount_tmpfs(&state).expect("a tmpfs for the state directory");
        }
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

    /// Directory with all files of this node.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The directory `--root`.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The directory `--state`.
    pub fn state(&self) -> PathBuf {
        self.state.clone()
    }

    /// The directory `--cni-conf-dir`.
    pub fn cni(&self) -> PathBuf {
        self.folder.join("cni")
    }

    /// Directory of the test's CNI plugins, which is searched before Debian's.
    pub fn plugins(&self) -> PathBuf {
        self.folder.join("plugins")
    }

    /// Path of the CRI socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.join("run/coracle.sock")
    }

    /// Path of the NRI socket.
    pub fn nri(&self) -> PathBuf {
        self.folder.join("nri.sock")
    }

    /// The log of the daemon, including its restarts.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.join("daemon.log")).unwrap_or_default()
    }

    /// The value of `--cgroup-parent`, unique to this node.
    pub fn cgroup_parent(&self) -> String {
        match host::has_systemd_driver() {
            true => format!("coracle_test_{}_{}.slice", run(), self.number),
            false => format!("coracle-test-{}-{}", run(), self.number),
        }
    }

    /// The name of the bridge, unique to this node, at most 15 bytes.
    pub fn bridge(&self) -> String {
        format!("ct{}b{}", run() % 1_000_000, self.number % 1000)
    }

    /// Variables added to the daemon's environment.
    pub fn environment(&self) -> &[(String, String)] {
        &self.environment
    }

    /// The first three numbers of the bridge's subnet. Test programs that run at once have PIDs near to each other; their nodes'
    /// subnets are far apart.
    pub fn subnet(&self) -> String {
        const SUBNETS: u64 = 100 * 250;
        const APART: u64 = 457;
        let index = (u64::from(run()) * APART + u64::from(self.number)) % SUBNETS;
        format!("10.{}.{}", 100 + index / 250, index % 250)
    }

    /// The daemon's process id.
    pub fn pid(&self) -> i32 {
        self.daemon.as_ref().expect("the daemon runs").id() as i32
    }

    /// Number of open descriptors of the daemon.
    pub fn descriptors(&self) -> usize {
        host::open_files(self.pid()).len()
    }

    /// Whether a daemon was started and not ended since, whether it runs or not.
    pub fn has_daemon(&self) -> bool {
        self.daemon.is_some()
    }

    /// The bytes of the probe program.
    pub fn probe(&self) -> Vec<u8> {
        image::program(&self.binaries)
    }

    /// Creates a directory for logs of pods.
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

    /// Sets the limit of open files of the next daemon; `None`: the limit of this process.
    pub fn limit_descriptors(&mut self, limit: Option<u32>) {
        self.descriptors = limit;
    }

    /// Sets the program that starts the next daemons, like [`Options::wrapper`]; empty: they are started
    /// directly.
    pub fn wrap(&mut self, wrapper: Vec<String>) {
        self.wrapper = wrapper;
    }

    /// Starts the daemon without waiting for its answer.
    pub fn spawn(&mut self) {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.folder.join("daemon.log"))
            .expect("the daemon's log");
        let limit = self.descriptors.map(|limit| format!("--nofile={limit}"));
        let limit = limit.into_iter().flat_map(|limit| ["prlimit".into(), PathBuf::from(limit)]);
        let wrapper = self.wrapper.iter().map(PathBuf::from);
        let mut words = limit.chain(wrapper).chain([self.binaries.join("coracled")]);
        let child = Command::new(words.next().expect("at least the daemon"))
            .args(words)
            .args(["--log-level", "debug"])
            .args(self.flags())
            .envs(self.environment.iter().cloned())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}: `make build`", self.binaries.display()));
        self.watched.store(u64::from(child.id()), Ordering::Relaxed);
        self.daemon = Some(child);
    }

    /// The flags of the node's daemon, and of commands for the node.
    pub fn flags(&self) -> Vec<String> {
        let (listen, config) = (self.socket(), self.folder.join("config.toml"));
        let [listen, config, root, state, cni] =
            [&listen, &config, &self.root, &self.state, &self.cni()].map(|path| path.display().to_string());
        let flags = [
            ("--config", config),
            ("--listen", format!("unix://{listen}")),
            ("--root", root),
            ("--state", state),
            ("--cgroup-parent", self.cgroup_parent()),
            ("--cni-conf-dir", cni),
        ];
        flags.into_iter().flat_map(|(name, value)| [name.to_owned(), value]).collect()
    }

    /// Kills the daemon; its pods continue.
    pub fn kill9(&mut self) {
        self.watched.store(0, Ordering::Relaxed);
        if let Some(mut child) = self.daemon.take() {
            child.kill().expect("the daemon is ours to kill");
            child.wait().expect("the daemon is our child");
        }
    }

    /// Ends the daemon with SIGTERM; its pods continue. Panics if it does not end.
    pub fn terminate(&mut self) {
        self.watched.store(0, Ordering::Relaxed);
        let Some(mut child) = self.daemon.take() else { return };
        kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).expect("the daemon is ours to stop");
        let status = wait_for("the daemon ends after SIGTERM", || child.try_wait().expect("it is our child"));
        assert!(status.success(), "the daemon ended with {status}:\n{}", self.log());
    }

    /// The exit status of a daemon that has ended by itself, or that another program has ended. `None` if it runs.
    pub fn exit_status(&mut self) -> Option<ExitStatus> {
        self.daemon.as_mut()?.try_wait().expect("the daemon is our child")
    }

    /// Kills the daemon and starts it again.
    pub fn restart(&mut self) {
        self.kill9();
        self.launch();
    }

    /// Runs `coracle image` with these arguments for this node.
    pub fn image_command(&self, words: &[&str]) -> Output {
        self.tool(&[&["image"], words].concat())
    }

    /// Runs `coracle` with these arguments and this node's configuration and directories.
    pub fn tool(&self, words: &[&str]) -> Output {
        self.command(words).output().expect("the program runs")
    }

    /// The command that [`Node::tool`] runs.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(self.binaries.join("coracle"));
        command.args(words).args(self.flags()).stdin(Stdio::null());
        command
    }

    /// Writes an archive to a file and imports it with `coracle image import`; returns the output, or the
    /// error text.
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

    /// Imports the probe's image; returns its name.
    pub fn import_probe(&self) -> String {
        let name = "localhost/probe:1";
        let image = Image::probe(&self.probe(), "usual");
        self.try_import(&image.oci_archive(name)).unwrap_or_else(|error| panic!("import: {error}"));
        name.into()
    }

    /// PID of a container's main process on the host, from the verbose status.
    #[track_caller]
    pub fn container_pid(&self, container_id: &str) -> i32 {
        let request = ContainerStatusRequest { container_id: container_id.into(), verbose: true };
        let answer = self.container_status(request).unwrap_or_else(|error| panic!("status: {error}"));
        let info: serde_json::Value =
            serde_json::from_str(&answer.info["info"]).expect("info is JSON, as crictl needs it");
        info["pid"].as_i64().expect("info has a pid") as i32
    }

    /// The output of a container: the lines of its log without their first three fields.
    pub fn output(&self, container_id: &str) -> String {
        let text = fs::read_to_string(self.container(container_id).log_path).unwrap_or_default();
        text.lines().filter_map(|line| line.splitn(4, ' ').nth(3)).map(|line| format!("{line}\n")).collect()
    }

    /// Runs the probe with these arguments in a new container of a new host-network pod; returns output and
    /// status, and removes the pod.
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

    /// Removes all objects through the CRI, ends the daemon, and fails if any object of this node remains.
    pub fn stop(mut self) {
        if self.daemon.is_none() {
            self.launch();
        }
        let pods = self.list_pod_sandbox(ListPodSandboxRequest::default()).expect("the daemon lists pods");
        for pod in pods.items {
            self.remove_pod(&pod.id);
        }
        // Those that serve neighbours end with the daemon, others by themselves.
        let mut serving = Vec::new();
        wait_until("all children of the daemon have ended", || {
            serving = self.workers();
            serving.iter().all(|worker| worker.command.contains(" mirror"))
        });
        self.terminate();
        wait_until("its servers have ended", || {
            serving.iter().all(|worker| !Path::new(&format!("/proc/{}", worker.pid)).exists())
        });
        let rests = wait_for_none(|| self.rests());
        assert!(rests.is_empty(), "left behind on the machine:\n{}", rests.join("\n"));
        let threads = self.threads.load(Ordering::Relaxed);
        assert!(threads <= 1, "the daemon was seen with {threads} threads");
        self.sweep();
        self.is_stopped = true;
        // EINVAL: it is no mount.
        let _ = nix::mount::umount(&self.state);
        fs::remove_dir_all(&self.folder).expect("the node's folder goes");
    }

    /// Writes another configuration for the next start or SIGHUP; `more` may add to existing sections.
    pub fn rewrite_config(&self, more: &str) {
        let more = more.replace("BRIDGE", &self.bridge()).replace("SUBNET", &self.subnet());
        let text = crate::config::text(&more, &self.folder);
        fs::write(self.folder.join("config.toml"), text).expect("the node's configuration");
        fs::create_dir_all(self.plugins()).expect("a folder for plugins");
    }

    /// Writes a conflist as on a Debian node with containernetworking-plugins.
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

    /// Records the daemon's number of threads every few milliseconds until the node is stopped.
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

    /// Removes the node's own objects and, after a failure, those of the daemon.
    fn sweep(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(sampler) = self.sampler.take() {
            // It only reads numbers; its result is not needed.
            let _ = sampler.join();
        }
        // The bridge plugin keeps its bridge for the next pod by design.
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

    /// Kills all processes of a failed test's pods, monitors first.
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

/// Mounts a tmpfs on a new directory, which only root can access.
fn mount_tmpfs(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let no = MsFlags::empty();
    nix::mount::mount(Some("tmpfs"), directory, Some("tmpfs"), no, Some("mode=0700")).map_err(io::Error::from)
}

/// Waits, with a time limit, until `look` finds no objects; returns the remaining ones.
fn wait_for_none(look: impl Fn() -> Vec<String>) -> Vec<String> {
    host::wait_within(Duration::from_secs(5) * host::slowness(), || look().is_empty().then(Vec::new))
        .unwrap_or_else(look)
}
