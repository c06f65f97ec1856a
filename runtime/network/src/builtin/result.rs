//! CNI results: creates the result of ADD in the format of the plugins, and parses results for DEL. The
//! module does no I/O. Rules: CNI spec 1.1.0, "Success"; before 1.0.0 each address has a field `version`.

use coracle_job::{CniOutcome, Interface};
use coracle_sandbox::collect::ordered;
use serde_json::{Map, Value, json};

use super::lease::Lease;
use super::plan::{Base, Route};
use coracle_netlink::Network;
use std::net::IpAddr;

/// First CNI version whose addresses have no field `version`.
const NO_FAMILY_SINCE: &str = "1.0.0";

/// The result of ADD of the main plugin. The pod's interface is the last of `interfaces`.
pub(super) fn outcome(
    version: &str,
    base: &Base,
    interfaces: Vec<Interface>,
    leases: &[Lease],
) -> CniOutcome {
    let place = interfaces.len().saturating_sub(1);
    let address = |lease: &Lease| {
        let mut fields = ordered::<_, Map<_, _>>([
            ("interface".to_owned(), json!(place)),
            ("address".to_owned(), json!(lease.address.to_string())),
            ("gateway".to_owned(), json!(lease.gateway)),
        ]);
        // The lexical order of the built-in versions is their order.
        if version < NO_FAMILY_SINCE {
            let family = if lease.gateway.is_ipv4() { "4" } else { "6" };
            fields.insert("version".to_owned(), json!(family));
        }
        Value::Object(fields)
    };
    let route = |route: &Route| match route.gateway {
        Some(gateway) => json!({ "dst": route.destination.to_string(), "gw": gateway }),
        None => json!({ "dst": route.destination.to_string() }),
    };
    let mut result = ordered::<_, Map<_, _>>([
        ("cniVersion".to_owned(), json!(version)),
        ("interfaces".to_owned(), interfaces.iter().map(interface).collect()),
        ("ips".to_owned(), leases.iter().map(address).collect()),
        ("dns".to_owned(), base.dns.clone()),
    ]);
    if !base.ipam.routes.is_empty() {
        result.insert("routes".to_owned(), base.ipam.routes.iter().map(route).collect());
    }
    let mut addresses: Vec<_> = leases.iter().map(|lease| lease.address.address).collect();
    // The first IPv4 address is the primary one; the others keep their order.
    if let Some(first) = addresses.iter().position(IpAddr::is_ipv4) {
        addresses[..=first].rotate_right(1);
    }
    CniOutcome {
        addresses: addresses.iter().map(IpAddr::to_string).collect(),
        result: Value::Object(result).to_string(),
        interfaces,
    }
}

/// Adds a link of the node to the result of ADD.
pub(super) fn add_link(outcome: &mut CniOutcome, link: Interface) {
    let mut result: Value = serde_json::from_str(&outcome.result).unwrap_or_default();
    if let Some(Value::Array(interfaces)) = result.get_mut("interfaces") {
        interfaces.push(interface(&link));
        outcome.result = result.to_string();
    }
    outcome.interfaces.push(link);
}

fn interface(interface: &Interface) -> Value {
    match interface.sandbox.as_str() {
        "" => json!({ "name": interface.name, "mac": interface.mac }),
        sandbox => json!({ "name": interface.name, "mac": interface.mac, "sandbox": sandbox }),
    }
}

/// The parts of a plugin's result that rules and DEL need: links of the node, and the addresses of the pod's interface with their
/// networks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Made {
    pub(super) links: Vec<String>,
    pub(super) addresses: Vec<Network>,
    /// MAC address of the pod's interface; `None` if it is not known.
    pub(super) mac: Option<[u8; 6]>,
}

/// Parses a result; an invalid one counts as empty. `name` is the pod's interface.
pub(super) fn read(result: &str, name: &str) -> Made {
    let result: Value = serde_json::from_str(result).unwrap_or_default();
    let list = |key: &str| result.get(key).and_then(Value::as_array).cloned().unwrap_or_default();
    let text =
        |value: &Value, key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let interfaces = list("interfaces");
    let links = interfaces.iter().filter(|interface| text(interface, "sandbox").is_empty());
    let is_its = |ip: &Value| {
        let place = ip.get("interface").and_then(Value::as_u64).and_then(|place| usize::try_from(place).ok());
        let Some(found) = place.and_then(|place| interfaces.get(place)) else { return true };
        text(found, "name") == name && !text(found, "sandbox").is_empty()
    };
    let ips = list("ips");
    let addresses = ips.iter().filter(|ip| is_its(ip)).filter_map(|ip| text(ip, "address").parse().ok());
    let own = interfaces.iter().find(|own| text(own, "name") == name && !text(own, "sandbox").is_empty());
    Made {
        links: links.map(|interface| text(interface, "name")).collect(),
        addresses: addresses.collect(),
        mac: own.and_then(|own| mac(&text(own, "mac"))),
    }
}

/// Parses `xx:xx:xx:xx:xx:xx`.
fn mac(text: &str) -> Option<[u8; 6]> {
    let bytes: Option<Vec<u8>> = text.split(':').map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
    bytes?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builtin::plan::{self, Part};
    use coracle_job::Attachment;

    fn base(version: &str) -> Base {
        let list = format!(
            r#"{{"cniVersion":"{version}","name":"n","plugins":[{{"type":"bridge","dns":{{"nameservers":["10.0.0.10"]}},
                "ipam":{{"type":"host-local","subnet":"10.1.0.0/24","routes":[{{"dst":"0.0.0.0/0"}},{{"dst":"10.9.0.0/16","gw":"10.1.0.9"}}]}}}}]}}"#
        );
        let attachment =
            Attachment { container_id: "a".into(), interface: "eth0".into(), ..Attachment::default() };
        let parts = plan::parts(&list, &attachment, &|_| true).unwrap();
        let [Part::BuiltIn(plan)] = &parts[..] else { panic!("{parts:?}") };
        plan.base.clone().unwrap()
    }

    fn interfaces() -> Vec<Interface> {
        let make = |name: &str, mac: &str, sandbox: &str| Interface {
            name: name.into(),
            mac: mac.into(),
            sandbox: sandbox.into(),
        };
        vec![
            make("cni0", "02:00:00:00:00:01", ""),
            make("veth1", "02:00:00:00:00:02", ""),
            make("eth0", "02:00:00:00:00:03", "/run/netns/a"),
        ]
    }

    fn leases() -> Vec<Lease> {
        let lease = |address: &str, gateway: &str| Lease {
            address: address.parse().unwrap(),
            gateway: gateway.parse().unwrap(),
        };
        vec![lease("fd00::5/64", "fd00::1"), lease("10.1.0.5/24", "10.1.0.1")]
    }

    #[test]
    fn results_have_the_format_of_the_plugins() {
        for (version, six, four) in [("1.0.0", "", ""), ("0.3.1", r#","version":"6""#, r#","version":"4""#)] {
            let expected = format!(
                r#"{{"cniVersion":"{version}","interfaces":[
                    {{"name":"cni0","mac":"02:00:00:00:00:01"}},{{"name":"veth1","mac":"02:00:00:00:00:02"}},
                    {{"name":"eth0","mac":"02:00:00:00:00:03","sandbox":"/run/netns/a"}}],
                  "ips":[{{"interface":2,"address":"fd00::5/64","gateway":"fd00::1"{six}}},
                    {{"interface":2,"address":"10.1.0.5/24","gateway":"10.1.0.1"{four}}}],
                  "routes":[{{"dst":"0.0.0.0/0"}},{{"dst":"10.9.0.0/16","gw":"10.1.0.9"}}],
                  "dns":{{"nameservers":["10.0.0.10"]}}}}"#
            );
            let found = outcome(version, &base(version), interfaces(), &leases());
            let parse = |text: &str| serde_json::from_str::<Value>(text).unwrap();
            assert_eq!(parse(&found.result), parse(&expected), "{version}");
            assert_eq!(found.addresses, ["10.1.0.5", "fd00::5"], "the first IPv4 address is first");
        }
    }

    #[test]
    fn del_finds_links_and_addresses_in_any_result() {
        let mut found = outcome("1.0.0", &base("1.0.0"), interfaces(), &leases());
        let link = Interface { name: "bwp1".into(), mac: "02:00:00:00:00:04".into(), sandbox: String::new() };
        add_link(&mut found, link.clone());
        assert_eq!(found.interfaces.last(), Some(&link));
        let made = read(&found.result, "eth0");
        assert_eq!(made.links, ["cni0", "veth1", "bwp1"]);
        assert_eq!(made.addresses, leases().iter().map(|lease| lease.address).collect::<Vec<_>>());
        assert!(read(&found.result, "eth1").addresses.is_empty(), "addresses of another interface");
        for text in ["", "[]", "{}", r#"{"ips":7,"interfaces":[7,{}]}"#, r#"{"ips":[{"address":"x"}]}"#] {
            assert!(read(text, "eth0").addresses.is_empty(), "{text}");
        }
    }
}
