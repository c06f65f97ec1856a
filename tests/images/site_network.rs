//! A site as it is in the field: each daemon in a network namespace with an address of its own, a list of neighbours that is the
//! same on all nodes and has a dead address, and one uplink.

use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::time::{Duration, Instant};

use coracle_tests::fault::{Fault, Faulty, Line};
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::Registry;

use crate::mirror::{image, logged, make_key, pull_on, sent, size};

/// Number of nodes.
const NODES: usize = 4;
/// Port on which the nodes serve.
const PORT: u16 = 5000;

fn ip(words: &str) {
    let output = Command::new("ip").args(words.split(' ')).output().expect("ip of iproute2");
    assert!(output.status.success(), "ip {words}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A bridge, and network namespaces that are connected to it; removed on drop.
struct Network {
    bridge: String,
    subnet: String,
    namespaces: Vec<String>,
}

impl Network {
    fn new(count: usize) -> Network {
        let id = std::process::id();
        let (bridge, subnet) =
            (format!("cms{}", id % 1_000_000), format!("172.{}.{}", 28 + id / 256 % 4, id % 256));
        let mut network = Network { bridge, subnet, namespaces: Vec::new() };
        let bridge = network.bridge.clone();
        ip(&format!("link add {bridge} type bridge"));
        ip(&format!("address add {}.1/24 dev {bridge}", network.subnet));
        ip(&format!("link set {bridge} up"));
        for number in 0..count {
            let (name, link) = (format!("{bridge}n{number}"), format!("{bridge}v{number}"));
            ip(&format!("netns add {name}"));
            network.namespaces.push(name.clone());
            ip(&format!("link add {link} type veth peer name eth0 netns {name}"));
            ip(&format!("link set {link} master {bridge} up"));
            ip(&format!("-n {name} address add {}/24 dev eth0", network.address(number)));
            ip(&format!("-n {name} link set eth0 up"));
            ip(&format!("-n {name} link set lo up"));
        }
        network
    }

    /// Address of a node; one more than there are nodes is no one's.
    fn address(&self, number: usize) -> IpAddr {
        format!("{}.{}", self.subnet, 10 + number).parse().expect("an address")
    }

    fn host(&self) -> IpAddr {
        format!("{}.1", self.subnet).parse().expect("an address")
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // A failed test has reported its error already.
        for name in &self.namespaces {
            let _ = Command::new("ip").args(["netns", "delete", name]).output();
        }
        let _ = Command::new("ip").args(["link", "delete", &self.bridge]).output();
    }
}

#[test]
fn nodes_of_a_site_share_one_uplink() {
    let network = Network::new(NODES);
    let neighbours: Vec<String> =
        (0..=NODES).map(|number| SocketAddr::new(network.address(number), PORT).to_string()).collect();
    let key = std::env::temp_dir().join(format!("{}-key", network.bridge));
    make_key(&key);
    let start = |number: usize| {
        let config = format!(
            "[mirror]\nlisten = \"{}\"\nkey_file = \"{}\"\nneighbours = {neighbours:?}\n",
            neighbours[number],
            key.display()
        );
        let wrapper = vec!["nsenter".to_owned(), format!("--net=/run/netns/{}", network.namespaces[number])];
        Node::with(Options { config, wrapper, ..Options::default() })
    };
    let nodes: Vec<Node> = (0..NODES).map(start).collect();
    let registry = Registry::start(nodes[0].folder());
    let image = image(&nodes[0], &[1_500_000, 1_500_000, 1_000_000, 800_000, 1000], 100);
    registry.push(&image, "site", "1");
    let line = Line::new(1_000_000.0);
    let uplink = Faulty::start_at(network.host(), registry.address(), move |_, _| Fault::Over(line.clone()));
    for node in &nodes {
        let address = uplink.address();
        let text = format!("mirrors:\n  \"{address}\":\n    endpoint: [\"http://{address}\"]\n");
        std::fs::write(node.folder().join("registries.yaml"), text).expect("a configuration");
    }
    let begun = Instant::now();
    pull_on(&nodes.iter().collect::<Vec<_>>(), &uplink.name("site", "1"));
    let (took, sent, size) = (begun.elapsed(), sent(&uplink, &image), size(&image));
    // On a busy machine a node may wait for another one without success.
    assert!(sent < 2 * size, "{sent} of {size} bytes");
    assert!(took < Duration::from_secs(120), "{took:?}");
    for node in &nodes {
        assert!(logged(node, "fetched") + logged(node, "neighbours") >= size, "{}", node.log());
    }
    let of_neighbours: u64 = nodes.iter().map(|node| logged(node, "neighbours")).sum();
    assert!(of_neighbours >= 2 * size, "{of_neighbours} of {size} bytes");
    nodes.into_iter().for_each(Node::stop);
    std::fs::remove_file(key).expect("the key is ours");
}
