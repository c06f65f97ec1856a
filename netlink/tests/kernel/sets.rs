//! Sets and maps: their elements redirect connections, are listed by nft, replaced, and removed by their owners.

use std::net::{IpAddr, TcpListener};

use coracle_netlink::{Family, Field, Hook, Protocol, RulePosition, Rules, Set, Socket, Value};
use nix::errno::Errno;

use crate::{alone, answers, listen_at, said};

/// The map of ports of this host that are redirected.
fn redirected() -> Set {
    Set {
        name: "ports".into(),
        key: &[Field::Protocol, Field::Port],
        value: &[Field::Destination, Field::Port],
    }
}

/// The map of addresses and ports that are redirected.
fn redirected_at() -> Set {
    Set { name: "ports-at".into(), key: &[Field::Destination, Field::Protocol, Field::Port], ..redirected() }
}

fn key(port: u16) -> [Value; 2] {
    [Value::Protocol(Protocol::Tcp), Value::Port(port)]
}

fn local(port: u16) -> [Value; 2] {
    [Value::Address([127, 0, 0, 1].into()), Value::Port(port)]
}

/// The rules that use the maps.
fn redirect_by_maps(rules: &mut Rules<'_>) {
    rules.base_chain("early", Hook::Output, 0);
    rules.base_chain("output", Hook::Output, 1);
    rules.chain("ports");
    for map in [redirected_at(), redirected()] {
        rules.set(&map);
        rules.rule("ports", RulePosition::Last, &|rule| rule.redirect_by(&map));
    }
    rules.rule("output", RulePosition::First, &|rule| {
        rule.to_this_host();
        rule.jump("ports");
    });
}

/// Makes the rules of both families, as several daemons would, and elements with an owner each.
fn with_elements(count: u16) -> (Socket, TcpListener) {
    let (firewall, listener) = (Socket::netfilter().unwrap(), listen_at(&["fd00::1/128"]));
    assert_eq!(firewall.owner_of("boat", Family::Ipv4, &redirected(), &key(8081)).unwrap(), None, "no table");
    for family in [Family::Ipv4, Family::Ipv6, Family::Ipv4] {
        firewall.replace_rules("boat", "all", family, &redirect_by_maps).unwrap();
    }
    for number in 0..count {
        add(&firewall, &format!("owner-{number}"), 8000 + number, "127.0.0.1").unwrap();
    }
    (firewall, listener)
}

fn add(firewall: &Socket, owner: &str, port: u16, target: &str) -> Result<(), coracle_netlink::Error> {
    let target: IpAddr = target.parse().unwrap();
    let mut rules = Rules::new("boat", owner, Family::of(target));
    rules.element(&redirected(), &key(port), &[Value::Address(target), Value::Port(81)]);
    rules.commit(firewall)
}

/// The kernel's list of 600 elements has several parts.
#[test]
fn elements_of_maps_redirect_and_are_removed_by_their_owner_as_root() {
    alone(|_| {
        let (firewall, _listener) = with_elements(600);
        add(&firewall, "owner-599", 8000, "fd00::1").unwrap();
        let all = ["127.0.0.1:8000", "127.0.0.1:8599", "[fd00::1]:8000"];
        assert_eq!(all.map(answers), [true; 3]);
        let listed = said("nft", &["list", "ruleset"]);
        for part in [
            "map ports {",
            "type inet_proto . inet_service : ipv4_addr . inet_service",
            "tcp . 8599 comment \"owner-599\" : 127.0.0.1 . 81",
        ] {
            assert!(listed.contains(part), "{part} in {}", &listed[..2000]);
        }
        assert_eq!(listed.matches("jump ports").count(), 2, "one of each family");
        let owners = |set| firewall.owners_in("boat", &|name| name == set).unwrap().len();
        assert_eq!([owners("ports"), owners("none")], [600, 0]);
        firewall.remove_rules("boat", "owner-599").unwrap();
        assert_eq!(all.map(answers), [true, false, false], "of both families, and no other");
        let maps = |name: &str| name.starts_with("ports");
        let unused = || firewall.remove_unused("boat", Family::Ipv4, &|owner| owner == "all", &maps).unwrap();
        assert!(!unused(), "it has elements");
        assert!(answers("127.0.0.1:8001"), "and the rules stay with it");
        (0..599_u16).for_each(|number| firewall.remove_rules("boat", &format!("owner-{number}")).unwrap());
        assert!(unused() && unused());
        let listed = said("nft", &["list", "table", "ip", "boat"]);
        assert!(!listed.contains("map ports") && !listed.contains("jump ports"), "{listed}");
        assert!(
            said("nft", &["list", "table", "ip6", "boat"]).contains("map ports"),
            "the other family's stay"
        );
        firewall.remove_rules("boat", "all").expect("shared rules have an owner, too");
    });
}

#[test]
fn an_element_is_replaced_in_one_transaction_only_on_request_as_root() {
    alone(|_| {
        let (firewall, _listener) = with_elements(2);
        let owner = |port| firewall.owner_of("boat", Family::Ipv4, &redirected(), &key(port)).unwrap();
        let refused = add(&firewall, "thief", 8000, "127.0.0.1").unwrap_err();
        assert_eq!((refused.op, refused.errno), ("add nftables element to", Errno::EEXIST), "{refused}");
        assert_eq!((owner(8000).as_deref(), owner(9999)), (Some("owner-0"), None));
        let mut rules = Rules::new("boat", "heir", Family::Ipv4);
        rules.remove_element(&redirected(), &key(8000));
        rules.element(&redirected(), &key(8000), &local(82));
        rules.commit(&firewall).unwrap();
        assert_eq!((owner(8000).as_deref(), answers("127.0.0.1:8000")), (Some("heir"), false));
        let mut rules = Rules::new("boat", "heir", Family::Ipv4);
        let ([address, _], [protocol, port]) = (local(0), key(8000));
        let own = [address, protocol, port];
        rules.element(&redirected_at(), &own, &local(81));
        rules.commit(&firewall).unwrap();
        assert!(answers("127.0.0.1:8000"), "an element with an address comes first");
        firewall.remove_rules("boat", "heir").unwrap();
        assert_eq!(
            (answers("127.0.0.1:8000"), owner(8000), owner(8001).as_deref()),
            (false, None, Some("owner-1"))
        );
        let mut rules = Rules::new("boat", "heir", Family::Ipv4);
        rules.remove_element(&redirected(), &key(8000));
        assert_eq!(rules.commit(&firewall).unwrap_err().errno, Errno::ENOENT);
    });
}
