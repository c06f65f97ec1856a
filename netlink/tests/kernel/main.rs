//! Tests netlink with the real kernel, in separate network namespaces. They need root and fail without it.
#![forbid(unsafe_code)]

mod sets;

use std::fs::{self, File};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coracle_netlink::{
    self as netlink, Batch, Bridge, Family, Hook, Network, Protocol, Rate, RemovedLinks, Route, Rule,
    RulePosition, Rules, Scope, Socket, Veth,
};
use coracle_sys::process;
use nix::errno::Errno;

const CLONE_NEWNET: u64 = 0x4000_0000;

/// Runs `test` in a thread with its own network namespace and passes the path of the namespace.
fn alone(test: impl FnOnce(&Path) + Send) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            process::unshare(CLONE_NEWNET).expect("a namespace: this test needs root");
            let thread = fs::read_link("/proc/thread-self").expect("a thread has a name");
            test(&PathBuf::from("/proc").join(thread).join("ns/net"));
        });
    });
}

fn network(text: &str) -> Network {
    text.parse().expect("a network")
}

fn lo_up(socket: &Socket) {
    let lo = socket.link("lo").unwrap().expect("every namespace has one").index;
    let mut batch = Batch::default();
    batch.set_up(lo, "lo");
    socket.run(batch).unwrap();
}

/// Gives the loopback link these addresses, fd00::1 among them, and listens on port 81.
fn listen_at(addresses: &[&str]) -> TcpListener {
    let node = Socket::route().unwrap();
    lo_up(&node);
    let lo = node.link("lo").unwrap().unwrap().index;
    let mut batch = Batch::default();
    addresses.iter().for_each(|address| batch.add_address(lo, network(address), false));
    node.run(batch).unwrap();
    let listener = TcpListener::bind(("::", 81)).unwrap();
    // The kernel creates the local route of an IPv6 address with a delay.
    let end = Instant::now() + Duration::from_secs(10);
    while !answers("[fd00::1]:81") {
        assert!(Instant::now() < end, "the address is not good");
    }
    listener
}

fn pair<'a>(bridge: Option<u32>, namespace: &File) -> Veth<'a> {
    Veth {
        name: "veth1",
        mac: [2, 0, 0, 0, 0, 1],
        bridge,
        peer_name: "eth0",
        peer_mac: [2, 0, 0, 0, 0, 2],
        peer_namespace: namespace.as_raw_fd(),
        mtu: 1400,
    }
}

#[test]
fn a_pair_is_made_between_a_bridge_and_a_namespace_as_root() {
    alone(|here| {
        alone(|there| {
            let node = netlink::inside(here, Socket::route).unwrap().unwrap();
            let pod = Socket::route().unwrap();
            let namespace = File::open(there).unwrap();
            for _ in 0..2 {
                let mut batch = Batch::default();
                batch.add_bridge(&Bridge { name: "br0", mtu: 0, mac: Some([2, 0, 0, 0, 0, 9]) });
                node.run(batch).expect("a bridge that is there is as good");
            }
            let bridge = node.link("br0").unwrap().expect("just made");
            assert_eq!(
                (bridge.kind.as_str(), bridge.mac, bridge.is_up),
                ("bridge", [2, 0, 0, 0, 0, 9], true)
            );
            let mut batch = Batch::default();
            batch.add_veth(&pair(Some(bridge.index), &namespace));
            batch.set_hairpin("veth1", true);
            batch.add_address(bridge.index, network("10.0.0.1/24"), false);
            node.run(batch).unwrap();
            let hairpin =
                netlink::inside(here, || fs::read_to_string("/proc/sys/net/ipv4/conf/veth1/forwarding"));
            assert!(hairpin.unwrap().is_ok(), "the node's end is in the node's namespace");
            assert_eq!(node.addresses(bridge.index).unwrap()[0], network("10.0.0.1/24"));

            let end = pod.link("eth0").unwrap().expect("the other end");
            assert_eq!((end.kind.as_str(), end.mac, end.is_up), ("veth", [2, 0, 0, 0, 0, 2], false));
            let mut batch = Batch::default();
            batch.add_address(end.index, network("10.0.0.2/24"), false);
            batch.set_up(end.index, "eth0");
            batch.add_address(end.index, network("fd00::2/64"), false);
            let gateway = Some("10.0.0.1".parse().unwrap());
            let (destination, link) = (network("0.0.0.0/0"), end.index);
            let default = Route { destination, link, gateway, source: None, scope: Scope::Universe };
            batch.add_route(&default, false);
            pod.run(batch).unwrap();
            let addresses = pod.addresses(end.index).unwrap();
            assert!(
                addresses.contains(&network("10.0.0.2/24")) && addresses.contains(&network("fd00::2/64"))
            );

            let mut batch = Batch::default();
            batch.add_route(&default, true);
            batch.remove_route(&default);
            batch.remove_route(&default);
            batch.remove_address(end.index, network("10.0.0.2/24"));
            batch.remove_address(end.index, network("10.0.0.2/24"));
            pod.run(batch).expect("repeating the requests succeeds");
            assert!(!pod.addresses(end.index).unwrap().contains(&network("10.0.0.2/24")));
            let mut batch = Batch::default();
            batch.set_down("veth1");
            batch.set_down("absent");
            batch.remove_link("veth1");
            batch.remove_link("veth1");
            node.run(batch).unwrap();
            assert_eq!((node.link("veth1").unwrap(), pod.link("eth0").unwrap()), (None, None));
        });
    });
}

#[test]
fn an_error_names_its_operation_and_the_others_are_applied_as_root() {
    alone(|here| {
        let node = Socket::route().unwrap();
        let mut batch = Batch::default();
        batch.set_up(999, "absent");
        batch.add_bridge(&Bridge { name: "br0", mtu: 0, mac: None });
        let error = node.run(batch).unwrap_err();
        assert_eq!(
            (error.to_string().as_str(), error.errno),
            ("set up absent: no such device", Errno::ENODEV)
        );
        assert!(node.link("br0").unwrap().is_some());
        let namespace = File::open(here).unwrap();
        let twice = || {
            let mut batch = Batch::default();
            batch.add_veth(&pair(None, &namespace));
            node.run(batch)
        };
        twice().unwrap();
        let error = twice().unwrap_err().to_string();
        assert!(
            error.starts_with("make link veth1 with eth0 in the pod") && error.ends_with("file exists"),
            "{error}"
        );
        assert!(netlink::inside(Path::new("/nowhere"), || ()).is_err());
    });
}

/// Whether a server at `address` answers.
/// The loopback interface is not moved, and neither is a link to a name that the other namespace has.
#[test]
fn a_link_is_moved_with_its_addresses_as_root() {
    alone(|here| {
        alone(|there| {
            let node = netlink::inside(here, Socket::route).unwrap().unwrap();
            let pod = Socket::route().unwrap();
            let namespace = File::open(there).unwrap();
            let mut batch = Batch::default();
            batch.add_bridge(&Bridge { name: "br0", mtu: 0, mac: None });
            node.run(batch).unwrap();
            let link = node.link("br0").unwrap().expect("just made");
            let mut batch = Batch::default();
            batch.add_ifb("card0", 1400);
            batch.add_ifb("card1", 1400);
            node.run(batch).unwrap();
            let [card, other] = ["card0", "card1"].map(|name| node.link(name).unwrap().expect("just made"));
            let mut batch = Batch::default();
            batch.add_address(card.index, network("10.7.0.2/24"), false);
            batch.add_address(card.index, network("fd07::2/64"), false);
            batch.add_address(link.index, network("10.8.0.2/24"), false);
            node.run(batch).unwrap();

            let addresses = node.global_addresses(card.index).unwrap();
            assert_eq!(
                addresses.len(),
                2,
                "neither that of the link's scope nor another link's: {addresses:?}"
            );
            let mut batch = Batch::default();
            batch.move_link(&card, namespace.as_raw_fd(), "net1");
            node.run(batch).unwrap();
            assert_eq!(node.link("card0").unwrap(), None);
            let moved = pod.link("net1").unwrap().expect("moved");
            assert!(!moved.is_up && !moved.is_loopback);
            for is_first in [true, false] {
                let mut batch = Batch::default();
                for address in &addresses {
                    batch.add_copied_address(moved.index, address);
                }
                batch.set_up(moved.index, "net1");
                let outcome = pod.run(batch).map_err(|error| error.to_string());
                let refused = outcome.as_ref().is_err_and(|text| text.starts_with("add address 10.7.0.2/24"));
                assert!(if is_first { outcome.is_ok() } else { refused }, "{outcome:?}");
            }
            let found = pod.addresses(moved.index).unwrap();
            assert!(found.contains(&network("10.7.0.2/24")) && found.contains(&network("fd07::2/64")));

            let mut batch = Batch::default();
            batch.move_link(&other, namespace.as_raw_fd(), "net1");
            let error = node.run(batch).unwrap_err();
            assert_eq!((error.op, error.errno), ("move link", Errno::EEXIST), "{error}");
            let lo = node.link("lo").unwrap().expect("every namespace has one");
            assert!(lo.is_loopback);
            let mut batch = Batch::default();
            batch.move_link(&lo, namespace.as_raw_fd(), "lo1");
            assert!(node.run(batch).is_err());
        });
    });
}

fn answers(address: &str) -> bool {
    let address: SocketAddr = address.parse().unwrap();
    TcpStream::connect_timeout(&address, Duration::from_secs(2)).is_ok()
}

#[test]
fn rules_are_added_together_and_removed_by_their_owner_as_root() {
    alone(|_| {
        let (firewall, listener) = (Socket::netfilter().unwrap(), listen_at(&["10.0.0.1/32", "fd00::1/128"]));
        firewall.remove_rules("boat", "one").expect("no table is as good");
        let add = |owner: &str, port: u16, target: &str| {
            let target: IpAddr = target.parse().unwrap();
            let mut rules = Rules::new("boat", owner, Family::of(target));
            rules.base_chain("output", Hook::Output, 0);
            rules.base_chain("postrouting", Hook::Postrouting, 0);
            let is_meant = |rule: &mut Rule<'_>| {
                rule.to_port(Protocol::Tcp, port);
                rule.to(Network { prefix: 24, ..Network::host(target) });
                rule.to_this_host();
            };
            rules.rule("output", RulePosition::Last, &|rule| {
                is_meant(rule);
                rule.from(Network::host(target));
                rule.set_mark(0x2000);
            });
            rules.rule("output", RulePosition::Last, &|rule| {
                is_meant(rule);
                rule.redirect(target, 81);
            });
            rules.rule("postrouting", RulePosition::Last, &|rule| {
                rule.not_to(Network { prefix: 8, ..Network::host(target) });
                rule.marked(0x2000);
                rule.masquerade();
            });
            rules.commit(&firewall)
        };
        add("one", 8081, "10.0.0.1").unwrap();
        add("two", 8082, "10.0.0.1").unwrap();
        add("one", 8081, "fd00::1").unwrap();
        let all = ["10.0.0.1:8081", "10.0.0.1:8082", "[fd00::1]:8081"];
        assert_eq!(all.map(answers), [true, true, true]);
        firewall.remove_rules("boat", "one").unwrap();
        assert_eq!(all.map(answers), [false, true, false]);
        firewall.remove_rules("boat", "one").unwrap();
        firewall.remove_rules("other", "two").unwrap();
        assert!(answers(all[1]));
        firewall.remove_rules("boat", "two").unwrap();
        assert_eq!(all.map(answers), [false; 3]);
        drop(listener);
        // An invalid rule makes its whole transaction fail.
        let mut rules = Rules::new("lost", "one", Family::Ipv4);
        rules.rule("prerouting", RulePosition::Last, &|rule| rule.masquerade());
        let error = rules.commit(&firewall).unwrap_err().to_string();
        assert!(error.starts_with("add nftables rule to lost prerouting"), "{error}");
    });
}

/// The list of the kernel has several parts if there are many rules.
#[test]
fn an_owner_is_found_among_hundreds_as_root() {
    alone(|_| {
        let (node, firewall) = (Socket::route().unwrap(), Socket::netfilter().unwrap());
        lo_up(&node);
        let listener = TcpListener::bind("127.0.0.1:81").unwrap();
        for number in 0..300_u16 {
            let owner = format!("owner-{number}");
            let mut rules = Rules::new("boat", &owner, Family::Ipv4);
            rules.base_chain("output", Hook::Output, 0);
            rules.rule("output", RulePosition::Last, &|rule| {
                rule.to_port(Protocol::Tcp, 1000 + number);
                rule.redirect([127, 0, 0, 1].into(), 81);
            });
            rules.commit(&firewall).unwrap();
        }
        assert!(answers("127.0.0.1:1299"));
        firewall.remove_rules("boat", "owner-299").unwrap();
        assert_eq!(
            [answers("127.0.0.1:1299"), answers("127.0.0.1:1298"), answers("127.0.0.1:1000")],
            [false, true, true]
        );
        drop(listener);
    });
}

#[test]
fn conntrack_entries_of_a_port_are_removed_as_root() {
    alone(|_| {
        let (node, netfilter) = (Socket::route().unwrap(), Socket::netfilter().unwrap());
        lo_up(&node);
        // Connection tracking is enabled by rules for address translation.
        let mut rules = Rules::new("boat", "one", Family::Ipv4);
        rules.base_chain("postrouting", Hook::Postrouting, 0);
        rules.rule("postrouting", RulePosition::Last, &|rule| {
            rule.marked(1);
            rule.masquerade();
        });
        rules.commit(&netfilter).unwrap();
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        let receivers: Vec<_> = [91, 92].map(|port| UdpSocket::bind(("127.0.0.1", port)).unwrap()).into();
        let own = sender.local_addr().unwrap().port();
        let followed = || {
            let text = fs::read_to_string("/proc/thread-self/net/nf_conntrack").unwrap();
            [91, 92].map(|port| text.contains(&format!("sport={own} dport={port} ")))
        };
        for port in [91, 92] {
            sender.send_to(b"ahoy", ("127.0.0.1", port)).unwrap();
        }
        assert_eq!(followed(), [true, true]);
        netfilter.forget_connections(Protocol::Tcp, 91, false).unwrap();
        netfilter.forget_connections(Protocol::Udp, 91, true).unwrap();
        assert_eq!(followed(), [true, true], "others than those meant");
        netfilter.forget_connections(Protocol::Udp, 91, false).unwrap();
        assert_eq!(followed(), [false, true]);
        netfilter.forget_connections_to(Protocol::Udp, "127.0.0.2".parse().unwrap()).unwrap();
        netfilter.forget_connections_to(Protocol::Udp, "::1".parse().unwrap()).unwrap();
        netfilter.forget_connections_to(Protocol::Tcp, "127.0.0.1".parse().unwrap()).unwrap();
        assert_eq!(followed(), [false, true], "others than those meant");
        netfilter.forget_connections_to(Protocol::Udp, "127.0.0.1".parse().unwrap()).unwrap();
        assert_eq!(followed(), [false, false]);
        // By the addresses that began them.
        sender.send_to(b"ahoy", ("127.0.0.1", 92)).unwrap();
        let from = |all: &[&str]| {
            let all = all.iter().map(|text| text.parse().unwrap()).collect();
            netfilter.forget_connections_from(Protocol::Udp, &all).unwrap();
            followed()[1]
        };
        assert_eq!(
            [from(&["127.0.0.2"]), from(&["127.0.0.2", "::1"]), from(&["127.0.0.1"])],
            [true, true, false]
        );
        sender.send_to(b"ahoy", ("127.0.0.1", 92)).unwrap();
        assert!(!from(&["127.0.0.2", "127.0.0.1"]));
        // More than the kernel takes in one request.
        for _ in 0..4000 {
            let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
            sender.send_to(b"ahoy", ("127.0.0.1", 91)).unwrap();
        }
        let count = || fs::read_to_string("/proc/thread-self/net/nf_conntrack").unwrap().lines().count();
        assert!(count() > 3000);
        netfilter.forget_connections_to(Protocol::Udp, "127.0.0.1".parse().unwrap()).unwrap();
        assert_eq!(count(), 0);
        drop(receivers);
    });
}

#[test]
fn conntrack_entries_of_ipv6_are_removed_by_the_answering_address_as_root() {
    alone(|_| {
        let (node, netfilter) = (Socket::route().unwrap(), Socket::netfilter().unwrap());
        lo_up(&node);
        let mut rules = Rules::new("boat", "one", Family::Ipv6);
        rules.base_chain("output", Hook::Output, 0);
        rules.rule("output", RulePosition::Last, &|rule| {
            rule.to_port(Protocol::Udp, 91);
            rule.redirect("::1".parse().unwrap(), 92);
        });
        rules.commit(&netfilter).unwrap();
        let sender = UdpSocket::bind("[::1]:0").unwrap();
        let receiver = UdpSocket::bind("[::1]:92").unwrap();
        sender.send_to(b"ahoy", "[::1]:91").unwrap();
        let followed = || {
            let text = fs::read_to_string("/proc/thread-self/net/nf_conntrack").unwrap();
            text.lines().filter(|line| line.contains(" dport=91 ")).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(followed().len(), 1, "{:?}", followed());
        netfilter.forget_connections_to(Protocol::Udp, "::2".parse().unwrap()).unwrap();
        assert_eq!(followed().len(), 1);
        netfilter.forget_connections_to(Protocol::Udp, "::1".parse().unwrap()).unwrap();
        assert!(followed().is_empty(), "{:?}", followed());
        // By the address that began them.
        sender.send_to(b"ahoy", "[::1]:91").unwrap();
        for (address, left) in [("::2", 1), ("127.0.0.1", 1), ("::1", 0)] {
            let all = [address.parse().unwrap()].into();
            netfilter.forget_connections_from(Protocol::Udp, &all).unwrap();
            assert_eq!(followed().len(), left, "{address}: {:?}", followed());
        }
        drop(receiver);
    });
}

#[test]
fn removed_links_are_reported_and_nothing_else_as_root() {
    alone(|_| {
        let socket = Socket::route().unwrap();
        let removals = RemovedLinks::open().unwrap();
        let mut batch = Batch::default();
        batch.add_bridge(&Bridge { name: "br1", mtu: 0, mac: None });
        batch.add_ifb("ifb1", 1400);
        socket.run(batch).unwrap();
        let bridge = socket.link("br1").unwrap().unwrap().index;
        said("ip", &["link", "set", "ifb1", "master", "br1"]);
        assert_eq!(socket.links().unwrap()["ifb1"].bridge, bridge);
        // A port that leaves its bridge is a message of the same type, of another family.
        said("ip", &["link", "set", "ifb1", "nomaster"]);
        assert_eq!(socket.links().unwrap()["ifb1"].bridge, 0);
        assert_eq!(removals.names().unwrap(), Some([].into()));
        said("ip", &["link", "delete", "ifb1"]);
        said("ip", &["link", "delete", "br1"]);
        assert_eq!(removals.names().unwrap(), Some(["br1".to_owned(), "ifb1".to_owned()].into()));
        assert_eq!(removals.names().unwrap(), Some([].into()));
    });
}

/// Runs a program in the network namespace of this thread and returns its output.
#[expect(clippy::disallowed_methods, reason = "a test has its thread to itself")]
fn said(program: &str, words: &[&str]) -> String {
    let output = std::process::Command::new(program).args(words).output().expect("it is installed");
    assert!(output.status.success(), "{program} {words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The rules of the filter table as listed by iptables.
fn listed() -> String {
    let save = |program| {
        said(program, &["-t", "filter"])
            .lines()
            .filter(|line| !line.starts_with('#'))
            .fold(String::new(), |text, line| {
                format!("{text}{}\n", line.split(" [").next().unwrap_or_default())
            })
    };
    ["iptables-save", "ip6tables-save"].map(save).concat()
}

#[test]
fn forwarding_is_accepted_where_iptables_finds_it_as_root() {
    let addresses: [IpAddr; 2] = ["10.1.0.5".parse().unwrap(), "fd00::5".parse().unwrap()];
    let rules = |family: &str, own: [&str; 2]| {
        let iptables = |words: &str| drop(said(family, &words.split(' ').collect::<Vec<_>>()));
        iptables("-N CNI-FORWARD");
        iptables("-N CNI-ADMIN");
        said(
            family,
            &[
                "-I",
                "FORWARD",
                "-m",
                "comment",
                "--comment",
                "CNI firewall plugin rules",
                "-j",
                "CNI-FORWARD",
            ],
        );
        let comment = "CNI firewall plugin admin overrides";
        said(family, &["-I", "CNI-FORWARD", "-m", "comment", "--comment", comment, "-j", "CNI-ADMIN"]);
        for own in own {
            iptables(&format!(
                "-A CNI-FORWARD -d {own} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"
            ));
            iptables(&format!("-A CNI-FORWARD -s {own} -j ACCEPT"));
        }
    };
    let mut theirs = String::new();
    alone(|_| {
        rules("iptables", ["10.1.0.5", "10.1.0.6"]);
        rules("ip6tables", ["fd00::5", "fd00::6"]);
        theirs = listed();
        let socket = Socket::netfilter().unwrap();
        socket.accept_forwarded(&addresses).unwrap();
        assert_eq!(listed(), theirs, "existing rules are not added again");
        socket.forget_forwarded(&addresses).unwrap();
        let left: String = theirs
            .lines()
            .filter(|line| !line.contains(".5/32") && !line.contains("::5/128"))
            .fold(String::new(), |text, line| text + line + "\n");
        assert_eq!(listed(), left, "and what iptables has added is found");
    });
    alone(|_| {
        let socket = Socket::netfilter().unwrap();
        socket.forget_forwarded(&addresses).expect("no table yet");
        socket.accept_forwarded(&addresses).unwrap();
        socket.accept_forwarded(&["10.1.0.6".parse().unwrap(), "fd00::6".parse().unwrap()]).unwrap();
        // Listing makes iptables create its chains.
        said("iptables", &["-L"]);
        said("ip6tables", &["-L"]);
        assert_eq!(listed(), theirs);
        for rule in
            ["-s 10.1.0.5 -j ACCEPT", "-d 10.1.0.5 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"]
        {
            let words: Vec<_> = ["-D", "CNI-FORWARD"].into_iter().chain(rule.split(' ')).collect();
            said("iptables", &words);
        }
        said("iptables", &["-P", "FORWARD", "DROP"]);
        socket.accept_forwarded(&addresses[1..]).unwrap();
        socket.accept_forwarded(&addresses[..1]).unwrap();
        assert!(listed().contains(":FORWARD DROP"), "a policy stays: {}", listed());
        assert!(listed().contains("-A CNI-FORWARD -s 10.1.0.5/32 -j ACCEPT"), "{}", listed());
    });
}

#[test]
fn traffic_is_limited_in_both_directions_as_root() {
    alone(|_| {
        alone(|there| {
            let socket = Socket::route().unwrap();
            let namespace = File::open(there).unwrap();
            let mut batch = Batch::default();
            batch.add_veth(&Veth { peer_namespace: namespace.as_raw_fd(), ..pair(None, &namespace) });
            batch.add_ifb("ifb1", 1400);
            socket.run(batch).unwrap();
            let (veth, ifb) = (socket.link("veth1").unwrap().unwrap(), socket.link("ifb1").unwrap().unwrap());
            assert_eq!((veth.mtu, ifb.mtu, ifb.kind.as_str(), ifb.is_up), (1400, 1400, "ifb", true));
            let peer = socket.link_at(veth.peer).unwrap().expect("the other end is here, too");
            assert_eq!((peer.name.as_str(), peer.peer), ("eth0", veth.index));
            let fast = Rate { bytes_per_second: 5_000_000_000, burst_bytes: 5_000_000 };
            let slow = Rate { bytes_per_second: 1_000_000, burst_bytes: 10_000 };
            let mut batch = Batch::default();
            batch.limit(veth.index, "veth1", fast);
            batch.redirect(veth.index, "veth1", ifb.index);
            batch.limit(ifb.index, "ifb1", slow);
            socket.run(batch).unwrap();
            let disciplines = said("tc", &["qdisc", "show"]);
            for part in [
                "tbf 1: dev veth1 root",
                "rate 40Gbit burst 5000000b",
                "ingress ffff: dev veth1",
                "tbf 1: dev ifb1 root",
                "rate 8Mbit burst 10000b lat 25ms",
            ] {
                assert!(disciplines.contains(part), "{part} in {disciplines}");
            }
            let filters = said("tc", &["filter", "show", "dev", "veth1", "ingress"]);
            assert!(filters.contains("Egress Redirect to device ifb1) stolen"), "{filters}");
            let mut batch = Batch::default();
            batch.limit(ifb.index, "ifb1", slow);
            let refused = socket.run(batch).unwrap_err();
            assert!(refused.to_string().starts_with("limit traffic of ifb1"), "{refused}");
        });
    });
}
