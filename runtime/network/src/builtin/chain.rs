//! What the plugins after the first do to a link that is there, whoever made it: rules, limits, and a place in the host's
//! filter. All of it is named after the pod, or by its addresses, and can be undone from its record.
//!
//! Rules: portmap, bandwidth, firewall 1.1.1.

use std::net::IpAddr;
use std::path::Path;

use coracle_base::error::{Error, Kind};
use coracle_job::{Attachment, CniOutcome, Interface};
use coracle_sandbox::netlink::{self, Batch, Link, Socket};
use sha2::{Digest as _, Sha512};

use super::attach::{set, show};
use super::conf::{Limits, Plan};
use super::result::{self, Made};
use super::rules::{self, Netfilter};

/// The link by which traffic of a pod makes its detour: this and as much of a digest as a name holds.
const DETOUR: &str = "bwp";
const DETOUR_BYTES: usize = 6;

/// Does for a pod what the plan has besides its link; `outcome` is that of the plugins so far.
pub(super) fn add(
    netfilter: &Netfilter,
    plan: &Plan,
    attachment: &Attachment,
    outcome: &mut CniOutcome,
) -> Result<(), Error> {
    let made = result::read(&outcome.result, &attachment.interface);
    rules::add(netfilter, plan, &attachment.container_id, &made.addresses)?;
    // After the rules, which keep others from using it.
    if plan.ports.iter().any(|ports| ports.masquerades) {
        route_localhost(&made)?;
    }
    if plan.limits != Limits::default() {
        limit(plan, attachment, &made, outcome)?;
    }
    if plan.firewall.is_some() {
        netfilter.with(|socket| Ok(socket.accept_forwarded(&addresses(&made))?))?;
    }
    Ok(())
}

/// Takes it back; what is gone is done. A link that is left is for a worker to remove, as that takes the kernel tens of
/// milliseconds.
pub(super) fn del(
    netfilter: &Netfilter,
    plan: &Plan,
    attachment: &Attachment,
    made: &Made,
) -> Result<Option<String>, Error> {
    if plan.firewall.is_some() {
        let mut own = addresses(made);
        if own.is_empty() {
            own = addresses_inside(attachment)?;
        }
        netfilter.with(|socket| Ok(socket.forget_forwarded(&own)?))?;
    }
    rules::remove(netfilter, plan, &attachment.container_id)?;
    let detour = plan.limits.egress.map(|_| detour_name(plan, attachment));
    Ok(detour.filter(|name| Path::new("/sys/class/net").join(name).exists()))
}

fn addresses(made: &Made) -> Vec<IpAddr> {
    made.addresses.iter().map(|network| network.address).collect()
}

/// The addresses of a pod whose ADD was cut short: there is no result. Without its namespace it has none.
fn addresses_inside(attachment: &Attachment) -> Result<Vec<IpAddr>, Error> {
    let path = Path::new(&attachment.netns);
    if !coracle_sandbox::netns::exists(path) {
        return Ok(Vec::new());
    }
    let pod = netlink::inside(path, Socket::route)??;
    let Some(link) = pod.link(&attachment.interface)? else { return Ok(Vec::new()) };
    Ok(pod.addresses(link.index)?.iter().map(|network| network.address).collect())
}

/// Lets packets from 127.0.0.1 leave by the link that leads to the pod: a port of the node is asked for there, too. That
/// also lets packets for 127.0.0.1 in, which the guard of our table drops ([`rules`]).
fn route_localhost(made: &Made) -> Result<(), Error> {
    let Some(own) = made.addresses.iter().find(|network| network.address.is_ipv4()) else { return Ok(()) };
    let node = Socket::route()?;
    let Some(index) = node.link_towards(own.address)? else { return Ok(()) };
    match node.link_at(index)? {
        Some(link) => set(&format!("net/ipv4/conf/{}/route_localnet", link.name), "1"),
        None => Ok(()),
    }
}

fn detour_name(plan: &Plan, attachment: &Attachment) -> String {
    let digest = Sha512::digest(format!("{}{}", plan.network, attachment.container_id));
    let digits: String = digest[..DETOUR_BYTES].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{DETOUR}{digits}")
}

fn limit(plan: &Plan, attachment: &Attachment, made: &Made, outcome: &mut CniOutcome) -> Result<(), Error> {
    let node = Socket::route()?;
    let end = node_end(&node, attachment, made)?;
    let mut batch = Batch::default();
    if let Some(rate) = plan.limits.ingress {
        batch.limit(end.index, &end.name, rate);
    }
    if let Some(rate) = plan.limits.egress {
        let name = detour_name(plan, attachment);
        let mut first = Batch::default();
        first.add_ifb(&name, end.mtu);
        node.run(first)?;
        let gone = || Error::new(Kind::Internal, format!("{name} is gone as soon as it was made"));
        let detour = node.link(&name)?.ok_or_else(gone)?;
        batch.redirect(end.index, &end.name, detour.index);
        batch.limit(detour.index, &name, rate);
        result::add_link(outcome, Interface { name, mac: show(detour.mac), sandbox: String::new() });
    }
    Ok(node.run(batch)?)
}

/// The node's end of the pod's pair, which the result names.
fn node_end(node: &Socket, attachment: &Attachment, made: &Made) -> Result<Link, Error> {
    let pod = netlink::inside(Path::new(&attachment.netns), Socket::route)??;
    let peer = pod.link(&attachment.interface)?.map_or(0, |link| link.peer);
    let end = if peer == 0 { None } else { node.link_at(peer)? };
    let why = || {
        let text =
            format!("limit traffic of {}: it is no end of a pair that is on the node", attachment.interface);
        Error::new(Kind::FailedPrecondition, text)
    };
    end.filter(|end| made.links.contains(&end.name)).ok_or_else(why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builtin::conf::{self, Part};

    #[test]
    fn a_detour_is_named_as_by_the_plugin() {
        let list = r#"{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"x"},{"type":"firewall"}]}"#;
        let attachment =
            Attachment { container_id: "a".into(), interface: "eth0".into(), ..Attachment::default() };
        let parts = conf::parts(list, &attachment, &|index| index == 1).unwrap();
        let [_, Part::BuiltIn(plan)] = &parts[..] else { panic!("{parts:?}") };
        // As bandwidth 1.1.1 has it for this network and this pod.
        assert_eq!(detour_name(plan, &attachment), "bwp48b4b2f9995b");
    }
}
