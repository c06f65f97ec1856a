//! Parses YAML into a tree whose nodes have line numbers, so that readers can report invalid lines and use
//! the others. The parser is a library; the tree type is part of this module, because it limits memory
//! (nested aliases can expand to terabytes) and keeps every scalar as text: a password `0123` is not a
//! number. JSON is valid YAML and is parsed as well.
//!
//! The worker reads `registries.yaml` and CDI files with it, `coracle k3s` and `coracle kubeadm` the configuration of
//! those programs. Only the first document of a file is read, and nothing is written.
#![forbid(unsafe_code)]

#[cfg(any(test, feature = "testing"))]
pub mod damaged;

use std::collections::{BTreeSet, HashMap};
use std::fmt;

use saphyr_parser::{Event, Parser, ScalarStyle, Span};

/// Maximum length of a file in bytes; typical files have a thousandth of it.
pub const FILE_BYTES_MAX: usize = 1 << 20;
/// Maximum nesting depth; CDI files have seven levels.
const DEPTH_MAX: u32 = 32;
/// Maximum size in bytes of all values: their texts, and [`NODE_BYTES`] for each, including those of anchors and expanded aliases.
const VALUES_BYTES_MAX: usize = 8 << 20;
/// Size in bytes of a value without its text.
const NODE_BYTES: usize = 80;

/// An error and its position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Line number, counted from 1.
    pub line: usize,
    /// Text without the line number.
    pub text: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.text)
    }
}

/// A value and the line on which it starts.
#[derive(Clone, Debug)]
pub struct Node {
    /// Line number, counted from 1.
    pub line: usize,
    value: Value,
}

#[derive(Clone, Debug)]
enum Value {
    Scalar { text: String, is_plain: bool },
    List(Vec<Node>),
    Map(Vec<(String, Node)>),
}

/// Parses the first document of a file; an empty file is null.
///
/// # Errors
/// Invalid YAML, a key that is not text or that occurs twice, or a file that exceeds a limit.
pub fn parse(text: &str) -> Result<Node, Problem> {
    if text.len() > FILE_BYTES_MAX {
        return Err(Problem { line: 1, text: format!("longer than {FILE_BYTES_MAX} bytes") });
    }
    let mut builder = Builder { parser: Parser::new_from_str(text), anchors: HashMap::new(), bytes: 0 };
    loop {
        match builder.next()? {
            (Event::StreamStart | Event::DocumentStart(_) | Event::Nothing, _) => {}
            (Event::StreamEnd, span) => return Ok(null(span)),
            (event, span) => return builder.node(event, span, 0),
        }
    }
}

struct Builder<'a> {
    parser: Parser<'a, saphyr_parser::StrInput<'a>>,
    /// Values with an anchor, and the size of each.
    anchors: HashMap<usize, (Node, usize)>,
    /// Size of all values.
    bytes: usize,
}

impl<'a> Builder<'a> {
    fn next(&mut self) -> Result<(Event<'a>, Span), Problem> {
        match self.parser.next() {
            Some(Ok(event)) => Ok(event),
            Some(Err(error)) => Err(Problem { line: error.marker().line(), text: error.info().to_owned() }),
            None => Err(Problem { line: 1, text: "unexpected end of file".to_owned() }),
        }
    }

    fn node(&mut self, event: Event<'a>, span: Span, depth: u32) -> Result<Node, Problem> {
        let line = span.start.line();
        let problem = |text: String| Problem { line, text };
        if depth > DEPTH_MAX {
            return Err(problem(format!("more than {DEPTH_MAX} levels")));
        }
        let before = self.bytes;
        self.charge(line, NODE_BYTES)?;
        let (anchor, value) = match event {
            Event::Scalar(text, style, anchor, _) => {
                self.charge(line, text.len())?;
                let is_plain = style == ScalarStyle::Plain;
                (anchor, Value::Scalar { text: text.into_owned(), is_plain })
            }
            Event::Alias(anchor) => {
                let Some((_, bytes)) = self.anchors.get(&anchor) else {
                    return Err(problem("an alias of a value that contains it".to_owned()));
                };
                self.charge(line, *bytes)?;
                let node = self.anchors.get(&anchor).map(|(node, _)| node.clone());
                return Ok(node.unwrap_or_else(|| null(span)));
            }
            Event::SequenceStart(anchor, _) => {
                let mut items = Vec::new();
                loop {
                    match self.next()? {
                        (Event::SequenceEnd, _) => break,
                        (event, span) => items.push(self.node(event, span, depth + 1)?),
                    }
                }
                (anchor, Value::List(items))
            }
            Event::MappingStart(anchor, _) => (anchor, Value::Map(self.entries(depth)?)),
            _ => return Err(problem("unexpected end of file".to_owned())),
        };
        let node = Node { line, value };
        if anchor != 0 {
            let bytes = self.bytes - before;
            self.charge(line, bytes)?;
            self.anchors.insert(anchor, (node.clone(), bytes));
        }
        Ok(node)
    }

    /// Counts a value before it is made.
    fn charge(&mut self, line: usize, bytes: usize) -> Result<(), Problem> {
        self.bytes = self.bytes.saturating_add(bytes);
        match self.bytes > VALUES_BYTES_MAX {
            true => Err(Problem { line, text: format!("more than {VALUES_BYTES_MAX} bytes of values") }),
            false => Ok(()),
        }
    }

    fn entries(&mut self, depth: u32) -> Result<Vec<(String, Node)>, Problem> {
        let (mut entries, mut keys) = (Vec::new(), BTreeSet::new());
        loop {
            let key = match self.next()? {
                (Event::MappingEnd, _) => return Ok(entries),
                (event, span) => self.node(event, span, depth + 1)?,
            };
            let Value::Scalar { text, .. } = key.value else {
                return Err(Problem { line: key.line, text: "a key that is not text".to_owned() });
            };
            if !keys.insert(text.clone()) {
                return Err(Problem { line: key.line, text: format!("duplicate key {text:?}") });
            }
            let (event, span) = self.next()?;
            let value = self.node(event, span, depth + 1)?;
            entries.push((text, value));
        }
    }
}

fn null(span: Span) -> Node {
    Node { line: span.start.line(), value: Value::Scalar { text: String::new(), is_plain: true } }
}

impl Node {
    /// Creates a text node at `line`, for a file in another format.
    pub fn quoted(line: usize, text: String) -> Self {
        Self { line, value: Value::Scalar { text, is_plain: false } }
    }

    /// Creates a sequence node, for a file in another format.
    pub fn sequence(line: usize, items: Vec<Node>) -> Self {
        Self { line, value: Value::List(items) }
    }

    /// Creates a mapping node, for a file in another format.
    pub fn mapping(line: usize, entries: Vec<(String, Node)>) -> Self {
        Self { line, value: Value::Map(entries) }
    }

    /// Whether the node is a sequence.
    pub fn is_sequence(&self) -> bool {
        matches!(self.value, Value::List(_))
    }

    /// The entries of a mapping in the order of the file; null is an empty mapping.
    ///
    /// # Errors
    /// The node is another value.
    pub fn map(&self) -> Result<&[(String, Node)], Problem> {
        match &self.value {
            Value::Map(entries) => Ok(entries),
            Value::Scalar { .. } if self.is_null() => Ok(&[]),
            Value::Scalar { .. } | Value::List(_) => Err(self.problem("is not a mapping")),
        }
    }

    /// The items of a sequence; null is an empty sequence.
    ///
    /// # Errors
    /// The node is another value.
    pub fn list(&self) -> Result<&[Node], Problem> {
        match &self.value {
            Value::List(items) => Ok(items),
            Value::Scalar { .. } if self.is_null() => Ok(&[]),
            Value::Scalar { .. } | Value::Map(_) => Err(self.problem("is not a list")),
        }
    }

    /// The unparsed text of a scalar; null is empty.
    ///
    /// # Errors
    /// The node is a sequence or a mapping.
    pub fn text(&self) -> Result<&str, Problem> {
        match &self.value {
            Value::Scalar { .. } if self.is_null() => Ok(""),
            Value::Scalar { text, .. } => Ok(text),
            Value::List(_) | Value::Map(_) => Err(self.problem("is not text")),
        }
    }

    /// The value of a boolean; null is false.
    ///
    /// # Errors
    /// The node is another value.
    pub fn boolean(&self) -> Result<bool, Problem> {
        match self.text()? {
            "true" | "True" | "TRUE" => Ok(true),
            "" | "false" | "False" | "FALSE" => Ok(false),
            other => Err(self.problem(&format!("{other:?} is neither true nor false"))),
        }
    }

    /// The value of a number from 0 to 4294967295, as YAML libraries of Go read it: after a leading 0 it is octal.
    ///
    /// # Errors
    /// The node is another value.
    pub fn number(&self) -> Result<u32, Problem> {
        let text = self.text()?;
        let (digits, radix) = match text.as_bytes() {
            [b'0', b'x' | b'X', ..] => (&text[2..], 16),
            [b'0', b'o' | b'O', ..] => (&text[2..], 8),
            [b'0', _, ..] => (&text[1..], 8),
            _ => (text, 10),
        };
        // `from_str_radix` accepts a sign.
        let number = if digits.starts_with('+') { None } else { u32::from_str_radix(digits, radix).ok() };
        number.ok_or_else(|| self.problem(&format!("{text:?} is not a number")))
    }

    /// Creates a problem with the line number of this node.
    pub fn problem(&self, text: &str) -> Problem {
        Problem { line: self.line, text: text.to_owned() }
    }

    fn is_null(&self) -> bool {
        match &self.value {
            Value::Scalar { text, is_plain } => {
                *is_plain && matches!(text.as_str(), "" | "~" | "null" | "Null" | "NULL")
            }
            Value::List(_) | Value::Map(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalars_are_kept_as_text_with_their_line() {
        let text = "a: 0123\nb:\n  - \"null\"\n  - ~\n  - [x, {y: no}]\nc: &anchor {d: true}\ne: *anchor\n";
        let root = parse(text).unwrap();
        let entries = root.map().unwrap();
        assert_eq!(entries[0].1.text().unwrap(), "0123");
        let list = entries[1].1.list().unwrap();
        assert_eq!((list[0].text().unwrap(), list[0].line), ("null", 3));
        assert!(list[1].map().unwrap().is_empty() && list[1].text().unwrap().is_empty());
        assert!(list[0].map().is_err(), "quoted, so it is text");
        assert!(entries[3].1.map().unwrap()[0].1.boolean().unwrap());
    }

    #[test]
    fn numbers_are_those_of_go() {
        for (text, number) in [("0", 0), ("432", 432), ("0660", 0o660), ("0o660", 0o660), ("0x1b0", 0x1b0)] {
            assert_eq!(parse(text).unwrap().number().unwrap(), number, "{text}");
        }
        for text in ["-1", "+1", "0x", "0x+1", "08", "one", "4294967296", "~", "[1]"] {
            assert!(parse(text).unwrap().number().is_err(), "{text}");
        }
    }

    #[test]
    fn json_is_parsed() {
        let root = parse("{\"a\": [1, \"two\"],\n \"b\": false}").unwrap();
        assert_eq!(root.map().unwrap()[0].1.list().unwrap()[1].text().unwrap(), "two");
        assert_eq!(root.map().unwrap()[1].1.line, 2);
    }

    #[test]
    fn errors_have_their_line() {
        for (text, line) in [("a: 1\na: 2\n", 2), ("a: [1\n", 2), ("a: 1\n b: 2\n", 2), ("? [x]\n: y\n", 1)] {
            assert_eq!(parse(text).unwrap_err().line, line, "{text:?}");
        }
        assert!(parse("").unwrap().map().unwrap().is_empty());
        assert!(parse("# nothing\n").unwrap().map().unwrap().is_empty());
    }

    #[test]
    fn the_expansion_of_nested_aliases_is_limited() {
        let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for level in 1..12 {
            let below = format!("*a{}", level - 1);
            text += &format!("a{level}: &a{level} [{}]\n", vec![below; 10].join(", "));
        }
        assert!(parse(&text).unwrap_err().text.starts_with("more than"));
        let deep = "[".repeat(10_000);
        assert!(parse(&deep).is_err());
    }

    #[test]
    fn texts_of_anchors_and_aliases_count_towards_the_limit() {
        let long = "x".repeat(400_000);
        let many_aliases = format!("- &a {long}\n{}", "- *a\n".repeat(40_000));
        let alias_keys = format!("? &a {long}\n: [{}]\n", vec!["{*a : 1}"; 30_000].join(", "));
        let list = vec!["1"; 20_000].join(",");
        let nested: String = (0..28).map(|level| format!("&n{level} [")).collect();
        let many_anchors = format!("{nested}{list}{}", "]".repeat(28));
        for text in [many_aliases, alias_keys, many_anchors] {
            let problem = parse(&text).unwrap_err();
            assert!(problem.text.starts_with("more than"), "{problem}");
        }
        let few = format!("- &a {long}\n- *a\n- *a\n");
        assert_eq!(parse(&few).unwrap().list().unwrap().len(), 3);
    }

    /// A search of all keys for each of them would take minutes.
    #[test]
    fn a_mapping_may_have_many_keys() {
        let text: String = (0..40_000).map(|key| format!("key{key}: 1\n")).collect();
        assert_eq!(parse(&text).unwrap().map().unwrap().len(), 40_000);
        let problem = parse(&(text + "key7: 2\n")).unwrap_err();
        assert_eq!((problem.line, problem.text.as_str()), (40_001, "duplicate key \"key7\""));
    }

    /// Any input is parsed or refused without a panic.
    #[test]
    fn damaged_files_cause_no_panic() {
        let text = "mirrors:\n  docker.io:\n    endpoint: [\"https://a:1\", &x 'b']\n    rewrite: {\"^a(.*)\": *x}\n";
        for text in damaged::damaged(text, 4000) {
            let _ = parse(&text);
        }
    }
}
