//! coracle under k3s, as far as it can be shown without k3s' program: its agent's files, kubelet and order of starts are
//! played by `k3s/agent.rs`, on a machine of its own (`k3s/machine.rs`). What is played:
//!
//! | part of k3s | played as |
//! |---|---|
//! | kubelet | Kubernetes' own of the same version, with k3s' flags. Not k3s': no API server, so static pods only and no webhook authentication |
//! | order of an agent's start | CNI configuration, first call to the runtime, kubelet; `/run/flannel/subnet.env` only later. Until then RunPodSandbox fails with the plugin's error, and leaves nothing |
//! | flannel | its CNI plugin with `bridge` and `host-local` of Debian; k3s' conflist. Not played: flannel's daemon and VXLAN, which `make cluster-flannel` has without k3s; a second node |
//! | `agent/images`, `registries.yaml`, `k3s crictl` | an archive of 300 MiB that is there before coracle starts; a mirror with a rewrite; crictl with the agent's `crictl.yaml` |
//! | restarts | k3s killed and started again, coracle likewise, both (coracle first): the same containers, none restarted |
//! | a reboot | everything killed, `/run` emptied, another boot ID: addresses of the earlier boot are released before k3s runs. A guest's reboot is tested without k3s |
//! | `k3s-killall.sh` | its effects, in its order: shims by name, mounts, network namespaces, links, leases, rules |
//!
//! With `tests/tools/kubelet-version VERSION` the same runs with the kubelets of other versions.

mod agent;
mod machine;

use std::fs;
use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use coracle_tests::cri::proto::{Container, ListImagesRequest, PodSandbox, PodSandboxState};
use coracle_tests::image::{self, Image};
use coracle_tests::registry::Registry;
use coracle_tests::{host, node};
use serde_json::json;

use agent::{Agent, MTU, RANGE};
use machine::Machine;

/// The image of the archive in k3s' directory, and one that the registry has.
const AIRGAP: &str = "docker.io/rancher/airgap-probe:v1";
const MIRRORED: &str = "docker.io/rancher/mirrored-probe:2";
/// Size of the archive.
const ARCHIVE_MIB: u32 = 300;
/// Port of the pod `web`, and the node's port that leads to it.
const PORT: u16 = 8080;
const HOST_PORT: u16 = 8085;

/// Whether this process is in the namespaces. Otherwise runs the test of this name there.
fn is_inside(name: &str) -> bool {
    host::require_root();
    if std::env::var_os("CORACLE_CLUSTER").is_some() {
        return true;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("cluster/namespaces");
    let program = std::env::current_exe().expect("this program has a path");
    let output = Command::new(script)
        .arg(program)
        .args(["--exact", &format!("k3s::{name}"), "--nocapture"])
        .env("CORACLE_TEST_DIR", node::base().join(format!("k3s-{name}")))
        .output()
        .expect("the script runs");
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    false
}

/// A node on which `coracle k3s enable` has run, and which has the probe's image in k3s' directory of images.
fn enabled_machine() -> Machine {
    let machine = Machine::new();
    agent::install(&machine);
    let output = machine.coracle(&["k3s", "enable"]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    machine
}

/// Writes an archive with the probe's image, as `docker save` does.
fn write_small_archive() {
    let image = Image::probe(&image::program(&node::binaries()), "k3s");
    let archive = image.oci_archive(AIRGAP);
    fs::write(Path::new(agent::IMAGES).join("probe.tar"), archive).expect("an archive");
}

/// Writes an archive like k3s' own of several hundred megabytes: `docker save` of an image with one large layer.
fn write_large_archive(folder: &Path) {
    let place = folder.join("airgap");
    let root = place.join("root");
    fs::create_dir_all(&root).expect("a directory");
    fs::write(root.join("probe"), image::program(&node::binaries())).expect("a file");
    agent::sh(&format!(
        "cd {} && chmod 755 root/probe && head -c {ARCHIVE_MIB}M /dev/urandom >root/data && tar -C root -cf layer.tar . && \
         rm -r root && sha256sum layer.tar | cut -d' ' -f1 >digest",
        place.display()
    ));
    let digest = fs::read_to_string(place.join("digest")).expect("a file");
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let config = json!({
        "architecture": architecture, "os": "linux", "config": { "Entrypoint": ["/probe"] },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{}", digest.trim())] },
    });
    let manifest = json!([{ "Config": "config.json", "RepoTags": [AIRGAP], "Layers": ["layer.tar"] }]);
    fs::write(place.join("config.json"), config.to_string()).expect("a file");
    fs::write(place.join("manifest.json"), manifest.to_string()).expect("a file");
    let images = Path::new(agent::IMAGES).display().to_string();
    agent::sh(&format!(
        "cd {} && tar -cf {images}/k3s-airgap-images.tar config.json layer.tar manifest.json && rm -r {0}",
        place.display()
    ));
}

/// A pod that serves on its own address and on a port of the node; the kubelet connects to it every second.
fn write_web() {
    let more = format!(
        "    ports: [{{containerPort: {PORT}, hostPort: {HOST_PORT}}}]\n    \
         livenessProbe: {{tcpSocket: {{port: {PORT}}}, periodSeconds: 1, failureThreshold: 3}}\n"
    );
    agent::write_pod("web", AIRGAP, "IfNotPresent", &format!("serve, \"{PORT}\""), &more);
}

/// The answer of the pod `web` on the node's port.
fn seen_on_host_port() -> Option<String> {
    const PATIENCE: Duration = Duration::from_secs(2);
    let address = SocketAddr::from(([127, 0, 0, 1], HOST_PORT));
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(text)
}

/// Waits until the pod `web` runs, and checks that it is on k3s' network; returns its container.
fn web_serves(machine: &Machine, agent: &Agent) -> Container {
    agent.ready("web");
    let web = machine.running("web").expect("it is ready");
    let address = machine.address(&web);
    assert!(address.starts_with(RANGE), "{address} is not of flannel's range");
    host::wait_until("the node's port leads to the pod", || {
        seen_on_host_port().is_some_and(|text| text == "hello from web-node\n")
    });
    web
}

/// Removes all pods through crictl and fails if anything of them remains.
fn remove_all_pods(machine: &Machine) {
    let output = agent::crictl(&["rmp", "--all", "--force"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rests = host::wait_within(Duration::from_secs(10), || machine.leftovers().is_empty().then(Vec::new));
    let rests = rests.unwrap_or_else(|| machine.leftovers());
    assert!(rests.is_empty(), "left behind:\n{}", rests.join("\n"));
}

/// Ends the test: no pull failed because an image of the archive was not there yet, and nothing remains.
fn end(machine: Machine) {
    assert!(!machine.log().contains("RegistryUnavailable"), "see {}", machine.folder.display());
    remove_all_pods(&machine);
    machine.end();
}

#[test]
fn k3s_starts_with_its_archive_mirror_and_flannel_and_is_restarted() {
    if !is_inside("k3s_starts_with_its_archive_mirror_and_flannel_and_is_restarted") {
        return;
    }
    let mut machine = enabled_machine();
    let registry = Registry::start(&machine.folder);
    let mirrored = Image::probe(&image::program(&node::binaries()), "mirrored");
    registry.push(&mirrored, "mirror/mirrored-probe", "2");
    let rewrite = "rewrite: {\"^rancher/(.*)\": \"mirror/$1\"}";
    let text =
        format!("mirrors:\n  docker.io:\n    endpoint: [\"http://{}\"]\n    {rewrite}\n", registry.address());
    fs::write("/etc/rancher/k3s/registries.yaml", text).expect("k3s' file");
    write_large_archive(&machine.folder);
    write_web();
    agent::write_pod("pulled", MIRRORED, "Always", "sleep, forever", "");
    machine.start_coracle();
    let agent = Agent::start(&machine);
    // The runtime serves while it imports.
    let images = machine.cri.list_images(ListImagesRequest::default()).expect("an answer").images;
    assert!(!images.iter().any(|image| image.repo_tags.contains(&AIRGAP.to_owned())), "{images:?}");
    // flannel's plugin fails until flannel has its range, and the kubelet tries again.
    agent.wait("a sandbox fails", || machine.log().contains("subnet.env").then_some(()));
    assert!(machine.leases().is_empty() && machine.ports().is_empty(), "the failure was undone");
    agent.start_flannel();
    let web = web_serves(&machine, &agent);
    agent.ready("pulled");
    let pulled = machine.running("pulled").expect("it is ready");
    let address = machine.address(&web);
    let heard = machine.exec(&pulled, &["connect", &format!("{address}:{PORT}")]);
    assert_eq!(heard.as_deref(), Ok("hello from web-node\n"), "from pod to pod");
    let mtu = machine.exec(&pulled, &["cat", "/sys/class/net/eth0/mtu"]);
    assert_eq!(mtu.as_deref().map(str::trim), Ok(MTU.to_string().as_str()));
    let list = String::from_utf8_lossy(&agent::crictl(&["pods", "--quiet"]).stdout).into_owned();
    assert_eq!(list.lines().count(), 2, "k3s crictl: {list}");
    restart_in_each_order(&mut machine, agent, &[web, pulled]);
    end(machine);
}

/// Restarts k3s, coracle, and both: no container may be replaced or restarted.
fn restart_in_each_order(machine: &mut Machine, mut agent: Agent, before: &[Container]) {
    for (restarts_k3s, restarts_coracle) in [(true, false), (false, true), (true, true)] {
        if restarts_k3s {
            agent.kill();
        }
        if restarts_coracle {
            machine.kill_coracle();
            // The unit's order: coracle, then k3s.
            machine.start_coracle();
        }
        if restarts_k3s {
            agent = Agent::start(machine);
            agent.start_flannel();
        }
        for (pod, before) in ["web", "pulled"].iter().zip(before) {
            let status = agent.ready(pod);
            assert_eq!(status["restartCount"], 0, "{pod}, k3s {restarts_k3s}, coracle {restarts_coracle}");
            assert_eq!(machine.running(pod).map(|one| one.id), Some(before.id.clone()));
        }
        assert_eq!(machine.sandboxes().len(), 2);
        web_serves(machine, &agent);
    }
    agent.kill();
}

#[test]
fn a_reboot_starts_coracle_and_then_k3s() {
    if !is_inside("a_reboot_starts_coracle_and_then_k3s") {
        return;
    }
    let mut machine = enabled_machine();
    write_small_archive();
    write_web();
    machine.start_coracle();
    let mut agent = Agent::start(&machine);
    agent.start_flannel();
    let before = web_serves(&machine, &agent);
    let other = machine.address(&before);
    agent.kill();
    machine.reboot();
    machine.start_coracle();
    // Nothing runs, and no address is allocated to what ran before, although k3s and flannel have not started.
    assert_eq!(machine.running("web"), None);
    host::wait_until("the earlier boot's address is released", || machine.leases().is_empty());
    let mut agent = Agent::start(&machine);
    agent.start_flannel();
    let after = web_serves(&machine, &agent);
    assert_ne!(after.pod_sandbox_id, before.pod_sandbox_id, "another boot, another sandbox");
    assert_eq!(machine.leases(), [machine.address(&after)], "only one address, {other} before");
    agent.kill();
    end(machine);
}

#[test]
fn k3s_starts_again_after_its_killall_script() {
    if !is_inside("k3s_starts_again_after_its_killall_script") {
        return;
    }
    let mut machine = enabled_machine();
    write_small_archive();
    write_web();
    machine.start_coracle();
    // As documented, with `crictl rmp` before it, and without.
    for removes_pods_first in [true, false] {
        let mut agent = Agent::start(&machine);
        agent.start_flannel();
        let web = web_serves(&machine, &agent);
        agent.kill();
        if removes_pods_first {
            remove_all_pods(&machine);
        }
        assert_eq!(agent::killall(), [], "no process of coracle has the name of a shim");
        assert!(!Path::new("/sys/class/net").join(machine::BRIDGE).exists());
        assert_eq!(machine::mount_points(&["/run/k3s", "/var/lib/kubelet/pods"]), Vec::<String>::new());
        if !removes_pods_first {
            // The script does not know coracle: the pod runs on, and has lost its network.
            assert_eq!(machine.running("web").map(|one| one.id), Some(web.id));
            assert_eq!(seen_on_host_port(), None);
            remove_all_pods(&machine);
        }
        assert_eq!(machine.leftovers(), Vec::<String>::new());
    }
    let mut agent = Agent::start(&machine);
    agent.start_flannel();
    let before = web_serves(&machine, &agent);
    agent.kill();
    agent::killall();
    let is_ready = |pod: &PodSandbox| pod.state() == PodSandboxState::SandboxReady;
    host::wait_until("the pod is not ready", || !machine.sandboxes().iter().any(is_ready));
    // The pod was not removed: k3s makes it anew.
    let mut agent = Agent::start(&machine);
    agent.start_flannel();
    agent.wait("another sandbox", || {
        machine.running("web").filter(|one| one.pod_sandbox_id != before.pod_sandbox_id)
    });
    let after = web_serves(&machine, &agent);
    assert_eq!(machine.leases(), [machine.address(&after)]);
    agent.kill();
    end(machine);
}
