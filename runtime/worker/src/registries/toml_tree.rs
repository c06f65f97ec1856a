//! TOML as the tree that YAML becomes, too: whoever reads a file's entries need not care which of the two it was. The parser
//! is the toml crate's; its tables are sorted by name, so their order in the file, which is the order in which mirrors are
//! asked, is taken from where their keys stand.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::yaml::{FILE_BYTES_MAX, Node, Problem};

/// Parses a whole file; tables keep the order they have in it.
///
/// # Errors
/// What is wrong, with its line.
pub(super) fn parse(text: &str) -> Result<Node, Problem> {
    if text.len() > FILE_BYTES_MAX {
        return Err(Problem { line: 1, text: format!("longer than {FILE_BYTES_MAX} bytes") });
    }
    let lines = Lines { starts: text.match_indices('\n').map(|(at, _)| at + 1).collect() };
    let (table, errors) = DeTable::parse_recoverable(text);
    // One mistake can be several errors; the first line is where somebody has to look.
    match errors.iter().min_by_key(|error| error.span().map_or(0, |span| span.start)) {
        None => Ok(lines.table(1, table.get_ref())),
        Some(error) => {
            let line = error.span().map_or(1, |span| lines.of(&span));
            Err(Problem { line, text: error.message().to_owned() })
        }
    }
}

/// Where each line but the first starts.
struct Lines {
    starts: Vec<usize>,
}

impl Lines {
    /// The line on which the span begins, counted from 1.
    fn of(&self, span: &Range<usize>) -> usize {
        1 + self.starts.partition_point(|start| *start <= span.start)
    }

    fn table(&self, line: usize, table: &DeTable<'_>) -> Node {
        let mut entries: Vec<_> = table.iter().collect();
        entries.sort_by_key(|(key, _)| key.span().start);
        let entries = entries.into_iter().map(|(key, value)| {
            let node = match value.get_ref() {
                // A table is where its name stands, whatever comes first in it.
                DeValue::Table(table) => self.table(self.of(&key.span()), table),
                _ => self.value(value),
            };
            (key.get_ref().to_string(), node)
        });
        Node::mapping(line, entries.collect())
    }

    fn value(&self, value: &Spanned<DeValue<'_>>) -> Node {
        let line = self.of(&value.span());
        let text = match value.get_ref() {
            DeValue::Array(items) => {
                return Node::sequence(line, items.iter().map(|item| self.value(item)).collect());
            }
            DeValue::Table(table) => return self.table(line, table),
            DeValue::String(text) => text.to_string(),
            DeValue::Integer(number) => number.to_string(),
            DeValue::Float(number) => number.to_string(),
            DeValue::Boolean(value) => value.to_string(),
            DeValue::Datetime(time) => time.to_string(),
        };
        Node::quoted(line, text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_keep_their_order_and_lines() {
        let text = "server = \"s\"\n\n[host.\"https://z\"]\n  skip_verify = true\n  ca = [\"/a\", '/b']\n\n[host.'https://a']\n";
        let root = parse(text).unwrap();
        let entries = root.map().unwrap();
        assert_eq!((entries[0].0.as_str(), entries[0].1.text().unwrap()), ("server", "s"));
        let hosts = entries[1].1.map().unwrap();
        let names: Vec<_> = hosts.iter().map(|(name, node)| (name.as_str(), node.line)).collect();
        assert_eq!(names, [("https://z", 3), ("https://a", 7)]);
        let first = hosts[0].1.map().unwrap();
        assert!(first[0].1.boolean().unwrap());
        assert_eq!((first[1].1.list().unwrap().len(), first[1].1.line), (2, 5));
    }

    #[test]
    fn what_is_wrong_has_its_line() {
        for (text, line) in [
            ("a = 1\nb = \n", 2),
            ("a = \"x\nb\"", 1),
            ("[a]\n[b]\n[a]\n", 3),
            ("a = 1\na = 2", 2),
            ("a = 1\n[a.b]", 2),
            ("a = 1 b = 2", 1),
            ("a = \"\\q\"", 1),
            ("\n\na = perhaps", 3),
        ] {
            assert_eq!(parse(text).map_err(|problem| problem.line).err(), Some(line), "{text:?}");
        }
        assert!(parse(&format!("a = {}", "[".repeat(10_000))).is_err());
        assert!(parse(&format!("{}b = 1", "a.".repeat(100_000))).is_err());
    }

    #[test]
    fn everything_of_toml_is_read() {
        let text = "[[host]]\na = 0x1f\n[[host]]\nb = 1979-05-27T07:32:00Z\nc = 1_000.5\n[host.d]\n\"e f\".g = {h = '''\ni'''}\n";
        let root = parse(text).unwrap();
        let hosts = root.map().unwrap()[0].1.list().unwrap();
        assert_eq!(hosts.len(), 2);
        let second = hosts[1].map().unwrap();
        let values: Vec<_> = second[..2].iter().map(|(key, node)| (key.as_str(), node.line)).collect();
        assert_eq!(values, [("b", 4), ("c", 5)]);
        let deep = &second[2].1.map().unwrap()[0].1.map().unwrap()[0].1.map().unwrap()[0];
        assert_eq!((deep.0.as_str(), deep.1.text().unwrap()), ("h", "i"));
    }

    /// Whatever bytes a file has, reading it ends, and without a panic.
    #[test]
    fn damaged_files_are_refused_or_read() {
        let text =
            "a = [\"b\", '''c''']\n[d.\"e\"]\nf = {g = \"\\u00e9\"} # h\ni.j = \"\"\"k\\\n l\"\"\"\n[[m]]\n";
        for text in crate::damaged::damaged(text, 20_000) {
            let _ = parse(&text);
        }
    }
}
