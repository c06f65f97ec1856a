//! coracle installed by its package under systemd, with default paths: the first test lets dpkg install it.

mod kubelet;
mod package;
mod pages;
mod scopes;

use std::path::Path;
use std::process::Command;

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::{
    CgroupDriver, ContainerState, ContainerStatusRequest, PodSandboxConfig, RemovePodSandboxRequest,
    RuntimeConfigRequest, StartContainerRequest, StopPodSandboxRequest, VersionRequest,
};
use coracle_tests::host::{is_alive, patience, wait_for, wait_until, wait_within};
use coracle_tests::image::{self, Image};
use coracle_tests::node::binaries;
use coracle_tests::request::{container, create, host_pod, run};

const PROGRAM: &str = "/usr/bin/coracle";
/// The CRI socket of the unit's daemon.
const SOCKET: &str = "/run/coracle/coracle.sock";
const IMAGE: &str = "localhost/unit:1";

/// A property of coracle's unit.
fn property(name: &str) -> String {
    show("coracle.service", name)
}

/// A property of a unit in the format of `systemctl show`.
fn show(unit: &str, name: &str) -> String {
    let output = Command::new("systemctl")
        .args(["show", "--value", "--property", name, unit])
        .output()
        .expect("systemctl runs");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn systemctl(words: &[&str]) {
    let output = Command::new("systemctl").args(words).output().expect("systemctl runs");
    assert!(output.status.success(), "systemctl {words:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Imports the probe's image with the command line, which uses the default paths.
fn import() {
    const ARCHIVE: &str = "/opt/unit.tar";
    let probe = Image::probe(&image::program(&binaries()), "unit");
    std::fs::write(ARCHIVE, probe.oci_archive(IMAGE)).expect("the archive");
    let output = Command::new(PROGRAM).args(["image", "import", ARCHIVE]).output().expect("the program runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Runs a container in a new pod; returns both IDs.
fn start(cri: &Cri, pod: &PodSandboxConfig) -> (String, String) {
    let pod_sandbox_id = cri.run_pod_sandbox(run(pod)).expect("run").pod_sandbox_id;
    let config = container("one", IMAGE, &["sleep", "forever"], pod);
    let request = create(&pod_sandbox_id, &config, pod);
    let container_id = cri.create_container(request).expect("create").container_id;
    cri.start_container(StartContainerRequest { container_id: container_id.clone() }).expect("start");
    (pod_sandbox_id, container_id)
}

fn pid(cri: &Cri, container_id: &str) -> i32 {
    let request = ContainerStatusRequest { container_id: container_id.into(), verbose: true };
    let answer = cri.container_status(request).expect("status");
    assert_eq!(answer.status.expect("a status").state(), ContainerState::ContainerRunning);
    let info: serde_json::Value = serde_json::from_str(&answer.info["info"]).expect("info is JSON");
    info["pid"].as_i64().expect("info has a pid") as i32
}

fn remove(cri: &Cri, pod_sandbox_id: String) {
    let stop = StopPodSandboxRequest { pod_sandbox_id: pod_sandbox_id.clone() };
    cri.stop_pod_sandbox(stop).expect("stop");
    cri.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id }).expect("remove");
}

#[test]
fn the_unit_reports_ready_and_the_systemd_driver() {
    let first = std::fs::read_to_string("/proc/1/comm").expect("a first process");
    assert_eq!(first.trim(), "systemd");
    // The unit is active only after the daemon sent READY=1, so it answers at once.
    let cri = package::installed();
    assert_eq!((property("Type").as_str(), property("ActiveState").as_str()), ("notify", "active"));
    cri.version(VersionRequest::default()).expect("version");
    let config = cri.runtime_config(RuntimeConfigRequest::default()).expect("config");
    let driver = config.linux.expect("linux").cgroup_driver();
    assert_eq!(driver, CgroupDriver::Systemd, "systemd runs this host");
}

#[test]
fn a_pod_outlives_a_restart_of_the_unit() {
    let cri = package::installed();
    import();
    let pod = host_pod("unit");
    let (pod_id, container_id) = start(&cri, &pod);
    let init = pid(&cri, &container_id);
    let daemon = property("MainPID");
    systemctl(&["restart", "coracle.service"]);
    assert_ne!(property("MainPID"), daemon, "another daemon");
    assert!(is_alive(init));
    let cri = Cri::new(Path::new(SOCKET));
    wait_until("the new daemon answers", || cri.version(VersionRequest::default()).is_ok());
    assert_eq!(pid(&cri, &container_id), init);
    remove(&cri, pod_id);
    wait_for("its process goes", || (!is_alive(init)).then_some(()));
}
