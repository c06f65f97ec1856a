//! TOML as the tree that YAML becomes, too: whoever reads a file's entries need not care which of the two it was. The
//! parser is the one the daemon reads its configuration with.

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::yaml::{FILE_BYTES_MAX, Node, Problem};

/// Parses a whole file; tables keep the order they have in it.
pub(crate) fn parse(text: &str) -> Result<Node, Problem> {
    if text.len() > FILE_BYTES_MAX {
        return Err(Problem { line: 1, text: format!("longer than {FILE_BYTES_MAX} bytes") });
    }
    let table = DeTable::parse(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        Problem { line: line(text, at), text: error.message().trim().replace('\n', "; ") }
    })?;
    Ok(mapping(text, table.span().start, table.get_ref()))
}

fn mapping(text: &str, at: usize, table: &DeTable<'_>) -> Node {
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    let entry = |key: &str, at: usize, value: &DeValue<'_>| (key.to_owned(), node(text, at, value));
    let entries = entries
        .into_iter()
        .map(|(key, value)| entry(key.get_ref(), key.span().start, value.get_ref()))
        .collect();
    Node::mapping(line(text, at), entries)
}

fn node(text: &str, at: usize, value: &DeValue<'_>) -> Node {
    let item = |item: &Spanned<DeValue<'_>>| node(text, item.span().start, item.get_ref());
    let scalar = |value: String| Node::quoted(line(text, at), value);
    match value {
        DeValue::String(value) => scalar(value.to_string()),
        DeValue::Boolean(value) => scalar(value.to_string()),
        DeValue::Integer(value) => scalar(value.as_str().to_owned()),
        DeValue::Float(value) => scalar(value.as_str().to_owned()),
        DeValue::Datetime(value) => scalar(value.to_string()),
        DeValue::Array(items) => Node::sequence(line(text, at), items.iter().map(item).collect()),
        DeValue::Table(table) => mapping(text, at, table),
    }
}

fn line(text: &str, at: usize) -> usize {
    1 + text.as_bytes()[..at.min(text.len())].iter().filter(|byte| **byte == b'\n').count()
}

#[cfg(test)]
mod tests {
    use super::parse;

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
        assert_eq!(parse("a = 1\nb = \n").unwrap_err().line, 2);
    }
}
