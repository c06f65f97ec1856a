//! The flags of the daemon, generated from the table of keys. The command line accepts them, too: they say which daemon is meant.

use std::fmt::Write as _;

use super::keys::{KEYS, Key};
use super::{DEFAULT_FILE, Sources, suggest};

/// The flag that names the main file; it belongs to no key.
const CONFIG: &str = "--config";

/// Parses the flags of the daemon.
///
/// # Errors
/// One line that names the invalid word.
pub fn parse(mut words: &[&str]) -> Result<Sources, String> {
    let mut sources = Sources::default();
    while !words.is_empty() {
        words = take(words, &mut sources)?;
    }
    Ok(sources)
}

/// Parses one `--flag VALUE` or `--flag=VALUE` at the start and returns the rest.
///
/// # Errors
/// One line: there is no such flag, or its value is missing.
pub fn take<'a, 'b>(words: &'a [&'b str], sources: &mut Sources) -> Result<&'a [&'b str], String> {
    let Some((word, rest)) = words.split_first() else { return Ok(words) };
    let (name, attached) = match word.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (*word, None),
    };
    let key = key_of(name);
    if key.is_none() && name != CONFIG {
        return Err(unknown("flag", name, names()));
    }
    let (value, rest) = match (attached, rest.split_first()) {
        (Some(value), _) => (value, rest),
        (None, Some((value, rest))) => (*value, rest),
        (None, None) => return Err(format!("{name}: its value is missing")),
    };
    match key {
        Some(key) => sources.flags.push((key, value.to_owned())),
        None => sources.file = Some(value.into()),
    }
    Ok(rest)
}

/// Whether the daemon has a flag with this name.
pub fn is_flag(name: &str) -> bool {
    name == CONFIG || key_of(name).is_some()
}

/// The names of all flags.
pub fn names() -> impl Iterator<Item = &'static str> + Clone {
    KEYS.iter().filter_map(|key| key.flag.as_ref().map(|flag| flag.name)).chain([CONFIG])
}

/// The text of `--help` of a command that starts the daemon.
pub fn help(command: &str) -> String {
    let mut text = format!(
        "{command} [FLAGS]: run the daemon until SIGTERM; pods keep running\n\n  {CONFIG} FILE\n      Default: {DEFAULT_FILE}; \
         drop-ins in conf.d beside it.\n"
    );
    for key in KEYS {
        if let Some(flag) = &key.flag {
            // Writing to a `String` does not fail.
            let _ = write!(
                text,
                "  {} {}\n      {} Default: {}.\n",
                flag.name, flag.value, key.text, key.default
            );
        }
    }
    text.push_str("\nSIGHUP reloads what can be reloaded, SIGUSR1 logs what the daemon holds.\n");
    text
}

/// The message about an unknown word, with the known one that it resembles.
pub fn unknown<'a>(what: &str, word: &str, known: impl Iterator<Item = &'a str> + Clone) -> String {
    match suggest::nearest(word, known) {
        Some(near) => format!("unknown {what} `{word}`, did you mean `{near}`?"),
        None => format!("unknown {what} `{word}`; --help lists what there is"),
    }
}

fn key_of(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.flag.as_ref().is_some_and(|flag| flag.name == name))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{help, is_flag, names, parse};

    #[test]
    fn flags_become_sources() {
        let sources =
            parse(&["--config", "/c", "--root=/r", "--cni-bin-dir", "/a", "--cni-bin-dir=/b"]).unwrap();
        assert_eq!(sources.file.as_deref(), Some(Path::new("/c")));
        let flags: Vec<_> = sources.flags.iter().map(|(key, value)| (key.name, value.as_str())).collect();
        assert_eq!(flags, [("root", "/r"), ("cni.bin_dirs", "/a"), ("cni.bin_dirs", "/b")]);
    }

    #[test]
    fn errors_name_the_invalid_argument() {
        for (words, expected) in [
            (&["--rot", "/x"][..], "unknown flag `--rot`, did you mean `--root`?"),
            (&["--root"], "--root: its value is missing"),
            (&["extra"], "unknown flag `extra`"),
        ] {
            let error = parse(words).unwrap_err();
            assert!(error.starts_with(expected), "{words:?}: {error}");
        }
    }

    #[test]
    fn every_flag_is_in_the_help() {
        let text = help("coracled");
        for flag in ["--config", "--listen", "--root", "--state"].into_iter().chain(names()) {
            assert!(is_flag(flag) && text.contains(&format!("  {flag} ")), "{flag}");
        }
    }
}
