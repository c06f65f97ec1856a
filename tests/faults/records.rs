//! Records that are damaged while the daemon is not running: each affects only its own pod, which is
//! reported.

use std::fs;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use coracle_tests::cri::proto::{
    ContainerState, ListPodSandboxRequest, PortMapping, RemoveContainerRequest, StartContainerRequest,
};
use coracle_tests::host;
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::free_host_port;
use coracle_tests::request::{DEFAULT_NETWORK, bridge_pod, container, host_pod};
use nix::sys::ptrace;
use nix::sys::stat::Mode;
use nix::unistd::Pid;

use crate::lost::recovered;

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

/// A change of a file of the daemon.
type Damage = fn(&Path);

fn rewrite(file: &Path, change: fn(&[u8]) -> Vec<u8>) {
    let bytes = fs::read(file).expect("a file of the daemon");
    fs::write(file, change(&bytes)).expect("a file of the daemon");
}

/// The daemon must not wait for the other end.
fn replace_by_fifo(file: &Path) {
    fs::remove_file(file).expect("a file of the daemon");
    nix::unistd::mkfifo(file, Mode::S_IRWXU).expect("a FIFO");
}

#[test]
fn a_damaged_record_affects_one_pod_and_is_quarantined() {
    let damages: [(&str, Damage); 5] = [
        ("empty", |record| rewrite(record, |_| Vec::new())),
        ("zeroed", |record| rewrite(record, |bytes| vec![0; bytes.len()])),
        ("cut", |record| rewrite(record, |bytes| bytes[..bytes.len() / 2].to_vec())),
        ("flipped", |record| {
            rewrite(record, |bytes| {
                // One bit in each half, that is in the body of each slot of the record.
                let mut bytes = bytes.to_vec();
                let half = bytes.len().div_ceil(2);
                bytes.chunks_mut(half).for_each(|part| part[20.min(part.len() - 1)] ^= 0x40);
                bytes
            });
        }),
        ("a FIFO", replace_by_fifo),
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
            damage(file);
        }
        // The record of an image that cannot be read is named beside it.
        let images = fs::read_dir(node.root().join("images/records")).expect("records").flatten();
        let unread: Vec<_> = images.map(|file| file.path()).collect();
        for record in &unread {
            fs::remove_file(record).expect("an image's record");
            symlink(record, record).expect("a link to itself");
        }
        node.launch();
        let pods = node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list").items;
        assert!(pods.iter().any(|pod| pod.id == witness_id), "{what}: the witness is lost");
        assert_eq!(node.container(&id).state(), ContainerState::ContainerRunning, "{what}");
        // Its monitor is ended first, which a busy machine may do after the daemon has begun to serve.
        host::wait_until("it is set aside", || {
            fs::read_dir(node.root().join("quarantine")).is_ok_and(|mut files| files.next().is_some())
        });
        let status = node.status(coracle_tests::cri::proto::StatusRequest::default()).expect("status");
        let conditions = status.status.expect("a status").conditions;
        let store =
            conditions.iter().find(|condition| condition.r#type == "StoreHealthy").expect("it is there");
        let unread = format!("{}: too many symbolic links", unread[0].display());
        let names = [&victim_id, "/quarantine, the last: ", "`coracle why POD`", &unread];
        assert!(!store.status && names.iter().all(|part| store.message.contains(*part)), "{what}: {store:?}");
        assert!(
            conditions.iter().any(|condition| condition.r#type == "RuntimeReady" && condition.status),
            "{what}"
        );
        node.stop();
    }
}

/// A container starts only from the plan with which it was created: the plan is its mounts and its masked paths.
#[test]
fn a_container_without_its_plan_does_not_start() {
    let damages: [(&str, Damage); 4] = [
        ("lost", |plan| fs::remove_file(plan).expect("a plan")),
        ("empty", |plan| rewrite(plan, |_| Vec::new())),
        ("flipped", |plan| {
            rewrite(plan, |bytes| {
                let mut bytes = bytes.to_vec();
                let middle = bytes.len() / 2;
                bytes[middle] ^= 0x40;
                bytes
            });
        }),
        ("a FIFO", replace_by_fifo),
    ];
    let node = Node::start();
    let image = node.import_probe();
    let pod = host_pod("plans");
    let pod_id = node.run_pod(&pod);
    for (number, (what, damage)) in damages.into_iter().enumerate() {
        let config = container(&format!("damaged-{number}"), &image, &["sleep", "forever"], &pod);
        let id = node.create(&pod_id, &config, &pod);
        damage(&node.state().join("pods").join(&pod_id).join("plans").join(&id));
        let refused = node.start_container(StartContainerRequest { container_id: id.clone() });
        let message = refused.expect_err(what).message().to_owned();
        assert!(message.contains("the container's plan") && message.contains(&id), "{what}: {message}");
        assert_eq!(node.container(&id).state(), ContainerState::ContainerExited, "{what}");
        node.remove_container(RemoveContainerRequest { container_id: id.clone() }).expect(what);
        let again = container(&format!("again-{number}"), &image, &["sleep", "forever"], &pod);
        node.run_container(&pod_id, &again, &pod);
    }
    node.remove_pod(&pod_id);
    node.stop();
}

/// Regression: the lease and the rules of the quarantined pod stayed for ever, so connections to its host
/// port were sent to an unused address, even after the pod was created again.
#[test]
fn the_network_of_a_pod_with_a_damaged_record_is_removed() {
    let mut node = Node::with_bridge();
    let port = free_host_port();
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
    host::wait_until("the lease is released", || node.leases().len() == 1);
    let asked = TcpStream::connect_timeout(&(Ipv4Addr::LOCALHOST, port).into(), Duration::from_secs(2));
    assert_eq!(asked.expect_err("nobody listens").kind(), ErrorKind::ConnectionRefused, "a rule is left");
    let again = node.run_pod(&pod);
    assert_eq!(node.leases().len(), 2);
    node.remove_pod(&again);
    node.remove_pod(&witness_id);
    node.stop();
}

/// Holds processes before their end, as an access to a dead network file system does (state D): a killed process
/// stays until `release` is called.
pub(crate) struct Held {
    release: Sender<()>,
    holder: JoinHandle<()>,
}

impl Held {
    pub(crate) fn hold(pids: Vec<i32>) -> Held {
        let (release, released) = channel();
        let (ready, is_ready) = channel();
        // ptrace belongs to one thread, and ends with it.
        let holder = std::thread::spawn(move || {
            for pid in pids {
                let traced = ptrace::seize(Pid::from_raw(pid), ptrace::Options::PTRACE_O_TRACEEXIT);
                traced.expect("the process can be traced");
            }
            ready.send(()).expect("the test waits");
            let _ = released.recv();
        });
        is_ready.recv().expect("the processes are traced");
        Held { release, holder }
    }

    pub(crate) fn release(self) {
        drop(self.release);
        self.holder.join().expect("the holder ends");
    }
}

/// Regression: each process that could not be killed delayed the start of the daemon by ten seconds, one after the
/// other.
#[test]
fn processes_that_cannot_be_killed_delay_no_other_pod() {
    /// Less than the ten seconds for which the daemon tries to kill the processes of one container.
    const START: Duration = Duration::from_secs(8);
    let mut node = Node::start();
    let image = node.import_probe();
    let start = |node: &Node, name: &str| {
        let pod = host_pod(name);
        let pod_id = node.run_pod(&pod);
        let config = container("one", &image, &["sleep", "forever"], &pod);
        let id = node.run_container(&pod_id, &config, &pod);
        (pod_id, node.container_pid(&id), id)
    };
    let (witness_id, _, witness) = start(&node, "witness");
    let victims = ["one", "two", "three"].map(|name| start(&node, name));
    let pids: Vec<i32> = victims.iter().map(|(_, pid, _)| *pid).collect();
    node.kill9();
    for (pod_id, _, _) in &victims {
        for file in records(node.root(), pod_id) {
            fs::write(file, "torn").expect("our file");
        }
    }
    let held = Held::hold(pids.clone());
    let begin = Instant::now();
    node.launch();
    let lasted = begin.elapsed();
    assert_eq!(node.container(&witness).state(), ContainerState::ContainerRunning);
    assert!(pids.iter().all(|pid| host::is_alive(*pid)), "they are not held");
    let (is_known, message) = recovered(&node);
    assert!(!is_known && message.contains("has not ended yet"), "{message}");
    assert!(lasted < START, "the start lasted {lasted:?}");
    held.release();
    host::wait_until("their state is known", || recovered(&node).0);
    assert!(!pids.iter().any(|pid| host::is_alive(*pid)));
    node.remove_pod(&witness_id);
    node.stop();
}

/// Finding F10: they stayed until the next reboot. Without a lease nothing led to the rules, and the host port to the next pod with the
/// address.
#[test]
fn the_lease_and_rules_of_a_pod_that_does_not_exist_are_released_at_the_next_start() {
    let ruleset = || {
        let listed = Command::new("nft").args(["list", "ruleset"]).output().expect("nft is installed");
        String::from_utf8_lossy(&listed.stdout).into_owned()
    };
    let other = Node::with(Options { config: DEFAULT_NETWORK.into(), ..Options::default() });
    let others = other.run_pod(&bridge_pod("other"));
    for has_lease in [true, false] {
        let mut node = Node::with(Options { config: DEFAULT_NETWORK.into(), ..Options::default() });
        let port = free_host_port();
        let mut pod = bridge_pod("gone");
        pod.port_mappings =
            vec![PortMapping { container_port: 80, host_port: i32::from(port), ..PortMapping::default() }];
        let (witness, gone) = (node.run_pod(&bridge_pod("witness")), node.run_pod(&pod));
        assert_eq!(node.leases().len(), 2, "{:?}", node.leases());
        let local = (Ipv4Addr::LOCALHOST, port).into();
        let connect = || TcpStream::connect_timeout(&local, Duration::from_secs(2));
        node.kill9();
        let places = [node.root(), &node.state()].map(|top| top.join("pods").join(&gone));
        let aside = ["root", "state"].map(|name| node.folder().join(format!("{name}-of-pod")));
        for (place, aside) in places.iter().zip(&aside) {
            fs::rename(place, aside).expect("the pod's directory");
        }
        if !has_lease {
            // As a script that ends all pods of a node.
            let deleted = Command::new("ip").args(["link", "delete", &format!("veth{gone:.11}")]).status();
            assert!(deleted.expect("ip is installed").success());
            let networks = node.root().join("networks/coracle");
            let leases = node.leases().into_iter().map(|name| networks.join(name));
            let own = |path: &PathBuf| fs::read_to_string(path).expect("a lease").starts_with(&gone);
            leases.filter(own).for_each(|path| fs::remove_file(path).expect("a lease"));
        }
        // Without its link the start of any daemon beside removes the rules, also that of another test.
        assert!(!has_lease || ruleset().contains(&gone));
        node.launch();
        host::wait_until("the rules are removed", || !ruleset().contains(&gone));
        host::wait_until("the lease is released", || node.leases().len() == 1);
        let refused = connect().expect_err("no process listens");
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "a rule is left");
        assert!([&witness, &others].iter().all(|id| ruleset().contains(*id)), "those of other pods stay");
        // The pod is known again, without its network, and can be removed.
        node.kill9();
        for (place, aside) in places.iter().zip(&aside) {
            fs::rename(aside, place).expect("the pod's directory");
        }
        node.launch();
        node.remove_pod(&gone);
        node.remove_pod(&witness);
        node.stop();
    }
    other.remove_pod(&others);
    other.stop();
}

/// Gives an option of the network in a slot of a pod's record a name that no release has.
fn rename_option(slot: &mut [u8]) {
    /// Offset of the body, whose length is in bytes 6 to 9.
    const HEADER_BYTES: usize = 14;
    let (known, unknown) = (b"linkLocal", b"linkOther");
    let at = slot.windows(known.len()).position(|window| window == known).expect("the option");
    slot[at..at + unknown.len()].copy_from_slice(unknown);
    let length = u32::from_le_bytes(slot[6..10].try_into().expect("four bytes"));
    let body_end = HEADER_BYTES + length as usize;
    let mut crc = flate2::Crc::new();
    crc.update(&slot[..body_end]);
    slot[body_end..body_end + 4].copy_from_slice(&crc.sum().to_le_bytes());
}

/// A pod that another release attached, with an option that this one does not know, can be removed: its lease, rules and link are
/// found by its id. Without the fix StopPodSandbox failed for ever ("is not built in").
#[test]
fn a_pod_of_another_releases_network_can_be_removed() {
    let mut node = Node::with(Options { config: DEFAULT_NETWORK.into(), ..Options::default() });
    let port = free_host_port();
    let mut pod = bridge_pod("other");
    pod.port_mappings =
        vec![PortMapping { container_port: 80, host_port: i32::from(port), ..PortMapping::default() }];
    let id = node.run_pod(&pod);
    node.kill9();
    for file in records(node.root(), &id).into_iter().filter(|path| path.ends_with("record")) {
        let mut bytes = fs::read(&file).expect("a record");
        let slot_bytes = bytes.len() / 2;
        bytes.chunks_mut(slot_bytes).for_each(rename_option);
        fs::write(file, bytes).expect("our file");
    }
    node.launch();
    assert_eq!(node.leases().len(), 1, "{:?}", node.leases());
    node.remove_pod(&id);
    assert!(node.leases().is_empty(), "{:?}\n{}", node.leases(), node.log());
    let asked = TcpStream::connect_timeout(&(Ipv4Addr::LOCALHOST, port).into(), Duration::from_secs(2));
    assert_eq!(asked.expect_err("nobody listens").kind(), ErrorKind::ConnectionRefused, "a rule is left");
    assert!(node.log().contains("detaching by the pod's ID"), "{}", node.log());
    node.stop();
}
