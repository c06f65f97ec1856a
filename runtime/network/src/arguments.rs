//! CNI arguments and capability arguments for a pod. The module does no I/O. Rules: CNI conventions, "Dynamic
//! plugin specific fields"; CRI 5.2 and CRI 5.3.

use std::net::IpAddr;

use coracle_base::error::{Error, Kind};
use coracle_job::{Attachment, PortMapping};
use coracle_sandbox::collect::ordered;
use serde_json::{Map, Value, json};

use super::conf::List;

/// Name of the pod's interface, equal in all CRI runtimes.
pub(super) const INTERFACE: &str = "eth0";
/// Names of the annotations for bandwidth limits, and the direction of each (Kubernetes, "Network Plugins").
const BANDWIDTH: [(&str, &str); 2] =
    [("kubernetes.io/ingress-bandwidth", "ingress"), ("kubernetes.io/egress-bandwidth", "egress")];
/// Minimum bandwidth limit in bits per second; Kubernetes accepts 1k to 1P.
const BANDWIDTH_MIN: u64 = 1000;
const BANDWIDTH_MAX: u64 = 1_000_000_000_000_000;
/// Burst in bits, equal to that of containerd and CRI-O: the maximum of the plugins.
const BURST: u64 = u32::MAX as u64;
/// Maximum length in bytes of a quantity in an annotation.
const QUANTITY_BYTES_MAX: usize = 32;

/// The parameters of a pod for its network.
#[derive(Clone, Debug)]
pub struct PodNetwork<'a> {
    /// ID of the pod sandbox.
    pub id: &'a str,
    /// Name of the pod (`K8S_POD_NAME`).
    pub name: &'a str,
    /// Kubernetes namespace of the pod (`K8S_POD_NAMESPACE`).
    pub namespace: &'a str,
    /// UID of the pod (`K8S_POD_UID`).
    pub uid: &'a str,
    /// Path of the network namespace.
    pub netns: &'a str,
    /// Port mappings of the CRI request; mappings without a host port are ignored.
    pub port_mappings: &'a [PortMapping],
    /// DNS configuration; `None`: the node's resolv.conf.
    pub dns: Option<Dns<'a>>,
    /// Cgroup parent; empty: the default.
    pub cgroup_parent: &'a str,
    /// Annotations of the pod, in the order of the request.
    pub annotations: &'a [(String, String)],
    /// The pod CIDR of UpdateRuntimeConfig, or two separated by a comma; empty: not set.
    pub pod_cidr: &'a str,
}

/// DNS configuration of a pod.
#[derive(Clone, Copy, Debug)]
pub struct Dns<'a> {
    /// Addresses of name servers.
    pub servers: &'a [String],
    /// Search domains.
    pub searches: &'a [String],
    /// Resolver options (resolv.conf(5)).
    pub options: &'a [String],
}

/// The attachment of `pod` to the network of `list`; capabilities that no plugin declares are omitted.
pub(super) fn attachment(pod: &PodNetwork<'_>, list: &List) -> Result<Attachment, Error> {
    let mut port_mappings = Vec::new();
    for (index, port) in pod.port_mappings.iter().enumerate().filter(|(_, port)| port.host_port > 0) {
        check_port(port).map_err(|(field, why)| invalid(&format!("port_mappings[{index}].{field}"), &why))?;
        port_mappings.push(port.clone());
    }
    let mut capabilities = capabilities(pod)?;
    capabilities.retain(|(name, _)| list.capabilities.contains(name));
    Ok(Attachment {
        container_id: pod.id.to_owned(),
        netns: pod.netns.to_owned(),
        interface: INTERFACE.to_owned(),
        arguments: arguments(pod)?,
        port_mappings,
        capabilities,
    })
}

/// The pairs of CNI_ARGS in containerd's order. A value with a separator is refused, because it could add
/// arguments.
fn arguments(pod: &PodNetwork<'_>) -> Result<Vec<(String, String)>, Error> {
    let pairs = [
        ("IgnoreUnknown", "1", ""),
        ("K8S_POD_NAMESPACE", pod.namespace, "metadata.namespace"),
        ("K8S_POD_NAME", pod.name, "metadata.name"),
        ("K8S_POD_INFRA_CONTAINER_ID", pod.id, ""),
        ("K8S_POD_UID", pod.uid, "metadata.uid"),
    ];
    let mut arguments = Vec::new();
    for (key, value, field) in pairs {
        if value.contains(|letter: char| matches!(letter, ';' | '=') || letter.is_control()) {
            return Err(invalid(
                field,
                &format!("{value:?} has a character that is not allowed in CNI_ARGS"),
            ));
        }
        arguments.push((key.to_owned(), value.to_owned()));
    }
    Ok(arguments)
}

/// Checks a port mapping; the error contains the field and the reason.
fn check_port(port: &PortMapping) -> Result<(), (&'static str, String)> {
    if port.container_port == 0 {
        return Err(("container_port", "0 is not a port".to_owned()));
    }
    if !matches!(port.protocol.as_str(), "tcp" | "udp" | "sctp") {
        return Err(("protocol", format!("{:?} is not tcp, udp or sctp", port.protocol)));
    }
    if !port.host_ip.is_empty() && port.host_ip.parse::<IpAddr>().is_err() {
        return Err(("host_ip", format!("{:?} is not an address", port.host_ip)));
    }
    Ok(())
}

/// All capability arguments for which the pod has values, each as JSON text.
fn capabilities(pod: &PodNetwork<'_>) -> Result<Vec<(String, String)>, Error> {
    let mut found = Vec::new();
    if let Some(dns) = pod.dns {
        let value = json!({ "servers": dns.servers, "searches": dns.searches, "options": dns.options });
        found.push(("dns", value));
    }
    let bandwidth = bandwidth(pod.annotations)?;
    if !bandwidth.is_empty() {
        found.push(("bandwidth", bandwidth.into()));
    }
    let ranges: Vec<_> = pod.pod_cidr.split(',').map(str::trim).filter(|cidr| is_cidr(cidr)).collect();
    if !ranges.is_empty() {
        found.push(("ipRanges", ranges.iter().map(|cidr| json!([{ "subnet": cidr }])).collect()));
    }
    if !pod.annotations.is_empty() {
        let annotations: Map<_, _> =
            ordered(pod.annotations.iter().map(|(key, value)| (key.clone(), Value::from(value.as_str()))));
        found.push(("io.kubernetes.cri.pod-annotations", annotations.into()));
    }
    if !pod.cgroup_parent.is_empty() {
        found.push(("cgroupPath", pod.cgroup_parent.into()));
    }
    Ok(found.into_iter().map(|(name, value)| (name.to_owned(), value.to_string())).collect())
}

/// The capability argument `bandwidth`; empty without an annotation.
fn bandwidth(annotations: &[(String, String)]) -> Result<Map<String, Value>, Error> {
    let mut limits = Map::new();
    for (key, direction) in BANDWIDTH {
        let Some((_, text)) = annotations.iter().find(|(name, _)| name == key) else { continue };
        let field = format!("annotations[{key}]");
        let rate = quantity(text).ok_or_else(|| invalid(&field, &format!("{text:?} is not a quantity")))?;
        if !(BANDWIDTH_MIN..=BANDWIDTH_MAX).contains(&rate) {
            return Err(invalid(&field, &format!("{text:?} is not between 1k and 1P")));
        }
        limits.insert(format!("{direction}Rate"), rate.into());
        limits.insert(format!("{direction}Burst"), BURST.into());
    }
    Ok(limits)
}

/// Parses a Kubernetes quantity into an integer, rounded up; `None` if it is invalid. Values above the range
/// of u64 become `u64::MAX` and negative values become 0; both are then refused as out of range.
fn quantity(text: &str) -> Option<u64> {
    let (is_negative, text) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    if text.len() > QUANTITY_BYTES_MAX {
        return None;
    }
    let end = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.len() + fraction.len() == 0 || fraction.contains('.') {
        return None;
    }
    let (factor, exponent) = scale(suffix)?;
    // digits * factor * 10^exponent / 10^(number of fraction digits), saturating.
    let digits = format!("{whole}{fraction}");
    let digits = digits.trim_start_matches('0');
    if is_negative || digits.is_empty() {
        return Some(0);
    }
    let mantissa = digits.parse::<u128>().ok()?.saturating_mul(factor);
    let exponent = exponent.checked_sub(i32::try_from(fraction.len()).ok()?)?;
    let power = 10_u128.checked_pow(exponent.unsigned_abs());
    let value = match (power, exponent < 0) {
        (Some(power), false) => mantissa.saturating_mul(power),
        (Some(power), true) => mantissa.div_ceil(power),
        (None, false) => u128::MAX,
        (None, true) => 1,
    };
    Some(u64::try_from(value).unwrap_or(u64::MAX))
}

/// Multiplier of a quantity's suffix: a factor and a power of ten; `None` if the suffix is invalid.
fn scale(suffix: &str) -> Option<(u128, i32)> {
    Some(match suffix {
        "n" => (1, -9),
        "u" => (1, -6),
        "m" => (1, -3),
        "" => (1, 0),
        "k" => (1, 3),
        "M" => (1, 6),
        "G" => (1, 9),
        "T" => (1, 12),
        "P" => (1, 15),
        "E" => (1, 18),
        "Ki" => (1 << 10, 0),
        "Mi" => (1 << 20, 0),
        "Gi" => (1 << 30, 0),
        "Ti" => (1 << 40, 0),
        "Pi" => (1 << 50, 0),
        "Ei" => (1 << 60, 0),
        _ => (1, suffix.strip_prefix(['e', 'E'])?.parse().ok()?),
    })
}

/// Whether a text is a valid CIDR.
fn is_cidr(text: &str) -> bool {
    let Some((address, length)) = text.split_once('/') else { return false };
    let bits = match address.parse() {
        Ok(IpAddr::V4(_)) => 32,
        Ok(IpAddr::V6(_)) => 128,
        Err(_) => return false,
    };
    length.parse::<u8>().is_ok_and(|length| length <= bits)
}

fn invalid(field: &str, why: &str) -> Error {
    Error::new(Kind::InvalidArgument, format!("config.{field}: {why}"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use coracle_job::PortMapping;

    use super::{Dns, PodNetwork, attachment, quantity};
    use crate::conf::List;
    use crate::tests::pod;
    use coracle_base::error::Kind;

    fn list(capabilities: &[&str]) -> List {
        let capabilities: BTreeSet<_> = capabilities.iter().map(|name| (*name).to_owned()).collect();
        List {
            file: String::new(),
            name: "n".into(),
            version: "1.0.0".into(),
            capabilities,
            text: "{}".into(),
        }
    }

    fn capability(pod: &PodNetwork<'_>, name: &str) -> Option<String> {
        let found = attachment(pod, &list(&[name])).unwrap().capabilities;
        assert!(found.len() < 2, "{found:?}");
        found.into_iter().next().map(|(_, text)| text)
    }

    #[test]
    fn arguments_are_those_of_containerd() {
        let made = attachment(&pod(), &list(&[])).unwrap();
        let pairs: Vec<_> = made.arguments.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let expected = "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web;K8S_POD_INFRA_CONTAINER_ID=c0ffee;K8S_POD_UID=1-2";
        assert_eq!(pairs.join(";"), expected);
        assert_eq!((made.interface.as_str(), made.netns.as_str()), ("eth0", "/run/netns/a"));
        let error = attachment(&PodNetwork { name: "a;K8S_POD_NAME=b", ..pod() }, &list(&[])).unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidArgument);
        assert!(error.message().starts_with("config.metadata.name: "), "{error}");
    }

    #[test]
    fn capability_arguments_follow_the_cni_conventions() {
        let servers = ["10.0.0.10".to_owned()];
        let dns = Dns { servers: &servers, searches: &[], options: &[] };
        let annotations = [("kubernetes.io/egress-bandwidth".to_owned(), "10M".to_owned())];
        let full = PodNetwork {
            dns: Some(dns),
            annotations: &annotations,
            cgroup_parent: "/kubepods/pod1",
            pod_cidr: "10.42.0.0/24, fd00:42::/64,junk,10.0.0.0/33",
            ..pod()
        };
        let cases = [
            ("dns", r#"{"options":[],"searches":[],"servers":["10.0.0.10"]}"#),
            ("bandwidth", r#"{"egressBurst":4294967295,"egressRate":10000000}"#),
            ("ipRanges", r#"[[{"subnet":"10.42.0.0/24"}],[{"subnet":"fd00:42::/64"}]]"#),
            ("io.kubernetes.cri.pod-annotations", r#"{"kubernetes.io/egress-bandwidth":"10M"}"#),
            ("cgroupPath", r#""/kubepods/pod1""#),
        ];
        for (name, expected) in cases {
            assert_eq!(capability(&full, name).as_deref(), Some(expected), "{name}");
            assert_eq!(capability(&pod(), name), None, "{name} of a pod without it");
        }
        assert_eq!(capability(&full, "mac"), None);
    }

    #[test]
    fn only_ports_with_a_host_port_are_mapped() {
        let port = |host_port: u16| PortMapping {
            host_port,
            container_port: 80,
            protocol: "tcp".into(),
            host_ip: String::new(),
        };
        let with = |ports: &[PortMapping]| {
            attachment(&PodNetwork { port_mappings: ports, ..pod() }, &list(&[]))
                .map(|made| made.port_mappings)
        };
        assert_eq!(with(&[port(0), port(12000)]), Ok(vec![port(12000)]));
        let cases = [
            (
                PortMapping { container_port: 0, ..port(1) },
                "config.port_mappings[1].container_port: 0 is not a port",
            ),
            (
                PortMapping { protocol: "icmp".into(), ..port(1) },
                "config.port_mappings[1].protocol: \"icmp\" is not tcp, udp or sctp",
            ),
            (
                PortMapping { host_ip: "localhost".into(), ..port(1) },
                "config.port_mappings[1].host_ip: \"localhost\" is not an address",
            ),
        ];
        for (bad, expected) in cases {
            let error = with(&[port(2), bad]).unwrap_err();
            assert_eq!((error.kind(), error.message()), (Kind::InvalidArgument, expected));
        }
    }

    #[test]
    fn quantities_have_the_format_of_kubernetes() {
        let cases = [
            ("10M", Some(10_000_000)),
            ("1k", Some(1000)),
            ("1P", Some(1_000_000_000_000_000)),
            ("1.5G", Some(1_500_000_000)),
            (".5k", Some(500)),
            ("1.", Some(1)),
            ("2Ki", Some(2048)),
            ("1e3", Some(1000)),
            ("1E3", Some(1000)),
            ("5E", Some(5_000_000_000_000_000_000)),
            ("1e-3", Some(1)),
            ("1500m", Some(2)),
            ("0", Some(0)),
            ("-5M", Some(0)),
            ("+1k", Some(1000)),
            ("999999E", Some(u64::MAX)),
            ("1e99999", Some(u64::MAX)),
            ("1e-99999", Some(1)),
            ("", None),
            (".", None),
            ("1.2.3", None),
            ("M", None),
            ("10 M", None),
            ("10K", None),
            ("1e", None),
            ("--1", None),
            ("1e99999999999", None),
            ("11111111111111111111111111111111111", None),
        ];
        for (text, expected) in cases {
            assert_eq!(quantity(text), expected, "{text:?}");
        }
    }

    #[test]
    fn a_bandwidth_out_of_range_is_refused() {
        for (text, expected) in [
            ("999", "\"999\" is not between 1k and 1P"),
            ("2P", "\"2P\" is not between 1k and 1P"),
            ("fast", "\"fast\" is not a quantity"),
        ] {
            let annotations = [("kubernetes.io/ingress-bandwidth".to_owned(), text.to_owned())];
            let error =
                attachment(&PodNetwork { annotations: &annotations, ..pod() }, &list(&[])).unwrap_err();
            let expected = format!("config.annotations[kubernetes.io/ingress-bandwidth]: {expected}");
            assert_eq!((error.kind(), error.message()), (Kind::InvalidArgument, expected.as_str()));
        }
    }
}
