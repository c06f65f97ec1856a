//! `coracle config status`: prints which configuration the running daemon uses, whether the files have changed since, and
//! the result of the last reload: a reload is requested by SIGHUP, which has no reply.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};

use coracle_base::collect::ordered;
use coracle_base::time::rfc3339;
use coracle_control::{Answer, Configuration, Request, socket};
use serde_json::{Value, json};

use crate::ask::ask_within;
use crate::list::json_text;
use crate::{EXIT_USAGE, Typed, complain, print};

/// Time limit for the daemon's answer, which it has in memory.
const DAEMON_PATIENCE: Duration = Duration::from_secs(5);

/// Executes the command; `files` returns the existing files of a configuration with this main file. Exit code 1: the daemon
/// does not use what is in the files, or does not answer; 2: invalid arguments.
pub fn run(state: &Path, command: &Typed, files: &dyn Fn(&Path) -> Vec<PathBuf>) -> ExitCode {
    let is_json = match (command.arguments.as_slice(), command.value("--output")) {
        ([], None | Some("text")) => false,
        ([], Some("json")) => true,
        ([], Some(other)) => return usage(&format!("--output {other}: text or json")),
        ([.., word], _) => return usage(&format!("config status: {word}: nothing more is expected here")),
    };
    let answers = match ask_within(state, &Request::Configuration {}, DAEMON_PATIENCE) {
        Ok(answers) => answers,
        Err(error) => {
            return complain([crate::ask::unanswered(&socket(state), &error)]);
        }
    };
    let Some(Answer::Configuration(loaded)) = answers.into_iter().next() else {
        return complain(["the daemon is of another version, and does not know this request"]);
    };
    let states = compare(&loaded, &files(&loaded.file));
    let is_in_force = loaded.refused_at_ns == 0
        && loaded.needs_restart.is_empty()
        && states.values().all(|state| *state == READ);
    match is_json {
        true => print(&format!("{}\n", json_text(&object(&loaded, &states, is_in_force), true))),
        false => print(&text(&loaded, &states)),
    };
    if is_in_force { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn usage(text: &str) -> ExitCode {
    complain([text]);
    ExitCode::from(EXIT_USAGE)
}

const READ: &str = "read";

/// The state of each file that the daemon has read, or that a reload would read.
fn compare(loaded: &Configuration, present: &[PathBuf]) -> BTreeMap<PathBuf, &'static str> {
    let mut states: BTreeMap<PathBuf, &'static str> =
        ordered(loaded.read.keys().map(|path| (path.clone(), "removed since")));
    for path in present {
        let changed = path.metadata().and_then(|about| about.modified()).ok();
        let changed = changed.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let changed_ns = changed.and_then(|since| i64::try_from(since.as_nanos()).ok()).unwrap_or(0);
        let state = match loaded.read.get(path) {
            Some(read_ns) if *read_ns == changed_ns => READ,
            Some(_) => "changed since",
            None => "new since",
        };
        states.insert(path.clone(), state);
    }
    states
}

fn text(loaded: &Configuration, states: &BTreeMap<PathBuf, &'static str>) -> String {
    let how = if loaded.is_reload { "by a reload" } else { "at the start" };
    let mut text = format!("configuration loaded {how}, {}\n", rfc3339(loaded.at_ns));
    if states.is_empty() {
        let _ = writeln!(text, "  {} does not exist: the defaults are in force", loaded.file.display());
    }
    for (path, state) in states {
        let _ = writeln!(text, "  {state:<14} {}", path.display());
    }
    if loaded.refused_at_ns != 0 {
        let _ = writeln!(
            text,
            "the reload at {} failed, and the configuration from before stays in force:",
            rfc3339(loaded.refused_at_ns)
        );
        for mistake in &loaded.mistakes {
            let _ = writeln!(text, "  {mistake}");
        }
    }
    if !loaded.needs_restart.is_empty() {
        let keys = loaded.needs_restart.join(", ");
        let _ = writeln!(text, "these keys take effect after a restart of the daemon: {keys}");
    }
    if states.values().any(|state| *state != READ) {
        text.push_str("to apply the files: coracle config check, then systemctl reload coracle\n");
    }
    text
}

fn object(loaded: &Configuration, states: &BTreeMap<PathBuf, &'static str>, is_in_force: bool) -> Value {
    let files: Vec<Value> =
        states.iter().map(|(path, state)| json!({"path": path, "state": state})).collect();
    let refused = (loaded.refused_at_ns != 0)
        .then(|| json!({"at": rfc3339(loaded.refused_at_ns), "mistakes": loaded.mistakes}));
    json!({
        "inForce": is_in_force,
        "loadedAt": rfc3339(loaded.at_ns),
        "loadedBy": if loaded.is_reload { "reload" } else { "start" },
        "files": files,
        "needsRestart": loaded.needs_restart,
        "failedReload": refused,
    })
}
