//! The differences that are meant: `known.toml`, whose reasons stand in docs/migration.md too (tests/house checks it).

use serde_json::Value;

/// A difference with its reason.
struct Entry {
    parts: Vec<String>,
    /// Names of facts, in which `*` stands for any text, each with whether it explained a difference.
    what: Vec<(String, bool)>,
    /// Values of coracle and of containerd; `*` stands for any text.
    ours: String,
    theirs: String,
}

/// The known differences: `tests/compare/known.toml`.
pub(crate) struct Known(Vec<Entry>);

impl Known {
    /// Reads the file.
    pub(crate) fn read() -> Known {
        let text = include_str!("known.toml");
        let file: Value = toml::from_str(text).expect("known.toml is TOML");
        let entries = file["difference"].as_array().cloned().unwrap_or_default();
        Known(entries.iter().map(Entry::of).collect())
    }

    /// Whether an entry explains this difference.
    pub(crate) fn explains(&mut self, part: &str, what: &str, ours: &str, theirs: &str) -> bool {
        let is_of = |entry: &&mut Entry| {
            entry.parts.iter().any(|known| known == part)
                && matches(&entry.ours, ours)
                && matches(&entry.theirs, theirs)
        };
        let mut patterns = self.0.iter_mut().filter(is_of).flat_map(|entry| &mut entry.what);
        let found = patterns.find(|(pattern, _)| matches(pattern, what));
        found.is_some_and(|(_, is_used)| {
            *is_used = true;
            true
        })
    }

    /// The names of a part's entries that explained nothing.
    pub(crate) fn unused(&self, part: &str) -> Vec<&str> {
        let entries = self.0.iter().filter(|entry| entry.parts.iter().any(|known| known == part));
        let names = entries.flat_map(|entry| &entry.what).filter(|(_, is_used)| !is_used);
        names.map(|(pattern, _)| pattern.as_str()).collect()
    }
}

impl Entry {
    fn of(value: &Value) -> Entry {
        let word = |key: &str| value.get(key)?.as_str().map(str::to_owned);
        let words = |key: &str| -> Vec<String> {
            let several = value[key].as_array().into_iter().flatten().filter_map(Value::as_str);
            let all: Vec<String> = word(key).into_iter().chain(several.map(str::to_owned)).collect();
            assert!(!all.is_empty(), "known.toml: {value} has no {key}");
            all
        };
        let any = || "*".to_owned();
        assert!(word("reason").is_some_and(|reason| !reason.is_empty()), "known.toml: {value} has no reason");
        Entry {
            parts: words("part"),
            what: words("what").into_iter().map(|what| (what, false)).collect(),
            ours: word("coracle").unwrap_or_else(any),
            theirs: word("containerd").unwrap_or_else(any),
        }
    }
}

/// Whether a text is what a pattern says, in which `*` stands for any text.
fn matches(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = text.strip_prefix(parts.next().unwrap_or_default()) else { return false };
    let parts: Vec<&str> = parts.collect();
    let Some((last, middle)) = parts.split_last() else { return rest.is_empty() };
    for part in middle {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}
