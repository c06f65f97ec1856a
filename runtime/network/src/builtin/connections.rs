//! Connection tracking of pods that come and go: its entries are removed that would lead peers of a removed pod to another pod,
//! which later has the address, or senders to a host port past its new pod.
//!
//! | entries | removed |
//! |---|---|
//! | of host ports that lead to a removed pod | with its rules |
//! | of datagrams to a host port before its pod existed | after the pod's rules were added |
//! | of datagrams that a removed pod sent and that were masqueraded: answers to them go to its address | from a second later on, or before another pod has the address |
//!
//! The last are removed together for all pods of that second, because the kernel takes some milliseconds to look through its table.
//! Those of TCP can stay: the kernel translates no segment with which a peer could begin a connection.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::Error;
use coracle_base::{log, reactor};
use coracle_job::PortMapping;
use coracle_netlink::{Network, Protocol, Socket};

use super::conf::Plan;
use super::mapping::{protocol, target};

/// Time during which addresses of removed pods are collected.
const COLLECTED: Duration = Duration::from_secs(1);
/// Number of entries that are removed at once: a pod can fill the kernel's table, and 240000 entries take more than a second.
const ENTRIES_MAX: usize = 2048;
/// Time for other work before the next entries.
const PAUSE: Duration = Duration::from_millis(5);

/// Addresses of removed pods from which datagrams were masqueraded.
#[derive(Default)]
pub(super) struct Departed(Rc<Waiting>);

#[derive(Default)]
struct Waiting {
    addresses: RefCell<BTreeSet<IpAddr>>,
    /// Kept open, because closing it can take long.
    socket: Cell<Option<Socket>>,
}

impl Departed {
    /// Removes the entries of datagrams from these addresses, from a second later on.
    pub(super) fn forget_later(&self, own: &[Network]) {
        let mut addresses = self.0.addresses.borrow_mut();
        let is_awaited = !addresses.is_empty();
        addresses.extend(own.iter().map(|network| network.address));
        if is_awaited || addresses.is_empty() {
            return;
        }
        let waiting = self.0.clone();
        let later = async move {
            reactor::sleep(COLLECTED).await;
            while !waiting.forget() {
                reactor::sleep(PAUSE).await;
            }
        };
        reactor::spawn(later).detach();
    }

    /// Removes the entries at once if another pod gets one of the addresses.
    pub(super) fn forget_before_reuse(&self, own: &[Network]) {
        let is_waiting = own.iter().any(|network| self.0.addresses.borrow().contains(&network.address));
        while is_waiting && !self.0.forget() {}
    }
}

impl Waiting {
    /// Removes entries of all addresses, a limited number of them; returns true if none is left.
    fn forget(&self) -> bool {
        let mut addresses = self.addresses.borrow_mut();
        let work = || {
            let socket = self.socket.take().map_or_else(Socket::netfilter, Ok)?;
            let is_done = socket.forget_connections_from(Protocol::Udp, &addresses, ENTRIES_MAX)?;
            // Otherwise the socket cannot be used again.
            self.socket.set(Some(socket).filter(|_| is_done));
            Ok(is_done)
        };
        let outcome: Result<bool, coracle_netlink::Error> = work();
        let is_over = outcome.unwrap_or_else(|error| {
            log::warn!("cannot remove conntrack entries, answers to removed pods may go to the next pods with their addresses"; error = error);
            true
        });
        if is_over {
            addresses.clear();
        }
        is_over
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
    let addresses = addresses.iter().copied().collect();
    socket.forget_connections_from(Protocol::Udp, &addresses, usize::MAX)?;
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
