//! System calls that RuntimeDefault refuses, with arguments for which the kernel itself would return another
//! error.

use super::raw;
use crate::see::Outcome;

/// Prints `saw call NAME ERRNO` for each.
pub(crate) fn all() -> Outcome {
    for (name, said) in raw::calls_to_be_refused() {
        println!("saw call {name} {}", said.map_or_else(|errno| format!("{errno:?}"), |_| "done".into()));
    }
    Ok(0)
}
