//! Requests to nodes of the site: plain HTTP with short time limits, without a proxy, redirects or credentials of a registry. The
//! worker has the site's key and signs the requests.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use coracle_job::{Failure, FailureKind};
use coracle_sandbox::describe_io;
use coracle_site::SCHEME;
use ureq::http::header::{ACCEPT, AUTHORIZATION, CONTENT_ENCODING, RANGE, WWW_AUTHENTICATE};
use ureq::http::{Response, StatusCode};
use ureq::{Agent, Body};

use super::agent;
use super::decoded::Codings;
use super::endpoint::{checked, parse_url, unreachable_peer};
use super::protocol::{AskNeighbour, Get, Resolved};
use super::request_failure::RequestFailure;

/// Time limit for a connection: neighbours are in the same network.
const CONNECT_MAX: Duration = Duration::from_secs(1);
/// Time limit from a request to the head of its answer. A neighbour sends it before it waits for anything, but may first have to start
/// the process that serves, which a board does beside its own work.
const FIRST_BYTE_MAX: Duration = Duration::from_secs(5);
/// Time limit for more data of a body. A neighbour that waits for its own registry is asked again.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// Maximum number of addresses: a larger site has several lists.
const NEIGHBOURS_MAX: usize = 32;
/// Time limit for all names, shorter than that of the worker for the answer.
const LOOKUP_MAX: Duration = Duration::from_millis(1500);
/// Stack size in bytes of a thread that resolves a name.
const STACK_BYTES: usize = 128 << 10;
/// Prefix of a name of which all addresses are neighbours.
const BY_DNS: &str = "dns:";
/// Maximum length of a nonce in bytes.
const NONCE_BYTES_MAX: usize = 128;

/// The HTTP client for neighbours.
pub(super) struct Neighbours(Agent);

impl Neighbours {
    pub(super) fn new() -> Self {
        let config = agent::settings()
            .proxy(None)
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
        let what = format!("http://{}", ask.address);
        let checked = checked(response, get, &what).map_err(|failed| match failed.status {
            Some(401) => RequestFailure { nonce, ..failed },
            _ => failed,
        });
        let (response, codings) = checked?;
        if !ask.is_head {
            has_content(&response, &what)?;
        }
        Ok((response, codings))
    }
}

/// Checks that a response has the bytes of a blob as they are, and says how many: otherwise it could go on without them for ever.
///
/// # Errors
/// The neighbour does not send the blob now; it sends something else.
fn has_content(response: &Response<Body>, what: &str) -> Result<(), Failure> {
    match response.status() {
        StatusCode::OK | StatusCode::PARTIAL_CONTENT => {}
        status => {
            let text = format!("{what}: it does not send the blob now (HTTP {})", status.as_u16());
            return Err(Failure::new(FailureKind::Unavailable, text));
        }
    }
    match response.body().content_length().is_some() && !response.headers().contains_key(CONTENT_ENCODING) {
        true => Ok(()),
        false => Err(Failure::invalid(format!("{what}: encoded content, or content without its length"))),
    }
}

/// The nonce of a challenge; empty if there is none.
fn nonce(response: &Response<Body>) -> String {
    let challenge = response.headers().get(WWW_AUTHENTICATE).and_then(|value| value.to_str().ok());
    let nonce = challenge.and_then(|value| value.strip_prefix(SCHEME)).unwrap_or_default().trim();
    let is_nonce = nonce.len() <= NONCE_BYTES_MAX && nonce.bytes().all(|byte| byte.is_ascii_graphic());
    if is_nonce { nonce.to_owned() } else { String::new() }
}

/// The addresses of neighbours, each once. A name that is not resolved within [`LOOKUP_MAX`] has none.
pub(super) fn resolve(names: &[String]) -> Vec<Resolved> {
    resolve_with(names, LOOKUP_MAX, |name| name.to_socket_addrs().map(Iterator::collect).unwrap_or_default())
}

fn resolve_with(
    names: &[String],
    limit: Duration,
    look_up: impl Fn(&str) -> Vec<SocketAddr> + Clone + Send + 'static,
) -> Vec<Resolved> {
    let (sender, receiver) = mpsc::channel();
    for name in names.iter().filter_map(|name| name.strip_prefix(BY_DNS)).take(NEIGHBOURS_MAX) {
        let (sender, look_up, name) = (sender.clone(), look_up.clone(), name.to_owned());
        // The receiver does not wait any longer if the name comes too late.
        let work = move || drop(sender.send(look_up(&name)));
        if let Err(error) = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(work) {
            eprintln!("names of neighbours: start a thread: {}", describe_io(&error));
        }
    }
    drop(sender);
    let numeric = names.iter().filter_map(|name| name.parse().ok());
    let mut addresses: Vec<SocketAddr> = numeric.collect();
    let until = Instant::now() + limit;
    while let Ok(more) = receiver.recv_timeout(until.saturating_duration_since(Instant::now())) {
        addresses.extend(more);
    }
    let mut found: Vec<Resolved> = Vec::new();
    for address in addresses {
        if found.iter().any(|other| other.address == address) {
            continue;
        }
        if found.len() == NEIGHBOURS_MAX {
            eprintln!("there are more than {NEIGHBOURS_MAX} neighbours: the others are not asked");
            break;
        }
        found.push(Resolved { address, from: from(address) });
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
    fn a_name_that_is_not_resolved_removes_no_other_neighbour() {
        let slow = |name: &str| {
            let is_slow = name.starts_with("slow");
            std::thread::sleep(Duration::from_secs(if is_slow { 60 } else { 0 }));
            vec![SocketAddr::from(([127, 0, 0, 1], if is_slow { 1 } else { 2 }))]
        };
        let names = ["dns:slow:1", "127.0.0.1:3", "dns:fast:2"].map(str::to_owned);
        let found = resolve_with(&names, Duration::from_secs(2), slow);
        let ports: Vec<u16> = found.iter().map(|one| one.address.port()).collect();
        assert_eq!(ports, [3, 2]);
    }

    #[test]
    fn no_more_addresses_than_the_limit_are_used() {
        let names: Vec<String> = (1..=100).map(|port| format!("127.0.0.1:{port}")).collect();
        assert_eq!(resolve(&names).len(), NEIGHBOURS_MAX);
    }
}
