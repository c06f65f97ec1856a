//! Results of public suites that are made with ginkgo (critest, Kubernetes' end-to-end tests), and their
//! comparison with a list of what cannot pass. A listed spec that passes is a failure, too.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

/// Result of a spec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The spec ran and passed.
    Passed,
    /// The spec ran and did not pass.
    Failed,
    /// The spec was selected and skipped itself.
    Skipped,
}

/// State of each selected spec by its name, with its message.
pub type Results = BTreeMap<String, (State, String)>;

/// State and reason of each listed spec by its name.
pub type Expected = BTreeMap<String, (State, String)>;

/// Reads the results from ginkgo's JSON report. `unselected` are the states that a spec without a message has
/// if it was not selected; with a message it has skipped itself.
pub fn results(report: &Path, unselected: &[&str]) -> std::io::Result<Results> {
    let suites: Value = serde_json::from_slice(&std::fs::read(report)?).expect("ginkgo's report is JSON");
    let specs = suites[0]["SpecReports"].as_array().expect("the report has specs");
    Ok(specs.iter().filter_map(|report| spec(report, unselected)).collect())
}

fn spec(report: &Value, unselected: &[&str]) -> Option<(String, (State, String))> {
    let leaf = report["LeafNodeText"].as_str().filter(|text| !text.is_empty())?;
    let levels = report["ContainerHierarchyTexts"].as_array()?.iter().filter_map(Value::as_str);
    let name: Vec<&str> = levels.chain([leaf]).collect();
    let why = report["Failure"]["Message"].as_str().unwrap_or_default();
    let state = match report["State"].as_str()? {
        "passed" => State::Passed,
        state if unselected.contains(&state) && why.is_empty() => return None,
        state if unselected.contains(&state) => State::Skipped,
        _ => State::Failed,
    };
    Some((name.join(" "), (state, why.to_owned())))
}

/// Reads these sections of a list in TOML; the specs of a section are expected to have its state.
pub fn expected(text: &str, sections: &[(&str, State)]) -> Expected {
    let table: toml::Table = text.parse().expect("the list is TOML");
    let mut all = Expected::new();
    for (section, state) in sections {
        for (spec, reason) in table.get(*section).and_then(toml::Value::as_table).into_iter().flatten() {
            let reason = reason.as_str().filter(|reason| reason.len() > 20).expect("each has a reason");
            all.insert(spec.clone(), (*state, reason.to_owned()));
        }
    }
    all
}

/// Prints the results that are as listed, and panics if there are others or none. With `all`, each listed spec
/// must have been selected.
pub fn judge(results: &Results, expected: &Expected, all: bool) {
    let mut wrong = Vec::new();
    for (name, (state, why)) in results {
        let due = expected.get(name).map_or(State::Passed, |(state, _)| *state);
        match expected.get(name) {
            Some((_, reason)) if *state == due => println!("{state:?} as expected: {name} ({reason})"),
            _ if *state == due => {}
            _ => {
                // gomega prints whole Go structures; the error is at the start.
                let why: String =
                    why.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(400).collect();
                wrong.push(format!("{name}: {state:?}, expected {due:?}: {why}"));
            }
        }
    }
    if all {
        let gone = expected.keys().filter(|name| !results.contains_key(*name));
        wrong.extend(gone.map(|name| format!("{name}: is listed and was not run")));
    }
    assert!(!results.is_empty(), "no spec ran");
    assert!(wrong.is_empty(), "{} specs are not as expected:\n{}", wrong.len(), wrong.join("\n"));
}

/// The numbers of specs in each state, as text.
pub fn counts(results: &Results) -> String {
    let count = |wanted| results.values().filter(|(state, _)| *state == wanted).count();
    let (passed, failed, skipped) = (count(State::Passed), count(State::Failed), count(State::Skipped));
    format!("{passed} passed, {failed} failed, {skipped} skipped")
}
