//! Loads the configuration into one typed value: defaults, then the file, then drop-ins in lexical order,
//! then flags.
//!
//! ```text
//! keys (the table) ──> defaults ─┐
//! config.toml, conf.d/*.toml ────┼──> one raw value per key ──> Config, or every problem with file and line
//! flags ─────────────────────────┘
//! ```
//!
//! Every key is defined once, in [`keys::KEYS`]; the parser, the [`flags`], `coracle config default` and
//! suggestions for misspelt keys are generated from it. All problems are reported together. No code outside
//! of this module handles unparsed strings.

mod document;
pub mod flags;
mod handlers;
mod keys;
mod read;
mod suggest;
#[cfg(test)]
mod tests;
mod types;
mod value;

use std::fmt;
use std::path::{Path, PathBuf};

pub use document::document;
pub use handlers::{RUNTIME_DEFAULT, RuntimeHandlers};
pub use keys::{KEYS, Key};
pub use types::{
    Address, CgroupDriver, Config, ContainerdSocket, DefaultNetwork, Mirror, Nri, Offline, Restart,
};

/// The default of the key `state`.
pub const STATE_DEFAULT: &str = "/run/coracle";
use coracle_base::collect;
use value::{Origin, Raw};

/// Default path of the configuration file (`--config`).
pub const DEFAULT_FILE: &str = "/etc/coracle/config.toml";

/// A problem of the configuration with its origin.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Origin of the value: `FILE:LINE`, or the flag.
    origin: Origin,
    text: String,
    hides: Hides,
}

/// The values that are unknown because of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Hides {
    /// The value of one key, or of none.
    Key(&'static str),
    /// All values of the file: it cannot be read, or is not TOML.
    File,
}

impl fmt::Display for Problem {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.origin, self.text)
    }
}

/// The sources of the configuration.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    /// Path from `--config`, which must exist. `None`: [`DEFAULT_FILE`], which is optional.
    pub file: Option<PathBuf>,
    /// Flags as (key, value) in the order of the command line; the flag of a list may occur several times.
    pub flags: Vec<(&'static Key, String)>,
}

/// The files that [`load`] reads, without those that do not exist.
pub fn files(sources: &Sources) -> Vec<PathBuf> {
    let file = sources.file.clone().unwrap_or_else(|| PathBuf::from(DEFAULT_FILE));
    let drop_ins = read::drop_ins(&file.with_file_name("conf.d")).unwrap_or_default();
    std::iter::once(file).chain(drop_ins).filter(|path| path.exists()).collect()
}

/// Loads the configuration from all sources, at start and at each reload.
///
/// # Errors
/// All problems of all sources, in the order of files and lines.
pub fn load(sources: &Sources) -> Result<Config, Vec<Problem>> {
    match load_valid_part(sources) {
        (config, problems) if problems.is_empty() => Ok(config),
        (_, problems) => Err(problems),
    }
}

/// Loads the configuration with the default for each value that is missing or invalid, and returns all problems: for
/// commands about a node whose configuration is invalid.
pub fn load_valid_part(sources: &Sources) -> (Config, Vec<Problem>) {
    let mut values: Vec<Option<(Raw, Origin)>> = vec![None; KEYS.len()];
    let mut problems = Vec::new();
    let (file, is_named) = match &sources.file {
        Some(file) => (file.as_path(), true),
        None => (Path::new(DEFAULT_FILE), false),
    };
    read::files(file, is_named, None, &mut values, &mut problems);
    apply_flags(sources, &mut values);
    let config = build(&values, &mut problems);
    collect::sort(&mut problems);
    (config, problems)
}

/// Loads the configuration for a command that asks a daemon: a mistake in a file is no reason not to ask it, because the daemon
/// continues with the configuration from before. Returns the problems too.
///
/// # Errors
/// The problems, if the command would ask another daemon than the one that its user means: a flag is invalid, or the state
/// directory is unknown.
pub fn load_for_client(sources: &Sources) -> Result<(Config, Vec<Problem>), Vec<Problem>> {
    const STATE: &str = "state";
    let (config, problems) = load_valid_part(sources);
    let is_given = sources.flags.iter().any(|(key, _)| key.name == STATE);
    let prevents = |problem: &Problem| match (&problem.origin, problem.hides) {
        (Origin::Flag(_), _) => true,
        (Origin::File(..), Hides::File) => !is_given,
        (Origin::File(..), Hides::Key(key)) => key == STATE && !is_given,
    };
    if problems.iter().any(prevents) { Err(problems) } else { Ok((config, problems)) }
}

/// Loads the configuration from a file that may be missing and its drop-ins, as it is once the file `drop_in` has this text.
///
/// # Errors
/// As [`load`].
pub fn load_with(file: &Path, drop_in: (&Path, &str)) -> Result<Config, Vec<Problem>> {
    let mut values: Vec<Option<(Raw, Origin)>> = vec![None; KEYS.len()];
    let mut problems = Vec::new();
    read::files(file, false, Some(drop_in), &mut values, &mut problems);
    let config = build(&values, &mut problems);
    collect::sort(&mut problems);
    if problems.is_empty() { Ok(config) } else { Err(problems) }
}

/// The configuration of a daemon without files and flags.
pub fn defaults() -> Config {
    build(&vec![None; KEYS.len()], &mut Vec::new())
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

/// Stores the given value, or the default, of each key in its field.
fn build(values: &[Option<(Raw, Origin)>], problems: &mut Vec<Problem>) -> Config {
    let mut config = Config::default();
    for (key, given) in KEYS.iter().zip(values) {
        // The table's own default; a test parses all of them.
        let default = read::literal(key.default).and_then(|raw| (key.store)(&mut config, &raw));
        default.expect("each default in the table fits its key");
        let Some((raw, origin)) = given else { continue };
        if let Err(text) = (key.store)(&mut config, raw) {
            let text = format!("{}: {text}", key.name);
            problems.push(Problem { origin: origin.clone(), text, hides: Hides::Key(key.name) });
        }
    }
    config
}

/// Names of the keys in which two configurations differ.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Names of changed keys that a reload applies.
    pub reloadable: Vec<&'static str>,
    /// Names of changed keys that require a restart.
    pub needs_restart: Vec<&'static str>,
}

/// Compares two configurations.
pub fn changes(old: &Config, new: &Config) -> Changes {
    let mut changes = Changes::default();
    for key in KEYS {
        if !(key.is_equal)(old, new) {
            let list = if key.reloadable { &mut changes.reloadable } else { &mut changes.needs_restart };
            list.push(key.name);
        }
    }
    changes
}
