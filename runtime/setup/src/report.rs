//! Prints plans, results and states, as text or, with `-o json`, as one object.

use std::fmt::Write as _;

use serde_json::{Value, json};

use crate::plan::{Change, Part, State};

/// Whether a change is made, or only shown.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// The change was made.
    Done,
    /// The change would be made (`--dry-run`).
    Shown,
}

/// The state as one or two words.
pub(crate) fn word(state: State) -> &'static str {
    match state {
        State::InPlace => "in place",
        State::Absent => "absent",
        State::Outdated => "outdated",
        State::Changed => "changed",
        State::Foreign => "foreign",
    }
}

/// Formats changes as text. Shown changes have the new lines of each file.
pub(crate) fn changes(changes: &[Change], mode: Mode) -> String {
    let mut text = String::new();
    for change in changes {
        let (made, would, path) = match change {
            Change::Write { path, from: None, .. } => ("written", "would write", path),
            Change::Write { path, from: Some(_), .. } => ("changed", "would change", path),
            Change::Remove { path, .. } => ("removed", "would remove", path),
            Change::RemoveDirectory { path } => ("removed if empty", "would remove if empty", path),
        };
        // Writing to a `String` does not fail.
        let _ = writeln!(text, "{} {path}", if mode == Mode::Done { made } else { would });
        if let (Change::Write { from, text: new, .. }, Mode::Shown) = (change, mode) {
            let old = from.as_deref().unwrap_or_default();
            for line in old.lines().filter(|line| !new.lines().any(|other| other == *line)) {
                let _ = writeln!(text, "    - {line}");
            }
            for line in new.lines().filter(|line| !old.lines().any(|other| other == *line)) {
                let _ = writeln!(text, "    + {line}");
            }
        }
    }
    text
}

/// Formats a list with a heading; empty without items.
pub(crate) fn list(heading: &str, items: &[String]) -> String {
    let lines: String = items.iter().map(|item| format!("    {item}\n")).collect();
    if items.is_empty() { lines } else { format!("{heading}:\n{lines}") }
}

/// The changes as JSON, for programs that read the output.
pub(crate) fn json_changes(changes: &[Change]) -> Value {
    let one = |change: &Change| match change {
        Change::Write { path, from, text } => {
            json!({ "action": "write", "path": path, "from": from, "text": text })
        }
        Change::Remove { path, .. } => json!({ "action": "remove", "path": path }),
        Change::RemoveDirectory { path } => json!({ "action": "remove directory if empty", "path": path }),
    };
    changes.iter().map(one).collect()
}

/// Files and settings for programs.
pub(crate) fn json_parts(parts: &[Part]) -> Value {
    parts.iter().map(|part| json!({ "path": part.path, "state": word(part.state) })).collect()
}
