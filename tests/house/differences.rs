//! The differences from containerd that `make compare` accepts: each stands in docs/migration.md with the same words.

use std::collections::BTreeSet;

use serde_json::Value;

/// More would be no list that a user reads before a migration.
const REASONS_MAX: usize = 30;

#[test]
fn each_known_difference_is_in_the_page_for_users() {
    let folder = crate::root();
    let text = std::fs::read_to_string(folder.join("tests/compare/known.toml")).expect("the list");
    let file: Value = toml::from_str(&text).expect("known.toml is TOML");
    let entries = file.get("difference").and_then(Value::as_array).cloned().unwrap_or_default();
    let reasons: BTreeSet<&str> = entries.iter().filter_map(|entry| entry["reason"].as_str()).collect();
    assert!(reasons.len() <= REASONS_MAX, "{} known differences, at most {REASONS_MAX}", reasons.len());
    let page = std::fs::read_to_string(folder.join("docs/migration.md")).expect("the page");
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let page = words(&page);
    for entry in &entries {
        let reason = words(entry["reason"].as_str().unwrap_or_default());
        assert!(!reason.is_empty(), "{entry}: no reason");
        assert!(!reason.to_lowercase().contains("not implemented"), "{entry}: what is missing is no reason");
        assert!(page.contains(&reason), "docs/migration.md does not say: {reason}");
    }
}
