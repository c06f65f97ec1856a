//! The configuration as one typed value: defaults, then the file, then drop-ins in lexical order, then flags.
//!
//! ```text
//!   keys (the table) ──> defaults ─┐
//!   config.toml, conf.d/*.toml ────┼──> one raw value per key ──> Config, or every problem with file and line
//!   flags ─────────────────────────┘
//! ```
//!
//! Every key is defined once, in [`keys::KEYS`]; from there come the parser, the flags, `coracle config default` and the
//! answer to a misspelt key. All problems are reported at once. Later code never sees a raw string.

mod document;
mod keys;
mod read;
mod suggest;
#[cfg(test)]
mod tests;
mod types;
mod value;

use std::fmt;
use std::path::{Path, PathBuf};

pub(crate) use document::document;
pub(crate) use keys::{KEYS, Key};
pub(crate) use suggest::nearest;
pub(crate) use types::{Address, CgroupDriver, Config, DefaultNetwork, DuplicatePolicy, Nri, Restart};
use value::{Origin, Raw};

/// Where the configuration is unless `--config` says otherwise.
pub(crate) const DEFAULT_FILE: &str = "/etc/coracle/config.toml";

/// One thing that is wrong, and where.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Problem {
    /// `FILE:LINE`, or the flag.
    origin: Origin,
    text: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.origin, self.text)
    }
}

/// What the command line adds to the files.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sources {
    /// `--config`: must exist. `None`: [`DEFAULT_FILE`], which need not.
    pub(crate) file: Option<PathBuf>,
    /// Flags as (key, value), in their order; a list takes one value per flag.
    pub(crate) flags: Vec<(&'static Key, String)>,
}

/// Reads all sources again, as at start.
///
/// # Errors
/// Every problem of every source, in the order of files and lines.
pub(crate) fn load(sources: &Sources) -> Result<Config, Vec<Problem>> {
    let mut values: Vec<Option<(Raw, Origin)>> = vec![None; KEYS.len()];
    let mut problems = Vec::new();
    let (file, is_named) = match &sources.file {
        Some(file) => (file.as_path(), true),
        None => (Path::new(DEFAULT_FILE), false),
    };
    read::files(file, is_named, &mut values, &mut problems);
    apply_flags(sources, &mut values);
    let config = build(&values, &mut problems);
    if problems.is_empty() {
        return Ok(config);
    }
    problems.sort();
    Err(problems)
}

fn apply_flags(sources: &Sources, values: &mut [Option<(Raw, Origin)>]) {
    for (index, key) in KEYS.iter().enumerate() {
        let given: Vec<Raw> = (sources.flags.iter())
            .filter(|(flagged, _)| std::ptr::eq(*flagged, key))
            .map(|(_, text)| Raw::Text(text.clone()))
            .collect();
        let Some(flag) = &key.flag else { continue };
        let Some(last) = given.last() else { continue };
        let raw = if key.is_list { Raw::List(given) } else { last.clone() };
        values[index] = Some((raw, Origin::Flag(flag.name)));
    }
}

/// One pass over the table: the given value, else the default, into its field.
fn build(values: &[Option<(Raw, Origin)>], problems: &mut Vec<Problem>) -> Config {
    let mut config = Config::default();
    for (key, given) in KEYS.iter().zip(values) {
        if let Some((raw, origin)) = given {
            if let Err(text) = (key.store)(&mut config, raw) {
                problems.push(Problem { origin: origin.clone(), text: format!("{}: {text}", key.name) });
            }
        } else {
            // The table's own text; a test stores every one.
            let stored = read::literal(key.default).and_then(|raw| (key.store)(&mut config, &raw));
            stored.expect("each default in the table fits its key");
        }
    }
    config
}

/// Names of the keys in which two configurations differ.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    /// In force after a reload.
    pub(crate) reloadable: Vec<&'static str>,
    /// In force after a restart.
    pub(crate) needs_restart: Vec<&'static str>,
}

/// What a reload from `old` to `new` changes, key by key.
pub(crate) fn changes(old: &Config, new: &Config) -> Changes {
    let mut changes = Changes::default();
    for key in KEYS {
        if !(key.is_equal)(old, new) {
            let list = if key.reloadable { &mut changes.reloadable } else { &mut changes.needs_restart };
            list.push(key.name);
        }
    }
    changes
}
