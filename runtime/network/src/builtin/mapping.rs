//! What a host port's mapping applies to: protocol, address of the node, address family. Pure; rules and connection tracking
//! use it.

use std::net::IpAddr;

use coracle_job::PortMapping;
use coracle_netlink::{Network, Protocol};

/// The protocol of a mapping; `None` if it has no ports.
pub(super) fn protocol(mapping: &PortMapping) -> Option<Protocol> {
    match mapping.protocol.as_str() {
        "tcp" => Some(Protocol::Tcp),
        "udp" => Some(Protocol::Udp),
        "sctp" => Some(Protocol::Sctp),
        _ => None,
    }
}

/// The node's address of a mapping (`None`: all addresses) and its protocol; `None` if the mapping is for the
/// other address family.
pub(super) fn target(mapping: &PortMapping, own: Network) -> Option<(Option<IpAddr>, Protocol)> {
    let protocol = protocol(mapping)?;
    if mapping.host_ip.is_empty() {
        return Some((None, protocol));
    }
    let host: IpAddr = mapping.host_ip.parse().ok()?;
    (host.is_ipv4() == own.address.is_ipv4())
        .then(|| (Some(host).filter(|host| !host.is_unspecified()), protocol))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_applies_to_the_family_of_its_host_address() {
        let (four, six) = ("10.1.0.5/24".parse().unwrap(), "fd00::5/64".parse().unwrap());
        let host = |text: &str| Some(text.parse::<IpAddr>().unwrap());
        let cases = [
            ("", Some(None), Some(None)),
            ("0.0.0.0", Some(None), None),
            ("::", None, Some(None)),
            ("192.0.2.1", Some(host("192.0.2.1")), None),
            ("2001:db8::1", None, Some(host("2001:db8::1"))),
        ];
        for (host_ip, in_four, in_six) in cases {
            let mapping = PortMapping {
                host_port: 1,
                container_port: 2,
                protocol: "udp".into(),
                host_ip: host_ip.into(),
            };
            let found = |own| target(&mapping, own).map(|(host, _)| host);
            assert_eq!((found(four), found(six)), (in_four, in_six), "{host_ip:?}");
        }
    }
}
