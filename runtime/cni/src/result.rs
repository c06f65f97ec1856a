//! Parses results of ADD in the formats of all CNI versions. Pure.
//!
//! ```text
//!     0.1, 0.2        ip4, ip6 {ip, gateway, routes}, dns
//!     0.3.0 to 0.4.0  interfaces, ips [{version, address, gateway, interface}], routes, dns
//!     1.0, 1.1        without `version` of ips; 1.1 adds fields
//! ```
//!
//! An older format is converted to the list's version; a newer one is not changed, because only plugins that
//! can also parse it may return it. Rules: CNI spec 1.1.0 "Success"; CRI 5.4.

use std::net::IpAddr;

use coracle_job::{CniOutcome, Interface};
use serde_json::{Map, Value};

use super::list::age;

/// First CNI version whose results have `interfaces` and `ips`.
const IPS_SINCE: &str = "0.3.0";
/// First CNI version whose `ips` have no `version`.
const NO_FAMILY_SINCE: &str = "1.0.0";

type Object = Map<String, Value>;

/// Converts a plugin's standard output into a result of the list's `version` for the next plugin. Output that
/// needs no conversion is not changed. Error texts continue "returned …".
pub(super) fn at_version(stdout: &[u8], version: &str) -> Result<String, String> {
    let text = std::str::from_utf8(stdout).map_err(|_| "a result that is not UTF-8".to_owned())?.trim();
    if text.is_empty() {
        return Err("no result".to_owned());
    }
    let mut result: Object =
        serde_json::from_str(text).map_err(|error| format!("a result that cannot be parsed: {error}"))?;
    let own = own_version(&result, version)?;
    if result.contains_key("cniVersion") && age(&own) >= age(version) {
        return Ok(text.to_owned());
    }
    raise(&mut result, &own, version);
    Ok(Value::Object(result).to_string())
}

/// The version of the result. Without `cniVersion` it is 0.2.0 if it has that format, otherwise the list's
/// version.
fn own_version(result: &Object, list: &str) -> Result<String, String> {
    match result.get("cniVersion") {
        Some(Value::String(own)) if age(own).is_some() => Ok(own.clone()),
        Some(other) => Err(format!("a result of unknown cniVersion {other}")),
        None if result.contains_key("ip4") || result.contains_key("ip6") => Ok("0.2.0".to_owned()),
        None => Ok(list.to_owned()),
    }
}

/// Converts a result from version `from` to the later version `to`; if `to` is older, only the version number
/// is changed.
fn raise(result: &mut Object, from: &str, to: &str) {
    let crosses = |step: &str| age(from) < age(step) && age(to) >= age(step);
    if crosses(IPS_SINCE) {
        let mut ips = Vec::new();
        let mut routes = Vec::new();
        for (key, family) in [("ip4", "4"), ("ip6", "6")] {
            let Some(Value::Object(mut old)) = result.remove(key) else { continue };
            let mut new = Object::new();
            new.insert("version".to_owned(), Value::from(family));
            new.extend(old.remove("ip").map(|address| ("address".to_owned(), address)));
            new.extend(old.remove("gateway").map(|gateway| ("gateway".to_owned(), gateway)));
            ips.push(Value::Object(new));
            if let Some(Value::Array(more)) = old.remove("routes") {
                routes.extend(more);
            }
        }
        result.insert("ips".to_owned(), Value::Array(ips));
        if !routes.is_empty() {
            result.insert("routes".to_owned(), Value::Array(routes));
        }
    }
    if crosses(NO_FAMILY_SINCE)
        && let Some(Value::Array(ips)) = result.get_mut("ips")
    {
        ips.iter_mut().filter_map(Value::as_object_mut).for_each(|ip| drop(ip.remove("version")));
    }
    result.insert("cniVersion".to_owned(), Value::from(to));
}

/// Creates the outcome of ADD from the final result. Fails if `interface` has no address.
pub(super) fn outcome(result: String, interface: &str) -> Result<CniOutcome, String> {
    let mut newest: Object =
        serde_json::from_str(&result).map_err(|error| format!("final result: {error}"))?;
    let own = own_version(&newest, NO_FAMILY_SINCE)?;
    if age(&own) < age(NO_FAMILY_SINCE) {
        raise(&mut newest, &own, NO_FAMILY_SINCE);
    }
    let interfaces: Vec<Interface> = list_of(&newest, "interfaces").iter().map(read_interface).collect();
    let mut addresses = Vec::new();
    for ip in list_of(&newest, "ips") {
        if belongs(ip, &interfaces, interface) {
            addresses.push(read_address(ip)?);
        }
    }
    // The primary address is the first IPv4 address, otherwise the first one. The others keep their order.
    if let Some(first) = addresses.iter().position(IpAddr::is_ipv4) {
        addresses[..=first].rotate_right(1);
    }
    if addresses.is_empty() {
        return Err(format!("the result gives {interface} no address"));
    }
    Ok(CniOutcome { addresses: addresses.iter().map(IpAddr::to_string).collect(), result, interfaces })
}

fn list_of<'a>(result: &'a Object, key: &str) -> &'a [Value] {
    result.get(key).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn read_interface(value: &Value) -> Interface {
    let text = |key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    Interface { name: text("name"), mac: text("mac"), sandbox: text("sandbox") }
}

/// Whether an element of `ips` belongs to the pod's interface: the referenced interface has this name and a
/// sandbox. An element without a reference belongs to it, one with an invalid reference does not.
fn belongs(ip: &Value, interfaces: &[Interface], name: &str) -> bool {
    let Some(index) = ip.get("interface").filter(|index| !index.is_null()) else { return true };
    if interfaces.is_empty() {
        return true;
    }
    let found = index.as_u64().and_then(|index| interfaces.get(usize::try_from(index).ok()?));
    found.is_some_and(|found| found.name == name && !found.sandbox.is_empty())
}

/// The address of an element of `ips` without the prefix length, which must be there and fit (CNI specification: CIDR notation).
fn read_address(ip: &Value) -> Result<IpAddr, String> {
    let text = ip.get("address").and_then(Value::as_str).unwrap_or_default();
    let parsed = text.split_once('/').and_then(|(address, length)| {
        let address: IpAddr = address.parse().ok()?;
        let bits = if address.is_ipv4() { 32 } else { 128 };
        // A number with a sign is one for Rust.
        let is_number = length.bytes().all(|byte| byte.is_ascii_digit());
        (is_number && length.parse::<u8>().ok()? <= bits).then_some(address)
    });
    parsed.ok_or_else(|| format!("the result has the invalid address {:?}", shortened(text)))
}

/// The start of a text that becomes a part of an error.
fn shortened(text: &str) -> &str {
    text.char_indices().nth(100).map_or(text, |(end, _)| &text[..end])
}

#[cfg(test)]
mod tests {
    use super::{at_version, outcome};

    /// Tests the format of each version with two addresses: it is converted to the result that a list of
    /// version 1.0.0 passes on.
    #[test]
    fn older_results_are_converted_to_the_version_of_the_list() {
        let old = r#""ip4":{"ip":"10.1.0.5/24","gateway":"10.1.0.1","routes":[{"dst":"0.0.0.0/0"}]},"ip6":{"ip":"fd00::5/64"}"#;
        let middle = r#""ips":[{"version":"4","address":"10.1.0.5/24","gateway":"10.1.0.1"},{"version":"6","address":"fd00::5/64"}],"routes":[{"dst":"0.0.0.0/0"}]"#;
        let new = r#""ips":[{"address":"10.1.0.5/24","gateway":"10.1.0.1"},{"address":"fd00::5/64"}],"routes":[{"dst":"0.0.0.0/0"}]"#;
        let versions = [
            ("0.1.0", old),
            ("0.2.0", old),
            ("0.3.0", middle),
            ("0.3.1", middle),
            ("0.4.0", middle),
            ("1.0.0", new),
            ("1.1.0", new),
        ];
        let parse = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        for (index, (from, shape)) in versions.iter().enumerate() {
            let printed = format!(r#"{{"cniVersion":"{from}",{shape}}}"#);
            for (to, expected) in &versions[index..] {
                let got = at_version(printed.as_bytes(), to).unwrap();
                let expected = format!(r#"{{"cniVersion":"{to}",{expected}}}"#);
                assert_eq!(parse(&got), parse(&expected), "{from} to {to}");
            }
            let outcome = outcome(printed.clone(), "eth0").unwrap();
            assert_eq!(outcome.addresses, ["10.1.0.5", "fd00::5"], "{from}");
            assert_eq!(outcome.result, printed);
        }
    }

    #[test]
    fn the_version_of_a_result_without_one_is_detected_by_its_format() {
        let got = at_version(br#"{"ip4":{"ip":"10.1.0.5/24"}}"#, "0.4.0").unwrap();
        assert_eq!(got, r#"{"cniVersion":"0.4.0","ips":[{"address":"10.1.0.5/24","version":"4"}]}"#);
        let got = at_version(br#"{"ips":[]}"#, "0.4.0").unwrap();
        assert_eq!(got, r#"{"cniVersion":"0.4.0","ips":[]}"#);
    }

    #[test]
    fn invalid_results_are_refused() {
        let cases: [(&[u8], &str); 6] = [
            (b"", "no result"),
            (b" \n", "no result"),
            (b"hello", "a result that cannot be parsed: expected value at line 1 column 1"),
            (
                b"[]",
                "a result that cannot be parsed: invalid type: sequence, expected a map at line 1 column 0",
            ),
            (b"\xff", "a result that is not UTF-8"),
            (br#"{"cniVersion":"9.0.0"}"#, "a result of unknown cniVersion \"9.0.0\""),
        ];
        for (printed, expected) in cases {
            assert_eq!(at_version(printed, "1.0.0").unwrap_err(), expected, "{printed:?}");
        }
    }

    /// Any output is either refused or converted into a result of the list's version.
    #[test]
    fn damaged_results_are_refused_or_converted() {
        let whole = br#"{"cniVersion":"0.2.0","ip4":{"ip":"10.1.0.5/24","routes":[{"dst":"0.0.0.0/0"}]},"interfaces":[{"name":"eth0"}],"ips":[{"address":"fd00::5/64","interface":0}]}"#;
        let mut random: u64 = 11;
        for _ in 0..5000 {
            let mut bytes = whole.to_vec();
            // xorshift64
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let at = random as usize % bytes.len();
            match random >> 62 {
                0 | 1 => bytes[at] = b"{}[]\",:0"[(random >> 40) as usize % 8],
                2 => drop(bytes.drain(at..(at + 9).min(whole.len()))),
                _ => bytes[at] = (random >> 32) as u8,
            }
            let shown = String::from_utf8_lossy(&bytes).into_owned();
            if let Ok(text) = at_version(&bytes, "1.0.0") {
                assert_eq!(at_version(text.as_bytes(), "1.0.0").as_ref(), Ok(&text), "{shown}");
                let _ = outcome(text, "eth0");
            }
        }
    }

    #[test]
    fn addresses_of_the_pods_interface_are_returned_with_ipv4_first() {
        let interfaces = r#""interfaces":[{"name":"br0"},{"name":"eth0"},{"name":"eth0","sandbox":"/run/netns/a"},{"name":"net1","sandbox":"/run/netns/a"}]"#;
        let cases = [
            (r#"{"address":"10.0.0.2/8","interface":2}"#, Ok("10.0.0.2")),
            (r#"{"address":"10.0.0.2/8"}"#, Ok("10.0.0.2")),
            (r#"{"address":"10.0.0.2/8","interface":null}"#, Ok("10.0.0.2")),
            (
                r#"{"address":"fd00::2/64","interface":2},{"address":"fd00::3/64","interface":2},{"address":"10.0.0.2/8","interface":2}"#,
                Ok("10.0.0.2 fd00::2 fd00::3"),
            ),
            (
                r#"{"address":"10.0.0.9/8","interface":3},{"address":"10.0.0.2/8","interface":2}"#,
                Ok("10.0.0.2"),
            ),
            (r#"{"address":"10.0.0.2/8","interface":0}"#, Err("the result gives eth0 no address")),
            (r#"{"address":"10.0.0.2/8","interface":1}"#, Err("the result gives eth0 no address")),
            (r#"{"address":"10.0.0.2/8","interface":99}"#, Err("the result gives eth0 no address")),
            (r#"{"address":"10.0.0.2/8","interface":-1}"#, Err("the result gives eth0 no address")),
            ("", Err("the result gives eth0 no address")),
            (
                r#"{"address":"10.0.0/8","interface":2}"#,
                Err("the result has the invalid address \"10.0.0/8\""),
            ),
            (r#"{"interface":2}"#, Err("the result has the invalid address \"\"")),
            (
                r#"{"address":"10.0.0.2","interface":2}"#,
                Err("the result has the invalid address \"10.0.0.2\""),
            ),
            (
                r#"{"address":"10.0.0.2/33","interface":2}"#,
                Err("the result has the invalid address \"10.0.0.2/33\""),
            ),
            (
                r#"{"address":"10.0.0.2/+8","interface":2}"#,
                Err("the result has the invalid address \"10.0.0.2/+8\""),
            ),
        ];
        for (ips, expected) in cases {
            let result = format!(r#"{{"cniVersion":"1.0.0",{interfaces},"ips":[{ips}]}}"#);
            let got = outcome(result, "eth0").map(|outcome| outcome.addresses.join(" "));
            assert_eq!(got, expected.map(str::to_owned).map_err(str::to_owned), "{ips}");
        }
        let without = r#"{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.2/8","interface":7}]}"#;
        assert_eq!(outcome(without.to_owned(), "eth0").unwrap().addresses, ["10.0.0.2"]);
    }
}
