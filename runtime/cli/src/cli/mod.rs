//! Parses the command line into a value, or an error about the command line. The module executes no command. The flags of
//! the daemon are those of [`flags`]; help, man pages and completions are generated from them and [`ABOUT`].

#[cfg(test)]
mod man_tests;
#[cfg(test)]
mod pages_tests;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::PathBuf;

use coracle_client::Typed;
use coracle_setup::Program;

use coracle_config::{self as config, Sources, flags, flags::unknown};

/// The requested command.
#[derive(Debug)]
pub(crate) enum Command {
    /// `coracle serve`: become the daemon with these flags, which it parses itself.
    Serve(Vec<String>),
    /// `coracle check`: check this host for a daemon with this configuration.
    Check {
        /// Sources of the configuration.
        sources: Sources,
        /// Whether to print JSON.
        as_json: bool,
    },
    /// `coracle config default`: print the default configuration file.
    ConfigDefault,
    /// `coracle config check`: check a configuration.
    ConfigCheck(Sources),
    /// `coracle config status`: print which configuration the running daemon uses.
    ConfigStatus(Typed, Sources),
    /// `coracle pods`, `ps`, `images` or `stats`: print a list of the daemon's objects; the sources of the configuration locate
    /// the daemon.
    List(Typed, Sources),
    /// `coracle events`: print changes of pods and containers when they happen.
    Events(Typed, Sources),
    /// `coracle logs`: print the log of a container.
    Logs(Typed, Sources),
    /// `coracle exec`: run a command in a container.
    Exec(Typed, Sources),
    /// `coracle image …`: a command on images, which the running daemon executes.
    Image(Typed, Sources),
    /// `coracle why`: report the events of a pod, a container or an image.
    Why(Typed, Sources),
    /// `coracle support-dump`: write an archive for a report about a problem.
    SupportDump(Typed, Sources),
    /// `coracle k3s …` or `coracle kubeadm …`: configure this program to use coracle, and back.
    Setup(Program, Typed, Sources),
    /// `coracle version`: print the version.
    Version,
    /// Print this help text.
    Help(String),
}

/// An error in the arguments, as text for stderr; the exit code is then 2.
pub(crate) type Usage = String;

/// Documentation of a command.
pub(crate) struct About {
    /// The words after `coracle`: a command, or a command and its subcommand.
    pub(crate) words: &'static str,
    /// The arguments of the command as shown in help texts, without its options.
    pub(crate) arguments: &'static str,
    /// Description of the command.
    pub(crate) text: &'static str,
    /// The options of the command, which may be before or after its arguments, in any order.
    pub(crate) options: &'static [Opt],
}

/// An option of a command.
#[derive(Debug)]
pub(crate) struct Opt {
    /// Long name of the option with its dashes.
    pub(crate) name: &'static str,
    /// Short name of the option, one letter with its dash; empty if there is none.
    pub(crate) short: &'static str,
    /// Placeholder for the value of the option in help texts; empty if the option has no value.
    pub(crate) value: &'static str,
    /// Effect of the option, for help texts.
    pub(crate) text: &'static str,
}

const fn about(
    words: &'static str,
    arguments: &'static str,
    options: &'static [Opt],
    text: &'static str,
) -> About {
    About { words, arguments, text, options }
}

const fn opt(name: &'static str, short: &'static str, value: &'static str, text: &'static str) -> Opt {
    Opt { name, short, value, text }
}

const fn by_state(value: &'static str) -> Opt {
    opt("--state", "-s", value, "only in this state; --state PATH, with a slash, is the daemon's directory")
}

const FORM: Opt = opt("--output", "-o", "FORM", "table, wide, json or yaml; the objects are those of crictl");
const IDS: Opt = opt("--quiet", "-q", "", "IDs only");
const NO_TRUNC: Opt = opt("--no-trunc", "", "", "complete IDs");
const BY_ID: Opt = opt("--id", "", "ID", "only the one with this ID, or the start of it");
const BY_NAME: Opt =
    opt("--name", "", "TEXT", "only where this is part of the name; ^ stands for its start, $ for its end");
const BY_NAMESPACE: Opt = opt("--namespace", "", "TEXT", "only where this is part of the namespace");
const BY_POD_STATE: Opt = by_state("POD-STATE");
const BY_CONTAINER_STATE: Opt = by_state("CONTAINER-STATE");
const BY_LABEL: Opt = opt("--label", "", "NAME=VALUE", "only with this label; repeatable");
const BY_POD: Opt = opt("--pod", "-p", "POD", "only of this pod: the start of its ID, POD, or NAMESPACE/POD");
const LAST: Opt = opt("--last", "-n", "COUNT", "only so many, the newest ones in any state");
const LATEST: Opt = opt("--latest", "-l", "", "only the newest one, in any state");

const AS_JSON: Opt = opt("--output", "-o", "FORMAT", "text or json: an array with one object for each line");
const DRY_RUN: Opt = opt("--dry-run", "-n", "", "print the changes, and make none");
const NO_IMAGES: Opt =
    opt("--no-images", "", "", "leave the images of the old containerd; they are pulled again");
const HOST_ROOT: Opt = opt("--host-root", "", "DIR", "root directory of the node's files; / unless told");
const OBJECT: Opt = opt("--output", "-o", "FORMAT", "text or json: one object");

const QUIET: Opt = opt("--quiet", "-q", "", "names only");

/// The documentation of all commands, in the order of the overview.
#[rustfmt::skip]
pub(crate) const ABOUT: [About; 35] = [
    about("serve", "[FLAGS]", &[], "run the daemon until SIGTERM; pods keep running after it"),
    about("check", "[--json] [FLAGS]", &[], "what this host has and lacks, one line each; exit 1 if pods cannot run"),
    about("config default", "", &[], "print the commented default configuration"),
    about("config check", "[FILE | FLAGS]", &[], "name every mistake in a configuration, with its line; exit 1 if there is one"),
    about("config status", "", &[OBJECT], "which files the daemon has read, what has changed since, and what the last reload did; exit 1 if the files are not in force"),
    about("why", "NAME", &[], "what happened to a pod, a container or an image, why, and what to do; also without the daemon"),
    about("support-dump", "FILE", &[], "write an archive for a report about a problem, without secrets; `-` is standard output"),
    about("k3s enable", "", &[DRY_RUN, NO_IMAGES, HOST_ROOT, OBJECT], "configure this node's k3s to use coracle; prints what to run afterwards"),
    about("k3s disable", "", &[DRY_RUN, HOST_ROOT, OBJECT], "restore the configuration from before `coracle k3s enable`"),
    about("k3s status", "", &[HOST_ROOT, OBJECT], "which parts of k3s' configuration are in place; exit 1 unless all are"),
    about("kubeadm enable", "", &[DRY_RUN, NO_IMAGES, HOST_ROOT, OBJECT], "configure the kubelet of kubeadm to use coracle; prints what to run afterwards"),
    about("kubeadm disable", "", &[DRY_RUN, HOST_ROOT, OBJECT], "restore the configuration from before `coracle kubeadm enable`"),
    about("kubeadm status", "", &[HOST_ROOT, OBJECT], "which parts of the kubelet's configuration are in place; exit 1 unless all are"),
    about("pods", "", &[opt("--all", "-a", "", "also pods that are being created or removed, which the CRI does not list"), BY_ID, BY_NAME, BY_NAMESPACE, BY_POD_STATE, BY_LABEL,
        LAST, LATEST, IDS, NO_TRUNC, FORM], "pod sandboxes, newest first"),
    about("ps", "", &[opt("--all", "-a", "", "also containers that do not run"), BY_ID, BY_NAME, BY_NAMESPACE, BY_CONTAINER_STATE, BY_LABEL, BY_POD,
        opt("--image", "", "IMAGE", "only of this image: part of its name, or the start of its ID"), LAST, LATEST, IDS, NO_TRUNC, FORM],
        "running containers, newest first"),
    about("images", "[IMAGE]", &[IDS, NO_TRUNC, FORM], "images, or those with this part of a name or start of an ID"),
    about("stats", "", &[BY_ID, BY_NAME, BY_NAMESPACE, BY_LABEL, BY_POD, opt("--seconds", "", "SECONDS", "time for the measurement of CPU usage; 1 unless told"),
        IDS, NO_TRUNC, FORM], "CPU time, memory, writable layer and swap of running containers"),
    about("events", "", &[opt("--output", "-o", "FORMAT", "text or json: one object a line")], "changes of pods and containers as they happen, until interrupted"),
    about("logs", "CONTAINER", &[opt("--follow", "-f", "", "print new lines while the container runs, also after the file was rotated"),
        opt("--tail", "", "COUNT", "only so many lines, the last ones"),
        opt("--since", "", "TIME", "only from this time on: RFC 3339, or a duration such as 10m before now"),
        opt("--timestamps", "-t", "", "the time in front of each line")], "what a container wrote: by its ID, CONTAINER, POD/CONTAINER or NAMESPACE/POD/CONTAINER"),
    about("exec", "CONTAINER COMMAND...", &[opt("--interactive", "-i", "", "standard input goes to the command"),
        opt("--tty", "-t", "", "the command has a terminal")], "run a command in a container, with its exit code; options stand before CONTAINER"),
    about("image import", "FILE...", &[AS_JSON], "import image archives of docker or OCI tools, also offline; `-` is standard input"),
    about("image take-over", "", &[opt("--from", "", "DIR", "root directory of the containerd; needed if there are several"),
        opt("--namespace", "", "NAMESPACE", "namespace of the images; k8s.io unless told"),
        opt("--dry-run", "-n", "", "print what would be imported"), AS_JSON],
        "import the images of the containerd that this node used before, without pulling them again"),
    about("image bundle", "--store DIR FILE...", &[opt("--store", "", "DIR", "the new directory")],
        "make an additional store of image archives, for the system's image of a node; works without the daemon"),
    about("image export", "IMAGE... -o FILE", &[opt("--output", "-o", "FILE", "the archive; `-` is standard output")],
        "write images into one OCI archive"),
    about("image pull", "IMAGE...", &[AS_JSON], "pull images from their registries, with the credentials of the node's files"),
    about("image list", "", &[opt("--pulling", "", "", "pulls in progress instead"), QUIET, AS_JSON], "every image, and whether it is pinned"),
    about("image df", "", &[AS_JSON], "how much space images use, and how much is free"),
    about("image explain", "IMAGE...", &[AS_JSON], "where an image is pulled from: endpoints in order, source of credentials, TLS"),
    about("image check", "", &[opt("--repair", "", "", "repair what is damaged, or remove it"), opt("--policy", "", "", "judge the images by image.policy instead"), AS_JSON], "verify every part of every image"),
    about("image tag", "IMAGE NAME", &[AS_JSON], "give an image one more name"),
    about("image pin", "IMAGE...", &[AS_JSON], "keep images from garbage collection"),
    about("image unpin", "IMAGE...", &[AS_JSON], "allow garbage collection of images again"),
    about("image remove", "IMAGE...", &[opt("--force", "-f", "", "also pinned images"), AS_JSON], "remove images"),
    about("image prune", "", &[AS_JSON], "remove every image that is not pinned and that no container uses"),
    about("version", "", &[], "print version, commit and target, and the versions of monitors and interfaces"),
];

const COMMANDS: [&str; 16] = [
    "serve",
    "check",
    "config",
    "why",
    "support-dump",
    "k3s",
    "kubeadm",
    "pods",
    "ps",
    "images",
    "stats",
    "events",
    "logs",
    "exec",
    "image",
    "version",
];

/// Names of commands whose second word is a command with its own options.
const GROUPS: [&str; 3] = ["k3s", "kubeadm", "image"];

/// Names of commands of one word that have their own options.
const OWN: [&str; 9] = ["why", "support-dump", "pods", "ps", "images", "stats", "events", "logs", "exec"];

/// Parses the arguments after the program's name.
///
/// # Errors
/// One line that names the invalid argument.
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
    // What follows a container is a command with options of its own.
    let own_words = rest.iter().take_while(|word| *command != "exec" || word.starts_with('-'));
    let wants_help = own_words.clone().any(|word| matches!(*word, "--help" | "-h"));
    match *command {
        _ if GROUPS.contains(command) && (wants_help || rest.first() == Some(&"help")) => {
            Ok(Command::Help(group_help(command, rest)))
        }
        "image" => group("image", rest).map(|(command, sources)| Command::Image(command, sources)),
        "k3s" => group("k3s", rest).map(|(command, sources)| Command::Setup(Program::K3s, command, sources)),
        "kubeadm" => group("kubeadm", rest)
            .map(|(command, sources)| Command::Setup(Program::Kubeadm, command, sources)),
        _ if COMMANDS.contains(command) && wants_help => Ok(Command::Help(help(command))),
        "support-dump" => {
            own("support-dump", rest).map(|(command, sources)| Command::SupportDump(command, sources))
        }
        "why" => own("why", rest).map(|(command, sources)| Command::Why(command, sources)),
        "pods" => own("pods", rest).map(list),
        "ps" => own("ps", rest).map(list),
        "images" => own("images", rest).map(list),
        "stats" => own("stats", rest).map(list),
        "events" => own("events", rest).map(|(command, sources)| Command::Events(command, sources)),
        "logs" => own("logs", rest).map(|(command, sources)| Command::Logs(command, sources)),
        "exec" => own("exec", rest).map(|(command, sources)| Command::Exec(command, sources)),
        "serve" => Ok(Command::Serve(rest.iter().map(|&word| word.to_owned()).collect())),
        "check" => {
            let own: Vec<&str> = rest.iter().copied().filter(|word| *word != "--json").collect();
            let as_json = own.len() < rest.len();
            flags::parse(&own).map(|sources| Command::Check { sources, as_json })
        }
        "config" => configuration(rest),
        "version" | "--version" | "-V" => no_more(rest, Command::Version),
        other => Err(unknown("command", other, COMMANDS.into_iter())),
    }
}

fn list((command, sources): (Typed, Sources)) -> Command {
    Command::List(command, sources)
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
        Some((&"check", rest)) => flags::parse(rest).map(Command::ConfigCheck),
        Some((&"status", _)) => {
            group("config", rest).map(|(command, sources)| Command::ConfigStatus(command, sources))
        }
        Some((other, _)) => Err(unknown("config command", other, ["default", "check", "status"].into_iter())),
        None => Err("config: default, check or status".into()),
    }
}

/// The commands of a group, such as `image`, by their second word.
fn commands_of(group: &str) -> impl Iterator<Item = (&'static str, &'static About)> + Clone {
    let second = move |about: &'static About| about.words.strip_prefix(group)?.strip_prefix(' ');
    ABOUT.iter().filter_map(move |about| Some((second(about)?, about)))
}

/// Parses a command of a group.
fn group(name: &'static str, rest: &[&str]) -> Result<(Typed, Sources), Usage> {
    words(name, None, Typed::default(), rest)
}

/// Parses a command of one word.
fn own(name: &'static str, rest: &[&str]) -> Result<(Typed, Sources), Usage> {
    let about = ABOUT.iter().find(|about| about.words == name);
    words(name, about, Typed { name, ..Typed::default() }, rest)
}

/// Parses flags that choose the daemon, the command's own options and its arguments, in any order. If `about` is `None`, the
/// first word that is not a flag is a command of the group `group`.
fn words(
    group: &'static str,
    mut about: Option<&'static About>,
    mut command: Typed,
    mut rest: &[&str],
) -> Result<(Typed, Sources), Usage> {
    let mut own = Sources::default();
    while let Some((word, more)) = rest.split_first() {
        // `-` alone is an argument: standard input.
        if word.len() > 1 && word.starts_with('-') {
            if let Some((first, last)) = about.and_then(|about| letters(about, word)) {
                command.flags.extend(first.iter().map(|option| option.name));
                rest = take_option(last, last.short, more, &mut command)?;
                continue;
            }
            rest = match about.and_then(|about| option(about, word, more.first())) {
                Some(found) => take_option(found, word, more, &mut command)?,
                None => image_flag(rest, about, &mut own)?,
            };
            continue;
        }
        match about {
            Some(about) if about.words == "exec" => {
                command.arguments.push((*word).to_owned());
                // A pair of dashes may stand in front of the command, as in kubectl.
                let words = more.strip_prefix(&["--"]).unwrap_or(more);
                command.arguments.extend(words.iter().map(|&word| word.to_owned()));
                return Ok((command, own));
            }
            Some(_) => command.arguments.push((*word).to_owned()),
            None => {
                let found = commands_of(group).find(|(name, _)| name == word);
                let names = commands_of(group).map(|(name, _)| name);
                let (name, found) = found.ok_or_else(|| unknown(&format!("{group} command"), word, names))?;
                (command.name, about) = (name, Some(found));
            }
        }
        rest = more;
    }
    match about {
        Some(_) => Ok((command, own)),
        None => {
            let names: Vec<_> = commands_of(group).map(|(name, _)| name).collect();
            Err(format!(
                "{group}: a command is missing: {}; `coracle {group} --help` says more",
                names.join(", ")
            ))
        }
    }
}

/// The option that `word` is, with or without a value after an equals sign; `None` if it is none of the command's options.
/// `next` is the following word.
fn option(about: &About, word: &str, next: Option<&&str>) -> Option<&'static Opt> {
    let (name, value) =
        word.split_once('=').map_or((word, next.copied()), |(name, value)| (name, Some(value)));
    let found = about.options.iter().find(|option| option.name == name || option.short == name)?;
    // crictl's filter has the name of the daemon's flag; no state has a slash, and every directory of a daemon.
    let is_flag = name == "--state" && value.is_some_and(|value| value.contains('/'));
    (!is_flag).then_some(found)
}

/// The options in a word such as `-aqo`: letters of options of this command, of which only the last one may have a value.
/// `None` if the word has another form.
fn letters(about: &About, word: &str) -> Option<(Vec<&'static Opt>, &'static Opt)> {
    let letters = word.strip_prefix('-').filter(|letters| letters.len() > 1 && !letters.starts_with('-'))?;
    let short = |letter: char| about.options.iter().find(|option| option.short.chars().eq(['-', letter]));
    let mut found: Vec<&'static Opt> = letters.chars().map(short).collect::<Option<_>>()?;
    let last = found.pop()?;
    found.iter().all(|option| option.value.is_empty()).then_some((found, last))
}

/// Adds an option to the command; returns the words after it.
fn take_option<'a, 'b>(
    option: &'static Opt,
    word: &str,
    more: &'a [&'b str],
    command: &mut Typed,
) -> Result<&'a [&'b str], Usage> {
    match (option.value, word.split_once('='), more.split_first()) {
        ("", None, _) => {
            command.flags.push(option.name);
            Ok(more)
        }
        ("", Some(_), _) => Err(format!("{}: takes no value", option.name)),
        (_, Some((_, value)), _) => {
            command.values.push((option.name, value.to_owned()));
            Ok(more)
        }
        (_, None, Some((value, behind))) => {
            command.values.push((option.name, (*value).to_owned()));
            Ok(behind)
        }
        (_, None, None) => Err(format!("{}: its value is missing", option.name)),
    }
}

/// Parses a flag that chooses the daemon. For the error about an unknown flag, it is compared with the command's options, too.
fn image_flag<'a, 'b>(
    words: &'a [&'b str],
    about: Option<&About>,
    own: &mut Sources,
) -> Result<&'a [&'b str], Usage> {
    let name = words.first().map_or("", |word| word.split_once('=').map_or(*word, |(name, _)| name));
    if flags::is_flag(name) {
        return flags::take(words, own);
    }
    let options = about.into_iter().flat_map(|about| about.options.iter().map(|option| option.name));
    Err(unknown("option", name, flags::names().chain(options)))
}

/// The text of `--help` of a group, or of one of its commands.
fn group_help(group: &str, rest: &[&str]) -> String {
    let asked = commands_of(group).find(|(name, _)| rest.contains(name));
    let mut text = String::new();
    for (name, about) in commands_of(group) {
        if asked.is_none_or(|(asked, _)| asked == name) {
            describe(&mut text, about);
        }
    }
    text.push_str(&note(group));
    text
}

/// Text after the description of a command that has its own options.
const WHERE_THE_DAEMON_IS: &str =
    "Flags of coracled, such as --config and --state, say where the daemon is.\n";

/// Appends the description of a command and its options.
fn describe(text: &mut String, about: &About) {
    let left = format!("{} {}", about.words, about.arguments);
    let _ = writeln!(text, "coracle {}: {}", left.trim_end(), about.text);
    for Opt { name, short, value, text: meaning } in about.options {
        let names = if short.is_empty() { (*name).to_owned() } else { format!("{short}, {name}") };
        let _ = writeln!(text, "    {:<27}  {meaning}", format!("{names} {value}").trim_end());
    }
}

fn overview() -> String {
    let mut text = String::from("coracle runs pods for a kubelet, on small nodes\n\n");
    for About { words, arguments, text: what, .. } in ABOUT {
        let left = format!("{words} {arguments}");
        let _ = writeln!(text, "  coracle {:<32}{what}", left.trim_end());
    }
    text.push_str("\n`coracle COMMAND --help` says more.\n");
    text
}

/// The help text of `command` and its subcommands; for `serve` also the flags.
fn help(command: &str) -> String {
    if command == "serve" {
        return flags::help("coracle serve") + &note(command);
    }
    let mut text = String::new();
    for about in ABOUT {
        if about.words.split(' ').next() == Some(command) {
            describe(&mut text, &about);
        }
    }
    text.push_str(&note(command));
    text
}

/// The lines of a help text below the options of the command; empty for commands without such lines.
fn note(command: &str) -> String {
    match command {
        _ if OWN.contains(&command) || GROUPS.contains(&command) => WHERE_THE_DAEMON_IS.to_owned(),
        "serve" => "The process becomes coracled, which parses the flags.\n".to_owned(),
        "check" => "FLAGS are those of coracled: they say where the daemon will work.\n".to_owned(),
        "config" => format!("Without FILE: {}, and conf.d beside it.\n", config::DEFAULT_FILE),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::{Command, parse};
    use std::path::Path;

    fn words(line: &str) -> Result<Command, String> {
        parse(line.split_whitespace().map(Into::into))
    }

    #[test]
    fn commands_are_parsed() {
        let Ok(Command::Serve(flags)) = words("serve --config /c --root=/r") else { panic!("serve") };
        assert_eq!(flags, ["--config", "/c", "--root=/r"]);
        assert!(matches!(words("check"), Ok(Command::Check { as_json: false, .. })));
        let Ok(Command::Check { sources, as_json: true }) = words("check --root /r --json") else {
            panic!("check")
        };
        assert_eq!(sources.flags.len(), 1);
        assert!(matches!(words("config default"), Ok(Command::ConfigDefault)));
        let Ok(Command::ConfigStatus(command, sources)) = words("config status --state /s -o json") else {
            panic!("config status")
        };
        assert_eq!((command.name, sources.flags.len(), command.values.len()), ("status", 1, 1));
        let Ok(Command::ConfigCheck(sources)) = words("config check /etc/x.toml") else {
            panic!("config check")
        };
        assert_eq!(sources.file.as_deref(), Some(Path::new("/etc/x.toml")));
        for line in ["image --state /s remove --force a b", "image remove a --state=/s b -f"] {
            let Ok(Command::Image(command, sources)) = words(line) else { panic!("{line}") };
            let found = (command.name, command.arguments.join(" "), command.flags, sources.flags.len());
            assert_eq!(found, ("remove", "a b".to_owned(), vec!["--force"], 1), "{line}");
        }
        let Ok(Command::Image(command, _)) = words("image import - -o json") else { panic!("import") };
        assert_eq!(
            (command.arguments.as_slice(), command.value("--output")),
            (["-".to_owned()].as_slice(), Some("json"))
        );
        let Ok(Command::Setup(program, command, _)) = words("k3s enable -n --host-root /r -o json") else {
            panic!("k3s enable")
        };
        assert_eq!(
            (program.name(), command.name, command.value("--host-root")),
            ("k3s", "enable", Some("/r"))
        );
        assert_eq!((command.flags, command.values.len()), (vec!["--dry-run"], 2));
        let Ok(Command::Why(command, sources)) = words("why --state /s default/web") else { panic!("why") };
        assert_eq!((command.name, command.arguments.len(), sources.flags.len()), ("why", 1, 1));
        let Ok(Command::Exec(command, sources)) = words("exec --state /s -it app -- sh -c --help") else {
            panic!("exec")
        };
        assert_eq!((command.flags, sources.flags.len()), (vec!["--interactive", "--tty"], 1));
        assert_eq!(command.arguments, ["app", "sh", "-c", "--help"]);
        let Ok(Command::List(command, sources)) = words("ps -aqo json --state /s --state exited") else {
            panic!("ps")
        };
        assert_eq!((command.flags, sources.flags.len()), (vec!["--all", "--quiet"], 1));
        assert_eq!(command.values, [("--output", "json".to_owned()), ("--state", "exited".to_owned())]);
        for line in ["version", "--version"] {
            assert!(matches!(words(line), Ok(Command::Version)), "{line}");
        }
    }

    #[test]
    fn help_is_an_argument_of_every_command() {
        for line in [
            "serve --help",
            "--help",
            "help",
            "-h",
            "check --help",
            "config -h",
            "image --help",
            "image help",
            "image list --help",
            "k3s --help",
            "kubeadm help",
            "why --help",
            "ps -a --help",
            "exec -i --help",
            "logs -h",
        ] {
            assert!(matches!(words(line), Ok(Command::Help(_))), "{line}");
        }
    }

    #[test]
    fn errors_name_the_invalid_argument() {
        let cases = [
            ("", "a command is missing"),
            ("serv", "unknown command `serv`, did you mean `serve`?"),
            ("check --rot /x", "unknown flag `--rot`, did you mean `--root`?"),
            ("config check --root", "--root: its value is missing"),
            ("version now", "now: nothing more"),
            ("config", "config: default, check or status"),
            ("config status --outptu json", "unknown option `--outptu`, did you mean `--output`?"),
            ("image lst", "unknown image command `lst`, did you mean `list`?"),
            ("image", "image: a command is missing"),
            ("k3s", "k3s: a command is missing: enable, disable, status"),
            ("kubeadm enabel", "unknown kubeadm command `enabel`, did you mean `enable`?"),
            ("k3s status --dry-run", "unknown option `--dry-run`"),
            ("image remove --fore x", "unknown option `--fore`, did you mean `--force`?"),
            ("image export x -o", "--output: its value is missing"),
            ("ps -aqx", "unknown option `-aqx`"),
            ("logs --tial 3", "unknown option `--tial`, did you mean `--tail`?"),
            ("exec --ty app ls", "unknown option `--ty`, did you mean `--tty`?"),
            ("why --stat /s x", "unknown option `--stat`, did you mean `--state`?"),
            ("config chek", "unknown config command `chek`, did you mean `check`?"),
        ];
        for (line, expected) in cases {
            let error = words(line).unwrap_err();
            assert!(error.starts_with(expected), "{line}: {error}");
        }
    }
}
