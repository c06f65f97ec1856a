//! Checks that all citations can be followed: cited sections of docs/specs, named pages, named tests, and paths in the
//! tables of headers exist, and no document outside of the repository is cited.
//!
//! A citation is the short name of a specification and the number of a section: `CRI 3.5`, `streaming 6.4`,
//! `NRI 4.7`.

use std::collections::BTreeSet;
use std::fs;

use crate::{files, root, short};

/// The prefix of citations of each specification, and its page.
const SPECIFICATIONS: [(&str, &str); 3] =
    [("CRI ", "docs/specs/cri.md"), ("streaming ", "docs/specs/streaming.md"), ("NRI ", "docs/specs/nri.md")];

/// Prefixes of citations of documents outside of the repository. Split, because this file is checked, too.
const NOT_HERE: [&str; 6] = [
    concat!("CRI ", "facts"),
    concat!("CRI ", "section"),
    concat!("facts ", "§"),
    concat!("design", ".md"),
    concat!("conventions", ".md"),
    concat!("conventions ", "§"),
];

/// Names that look like those of tests: a key of containerd, and a field of the CRI.
const NOT_OURS: [&str; 2] = ["drain_exec_sync_io_timeout", "memory_swap_limit_in_bytes"];

/// The numbers of a page's headings: `3.5` of `### 3.5 Title`, `3` of `## 3. Title`.
fn headings(page: &str) -> BTreeSet<String> {
    let text = fs::read_to_string(root().join(page)).expect("a specification");
    let titles = text.lines().filter_map(|line| Some(line.strip_prefix('#')?.trim_start_matches('#').trim()));
    titles
        .filter_map(|title| {
            let title = title.strip_prefix("Appendix ").unwrap_or(title);
            let number = title.split(' ').next()?.trim_end_matches('.');
            let is_number =
                number.len() <= 5 && number.contains(|c: char| c.is_ascii_digit() || c.is_ascii_uppercase());
            is_number.then(|| number.to_owned())
        })
        .collect()
}

/// The section numbers that follow `name` in a text: `CRI 3.5` gives 3.5, `CRI v1` and `CRI RPC` nothing.
fn cited<'a>(text: &'a str, name: &'a str) -> impl Iterator<Item = &'a str> {
    text.match_indices(name).filter_map(move |(at, _)| {
        let is_word = text[..at].ends_with(|c: char| c.is_ascii_alphanumeric());
        let rest = &text[at + name.len()..];
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let number = rest[..end].trim_end_matches('.');
        let goes_on = rest[end..].starts_with(|c: char| c.is_ascii_alphanumeric());
        (!number.is_empty() && !is_word && !goes_on).then_some(number)
    })
}

/// The pages of this repository that a text names: `docs/security.md`.
fn pages(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices("docs/").filter_map(|(at, _)| {
        let rest = &text[at..];
        let end =
            rest.find(|c: char| !c.is_ascii_alphanumeric() && !"/-_.".contains(c)).unwrap_or(rest.len());
        let path = rest[..end].trim_end_matches('.');
        let is_ours = !text[..at].ends_with(|c: char| c.is_ascii_alphanumeric() || "/.-".contains(c));
        (is_ours && path.ends_with(".md")).then_some(path)
    })
}

/// Names in backticks that only a test has: five words or more in snake case.
fn tests(text: &str) -> impl Iterator<Item = &str> {
    let is_name = |name: &&str| {
        let is_snake_case =
            name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
        is_snake_case && name.split('_').filter(|word| !word.is_empty()).count() >= 5
    };
    text.split('`').skip(1).step_by(2).map(|name| name.rsplit("::").next().unwrap_or(name)).filter(is_name)
}

fn texts() -> impl Iterator<Item = (String, String)> {
    let all = files(".rs").into_iter().chain(files(".md")).chain(files(".toml")).chain(files(".proto"));
    all.map(|path| (short(&path), fs::read_to_string(path).expect("a text file")))
}

#[test]
fn citations_lead_to_sections_that_exist() {
    let specifications = SPECIFICATIONS.map(|(name, page)| (name, page, headings(page)));
    let mut dead = Vec::new();
    for (path, text) in texts() {
        for (name, page, sections) in &specifications {
            let missing = cited(&text, name).filter(|number| !sections.contains(*number));
            dead.extend(missing.map(|number| format!("{path}: {name}{number} is not in {page}")));
        }
        dead.extend(
            pages(&text).filter(|page| !root().join(page).exists()).map(|page| format!("{path}: {page}")),
        );
    }
    assert!(dead.is_empty(), "{dead:#?}");
}

/// Regression: docs/cni.md named 39 tests that had other names since.
#[test]
fn tests_that_pages_name_exist() {
    let sources: Vec<String> =
        files(".rs").iter().map(|path| fs::read_to_string(path).expect("a source")).collect();
    let functions: BTreeSet<&str> = sources
        .iter()
        .flat_map(|source| source.match_indices("fn ").map(|(at, _)| &source[at + 3..]))
        .filter_map(|rest| rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next())
        .collect();
    let mut dead = Vec::new();
    for path in files(".md") {
        let text = fs::read_to_string(&path).expect("a page");
        let unknown = tests(&text).filter(|name| !functions.contains(name) && !NOT_OURS.contains(name));
        dead.extend(unknown.map(|name| format!("{}: {name}", short(&path))));
    }
    assert!(dead.is_empty(), "{dead:#?}");
}

/// Paths in backquotes in the tables of a source's header, with the number of their line: `Pods::run`.
fn header_paths(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let is_path = |name: &str| {
        name.contains("::")
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b':')
    };
    let rows = (1..).zip(text.lines()).filter(|(_, line)| line.starts_with("//! |"));
    rows.flat_map(|(number, row)| row.split('`').skip(1).step_by(2).map(move |name| (number, name)))
        .filter(move |(_, name)| is_path(name))
}

/// Whether the code of a source has this word.
fn has_word(text: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut code = text.lines().filter(|line| line.contains(word) && !line.trim_start().starts_with("//"));
    text.contains(word) && code.any(|line| line.split(|c| !is_part(c)).any(|part| part == word))
}

/// Whether a source is the module `item` of the module `scope`, or is the module `scope` and has `item`. A crate's and a
/// type's `item` may be in any source that has both names.
fn is_declared(sources: &[(String, String)], scope: &str, item: &str) -> bool {
    let is_crate = scope == "crate" || scope.starts_with("coracle_");
    let is_module = !is_crate && scope.starts_with(|c: char| c.is_ascii_lowercase());
    let own = [format!("/{scope}/{item}.rs"), format!("/{scope}/{item}/mod.rs")];
    let parent = [format!("/{scope}.rs"), format!("/{scope}/mod.rs")];
    sources.iter().any(|(path, text)| match is_module {
        true => {
            own.iter().any(|end| path.ends_with(end))
                || parent.iter().any(|end| path.ends_with(end)) && has_word(text, item)
        }
        false => has_word(text, scope) && has_word(text, item),
    })
}

/// Regression: the tables of RunPodSandbox and CreateContainer named modules that had moved to another crate.
#[test]
fn paths_in_tables_of_headers_exist() {
    let paths = files(".rs").into_iter();
    let sources: Vec<(String, String)> =
        paths.map(|path| (short(&path), fs::read_to_string(path).expect("a source"))).collect();
    let mut dead = Vec::new();
    for (path, text) in &sources {
        for (line, name) in header_paths(text) {
            let mut parts = name.rsplit("::");
            let (item, scope) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
            if !is_declared(&sources, scope, item) {
                dead.push(format!("{path}:{line}: {name}"));
            }
        }
    }
    assert!(dead.is_empty(), "{dead:#?}");
}

#[test]
fn nothing_cites_documents_that_are_not_here() {
    let mut found = Vec::new();
    for (path, text) in texts() {
        for (number, line) in text.lines().enumerate() {
            found.extend(
                NOT_HERE
                    .iter()
                    .filter(|word| line.contains(*word))
                    .map(|word| format!("{path}:{}: {word}", number + 1)),
            );
        }
    }
    assert!(found.is_empty(), "cite a section of docs/specs or a public source instead: {found:#?}");
}

#[test]
fn citations_and_pages_are_found_in_text() {
    let text = "Rules: CRI 3.5 and CRI 2.16. Not: CRI v1, SCRI 3.4, CRI 1.x";
    assert_eq!(cited(text, "CRI ").collect::<Vec<_>>(), ["3.5", "2.16"]);
    let text = "See docs/cni.md, [x](../docs/nri.md) and docs/notes/.";
    assert_eq!(pages(text).collect::<Vec<_>>(), ["docs/cni.md"]);
    assert!(headings("docs/specs/cri.md").contains("3.5"));
    let text = "See `base::a_test_of_five_words` and `cgroup_threadgroup_rwsem`, not a_test_of_five_words.";
    assert_eq!(tests(text).collect::<Vec<_>>(), ["a_test_of_five_words"]);
}
