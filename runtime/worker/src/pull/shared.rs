//! Downloads a blob that other nodes of the site may have: from them, and the rest from a registry, which is announced to them.
//! Nothing that a neighbour sends or does not send fails the pull.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coracle_job::{Failure, FailureKind};

use super::blob::Part;
use super::connection::Connection;
use super::manifest::Descriptor;
use super::neighbours::{Choice, Neighbours, State, choose};
use super::sources::GAIN_BYTES_MIN;
use super::transfer::Transfer;

/// Pause between two rounds of questions.
const PAUSE: Duration = Duration::from_millis(200);
/// Maximum time for which this node waits for nodes before it in the order to ask the registry.
const WAIT_MAX: Duration = Duration::from_secs(3);
/// Maximum time for which a neighbour that downloads the blob may make no progress: uplinks are interrupted for seconds, and all
/// nodes of a site have the same one.
const STALL_MAX: Duration = Duration::from_secs(30);
/// Maximum number of attempts at a neighbour without progress, unless it downloads the blob.
const FRUITLESS_MAX: u32 = 2;
/// Duration of a round above which its answers are not a reason to ask the registry: another node may have begun meanwhile.
const FRESH_MAX: Duration = Duration::from_millis(250);

impl Transfer {
    /// Downloads the rest of a blob and verifies its digest.
    ///
    /// # Errors
    /// No registry has the blob, the disk is full, or the fetcher has failed.
    pub(super) fn download(&self, part: &mut Part, blob: &Descriptor) -> Result<(), Failure> {
        if let Some((neighbours, connection)) = self.sources.neighbours()
            && self.download_from_neighbours(part, blob, neighbours, connection)?
        {
            return Ok(());
        }
        part.begin_fetching();
        part.complete(&self.sources, blob, &self.report)
    }

    /// Downloads the rest of a blob from neighbours; returns whether it is complete and has its digest. Otherwise the registry
    /// has to be asked for the rest.
    fn download_from_neighbours(
        &self,
        part: &mut Part,
        blob: &Descriptor,
        neighbours: &Arc<Neighbours>,
        connection: &Connection,
    ) -> Result<bool, Failure> {
        let own = neighbours.own_order(&blob.digest);
        let mut tries = Tries::new(part.length());
        loop {
            self.report.pulse();
            let begun = Instant::now();
            let answers = neighbours.ask(&blob.digest, |peer| !tries.is_refused(peer));
            match choose(&answers, part.length(), own) {
                Choice::Take(index) => {
                    let peer = &neighbours.peers()[index];
                    let is_fetching = answers
                        .iter()
                        .any(|answer| answer.peer == index && matches!(answer.state, State::Fetching(_)));
                    match part.take(&connection.neighbour(neighbours, peer), blob, &self.report) {
                        Ok(true) => return Ok(true),
                        Ok(false) => tries.failed(index, part.length(), false, is_fetching),
                        Err(failed) if failed.ends_pull || failed.failure.kind == FailureKind::NoSpace => {
                            return Err(failed.failure);
                        }
                        Err(failed) => {
                            eprintln!("{}", failed.failure.message);
                            // The bytes of several may be mixed, so it is unknown which one is to blame.
                            if part.is_discarded() {
                                return Ok(false);
                            }
                            let is_wrong = failed.failure.kind != FailureKind::Unavailable;
                            tries.failed(index, part.length(), is_wrong, is_fetching);
                        }
                    }
                    std::thread::sleep(PAUSE);
                }
                Choice::Wait if tries.since.elapsed() < WAIT_MAX => std::thread::sleep(PAUSE),
                // Another node that decides at this moment announces it before the next round.
                Choice::Registry { is_alone }
                    if !(tries.is_sure || is_alone && begun.elapsed() < FRESH_MAX) =>
                {
                    tries.is_sure = true;
                    std::thread::sleep(PAUSE);
                }
                Choice::Wait | Choice::Registry { .. } => return Ok(false),
            }
        }
    }
}

/// The attempts to get one blob from neighbours.
struct Tries {
    /// Time and length of the part at the last progress.
    since: Instant,
    length: u64,
    /// The number of attempts without progress by neighbour; above [`FRUITLESS_MAX`] it is not asked again.
    fruitless: BTreeMap<usize, u32>,
    /// Whether another round was made before the registry is asked.
    is_sure: bool,
}

impl Tries {
    fn new(length: u64) -> Self {
        Self { since: Instant::now(), length, fruitless: BTreeMap::new(), is_sure: false }
    }

    fn is_refused(&self, peer: usize) -> bool {
        self.fruitless.get(&peer).is_some_and(|count| *count >= FRUITLESS_MAX)
    }

    /// Counts an attempt after which the part has this length. Less than [`GAIN_BYTES_MIN`] are no progress, otherwise a
    /// neighbour could send single bytes endlessly.
    fn failed(&mut self, peer: usize, length: u64, is_wrong: bool, is_fetching: bool) {
        let has_gained = length >= self.length.saturating_add(GAIN_BYTES_MIN);
        if has_gained {
            (self.since, self.length) = (Instant::now(), length);
        }
        let count = self.fruitless.entry(peer).or_default();
        *count = match (is_wrong, has_gained) {
            (true, _) => FRUITLESS_MAX,
            (false, true) => 0,
            (false, false) if is_fetching && self.since.elapsed() < STALL_MAX => *count,
            // It makes no progress, whatever it says.
            (false, false) if is_fetching => FRUITLESS_MAX,
            (false, false) => *count + 1,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_neighbour_without_progress_is_not_asked_for_ever() {
        let mut tries = Tries::new(0);
        for count in 1..=FRUITLESS_MAX {
            assert!(!tries.is_refused(0), "{count}");
            tries.failed(0, u64::from(count), false, false);
        }
        assert!(tries.is_refused(0) && !tries.is_refused(1));
        tries.failed(1, 5, true, true);
        assert!(tries.is_refused(1), "it sent something else than the blob");
        tries.failed(2, 5, false, true);
        assert!(!tries.is_refused(2), "its download may be interrupted");
        let Some(long_ago) = Instant::now().checked_sub(STALL_MAX) else { return };
        tries.since = long_ago;
        tries.failed(2, 6, false, true);
        assert!(tries.is_refused(2));
        tries.since = long_ago;
        tries.failed(3, GAIN_BYTES_MIN, false, true);
        assert!(!tries.is_refused(3) && tries.since.elapsed() < STALL_MAX, "it made progress");
    }
}
