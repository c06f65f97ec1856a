//! The node's tables of connections and of neighbours at their limits, which a pod can reach: the kernel has one limit for all
//! pods and the node. What the pod cannot stop is asserted; what fails meanwhile is what docs/threat-model.md names. The
//! limits are those of the machine, so these tests run in a guest only.

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use coracle_tests::cri::proto::{PodSandboxConfig, PodSandboxStatusRequest};
use coracle_tests::host;
use coracle_tests::node::{Node, Options};
use coracle_tests::request::{DEFAULT_NETWORK, bridge_pod, container, exec};

/// Maximum number of connections: some bursts more than a node with three pods has.
const CONNECTIONS_MAX: u32 = 400;
/// Maximum number of neighbours, of which each pod and the node need one for each other.
const NEIGHBOURS_MAX: u32 = 48;

/// Time limit of a connection, in a guest that is emulated.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// The kernel forgets closed connections after two minutes (nf_conntrack_tcp_timeout_time_wait), of its own clock.
const FORGOTTEN: Duration = Duration::from_secs(300);

fn write(setting: &str, value: u32) {
    let path = format!("/proc/sys/net/{setting}");
    fs::write(&path, value.to_string()).unwrap_or_else(|error| panic!("{path}: {error}"));
}

fn read(setting: &str) -> u32 {
    let text = fs::read_to_string(format!("/proc/sys/net/{setting}")).expect("a setting");
    text.trim().parse().expect("a number")
}

/// The kernel's messages since the boot.
fn messages() -> String {
    let output = Command::new("busybox").arg("dmesg").output().expect("busybox has it");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn node() -> Node {
    Node::with(Options { config: DEFAULT_NETWORK.into(), ..Options::default() })
}

/// Starts a pod with a container that executes these words; returns the IDs of both and the pod's address.
fn start(node: &Node, pod: &PodSandboxConfig, image: &str, words: &[&str]) -> (String, String, IpAddr) {
    let pod_id = node.run_pod(pod);
    let id = node.run_container(&pod_id, &container("one", image, words, pod), pod);
    let ask = PodSandboxStatusRequest { pod_sandbox_id: pod_id.clone(), verbose: false };
    let status = node.pod_sandbox_status(ask).expect("status").status.expect("a status");
    let address = status.network.expect("a network").ip.parse().expect("an address");
    (pod_id, id, address)
}

/// Asks a pod's server, like a probe of the kubelet.
fn asks(address: IpAddr) -> Option<TcpStream> {
    let stream = TcpStream::connect_timeout(&SocketAddr::new(address, 80), CONNECT_LIMIT).ok()?;
    stream.set_read_timeout(Some(CONNECT_LIMIT)).expect("a socket");
    echoes(&stream).then_some(stream)
}

fn echoes(mut stream: &TcpStream) -> bool {
    let mut answer = [0; 5];
    stream.write_all(b"hello").is_ok() && stream.read_exact(&mut answer).is_ok()
}

/// A new pod starts, its container can be used, and it is removed.
fn a_pod_lives(node: &Node, image: &str, name: &str) {
    let (pod_id, id, _) = start(node, &bridge_pod(name), image, &["sleep", "forever"]);
    let answer = node.exec_sync(exec(&id, &["print", "alive"], 20)).expect("a probe by exec");
    assert_eq!(answer.stdout, b"alive\n", "{name}");
    node.remove_pod(&pod_id);
}

#[test]
fn a_full_table_of_connections_stops_no_start_and_no_exec() {
    let node = node();
    let image = node.import_probe();
    let (_, victim, victim_at) = start(&node, &bridge_pod("victim"), &image, &["echo", "0.0.0.0:80"]);
    let before = host::wait_for("the node reaches the victim", || asks(victim_at));
    write("netfilter/nf_conntrack_max", CONNECTIONS_MAX);
    // A port of the node on which something accepts whatever comes, like a web server.
    let gateway: IpAddr = format!("{}.1", node.subnet()).parse().expect("an address");
    let listener = TcpListener::bind((gateway, 0)).expect("a port");
    let port = listener.local_addr().expect("a port").port();
    listener.set_nonblocking(true).expect("a socket");
    let is_over = Arc::new(AtomicBool::new(false));
    let serving = {
        let is_over = Arc::clone(&is_over);
        std::thread::spawn(move || {
            let mut held = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                held.extend(listener.accept());
                std::thread::sleep(Duration::from_millis(1));
            }
        })
    };
    let words = ["attack", "connections", &format!("{gateway}:{port}"), "2000"];
    let pod = PodSandboxConfig { log_directory: node.log_directory("attacker"), ..bridge_pod("attacker") };
    let (attacker, id, _) = start(&node, &pod, &image, &words);
    let said = host::wait_for("the attacker has all that there are", || {
        let said = node.output(&id);
        said.contains("saw connected").then_some(said)
    });
    let count = read("netfilter/nf_conntrack_count");
    assert!(count >= CONNECTIONS_MAX, "{count}: {said}");
    assert!(asks(victim_at).is_none(), "{count}: the table is not full");
    assert!(messages().contains("table full, dropping packet"), "{count}");
    // A connection that exists continues.
    assert!(echoes(&before), "the connection was lost");
    node.exec_sync(exec(&victim, &["print", "alive"], 20)).expect("a probe by exec");
    a_pod_lives(&node, &image, "meanwhile");
    node.remove_pod(&attacker);
    is_over.store(true, Ordering::Relaxed);
    serving.join().expect("no panic");
    let again = host::wait_within(FORGOTTEN, || asks(victim_at));
    assert!(again.is_some(), "{} of {CONNECTIONS_MAX} are left", read("netfilter/nf_conntrack_count"));
    node.stop();
}

#[test]
fn a_full_table_of_neighbours_stops_no_start_and_no_exec() {
    let node = node();
    let image = node.import_probe();
    let (_, victim, victim_at) = start(&node, &bridge_pod("victim"), &image, &["echo", "0.0.0.0:80"]);
    host::wait_for("the node reaches the victim", || asks(victim_at));
    let (attacker, id, _) = start(&node, &bridge_pod("attacker"), &image, &["sleep", "forever"]);
    for (number, value) in [NEIGHBOURS_MAX / 4, NEIGHBOURS_MAX / 2, NEIGHBOURS_MAX].into_iter().enumerate() {
        write(&format!("ipv4/neigh/default/gc_thresh{}", number + 1), value);
    }
    let (gateway, first) = (format!("{}.1", node.subnet()), format!("{}.50", node.subnet()));
    let is_over = Arc::new(AtomicBool::new(false));
    let attack = {
        let (client, is_over) = (node.another(), Arc::clone(&is_over));
        std::thread::spawn(move || {
            let words = ["attack", "sources", "eth0", &gateway, &first, "200"];
            while !is_over.load(Ordering::Relaxed) {
                // While the table is full, not even the attacker reaches the gateway.
                let _ = client.exec_sync(exec(&id, &words, 20));
            }
        })
    };
    host::wait_until("the table is full", || messages().contains("neighbor table overflow"));
    for round in 0..3 {
        node.exec_sync(exec(&victim, &["print", "alive"], 20)).expect("a probe by exec");
        a_pod_lives(&node, &image, &format!("meanwhile{round}"));
        println!("round {round}: the victim is reached: {}", asks(victim_at).is_some());
    }
    is_over.store(true, Ordering::Relaxed);
    attack.join().expect("no panic");
    node.remove_pod(&attacker);
    // A neighbour that does not answer is forgotten after three seconds.
    host::wait_for("the node reaches the victim again", || asks(victim_at));
    let (_, _, new_at) = start(&node, &bridge_pod("new"), &image, &["echo", "0.0.0.0:80"]);
    host::wait_for("the node reaches a new pod", || asks(new_at));
    node.stop();
}
