//! Parser of the options of chained plugins: `portmap`, `bandwidth`, `firewall`. The module does no I/O.

use coracle_job::Attachment;
use coracle_netlink::Rate;
use serde_json::{Map, Value};

use super::options::Options;
use super::{Firewall, Limits, Plan, Ports};

/// Default bit of the packet mark that `portmap` uses for masquerading (portmap's documentation).
const MARK_BIT: u64 = 13;
/// Default name of the administrator's chain of iptables (firewall's documentation).
const ADMIN_CHAIN: &str = "CNI-ADMIN";
/// First CNI version that `firewall` supports.
const FIREWALL_SINCE: &str = "0.4.0";
const LIMITS: [&str; 4] = ["ingressRate", "ingressBurst", "egressRate", "egressBurst"];

pub(super) fn portmap(
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
    if !ports.mappings.is_empty() {
        plan.ports.push(ports);
    }
    Ok(())
}

/// Parses the limits in the list; if there are none, the pod's capability argument applies.
pub(super) fn bandwidth(
    mut options: Options,
    arguments: &Map<String, Value>,
    plan: &mut Plan,
) -> Result<(), String> {
    let is_static = LIMITS.iter().any(|key| options.0.contains_key(*key));
    let mut told = match arguments.get("bandwidth") {
        Some(told) if !is_static => Options::of(told.clone())?,
        _ => Options(Map::new()),
    };
    let limits = if is_static { &mut options } else { &mut told };
    let mut numbers = [0; LIMITS.len()];
    for (number, key) in numbers.iter_mut().zip(LIMITS) {
        *number = limits.number(key, u64::MAX)?.unwrap_or_default();
    }
    let limits = Limits { ingress: rate(numbers[0], numbers[1])?, egress: rate(numbers[2], numbers[3])? };
    told.end()?;
    options.end()?;
    if plan.limits != Limits::default() {
        return Err("a second bandwidth limit is not built in".to_owned());
    }
    plan.limits = limits;
    Ok(())
}

/// Converts a limit in bits per second and its burst in bits; `None` if both are 0, that is no limit.
fn rate(per_second: u64, burst: u64) -> Result<Option<Rate>, String> {
    let rate = Rate { bytes_per_second: per_second / 8, burst_bytes: burst / 8 };
    match (per_second, burst) {
        (0, 0) => Ok(None),
        (8.., 1..) if rate.burst_bytes < u64::from(u32::MAX) => Ok(Some(rate)),
        _ => Err(format!("{per_second} bits per second with a burst of {burst} are not built in")),
    }
}

pub(super) fn firewall(mut options: Options, plan: &mut Plan) -> Result<(), String> {
    if plan.version.as_str() < FIREWALL_SINCE {
        return Err("not built in before 0.4.0".to_owned());
    }
    let one_of = |known: &'static [&str]| {
        move |value: &Value| value.as_str().filter(|text| known.contains(text)).map(str::to_owned)
    };
    let backend = options.read("backend", one_of(&["", "iptables"]))?.unwrap_or_default();
    options.read("iptablesAdminChainName", one_of(&["", ADMIN_CHAIN]))?;
    options.read("ingressPolicy", one_of(&["", "open"]))?;
    // An option of the firewalld backend, which has no effect here.
    options.read("firewalldZone", |zone| zone.is_string().then_some(()))?;
    options.end()?;
    plan.firewall = Some(Firewall { prefers_firewalld: backend.is_empty() });
    Ok(())
}
