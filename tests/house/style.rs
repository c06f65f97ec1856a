//! Checks wording and spelling of comments, pages and messages: plain English with the standard terms of the
//! field. The list of phrases comes from reviews of the code; add a phrase when a review finds one. The spell
//! check uses the dictionary of the `typos` program.
//!
//! In Rust sources comments and string literals of several words are checked, in pages everything except
//! code.

use std::fs;
use std::path::Path;

use unicase::UniCase;

use crate::{files, root, short};

/// Files and directories whose wording has been reviewed: all.
const REVIEWED: [&str; 14] = [
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "docs/",
    "netlink/",
    "nri/",
    "packaging/",
    "runtime/",
    "sandbox/",
    "targets/",
    "tests/",
];

/// Parts of [`REVIEWED`] that are not checked: a generated page and the list of phrases itself.
const NOT_REVIEWED: [&str; 2] = ["docs/config.md", "tests/house/style.rs"];

/// Phrases to avoid, with a suggestion. All are in lower case and match whole words.
const PHRASES: [(&str, &str); 78] = [
    ("a word in the log", "a log message"),
    ("anybody", "name the user, process or client"),
    ("as ever", "delete it"),
    ("as it stands", "unchanged, not parsed"),
    ("at work", "running"),
    ("away again", "removed"),
    ("by way of", "through"),
    ("comes along", "is passed"),
    ("comes to", "results in"),
    ("costs itself only", "affects only itself"),
    ("does not tell", "does not report"),
    ("everybody", "all users, all processes"),
    ("for want of", "because of a lack of"),
    ("gets on", "makes progress"),
    ("gets rid of", "removes"),
    ("gives back", "returns"),
    ("gives up", "aborts, releases"),
    ("goes along", "is passed"),
    ("goes on", "continues"),
    ("goes on from", "resumes"),
    ("gone on", "continued"),
    ("gone on from", "resumed"),
    ("half done", "incomplete"),
    ("hear of", "receive, be notified of"),
    ("hears of", "receives, is notified of"),
    ("in force again", "restored"),
    ("in vain", "without success"),
    ("is given up", "is aborted, is abandoned"),
    ("is laid", "is put, is applied"),
    ("is let go", "is released"),
    ("is made of", "consists of"),
    ("is no call", "is not a system call"),
    ("is no more", "no longer exists"),
    ("is no name", "is not a valid name"),
    ("is not told", "is not notified"),
    ("is passed over", "is ignored"),
    ("is said", "is reported, is logged"),
    ("is taken for", "is treated as"),
    ("is taken over", "is compromised, is loaded, is adopted"),
    ("is told", "receives"),
    ("it has not after", "it still does not after"),
    ("knows of", "has"),
    ("let go of", "closed, released, disconnected"),
    ("lets go of", "closes, releases"),
    ("looks at", "reads, checks"),
    ("made anew", "created again"),
    ("made of", "consisting of"),
    ("nobody", "no process, no user"),
    ("of our own making", "own"),
    ("of ours", "of coracle"),
    ("of theirs", "name the owner"),
    ("once more", "again"),
    ("read anew", "read again"),
    ("read over", "ignored"),
    ("ridden out", "tolerated, ignored"),
    ("said once", "logged once"),
    ("somebody", "another process, a user"),
    ("someone", "another process, a user"),
    ("stays as it is", "is not changed"),
    ("take back", "revert, remove"),
    ("takes away", "removes"),
    ("takes back", "reverts, removes"),
    ("takes for gone", "treats as removed"),
    ("the way around", "the fallback"),
    ("this room", "this crate"),
    ("those asked for", "the requested ones"),
    ("thrown away", "dropped, removed"),
    ("told apart", "distinguished"),
    ("told of", "notified of"),
    ("turned away", "refused"),
    ("under way", "running, in progress"),
    ("what came of it", "the result"),
    ("what is asked", "the request"),
    ("what is left", "the rest"),
    ("what is there", "existing files, existing rules"),
    ("what it is told", "its input"),
    ("whoever", "a client that, a process that"),
    ("with a word", "with a log message"),
];

/// Beginnings of documentation comments that need the item above to be understood.
const FRAGMENTS: [&str; 26] = [
    "What ",
    "Whether it ",
    "Whether its ",
    "The same",
    "As ",
    "Of ",
    "And ",
    "Likewise",
    "With a ",
    "With the ",
    "Without ",
    "Closing it",
    "Whoever",
    "It ",
    "Its ",
    "They ",
    "Their ",
    "Also ",
    "Same ",
    "But ",
    "Or ",
    "Which ",
    "Where ",
    "Those ",
    "That ",
    "This image",
];

/// Second words of documentation comments that need the item above to be understood: `Runs it`.
const POINTERS: [&str; 3] = ["it", "its", "them"];

/// Files in which a phrase is right: end of the path, phrase.
const EXCEPTIONS: [(&str, &str); 0] = [];

/// Words of the misspelling dictionary that are correct here.
const WORDS: [&str; 1] = ["sytemd"];

/// The text of a file without code: its words with the number of their line.
type Prose = Vec<(usize, String)>;

fn is_reviewed(name: &str) -> bool {
    let is_in = |list: &[&str]| {
        list.iter().any(|place| name == *place || place.ends_with('/') && name.starts_with(place))
    };
    is_in(&REVIEWED) && !is_in(&NOT_REVIEWED)
}

/// Removes code between backquotes and link targets.
fn without_code(line: &str) -> String {
    let plain: String = line.split('`').step_by(2).collect::<Vec<_>>().join(" x ");
    let mut pieces = plain.split("](");
    let mut text = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        text.push(' ');
        text.push_str(piece.split_once(')').map_or("", |(_, rest)| rest));
    }
    text.split(' ').filter(|word| !word.contains("://")).collect::<Vec<_>>().join(" ")
}

/// The comments and the string literals of several words of a line of Rust.
fn of_rust(line: &str) -> String {
    let trimmed = line.trim_start();
    if trimmed.starts_with("//") {
        return trimmed.trim_start_matches(['/', '!']).to_owned();
    }
    let literals = line.split('"').skip(1).step_by(2).filter(|text| text.matches(' ').count() > 1);
    let comment = line.split_once(" // ").map(|(_, comment)| comment);
    literals.chain(comment).collect::<Vec<_>>().join(" . ")
}

fn prose(path: &Path, text: &str) -> Prose {
    let is_rust = path.extension().is_some_and(|ending| ending == "rs");
    let mut is_code = false;
    let mut found = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let words = if is_rust { of_rust(line) } else { line.to_owned() };
        if words.trim_start().starts_with("```") {
            is_code = !is_code;
            continue;
        }
        let is_indented =
            !is_rust && words.starts_with("    ") && !words.trim_start().starts_with(['-', '|']);
        if !is_code && !is_indented {
            found.push((number, without_code(&words)));
        }
    }
    found
}

/// Lower-case words separated and surrounded by single spaces.
fn simple(text: &str) -> String {
    let letters = text.chars().map(|letter| if letter.is_alphanumeric() { letter } else { ' ' });
    let words = letters.collect::<String>().to_lowercase();
    format!(" {} ", words.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// The simplified lines of `prose`, each with the first words of the next line, so that a phrase may be spread over two lines.
fn overlapping(prose: &Prose) -> Vec<(usize, String, String)> {
    let lines: Vec<(usize, String)> = prose.iter().map(|(number, line)| (*number, simple(line))).collect();
    let next = |index: usize| {
        let (number, _) = &lines[index];
        let next = lines.get(index + 1).filter(|(next, _)| *next == number + 1);
        next.map_or(String::new(), |(_, line)| line.trim_start().to_owned())
    };
    (0..lines.len()).map(|index| (lines[index].0, lines[index].1.clone(), next(index))).collect()
}

/// Numbers of the lines in which a phrase begins.
fn places(lines: &[(usize, String, String)], phrase: &str) -> Vec<usize> {
    let wanted = format!(" {phrase} ");
    let is_found = |line: &str, next: &str| {
        line.contains(&wanted)
            || phrase.match_indices(' ').any(|(at, _)| {
                line.ends_with(&format!(" {} ", &phrase[..at]))
                    && next.starts_with(&format!("{} ", &phrase[at + 1..]))
            })
    };
    let found = lines.iter().filter(|(_, line, next)| is_found(line, next));
    found.map(|(number, ..)| *number).collect()
}

#[test]
fn reviewed_files_use_plain_words() {
    let mut wrong = Vec::new();
    for path in files(".rs").into_iter().chain(files(".md")) {
        let name = short(&path);
        if !is_reviewed(&name) {
            continue;
        }
        let lines = overlapping(&prose(&path, &fs::read_to_string(&path).expect("a text file")));
        for (phrase, better) in PHRASES {
            if EXCEPTIONS.iter().any(|(file, allowed)| name.ends_with(file) && *allowed == phrase) {
                continue;
            }
            let found = places(&lines, phrase).into_iter();
            wrong.extend(found.map(|line| format!("{name}:{line}: \"{phrase}\": better: {better}")));
        }
    }
    assert!(wrong.is_empty(), "{} phrases to avoid:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn documentation_comments_stand_alone() {
    let mut wrong = Vec::new();
    for path in files(".rs").into_iter().filter(|path| is_reviewed(&short(path))) {
        let text = fs::read_to_string(&path).expect("a source file");
        let mut is_inside = false;
        for (number, line) in (1..).zip(text.lines()) {
            let comment = line.trim_start().strip_prefix("/// ");
            let points = |comment: &str| {
                let second = comment.split(' ').nth(1).unwrap_or_default();
                POINTERS.contains(&second.trim_end_matches([',', '.', ';', ':']))
            };
            let is_fragment =
                |comment: &str| FRAGMENTS.iter().any(|start| comment.starts_with(start)) || points(comment);
            if comment.is_some_and(is_fragment) && !is_inside {
                wrong.push(format!("{}:{number}: {}", short(&path), line.trim()));
            }
            is_inside = line.trim_start().starts_with("///");
        }
    }
    assert!(wrong.is_empty(), "begin with what the item is or does:\n{}", wrong.join("\n"));
}

#[test]
fn words_are_spelled_right() {
    let mut wrong = Vec::new();
    for path in files(".rs").into_iter().chain(files(".md")) {
        let text = fs::read_to_string(&path).expect("a text file");
        for (number, line) in prose(&path, &text) {
            let words = line.split(|letter: char| !letter.is_alphabetic() && letter != '_');
            for word in words.filter(|word| word.len() > 3 && !word.contains('_')) {
                let is_name = word.chars().skip(1).any(char::is_uppercase);
                let corrections = typos_dict::WORD.find(&UniCase::new(word));
                let Some(right) = corrections.filter(|_| !is_name && !WORDS.contains(&word)) else {
                    continue;
                };
                wrong.push(format!("{}:{number}: {word}: {}", short(&path), right.join(" or ")));
            }
        }
    }
    assert!(wrong.is_empty(), "misspelled:\n{}", wrong.join("\n"));
}

#[test]
fn lists_of_reviewed_files_name_what_exists() {
    let missing = REVIEWED.iter().chain(&NOT_REVIEWED).filter(|place| !root().join(place).exists());
    let missing: Vec<_> = missing.collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn phrases_are_found_in_prose_and_not_in_code() {
    let text = "/// Closes it when nobody\n/// reads, or some one\n/// that is `nobody`.\nlet nobody = \"nobody is here\";\n\
                // ```\n// nobody\n// ```\n";
    let lines = overlapping(&prose(Path::new("a.rs"), text));
    assert_eq!(places(&lines, "nobody"), [1, 4]);
    assert_eq!(places(&lines, "one that"), [2]);
    assert_eq!(places(&lines, "read"), [] as [usize; 0]);
}
