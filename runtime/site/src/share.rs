//! What the nodes of a site know about each other's share of a blob, and which of them asks the registry, without I/O except for the name
//! of a node. All nodes compute the same order, so that none has to be asked.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use coracle_sandbox::collect;
use coracle_sandbox::describe_io;
use sha2::{Digest, Sha256};

/// A neighbour's share of a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The neighbour has the blob.
    Complete,
    /// The neighbour downloads the blob from a registry, and has this many bytes.
    Fetching(u64),
    /// The neighbour has this many bytes, the first ones from other nodes, and downloads the others from a registry.
    Resuming(u64),
    /// The neighbour has this number of bytes, and has not requested the blob from a registry.
    Waiting(u64),
    /// The neighbour downloads what it does not have of the layer, this many bytes so far, and will have it unpacked, without the blob.
    Changing(u64),
    /// The neighbour has nothing of it, or does not say.
    Nothing,
}

impl State {
    /// Parses the field of an answer; returns also the name of the node.
    pub fn parse(field: &str) -> Option<(Self, &str)> {
        let mut words = field.split(' ');
        let (word, bytes, name) = (words.next()?, words.next()?.parse().ok()?, words.next()?);
        let state = match word {
            "complete" => Self::Complete,
            "fetching" => Self::Fetching(bytes),
            "resuming" => Self::Resuming(bytes),
            "waiting" => Self::Waiting(bytes),
            "changing" => Self::Changing(bytes),
            "nothing" => Self::Nothing,
            _ => return None,
        };
        Some((state, name))
    }
}

/// The answer of a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Index of the neighbour.
    pub peer: usize,
    /// Share of the neighbour.
    pub state: State,
    /// Number of the neighbour in the order of the blob ([`order`]).
    pub order: u64,
    /// Length in bytes of the outline of the layer, if the neighbour has it unpacked and was asked for it.
    pub outline: Option<u64>,
}

impl Answer {
    /// Whether the neighbour downloads the blob from a registry.
    pub fn is_downloading(&self) -> bool {
        matches!(self.state, State::Fetching(_) | State::Resuming(_))
    }

    /// Number of bytes of the blob that the neighbour can send at once.
    pub fn bytes(&self) -> u64 {
        match self.state {
            State::Complete => u64::MAX,
            State::Fetching(bytes) | State::Resuming(bytes) => bytes,
            State::Waiting(_) | State::Changing(_) | State::Nothing => 0,
        }
    }
}

/// The action that follows from the answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The blob is requested from this neighbour.
    Take(Answer),
    /// A neighbour before this node in the order is about to get it.
    Wait,
    /// This node asks the registry.
    Registry {
        /// Whether no other node is about to.
        is_alone: bool,
    },
}

/// Chooses for a node with `bytes` of the blob and this number in the order; `None`: it serves no one, so all others come first.
/// A neighbour that failed is chosen if there is no other.
pub fn choose(answers: &[Answer], bytes: u64, order: Option<u64>, failed: &BTreeSet<usize>) -> Choice {
    let rank = |answer: &&Answer| {
        let (place, bytes, order) = match answer.state {
            // Nodes choose differently, so that one of those that have the blob does not serve all.
            State::Complete => (0, u64::MAX, answer.order ^ order.unwrap_or(0)),
            State::Fetching(bytes) => (1, bytes, answer.order),
            State::Resuming(bytes) => (2, bytes, answer.order),
            State::Waiting(_) | State::Changing(_) | State::Nothing => return None,
        };
        Some((failed.contains(&answer.peer), place, Reverse(bytes), order))
    };
    let sources = answers.iter().filter_map(|answer| Some((rank(&answer)?, answer)));
    if let Some((_, answer)) = sources.min_by_key(|(rank, _)| *rank) {
        return Choice::Take(*answer);
    }
    let mut waiting = answers.iter().filter_map(|answer| match answer.state {
        State::Waiting(bytes) => Some((Reverse(bytes), answer.order)),
        _ => None,
    });
    let is_alone = waiting.clone().next().is_none();
    let is_behind = waiting.any(|other| order.is_none_or(|order| other < (Reverse(bytes), order)));
    if is_behind { Choice::Wait } else { Choice::Registry { is_alone } }
}

/// Maximum time for which a node waits for nodes before it in the order to ask the registry.
pub const WAIT_MAX: Duration = Duration::from_secs(3);
/// Duration of a round above which its answers are not a reason to ask the registry: another node may have begun meanwhile.
pub const FRESH_MAX: Duration = Duration::from_millis(250);

/// The number of a node in the order of a blob (rendezvous hashing): another node is the first for each blob.
pub fn order(node: &str, digest: &str) -> u64 {
    let hash = Sha256::new().chain_update(node).chain_update("\n").chain_update(digest).finalize();
    hash.first_chunk().map_or(0, |first| u64::from_be_bytes(*first))
}

/// The name of this node for its neighbours, which orders them and by which a node recognises itself at another address: it is the
/// same in all processes of a daemon until the next boot of the machine, and another one for each daemon, also after a disk was
/// copied.
///
/// # Errors
/// The id of the boot, or the root directory, cannot be read.
pub fn identity(root: &Path) -> Result<String, String> {
    const BOOT: &str = "/proc/sys/kernel/random/boot_id";
    const DIGITS: usize = 16;
    let boot = std::fs::read(BOOT).map_err(|error| format!("read {BOOT}: {}", describe_io(&error)))?;
    let root =
        root.metadata().map_err(|error| format!("stat {}: {}", root.display(), describe_io(&error)))?;
    let hash = Sha256::new().chain_update(boot).chain_update(format!("{} {}", root.dev(), root.ino()));
    let mut id = data_encoding::HEXLOWER.encode(&hash.finalize());
    id.truncate(DIGITS);
    Ok(id)
}

/// The offers of unpacked layers in the answers of neighbours, each with the length of its outline, at most `bytes_max`; in an order that
/// is another one on each node, and no more than are tried for one layer.
pub fn offers(answers: &[Answer], own: u64, bytes_max: u64) -> Vec<(Answer, u64)> {
    const NEIGHBOURS_MAX: usize = 2;
    let fits = |bytes: &u64| (1..=bytes_max).contains(bytes);
    let offer = |answer: &Answer| Some((*answer, answer.outline.filter(fits)?));
    let mut offers: Vec<_> = answers.iter().filter_map(offer).collect();
    collect::sort_by_key(&mut offers, |(answer, _)| answer.order ^ own);
    offers.truncate(NEIGHBOURS_MAX);
    offers
}

/// The number of bytes that a blob of `size` bytes costs beside an unpacked layer, of which `has` bytes are there; `None` if more than that
/// may come from a neighbour, because they would come from a registry.
pub fn compared_with(is_offered: bool, size: u64, has: u64) -> Option<u64> {
    let left = size.saturating_sub(has);
    (is_offered || left <= has).then_some(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(states: &[(State, u64)]) -> Vec<Answer> {
        let answer = |(peer, (state, order)): (usize, &(State, u64))| Answer {
            peer,
            state: *state,
            order: *order,
            outline: None,
        };
        states.iter().enumerate().map(answer).collect()
    }

    #[test]
    fn a_node_follows_the_one_that_downloads_and_waits_only_for_those_before_it() {
        use State::{Changing, Complete, Fetching, Nothing, Resuming, Waiting};
        let take = |peer, state, order| Choice::Take(Answer { peer, state, order, outline: None });
        let registry = |is_alone| Choice::Registry { is_alone };
        for (states, bytes, order, expected) in [
            (&[][..], 0, Some(5), registry(true)),
            (&[(Nothing, 1)], 0, Some(5), registry(true)),
            // It will not have the blob.
            (&[(Changing(9), 1)], 0, Some(5), registry(true)),
            (&[(Fetching(0), 9), (Complete, 8), (Complete, 7)], 0, Some(5), take(2, Complete, 7)),
            (&[(Waiting(9), 1), (Fetching(3), 2), (Fetching(4), 3)], 0, Some(5), take(2, Fetching(4), 3)),
            (&[(Resuming(9), 1), (Fetching(0), 2)], 0, Some(5), take(1, Fetching(0), 2)),
            (&[(Resuming(1), 1), (Resuming(9), 2)], 0, Some(5), take(1, Resuming(9), 2)),
            // One that has too many connections.
            (&[(Waiting(u64::MAX), 0)], 7, Some(5), Choice::Wait),
            (&[(Waiting(0), 1)], 0, Some(5), Choice::Wait),
            (&[(Waiting(0), 9)], 0, Some(5), registry(false)),
            // The one with the most bytes downloads the rest.
            (&[(Waiting(0), 1)], 7, Some(5), registry(false)),
            (&[(Waiting(7), 9)], 0, Some(5), Choice::Wait),
            // A node that serves no one is the last.
            (&[(Waiting(0), 9)], 7, None, Choice::Wait),
        ] {
            assert_eq!(
                choose(&answers(states), bytes, order, &BTreeSet::new()),
                expected,
                "{states:?} {bytes} {order:?}"
            );
        }
    }

    #[test]
    fn a_neighbour_that_failed_is_chosen_if_there_is_no_other() {
        use State::{Complete, Fetching, Waiting};
        let choose = |states: &[(State, u64)]| choose(&answers(states), 0, Some(5), &BTreeSet::from([0]));
        let take = |peer, state, order| Choice::Take(Answer { peer, state, order, outline: None });
        assert_eq!(choose(&[(Complete, 1), (Complete, 9)]), take(1, Complete, 9));
        assert_eq!(choose(&[(Complete, 1), (Fetching(3), 9)]), take(1, Fetching(3), 9));
        assert_eq!(choose(&[(Complete, 1), (Waiting(3), 9)]), take(0, Complete, 1));
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
                choose(&answers(&others), 0, Some(*node), &BTreeSet::new()) != Choice::Wait
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
            ("complete 5 a1", Some((State::Complete, "a1"))),
            ("fetching 5 a1", Some((State::Fetching(5), "a1"))),
            ("resuming 5 a1", Some((State::Resuming(5), "a1"))),
            ("waiting 0 a1", Some((State::Waiting(0), "a1"))),
            ("changing 7 a1", Some((State::Changing(7), "a1"))),
            ("nothing 0 a1", Some((State::Nothing, "a1"))),
            ("", None),
            ("fetching 5", None),
            ("waiting -1 a1", None),
            ("x 5 a1", None),
        ] {
            assert_eq!(State::parse(field), expected, "{field:?}");
        }
    }

    #[test]
    fn only_outlines_of_a_possible_length_are_offers() {
        let answer = |peer, order, outline| Answer { peer, state: State::Nothing, order, outline };
        let answers = [
            answer(0, 7, None),
            answer(1, 6, Some(0)),
            answer(2, 5, Some(101)),
            answer(3, 4, Some(9)),
            answer(4, 3, Some(100)),
            answer(5, 2, Some(8)),
        ];
        let peers =
            |own| offers(&answers, own, 100).iter().map(|(answer, _)| answer.peer).collect::<Vec<_>>();
        assert_eq!(peers(0), [5, 4]);
        assert_eq!(peers(4), [3, 5], "another node begins with another neighbour");
    }

    #[test]
    fn received_bytes_are_not_requested_again() {
        assert_eq!(compared_with(true, 100, 0), Some(100));
        assert_eq!(compared_with(true, 100, 90), Some(10));
        assert_eq!(compared_with(false, 100, 90), Some(10), "the registry sends a few bytes");
        assert_eq!(compared_with(false, 100, 10), None, "the registry would send most");
    }
}
