//! The transitions of pods and containers that docs/reliability.md lists, and the check of those that happen, for the simulation:
//! a state that is written past `on` is found by the next transition.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::sync::LazyLock;

const PAGE: &str = include_str!("../../../../docs/reliability.md");
const HEAD: &str = "| the pod or container is | event | it is then |\n|---|---|---|\n";

static ROWS: LazyLock<BTreeSet<[&str; 3]>> = LazyLock::new(|| rows().collect());

/// All transitions since the last [`take`].
#[derive(Default)]
struct Seen {
    /// The last state of each pod and container by its ID.
    states: BTreeMap<String, &'static str>,
    violation: Option<String>,
}

thread_local!(static SEEN: RefCell<Seen> = RefCell::default());

/// The rows of the documented table: state, event, next state.
pub fn rows() -> impl Iterator<Item = [&'static str; 3]> {
    let table = PAGE.split_once(HEAD).map_or("", |(_, rest)| rest);
    table.lines().map_while(|line| {
        let mut cells = line.strip_prefix("| ")?.strip_suffix(" |")?.split(" | ");
        Some([cells.next()?, cells.next()?, cells.next()?])
    })
}

/// Notes a transition of the pod or container with this ID.
pub(crate) fn note(id: &impl Display, row: [&'static str; 3]) {
    let [from, event, to] = row;
    SEEN.with_borrow_mut(|seen| {
        let before = seen.states.insert(id.to_string(), to);
        let violation = match before.filter(|before| *before != from) {
            Some(before) => format!("{id:.13} was {before} and is {from} without an event"),
            None if !ROWS.contains(&row) => {
                format!(
                    "docs/reliability.md does not list that {id:.13} is {to} after \"{event}\" while {from}"
                )
            }
            None => return,
        };
        seen.violation.get_or_insert(violation);
    });
}

/// The state of the pod or container with this ID after its last transition; `None` if there was none.
pub fn last(id: &impl Display) -> Option<&'static str> {
    SEEN.with_borrow(|seen| seen.states.get(&id.to_string()).copied())
}

/// The first transition that must not happen; forgets all, because the next daemon begins with what is on disk.
pub fn take() -> Option<String> {
    SEEN.take().violation
}
