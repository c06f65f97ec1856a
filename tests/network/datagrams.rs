//! Host ports of UDP after the pod's end: connection tracking must not keep the way to the pod for senders that go on.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use coracle_tests::cri::proto::Protocol;
use coracle_tests::host;
use serde_json::json;

use crate::builtin::{self, Case, DUAL, Port};
use crate::facts::{self, Outside};

/// Time limit of an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

fn socket(namespace: &str, address: IpAddr, port: u16) -> UdpSocket {
    let socket = facts::inside(namespace, || {
        host::wait_for("the port is free", || UdpSocket::bind((address, port)).ok())
    });
    socket.set_read_timeout(Some(ANSWER_LIMIT)).expect("a socket");
    socket
}

/// Whether a datagram of `client` reaches `server` and the answer returns.
fn is_answered(client: &UdpSocket, server: &UdpSocket, at: SocketAddr) -> bool {
    let mut buffer = [0; 16];
    client.send_to(b"ahoy", at).expect("it is sent");
    let Ok((length, peer)) = host::uninterrupted(|| server.recv_from(&mut buffer)) else { return false };
    server.send_to(&buffer[..length], peer).expect("it is sent");
    host::uninterrupted(|| client.recv_from(&mut buffer)).is_ok()
}

/// A server of the node takes the port over from the pod, and a sender keeps its own port (containernetworking/plugins#1190).
#[test]
fn a_continuing_sender_reaches_the_next_server_of_the_port() {
    let port = Some(Port { protocol: Protocol::Udp, host_ip: "" });
    let main = json!({ "isGateway": true, "ipMasq": true });
    let case = Case { main, ipam: DUAL, portmap: Some(json!({})), port, ..Case::default() };
    let node = builtin::node(&case, true);
    let outside = Outside::new(&node);
    let (configs, port) = builtin::pods(&node, &case);
    let id = node.run_pod(&configs[0]);
    facts::settle(&builtin::result(&node, &id)["interfaces"]);
    let any = [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)];
    let clients = any.map(|any| socket(outside.namespace(), any, 0));
    let addresses = outside.host.map(|host| SocketAddr::new(host, port));
    // One socket for both families.
    let in_pod = socket(&facts::namespace(&id), any[1], 80);
    for (client, address) in clients.iter().zip(addresses) {
        assert!(is_answered(client, &in_pod, address), "{address}: by the pod");
    }
    drop(in_pod);
    node.remove_pod(&id);
    let on_node = socket("", any[1], port);
    for (client, address) in clients.iter().zip(addresses) {
        assert!(is_answered(client, &on_node, address), "{address}: by the node, from the same port");
    }
    drop(outside);
    node.stop();
}
