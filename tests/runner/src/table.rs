//! The table of times: printed after each run, and kept in CONTRIBUTING.md.

use std::fmt::Write as _;
use std::fs;
use std::time::Duration;

use crate::schedule::Outcome;
use crate::steps::Tier;

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

/// Writes the times of this run into CONTRIBUTING.md, in place of those of the run before.
pub(crate) fn update(tier: Tier, ended: &[Outcome], whole: Duration) {
    const PAGE: &str = "CONTRIBUTING.md";
    let page = fs::read_to_string(PAGE).expect("CONTRIBUTING.md");
    let new = replaced(&page, mark(tier), &rows(ended, whole));
    fs::write(PAGE, new).expect("CONTRIBUTING.md can be written");
}

fn rows(ended: &[Outcome], whole: Duration) -> String {
    let mut text = String::from("| step | part | seconds | tests | what it shows |\n|---|---|---|---|---|\n");
    for outcome in ended {
        let (step, results) = (&outcome.step, &outcome.results);
        let tests = if results.programs == 0 { String::new() } else { results.passed.to_string() };
        let (name, parts, seconds) = (step.name, step.parts.join(" "), outcome.took.as_secs_f64());
        let _ = writeln!(text, "| {name} | {parts} | {seconds:.0} | {tests} | {} |", step.proves);
    }
    let _ = writeln!(text, "| all of it | | {:.0} | | |", whole.as_secs_f64());
    text
}

/// The page with these rows in place of the table behind `mark`.
fn replaced(page: &str, mark: &str, rows: &str) -> String {
    let (before, after) = page.split_once(mark).unwrap_or_else(|| panic!("CONTRIBUTING.md has no {mark}"));
    let rest: String = after
        .trim_start_matches('\n')
        .split_inclusive('\n')
        .skip_while(|line| line.starts_with('|'))
        .collect();
    format!("{before}{mark}\n\n{rows}{}{rest}", if rest.starts_with('\n') { "" } else { "\n" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_replaces_the_one_before() {
        let page = "a\n\n<!-- m -->\n\n| old |\n|---|\n\nb\n";
        let new = replaced(page, "<!-- m -->", "| new |\n|---|\n| 1 |\n");
        assert_eq!(new, "a\n\n<!-- m -->\n\n| new |\n|---|\n| 1 |\n\nb\n");
        assert_eq!(replaced(&new, "<!-- m -->", "| old |\n|---|\n"), page);
    }
}
