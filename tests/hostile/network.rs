//! Access of pods to the node's loopback interface and its sockets.

use std::fs;
use std::net::UdpSocket;

use coracle_tests::cri::proto::{PortMapping, Protocol};
use coracle_tests::host;
use coracle_tests::node::{Node, Options};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::registry::free_host_port;
use coracle_tests::request::{DEFAULT_NETWORK, bridge_pod, container, host_pod};

use crate::{Rights, armed, says};

/// CVE-2020-8558: a packet for 127.0.0.1 in a frame to the bridge's MAC address must not reach the node. The
/// built-in portmap requires `route_localnet`, which lets it in. Without the defence the socket on loopback
/// receives it.
#[test]
fn finding_11_cve_2020_8558_a_pod_does_not_reach_the_nodes_loopback() {
    let node = Node::with(Options { config: DEFAULT_NETWORK.into(), ..Options::default() });
    // A host port of a pod: with it the bridge routes 127.0.0.0/8.
    let mut server = bridge_pod("server");
    server.log_directory = node.log_directory("server");
    server.port_mappings = vec![PortMapping {
        protocol: Protocol::Udp.into(),
        container_port: 80,
        host_port: i32::from(free_host_port()),
        ..Default::default()
    }];
    node.run_pod(&server);
    let fixture = PodFixture::on(node, bridge_pod("attacker"));
    let attacker = fixture.run(&armed(&fixture, "attacker", Rights::Default, &["sleep", "forever"]));
    let gateway = format!("{}.1", fixture.node.subnet());
    let loopback = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let open = UdpSocket::bind((gateway.as_str(), 0)).expect("the bridge has the address");
    for socket in [&loopback, &open] {
        socket.set_nonblocking(true).expect("a socket");
    }
    let port = |socket: &UdpSocket| socket.local_addr().expect("bound").port().to_string();
    let said = says(&fixture, &attacker, &["attack", "frame", "-", "127.0.0.1", &port(&loopback), "reached"]);
    assert!(said.contains("saw sent to 127.0.0.1"), "{said}");
    // Finding: nor does one arrive that says to come from there, which services may trust. Without the defence: `trusted` from
    // 127.0.0.2, where rp_filter is 0.
    for source in ["127.0.0.1", "127.0.0.2"] {
        let said = says(&fixture, &attacker, &["attack", "frame", source, &gateway, &port(&open), "trusted"]);
        assert!(said.contains("saw sent to"), "{said}");
    }
    // The same frame for an address that pods may reach arrives; the bridge preserves the order of frames.
    let said = says(&fixture, &attacker, &["attack", "frame", "-", &gateway, &port(&open), "control"]);
    assert!(said.contains("saw sent to"), "{said}");
    let mut buffer = [0; 64];
    let length = host::wait_for("the frame arrives", || open.recv(&mut buffer).ok());
    assert_eq!(&buffer[..length], b"control");
    let reached = loopback.recv(&mut buffer);
    assert!(reached.is_err(), "the node's loopback heard a pod: {}", String::from_utf8_lossy(&buffer));
    fixture.node.stop();
}

/// A container on the node's network can connect to every abstract socket there; coracle has none, also while
/// containers start, execute commands and end.
#[test]
fn coracle_never_has_abstract_sockets() {
    let fixture = PodFixture::with(host_pod("sockets"));
    let attacker = fixture.run(&armed(&fixture, "attacker", Rights::AllUnfiltered, &["sleep", "forever"]));
    for round in 0..8 {
        let other = fixture.run(&fixture.config(&format!("other{round}"), &["sleep", "forever"]));
        let said = says(&fixture, &attacker, &["attack", "sockets"]);
        for name in said.lines().filter_map(|line| line.strip_prefix("saw abstract ")) {
            assert!(!name.contains("coracle") && !name.contains(&other[..12]), "{name}");
        }
        says(&fixture, &other, &["true"]);
    }
    fixture.node.stop();
}

/// A pod's container sees only its own network, whatever its capabilities.
#[test]
fn containers_cannot_leave_their_network_namespace() {
    let fixture = PodFixture::on(Node::with_bridge(), bridge_pod("inside"));
    let attacker = fixture.run(&armed(&fixture, "attacker", Rights::AllUnfiltered, &["sleep", "forever"]));
    let said = says(&fixture, &attacker, &["cat", "/proc/net/dev"]);
    assert!(said.contains("eth0") && !said.contains(&fixture.node.bridge()), "{said}");
    let said = says(&fixture, &attacker, &["ls", "/sys/class/net"]);
    assert!(!said.contains(&fixture.node.bridge()), "{said}");
    fixture.node.stop();
}

/// Finding S2: a pod with the default capabilities gave its neighbours an IPv6 address and a default route through itself.
/// The control is a pod that asks for them.
#[test]
fn finding_s2_a_neighbours_router_advertisement_gives_no_address_and_no_route() {
    // With the checks of neighbours no advertisement arrives.
    let config = format!("{DEFAULT_NETWORK}check_neighbours = false\n");
    let node = Node::with(Options { config, ..Options::default() });
    let image = node.import_probe();
    let started = |name: &str, sysctls: &[(&str, &str)]| {
        let mut pod = bridge_pod(name);
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        pod.linux.as_mut().expect("set").sysctls = sysctls.iter().map(own).collect();
        let pod_id = node.run_pod(&pod);
        let id = node.run_container(&pod_id, &container(name, &image, &["sleep", "forever"], &pod), &pod);
        node.container_pid(&id)
    };
    let victim = started("victim", &[]);
    let with_ipv6 = started("with-ipv6", &[("net.ipv6.conf.eth0.disable_ipv6", "0")]);
    let control = [("net.ipv6.conf.eth0.disable_ipv6", "0"), ("net.ipv6.conf.eth0.accept_ra", "2")];
    let control = started("control", &control);
    let routes = |pid: i32| {
        let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/net/{name}")).expect("it runs");
        (read("ipv6_route") + &read("if_inet6")).lines().filter(|line| line.contains("0bad")).count()
    };
    let fixture = PodFixture::on(node, bridge_pod("attacker"));
    let attacker = fixture.run(&armed(&fixture, "attacker", Rights::Default, &["sleep", "forever"]));
    host::wait_until("the control has the prefix, an address and the default route", || {
        let said = says(&fixture, &attacker, &["attack", "advertise", "eth0"]);
        assert!(said.contains("saw sent"), "{said}");
        routes(control) >= 3
    });
    assert_eq!([routes(victim), routes(with_ipv6)], [0, 0]);
    fixture.node.stop();
}
