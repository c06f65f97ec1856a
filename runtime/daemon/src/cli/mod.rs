//! The command line as a value: what to do, or what is wrong with what was typed. Nothing is done here.
//! Flags of `serve` come from the table of configuration keys; help, man pages and completions from that one and [`ABOUT`].

#[cfg(test)]
mod pages;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::PathBuf;

use crate::config::{self, KEYS, Key, Sources};

/// What `coracle` was asked to do.
#[derive(Debug)]
pub(crate) enum Command {
    /// Be the daemon.
    Serve(Sources),
    /// Say what this host has and lacks for a daemon with this configuration.
    Check {
        /// The configuration.
        sources: Sources,
        /// For programs.
        as_json: bool,
    },
    /// Print the default configuration file.
    ConfigDefault,
    /// Say what is wrong with a configuration.
    ConfigCheck(Sources),
    /// Something with images, through the running daemon: the words after `image`, and the configuration that says
    /// where the daemon is.
    Image(Vec<String>, Sources),
    /// Print the version.
    Version,
    /// Print this text.
    Help(String),
}

/// What is wrong with what was typed, for stderr; exit code 2.
pub(crate) type Usage = String;

/// Exit code for a command line that cannot be understood, as shells use it.
pub(crate) const EXIT_USAGE: u8 = 2;

/// A command as people see it.
pub(crate) struct About {
    /// After `coracle`: a command, or a command and its own.
    pub(crate) words: &'static str,
    /// What follows it.
    pub(crate) arguments: &'static str,
    /// What it does.
    pub(crate) text: &'static str,
}

const fn about(words: &'static str, arguments: &'static str, text: &'static str) -> About {
    About { words, arguments, text }
}

/// Every command, in the order of the overview.
#[rustfmt::skip]
pub(crate) const ABOUT: [About; 13] = [
    about("serve", "[FLAGS]", "be the daemon, until SIGTERM; pods run on"),
    about("check", "[--json] [FLAGS]", "what this host has and lacks, one line each; exit 1 if pods cannot run"),
    about("config default", "", "print the commented default configuration"),
    about("config check", "[FILE | FLAGS]", "name every mistake in a configuration, with its line; exit 1 if there is one"),
    about("image import", "FILE...", "take over image archives, docker's or OCI's; works offline"),
    about("image export", "IMAGE... -o FILE", "write images into one OCI archive"),
    about("image list", "[--pulling]", "every image, with what is pinned; --pulling: what is on its way"),
    about("image explain", "IMAGE...", "where an image is asked for: endpoints in order, credentials' source, TLS"),
    about("image check", "[--repair]", "look at every part of every image; --repair: mend or drop what is broken"),
    about("image pin", "IMAGE...", "keep images from garbage collection"),
    about("image unpin", "IMAGE...", "let go of them"),
    about("image remove", "[--force] IMAGE...", "remove images; --force: also pinned ones"),
    about("version", "", "print the version"),
];

const COMMANDS: [&str; 5] = ["serve", "check", "config", "image", "version"];

/// Understands the words after the program's name.
///
/// # Errors
/// One line that names the word.
pub(crate) fn parse(words: impl Iterator<Item = OsString>) -> Result<Command, Usage> {
    let words: Result<Vec<String>, OsString> = words.map(OsString::into_string).collect();
    let words = words.map_err(|word| format!("not UTF-8: {}", word.display()))?;
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let Some((command, rest)) = words.split_first() else {
        return Err(format!("a command is missing: {}; `coracle --help` says more", COMMANDS.join(", ")));
    };
    if matches!(*command, "--help" | "-h" | "help") {
        return Ok(Command::Help(overview()));
    }
    let wants_help = rest.iter().any(|word| matches!(*word, "--help" | "-h"));
    match *command {
        // `image` has commands of its own, which explain themselves.
        "image" => image(rest),
        "serve" | "check" | "config" | "version" if wants_help => Ok(Command::Help(help(command))),
        "serve" => sources(rest).map(Command::Serve),
        "check" => {
            let own: Vec<&str> = rest.iter().copied().filter(|word| *word != "--json").collect();
            let as_json = own.len() < rest.len();
            sources(&own).map(|sources| Command::Check { sources, as_json })
        }
        "config" => configuration(rest),
        "version" | "--version" | "-V" => no_more(rest, Command::Version),
        other => Err(unknown("command", other, COMMANDS.into_iter())),
    }
}

fn no_more(rest: &[&str], command: Command) -> Result<Command, Usage> {
    match rest.first() {
        None => Ok(command),
        Some(word) => Err(format!("{word}: nothing more is expected here")),
    }
}

fn configuration(rest: &[&str]) -> Result<Command, Usage> {
    match rest.split_first() {
        Some((&"default", rest)) => no_more(rest, Command::ConfigDefault),
        Some((&"check", [file])) if !file.starts_with('-') => {
            Ok(Command::ConfigCheck(Sources { file: Some(PathBuf::from(file)), flags: Vec::new() }))
        }
        Some((&"check", rest)) => sources(rest).map(Command::ConfigCheck),
        Some((other, _)) => Err(unknown("config command", other, ["default", "check"].into_iter())),
        None => Err("config: default or check".into()),
    }
}

/// Flags in front of the image command choose the daemon; what follows is that command's own.
fn image(mut rest: &[&str]) -> Result<Command, Usage> {
    let mut own = Sources::default();
    while rest.first().is_some_and(|word| word.starts_with("--") && *word != "--help") {
        rest = flag(rest, &mut own)?;
    }
    Ok(Command::Image(rest.iter().map(|word| (*word).to_owned()).collect(), own))
}

fn sources(mut rest: &[&str]) -> Result<Sources, Usage> {
    let mut sources = Sources::default();
    while !rest.is_empty() {
        rest = flag(rest, &mut sources)?;
    }
    Ok(sources)
}

/// Takes one `--flag VALUE` or `--flag=VALUE` off the front and returns the rest.
fn flag<'a, 'b>(words: &'a [&'b str], sources: &mut Sources) -> Result<&'a [&'b str], Usage> {
    let Some((word, rest)) = words.split_first() else { return Ok(words) };
    let (name, attached) = match word.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (*word, None),
    };
    let key = flagged(name);
    if key.is_none() && name != "--config" {
        return Err(unknown("flag", name, flags().chain(["--config"])));
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

fn flagged(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.flag.as_ref().is_some_and(|flag| flag.name == name))
}

fn flags() -> impl Iterator<Item = &'static str> + Clone {
    KEYS.iter().filter_map(|key| key.flag.as_ref().map(|flag| flag.name))
}

fn unknown<'a>(what: &str, word: &str, known: impl Iterator<Item = &'a str> + Clone) -> Usage {
    match config::nearest(word, known) {
        Some(near) => format!("unknown {what} `{word}`, did you mean `{near}`?"),
        None => format!("unknown {what} `{word}`; `coracle --help` lists what there is"),
    }
}

/// `coracle version`.
pub(crate) fn version() -> String {
    format!("coracle {}\n", env!("CARGO_PKG_VERSION"))
}

fn overview() -> String {
    let mut text = String::from("coracle runs pods for a kubelet, on small nodes\n\n");
    for About { words, arguments, text: what } in ABOUT {
        let left = format!("{words} {arguments}");
        let _ = writeln!(text, "  coracle {:<32}{what}", left.trim_end());
    }
    text.push_str("\n`coracle COMMAND --help` says more.\n");
    text
}

/// What the table says of `command` and its own commands; `serve` has flags to tell of.
fn help(command: &str) -> String {
    if command == "serve" {
        return serve_help();
    }
    let mut text = String::new();
    for About { words, arguments, text: what } in ABOUT {
        if words.split(' ').next() == Some(command) {
            let left = format!("{words} {arguments}");
            let _ = writeln!(text, "coracle {}: {what}", left.trim_end());
        }
    }
    match command {
        "check" => {
            text.push_str("FLAGS are those of `coracle serve`: they say where the daemon will work.\n")
        }
        "config" => {
            let _ = writeln!(text, "Without FILE: {}, and conf.d beside it.", config::DEFAULT_FILE);
        }
        _ => {}
    }
    text
}

fn serve_help() -> String {
    let mut text = format!(
        "coracle serve [FLAGS]: be the daemon, until SIGTERM; pods run on\n\n  --config FILE\n      Default: {}; drop-ins \
         in conf.d beside it.\n",
        config::DEFAULT_FILE
    );
    for key in KEYS {
        if let Some(flag) = &key.flag {
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

#[cfg(test)]
mod tests {
    use super::{Command, parse};
    use std::path::Path;

    fn words(line: &str) -> Result<Command, String> {
        parse(line.split_whitespace().map(Into::into))
    }

    #[test]
    fn commands_are_understood() {
        let Ok(Command::Serve(sources)) =
            words("serve --config /c --root=/r --cni-bin-dir /a --cni-bin-dir=/b")
        else {
            panic!("serve");
        };
        assert_eq!(sources.file.as_deref(), Some(Path::new("/c")));
        let flags: Vec<_> = sources.flags.iter().map(|(key, value)| (key.name, value.as_str())).collect();
        assert_eq!(flags, [("root", "/r"), ("cni.bin_dirs", "/a"), ("cni.bin_dirs", "/b")]);
        assert!(matches!(words("check"), Ok(Command::Check { as_json: false, .. })));
        let Ok(Command::Check { sources, as_json: true }) = words("check --root /r --json") else {
            panic!("check")
        };
        assert_eq!(sources.flags.len(), 1);
        assert!(matches!(words("config default"), Ok(Command::ConfigDefault)));
        let Ok(Command::ConfigCheck(sources)) = words("config check /etc/x.toml") else {
            panic!("config check")
        };
        assert_eq!(sources.file.as_deref(), Some(Path::new("/etc/x.toml")));
        let Ok(Command::Image(rest, sources)) = words("image --state /s list --json") else {
            panic!("image")
        };
        assert_eq!((rest.join(" ").as_str(), sources.flags.len()), ("list --json", 1));
        for line in ["version", "--version"] {
            assert!(matches!(words(line), Ok(Command::Version)), "{line}");
        }
    }

    #[test]
    fn every_flag_is_in_the_help() {
        let Ok(Command::Help(text)) = words("serve --help") else { panic!("help") };
        for flag in
            ["--config", "--listen", "--root", "--state", "--nri-socket", "--cgroup-parent", "--cni-conf-dir"]
                .into_iter()
                .chain(super::flags())
        {
            assert!(text.contains(&format!("  {flag} ")), "{flag}");
        }
        for line in ["--help", "help", "-h", "check --help", "config -h"] {
            assert!(matches!(words(line), Ok(Command::Help(_))), "{line}");
        }
    }

    #[test]
    fn mistakes_name_the_word() {
        let cases = [
            ("", "a command is missing"),
            ("serv", "unknown command `serv`, did you mean `serve`?"),
            ("serve --rot /x", "unknown flag `--rot`, did you mean `--root`?"),
            ("serve --root", "--root: its value is missing"),
            ("serve extra", "unknown flag `extra`"),
            ("version now", "now: nothing more"),
            ("config", "config: default or check"),
            ("config chek", "unknown config command `chek`, did you mean `check`?"),
        ];
        for (line, expected) in cases {
            let error = words(line).unwrap_err();
            assert!(error.starts_with(expected), "{line}: {error}");
        }
    }
}
