//! Built-in bandwidth limits and acceptance by the host's packet filter compared with Debian's plugins
//! `bandwidth` and `firewall`: equal token buckets, IFB links and rules, their effect, and that each can
//! remove what the other created.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use coracle_tests::host;
use coracle_tests::node::Node;
use coracle_tests::request::{bridge_pod, run};
use serde_json::{Value, json};

use crate::builtin::{
    self, BY_PROGRAMS, Case, DUAL, ONE_SUBNET, TCP, addresses, compare, is_link, link_is_derived, own_links,
    result, run_plugin,
};
use crate::facts::{self, Outside};

const LIMITS: &str = r#"{"type":"bandwidth","ingressRate":8000000,"ingressBurst":800000,
    "egressRate":16000000,"egressBurst":160000}"#;

fn limits() -> Value {
    serde_json::from_str(LIMITS).expect("the test's own JSON")
}

fn firewall() -> Value {
    json!({ "type": "firewall" })
}

#[test]
fn bandwidth_limits_of_the_list_equal_those_of_the_plugin_programs() {
    let main = json!({ "isGateway": true, "mtu": 1400 });
    compare(Case { main, ipam: ONE_SUBNET, chained: vec![limits()], ..Case::default() });
}

#[test]
fn bandwidth_limits_of_a_pod_equal_those_of_the_plugin_programs() {
    // Rates for which the burst's time fits into the kernel's field; see docs/cni.md for others.
    let annotations =
        &[("kubernetes.io/ingress-bandwidth", "100M"), ("kubernetes.io/egress-bandwidth", "40G")];
    let bandwidth = json!({ "type": "bandwidth", "capabilities": { "bandwidth": true } });
    let (main, chained) = (json!({ "ipMasq": true }), vec![bandwidth]);
    compare(Case {
        main,
        is_point_to_point: true,
        ipam: ONE_SUBNET,
        chained,
        annotations,
        ..Case::default()
    });
}

#[test]
fn firewall_and_host_port_equal_those_of_the_plugin_programs() {
    let (main, portmap) = (json!({ "isGateway": true, "ipMasq": true }), Some(json!({})));
    let chained = vec![firewall()];
    compare(Case { main, ipam: ONE_SUBNET, portmap, port: TCP, chained, ..Case::default() });
}

#[test]
fn a_dual_stack_firewall_with_limits_equals_that_of_the_plugin_programs() {
    let chained = vec![json!({ "type": "firewall", "backend": "iptables" }), limits()];
    compare(Case { main: json!({ "isGateway": true }), ipam: DUAL, chained, ..Case::default() });
}

/// A program between two built-in plugins: `tuning` applies its settings, and everything else is unchanged.
#[test]
fn a_plugin_program_runs_between_built_in_plugins() {
    let tuning = json!({ "type": "tuning", "sysctl": { "net.ipv4.conf.eth0.log_martians": "1" } });
    let case = Case {
        main: json!({ "isGateway": true }),
        ipam: ONE_SUBNET,
        chained: vec![tuning, limits(), firewall()],
        ..Case::default()
    };
    let node = builtin::node(&case, true);
    let pod_id = node.run_pod(&bridge_pod("tuned"));
    assert!(link_is_derived(&node, &pod_id), "the bridge is built in: {}", result(&node, &pod_id));
    let own = addresses(&node, &pod_id);
    let links = own_links(&node, &pod_id);
    assert_eq!((links.len(), facts::accepted(&own).len()), (2, 2), "{links:?}");
    let martians = "/proc/sys/net/ipv4/conf/eth0/log_martians";
    let set = facts::inside(&facts::namespace(&pod_id), || std::fs::read_to_string(martians));
    assert_eq!(set.expect("a sysctl").trim(), "1");
    let why = r#"reason="plugin 1, \"tuning\": not built in, or not at this position""#;
    assert!(node.log().contains(why), "no other is a program: {}", node.log());
    node.remove_pod(&pod_id);
    assert!(facts::accepted(&own).is_empty() && !is_link(&links[1]), "{links:?}");
    node.stop();
}

/// Drops forwarded packets from and to a node's pods until it is dropped.
struct Refusal(String);

impl Refusal {
    fn new(node: &Node) -> Refusal {
        let refusal = Refusal(format!("{}.0/24", node.subnet()));
        refusal.tell("-A");
        refusal
    }

    fn tell(&self, what: &str) {
        for end in ["-s", "-d"] {
            let words = ["-w", what, "FORWARD", end, &self.0, "-j", "DROP"];
            let output = Command::new("iptables").args(words).output().expect("iptables is installed");
            assert!(output.status.success() || what == "-D", "{output:?}");
        }
    }
}

impl Drop for Refusal {
    fn drop(&mut self) {
        self.tell("-D");
    }
}

#[test]
fn the_firewall_plugin_accepts_traffic_of_pods() {
    let reached = |chained: Vec<Value>| {
        let main = json!({ "isGateway": true });
        let case = Case { main, ipam: ONE_SUBNET, chained, ..Case::default() };
        let node = builtin::node(&case, true);
        let (outside, _refusal) = (Outside::new(&node), Refusal::new(&node));
        let pod_id = node.run_pod(&bridge_pod("refused"));
        let beyond = SocketAddr::new(outside.address[0], 80);
        let seen = facts::seen(outside.namespace(), 80, &facts::namespace(&pod_id), beyond);
        let own = addresses(&node, &pod_id)[0];
        node.remove_pod(&pod_id);
        node.stop();
        seen == Some(own)
    };
    assert!(!reached(Vec::new()), "it is refused");
    assert!(reached(vec![firewall()]));
}

/// Duration of the transmission of this many bytes in seconds.
fn seconds_for(bytes: usize, server: &str, client: &str, to: IpAddr) -> f64 {
    let listener = facts::inside(server, || TcpListener::bind(("::", 9000)).expect("a free port"));
    let mut stream = facts::inside(client, || {
        TcpStream::connect_timeout(&SocketAddr::new(to, 9000), Duration::from_secs(5))
    })
    .expect("it listens");
    let (mut peer, _) = listener.accept().expect("it has asked");
    let begin = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(move || stream.write_all(&vec![0; bytes]).expect("it reads"));
        let mut read = Vec::new();
        peer.read_to_end(&mut read).expect("it sends");
        assert_eq!(read.len(), bytes);
    });
    begin.elapsed().as_secs_f64()
}

#[test]
fn bandwidth_limits_are_effective() {
    let bandwidth = json!({ "type": "bandwidth", "capabilities": { "bandwidth": true }, "ingressRate": 8_000_000,
        "ingressBurst": 800_000, "egressRate": 8_000_000, "egressBurst": 800_000 });
    let case = Case {
        main: json!({ "isGateway": true }),
        ipam: ONE_SUBNET,
        chained: vec![bandwidth],
        ..Case::default()
    };
    let node = builtin::node(&case, true);
    let pod_id = node.run_pod(&bridge_pod("slow"));
    let (name, own) = (facts::namespace(&pod_id), addresses(&node, &pod_id)[0]);
    let gateway = format!("{}.1", node.subnet()).parse().expect("an address");
    // 400 kB at 1 MB/s with a burst of 100 kB: at least 0.25 s, however fast the machine is.
    for (direction, took) in
        [("to", seconds_for(400_000, &name, "", own)), ("from", seconds_for(400_000, "", &name, gateway))]
    {
        assert!(took > 0.25, "{direction} the pod: {took} s");
    }
    node.remove_pod(&pod_id);
    node.stop();
}

#[test]
fn built_in_plugins_and_programs_can_remove_each_others_limits_and_rules() {
    let chained = vec![limits(), firewall()];
    let case = Case { main: json!({ "isGateway": true }), ipam: ONE_SUBNET, chained, ..Case::default() };
    let mut node = builtin::node(&case, false);
    let by_program = node.run_pod(&bridge_pod("by-program"));
    node.terminate();
    node.rewrite_config("");
    node.launch();
    let built_in = node.run_pod(&bridge_pod("built-in"));
    assert!(!link_is_derived(&node, &by_program) && link_is_derived(&node, &built_in));
    let (theirs, ours) = (addresses(&node, &by_program), addresses(&node, &built_in));
    let links = [own_links(&node, &by_program), own_links(&node, &built_in)];
    assert_eq!([facts::accepted(&theirs).len(), facts::accepted(&ours).len()], [2, 2]);

    let log = node.log().len();
    node.remove_pod(&by_program);
    assert!(!node.log()[log..].contains("cni: "), "no plugin is asked: {}", &node.log()[log..]);
    assert!(facts::accepted(&theirs).is_empty(), "{:?}", facts::accepted(&theirs));
    assert!(!is_link(&links[0][1]), "{links:?}");

    let list: Value = serde_json::from_str(&case.list(&node)).expect("the test's own JSON");
    let made = result(&node, &built_in);
    for plugin in list["plugins"].as_array().expect("a list").iter().rev() {
        let mut input = plugin.clone();
        input["name"] = json!("boat");
        input["cniVersion"] = json!("1.0.0");
        input["prevResult"] = made.clone();
        let kind = plugin["type"].as_str().expect("the test's own");
        assert!(run_plugin(&node, kind, "DEL", &built_in, &input), "{kind}");
    }
    assert!(facts::accepted(&ours).is_empty(), "{:?}", facts::accepted(&ours));
    assert!(links[1].iter().all(|link| !is_link(link)), "{links:?}");
    node.remove_pod(&built_in);
    node.stop();
}

/// Everything that was created before a program failed is removed, although there is no result.
#[test]
fn a_failing_program_is_undone_with_its_predecessors() {
    // An MTU that no other test uses, to identify the links.
    const MTU: u64 = 1399;
    let main = json!({ "isGateway": true, "mtu": MTU });
    let tuning = json!({ "type": "tuning", "sysctl": { "net.ipv4.conf.eth0.no_such_thing": "1" } });
    let chained = vec![limits(), firewall(), tuning];
    let case = Case { main, ipam: ONE_SUBNET, chained, ..Case::default() };
    let node = builtin::node(&case, true);
    let refused = node.run_pod_sandbox(run(&bridge_pod("refused"))).expect_err("the program fails");
    assert!(refused.message().contains(r#"plugin type="tuning" failed (add)"#), "{refused}");
    let first: IpAddr = format!("{}.2", node.subnet()).parse().expect("an address");
    assert!(facts::accepted(&[first]).is_empty(), "{:?}", facts::accepted(&[first]));
    let links = || {
        let text = facts::run("ip", &["link", "show"]);
        text.lines().filter(|line| line.contains(&format!("mtu {MTU}")) && line.contains(": bwp")).count()
    };
    host::wait_until("nothing is left", || node.rests().is_empty() && links() == 0);
    node.stop();
}

/// After the daemon was killed everything is removed, with the recorded configuration.
#[test]
fn a_crash_leaves_no_limits_and_no_rules() {
    let chained = vec![limits(), firewall()];
    let case = Case { main: json!({ "isGateway": true }), ipam: ONE_SUBNET, chained, ..Case::default() };
    let mut node = builtin::node(&case, true);
    let pod_id = node.run_pod(&bridge_pod("crash"));
    let (own, links) = (addresses(&node, &pod_id), own_links(&node, &pod_id));
    node.restart();
    // A changed configuration does not affect this pod.
    node.terminate();
    node.rewrite_config(BY_PROGRAMS);
    node.launch();
    node.remove_pod(&pod_id);
    assert!(facts::accepted(&own).is_empty() && links.iter().skip(1).all(|link| !is_link(link)), "{links:?}");
    node.stop();
}
