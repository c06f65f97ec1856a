//! Calls that RuntimeDefault is there to refuse, made so that the kernel itself would answer something else.

use super::raw;
use crate::see::Outcome;

/// `saw call NAME ERRNO` for each.
pub(crate) fn all() -> Outcome {
    for (name, said) in raw::calls_to_be_refused() {
        println!("saw call {name} {}", said.map_or_else(|errno| format!("{errno:?}"), |_| "done".into()));
    }
    Ok(0)
}
