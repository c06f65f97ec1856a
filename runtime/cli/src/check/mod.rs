//! `coracle check`: reports which requirements for running pods this kernel and host meet, one line each, for people and for
//! `grep`; with `--json` for programs.
//!
//! ```text
//! degraded  cgroup controller hugetlb: limits on huge pages are not applied; CONFIG_CGROUP_HUGETLB
//! have      overlayfs
//! ```
//! Requirements that are not met are first. Kernel requirements are in the sandbox's table (`probe`, docs/kernel.md), host
//! requirements in `host` (docs/check.md). The check changes nothing. The check runs in a separate process, so it may block.

mod host;
mod kernel_config;

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use coracle_client::{complain, print};
use coracle_sandbox::collect;
use coracle_sandbox::probe::{self, Need, State};
use serde_json::json;

use coracle_config::Config;

/// Checks all requirements and prints the report. Exit code 1: pods cannot run on this host.
pub(crate) fn run(config: &Config, as_json: bool) -> ExitCode {
    match text(config, as_json) {
        Ok((text, can_run)) => match (print(&text), can_run) {
            (ExitCode::SUCCESS, true) => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        },
        Err(error) => complain([error]),
    }
}

/// The report, and whether pods can run.
///
/// # Errors
/// A property of the kernel cannot be read.
pub(crate) fn text(config: &Config, as_json: bool) -> Result<(String, bool), String> {
    let kernel = probe::needs(kernel_config::read()).map_err(|error| error.to_string())?;
    let host = host::needs(config);
    let text = if as_json { json(&kernel, &host) } else { report(&kernel, &host) };
    Ok((text, can_run(&kernel, &host)))
}

fn can_run(kernel: &[Need], host: &[Need]) -> bool {
    probe::can_run(kernel) && probe::can_run(host)
}

/// The state of a requirement as one word.
fn word(need: &Need) -> &'static str {
    match (need.state, need.is_required) {
        (State::Have, _) => "have",
        (State::Missing, true) => "missing",
        (State::Missing, false) => "degraded",
        (State::Unknown, _) => "unknown",
    }
}

/// Names of requirements whose absence most pods do not notice: they are last among those that are not met.
const MINOR: [&str; 4] = ["state in memory", "cgroup v2", "cgroup controller hugetlb", "AppArmor"];

/// Formats the report: first missing requirements, then degraded ones, each of the host before those of the kernel, because
/// they are easier to fix; then the others in the order of the documentation pages, and a summary.
fn report(kernel: &[Need], host: &[Need]) -> String {
    let mut text = String::new();
    let rank = |need: &Need| match word(need) {
        "missing" => 0,
        "degraded" if !MINOR.contains(&need.name) => 1,
        "degraded" => 2,
        _ => 3,
    };
    let is_fine = |need: &&Need| rank(need) == 3;
    let mut wrong: Vec<&Need> = host.iter().chain(kernel).filter(|need| !is_fine(need)).collect();
    collect::sort_by_key(&mut wrong, |need| rank(need));
    for need in wrong.into_iter().chain(kernel.iter().chain(host).filter(is_fine)) {
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
    if kernel.iter().chain(host).any(|need| need.state == State::Missing) {
        let _ = writeln!(text, "pages: {}, {}", page_of("kernel.md"), page_of("check.md"));
    }
    text
}

/// The path of a documentation page: the installed page next to this program, otherwise the page in the source tree.
fn page_of(name: &str) -> String {
    let own = std::fs::read_link("/proc/self/exe").unwrap_or_default();
    let installed =
        own.parent().and_then(Path::parent).map(|prefix| prefix.join("share/doc/coracle").join(name));
    match installed.filter(|path| path.is_file()) {
        Some(path) => path.display().to_string(),
        None => format!("docs/{name}"),
    }
}

/// Formats the report as a JSON object.
fn json(kernel: &[Need], host: &[Need]) -> String {
    let mut needs = Vec::new();
    for (page, from) in [("kernel.md", kernel), ("check.md", host)] {
        let page = page_of(page);
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
    fn each_state_is_printed_with_its_word() {
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
            let need = [need(state, is_required, found)];
            for text in [report(&need, &[]), report(&[], &need)] {
                let (lines, pages) = text.split_once("pages: ").unwrap_or((&text, ""));
                assert_eq!(lines, expected, "{state:?} {is_required}");
                assert_eq!(pages.contains("kernel.md"), state == State::Missing, "{text}");
            }
        }
    }

    #[test]
    fn missing_requirements_are_listed_first() {
        let all = |state| [need(state, true, "required"), need(state, false, "optional")];
        let kernel = [all(State::Have), all(State::Missing), all(State::Unknown)].concat();
        let host = [all(State::Have), all(State::Missing)].concat();
        let text = report(&kernel, &host);
        let words: Vec<&str> = text.lines().filter_map(|line| line.split_whitespace().next()).collect();
        let expected = "missing missing degraded degraded have have unknown unknown have have pods pages:";
        assert_eq!(words.join(" "), expected, "{text}");
    }

    #[test]
    fn json_has_the_requirements_of_the_text() {
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
