//! Converts TOML into the tree type of the YAML parser, so that the readers of files do not depend on the
//! format. The parser is the toml crate. Its tables are sorted by name, so the order in the file, in which
//! mirrors are tried, is restored from the positions of the keys.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use coracle_sandbox::collect;
use coracle_yaml::{Node, Problem};

/// Maximum length of a file in bytes. The parser's tree needs eighty times as many; typical files have some hundred bytes.
const FILE_BYTES_MAX: usize = 256 << 10;

/// Parses a whole file; tables keep their order in the file.
///
/// # Errors
/// The first error with its line number.
pub(crate) fn parse(text: &str) -> Result<Node, Problem> {
    if text.len() > FILE_BYTES_MAX {
        return Err(Problem { line: 1, text: format!("longer than {FILE_BYTES_MAX} bytes") });
    }
    let lines = Lines { starts: text.match_indices('\n').map(|(at, _)| at + 1).collect() };
    let (table, errors) = DeTable::parse_recoverable(text);
    // One mistake can cause several errors; the one with the first line is reported.
    match errors.iter().min_by_key(|error| error.span().map_or(0, |span| span.start)) {
        None => Ok(lines.table(1, table.get_ref())),
        Some(error) => {
            let line = error.span().map_or(1, |span| lines.of(&span));
            Err(Problem { line, text: error.message().to_owned() })
        }
    }
}

/// The start offsets of all lines except the first.
struct Lines {
    starts: Vec<usize>,
}

impl Lines {
    /// The number of the line on which the span starts, counted from 1.
    fn of(&self, span: &Range<usize>) -> usize {
        1 + self.starts.partition_point(|start| *start <= span.start)
    }

    fn table(&self, line: usize, table: &DeTable<'_>) -> Node {
        let mut entries: Vec<_> = table.iter().collect();
        collect::sort_by_key(&mut entries, |(key, _)| key.span().start);
        let entries = entries.into_iter().map(|(key, value)| {
            let node = match value.get_ref() {
                // The line of a table is that of its name.
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
    fn the_length_of_a_file_is_limited() {
        let long = format!("a = [{}]", "1,".repeat(FILE_BYTES_MAX / 2));
        assert_eq!(parse(&long).unwrap_err().text, "longer than 262144 bytes");
        assert!(parse(&long[long.len() / 2 * 2 - FILE_BYTES_MAX..]).is_err());
        let just = format!("a = [{}]", "1,".repeat(FILE_BYTES_MAX / 2 - 4));
        assert!(parse(&just).is_ok());
    }

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
    fn errors_have_their_line() {
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
    fn all_types_of_toml_are_supported() {
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

    /// Any input is parsed or refused without a panic.
    #[test]
    fn damaged_files_cause_no_panic() {
        let text =
            "a = [\"b\", '''c''']\n[d.\"e\"]\nf = {g = \"\\u00e9\"} # h\ni.j = \"\"\"k\\\n l\"\"\"\n[[m]]\n";
        for text in coracle_yaml::damaged::damaged(text, 20_000) {
            let _ = parse(&text);
        }
    }
}
