//! The endpoints of one pull, asked in turn. What one refuses the next may have; what all refuse for the moment is asked
//! for again after a pause. Both ends are bounded: rounds without new bytes, and the time they take.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use coracle_job::{Failure, FailureKind};

use super::connection::Connection;
use crate::failure::failure;
use crate::fetch::Trouble;

/// Rounds over all endpoints that bring nothing new.
const ROUNDS_MAX: u32 = 5;
/// No round begins later than this after the last new bytes.
const FRUITLESS_MAX: Duration = Duration::from_secs(90);
/// The first pause between two rounds; each is twice the last.
const PAUSE_FIRST: Duration = Duration::from_millis(500);
/// Less than this is not getting on: a peer that gives a byte each time would keep us for ever.
pub(super) const GAIN_BYTES_MIN: u64 = 64 << 10;

/// What an endpoint is to be able to do.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    /// Say what a tag means.
    Resolve,
    /// Give what has a digest.
    Pull,
}

/// All endpoints of a pull.
pub(super) struct Sources {
    connections: Vec<Connection>,
    /// The one that answered last: asked first for the next thing.
    first: AtomicUsize,
}

impl Sources {
    pub(super) fn new(connections: Vec<Connection>) -> Self {
        Self { connections, first: AtomicUsize::new(0) }
    }

    /// Asks until one gives what is asked. What they said last is in the failure, and its kind is that of the last one,
    /// unless an earlier one says more than "not there". `gained` tells how many bytes there are by now.
    pub(super) fn ask<T, S>(
        &self,
        need: Need,
        state: &mut S,
        gained: impl Fn(&S) -> u64,
        mut ask: impl FnMut(&Connection, &mut S) -> Result<T, Trouble>,
    ) -> Result<T, Failure> {
        let (mut rounds, mut last_gain) = (0, Instant::now());
        loop {
            let before = gained(state);
            let troubles = match self.round(need, |connection| ask(connection, state)) {
                Ok(answer) => return Ok(answer),
                Err(troubles) => troubles,
            };
            if gained(state) >= before.saturating_add(GAIN_BYTES_MIN) {
                (rounds, last_gain) = (0, Instant::now());
            }
            rounds += 1;
            let pause = troubles.iter().filter_map(|trouble| trouble.pause).min();
            match pause {
                Some(least) if rounds < ROUNDS_MAX && last_gain.elapsed() < FRUITLESS_MAX => {
                    std::thread::sleep(least.max(PAUSE_FIRST * 2_u32.pow(rounds - 1)));
                }
                _ => return Err(together(troubles)),
            }
        }
    }

    /// Asks each once, the one that answered last first.
    fn round<T>(
        &self,
        need: Need,
        mut ask: impl FnMut(&Connection) -> Result<T, Trouble>,
    ) -> Result<T, Vec<Trouble>> {
        let mut troubles = Vec::new();
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
                // A full disk is full for every endpoint.
                Err(trouble) if trouble.ends_pull || trouble.failure.kind == FailureKind::NoSpace => {
                    return Err(vec![trouble]);
                }
                Err(trouble) => troubles.push(trouble),
            }
        }
        Err(troubles)
    }
}

fn together(troubles: Vec<Trouble>) -> Failure {
    let kinds = || troubles.iter().map(|trouble| trouble.failure.kind).rev();
    let kind = kinds().find(|kind| *kind != FailureKind::NotFound).or_else(|| kinds().next());
    let texts: Vec<&str> = troubles.iter().map(|trouble| trouble.failure.message.as_str()).collect();
    let text = if texts.is_empty() { "no endpoint to ask".to_owned() } else { texts.join("; ") };
    failure(kind.unwrap_or(FailureKind::Unavailable), text)
}
