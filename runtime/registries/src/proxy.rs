//! Determines the proxy for a URL from the environment in the same way as curl and Go programs: `HTTP_PROXY`,
//! `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`, in upper or lower case. Addresses of this machine are always
//! contacted directly.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use ureq::http::Uri;

/// The relevant environment variables. There is no `Debug`, because a proxy's URL may contain a password.
#[derive(Clone, Default, Serialize, Deserialize)]
pub struct Environment {
    http: Option<Proxy>,
    https: Option<Proxy>,
    no_proxy: String,
}

/// A proxy of the environment.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proxy {
    /// Name of the variable.
    variable: String,
    /// The value of the variable, which may contain a password.
    value: String,
}

impl Proxy {
    /// The URL of the proxy with its scheme, which may contain a password. The schemes are those of Go's client; as
    /// there, a proxy of SOCKS always gets host names and looks them up itself.
    ///
    /// # Errors
    /// The scheme is not supported, or the value is no URL; the text names the variable and has no password.
    pub fn url(&self) -> Result<String, String> {
        let (scheme, rest) = self.value.split_once("://").unwrap_or(("http", &self.value));
        let scheme = scheme.to_ascii_lowercase();
        let scheme = match scheme.as_str() {
            "http" | "https" => scheme.as_str(),
            "socks5" | "socks5h" => "socks5h",
            _ => {
                let known = "http, https, socks5 and socks5h are supported";
                return Err(format!("{}: a proxy with {scheme:?}: {known}", self.variable));
            }
        };
        let url: Option<Uri> = format!("{scheme}://{rest}").parse().ok();
        match url.filter(|url| url.host().is_some_and(|host| !host.is_empty())) {
            Some(url) => Ok(url.to_string()),
            None => Err(format!("{}: the value is not the URL of a proxy", self.variable)),
        }
    }

    /// The URL as text for users, without user and password.
    pub fn shown(&self) -> String {
        match self.url() {
            Ok(_) => {
                let (scheme, rest) = self.value.split_once("://").unwrap_or(("http", &self.value));
                format!("{scheme}://{} of {}", rest.rsplit('@').next().unwrap_or_default(), self.variable)
            }
            Err(why) => format!("{why}, so no request is sent"),
        }
    }
}

impl Environment {
    /// Reads the environment of this process.
    pub fn read() -> Self {
        Self::of(|name| std::env::var(name).ok())
    }

    fn of(variable: impl Fn(&str) -> Option<String>) -> Self {
        let either = |name: &str| {
            let values = [name.to_ascii_uppercase(), name.to_ascii_lowercase()];
            values.into_iter().find_map(|name| {
                let value = variable(&name).filter(|value| !value.is_empty())?;
                Some(Proxy { variable: name, value })
            })
        };
        let all = either("all_proxy");
        Self {
            http: either("http_proxy").or_else(|| all.clone()),
            https: either("https_proxy").or(all),
            no_proxy: either("no_proxy").map(|found| found.value).unwrap_or_default(),
        }
    }

    /// The proxy for a URL; `None` if the host is contacted directly.
    pub fn proxy_for(&self, url: &Uri) -> Option<&Proxy> {
        let proxy = match url.scheme_str() {
            Some("https") => self.https.as_ref(),
            _ => self.http.as_ref(),
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
    use super::{Environment, Proxy};

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
            let proxy = environment.proxy_for(&url.parse().unwrap());
            assert_eq!(proxy.map(|proxy| proxy.value.as_str()), expected, "{url}");
        }
        let none = Environment::of(|name| (name == "NO_PROXY").then(|| "*".to_owned()));
        assert!(none.proxy_for(&"https://reg.example".parse().unwrap()).is_none());
        let every =
            Environment::of(|name| Some(if name == "NO_PROXY" { "*" } else { "http://p" }.to_owned()));
        assert!(every.proxy_for(&"https://reg.example".parse().unwrap()).is_none());
    }

    /// Other values are errors with the name of the variable, and never a direct connection.
    #[test]
    fn only_supported_proxies_are_used() {
        let proxy = |value: &str| Proxy { variable: "HTTPS_PROXY".into(), value: value.into() };
        for (value, url, shown) in [
            ("p.example:3128", "http://p.example:3128/", "http://p.example:3128 of HTTPS_PROXY"),
            ("HTTPS://u:pw@p.example", "https://u:pw@p.example/", "HTTPS://p.example of HTTPS_PROXY"),
            ("socks5://u:pw@p:1080", "socks5h://u:pw@p:1080/", "socks5://p:1080 of HTTPS_PROXY"),
            ("socks5h://[::1]:1080", "socks5h://[::1]:1080/", "socks5h://[::1]:1080 of HTTPS_PROXY"),
        ] {
            assert_eq!((proxy(value).url().as_deref(), proxy(value).shown().as_str()), (Ok(url), shown));
        }
        for value in
            ["socks4://u:pw@p", "socks4a://p", "socks://p", "ftp://u:pw@p", "http://u:pw@ p", "http://"]
        {
            let why = proxy(value).url().unwrap_err();
            assert!(why.starts_with("HTTPS_PROXY: ") && !why.contains("pw"), "{why}");
            assert!(proxy(value).shown().starts_with(&why), "{why}");
        }
    }
}
