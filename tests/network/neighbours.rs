//! What a pod on a bridge can say about the addresses of its neighbours.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use coracle_tests::host;
use coracle_tests::node::{Node, Options};
use coracle_tests::request::{DEFAULT_NETWORK, bridge_pod, container, exec};
use serde_json::json;

use crate::builtin::{self, Case, DUAL, addresses};
use crate::facts;

/// The victim and the attacker on a bridge, which has the first address of each family.
pub(crate) struct Bridge {
    pub(crate) node: Node,
    /// Network namespace of the victim; the node's is the empty name.
    pub(crate) victim: String,
    pub(crate) victim_addresses: Vec<IpAddr>,
    pub(crate) attacker: String,
    pub(crate) attacker_id: String,
    /// A container of the attacker with the capabilities of a container without a security context.
    attacking: String,
}

impl Bridge {
    pub(crate) fn new(node: Node) -> Bridge {
        let image = node.import_probe();
        let victim = node.run_pod(&bridge_pod("victim"));
        let pod = bridge_pod("attacker");
        let attacker = node.run_pod(&pod);
        let config = container("attacker", &image, &["sleep", "forever"], &pod);
        let attacking = node.run_container(&attacker, &config, &pod);
        let victim_addresses = addresses(&node, &victim);
        let [victim, attacker_namespace] = [&victim, &attacker].map(|id| facts::namespace(id));
        Bridge {
            node,
            victim,
            victim_addresses,
            attacker: attacker_namespace,
            attacker_id: attacker,
            attacking,
        }
    }

    pub(crate) fn gateways(&self) -> [IpAddr; 2] {
        [format!("{}.1", self.node.subnet()), format!("{}::1", facts::six(&self.node))]
            .map(|text| text.parse().expect("an address"))
    }

    /// Sends frames of the attacker that say that `address` belongs to `mac`, from the MAC address `from`, with and without tags
    /// of VLAN 0.
    fn claim(&self, address: IpAddr, mac: &str, from: &str) {
        (0..3).for_each(|tags| self.claim_tagged(address, mac, from, tags));
    }

    fn claim_tagged(&self, address: IpAddr, mac: &str, from: &str, tags: u32) {
        let six = self.victim_addresses.iter().find(|address| address.is_ipv6());
        let six = six.map_or("-".to_owned(), IpAddr::to_string);
        let said = self.attack(&["claim", "eth0", &address.to_string(), mac, from, &six, &tags.to_string()]);
        assert_eq!(said.matches("saw sent").count(), 2, "{said}");
    }

    /// Runs an attack of the probe in the attacker's container; returns its report, which says that something was sent.
    #[track_caller]
    pub(crate) fn attack(&self, words: &[&str]) -> String {
        let words = [&["attack"], words].concat();
        let answer = self.node.exec_sync(exec(&self.attacking, &words, 20)).expect("exec");
        let said = String::from_utf8_lossy(&[answer.stdout, answer.stderr].concat()).into_owned();
        assert!(said.contains("saw sent") && !said.contains("held"), "{said}");
        said
    }

    /// Waits for a datagram that arrives after all frames that were sent before: the bridge preserves their order.
    pub(crate) fn wait_for_the_attackers_frames(&self) {
        for address in &self.victim_addresses {
            let address = SocketAddr::new(*address, 0);
            let heard =
                facts::seen_by_udp(&self.victim, 5300, &self.attacker, SocketAddr::new(address.ip(), 5300));
            assert!(heard.is_some(), "{address}: pods reach each other");
        }
    }
}

/// The MAC address of a neighbour, after a datagram to it.
pub(crate) fn neighbour(namespace: &str, address: IpAddr) -> Option<String> {
    facts::inside(namespace, || {
        let socket =
            UdpSocket::bind(if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).expect("a socket");
        // It fails while the address is not known to be there.
        let _ = socket.send_to(b"hello", (address, 9));
    });
    known(namespace, address)
}

pub(crate) fn known(namespace: &str, address: IpAddr) -> Option<String> {
    let said = facts::inside(namespace, || facts::run("ip", &["neighbour", "show", &address.to_string()]));
    let mac = said.split_once("lladdr ")?.1.split_whitespace().next()?;
    Some(mac.to_owned())
}

/// Removes the entry of a neighbour, which is then asked for its MAC address.
pub(crate) fn forget(namespace: &str, address: IpAddr) {
    facts::inside(namespace, || {
        let said = facts::run("ip", &["-o", "neighbour", "show", &address.to_string()]);
        let link = said.split_whitespace().nth(2).expect("an entry").to_owned();
        facts::run("ip", &["neighbour", "del", &address.to_string(), "dev", &link]);
    });
}

pub(crate) fn mac(namespace: &str) -> String {
    facts::inside(namespace, || {
        let said = facts::run("ip", &["-o", "link", "show", "eth0"]);
        said.split_once("link/ether ").expect("a MAC address").1[..17].to_owned()
    })
}

/// The ports of the bridge at which it has seen a MAC address.
fn ports_of(node: &Node, mac: &str) -> Vec<String> {
    let said = facts::run("bridge", &["fdb", "show", "br", &node.bridge()]);
    let learnt = said.lines().filter(|line| line.starts_with(mac) && !line.contains("permanent"));
    learnt.filter_map(|line| line.split_whitespace().nth(2).map(str::to_owned)).collect()
}

/// Finding: a pod took the packets of its neighbours to the gateway by answering for its address. The control is the same bridge
/// without the checks.
#[test]
fn a_pod_answers_for_its_own_addresses_only() {
    for is_checked in [false, true] {
        let main = json!({ "isGateway": true, "macOfAddress": true, "checkNeighbours": is_checked });
        let bridge = Bridge::new(builtin::node(&Case { main, ipam: DUAL, ..Case::default() }, true));
        let [attacker, victim] = [mac(&bridge.attacker), mac(&bridge.victim)];
        // The victim's entries of the gateway, and the node's of the victim.
        let entries = bridge.gateways().map(|address| (bridge.victim.clone(), address)).into_iter();
        let entries = entries.chain(bridge.victim_addresses.iter().map(|address| (String::new(), *address)));
        for (namespace, address) in entries {
            let real = host::wait_for("the entry", || neighbour(&namespace, address));
            assert_ne!(real, attacker);
            if !is_checked {
                // Each kind of frame; the true answer lies in between.
                for tags in 0..3 {
                    host::wait_until("the neighbour believes it", || {
                        bridge.claim_tagged(address, "-", "-", tags);
                        known(&namespace, address).as_ref() == Some(&attacker)
                    });
                    forget(&namespace, address);
                    host::wait_until("the entry is right again", || {
                        neighbour(&namespace, address).as_ref() == Some(&real)
                    });
                }
                continue;
            }
            for from in ["-", &real, "02:00:00:00:00:01"] {
                bridge.claim(address, "-", from);
                bridge.claim(address, &attacker, from);
            }
            bridge.wait_for_the_attackers_frames();
            assert_eq!(known(&namespace, address), Some(real), "{address} in {namespace:?}");
        }
        // The MAC address of the victim, which the bridge would then look for at the attacker's port.
        let is_at_the_victim = || {
            let seen = ports_of(&bridge.node, &victim);
            assert_eq!(seen.len(), 1, "{seen:?}");
            facts::run("ip", &["-o", "link", "show", "dev", &seen[0]]).contains(&bridge.victim)
        };
        // Broadcast, and addresses that bridges do not forward, of which they learn all the same.
        for to in ["ff:ff:ff:ff:ff:ff", "01:80:c2:00:00:03", "01:80:c2:00:00:0e"] {
            let disguises = || {
                bridge.attack(&["disguise", "eth0", &victim, to]);
            };
            if is_checked {
                disguises();
                bridge.wait_for_the_attackers_frames();
                assert!(is_at_the_victim(), "{to}");
            } else {
                host::wait_until("the bridge believes it", || {
                    disguises();
                    !is_at_the_victim()
                });
                neighbour(&bridge.victim, bridge.gateways()[0]);
            }
        }
        bridge.node.stop();
    }
}

/// The default network has the checks, unless its key says otherwise.
#[test]
fn the_default_network_checks_what_pods_say_about_addresses() {
    for (more, is_checked) in [("", true), ("check_neighbours = false\n", false)] {
        let config = format!("{DEFAULT_NETWORK}{more}");
        let bridge = Bridge::new(Node::with(Options { config, ..Options::default() }));
        let ([gateway, _], attacker) = (bridge.gateways(), mac(&bridge.attacker));
        let real = host::wait_for("the entry", || neighbour(&bridge.victim, gateway));
        let is_believed = || {
            bridge.claim(gateway, "-", "-");
            known(&bridge.victim, gateway).as_ref() == Some(&attacker)
        };
        match is_checked {
            true => assert!((0..5).all(|_| !is_believed()), "{real}"),
            false => host::wait_until("the victim believes it", is_believed),
        }
        bridge.wait_for_the_attackers_frames();
        let listed = facts::run("nft", &["list", "table", "bridge", "coracle"]);
        assert_eq!(listed.contains(&mac(&bridge.victim)), is_checked, "{listed}");
        bridge.node.stop();
    }
}
