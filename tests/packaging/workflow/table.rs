//! `lines.toml`: how each step of the workflow is tested.

use toml::{Table, Value};

/// How the steps of one job are tested.
pub(crate) struct Entry {
    /// The combination of the matrix that runs, as `NAME=VALUE`; without one the first.
    pub(crate) only: Option<String>,
    pub(crate) rules: Vec<Rule>,
}

/// How one step is tested.
pub(crate) struct Rule {
    /// The script, or the action without its version.
    pub(crate) text: String,
    pub(crate) act: Act,
}

pub(crate) enum Act {
    Run(Run),
    /// The step does not run, for this reason.
    Not(String),
}

/// How a step runs.
#[derive(Default)]
pub(crate) struct Run {
    /// The script in which `LINE` stands for the line; empty: the line alone.
    pub(crate) frame: String,
    /// Text after which the line is stopped, because the rest is tested elsewhere.
    pub(crate) until: Option<String>,
    /// Texts of the output, in this order.
    pub(crate) says: Vec<String>,
    /// Minutes after which the line is killed and fails; 0: the usual.
    pub(crate) minutes: u64,
}

/// The entry of a job.
///
/// # Panics
/// If the file is not as its head describes.
pub(crate) fn entry(job: &str) -> Option<Entry> {
    let table = all();
    let entry = table.get(job)?.as_table().expect("the table of a job");
    let unknown = entry.keys().find(|key| !matches!(key.as_str(), "only" | "steps"));
    assert_eq!(unknown, None, "lines.toml, {job}: unknown key");
    let steps = entry.get("steps").and_then(Value::as_array).expect("steps of a job");
    let rules = steps.iter().map(|step| rule(job, step.as_table().expect("a step"))).collect();
    Some(Entry { only: text(entry, "only"), rules })
}

/// The names of all jobs that have an entry.
pub(crate) fn names() -> Vec<String> {
    all().keys().cloned().collect()
}

fn all() -> Table {
    include_str!("lines.toml").parse().expect("lines.toml is TOML")
}

fn text(table: &Table, key: &str) -> Option<String> {
    table.get(key).map(|value| value.as_str().expect("a text").to_owned())
}

fn rule(job: &str, table: &Table) -> Rule {
    const KEYS: [&str; 8] = ["run", "uses", "frame", "until", "says", "minutes", "why", "not"];
    let unknown = table.keys().find(|key| !KEYS.contains(&key.as_str()));
    assert_eq!(unknown, None, "lines.toml, {job}: unknown key");
    let step = text(table, "run").xor(text(table, "uses")).expect("a step has one of run and uses");
    if let Some(reason) = text(table, "not") {
        assert_eq!(table.len(), 2, "lines.toml, {job}, {step}: what does not run has only its reason");
        return Rule { text: step, act: Act::Not(reason) };
    }
    let run = Run {
        frame: text(table, "frame").unwrap_or_default(),
        until: text(table, "until"),
        says: table.get("says").and_then(Value::as_array).into_iter().flatten().map(one).collect(),
        minutes: table.get("minutes").and_then(Value::as_integer).map_or(0, |minutes| minutes as u64),
    };
    let is_whole = run.frame.is_empty() && run.until.is_none();
    assert_eq!(
        is_whole,
        !table.contains_key("why"),
        "lines.toml, {job}, {step}: `why` with `frame` or `until`"
    );
    Rule { text: step, act: Act::Run(run) }
}

fn one(value: &Value) -> String {
    value.as_str().expect("a text").to_owned()
}
