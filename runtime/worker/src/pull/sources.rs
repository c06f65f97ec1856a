//! The endpoints of one pull. If one refuses a request, the next is tried; if all fail temporarily, they are
//! retried after a delay. The number of rounds without new data and their duration are limited.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use coracle_job::{Failure, FailureKind};

use super::connection::Connection;
use super::neighbours::Neighbours;
use coracle_fetch::RequestFailure;

/// Maximum number of rounds over all endpoints without new data.
const ROUNDS_MAX: u32 = 5;
/// Maximum time from the last new data to the start of another round.
pub(super) const FRUITLESS_MAX: Duration = Duration::from_secs(90);
/// Delay before the second round; each further delay is twice the previous one.
const PAUSE_FIRST: Duration = Duration::from_millis(500);
/// Minimum number of new bytes with which a round counts as progress: otherwise an endpoint that sends single
/// bytes could delay a pull endlessly.
pub(super) const GAIN_BYTES_MIN: u64 = 64 << 10;

/// Maximum number of URLs of one blob that are tried; more than one is rare.
const URLS_MAX: usize = 8;

/// A capability that a request needs from an endpoint.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    /// Resolving a tag to a manifest.
    Resolve,
    /// Getting content by digest.
    Pull,
}

/// All endpoints of a pull.
pub(super) struct Sources {
    connections: Vec<Connection>,
    /// Index of the endpoint of the last success, which is tried first.
    first: AtomicUsize,
    /// The nodes of the site, which are asked for blobs before the endpoints.
    neighbours: Option<Arc<Neighbours>>,
}

impl Sources {
    pub(super) fn new(connections: Vec<Connection>, neighbours: Option<Arc<Neighbours>>) -> Self {
        Self { connections, first: AtomicUsize::new(0), neighbours }
    }

    /// The neighbours, with a connection as a template for those to neighbours.
    pub(super) fn neighbours(&self) -> Option<(&Arc<Neighbours>, &Connection)> {
        self.neighbours.as_ref().zip(self.connections.first())
    }

    /// Tries the endpoints until one succeeds. The failure contains the last error of each endpoint; its kind
    /// is that of the last endpoint, unless an earlier error is more specific than "not found". `gained`
    /// returns the current number of downloaded bytes.
    pub(super) fn ask<T, S>(
        &self,
        need: Need,
        state: &mut S,
        gained: impl Fn(&S) -> u64,
        mut ask: impl FnMut(&Connection, &mut S) -> Result<T, RequestFailure>,
    ) -> Result<T, Failure> {
        let (mut rounds, mut last_gain) = (0, Instant::now());
        loop {
            let before = gained(state);
            let failures = match self.round(need, |connection| ask(connection, state)) {
                Ok(answer) => return Ok(answer),
                Err(failures) => failures,
            };
            if gained(state) >= before.saturating_add(GAIN_BYTES_MIN) {
                (rounds, last_gain) = (0, Instant::now());
            }
            rounds += 1;
            let pause = failures.iter().filter_map(|failed| failed.pause).min();
            match pause {
                Some(least) if rounds < ROUNDS_MAX && last_gain.elapsed() < FRUITLESS_MAX => {
                    std::thread::sleep(least.max(PAUSE_FIRST * 2_u32.pow(rounds - 1)));
                }
                _ => return Err(together(failures)),
            }
        }
    }

    /// The URLs on any host from which a blob can be downloaded, too; others than http and https are ignored, as with
    /// containerd.
    pub(super) fn elsewhere(&self, urls: &[String]) -> Self {
        let is_web = |url: &&String| {
            let scheme = url.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase());
            matches!(scheme.as_deref(), Some("http" | "https"))
        };
        let urls = urls.iter().filter(is_web).take(URLS_MAX);
        Self::new(urls.filter_map(|url| Some(self.connections.last()?.elsewhere(url))).collect(), None)
    }

    /// Each endpoint that can do this, alone, the one of the last success first; and whether it is the last one of the configuration, which
    /// is the registry itself.
    pub(super) fn each(&self, need: Need) -> Vec<(Self, bool)> {
        let (count, first) = (self.connections.len(), self.first.load(Ordering::Relaxed));
        let can = |index: &usize| self.connections[*index].can(need);
        let registry = (0..count).rfind(can);
        let indices = (0..count).map(|step| (first + step) % count).filter(can);
        let alone = |index: usize| Self::new(vec![self.connections[index].clone()], None);
        indices.map(|index| (alone(index), Some(index) == registry)).collect()
    }

    /// Tries the endpoints once, without a retry.
    pub(super) fn once<T>(
        &self,
        need: Need,
        ask: impl FnMut(&Connection) -> Result<T, RequestFailure>,
    ) -> Result<T, Failure> {
        self.round(need, ask).map_err(together)
    }

    /// Tries each endpoint once, beginning with the one that succeeded last.
    fn round<T>(
        &self,
        need: Need,
        mut ask: impl FnMut(&Connection) -> Result<T, RequestFailure>,
    ) -> Result<T, Vec<RequestFailure>> {
        let mut failures = Vec::new();
        let (count, first) = (self.connections.len(), self.first.load(Ordering::Relaxed));
        for index in (0..count).map(|step| (first + step) % count) {
            let connection = &self.connections[index];
            if !connection.can(need) {
                continue;
            }
            match ask(connection) {
                Ok(answer) => {
                    self.first.store(index, Ordering::Relaxed);
                    return Ok(answer);
                }
                // A full disk affects all endpoints.
                Err(failed) if failed.ends_pull || failed.failure.kind == FailureKind::NoSpace => {
                    return Err(vec![failed]);
                }
                Err(failed) => failures.push(failed),
            }
        }
        Err(failures)
    }
}

/// Whether a failure is none of the content: another attempt, or a neighbour, may have it.
pub(super) fn is_passing(failure: &Failure) -> bool {
    matches!(failure.kind, FailureKind::Unavailable | FailureKind::RateLimited | FailureKind::NameResolution)
}

fn together(failures: Vec<RequestFailure>) -> Failure {
    let kinds = || failures.iter().map(|failed| failed.failure.kind).rev();
    let kind = kinds().find(|kind| *kind != FailureKind::NotFound).or_else(|| kinds().next());
    let texts: Vec<&str> = failures.iter().map(|failed| failed.failure.message.as_str()).collect();
    let text =
        if texts.is_empty() { "no endpoint is configured for this".to_owned() } else { texts.join("; ") };
    Failure::new(kind.unwrap_or(FailureKind::Unavailable), text)
}
