//! The main part of the built-in plugins for one pod (`bridge` or `ptp` with `host-local`): leases, links,
//! addresses and routes, in the order of the plugins.
//!
//! The netlink calls are short and made directly. Removing a link would take tens of milliseconds; DEL
//! therefore only sets the link down, so that its address no longer answers. The kernel removes the veth pair
//! with the pod's network namespace, which is the next step of the pod's teardown. A TCP connection that its
//! peer has not closed keeps the namespace for a minute; a pair that still exists shortly after DEL is
//! removed explicitly. Rules: bridge, ptp 1.1.1. The name of the node's end is derived from the pod's ID:
//! `veth` and 11 digits.

use std::fs;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use coracle_base::error::{Error, Kind, failed};
use coracle_base::{log, reactor};
use coracle_job::{Attachment, CniOutcome, Interface};
use coracle_netlink::{self as netlink, Batch, Link, Network, Route, Scope, Socket, Veth};

use super::lease::{self, Lease, Leases};
use super::neighbours;
use super::plan::{Base, Bridge, Main, Plan};
use super::result::{self, Made};

/// Time limit for a new pair to transmit packets, which usually takes a millisecond.
const RUNNING_LIMIT: Duration = Duration::from_secs(3);
/// Time after which a remaining pair is removed explicitly. The kernel needs 20 to 60 ms to remove a
/// namespace.
const LINGER: Duration = Duration::from_millis(250);
/// Number of digits of the pod's ID in the name of its link; the name then has the maximum length.
const NAME_DIGITS: usize = 11;

type Mac = [u8; 6];

/// Name of the node's end of a pod's pair.
pub(super) fn link_name(attachment: &Attachment) -> String {
    link_of(&attachment.container_id)
}

fn link_of(id: &str) -> String {
    format!("veth{}", id.chars().take(NAME_DIGITS).collect::<String>())
}

/// Whether the node's end of the pair of the pod with this ID exists.
pub(super) fn has_link(node: &Socket, id: &str) -> Result<bool, Error> {
    Ok(node.link(&link_of(id))?.is_some())
}

/// The node's end of a pod's pair, and the bridge to which it belongs.
pub(super) fn links(base: &Base, attachment: &Attachment) -> (String, Option<String>) {
    let bridge = match &base.main {
        Main::Bridge(bridge) => Some(bridge.name.clone()),
        Main::PointToPoint => None,
    };
    (link_name(attachment), bridge)
}

/// Attaches a pod. Its link transmits packets only after [`wait_until_running`].
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

/// Detaches a pod; missing objects are not an error. If ADD's result is recorded, only the lease files of its
/// addresses are read, otherwise all. Returns whether it was the last pod of its network.
pub(super) async fn del(base: &Base, attachment: &Attachment, made: &Made) -> Result<bool, Error> {
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
        Err(error) if lease::is_absent(&error) => return Ok(true),
        Err(error) => return Err(failed("look at", directory, &error)),
        Ok(_) => {}
    }
    let store = Leases::lock(directory).await?;
    let addresses: Vec<_> = made.addresses.iter().map(|network| network.address).collect();
    store.release(&attachment.container_id, &attachment.interface, &addresses)?;
    Ok(store.is_empty())
}

/// Sets a pod's link down, which is found by its name; the kernel removes the link with the pod's namespace.
pub(super) fn remove_link(attachment: &Attachment) -> Result<(), Error> {
    let mut batch = Batch::default();
    batch.set_down(&link_name(attachment));
    Socket::route()?.run(batch)?;
    reactor::spawn(remove_lingering(link_name(attachment))).detach();
    Ok(())
}

/// Removes the node's end of a pair whose namespace outlived its pod.
async fn remove_lingering(name: String) {
    reactor::sleep(LINGER).await;
    if !Path::new("/sys/class/net").join(&name).exists() {
        return;
    }
    let mut batch = Batch::default();
    batch.remove_link(&name);
    if let Err(error) = Socket::route().and_then(|socket| socket.run(batch)) {
        log::warn!("cannot remove the link of a pod, the kernel removes it after its last connection"; link = name, error = error);
    }
}

/// Returns the bridge. A missing bridge is created. The gateways' addresses are added to it.
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
            let why = || Error::new(Kind::Internal, format!("bridge {name}: missing after its creation"));
            node.link(name)?.ok_or_else(why)?
        }
    };
    if link.kind != "bridge" {
        return Err(Error::new(Kind::FailedPrecondition, format!("{name} exists and is not a bridge")));
    }
    if bridge.keeps_addresses {
        own(name, &base.ipam.directory)?;
    }
    if bridge.checks_neighbours {
        neighbours::set_up(name)?;
    }
    // Also of a bridge that another program made, as the plugin does.
    own_routes(name);
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

/// Adds the gateways' addresses to the bridge. A bridge may have only one IPv4 address, and its IPv6 networks
/// must not overlap; other addresses are an error unless the configuration permits their removal.
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
        // Otherwise the bridge takes the address of one of its ports, which changes when ports are added or
        // removed.
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

/// Whether IPv6 is disabled on the pod's link: the network has no IPv6 range and the configuration does not require link-local
/// addresses.
fn is_without_ipv6(base: &Base) -> bool {
    let has_range = base.ipam.sets.iter().flatten().any(|range| range.gateway.is_ipv6());
    !has_range && matches!(&base.main, Main::Bridge(Bridge { has_link_local: false, .. }))
}

/// Whether the node is the router of the pod's link, so that advertisements of other routers are not legitimate: they would come
/// from another pod. A bridge without the node's address may be part of a network with its own router.
fn is_routed_by_node(base: &Base) -> bool {
    match &base.main {
        Main::Bridge(bridge) => bridge.is_gateway,
        Main::PointToPoint => true,
    }
}

/// Beginning of the alias of a bridge of a default network; the directory of its leases follows.
const OWNER: &str = "coracle ";

/// Marks the bridge of a default network as that of this directory of leases. A bridge of another directory with leases is
/// refused: both would lease the same addresses.
fn own(bridge: &str, directory: &Path) -> Result<(), Error> {
    let alias = Path::new("/sys/class/net").join(bridge).join("ifalias");
    let own = format!("{OWNER}{}", directory.display());
    let found = fs::read_to_string(&alias).map_err(|error| failed("read", &alias, &error))?;
    let found = found.trim_end();
    if found == own {
        return Ok(());
    }
    if let Some(other) = found.strip_prefix(OWNER).map(Path::new)
        && lease::is_in_use(other).map_err(|error| error.context(format!("the owner of bridge {bridge}")))?
    {
        let text = format!(
            "bridge {bridge} is in use by the daemon with the leases in {}: set another network.bridge and network.subnets",
            other.display()
        );
        return Err(Error::new(Kind::FailedPrecondition, text));
    }
    fs::write(&alias, own).map_err(|error| failed("write", &alias, &error))
}

/// Disables the acceptance of router advertisements on the link, which could add addresses and routes. A kernel without
/// IPv6 does not have the sysctl.
fn own_routes(link: &str) {
    let _ = set(&format!("net/ipv6/conf/{link}/accept_ra"), "0");
}

/// Adds the addresses and routes of the pod.
fn configure_pod(base: &Base, attachment: &Attachment, leases: &[Lease]) -> Result<(), Error> {
    let interface = attachment.interface.as_str();
    let has_ipv6 = leases.iter().any(|lease| lease.gateway.is_ipv6());
    let pod = netlink::inside(Path::new(&attachment.netns), || {
        if base.main != Main::PointToPoint {
            // The file is missing on a kernel without IPv6.
            let _ = put(&format!("net/ipv6/conf/{interface}/accept_dad"), "0");
            if mac_of_address(base, leases).is_none() {
                // Announces the address to neighbours by gratuitous ARP.
                let _ = put(&format!("net/ipv4/conf/{interface}/arp_notify"), "1");
            }
        }
        for link in ["lo", interface].iter().filter(|_| has_ipv6) {
            set(&format!("net/ipv6/conf/{link}/disable_ipv6"), "0")?;
        }
        if is_routed_by_node(base) {
            own_routes(interface);
            // A redirect can only come from another pod. Without forwarding the kernel obeys it if either of both permits it.
            for link in ["all", interface] {
                let _ = put(&format!("net/ipv4/conf/{link}/accept_redirects"), "0");
                let _ = put(&format!("net/ipv6/conf/{link}/accept_redirects"), "0");
            }
        }
        if is_without_ipv6(base) {
            // No link-local address, and therefore no router solicitations and no multicast groups; and what another pod
            // sends by IPv6 is dropped. The file is missing on a kernel without IPv6.
            let _ = put(&format!("net/ipv6/conf/{interface}/disable_ipv6"), "1");
        }
        Ok::<_, Error>(Socket::route()?)
    })??;
    let why = || Error::new(Kind::Internal, format!("{interface} is not in the pod's namespace"));
    let link = pod.link(interface)?.ok_or_else(why)?.index;
    let mut batch = Batch::default();
    // Before the link is set up, so that the kernel announces the addresses; IPv6 routes require a link that
    // is up.
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

/// Replaces the subnet's route by a route through the gateway, because only the gateway is reachable on the
/// link.
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

/// Configures the node's end of a point-to-point link: the gateways' addresses, and a route to each address
/// of the pod.
fn configure_node(node: &Socket, name: &str, leases: &[Lease]) -> Result<(), Error> {
    let why = || Error::new(Kind::Internal, format!("{name} is missing after its creation"));
    let link = node.link(name)?.ok_or_else(why)?.index;
    let mut batch = Batch::default();
    for lease in leases {
        batch.add_address(link, Network::host(lease.gateway), false);
        let destination = Network::host(lease.address.address);
        batch.add_route(&to(destination, link, None, None, Scope::Host), true);
    }
    Ok(node.run(batch)?)
}

/// Enables packet forwarding on the node for the address families of the pod.
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

/// Sets a sysctl in the current network namespace. If the sysctl already has the value, it is not written,
/// because it may be read-only.
pub(super) fn set(key: &str, value: &str) -> Result<(), Error> {
    set_file(&Path::new("/proc/sys").join(key), value)
}

/// Writes a value to a file of the kernel that has another one.
pub(super) fn set_file(path: &Path, value: &str) -> Result<(), Error> {
    if fs::read_to_string(path).is_ok_and(|present| present.trim() == value) {
        return Ok(());
    }
    fs::write(path, value).map_err(|error| failed("set", path, &error))
}

/// Sets a sysctl without reading it first.
fn put(key: &str, value: &str) -> Result<(), Error> {
    let path = Path::new("/proc/sys").join(key);
    fs::write(&path, value).map_err(|error| failed("set", &path, &error))
}

/// Waits until the pair transmits packets, which is shortly after both ends are up.
pub(super) async fn wait_until_running(attachment: &Attachment) -> Result<(), Error> {
    let (node, name) = (Socket::route()?, link_name(attachment));
    let end = Instant::now() + RUNNING_LIMIT;
    let mut pause = Duration::from_micros(500);
    while !node.link(&name)?.is_some_and(|link| link.is_running) {
        if Instant::now() > end {
            let text = format!("{name} does not transmit packets: its bridge may be down");
            return Err(Error::new(Kind::DeadlineExceeded, text));
        }
        reactor::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(50));
    }
    Ok(())
}

/// The pod's MAC address if the configuration derives it from the IPv4 address: the locally administered
/// prefix 0a:58, which earlier CNI plugins used for this, too, and the address. Otherwise `None`.
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

/// Three random unique MAC addresses: locally administered, unicast.
fn random_macs() -> Result<[Mac; 3], Error> {
    let random = coracle_sandbox::random_id()?;
    let mut macs = [Mac::default(); 3];
    for (mac, bytes) in macs.iter_mut().zip(random.chunks(6)) {
        mac.copy_from_slice(bytes);
        mac[0] = mac[0] & 0xfc | 0x02;
    }
    Ok(macs)
}

/// Formats a MAC address as `xx:xx:xx:xx:xx:xx`.
pub(super) fn show(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
