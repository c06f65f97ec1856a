//! A unit of systemd with its drop-ins, as far as the command line of its program depends on them: ExecStart, Environment and
//! EnvironmentFile (systemd.unit(5), systemd.service(5), systemd.exec(5)); and a service of OpenRC in the form that k3s' installer
//! writes. Nothing is executed.

use std::collections::{BTreeMap, BTreeSet};

use crate::host::{Host, Problem};

/// Directories of units, from the highest to the lowest priority.
const DIRECTORIES: [&str; 5] = [
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];

/// A unit, read with all its drop-ins.
#[derive(Debug, Default)]
pub(crate) struct Unit {
    /// The words of ExecStart before variables are replaced, the program first.
    words: Vec<String>,
    /// The environment of the program: the value of each variable and the file that sets it.
    pub(crate) environment: BTreeMap<String, (String, String)>,
    /// The file that sets ExecStart.
    pub(crate) path: String,
}

/// Reads a unit such as `k3s.service`; `None` if the node has no such unit. `own` is the name of coracle's drop-in, which is ignored.
///
/// # Errors
/// A file of the unit cannot be read.
pub(crate) fn read(host: &Host, name: &str, own: &str) -> Result<Option<Unit>, Problem> {
    let stem = name.trim_end_matches(".service");
    let mut unit = Unit::default();
    let mut files = Vec::new();
    let Some(main) = DIRECTORIES.iter().find(|directory| host.is_file(&format!("{directory}/{name}"))) else {
        return Ok(None);
    };
    unit.load(host, stem, &format!("{main}/{name}"), &mut files)?;
    // Of drop-ins with the same name the one in the first directory is used, and all are ordered by name.
    let mut drop_ins: BTreeMap<String, String> = BTreeMap::new();
    for directory in DIRECTORIES {
        let directory = format!("{directory}/{name}.d");
        for drop_in in host.list(&directory)?.into_iter().filter(|drop_in| drop_in.ends_with(".conf")) {
            drop_ins.entry(drop_in.clone()).or_insert_with(|| format!("{directory}/{drop_in}"));
        }
    }
    for (drop_in, path) in drop_ins {
        if drop_in != own {
            unit.load(host, stem, &path, &mut files)?;
        }
    }
    // systemd reads these files after all other settings, when it starts the program.
    for (path, is_optional) in files {
        match host.read(&path)? {
            Some(text) => unit.environment_file(&path, &text),
            None if is_optional => {}
            None => return Err(Problem(format!("{path}: does not exist, but {name} names it"))),
        }
    }
    Ok(Some(unit))
}

/// Reads a service of OpenRC such as `k3s`: `command_args`, and the files that the script reads as environment; `None` if the node
/// has no such service. Other statements of the script are ignored.
///
/// # Errors
/// A file of the service cannot be read.
pub(crate) fn openrc(host: &Host, name: &str) -> Result<Option<Unit>, Problem> {
    let path = format!("/etc/init.d/{name}");
    let Some(text) = host.read(&path)? else { return Ok(None) };
    let is_argument =
        |word: &String| !word.trim_start_matches(|letter: char| letter.is_ascii_digit()).starts_with('>');
    // The redirection of the output is at the end.
    let words = assigned(&text, "command_args").map(|value| words(&value)).unwrap_or_default();
    let words = words.into_iter().take_while(is_argument).collect();
    let mut unit = Unit { words, path, ..Unit::default() };
    for file in sourced(&text) {
        if let Some(text) = host.read(&file)? {
            unit.environment_file(&file, &text);
        }
    }
    Ok(Some(unit))
}

/// The value of the last assignment of a shell variable whose value is in double quotes; `None` if there is none.
fn assigned(text: &str, name: &str) -> Option<String> {
    let start = format!("{name}=\"");
    let is_statement =
        |at: usize| text[..at].rsplit('\n').next().is_some_and(|before| before.trim().is_empty());
    let at = text.match_indices(&start).map(|(at, _)| at).filter(|at| is_statement(*at)).last()?;
    let mut value = String::new();
    let mut letters = text[at + start.len()..].chars();
    while let Some(letter) = letters.next() {
        match letter {
            '"' => return Some(value),
            '\\' => match letters.next()? {
                '\n' => {}
                letter @ ('"' | '\\' | '$' | '`') => value.push(letter),
                letter => value.extend(['\\', letter]),
            },
            letter => value.push(letter),
        }
    }
    None
}

/// The files that a shell script reads with the command `.`, by absolute paths.
fn sourced(text: &str) -> Vec<String> {
    let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
    let mut files = Vec::new();
    for line in lines {
        let words: Vec<&str> = line.split([' ', '\t', ';']).filter(|word| !word.is_empty()).collect();
        let pairs = words.windows(2).filter(|pair| pair[0] == "." && pair[1].starts_with('/'));
        files.extend(pairs.map(|pair| pair[1].to_owned()));
    }
    files
}

impl Unit {
    /// Adds a file of the unit `name`, which has no suffix here.
    fn load(
        &mut self,
        host: &Host,
        name: &str,
        path: &str,
        files: &mut Vec<(String, bool)>,
    ) -> Result<(), Problem> {
        // A drop-in that leads to /dev/null is masked.
        if !host.is_file(path) {
            return Ok(());
        }
        let text = host.read(path)?.unwrap_or_default();
        let mut is_service = false;
        for line in logical_lines(&text) {
            if line.starts_with('[') {
                is_service = line == "[Service]";
                continue;
            }
            let Some((key, value)) = line.split_once('=').filter(|_| is_service) else { continue };
            let value = value.trim();
            match key.trim() {
                "ExecStart" => {
                    self.words = words(value.trim_start_matches(['-', '@', ':', '+', '!']));
                    path.clone_into(&mut self.path);
                }
                "Environment" if value.is_empty() => self.environment.clear(),
                "Environment" => {
                    for word in words(value) {
                        if let Some((name, value)) = word.split_once('=') {
                            self.environment.insert(name.to_owned(), (value.to_owned(), path.to_owned()));
                        }
                    }
                }
                "EnvironmentFile" if value.is_empty() => files.clear(),
                "EnvironmentFile" => {
                    let path = value.trim_start_matches('-').replace("%N", name);
                    files.push((path, value.starts_with('-')));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn environment_file(&mut self, path: &str, text: &str) {
        for line in logical_lines(text) {
            if let Some((name, value)) = line.split_once('=') {
                let value = words(value).join(" ");
                let name = name.trim_start_matches("export ").trim();
                self.environment.insert(name.to_owned(), (value, path.to_owned()));
            }
        }
    }

    /// The words of the command line, each with the file that it comes from. A variable without braces becomes several words.
    pub(crate) fn command_line(&self) -> Vec<(String, String)> {
        let mut line = Vec::new();
        for word in &self.words {
            match word.strip_prefix('$').filter(|name| !name.starts_with(['{', '$'])) {
                Some(name) => {
                    let (value, path) = self.environment.get(name).cloned().unwrap_or_default();
                    line.extend(words(&value).into_iter().map(|word| (word, path.clone())));
                }
                None => line.push((word.clone(), self.path.clone())),
            }
        }
        line
    }

    /// The values of an option in the command line, each with its file: `--name VALUE` and `--name=VALUE`.
    pub(crate) fn option(&self, names: &[&str]) -> Vec<(String, String)> {
        option(&self.command_line(), names)
    }
}

/// The words of a command line that begin with a dash, as options: name with its dashes, value, and file. A following word that
/// begins with a dash is not a value: the option is then a switch, with the value `true`.
pub(crate) fn options(line: &[(String, String)]) -> impl Iterator<Item = (&str, &str, &str)> {
    let options = line.iter().enumerate().filter(|(_, (word, _))| word.starts_with('-'));
    options.map(|(index, (word, path))| {
        let (name, value) =
            word.split_once('=').map_or((word.as_str(), None), |(name, value)| (name, Some(value)));
        let next = line.get(index + 1).map(|(next, _)| next.as_str()).filter(|next| !next.starts_with('-'));
        (name, value.or(next).unwrap_or("true"), path.as_str())
    })
}

/// The values of an option in a command line, each with its file.
fn option(line: &[(String, String)], names: &[&str]) -> Vec<(String, String)> {
    let found = options(line).filter(|(name, ..)| names.contains(name));
    found.map(|(_, value, path)| (value.to_owned(), path.to_owned())).collect()
}

/// Lines without comments, with continued lines joined.
fn logical_lines(text: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut open = String::new();
    for line in text.lines() {
        let line = line.trim();
        if line.starts_with(['#', ';']) {
            continue;
        }
        match line.strip_suffix('\\') {
            Some(start) => {
                open.push_str(start);
                open.push(' ');
            }
            None => {
                open.push_str(line);
                let line = std::mem::take(&mut open);
                if !line.trim().is_empty() {
                    lines.push(line.trim().to_owned());
                }
            }
        }
    }
    lines.extend(Some(open.trim().to_owned()).filter(|line| !line.is_empty()));
    lines
}

/// The words of a line: separated by white space, with quotes and backslashes as in a unit.
pub(crate) fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let (mut word, mut is_word, mut quote) = (String::new(), false, None);
    let mut letters = line.chars();
    while let Some(letter) = letters.next() {
        match (letter, quote) {
            ('\\', _) => {
                word.extend(letters.next());
                is_word = true;
            }
            ('"' | '\'', None) => {
                quote = Some(letter);
                is_word = true;
            }
            (letter, Some(open)) if letter == open => quote = None,
            (letter, None) if letter.is_whitespace() => {
                if is_word {
                    words.push(std::mem::take(&mut word));
                }
                is_word = false;
            }
            (letter, _) => {
                word.push(letter);
                is_word = true;
            }
        }
    }
    if is_word {
        words.push(word);
    }
    words
}

/// Whether a unit is started at boot or with another unit.
///
/// # Errors
/// A directory of units cannot be read.
pub(crate) fn enabled(host: &Host, name: &str) -> Result<bool, Problem> {
    let mut wanted_by = BTreeSet::new();
    for directory in DIRECTORIES {
        let names = host.list(directory)?;
        wanted_by.extend(
            names
                .into_iter()
                .filter(|name| name.ends_with(".wants"))
                .map(|name| format!("{directory}/{name}")),
        );
    }
    Ok(wanted_by.iter().any(|directory| host.exists(&format!("{directory}/{name}"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_and_backslashes_are_parsed_like_those_of_systemd() {
        for (line, expected) in [
            ("", vec![]),
            ("a  b\tc", vec!["a", "b", "c"]),
            ("'--disable' \"tra efik\" a\\ b", vec!["--disable", "tra efik", "a b"]),
            ("\"A=b c\" ''", vec!["A=b c", ""]),
            ("\"open and 'more", vec!["open and 'more"]),
        ] {
            assert_eq!(words(line), expected, "{line}");
        }
    }

    #[test]
    fn assignments_of_a_shell_script_span_lines() {
        let script = "# command_args=\"no\"\ncommand_args=\"server \\\n\t'--docker' \\\n\t'--node-label' \\\n\t'a=\\\"b\\\"' \\\n\n    >>/var/log/k3s.log 2>&1\"\n\
            set -o allexport\nif [ -f /etc/environment ]; then . /etc/environment; fi\nif [ -f /a/k3s.env ]; then . /a/k3s.env; fi\n# . /c\n";
        let value = assigned(script, "command_args").expect("a value");
        assert_eq!(
            words(&value),
            ["server", "--docker", "--node-label", "a=\"b\"", ">>/var/log/k3s.log", "2>&1"]
        );
        assert_eq!(sourced(script), ["/etc/environment", "/a/k3s.env"]);
        assert_eq!(assigned("command_args=\"open", "command_args"), None);
    }

    #[test]
    fn options_are_found_with_and_without_an_equals_sign() {
        let line: Vec<_> = words("k3s server --docker --data-dir /d -d=/e --docker")
            .into_iter()
            .map(|word| (word, "f".to_owned()))
            .collect();
        let values =
            |names: &[&str]| option(&line, names).into_iter().map(|(value, _)| value).collect::<Vec<_>>();
        assert_eq!(values(&["--data-dir", "-d"]), ["/d", "/e"]);
        assert_eq!(values(&["--docker"]), ["true", "true"]);
        assert!(values(&["--dock"]).is_empty());
    }

    #[test]
    fn continued_lines_are_joined_and_comments_skipped() {
        let text = "# c\nExecStart=/k3s \\\n    server \\\n\t'--disable' \\\n; comment\n\n[X]\nlast \\";
        assert_eq!(logical_lines(text), ["ExecStart=/k3s  server  '--disable'", "[X]", "last"]);
    }
}
