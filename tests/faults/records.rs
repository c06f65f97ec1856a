//! Records that are damaged while the daemon is not running: each affects only its own pod, which is
//! reported.

use std::fs;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_tests::cri::proto::{ContainerState, ListPodSandboxRequest, PortMapping};
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::free_address;
use coracle_tests::request::{DEFAULT_NETWORK, bridge_pod, container, host_pod};

/// Regular files of a pod's record: its own file, or all files in its directory except layers.
fn records(root: &Path, pod_id: &str) -> Vec<PathBuf> {
    let place = root.join("pods");
    let mut found = Vec::new();
    for entry in fs::read_dir(&place).expect("records").flatten() {
        if !entry.file_name().to_string_lossy().contains(pod_id) {
            continue;
        }
        if entry.path().is_file() {
            found.push(entry.path());
        } else {
            let inner = fs::read_dir(entry.path()).into_iter().flatten().flatten();
            found.extend(inner.map(|entry| entry.path()).filter(|path| path.is_file()));
        }
    }
    found
}

#[test]
fn a_damaged_record_affects_one_pod_and_is_quarantined() {
    type Damage = fn(&[u8]) -> Vec<u8>;
    let damages: [(&str, Damage); 4] = [
        ("empty", |_| Vec::new()),
        ("zeroed", |bytes| vec![0; bytes.len()]),
        ("cut", |bytes| bytes[..bytes.len() / 2].to_vec()),
        ("flipped", |bytes| {
            let mut bytes = bytes.to_vec();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 0x40;
            bytes
        }),
    ];
    for (what, damage) in damages {
        let mut node = Node::start();
        let image = node.import_probe();
        let (victim, witness) = (host_pod("victim"), host_pod("witness"));
        let (victim_id, witness_id) = (node.run_pod(&victim), node.run_pod(&witness));
        let config = container("one", &image, &["sleep", "forever"], &witness);
        let id = node.run_container(&witness_id, &config, &witness);
        node.kill9();
        let files = records(node.root(), &victim_id);
        assert!(!files.is_empty(), "no record of {victim_id} below {}", node.root().display());
        for file in &files {
            let bytes = fs::read(file).expect("a record");
            fs::write(file, damage(&bytes)).expect("our file");
        }
        node.launch();
        let pods = node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list").items;
        assert!(pods.iter().any(|pod| pod.id == witness_id), "{what}: the witness is lost");
        assert_eq!(node.container(&id).state(), ContainerState::ContainerRunning, "{what}");
        let aside = fs::read_dir(node.root().join("quarantine")).map(Iterator::count).unwrap_or(0);
        assert!(aside > 0, "{what}: nothing was set aside\n{}", node.log());
        let status = node.status(coracle_tests::cri::proto::StatusRequest::default()).expect("status");
        let conditions = status.status.expect("a status").conditions;
        assert!(
            conditions.iter().any(|condition| !condition.r#type.starts_with("Network") && !condition.status),
            "{what}: no condition shows it: {conditions:?}"
        );
        assert!(
            conditions.iter().any(|condition| condition.r#type == "RuntimeReady" && condition.status),
            "{what}"
        );
        node.stop();
    }
}

/// Regression: the lease and the rules of the quarantined pod stayed for ever, so connections to its host
/// port were sent to an unused address, even after the pod was created again.
#[test]
fn the_network_of_a_pod_with_a_damaged_record_is_removed() {
    let mut node = Node::with_bridge();
    let port = free_address().port();
    let mut pod = bridge_pod("victim");
    pod.port_mappings =
        vec![PortMapping { container_port: 80, host_port: i32::from(port), ..PortMapping::default() }];
    let (witness_id, victim_id) = (node.run_pod(&bridge_pod("witness")), node.run_pod(&pod));
    assert_eq!(node.leases().len(), 2, "{:?}", node.leases());
    node.kill9();
    for file in records(node.root(), &victim_id) {
        fs::write(file, "torn").expect("our file");
    }
    node.launch();
    assert_eq!(node.leases().len(), 1, "{:?}\n{}", node.leases(), node.log());
    let asked = TcpStream::connect_timeout(&(Ipv4Addr::LOCALHOST, port).into(), Duration::from_secs(2));
    assert_eq!(asked.expect_err("nobody listens").kind(), ErrorKind::ConnectionRefused, "a rule is left");
    let again = node.run_pod(&pod);
    assert_eq!(node.leases().len(), 2);
    node.remove_pod(&again);
    node.remove_pod(&witness_id);
    node.stop();
}

/// A pod that another release attached, with an option that this one does not know, can be removed: its lease, rules and link are
/// found by its id. Without the fix StopPodSandbox failed for ever ("is not built in").
#[test]
fn a_pod_of_another_releases_network_can_be_removed() {
    let mut node = Node::with(Options { config: DEFAULT_NETWORK.into(), ..Options::default() });
    let port = free_address().port();
    let mut pod = bridge_pod("other");
    pod.port_mappings =
        vec![PortMapping { container_port: 80, host_port: i32::from(port), ..PortMapping::default() }];
    let id = node.run_pod(&pod);
    node.kill9();
    for file in records(node.root(), &id).into_iter().filter(|path| path.ends_with("record")) {
        let mut bytes = fs::read(&file).expect("a record");
        let (known, unknown) = (b"linkLocal", b"linkOther");
        let at = bytes.windows(known.len()).position(|window| window == known).expect("the option");
        bytes[at..at + unknown.len()].copy_from_slice(unknown);
        let body = bytes.len() - 4;
        let mut crc = flate2::Crc::new();
        crc.update(&bytes[..body]);
        bytes[body..].copy_from_slice(&crc.sum().to_le_bytes());
        fs::write(file, bytes).expect("our file");
    }
    node.launch();
    assert_eq!(node.leases().len(), 1, "{:?}", node.leases());
    node.remove_pod(&id);
    assert!(node.leases().is_empty(), "{:?}\n{}", node.leases(), node.log());
    let asked = TcpStream::connect_timeout(&(Ipv4Addr::LOCALHOST, port).into(), Duration::from_secs(2));
    assert_eq!(asked.expect_err("nobody listens").kind(), ErrorKind::ConnectionRefused, "a rule is left");
    assert!(node.log().contains("detached by the pod's id alone"), "{}", node.log());
    node.stop();
}
