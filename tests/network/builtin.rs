//! The built-in plugins compared with Debian's plugins (version 1.1.1, the reference) for the same
//! configuration: equal addresses, routes, links, leases, results and effects, and complete removal; each can
//! also remove what the other created. Names of links, MAC addresses and the tables of rules may differ.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::{Command, Stdio};

use coracle_tests::cri::proto::{
    NetworkConfig, PodSandboxConfig, PodSandboxStatusRequest, PortMapping, Protocol, RuntimeConfig,
    UpdateRuntimeConfigRequest,
};
use coracle_tests::host;
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::free_host_port;
use coracle_tests::request::{DEFAULT_NETWORK, bridge_pod};
use serde_json::{Value, json};

use crate::facts::{self, Outside};
use crate::is_ready;

pub(crate) const BY_PROGRAMS: &str = "[cni]\nbuilt_in = false\n";

/// A configuration to be compared.
#[derive(Default)]
pub(crate) struct Case {
    pub(crate) version: &'static str,
    /// Options of the main plugin except its type, bridge and ipam.
    pub(crate) main: Value,
    pub(crate) is_point_to_point: bool,
    /// Options of host-local except its type and directory; NET stands for the first three numbers of the
    /// IPv4 subnet, SIX for the IPv6 prefix.
    pub(crate) ipam: &'static str,
    /// Options of portmap.
    pub(crate) portmap: Option<Value>,
    pub(crate) port: Option<Port>,
    /// Complete configurations of chained plugins.
    pub(crate) chained: Vec<Value>,
    /// Annotations of the pods.
    pub(crate) annotations: &'static [(&'static str, &'static str)],
}

/// A host port.
#[derive(Clone, Copy)]
pub(crate) struct Port {
    pub(crate) protocol: Protocol,
    /// Address of the host, with NET and SIX as in [`Case::ipam`]; empty: all addresses.
    pub(crate) host_ip: &'static str,
}

pub(crate) const ONE_SUBNET: &str = r#""subnet":"NET.0/24","routes":[{"dst":"0.0.0.0/0"}]"#;
pub(crate) const DUAL: &str = r#""ranges":[[{"subnet":"NET.0/24"}],[{"subnet":"SIX::/64"}]],"routes":[{"dst":"0.0.0.0/0"},{"dst":"::/0"}]"#;

impl Case {
    pub(crate) fn list(&self, node: &Node) -> String {
        let mut ipam = self.ipam.replace("NET", &node.subnet()).replace("SIX", &facts::six(node));
        ipam.push_str(&format!(r#","type":"host-local","dataDir":"{}/leases""#, node.folder().display()));
        let mut main = self.main.clone();
        main["type"] = json!(if self.is_point_to_point { "ptp" } else { "bridge" });
        if !self.is_point_to_point {
            main["bridge"] = json!(node.bridge());
        }
        main["ipam"] = serde_json::from_str(&format!("{{{ipam}}}")).expect("the test's own JSON");
        let mut plugins = vec![main];
        if let Some(options) = &self.portmap {
            let mut portmap = options.clone();
            portmap["type"] = json!("portmap");
            portmap["capabilities"] = json!({ "portMappings": true });
            plugins.push(portmap);
        }
        plugins.extend(self.chained.iter().cloned());
        let version = if self.version.is_empty() { "1.0.0" } else { self.version };
        json!({ "cniVersion": version, "name": "boat", "plugins": plugins }).to_string()
    }
}

/// A node with this network, with built-in plugins or programs.
pub(crate) fn node(case: &Case, is_built_in: bool) -> Node {
    let config = if is_built_in { String::new() } else { BY_PROGRAMS.to_owned() };
    let node = Node::with(Options { config, ..Options::default() });
    fs::write(node.cni().join("10-boat.conflist"), case.list(&node)).expect("a network");
    host::wait_until("the network is configured", || is_ready(&node));
    node
}

/// The addresses of a pod, the primary one first.
pub(crate) fn addresses(node: &Node, pod_id: &str) -> Vec<IpAddr> {
    let ask = PodSandboxStatusRequest { pod_sandbox_id: pod_id.into(), verbose: false };
    let network =
        node.pod_sandbox_status(ask).expect("status").status.expect("a status").network.expect("a network");
    let more = network.additional_ips.iter().map(|address| address.ip.as_str());
    [network.ip.as_str()].into_iter().chain(more).map(|text| text.parse().expect("an address")).collect()
}

pub(crate) fn result(node: &Node, pod_id: &str) -> Value {
    let ask = PodSandboxStatusRequest { pod_sandbox_id: pod_id.into(), verbose: true };
    let answer = node.pod_sandbox_status(ask).expect("status");
    let info: Value = serde_json::from_str(&answer.info["info"]).expect("info is JSON");
    info["cniRawResult"].clone()
}

/// The owner of an address: the pod, the node, or another host.
fn whose(address: Option<IpAddr>, own: &[IpAddr], outside: &Outside) -> &'static str {
    match address {
        None => "unheard",
        Some(address) if own.contains(&address) => "itself",
        Some(address) if outside.host.contains(&address) || outside.address.contains(&address) => "beyond",
        Some(address) if address.is_loopback() => "localhost",
        Some(_) => "the bridge's side",
    }
}

pub(crate) fn pods(node: &Node, case: &Case) -> (Vec<PodSandboxConfig>, u16) {
    let port = free_host_port();
    let mut server = bridge_pod("server");
    if let Some(asked) = case.port {
        let host_ip = asked.host_ip.replace("NET", &node.subnet()).replace("SIX", &facts::six(node));
        server.port_mappings = vec![PortMapping {
            protocol: asked.protocol.into(),
            container_port: 80,
            host_port: i32::from(port),
            host_ip,
        }];
    }
    let own = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    server.annotations.extend(case.annotations.iter().map(own));
    (vec![server, bridge_pod("client")], port)
}

/// Everything that must be equal, and what remains after the removal.
fn observe(case: &Case, is_built_in: bool) -> String {
    let node = node(case, is_built_in);
    let outside = Outside::new(&node);
    let (configs, port) = pods(&node, case);
    let ids: Vec<_> = configs.iter().map(|pod| node.run_pod(pod)).collect();
    let is_ours = !node.log().contains("coracle-worker") && link_is_derived(&node, &ids[0]);
    assert_eq!(is_ours, is_built_in, "who attached it; {}", node.log());
    ids.iter().for_each(|id| facts::settle(&result(&node, id)["interfaces"]));
    let mut text = facts::describe(&node, &ids[0], &result(&node, &ids[0]));
    text = text.replace(&ids[1], "OTHER");
    let (server, client) = (addresses(&node, &ids[0]), addresses(&node, &ids[1]));
    let accepted = facts::accepted(&server);
    text.extend(accepted.iter().map(|rule| format!("\n{}", facts::rename(&node, &ids[0], rule))));
    let links = own_links(&node, &ids[0]);
    let names: Vec<_> = ids.iter().map(|id| facts::namespace(id)).collect();
    let mut note = |what: String, heard: &str| text.push_str(&format!("\n{what}: {heard}"));
    for address in &server {
        let family = if address.is_ipv4() { 0 } else { 1 };
        let at = SocketAddr::new(*address, 80);
        note(
            format!("pod to pod {family}"),
            whose(facts::seen(&names[0], 80, &names[1], at), &client, &outside),
        );
        note(format!("host to pod {family}"), whose(facts::seen(&names[0], 80, "", at), &client, &outside));
        let beyond = SocketAddr::new(outside.address[family], 80);
        note(
            format!("pod to beyond {family}"),
            whose(facts::seen(outside.namespace(), 80, &names[0], beyond), &server, &outside),
        );
    }
    if let Some(asked) = case.port {
        let seen = match asked.protocol {
            Protocol::Udp => facts::seen_by_udp,
            _ => facts::seen,
        };
        for family in 0..2 {
            let at = SocketAddr::new(outside.host[family], port);
            for (who, from) in
                [("beyond", outside.namespace()), ("client", &names[1]), ("itself", &names[0]), ("host", "")]
            {
                let heard = seen(&names[0], 80, from, at);
                let own: &[IpAddr] = if who == "itself" { &server } else { &client };
                note(format!("{who} to port {family}"), whose(heard, own, &outside));
            }
        }
        let heard = seen(&names[0], 80, "", SocketAddr::from(([127, 0, 0, 1], port)));
        note("localhost to port".into(), whose(heard, &server, &outside));
        if !asked.host_ip.is_empty() {
            let host_ip: IpAddr = configs[0].port_mappings[0].host_ip.parse().expect("the test's own");
            let heard = seen(&names[0], 80, &names[1], SocketAddr::new(host_ip, port));
            note("client to the address of the port".into(), whose(heard, &client, &outside));
        }
    }
    for id in &ids {
        node.remove_pod(id);
        assert!(facts::rules(id).is_empty(), "{:?}", facts::rules(id));
    }
    assert!(facts::accepted(&server).is_empty(), "{:?}", facts::accepted(&server));
    host::wait_until("the pod's links are gone", || links.iter().all(|link| !is_link(link)));
    if case.port.is_some() {
        // The port is now free for the node.
        let heard = facts::seen("", port, outside.namespace(), SocketAddr::new(outside.host[0], port));
        note("port when the pod is gone".into(), whose(heard, &[], &outside));
    }
    text.push_str(&facts::leases(&node, &ids[0]));
    drop(outside);
    node.stop();
    text
}

/// Links of the node that belong to the pod only.
pub(crate) fn own_links(node: &Node, pod_id: &str) -> Vec<String> {
    let links = result(node, pod_id)["interfaces"].clone();
    let on_node = |link: &&Value| link["sandbox"].as_str().unwrap_or_default().is_empty();
    let names = links.as_array().into_iter().flatten().filter(on_node);
    let names = names.map(|link| link["name"].as_str().unwrap_or_default().to_owned());
    names.filter(|name| *name != node.bridge()).collect()
}

pub(crate) fn is_link(name: &str) -> bool {
    Path::new("/sys/class/net").join(name).exists()
}

/// Whether the node's end is named after the pod, which only the built-in plugins do.
pub(crate) fn link_is_derived(node: &Node, pod_id: &str) -> bool {
    let links = result(node, pod_id)["interfaces"].clone();
    links.as_array().into_iter().flatten().any(|link| link["name"] == format!("veth{}", &pod_id[..11]))
}

#[track_caller]
pub(crate) fn compare(case: Case) {
    let (ours, theirs) = std::thread::scope(|scope| {
        let theirs = scope.spawn(|| observe(&case, false));
        (observe(&case, true), theirs.join().expect("programs do it, too"))
    });
    assert!(
        ours.contains("lease NET") || ours.contains("lease SUBNET") || ours.contains("lease SIX"),
        "{ours}"
    );
    if ours != theirs {
        let differing = |from: &str, to: &str, sign: &str| {
            let lines = from.lines().filter(|line| !to.lines().any(|other| other == *line));
            lines.map(|line| format!("{sign} {line}\n")).collect::<String>()
        };
        panic!(
            "built in (+), by programs (-):\n{}{}",
            differing(&ours, &theirs, "+"),
            differing(&theirs, &ours, "-")
        );
    }
}

pub(crate) const TCP: Option<Port> = Some(Port { protocol: Protocol::Tcp, host_ip: "" });

#[test]
fn a_bridge_without_a_gateway_equals_that_of_the_plugin_programs() {
    compare(Case { main: json!({}), ipam: r#""subnet":"NET.0/24""#, ..Case::default() });
}

#[test]
fn a_bridge_that_is_the_gateway_equals_that_of_the_plugin_programs() {
    compare(Case { main: json!({ "isGateway": true }), ipam: ONE_SUBNET, ..Case::default() });
}

#[test]
fn a_default_gateway_with_masquerading_equals_that_of_the_plugin_programs() {
    let main = json!({ "isDefaultGateway": true, "ipMasq": true });
    compare(Case { main, ipam: r#""subnet":"NET.0/24""#, ..Case::default() });
}

#[test]
fn a_host_port_with_hairpin_and_masquerading_equals_that_of_the_plugin_programs() {
    let main = json!({ "isGateway": true, "hairpinMode": true, "ipMasq": true });
    compare(Case { main, ipam: ONE_SUBNET, portmap: Some(json!({})), port: TCP, ..Case::default() });
}

#[test]
fn a_host_port_of_an_old_cni_version_equals_that_of_the_plugin_programs() {
    let (main, portmap) =
        (json!({ "isGateway": true, "dns": { "search": ["boat"] } }), Some(json!({ "snat": false })));
    compare(Case { version: "0.3.1", main, ipam: ONE_SUBNET, portmap, port: TCP, ..Case::default() });
}

#[test]
fn a_udp_host_port_of_one_address_equals_that_of_the_plugin_programs() {
    let port = Some(Port { protocol: Protocol::Udp, host_ip: "NET.1" });
    let main = json!({ "isGateway": true });
    compare(Case { main, ipam: ONE_SUBNET, portmap: Some(json!({})), port, ..Case::default() });
}

#[test]
fn a_dual_stack_pod_with_a_host_port_equals_that_of_the_plugin_programs() {
    let main = json!({ "isGateway": true, "ipMasq": true, "hairpinMode": true });
    compare(Case {
        main,
        ipam: DUAL,
        portmap: Some(json!({ "markMasqBit": 12 })),
        port: TCP,
        ..Case::default()
    });
}

#[test]
fn an_ipv6_only_pod_equals_that_of_the_plugin_programs() {
    let ipam = r#""subnet":"SIX::/64","rangeStart":"SIX::1:0","routes":[{"dst":"::/0"}]"#;
    compare(Case { main: json!({ "isGateway": true, "ipMasq": true }), ipam, ..Case::default() });
}

#[test]
fn mtu_and_promiscuous_mode_equal_those_of_the_plugin_programs() {
    let main = json!({ "isGateway": true, "promiscMode": true, "mtu": 1400, "forceAddress": true });
    compare(Case { main, ipam: ONE_SUBNET, ..Case::default() });
}

#[test]
fn ranges_gateways_and_routes_equal_those_of_the_plugin_programs() {
    let ipam = r#""ranges":[[{"subnet":"NET.0/24","rangeStart":"NET.20","rangeEnd":"NET.20","gateway":"NET.2"},{"subnet":"NET.0/24","rangeStart":"NET.40","gateway":"NET.2"}],
        [{"subnet":"SIX::/80","rangeStart":"SIX::50","gateway":"SIX::7"}]],
        "routes":[{"dst":"192.0.2.0/24","gw":"NET.9"},{"dst":"198.51.100.0/24"},{"dst":"2001:db8::/32","gw":"SIX::9"}]"#;
    compare(Case { main: json!({}), ipam, ..Case::default() });
}

#[test]
fn a_ptp_pod_with_a_host_port_equals_that_of_the_plugin_programs() {
    let (main, portmap) = (json!({ "ipMasq": true, "mtu": 1400 }), Some(json!({})));
    compare(Case { main, is_point_to_point: true, ipam: ONE_SUBNET, portmap, port: TCP, ..Case::default() });
}

#[test]
fn a_dual_stack_ptp_pod_equals_that_of_the_plugin_programs() {
    compare(Case { main: json!({}), is_point_to_point: true, ipam: DUAL, ..Case::default() });
}

/// Executes one of Debian's plugins for a pod, as another runtime would.
pub(crate) fn run_plugin(node: &Node, plugin: &str, command: &str, pod_id: &str, input: &Value) -> bool {
    use std::io::Write;
    let mut child = Command::new(format!("/usr/lib/cni/{plugin}"))
        .env("CNI_COMMAND", command)
        .env("CNI_CONTAINERID", pod_id)
        .env("CNI_NETNS", format!("/run/netns/{}", facts::namespace(pod_id)))
        .env("CNI_IFNAME", "eth0")
        .env("CNI_PATH", "/usr/lib/cni")
        .stdin(Stdio::piped())
        .stdout(fs::File::create(node.folder().join("plugin.out")).expect("a file"))
        .spawn()
        .expect("Debian's plugins are installed");
    child.stdin.take().expect("a pipe").write_all(input.to_string().as_bytes()).expect("it reads");
    child.wait().expect("our child").success()
}

#[test]
fn built_in_plugins_and_programs_can_remove_each_others_pods() {
    let case = Case { main: json!({ "isGateway": true }), ipam: ONE_SUBNET, ..Case::default() };
    let mut node = node(&case, false);
    let by_program = node.run_pod(&bridge_pod("by-program"));
    assert!(!link_is_derived(&node, &by_program));
    node.terminate();
    node.rewrite_config("");
    node.launch();
    let built_in = node.run_pod(&bridge_pod("built-in"));
    assert!(link_is_derived(&node, &built_in));
    assert_eq!(node.leases().len(), 2);
    // Each treats the other's address as allocated, and the pods can connect.
    let (server, client) = (addresses(&node, &by_program)[0], addresses(&node, &built_in)[0]);
    let names = [facts::namespace(&by_program), facts::namespace(&built_in)];
    assert_eq!(facts::seen(&names[0], 80, &names[1], SocketAddr::new(server, 80)), Some(client));

    // The built-in code removes the attachment of the plugin programs, with no program available.
    let log = node.log().len();
    node.remove_pod(&by_program);
    assert!(!node.log()[log..].contains("worker"), "{}", &node.log()[log..]);
    assert_eq!(node.leases(), [client.to_string()]);

    // The plugin program removes the attachment of the built-in code; for the daemon nothing remains, which
    // is not an error.
    let list: Value = serde_json::from_str(&case.list(&node)).expect("the test's own JSON");
    let mut input = list["plugins"][0].clone();
    input["name"] = json!("boat");
    input["cniVersion"] = json!("1.0.0");
    assert!(run_plugin(&node, "bridge", "DEL", &built_in, &input));
    assert!(node.leases().is_empty());
    assert!(!Path::new("/sys/class/net").join(format!("veth{}", &built_in[..11])).exists());
    node.remove_pod(&built_in);
    node.stop();
}

#[test]
fn a_pod_with_rules_is_removed_by_the_implementation_that_created_them() {
    let case = Case {
        main: json!({ "isGateway": true, "ipMasq": true }),
        ipam: ONE_SUBNET,
        portmap: Some(json!({})),
        port: TCP,
        ..Case::default()
    };
    let mut node = node(&case, false);
    let (configs, _) = pods(&node, &case);
    let by_program = node.run_pod(&configs[0]);
    assert!(!facts::rules(&by_program).is_empty());
    node.terminate();
    node.rewrite_config("");
    node.launch();
    node.remove_pod(&by_program);
    assert!(facts::rules(&by_program).is_empty(), "{:?}", facts::rules(&by_program));
    node.stop();
}

#[test]
fn a_node_without_any_configuration_has_the_default_network() {
    let mut node = Node::with(Options { config: DEFAULT_NETWORK.into(), ..Options::default() });
    assert!(is_ready(&node));
    let outside = Outside::new(&node);
    let case = Case { port: TCP, ..Case::default() };
    let (configs, port) = pods(&node, &case);
    let ids: Vec<_> = configs.iter().map(|pod| node.run_pod(pod)).collect();
    let names: Vec<_> = ids.iter().map(|id| facts::namespace(id)).collect();
    let (server, client) = (addresses(&node, &ids[0])[0], addresses(&node, &ids[1])[0]);
    assert_eq!(facts::seen(&names[0], 80, &names[1], SocketAddr::new(server, 80)), Some(client));
    // On a network without IPv6 pods send no router solicitations.
    for pod in node.monitors() {
        let own = fs::read_to_string(format!("/proc/{}/net/if_inet6", pod.pid)).expect("the pod's links");
        assert!(!own.contains("eth0"), "{own}");
    }
    let beyond = SocketAddr::new(outside.address[0], 80);
    assert_eq!(facts::seen(outside.namespace(), 80, &names[1], beyond), Some(outside.host[0]), "masqueraded");
    let at = SocketAddr::new(outside.host[0], port);
    assert_eq!(
        facts::seen(&names[0], 80, outside.namespace(), at),
        Some(outside.address[0]),
        "the node's port"
    );
    // The kubelet sets the pod CIDR: it applies to new pods, and the others can reach them.
    let subnet = node.subnet().replacen("10.", "100.", 1);
    let network_config = Some(NetworkConfig { pod_cidr: format!("{subnet}.0/24") });
    let told = UpdateRuntimeConfigRequest { runtime_config: Some(RuntimeConfig { network_config }) };
    node.update_runtime_config(told).expect("it is applied");
    let late_id = node.run_pod(&bridge_pod("late"));
    let late = addresses(&node, &late_id)[0];
    assert_eq!(late.to_string(), format!("{subnet}.2"));
    assert!(facts::seen(&names[0], 80, &facts::namespace(&late_id), SocketAddr::new(server, 80)).is_some());
    assert!(facts::seen(&facts::namespace(&late_id), 80, &names[0], SocketAddr::new(late, 80)).is_some());
    assert_eq!(node.leases().len(), 3, "{:?}", node.leases());
    // After a crash nothing is lost, and the next daemon removes everything.
    node.restart();
    assert_eq!(addresses(&node, &ids[0])[0], server);
    for id in ids.iter().chain([&late_id]) {
        node.remove_pod(id);
    }
    let heard = facts::seen("", port, outside.namespace(), at);
    assert_eq!(heard, Some(outside.address[0]), "the port is the node's again");
    drop(outside);
    node.stop();
}

/// No pod on the default network sends gratuitous ARP: the MAC address is derived from the IP address.
#[test]
fn an_address_can_be_reused_immediately() {
    let node = Node::with(Options { config: DEFAULT_NETWORK.into(), ..Options::default() });
    let [first, client] = ["first", "client"].map(|name| node.run_pod(&bridge_pod(name)));
    let address = addresses(&node, &first)[0];
    let reached = |server: &str| {
        let from_pod = facts::namespace(&client);
        [from_pod.as_str(), ""]
            .map(|from| facts::seen(server, 80, from, SocketAddr::new(address, 80)).is_some())
    };
    assert_eq!(reached(&facts::namespace(&first)), [true; 2], "what neighbours remember of it");
    node.remove_pod(&first);
    let before = format!("{}.1", node.subnet());
    fs::write(node.root().join("networks/coracle/last_reserved_ip.0"), before).expect("the network's files");
    let next = node.run_pod(&bridge_pod("next"));
    assert_eq!(addresses(&node, &next)[0], address);
    let namespace = facts::namespace(&next);
    let calls = facts::inside(&namespace, || fs::read_to_string("/proc/sys/net/ipv4/conf/eth0/arp_notify"));
    assert_eq!(calls.expect("a file of the kernel").trim(), "0");
    assert_eq!(reached(&namespace), [true; 2]);
    node.stop();
}

/// Finding 11 in docs/results/0.1.0.md (CVE-2020-8558). Regression: a host port sets `route_localnet`, and then
/// every pod that could send raw packets reached services on the node's loopback interface. In the test the
/// pod's kernel sends such packets through its link, which is equivalent to a packet socket. (To see the
/// failure on a machine where this has run, empty the chain first: `nft flush chain ip coracle guard`.)
#[test]
fn pods_do_not_reach_the_nodes_loopback() {
    for is_point_to_point in [false, true] {
        let case = Case {
            main: if is_point_to_point {
                json!({ "ipMasq": true })
            } else {
                json!({ "isGateway": true, "ipMasq": true })
            },
            is_point_to_point,
            ipam: ONE_SUBNET,
            portmap: Some(json!({ "snat": true })),
            port: TCP,
            ..Case::default()
        };
        let node = node(&case, true);
        let (configs, port) = pods(&node, &case);
        let ids: Vec<_> = configs.iter().map(|pod| node.run_pod(pod)).collect();
        let names: Vec<_> = ids.iter().map(|id| facts::namespace(id)).collect();
        let by_the_link = |name: &str| {
            facts::inside(name, || {
                for key in ["all", "eth0"] {
                    let path = format!("/proc/sys/net/ipv4/conf/{key}/route_localnet");
                    fs::write(path, "1").expect("the namespace's own setting");
                }
            });
            let route = facts::run("ip", &["-n", name, "route", "show", "default"]);
            let gateway = route.split(' ').nth(2).expect("default via GATEWAY").to_owned();
            facts::run("ip", &["-n", name, "route", "del", "local", "127.0.0.0/8", "table", "local"]);
            facts::run("ip", &["-n", name, "route", "del", "local", "127.0.0.1", "table", "local"]);
            facts::run("ip", &["-n", name, "route", "add", "127.0.0.1/32", "via", &gateway, "dev", "eth0"]);
        };
        names.iter().for_each(|name| by_the_link(name));
        let of_the_node = free_host_port();
        let at = SocketAddr::from(([127, 0, 0, 1], of_the_node));
        for name in &names {
            assert_eq!(facts::seen("", of_the_node, name, at), None, "TCP, {is_point_to_point}");
            assert_eq!(facts::seen_by_udp("", of_the_node, name, at), None, "UDP, {is_point_to_point}");
        }
        // The node itself can use its loopback interface and the pod's port on it.
        assert!(facts::seen("", of_the_node, "", at).is_some());
        let published = SocketAddr::from(([127, 0, 0, 1], port));
        assert!(facts::seen(&names[0], 80, "", published).is_some(), "{is_point_to_point}");
        // The bridge's setting stays after the pod was removed, and so does the guard chain.
        node.remove_pod(&ids[0]);
        assert_eq!(facts::seen("", of_the_node, &names[1], at), None, "after the pod with the port");
        node.remove_pod(&ids[1]);
        node.stop();
    }
}
