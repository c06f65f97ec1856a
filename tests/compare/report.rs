//! What the probe reports of a container (`probe report`), as facts with names, without the names that each side chooses.

use std::collections::{BTreeMap, BTreeSet};

/// The facts of one report.
#[derive(Debug, Clone, Default)]
pub(crate) struct Report(BTreeMap<String, String>);

impl Report {
    /// Parses the probe's lines. `own`: words of this side with the words that stand for them.
    pub(crate) fn of(text: &str, own: &[(String, &str)]) -> Report {
        let mut facts = BTreeMap::new();
        for line in text.lines() {
            let mut line = line.trim_end_matches('\r').to_owned();
            for (word, name) in own.iter().filter(|(word, _)| !word.is_empty()) {
                line = line.replace(word.as_str(), name);
            }
            if let Some((name, value)) = line.split_once(": ").or_else(|| Some((line.strip_suffix(':')?, "")))
            {
                facts.insert(name.to_owned(), value.to_owned());
            }
        }
        Report(facts)
    }

    /// The names of the facts of both, each with its values; a fact that only one has is empty on the other side.
    pub(crate) fn beside<'a>(&'a self, other: &'a Report) -> Vec<(&'a str, &'a str, &'a str)> {
        const NONE: &str = "(no such fact)";
        let names: BTreeSet<&String> = self.0.keys().chain(other.0.keys()).collect();
        let value = |report: &'a Report, name| report.0.get(name).map_or(NONE, String::as_str);
        names.into_iter().map(|name| (name.as_str(), value(self, name), value(other, name))).collect()
    }

    /// All facts.
    pub(crate) fn facts(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// The number of facts.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

/// The text that a container wrote to its standard output and error, from its log in the format of the CRI.
pub(crate) fn output(log: &str) -> String {
    let mut text = String::new();
    for line in log.lines() {
        // TIME STREAM F|P TEXT: a partial line continues in the next.
        let mut parts = line.splitn(4, ' ').skip(2);
        let (tag, rest) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        text.push_str(rest);
        if tag != "P" {
            text.push('\n');
        }
    }
    text
}
