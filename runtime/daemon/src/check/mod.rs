//! `coracle check`: what this kernel and host have and lack for running pods, one line per need, for people and for `grep`;
//! with `--json` for programs.
//!
//! ```text
//!   have      overlayfs
//!   degraded  cgroup controller hugetlb: limits on huge pages are refused; CONFIG_CGROUP_HUGETLB
//! ```
//! Needs of the kernel are the sandbox's table (`probe`, docs/kernel.md), those of the host are in `host` (docs/check.md).
//! Nothing is changed by asking. A process of its own: it may wait.

mod host;
mod kernel_config;

use std::fmt::Write as _;
use std::process::ExitCode;

use coracle_sandbox::probe::{self, Need, State};
use serde_json::json;

use crate::config::Config;

/// Looks at everything. Exit code 1: pods cannot run here, so that an installer need not read.
pub(crate) fn run(config: &Config, as_json: bool) -> ExitCode {
    let kernel = match probe::needs(kernel_config::read()) {
        Ok(needs) => needs,
        Err(error) => return crate::complain([error]),
    };
    let host = host::needs(config);
    let text = if as_json { json(&kernel, &host) } else { report(&kernel, &host) };
    match (crate::print(&text), can_run(&kernel, &host)) {
        (ExitCode::SUCCESS, true) => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

fn can_run(kernel: &[Need], host: &[Need]) -> bool {
    probe::can_run(kernel) && probe::can_run(host)
}

/// One word for a need: what a reader must know first.
fn word(need: &Need) -> &'static str {
    match (need.state, need.is_required) {
        (State::Have, _) => "have",
        (State::Missing, true) => "missing",
        (State::Missing, false) => "degraded",
        (State::Unknown, _) => "unknown",
    }
}

/// The lines, the kernel's first, and what follows from them.
fn report(kernel: &[Need], host: &[Need]) -> String {
    let mut text = String::new();
    for need in kernel.iter().chain(host) {
        // Writing to a `String` does not fail.
        let _ = write!(text, "{:<8}  {}", word(need), need.name);
        let parts: &[&str] = match need.state {
            State::Have => &[&need.found],
            State::Missing | State::Unknown => &[&need.found, need.without, need.fix],
        };
        let mut between = ": ";
        for part in parts.iter().filter(|part| !part.is_empty()) {
            text.push_str(between);
            text.push_str(part);
            between = "; ";
        }
        text.push('\n');
    }
    text.push_str(match can_run(kernel, host) {
        true => "pods can run\n",
        false => "pods cannot run here: see what is missing above\n",
    });
    text
}

/// The same as one object.
fn json(kernel: &[Need], host: &[Need]) -> String {
    let mut needs = Vec::new();
    for (page, from) in [("docs/kernel.md", kernel), ("docs/check.md", host)] {
        needs.extend(from.iter().map(|need| {
            json!({
                "name": need.name,
                "state": word(need),
                "required": need.is_required,
                "found": need.found,
                "without": need.without,
                "fix": need.fix,
                "page": page,
            })
        }));
    }
    format!("{}\n", json!({ "can_run_pods": can_run(kernel, host), "needs": needs }))
}

#[cfg(test)]
mod tests {
    use super::{json, report};
    use coracle_sandbox::probe::{Need, State};

    fn need(state: State, is_required: bool, found: &str) -> Need {
        Need {
            name: "x",
            is_required,
            state,
            found: found.into(),
            without: "nothing works",
            fix: "switch it on",
        }
    }

    #[test]
    fn each_state_has_its_word() {
        let cases = [
            (State::Have, true, "", "have      x\npods can run\n"),
            (State::Have, false, "of oak", "have      x: of oak\npods can run\n"),
            (
                State::Missing,
                true,
                "",
                "missing   x: nothing works; switch it on\npods cannot run here: see what is missing above\n",
            ),
            (State::Missing, false, "none", "degraded  x: none; nothing works; switch it on\npods can run\n"),
            (State::Unknown, true, "", "unknown   x: nothing works; switch it on\npods can run\n"),
        ];
        for (state, is_required, found, expected) in cases {
            assert_eq!(report(&[need(state, is_required, found)], &[]), expected, "{state:?} {is_required}");
            assert_eq!(report(&[], &[need(state, is_required, found)]), expected, "{state:?} {is_required}");
        }
    }

    #[test]
    fn programs_read_the_same() {
        let text = json(&[need(State::Have, true, "")], &[need(State::Missing, false, "none")]);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["can_run_pods"], true);
        assert_eq!(value["needs"][0]["state"], "have");
        assert_eq!(value["needs"][0]["page"], "docs/kernel.md");
        assert_eq!(value["needs"][1]["state"], "degraded");
        assert_eq!(value["needs"][1]["found"], "none");
        assert_eq!(value["needs"][1]["page"], "docs/check.md");
        let text = json(&[], &[need(State::Missing, true, "")]);
        assert!(text.starts_with("{\"can_run_pods\":false,"), "{text}");
    }
}
