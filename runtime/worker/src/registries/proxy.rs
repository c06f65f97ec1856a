//! Determines the proxy for a URL from the environment in the same way as curl and Go programs: `HTTP_PROXY`,
//! `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`, in upper or lower case. Addresses of this machine are always
//! contacted directly.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use ureq::http::Uri;

/// The relevant environment variables.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Environment {
    http: Option<String>,
    https: Option<String>,
    no_proxy: String,
}

impl Environment {
    /// Reads the environment of this process.
    pub(crate) fn read() -> Self {
        Self::of(|name| std::env::var(name).ok())
    }

    fn of(variable: impl Fn(&str) -> Option<String>) -> Self {
        let either = |name: &str| {
            let values = [name.to_ascii_uppercase(), name.to_ascii_lowercase()];
            values.iter().find_map(|name| variable(name).filter(|value| !value.is_empty()))
        };
        let all = either("all_proxy");
        Self {
            http: either("http_proxy").or_else(|| all.clone()),
            https: either("https_proxy").or(all),
            no_proxy: either("no_proxy").unwrap_or_default(),
        }
    }

    /// URL of the proxy for a URL, which may contain a password; `None` if the host is contacted directly.
    pub(crate) fn proxy_for(&self, url: &Uri) -> Option<&str> {
        let proxy = match url.scheme_str() {
            Some("https") => self.https.as_deref(),
            _ => self.http.as_deref(),
        }?;
        let host = url.host()?.trim_start_matches('[').trim_end_matches(']');
        let port = url.port_u16().unwrap_or(if url.scheme_str() == Some("https") { 443 } else { 80 });
        (!self.is_direct(host, port)).then_some(proxy)
    }

    fn is_direct(&self, host: &str, port: u16) -> bool {
        let address: Option<IpAddr> = host.parse().ok();
        if host.eq_ignore_ascii_case("localhost") || address.is_some_and(|address| address.is_loopback()) {
            return true;
        }
        let entries = self.no_proxy.split([',', ' ']).filter(|entry| !entry.is_empty());
        entries.into_iter().any(|entry| matches(entry, host, address, port))
    }
}

/// Matches an entry of `NO_PROXY`: `*`, an address, a network, a domain including its subdomains, or (with a
/// leading dot) only its subdomains; an entry with a port matches that port only.
fn matches(entry: &str, host: &str, address: Option<IpAddr>, port: u16) -> bool {
    if entry == "*" {
        return true;
    }
    if let Some((network, bits)) = entry.split_once('/') {
        let parsed = (network.parse().ok(), bits.parse().ok(), address);
        return matches!(parsed, (Some(network), Some(bits), Some(address)) if is_in(address, network, bits));
    }
    let (name, only_port) = match entry.rsplit_once(':') {
        Some((name, text)) if !name.contains(':') || name.ends_with(']') => (name, text.parse::<u16>().ok()),
        _ => (entry, None),
    };
    if only_port.is_some_and(|only| only != port) {
        return false;
    }
    if let Ok(named) = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>() {
        return address == Some(named);
    }
    let (name, host) = (name.trim_start_matches('*').to_ascii_lowercase(), host.to_ascii_lowercase());
    match name.strip_prefix('.') {
        Some(_) => host.ends_with(&name),
        None => host == name || host.strip_suffix(&name).is_some_and(|rest| rest.ends_with('.')),
    }
}

fn is_in(address: IpAddr, network: IpAddr, bits: u32) -> bool {
    match (address, network) {
        (IpAddr::V4(address), IpAddr::V4(network)) if bits <= 32 => {
            let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
            address.to_bits() & mask == network.to_bits() & mask
        }
        (IpAddr::V6(address), IpAddr::V6(network)) if bits <= 128 => {
            let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
            address.to_bits() & mask == network.to_bits() & mask
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::Environment;

    #[test]
    fn the_proxy_follows_from_the_environment() {
        let environment = Environment::of(|name| {
            let value = match name {
                "HTTPS_PROXY" => "http://secure:1",
                "all_proxy" => "http://all:1",
                "no_proxy" => {
                    ".below.example, at.example 10.0.0.0/8,fd00::/8,[fd11::1]:5000,only.example:5000,*.star.example"
                }
                _ => return None,
            };
            Some(value.to_owned())
        });
        for (url, expected) in [
            ("https://reg.example/v2", Some("http://secure:1")),
            ("http://reg.example/v2", Some("http://all:1")),
            ("https://localhost:5000/", None),
            ("https://127.0.0.2/", None),
            ("https://[::1]:5000/", None),
            ("https://x.below.example/", None),
            ("https://below.example/", Some("http://secure:1")),
            ("https://at.example:5000/", None),
            ("https://x.At.Example/", None),
            ("https://what.example/", Some("http://secure:1")),
            ("https://10.1.2.3/", None),
            ("https://11.1.2.3/", Some("http://secure:1")),
            ("https://[fd00::5]/", None),
            ("https://[fe00::5]/", Some("http://secure:1")),
            ("https://only.example:5000/", None),
            ("https://only.example/", Some("http://secure:1")),
            ("https://x.star.example/", None),
        ] {
            assert_eq!(environment.proxy_for(&url.parse().unwrap()), expected, "{url}");
        }
        let none = Environment::of(|name| (name == "NO_PROXY").then(|| "*".to_owned()));
        assert_eq!(none.proxy_for(&"https://reg.example".parse().unwrap()), None);
        let every =
            Environment::of(|name| Some(if name == "NO_PROXY" { "*" } else { "http://p" }.to_owned()));
        assert_eq!(every.proxy_for(&"https://reg.example".parse().unwrap()), None);
    }
}
