//! Checks that `make t` reports mistakes before it compiles anything.

use std::process::{Command, Output};

use crate::root;

fn known(words: &[&str]) -> Output {
    Command::new(root().join("tests/tools/known")).args(words).output().expect("it runs")
}

#[test]
fn a_name_that_no_test_has_is_refused_before_the_build() {
    // Composed, because this file is searched, too.
    let missing = ["no", "such", "name"].join("_");
    let refused = known(&[&missing, "house"]);
    assert_eq!(refused.status.code(), Some(2));
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(text.contains(&missing) && text.contains("house"), "{text}");
    for name in ["a_name_that_no_test", "commands", "commands::a_name_that_no_test"] {
        let found = known(&[name, "house"]);
        assert!(found.status.success(), "{name}: {}", String::from_utf8_lossy(&found.stderr));
    }
}
