//! The changes that `enable` and `disable` make, as a list that is computed before the first one is made. This file reads files by
//! a function that it is given and writes none.
//!
//! `enable` writes the record first and sets the runtime's endpoint last, so that a command that is interrupted leaves a node that
//! uses its old runtime; `disable` goes the other way. Both may be repeated until they succeed.

use coracle_client::collect;

use crate::host::Problem;
use crate::own::{Origin, origin, sealed};
use crate::record::{self, Edit, Record};

/// A file that coracle writes into a directory of another program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OwnFile {
    /// Path of the file.
    pub(crate) path: String,
    /// Text of the file, without the first line that [`sealed`] adds.
    pub(crate) text: String,
}

/// A setting in a file of another program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Setting {
    /// Path of the file.
    pub(crate) path: String,
    /// The edit; `None` if the file has the value already.
    pub(crate) edit: Option<Edit>,
}

/// The requirements of a program that is to use coracle, and what prevents it.
#[derive(Debug, Default)]
pub(crate) struct Wanted {
    /// Files that coracle writes.
    pub(crate) files: Vec<OwnFile>,
    /// Settings in files of the program.
    pub(crate) settings: Vec<Setting>,
    /// Reasons for which nothing may be changed.
    pub(crate) refusals: Vec<String>,
    /// Facts that the operator should know.
    pub(crate) notes: Vec<String>,
    /// Commands that the operator has to run afterwards, in this order.
    pub(crate) steps: Vec<String>,
    /// Whether the images of the old containerd are taken over.
    pub(crate) takes_images: bool,
    /// Root directory of the old containerd, if it has images that are taken over.
    pub(crate) old_store: Option<String>,
}

/// The state of a file or a setting of a file, as `status` prints it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// The file or setting is as `enable` makes it.
    InPlace,
    /// The file does not exist, or does not have the setting.
    Absent,
    /// `enable` wrote the file, and would write another text today.
    Outdated,
    /// The file was changed since `enable` wrote it.
    Changed,
    /// Another program or a user wrote the file.
    Foreign,
}

/// A file or a setting with its state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Path of the file.
    pub(crate) path: String,
    /// State of the file or setting.
    pub(crate) state: State,
}

/// A change of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Writes the text to a file whose present text is `from`; `None`: the file does not exist.
    Write {
        /// Path of the file.
        path: String,
        /// Text before the change.
        from: Option<String>,
        /// Text after the change.
        text: String,
    },
    /// Removes a file whose present text is `from`.
    Remove {
        /// Path of the file.
        path: String,
        /// Text before the change.
        from: String,
    },
    /// Removes a directory if it is empty.
    RemoveDirectory {
        /// Path of the directory.
        path: String,
    },
}

/// The changes of a command with everything that it reports.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Files and settings with their present state.
    pub(crate) parts: Vec<Part>,
    /// The changes in their order.
    pub(crate) changes: Vec<Change>,
    /// Reasons for which nothing may be changed, or, of `disable`, what it leaves.
    pub(crate) problems: Vec<String>,
}

/// Reads a file of the node; `None` if there is none.
pub(crate) type Read<'a> = &'a dyn Fn(&str) -> Result<Option<String>, Problem>;

/// Plans `enable`. `is_there` says whether a directory exists. With problems there are no changes.
pub(crate) fn enable(
    program: &str,
    wanted: &Wanted,
    read: Read<'_>,
    is_there: &dyn Fn(&str) -> bool,
) -> Plan {
    let mut plan = Plan { problems: wanted.refusals.clone(), ..Plan::default() };
    let (mut record, recorded) = old_record(program, read, &mut plan.problems);
    let mut changes = Vec::new();
    for file in &wanted.files {
        own_file(program, file, read, &mut plan, &mut changes, &mut record);
    }
    for setting in &wanted.settings {
        let state = if setting.edit.is_none() { State::InPlace } else { State::Absent };
        plan.parts.push(Part { path: setting.path.clone(), state });
        let Some(edit) = &setting.edit else { continue };
        match read(&edit.path).map_err(|problem| problem.0).and_then(|from| {
            let from = from.ok_or(format!("{}: does not exist", edit.path))?;
            let text = replace(&from, edit.before.as_deref(), Some(&edit.after));
            text.map(|text| (from, text)).map_err(|error| format!("{}: {error}", edit.path))
        }) {
            Ok((from, text)) => {
                changes.push(Change::Write { path: edit.path.clone(), from: Some(from), text })
            }
            Err(problem) => plan.problems.push(problem),
        }
        record.edits.retain(|known| known != edit);
        record.edits.push(edit.clone());
    }
    if plan.problems.is_empty() && !(changes.is_empty() && recorded.is_none()) {
        let path = record::path(program);
        let paths = record.files.iter().chain([&path]).flat_map(|path| parents(path));
        let missing: Vec<String> =
            paths.filter(|directory| !is_there(directory)).map(str::to_owned).collect();
        for directory in missing {
            if !record.directories.contains(&directory) {
                record.directories.push(directory);
            }
        }
        let text = record.text();
        if recorded.as_ref() != Some(&text) {
            plan.changes.push(Change::Write { path, from: recorded, text });
        }
        plan.changes.extend(changes);
    }
    plan
}

fn own_file(
    program: &str,
    file: &OwnFile,
    read: Read<'_>,
    plan: &mut Plan,
    changes: &mut Vec<Change>,
    record: &mut Record,
) {
    let text = sealed(program, &file.text);
    let found = match read(&file.path) {
        Ok(found) => found,
        Err(problem) => return plan.problems.push(problem.0),
    };
    let state = match found.as_deref().map(|found| (found == text, origin(program, found))) {
        None => State::Absent,
        Some((true, _)) => State::InPlace,
        Some((false, Origin::Own)) => State::Outdated,
        Some((false, Origin::Changed)) => State::Changed,
        Some((false, Origin::Foreign)) => State::Foreign,
    };
    match state {
        State::InPlace | State::Absent | State::Outdated if !record.files.contains(&file.path) => {
            record.files.push(file.path.clone());
        }
        State::InPlace | State::Absent | State::Outdated => {}
        State::Changed => plan.problems.push(format!(
            "{}: was changed since `coracle {program} enable` wrote it: move your changes to another file and remove this one",
            file.path
        )),
        State::Foreign => plan.problems.push(format!(
            "{}: exists, and `coracle {program} enable` did not write it: remove it, or keep the manual configuration",
            file.path
        )),
    }
    if matches!(state, State::Absent | State::Outdated) {
        changes.push(Change::Write { path: file.path.clone(), from: found, text });
    }
    plan.parts.push(Part { path: file.path.clone(), state });
}

/// The record with its text; an empty record if there is none.
fn old_record(program: &str, read: Read<'_>, problems: &mut Vec<String>) -> (Record, Option<String>) {
    let path = record::path(program);
    match read(&path) {
        Ok(None) => (Record::default(), None),
        Ok(Some(text)) => match Record::parse(&text) {
            Ok(record) => (record, Some(text)),
            Err(error) => {
                problems.push(format!("{path}: not a record of coracle: {error}"));
                (Record::default(), Some(text))
            }
        },
        Err(problem) => {
            problems.push(problem.0);
            (Record::default(), None)
        }
    }
}

/// Plans `disable`: restores the lines of other programs' files, then removes own files, directories and the record. `paths` are
/// the files that `enable` writes, in case that the record is lost. Whatever was changed since is left and named in the problems;
/// the record is then kept.
pub(crate) fn disable(
    program: &str,
    paths: &[String],
    read: Read<'_>,
    is_there: &dyn Fn(&str) -> bool,
) -> Plan {
    let mut plan = Plan::default();
    let (record, recorded) = old_record(program, read, &mut plan.problems);
    restore(&record.edits, read, &mut plan);
    let lost = paths.iter().filter(|path| !record.files.contains(path));
    for (path, is_recorded) in
        record.files.iter().map(|path| (path, true)).chain(lost.map(|path| (path, false)))
    {
        let found = match read(path) {
            Ok(Some(found)) => found,
            Ok(None) => continue,
            Err(problem) => {
                plan.problems.push(format!("{problem}: left"));
                continue;
            }
        };
        match origin(program, &found) {
            Origin::Own => plan.changes.push(Change::Remove { path: path.clone(), from: found }),
            Origin::Foreign if !is_recorded => {}
            Origin::Changed | Origin::Foreign => {
                plan.problems
                    .push(format!("{path}: was changed since `coracle {program} enable` wrote it: left"));
            }
        }
    }
    let path = record::path(program);
    let mut directories = record.directories.clone();
    directories.retain(|directory| is_there(directory));
    collect::sort_by_key(&mut directories, |directory| std::cmp::Reverse(directory.len()));
    let (last, first): (Vec<String>, Vec<String>) =
        directories.into_iter().partition(|directory| parents(&path).any(|parent| parent == directory));
    plan.changes.extend(first.into_iter().map(|path| Change::RemoveDirectory { path }));
    if let Some(from) = recorded.filter(|_| plan.problems.is_empty()) {
        plan.changes.push(Change::Remove { path, from });
        plan.changes.extend(last.into_iter().map(|path| Change::RemoveDirectory { path }));
    }
    plan
}

/// Plans the way back of the edits, the last one first, with one change for each file.
fn restore(edits: &[Edit], read: Read<'_>, plan: &mut Plan) {
    let mut paths: Vec<&str> = Vec::new();
    for edit in edits.iter().rev() {
        if !paths.contains(&edit.path.as_str()) {
            paths.push(&edit.path);
        }
    }
    for path in paths {
        let from = match read(path) {
            Ok(Some(from)) => from,
            Ok(None) => continue,
            Err(problem) => {
                plan.problems.push(format!("{problem}: left"));
                continue;
            }
        };
        let mut text = from.clone();
        let of_path: Vec<&Edit> = edits.iter().filter(|edit| edit.path == path).collect();
        for (index, edit) in of_path.iter().enumerate().rev() {
            let has = |line: &str| text.lines().any(|found| found == line);
            // A file that does not have the line, but one from before this edit, is restored already.
            let is_restored = !has(&edit.after)
                && of_path[..=index].iter().any(|edit| edit.before.as_deref().is_none_or(has));
            match replace(&text, Some(&edit.after), edit.before.as_deref()) {
                Ok(restored) => text = restored,
                Err(_) if is_restored => {}
                Err(error) => plan.problems.push(format!(
                    "{path}: {error}; before `enable` it was: {}: left",
                    edit.before.as_deref().unwrap_or("absent")
                )),
            }
        }
        if text != from {
            plan.changes.push(Change::Write { path: path.to_owned(), from: Some(from), text });
        }
    }
}

/// Replaces the only line `before`; `None` as `before` adds a line at the end, `None` as `after` removes the line.
fn replace(text: &str, before: Option<&str>, after: Option<&str>) -> Result<String, String> {
    let Some(before) = before else {
        return match text.is_empty() || text.ends_with('\n') {
            true => Ok(format!("{text}{}\n", after.unwrap_or_default())),
            false => Err("the last line has no end".to_owned()),
        };
    };
    let count = text.lines().filter(|line| *line == before).count();
    if count != 1 {
        return Err(format!("has {count} lines `{before}`, not one"));
    }
    let mut replaced = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        let (content, end) = line.strip_suffix('\n').map_or((line, ""), |content| (content, "\n"));
        match (content == before, after) {
            (false, _) => replaced.push_str(line),
            (true, Some(after)) => {
                replaced.push_str(after);
                replaced.push_str(end);
            }
            (true, None) => {}
        }
    }
    Ok(replaced)
}

/// The directories above a path, without the root, the longest first.
fn parents(path: &str) -> impl Iterator<Item = &str> {
    let ends = path.match_indices('/').map(|(at, _)| at).filter(|at| *at > 0);
    ends.map(|at| &path[..at]).collect::<Vec<_>>().into_iter().rev()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    /// Files in memory; directories exist if a file is below them, or if they are listed.
    #[derive(Clone, Debug, Default, PartialEq, Eq)]
    struct Tree {
        files: BTreeMap<String, String>,
        directories: BTreeSet<String>,
    }

    impl Tree {
        fn apply(&mut self, change: &Change) {
            match change {
                Change::Write { path, from, text } => {
                    assert_eq!(self.files.get(path), from.as_ref(), "{path}");
                    self.directories.extend(parents(path).map(str::to_owned));
                    self.files.insert(path.clone(), text.clone());
                }
                Change::Remove { path, from } => assert_eq!(self.files.remove(path).as_ref(), Some(from)),
                Change::RemoveDirectory { path } => {
                    let below = format!("{path}/");
                    let mut paths = self.files.keys().chain(&self.directories);
                    if !paths.any(|path| path.starts_with(&below)) {
                        self.directories.remove(path);
                    }
                }
            }
        }

        fn enable(&self, wanted: &Wanted) -> Plan {
            let read = |path: &str| Ok(self.files.get(path).cloned());
            enable("k3s", wanted, &read, &|path| self.directories.contains(path))
        }

        fn disable(&self) -> Plan {
            let read = |path: &str| Ok(self.files.get(path).cloned());
            disable("k3s", &["/etc/a.d/50.conf".to_owned()], &read, &|path| self.directories.contains(path))
        }
    }

    fn tree() -> Tree {
        let mut tree = Tree::default();
        tree.apply(&Change::Write {
            path: "/etc/flags".into(),
            from: None,
            text: "# f\nA=old\nB=x\n".into(),
        });
        tree.apply(&Change::Write { path: "/etc/conf".into(), from: None, text: "k: v\n".into() });
        tree
    }

    fn wanted(tree: &Tree, value: &str) -> Wanted {
        let file = |path: &str| OwnFile { path: path.into(), text: format!("v = {value}\n") };
        let after = format!("A={value}");
        let flags = tree.files["/etc/flags"].lines().nth(1).map(str::to_owned);
        let edit = |path: &str, before: Option<String>, after: String| Setting {
            path: path.into(),
            edit: Some(Edit { path: path.into(), before, after }),
        };
        let done = |path: &str| Setting { path: path.into(), edit: None };
        let is_set = tree.files["/etc/conf"].contains("endpoint: x\n");
        Wanted {
            files: vec![file("/etc/a.d/50.conf"), file("/etc/b/c/50.conf")],
            settings: vec![
                if flags.as_ref() == Some(&after) {
                    done("/etc/flags")
                } else {
                    edit("/etc/flags", flags, after)
                },
                if is_set { done("/etc/conf") } else { edit("/etc/conf", None, "endpoint: x".into()) },
            ],
            ..Wanted::default()
        }
    }

    fn carry_out(tree: &mut Tree, plan: &Plan) {
        plan.changes.iter().for_each(|change| tree.apply(change));
    }

    #[test]
    fn disable_restores_the_tree_and_both_may_be_repeated() {
        let before = tree();
        let mut tree = before.clone();
        let plan = tree.enable(&wanted(&tree, "new"));
        assert!(plan.problems.is_empty() && plan.changes.len() == 5, "{plan:?}");
        let first = &plan.changes[0];
        assert!(
            matches!(first, Change::Write { path, .. } if path == "/etc/coracle/setup/k3s.json"),
            "{first:?}"
        );
        carry_out(&mut tree, &plan);
        let again = tree.enable(&wanted(&tree, "new"));
        assert!(again.problems.is_empty() && again.changes.is_empty(), "{again:?}");
        assert!(again.parts.iter().all(|part| part.state == State::InPlace), "{again:?}");
        let back = tree.disable();
        assert!(back.problems.is_empty(), "{back:?}");
        carry_out(&mut tree, &back);
        assert_eq!(tree, before);
        let again = tree.disable();
        assert!(again.problems.is_empty() && again.changes.is_empty(), "{again:?}");
    }

    /// Each sequence of enables, with other values, and interruptions after each number of changes, ends in the original tree.
    #[test]
    fn interrupted_commands_are_completed_by_a_retry_and_undone() {
        for (first, second) in (0..6).flat_map(|first| (0..6).map(move |second| (first, second))) {
            let before = tree();
            let mut tree = before.clone();
            for (value, count) in [("new", first), ("other", second)] {
                let plan = tree.enable(&wanted(&tree, value));
                assert!(plan.problems.is_empty(), "{first} {second}: {plan:?}");
                plan.changes.iter().take(count).for_each(|change| tree.apply(change));
            }
            let plan = tree.enable(&wanted(&tree, "other"));
            carry_out(&mut tree, &plan);
            assert_eq!(tree.files["/etc/flags"], "# f\nA=other\nB=x\n", "{first} {second}");
            for count in 0.. {
                let plan = tree.disable();
                assert!(plan.problems.is_empty(), "{first} {second}: {plan:?}");
                if plan.changes.is_empty() {
                    break;
                }
                plan.changes.iter().take(count % 3 + 1).for_each(|change| tree.apply(change));
                assert!(count < 100, "{first} {second}: {plan:?}");
            }
            assert_eq!(tree.files, before.files, "{first} {second}");
        }
    }

    #[test]
    fn a_changed_file_is_left_and_named() {
        let mut tree = tree();
        let plan = tree.enable(&wanted(&tree, "new"));
        carry_out(&mut tree, &plan);
        tree.files.get_mut("/etc/a.d/50.conf").unwrap().push_str("mine = 1\n");
        let flags = "# f\nA=new --more\nB=x\n".to_owned();
        tree.files.insert("/etc/flags".into(), flags.clone());
        let plan = tree.disable();
        assert_eq!(plan.problems.len(), 2, "{plan:?}");
        assert!(plan.problems[0].starts_with("/etc/flags: has 0 lines `A=new`"), "{plan:?}");
        assert!(plan.problems[1].starts_with("/etc/a.d/50.conf: was changed since"), "{plan:?}");
        carry_out(&mut tree, &plan);
        assert_eq!(
            (tree.files["/etc/flags"].as_str(), tree.files["/etc/conf"].as_str()),
            (flags.as_str(), "k: v\n")
        );
        assert!(tree.files.contains_key("/etc/a.d/50.conf") && !tree.files.contains_key("/etc/b/c/50.conf"));
        let refused = tree.enable(&wanted(&tree, "new"));
        assert!(refused.changes.is_empty(), "{refused:?}");
        assert!(refused.problems[0].contains("was changed since"), "{refused:?}");
    }

    #[test]
    fn nothing_is_changed_if_one_file_cannot_be() {
        let tree = tree();
        let mut wanted = wanted(&tree, "new");
        for (path, text, expected) in [
            ("/etc/b/c/50.conf", "theirs\n", "did not write it"),
            ("/etc/coracle/setup/k3s.json", "{", "not a record of coracle"),
        ] {
            let mut tree = tree.clone();
            tree.files.insert(path.into(), text.into());
            let plan = tree.enable(&wanted);
            assert!(plan.changes.is_empty() && plan.problems[0].contains(expected), "{plan:?}");
        }
        let denied = RefCell::new(0);
        let read = |path: &str| {
            *denied.borrow_mut() += 1;
            Err(Problem(format!("{path}: permission denied")))
        };
        let plan = enable("k3s", &wanted, &read, &|_| true);
        assert!(plan.changes.is_empty() && plan.problems.len() == 5, "{plan:?}");
        wanted.refusals.push("no".into());
        let plan = tree.enable(&wanted);
        assert!(plan.changes.is_empty() && plan.problems == ["no"], "{plan:?}");
    }

    #[test]
    fn without_its_record_disable_removes_only_own_files() {
        let mut tree = tree();
        let plan = tree.enable(&wanted(&tree, "new"));
        carry_out(&mut tree, &plan);
        tree.files.remove("/etc/coracle/setup/k3s.json");
        let plan = tree.disable();
        assert!(plan.problems.is_empty(), "{plan:?}");
        assert!(
            matches!(plan.changes.as_slice(), [Change::Remove { path, .. }] if path == "/etc/a.d/50.conf"),
            "{plan:?}"
        );
    }
}
