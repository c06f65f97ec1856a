//! Finds the shell lines of a page: indented and fenced blocks, the column `command` of tables, and commands in
//! the text. Pure: a page's text in, its lines out.

/// Programs whose name at the start of inline code makes it a command, if more words follow.
const PROGRAMS: [&str; 32] = [
    "apt",
    "cargo",
    "coracle",
    "coracled",
    "crictl",
    "curl",
    "df",
    "dpkg",
    "grep",
    "install",
    "journalctl",
    "k3s",
    "kill",
    "kubeadm",
    "kubectl",
    "kubelet",
    "ls",
    "make",
    "modprobe",
    "mount",
    "nft",
    "nvidia-ctk",
    "openssl",
    "printf",
    "rc-service",
    "rc-update",
    "rm",
    "strace",
    "sysctl",
    "systemctl",
    "tar",
    "uname",
];

/// The heading of table columns that have commands.
const COLUMNS: [&str; 2] = ["command", "with crictl"];

/// One command of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Line {
    /// Number of the line in the page.
    pub(crate) number: usize,
    /// The first cell of its row, if it is in a table.
    pub(crate) row: String,
    /// The command without prompt and comment.
    pub(crate) text: String,
}

/// The part of a code block between blank lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Group {
    /// Number of its first line in the page.
    pub(crate) number: usize,
    pub(crate) kind: Kind,
    /// The lines without the common indentation.
    pub(crate) lines: Vec<String>,
}

/// The content of a code block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Commands, one a line.
    Shell,
    /// Commands with a prompt, and their output.
    Transcript,
    Toml,
    Yaml,
    /// Sections of a systemd unit.
    Unit,
    /// Lines of coracle's log.
    Log,
}

/// All commands of a page in its order.
pub(crate) fn lines(page: &str) -> Vec<Line> {
    let mut found: Vec<Line> = groups(page).iter().flat_map(commands).collect();
    for paragraph in paragraphs(page) {
        found.extend(in_text(&paragraph));
    }
    found.extend(in_tables(page));
    found.sort_by_key(|line| line.number);
    found
}

/// A line of the page and its role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Blank,
    Code,
    /// A line with three backquotes.
    Fence,
    Table,
    Text,
}

/// The role of each line. Code is fenced, or indented by four or more after a blank line or code, and not the second
/// line of a list's item.
fn roles(page: &str) -> Vec<(Role, &str)> {
    let mut found: Vec<(Role, &str)> = Vec::new();
    let mut is_fenced = false;
    for line in page.lines() {
        let before = found.last().map_or(Role::Blank, |(role, _)| *role);
        let role = if line.trim_start().starts_with("```") {
            is_fenced = !is_fenced;
            Role::Fence
        } else if is_fenced {
            Role::Code
        } else if line.trim().is_empty() {
            Role::Blank
        } else if line.starts_with("    ") && before != Role::Text {
            Role::Code
        } else if line.starts_with('|') {
            Role::Table
        } else {
            Role::Text
        };
        found.push((role, line));
    }
    found
}

/// The groups of all code blocks of a page.
pub(crate) fn groups(page: &str) -> Vec<Group> {
    let mut found: Vec<Group> = Vec::new();
    let mut is_open = false;
    for (number, (role, line)) in (1..).zip(roles(page)) {
        let is_code = role == Role::Code && !line.trim().is_empty();
        if is_code && !is_open {
            found.push(Group { number, kind: Kind::Shell, lines: Vec::new() });
        }
        if let Some(group) = found.last_mut().filter(|_| is_code) {
            group.lines.push(line.to_owned());
        }
        is_open = is_code;
    }
    found.iter_mut().for_each(finish);
    found
}

/// Removes the common indentation and determines the kind.
fn finish(group: &mut Group) {
    let indentation = |line: &String| line.len() - line.trim_start().len();
    let common = group.lines.iter().map(indentation).min().unwrap_or(0);
    for line in &mut group.lines {
        line.drain(..common);
    }
    group.kind = kind(&group.lines);
}

fn kind(lines: &[String]) -> Kind {
    let Some(first) = lines.iter().find(|line| !line.starts_with('#')) else { return Kind::Shell };
    let mut words = first.split_whitespace();
    let (word, next) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    match word {
        "$" => Kind::Transcript,
        "[Unit]" | "[Service]" | "[Install]" => Kind::Unit,
        _ if word.starts_with('[') && word.ends_with(']') || next == "=" => Kind::Toml,
        _ if word.ends_with(':') => Kind::Yaml,
        _ if word.starts_with("level=") => Kind::Log,
        _ => Kind::Shell,
    }
}

/// The commands of a group; a line that ends with a backslash continues in the next one.
fn commands(group: &Group) -> Vec<Line> {
    let mut found: Vec<Line> = Vec::new();
    let mut is_continued = false;
    for (number, line) in (group.number..).zip(&group.lines) {
        let command = match group.kind {
            Kind::Shell => Some(without_comment(line)),
            Kind::Transcript => line.strip_prefix("$ ").map(without_comment),
            _ => None,
        };
        let Some(command) = command.filter(|command| !command.is_empty()) else { continue };
        let (text, continues) = command.strip_suffix('\\').map_or((command, false), |text| (text, true));
        match found.last_mut().filter(|_| is_continued) {
            Some(last) => last.text.push_str(text.trim()),
            None => found.push(Line { number, row: String::new(), text: text.to_owned() }),
        }
        is_continued = continues;
    }
    found
}

/// A line of a block without its comment.
fn without_comment(line: &str) -> &str {
    let comment = if line.trim_start().starts_with('#') { Some(0) } else { line.find(" # ") };
    comment.map_or(line, |at| &line[..at]).trim()
}

/// Paragraphs and list items: the number of the first line, and the text with its line breaks.
fn paragraphs(page: &str) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let mut is_open = false;
    for (number, (role, line)) in (1..).zip(roles(page)) {
        if role == Role::Text {
            match found.last_mut().filter(|_| is_open) {
                Some((_, text)) => *text = format!("{text}\n{line}"),
                None => found.push((number, line.to_owned())),
            }
        }
        is_open = role == Role::Text;
    }
    found
}

/// Inline code with the number of line breaks before it.
fn spans(text: &str) -> impl Iterator<Item = (usize, String)> {
    let mut breaks = 0;
    text.split('`').enumerate().filter_map(move |(index, piece)| {
        let before = breaks;
        breaks += piece.matches('\n').count();
        (index % 2 == 1).then(|| (before, piece.split_whitespace().collect::<Vec<_>>().join(" ")))
    })
}

/// Commands between backquotes: a program of [`PROGRAMS`] and at least one more word.
fn is_command(code: &str) -> bool {
    let mut words = code.split(' ');
    words.next().is_some_and(|program| PROGRAMS.contains(&program)) && words.next().is_some()
}

fn in_text((first, text): &(usize, String)) -> Vec<Line> {
    let found = spans(text).filter(|(_, code)| is_command(code));
    found.map(|(breaks, text)| Line { number: first + breaks, row: String::new(), text }).collect()
}

/// All code in columns of commands, and commands in other columns.
fn in_tables(page: &str) -> Vec<Line> {
    let mut found = Vec::new();
    let mut heading: Vec<&str> = Vec::new();
    for (number, (role, line)) in (1..).zip(roles(page)) {
        if role != Role::Table {
            heading.clear();
            continue;
        }
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        if heading.is_empty() {
            heading = cells;
            continue;
        }
        for (column, cell) in cells.iter().enumerate() {
            let is_for_commands = heading.get(column).is_some_and(|name| COLUMNS.contains(name));
            let code = spans(cell).map(|(_, code)| code);
            let row = cells[0].to_owned();
            found.extend(code.filter(|code| is_for_commands || is_command(code)).map(|text| Line {
                number,
                row: row.clone(),
                text,
            }));
        }
    }
    found
}

mod tests {
    use super::*;

    fn texts(page: &str) -> Vec<(usize, String)> {
        lines(page).into_iter().map(|line| (line.number, line.text)).collect()
    }

    #[track_caller]
    fn assert_texts(page: &str, expected: &[(usize, &str)]) {
        let expected: Vec<_> = expected.iter().map(|(number, text)| (*number, (*text).to_owned())).collect();
        assert_eq!(texts(page), expected);
    }

    #[test]
    fn blocks_give_their_lines_without_comments() {
        assert_texts(
            "Do:\n\n    a 1   # why\n    # only this\n    b\n\n    c\n",
            &[(3, "a 1"), (5, "b"), (7, "c")],
        );
        assert_texts(
            "1. In a list:\n\n       a 'x#y'\n       b \\\n         c\n   text\n",
            &[(3, "a 'x#y'"), (4, "b c")],
        );
        assert_texts("```\na\n```\ntext\n", &[(2, "a")]);
        assert_texts("text\n    and its continuation\n", &[]);
    }

    #[test]
    fn of_a_transcript_only_the_lines_with_a_prompt_are_commands() {
        assert_texts(
            "\n    $ coracle check\n    missing   programs\n    $ b\n",
            &[(2, "coracle check"), (4, "b")],
        );
    }

    /// A block of an unknown form counts as commands, so that it needs rules.
    #[test]
    fn configuration_and_logs_are_no_commands() {
        for text in
            ["[cni]\nx = 1", "x = [1]", "a: b", "# file\napiVersion: v1", "[Unit]\nAfter=x", "level=warn x"]
        {
            let page = format!("\n    {}\n", text.replace('\n', "\n    "));
            assert_texts(&page, &[]);
        }
        assert_texts("\n    frobnicate all\n", &[(2, "frobnicate all")]);
    }

    #[test]
    fn code_in_the_text_is_a_command_if_it_begins_with_a_program_and_has_more_words() {
        let page = "Use `crictl` or\n`coracle why\nNAME`, not `keep_blobs = true`; `systemctl status x`.\n";
        assert_texts(page, &[(2, "coracle why NAME"), (3, "systemctl status x")]);
    }

    #[test]
    fn tables_have_commands_in_their_column_and_elsewhere() {
        let page =
            "| symptom | command | cure |\n|---|---|---|\n| `x y` | `frob`, line \"z\" | `ls /x` or `y` |\n";
        assert_texts(page, &[(3, "frob"), (3, "ls /x")]);
        assert!(lines(page).iter().all(|line| line.row == "`x y`"));
        assert_texts("| a | b |\n|---|---|\n| `frob x` | `ls /x` |\n", &[(3, "ls /x")]);
    }
}
