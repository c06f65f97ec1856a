//! The rules of nftables that pods share: what one pod has in them, what happens to pods whose rules an earlier build
//! wrote, and to pods after another program has emptied the table.

use std::io::Write;
use std::net::SocketAddr;
use std::process::{Command, Stdio};

use coracle_tests::node::Node;
use serde_json::json;

use crate::builtin::{self, Case, ONE_SUBNET, TCP, addresses, pods};
use crate::facts::{self, Outside};

fn case() -> Case {
    Case {
        main: json!({ "isGateway": true, "ipMasq": true }),
        ipam: ONE_SUBNET,
        portmap: Some(json!({})),
        port: TCP,
        ..Case::default()
    }
}

/// Lines of coracle's tables with a text, for example a pod's ID.
fn lines_with(part: &str) -> Vec<String> {
    let text = ["ip", "ip6"].map(|family| {
        let output = Command::new("nft").args(["list", "table", family, "coracle"]).output();
        String::from_utf8_lossy(&output.expect("nft is installed").stdout).into_owned()
    });
    let lines = text.iter().flat_map(|text| text.split(['\n', ',']));
    lines.filter(|line| line.contains(part)).map(|line| line.trim().to_owned()).collect()
}

/// Runs commands of nft.
pub(crate) fn nft(commands: &str) {
    let mut child =
        Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).spawn().expect("nft is installed");
    child.stdin.take().expect("a pipe").write_all(commands.as_bytes()).expect("it reads");
    assert!(child.wait().expect("our child").success(), "{commands}");
}

/// Replaces a pod's elements by the rules that builds before the sets had for it.
fn rewrite_as_earlier_builds(node: &Node, pod_id: &str, port: u16) {
    let (own, subnet) = (addresses(node, pod_id)[0], node.subnet());
    let elements = lines_with(pod_id);
    assert_eq!(elements.len(), 5, "masquerading, port, two sources of it, published: {elements:?}");
    let set = |name: &str, key: String| format!("delete element ip coracle {name} {{ {key} }}\n");
    let tcp = format!("tcp . {port}");
    nft(&[
        set(&format!("masquerade-{subnet}.0-24"), own.to_string()),
        set("ports", tcp.clone()),
        set(&format!("near-{subnet}.0-24-0x2000"), tcp.clone()),
        set("near-0x2000", format!("127.0.0.1 . {tcp}")),
        set("published-0x2000", own.to_string()),
    ]
    .concat());
    assert_eq!(lines_with(pod_id), Vec::<String>::new());
    let mut rules = String::from(
        "add chain ip coracle prerouting { type nat hook prerouting priority -100 ; }\n\
         add chain ip coracle output { type nat hook output priority -100 ; }\n",
    );
    for chain in ["prerouting", "output"] {
        rules.push_str(&format!(
            "add rule ip coracle {chain} fib daddr type local tcp dport {port} dnat to {own}:80 comment \"{pod_id}\"\n"
        ));
    }
    rules.push_str(&format!(
        "add rule ip coracle postrouting ip saddr {own} ip daddr != {subnet}.0/24 masquerade comment \"{pod_id}\"\n"
    ));
    nft(&rules);
    assert_eq!(lines_with(pod_id).len(), 3);
}

#[test]
fn rules_of_an_earlier_build_and_elements_are_removed_by_the_next() {
    let case = case();
    let mut node = builtin::node(&case, true);
    let outside = Outside::new(&node);
    let (configs, port) = pods(&node, &case);
    let at = SocketAddr::new(outside.host[0], port);
    let old = node.run_pod(&configs[0]);
    rewrite_as_earlier_builds(&node, &old, port);
    node.restart();
    let new = node.run_pod(&configs[1]);
    assert_eq!(lines_with(&new).len(), 1, "{:?}", lines_with(&new));
    // Both forms work side by side.
    let beyond = SocketAddr::new(outside.address[0], 80);
    for id in [&old, &new] {
        let heard = facts::seen(outside.namespace(), 80, &facts::namespace(id), beyond);
        assert_eq!(heard, Some(outside.host[0]), "masqueraded");
    }
    assert!(facts::seen(&facts::namespace(&old), 80, outside.namespace(), at).is_some());
    node.remove_pod(&old);
    assert_eq!(lines_with(&old), Vec::<String>::new());
    assert_eq!(lines_with(&new).len(), 1, "of no other pod");
    let network = format!("{}.0-24", node.subnet());
    assert!(!lines_with(&network).is_empty(), "sets and rules of the network");
    node.remove_pod(&new);
    assert_eq!(lines_with(&new), Vec::<String>::new());
    assert_eq!(lines_with(&network), Vec::<String>::new(), "nothing of the network after its last pod");
    assert_eq!(lines_with(&format!("{}.0/24", node.subnet())), Vec::<String>::new());
    let heard = facts::seen("", port, outside.namespace(), at);
    assert_eq!(heard, Some(outside.address[0]), "the port is the node's again");
    drop(outside);
    node.stop();
}

/// After a downgrade the earlier build removes a pod without its elements. They do not disturb the next pod with the
/// same port or address, and are replaced.
#[test]
fn elements_that_an_earlier_build_left_behind_are_replaced() {
    let case = case();
    let node = builtin::node(&case, true);
    let outside = Outside::new(&node);
    let (configs, port) = pods(&node, &case);
    let first = node.run_pod(&configs[0]);
    // Keeps the network's sets.
    let other = node.run_pod(&configs[1]);
    assert!(addresses(&node, &other)[0].to_string().ends_with(".3"));
    node.remove_pod(&first);
    let subnet = node.subnet();
    let next = format!("{subnet}.4");
    let lost = "f".repeat(64);
    nft(&format!(
        "add element ip coracle masquerade-{subnet}.0-24 {{ {next} comment \"{lost}\" }}\n\
         add element ip coracle ports {{ tcp . {port} comment \"{lost}\" : {subnet}.77 . 80 }}\n\
         add element ip coracle published-0x2000 {{ {next} comment \"{lost}\" }}\n"
    ));
    let second = node.run_pod(&configs[0]);
    assert_eq!(addresses(&node, &second)[0].to_string(), next);
    assert_eq!((lines_with(&lost), lines_with(&second).len()), (Vec::<String>::new(), 5));
    let at = SocketAddr::new(outside.host[0], port);
    assert!(facts::seen(&facts::namespace(&second), 80, outside.namespace(), at).is_some());
    node.remove_pod(&second);
    assert_eq!(lines_with(&second), Vec::<String>::new());
    node.remove_pod(&other);
    drop(outside);
    node.stop();
}

/// An administrator or the restart of a firewall may remove rules: here only this network's part is removed, because other tests use the
/// same table.
#[test]
fn shared_rules_that_another_program_removed_are_created_again() {
    let case = case();
    let mut node = builtin::node(&case, true);
    let outside = Outside::new(&node);
    let (configs, _) = pods(&node, &case);
    let before = node.run_pod(&configs[1]);
    let set = format!("masquerade-{}.0-24", node.subnet());
    let chain = facts::run("nft", &["-a", "list", "chain", "ip", "coracle", "postrouting"]);
    let rule = chain.lines().find(|line| line.contains(&format!("@{set} "))).expect("the network's rule");
    let handle = rule.rsplit(' ').next().expect("a handle");
    nft(&format!("delete rule ip coracle postrouting handle {handle}\n"));
    let beyond = SocketAddr::new(outside.address[0], 80);
    let heard = |id: &str| facts::seen(outside.namespace(), 80, &facts::namespace(id), beyond);
    // The next daemon makes it again for its first pod, which also repairs the earlier one's traffic.
    node.restart();
    let after = node.run_pod(&configs[0]);
    assert_eq!([heard(&before), heard(&after)], [Some(outside.host[0]); 2]);
    // Without the set it is made by the next pod, also of the same daemon.
    node.remove_pod(&after);
    let chain = facts::run("nft", &["-a", "list", "chain", "ip", "coracle", "postrouting"]);
    let rule = chain.lines().find(|line| line.contains(&format!("@{set} "))).expect("the network's rule");
    let handle = rule.rsplit(' ').next().expect("a handle");
    nft(&format!("delete rule ip coracle postrouting handle {handle}\ndelete set ip coracle {set}\n"));
    let later = node.run_pod(&configs[0]);
    assert_eq!(heard(&later), Some(outside.host[0]));
    // The pod whose element is gone can be removed.
    node.remove_pod(&before);
    node.remove_pod(&later);
    drop(outside);
    node.stop();
}

/// Runs a test of this program, which is ignored otherwise, in a network namespace of its own, because it changes all of
/// coracle's table or measures what the whole namespace has.
pub(crate) fn run_in_own_network(test: &str) {
    // sysfs shows the links of the network namespace that it was mounted in.
    let script = "cgroups=$(mktemp -d) && mount --rbind /sys/fs/cgroup $cgroups && mount -t sysfs sysfs /sys && \
                  mount --rbind $cgroups /sys/fs/cgroup && umount -l $cgroups && rmdir $cgroups && ip link set lo up && \
                  exec \"$0\" --exact --ignored \"$1\"";
    let output = Command::new("unshare")
        .args(["--net", "--mount", "sh", "-c", script])
        .arg(std::env::current_exe().expect("this program"))
        .arg(test)
        .output()
        .expect("unshare runs");
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
fn host_ports_work_after_the_table_was_removed_without_pods() {
    run_in_own_network("rules::a_pod_after_a_removed_table_is_reached_at_its_host_port");
}

/// A firewall is restarted while the network has no pods: what the next pod shares with others is made again.
#[test]
#[ignore = "run by host_ports_work_after_the_table_was_removed_without_pods"]
fn a_pod_after_a_removed_table_is_reached_at_its_host_port() {
    let case = case();
    let node = builtin::node(&case, true);
    let outside = Outside::new(&node);
    let (configs, port) = pods(&node, &case);
    let first = node.run_pod(&configs[0]);
    node.remove_pod(&first);
    nft("delete table ip coracle\n");
    let second = node.run_pod(&configs[0]);
    let at = SocketAddr::new(outside.host[0], port);
    assert!(facts::seen(&facts::namespace(&second), 80, outside.namespace(), at).is_some());
    node.remove_pod(&second);
    drop(outside);
    node.stop();
}

#[test]
fn a_pod_after_the_rules_were_flushed_has_all_of_them() {
    run_in_own_network("rules::masquerading_and_host_ports_work_after_the_table_was_flushed");
}

/// `nft flush table` removes rules and keeps sets and chains.
#[test]
#[ignore = "run by a_pod_after_the_rules_were_flushed_has_all_of_them"]
fn masquerading_and_host_ports_work_after_the_table_was_flushed() {
    let case = case();
    let node = builtin::node(&case, true);
    let outside = Outside::new(&node);
    let (configs, port) = pods(&node, &case);
    let other = node.run_pod(&configs[1]);
    nft("flush table ip coracle\n");
    let second = node.run_pod(&configs[0]);
    let beyond = SocketAddr::new(outside.address[0], 80);
    let heard = facts::seen(outside.namespace(), 80, &facts::namespace(&second), beyond);
    let at = SocketAddr::new(outside.host[0], port);
    let reached = facts::seen(&facts::namespace(&second), 80, outside.namespace(), at);
    assert_eq!(heard, Some(outside.host[0]), "masqueraded; host port: {reached:?}");
    assert!(reached.is_some(), "the host port");
    node.remove_pod(&second);
    node.remove_pod(&other);
    drop(outside);
    node.stop();
}
