//! URLs of endpoints: derived from a registry's name, or from configuration files (REG-3, REG-4 in CRI 8.1).

use std::net::IpAddr;

use ureq::http::Uri;

/// Host names of Docker Hub; references contain the first one.
pub(crate) const DOCKER_HUB: [&str; 3] = ["docker.io", "registry-1.docker.io", "index.docker.io"];

/// The default endpoint of a registry. Docker Hub's API has a different host. A registry on this machine uses
/// http, unless its port is 443 or the configuration has TLS settings for it (`has_tls`).
pub(crate) fn default_url(registry: &str, has_tls: bool) -> String {
    let host = if registry == "docker.io" { "registry-1.docker.io" } else { registry };
    format!("{}://{host}/v2", if has_tls { "https" } else { scheme(host) })
}

/// Normalises a configured endpoint: the scheme is optional, and so is the path that the specification
/// defines; any other path is the complete prefix (REG-4).
pub(crate) fn normalise(written: &str) -> Result<String, String> {
    let (base, path) = split(written)?;
    Ok(format!("{base}{}", if path.is_empty() { "/v2" } else { &path }))
}

/// Normalises an endpoint of hosts.toml: the path that the specification defines is appended to any other
/// path, unless that is the complete prefix.
pub(crate) fn normalise_host(written: &str, is_path_whole: bool) -> Result<String, String> {
    let (base, path) = split(written)?;
    let is_whole = is_path_whole || path.ends_with("/v2");
    Ok(format!("{base}{path}{}", if is_whole { "" } else { "/v2" }))
}

/// Splits a URL into scheme with authority, and the path without its trailing slash.
fn split(written: &str) -> Result<(String, String), String> {
    let text = written.trim();
    let whole = match text.contains("://") {
        true => text.to_owned(),
        false => format!("{}://{text}", scheme(text.split('/').next().unwrap_or_default())),
    };
    let url: Uri = whole.parse().map_err(|_| format!("{written:?} is not a URL"))?;
    let (Some(scheme @ ("http" | "https")), Some(authority)) = (url.scheme_str(), url.authority()) else {
        return Err(format!("{written:?} is neither http nor https"));
    };
    // The parser drops fragments silently.
    if url.query().is_some() || whole.contains('#') || authority.as_str().contains('@') {
        return Err(format!("{written:?} has a query, a fragment or a user, which an endpoint cannot have"));
    }
    Ok((format!("{scheme}://{authority}"), url.path().trim_end_matches('/').to_owned()))
}

/// Host and port of a normalised URL: the key of `configs`.
pub(crate) fn host(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    rest.split('/').next().unwrap_or_default()
}

fn scheme(host: &str) -> &'static str {
    if is_loopback(host) { "http" } else { "https" }
}

fn is_loopback(registry: &str) -> bool {
    let (host, port) = match registry.rsplit_once(':') {
        // The colons are within the brackets of `[::1]`.
        Some((host, port)) if !port.contains(']') => (host, port),
        _ => (registry, ""),
    };
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    port != "443" && (host == "localhost" || address.is_ok_and(|address| address.is_loopback()))
}

#[cfg(test)]
mod tests {
    use super::{default_url, host, normalise, normalise_host};

    #[test]
    fn the_path_is_appended_unless_override_path_is_set() {
        for (written, is_path_whole, expected) in [
            ("https://reg.example", false, "https://reg.example/v2"),
            ("https://reg.example/v2/", false, "https://reg.example/v2"),
            ("http://reg.example/proxy/", false, "http://reg.example/proxy/v2"),
            ("http://reg.example/v2/proxy", true, "http://reg.example/v2/proxy"),
            ("localhost:5000", false, "http://localhost:5000/v2"),
        ] {
            assert_eq!(normalise_host(written, is_path_whole).as_deref(), Ok(expected), "{written}");
        }
    }

    #[test]
    fn default_urls_are_derived_from_the_registry() {
        let cases = [
            ("docker.io", "https://registry-1.docker.io/v2"),
            ("quay.io", "https://quay.io/v2"),
            ("reg.example:5000", "https://reg.example:5000/v2"),
            ("localhost", "http://localhost/v2"),
            ("localhost:5000", "http://localhost:5000/v2"),
            ("localhost:443", "https://localhost:443/v2"),
            ("127.0.0.1:5000", "http://127.0.0.1:5000/v2"),
            ("[::1]", "http://[::1]/v2"),
            ("[::1]:5000", "http://[::1]:5000/v2"),
            ("[fd00::1]:5000", "https://[fd00::1]:5000/v2"),
            ("localhost.example", "https://localhost.example/v2"),
            ("10.0.0.1:5000", "https://10.0.0.1:5000/v2"),
        ];
        for (registry, expected) in cases {
            assert_eq!(default_url(registry, false), expected, "{registry}");
            assert_eq!(default_url(registry, true), expected.replace("http:", "https:"), "{registry}");
        }
    }

    #[test]
    fn configured_endpoints_are_normalised() {
        for (written, expected) in [
            ("https://reg.example:5000", "https://reg.example:5000/v2"),
            ("https://reg.example/", "https://reg.example/v2"),
            ("https://reg.example/v2/", "https://reg.example/v2"),
            ("http://10.0.0.2:5000/v2/proxy", "http://10.0.0.2:5000/v2/proxy"),
            ("http://10.0.0.2/artifactory/api/docker", "http://10.0.0.2/artifactory/api/docker"),
            ("reg.example", "https://reg.example/v2"),
            ("localhost:5000", "http://localhost:5000/v2"),
            ("127.0.0.1:443", "https://127.0.0.1:443/v2"),
            (" https://reg.example ", "https://reg.example/v2"),
        ] {
            assert_eq!(normalise(written).as_deref(), Ok(expected), "{written}");
        }
        for wrong in
            ["", "ftp://x", "https://", "https://a b", "https://a?q=1", "https://a#f", "https://u:p@a"]
        {
            assert!(normalise(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(host("https://reg.example:5000/v2"), "reg.example:5000");
    }
}
