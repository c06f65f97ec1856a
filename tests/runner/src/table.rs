//! The table of times: printed after each run, and kept in CONTRIBUTING.md.

use std::fmt::Write as _;
use std::fs;
use std::time::Duration;

use crate::schedule::Outcome;
use crate::steps::{STEPS, Tier};

/// Number of tests that are named as the slowest.
const SLOWEST: usize = 10;

/// The steps with their seconds, and the slowest tests.
pub(crate) fn of_run(ended: &[Outcome], whole: Duration) -> String {
    let mut text = String::from(" seconds  passed  step\n");
    for outcome in ended {
        let passed = match outcome.results.programs {
            0 => "-".to_owned(),
            _ => outcome.results.passed.to_string(),
        };
        let _ = writeln!(text, "{:8.1}  {passed:>6}  {}", outcome.took.as_secs_f64(), outcome.step.name);
    }
    let _ = writeln!(text, "{:8.1}          all of it, side by side", whole.as_secs_f64());
    let mut times: Vec<_> = ended
        .iter()
        .flat_map(|outcome| {
            outcome.results.times.iter().map(move |(name, time)| (time, outcome.step.name, name))
        })
        .collect();
    times.sort_by(|left, right| right.cmp(left));
    if !times.is_empty() {
        text += "\nthe slowest tests\n";
    }
    for (time, step, name) in times.into_iter().take(SLOWEST) {
        let _ = writeln!(text, "{:8.1}  {step}: {name}", time.as_secs_f64());
    }
    text
}

/// The heading of a tier's table in CONTRIBUTING.md; the table follows it.
fn mark(tier: Tier) -> &'static str {
    match tier {
        Tier::Check => "<!-- times of make check -->",
        Tier::Test => "<!-- times of make test -->",
        Tier::All => "<!-- times of make test-all -->",
    }
}

/// Writes the times of this run into CONTRIBUTING.md, in place of those of the run before. Parts may be run one after the other: rows of
/// steps that were not run stay.
pub(crate) fn update(tier: Tier, ended: &[Outcome], whole: Duration) {
    const PAGE: &str = "CONTRIBUTING.md";
    let page = fs::read_to_string(PAGE).expect("CONTRIBUTING.md");
    let mut rows: Vec<(&str, String)> =
        ended.iter().map(|outcome| (outcome.step.name, row(outcome))).collect();
    // The time of several parts says nothing if they were run alone.
    if tier != Tier::All {
        rows.push((WHOLE, format!("| {WHOLE} | | {:.0} | | |\n", whole.as_secs_f64())));
    }
    let order: Vec<&str> = STEPS.iter().map(|step| step.name).chain([WHOLE]).collect();
    fs::write(PAGE, replaced(&page, mark(tier), rows, &order)).expect("CONTRIBUTING.md can be written");
}

/// Name of the last row.
const WHOLE: &str = "all of it";

const HEAD: &str = "| step | part | seconds | tests | what it shows |\n|---|---|---|---|---|\n";

fn row(outcome: &Outcome) -> String {
    let (step, results) = (&outcome.step, &outcome.results);
    let tests = if results.programs == 0 { String::new() } else { results.passed.to_string() };
    let (name, parts, seconds) = (step.name, step.parts.join(" "), outcome.took.as_secs_f64());
    format!("| {name} | {parts} | {seconds:.0} | {tests} | {} |\n", step.proves)
}

/// The page with these rows in the table behind `mark`, in this order of names. Other rows stay if their names are in `order`.
fn replaced<'a>(page: &'a str, mark: &str, mut rows: Vec<(&'a str, String)>, order: &[&str]) -> String {
    let (before, after) = page.split_once(mark).unwrap_or_else(|| panic!("CONTRIBUTING.md has no {mark}"));
    let after = after.trim_start_matches('\n');
    let table = after.split_inclusive('\n').take_while(|line| line.starts_with('|'));
    let length: usize = table.clone().map(str::len).sum();
    for line in table {
        let name = line.split('|').nth(1).unwrap_or_default().trim();
        if !rows.iter().any(|(new, _)| *new == name) {
            rows.push((name, line.to_owned()));
        }
    }
    let place = |name: &str| order.iter().position(|known| *known == name);
    rows.retain(|(name, _)| place(name).is_some());
    rows.sort_by_key(|(name, _)| place(name));
    let rows: String = rows.into_iter().map(|(_, row)| row).collect();
    let rest = &after[length..];
    format!("{before}{mark}\n\n{HEAD}{rows}{}{rest}", if rest.starts_with('\n') { "" } else { "\n" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_run_replace_those_before_and_others_stay() {
        let page = format!("a\n\n<!-- m -->\n\n{HEAD}| one | 1 |\n| gone | 3 |\n| three | 4 |\n\nb\n");
        let new = vec![("two", "| two | 5 |\n".to_owned()), ("one", "| one | 6 |\n".to_owned())];
        let new = replaced(&page, "<!-- m -->", new, &["one", "two", "three"]);
        assert_eq!(new, format!("a\n\n<!-- m -->\n\n{HEAD}| one | 6 |\n| two | 5 |\n| three | 4 |\n\nb\n"));
        assert_eq!(
            replaced(&new, "<!-- m -->", Vec::new(), &["one", "two", "three"]),
            new,
            "nothing was run"
        );
    }
}
