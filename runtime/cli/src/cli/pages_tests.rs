//! Generates the completions of packaging/ and the commented configuration from the tables of the parser. Only tests use
//! this file, so it does not enlarge the program: `UPDATE=1 cargo test -p coracle cli::` writes the files, and the man
//! pages of [`super::man_tests`]; otherwise the tests compare them.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use super::{ABOUT, About, COMMANDS, GROUPS, OWN, Opt, commands_of};
use coracle_config::{DEFAULT_FILE, KEYS};

/// Commands with the daemon's flags.
pub(super) const WITH_FLAGS: [&str; 3] = ["serve", "check", "config check"];

/// A flag as documented: its name, the name of its value, its description.
pub(super) struct Shown {
    pub(super) name: &'static str,
    pub(super) value: &'static str,
    pub(super) text: String,
}

pub(super) fn flags() -> Vec<Shown> {
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

/// The names of an option, the short one first.
pub(super) fn spellings(option: &Opt) -> Vec<&'static str> {
    [option.short, option.name].into_iter().filter(|name| !name.is_empty()).collect()
}

/// The commands of two words that have options: first and second word, documentation.
fn group_commands() -> impl Iterator<Item = (&'static str, &'static str, &'static About)> {
    let of = |group| commands_of(group).map(move |(name, about)| (group, name, about));
    let config = of("config").filter(|(_, _, about)| !about.options.is_empty());
    GROUPS.into_iter().flat_map(of).chain(config)
}

/// Commands of one word with their options.
fn own_commands() -> impl Iterator<Item = &'static About> {
    ABOUT.iter().filter(|about| OWN.contains(&about.words))
}

/// The kind of value that the arguments of a command or an option take.
fn takes(arguments: &str) -> Taken {
    match arguments.trim_end_matches(" -o FILE") {
        "FILE" | "FILE..." | "DIR" => Taken::File,
        "FORMAT" => Taken::Words("text json"),
        "FORM" => Taken::Words("table wide json yaml"),
        "POD-STATE" => Taken::Words("ready notready"),
        "CONTAINER-STATE" => Taken::Words("created running exited unknown"),
        "CONTAINER" | "CONTAINER COMMAND..." => Taken::Listed("coracle ps --all --quiet"),
        "POD" => Taken::Listed("coracle pods --quiet"),
        "IMAGE" | "[IMAGE]" | "IMAGE..." | "IMAGE NAME" => Taken::Listed("coracle image list --quiet"),
        _ => Taken::Nothing,
    }
}

enum Taken {
    File,
    /// A value of a fixed set: its words, separated by spaces.
    Words(&'static str),
    /// One of the words that this command of the shell prints.
    Listed(&'static str),
    /// The shell cannot complete the value.
    Nothing,
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

/// The kind of a value, which determines the completion of each shell.
enum Value {
    Path,
    Level,
    Format,
    Other,
}

fn value(flag: &Shown) -> Value {
    match flag.value {
        "FILE" | "DIR" | "PATH" => Value::Path,
        "LEVEL" => Value::Level,
        "FORMAT" => Value::Format,
        _ => Value::Other,
    }
}

const LEVELS: &str = "error warn info debug";

const FORMATS: &str = "text json";

fn bash() -> String {
    let names = |wanted: fn(&Value) -> bool| {
        let names: Vec<_> =
            flags().iter().filter(|flag| wanted(&value(flag))).map(|flag| flag.name).collect();
        names.join("|")
    };
    let mut text = format!(
        "# Completions of coracle for bash; made by runtime/cli/src/cli/pages_tests.rs.\n_coracle() {{\n\
         \x20   local word=${{COMP_WORDS[COMP_CWORD]}} words\n\
         \x20   [[ {} ]] || case ${{COMP_WORDS[COMP_CWORD-1]}} in\n\
         \x20       {}) COMPREPLY=($(compgen -f -- \"$word\")); return ;;\n\
         \x20       {}) COMPREPLY=($(compgen -W \"{LEVELS}\" -- \"$word\")); return ;;\n\
         \x20       {}) COMPREPLY=($(compgen -W \"{FORMATS}\" -- \"$word\")); return ;;\n\
         \x20       {}) COMPREPLY=(); return ;;\n\
         \x20   esac\n\
         \x20   case $COMP_CWORD:${{COMP_WORDS[1]}}:${{COMP_WORDS[2]}} in\n\
         \x20       1:*) words=\"{}\" ;;\n",
        with_another_meaning().join(" || "),
        names(|value| matches!(value, Value::Path)),
        names(|value| matches!(value, Value::Level)),
        names(|value| matches!(value, Value::Format)),
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
    bash_own(&mut text);
    text.push_str("    esac\n");
    text.push_str("    COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n");
    // A reference has colons, at which bash begins a new word.
    text.push_str(
        "    declare -F __ltrim_colon_completions >/dev/null && __ltrim_colon_completions \"$word\"\n",
    );
    text.push_str("}\ncomplete -o filenames -F _coracle coracle\n");
    text
}

/// Conditions in bash for options of a command that have the same name as a flag of the daemon.
fn with_another_meaning() -> Vec<String> {
    let flags = flags();
    let is_flag = |option: &&Opt| flags.iter().any(|flag| flag.name == option.name);
    let mut conditions = Vec::new();
    for about in own_commands() {
        for option in about.options.iter().filter(is_flag) {
            let words = "${COMP_WORDS[1]}:${COMP_WORDS[COMP_CWORD-1]}";
            conditions.push(format!("{words} == {}:{}", about.words, option.name));
        }
    }
    conditions
}

/// Appends the completion for bash of commands with their own options: options, their values, files, and names of existing
/// objects.
fn bash_own(text: &mut String) {
    for (group, name, about) in group_commands() {
        let _ = writeln!(text, "        *:{group}:{name})");
        bash_options(text, about);
    }
    for about in own_commands() {
        let _ = writeln!(text, "        *:{}:*)", about.words);
        bash_options(text, about);
    }
}

fn bash_options(text: &mut String, about: &About) {
    for option in about.options.iter().filter(|option| !option.value.is_empty()) {
        let action = match takes(option.value) {
            Taken::File => "$(compgen -f -- \"$word\")".to_owned(),
            Taken::Words(words) => format!("$(compgen -W \"{words}\" -- \"$word\")"),
            Taken::Listed(command) => format!("$(compgen -W \"$({command} 2>/dev/null)\" -- \"$word\")"),
            Taken::Nothing => String::new(),
        };
        let names = spellings(option).join("|");
        let previous = "${COMP_WORDS[COMP_CWORD-1]}";
        let _ =
            writeln!(text, "            case {previous} in {names}) COMPREPLY=({action}); return ;; esac");
    }
    let options: Vec<_> = about.options.iter().flat_map(spellings).collect();
    let _ = writeln!(text, "            words=\"{}\"", options.join(" "));
    match takes(about.arguments) {
        Taken::File => text.push_str(
            "            [[ $word == -* ]] || { COMPREPLY=($(compgen -f -- \"$word\")); return; } ;;\n",
        ),
        Taken::Listed(command) => {
            let _ = writeln!(text, "            [[ $word == -* ]] || words=$({command} 2>/dev/null) ;;");
        }
        Taken::Words(_) | Taken::Nothing => text.push_str("            ;;\n"),
    }
}

fn zsh() -> String {
    // In a specification brackets and colons have a meaning, in quotes quotes.
    let plain =
        |text: &str| text.replace('\'', "'\\''").replace('[', "(").replace(']', ")").replace(':', "\\:");
    let mut text = String::from(
        "#compdef coracle\n# Completions of coracle for zsh; made by runtime/cli/src/cli/pages_tests.rs.\n",
    );
    text.push_str("_coracle() {\n    local -a flags commands\n    flags=(\n");
    for flag in flags() {
        let action = match value(&flag) {
            Value::Path => "_files".into(),
            Value::Level => format!("({LEVELS})"),
            Value::Format => format!("({FORMATS})"),
            Value::Other => " ".into(),
        };
        let _ = writeln!(text, "        '*{}[{}]:{}:{action}'", flag.name, plain(&flag.text), flag.value);
    }
    text.push_str("    )\n    if (( CURRENT == 2 )); then\n        commands=(");
    text.push_str(&COMMANDS.join(" "));
    text.push_str(")\n        _describe command commands\n        return\n    fi\n    case $words[2] in\n");
    text.push_str(
        "        serve) _arguments $flags '*: :()' ;;\n        check) _arguments '--json' $flags '*: :()' ;;\n",
    );
    for command in ["config"].into_iter().chain(GROUPS) {
        let _ = writeln!(
            text,
            "        {command})\n            if (( CURRENT == 3 )); then\n                commands=("
        );
        for about in ABOUT {
            if let Some((_, own)) = about.words.split_once(' ').filter(|(first, _)| *first == command) {
                let _ = writeln!(text, "                    '{own}:{}'", plain(about.text));
            }
        }
        text.push_str("                )\n                _describe command commands\n                return\n            fi\n");
        if command == "config" {
            text.push_str("            case $words[3] in\n                check) _arguments $flags '*:file:_files' ;;\n");
            for (_, name, about) in group_commands().filter(|(group, ..)| *group == command) {
                let _ = write!(text, "                {name})");
                zsh_options(&mut text, about, &plain);
            }
            text.push_str("            esac ;;\n");
            continue;
        }
        zsh_group(&mut text, command, &plain);
        text.push_str("            esac ;;\n");
    }
    for about in own_commands() {
        let _ = write!(text, "        {})", about.words);
        zsh_options(&mut text, about, &plain);
    }
    text.push_str("    esac\n}\n_coracle \"$@\"\n");
    text
}

/// Appends the completion for zsh of the options of a group's commands, like [`bash_own`].
fn zsh_group(text: &mut String, group: &str, plain: &dyn Fn(&str) -> String) {
    text.push_str("            case $words[3] in\n");
    for (name, about) in commands_of(group) {
        let _ = write!(text, "                {name})");
        zsh_options(text, about, plain);
    }
}

fn zsh_options(text: &mut String, about: &About, plain: &dyn Fn(&str) -> String) {
    text.push_str(" _arguments");
    for option in about.options {
        let value = match takes(option.value) {
            _ if option.value.is_empty() => String::new(),
            Taken::Nothing => format!(":{}: ", option.value),
            Taken::File => ":FILE:_files".to_owned(),
            Taken::Words(words) => format!(":{}:({words})", option.value),
            Taken::Listed(command) => format!(":{}:($({command} 2>/dev/null))", option.value),
        };
        for name in spellings(option) {
            let _ = write!(text, " '{name}[{}]{value}'", plain(option.text));
        }
    }
    match takes(about.arguments) {
        Taken::File => text.push_str(" '*:archive:_files' ;;\n"),
        Taken::Listed(command) => {
            let what = about.arguments.trim_matches(['[', ']', '.']).split(' ').next().unwrap_or_default();
            let _ = writeln!(text, " '*:{}:($({command} 2>/dev/null))' ;;", what.to_lowercase());
        }
        // Without this, options are not completed after an argument.
        Taken::Words(_) | Taken::Nothing => text.push_str(" '*: :()' ;;\n"),
    }
}

fn fish() -> String {
    let plain = |text: &str| text.replace('\\', "\\\\").replace('\'', "\\'");
    let mut text = String::from(
        "# Completions of coracle for fish; made by runtime/cli/src/cli/pages_tests.rs.\ncomplete -c coracle -f\n",
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
                "complete -c coracle -n '__fish_seen_subcommand_from {first}; and test (count (commandline -opc)) -eq 2' -a {own} -d '{}'",
                plain(about.text)
            );
        }
    }
    for flag in flags() {
        let action = match value(&flag) {
            Value::Path => "-rF".to_owned(),
            Value::Level => format!("-xa '{LEVELS}'"),
            Value::Format => format!("-xa '{FORMATS}'"),
            Value::Other => "-x".into(),
        };
        let _ = writeln!(
            text,
            "complete -c coracle -n '__fish_seen_subcommand_from serve check; and not __fish_seen_subcommand_from image' -l {} {action} -d '{}'",
            flag.name.trim_start_matches('-'),
            plain(&flag.text)
        );
    }
    text.push_str("complete -c coracle -n '__fish_seen_subcommand_from check; and not __fish_seen_subcommand_from config image' -l json -d 'for programs'\n");
    fish_own(&mut text, &plain);
    text
}

/// Appends the completion for fish of options and names of commands, like [`bash_own`].
fn fish_own(text: &mut String, plain: &dyn Fn(&str) -> String) {
    for (group, name, about) in group_commands() {
        let here = format!("__fish_seen_subcommand_from {group}; and __fish_seen_subcommand_from {name}");
        fish_options(text, about, &here, plain);
    }
    for about in own_commands() {
        let here =
            format!("__fish_seen_subcommand_from {}; and not __fish_seen_subcommand_from image", about.words);
        fish_options(text, about, &here, plain);
    }
}

fn fish_options(text: &mut String, about: &About, here: &str, plain: &dyn Fn(&str) -> String) {
    for option in about.options {
        let short = option.short.trim_start_matches('-');
        let short = if short.is_empty() { String::new() } else { format!(" -s {short}") };
        let action = match takes(option.value) {
            _ if option.value.is_empty() => String::new(),
            Taken::Nothing => " -x".to_owned(),
            Taken::File => " -rF".to_owned(),
            Taken::Words(words) => format!(" -xa '{words}'"),
            Taken::Listed(command) => format!(" -xa '({command} 2>/dev/null)'"),
        };
        let long = option.name.trim_start_matches('-');
        let _ = writeln!(
            text,
            "complete -c coracle -n '{here}'{short} -l {long}{action} -d '{}'",
            plain(option.text)
        );
    }
    let arguments = match takes(about.arguments) {
        Taken::File => "-F".to_owned(),
        Taken::Listed(command) => format!("-a '({command} 2>/dev/null)'"),
        Taken::Words(_) | Taken::Nothing => return,
    };
    let _ = writeln!(text, "complete -c coracle -n '{here}' {arguments}");
}

pub(super) fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging")
}

#[test]
fn completions_pages_and_configuration_are_those_of_the_tables() {
    let files = [
        ("completions/coracle.bash", bash()),
        ("completions/_coracle", zsh()),
        ("completions/coracle.fish", fish()),
        ("config.toml", coracle_config::document()),
    ];
    for (name, expected) in files {
        compare(name, &expected);
    }
}

/// Compares a file of packaging/ with its expected content, or writes it if UPDATE is set.
#[track_caller]
pub(super) fn compare(name: &str, expected: &str) {
    let path = packaging().join(name);
    if std::env::var_os("UPDATE").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, expected).unwrap();
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    assert!(found == expected, "{name} is old: UPDATE=1 cargo test -p coracle cli::");
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
