//! nftables for one pod: masquerading for `bridge` and `ptp`, host ports for `portmap`, and checks of frames, in coracle's tables
//! `ip coracle`, `ip6 coracle` and `bridge coracle`. A pod is some elements of sets, with its ID as their comment; the rules that use the sets are shared
//! by all pods. A connection therefore passes the same number of rules with one pod and with hundreds, and a pod is
//! added and removed at the same cost.
//!
//! ```text
//! postrouting           from an address in masquerade-NET, not to NET, not multicast: masquerade
//!                       with the mark bit, to an address in published-BIT: masquerade
//! ports-prerouting,
//! ports-output          to an address of this host: jump to ports
//! ports                 from NET, to a port in near-NET-BIT (with an address: near-at-NET-BIT): set the mark bit
//!                       from an address to a port in near-BIT (near-at-BIT): set the mark bit
//!                       to an address and port in ports-at, to a port in ports: DNAT to the pod's address and port
//! guard                 not from lo, to or from 127.0.0.0/8: drop
//! neighbours            see [`super::neighbours`]
//! ```
//! NET is the pods' network, BIT the mark. What a network has in common is made when its first pod needs it, and removed
//! after its last pod, if coracle has its leases; the rest is kept with the table. Builds before the sets had rules for each pod, in `prerouting`, `output` and `postrouting`:
//! they stay in effect until their pods are removed. Their chains come first: after a downgrade to such a build a new
//! pod's rules win over elements that it could not remove. Rules: the plugins' documentation at cni.dev; docs/cni.md,
//! "Built-in plugins".

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use coracle_base::error::Error;
use coracle_base::log;
use coracle_job::Attachment;
use coracle_netlink::{Family, Field, Hook, Network, RulePosition, Rules, Set, Socket, Value};

use nix::errno::Errno;

use super::attach::{self, link_name};
use super::connections::{self, Departed};
use super::mapping::target;
use super::neighbours;
use super::plan::{Plan, Ports};
use super::result::Made;

/// Name of coracle's table in all families.
const TABLE: &str = "coracle";
const MULTICAST: [Network; 2] = [
    Network { address: IpAddr::V4(Ipv4Addr::new(224, 0, 0, 0)), prefix: 4 },
    Network { address: IpAddr::V6(Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0)), prefix: 8 },
];
const LOCALHOST: Network = Network { address: IpAddr::V4(Ipv4Addr::LOCALHOST), prefix: 32 };

const POSTROUTING: &str = "postrouting";
const PORTS: &str = "ports";
const PORT: &[Field] = &[Field::Protocol, Field::Port];
const PORT_AT: &[Field] = &[Field::Destination, Field::Protocol, Field::Port];
const TARGET: &[Field] = &[Field::Destination, Field::Port];
/// Maximum number of attempts to add a pod's elements: what they need may have to be made, and elements of others with the
/// same key replaced.
const TRIES: u32 = 4;

/// A netlink socket for nftables, and what is known to be in the tables. The socket is kept open, because closing it
/// takes longer than all other operations.
#[derive(Default)]
pub(crate) struct Netfilter {
    socket: Cell<Option<Socket>>,
    /// The shared parts that this daemon has made, and whether each is known to be complete.
    shared: RefCell<BTreeMap<Part, bool>>,
    /// [`Socket::generation`] after this daemon's last change. With another one, no part is known to be complete: a
    /// firewall that is restarted, for example, removes all rules.
    generation: RefCell<Vec<u8>>,
    /// Whether the lack of nftables for bridges was logged.
    has_said_without_bridges: Cell<bool>,
    departed: Departed,
}

/// A shared part: its table's family, and its owner's name.
type Part = (Family, String);

impl Netfilter {
    /// Runs `work` with the socket. After an error the socket is replaced, because unread replies may be in
    /// its buffer.
    pub(super) fn with(&self, work: impl FnOnce(&Socket) -> Result<(), Error>) -> Result<(), Error> {
        // The networks of the simulation are plugins; nftables would be those of the machine that runs it.
        #[cfg(feature = "simulation")]
        if coracle_sandbox::simulation::node().is_some() {
            return Ok(());
        }
        let socket = self.socket.take().map_or_else(Socket::netfilter, Ok)?;
        self.notice_changes(&socket)?;
        work(&socket)?;
        *self.generation.borrow_mut() = socket.generation()?;
        self.socket.set(Some(socket));
        Ok(())
    }

    /// Looks whether another program has changed nftables since this daemon did.
    fn notice_changes(&self, socket: &Socket) -> Result<(), Error> {
        if socket.generation()? != *self.generation.borrow() {
            self.shared.borrow_mut().values_mut().for_each(|is_complete| *is_complete = false);
        }
        Ok(())
    }

    /// Makes a shared part unless this daemon has made it and it is complete. Existing rules are replaced, which also
    /// repairs those that another program removed.
    fn ensure(&self, socket: &Socket, family: Family, part: &Shared) -> Result<(), coracle_netlink::Error> {
        let key = (family, part.owner());
        let known = self.shared.borrow().get(&key).copied();
        let is_complete = match known {
            Some(true) => return Ok(()),
            Some(false) => socket.count_rules(TABLE, &key.1, family)? == part.rules_count(),
            None => false,
        };
        if !is_complete {
            socket.replace_rules(TABLE, &key.1, family, &|rules| part.write(rules, family))?;
        }
        self.shared.borrow_mut().insert(key, true);
        Ok(())
    }
}

/// Sets and rules that pods share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shared {
    /// Masquerading of a network's pods.
    Masquerading(Network),
    /// Redirection of host ports.
    Ports,
    /// Masquerading of connections to host ports that begin at single addresses, with this mark.
    Marks(u32),
    /// Masquerading of connections to host ports that begin in a network, with this mark.
    MarksFrom(Network, u32),
    /// Checks of the ARP and neighbour-discovery packets of pods on a bridge.
    Neighbours,
}

/// An element of a pod: set, key and value.
pub(super) type Element = (Set, Vec<Value>, Vec<Value>);

pub(super) fn set(name: String, key: &'static [Field]) -> Set {
    Set { name, key, value: &[] }
}

/// The network as a part of a name that nft can read: without colons and slashes.
fn in_name(network: Network) -> String {
    network.base().to_string().replace(':', "_").replace('/', "-")
}

/// The beginning of the names of the sets of masqueraded addresses; the network follows.
const MASQUERADED: &str = "masquerade-";

fn masqueraded(network: Network) -> Set {
    set(format!("{MASQUERADED}{}", in_name(network)), &[Field::Source])
}

/// The maps of host ports of all addresses and of one address.
fn ports() -> [Set; 2] {
    [("ports", PORT), ("ports-at", PORT_AT)].map(|(name, key)| Set { name: name.into(), key, value: TARGET })
}

fn near(mark: u32) -> [Set; 2] {
    const KEYS: [&[Field]; 2] = [
        &[Field::Source, Field::Protocol, Field::Port],
        &[Field::Source, Field::Destination, Field::Protocol, Field::Port],
    ];
    [set(format!("near-{mark:#x}"), KEYS[0]), set(format!("near-at-{mark:#x}"), KEYS[1])]
}

fn near_from(network: Network, mark: u32) -> [Set; 2] {
    let name = in_name(network);
    [set(format!("near-{name}-{mark:#x}"), PORT), set(format!("near-at-{name}-{mark:#x}"), PORT_AT)]
}

fn published(mark: u32) -> Set {
    set(format!("published-{mark:#x}"), &[Field::Destination])
}

/// The beginning of the owner's name of [`Shared::MarksFrom`]; the mark follows.
fn ports_owner(network: Network) -> String {
    format!("host ports, {}, mark ", network.base())
}

impl Shared {
    /// The comment of the rules, by which they are found.
    fn owner(self) -> String {
        match self {
            Self::Masquerading(network) => format!("pods of {}", network.base()),
            Self::Ports => "host ports".to_owned(),
            Self::Marks(mark) => format!("host ports, mark {mark:#x}"),
            Self::MarksFrom(network, mark) => format!("{}{mark:#x}", ports_owner(network)),
            Self::Neighbours => neighbours::OWNER.to_owned(),
        }
    }

    /// Number of rules that [`Shared::write`] adds.
    fn rules_count(self) -> usize {
        match self {
            Self::Masquerading(_) => 1,
            Self::Ports => 4,
            Self::Marks(_) => 3,
            Self::MarksFrom(..) => 2,
            Self::Neighbours => neighbours::RULES_COUNT,
        }
    }

    fn write(self, rules: &mut Rules<'_>, family: Family) {
        match self {
            Self::Masquerading(network) => {
                let pods = masqueraded(network);
                rules.set(&pods);
                rules.base_chain(POSTROUTING, Hook::Postrouting, 0);
                rules.rule(POSTROUTING, RulePosition::Last, &|rule| {
                    rule.is_in(&pods);
                    rule.not_to(network.base());
                    rule.not_to(MULTICAST[usize::from(family == Family::Ipv6)]);
                    rule.masquerade();
                });
            }
            Self::Ports => {
                rules.chain(PORTS);
                for (name, hook) in [("ports-prerouting", Hook::Prerouting), ("ports-output", Hook::Output)] {
                    // After the rules of single pods, see above.
                    rules.base_chain(name, hook, 1);
                    rules.rule(name, RulePosition::Last, &|rule| {
                        rule.to_this_host();
                        rule.jump(PORTS);
                    });
                }
                let [any, at] = ports();
                for map in [at, any] {
                    rules.set(&map);
                    rules.rule(PORTS, RulePosition::Last, &|rule| rule.redirect_by(&map));
                }
            }
            Self::Marks(mark) => {
                rules.chain(PORTS);
                for near in near(mark) {
                    rules.set(&near);
                    rules.rule(PORTS, RulePosition::First, &|rule| {
                        rule.is_in(&near);
                        rule.set_mark(mark);
                    });
                }
                let published = published(mark);
                rules.set(&published);
                rules.base_chain(POSTROUTING, Hook::Postrouting, 0);
                rules.rule(POSTROUTING, RulePosition::Last, &|rule| {
                    rule.is_in(&published);
                    rule.marked(mark);
                    rule.masquerade();
                });
            }
            Self::MarksFrom(network, mark) => {
                rules.chain(PORTS);
                for near in near_from(network, mark) {
                    rules.set(&near);
                    rules.rule(PORTS, RulePosition::First, &|rule| {
                        rule.from(network);
                        rule.is_in(&near);
                        rule.set_mark(mark);
                    });
                }
            }
            Self::Neighbours => neighbours::write(rules),
        }
    }
}

/// The elements of a pod in the table of one address family, and the shared parts that they need.
#[derive(Debug, Default, PartialEq, Eq)]
struct Wanted {
    shared: Vec<Shared>,
    elements: Vec<Element>,
    guards_loopback: bool,
}

impl Wanted {
    /// `None` if the pod has nothing in the table of this family.
    fn new(plan: &Plan, attachment: &Attachment, made: &Made, family: Family) -> Option<Self> {
        match family {
            Family::Ipv4 | Family::Ipv6 => Self::translated(plan, &made.addresses, family),
            Family::Bridge => Self::checked(plan, attachment, made),
        }
    }

    fn checked(plan: &Plan, attachment: &Attachment, made: &Made) -> Option<Self> {
        plan.base.as_ref().filter(|base| base.checks_neighbours())?;
        let elements = neighbours::elements(&link_name(attachment), made.mac?, &made.addresses);
        Some(Self { shared: vec![Shared::Neighbours], elements, guards_loopback: false })
    }

    fn translated(plan: &Plan, own: &[Network], family: Family) -> Option<Self> {
        let own: Vec<_> = own.iter().filter(|own| Family::of(own.address) == family).collect();
        let first = **own.first()?;
        let mut wanted = Self::default();
        if plan.base.as_ref().is_some_and(|base| base.masquerades) {
            for own in own {
                wanted.needs(Shared::Masquerading(*own));
                wanted.has(masqueraded(*own), vec![Value::Address(own.address)], Vec::new());
            }
        }
        for ports in &plan.ports {
            wanted.publish(ports, first);
        }
        wanted.guards_loopback = family == Family::Ipv4 && plan.ports.iter().any(|ports| ports.masquerades);
        Some(wanted)
    }

    fn needs(&mut self, shared: Shared) {
        if !self.shared.contains(&shared) {
            self.shared.push(shared);
        }
    }

    /// Adds an element; the first one with a key stays.
    fn has(&mut self, set: Set, key: Vec<Value>, value: Vec<Value>) {
        if !self.elements.iter().any(|(other, present, _)| other.name == set.name && *present == key) {
            self.elements.push((set, key, value));
        }
    }

    /// Adds the host ports that lead to `own`.
    fn publish(&mut self, ports: &Ports, own: Network) {
        for mapping in &ports.mappings {
            let Some((host, protocol)) = target(mapping, own) else { continue };
            let port = [Value::Protocol(protocol), Value::Port(mapping.host_port)];
            let at: Vec<_> = host.map(Value::Address).into_iter().chain(port).collect();
            let choose = |[any, at]: [Set; 2]| if host.is_some() { at } else { any };
            let to = vec![Value::Address(own.address), Value::Port(mapping.container_port)];
            self.needs(Shared::Ports);
            self.has(choose(self::ports()), at.clone(), to);
            if !ports.masquerades {
                continue;
            }
            self.needs(Shared::Marks(ports.mark));
            self.has(published(ports.mark), vec![Value::Address(own.address)], Vec::new());
            // A network of one address, as of a routed network's pods, would make sets for each pod.
            let is_single = own == Network::host(own.address);
            let localhost = own.address.is_ipv4().then_some(LOCALHOST.address);
            for source in [localhost, is_single.then_some(own.address)].into_iter().flatten() {
                let key = [Value::Address(source)].into_iter().chain(at.iter().cloned());
                self.has(choose(near(ports.mark)), key.collect(), Vec::new());
            }
            if !is_single {
                self.needs(Shared::MarksFrom(own.base(), ports.mark));
                self.has(choose(near_from(own, ports.mark)), at, Vec::new());
            }
        }
    }
}

/// Adds the rules of a pod if it needs any.
pub(super) fn add(
    netfilter: &Netfilter,
    plan: &Plan,
    attachment: &Attachment,
    made: &Made,
) -> Result<(), Error> {
    match plan.has_rules() {
        true => netfilter.with(|socket| add_by(netfilter, socket, plan, attachment, made)),
        false => Ok(()),
    }
}

/// Removes the rules of a pod.
pub(super) fn remove(
    netfilter: &Netfilter,
    plan: &Plan,
    attachment: &Attachment,
    made: &Made,
) -> Result<(), Error> {
    match plan.has_rules() {
        true => netfilter.with(|socket| {
            remove_by(socket, plan, attachment, made)?;
            if plan.base.as_ref().is_some_and(|base| base.masquerades) {
                netfilter.departed.note(socket, &made.addresses);
            }
            Ok(())
        }),
        false => Ok(()),
    }
}

/// Removes the sets and rules that pods of the networks share, after the last pod.
pub(super) fn forget_networks(netfilter: &Netfilter, plan: &Plan, networks: &[Network]) -> Result<(), Error> {
    if !plan.has_rules() {
        return Ok(());
    }
    for network in networks {
        let family = Family::of(network.address);
        let (pods, ports) = (Shared::Masquerading(*network).owner(), ports_owner(*network));
        let is_owner = |owner: &str| owner == pods || owner.starts_with(&ports);
        let near = near_from(*network, 0).map(|set| set.name.trim_end_matches('0').to_owned());
        let masqueraded = masqueraded(*network).name;
        let is_set = |name: &str| name == masqueraded || near.iter().any(|near| name.starts_with(near));
        netfilter.shared.borrow_mut().retain(|(of, owner), _| *of != family || !is_owner(owner));
        netfilter.with(|socket| Ok(socket.remove_unused(TABLE, family, &is_owner, &is_set).map(drop)?))?;
    }
    Ok(())
}

/// Removes the rules of a pod whose record is lost.
pub(super) fn remove_all(netfilter: &Netfilter, id: &str) -> Result<(), Error> {
    netfilter.with(|socket| Ok(socket.remove_rules(TABLE, id)?))
}

/// IDs of the pods that have elements of the built-in `bridge` or `ptp`, but not their link, which these name by the ID. They are
/// gone, or will be detached by their daemon: nothing can be sent to them. Pods of a main plugin that is a program are not among them.
pub(crate) fn owners_without_link(netfilter: &Netfilter) -> Result<BTreeSet<String>, Error> {
    let is_set = |name: &str| name.starts_with(MASQUERADED) || name == neighbours::LINKS;
    let mut found = BTreeSet::new();
    netfilter.with(|socket| {
        found = socket.owners_in(TABLE, &is_set)?;
        Ok(())
    })?;
    if found.is_empty() {
        return Ok(found);
    }
    let (node, mut without) = (Socket::route()?, BTreeSet::new());
    for id in found {
        if !attach::has_link(&node, &id)? {
            without.insert(id);
        }
    }
    Ok(without)
}

fn add_by(
    netfilter: &Netfilter,
    socket: &Socket,
    plan: &Plan,
    attachment: &Attachment,
    made: &Made,
) -> Result<(), Error> {
    for family in Family::ALL {
        let Some(wanted) = Wanted::new(plan, attachment, made, family) else { continue };
        match add_of_family(netfilter, socket, &attachment.container_id, family, &wanted) {
            // A kernel without CONFIG_NF_TABLES_BRIDGE, or without the module nft_meta_bridge where there is one.
            Err(error)
                if family == Family::Bridge && matches!(error.errno, Errno::EOPNOTSUPP | Errno::ENOENT) =>
            {
                if !netfilter.has_said_without_bridges.replace(true) {
                    log::warn!(
                        "the kernel has no nftables for bridges, so pods can spoof ARP and IPv6 neighbour discovery: see network.check_neighbours"
                    );
                }
            }
            outcome => outcome?,
        }
        if let Some(first) = made.addresses.iter().find(|own| Family::of(own.address) == family) {
            connections::forget_datagrams(socket, plan, *first);
        }
    }
    netfilter.departed.forget_before_reuse(socket, &made.addresses);
    Ok(())
}

fn add_of_family(
    netfilter: &Netfilter,
    socket: &Socket,
    id: &str,
    family: Family,
    wanted: &Wanted,
) -> Result<(), coracle_netlink::Error> {
    let mut replaced: Vec<Element> = Vec::new();
    for attempt in 1.. {
        let shared = wanted.shared.iter().try_for_each(|shared| netfilter.ensure(socket, family, shared));
        let mut rules = Rules::new(TABLE, id, family);
        // Before `chained::route_localhost`, which allows the traffic that this rule drops.
        if wanted.guards_loopback {
            rules.guard_loopback();
        }
        for (set, key, _) in &replaced {
            rules.remove_element(set, key);
        }
        for (set, key, value) in &wanted.elements {
            rules.element(set, key, value);
        }
        match shared.and_then(|()| rules.commit(socket)) {
            // Another program removed the table, or an element that was to be replaced.
            Err(error) if error.errno == Errno::ENOENT && attempt < TRIES => {
                netfilter.shared.borrow_mut().clear();
                replaced = present(socket, family, wanted)?;
            }
            // Left by a pod that a build without sets has removed, or two pods want the same port: the last one has it.
            Err(error) if error.errno == Errno::EEXIST && attempt < TRIES => {
                replaced = present(socket, family, wanted)?;
            }
            outcome => return outcome,
        }
    }
    Ok(())
}

/// The elements of a pod whose keys are in the sets already, as elements of any owner.
fn present(socket: &Socket, family: Family, wanted: &Wanted) -> Result<Vec<Element>, coracle_netlink::Error> {
    let mut found = Vec::new();
    for element in &wanted.elements {
        if socket.owner_of(TABLE, family, &element.0, &element.1)?.is_some() {
            found.push(element.clone());
        }
    }
    Ok(found)
}

/// Removes the elements that the plan and the addresses name. If one is missing or belongs to another pod, the pod was
/// attached by an earlier build, or not completely, and everything with its ID is searched.
fn remove_by(socket: &Socket, plan: &Plan, attachment: &Attachment, made: &Made) -> Result<(), Error> {
    let id = attachment.container_id.as_str();
    let mut is_complete = !made.addresses.is_empty();
    for family in Family::ALL {
        let Some(wanted) = Wanted::new(plan, attachment, made, family) else { continue };
        let mut rules = Rules::new(TABLE, id, family);
        let mut count = 0;
        for (set, key, _) in &wanted.elements {
            if socket.owner_of(TABLE, family, set, key)?.as_deref() == Some(id) {
                rules.remove_element(set, key);
                count += 1;
            }
        }
        is_complete &= count == wanted.elements.len();
        if count > 0 {
            match rules.commit(socket) {
                // Another program removed one meanwhile.
                Err(error) if error.errno == Errno::ENOENT => is_complete = false,
                outcome => outcome?,
            }
        }
    }
    if !is_complete {
        socket.remove_rules(TABLE, id)?;
    }
    connections::forget_peers(socket, plan, &made.addresses);
    Ok(())
}
