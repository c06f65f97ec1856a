//! `coracle check`: what the host has and lacks, one line per need, for people and for `grep`.
//!
//! ```text
//!   have      overlayfs
//!   degraded  hugetlb: CONFIG_HUGETLBFS: limits of huge pages are not set
//! ```

use std::fmt::Write as _;

use coracle_sandbox::probe::{Need, State};

/// The lines for `needs`, in their order.
pub(crate) fn report(needs: &[Need]) -> String {
    let mut text = String::new();
    for need in needs {
        let (word, hint) = match (need.state, need.is_required) {
            (State::Have, _) => ("have", ""),
            (State::Missing, true) => ("missing", need.hint),
            (State::Missing, false) => ("degraded", need.hint),
            (State::Unknown, _) => ("unknown", need.hint),
        };
        let colon = if hint.is_empty() { "" } else { ": " };
        // Writing to a `String` does not fail.
        let _ = writeln!(text, "{word:<8}  {}{colon}{hint}", need.name);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::report;
    use coracle_sandbox::probe::{Need, State};

    #[test]
    fn each_state_has_its_word() {
        let need = |state, is_required| Need { name: "x".into(), is_required, state, hint: "switch it on" };
        let cases = [
            (State::Have, true, "have      x\n"),
            (State::Have, false, "have      x\n"),
            (State::Missing, true, "missing   x: switch it on\n"),
            (State::Missing, false, "degraded  x: switch it on\n"),
            (State::Unknown, true, "unknown   x: switch it on\n"),
        ];
        for (state, is_required, expected) in cases {
            assert_eq!(report(&[need(state, is_required)]), expected, "{state:?} {is_required}");
        }
    }
}
