//! `tests/docs/rules.toml`: how each shell line of the pages is tested. Shared by `tests/docs`, which checks that the
//! list is complete and runs lines on nodes, and `tests/inside`, which runs the lines that need systemd.

use toml::{Table, Value};

/// The rule of one line of a page.
#[derive(Debug, Clone)]
pub struct Rule {
    /// Path of the page in the workspace.
    pub page: String,
    /// The whole line.
    pub line: String,
    /// A part of the first cell of its row; empty: any.
    pub row: String,
    /// How the line is tested.
    pub act: Act,
    /// Texts that its output has, in this order.
    pub says: Vec<String>,
}

/// How a line is tested.
#[derive(Debug, Clone)]
pub enum Act {
    /// A script on a node runs the line.
    Run {
        /// Name of the group of lines that run on one node.
        group: String,
        /// Replacements in the line.
        with: Vec<(String, String)>,
        /// The script in which `LINE` stands for the line.
        frame: String,
        /// The exit code.
        exit: i32,
    },
    /// A guest with systemd runs the line, in the order of the numbers.
    Guest(i64),
    /// A test whose source contains a text runs the line.
    Elsewhere {
        /// Path of the source in the workspace.
        file: String,
        /// A text in the source of the test.
        text: String,
    },
}

/// The rules of all pages.
///
/// # Panics
/// If the file is not as its head describes.
pub fn all() -> Vec<Rule> {
    let table = table();
    let pages = table.iter().filter(|(page, _)| page.ends_with(".md"));
    pages
        .flat_map(|(page, content)| {
            let rules = content.get("rules").and_then(Value::as_array).expect("rules of a page");
            rules.iter().map(move |rule| read(page, rule.as_table().expect("a rule")))
        })
        .collect()
}

/// The programs that no test can have, each with the reason.
pub fn absent() -> Vec<(String, String)> {
    pairs(table().get("absent"))
}

fn table() -> Table {
    include_str!("../docs/rules.toml").parse().expect("rules.toml is TOML")
}

fn read(page: &str, rule: &Table) -> Rule {
    const KEYS: [&str; 9] = ["line", "row", "run", "with", "frame", "exit", "says", "guest", "elsewhere"];
    let unknown = rule.keys().find(|key| !KEYS.contains(&key.as_str()));
    assert_eq!(unknown, None, "rules.toml, {page}: unknown key");
    let text = |key: &str| rule.get(key).map(|value| value.as_str().expect("a text").to_owned());
    let line = text("line").expect("a rule has a line");
    let says = rule.get("says").and_then(Value::as_array).into_iter().flatten();
    let says = says.map(|value| value.as_str().expect("a text").to_owned()).collect();
    let act = match (text("run"), rule.get("guest"), text("elsewhere")) {
        (Some(group), None, None) => Act::Run {
            group,
            with: pairs(rule.get("with")),
            frame: text("frame").unwrap_or_else(|| "LINE".to_owned()),
            exit: rule.get("exit").and_then(Value::as_integer).unwrap_or(0) as i32,
        },
        (None, Some(number), None) => Act::Guest(number.as_integer().expect("a number")),
        (None, None, Some(source)) => {
            let (file, text) = source.split_once(": ").expect("elsewhere = \"FILE: TEXT\"");
            Act::Elsewhere { file: file.to_owned(), text: text.to_owned() }
        }
        _ => panic!("rules.toml, {page}, {line}: one of run, guest and elsewhere"),
    };
    Rule { page: page.to_owned(), row: text("row").unwrap_or_default(), line, act, says }
}

fn pairs(table: Option<&Value>) -> Vec<(String, String)> {
    let pairs = table.and_then(Value::as_table).into_iter().flatten();
    pairs.map(|(key, value)| (key.clone(), value.as_str().expect("a text").to_owned())).collect()
}

/// Fails with the whole text unless it has all parts in this order.
///
/// # Panics
/// If a part is missing.
#[track_caller]
pub fn expect_in_order(text: &str, parts: &[String], what: &str) {
    let mut rest = text;
    for part in parts {
        let Some((_, behind)) = rest.split_once(part.as_str()) else {
            panic!("{what}\nlacks {part:?} at its place in:\n{text}")
        };
        rest = behind;
    }
}
