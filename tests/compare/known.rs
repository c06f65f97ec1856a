//! The differences that are meant: `known.toml`, whose reasons stand in docs/migration.md too (tests/house checks it).

use serde_json::Value;

/// A difference with its reason.
struct Entry {
    part: String,
    /// Names of facts; `*` stands for any text.
    what: Vec<String>,
    /// Values of coracle and of containerd; `*` stands for any text.
    ours: String,
    theirs: String,
    is_used: bool,
}

/// The file.
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
        let fits = |entry: &&mut Entry| {
            entry.part == part
                && entry.what.iter().any(|pattern| matches(pattern, what))
                && matches(&entry.ours, ours)
                && matches(&entry.theirs, theirs)
        };
        let found = self.0.iter_mut().find(fits);
        found.is_some_and(|entry| {
            entry.is_used = true;
            true
        })
    }

    /// The names of a part's entries that explained nothing.
    pub(crate) fn unused(&self, part: &str) -> Vec<&[String]> {
        let unused = self.0.iter().filter(|entry| entry.part == part && !entry.is_used);
        unused.map(|entry| &*entry.what).collect()
    }
}

impl Entry {
    fn of(value: &Value) -> Entry {
        let word = |key: &str| value[key].as_str().map(str::to_owned);
        let any = || "*".to_owned();
        assert!(word("reason").is_some_and(|reason| !reason.is_empty()), "known.toml: {value} has no reason");
        Entry {
            part: word("part").expect("each entry of known.toml names its part"),
            what: match (word("what"), value["what"].as_array()) {
                (Some(one), _) => vec![one],
                (None, Some(several)) => {
                    several.iter().filter_map(Value::as_str).map(str::to_owned).collect()
                }
                (None, None) => panic!("known.toml: {value} names no fact"),
            },
            ours: word("coracle").unwrap_or_else(any),
            theirs: word("containerd").unwrap_or_else(any),
            is_used: false,
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
