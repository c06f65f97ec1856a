//! When a node asks the registry for what changed of a layer whose blob has a table of contents (zstd:chunked, eStargz), without I/O: one node of
//! a site does, and the others take the unpacked layer from it. While that node downloads, no one can follow it, so it announces its
//! progress ([`State::Changing`]), and the others wait as long as there is some.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::share::{Answer, Choice, FRESH_MAX, State, WAIT_MAX, choose};

/// Maximum time for which a neighbour that downloads what changed may make no progress: after it a pull whose registry cannot be reached
/// has failed itself.
const STALL_MAX: Duration = Duration::from_secs(90);
/// Rate in bytes per second below which a site is not waited for, whatever it says: the time for all changes of a layer together.
const RATE_MIN: u64 = 64 << 10;
/// Minimum number of bytes that are progress: below the share of a layer in an uplink of 1 Mbit/s.
const GAIN_BYTES_MIN: u64 = 512 << 10;

/// The action that follows from the answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A neighbour has the blob, or downloads all of it: it is taken from there.
    Follow,
    /// The neighbours are asked again after a pause.
    Wait,
    /// This node asks the registry.
    Ask,
}

/// The wait of one node for the others.
#[derive(Debug)]
pub struct Turn {
    /// Maximum time for all waits for neighbours that download what changed.
    changing_max: Duration,
    /// Time since which this node waits for a neighbour that downloads what changed.
    changing_since: Option<Instant>,
    /// Time since which this node waits for neighbours that have not asked the registry.
    waiting_since: Option<Instant>,
    /// Whether the query before a request to the registry was repeated.
    is_sure: bool,
    /// Neighbours that download what changed, with the bytes and the time of their last progress.
    changing: BTreeMap<usize, (u64, Instant)>,
}

impl Turn {
    /// Creates the wait for a blob of `size` bytes.
    pub fn new(size: u64) -> Self {
        Self {
            changing_max: STALL_MAX + Duration::from_secs(size / RATE_MIN),
            changing_since: None,
            waiting_since: None,
            is_sure: false,
            changing: BTreeMap::new(),
        }
    }

    /// The next step of a node with `bytes` of the blob and this number in the order (`None`: it serves no one), after the `answers` to a
    /// query that began at `begun` and ended `now`.
    pub fn step(
        &mut self,
        answers: &[Answer],
        bytes: u64,
        order: Option<u64>,
        begun: Instant,
        now: Instant,
    ) -> Step {
        let mut is_changing = false;
        for answer in answers {
            // One whose layer can be taken is not waited for: this node could not take it.
            let (State::Changing(bytes), None) = (answer.state, answer.outline) else { continue };
            let last = self.changing.entry(answer.peer).or_insert((bytes, now));
            if bytes >= last.0.saturating_add(GAIN_BYTES_MIN) {
                *last = (bytes, now);
            }
            is_changing |= now.saturating_duration_since(last.1) < STALL_MAX;
        }
        if is_changing {
            let since = *self.changing_since.get_or_insert(now);
            is_changing = now.saturating_duration_since(since) < self.changing_max;
        }
        match choose(answers, bytes, order, &BTreeSet::new()) {
            Choice::Take(_) => Step::Follow,
            _ if is_changing => {
                (self.waiting_since, self.is_sure) = (None, false);
                Step::Wait
            }
            Choice::Wait => {
                let since = *self.waiting_since.get_or_insert(now);
                if now.saturating_duration_since(since) < WAIT_MAX { Step::Wait } else { Step::Ask }
            }
            Choice::Registry { is_alone } => {
                let is_fresh = is_alone && now.saturating_duration_since(begun) < FRESH_MAX;
                // Another node that decides at this moment announces it before the next round.
                let is_sure = is_fresh || std::mem::replace(&mut self.is_sure, true);
                if is_sure { Step::Ask } else { Step::Wait }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Instant {
        use std::sync::OnceLock;
        static BEGUN: OnceLock<Instant> = OnceLock::new();
        *BEGUN.get_or_init(Instant::now) + Duration::from_secs(seconds)
    }

    fn answer(peer: usize, state: State) -> Answer {
        Answer { peer, state, order: 1, outline: None }
    }

    /// Steps after the answers at these seconds.
    fn steps(order: Option<u64>, rounds: &[(u64, &[Answer])]) -> Vec<Step> {
        let mut turn = Turn::new(64 << 20);
        rounds.iter().map(|(time, answers)| turn.step(answers, 0, order, at(*time), at(*time))).collect()
    }

    #[test]
    fn one_node_of_a_site_asks_for_what_changed() {
        use State::{Changing, Complete, Fetching, Nothing, Waiting};
        use Step::{Ask, Follow, Wait};
        assert_eq!(steps(Some(5), &[(0, &[answer(0, Nothing)])]), [Ask]);
        let waiting = [answer(0, Waiting(0))];
        assert_eq!(steps(Some(0), &[(0, &waiting), (1, &waiting)]), [Wait, Ask], "before the other one");
        assert_eq!(steps(Some(5), &[(0, &waiting), (2, &waiting), (3, &waiting)]), [Wait, Wait, Ask]);
        for state in [Complete, Fetching(0)] {
            assert_eq!(steps(Some(0), &[(0, &[answer(0, Changing(0)), answer(1, state)])]), [Follow]);
        }
        // First in the order or not, and serving or not.
        for order in [Some(0), Some(5), None] {
            assert_eq!(steps(order, &[(0, &[answer(0, Changing(0))]), (80, &waiting[..0])]), [Wait, Ask]);
        }
    }

    #[test]
    fn a_node_that_makes_no_progress_is_not_waited_for() {
        use Step::{Ask, Wait};
        let changing = |bytes| [answer(0, State::Changing(bytes))];
        let (none, few, more) = (changing(0), changing(GAIN_BYTES_MIN - 1), changing(GAIN_BYTES_MIN));
        assert_eq!(steps(Some(0), &[(0, &none), (89, &few), (90, &few)]), [Wait, Wait, Ask]);
        assert_eq!(
            steps(Some(0), &[(0, &none), (89, &more), (178, &more), (179, &more)]),
            [Wait, Wait, Wait, Ask]
        );
        // A word that grows and grows has an end, too.
        let grown: Vec<_> = (0..20).map(|round| changing((round + 1) * GAIN_BYTES_MIN)).collect();
        let rounds: Vec<_> =
            grown.iter().enumerate().map(|(round, answers)| (round as u64 * 80, &answers[..])).collect();
        let steps_of_growth = steps(Some(0), &rounds);
        assert_eq!((steps_of_growth[13], steps_of_growth[15]), (Wait, Ask), "{steps_of_growth:?}");
        // Another one that begins has its own time.
        let both = [answer(0, State::Changing(0)), answer(1, State::Changing(0))];
        assert_eq!(steps(Some(0), &[(0, &none), (90, &both)]), [Wait, Wait]);
        let offered = [Answer { outline: Some(9), ..answer(0, State::Changing(0)) }];
        assert_eq!(steps(Some(0), &[(0, &offered)]), [Ask], "its layer could not be taken");
    }
}
