//! What the first plugin of a list does for one pod: leases, links, addresses and routes, in the plugins' order.
//!
//! The calls to the kernel are short and made in line. Removing a link would wait for tens of milliseconds: it is only
//! switched off here, so that its address answers nobody; the kernel removes the pair when the pod's namespace ends,
//! which is the next step of a pod's way down. A connection that a peer has not closed keeps the namespace for a minute: a
//! pair that is still there a moment later is removed the slow way.
//! Rules: bridge, ptp 1.1.1; what is derived from the pod's id is the name of the node's end, `veth` and 11 digits.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use coracle_base::error::{Error, Kind, failed};
use coracle_base::{log, reactor};
use coracle_job::{Attachment, CniOutcome, Interface};
use coracle_sandbox::netlink::{self, Batch, Link, Network, Route, Scope, Socket, Veth};

use super::conf::{Base, Bridge, Main, Plan};
use super::lease::{Lease, Leases};
use super::result::{self, Made};

/// How long the kernel may take to let packets through a new pair: it does so in a millisecond.
const RUNNING_LIMIT: Duration = Duration::from_secs(3);
/// What the kernel gets to take a namespace apart: 20 to 60 ms.
const LINGER: Duration = Duration::from_millis(250);
/// Digits of the pod's id in its link's name, with which the longest name is reached.
const NAME_DIGITS: usize = 11;

type Mac = [u8; 6];

/// The node's end of a pod's pair.
fn link_name(attachment: &Attachment) -> String {
    format!("veth{}", attachment.container_id.chars().take(NAME_DIGITS).collect::<String>())
}

/// Attaches a pod. Its link carries packets only [`wait_until_running`] later.
pub(super) async fn add(plan: &Plan, base: &Base, attachment: &Attachment) -> Result<CniOutcome, Error> {
    let leases = {
        let store = Leases::lock(&base.ipam.directory).await?;
        store.take(&attachment.container_id, &attachment.interface, &base.ipam.sets)?
    };
    let name = link_name(attachment);
    let mut macs = random_macs()?;
    if let Some(mac) = mac_of_address(base, &leases) {
        macs[1] = mac;
    }
    let node = Socket::route()?;
    let mut interfaces = Vec::new();
    let bridge = match &base.main {
        Main::Bridge(bridge) => {
            let link = make_bridge(&node, base, bridge, macs[2], &leases)?;
            interfaces.push((bridge.name.clone(), link.mac, ""));
            Some(link.index)
        }
        Main::PointToPoint => None,
    };
    make_pair(&node, base, attachment, &name, macs, bridge)?;
    configure_pod(base, attachment, &leases)?;
    if bridge.is_none() {
        configure_node(&node, &name, &leases)?;
    }
    forward(base, &leases)?;
    interfaces.push((name, macs[0], ""));
    interfaces.push((attachment.interface.clone(), macs[1], &attachment.netns));
    let interfaces = interfaces.into_iter().map(|(name, mac, sandbox)| Interface {
        name,
        mac: show(mac),
        sandbox: sandbox.to_owned(),
    });
    Ok(result::outcome(&plan.version, base, interfaces.collect(), &leases))
}

/// Detaches a pod; what is gone is done. With its result only the pod's own files are looked at.
pub(super) async fn del(base: &Base, attachment: &Attachment, made: &Made) -> Result<(), Error> {
    let mut batch = Batch::default();
    batch.set_down(&link_name(attachment));
    let is_bridge = |link: &str| matches!(&base.main, Main::Bridge(bridge) if bridge.name == link);
    for link in made.links.iter().filter(|link| link.starts_with("veth") && !is_bridge(link)) {
        batch.set_down(link);
    }
    Socket::route()?.run(batch)?;
    reactor::spawn(remove_lingering(link_name(attachment))).detach();
    let directory = &base.ipam.directory;
    match fs::metadata(directory) {
        Err(error) if is_absent(&error) => return Ok(()),
        Err(error) => return Err(failed("look at", directory, &error)),
        Ok(_) => {}
    }
    let store = Leases::lock(directory).await?;
    let addresses: Vec<_> = made.addresses.iter().map(|network| network.address).collect();
    store.release(&attachment.container_id, &attachment.interface, &addresses)
}

/// Any other error says nothing about whether there are leases.
fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Removes the node's end of a pair whose namespace did not end with its pod.
async fn remove_lingering(name: String) {
    reactor::sleep(LINGER).await;
    if !Path::new("/sys/class/net").join(&name).exists() {
        return;
    }
    let mut batch = Batch::default();
    batch.remove_link(&name);
    if let Err(error) = Socket::route().and_then(|socket| socket.run(batch)) {
        log::warn!("a pod's link stays until its last connection ends"; link = name, error = error);
    }
}

/// The bridge with its addresses, made where it is not there.
fn make_bridge(
    node: &Socket,
    base: &Base,
    bridge: &Bridge,
    mac: Mac,
    leases: &[Lease],
) -> Result<Link, Error> {
    let name = bridge.name.as_str();
    let link = match node.link(name)? {
        Some(link) => link,
        None => {
            let mut batch = Batch::default();
            let mac = bridge.is_gateway.then_some(mac);
            batch.add_bridge(&netlink::Bridge { name, mtu: base.mtu, mac });
            node.run(batch)?;
            own_routes(name);
            let why = || Error::new(Kind::Internal, format!("bridge {name}: gone as soon as it was made"));
            node.link(name)?.ok_or_else(why)?
        }
    };
    if link.kind != "bridge" {
        return Err(Error::new(Kind::FailedPrecondition, format!("{name} is there and is no bridge")));
    }
    let mut batch = Batch::default();
    if !link.is_up {
        batch.set_up(link.index, name);
    }
    if bridge.is_promiscuous {
        batch.set_promiscuous(link.index, name);
    }
    if bridge.is_gateway {
        give_addresses(node, &mut batch, bridge, &link, leases)?;
    }
    node.run(batch)?;
    Ok(link)
}

/// The gateways' addresses for the bridge. IPv4 has one only, networks of IPv6 must not overlap, unless others may be
/// taken away.
fn give_addresses(
    node: &Socket,
    batch: &mut Batch,
    bridge: &Bridge,
    link: &Link,
    leases: &[Lease],
) -> Result<(), Error> {
    let mut present = node.addresses(link.index)?;
    for lease in leases {
        let gateway = Network { address: lease.gateway, prefix: lease.address.prefix };
        if present.contains(&gateway) {
            continue;
        }
        let is_in_the_way = |other: &Network| {
            !bridge.keeps_addresses
                && other.address.is_ipv4() == gateway.address.is_ipv4()
                && (gateway.address.is_ipv4()
                    || other.contains(gateway.address)
                    || gateway.contains(other.address))
        };
        if !bridge.forces_address && present.iter().any(is_in_the_way) {
            let text = format!("{:?} already has an IP address different from {gateway}", bridge.name);
            return Err(Error::new(Kind::FailedPrecondition, text));
        }
        for other in present.extract_if(.., |other| is_in_the_way(other)) {
            batch.remove_address(link.index, other);
        }
        batch.add_address(link.index, gateway, true);
        // Otherwise it would take over the address of a port, and change it as ports come and go.
        batch.set_mac(link.index, &bridge.name, link.mac);
        present.push(gateway);
    }
    Ok(())
}

fn make_pair(
    node: &Socket,
    base: &Base,
    attachment: &Attachment,
    name: &str,
    macs: [Mac; 3],
    bridge: Option<u32>,
) -> Result<(), Error> {
    let path = Path::new(&attachment.netns);
    let namespace = fs::File::open(path).map_err(|error| failed("open", path, &error))?;
    let mut batch = Batch::default();
    batch.add_veth(&Veth {
        name,
        mac: macs[0],
        bridge,
        peer_name: &attachment.interface,
        peer_mac: macs[1],
        peer_namespace: namespace.as_raw_fd(),
        mtu: base.mtu,
    });
    if let Main::Bridge(Bridge { has_hairpin: true, .. }) = &base.main {
        batch.set_hairpin(name, true);
    }
    node.run(batch)?;
    own_routes(name);
    Ok(())
}

/// Whether a pod's link is to have no address of IPv6: nothing of it is in the network, and the configuration has no need of it either.
fn is_without_ipv6(base: &Base) -> bool {
    let has_range = base.ipam.sets.iter().flatten().any(|range| range.gateway.is_ipv6());
    !has_range && matches!(&base.main, Main::Bridge(Bridge { has_link_local: false, .. }))
}

/// Nobody else on the link says where packets go. A kernel without IPv6 has no such file.
fn own_routes(link: &str) {
    let _ = put(&format!("net/ipv6/conf/{link}/accept_ra"), "0");
}

/// Addresses and routes of the pod.
fn configure_pod(base: &Base, attachment: &Attachment, leases: &[Lease]) -> Result<(), Error> {
    let interface = attachment.interface.as_str();
    let has_ipv6 = leases.iter().any(|lease| lease.gateway.is_ipv6());
    let pod = netlink::inside(Path::new(&attachment.netns), || {
        if base.main != Main::PointToPoint {
            // Not there without IPv6.
            let _ = put(&format!("net/ipv6/conf/{interface}/accept_dad"), "0");
            if mac_of_address(base, leases).is_none() {
                // Neighbours hear whose the address is now.
                let _ = put(&format!("net/ipv4/conf/{interface}/arp_notify"), "1");
            }
        }
        for link in ["lo", interface].iter().filter(|_| has_ipv6) {
            set(&format!("net/ipv6/conf/{link}/disable_ipv6"), "0")?;
        }
        if is_without_ipv6(base) {
            // It makes no address for itself (IN6_ADDR_GEN_MODE_NONE, Linux 4.11), so it asks nobody and joins no group.
            let _ = put(&format!("net/ipv6/conf/{interface}/addr_gen_mode"), "1");
        }
        Ok::<_, Error>(Socket::route()?)
    })??;
    let why = || Error::new(Kind::Internal, format!("{interface} is not in the pod's namespace"));
    let link = pod.link(interface)?.ok_or_else(why)?.index;
    let mut batch = Batch::default();
    // Before the link is on, so that neighbours hear of it; an address of IPv6 has its route only on one that is.
    for lease in leases.iter().filter(|lease| lease.gateway.is_ipv4()) {
        batch.add_address(link, lease.address, false);
    }
    batch.set_up(link, interface);
    for lease in leases.iter().filter(|lease| lease.gateway.is_ipv6()) {
        batch.add_address(link, lease.address, false);
    }
    for route in &base.ipam.routes {
        let is_its = |lease: &&Lease| lease.gateway.is_ipv4() == route.destination.address.is_ipv4();
        let gateway = route.gateway.or_else(|| leases.iter().find(is_its).map(|lease| lease.gateway));
        batch.add_route(&to(route.destination, link, gateway, None, Scope::Universe), true);
    }
    if base.main == Main::PointToPoint {
        for lease in leases {
            by_gateway_alone(&mut batch, link, lease);
        }
    }
    Ok(pod.run(batch)?)
}

/// What is in the subnet is not on the link: everything goes by the gateway, which is.
fn by_gateway_alone(batch: &mut Batch, link: u32, lease: &Lease) {
    let (subnet, own) = (lease.address.base(), Some(lease.address.address));
    batch.remove_route(&to(subnet, link, None, None, Scope::Any));
    batch.add_route(&to(Network::host(lease.gateway), link, None, own, Scope::Link), true);
    batch.add_route(&to(subnet, link, Some(lease.gateway), own, Scope::Universe), true);
}

fn to(
    destination: Network,
    link: u32,
    gateway: Option<IpAddr>,
    source: Option<IpAddr>,
    scope: Scope,
) -> Route {
    Route { destination, link, gateway, source, scope }
}

/// The node's side of a point-to-point link: the gateways' addresses, and a route to each of the pod's.
fn configure_node(node: &Socket, name: &str, leases: &[Lease]) -> Result<(), Error> {
    let why = || Error::new(Kind::Internal, format!("{name} is gone as soon as it was made"));
    let link = node.link(name)?.ok_or_else(why)?.index;
    let mut batch = Batch::default();
    for lease in leases {
        batch.add_address(link, Network::host(lease.gateway), false);
        let destination = Network::host(lease.address.address);
        batch.add_route(&to(destination, link, None, None, Scope::Host), true);
    }
    Ok(node.run(batch)?)
}

/// Has the node forward packets of the pod's families.
fn forward(base: &Base, leases: &[Lease]) -> Result<(), Error> {
    if matches!(&base.main, Main::Bridge(bridge) if !bridge.is_gateway) {
        return Ok(());
    }
    if leases.iter().any(|lease| lease.gateway.is_ipv4()) {
        set("net/ipv4/ip_forward", "1")?;
    }
    if leases.iter().any(|lease| lease.gateway.is_ipv6()) {
        set("net/ipv6/conf/all/forwarding", "1")?;
    }
    Ok(())
}

/// Sets a sysctl of the namespace we are in. One that has the value already is not written: it may be read-only.
pub(super) fn set(key: &str, value: &str) -> Result<(), Error> {
    let path = Path::new("/proc/sys").join(key);
    if fs::read_to_string(&path).is_ok_and(|present| present.trim() == value) {
        return Ok(());
    }
    put(key, value)
}

/// Sets a sysctl that is as the kernel made it.
fn put(key: &str, value: &str) -> Result<(), Error> {
    let path = Path::new("/proc/sys").join(key);
    fs::write(&path, value).map_err(|error| failed("set", &path, &error))
}

/// The pair carries packets a moment after both ends are on.
pub(super) async fn wait_until_running(attachment: &Attachment) -> Result<(), Error> {
    let (node, name) = (Socket::route()?, link_name(attachment));
    let end = Instant::now() + RUNNING_LIMIT;
    let mut pause = Duration::from_micros(500);
    while !node.link(&name)?.is_some_and(|link| link.is_running) {
        if Instant::now() > end {
            let text = format!("{name} carries no packets: is its bridge switched off?");
            return Err(Error::new(Kind::DeadlineExceeded, text));
        }
        reactor::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(50));
    }
    Ok(())
}

/// The pod's, where its configuration wants it to follow from its address: 0a:58 is locally administered, and what CNI's own
/// plugins began such addresses with.
fn mac_of_address(base: &Base, leases: &[Lease]) -> Option<Mac> {
    let Main::Bridge(Bridge { has_mac_of_address: true, .. }) = &base.main else { return None };
    leases.iter().find_map(|lease| match lease.address.address {
        IpAddr::V4(address) => {
            let [a, b, c, d] = address.octets();
            Some([0x0a, 0x58, a, b, c, d])
        }
        IpAddr::V6(_) => None,
    })
}

/// Three addresses that nobody else has: locally administered, of one station.
fn random_macs() -> Result<[Mac; 3], Error> {
    let random = coracle_sandbox::random_id()?;
    let mut macs = [Mac::default(); 3];
    for (mac, bytes) in macs.iter_mut().zip(random.chunks(6)) {
        mac.copy_from_slice(bytes);
        mac[0] = mac[0] & 0xfc | 0x02;
    }
    Ok(macs)
}

/// As people write it.
pub(super) fn show(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
