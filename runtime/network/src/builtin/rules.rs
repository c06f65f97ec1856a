//! nftables rules for one pod: masquerading for `bridge` and `ptp`, host ports for `portmap`. The rules are
//! in coracle's tables `ip coracle` and `ip6 coracle`, each rule with the pod's ID as a comment.
//!
//! ```text
//! prerouting, output    to the host port, from the pod's network or 127.0.0.1: set the mark bit
//!                         to the host port: DNAT to the pod's address and port
//! postrouting           with the mark bit, to the pod: masquerade
//!                         from the pod, not to its own network, not multicast: masquerade
//! guard                 not from lo, to 127.0.0.0/8: drop; one rule for all pods, kept with the table
//! ```
//! Rules: the plugins' documentation at cni.dev; docs/cni.md, "Built in".

use std::cell::Cell;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use coracle_base::error::Error;
use coracle_base::log;
use coracle_job::PortMapping;
use coracle_netlink::{Hook, Network, Protocol, Rule, Rules, Socket};

use super::conf::{Plan, Ports};

/// Name of coracle's table in both families.
const TABLE: &str = "coracle";
const MULTICAST: [Network; 2] = [
    Network { address: IpAddr::V4(Ipv4Addr::new(224, 0, 0, 0)), prefix: 4 },
    Network { address: IpAddr::V6(Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0)), prefix: 8 },
];
const LOCALHOST: Network = Network { address: IpAddr::V4(Ipv4Addr::LOCALHOST), prefix: 32 };

/// A netlink socket for nftables. It is kept open, because closing it takes longer than all other operations.
#[derive(Default)]
pub(crate) struct Netfilter(Cell<Option<Socket>>);

impl Netfilter {
    /// Runs `work` with the socket. After an error the socket is replaced, because unread replies may be in
    /// its buffer.
    pub(super) fn with(&self, work: impl FnOnce(&Socket) -> Result<(), Error>) -> Result<(), Error> {
        let socket = self.0.take().map_or_else(Socket::netfilter, Ok)?;
        let outcome = work(&socket);
        if outcome.is_ok() {
            self.0.set(Some(socket));
        }
        outcome
    }
}

/// Adds the rules of a pod if it needs any.
pub(super) fn add(netfilter: &Netfilter, plan: &Plan, id: &str, own: &[Network]) -> Result<(), Error> {
    match plan.has_rules() {
        true => netfilter.with(|socket| add_by(socket, plan, id, own)),
        false => Ok(()),
    }
}

/// Removes the rules of a pod.
pub(super) fn remove(netfilter: &Netfilter, plan: &Plan, id: &str) -> Result<(), Error> {
    match plan.has_rules() {
        true => netfilter.with(|socket| Ok(socket.remove_rules(TABLE, id)?)),
        false => Ok(()),
    }
}

/// Removes the rules of a pod whose record is lost.
pub(super) fn remove_all(netfilter: &Netfilter, id: &str) -> Result<(), Error> {
    netfilter.with(|socket| Ok(socket.remove_rules(TABLE, id)?))
}

fn add_by(socket: &Socket, plan: &Plan, id: &str, own: &[Network]) -> Result<(), Error> {
    let masquerades = plan.base.as_ref().is_some_and(|base| base.masquerades);
    for is_ipv6 in [false, true] {
        let addresses: Vec<_> = own.iter().filter(|own| own.address.is_ipv6() == is_ipv6).collect();
        let Some(first) = addresses.first() else { continue };
        let mut rules = Rules::new(TABLE, id, is_ipv6);
        rules.chain(Hook::Postrouting);
        if !plan.ports.is_empty() {
            rules.chain(Hook::Prerouting);
            rules.chain(Hook::Output);
        }
        // Before `chain::route_localhost`, which allows the traffic that this rule drops.
        if !is_ipv6 && plan.ports.iter().any(|ports| ports.masquerades) {
            rules.guard_loopback();
        }
        for ports in &plan.ports {
            publish(&mut rules, ports, **first);
        }
        for own in addresses.iter().filter(|_| masquerades) {
            rules.rule(Hook::Postrouting, &|rule| {
                rule.from(Network::host(own.address));
                rule.not_to(own.base());
                rule.not_to(MULTICAST[usize::from(is_ipv6)]);
                rule.masquerade();
            });
        }
        rules.commit(socket)?;
        forget_datagrams(socket, plan, **first);
    }
    Ok(())
}

/// Removes conntrack entries of UDP and SCTP senders for the host ports, so that their datagrams reach the
/// new pod. An error is only logged, because few senders are affected.
fn forget_datagrams(socket: &Socket, plan: &Plan, own: Network) {
    for mapping in plan.ports.iter().flat_map(|ports| &ports.mappings) {
        let Some((_, Protocol::Udp)) = target(mapping, own) else { continue };
        let port = mapping.host_port;
        if let Err(error) = socket.forget_connections(Protocol::Udp, port, own.address.is_ipv6()) {
            log::warn!("cannot remove conntrack entries, datagrams of earlier senders may not reach the pod"; port = port, error = error);
        }
    }
}

/// Adds the rules of host ports that lead to `own`.
fn publish(rules: &mut Rules<'_>, ports: &Ports, own: Network) {
    let mut is_any = false;
    for mapping in &ports.mappings {
        let Some((host, protocol)) = target(mapping, own) else { continue };
        is_any = true;
        let is_meant = |rule: &mut Rule<'_>| {
            rule.to_port(protocol, mapping.host_port);
            if let Some(host) = host {
                rule.to(Network::host(host));
            }
            rule.to_this_host();
        };
        for hook in [Hook::Prerouting, Hook::Output] {
            let localhost = own.address.is_ipv4().then_some(LOCALHOST);
            for near in [Some(own), localhost].into_iter().flatten().filter(|_| ports.masquerades) {
                rules.rule(hook, &|rule| {
                    rule.from(near);
                    is_meant(rule);
                    rule.set_mark(ports.mark);
                });
            }
            rules.rule(hook, &|rule| {
                is_meant(rule);
                rule.redirect(own.address, mapping.container_port);
            });
        }
    }
    if is_any && ports.masquerades {
        rules.rule(Hook::Postrouting, &|rule| {
            rule.to(Network::host(own.address));
            rule.marked(ports.mark);
            rule.masquerade();
        });
    }
}

/// The node's address of a mapping (`None`: all addresses) and its protocol; `None` if the mapping is for the
/// other address family.
fn target(mapping: &PortMapping, own: Network) -> Option<(Option<IpAddr>, Protocol)> {
    let protocol = match mapping.protocol.as_str() {
        "tcp" => Protocol::Tcp,
        "udp" => Protocol::Udp,
        "sctp" => Protocol::Sctp,
        _ => return None,
    };
    if mapping.host_ip.is_empty() {
        return Some((None, protocol));
    }
    let host: IpAddr = mapping.host_ip.parse().ok()?;
    (host.is_ipv4() == own.address.is_ipv4())
        .then(|| (Some(host).filter(|host| !host.is_unspecified()), protocol))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_applies_to_the_family_of_its_host_address() {
        let (four, six) = ("10.1.0.5/24".parse().unwrap(), "fd00::5/64".parse().unwrap());
        let host = |text: &str| Some(text.parse::<IpAddr>().unwrap());
        let cases = [
            ("", Some(None), Some(None)),
            ("0.0.0.0", Some(None), None),
            ("::", None, Some(None)),
            ("192.0.2.1", Some(host("192.0.2.1")), None),
            ("2001:db8::1", None, Some(host("2001:db8::1"))),
        ];
        for (host_ip, in_four, in_six) in cases {
            let mapping = PortMapping {
                host_port: 1,
                container_port: 2,
                protocol: "udp".into(),
                host_ip: host_ip.into(),
            };
            let found = |own| target(&mapping, own).map(|(host, _)| host);
            assert_eq!((found(four), found(six)), (in_four, in_six), "{host_ip:?}");
        }
    }
}
