//! The other nodes of the site, and the choice of one of them for a blob, so that a site downloads an image once ([`super::shared`]).
//!
//! ```text
//! names ─► addresses (the fetcher resolves them, and says which is this node's)
//! blob ─► all are asked at once: complete │ fetching │ waiting │ nothing
//!            complete, fetching: the blob is downloaded from there, as it grows
//!            waiting, and before this node in the order: this node waits for it
//!            else: this node asks the registry, and announces it ([`Announcement`](crate::mirror::state))
//! ```
//! | two nodes cannot wait for each other, because | |
//! |---|---|
//! | only a node that has the blob or downloads it from a registry is followed | a node that follows another one is only `waiting` |
//! | the order of two nodes is the same on both | more bytes first, then a hash of the node's address and the digest, which distributes the layers of an image |
//!
//! Neighbours are trusted for nothing: the digest of the blob is verified as if a registry had sent it, and after a wrong one only
//! the registry is asked. Each wait for them has a limit, after which the registry is asked for the bytes that are missing.

use std::cmp::Reverse;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use coracle_job::{FailureKind, PullJob, Timeouts};
use sha2::{Digest, Sha256};

use crate::failure::failure;
use crate::fetch::{AskNeighbour, Body, Fetcher, Get, Head, RequestFailure};
use crate::mirror::{Signed, SiteKey};

/// Time for which a neighbour that cannot be reached is not asked.
const AWAY: Duration = Duration::from_secs(10);
/// Minimum rate of a neighbour in bytes per second, and the longest window over which it is measured: below that of a slow uplink
/// that several layers share.
const RATE_BYTES_MIN: u64 = 4 << 10;
const RATE_WINDOW_MS_MAX: u64 = 20_000;
/// Stack size in bytes of a thread that asks.
const STACK_BYTES: usize = 64 << 10;

/// The neighbours of this node in one pull.
pub(super) struct Neighbours {
    fetcher: Arc<Fetcher>,
    settings: coracle_job::Neighbours,
    registry: String,
    repository: String,
    key: Option<SiteKey>,
    timeouts: Timeouts,
    /// Known after the first question.
    site: OnceLock<Site>,
    /// Held during a round: the number of concurrent requests is limited.
    asking: Mutex<()>,
}

/// The nodes of the site.
#[derive(Default)]
struct Site {
    /// The address of this node for its neighbours; `None` if it does not serve them.
    own: Option<String>,
    peers: Vec<Arc<Peer>>,
}

/// A neighbour.
pub(super) struct Peer {
    pub(super) address: SocketAddr,
    state: Mutex<PeerState>,
}

#[derive(Default)]
struct PeerState {
    /// The nonce of its last challenge; empty: none.
    nonce: String,
    /// Time until which it is not asked.
    away_until: Option<Instant>,
}

/// A neighbour's share of a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Complete,
    /// The neighbour downloads the blob from a registry, and has this many bytes.
    Fetching(u64),
    /// The neighbour has this many bytes, and has not asked a registry.
    Waiting(u64),
    Nothing,
}

impl State {
    fn parse(field: &str) -> Self {
        let (word, bytes) = field.split_once(' ').unwrap_or((field, ""));
        match (word, bytes.parse()) {
            ("complete", _) => Self::Complete,
            ("fetching", Ok(bytes)) => Self::Fetching(bytes),
            ("waiting", Ok(bytes)) => Self::Waiting(bytes),
            _ => Self::Nothing,
        }
    }
}

/// An answer: the index of the neighbour, its share, and its number in the order of the blob.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    pub(super) peer: usize,
    pub(super) state: State,
    order: u64,
}

/// The action that follows from the answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// The blob is requested from this neighbour.
    Take(usize),
    /// A neighbour before this node in the order is about to get it.
    Wait,
    /// This node asks the registry; `is_alone`: no other node is about to.
    Registry { is_alone: bool },
}

/// Chooses for a node with `bytes` of the blob and this number in the order; `None`: it serves no one, so all others come first.
pub(super) fn choose(answers: &[Answer], bytes: u64, order: Option<u64>) -> Choice {
    let complete = answers.iter().filter(|answer| answer.state == State::Complete);
    // Nodes choose differently, so that one of those that have the blob does not serve all.
    if let Some(answer) = complete.min_by_key(|answer| answer.order ^ order.unwrap_or(0)) {
        return Choice::Take(answer.peer);
    }
    let fetching = answers.iter().filter_map(|answer| match answer.state {
        State::Fetching(bytes) => Some((Reverse(bytes), answer.order, answer.peer)),
        _ => None,
    });
    if let Some((_, _, peer)) = fetching.min() {
        return Choice::Take(peer);
    }
    let mut waiting = answers.iter().filter_map(|answer| match answer.state {
        State::Waiting(bytes) => Some((Reverse(bytes), answer.order)),
        _ => None,
    });
    let is_alone = waiting.clone().next().is_none();
    let is_behind = waiting.any(|other| order.is_none_or(|order| other < (Reverse(bytes), order)));
    if is_behind { Choice::Wait } else { Choice::Registry { is_alone } }
}

/// The number of a node in the order of a blob (rendezvous hashing): another node is the first for each blob.
fn order(node: &str, digest: &str) -> u64 {
    let hash = Sha256::new().chain_update(node).chain_update("\n").chain_update(digest).finalize();
    hash.first_chunk().map_or(0, |first| u64::from_be_bytes(*first))
}

/// The name of a node in the order.
fn name(address: SocketAddr) -> String {
    format!("{} {}", address.ip().to_canonical(), address.port())
}

impl Neighbours {
    /// The neighbours in the configuration of a pull; `None` if there are none, or if the site's key cannot be read.
    pub(super) fn of(job: &PullJob, fetcher: &Arc<Fetcher>) -> Option<Arc<Self>> {
        let settings = &job.registries.neighbours;
        if settings.names.is_empty() {
            return None;
        }
        let key = settings.key_file.as_deref().map(SiteKey::read).transpose();
        let key = key.inspect_err(|why| eprintln!("neighbours are not asked: {why}")).ok()?;
        let configured = &job.registries.timeouts;
        Some(Arc::new(Self {
            fetcher: fetcher.clone(),
            settings: settings.clone(),
            registry: job.registry.clone(),
            repository: job.repository.clone(),
            key,
            timeouts: Timeouts {
                rate_bytes_min: configured.rate_bytes_min.max(RATE_BYTES_MIN),
                rate_window_ms: configured.rate_window_ms.min(RATE_WINDOW_MS_MAX),
                ..*configured
            },
            site: OnceLock::new(),
            asking: Mutex::new(()),
        }))
    }

    /// The time limits of bodies.
    pub(super) fn timeouts(&self) -> &Timeouts {
        &self.timeouts
    }

    /// Whether the word of a neighbour counts for a tag.
    pub(super) fn resolve_tags(&self) -> bool {
        self.settings.resolve_tags
    }

    /// The neighbours, in the order of their names.
    pub(super) fn peers(&self) -> &[Arc<Peer>] {
        &self.site().peers
    }

    /// The number of this node in the order of a blob; `None` if it serves no one.
    pub(super) fn own_order(&self, digest: &str) -> Option<u64> {
        self.site().own.as_ref().map(|own| order(own, digest))
    }

    fn site(&self) -> &Site {
        self.site.get_or_init(|| match self.fetcher.resolve(self.settings.names.clone()) {
            Ok(found) => {
                let port = self.settings.port;
                let mut site = Site::default();
                for one in found {
                    let own = one.from.zip(port).map(|(from, port)| SocketAddr::new(from, port));
                    match own == Some(one.address) {
                        // The site's list has this node, too: the others know it by this address.
                        true => site.own = own.map(name),
                        false => site.peers.push(Arc::new(Peer::new(one.address))),
                    }
                    if site.own.is_none() {
                        site.own = own.map(name);
                    }
                }
                site
            }
            Err(failure) => {
                eprintln!("neighbours are not asked: {}", failure.message);
                Site::default()
            }
        })
    }

    /// Requests `get` from a neighbour.
    pub(super) fn get(&self, peer: &Peer, get: Get) -> Result<(Head, Body), RequestFailure> {
        self.request(peer, get, false)
    }

    fn request(&self, peer: &Peer, get: Get, is_head: bool) -> Result<(Head, Body), RequestFailure> {
        let target = format!("/v2/{}/{}?ns={}", self.repository, get.what, self.registry);
        let range = get.range();
        let mut is_proven = false;
        if peer.is_away() {
            let text = format!("neighbour {} could not be reached before", peer.address);
            return Err(failure(FailureKind::Unavailable, text).into());
        }
        loop {
            let method = if is_head { "HEAD" } else { "GET" };
            let signed = Signed { server: peer.address, method, target: &target, range: &range };
            let nonce = peer.lock().nonce.clone();
            let authorization = match &self.key {
                Some(key) if !nonce.is_empty() => key.authorize(&nonce, signed),
                Some(_) | None => String::new(),
            };
            let ask = AskNeighbour { address: peer.address, target: target.clone(), is_head, authorization };
            match self.fetcher.get(Get { neighbour: Some(ask), ..get.clone() }) {
                // The first question, a nonce that has expired, or a server that has ended and begun again.
                Err(failed) if !failed.nonce.is_empty() && self.key.is_some() && !is_proven => {
                    peer.lock().nonce.clone_from(&failed.nonce);
                    is_proven = true;
                }
                answer => {
                    return answer.inspect_err(|failed| {
                        // A node that answers is there, whatever it answers; but without the site's key it will never serve
                        // this node.
                        if failed.status.is_none_or(|status| status == 401) {
                            peer.lock().away_until = Some(Instant::now() + AWAY);
                        }
                    });
                }
            }
        }
    }

    /// Asks those neighbours of which `is_asked` is true how much they have of a blob.
    pub(super) fn ask(&self, digest: &str, is_asked: impl Fn(usize) -> bool) -> Vec<Answer> {
        let _asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        let site = self.site();
        let asked = site.peers.iter().enumerate().filter(|(index, peer)| is_asked(*index) && !peer.is_away());
        std::thread::scope(|scope| {
            let asking: Vec<_> = asked
                .filter_map(|(index, peer)| {
                    let ask = move || (index, self.state(peer, digest));
                    std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, ask).ok()
                })
                .collect();
            let answers = asking.into_iter().filter_map(|asking| asking.join().ok());
            let answer = |(peer, state): (usize, State)| Answer {
                peer,
                state,
                order: order(&name(site.peers[peer].address), digest),
            };
            answers.map(answer).collect()
        })
    }

    fn state(&self, peer: &Peer, digest: &str) -> State {
        let get = Get { what: format!("blobs/{digest}"), accept: "*/*".to_owned(), ..Get::default() };
        match self.request(peer, get, true) {
            Ok((head, _)) => State::parse(&head.state),
            Err(failed) => {
                if failed.status == Some(401) {
                    eprintln!("{}", failed.failure.message);
                }
                State::Nothing
            }
        }
    }
}

impl Peer {
    fn new(address: SocketAddr) -> Self {
        Self { address, state: Mutex::default() }
    }

    /// Whether the neighbour could not be reached a moment ago.
    fn is_away(&self) -> bool {
        self.lock().away_until.is_some_and(|until| until > Instant::now())
    }

    fn lock(&self) -> MutexGuard<'_, PeerState> {
        // A panic ends the process (`panic = "abort"`), so the lock cannot be poisoned.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(states: &[(State, u64)]) -> Vec<Answer> {
        let answer =
            |(peer, (state, order)): (usize, &(State, u64))| Answer { peer, state: *state, order: *order };
        states.iter().enumerate().map(answer).collect()
    }

    #[test]
    fn a_node_follows_the_one_that_downloads_and_waits_only_for_those_before_it() {
        use State::{Complete, Fetching, Nothing, Waiting};
        let registry = |is_alone| Choice::Registry { is_alone };
        for (states, bytes, order, expected) in [
            (&[][..], 0, Some(5), registry(true)),
            (&[(Nothing, 1)], 0, Some(5), registry(true)),
            (&[(Fetching(0), 9), (Complete, 8), (Complete, 7)], 0, Some(5), Choice::Take(2)),
            (&[(Waiting(9), 1), (Fetching(3), 2), (Fetching(4), 3)], 0, Some(5), Choice::Take(2)),
            (&[(Waiting(0), 1)], 0, Some(5), Choice::Wait),
            (&[(Waiting(0), 9)], 0, Some(5), registry(false)),
            // The one with the most bytes downloads the rest.
            (&[(Waiting(0), 1)], 7, Some(5), registry(false)),
            (&[(Waiting(7), 9)], 0, Some(5), Choice::Wait),
            // A node that serves no one is the last.
            (&[(Waiting(0), 9)], 7, None, Choice::Wait),
        ] {
            assert_eq!(choose(&answers(states), bytes, order), expected, "{states:?} {bytes} {order:?}");
        }
    }

    #[test]
    fn of_nodes_that_wait_exactly_one_asks_the_registry() {
        for digest in ["sha256:a", "sha256:b", "sha256:c", "sha256:d"] {
            let nodes: Vec<u64> =
                (1..=10).map(|node| order(&format!("10.0.0.{node} 5000"), digest)).collect();
            let asks = |node: &u64| {
                let others: Vec<(State, u64)> = nodes
                    .iter()
                    .filter(|other| *other != node)
                    .map(|other| (State::Waiting(0), *other))
                    .collect();
                choose(&answers(&others), 0, Some(*node)) != Choice::Wait
            };
            assert_eq!(nodes.iter().filter(|node| asks(node)).count(), 1, "{digest}");
        }
    }

    #[test]
    fn layers_are_distributed_over_the_nodes() {
        let first = |layer: u32| {
            (0..4).min_by_key(|node| order(&format!("10.0.0.{node} 5000"), &format!("sha256:{layer}")))
        };
        let mut counts = [0; 4];
        (0..400).filter_map(first).for_each(|node: usize| counts[node] += 1);
        assert!(counts.iter().all(|count| (60..=140).contains(count)), "{counts:?}");
    }

    #[test]
    fn states_of_neighbours_are_parsed() {
        for (field, expected) in [
            ("complete 5", State::Complete),
            ("fetching 5", State::Fetching(5)),
            ("waiting 0", State::Waiting(0)),
            ("", State::Nothing),
            ("fetching", State::Nothing),
            ("waiting -1", State::Nothing),
        ] {
            assert_eq!(State::parse(field), expected, "{field:?}");
        }
    }
}
