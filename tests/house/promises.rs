//! Checks that tests that pages name as evidence exist. A name in backquotes with three or more underscores
//! and only lower-case letters, digits and underscores counts as the name of a test.

use std::collections::BTreeSet;
use std::fs;

use crate::{files, root};

/// The pages whose claims refer to tests.
const PAGES: [&str; 4] =
    ["docs/promises.md", "docs/results/0.1.0.md", "docs/security.md", "docs/threat-model.md"];

/// Names of all functions of the repository: tests are functions, some of which macros generate from a name.
fn functions() -> BTreeSet<String> {
    let is_part = |character: char| character.is_ascii_alphanumeric() || character == '_';
    let mut names = BTreeSet::new();
    for path in files(".rs") {
        let text = fs::read_to_string(path).expect("a source file");
        for line in text.lines() {
            let after = line.split("fn ").skip(1);
            names.extend(after.map(|rest| rest.split(|c| !is_part(c)).next().unwrap_or_default().to_owned()));
        }
    }
    names
}

/// Texts in backquotes that have the form of a test's name.
fn named(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2).filter(|word| {
        word.matches('_').count() >= 3
            && word.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
    })
}

#[test]
fn tests_that_pages_name_exist() {
    let functions = functions();
    let mut missing = Vec::new();
    for page in PAGES {
        let Ok(text) = fs::read_to_string(root().join(page)) else { continue };
        missing.extend(
            named(&text).filter(|name| !functions.contains(*name)).map(|name| (page, name.to_owned())),
        );
    }
    assert!(missing.is_empty(), "no such test: {missing:?}");
}

#[test]
fn only_names_of_tests_are_taken_for_them() {
    let text = "`a_test_of_ours` and `keep_blobs`, `CLONE_INTO_CGROUP_NOW_X`, `path/to_a_file_here.rs`";
    assert_eq!(named(text).collect::<Vec<_>>(), ["a_test_of_ours"]);
}
