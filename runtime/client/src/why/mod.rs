//! `coracle why NAME`: reports the events of a pod, a container or an image from the history that the daemon
//! records (`coracle_base::history`), and the current state from the running daemon.
//!
//! ```text
//!   story (reads the files) ──> select (events of NAME) ──> report (cause and advice first, then the events)
//!                                                     advice (text of an error → advice) ─┘
//! ```
//! The command is a separate process, so it may block. It works without the daemon.

mod advice;
mod live;
mod report;
mod select;
mod story;

use std::path::Path;
use std::process::ExitCode;
use std::time::SystemTime;

use coracle_base::history;

use crate::{EXIT_USAGE, Typed};
use live::Live;

/// Prints the report. Exit code 1: there are no events of the name, or the name is ambiguous; 2: no name.
pub fn run(state: &Path, command: &Typed) -> ExitCode {
    let [name] = command.arguments.as_slice() else {
        crate::complain([
            "why: one name is expected: NAMESPACE/POD, POD, CONTAINER, IMAGE, or the start of an id",
        ]);
        return ExitCode::from(EXIT_USAGE);
    };
    history::sweep(state, SystemTime::now());
    let (story, live) = (story::read(state), Live::ask(state));
    match select::select(&story.events, &live, name) {
        Ok(selection) => crate::print(&report::write(&selection, &live, &story.problems)),
        Err(text) => crate::complain(story.problems.iter().cloned().chain([text])),
    }
}
