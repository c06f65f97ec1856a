//! The configuration of flannel and k3s: `flannel` is a program that delegates to `bridge`; the following
//! plugins are built in. flannel's own program is used if it is installed, otherwise a script with its
//! relevant behaviour.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use coracle_tests::host;
use coracle_tests::node::Node;

use crate::builtin::{self, Case, TCP, addresses, is_link, link_is_derived, own_links, result};
use crate::facts::{self, Outside};
use crate::is_ready;

/// The CNI list of k3s, except for paths and the bridge's name.
const LIST: &str = r#"{"name":"cbr0","cniVersion":"1.0.0","plugins":[
    {"type":"flannel","subnetFile":"FOLDER/subnet.env","dataDir":"FOLDER/flannel","ipam":{"dataDir":"FOLDER/leases"},
     "delegate":{"bridge":"BRIDGE","hairpinMode":true,"forceAddress":true,"isDefaultGateway":true}},
    {"type":"portmap","capabilities":{"portMappings":true}},
    {"type":"bandwidth","capabilities":{"bandwidth":true}}]}"#;

/// The file that flannel's daemon writes.
const SUBNET: &str =
    "FLANNEL_NETWORK=10.42.0.0/16\nFLANNEL_SUBNET=10.42.0.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";

/// Creates a bridge configuration from the subnet, stores it for DEL, and executes the plugin.
const PROGRAM: &str = r#"#!/bin/sh
set -eu
input=$(cat)
kept=FOLDER/flannel/$CNI_CONTAINERID
if [ "$CNI_COMMAND" = ADD ]; then
  . FOLDER/subnet.env
  mkdir -p FOLDER/flannel
  cat >"$kept" <<END
{"cniVersion":"1.0.0","name":"cbr0","type":"bridge","bridge":"BRIDGE","hairpinMode":true,"forceAddress":true,
 "isDefaultGateway":true,"isGateway":true,"ipMasq":false,"mtu":$FLANNEL_MTU,
 "ipam":{"type":"host-local","dataDir":"FOLDER/leases","ranges":[[{"subnet":"10.42.0.0/24"}]],
         "routes":[{"dst":"$FLANNEL_NETWORK"}]}}
END
  exec /usr/lib/cni/bridge <"$kept"
fi
[ -e "$kept" ] || exit 0
/usr/lib/cni/bridge <"$kept"
rm "$kept"
"#;

fn fill(node: &Node, text: &str) -> String {
    let numbers = node.subnet();
    let network = numbers.rsplit_once('.').map_or("", |(network, _)| network);
    text.replace("FOLDER", &node.folder().display().to_string())
        .replace("BRIDGE", &node.bridge())
        .replace("10.42.0.0/16", &format!("{network}.0.0/16"))
        .replace("10.42.0", &node.subnet())
}

#[test]
fn flannels_list_attaches_a_pod_with_a_port_and_limits_and_leaves_nothing() {
    let mut node = Node::start();
    fs::write(node.folder().join("subnet.env"), fill(&node, SUBNET)).expect("a file");
    if !Path::new("/opt/cni/bin/flannel").exists() {
        let program = node.plugins().join("flannel");
        host::write_program(&program, &fill(&node, PROGRAM));
    }
    fs::write(node.cni().join("10-flannel.conflist"), fill(&node, LIST)).expect("a network");
    host::wait_until("the network is configured", || is_ready(&node));
    let outside = Outside::new(&node);
    let annotations =
        &[("kubernetes.io/ingress-bandwidth", "100M"), ("kubernetes.io/egress-bandwidth", "200M")];
    let (configs, port) = builtin::pods(&node, &Case { port: TCP, annotations, ..Case::default() });
    let ids: Vec<_> = configs.iter().map(|pod| node.run_pod(pod)).collect();
    let (server, client) = (addresses(&node, &ids[0])[0], addresses(&node, &ids[1])[0]);
    assert!(!link_is_derived(&node, &ids[0]), "flannel has made it: {}", result(&node, &ids[0]));
    assert!(
        [server, client].iter().all(|own| own.to_string().starts_with(&node.subnet())),
        "{server} {client}"
    );
    let names: Vec<_> = ids.iter().map(|id| facts::namespace(id)).collect();
    assert_eq!(facts::seen(&names[0], 80, &names[1], SocketAddr::new(server, 80)), Some(client));
    // The host port is built in, and no iptables rule refers to the pod.
    let at = SocketAddr::new(outside.host[0], port);
    for from in [outside.namespace(), &names[1], &names[0], ""] {
        assert!(facts::seen(&names[0], 80, from, at).is_some(), "port {port} from {from:?}");
    }
    let local = SocketAddr::from(([127, 0, 0, 1], port));
    assert!(facts::seen(&names[0], 80, "", local).is_some(), "localhost");
    assert!(facts::rules(&ids[0]).is_empty(), "{:?}", facts::rules(&ids[0]));
    let links = own_links(&node, &ids[0]);
    assert_eq!(links.len(), 2, "the pair's end, and the detour of what the pod sends: {links:?}");
    let seen = facts::describe(&node, &ids[0], &result(&node, &ids[0]));
    for part in ["host traffic kind=\"tbf\"", "host redirects kind=\"mirred\"", "\"rate\":25000000"] {
        assert!(seen.contains(part), "{part} in {seen}");
    }
    // The next daemon knows which plugins attached the pod, although the configuration was removed.
    fs::remove_file(node.cni().join("10-flannel.conflist")).expect("our file");
    node.restart();
    ids.iter().for_each(|id| node.remove_pod(id));
    host::wait_until("the pod's links are gone", || links.iter().all(|link| !is_link(link)));
    let heard = facts::seen("", port, outside.namespace(), at);
    assert_eq!(heard, Some(outside.address[0]), "the port is the node's again");
    let kept = fs::read_dir(node.folder().join("flannel")).map(Iterator::count);
    assert_eq!(kept.unwrap_or_default(), 0, "flannel received the DEL");
    drop(outside);
    node.stop();
}
