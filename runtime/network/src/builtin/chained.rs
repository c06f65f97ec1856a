//! The chained part of the built-in plugins (`portmap`, `bandwidth`, `firewall`), which modifies an existing
//! link: rules, limits, and acceptance by the host's packet filter. Every object is named after the pod or
//! its addresses, so DEL can remove it from the pod's record.
//!
//! Rules: portmap, bandwidth, firewall 1.1.1.

use std::net::IpAddr;
use std::path::Path;

use coracle_base::error::{Error, Kind};
use coracle_job::{Attachment, CniOutcome, Interface};
use coracle_netlink::{self as netlink, Batch, Link, Socket};
use sha2::{Digest as _, Sha512};

use super::attach::{set, show};
use super::plan::{Limits, Plan};
use super::result::{self, Made};
use super::rules::{self, Netfilter};

/// Prefix of the name of the IFB link that limits a pod's egress traffic; the first digits of a digest
/// follow.
const IFB_PREFIX: &str = "bwp";
const DETOUR_BYTES: usize = 6;

/// Runs the chained plugins of the plan; `outcome` is the result of the preceding plugins.
pub(super) fn add(
    netfilter: &Netfilter,
    plan: &Plan,
    attachment: &Attachment,
    outcome: &mut CniOutcome,
) -> Result<(), Error> {
    let made = result::read(&outcome.result, &attachment.interface);
    rules::add(netfilter, plan, attachment, &made)?;
    // After the rules, which protect 127.0.0.1 from other hosts.
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

/// Removes everything that [`add`] created; missing objects are not an error. Returns the name of a link that
/// a worker should remove, because the kernel needs tens of milliseconds for it.
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
    rules::remove(netfilter, plan, attachment, made)?;
    let ifb = plan.limits.egress.map(|_| ifb_name(plan, attachment));
    Ok(ifb.filter(|name| Path::new("/sys/class/net").join(name).exists()))
}

fn addresses(made: &Made) -> Vec<IpAddr> {
    made.addresses.iter().map(|network| network.address).collect()
}

/// Reads the addresses from the pod's namespace, for an interrupted ADD without a result. Empty if the
/// namespace no longer exists.
fn addresses_inside(attachment: &Attachment) -> Result<Vec<IpAddr>, Error> {
    let path = Path::new(&attachment.netns);
    if !coracle_sandbox::netns::exists(path) {
        return Ok(Vec::new());
    }
    let pod = netlink::inside(path, Socket::route)??;
    let Some(link) = pod.link(&attachment.interface)? else { return Ok(Vec::new()) };
    Ok(pod.addresses(link.index)?.iter().map(|network| network.address).collect())
}

/// Enables `route_localnet` on the link that leads to the pod, so that host ports work on 127.0.0.1. With
/// this setting, packets for 127.0.0.1 from the network would be accepted, too; the `guard` chain drops them
/// ([`rules`]).
fn route_localhost(made: &Made) -> Result<(), Error> {
    let Some(own) = made.addresses.iter().find(|network| network.address.is_ipv4()) else { return Ok(()) };
    let node = Socket::route()?;
    let Some(index) = node.link_towards(own.address)? else { return Ok(()) };
    match node.link_at(index)? {
        Some(link) => set(&format!("net/ipv4/conf/{}/route_localnet", link.name), "1"),
        None => Ok(()),
    }
}

fn ifb_name(plan: &Plan, attachment: &Attachment) -> String {
    let digest = Sha512::digest(format!("{}{}", plan.network, attachment.container_id));
    let digits: String = digest[..DETOUR_BYTES].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{IFB_PREFIX}{digits}")
}

fn limit(plan: &Plan, attachment: &Attachment, made: &Made, outcome: &mut CniOutcome) -> Result<(), Error> {
    let node = Socket::route()?;
    let end = node_end(&node, attachment, made)?;
    let mut batch = Batch::default();
    if let Some(rate) = plan.limits.ingress {
        batch.limit(end.index, &end.name, rate);
    }
    if let Some(rate) = plan.limits.egress {
        let name = ifb_name(plan, attachment);
        let mut first = Batch::default();
        first.add_ifb(&name, end.mtu);
        node.run(first)?;
        let gone = || Error::new(Kind::Internal, format!("{name} is missing after its creation"));
        let ifb = node.link(&name)?.ok_or_else(gone)?;
        batch.redirect(end.index, &end.name, ifb.index);
        batch.limit(ifb.index, &name, rate);
        result::add_link(outcome, Interface { name, mac: show(ifb.mac), sandbox: String::new() });
    }
    Ok(node.run(batch)?)
}

/// The node's end of the pod's veth pair, which the result of ADD names.
fn node_end(node: &Socket, attachment: &Attachment, made: &Made) -> Result<Link, Error> {
    let pod = netlink::inside(Path::new(&attachment.netns), Socket::route)??;
    let peer = pod.link(&attachment.interface)?.map_or(0, |link| link.peer);
    let end = if peer == 0 { None } else { node.link_at(peer)? };
    let why = || {
        let text = format!(
            "limit the bandwidth of {}: not a veth link with a peer on the node",
            attachment.interface
        );
        Error::new(Kind::FailedPrecondition, text)
    };
    end.filter(|end| made.links.contains(&end.name)).ok_or_else(why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builtin::plan::{self, Part};

    #[test]
    fn the_ifb_link_has_the_name_that_the_plugin_uses() {
        let list = r#"{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"x"},{"type":"firewall"}]}"#;
        let attachment =
            Attachment { container_id: "a".into(), interface: "eth0".into(), ..Attachment::default() };
        let parts = plan::parts(list, &attachment, &|index| index == 1).unwrap();
        let [_, Part::BuiltIn(plan)] = &parts[..] else { panic!("{parts:?}") };
        // The name that bandwidth 1.1.1 derives for this network and this pod.
        assert_eq!(ifb_name(plan, &attachment), "bwp48b4b2f9995b");
    }
}
