//! Requests to nodes of the site: plain HTTP with short time limits, without a proxy, redirects or credentials of a registry. The
//! worker has the site's key and signs the requests.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::time::Duration;

use ureq::http::Response;
use ureq::http::header::{ACCEPT, AUTHORIZATION, RANGE, WWW_AUTHENTICATE};
use ureq::{Agent, Body};

use super::decoded::Codings;
use super::endpoint::{checked, parse_url, unreachable_peer};
use super::protocol::{AskNeighbour, Get, Resolved};
use super::request_failure::RequestFailure;
use crate::mirror::SCHEME;

/// Time limit for a connection: neighbours are in the same network.
const CONNECT_MAX: Duration = Duration::from_secs(1);
/// Time limit from a request to the head of its answer, which a neighbour sends before it waits for anything.
const FIRST_BYTE_MAX: Duration = Duration::from_secs(2);
/// Time limit for more data of a body. A neighbour that waits for its own registry is asked again.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// Buffer sizes in bytes of a connection.
const INPUT_BYTES: usize = 64 << 10;
const OUTPUT_BYTES: usize = 4 << 10;
/// Maximum number of addresses: a larger site has several lists.
const NEIGHBOURS_MAX: usize = 32;
/// Prefix of a name of which all addresses are neighbours.
const BY_DNS: &str = "dns:";
/// Maximum length of a nonce in bytes.
const NONCE_BYTES_MAX: usize = 128;

/// The HTTP client for neighbours.
pub(super) struct Neighbours(Agent);

impl Neighbours {
    pub(super) fn new() -> Self {
        let config = Agent::config_builder()
            .proxy(None)
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .accept_encoding("identity")
            .user_agent(concat!("coracle/", env!("CARGO_PKG_VERSION")))
            .input_buffer_size(INPUT_BYTES)
            .output_buffer_size(OUTPUT_BYTES)
            // A connection that its server closes at this moment would look like a neighbour that is gone.
            .max_idle_connections(0)
            .max_idle_connections_per_host(0)
            .timeout_connect(Some(CONNECT_MAX))
            .timeout_recv_response(Some(FIRST_BYTE_MAX))
            .timeout_per_read(Some(SILENCE_MAX))
            .build();
        Self(config.into())
    }

    /// Makes a request; the response has a success status.
    pub(super) fn get(
        &self,
        ask: &AskNeighbour,
        get: &Get,
    ) -> Result<(Response<Body>, Codings), RequestFailure> {
        let url = parse_url(&format!("http://{}{}", ask.address, ask.target))?;
        let mut request = if ask.is_head { self.0.head(&url) } else { self.0.get(&url) };
        request = request.header(ACCEPT, &get.accept);
        let range = get.range();
        for (name, value) in [(RANGE, &range), (AUTHORIZATION, &ask.authorization)] {
            if !value.is_empty() {
                request = request.header(name, value);
            }
        }
        let response = request.call().map_err(|error| unreachable_peer(&url, &error))?;
        let nonce = nonce(&response);
        // The head of a whole blob has no length that could be compared with that of a range.
        checked(response, get, &format!("http://{}", ask.address)).map_err(|failed| match failed.status {
            Some(401) => RequestFailure { nonce, ..failed },
            _ => failed,
        })
    }
}

/// The nonce of a challenge; empty if there is none.
fn nonce(response: &Response<Body>) -> String {
    let challenge = response.headers().get(WWW_AUTHENTICATE).and_then(|value| value.to_str().ok());
    let nonce = challenge.and_then(|value| value.strip_prefix(SCHEME)).unwrap_or_default().trim();
    let is_nonce = nonce.len() <= NONCE_BYTES_MAX && nonce.bytes().all(|byte| byte.is_ascii_graphic());
    if is_nonce { nonce.to_owned() } else { String::new() }
}

/// The addresses of neighbours, each once. A name that cannot be resolved has none.
pub(super) fn resolve(names: &[String]) -> Vec<Resolved> {
    let mut found: Vec<Resolved> = Vec::new();
    for name in names {
        let addresses = match name.strip_prefix(BY_DNS) {
            Some(name) => name.to_socket_addrs().map(Iterator::collect).unwrap_or_default(),
            None => name.parse().map_or_else(|_| Vec::new(), |address: SocketAddr| vec![address]),
        };
        for address in addresses {
            if found.len() < NEIGHBOURS_MAX && found.iter().all(|other| other.address != address) {
                found.push(Resolved { address, from: from(address) });
            }
        }
    }
    found
}

/// The address from which this node contacts another one: the kernel chooses it, and no data is sent.
fn from(address: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr =
        if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(address).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_addresses_are_recognised_and_names_resolved_once() {
        let names =
            ["127.0.0.1:5000", "127.0.0.1:5000", "dns:localhost:5000", "nonsense", "dns:", "dns:x.invalid:1"];
        let found = resolve(&names.map(str::to_owned));
        let v4: Vec<&Resolved> = found.iter().filter(|one| one.address.is_ipv4()).collect();
        assert_eq!(v4.len(), 1, "{found:?}");
        assert_eq!(v4[0].from, Some(v4[0].address.ip()), "an own address");
    }

    #[test]
    fn no_more_addresses_than_the_limit_are_used() {
        let names: Vec<String> = (1..=100).map(|port| format!("127.0.0.1:{port}")).collect();
        assert_eq!(resolve(&names).len(), NEIGHBOURS_MAX);
    }
}
