//! Downloads a blob that other nodes of the site may have: from them, and the rest from a registry, which is announced to them.
//! Nothing that a neighbour sends or does not send fails the pull.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coracle_job::{Failure, FailureKind, Layer};

use super::blob::{Part, Taken};
use super::connection::Connection;
use super::neighbours::{Neighbours, OWN_RATE_BYTES_MIN, Peer, Round};
use super::sources::{GAIN_BYTES_MIN, is_passing};
use super::transfer::Transfer;
use coracle_fetch::RequestFailure;
use coracle_manifest::Descriptor;
use coracle_site::share::{Answer, Choice, FRESH_MAX, State, WAIT_MAX, choose};

/// Pause between two queries of all neighbours.
pub(super) const PAUSE: Duration = Duration::from_millis(200);
/// Maximum time for which a neighbour that downloads the blob may make no progress: uplinks are interrupted for seconds, and all
/// nodes of a site have the same one.
const STALL_MAX: Duration = Duration::from_secs(30);
/// Number of times that bytes of neighbours are wrong after which the registry is asked for the blob.
const WRONG_MAX: u32 = 2;
/// Maximum age of answers from before the download.
pub(super) const AGE_MAX: Duration = Duration::from_secs(2);

impl Transfer {
    /// Asks neighbours for a blob and for its layer, after this pull was announced to them; `None` if there are none.
    pub(super) fn ask(&self, part: &mut Part, blob: &Descriptor, layer: &Layer) -> Option<Round> {
        let (neighbours, _) = self.sources.neighbours().filter(|_| !part.is_complete())?;
        if !part.is_announced() {
            self.announce(part);
        }
        Some(neighbours.ask(&blob.digest, Some(&layer.chain_id), |_| true))
    }

    /// Announces that this pull has the part, and has not asked a registry.
    pub(super) fn announce(&self, part: &mut Part) {
        if let Some(registry) = &self.announced_for {
            part.announce(registry);
        }
    }

    /// Downloads the rest of a blob and verifies its digest. `round` are the answers of neighbours before. Returns whether all of it is
    /// there, which it is not if neighbours do not have it and the registry is not asked.
    ///
    /// # Errors
    /// No registry has the blob, the disk is full, or the fetcher has failed.
    pub(super) fn download(
        &self,
        part: &mut Part,
        blob: &Descriptor,
        round: Option<Round>,
        asks_registry: bool,
    ) -> Result<bool, Failure> {
        let neighbours = self.sources.neighbours().filter(|_| !part.is_complete());
        if !part.is_announced() {
            self.announce(part);
        }
        let mut tries = Tries { round, ..Tries::new(part.length()) };
        if let Some((neighbours, connection)) = neighbours
            && self.download_from_neighbours(part, blob, neighbours, connection, &mut tries)?
        {
            return Ok(true);
        }
        if !asks_registry {
            return Ok(false);
        }
        part.set_fetching(true);
        let failed = match part.complete(&self.sources, blob, &self.report) {
            Err(failure) if is_passing(&failure) => failure,
            completed => return completed.map(|()| true),
        };
        part.set_fetching(false);
        // Another node may have had more luck with its registry.
        match neighbours {
            Some((neighbours, connection)) if !part.is_complete() => {
                tries.begin_again(part);
                match self.download_from_neighbours(part, blob, neighbours, connection, &mut tries)? {
                    true => Ok(true),
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
        tries: &mut Tries,
    ) -> Result<bool, Failure> {
        let own = neighbours.own_order(&blob.digest);
        while tries.wrong < WRONG_MAX {
            self.report.pulse();
            let is_fresh = |round: &Round| round.begun.elapsed() < AGE_MAX;
            let Round { begun, answers } =
                tries.round.take().filter(is_fresh).unwrap_or_else(|| {
                    neighbours.ask(&blob.digest, None, |peer| !tries.refused.contains(&peer))
                });
            let choice = choose(&answers, part.length(), own, &tries.failed_since);
            if !matches!(choice, Choice::Wait) {
                tries.waiting_since = None;
            }
            match choice {
                Choice::Take(answer) => {
                    let peer = &neighbours.peers()[answer.peer];
                    let (before, begun) = (part.length(), Instant::now());
                    let has = if tries.is_last { 0 } else { answer.bytes() };
                    let taken = part.take(&connection.neighbour(neighbours, peer), blob, has, &self.report);
                    let gained = part.length().saturating_sub(before);
                    // Wrong bytes have been discarded.
                    if gained > 0 || matches!(taken, Ok(Taken::Wrong { .. })) {
                        tries.sent(answer);
                    }
                    // One that downloads is no faster than its uplink, which is also that of this node.
                    let timeouts =
                        if answer.is_downloading() { connection.timeouts() } else { neighbours.timeouts() };
                    let rate = u128::from(gained) * 1000 / begun.elapsed().as_millis().max(1);
                    let is_slow = rate < timeouts.rate_bytes_min.into();
                    let is_slower = gained > 0 && has > part.length() && rate < OWN_RATE_BYTES_MIN.into();
                    match taken {
                        Ok(Taken::All) => return Ok(true),
                        Ok(Taken::Some) => tries.failed(answer, peer, part.length(), End::Early { is_slow }),
                        Ok(Taken::Wrong { had_earlier }) => {
                            tries.blame(neighbours.peers(), part.length(), had_earlier);
                        }
                        Err(failed) if failed.ends_pull || failed.failure.kind == FailureKind::NoSpace => {
                            return Err(failed.failure);
                        }
                        Err(failed) => {
                            eprintln!("{}", failed.failure.message);
                            tries.failed(answer, peer, part.length(), End::of(&failed, is_slow, is_slower));
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
            // Other neighbours may be no better.
            if matches!(choice, Choice::Take(_)) && tries.since.elapsed() >= STALL_MAX {
                return Ok(false);
            }
            std::thread::sleep(PAUSE);
        }
        Ok(false)
    }
}

/// The end of an attempt at a neighbour that has not completed the blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The answer ended early; `is_slow`: with fewer bytes for its time than the minimum rate.
    Early { is_slow: bool },
    /// The answer ended early, and the neighbour sent what it has more slowly than the registry may: the registry is asked first.
    Slower,
    /// There was no attempt: the neighbour serves too many others, or another thread could not reach it a moment ago.
    Busy,
    /// The neighbour sent bytes that are not those of the blob.
    Wrong,
}

impl End {
    fn of(failed: &RequestFailure, is_slow: bool, is_slower: bool) -> Self {
        match failed.failure.kind {
            FailureKind::Invalid => Self::Wrong,
            _ if failed.pause.is_some_and(|pause| !pause.is_zero()) => Self::Busy,
            _ if is_slower && !is_slow => Self::Slower,
            _ => Self::Early { is_slow },
        }
    }
}

/// The attempts to get one blob from neighbours.
struct Tries {
    /// Time and length of the part at the last progress.
    since: Instant,
    length: u64,
    /// Time since which this node waits for neighbours that have not requested the blob themselves.
    waiting_since: Option<Instant>,
    /// Neighbours that are not asked for this blob any more.
    refused: BTreeSet<usize>,
    /// Neighbours of the attempts that failed since the last progress.
    failed_since: BTreeSet<usize>,
    /// Neighbours that have sent bytes which are not verified, with their share at that time.
    senders: BTreeMap<usize, State>,
    /// Number of times that the bytes of neighbours were wrong.
    wrong: u32,
    /// Whether the query before a request to the registry was repeated.
    is_sure: bool,
    /// Whether the registry has failed, so that slow neighbours are better than none.
    is_last: bool,
    /// Answers from before the first round.
    round: Option<Round>,
}

impl Tries {
    fn new(length: u64) -> Self {
        Self {
            since: Instant::now(),
            length,
            waiting_since: None,
            refused: BTreeSet::new(),
            failed_since: BTreeSet::new(),
            senders: BTreeMap::new(),
            wrong: 0,
            is_sure: false,
            is_last: false,
            round: None,
        }
    }

    /// Begins again after the registry has failed. Neighbours whose bytes are not verified remain known.
    fn begin_again(&mut self, part: &Part) {
        let Self { senders, wrong, .. } = std::mem::replace(self, Self::new(part.length()));
        (self.wrong, self.is_last) = (wrong, true);
        if part.has_unverified() {
            self.senders = senders;
        }
    }

    /// Notes who sent bytes; one that had bytes of others itself is remembered as such.
    fn sent(&mut self, answer: Answer) {
        let state = self.senders.entry(answer.peer).or_insert(answer.state);
        if !matches!(state, State::Resuming(_)) {
            *state = answer.state;
        }
    }

    /// Whether this node waits for another round.
    fn may_wait(&mut self) -> bool {
        self.waiting_since.get_or_insert_with(Instant::now).elapsed() < WAIT_MAX
    }

    /// Counts an attempt after which the part has this length. Less than [`GAIN_BYTES_MIN`] are no progress, otherwise a
    /// neighbour could send single bytes endlessly; nor is any number of bytes below the minimum rate.
    fn failed(&mut self, answer: Answer, peer: &Peer, length: u64, end: End) {
        let is_slow = matches!(end, End::Early { is_slow: true } | End::Slower);
        let has_gained = !is_slow && length >= self.length.saturating_add(GAIN_BYTES_MIN);
        if has_gained {
            (self.since, self.length) = (Instant::now(), length);
            self.failed_since.clear();
        }
        if is_slow {
            // They are not those of the next attempt.
            self.length = length;
        }
        self.failed_since.insert(answer.peer);
        match end {
            // Another pull may have told it of a blob with this digest and another size.
            End::Wrong if answer.is_downloading() => drop(self.refused.insert(answer.peer)),
            End::Wrong => peer.refuse(),
            End::Slower => drop(self.refused.insert(answer.peer)),
            End::Early { .. } if has_gained => peer.count(true),
            End::Early { .. } if !answer.is_downloading() => peer.count(false),
            End::Early { .. } | End::Busy if self.since.elapsed() < STALL_MAX => {}
            // It makes no progress, whatever it says.
            End::Early { .. } | End::Busy => {
                peer.count(false);
                self.refused.insert(answer.peer);
            }
        }
    }

    /// Counts a blob with another digest, after which the part has this length. A neighbour that alone has sent the bytes is not
    /// asked again in this pull; several, or one that had bytes of others itself, are not for this blob. If an earlier pull had sent
    /// some, they are asked again for all.
    fn blame(&mut self, peers: &[Arc<Peer>], length: u64, had_earlier: bool) {
        let senders = std::mem::take(&mut self.senders);
        let is_alone = senders.len() == 1;
        for (index, state) in senders {
            match state {
                _ if had_earlier => {}
                State::Complete | State::Fetching(_) if is_alone => peers[index].refuse(),
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
        Answer { peer, state, order: 0, outline: None }
    }

    fn peers(count: u16) -> Vec<Arc<Peer>> {
        (1..=count).map(|port| Arc::new(Peer::new(([127, 0, 0, 1], port).into()))).collect()
    }

    #[test]
    fn a_neighbour_without_progress_is_not_asked_for_ever() {
        let (mut tries, peers) = (Tries::new(0), peers(4));
        let (complete, fetching) = (State::Complete, State::Fetching(9));
        let (early, slow) = (End::Early { is_slow: false }, End::Early { is_slow: true });
        for _ in 0..9 {
            tries.failed(answer(0, complete), &peers[0], 1, End::Busy);
        }
        assert!(!peers[0].is_refused() && tries.failed_since.contains(&0), "it serves others");
        while !peers[0].is_refused() {
            tries.failed(answer(0, complete), &peers[0], 1, early);
        }
        assert!(!peers[1].is_refused());
        tries.failed(answer(1, complete), &peers[1], 5, End::Wrong);
        assert!(peers[1].is_refused(), "it sent something else than the blob");
        tries.failed(answer(2, fetching), &peers[2], 5, early);
        assert!(!tries.refused.contains(&2), "its download may be interrupted");
        let Some(long_ago) = Instant::now().checked_sub(STALL_MAX) else { return };
        tries.since = long_ago;
        tries.failed(answer(2, fetching), &peers[2], 6, early);
        assert!(tries.refused.contains(&2) && !peers[2].is_refused());
        tries.since = long_ago;
        tries.failed(answer(3, fetching), &peers[3], GAIN_BYTES_MIN, early);
        assert!(!tries.refused.contains(&3) && tries.since.elapsed() < STALL_MAX, "it made progress");
        tries.since = long_ago;
        tries.failed(answer(3, fetching), &peers[3], 9 * GAIN_BYTES_MIN, slow);
        assert!(tries.refused.contains(&3), "many bytes in a long time");
        tries.failed(answer(3, complete), &peers[3], 99 * GAIN_BYTES_MIN, slow);
        tries.failed(answer(3, complete), &peers[3], 999 * GAIN_BYTES_MIN, slow);
        assert!(peers[3].is_refused(), "many bytes in a long time, twice");
        tries.failed(answer(1, complete), &peers[1], 9999 * GAIN_BYTES_MIN, End::Slower);
        assert!(tries.refused.contains(&1) && tries.since == long_ago, "it is not asked before the registry");
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
        tries.blame(&peers, 3, false);
        assert!(tries.refused.contains(&0) && tries.refused.contains(&1));
        assert!(!peers[0].is_refused() && tries.senders.is_empty() && tries.length == 3);
        tries.senders = BTreeMap::from([(2, State::Complete)]);
        tries.blame(&peers, 3, true);
        assert!(!peers[2].is_refused() && !tries.refused.contains(&2), "they may be of an earlier pull");
        tries.senders = BTreeMap::from([(2, State::Resuming(5))]);
        tries.blame(&peers, 3, false);
        assert!(!peers[2].is_refused() && tries.refused.contains(&2), "they may be of others");
        tries.senders = BTreeMap::from([(2, State::Complete)]);
        tries.blame(&peers, 3, false);
        assert!(peers[2].is_refused());
    }
}
