//! The pod's interface: sysctls that name it, and what neighbours can do to it.

use std::fs;
use std::os::unix::fs::symlink;

use coracle_tests::cri::proto::{ListPodSandboxRequest, PodSandboxConfig};
use coracle_tests::node::{Node, Options};
use coracle_tests::request::{DEFAULT_NETWORK, bridge_pod, run};
use serde_json::json;
use tonic::Code;

use crate::builtin::{self, Case, DUAL, ONE_SUBNET, addresses};
use crate::facts;

fn with_sysctls(name: &str, sysctls: &[(&str, &str)]) -> PodSandboxConfig {
    let mut pod = bridge_pod(name);
    let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    pod.linux.as_mut().expect("set").sysctls = sysctls.iter().map(own).collect();
    pod
}

/// A file in the network namespace of a pod.
fn inside(pod_id: &str, path: &str) -> String {
    let text = facts::inside(&facts::namespace(pod_id), || fs::read_to_string(path));
    text.unwrap_or_else(|error| panic!("{path}: {error}")).trim().to_owned()
}

/// The sysctls were written before the interface existed, so that such a pod never started.
#[test]
fn sysctls_of_a_pod_may_name_its_interface() {
    let case = Case { main: json!({ "isGateway": true }), ipam: ONE_SUBNET, ..Case::default() };
    for is_built_in in [true, false] {
        let node = builtin::node(&case, is_built_in);
        let wanted = [
            ("net.ipv4.conf.eth0.rp_filter", "2"),
            ("net.ipv4.neigh.eth0.gc_stale_time", "17"),
            ("net.ipv6.conf.eth0.accept_ra", "2"),
            ("net/ipv4/ip_unprivileged_port_start", "80"),
        ];
        let id = node.run_pod(&with_sysctls("named", &wanted));
        for (name, value) in wanted {
            assert_eq!(inside(&id, &format!("/proc/sys/{}", name.replace('.', "/"))), value, "{name}");
        }
        let refused =
            node.run_pod_sandbox(run(&with_sysctls("wrong", &[("net.ipv4.conf.eth9.rp_filter", "2")])));
        let refused = refused.expect_err("there is no such interface");
        let expected = "set sysctl net/ipv4/conf/eth9/rp_filter to \"2\": no such file or directory";
        assert!(refused.message().contains(expected), "{refused}");
        assert_eq!(node.leases().len(), 1, "nothing of the refused pod is left");
        node.stop();
    }
}

/// The network's own set-up used to switch IPv6 on again.
#[test]
fn a_pod_that_switches_ipv6_off_has_none() {
    let case = Case { main: json!({ "isGateway": true }), ipam: DUAL, ..Case::default() };
    for is_built_in in [true, false] {
        let node = builtin::node(&case, is_built_in);
        let id = node.run_pod(&with_sysctls("four", &[("net.ipv6.conf.all.disable_ipv6", "1")]));
        assert_eq!(inside(&id, "/proc/thread-self/net/if_inet6"), "");
        let plain = node.run_pod(&bridge_pod("both"));
        assert!(inside(&plain, "/proc/thread-self/net/if_inet6").contains("eth0"));
        assert_eq!(addresses(&node, &plain).len(), 2);
        node.stop();
    }
}

/// A router advertisement of a neighbour would give the pod an address and a default route. The node is the router of these
/// links; a bridge without the node's address may have a router of its own.
#[test]
fn a_pod_takes_no_routes_from_its_neighbours() {
    let setting = |id: &str, name: &str| inside(id, &format!("/proc/sys/net/ipv6/conf/eth0/{name}"));
    let settings = |node: &Node| {
        let id = node.run_pod(&bridge_pod("victim"));
        [setting(&id, "accept_ra"), setting(&id, "disable_ipv6")]
    };
    for (main, is_point_to_point, ipam, expected) in [
        (json!({ "isGateway": true }), false, ONE_SUBNET, ["0", "0"]),
        (json!({ "isGateway": true }), false, DUAL, ["0", "0"]),
        (json!({}), true, DUAL, ["0", "0"]),
        (json!({}), false, ONE_SUBNET, ["1", "0"]),
    ] {
        let case = Case { main, is_point_to_point, ipam, ..Case::default() };
        let node = builtin::node(&case, true);
        assert_eq!(settings(&node), expected, "{} {ipam}", case.main);
        node.stop();
    }
    let node = Node::with(Options { config: DEFAULT_NETWORK.into(), ..Options::default() });
    assert_eq!(settings(&node), ["0", "1"], "the default network is IPv4 only");
    node.stop();
}

/// Two daemons with different roots, the same bridge and the same range leased the same addresses.
#[test]
fn a_bridge_of_another_daemon_is_refused_while_it_has_leases() {
    let first = Node::with(Options { config: DEFAULT_NETWORK.into(), ..Options::default() });
    let of_first = DEFAULT_NETWORK.replace("BRIDGE", &first.bridge()).replace("SUBNET", &first.subnet());
    let second = Node::with(Options { config: of_first, ..Options::default() });
    let pod_id = first.run_pod(&bridge_pod("first"));
    let refused =
        second.run_pod_sandbox(run(&bridge_pod("second"))).expect_err("the addresses are the first's");
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    let owner = format!("bridge {} is in use by the daemon with the leases in", first.bridge());
    let leases = first.root().join("networks").display().to_string();
    assert!(refused.message().contains(&owner) && refused.message().contains(&leases), "{refused}");
    assert!(second.leases().is_empty(), "{:?}", second.leases());
    // A lease that cannot be read is one.
    let lease = first.root().join("networks/coracle").join(&first.leases()[0]);
    let aside = first.folder().join("lease");
    fs::rename(&lease, &aside).expect("a lease");
    symlink(&lease, &lease).expect("a link to itself");
    let refused = second.run_pod_sandbox(run(&bridge_pod("second"))).expect_err("it is the first's bridge");
    assert!(refused.message().contains(&owner), "{refused}");
    fs::rename(&aside, &lease).expect("our file");
    first.run_pod(&bridge_pod("more"));
    let pods = first.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list").items;
    pods.iter().for_each(|pod| first.remove_pod(&pod.id));
    assert!(pods.iter().any(|pod| pod.id == pod_id));
    // No address is leased any more.
    let id = second.run_pod(&bridge_pod("second"));
    let refused =
        first.run_pod_sandbox(run(&bridge_pod("late"))).expect_err("the addresses are the second's");
    assert!(refused.message().contains(&second.root().display().to_string()), "{refused}");
    second.remove_pod(&id);
    second.stop();
    first.stop();
}
