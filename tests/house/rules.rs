//! Each rule of NRI's specification has a test named after it: `nri_s17_…`, or several in one name.

use std::collections::BTreeSet;
use std::fs;

/// How many rules there are of each kind: pods, containers, robustness.
const RULES: [(char, u32); 3] = [('s', 38), ('c', 34), ('r', 26)];

fn named(folder: &str, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(crate::root().join(folder)).expect("a folder").flatten() {
        let path = entry.path();
        if path.is_dir() {
            named(&path.display().to_string(), found);
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            let text = fs::read_to_string(&path).expect("our source");
            let names = text.lines().filter_map(|line| line.trim().strip_prefix("fn nri_"));
            // The rules come first in a name; its words follow.
            let is_rule = |word: &&str| {
                word.len() > 1
                    && word.starts_with(['s', 'c', 'r'])
                    && word[1..].bytes().all(|byte| byte.is_ascii_digit())
            };
            found.extend(names.flat_map(|name| name.split('_').take_while(is_rule)).map(str::to_owned));
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
    assert_eq!(found.difference(&all).collect::<Vec<_>>(), Vec::<&String>::new(), "tests of no rule");
}
