//! Generates the man pages of packaging/man from the tables of the parser, which also make the texts of `--help`: one of
//! each program, one of each command, `coracle-image-pull(1)` for `coracle image pull`, one of each group of commands, and one
//! of the configuration. Only tests use this file: see [`super::pages_tests`].

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;

use super::pages_tests::{Shown, WITH_FLAGS, compare, flags, packaging, spellings};
use super::{ABOUT, About, COMMANDS, Command, GROUPS, OWN, commands_of, note, parse};
use coracle_config::{DEFAULT_FILE, KEYS};
use coracle_preflight::DAEMON;

/// Words before which a second word is the command.
fn groups() -> impl Iterator<Item = &'static str> {
    GROUPS.into_iter().chain(["config"])
}

/// Name of the page of a command or a group.
fn page_of(words: &str) -> String {
    format!("coracle-{}", words.replace(' ', "-"))
}

/// Escapes text for roff, including lines that would start with a macro.
fn roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

/// Appends a tagged paragraph of roff.
fn tagged(page: &mut String, tag: &str, rest: &str, text: &str) {
    let rest = if rest.is_empty() { String::new() } else { format!(" {}", roff(rest)) };
    let _ = write!(page, ".TP\n\\fB{}\\fR{rest}\n{}\n", roff(tag), roff(text));
}

fn head(name: &str, section: u32, line: &str) -> String {
    format!(
        ".\\\" Made from the tables of the program: see runtime/cli/src/cli/man_tests.rs.\n.TH {} {section} \"\" \"coracle {}\"\n\
         .SH NAME\n{} \\- {}\n",
        roff(&name.to_uppercase()),
        env!("CARGO_PKG_VERSION"),
        roff(name),
        roff(line)
    )
}

/// Appends a synopsis of commands, one a line.
fn synopsis<'a>(page: &mut String, commands: impl Iterator<Item = &'a About>) {
    page.push_str(".SH SYNOPSIS\n");
    for (index, About { words, arguments, options, .. }) in commands.enumerate() {
        page.push_str(if index > 0 { ".br\n" } else { "" });
        let _ = write!(page, "\\fBcoracle {}\\fR", roff(words));
        let options = if options.is_empty() { "" } else { " [OPTIONS]" };
        let arguments = if arguments.is_empty() { String::new() } else { format!(" {}", roff(arguments)) };
        let _ = writeln!(page, "{options}{arguments}");
    }
}

/// Appends references to pages, separated by commas.
fn see_also(page: &mut String, pages: &[(String, u32)]) {
    page.push_str(".SH SEE ALSO\n");
    for (index, (name, section)) in pages.iter().enumerate() {
        let comma = if index + 1 < pages.len() { "," } else { "" };
        let _ = writeln!(page, ".BR {} ({section}){comma}", roff(name));
    }
}

fn coracle_1() -> String {
    let mut page = head("coracle", 1, "the command line of a node that runs pods for a kubelet");
    synopsis(&mut page, ABOUT.iter());
    page.push_str(
        ".SH DESCRIPTION\ncoracle asks the daemon,\n.BR coracled (8),\nand checks and configures the node.\n.SH COMMANDS\n\
         Each command has a page with its options, which\n.B coracle COMMAND \\-\\-help\nprints, too.\n",
    );
    for About { words, text, .. } in ABOUT {
        let _ = write!(page, ".TP\n.BR {} (1)\n{}\n", roff(&page_of(words)), roff(text));
    }
    page.push_str(".SH EXIT STATUS\n0: it worked. 1: it did not, or pods cannot run, or there is a mistake. 2: the command line or ");
    page.push_str("the configuration cannot be understood.\n");
    see_also(&mut page, &[("coracle.toml".to_owned(), 5), (DAEMON.to_owned(), 8)]);
    page
}

fn coracled_8() -> String {
    let mut page = head(DAEMON, 8, "run pods for a kubelet, on small nodes");
    page.push_str(
        ".SH SYNOPSIS\n\\fBcoracled\\fR [FLAGS]\n.br\n\\fBcoracled\\fR \\-\\-help | \\-\\-version\n",
    );
    page.push_str(
        ".SH DESCRIPTION\ncoracled serves the Container Runtime Interface (CRI v1) on a unix socket. It may be \
         stopped, killed or upgraded at any time: pods run on, and the next daemon takes them over.\n",
    );
    serve_flags(&mut page);
    serve_surroundings(&mut page);
    page.push_str(".SH EXIT STATUS\n0: it was asked to end. 1: it could not start or failed. 2: the command line or the configuration cannot be understood.\n.SH FILES\n");
    for (name, text) in [
        (DEFAULT_FILE, "The configuration: see \\fBcoracle.toml\\fR(5)."),
        ("/var/lib/coracle", "Images, layers, records of pods."),
        ("/run/coracle", "The CRI socket, and what no reboot needs."),
    ] {
        let _ = write!(page, ".TP\n\\fI{}\\fR\n{text}\n", roff(name));
    }
    let others = [("coracle", 1), ("coracle.toml", 5), ("coracle-pod", 8), ("coracle-worker", 8)];
    see_also(&mut page, &others.map(|(name, section)| (name.to_owned(), section)));
    page
}

/// Appends the flags of the daemon.
fn serve_flags(page: &mut String) {
    page.push_str(".SH FLAGS\n");
    for Shown { name, value, text } in flags() {
        tagged(page, name, value, &text);
    }
}

/// Appends the daemon's signals and environment.
fn serve_surroundings(page: &mut String) {
    page.push_str(".SH SIGNALS\n");
    for (name, text) in [
        (
            "SIGTERM, SIGINT",
            "Running calls may complete within ten seconds; then the daemon ends. Pods keep running.",
        ),
        ("SIGHUP", "Reload the configuration. What needs a restart is named in the log."),
        ("SIGUSR1", "Log what the daemon holds: counts, pods, and what they wait for."),
    ] {
        tagged(page, name, "", text);
    }
    page.push_str(".SH ENVIRONMENT\n");
    for (name, text) in [
        ("NOTIFY_SOCKET", "Socket of systemd for the notification that the daemon is ready."),
        (
            "JOURNAL_STREAM",
            "Set by systemd: if stderr is that stream, messages are sent to the journal with their priority, and each of their keys is a field, such as CORACLE_POD.",
        ),
        (
            "WATCHDOG_USEC",
            "Interval in which systemd expects a sign of life; without it the daemon has no timer.",
        ),
    ] {
        tagged(page, name, "", text);
    }
}

/// The page of one command.
fn command_1(about: &About) -> String {
    let About { words, text, options, .. } = about;
    let mut page = head(&page_of(words), 1, text);
    synopsis(&mut page, [about].into_iter());
    let first = words.split(' ').next().unwrap_or_default();
    let _ = writeln!(page, ".SH DESCRIPTION\n{}.", roff(text));
    let note = if first == "config" && *words != "config check" { String::new() } else { note(first) };
    let _ = write!(page, "{}{}", if note.is_empty() { "" } else { ".PP\n" }, roff(&note));
    if !options.is_empty() {
        page.push_str(".SH OPTIONS\n");
        for option in *options {
            tagged(&mut page, &spellings(option).join(", "), option.value, option.text);
        }
    }
    if WITH_FLAGS.contains(words) && *words != "serve" {
        serve_flags(&mut page);
    }
    page.push_str(".SH EXIT STATUS\n");
    page.push_str(match *words {
        "exec" => "That of the command in the container. 1, too: the command was not run, or its exit status is not known. 2, too: the command line cannot be understood.\n",
        "serve" => "That of the daemon. 1, too: its program is not beside this one.\n",
        _ => "0: it worked. 1: it did not, or what it reports is not in order. 2: the command line or the configuration cannot be understood.\n",
    });
    let others = commands_of(first).filter(|(_, other)| other.words != *words);
    let others = others.map(|(_, other)| (page_of(other.words), 1));
    let mut pages: Vec<_> = others.collect();
    pages.sort();
    pages.insert(0, ("coracle".to_owned(), 1));
    if first == "config" {
        pages.push(("coracle.toml".to_owned(), 5));
    }
    if WITH_FLAGS.contains(&first) {
        pages.push((DAEMON.to_owned(), 8));
    }
    see_also(&mut page, &pages);
    page
}

/// The page of a group of commands.
fn group_1(group: &str) -> String {
    let names: Vec<_> = commands_of(group).map(|(name, _)| name).collect();
    let mut page = head(&page_of(group), 1, &format!("commands {}", names.join(", ")));
    synopsis(&mut page, commands_of(group).map(|(_, about)| about));
    page.push_str(".SH DESCRIPTION\nEach command has a page of its own.\n");
    for (_, about) in commands_of(group) {
        let _ = write!(page, ".TP\n.BR {} (1)\n{}\n", roff(&page_of(about.words)), roff(about.text));
    }
    see_also(&mut page, &[("coracle".to_owned(), 1)]);
    page
}

fn coracle_toml_5() -> String {
    let mut page = head("coracle.toml", 5, "configuration of coracle");
    let _ = write!(
        page,
        ".SH DESCRIPTION\n{} is TOML; every key is optional. Drop\\-ins in conf.d/*.toml beside it are merged over it in \
         lexical order, and a flag takes precedence over all of them. Keys marked (reload) follow a SIGHUP, others need a restart. \
         \\fBcoracle config check\\fR names every mistake.\n",
        roff(DEFAULT_FILE)
    );
    let mut section = None;
    for key in KEYS {
        let (table, name) = key.name.rsplit_once('.').unwrap_or(("", key.name));
        if section != Some(table) {
            let title = if table.is_empty() { "TOP-LEVEL KEYS".into() } else { format!("[{table}]") };
            let _ = writeln!(page, ".SH {}", roff(&title));
            section = Some(table);
        }
        let mark = if key.reloadable { " (reload)" } else { "" };
        let flag =
            key.flag.as_ref().map_or(String::new(), |flag| format!(" Flag: {} {}.", flag.name, flag.value));
        tagged(&mut page, name, &format!("= {}", key.default), &format!("{}{mark}{flag}", key.text));
    }
    see_also(&mut page, &[("coracle".to_owned(), 1), (DAEMON.to_owned(), 8)]);
    page
}

/// All generated pages: file name, text.
fn pages() -> Vec<(String, String)> {
    let mut pages = vec![
        ("coracle.1".to_owned(), coracle_1()),
        ("coracled.8".to_owned(), coracled_8()),
        ("coracle.toml.5".to_owned(), coracle_toml_5()),
    ];
    pages.extend(ABOUT.iter().map(|about| (format!("{}.1", page_of(about.words)), command_1(about))));
    pages.extend(groups().map(|group| (format!("{}.1", page_of(group)), group_1(group))));
    pages
}

#[test]
fn man_pages_are_those_of_the_tables() {
    for (name, expected) in pages() {
        compare(&format!("man/{name}"), &expected);
    }
}

/// A page of a command that was removed or renamed must not stay in the packages.
#[test]
fn every_file_is_generated_or_of_section_8() {
    let expected: BTreeSet<_> = pages().into_iter().map(|(name, _)| name).collect();
    for entry in fs::read_dir(packaging().join("man")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(expected.contains(&name) || name.ends_with(".8"), "man/{name} is of no command: remove it");
    }
}

/// The text of a page as a reader sees it: without macros, fonts and escapes.
fn plain(page: &str) -> String {
    let lines = page.lines().filter(|line| !line.starts_with(".\\\""));
    let lines = lines.map(|line| line.strip_prefix(".BR ").or(line.strip_prefix(".B ")).unwrap_or(line));
    let text: Vec<_> = lines.collect();
    let text = text.join("\n").replace("\\fB", "").replace("\\fI", "").replace("\\fR", "");
    text.replace("\\&", "").replace("\\-", "-").replace("\\e", "\\")
}

fn help(line: &str) -> String {
    let Ok(Command::Help(text)) = parse(line.split(' ').map(Into::into)) else { panic!("{line}") };
    text
}

/// Read from the files and from the texts of `--help`, not from the table of both.
#[test]
fn each_command_of_the_help_has_a_page_with_its_arguments_options_and_text() {
    let overview = help("--help");
    let lines: Vec<_> = overview.lines().filter_map(|line| line.strip_prefix("  coracle ")).collect();
    assert!(lines.len() >= COMMANDS.len(), "{overview}");
    for line in lines {
        let name: Vec<_> = line.split(' ').take_while(|word| word.starts_with(char::is_lowercase)).collect();
        let name = &name[..name.len().min(if groups().any(|group| group == name[0]) { 2 } else { 1 })];
        let file = packaging().join(format!("man/coracle-{}.1", name.join("-")));
        let page = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let page = plain(&page);
        let name = name.join(" ");
        let text = help(&format!("{name} --help"));
        let shown = text.lines().find(|line| line.starts_with(&format!("coracle {name}"))).unwrap();
        let (left, about) = shown.split_once(": ").unwrap();
        let (_, arguments) = left.split_at("coracle ".len() + name.len());
        assert!(page.contains(&format!("coracle {name}")) && page.contains(arguments), "{name}: {left}");
        assert!(page.contains(about.split("; pods keep").next().unwrap()), "{name}: {about}");
        let of_it = text.lines().skip_while(|line| *line != shown).skip(1);
        for option in of_it.take_while(|line| line.starts_with("    ")) {
            let (names, meaning) = option.trim().split_once("  ").unwrap_or((option.trim(), ""));
            let option = format!("{names}\n{}", meaning.trim());
            assert!(page.contains(&option), "{name}: {option}");
        }
    }
    for flag in help("serve --help").lines().filter_map(|line| line.strip_prefix("  --")) {
        let page = fs::read_to_string(packaging().join("man/coracled.8")).unwrap();
        assert!(plain(&page).contains(&format!("--{flag}\n")), "--{flag}");
    }
    assert!(OWN.iter().all(|own| packaging().join(format!("man/coracle-{own}.1")).exists()));
}
