//! Packets by which a pod on a bridge tries to change what its neighbours know and receive: neighbour advertisements in pieces,
//! redirects, and queries for multicast groups.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::time::Duration;

use coracle_tests::host;
use coracle_tests::node::Node;
use coracle_tests::request::bridge_pod;
use serde_json::json;

use crate::builtin::{self, Case, DUAL, addresses};
use crate::facts;
use crate::neighbours::{Bridge, forget, known, mac, neighbour};

/// A node whose bridge has both families, and connection tracking for both, because its pods are masqueraded.
fn node(is_checked: bool) -> Node {
    let main =
        json!({ "isGateway": true, "ipMasq": true, "macOfAddress": true, "checkNeighbours": is_checked });
    builtin::node(&Case { main, ipam: DUAL, ..Case::default() }, true)
}

/// Whether netfilter of this machine sees IPv6 packets on bridges, so that connection tracking reassembles them: br_netfilter,
/// which kube-proxy requires.
fn reassembles_on_bridges() -> bool {
    fs::read_to_string("/proc/sys/net/bridge/bridge-nf-call-ip6tables").is_ok_and(|text| text.trim() == "1")
}

/// Finding: with br_netfilter the node reassembled an advertisement after the check, and the victim did not see that it had been
/// in fragments, which it would have ignored (RFC 6980). Without the defence: `chained` is believed.
#[test]
fn an_advertisement_in_fragments_is_not_believed() {
    /// Size of a datagram that needs several fragments.
    const LARGE: usize = 4000;
    for is_checked in [false, true] {
        let bridge = Bridge::new(node(is_checked));
        let attacker = mac(&bridge.attacker);
        let six = bridge.victim_addresses.iter().find(|address| address.is_ipv6()).expect("both families");
        for (namespace, address) in [(bridge.victim.as_str(), bridge.gateways()[1]), ("", *six)] {
            let real = host::wait_for("the entry", || neighbour(namespace, address));
            let mut believed = Vec::new();
            for way in ["whole", "visible", "hidden", "chained"] {
                for _ in 0..3 {
                    bridge.attack(&["fragments", way, "eth0", &address.to_string()]);
                }
                bridge.wait_for_the_attackers_frames();
                if known(namespace, address).as_ref() == Some(&attacker) {
                    believed.push(way);
                    forget(namespace, address);
                    host::wait_until("the entry is right again", || {
                        neighbour(namespace, address).as_ref() == Some(&real)
                    });
                }
            }
            let expected: &[&str] = match (is_checked, reassembles_on_bridges()) {
                (true, _) => &[],
                (false, true) => &["whole", "visible", "chained"],
                (false, false) => &["whole"],
            };
            assert_eq!(believed, expected, "{address} in {namespace:?}");
        }
        // Datagrams in fragments arrive as before.
        let [sender, receiver] = [&bridge.attacker, &bridge.victim]
            .map(|pod| facts::inside(pod, || UdpSocket::bind("[::]:0").expect("a socket")));
        receiver.set_read_timeout(Some(Duration::from_secs(2))).expect("a socket");
        let port = receiver.local_addr().expect("bound").port();
        sender.send_to(&[1; LARGE], (*six, port)).expect("it is sent");
        let arrived = host::uninterrupted(|| receiver.recv(&mut [0; LARGE]));
        assert_eq!(arrived.ok(), Some(LARGE), "is checked: {is_checked}");
        drop((sender, receiver));
        bridge.node.stop();
    }
}

/// The router that a pod uses for a destination.
fn router(namespace: &str, destination: &str) -> String {
    let route = facts::run("ip", &["-n", namespace, "route", "get", destination]);
    route
        .split_once(" via ")
        .expect("a route through a router")
        .1
        .split(' ')
        .next()
        .expect("a word")
        .to_owned()
}

/// The link-local address of a link.
fn link_local(namespace: &str, link: &str) -> String {
    let list = || facts::run("ip", &["-6", "-o", "address", "show", "dev", link, "scope", "link"]);
    let said = facts::inside(namespace, list);
    let address = said.split_whitespace().nth(3).expect("the link has an address");
    address.split('/').next().expect("an address").to_owned()
}

/// A neighbour says in the gateway's name that it is the better router. The control is a pod that obeys redirects, without the
/// checks of neighbours, by which those of IPv6 do not arrive.
#[test]
fn a_redirect_of_a_neighbour_changes_no_route() {
    const FAR: [&str; 2] = ["198.51.100.7", "2001:db8:77::7"];
    for is_checked in [false, true] {
        let bridge = Bridge::new(node(is_checked));
        let mut pod = bridge_pod("control");
        // A kernel that forwards, as that of a pod may, needs both of IPv4.
        let sysctls = ["ipv4.conf.all", "ipv4.conf.eth0", "ipv6.conf.eth0"];
        let sysctls = sysctls.map(|place| (format!("net.{place}.accept_redirects"), "1".to_owned()));
        pod.linux.as_mut().expect("set").sysctls = sysctls.into();
        let control = bridge.node.run_pod(&pod);
        let control_addresses = addresses(&bridge.node, &control);
        let control = facts::namespace(&control);
        // A redirect comes from a link-local address, which must be the router's (RFC 4861, section 8.1).
        let gateways = [bridge.gateways()[0].to_string(), link_local("", &bridge.node.bridge())];
        for pod in [&bridge.victim, &control] {
            facts::run("ip", &["-n", pod, "route", "add", FAR[1], "via", &gateways[1], "dev", "eth0"]);
        }
        let own = addresses_of(&bridge.attacker);
        let send = |pod: &str, all: &[IpAddr]| {
            for (family, is_ipv4) in [true, false].into_iter().enumerate() {
                let to = all.iter().find(|address| address.is_ipv4() == is_ipv4).expect("both families");
                let (to, hardware) = (to.to_string(), mac(pod));
                let (router, via) = (&gateways[family], &own[family]);
                bridge.attack(&["redirect", "eth0", &to, &hardware, router, FAR[family], via]);
            }
        };
        let routers = |pod: &str| FAR.map(|far| router(pod, far));
        let expected = if is_checked { [own[0].clone(), gateways[1].clone()] } else { own.clone() };
        host::wait_within(host::patience(), || {
            send(&control, &control_addresses);
            send(&bridge.victim, &bridge.victim_addresses);
            (routers(&control) == expected).then_some(())
        });
        bridge.wait_for_the_attackers_frames();
        assert_eq!(routers(&control), expected, "the control; is checked: {is_checked}");
        assert_eq!(routers(&bridge.victim), gateways, "is checked: {is_checked}");
        bridge.node.stop();
    }
}

/// The IPv4 address and the link-local address of a pod.
fn addresses_of(namespace: &str) -> [String; 2] {
    let list = || facts::run("ip", &["-4", "-o", "address", "show", "dev", "eth0"]);
    let said = facts::inside(namespace, list);
    let four = said.split_whitespace().nth(3).expect("an address").split('/').next().expect("an address");
    [four.to_owned(), link_local(namespace, "eth0")]
}

/// A neighbour pretends to be a multicast router. A bridge that snoops then sends a group's packets to those only whose reports it
/// has seen; here the victim's are lost. The control is a bridge without the checks, which snoops as the kernel's default is.
#[test]
fn a_query_for_multicast_groups_takes_nothing_from_neighbours() {
    const GROUP: Ipv4Addr = Ipv4Addr::new(239, 77, 0, 1);
    const LIMIT: Duration = Duration::from_millis(500);
    for is_checked in [false, true] {
        let bridge = Bridge::new(node(is_checked));
        let IpAddr::V4(own) = bridge.victim_addresses[0] else { panic!("IPv4 is the first family") };
        let listener = facts::inside(&bridge.victim, || {
            facts::run(
                "nft",
                &[
                    "add table ip silent; add chain ip silent out { type filter hook output priority 0; }; add rule ip silent out ip protocol igmp drop",
                ],
            );
            let listener = UdpSocket::bind("0.0.0.0:0").expect("a socket");
            listener.join_multicast_v4(&GROUP, &own).expect("the link is up");
            listener
        });
        listener.set_read_timeout(Some(LIMIT)).expect("a socket");
        let port = listener.local_addr().expect("bound").port();
        let sender = facts::inside(&bridge.attacker, || UdpSocket::bind("0.0.0.0:0").expect("a socket"));
        let hears = || {
            sender.send_to(b"to all", (GROUP, port)).expect("it is sent");
            host::uninterrupted(|| listener.recv(&mut [0; 16])).is_ok()
        };
        assert!(hears(), "before");
        let address = addresses_of(&bridge.attacker)[0].clone();
        let hears_after = || {
            bridge.attack(&["query", "eth0", &address]);
            hears()
        };
        match is_checked {
            true => assert!((0..5).all(|_| hears_after())),
            false => host::wait_until("the bridge believes it", || !hears_after()),
        }
        drop((listener, sender));
        bridge.node.stop();
    }
}
