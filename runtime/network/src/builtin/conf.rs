//! Which plugins of a list are ours to run, and what they come to for one pod. Pure.
//! What is not known here, an option, a type, a shape, makes a plugin its program's business: each value is taken out of its
//! object as it is understood, and nothing may be left. A configuration that is wrong is theirs, too: they say so.
//!
//! ```text
//!   bridge, portmap, tuning, firewall ── choose ──> 0, 1, 3 ── parts ──> BuiltIn(Plan), Programs(tuning), BuiltIn(Plan)
//! ```
//! Options: bridge, ptp, host-local, portmap, bandwidth, firewall and loopback at cni.dev, as of 1.1.1; docs/cni.md lists
//! them.

mod chained;
mod options;

use std::net::IpAddr;
use std::path::PathBuf;

use coracle_job::{Attachment, PortMapping};
use coracle_sandbox::netlink::{Network, Rate};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use self::options::Options;
use super::range::Range;
use crate::conf::flat;

/// Versions whose results have `ips`: older lists are rare, and their plugins are, too.
const VERSIONS: [&str; 5] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];
/// Where `host-local` keeps its leases (its document).
pub(crate) const DATA_DIR: &str = "/var/lib/cni/networks";
/// The bridge of a list that names none (its document).
const BRIDGE: &str = "cni0";
/// What does nothing here: `lo` is up.
const LOOPBACK: &str = "loopback";
/// Longest name of a link.
const LINK_BYTES_MAX: usize = 15;
/// Largest MTU that a veth takes.
const MTU_MAX: u64 = 65_535;

/// A run of plugins of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Ours.
    BuiltIn(Box<Plan>),
    /// A list of those alone, as JSON.
    Programs(String),
}

/// How one pod is attached by plugins of ours that follow each other in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Name of the list.
    pub(super) network: String,
    /// Version of the list.
    pub(super) version: String,
    /// `None`: programs have given the pod its link.
    pub(super) base: Option<Base>,
    /// Empty without ports of the node.
    pub(super) ports: Vec<Ports>,
    pub(super) limits: Limits,
    pub(super) firewall: Option<Firewall>,
}

/// The first plugin of a list: what gives the pod its link and its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Base {
    pub(super) main: Main,
    /// Bytes; 0: the kernel's choice.
    pub(super) mtu: u32,
    /// What leaves the network leaves with the node's address.
    pub(super) masquerades: bool,
    pub(super) ipam: Ipam,
    /// Of the result, as the configuration has it.
    pub(super) dns: Value,
}

/// What links the pod to the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Main {
    /// A port of a bridge.
    Bridge(Bridge),
    /// Routes alone.
    PointToPoint,
}

/// Options of `bridge`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bridge {
    pub(super) name: String,
    /// The bridge has the gateway's addresses.
    pub(super) is_gateway: bool,
    /// Other addresses of the bridge give way.
    pub(super) forces_address: bool,
    /// Other addresses of the bridge do no harm. An option of ours alone: the range of the default network changes when
    /// the kubelet says which is the node's, and pods of the earlier one live on.
    pub(super) keeps_addresses: bool,
    /// Links have addresses of IPv6 of their own also where no range is of IPv6. False is an option of ours alone: each pod
    /// asks for routers and tells its groups, and all of that reaches every other pod of the bridge.
    pub(super) has_link_local: bool,
    /// A pod's hardware address follows from its address of IPv4, so that what neighbours remember of an address holds for the
    /// next pod that gets it, too, and no pod has to call out whose it is, to every other of the bridge. An option of ours alone.
    pub(super) has_mac_of_address: bool,
    pub(super) has_hairpin: bool,
    pub(super) is_promiscuous: bool,
}

/// Options of `host-local`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ipam {
    /// One address is taken of each set.
    pub(super) sets: Vec<Vec<Range>>,
    pub(super) routes: Vec<Route>,
    /// The directory of this network's leases.
    pub(super) directory: PathBuf,
}

/// A route of the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Route {
    pub(super) destination: Network,
    /// `None`: the first gateway of its family.
    pub(super) gateway: Option<IpAddr>,
}

/// What one `portmap` of the list does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ports {
    /// Connections from the pod's own network and from localhost come with the node's address.
    pub(super) masquerades: bool,
    /// The bit of the mark for those.
    pub(super) mark: u32,
    pub(super) mappings: Vec<PortMapping>,
}

/// What `firewall` does: what is forwarded from the pod, and what answers it, is accepted by the host's filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Firewall {
    /// Where firewalld runs, it is told instead.
    pub(super) prefers_firewalld: bool,
}

/// What one `bandwidth` of the list does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Limits {
    /// Of what the pod receives.
    pub(super) ingress: Option<Rate>,
    /// Of what the pod sends.
    pub(super) egress: Option<Rate>,
}

impl Plan {
    /// Whether there are rules for it that nobody else finds: in our own tables of nftables.
    pub(super) fn has_rules(&self) -> bool {
        self.base.as_ref().is_some_and(|base| base.masquerades) || !self.ports.is_empty()
    }
}

/// A list as it is read.
#[derive(Deserialize)]
struct List {
    #[serde(rename = "cniVersion")]
    version: String,
    name: String,
    plugins: Vec<Box<RawValue>>,
}

/// Which plugins of a list are ours.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Choice {
    /// Their places in the list.
    pub places: Vec<usize>,
    /// Why others are not, one line for each.
    pub reasons: Vec<String>,
}

/// Chooses for a pod. `filter` says whether the filter of this host is one that we can write. `Err`: the whole list is not
/// ours.
pub(super) fn choose(
    conflist: &str,
    attachment: &Attachment,
    filter: &dyn Fn(Firewall) -> Result<(), String>,
) -> Result<Choice, String> {
    let list = List::read(conflist, attachment)?;
    let (mut choice, mut is_first) = (Choice::default(), true);
    for (index, plugin) in list.plugins.iter().enumerate() {
        let mut plan = list.plan();
        let (kind, mut outcome) = plan.take(plugin, attachment, is_first);
        if let (Ok(()), Some(firewall)) = (&outcome, &plan.firewall) {
            outcome = filter(*firewall);
        }
        match outcome {
            Ok(()) => choice.places.push(index),
            Err(why) => choice.reasons.push(format!("plugin {index}, {kind:?}: {why}")),
        }
        is_first &= kind == LOOPBACK;
    }
    if is_first { Err("no plugin gives a link".to_owned()) } else { Ok(choice) }
}

/// A list in the order of ADD. `is_ours` chooses by place. `Err`: why one that is chosen cannot be ours.
pub(super) fn parts(
    conflist: &str,
    attachment: &Attachment,
    is_ours: &dyn Fn(usize) -> bool,
) -> Result<Vec<Part>, String> {
    let list = List::read(conflist, attachment)?;
    let (mut parts, mut programs, mut is_first) = (Vec::new(), Vec::new(), true);
    for (index, plugin) in list.plugins.iter().enumerate() {
        if !is_ours(index) {
            programs.push(plugin.get());
            is_first = false;
            continue;
        }
        if !programs.is_empty() {
            parts.push(Part::Programs(flat(&list.version, &list.name, &std::mem::take(&mut programs))));
        }
        let mut plan = match parts.pop() {
            Some(Part::BuiltIn(plan)) => plan,
            other => {
                parts.extend(other);
                Box::new(list.plan())
            }
        };
        let (kind, outcome) = plan.take(plugin, attachment, is_first);
        outcome.map_err(|why| format!("plugin {index}, {kind:?}: {why}"))?;
        is_first &= kind == LOOPBACK;
        if !is_first {
            parts.push(Part::BuiltIn(plan));
        }
    }
    if !programs.is_empty() {
        parts.push(Part::Programs(flat(&list.version, &list.name, &programs)));
    }
    Ok(parts)
}

/// The plugins of a list but for those at `places`, as a list; `None`: it is none, or nothing is left.
pub(super) fn without(conflist: &str, places: &[usize]) -> Option<String> {
    let list: List = serde_json::from_str(conflist).ok()?;
    let plugins = list.plugins.iter().enumerate().filter(|(index, _)| !places.contains(index));
    let plugins: Vec<_> = plugins.map(|(_, plugin)| plugin.get()).collect();
    (!plugins.is_empty()).then(|| flat(&list.version, &list.name, &plugins))
}

impl List {
    fn read(conflist: &str, attachment: &Attachment) -> Result<List, String> {
        let list: List = serde_json::from_str(conflist).map_err(|error| error.to_string())?;
        if !VERSIONS.contains(&list.version.as_str()) {
            return Err(format!("cniVersion {:?} is not built in", list.version));
        }
        let is_name =
            |text: &str| !text.is_empty() && !text.contains(['/', '\0']) && text != "." && text != "..";
        if !is_name(&list.name) || !is_name(&attachment.container_id) || !is_link(&attachment.interface) {
            return Err("no name of a network, a pod or a link".to_owned());
        }
        Ok(list)
    }

    /// One that does nothing yet.
    fn plan(&self) -> Plan {
        Plan {
            network: self.name.clone(),
            version: self.version.clone(),
            base: None,
            ports: Vec::new(),
            limits: Limits::default(),
            firewall: None,
        }
    }
}

impl Plan {
    /// Takes one more plugin in: its type, and why it is not ours.
    fn take(
        &mut self,
        plugin: &RawValue,
        attachment: &Attachment,
        is_first: bool,
    ) -> (String, Result<(), String>) {
        let mut kind = String::new();
        let outcome = self.try_take(plugin, attachment, is_first, &mut kind);
        (kind, outcome)
    }

    fn try_take(
        &mut self,
        plugin: &RawValue,
        attachment: &Attachment,
        is_first: bool,
        kind: &mut String,
    ) -> Result<(), String> {
        let value = serde_json::from_str(plugin.get()).map_err(|error| error.to_string())?;
        let mut options = Options::of(value)?;
        *kind = options.text("type")?.unwrap_or_default();
        let arguments = arguments(&mut options, attachment)?;
        // `.conf` files are lists of one, with the keys of a list.
        options.0.remove("cniVersion");
        options.0.remove("name");
        match (kind.as_str(), is_first) {
            (LOOPBACK, _) => options.end(),
            ("bridge" | "ptp", true) => {
                self.base = Some(base(kind, options, &arguments, &self.network)?);
                Ok(())
            }
            ("portmap", false) => chained::portmap(options, &arguments, attachment, self),
            ("bandwidth", false) => chained::bandwidth(options, &arguments, self),
            ("firewall", false) => chained::firewall(options, self),
            _ => Err("not built in, or not in this place".to_owned()),
        }
    }
}

/// The capability arguments of the pod that a plugin declares.
fn arguments(options: &mut Options, attachment: &Attachment) -> Result<Map<String, Value>, String> {
    let declared = options.read("capabilities", |value| value.as_object().cloned())?.unwrap_or_default();
    let mut arguments = Map::new();
    for (name, _) in declared.iter().filter(|(_, wanted)| **wanted == Value::Bool(true)) {
        if name == "portMappings" {
            arguments.insert(name.clone(), Value::Null);
        } else if let Some((_, text)) = attachment.capabilities.iter().find(|(known, _)| known == name) {
            let value = serde_json::from_str(text).map_err(|error| format!("capability {name}: {error}"))?;
            arguments.insert(name.clone(), value);
        }
    }
    Ok(arguments)
}

fn base(
    kind: &str,
    mut options: Options,
    arguments: &Map<String, Value>,
    network: &str,
) -> Result<Base, String> {
    if arguments.contains_key("mac") || arguments.contains_key("ips") {
        return Err("a capability is not built in".to_owned());
    }
    let ipam = options.value("ipam").ok_or("no ipam")?;
    let mut ipam = self::ipam(Options::of(ipam)?, arguments, network)?;
    let main = match kind {
        "bridge" => Main::Bridge(bridge(&mut options, &mut ipam)?),
        _ => Main::PointToPoint,
    };
    let base = Base {
        main,
        mtu: options.number("mtu", MTU_MAX)?.unwrap_or_default() as u32,
        masquerades: options.flag("ipMasq")?,
        ipam,
        dns: options.value("dns").unwrap_or_else(|| Value::Object(Map::new())),
    };
    options.off(&["args"])?;
    options.end()?;
    Ok(base)
}

fn bridge(options: &mut Options, ipam: &mut Ipam) -> Result<Bridge, String> {
    let is_default_gateway = options.flag("isDefaultGateway")?;
    let bridge = Bridge {
        name: options.text("bridge")?.unwrap_or_else(|| BRIDGE.to_owned()),
        is_gateway: options.flag("isGateway")? || is_default_gateway,
        forces_address: options.flag("forceAddress")?,
        keeps_addresses: options.flag("keepAddresses")?,
        has_link_local: options.read("linkLocal", Value::as_bool)?.unwrap_or(true),
        has_mac_of_address: options.flag("macOfAddress")?,
        has_hairpin: options.flag("hairpinMode")?,
        is_promiscuous: options.flag("promiscMode")?,
    };
    if !is_link(&bridge.name) || bridge.has_hairpin && bridge.is_promiscuous {
        return Err("a bridge's name or modes are wrong".to_owned());
    }
    options.off(&["vlan", "vlanTrunk", "preserveDefaultVlan", "macspoofchk", "enabledad"])?;
    options.off(&["disableContainerInterface", "portIsolation"])?;
    if is_default_gateway {
        for set in &ipam.sets {
            let Some(range) = set.first() else { continue };
            let everything = Network { prefix: 0, ..range.subnet }.base();
            if !ipam.routes.iter().any(|route| route.gateway.is_some() && route.destination == everything) {
                ipam.routes.push(Route { destination: everything, gateway: Some(range.gateway) });
            }
        }
        // Of several ranges only the address says whose gateway it is.
        if ipam.sets.iter().any(|set| set.iter().any(|range| range.gateway != set[0].gateway)) {
            return Err("isDefaultGateway with several gateways is not built in".to_owned());
        }
    }
    Ok(bridge)
}

fn ipam(mut options: Options, arguments: &Map<String, Value>, network: &str) -> Result<Ipam, String> {
    if options.text("type")?.as_deref() != Some("host-local") {
        return Err("ipam other than host-local is not built in".to_owned());
    }
    let mut sets = Vec::new();
    if let Some(Value::Array(told)) = arguments.get("ipRanges") {
        sets.extend(told.iter().cloned());
    }
    let more = options.list("ranges")?;
    let keys = ["subnet", "rangeStart", "rangeEnd", "gateway"];
    let single: Map<_, _> =
        keys.iter().filter_map(|key| Some(((*key).to_owned(), options.value(key)?))).collect();
    if single.contains_key("subnet") {
        sets.push(Value::Array(vec![Value::Object(single)]));
    } else if !single.is_empty() {
        return Err("a range without a subnet".to_owned());
    }
    sets.extend(more);
    let sets = sets.into_iter().map(set).collect::<Result<Vec<_>, _>>()?;
    let ranges: Vec<&Range> = sets.iter().flatten().collect();
    for (index, range) in ranges.iter().enumerate() {
        if ranges[..index].iter().any(|other| other.overlaps(range)) {
            return Err(format!("ranges overlap at {}", range.subnet));
        }
    }
    if ranges.is_empty() {
        return Err("no range".to_owned());
    }
    let routes = options.list("routes")?.into_iter().map(route).collect::<Result<Vec<_>, _>>()?;
    let directory =
        PathBuf::from(options.text("dataDir")?.unwrap_or_else(|| DATA_DIR.to_owned())).join(network);
    options.off(&["resolvConf"])?;
    options.end()?;
    Ok(Ipam { sets, routes, directory })
}

/// A set of ranges of one family.
fn set(value: Value) -> Result<Vec<Range>, String> {
    let Value::Array(items) = value else { return Err("a set of ranges is no list".to_owned()) };
    let mut set: Vec<Range> = Vec::new();
    for item in items {
        let mut options = Options::of(item)?;
        let subnet = options.read("subnet", network)?.ok_or("a range without a subnet")?;
        let (start, end) = (options.address("rangeStart")?, options.address("rangeEnd")?);
        let range = Range::new(subnet, start, end, options.address("gateway")?)?;
        options.end()?;
        if set.first().is_some_and(|first| first.start.is_ipv4() != range.start.is_ipv4()) {
            return Err("a set of ranges of both families".to_owned());
        }
        set.push(range);
    }
    if set.is_empty() { Err("a set without ranges".to_owned()) } else { Ok(set) }
}

fn route(value: Value) -> Result<Route, String> {
    let mut options = Options::of(value)?;
    let destination = options.read("dst", network)?.ok_or("a route without dst")?;
    let gateway = options.address("gw")?;
    options.end()?;
    if gateway.is_some_and(|gateway| gateway.is_ipv4() != destination.address.is_ipv4()) {
        return Err(format!("route {destination}: its gateway is of the other family"));
    }
    Ok(Route { destination: destination.base(), gateway })
}

fn network(value: &Value) -> Option<Network> {
    value.as_str()?.parse().ok()
}

/// Whether a text can be a link's name.
fn is_link(name: &str) -> bool {
    let is_letter = |letter: char| letter.is_ascii_graphic() && !matches!(letter, '/' | ':' | '%');
    !matches!(name, "" | "." | "..") && name.len() <= LINK_BYTES_MAX && name.chars().all(is_letter)
}

#[cfg(test)]
mod tests;
