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

/// Makes the calls by the entries of other ABIs; prints `saw i386 NAME ERRNO` or `saw x32 NAME ERRNO` for each.
pub(crate) fn by_other_entries() -> Outcome {
    let entries = [("i386", raw::calls_by_i386 as fn() -> _), ("x32", raw::calls_by_x32)];
    for (entry, calls) in entries {
        for (name, said) in calls() {
            println!(
                "saw {entry} {name} {}",
                said.map_or_else(|errno| format!("{errno:?}"), |_| "done".into())
            );
        }
    }
    Ok(0)
}

/// Whether the kernel would write the memory of these processes to a core dump: `saw dump PID USER`, `saw dump PID none`.
pub(crate) fn dumps(pids: &[&str]) -> Outcome {
    for pid in pids {
        let said = match raw::dump_mode(crate::act::number(pid)? as i32) {
            Ok(Some(mode)) => mode.to_owned(),
            Ok(None) => "unknown".to_owned(),
            Err(errno) => format!("error {errno:?}"),
        };
        println!("saw dump {pid} {said}");
    }
    Ok(0)
}
