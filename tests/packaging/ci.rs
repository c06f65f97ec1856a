//! The workflow of CI, which runs elsewhere: what can be seen in its text.

use std::fs;

use crate::workspace;

/// The lines of all workflows, with the file and the number.
fn lines() -> Vec<(String, String)> {
    let folder = workspace().join(".github/workflows");
    let mut lines = Vec::new();
    for entry in fs::read_dir(folder).expect("workflows").flatten() {
        let (name, text) = (entry.file_name(), fs::read_to_string(entry.path()).expect("a workflow"));
        let numbered = text.lines().enumerate();
        lines.extend(
            numbered.map(|(at, line)| (format!("{}:{}", name.display(), at + 1), line.trim().to_owned())),
        );
    }
    lines
}

/// A tag of an action can be moved to other code, a commit cannot. The comment names the version for readers.
#[test]
fn each_action_is_pinned_by_digest() {
    let mut count = 0;
    for (place, line) in lines() {
        let Some(action) = line.trim_start_matches("- ").strip_prefix("uses: ") else { continue };
        let (_, version) = action.split_once('@').unwrap_or_else(|| panic!("{place}: no version: {line}"));
        let (digest, comment) = version.split_once(" # v").unwrap_or_else(|| panic!("{place}: {line}"));
        let is_digest = digest.len() == 40 && digest.chars().all(|digit| digit.is_ascii_hexdigit());
        assert!(is_digest && !comment.is_empty(), "{place}: {line}");
        count += 1;
    }
    assert!(count > 0, "no workflow uses an action");
}

/// Each `make` of a workflow is a target of the Makefile.
#[test]
fn each_make_names_a_target() {
    let makefile = fs::read_to_string(workspace().join("Makefile")).expect("the Makefile");
    for (place, line) in lines() {
        let Some((_, words)) = line.split_once("make ").filter(|(before, _)| !before.contains('#')) else {
            continue;
        };
        let target = words.split(' ').next().expect("a word");
        assert!(makefile.contains(&format!("\n{target}:")), "{place}: make {target}");
    }
}
