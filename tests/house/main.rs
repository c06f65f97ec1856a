//! Checks of the source code: dependencies, use of unsafe, module headers, sizes, citations, wording. They
//! require neither root nor a daemon, so `make check` runs them, too; `calls` requires what
//! `tests/tools/install calls` unpacks.
#![forbid(unsafe_code)]

mod calls;
mod citations;
mod commands;
mod dependencies;
mod differences;
mod fields;
mod modules;
mod pictures;
mod promises;
mod rules;
mod sources;
mod style;

use std::path::{Path, PathBuf};

/// The directory of the workspace.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in the workspace")
}

/// All files in the workspace's directories with this suffix, except built, generated and hidden ones.
pub(crate) fn files(ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    walk(root(), ending, &mut found);
    found.sort();
    found
}

pub(crate) fn walk(folder: &Path, ending: &str, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a directory").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_generated = name.ends_with(".rs") && folder.ends_with("proto");
        if name.starts_with('.') || name == "target" || is_generated {
            continue;
        }
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            walk(&entry.path(), ending, found);
        } else if name.ends_with(ending) {
            found.push(entry.path());
        }
    }
}

/// A file's text without its tests; test modules in files of their own are only named in it.
pub(crate) fn without_tests(text: &str) -> String {
    const MARK: &str = "#[cfg(test)]\n";
    let mut code = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(MARK) {
        code.push_str(before);
        let line = after.lines().next().unwrap_or_default();
        if line.trim_start().starts_with("mod ") && line.ends_with('{') {
            return code;
        }
        rest = after.split_once('\n').map_or("", |(_, rest)| rest);
    }
    code + rest
}

/// A path relative to the workspace.
pub(crate) fn short(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}
