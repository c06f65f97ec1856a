//! TOML as the tree that YAML becomes, too: whoever reads a file's entries need not care which of the two it was. Of our
//! own, for hosts.toml only: 12 KiB where the daemon's parser would be 80 in each worker. What it does not read it refuses
//! with its line: arrays of tables. Numbers and dates stay the text they are. The tests hold it against that parser.

use crate::yaml::{FILE_BYTES_MAX, Node, Problem};

/// Deepest nesting of values; hosts.toml has two levels.
const DEPTH_MAX: u32 = 16;

/// Parses a whole file; tables keep the order they have in it.
pub(crate) fn parse(text: &str) -> Result<Node, Problem> {
    if text.len() > FILE_BYTES_MAX {
        return Err(Problem { line: 1, text: format!("longer than {FILE_BYTES_MAX} bytes") });
    }
    let mut reader = Reader { rest: text, line: 1 };
    let mut root = Table { line: 1, is_defined: true, entries: Vec::new() };
    let mut path: Vec<String> = Vec::new();
    loop {
        reader.skip_lines();
        let line = reader.line;
        if reader.rest.is_empty() {
            return Ok(root.node());
        }
        if reader.take("[[") {
            return Err(reader.problem("arrays of tables are not read here"));
        }
        if reader.take("[") {
            path = reader.key()?;
            reader.expect("]")?;
            let table = root.table(&path, line)?;
            if std::mem::replace(&mut table.is_defined, true) {
                return Err(Problem { line, text: format!("[{}] is there twice", path.join(".")) });
            }
            table.line = line;
        } else {
            let (name, value) = reader.entry(0)?;
            let name: Vec<String> = path.iter().cloned().chain(name).collect();
            root.insert(&name, line, value)?;
        }
        reader.end_of_line()?;
    }
}

/// A table that grows.
struct Table {
    line: usize,
    /// A heading of its own was there, so a second one is a mistake.
    is_defined: bool,
    entries: Vec<(String, Item)>,
}

enum Item {
    Table(Table),
    Value(Node),
}

impl Table {
    /// The table at this path, made where it is not there.
    fn table(&mut self, path: &[String], line: usize) -> Result<&mut Table, Problem> {
        let Some((first, rest)) = path.split_first() else { return Ok(self) };
        let index = match self.entries.iter().position(|(name, _)| name == first) {
            Some(index) => index,
            None => {
                let table = Table { line, is_defined: false, entries: Vec::new() };
                self.entries.push((first.clone(), Item::Table(table)));
                self.entries.len() - 1
            }
        };
        match &mut self.entries[index].1 {
            Item::Table(table) => table.table(rest, line),
            Item::Value(_) => Err(Problem { line, text: format!("{first:?} is a value, no table") }),
        }
    }

    fn insert(&mut self, path: &[String], line: usize, value: Node) -> Result<(), Problem> {
        let Some((last, path)) = path.split_last() else { return Ok(()) };
        let table = self.table(path, line)?;
        if table.entries.iter().any(|(name, _)| name == last) {
            return Err(Problem { line, text: format!("{last:?} is there twice") });
        }
        table.entries.push((last.clone(), Item::Value(value)));
        Ok(())
    }

    fn node(self) -> Node {
        let entries = self.entries.into_iter().map(|(name, item)| match item {
            Item::Table(table) => (name, table.node()),
            Item::Value(value) => (name, value),
        });
        Node::mapping(self.line, entries.collect())
    }
}

/// What is not read yet, and the line it is on.
struct Reader<'a> {
    rest: &'a str,
    line: usize,
}

impl Reader<'_> {
    fn problem(&self, text: &str) -> Problem {
        Problem { line: self.line, text: text.to_owned() }
    }

    fn take(&mut self, what: &str) -> bool {
        match self.rest.strip_prefix(what) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn expect(&mut self, what: &str) -> Result<(), Problem> {
        self.skip_blanks();
        match self.take(what) {
            true => Ok(()),
            false => Err(self.problem(&format!("expected {what}"))),
        }
    }

    fn skip_blanks(&mut self) {
        self.rest = self.rest.trim_start_matches([' ', '\t']);
    }

    /// Blanks, line ends and comments.
    fn skip_lines(&mut self) {
        loop {
            self.skip_blanks();
            if self.rest.starts_with('#') {
                self.rest = &self.rest[self.rest.find('\n').unwrap_or(self.rest.len())..];
            }
            if self.take("\n") || self.take("\r\n") {
                self.line += 1;
            } else {
                return;
            }
        }
    }

    fn end_of_line(&mut self) -> Result<(), Problem> {
        let line = self.line;
        self.skip_lines();
        match self.line > line || self.rest.is_empty() {
            true => Ok(()),
            false => Err(self.problem("more on this line than is expected")),
        }
    }

    fn entry(&mut self, depth: u32) -> Result<(Vec<String>, Node), Problem> {
        let key = self.key()?;
        self.expect("=")?;
        self.skip_blanks();
        Ok((key, self.value(depth)?))
    }

    /// `a."b c".d`
    fn key(&mut self) -> Result<Vec<String>, Problem> {
        let mut parts = Vec::new();
        loop {
            self.skip_blanks();
            let part = if self.rest.starts_with(['"', '\'']) {
                self.string()?
            } else {
                let is_bare = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_');
                let end = self.rest.find(|letter| !is_bare(letter)).unwrap_or(self.rest.len());
                let (part, rest) = self.rest.split_at(end);
                if part.is_empty() {
                    return Err(self.problem("expected a key"));
                }
                self.rest = rest;
                part.to_owned()
            };
            parts.push(part);
            self.skip_blanks();
            if !self.take(".") {
                return Ok(parts);
            }
            if parts.len() > DEPTH_MAX as usize {
                return Err(self.problem("nested too deep"));
            }
        }
    }

    fn value(&mut self, depth: u32) -> Result<Node, Problem> {
        let line = self.line;
        if depth > DEPTH_MAX {
            return Err(self.problem("nested too deep"));
        }
        if self.rest.starts_with(['"', '\'']) {
            return Ok(Node::quoted(line, self.string()?));
        }
        if self.take("[") {
            return self.array(line, depth);
        }
        if self.take("{") {
            return self.inline_table(line, depth);
        }
        let end = self.rest.find([',', ']', '}', '#', '\n', '\r']).unwrap_or(self.rest.len());
        let (bare, rest) = self.rest.split_at(end);
        let bare = bare.trim_end();
        let is_number = bare.starts_with(|letter: char| letter.is_ascii_digit() || "+-".contains(letter));
        let is_one = bare.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-_.:".contains(&byte));
        let is_word = matches!(bare, "true" | "false" | "inf" | "nan");
        if !(is_word || is_number && is_one) {
            return Err(self.problem("expected a value: text stands in quotes"));
        }
        self.rest = rest;
        Ok(Node::quoted(line, bare.to_owned()))
    }

    fn array(&mut self, line: usize, depth: u32) -> Result<Node, Problem> {
        let mut items = Vec::new();
        loop {
            self.skip_lines();
            if self.take("]") {
                return Ok(Node::sequence(line, items));
            }
            items.push(self.value(depth + 1)?);
            self.skip_lines();
            if !self.take(",") && !self.rest.starts_with(']') {
                return Err(self.problem("expected , or ]"));
            }
        }
    }

    fn inline_table(&mut self, line: usize, depth: u32) -> Result<Node, Problem> {
        let mut table = Table { line, is_defined: true, entries: Vec::new() };
        loop {
            self.skip_lines();
            if self.take("}") {
                return Ok(table.node());
            }
            let line = self.line;
            let (name, value) = self.entry(depth + 1)?;
            table.insert(&name, line, value)?;
            self.skip_lines();
            if !self.take(",") && !self.rest.starts_with('}') {
                return Err(self.problem("expected , or }"));
            }
        }
    }

    /// In any of the four kinds of quotes.
    fn string(&mut self) -> Result<String, Problem> {
        let is_literal = self.rest.starts_with('\'');
        let (long, short) = if is_literal { ("'''", "'") } else { ("\"\"\"", "\"") };
        let is_long = self.take(long);
        if is_long {
            // A line end right behind the quotes is not part of the text.
            if self.take("\n") || self.take("\r\n") {
                self.line += 1;
            }
        } else {
            self.take(short);
        }
        let end = if is_long { long } else { short };
        let mut text = String::new();
        loop {
            if self.take(end) {
                // Up to two quotes may stand before the three that end it.
                while is_long && self.take(short) {
                    text.push_str(short);
                }
                return Ok(text);
            }
            let Some(letter) = self.rest.chars().next() else { break };
            self.rest = &self.rest[letter.len_utf8()..];
            match letter {
                '\n' if !is_long => break,
                '\n' => {
                    self.line += 1;
                    text.push(letter);
                }
                '\\' if !is_literal => self.escape(is_long, &mut text)?,
                _ => text.push(letter),
            }
        }
        Err(self.problem("a text without its last quote"))
    }

    fn escape(&mut self, is_long: bool, text: &mut String) -> Result<(), Problem> {
        let wrong = self.problem("an escape that is none");
        let Some(letter) = self.rest.chars().next() else { return Err(wrong) };
        if is_long && letter.is_ascii_whitespace() {
            // The line goes on with what stands first on a following one.
            let after = self.rest.trim_start_matches([' ', '\t', '\r', '\n']);
            let skipped = &self.rest[..self.rest.len() - after.len()];
            self.line += skipped.matches('\n').count();
            self.rest = after;
            return if skipped.contains('\n') { Ok(()) } else { Err(wrong) };
        }
        self.rest = &self.rest[letter.len_utf8()..];
        let digits = match letter {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => {
                let plain =
                    ['b', 't', 'n', 'f', 'r', 'e', '"', '\\'].iter().position(|known| *known == letter);
                let letters = ['\u{8}', '\t', '\n', '\u{c}', '\r', '\u{1b}', '"', '\\'];
                text.push(letters[plain.ok_or(wrong)?]);
                return Ok(());
            }
        };
        let hex = self.rest.get(..digits).filter(|hex| hex.bytes().all(|digit| digit.is_ascii_hexdigit()));
        let letter = hex.and_then(|hex| u32::from_str_radix(hex, 16).ok()).and_then(char::from_u32);
        text.push(letter.ok_or(wrong)?);
        self.rest = &self.rest[digits..];
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::parse;
    use crate::yaml::Node;
    use toml::de::{DeTable, DeValue};

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
        for (text, line) in [
            ("a = 1\nb = \n", 2),
            ("a = \"x\nb\"", 1),
            ("a = [1,\n2\n", 3),
            ("[a]\n[b]\n[a]\n", 3),
            ("a = 1\na = 2", 2),
            ("a = 1\n[a.b]", 2),
            ("a = 1 b = 2", 1),
            ("\n[[a]]\n", 2),
            ("a = \"\\q\"", 1),
        ] {
            assert_eq!(parse(text).map_err(|problem| problem.line).err(), Some(line), "{text:?}");
        }
        assert!(parse(&format!("a = {}", "[".repeat(10_000))).is_err());
        assert!(parse(&"a.".repeat(10_000)).is_err());
    }

    /// The same tree in one notation, whoever read it.
    fn ours(node: &Node) -> String {
        if node.is_sequence() {
            return format!("[{}]", node.list().unwrap().iter().map(ours).collect::<Vec<_>>().join(","));
        }
        match node.text() {
            Ok(text) => format!("{text:?}"),
            Err(_) => {
                let mut entries: Vec<_> =
                    node.map().unwrap().iter().map(|(key, node)| format!("{key:?}:{}", ours(node))).collect();
                entries.sort();
                format!("{{{}}}", entries.join(","))
            }
        }
    }

    fn theirs(value: &DeValue<'_>) -> String {
        match value {
            DeValue::String(text) => format!("{text:?}"),
            DeValue::Boolean(value) => format!("\"{value}\""),
            DeValue::Integer(value) => format!("{:?}", value.to_string()),
            DeValue::Float(value) => format!("{:?}", value.as_str()),
            DeValue::Datetime(value) => format!("\"{value}\""),
            DeValue::Array(items) => {
                format!("[{}]", items.iter().map(|item| theirs(item.get_ref())).collect::<Vec<_>>().join(","))
            }
            DeValue::Table(table) => their_table(table),
        }
    }

    fn their_table(table: &DeTable<'_>) -> String {
        let entry = |(key, value): (&toml::Spanned<_>, &toml::Spanned<DeValue<'_>>)| {
            let key: &std::borrow::Cow<'_, str> = key.get_ref();
            format!("{key:?}:{}", theirs(value.get_ref()))
        };
        let mut entries: Vec<_> = table.iter().map(entry).collect();
        entries.sort();
        format!("{{{}}}", entries.join(","))
    }

    #[test]
    fn it_reads_what_a_whole_parser_reads() {
        let texts = [
            "a = 'b' # c\r\n\r\n  [x . 'y z'.\"w\"]\t# d\n  k.l = {m = [1, [\"\", ''], {}], n.o = true}\n",
            "a = \"\\u00e9\\t\\\"\\\\ \\U0001F6F6\"\nb = '''\nx\\y\n''z'''\nc = \"\"\"one \\\n   two\n\"\"\"\n",
            "a = [\n  'x', # y\n  \"z\",\n]\nb = [ ]\n[t]\n[t.u]\nv = false\n",
            "[host.\"https://a\".header]\nx-y = [\"1\", \"2\"]\n[host.\"https://a\"]\nca = 'b'\n",
            "",
            "# nothing",
        ];
        for text in texts {
            let expected = their_table(DeTable::parse(text).unwrap().get_ref());
            let got = parse(text).unwrap_or_else(|problem| panic!("{text:?}: {problem}"));
            // An empty table is null to whoever asks for text.
            assert_eq!(ours(&got), expected, "{text:?}");
        }
    }

    /// Whatever bytes a file has, reading it ends, and without a panic; and what the other refuses is not taken for more.
    #[test]
    fn damaged_files_are_refused_or_read() {
        let text = "a = [\"b\", '''c''']\n[d.\"e\"]\nf = {g = \"\\u00e9\"} # h\ni.j = \"\"\"k\\\n l\"\"\"\n";
        for text in crate::damaged::damaged(text, 20_000) {
            let _ = parse(&text);
        }
    }
}
