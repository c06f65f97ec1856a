//! Decides which plugins of a list are built in, and computes the plan for one pod. The module does no I/O.
//! Each supported option is removed from its JSON object as it is parsed, and no option may remain: a plugin
//! with an unknown option, type or value is run as a program. The same applies to an invalid configuration,
//! so that the program reports the error.
//!
//! ```text
//! bridge, portmap, tuning, firewall ── choose ──> 0, 1, 3 ── parts ──> BuiltIn(Plan), Programs(tuning),
//! BuiltIn(Plan)
//! ```
//! Options: bridge, ptp, host-local, portmap, bandwidth, firewall and loopback at cni.dev, version 1.1.1;
//! docs/cni.md lists them.

mod chained_options;
mod options;

use std::net::IpAddr;
use std::path::PathBuf;

use coracle_job::{Attachment, PortMapping};
use coracle_netlink::{Network, Rate};
use coracle_sandbox::collect::ordered;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use self::options::Options;
use super::range::Range;
use crate::conf::flat;

/// CNI versions whose results have the field `ips`. Lists of older versions are rare and run as programs.
const VERSIONS: [&str; 5] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];
/// Default directory of the leases (host-local's documentation).
pub(crate) const DATA_DIR: &str = "/var/lib/cni/networks";
/// Default name of the bridge (bridge's documentation).
const BRIDGE: &str = "cni0";
/// Type of a plugin that needs no action, because the daemon sets `lo` up in every pod.
const LOOPBACK: &str = "loopback";
/// Maximum length of a link's name in bytes.
const LINK_BYTES_MAX: usize = 15;
/// Maximum MTU of a veth link in bytes.
const MTU_MAX: u64 = 65_535;

/// Consecutive plugins of a list that are run in the same way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Built-in plugins, as a plan.
    BuiltIn(Box<Plan>),
    /// Plugins that are programs; the value is a list of them in JSON.
    Programs(String),
}

/// The actions of consecutive built-in plugins of a list for one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Name of the network.
    pub(super) network: String,
    /// CNI version of the list.
    pub(super) version: String,
    /// The main plugin; `None` if a program created the pod's link.
    pub(super) base: Option<Base>,
    /// Port mappings; empty if the pod has no host ports.
    pub(super) ports: Vec<Ports>,
    pub(super) limits: Limits,
    pub(super) firewall: Option<Firewall>,
}

/// The first plugin of a list, which creates the pod's link and addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Base {
    pub(super) main: Main,
    /// MTU in bytes; 0: the kernel's default.
    pub(super) mtu: u32,
    /// Whether traffic that leaves the network is masqueraded.
    pub(super) masquerades: bool,
    pub(super) ipam: Ipam,
    /// The field `dns` of the result, from the configuration.
    pub(super) dns: Value,
}

/// The kind of link between the pod and the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Main {
    /// A veth pair whose node end is a port of a bridge.
    Bridge(Bridge),
    /// A veth pair with routes only.
    PointToPoint,
}

/// Options of the plugin `bridge`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bridge {
    pub(super) name: String,
    /// Whether the bridge has the gateway's addresses.
    pub(super) is_gateway: bool,
    /// Whether other addresses of the bridge are removed.
    pub(super) forces_address: bool,
    /// Whether other addresses of the bridge are kept. This option exists only in coracle: the range of the
    /// default network changes when the kubelet sets the pod CIDR, while pods of the earlier range are still
    /// running.
    pub(super) keeps_addresses: bool,
    /// Whether links have IPv6 link-local addresses even if no range is IPv6. `false` exists only in coracle:
    /// otherwise each pod sends router solicitations and multicast reports to every pod on the bridge.
    pub(super) has_link_local: bool,
    /// Whether a pod's MAC address is derived from its IPv4 address. Neighbours' ARP entries then stay valid
    /// for the next pod with that address, and no pod has to send gratuitous ARP to all others on the bridge.
    /// This option exists only in coracle.
    pub(super) has_mac_of_address: bool,
    /// Whether a pod can only use its own MAC address, and answer for its own addresses only. This option exists only in coracle.
    pub(super) checks_neighbours: bool,
    pub(super) has_hairpin: bool,
    pub(super) is_promiscuous: bool,
}

/// Options of the plugin `host-local`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ipam {
    /// Sets of address ranges; a pod gets one address of each set.
    pub(super) sets: Vec<Vec<Range>>,
    pub(super) routes: Vec<Route>,
    /// Directory of this network's leases.
    pub(super) directory: PathBuf,
}

/// A route in the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Route {
    pub(super) destination: Network,
    /// Gateway of the route; `None`: the first gateway of the same address family.
    pub(super) gateway: Option<IpAddr>,
}

/// The action of one `portmap` plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ports {
    /// Whether connections from the pod's own network and from localhost are masqueraded.
    pub(super) masquerades: bool,
    /// Bit of the packet mark that selects the masqueraded connections.
    pub(super) mark: u32,
    pub(super) mappings: Vec<PortMapping>,
}

/// The action of the `firewall` plugin: the host's packet filter accepts forwarded packets from the pod, and
/// replies to the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Firewall {
    /// Whether firewalld is configured instead, if it is running.
    pub(super) prefers_firewalld: bool,
}

/// The action of one `bandwidth` plugin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Limits {
    /// Limit for traffic to the pod; `None`: no limit.
    pub(super) ingress: Option<Rate>,
    /// Limit for traffic from the pod; `None`: no limit.
    pub(super) egress: Option<Rate>,
}

impl Base {
    /// Whether the pod's frames are checked on the bridge.
    pub(super) fn checks_neighbours(&self) -> bool {
        matches!(&self.main, Main::Bridge(bridge) if bridge.checks_neighbours)
    }
}

impl Plan {
    /// Whether the pod needs rules in coracle's own nftables tables, which no plugin program would find.
    pub(super) fn has_rules(&self) -> bool {
        self.base.as_ref().is_some_and(|base| base.masquerades || base.checks_neighbours())
            || !self.ports.is_empty()
    }
}

/// A parsed network configuration list.
#[derive(Deserialize)]
struct List {
    #[serde(rename = "cniVersion")]
    version: String,
    name: String,
    plugins: Vec<Box<RawValue>>,
}

/// The plugins of a list that are built in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Choice {
    /// Indices of the built-in plugins in the network configuration list.
    pub places: Vec<usize>,
    /// The reasons why the other plugins are not built in, one line for each.
    pub reasons: Vec<String>,
}

/// Chooses the built-in plugins for a pod. `filter` checks whether the host's packet filter can be modified
/// with netlink. `Err`: the reasons why no plugin is built in.
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
    if is_first { Err("no plugin that creates a link".to_owned()) } else { Ok(choice) }
}

/// Splits a list into parts in the order of ADD. `is_ours` returns whether the plugin with this index is
/// built in. `Err`: the reason why a selected plugin cannot be built in.
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

/// The list without the plugins with the indices `places`; `None` if the list cannot be parsed or no plugin
/// remains.
pub(super) fn without(conflist: &str, places: &[usize]) -> Option<String> {
    let list: List = serde_json::from_str(conflist).ok()?;
    let plugins = list.plugins.iter().enumerate().filter(|(index, _)| !places.contains(index));
    let plugins: Vec<_> = plugins.map(|(_, plugin)| plugin.get()).collect();
    (!plugins.is_empty()).then(|| flat(&list.version, &list.name, &plugins))
}

/// The directories with the leases of each network that a list names (`ipam.dataDir`), also if other parts of
/// the list are invalid.
pub(super) fn data_directories(conflist: &str) -> Vec<PathBuf> {
    let list: Value = serde_json::from_str(conflist).unwrap_or_default();
    let plugins = list["plugins"].as_array().into_iter().flatten();
    let named = plugins.filter_map(|plugin| plugin["ipam"]["dataDir"].as_str());
    named.map(PathBuf::from).filter(|path| path.is_absolute()).collect()
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
            return Err("the name of the network, the pod ID or the link's name is invalid".to_owned());
        }
        Ok(list)
    }

    /// Creates a plan without actions for this list.
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
    /// Adds one plugin to the plan; returns its type and, on failure, the reason why it is not built in.
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
        // A `.conf` file was wrapped into a list, and its plugin still has the keys of the list.
        options.0.remove("cniVersion");
        options.0.remove("name");
        match (kind.as_str(), is_first) {
            (LOOPBACK, _) => options.end(),
            ("bridge" | "ptp", true) => {
                self.base = Some(base(kind, options, &arguments, &self.network)?);
                Ok(())
            }
            ("portmap", false) => chained_options::portmap(options, &arguments, attachment, self),
            ("bandwidth", false) => chained_options::bandwidth(options, &arguments, self),
            ("firewall", false) => chained_options::firewall(options, self),
            _ => Err("not built in, or not at this position".to_owned()),
        }
    }
}

/// The pod's capability arguments that the plugin declares.
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
        return Err("a declared capability is not built in".to_owned());
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
        checks_neighbours: options.flag("checkNeighbours")?,
        has_hairpin: options.flag("hairpinMode")?,
        is_promiscuous: options.flag("promiscMode")?,
    };
    if !is_link(&bridge.name) || bridge.has_hairpin && bridge.is_promiscuous {
        return Err("the bridge's name is invalid, or promiscMode and hairpinMode are both set".to_owned());
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
        // With several ranges, the gateway depends on the allocated address.
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
        ordered(keys.iter().filter_map(|key| Some(((*key).to_owned(), options.value(key)?))));
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

/// Parses a set of ranges, which must all be of one address family.
fn set(value: Value) -> Result<Vec<Range>, String> {
    let Value::Array(items) = value else { return Err("a set of ranges is not a list".to_owned()) };
    let mut set: Vec<Range> = Vec::new();
    for item in items {
        let mut options = Options::of(item)?;
        let subnet = options.read("subnet", network)?.ok_or("a range without a subnet")?;
        let (start, end) = (options.address("rangeStart")?, options.address("rangeEnd")?);
        let range = Range::new(subnet, start, end, options.address("gateway")?)?;
        options.end()?;
        if set.first().is_some_and(|first| first.start.is_ipv4() != range.start.is_ipv4()) {
            return Err("a set of ranges of both address families".to_owned());
        }
        set.push(range);
    }
    if set.is_empty() { Err("an empty set of ranges".to_owned()) } else { Ok(set) }
}

fn route(value: Value) -> Result<Route, String> {
    let mut options = Options::of(value)?;
    let destination = options.read("dst", network)?.ok_or("a route without dst")?;
    let gateway = options.address("gw")?;
    options.end()?;
    if gateway.is_some_and(|gateway| gateway.is_ipv4() != destination.address.is_ipv4()) {
        return Err(format!("route {destination}: its gateway has the other address family"));
    }
    Ok(Route { destination: destination.base(), gateway })
}

fn network(value: &Value) -> Option<Network> {
    value.as_str()?.parse().ok()
}

/// Whether a text is a valid name of a link.
fn is_link(name: &str) -> bool {
    let is_letter = |letter: char| letter.is_ascii_graphic() && !matches!(letter, '/' | ':' | '%');
    !matches!(name, "" | "." | "..") && name.len() <= LINK_BYTES_MAX && name.chars().all(is_letter)
}

#[cfg(test)]
mod tests;
