//! Each rule of docs/specs/nri.md has a test whose documentation comment names it: `NRI-S17`, or several.

use std::collections::BTreeSet;
use std::fs;

/// Number of rules of each kind: pods, containers, robustness.
const RULES: [(char, u32); 3] = [('S', 38), ('C', 34), ('R', 26)];

/// The rules in a line: `NRI-S1, NRI-R23` gives S1 and R23.
fn rules(line: &str) -> impl Iterator<Item = String> {
    line.split("NRI-").skip(1).filter_map(|rest| {
        let end = rest.find(|letter: char| !letter.is_ascii_alphanumeric()).unwrap_or(rest.len());
        let (kind, number) = rest[..end].split_at_checked(1)?;
        let is_rule = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        (is_rule && "SCR".contains(kind)).then(|| rest[..end].to_owned())
    })
}

/// Collects the rules in documentation comments of tests below a directory.
fn named(directory: &str, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(crate::root().join(directory)).expect("a directory").flatten() {
        let path = entry.path();
        if path.is_dir() {
            named(&path.display().to_string(), found);
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            let text = fs::read_to_string(&path).expect("a source file");
            let mut comment = Vec::new();
            for line in text.lines().map(str::trim) {
                if line.starts_with("///") {
                    comment.extend(rules(line));
                } else if line == "#[test]" {
                    found.extend(comment.drain(..));
                } else {
                    comment.clear();
                }
            }
        }
    }
}

#[test]
fn every_rule_of_nri_has_a_test() {
    let mut found = BTreeSet::new();
    named("tests/nri", &mut found);
    named("nri/src", &mut found);
    let all =
        RULES.iter().flat_map(|(kind, count)| (1..=*count).map(move |number| format!("{kind}{number}")));
    let all: BTreeSet<_> = all.collect();
    assert_eq!(all.difference(&found).collect::<Vec<_>>(), Vec::<&String>::new(), "rules without a test");
    assert_eq!(found.difference(&all).collect::<Vec<_>>(), Vec::<&String>::new(), "tests of unknown rules");
}
