//! Whether a list is ours to run, and what it comes to for one pod. Pure.
//! What is not known here, an option, a type, a shape, makes the whole list the plugins' business: each value is taken out
//! of its object as it is understood, and nothing may be left. A configuration that is wrong is theirs, too: they say so.
//! Options: bridge, ptp, host-local, portmap, bandwidth and loopback at cni.dev, as of 1.1.1; docs/cni.md lists them.

use std::net::IpAddr;
use std::path::PathBuf;

use coracle_job::{Attachment, PortMapping};
use coracle_sandbox::netlink::Network;
use serde_json::{Map, Value};

use super::range::Range;

/// Versions whose results have `ips`: older lists are rare, and their plugins are, too.
const VERSIONS: [&str; 5] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];
/// Where `host-local` keeps its leases (its document).
const DATA_DIR: &str = "/var/lib/cni/networks";
/// The bridge of a list that names none (its document).
const BRIDGE: &str = "cni0";
/// The bit of a packet's mark with which `portmap` asks for masquerading (its document).
const MARK_BIT: u64 = 13;
/// Longest name of a link.
const LINK_BYTES_MAX: usize = 15;
/// Largest MTU that a veth takes.
const MTU_MAX: u64 = 65_535;

/// How one pod is attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// Name of the list.
    pub(super) network: String,
    /// Version of the list.
    pub(super) version: String,
    pub(super) main: Main,
    /// Bytes; 0: the kernel's choice.
    pub(super) mtu: u32,
    /// What leaves the network leaves with the node's address.
    pub(super) masquerades: bool,
    pub(super) ipam: Ipam,
    /// Of the result, as the configuration has it.
    pub(super) dns: Value,
    /// Empty without ports of the node.
    pub(super) ports: Vec<Ports>,
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

impl Plan {
    /// Whether there are rules of nftables for it.
    pub(super) fn has_rules(&self) -> bool {
        self.masquerades || !self.ports.is_empty()
    }
}

/// The options of one plugin that are not understood yet.
struct Options(Map<String, Value>);

impl Options {
    fn of(value: Value) -> Result<Options, String> {
        match value {
            Value::Object(fields) => Ok(Options(fields)),
            _ => Err("not an object".to_owned()),
        }
    }

    /// An option; one that is null is not there.
    fn value(&mut self, key: &str) -> Option<Value> {
        self.0.remove(key).filter(|value| !value.is_null())
    }

    fn read<T>(&mut self, key: &str, read: impl Fn(&Value) -> Option<T>) -> Result<Option<T>, String> {
        let Some(value) = self.value(key) else { return Ok(None) };
        read(&value).map(Some).ok_or_else(|| format!("{key}: {value} is not built in"))
    }

    fn flag(&mut self, key: &str) -> Result<bool, String> {
        Ok(self.read(key, Value::as_bool)?.unwrap_or(false))
    }

    fn number(&mut self, key: &str, most: u64) -> Result<Option<u64>, String> {
        self.read(key, |value| value.as_u64().filter(|number| *number <= most))
    }

    fn text(&mut self, key: &str) -> Result<Option<String>, String> {
        self.read(key, |value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned))
    }

    fn address(&mut self, key: &str) -> Result<Option<IpAddr>, String> {
        self.read(key, |value| value.as_str()?.parse().ok())
    }

    fn list(&mut self, key: &str) -> Result<Vec<Value>, String> {
        Ok(self.read(key, |value| value.as_array().cloned())?.unwrap_or_default())
    }

    /// Options that change nothing while they are empty, zero or false.
    fn off(&mut self, keys: &[&str]) -> Result<(), String> {
        for key in keys {
            let is_off = |value: &Value| match value {
                Value::Null | Value::Bool(false) => true,
                Value::Number(number) => number.as_u64() == Some(0),
                Value::String(text) => text.is_empty(),
                Value::Array(items) => items.is_empty(),
                Value::Object(fields) => fields.is_empty(),
                Value::Bool(true) => false,
            };
            self.read(key, |value| is_off(value).then_some(()))?;
        }
        Ok(())
    }

    /// Nothing may be left.
    fn end(self) -> Result<(), String> {
        self.0.keys().next().map_or(Ok(()), |key| Err(format!("{key} is not built in")))
    }
}

/// What the list comes to for a pod, else why it is not ours.
pub(super) fn plan(conflist: &str, attachment: &Attachment) -> Result<Plan, String> {
    let read = serde_json::from_str(conflist).map_err(|error| error.to_string())?;
    let mut list = Options::of(read)?;
    let version = list.text("cniVersion")?.unwrap_or_default();
    let network = list.text("name")?.unwrap_or_default();
    if !VERSIONS.contains(&version.as_str()) {
        return Err(format!("cniVersion {version:?} is not built in"));
    }
    let is_name = |text: &str| !text.is_empty() && !text.contains(['/', '\0']) && text != "." && text != "..";
    if !is_name(&network) || !is_name(&attachment.container_id) || !is_link(&attachment.interface) {
        return Err("no name of a network, a pod or a link".to_owned());
    }
    let mut plan: Option<Plan> = None;
    for (index, plugin) in list.list("plugins")?.into_iter().enumerate() {
        let mut options = Options::of(plugin).map_err(|why| format!("plugin {index}: {why}"))?;
        let kind = options.text("type")?.unwrap_or_default();
        let arguments = arguments(&mut options, attachment)?;
        // `.conf` files are lists of one, with the keys of a list.
        options.0.remove("cniVersion");
        options.0.remove("name");
        let outcome = match (kind.as_str(), &mut plan) {
            ("loopback", _) => options.end(),
            ("bridge" | "ptp", None) => main(&kind, options, &arguments, &network, &version).map(|made| {
                plan = Some(made);
            }),
            ("portmap", Some(plan)) => portmap(options, &arguments, attachment, plan),
            ("bandwidth", Some(_)) => bandwidth(options, &arguments),
            _ => Err("not built in, or not in this place".to_owned()),
        };
        outcome.map_err(|why| format!("plugin {index}, {kind:?}: {why}"))?;
    }
    plan.ok_or_else(|| "no plugin gives a link".to_owned())
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

fn main(
    kind: &str,
    mut options: Options,
    arguments: &Map<String, Value>,
    network: &str,
    version: &str,
) -> Result<Plan, String> {
    if arguments.contains_key("mac") || arguments.contains_key("ips") {
        return Err("a capability is not built in".to_owned());
    }
    let ipam = options.value("ipam").ok_or("no ipam")?;
    let mut ipam = self::ipam(Options::of(ipam)?, arguments, network)?;
    let main = match kind {
        "bridge" => Main::Bridge(bridge(&mut options, &mut ipam)?),
        _ => Main::PointToPoint,
    };
    let plan = Plan {
        network: network.to_owned(),
        version: version.to_owned(),
        main,
        mtu: options.number("mtu", MTU_MAX)?.unwrap_or_default() as u32,
        masquerades: options.flag("ipMasq")?,
        ipam,
        dns: options.value("dns").unwrap_or_else(|| Value::Object(Map::new())),
        ports: Vec::new(),
    };
    options.off(&["args"])?;
    options.end()?;
    Ok(plan)
}

fn bridge(options: &mut Options, ipam: &mut Ipam) -> Result<Bridge, String> {
    let is_default_gateway = options.flag("isDefaultGateway")?;
    let bridge = Bridge {
        name: options.text("bridge")?.unwrap_or_else(|| BRIDGE.to_owned()),
        is_gateway: options.flag("isGateway")? || is_default_gateway,
        forces_address: options.flag("forceAddress")?,
        keeps_addresses: options.flag("keepAddresses")?,
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

fn portmap(
    mut options: Options,
    arguments: &Map<String, Value>,
    attachment: &Attachment,
    plan: &mut Plan,
) -> Result<(), String> {
    let ports = Ports {
        masquerades: options.read("snat", Value::as_bool)?.unwrap_or(true),
        mark: 1 << options.number("markMasqBit", 31)?.unwrap_or(MARK_BIT),
        mappings: match arguments.contains_key("portMappings") {
            true => attachment.port_mappings.clone(),
            false => Vec::new(),
        },
    };
    options.off(&["conditionsV4", "conditionsV6", "externalSetMarkChain"])?;
    options.end()?;
    if ports.mappings.is_empty() {
        return Ok(());
    }
    if matches!(&plan.main, Main::Bridge(bridge) if !bridge.is_gateway) {
        return Err("ports of a bridge that is no gateway are not built in".to_owned());
    }
    plan.ports.push(ports);
    Ok(())
}

/// A pod without limits: there is nothing to do. One that has some is the program's.
fn bandwidth(mut options: Options, arguments: &Map<String, Value>) -> Result<(), String> {
    if arguments.contains_key("bandwidth") {
        return Err("limits are not built in".to_owned());
    }
    options.off(&["ingressRate", "ingressBurst", "egressRate", "egressBurst"])?;
    options.end()
}

/// Whether a text can be a link's name.
fn is_link(name: &str) -> bool {
    let is_letter = |letter: char| letter.is_ascii_graphic() && !matches!(letter, '/' | ':' | '%');
    !matches!(name, "" | "." | "..") && name.len() <= LINK_BYTES_MAX && name.chars().all(is_letter)
}

#[cfg(test)]
mod tests;
