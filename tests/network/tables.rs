//! Tables of the node that pods fill: neighbours, and connections. The kernel has one limit for all network namespaces
//! (`net.ipv4.neigh.default.gc_thresh3`, `net.netfilter.nf_conntrack_max`), which these tests neither change nor reach.

use std::fs;
use std::net::SocketAddr;

use coracle_tests::cri::proto::VersionRequest;
use coracle_tests::host;
use coracle_tests::node::{Node, Options};
use coracle_tests::request::{DEFAULT_NETWORK, bridge_pod};

use crate::builtin::addresses;
use crate::facts;
use crate::neighbours::Bridge;
use crate::rules::run_in_own_network;

fn network(is_checked: bool) -> Node {
    let config = format!("{DEFAULT_NETWORK}check_neighbours = {is_checked}\n");
    Node::with(Options { config, ..Options::default() })
}

/// The node's entries of neighbours on the bridge, except those of pods that exist.
fn strangers(bridge: &Bridge) -> usize {
    let known = facts::run("ip", &["neighbour", "show", "nud", "all", "dev", &bridge.node.bridge()]);
    let is_high = |line: &&str| {
        let address = line.split(' ').next().unwrap_or_default();
        address.rsplit('.').next().and_then(|last| last.parse::<u8>().ok()).is_some_and(|last| last >= 100)
    };
    known.lines().filter(is_high).count()
}

/// A pod asks for the gateway in the name of a hundred neighbours, which do not exist. The control is the network without checks.
#[test]
fn requests_from_a_hundred_addresses_leave_no_neighbours_on_the_node() {
    for is_checked in [false, true] {
        let bridge = Bridge::new(network(is_checked));
        let (gateway, first) = (bridge.gateways()[0].to_string(), format!("{}.100", bridge.node.subnet()));
        let said = bridge.attack(&["askers", "eth0", &gateway, &first, "100"]);
        assert!(said.contains("saw sent 100"), "{said}");
        bridge.wait_for_the_attackers_frames();
        let found = strangers(&bridge);
        assert!(if is_checked { found == 0 } else { found > 90 }, "is checked: {is_checked}, found: {found}");
        bridge.node.stop();
    }
}

#[test]
fn packets_from_many_addresses_leave_only_neighbours_of_the_pods_network() {
    run_in_own_network("tables::only_addresses_of_the_pods_network_become_neighbours");
}

/// The node answers packets of a pod whatever their source address is, and asks for the MAC addresses of those that would be on the
/// bridge (docs/threat-model.md, "Not guaranteed"): the number is bounded by the pods' network. For others it asks no neighbour.
#[test]
#[ignore = "run by packets_from_many_addresses_leave_only_neighbours_of_the_pods_network"]
fn only_addresses_of_the_pods_network_become_neighbours() {
    let bridge = Bridge::new(network(true));
    let gateway = bridge.gateways()[0].to_string();
    for (first, expected) in
        [("198.51.100.100".to_owned(), 0), (format!("{}.100", bridge.node.subnet()), 100)]
    {
        let said = bridge.attack(&["sources", "eth0", &gateway, &first, "100"]);
        assert!(said.contains("saw sent 100"), "{said}");
        bridge.wait_for_the_attackers_frames();
        assert_eq!(strangers(&bridge), expected, "from {first} on");
    }
    let at = SocketAddr::new(bridge.victim_addresses[0], 80);
    assert!(facts::seen(&bridge.victim, 80, "", at).is_some());
    bridge.node.stop();
}

#[test]
fn connections_that_a_pod_leaves_behind_end_before_its_address_is_used_again() {
    run_in_own_network("tables::connections_of_a_removed_pod_end_before_its_address_is_reused");
}

/// A pod sends datagrams from ten thousand ports. The kernel counts connections for each network namespace, and this one is the
/// test's own.
#[test]
#[ignore = "run by connections_that_a_pod_leaves_behind_end_before_its_address_is_used_again"]
fn connections_of_a_removed_pod_end_before_its_address_is_reused() {
    /// Anonymous memory of the daemon in KiB that the entries must not need.
    const DAEMON_KIB_MAX: u64 = 16 << 10;
    let bridge = Bridge::new(network(true));
    let count = || {
        let text =
            fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count").expect("connection tracking");
        text.trim().parse::<u32>().expect("a number")
    };
    let before = count();
    let gateway = format!("{}:9", bridge.gateways()[0]);
    let said = bridge.attack(&["flows", &gateway, "10000"]);
    assert!(said.contains("saw sent 10000"), "{said}");
    let filled = count();
    assert!(filled > before + 9_000, "{before}, then {filled}");
    // Others are not affected before the kernel's limit is reached.
    let at = SocketAddr::new(bridge.victim_addresses[0], 80);
    assert!(facts::seen(&bridge.victim, 80, "", at).is_some());
    let address = addresses(&bridge.node, &bridge.attacker_id)[0];
    bridge.node.remove_pod(&bridge.attacker_id);
    bridge.node.version(VersionRequest::default()).expect("the daemon answers");
    // The next pod gets the first free address.
    let last = bridge.node.root().join("networks/coracle/last_reserved_ip.0");
    fs::write(last, format!("{}.1", bridge.node.subnet())).expect("the network's files");
    let next = bridge.node.run_pod(&bridge_pod("next"));
    assert_eq!(addresses(&bridge.node, &next)[0], address);
    // The kernel keeps such an entry for half a minute.
    assert!(count() < before + 1_000, "{before}, then {}", count());
    let memory = host::anonymous_kib(bridge.node.pid());
    assert!(memory < DAEMON_KIB_MAX, "the daemon has {memory} KiB");
    bridge.node.stop();
}
