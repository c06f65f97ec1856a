//! What Rust's test harness prints, as numbers. Pure.

use std::time::Duration;

/// The results of one or more test programs.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Results {
    pub(crate) passed: u32,
    pub(crate) failed: u32,
    /// Tests that a filter or `#[ignore]` left out.
    pub(crate) left_out: u32,
    /// Number of lines `test result: …`: that many programs ended in order.
    pub(crate) programs: u32,
    /// The tests with their times, as far as the harness printed them.
    pub(crate) times: Vec<(String, Duration)>,
}

impl Results {
    /// Reads the output of test programs: `test NAME ... ok <1.234s>` and `test result: ok. 5 passed; 0 failed; …`.
    pub(crate) fn read(output: &str) -> Results {
        let mut results = Results::default();
        for line in output.lines() {
            if let Some(numbers) = line.strip_prefix("test result: ") {
                results.programs += 1;
                results.passed += number_before(numbers, "passed");
                results.failed += number_before(numbers, "failed");
                results.left_out +=
                    number_before(numbers, "filtered out") + number_before(numbers, "ignored");
            } else if let Some((name, time)) = timed(line) {
                results.times.push((name.to_owned(), time));
            }
        }
        results
    }

    pub(crate) fn add(&mut self, other: Results) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.left_out += other.left_out;
        self.programs += other.programs;
        self.times.extend(other.times);
    }
}

/// The number in front of a word, as in `5 passed; 0 failed`.
fn number_before(text: &str, word: &str) -> u32 {
    let before = text.split(word).next().filter(|before| before.len() < text.len());
    before.and_then(|before| before.split_whitespace().last()?.parse().ok()).unwrap_or(0)
}

/// `test NAME ... ok <1.234s>`.
fn timed(line: &str) -> Option<(&str, Duration)> {
    let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let seconds = rest.split_once('<')?.1.split_once("s>")?.0;
    Some((name, Duration::from_secs_f64(seconds.parse().ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_the_sum_of_all_programs() {
        let output = "running 2 tests\n\
            test pods::one ... ok <1.250s>\n\
            test pods::two ... FAILED <0.002s>\n\
            test result: FAILED. 1 passed; 1 failed; 3 ignored; 0 measured; 4 filtered out; finished in 1.25s\n\
            noise <7s>\n\
            test result: ok. 10 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n";
        let results = Results::read(output);
        let times = vec![
            ("pods::one".to_owned(), Duration::from_millis(1250)),
            ("pods::two".to_owned(), Duration::from_millis(2)),
        ];
        assert_eq!(results, Results { passed: 11, failed: 1, left_out: 7, programs: 2, times });
    }
}
