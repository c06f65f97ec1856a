//! Where an image is asked for. A registry's own endpoint follows from its name (REG-3 and REG-4 in CRI facts §8.1).

use std::net::IpAddr;

use coracle_job::{Credentials, Endpoint, Tls};

/// The endpoints of `registry` (normalised), in the order to try them.
pub(super) fn endpoints(registry: &str, credentials: Credentials) -> Vec<Endpoint> {
    vec![Endpoint {
        url: default_url(registry),
        repository: String::new(),
        credentials,
        tls: Tls::default(),
        is_mirror: false,
    }]
}

/// Docker Hub's API has a host of its own. A registry on this machine speaks plain http, unless at the port of https.
fn default_url(registry: &str) -> String {
    let host = if registry == "docker.io" { "registry-1.docker.io" } else { registry };
    let scheme = if is_loopback(host) { "http" } else { "https" };
    format!("{scheme}://{host}/v2")
}

fn is_loopback(registry: &str) -> bool {
    let (host, port) = match registry.rsplit_once(':') {
        // The colons of `[::1]` are inside.
        Some((host, port)) if !port.contains(']') => (host, port),
        _ => (registry, ""),
    };
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    port != "443" && (host == "localhost" || address.is_ok_and(|address| address.is_loopback()))
}

#[cfg(test)]
mod tests {
    use super::default_url;

    #[test]
    fn urls_follow_from_registries() {
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
            assert_eq!(default_url(registry), expected, "{registry}");
        }
    }
}
