//! Rules for all source files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::{files, root, short, without_tests};

/// Directories in which `unsafe` is permitted: the system calls, and the monitor, which has no std. Further exceptions are
/// the attack program in test images, which makes system calls that coracle does not need, the floor of the
/// benchmarks, which uses no code of coracle, and a test's allocator, which is an unsafe trait.
const UNSAFE: [&str; 5] = [
    "sandbox/sys/src/",
    "sandbox/pod/src/",
    "sandbox/tests/jail_start.rs",
    "tests/floor/raw.rs",
    "tests/probe/src/attack/raw.rs",
];

/// Words that mark unfinished code. Split, because this file is checked, too.
const UNFINISHED: [&str; 4] =
    [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("unimpl", "emented!("), concat!("to", "do!(")];

/// Maximum number of lines of a file without its tests.
const FILE_LINES_MAX: usize = 600;
/// Maximum number of lines of a function.
const FUNCTION_LINES_MAX: usize = 70;

/// Longer files and functions (`path::name`) with the reason. They may shrink; they may grow only with a
/// reason.
const LONGER: [(&str, &str); 1] =
    [("sandbox/pod/src/child.rs::perform", "a match with one arm per operation")];

/// Files of tables, one row per case.
const TABLES: [&str; 4] = [
    "tests/compare/configurations/table.rs",
    "tests/compare/layers/table.rs",
    "tests/compare/registries/rows.rs",
    "tests/compare/requests/calls.rs",
];

#[test]
fn each_file_says_why_it_exists() {
    let silent: Vec<String> = files(".rs")
        .into_iter()
        .filter(|path| {
            let text = fs::read_to_string(path).expect("a source file");
            !text.starts_with("//!")
        })
        .map(|path| short(&path))
        .collect();
    assert!(silent.is_empty(), "no header: {silent:?}");
}

#[test]
fn only_listed_directories_have_unsafe_code() {
    let mut outside = Vec::new();
    for path in files(".rs") {
        let name = short(&path);
        if UNSAFE.iter().any(|place| name.starts_with(place)) {
            continue;
        }
        let text = fs::read_to_string(&path).expect("a source file");
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            let mut words = code.split([' ', '(']);
            let is_unsafe = words.any(|word| word == "unsafe") && !code.contains('"');
            if is_unsafe {
                outside.push(format!("{name}:{}", number + 1));
            }
        }
    }
    assert!(outside.is_empty(), "{outside:?}");
}

#[test]
fn no_file_has_an_unfinished_mark() {
    let mut later = Vec::new();
    for path in files(".rs").into_iter().chain(files(".toml")).chain(files(".md")) {
        let text = fs::read_to_string(&path).expect("a text file");
        for (number, line) in text.lines().enumerate() {
            if UNFINISHED.iter().any(|word| line.contains(word)) {
                later.push(format!("{}:{}", short(&path), number + 1));
            }
        }
    }
    assert!(later.is_empty(), "do it, or file it: {later:?}");
}

#[test]
fn files_and_functions_stay_short() {
    let mut long: BTreeMap<String, usize> = BTreeMap::new();
    for path in files(".rs") {
        let name = short(&path);
        let text = fs::read_to_string(&path).expect("a source file");
        let body = without_tests(&text);
        let lines = body.lines().count();
        if lines > FILE_LINES_MAX {
            long.insert(name.clone(), lines);
        }
        for (function, lines) in functions(&body) {
            if lines > FUNCTION_LINES_MAX {
                long.insert(format!("{name}::{function}"), lines);
            }
        }
    }
    long.retain(|name, _| !TABLES.iter().any(|table| name.starts_with(table)));
    long.retain(|name, _| !LONGER.iter().any(|(known, _)| known == name));
    assert!(long.is_empty(), "two things in one? {long:#?}");
}

/// Name and length of each function in rustfmt's layout: it ends at a brace with the indentation of its
/// start.
fn functions(text: &str) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    let lines: Vec<&str> = text.lines().collect();
    for (start, line) in lines.iter().enumerate() {
        let trimmed = line.trim_start();
        let Some(at) = trimmed.find("fn ") else { continue };
        let is_head = trimmed[..at].split_whitespace().all(|word| {
            matches!(word, "const" | "async" | "unsafe" | "extern" | "\"C\"") || word.starts_with("pub")
        });
        if !is_head {
            continue;
        }
        let name: String = trimmed[at + 3..]
            .chars()
            .take_while(|letter| letter.is_alphanumeric() || *letter == '_')
            .collect();
        let end = format!("{}}}", &line[..line.len() - trimmed.len()]);
        if let Some(length) = lines[start..].iter().position(|line| *line == end) {
            found.push((name, length + 1));
        }
    }
    found
}

/// Maximum number of words of all pages of a directory, or of a page. A longer manual is not read, so that a new paragraph replaces another one, is a
/// link to the page that says it, or is a result of one day: those are in docs/results and not counted.
const WORDS_MAX: [(&str, usize); 3] = [("docs", 45_000), ("docs/notes", 10_000), ("README.md", 1_000)];

#[test]
fn pages_stay_short() {
    let words = |path: &Path| fs::read_to_string(path).expect("a page").split_whitespace().count();
    let pages = files(".md");
    let mut long = Vec::new();
    for (place, max) in WORDS_MAX {
        let place = root().join(place);
        let is_counted = |path: &&PathBuf| path.parent() == Some(&place) || **path == place;
        let mut counts: Vec<_> =
            pages.iter().filter(is_counted).map(|path| (words(path), short(path))).collect();
        let all: usize = counts.iter().map(|(count, _)| count).sum();
        assert!(all > 0, "{}: no pages", place.display());
        if all > max {
            counts.sort_unstable_by(|one, other| other.cmp(one));
            counts.truncate(5);
            long.push(format!("{}: {all} words, at most {max}; the longest: {counts:?}", short(&place)));
        }
    }
    assert!(long.is_empty(), "say it once, and shorter: {long:#?}");
}

#[test]
fn links_in_our_pages_lead_somewhere() {
    let mut broken = Vec::new();
    for path in files(".md") {
        // Code may look like a link.
        let text = fs::read_to_string(&path).expect("a page").split("```").step_by(2).collect::<String>();
        for piece in text.split("](").skip(1) {
            let target = piece.split(')').next().unwrap_or_default();
            let place = target.split('#').next().unwrap_or_default();
            if place.is_empty() || place.contains("://") || place.starts_with("mailto:") {
                continue;
            }
            let folder = path.parent().unwrap_or(root());
            if !folder.join(place).exists() {
                broken.push(format!("{} -> {target}", short(&path)));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:?}");
}

/// The modules that a file declares, and the files that it names by their paths, without `.rs`.
fn modules(text: &str) -> BTreeSet<String> {
    let is_part = |one: char| one.is_alphanumeric() || one == '_' || one == '-';
    let declared = text.split("mod ").skip(1).filter_map(|rest| rest.split_once(';')).map(|(name, _)| name);
    let paths = text.split(".rs\"").map(|before| &before[before.trim_end_matches(is_part).len()..]);
    declared.chain(paths).map(str::to_owned).collect()
}

#[test]
fn every_source_file_is_reached_by_a_mod_line() {
    let mut unreachable = Vec::new();
    let mut all = files(".rs");
    // The file of a program may be named in its manifest.
    all.extend(files("Cargo.toml"));
    let named: Vec<(&PathBuf, BTreeSet<String>)> =
        all.iter().map(|path| (path, modules(&fs::read_to_string(path).unwrap_or_default()))).collect();
    for path in all.iter().filter(|path| path.extension().is_some_and(|ending| ending == "rs")) {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if matches!(name.as_str(), "main" | "lib" | "build")
            || ["/tests/", "/benches/"].iter().any(|place| short(path).contains(place))
        {
            continue;
        }
        let wanted = if name == "mod" {
            path.parent()
                .and_then(|folder| folder.file_name())
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned()
        } else {
            name
        };
        if !named.iter().any(|(other, names)| *other != path && names.contains(&wanted)) {
            unreachable.push(short(path));
        }
    }
    assert!(unreachable.is_empty(), "{unreachable:?}");
}

#[test]
fn the_configuration_page_has_the_default_configuration() {
    let read = |path: &str| fs::read_to_string(root().join(path)).expect("a text file");
    let page = read("docs/config.md");
    let shown =
        page.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a block of TOML");
    assert_eq!(shown, read("packaging/config.toml"), "copy packaging/config.toml into docs/config.md");
}
