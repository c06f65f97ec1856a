//! Connection tracking of pods that come and go: its entries are removed that would lead peers of a removed pod to another pod,
//! which later has the address, or senders to a host port past its new pod.
//!
//! | entries | removed |
//! |---|---|
//! | of host ports that lead to a removed pod | with its rules |
//! | of datagrams to a host port before its pod existed | after the pod's rules were added |
//! | of datagrams that a removed pod sent and that were masqueraded: answers to them go to its address | before another pod has the address |
//!
//! Those of TCP can stay: the kernel translates no segment with which a peer could begin a connection.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::net::IpAddr;

use coracle_base::error::Error;
use coracle_base::log;
use coracle_job::PortMapping;
use coracle_netlink::{Network, Protocol, Socket};
use coracle_sandbox::collect::ordered;

use super::mapping::{protocol, target};
use super::plan::Plan;

/// Number of addresses that are kept: as many as pods are removed in a day or more on most nodes, in 20 KiB of memory.
const ADDRESSES_MAX: usize = 1024;

/// Addresses of removed pods whose datagrams were masqueraded. Addresses are given away in turn, so that hardly any of them has
/// another pod while the kernel still has such an entry; only then it is searched, which takes it some milliseconds.
#[derive(Default)]
pub(super) struct Departed(RefCell<BTreeSet<IpAddr>>);

impl Departed {
    /// Notes the addresses of a removed pod. If there are too many, the entries of all are removed.
    pub(super) fn note(&self, socket: &Socket, own: &[Network]) {
        self.0.borrow_mut().extend(own.iter().map(|network| network.address));
        if self.0.borrow().len() > ADDRESSES_MAX {
            forget_sent(socket, &self.0.take());
        }
    }

    /// Removes the entries of the earlier pods with these addresses.
    pub(super) fn forget_before_reuse(&self, socket: &Socket, own: &[Network]) {
        let mut departed = self.0.borrow_mut();
        let own = own.iter().map(|network| network.address);
        let reused: BTreeSet<IpAddr> = ordered(own.filter(|address| departed.remove(address)));
        if !reused.is_empty() {
            forget_sent(socket, &reused);
        }
    }
}

/// Removes the entries of datagrams that these addresses sent. An error is only logged, because few peers are affected.
fn forget_sent(socket: &Socket, addresses: &BTreeSet<IpAddr>) {
    if let Err(error) = socket.forget_connections_from(Protocol::Udp, addresses) {
        log::warn!("cannot remove conntrack entries, answers to removed pods may go to the next pods with their addresses"; error = error);
    }
}

/// Removes the entries that lead to host ports of a pod whose rules were removed. A peer that continues would otherwise keep its
/// entry, and reach another pod that receives the address; of TCP also with a new connection from the same port. Without
/// addresses, of an ADD without a result, the entries are found by the ports.
pub(super) fn forget_peers(socket: &Socket, plan: &Plan, own: &[Network]) {
    let mappings = || plan.ports.iter().flat_map(|ports| &ports.mappings);
    let forgotten = match own {
        [] => mappings().try_for_each(|mapping| {
            let Some(protocol) = protocol(mapping) else { return Ok(()) };
            let forget = |is_ipv6| socket.forget_connections(protocol, mapping.host_port, is_ipv6);
            [false, true].into_iter().try_for_each(forget)
        }),
        own => own.iter().try_for_each(|own| {
            let mut protocols = protocols(mappings()).into_iter();
            protocols.try_for_each(|protocol| socket.forget_connections_to(protocol, own.address))
        }),
    };
    if let Err(error) = forgotten {
        log::warn!("cannot remove conntrack entries, earlier peers of the pod may reach the next pod with its address"; error = error);
    }
}

/// The protocols of mappings, each once.
fn protocols<'a>(mappings: impl Iterator<Item = &'a PortMapping>) -> Vec<Protocol> {
    let mut found = Vec::new();
    for protocol in mappings.filter_map(protocol) {
        if !found.contains(&protocol) {
            found.push(protocol);
        }
    }
    found
}

/// Removes the entries that lead to addresses of a pod whose record is lost.
pub(super) fn forget_addresses(socket: &Socket, addresses: &[IpAddr]) -> Result<(), Error> {
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Sctp] {
        addresses.iter().try_for_each(|address| socket.forget_connections_to(protocol, *address))?;
    }
    let addresses = ordered(addresses.iter().copied());
    socket.forget_connections_from(Protocol::Udp, &addresses)?;
    Ok(())
}

/// Removes the entries of UDP senders for the host ports, so that their datagrams reach the new pod. An error is only logged, because
/// few senders are affected.
pub(super) fn forget_datagrams(socket: &Socket, plan: &Plan, own: Network) {
    for mapping in plan.ports.iter().flat_map(|ports| &ports.mappings) {
        let Some((_, Protocol::Udp)) = target(mapping, own) else { continue };
        let port = mapping.host_port;
        if let Err(error) = socket.forget_connections(Protocol::Udp, port, own.address.is_ipv6()) {
            log::warn!("cannot remove conntrack entries, datagrams of earlier senders may not reach the pod"; port = port, error = error);
        }
    }
}
