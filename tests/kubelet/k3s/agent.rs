//! The part of k3s' agent: the files that it writes at each start, in its order, and its kubelet with its flags. The agent
//! contains its kubelet, so both start and end together. k3s itself is not run: its programs are not among the
//! packages that this project's tests may use.
//!
//! Source: k3s 1.33 to 1.36, pkg/agent/run.go (order), pkg/daemons/agent/agent_linux.go (flags), pkg/agent/flannel
//! (conflist, subnet file), pkg/agent/cri (first call), install.sh (killall).

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use coracle_tests::cri::proto::VersionRequest;
use coracle_tests::host::{self, wait_within};
use coracle_tests::kubelet;
use nix::mount::{MntFlags, umount2};
use serde_json::Value;

use super::machine::{BRIDGE, Machine, mount_points};

const DATA: &str = "/var/lib/rancher/k3s";
/// Directories of the agent: static pods, archives of images, its CNI configuration.
pub(super) const IMAGES: &str = "/var/lib/rancher/k3s/agent/images";
const PODS: &str = "/var/lib/rancher/k3s/agent/pod-manifests";
const CNI: &str = "/var/lib/rancher/k3s/agent/etc/cni/net.d";
/// The agent's file for `k3s crictl`.
const CRICTL: &str = "/var/lib/rancher/k3s/agent/etc/crictl.yaml";
/// Directory of the kubelet's configuration, and the file in it that k3s writes at each start.
const KUBELET: &str = "/var/lib/rancher/k3s/agent/etc/kubelet.conf.d";
const DEFAULTS: &str = "00-k3s-defaults.conf";
/// The file that flannel writes once it has the node's range, and the range.
const SUBNET: &str = "/run/flannel/subnet.env";
pub(super) const RANGE: &str = "10.42.0.";
/// Packets in flannel's VXLAN are this long.
pub(super) const MTU: u32 = 1450;
/// `--kubelet-arg=read-only-port=…` of the test's user: k3s itself closes the port.
const READ_ONLY_PORT: u16 = 10255;
/// A kubelet waits up to ten seconds between two attempts at a pod, and the machines of tests are slow.
const PATIENCE: Duration = Duration::from_secs(120);

/// The network of k3s. flannel's plugin calls `bridge`, and the others follow it.
const CONFLIST: &str = r#"{"name":"cbr0","cniVersion":"1.0.0","plugins":[
{"type":"flannel","delegate":{"hairpinMode":true,"forceAddress":true,"isDefaultGateway":true}},
{"type":"portmap","capabilities":{"portMappings":true}},
{"type":"bandwidth","capabilities":{"bandwidth":true}}]}
"#;

/// Settings of the test, in a file of its own as users add them: no API server decides on requests, and cgroups are
/// below a directory of the test.
const SETTINGS: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
    authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}\nauthorization: {mode: AlwaysAllow}\n\
    cgroupRoot: /PARENT\nenforceNodeAllocatable: []\nfailCgroupV1: false\n\
    evictionHard: {\"memory.available\": \"1Mi\"}\n";

/// A running agent.
pub(super) struct Agent {
    kubelet: Child,
    log: PathBuf,
}

/// Installs what k3s' installer and its first start leave on a node, with its own containerd as the runtime.
pub(super) fn install(machine: &Machine) {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let trees = tests.join("packaging/trees");
    // k3s of a new Kubernetes comes later: until then its tree is that of the version before.
    let mut of_versions = (1..=kubelet_minor()).rev().map(|minor| trees.join(format!("k3s-1.{minor}")));
    let tree = of_versions.find(|tree| tree.exists()).expect("a tree for this kubelet or an older one");
    for (from, to) in [("etc", "/etc"), ("var/lib", "/var/lib")] {
        sh(&format!("cp -r {}/{from}/. {to}", tree.display()));
    }
    // k3s uses this driver where systemd is not the first process.
    let defaults = Path::new(KUBELET).join(DEFAULTS);
    let text = fs::read_to_string(&defaults)
        .expect("part of the tree")
        .replace("cgroupDriver: systemd", "cgroupDriver: cgroupfs");
    fs::write(defaults, text).expect("a file");
    fs::write(Path::new(KUBELET).join("10-test.conf"), SETTINGS.replace("PARENT", &machine.cgroup_parent()))
        .expect("a file");
    let plugins = Path::new(DATA).join("data/cni");
    for directory in [plugins.as_path(), Path::new(IMAGES), Path::new(PODS)] {
        fs::create_dir_all(directory).expect("a directory");
    }
    let tools =
        fs::canonicalize(tests.join("../target/tools/bin")).expect("`tests/tools/install test` makes it");
    symlink(tools.join("flannel"), plugins.join("flannel")).expect("a link");
    for plugin in ["bridge", "host-local", "loopback", "portmap", "bandwidth"] {
        symlink(Path::new("/usr/lib/cni").join(plugin), plugins.join(plugin)).expect("a link");
    }
    // k3s' server signs both.
    let agent = Path::new(DATA).join("agent").display().to_string();
    sh(&format!(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 7 -subj /CN=node \
         -keyout {agent}/serving-kubelet.key -out {agent}/serving-kubelet.crt && \
         cp {agent}/serving-kubelet.crt {agent}/client-ca.crt"
    ));
}

/// Writes a static pod on the pod network.
pub(super) fn write_pod(name: &str, image: &str, policy: &str, words: &str, more: &str) {
    let text = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: kube-system}}\nspec:\n  \
         terminationGracePeriodSeconds: 1\n  containers:\n  - name: main\n    image: {image}\n    \
         imagePullPolicy: {policy}\n    args: [{words}]\n{more}"
    );
    fs::write(Path::new(PODS).join(format!("{name}.yaml")), text).expect("a manifest");
}

impl Agent {
    /// Starts the agent: its files, then the first call to the runtime, then the kubelet. The subnet file follows when
    /// the API server has answered: [`Agent::start_flannel`].
    pub(super) fn start(machine: &Machine) -> Agent {
        let endpoint = endpoint();
        fs::write(CRICTL, format!("runtime-endpoint: {endpoint}\n")).expect("crictl.yaml");
        fs::create_dir_all(CNI).expect("a directory");
        fs::write(Path::new(CNI).join("10-flannel.conflist"), CONFLIST).expect("the network");
        let defaults = Path::new(KUBELET).join(DEFAULTS);
        let text = fs::read_to_string(&defaults).expect("part of the tree");
        let lines = text.lines().map(|line| match line.strip_prefix("containerRuntimeEndpoint: ") {
            Some(_) => format!("containerRuntimeEndpoint: {endpoint}\n"),
            None => format!("{line}\n"),
        });
        fs::write(&defaults, lines.collect::<String>()).expect("the kubelet's configuration");
        host::wait_until("the runtime answers", || {
            machine.cri.version(VersionRequest { version: "0.1.0".into() }).is_ok()
        });
        let log = machine.folder.join("k3s.log");
        let file = fs::File::options().create(true).append(true).open(&log).expect("a log");
        let kubelet = Command::new(kubelet::program())
            .args(["--cloud-provider=external", "--hostname-override=node", "--node-ip=10.88.0.1"])
            .args([format!("--config-dir={KUBELET}"), "--node-labels=".into(), "--read-only-port=0".into()])
            .arg(format!("--read-only-port={READ_ONLY_PORT}"))
            .stdin(Stdio::null())
            .stdout(file.try_clone().expect("a descriptor"))
            .stderr(file)
            .spawn()
            .expect("the kubelet runs");
        Agent { kubelet, log }
    }

    /// Writes the subnet file, as flannel does once it has the node's range.
    pub(super) fn start_flannel(&self) {
        fs::create_dir_all("/run/flannel").expect("a directory");
        let new = format!("{SUBNET}.new");
        let text = format!(
            "FLANNEL_NETWORK=10.42.0.0/16\nFLANNEL_SUBNET={RANGE}1/24\nFLANNEL_MTU={MTU}\nFLANNEL_IPMASQ=true\n"
        );
        fs::write(&new, text).and_then(|()| fs::rename(&new, SUBNET)).expect("the subnet file");
    }

    /// Kills k3s, as a crash or the end of its unit does: with its unit's `KillMode=process` nothing else ends. Waits for the
    /// programs that the kubelet has started: rules that its iptables adds make the iptables-restore of [`killall`] fail.
    pub(super) fn kill(&mut self) {
        let started = host::children(self.kubelet.id() as i32);
        self.kubelet.kill().expect("it is ours");
        self.kubelet.wait().expect("our child");
        host::wait_until("the kubelet's programs have ended", || {
            !started.iter().any(|pid| host::is_alive(*pid))
        });
    }

    /// The status of the container of a pod, from the kubelet, once it is ready.
    pub(super) fn ready(&self, pod: &str) -> Value {
        self.wait(&format!("{pod} is ready"), || {
            kubelet::container(READ_ONLY_PORT, pod).filter(|status| status["ready"] == true)
        })
    }

    /// Waits until `condition` returns a value; panics with the kubelet's last errors.
    #[track_caller]
    pub(super) fn wait<T>(&self, what: &str, condition: impl FnMut() -> Option<T>) -> T {
        wait_within(PATIENCE, condition).unwrap_or_else(|| {
            let log = fs::read_to_string(&self.log).unwrap_or_default();
            let errors: Vec<_> = log.lines().filter(|line| line.starts_with('E')).rev().take(10).collect();
            panic!("timeout: {what}; the kubelet's last errors:\n{}", errors.join("\n"))
        })
    }
}

/// The endpoint that k3s reads from the drop-in of `coracle k3s enable`.
fn endpoint() -> String {
    let text =
        fs::read_to_string("/etc/rancher/k3s/config.yaml.d/50-coracle.yaml").expect("`enable` wrote it");
    let value = text.lines().find_map(|line| line.strip_prefix("container-runtime-endpoint: "));
    value.expect("it has the endpoint").trim_matches('"').to_owned()
}

/// `k3s crictl` with these arguments.
pub(super) fn crictl(words: &[&str]) -> Output {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tools/bin/crictl");
    Command::new(program)
        .args(["--config", CRICTL])
        .args(words)
        .stdin(Stdio::null())
        .output()
        .expect("crictl runs")
}

/// Does what `k3s-killall.sh` does after it has stopped k3s' units: it kills the shims of k3s' containerd with all that they
/// started, unmounts and removes what is below k3s' and the kubelet's directories, removes network namespaces and links that
/// it knows by name, all leases, and iptables' rules of Kubernetes and CNI. Returns the shims.
pub(super) fn killall() -> Vec<host::Process> {
    let shims = host::processes(&format!("{DATA}/data/"));
    let shims: Vec<_> =
        shims.into_iter().filter(|one| one.command.contains("/bin/containerd-shim")).collect();
    for point in
        mount_points(&["/run/k3s", "/var/lib/kubelet/pods", "/var/lib/kubelet/plugins", "/run/netns/cni-"])
    {
        umount2(point.as_str(), MntFlags::MNT_FORCE).unwrap_or_else(|errno| panic!("{point}: {errno}"));
        let _ = fs::remove_dir_all(&point); // `rm -rf`
    }
    for link in host::links(BRIDGE).iter().filter(|link| *link != BRIDGE) {
        sh(&format!("ip link delete {link}"));
    }
    for link in [BRIDGE, "flannel.1", "flannel-v6.1", "kube-ipvs0", "flannel-wg", "flannel-wg-v6"] {
        // Most of them do not exist.
        let _ = Command::new("ip").args(["link", "delete", link]).stderr(Stdio::null()).status();
    }
    // The script continues after an error: a pod whose network is made at this moment has its lease there.
    let _ = Command::new("rm").args(["-rf", "/var/lib/cni/"]).status();
    for tool in ["iptables", "ip6tables"] {
        sh(&format!("{tool}-save | grep -v KUBE- | grep -v CNI- | grep -iv flannel | {tool}-restore"));
    }
    shims
}

/// The minor version of the kubelet: 36 of `Kubernetes v1.36.3`.
fn kubelet_minor() -> u32 {
    let output = Command::new(kubelet::program()).arg("--version").output();
    let output = output.expect("`tests/tools/install test` builds the kubelet");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let minor = text.split('.').nth(1).and_then(|minor| minor.parse().ok());
    minor.unwrap_or_else(|| panic!("the kubelet's version: {text}"))
}

/// Runs a shell command that must succeed.
#[track_caller]
pub(super) fn sh(command: &str) {
    let output = Command::new("sh").args(["-c", command]).output().expect("sh runs");
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}
