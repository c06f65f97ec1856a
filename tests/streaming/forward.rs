//! Port-forward: many connections, half-closed connections, closed ports, networks of pods and of the node.

use std::collections::BTreeMap;

use coracle_tests::host::wait_until;
use coracle_tests::node::Node;
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request;
use coracle_tests::spdy::{Client, Frame};

use crate::{forward_url, gives_back_descriptors};

const PROTOCOL: &str = "portforward.k8s.io";

/// A pod with its own network and an echo server.
fn echoing(address: &str) -> PodFixture {
    let fixture = PodFixture::on(Node::with_bridge(), request::bridge_pod("echo"));
    let container = fixture.run(&fixture.config("echo", &["echo", address]));
    wait_until("the server serves", || fixture.node.output(&container).contains("serving"));
    fixture
}

/// Opens a pair of streams; the data stream is the second one.
fn open_pair(client: &mut Client, port: &str, number: usize) -> (u32, u32) {
    let number = number.to_string();
    let mut open = |kind| client.open(&[("streamtype", kind), ("port", port), ("requestid", &number)]);
    let error = open("error").expect("a stream");
    (error, open("data").expect("a stream"))
}

/// Reads all data until all streams of `wanted` have ended.
fn read_ends(client: &mut Client, wanted: &[u32]) -> BTreeMap<u32, Vec<u8>> {
    let mut seen: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
    let mut left = wanted.to_vec();
    while !left.is_empty() {
        match client.next().expect("a frame") {
            Frame::Data(stream, is_last, bytes) => {
                seen.entry(stream).or_default().extend(bytes);
                left.retain(|other| !(is_last && *other == stream));
            }
            Frame::Reset(stream, _) => left.retain(|other| *other != stream),
            _ => {}
        }
    }
    seen
}

/// STR-9 with twenty times fifty connections: every connection gets its own bytes back after its half-close.
#[test]
fn str_9_twenty_connections_with_fifty_streams_each() {
    let fixture = echoing("127.0.0.1:80");
    let before = fixture.node.descriptors();
    let urls: Vec<String> = (0..20).map(|_| forward_url(&fixture.node, &fixture.pod_id)).collect();
    let sessions: Vec<_> = urls
        .into_iter()
        .map(|url| {
            std::thread::spawn(move || {
                let mut client = Client::connect(&url, PROTOCOL);
                let pairs: Vec<_> = (0..50).map(|number| open_pair(&mut client, "80", number)).collect();
                for (number, (error, data)) in pairs.iter().enumerate() {
                    client.finish(*error).expect("the end");
                    client.send(*data, format!("connection {number}").as_bytes()).expect("bytes");
                    client.finish(*data).expect("the end");
                }
                let all: Vec<u32> = pairs.iter().flat_map(|(error, data)| [*error, *data]).collect();
                let seen = read_ends(&mut client, &all);
                for (number, (error, data)) in pairs.iter().enumerate() {
                    let error = seen.get(error).map(|text| String::from_utf8_lossy(text));
                    assert_eq!(error.unwrap_or_default(), "", "connection {number}");
                    assert_eq!(seen[data], format!("connection {number}").into_bytes());
                }
            })
        })
        .collect();
    for session in sessions {
        session.join().expect("a session");
    }
    gives_back_descriptors(&fixture.node, before);
    fixture.node.stop();
}

#[test]
fn a_closed_port_is_an_error_and_the_session_continues() {
    let fixture = echoing("[::1]:81");
    let mut client = Client::connect(&forward_url(&fixture.node, &fixture.pod_id), PROTOCOL);
    let (error, data) = open_pair(&mut client, "82", 1);
    let seen = read_ends(&mut client, &[error, data]);
    let text = String::from_utf8_lossy(&seen[&error]).into_owned();
    assert!(text.starts_with("error forwarding port 82 to pod ") && text.contains("refused"), "{text}");
    // IPv6 is tried if IPv4 fails.
    let (error, data) = open_pair(&mut client, "81", 2);
    client.send(data, b"six").expect("bytes");
    client.finish(data).expect("the end");
    assert_eq!(read_ends(&mut client, &[error, data])[&data], b"six");
    // Invalid headers are refused individually.
    for headers in [
        &[("streamtype", "data"), ("port", "0"), ("requestid", "3")][..],
        &[("streamtype", "data"), ("requestid", "3")],
        &[("streamtype", "stdin"), ("port", "80"), ("requestid", "3")],
    ] {
        let stream = client.open(headers).expect("a stream");
        assert!(matches!(client.next(), Ok(Frame::Reset(reset, 1)) if reset == stream), "{headers:?}");
    }
    fixture.node.stop();
}

/// Connections of a client that disconnects are closed in the pod.
#[test]
fn connections_end_with_their_client() {
    let fixture = echoing("127.0.0.1:80");
    let before = fixture.node.descriptors();
    for round in 0..20 {
        let mut client = Client::connect(&forward_url(&fixture.node, &fixture.pod_id), PROTOCOL);
        for number in 0..10 {
            let (_, data) = open_pair(&mut client, "80", number);
            client.send(data, &[b'x'; 10_000]).expect("bytes");
        }
        for _ in 0..round {
            client.next().expect("a frame");
        }
    }
    gives_back_descriptors(&fixture.node, before);
    fixture.node.stop();
}

#[test]
fn only_ready_pods_are_forwarded_to() {
    use coracle_tests::cri::proto::{PortForwardRequest, StopPodSandboxRequest};
    let fixture = PodFixture::start();
    let request =
        |port: &[i32]| PortForwardRequest { pod_sandbox_id: fixture.pod_id.clone(), port: port.to_vec() };
    assert_eq!(fixture.node.port_forward(request(&[70_000])).unwrap_err().code() as i32, 3);
    fixture
        .node
        .stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: fixture.pod_id.clone() })
        .expect("stopped");
    assert_eq!(fixture.node.port_forward(request(&[])).unwrap_err().code() as i32, 9);
    fixture.node.stop();
}
