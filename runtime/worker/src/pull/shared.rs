//! Downloads a blob that other nodes of the site may have: from them, and the rest from a registry, which is announced to them.
//! Nothing that a neighbour sends or does not send fails the pull.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coracle_job::{Failure, FailureKind};

use super::blob::{Part, Taken};
use super::connection::Connection;
use super::manifest::Descriptor;
use super::neighbours::{Answer, Choice, Neighbours, Peer, State, choose};
use super::sources::GAIN_BYTES_MIN;
use super::transfer::Transfer;

/// Pause between two rounds of questions.
const PAUSE: Duration = Duration::from_millis(200);
/// Maximum time for which this node waits for nodes before it in the order to ask the registry.
const WAIT_MAX: Duration = Duration::from_secs(3);
/// Maximum time for which a neighbour that downloads the blob may make no progress: uplinks are interrupted for seconds, and all
/// nodes of a site have the same one.
const STALL_MAX: Duration = Duration::from_secs(30);
/// Number of times that bytes of neighbours are wrong after which the registry is asked for the blob.
const WRONG_MAX: u32 = 2;
/// Duration of a round above which its answers are not a reason to ask the registry: another node may have begun meanwhile.
const FRESH_MAX: Duration = Duration::from_millis(250);

impl Transfer {
    /// Downloads the rest of a blob and verifies its digest.
    ///
    /// # Errors
    /// No registry has the blob, the disk is full, or the fetcher has failed.
    pub(super) fn download(&self, part: &mut Part, blob: &Descriptor) -> Result<(), Failure> {
        let neighbours = self.sources.neighbours().filter(|_| !part.is_complete());
        if self.is_announced {
            part.announce();
        }
        if let Some((neighbours, connection)) = neighbours
            && self.download_from_neighbours(part, blob, neighbours, connection)?
        {
            return Ok(());
        }
        part.set_fetching(true);
        let failed = match part.complete(&self.sources, blob, &self.report) {
            Err(failure) if failure.kind == FailureKind::Unavailable => failure,
            completed => return completed,
        };
        part.set_fetching(false);
        // Another node may have had more luck with its registry.
        match neighbours {
            Some((neighbours, connection)) if !part.is_complete() => {
                match self.download_from_neighbours(part, blob, neighbours, connection)? {
                    true => Ok(()),
                    false => Err(failed),
                }
            }
            _ => Err(failed),
        }
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
        while tries.wrong < WRONG_MAX {
            self.report.pulse();
            let begun = Instant::now();
            let answers = neighbours.ask(&blob.digest, |peer| !tries.refused.contains(&peer));
            let choice = choose(&answers, part.length(), own);
            if !matches!(choice, Choice::Wait) {
                tries.waiting_since = None;
            }
            match choice {
                Choice::Take(answer) => {
                    let peer = &neighbours.peers()[answer.peer];
                    let before = part.length();
                    let taken = part.take(&connection.neighbour(neighbours, peer), blob, &self.report);
                    // Wrong bytes have been discarded.
                    if part.length() != before || matches!(taken, Ok(Taken::Wrong)) {
                        tries.senders.insert(answer.peer, answer.state);
                    }
                    match taken {
                        Ok(Taken::All) => return Ok(true),
                        Ok(Taken::Some) => {
                            tries.failed(answer, peer, part.length(), FailureKind::Unavailable)
                        }
                        Ok(Taken::Wrong) => tries.blame(neighbours.peers(), part.length()),
                        Err(failed) if failed.ends_pull || failed.failure.kind == FailureKind::NoSpace => {
                            return Err(failed.failure);
                        }
                        Err(failed) => {
                            eprintln!("{}", failed.failure.message);
                            tries.failed(answer, peer, part.length(), failed.failure.kind);
                        }
                    }
                }
                Choice::Wait if tries.may_wait() => {}
                // Another node that decides at this moment announces it before the next round.
                Choice::Registry { is_alone }
                    if !(tries.is_sure || is_alone && begun.elapsed() < FRESH_MAX) =>
                {
                    tries.is_sure = true;
                }
                Choice::Wait | Choice::Registry { .. } => return Ok(false),
            }
            std::thread::sleep(PAUSE);
        }
        Ok(false)
    }
}

/// The attempts to get one blob from neighbours.
struct Tries {
    /// Time and length of the part at the last progress.
    since: Instant,
    length: u64,
    /// Time since which this node waits for others that have not asked a registry.
    waiting_since: Option<Instant>,
    /// Neighbours that are not asked for this blob any more.
    refused: BTreeSet<usize>,
    /// Neighbours that have sent bytes which are not verified, with their share at that time.
    senders: BTreeMap<usize, State>,
    /// Number of times that the bytes of neighbours were wrong.
    wrong: u32,
    /// Whether another round was made before the registry is asked.
    is_sure: bool,
}

impl Tries {
    fn new(length: u64) -> Self {
        Self {
            since: Instant::now(),
            length,
            waiting_since: None,
            refused: BTreeSet::new(),
            senders: BTreeMap::new(),
            wrong: 0,
            is_sure: false,
        }
    }

    /// Whether this node waits for another round.
    fn may_wait(&mut self) -> bool {
        self.waiting_since.get_or_insert_with(Instant::now).elapsed() < WAIT_MAX
    }

    /// Counts an attempt after which the part has this length. Less than [`GAIN_BYTES_MIN`] are no progress, otherwise a
    /// neighbour could send single bytes endlessly.
    fn failed(&mut self, answer: Answer, peer: &Peer, length: u64, kind: FailureKind) {
        let has_gained = length >= self.length.saturating_add(GAIN_BYTES_MIN);
        if has_gained {
            (self.since, self.length) = (Instant::now(), length);
        }
        match (kind, has_gained) {
            // It sent something else than the blob.
            (FailureKind::Invalid, _) => peer.refuse(),
            (_, true) => peer.count(true),
            (_, false) if !answer.is_downloading() => peer.count(false),
            (_, false) if self.since.elapsed() < STALL_MAX => {}
            // It makes no progress, whatever it says.
            (_, false) => drop(self.refused.insert(answer.peer)),
        }
    }

    /// Counts a blob with another digest, after which the part has this length. A neighbour that alone has sent the bytes is not
    /// asked again in this pull, several are not for this blob. One that had bytes of others itself downloads them again.
    fn blame(&mut self, peers: &[Arc<Peer>], length: u64) {
        let senders = std::mem::take(&mut self.senders);
        let is_alone = senders.len() == 1;
        for (index, state) in senders {
            match state {
                State::Resuming(_) => {}
                _ if is_alone => peers[index].refuse(),
                _ => drop(self.refused.insert(index)),
            }
        }
        (self.since, self.length) = (Instant::now(), length);
        self.wrong += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(peer: usize, state: State) -> Answer {
        Answer { peer, state, order: 0 }
    }

    fn peers(count: u16) -> Vec<Arc<Peer>> {
        (1..=count).map(|port| Arc::new(Peer::new(([127, 0, 0, 1], port).into()))).collect()
    }

    #[test]
    fn a_neighbour_without_progress_is_not_asked_for_ever() {
        let (mut tries, peers) = (Tries::new(0), peers(4));
        let (complete, fetching) = (State::Complete, State::Fetching(9));
        let unavailable = FailureKind::Unavailable;
        while !peers[0].is_refused() {
            tries.failed(answer(0, complete), &peers[0], 1, unavailable);
        }
        assert!(!peers[1].is_refused());
        tries.failed(answer(1, fetching), &peers[1], 5, FailureKind::Invalid);
        assert!(peers[1].is_refused(), "it sent something else than the blob");
        tries.failed(answer(2, fetching), &peers[2], 5, unavailable);
        assert!(!tries.refused.contains(&2), "its download may be interrupted");
        let Some(long_ago) = Instant::now().checked_sub(STALL_MAX) else { return };
        tries.since = long_ago;
        tries.failed(answer(2, fetching), &peers[2], 6, unavailable);
        assert!(tries.refused.contains(&2) && !peers[2].is_refused());
        tries.since = long_ago;
        tries.failed(answer(3, fetching), &peers[3], GAIN_BYTES_MIN, unavailable);
        assert!(!tries.refused.contains(&3) && tries.since.elapsed() < STALL_MAX, "it made progress");
    }

    #[test]
    fn the_wait_for_others_has_a_time_of_its_own() {
        let mut tries = Tries::new(0);
        let Some(long_ago) = Instant::now().checked_sub(STALL_MAX) else { return };
        tries.since = long_ago;
        assert!(tries.may_wait(), "the last progress was long ago, but the wait begins now");
        tries.waiting_since = Some(long_ago);
        assert!(!tries.may_wait());
    }

    #[test]
    fn of_several_senders_of_wrong_bytes_none_is_refused_for_the_pull() {
        let (mut tries, peers) = (Tries::new(7), peers(3));
        tries.senders = BTreeMap::from([(0, State::Complete), (1, State::Fetching(5))]);
        tries.blame(&peers, 3);
        assert!(tries.refused.contains(&0) && tries.refused.contains(&1));
        assert!(!peers[0].is_refused() && tries.senders.is_empty() && tries.length == 3);
        tries.senders = BTreeMap::from([(2, State::Resuming(5))]);
        tries.blame(&peers, 3);
        assert!(!peers[2].is_refused() && !tries.refused.contains(&2), "the bytes were of others");
        tries.senders = BTreeMap::from([(2, State::Complete)]);
        tries.blame(&peers, 3);
        assert!(peers[2].is_refused());
    }
}
