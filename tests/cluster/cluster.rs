//! A whole Kubernetes cluster of one node with coracle as its runtime. It runs in the namespaces that
//! `tests/cluster/namespaces` creates: its own network, where fixed addresses cannot collide, and its own `/run` and
//! `/var/lib`, where the kubelet's fixed paths belong to this cluster only. All of its processes end with these
//! namespaces; [`Cluster::stop`] ends them in order and checks that coracle removed everything.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use coracle_tests::cri::proto::{CgroupDriver, RuntimeConfigRequest};
use coracle_tests::host::{self, wait_within};
use coracle_tests::node::{self, Node, Options};
use coracle_tests::peer::Peer;
use coracle_tests::request::DEFAULT_NETWORK;
use serde_json::Value;

use crate::certificates::Certificates;
use crate::history::read_from;

/// Address of the node, which `tests/cluster/namespaces` sets.
const ADDRESS: &str = "10.88.0.1";
/// Addresses of services; the first is that of the API server.
const SERVICES: &str = "10.96.0.0/16";
const DNS: &str = "10.96.0.10";
/// Time limit of each step of the start, which takes seconds on a quiet machine.
const STEP_LIMIT: Duration = Duration::from_secs(180);
/// The archive of the images that every cluster has, in the directory of [`tools`].
pub(crate) const IMAGES: &str = "images-cluster.tar";
/// Configuration with which the kubelet's cAdvisor finds pods.
const METRICS: &str = "[metrics]\ncontainerd_socket = \"/run/containerd/containerd.sock\"\n";
const APISERVER: &str = "kube-apiserver";
/// Time limit for processes to end after SIGTERM.
const END_LIMIT: Duration = Duration::from_secs(20);

/// A running cluster.
pub(crate) struct Cluster {
    /// The node's runtime; without pods if `peer` is the runtime.
    pub(crate) node: Node,
    /// The runtime in the place of coracle.
    peer: Option<Peer>,
    begin: Instant,
    certificates: Certificates,
    kubelet: Option<Child>,
    /// The range of the pods' addresses.
    pods: String,
    /// Lines that are added to the kubelet's configuration at its next start.
    kubelet_lines: String,
    /// The control plane and kube-proxy, in the order of their start.
    processes: Vec<Program>,
}

/// A program of the control plane, or kube-proxy.
struct Program {
    name: &'static str,
    arguments: Vec<String>,
    child: Child,
}

/// The directory `target` of this checkout, or `CORACLE_CLUSTER_TARGET`.
pub(crate) fn target() -> PathBuf {
    let usual = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    std::env::var_os("CORACLE_CLUSTER_TARGET").map_or_else(usual, PathBuf::from)
}

/// Directory of the programs and images, which `tests/tools/install cluster` makes: the newest version, or
/// `CORACLE_CLUSTER_TOOLS`.
pub(crate) fn tools() -> PathBuf {
    if let Some(given) = std::env::var_os("CORACLE_CLUSTER_TOOLS") {
        return given.into();
    }
    let tools = target().join("tools");
    let entries = fs::read_dir(&tools).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_cluster =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("cluster-"));
    let found = entries.filter(is_cluster).max();
    found.unwrap_or_else(|| {
        panic!("no cluster-VERSION in {}: `tests/tools/install cluster` builds it", tools.display())
    })
}

fn directory(path: PathBuf) -> PathBuf {
    fs::create_dir_all(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    path
}

impl Cluster {
    /// Starts all programs; returns when the node is ready and the DNS server serves.
    pub(crate) fn start(more_images: &[&str]) -> Cluster {
        let node =
            Node::with(Options { config: format!("{DEFAULT_NETWORK}{METRICS}"), ..Options::default() });
        Cluster::with(node, None, None, more_images).serving()
    }

    /// Starts all programs with this range of pods' addresses on a node without a network: it becomes ready when an
    /// add-on has configured one.
    pub(crate) fn start_without_network(pods: &str, more_images: &[&str]) -> Cluster {
        let node = Node::with(Options { config: METRICS.into(), ..Options::default() });
        Cluster::with(node, None, Some(pods), more_images)
    }

    /// Starts a cluster with containerd as its runtime; the programs are those of `tests/tools/install cluster-peer`.
    pub(crate) fn start_with_containerd() -> Cluster {
        let node = Node::with_bridge();
        let network = fs::read_to_string(node.cni().join("10-boat.conflist")).expect("the node's network");
        let peer = Peer::start(&directory(node.folder().join("containerd")), &node.bridge(), &network, None);
        Cluster::with(node, Some(peer), None, &[]).serving()
    }

    fn with(node: Node, peer: Option<Peer>, pods: Option<&str>, more_images: &[&str]) -> Cluster {
        let begin = Instant::now();
        directory(node.folder().join("logs"));
        let certificates = Certificates::new(node.folder().join("certificates"));
        let pods = pods.map_or_else(|| format!("{}.0/24", node.subnet()), str::to_owned);
        let mut cluster = Cluster {
            node,
            peer,
            begin,
            certificates,
            kubelet: None,
            pods,
            kubelet_lines: String::new(),
            processes: Vec::new(),
        };
        let images = [IMAGES].iter().chain(more_images);
        let mut imports: Vec<Child> = images.map(|name| cluster.import(&tools().join(name))).collect(); // an absolute path replaces the directory
        cluster.start_etcd();
        cluster.start_apiserver();
        cluster.start_controllers();
        cluster.say("the API server answers");
        for child in &mut imports {
            assert!(
                child.wait().expect("our child").success(),
                "an import failed: {}",
                cluster.log("import")
            );
        }
        cluster.say("images are imported");
        cluster.start_kubelet();
        cluster.start_proxy();
        cluster.apply(include_str!("manifests/dns.yaml"));
        cluster
    }

    /// Waits until the node is ready and the DNS server serves.
    pub(crate) fn serving(mut self) -> Cluster {
        self.wait("the node is ready", |cluster| cluster.is_node_ready().then_some(()));
        self.say("the node is ready");
        let expected =
            if host::has_systemd_driver() { CgroupDriver::Systemd } else { CgroupDriver::Cgroupfs };
        let config =
            self.node.runtime_config(RuntimeConfigRequest::default()).expect("the runtime's configuration");
        assert_eq!(config.linux.expect("on Linux").cgroup_driver(), expected);
        self.wait("the DNS server is available", |cluster| {
            let deployment = cluster.get(&["-n", "kube-system", "deployment", "coredns"])?;
            (deployment["status"]["availableReplicas"] == 1).then_some(())
        });
        self.say("the DNS server serves");
        self
    }

    /// Prints a line with the time since the start.
    pub(crate) fn say(&self, what: &str) {
        println!("{:7.1} s  {what}", self.begin.elapsed().as_secs_f64());
    }

    /// Time since the start.
    pub(crate) fn age(&self) -> Duration {
        self.begin.elapsed()
    }

    /// PID of the runtime's daemon.
    pub(crate) fn runtime_pid(&self) -> i32 {
        self.peer.as_ref().map_or_else(|| self.node.pid(), Peer::pid)
    }

    /// Names and PIDs of the programs that run beside the runtime.
    pub(crate) fn programs(&self) -> Vec<(&'static str, i32)> {
        let kubelet = self.kubelet.iter().map(|child| ("kubelet", child.id() as i32));
        kubelet.chain(self.processes.iter().map(|one| (one.name, one.child.id() as i32))).collect()
    }

    fn runtime_socket(&self) -> PathBuf {
        self.peer.as_ref().map_or_else(|| self.node.socket(), Peer::socket)
    }

    /// Kubeconfig of an administrator.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.certificates.path("admin.kubeconfig")
    }

    /// Log of one of the programs.
    pub(crate) fn log(&self, name: &str) -> String {
        fs::read_to_string(self.node.folder().join(format!("logs/{name}.log"))).unwrap_or_default()
    }

    /// Size of the log of one of the programs.
    pub(crate) fn log_bytes(&self, name: &str) -> u64 {
        let path = self.node.folder().join(format!("logs/{name}.log"));
        fs::metadata(path).map_or(0, |about| about.len())
    }

    /// The part of a log from this byte on.
    pub(crate) fn log_since(&self, name: &str, offset: u64) -> String {
        read_from(&self.node.folder().join(format!("logs/{name}.log")), offset)
    }

    fn log_file(&self, name: &str) -> fs::File {
        let path = self.node.folder().join(format!("logs/{name}.log"));
        fs::File::options().create(true).append(true).open(&path).expect("a log")
    }

    /// Starts the import of an archive of images into the node's runtime.
    pub(crate) fn import(&self, archive: &Path) -> Child {
        assert!(archive.exists(), "{}: `tests/tools/install` makes it", archive.display());
        let mut command = self.peer.as_ref().map_or_else(
            || {
                let mut command = Command::new(node::binaries().join("coracle"));
                command.arg("image").arg("--config").arg(self.node.folder().join("config.toml"));
                command.arg("--state").arg(self.node.state()).arg("import");
                command
            },
            Peer::import_command,
        );
        command
            .arg(archive)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(self.log_file("import"))
            .spawn()
            .expect("the program runs")
    }

    /// Starts one program in a process group of its own, so that a terminal's signals do not reach it.
    fn spawn(&self, program: &Path, name: &str, arguments: &[String]) -> Child {
        Command::new(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(self.log_file(name))
            .stderr(self.log_file(name))
            .process_group(0)
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", program.display()))
    }

    fn run(&mut self, name: &'static str, arguments: &[String]) {
        let child = self.spawn(&tools().join("bin").join(name), name, arguments);
        self.processes.push(Program { name, arguments: arguments.to_vec(), child });
    }

    /// Kills the API server; returns its arguments for [`Cluster::restart_apiserver`].
    pub(crate) fn kill_apiserver(&mut self) -> Vec<String> {
        let position = self.processes.iter().position(|one| one.name == APISERVER).expect("it runs");
        let mut program = self.processes.remove(position);
        program.child.kill().expect("it is ours");
        program.child.wait().expect("our child");
        program.arguments
    }

    /// Starts the API server again with the arguments of its predecessor; waits until it is ready.
    pub(crate) fn restart_apiserver(&mut self, arguments: &[String]) {
        self.run(APISERVER, arguments);
        self.wait_for_apiserver();
    }

    fn wait_for_apiserver(&mut self) {
        self.wait("the API server is ready", |cluster| {
            cluster.kubectl(&["get", "--raw=/readyz"]).status.success().then_some(())
        });
    }

    fn at(&self, name: &str) -> String {
        self.certificates.path(name).display().to_string()
    }

    fn start_etcd(&mut self) {
        let data = self.node.folder().join("etcd");
        let arguments = [
            format!("--data-dir={}", data.display()),
            "--unsafe-no-fsync".into(),
            "--listen-client-urls=http://127.0.0.1:2379".into(),
            "--advertise-client-urls=http://127.0.0.1:2379".into(),
            "--listen-peer-urls=http://127.0.0.1:2380".into(),
        ];
        self.run("etcd", &arguments);
    }

    fn start_apiserver(&mut self) {
        let names = [
            "DNS:kubernetes",
            "DNS:kubernetes.default",
            "DNS:kubernetes.default.svc",
            "DNS:kubernetes.default.svc.cluster.local",
            "DNS:localhost",
            "IP:127.0.0.1",
            "IP:10.96.0.1",
            "IP:10.88.0.1",
        ];
        self.certificates.issue("apiserver", "/CN=kube-apiserver", &names);
        self.certificates.issue("kubelet-client", "/O=system:masters/CN=apiserver-kubelet-client", &[]);
        self.certificates.issue("front-proxy", "/CN=front-proxy", &[]);
        let server = format!("https://{ADDRESS}:6443");
        self.certificates.kubeconfig("admin", "/O=system:masters/CN=admin", &server);
        let ca = self.at("ca.crt");
        let arguments = [
            "--etcd-servers=http://127.0.0.1:2379".into(),
            format!("--advertise-address={ADDRESS}"),
            format!("--service-cluster-ip-range={SERVICES}"),
            format!("--tls-cert-file={}", self.at("apiserver.crt")),
            format!("--tls-private-key-file={}", self.at("apiserver.key")),
            format!("--client-ca-file={ca}"),
            format!("--kubelet-client-certificate={}", self.at("kubelet-client.crt")),
            format!("--kubelet-client-key={}", self.at("kubelet-client.key")),
            "--kubelet-preferred-address-types=InternalIP".into(),
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local".into(),
            format!("--service-account-key-file={}", self.at("sa.pub")),
            format!("--service-account-signing-key-file={}", self.at("sa.key")),
            "--authorization-mode=Node,RBAC".into(),
            "--enable-admission-plugins=NodeRestriction".into(),
            "--allow-privileged=true".into(),
            format!("--requestheader-client-ca-file={ca}"),
            "--requestheader-allowed-names=front-proxy".into(),
            "--requestheader-extra-headers-prefix=X-Remote-Extra-".into(),
            "--requestheader-group-headers=X-Remote-Group".into(),
            "--requestheader-username-headers=X-Remote-User".into(),
            format!("--proxy-client-cert-file={}", self.at("front-proxy.crt")),
            format!("--proxy-client-key-file={}", self.at("front-proxy.key")),
        ];
        self.run(APISERVER, &arguments);
        self.wait_for_apiserver();
    }

    fn start_controllers(&mut self) {
        let server = format!("https://{ADDRESS}:6443");
        let of = |name: &str| {
            self.certificates.kubeconfig(name, &format!("/CN=system:{name}"), &server).display().to_string()
        };
        let (manager, scheduler) = (of("kube-controller-manager"), of("kube-scheduler"));
        let arguments = [
            format!("--kubeconfig={manager}"),
            format!("--authentication-kubeconfig={manager}"),
            format!("--authorization-kubeconfig={manager}"),
            "--use-service-account-credentials".into(),
            format!("--service-account-private-key-file={}", self.at("sa.key")),
            format!("--root-ca-file={}", self.at("ca.crt")),
            format!("--cluster-signing-cert-file={}", self.at("ca.crt")),
            format!("--cluster-signing-key-file={}", self.at("ca.key")),
            "--leader-elect=false".into(),
            "--allocate-node-cidrs".into(),
            "--node-cidr-mask-size=24".into(),
            format!("--cluster-cidr={}", self.pods),
            format!("--service-cluster-ip-range={SERVICES}"),
        ];
        self.run("kube-controller-manager", &arguments);
        let arguments = [
            format!("--kubeconfig={scheduler}"),
            format!("--authentication-kubeconfig={scheduler}"),
            format!("--authorization-kubeconfig={scheduler}"),
            "--leader-elect=false".into(),
        ];
        self.run("kube-scheduler", &arguments);
    }

    /// Starts a kubelet; the previous one must have ended.
    pub(crate) fn start_kubelet(&mut self) {
        let server = format!("https://{ADDRESS}:6443");
        let kubeconfig = self.certificates.path("kubelet.kubeconfig");
        let config = self.node.folder().join("kubelet.yaml");
        if !kubeconfig.exists() {
            self.certificates.kubeconfig("kubelet", "/O=system:nodes/CN=system:node:node", &server);
            fs::write(self.resolver(), format!("nameserver {DNS}\n")).expect("a file");
            if !host::has_systemd_driver() {
                host::make_kubelet_cgroups(&self.node.cgroup_parent());
            }
        }
        fs::write(&config, self.kubelet_config()).expect("a file");
        let program = target().join("tools/bin/kubelet");
        let arguments = [
            format!("--config={}", config.display()),
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--cert-dir={}", self.node.folder().join("kubelet-certificates").display()),
            "--hostname-override=node".into(),
            format!("--node-ip={ADDRESS}"),
            "--v=2".into(),
        ];
        self.kubelet = Some(self.spawn(&program, "kubelet", &arguments));
    }

    fn resolver(&self) -> PathBuf {
        self.node.folder().join("resolv.conf")
    }

    /// Adds lines to the configuration of the kubelets that are started from now on; they replace those of the
    /// previous call.
    pub(crate) fn configure_kubelet(&mut self, lines: &str) {
        lines.clone_into(&mut self.kubelet_lines);
    }

    fn kubelet_config(&self) -> String {
        let cgroups = match host::has_systemd_driver() {
            true => "cgroupDriver: systemd".to_owned(),
            false => format!("cgroupDriver: cgroupfs\ncgroupRoot: /{}", self.node.cgroup_parent()),
        };
        format!(
            "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
             authentication: {{anonymous: {{enabled: false}}, webhook: {{enabled: true}}, x509: {{clientCAFile: {}}}}}\n\
             authorization: {{mode: Webhook}}\n{cgroups}\nfailCgroupV1: false\n\
             failSwapOn: false\nclusterDNS: [{DNS}]\nclusterDomain: cluster.local\nresolvConf: {}\n\
             containerRuntimeEndpoint: unix://{}\nstaticPodPath: {}\nimageGCHighThresholdPercent: 100\n\
             imageGCLowThresholdPercent: 99\nevictionHard: {{\"memory.available\": 50Mi}}\n{}",
            self.at("ca.crt"),
            self.resolver().display(),
            self.runtime_socket().display(),
            directory(self.node.folder().join("static")).display(),
            self.kubelet_lines,
        )
    }

    /// Kills the kubelet with SIGKILL.
    pub(crate) fn kill_kubelet(&mut self) {
        if let Some(mut child) = self.kubelet.take() {
            child.kill().expect("it is ours");
            child.wait().expect("our child");
        }
    }

    /// Starts the kubelet again if it has ended, as a service manager does: at its start it ends if the runtime does not
    /// answer. Returns whether it had ended.
    pub(crate) fn revive_kubelet(&mut self) -> bool {
        let Some(child) = &mut self.kubelet else { return false };
        if child.try_wait().expect("our child").is_none() {
            return false;
        }
        self.start_kubelet();
        true
    }

    fn start_proxy(&mut self) {
        let server = format!("https://{ADDRESS}:6443");
        let kubeconfig = self.certificates.kubeconfig("kube-proxy", "/CN=system:kube-proxy", &server);
        let config = self.node.folder().join("kube-proxy.yaml");
        // Only the initial network namespace may set the limits of connection tracking.
        let text = format!(
            "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: iptables\n\
             clientConnection: {{kubeconfig: {}}}\nclusterCIDR: {}\nhostnameOverride: node\n\
             conntrack: {{maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}}\n",
            kubeconfig.display(),
            self.pods
        );
        fs::write(&config, text).expect("a file");
        self.run("kube-proxy", &[format!("--config={}", config.display())]);
    }

    /// Runs kubectl as an administrator.
    pub(crate) fn kubectl(&self, arguments: &[&str]) -> Output {
        self.kubectl_command(arguments).stdin(Stdio::null()).output().expect("kubectl runs")
    }

    /// A command of kubectl as an administrator.
    pub(crate) fn kubectl_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(tools().join("bin/kubectl"));
        command.arg("--kubeconfig").arg(self.kubeconfig()).args(arguments);
        command
    }

    /// Runs kubectl and returns its output; panics with its error.
    #[track_caller]
    pub(crate) fn must(&self, arguments: &[&str]) -> String {
        let output = self.kubectl(arguments);
        assert!(
            output.status.success(),
            "kubectl {arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Applies a manifest; panics with kubectl's error.
    #[track_caller]
    pub(crate) fn apply(&self, manifest: &str) {
        let file = self.node.folder().join("manifest.yaml");
        fs::write(&file, manifest).expect("a file");
        self.must(&["apply", "-f", &file.display().to_string()]);
    }

    /// `kubectl get … -o json`; `None` if it fails.
    pub(crate) fn get(&self, arguments: &[&str]) -> Option<Value> {
        let words: Vec<&str> = ["get", "-o", "json"].iter().chain(arguments).copied().collect();
        let output = self.kubectl(&words);
        output.status.success().then(|| serde_json::from_slice(&output.stdout).expect("kubectl writes JSON"))
    }

    /// Waits until `condition` returns a value; panics with `what` and the last lines of the kubelet's log.
    #[track_caller]
    pub(crate) fn wait<T>(&mut self, what: &str, mut condition: impl FnMut(&Cluster) -> Option<T>) -> T {
        const LOOK_AGAIN: Duration = Duration::from_millis(200);
        let end = Instant::now() + STEP_LIMIT * host::slowness();
        loop {
            if let Some(value) = condition(self) {
                return value;
            }
            for Program { name, child, .. } in &mut self.processes {
                if let Some(status) = child.try_wait().expect("our child") {
                    let log = fs::read_to_string(self.node.folder().join(format!("logs/{name}.log")))
                        .unwrap_or_default();
                    panic!("{what}: {name} ended with {status}:\n{}", last_lines(&log));
                }
            }
            assert!(
                Instant::now() < end,
                "timeout: {what}; the kubelet's log:\n{}",
                last_lines(&self.log("kubelet"))
            );
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Whether all pods of a deployment are of its newest generation and available.
    pub(crate) fn is_rolled_out(&self, deployment: &str) -> bool {
        let output =
            self.kubectl(&["rollout", "status", &format!("deployment/{deployment}"), "--watch=false"]);
        String::from_utf8_lossy(&output.stdout).contains("successfully rolled out")
    }

    /// Whether the API server shows the node as ready.
    pub(crate) fn is_node_ready(&self) -> bool {
        self.readiness().is_some_and(|condition| condition["status"] == "True")
    }

    /// The condition `Ready` of the node.
    pub(crate) fn readiness(&self) -> Option<Value> {
        let node = self.get(&["node", "node"])?;
        let conditions = node["status"]["conditions"].as_array()?;
        conditions.iter().find(|one| one["type"] == "Ready").cloned()
    }

    /// Ends all programs, the kubelet first, removes all pods through the CRI, and fails if an object of coracle
    /// remains.
    pub(crate) fn stop(mut self) {
        if let Some(mut child) = self.kubelet.take() {
            let pid = nix::unistd::Pid::from_raw(child.id() as i32);
            nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).expect("it is ours");
            let status = wait_within(END_LIMIT * host::slowness(), || child.try_wait().expect("our child"));
            assert!(status.is_some(), "the kubelet did not end within {END_LIMIT:?} after SIGTERM");
        }
        // The others have nothing to save, and the API server waits for its clients.
        for Program { child, .. } in self.processes.iter_mut().rev() {
            child.kill().expect("it is ours");
            child.wait().expect("our child");
        }
        // The kubelet's volumes.
        for line in host::mounts("/var/lib/kubelet/").iter().rev() {
            let place = line.split(' ').nth(4).unwrap_or_default();
            nix::mount::umount2(place, nix::mount::MntFlags::MNT_DETACH).expect("a volume");
        }
        let Cluster { node, peer, .. } = self;
        if let Some(peer) = peer {
            peer.stop();
        }
        node.stop();
    }
}

/// The end of a log.
fn last_lines(text: &str) -> String {
    const LINES: usize = 15;
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}
