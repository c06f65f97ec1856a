//! nftables rules by which a pod cannot speak for another one on a bridge. Without them any pod with CAP_NET_RAW, which the kubelet
//! gives to every container by default, could answer for the gateway's address and read what its neighbours send.
//!
//! ```text
//! table bridge coracle
//! neighbours-in,
//! neighbours-own  from a link in neighbours-links: jump to neighbours
//! neighbours      the sender's MAC address is not in neighbours-macs, or to an address that bridges do not forward: drop
//!                 a VLAN tag in a VLAN tag: drop, because Linux receives what is in tags of VLAN 0 as if it had none
//!                 ARP whose sender's addresses are in neighbours-arp: accept; other ARP: drop
//!                 ICMPv6 router advertisement or redirect: drop
//!                 ICMPv6 solicitation from an address in neighbours-ipv6: accept; others: drop
//!                 ICMPv6 neighbour advertisement of a target in neighbours-ipv6: accept; others: drop
//!                 IPv6 with the beginning of the upper-layer header, and later fragments: accept; other IPv6: drop
//! ```
//! What is allowed is accepted first: of a truncated message or a first fragment a field cannot be read, and then no rule with it
//! matches. For the same reason a first fragment must have the upper-layer header (RFC 7112): with br_netfilter the node
//! reassembles a packet after these chains, and its receiver does not see that it was in fragments, in which it would ignore such
//! messages (RFC 6980).
//!
//! The chains see a frame before the bridge learns from it, so that the node's own tables are protected, too; frames that bridges do
//! not forward are seen at the input hook only, and [`set_up`] stops the bridge from learning from them. The source addresses of IP packets are not compared, because a pod may be the router of others (VPNs). Rules: RFC 826; RFC 4861, section 11.2;
//! RFC 5227, 2.1.1 (probes have the sender's address 0.0.0.0).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use coracle_base::error::Error;
use coracle_netlink::{ETH_P_IPV6, Field, FramesHook, Network, Rule, RulePosition, Rules, Set, Value};

use super::attach::set_file;
use super::rules::{Element, set};

/// Comment of the rules.
pub(super) const OWNER: &str = "neighbours";
/// Name of the set of the links whose frames are checked.
pub(super) const LINKS: &str = "neighbours-links";
/// Number of rules that [`write()`] adds.
pub(super) const RULES_COUNT: usize = 19;

const INCOMING: &str = "neighbours-in";
const OWN: &str = "neighbours-own";
const CHECKS: &str = "neighbours";
const ETH_P_ARP: u16 = 0x0806;
const ETH_P_8021Q: u16 = 0x8100;
const ETH_P_8021AD: u16 = 0x88a8;
// Types of ICMPv6 messages (RFC 4861, section 4).
const ROUTER_SOLICITATION: u8 = 133;
const ROUTER_ADVERTISEMENT: u8 = 134;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
const REDIRECT: u8 = 137;

const OWN_ADDRESS: &[Field] = &[Field::Link, Field::Ipv6Source];
const ADVERTISED: &[Field] = &[Field::Link, Field::AdvertisedTarget];

fn links() -> Set {
    set(LINKS.into(), &[Field::Link])
}

fn macs() -> Set {
    set("neighbours-macs".into(), &[Field::Link, Field::Hardware])
}

fn arp() -> Set {
    set("neighbours-arp".into(), &[Field::Link, Field::ArpHardware, Field::ArpAddress])
}

/// The IPv6 addresses of each link; `key` says with what of a packet they are compared.
fn ipv6(key: &'static [Field]) -> Set {
    set("neighbours-ipv6".into(), key)
}

/// Writes the sets and rules that all pods share.
pub(super) fn write(rules: &mut Rules<'_>) {
    type Verdict = fn(&mut Rule<'_>);
    rules.chain(CHECKS);
    for set in [links(), macs(), arp(), ipv6(OWN_ADDRESS)] {
        rules.set(&set);
    }
    for (name, hook) in [(INCOMING, FramesHook::Prerouting), (OWN, FramesHook::Input)] {
        rules.frames_chain(name, hook);
        rules.rule(name, RulePosition::Last, &|rule| {
            rule.is_in(&links());
            rule.jump(CHECKS);
        });
    }
    let mut when = |matches: &dyn Fn(&mut Rule<'_>), verdict: Verdict| {
        rules.rule(CHECKS, RulePosition::Last, &|rule| {
            matches(rule);
            verdict(rule);
        });
    };
    let (accept, drop): (Verdict, Verdict) = (|rule| rule.accept_packet(), |rule| rule.drop_packet());
    when(&|rule| rule.is_not_in(&macs()), drop);
    when(&|rule| rule.to_bridges_only(), drop);
    for tag in [ETH_P_8021Q, ETH_P_8021AD] {
        when(&|rule| rule.of_ethernet_protocol(tag), drop);
    }
    let is_arp = |rule: &mut Rule<'_>| rule.of_ethernet_protocol(ETH_P_ARP);
    when(
        &|rule| {
            is_arp(rule);
            rule.is_in(&arp());
        },
        accept,
    );
    when(&is_arp, drop);
    for kind in [ROUTER_ADVERTISEMENT, REDIRECT] {
        when(&|rule| rule.of_icmpv6_type(kind), drop);
    }
    for (kind, address) in [
        (ROUTER_SOLICITATION, OWN_ADDRESS),
        (NEIGHBOUR_SOLICITATION, OWN_ADDRESS),
        (NEIGHBOUR_ADVERTISEMENT, ADVERTISED),
    ] {
        let is_it = |rule: &mut Rule<'_>| rule.of_icmpv6_type(kind);
        when(
            &|rule| {
                is_it(rule);
                rule.is_in(&ipv6(address));
            },
            accept,
        );
        when(&is_it, drop);
    }
    when(&|rule| rule.has_upper_layer_header(), accept);
    when(&|rule| rule.is_later_fragment(), accept);
    when(&|rule| rule.of_ethernet_protocol(ETH_P_IPV6), drop);
}

/// Sets options of the bridge without which pods disturb their neighbours below the rules: the bridge learns nothing from frames to
/// addresses that bridges do not forward (Linux 5.0), and floods multicast frames, so that a pod which claims to be a multicast router
/// does not get the neighbour solicitations of all others.
pub(super) fn set_up(bridge: &str) -> Result<(), Error> {
    let options = Path::new("/sys/class/net").join(bridge).join("bridge");
    // A kernel without snooping does not have its option.
    for (option, value) in [("no_linklocal_learn", "1"), ("multicast_snooping", "0")] {
        let path = options.join(option);
        if path.exists() {
            set_file(&path, value)?;
        }
    }
    Ok(())
}

/// The elements of a pod whose end on the node is `link`, with its MAC address and its addresses.
pub(super) fn elements(link: &str, mac: [u8; 6], own: &[Network]) -> Vec<Element> {
    let (link, mac_value) = (Value::Link(link.to_owned()), Value::Hardware(mac));
    let mut elements = vec![
        (links(), vec![link.clone()], Vec::new()),
        (macs(), vec![link.clone(), mac_value.clone()], Vec::new()),
    ];
    // What a host sends that has no address yet, and an address that the kernel makes from the MAC address if IPv6 is enabled.
    let without = [IpAddr::V4(Ipv4Addr::UNSPECIFIED), Ipv6Addr::UNSPECIFIED.into(), link_local(mac).into()];
    for address in own.iter().map(|network| network.address).chain(without) {
        let value = Value::Address(address);
        elements.push(match address {
            IpAddr::V4(_) => (arp(), vec![link.clone(), mac_value.clone(), value], Vec::new()),
            IpAddr::V6(_) => (ipv6(OWN_ADDRESS), vec![link.clone(), value], Vec::new()),
        });
    }
    elements
}

/// The link-local address of a MAC address (RFC 4291, appendix A).
fn link_local([a, b, c, d, e, f]: [u8; 6]) -> Ipv6Addr {
    Ipv6Addr::from([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_local_address_has_the_mac_address() {
        assert_eq!(link_local([0x0a, 0x58, 10, 86, 0, 5]).to_string(), "fe80::858:aff:fe56:5");
    }

    #[test]
    fn a_pod_has_its_addresses_and_those_of_a_host_without_one() {
        let own = ["10.86.0.5/16".parse().unwrap(), "fd00::5/64".parse().unwrap()];
        let of = |name: &str| {
            let found = elements("veth1", [2; 6], &own);
            found.iter().filter(|(set, ..)| set.name == name).count()
        };
        assert_eq!(
            ["links", "macs", "arp", "ipv6"].map(|name| of(&format!("neighbours-{name}"))),
            [1, 1, 2, 3]
        );
    }
}
