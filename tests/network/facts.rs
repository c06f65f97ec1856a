//! Describes a pod's network from the machine's point of view: addresses, routes, links, leases and
//! connectivity, as text with fixed names for everything that differs between nodes. Uses iproute2 and
//! sockets.

use std::fs;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use coracle_tests::host;
use coracle_tests::node::Node;
use nix::sched::{CloneFlags, setns};
use serde_json::Value;

/// Time limit of connections, both of those that should succeed and of those that should fail.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);

/// Runs `work` in a network namespace, in a separate thread; empty: the host's.
pub(crate) fn inside<T: Send>(namespace: &str, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let enter = move || {
            if !namespace.is_empty() {
                let file = fs::File::open(format!("/run/netns/{namespace}")).expect("a namespace");
                setns(file, CloneFlags::CLONE_NEWNET).expect("root may enter");
            }
            work()
        };
        scope.spawn(enter).join().expect("the thread ends")
    })
}

/// The namespace of a pod, whose name has half of its ID.
pub(crate) fn namespace(pod_id: &str) -> String {
    format!("coracle-{}", &pod_id[..32])
}

/// Runs a program of the host and returns its output; panics with its error.
#[track_caller]
pub(crate) fn run(program: &str, words: &[&str]) -> String {
    let output = Command::new(program).args(words).output().expect("the program is installed");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {}: {said}", words.join(" "));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The JSON output of iproute2 in a namespace.
fn ip(namespace: &str, words: &[&str]) -> Vec<Value> {
    let mut all = vec!["-j", "-d"];
    if !namespace.is_empty() {
        all.extend(["-n", namespace]);
    }
    all.extend(words);
    let text = run("ip", &all);
    serde_json::from_str(if text.trim().is_empty() { "[]" } else { &text }).expect("iproute2 prints JSON")
}

/// One line with those of these fields that exist.
fn line(title: &str, value: &Value, keys: &[&str]) -> String {
    let fields =
        keys.iter().filter(|key| !value[**key].is_null()).map(|key| format!(" {key}={}", value[*key]));
    format!("{title}{}", fields.collect::<String>())
}

/// The client's address that a server on `port` of one namespace sees for a connection from another namespace
/// to `address`; `None`: there is no connection. Empty: the host's namespace.
pub(crate) fn seen(server: &str, port: u16, client: &str, address: SocketAddr) -> Option<IpAddr> {
    let listener = inside(server, || bind(|| TcpListener::bind(("::", port))));
    listener.set_nonblocking(true).expect("a socket");
    let stream = inside(client, || TcpStream::connect_timeout(&address, CONNECT_LIMIT)).ok()?;
    let peer = host::wait_within(CONNECT_LIMIT, || listener.accept().ok())?.1.ip();
    drop(stream);
    Some(peer.to_canonical())
}

/// Opens a socket on a port that another process may use for a moment.
fn bind<T>(mut open: impl FnMut() -> std::io::Result<T>) -> T {
    host::wait_for("the port is free", || open().ok())
}

/// The client's address like [`seen`], for UDP, and whether the reply arrives.
pub(crate) fn seen_by_udp(server: &str, port: u16, client: &str, address: SocketAddr) -> Option<IpAddr> {
    let listener = inside(server, || bind(|| UdpSocket::bind(("::", port))));
    let asks = inside(client, || bind(|| UdpSocket::bind(("::", 0))));
    for socket in [&listener, &asks] {
        socket.set_read_timeout(Some(CONNECT_LIMIT)).expect("a socket");
    }
    let address = match address.ip() {
        IpAddr::V4(four) => SocketAddr::from((four.to_ipv6_mapped(), address.port())),
        IpAddr::V6(_) => address,
    };
    asks.send_to(b"ahoy", address).ok()?;
    let mut buffer = [0; 16];
    let (length, peer) = host::uninterrupted(|| listener.recv_from(&mut buffer)).ok()?;
    listener.send_to(&buffer[..length], peer).ok()?;
    host::uninterrupted(|| asks.recv_from(&mut buffer)).ok()?;
    Some(peer.ip().to_canonical())
}

/// A network beyond the host, with routes to and from pods.
pub(crate) struct Outside {
    name: String,
    /// Addresses of the host and of the other side in both families.
    pub(crate) host: [IpAddr; 2],
    pub(crate) address: [IpAddr; 2],
}

impl Outside {
    pub(crate) fn new(node: &Node) -> Outside {
        let name = node.bridge().replacen("ct", "co", 1);
        let subnet = node.subnet().replacen("10.", "172.", 1);
        let parse = |text: String| -> IpAddr { text.parse().expect("an address") };
        let six = format!("fd77:{}", six(node).trim_start_matches("fd76:"));
        let host = [parse(format!("{subnet}.1")), parse(format!("{six}::1"))];
        let address = [parse(format!("{subnet}.2")), parse(format!("{six}::2"))];
        run("ip", &["netns", "add", &name]);
        let outside = Outside { name, host, address };
        let name = outside.name.as_str();
        run("ip", &["link", "add", name, "type", "veth", "peer", "name", "out", "netns", name]);
        for (ours, theirs, length) in [(host[0], address[0], 24), (host[1], address[1], 64)] {
            run("ip", &["address", "add", &format!("{ours}/{length}"), "dev", name, "nodad"]);
            run("ip", &["-n", name, "address", "add", &format!("{theirs}/{length}"), "dev", "out", "nodad"]);
        }
        run("ip", &["link", "set", name, "up"]);
        run("ip", &["-n", name, "link", "set", "out", "up"]);
        run("ip", &["-n", name, "route", "add", "default", "via", &host[0].to_string()]);
        run("ip", &["-n", name, "route", "add", "default", "via", &host[1].to_string()]);
        outside
    }

    pub(crate) fn namespace(&self) -> &str {
        &self.name
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        // The veth pair is removed with either end; a failed test has reported its error already.
        let _ = Command::new("ip").args(["link", "delete", &self.name]).output();
        let _ = Command::new("ip").args(["netns", "delete", &self.name]).output();
    }
}

/// The first four groups of the node's IPv6 subnet, which are unique.
pub(crate) fn six(node: &Node) -> String {
    let numbers: Vec<_> = node.subnet().split('.').skip(1).map(str::to_owned).collect();
    format!("fd76:{}:{}:1", numbers[0], numbers[1])
}

/// Replaces everything that differs between nodes and pods by fixed names.
pub(crate) fn rename(node: &Node, pod_id: &str, text: &str) -> String {
    let mut text = text
        .replace(&node.folder().display().to_string(), "FOLDER")
        .replace(pod_id, "ID")
        .replace(&pod_id[..32], "ID");
    text = text.replace(&node.bridge(), "BRIDGE").replace(&format!("{}.", node.subnet()), "SUBNET.");
    text = text.replace(&six(node), "SIX");
    // Names of links and hardware addresses.
    let mut words = Vec::new();
    for word in text.split('"') {
        let is_mac = word.len() == 17 && word.matches(':').count() == 5;
        words.push(match word {
            _ if is_mac => "MAC",
            _ if word.starts_with("veth") => "VETH",
            _ if word.starts_with("bwp") => "DETOUR",
            word => word,
        });
    }
    words.join("\"")
}

/// The pod's side and the host's side as text.
pub(crate) fn describe(node: &Node, pod_id: &str, result: &Value) -> String {
    let pod = namespace(pod_id);
    let mut lines = Vec::new();
    for link in ip(&pod, &["address"]) {
        let name = link["ifname"].as_str().unwrap_or_default();
        lines.push(line(&format!("pod {name}"), &link, &["flags", "mtu", "operstate"]));
        let addresses = link["addr_info"].as_array().cloned().unwrap_or_default();
        // The kernel's link-local addresses were not configured.
        let keys = ["local", "prefixlen", "broadcast", "scope", "tentative", "dadfailed", "noprefixroute"];
        let asked = addresses.iter().filter(|address| address["scope"] != "link");
        lines.extend(asked.map(|address| line(&format!("pod {name} has"), address, &keys)));
    }
    let keys = ["dst", "gateway", "dev", "scope", "prefsrc", "type", "protocol", "flags"];
    for family in ["-4", "-6"] {
        let routes = ip(&pod, &[family, "route", "show", "table", "all"]);
        let asked = routes.iter().filter(|route| route["dst"] != "fe80::/64" && route["type"] != "multicast");
        // Local routes of these addresses are added and removed with them.
        let asked = asked.filter(|route| !route["dst"].as_str().is_some_and(|dst| dst.starts_with("fe80")));
        lines.extend(asked.map(|route| line(&format!("pod route {family}"), route, &keys)));
    }
    for key in ["net/ipv4/conf/eth0/arp_notify", "net/ipv6/conf/eth0/accept_dad"] {
        let value = inside(&pod, || fs::read_to_string(format!("/proc/sys/{key}")));
        lines.push(format!("pod {key} {}", value.unwrap_or_default().trim()));
    }
    let interfaces = result["interfaces"].as_array().cloned().unwrap_or_default();
    for interface in
        interfaces.iter().filter(|interface| interface["sandbox"].as_str().unwrap_or("").is_empty())
    {
        lines.extend(of_host(node, interface["name"].as_str().unwrap_or_default()));
    }
    lines.push(format!("result {result}"));
    let mut text = rename(node, pod_id, &lines.join("\n"));
    text.push_str(&leases(node, pod_id));
    text
}

/// A link of the host and its routes.
fn of_host(node: &Node, name: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let kind = if name == node.bridge() { "bridge" } else { "port" };
    for link in ip("", &["address", "show", "dev", name]) {
        lines.push(line(
            &format!("host {kind}"),
            &link,
            &["flags", "mtu", "operstate", "master", "promiscuity"],
        ));
        let port = &link["linkinfo"]["info_slave_data"];
        lines.push(line("host port", port, &["state", "hairpin", "learning", "flood"]));
        let addresses = link["addr_info"].as_array().cloned().unwrap_or_default();
        let asked = addresses.iter().filter(|address| address["scope"] != "link");
        lines.extend(
            asked.map(|address| line("host has", address, &["local", "prefixlen", "broadcast", "scope"])),
        );
    }
    for family in ["-4", "-6"] {
        let routes = ip("", &[family, "route", "show", "dev", name]);
        let asked = routes.iter().filter(|route| route["dst"] != "fe80::/64" && route["type"] != "multicast");
        lines.extend(
            asked.map(|route| line("host route", route, &["dst", "gateway", "scope", "prefsrc", "protocol"])),
        );
    }
    for key in ["ipv4/conf/NAME/route_localnet", "ipv6/conf/NAME/accept_ra"] {
        let value = fs::read_to_string(Path::new("/proc/sys/net").join(key.replace("NAME", name)));
        lines.push(format!("host {kind} {key} {}", value.unwrap_or_default().trim()));
    }
    lines.extend(traffic(name));
    lines
}

/// Bandwidth limits of a link of the host, and the redirection of its ingress traffic.
fn traffic(name: &str) -> Vec<String> {
    let tc = |words: &[&str]| -> Vec<Value> {
        let text = run("tc", &[&["-j"], words].concat());
        serde_json::from_str(if text.trim().is_empty() { "[]" } else { &text }).expect("tc prints JSON")
    };
    let disciplines = tc(&["qdisc", "show", "dev", name]);
    // Default queueing disciplines have no handle.
    let limits = disciplines.iter().filter(|found| found["kind"] == "tbf" || found["kind"] == "ingress");
    let mut lines: Vec<_> = limits
        .map(|found| line("host traffic", found, &["kind", "handle", "root", "parent", "options"]))
        .collect();
    for filter in tc(&["filter", "show", "dev", name, "ingress"]) {
        // The plugin's second action is never executed: the first one takes every packet.
        let first = &filter["options"]["actions"][0];
        let keys = ["kind", "mirred_action", "direction", "to_dev", "control_action"];
        if filter["options"]["match"].is_object() {
            lines.push(line("host redirects", &filter, &["protocol", "pref", "kind"]));
            lines.push(line("host redirects", &filter["options"], &["flowid", "match"]));
            lines.push(line("host redirects", first, &keys));
        }
    }
    lines
}

/// Waits until the kernel has completed duplicate address detection for a link, which it does for addresses
/// on the node's side.
pub(crate) fn settle(links: &Value) {
    for link in links
        .as_array()
        .into_iter()
        .flatten()
        .filter(|link| link["sandbox"].as_str().unwrap_or("").is_empty())
    {
        let name = link["name"].as_str().unwrap_or_default();
        host::wait_until("addresses of IPv6 are good", || {
            run("ip", &["-6", "address", "show", "dev", name, "tentative"]).is_empty()
        });
    }
}

/// The lease files and their content.
pub(crate) fn leases(node: &Node, pod_id: &str) -> String {
    let mut lines = Vec::new();
    for entry in fs::read_dir(node.folder().join("leases/boat")).into_iter().flatten().flatten() {
        let text = fs::read_to_string(entry.path()).unwrap_or_default();
        lines.push(format!("\nlease {} {text:?}", entry.file_name().to_string_lossy()));
    }
    lines.sort();
    rename(node, pod_id, &lines.concat())
}

/// Rules of the host's packet filter for these addresses, and the jumps to them.
pub(crate) fn accepted(addresses: &[IpAddr]) -> Vec<String> {
    let mut found = Vec::new();
    for program in ["iptables-save", "ip6tables-save"] {
        let text = run(program, &["-t", "filter"]);
        let is_its = |line: &&str| {
            let names = |address: &IpAddr| line.contains(&format!(" {address}/"));
            line.starts_with("-A") && addresses.iter().any(names)
        };
        found.extend(text.lines().filter(is_its).map(str::to_owned));
    }
    found
}

/// NAT rules of the host that refer to a pod, in any table.
pub(crate) fn rules(pod_id: &str) -> Vec<String> {
    let mut found = Vec::new();
    for program in ["iptables-save", "ip6tables-save"] {
        let Ok(output) = Command::new(program).args(["-t", "nat"]).output() else { continue };
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        found.extend(text.lines().filter(|line| line.contains(pod_id)).map(str::to_owned));
    }
    found
}
