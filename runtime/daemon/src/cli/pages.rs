//! The man pages and the completions of packaging/, made from the same tables as the parser. Only tests know this file, so
//! the program does not grow by it: `UPDATE=1 cargo test -p coracle pages` writes them anew, without it they must agree.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use super::{ABOUT, About, COMMANDS};
use crate::config::{DEFAULT_FILE, KEYS};

/// Commands that take the daemon's flags.
const WITH_FLAGS: [&str; 3] = ["serve", "check", "config check"];

/// A flag: its name, what its value is called, what it means.
struct Shown {
    name: &'static str,
    value: &'static str,
    text: String,
}

fn flags() -> Vec<Shown> {
    let text = format!("The configuration, instead of {DEFAULT_FILE}; drop-ins in conf.d beside it.");
    let mut flags = vec![Shown { name: "--config", value: "FILE", text }];
    for key in KEYS {
        if let Some(flag) = &key.flag {
            let text = format!("{} Default: {}.", key.text, key.default);
            flags.push(Shown { name: flag.name, value: flag.value, text });
        }
    }
    flags
}

/// Text for roff: its escapes, and no line that begins like a macro.
fn roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

/// A paragraph with a tag.
fn tagged(page: &mut String, tag: &str, rest: &str, text: &str) {
    let rest = if rest.is_empty() { String::new() } else { format!(" {}", roff(rest)) };
    let _ = write!(page, ".TP\n\\fB{}\\fR{rest}\n{}\n", roff(tag), roff(text));
}

fn head(name: &str, section: u32, line: &str) -> String {
    format!(
        ".\\\" Made from the tables of the program: see runtime/daemon/src/cli/pages.rs.\n.TH {} {section} \"\" \"coracle {}\"\n\
         .SH NAME\n{name} \\- {line}\n",
        name.to_uppercase(),
        env!("CARGO_PKG_VERSION")
    )
}

fn coracle_1() -> String {
    let mut page = head("coracle", 1, "run pods for a kubelet, on small nodes");
    page.push_str(".SH SYNOPSIS\n");
    for About { words, arguments, .. } in ABOUT {
        let _ = write!(page, "\\fBcoracle {words}\\fR {}\n.br\n", roff(arguments));
    }
    page.push_str(
        ".SH DESCRIPTION\ncoracle serves the Container Runtime Interface (CRI v1) on a unix socket. The daemon may be \
         stopped, killed or upgraded at any time: pods run on, and the next daemon takes them over.\n.SH COMMANDS\n",
    );
    for About { words, arguments, text } in ABOUT {
        tagged(&mut page, words, arguments, text);
    }
    page.push_str(".SH FLAGS\n");
    for Shown { name, value, text } in flags() {
        tagged(&mut page, name, value, &text);
    }
    page.push_str(".SH SIGNALS\n");
    for (name, text) in [
        (
            "SIGTERM, SIGINT",
            "Calls under way may end, for ten seconds at most; then the daemon ends. Pods run on.",
        ),
        ("SIGHUP", "Reload the configuration. What needs a restart is named in the log."),
        ("SIGUSR1", "Log what the daemon holds."),
    ] {
        tagged(&mut page, name, "", text);
    }
    page.push_str(".SH ENVIRONMENT\n");
    for (name, text) in [
        ("NOTIFY_SOCKET", "Where systemd is told that the daemon is ready."),
        (
            "WATCHDOG_USEC",
            "How often systemd wants to hear of the daemon at least; without it nothing wakes up.",
        ),
    ] {
        tagged(&mut page, name, "", text);
    }
    page.push_str(".SH EXIT STATUS\n0: it worked. 1: it did not, or pods cannot run, or there is a mistake. 2: the command line or ");
    page.push_str("the configuration cannot be understood.\n.SH FILES\n");
    for (name, text) in [
        (DEFAULT_FILE, "The configuration: see \\fBcoracle.toml\\fR(5)."),
        ("/var/lib/coracle", "Images, layers, records of pods."),
        ("/run/coracle", "The CRI socket, and what no reboot needs."),
    ] {
        let _ = write!(page, ".TP\n\\fI{}\\fR\n{text}\n", roff(name));
    }
    page.push_str(".SH SEE ALSO\n\\fBcoracle.toml\\fR(5)\n");
    page
}

fn coracle_toml_5() -> String {
    let mut page = head("coracle.toml", 5, "configuration of coracle");
    let _ = write!(
        page,
        ".SH DESCRIPTION\n{} is TOML; every key is optional. Drop\\-ins in conf.d/*.toml beside it are merged over it in \
         lexical order, and a flag beats them all. Keys marked (reload) follow a SIGHUP, others need a restart. \
         \\fBcoracle config check\\fR names every mistake.\n",
        roff(DEFAULT_FILE)
    );
    let mut section = None;
    for key in KEYS {
        let (table, name) = key.name.rsplit_once('.').unwrap_or(("", key.name));
        if section != Some(table) {
            let title = if table.is_empty() { "KEYS OF THE WHOLE".into() } else { format!("[{table}]") };
            let _ = writeln!(page, ".SH {title}");
            section = Some(table);
        }
        let mark = if key.reloadable { " (reload)" } else { "" };
        let flag =
            key.flag.as_ref().map_or(String::new(), |flag| format!(" Flag: {} {}.", flag.name, flag.value));
        tagged(&mut page, name, &format!("= {}", key.default), &format!("{}{mark}{flag}", key.text));
    }
    page.push_str(".SH SEE ALSO\n\\fBcoracle\\fR(1)\n");
    page
}

/// Words that may follow `command`: its own commands, and its flags.
fn followers(command: &str) -> (Vec<&'static str>, Vec<&'static str>) {
    let own = ABOUT.iter().filter_map(|about| about.words.split_once(' '));
    let own = own.filter(|(first, _)| *first == command).map(|(_, second)| second).collect();
    let mut words: Vec<&str> = Vec::new();
    if command == "check" {
        words.push("--json");
    }
    if WITH_FLAGS.contains(&command) {
        words.extend(flags().iter().map(|flag| flag.name));
    }
    (own, words)
}

/// What a value may be: how each shell asks for it.
enum Value {
    Path,
    Level,
    Other,
}

fn value(flag: &Shown) -> Value {
    match flag.value {
        "FILE" | "DIR" | "PATH" => Value::Path,
        "LEVEL" => Value::Level,
        _ => Value::Other,
    }
}

const LEVELS: &str = "error warn info debug";

fn bash() -> String {
    let names = |wanted: fn(&Value) -> bool| {
        let names: Vec<_> =
            flags().iter().filter(|flag| wanted(&value(flag))).map(|flag| flag.name).collect();
        names.join("|")
    };
    let mut text = format!(
        "# Completions of coracle for bash; made by runtime/daemon/src/cli/pages.rs.\n_coracle() {{\n\
         \x20   local word=${{COMP_WORDS[COMP_CWORD]}} words\n\
         \x20   case ${{COMP_WORDS[COMP_CWORD-1]}} in\n\
         \x20       {}) COMPREPLY=($(compgen -f -- \"$word\")); return ;;\n\
         \x20       {}) COMPREPLY=($(compgen -W \"{LEVELS}\" -- \"$word\")); return ;;\n\
         \x20       {}) COMPREPLY=(); return ;;\n\
         \x20   esac\n\
         \x20   case $COMP_CWORD:${{COMP_WORDS[1]}}:${{COMP_WORDS[2]}} in\n\
         \x20       1:*) words=\"{}\" ;;\n",
        names(|value| matches!(value, Value::Path)),
        names(|value| matches!(value, Value::Level)),
        names(|value| matches!(value, Value::Other)),
        COMMANDS.join(" ")
    );
    for command in COMMANDS {
        let (own, words) = followers(command);
        if !own.is_empty() {
            let _ = writeln!(text, "        2:{command}:*) words=\"{}\" ;;", own.join(" "));
        } else if !words.is_empty() {
            let _ = writeln!(text, "        *:{command}:*) words=\"{}\" ;;", words.join(" "));
        }
    }
    let (_, words) = followers("config check");
    let _ = writeln!(text, "        *:config:check) words=\"{}\" ;;", words.join(" "));
    text.push_str("        *:image:remove) words=\"--force\" ;;\n");
    text.push_str("        *:image:import) COMPREPLY=($(compgen -f -- \"$word\")); return ;;\n    esac\n");
    text.push_str("    COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n}\ncomplete -o filenames -F _coracle coracle\n");
    text
}

fn zsh() -> String {
    // In a specification brackets and colons have a meaning, in quotes quotes.
    let plain = |text: &str| text.replace('\'', "").replace('[', "(").replace(']', ")").replace(':', "\\:");
    let mut text = String::from(
        "#compdef coracle\n# Completions of coracle for zsh; made by runtime/daemon/src/cli/pages.rs.\n",
    );
    text.push_str("_coracle() {\n    local -a flags commands\n    flags=(\n");
    for flag in flags() {
        let action = match value(&flag) {
            Value::Path => "_files".into(),
            Value::Level => format!("({LEVELS})"),
            Value::Other => " ".into(),
        };
        let _ = writeln!(text, "        '*{}[{}]:{}:{action}'", flag.name, plain(&flag.text), flag.value);
    }
    text.push_str("    )\n    if (( CURRENT == 2 )); then\n        commands=(");
    text.push_str(&COMMANDS.join(" "));
    text.push_str(")\n        _describe command commands\n        return\n    fi\n    case $words[2] in\n");
    text.push_str(
        "        serve) _arguments '*: : ' $flags ;;\n        check) _arguments '*: : ' '--json' $flags ;;\n",
    );
    for command in ["config", "image"] {
        let _ = writeln!(
            text,
            "        {command})\n            if (( CURRENT == 3 )); then\n                commands=("
        );
        for about in ABOUT {
            if let Some((_, own)) = about.words.split_once(' ').filter(|(first, _)| *first == command) {
                let _ = writeln!(text, "                    '{own}:{}'", plain(about.text));
            }
        }
        text.push_str("                )\n                _describe command commands\n            else\n                _files\n");
        text.push_str("            fi ;;\n");
    }
    text.push_str("    esac\n}\n_coracle \"$@\"\n");
    text
}

fn fish() -> String {
    let plain = |text: &str| text.replace('\\', "\\\\").replace('\'', "\\'");
    let mut text = String::from(
        "# Completions of coracle for fish; made by runtime/daemon/src/cli/pages.rs.\ncomplete -c coracle -f\n",
    );
    for command in COMMANDS {
        let about = ABOUT.iter().find(|about| about.words == command).map_or("", |about| about.text);
        let _ =
            writeln!(text, "complete -c coracle -n __fish_use_subcommand -a {command} -d '{}'", plain(about));
    }
    for about in ABOUT {
        if let Some((first, own)) = about.words.split_once(' ') {
            let _ = writeln!(
                text,
                "complete -c coracle -n '__fish_seen_subcommand_from {first}' -a {own} -d '{}'",
                plain(about.text)
            );
        }
    }
    for flag in flags() {
        let action = match value(&flag) {
            Value::Path => "-rF".to_owned(),
            Value::Level => format!("-xa '{LEVELS}'"),
            Value::Other => "-x".into(),
        };
        let _ = writeln!(
            text,
            "complete -c coracle -n '__fish_seen_subcommand_from serve check' -l {} {action} -d '{}'",
            flag.name.trim_start_matches('-'),
            plain(&flag.text)
        );
    }
    text.push_str("complete -c coracle -n '__fish_seen_subcommand_from check' -l json -d 'for programs'\n");
    text.push_str("complete -c coracle -n '__fish_seen_subcommand_from import' -F\n");
    text.push_str(
        "complete -c coracle -n '__fish_seen_subcommand_from remove' -l force -d 'also pinned images'\n",
    );
    text
}

fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging")
}

#[test]
fn pages_and_completions_are_those_of_the_tables() {
    let files = [
        ("man/coracle.1", coracle_1()),
        ("man/coracle.toml.5", coracle_toml_5()),
        ("completions/coracle.bash", bash()),
        ("completions/_coracle", zsh()),
        ("completions/coracle.fish", fish()),
        ("config.toml", crate::config::document()),
    ];
    for (name, expected) in files {
        let path = packaging().join(name);
        if std::env::var_os("UPDATE").is_some() {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, &expected).unwrap();
        }
        let found = fs::read_to_string(&path).unwrap_or_default();
        assert!(found == expected, "{name} is old: UPDATE=1 cargo test -p coracle pages");
    }
}

#[test]
fn every_command_is_in_the_table_and_in_every_completion() {
    for command in COMMANDS {
        assert!(ABOUT.iter().any(|about| about.words.split(' ').next() == Some(command)), "{command}");
        for text in [bash(), zsh(), fish()] {
            assert!(text.contains(command), "{command}");
        }
    }
}
