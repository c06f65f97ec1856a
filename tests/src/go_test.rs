//! Results of test programs in Go, as they print them with `-test.v`, and the list of those that do not pass.

use crate::ginkgo::{self, Expected, Results, State};

/// The list of tests that do not pass. A name that ends with `*` stands for all tests that begin so.
pub struct List {
    left_out: Expected,
    fails: Expected,
    may_skip: Expected,
    races: Expected,
}

impl List {
    /// Reads the list, which is TOML with a section for each field.
    pub fn read(text: &str) -> List {
        let section = |name, state| ginkgo::expected(text, &[(name, state)]);
        List {
            left_out: section("not_run", State::Skipped),
            fails: section("fails", State::Failed),
            may_skip: section("may_skip", State::Skipped),
            races: section("races", State::Passed),
        }
    }

    /// Whether a test is not run at all.
    pub fn is_left_out(&self, name: &str) -> bool {
        self.left_out.keys().any(|pattern| matches(pattern, name))
    }

    /// The entries about what is not run, or run again, that name none of these tests.
    pub fn obsolete(&self, names: &[String]) -> Vec<&str> {
        let patterns = self.left_out.keys().chain(self.races.keys()).map(String::as_str);
        patterns.filter(|pattern| !names.iter().any(|name| matches(pattern, name))).collect()
    }

    /// How often a test is run: it must pass once.
    pub fn attempts(&self, name: &str) -> usize {
        /// For those that depend on who is first.
        const ATTEMPTS: usize = 3;
        if self.races.contains_key(name) { ATTEMPTS } else { 1 }
    }

    /// The expected states of these results. A pattern that none matches remains, as a test that was not run.
    pub fn expected(&self, results: &Results) -> Expected {
        let mut expected = Expected::new();
        for (pattern, due) in &self.fails {
            let before = expected.len();
            let names = results.keys().filter(|name| matches(pattern, name));
            expected.extend(names.map(|name| (name.clone(), due.clone())));
            if expected.len() == before {
                expected.insert(pattern.clone(), due.clone());
            }
        }
        for (name, _) in results.iter().filter(|(_, (state, _))| *state == State::Skipped) {
            let skips = self.may_skip.iter().find(|(pattern, _)| matches(pattern, name));
            expected.extend(skips.map(|(_, due)| (name.clone(), due.clone())));
        }
        expected
    }
}

fn matches(pattern: &str, name: &str) -> bool {
    pattern.strip_suffix('*').map_or(pattern == name, |start| name.starts_with(start))
}

/// Failure that no entry of a list expects: of a test that did not end, or that ended with an error although no part of it failed.
pub fn unexpected(name: &str, why: String) -> Results {
    [(format!("({name})"), (State::Failed, why))].into()
}

/// Reads the results of the test `name`: those of its subtests, if it has some, and its own if it failed and none of them did.
pub fn read(name: &str, output: &str) -> Results {
    let all: Vec<(&str, State)> = output.lines().filter_map(result).collect();
    if !all.iter().any(|(found, _)| *found == name) {
        return [(name.to_owned(), (State::Failed, why(output, "panic: ")))].into();
    }
    let of_interest = |(found, state): &&(&str, State)| {
        let parts = || {
            all.iter().filter(|(part, _)| part.strip_prefix(found).is_some_and(|rest| rest.starts_with('/')))
        };
        match state {
            State::Failed => parts().all(|(_, state)| *state != State::Failed),
            _ => parts().next().is_none(),
        }
    };
    let with_reason = |(found, state): &(&str, State)| {
        // A subtest's messages follow the line with which it begins.
        let begin = output.find(&format!("=== RUN   {found}\n")).unwrap_or(0);
        let marker = if *state == State::Failed { "Error:" } else { "_test.go:" };
        ((*found).to_owned(), (*state, why(&output[begin..], marker)))
    };
    all.iter().filter(of_interest).map(with_reason).collect()
}

/// `--- FAIL: TestName/part (0.10s)`
fn result(line: &str) -> Option<(&str, State)> {
    let (state, rest) = line.trim_start().strip_prefix("--- ")?.split_once(": ")?;
    let state = match state {
        "PASS" => State::Passed,
        "FAIL" => State::Failed,
        "SKIP" => State::Skipped,
        _ => return None,
    };
    Some((rest.rsplit_once(" (")?.0, state))
}

/// The text from `marker` on, or the end of all.
fn why(output: &str, marker: &str) -> String {
    const CHARACTERS: usize = 400;
    let from_end = output.char_indices().rev().nth(CHARACTERS).map_or(0, |(index, _)| index);
    output[output.find(marker).unwrap_or(from_end)..].chars().take(CHARACTERS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "=== RUN   TestA\n=== RUN   TestA/one\n    a_test.go:1: Error: first\n\
        === RUN   TestA/two\n    a_test.go:2:\n  Error:  second\n--- FAIL: TestA (0.10s)\n\
        \x20   --- PASS: TestA/one (0.05s)\n    --- FAIL: TestA/two (0.05s)\nFAIL\n";

    fn states(results: &Results) -> Vec<(&str, State)> {
        results.iter().map(|(name, (state, _))| (name.as_str(), *state)).collect()
    }

    #[test]
    fn subtests_take_the_place_of_their_test() {
        let results = read("TestA", OUTPUT);
        assert_eq!(states(&results), [("TestA/one", State::Passed), ("TestA/two", State::Failed)]);
        assert!(results["TestA/two"].1.starts_with("Error:  second"), "{results:?}");
        // It failed itself, after its subtests.
        let results = read("TestA", &OUTPUT.replace("--- FAIL: TestA/two", "--- SKIP: TestA/two"));
        assert_eq!(
            states(&results),
            [("TestA", State::Failed), ("TestA/one", State::Passed), ("TestA/two", State::Skipped)]
        );
    }

    #[test]
    fn a_test_without_a_result_has_failed() {
        for output in ["", "panic: nil map\n", "--- PASS: TestAB (0.00s)\nPASS\n"] {
            assert_eq!(states(&read("TestA", output)), [("TestA", State::Failed)], "{output}");
        }
        assert!(read("TestA", "x\npanic: nil map\n")["TestA"].1.starts_with("panic: nil map"));
    }

    #[test]
    fn a_pattern_expects_each_test_that_begins_so() {
        let list = List::read(
            "[not_run]\n\"TestZ*\" = \"a reason that is long enough\"\n\
             [fails]\n\"TestA/*\" = \"a reason that is long enough\"\n\"TestGone\" = \"a reason that is long enough\"\n\
             [may_skip]\n\"TestB\" = \"a reason that is long enough\"\n\"TestC\" = \"a reason that is long enough\"\n\
             [races]\n\"TestC\" = \"a reason that is long enough\"\n",
        );
        assert!(list.is_left_out("TestZip") && !list.is_left_out("TestA/one"));
        assert_eq!(list.obsolete(&["TestZip".to_owned()]), ["TestC"]);
        assert_eq!((list.attempts("TestC"), list.attempts("TestB")), (3, 1));
        let mut results = read("TestA", OUTPUT);
        results.insert("TestB".into(), (State::Skipped, String::new()));
        results.insert("TestC".into(), (State::Passed, String::new()));
        // TestA/one passes although it is listed, and TestGone was not run: both are failures for `ginkgo::judge`.
        let expected = list.expected(&results);
        let name = unexpected("TestA/one", String::new()).into_keys().next().expect("one");
        assert!(!expected.contains_key(&name) && !matches("Test*", &name), "{name}");
        assert_eq!(
            states(&expected),
            [
                ("TestA/one", State::Failed),
                ("TestA/two", State::Failed),
                ("TestB", State::Skipped),
                ("TestGone", State::Failed)
            ]
        );
    }
}
