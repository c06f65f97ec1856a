//! Host ports that pods ask for to reach, or to be reached at, what is not theirs: ports of one address, of two pods, and of pods
//! that were removed.

use std::fs;
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use coracle_tests::cri::proto::{PortMapping, Protocol};
use coracle_tests::host;
use coracle_tests::node::Node;
use coracle_tests::registry::free_host_port;
use coracle_tests::request::bridge_pod;
use serde_json::json;

use crate::builtin::{self, Case, ONE_SUBNET, addresses};
use crate::facts::{self, Outside};
use crate::rules::{nft, run_in_own_network};

/// Time limit of what should not arrive.
const LIMIT: Duration = Duration::from_secs(1);

fn node() -> Node {
    let main = json!({ "isGateway": true, "ipMasq": true, "hairpinMode": true });
    builtin::node(&Case { main, ipam: ONE_SUBNET, portmap: Some(json!({})), ..Case::default() }, true)
}

/// Runs a pod with a host port that leads to its port 80; returns its ID.
fn with_port(node: &Node, name: &str, protocol: Protocol, host_ip: &str, port: u16) -> String {
    let mut pod = bridge_pod(name);
    pod.port_mappings = vec![PortMapping {
        protocol: protocol.into(),
        container_port: 80,
        host_port: i32::from(port),
        host_ip: host_ip.into(),
    }];
    node.run_pod(&pod)
}

/// Lets the next pod have the address that was given to the first one.
fn begin_again(node: &Node) {
    let last = node.folder().join("leases/boat/last_reserved_ip.0");
    fs::write(last, format!("{}.1", node.subnet())).expect("the network's files");
}

/// The first of `pods` that a connection from `client` to `address` reaches.
fn reached(pods: &[&str], client: &str, address: SocketAddr) -> Option<usize> {
    pods.iter().position(|id| facts::seen(&facts::namespace(id), 80, client, address).is_some())
}

/// Routes packets for 127.0.0.1 from another host to the node, and lets its kernel send them.
fn send_loopback_outside(outside: &Outside) {
    let name = outside.namespace();
    facts::inside(name, || {
        for key in ["all", "out"] {
            let path = format!("/proc/sys/net/ipv4/conf/{key}/route_localnet");
            fs::write(path, "1").expect("the namespace's own setting");
        }
    });
    let via = outside.host[0].to_string();
    facts::run("ip", &["-n", name, "link", "set", "lo", "down"]);
    facts::run("ip", &["-n", name, "route", "add", "127.0.0.1/32", "via", &via, "dev", "out"]);
}

/// Two pods have one port on two addresses; a third one has it on all others.
#[test]
fn a_host_port_of_one_address_is_reached_there_only() {
    let node = node();
    let outside = Outside::new(&node);
    let port = free_host_port();
    let far = outside.host[0];
    let local = with_port(&node, "local", Protocol::Tcp, "127.0.0.1", port);
    let one = with_port(&node, "one", Protocol::Tcp, &far.to_string(), port);
    let pods = [local.as_str(), one.as_str()];
    let gateway: IpAddr = format!("{}.1", node.subnet()).parse().expect("an address");
    let localhost: IpAddr = "127.0.0.1".parse().expect("an address");
    let at = |client: &str, address: IpAddr| reached(&pods, client, SocketAddr::new(address, port));
    assert_eq!([localhost, far, gateway].map(|address| at("", address)), [Some(0), Some(1), None]);
    assert_eq!([far, gateway].map(|address| at(outside.namespace(), address)), [Some(1), None]);
    // Neither another host nor a pod reaches what is published on 127.0.0.1.
    send_loopback_outside(&outside);
    assert_eq!(at(outside.namespace(), localhost), None);
    let neighbour = facts::namespace(&one);
    assert_eq!([localhost, gateway].map(|address| at(&neighbour, address)), [None; 2]);
    assert_eq!(at(&neighbour, far), Some(1), "a pod reaches its own port");
    // A pod with the port on all addresses takes over neither of the two.
    let all = with_port(&node, "all", Protocol::Tcp, "", port);
    assert_eq!([localhost, far, gateway].map(|address| at("", address)), [Some(0), Some(1), None]);
    assert_eq!(reached(&[&all], "", SocketAddr::new(gateway, port)), Some(0));
    drop(outside);
    node.stop();
}

/// The kubelet never lets two pods have the same port, but the CRI can: the later pod has it, the end of the earlier one does not
/// take it away, and after the end of both it is the node's.
#[test]
fn of_two_pods_with_one_host_port_the_later_one_has_it() {
    let node = node();
    let outside = Outside::new(&node);
    let port = free_host_port();
    let at = SocketAddr::new(outside.host[0], port);
    let [first, second] = ["first", "second"].map(|name| with_port(&node, name, Protocol::Tcp, "", port));
    assert_eq!(reached(&[&first, &second], outside.namespace(), at), Some(1));
    // The other protocol is another port.
    let other = with_port(&node, "other", Protocol::Udp, "", port);
    assert_eq!(reached(&[&first, &second, &other], outside.namespace(), at), Some(1));
    node.remove_pod(&first);
    assert_eq!(reached(&[&second], outside.namespace(), at), Some(0));
    node.remove_pod(&second);
    let heard = facts::seen("", port, outside.namespace(), at);
    assert_eq!(heard, Some(outside.address[0]), "the port is the node's again");
    drop(outside);
    node.stop();
}

#[test]
fn the_nodes_loopback_is_guarded_against_other_hosts() {
    run_in_own_network("ports::loopback_packets_from_outside_are_dropped_by_the_guard_only");
}

/// A host outside whose link routes 127.0.0.0/8, as an administrator may set it, and a pod, with and without the chain that drops
/// such packets.
#[test]
#[ignore = "run by the_nodes_loopback_is_guarded_against_other_hosts"]
fn loopback_packets_from_outside_are_dropped_by_the_guard_only() {
    let node = node();
    let outside = Outside::new(&node);
    let pod = with_port(&node, "server", Protocol::Tcp, "127.0.0.1", free_host_port());
    let published = SocketAddr::from(([127, 0, 0, 1], port_of(&node)));
    send_loopback_outside(&outside);
    let link = format!("/proc/sys/net/ipv4/conf/{}/route_localnet", outside.namespace());
    fs::write(link, "1").expect("the node's own setting");
    let of_the_node = SocketAddr::from(([127, 0, 0, 1], free_host_port()));
    let heard = || {
        let service = facts::seen_by_udp("", of_the_node.port(), outside.namespace(), of_the_node);
        [service.is_some(), reached(&[&pod], outside.namespace(), published).is_some()]
    };
    assert_eq!(heard(), [false; 2]);
    nft("flush chain ip coracle guard\n");
    assert!(heard()[0], "without the guard the packets arrive");
    // The next pod with a host port on 127.0.0.1 brings it back.
    with_port(&node, "next", Protocol::Tcp, "127.0.0.1", free_host_port());
    assert_eq!(heard(), [false; 2]);
    drop(outside);
    node.stop();
}

/// The only host port in coracle's table, which is this namespace's own.
fn port_of(_: &Node) -> u16 {
    let table = facts::run("nft", &["list", "map", "ip", "coracle", "ports-at"]);
    let element = table.split_once("127.0.0.1 . tcp . ").expect("the pod's port").1;
    element.split(' ').next().and_then(|port| port.parse().ok()).expect("a number")
}

/// Another host keeps its connection to a host port open, without a word, and the port's pod is removed. The next pod with the
/// address publishes nothing, and a new connection from the same port must not reach it. Without the defence connection
/// tracking still redirects it.
#[test]
fn a_connection_to_a_removed_pod_does_not_lead_to_the_next_one_with_its_address() {
    const CLIENT: &str = "40000 40000";
    let node = node();
    let port = free_host_port();
    let first = with_port(&node, "first", Protocol::Tcp, "", port);
    let address = addresses(&node, &first)[0];
    let client = || {
        let outside = Outside::new(&node);
        facts::inside(outside.namespace(), || {
            fs::write("/proc/sys/net/ipv4/ip_local_port_range", CLIENT).expect("the namespace's own");
        });
        outside
    };
    let outside = client();
    let at = SocketAddr::new(outside.host[0], port);
    let listener = facts::inside(&facts::namespace(&first), || std::net::TcpListener::bind("0.0.0.0:80"));
    let stream =
        facts::inside(outside.namespace(), || TcpStream::connect_timeout(&at, LIMIT)).expect("the port");
    drop(listener);
    // The end of the connection is lost, and so is the client's memory of it.
    facts::run("ip", &["link", "set", outside.namespace(), "down"]);
    drop(stream);
    drop(outside);
    node.remove_pod(&first);
    begin_again(&node);
    let next = node.run_pod(&bridge_pod("next"));
    assert_eq!(addresses(&node, &next)[0], address);
    let outside = client();
    assert_eq!(reached(&[&next], outside.namespace(), at), None);
    drop(outside);
    node.stop();
}

/// Senders of datagrams to a host port, so many that their entries do not fit into one request to the kernel. Finding: none of
/// the entries was removed.
#[test]
fn many_senders_to_a_removed_pod_do_not_reach_the_next_one_with_its_address() {
    const SENDERS: std::ops::Range<u16> = 20_000..24_000;
    let node = node();
    let outside = Outside::new(&node);
    let port = free_host_port();
    let at = SocketAddr::new(outside.host[0], port);
    let first = with_port(&node, "first", Protocol::Udp, "", port);
    let address = addresses(&node, &first)[0];
    let send = || {
        facts::inside(outside.namespace(), || {
            for source in SENDERS {
                let socket = UdpSocket::bind(("0.0.0.0", source)).expect("a free port");
                // The node may report that no process listens.
                let _ = socket.send_to(b"ahoy", at);
            }
        });
    };
    let hears = |id: &str| {
        let socket =
            facts::inside(&facts::namespace(id), || UdpSocket::bind("0.0.0.0:80").expect("a socket"));
        socket.set_read_timeout(Some(LIMIT)).expect("a socket");
        send();
        host::uninterrupted(|| socket.recv(&mut [0; 16])).is_ok()
    };
    assert!(hears(&first));
    node.remove_pod(&first);
    assert!(!node.log().contains("cannot remove conntrack entries"), "{}", node.log());
    begin_again(&node);
    let next = node.run_pod(&bridge_pod("next"));
    assert_eq!(addresses(&node, &next)[0], address);
    assert!(!hears(&next), "the next pod hears senders of the first one");
    drop(outside);
    node.stop();
}

/// A pod sends datagrams to an accomplice outside from the port of a service, and ends. The accomplice continues to answer; the next
/// pod with the address must not hear it.
#[test]
fn answers_to_a_removed_pod_do_not_reach_the_next_one_with_its_address() {
    const SERVICE: u16 = 5353;
    let node = node();
    let outside = Outside::new(&node);
    let first = node.run_pod(&bridge_pod("first"));
    let address = addresses(&node, &first)[0];
    let socket = |namespace: &str, port: u16| {
        let socket = facts::inside(namespace, || UdpSocket::bind(("0.0.0.0", port)).expect("a socket"));
        socket.set_read_timeout(Some(LIMIT)).expect("a socket");
        socket
    };
    let accomplice = socket(outside.namespace(), 9000);
    let sender = socket(&facts::namespace(&first), SERVICE);
    sender.send_to(b"ahoy", (outside.address[0], 9000)).expect("it is sent");
    let (_, seen) = host::uninterrupted(|| accomplice.recv_from(&mut [0; 16])).expect("it arrives");
    assert_eq!(seen.ip(), outside.host[0], "masqueraded");
    drop(sender);
    node.remove_pod(&first);
    begin_again(&node);
    let next = node.run_pod(&bridge_pod("next"));
    assert_eq!(addresses(&node, &next)[0], address);
    let service = socket(&facts::namespace(&next), SERVICE);
    accomplice.send_to(b"to the service", seen).expect("it is sent");
    assert!(host::uninterrupted(|| service.recv(&mut [0; 16])).is_err(), "the service heard it");
    drop((accomplice, service, outside));
    node.stop();
}
