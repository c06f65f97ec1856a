//! Pods whose links another program removes: `k3s-killall.sh` deletes the bridge, its ports and all leases.

use std::net::SocketAddr;
use std::process::Command;

use coracle_tests::cri::proto::{PodSandboxState, PodSandboxStatusRequest, PortMapping};
use coracle_tests::host::{self, remove_while_written, wait_until};
use coracle_tests::node::Node;
use coracle_tests::registry::free_host_port;
use coracle_tests::request::{bridge_pod, container, host_pod};
use serde_json::json;

use crate::builtin::{self, Case, ONE_SUBNET, own_links};
use crate::facts;

fn is_ready(node: &Node, pod_id: &str) -> bool {
    let request = PodSandboxStatusRequest { pod_sandbox_id: pod_id.into(), verbose: false };
    let status = node.pod_sandbox_status(request).expect("status").status.expect("a status");
    status.state() == PodSandboxState::SandboxReady
}

fn case() -> Case {
    // Without a link, the program `bridge` 1.1.1 leaves its masquerading rules behind.
    let main = json!({ "isGateway": true });
    Case { main, ipam: ONE_SUBNET, portmap: Some(json!({})), ..Case::default() }
}

fn delete(link: &str) {
    facts::run("ip", &["link", "delete", link]);
}

/// Whether an element or a rule leads to this address.
fn is_published(address: &str) -> bool {
    let output = Command::new("nft").args(["list", "ruleset"]).output().expect("nft is installed");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines()
        .any(|line| line.contains(&format!(" {address} . 80")) || line.contains(&format!("{address}:80")))
}

/// The pod becomes NotReady, so that the kubelet replaces it, and nothing of its network leads to its successor.
#[test]
fn a_pod_without_a_link_is_not_ready_and_keeps_no_port() {
    for is_built_in in [true, false] {
        let node = builtin::node(&case(), is_built_in);
        let image = node.import_probe();
        let mut config = bridge_pod("lost");
        let host_port = i32::from(free_host_port());
        config.port_mappings = vec![PortMapping { container_port: 80, host_port, ..Default::default() }];
        let id = node.run_pod(&config);
        let container_id =
            node.run_container(&id, &container("main", &image, &["sleep", "forever"], &config), &config);
        let address = builtin::addresses(&node, &id)[0].to_string();
        let (other, on_host) = (node.run_pod(&bridge_pod("other")), node.run_pod(&host_pod("host")));
        assert!(is_published(&address));
        delete(&own_links(&node, &id)[0]);
        wait_until("the pod is not ready", || !is_ready(&node, &id));
        wait_until("its address is released", || node.leases().len() == 1);
        wait_until("no rule is left", || !is_published(&address) && facts::rules(&id).is_empty());
        assert!(is_ready(&node, &other) && is_ready(&node, &on_host), "the others are not concerned");
        assert!(
            host::processes("sleep forever")
                .iter()
                .any(|process| process.pid == node.container_pid(&container_id))
        );
        let why = node.tool(&["why", "default/lost"]);
        let why = String::from_utf8_lossy(&why.stdout).into_owned();
        assert!(why.contains("lost its network") && why.contains("was removed"), "{why}");
        node.remove_pod(&id);
        node.stop();
    }
}

/// Does to the pods of a bridge the same as `k3s-killall.sh`, with and without a daemon that runs meanwhile.
#[test]
fn a_deleted_bridge_and_lost_leases_end_all_its_pods() {
    for (is_built_in, runs) in [(true, true), (true, false), (false, true), (false, false)] {
        let mut node = builtin::node(&case(), is_built_in);
        let ids = ["one", "two"].map(|name| node.run_pod(&bridge_pod(name)));
        let links: Vec<_> = ids.iter().flat_map(|id| own_links(&node, id)).collect();
        if !runs {
            node.kill9();
        }
        links.iter().for_each(|link| delete(link));
        delete(&node.bridge());
        remove_while_written(&node.folder().join("leases"));
        if !runs {
            node.launch();
        }
        for id in &ids {
            wait_until("the pod is not ready", || !is_ready(&node, id));
        }
        let new = node.run_pod(&bridge_pod("new"));
        let at = SocketAddr::new(builtin::addresses(&node, &new)[0], 80);
        assert!(facts::seen(&facts::namespace(&new), 80, "", at).is_some(), "the new pod has a network");
        ids.iter().for_each(|id| node.remove_pod(id));
        assert!(is_ready(&node, &new));
        assert_eq!(node.leases().len(), 1, "the new pod's");
        node.stop();
    }
}

/// A bridge alone, whose ports stay: the pods have no network, although their links exist.
#[test]
fn a_bridge_that_is_made_again_is_another_one() {
    for runs in [true, false] {
        let mut node = builtin::node(&case(), true);
        let id = node.run_pod(&bridge_pod("cut"));
        if !runs {
            node.kill9();
        }
        delete(&node.bridge());
        if !runs {
            node.launch();
        }
        wait_until("the pod is not ready", || !is_ready(&node, &id));
        let new = node.run_pod(&bridge_pod("new"));
        node.restart();
        assert!(is_ready(&node, &new), "{}", node.log());
        node.remove_pod(&id);
        node.stop();
    }
}
