//! `coracle config default`: all keys with description and default, commented out, so that the file has no
//! effect until a line is uncommented.

use std::fmt::Write as _;

use super::keys::KEYS;

/// Width of the comments in characters.
const COLUMNS: usize = 100;

/// The complete default configuration file.
pub fn document() -> String {
    let mut text = String::from(
        "# coracle's configuration. Every key is optional; each line shows its default. Drop-ins in conf.d/*.toml are\n\
         # merged over this file in lexical order, and a flag takes precedence over all of them. Keys marked (reload) follow a SIGHUP.\n",
    );
    let mut section = "";
    for key in KEYS {
        let (table, name) = key.name.rsplit_once('.').unwrap_or(("", key.name));
        if table != section {
            let _ = write!(text, "\n[{table}]\n");
            section = table;
        }
        let mark = if key.reloadable { " (reload)" } else { "" };
        let flag =
            key.flag.as_ref().map_or(String::new(), |flag| format!(" Flag: {} {}.", flag.name, flag.value));
        text.push('\n');
        for line in wrap(&format!("{}{mark}{flag}", key.text)) {
            let _ = writeln!(text, "# {line}");
        }
        let _ = writeln!(text, "#{name} = {}", key.default);
    }
    text
}

fn wrap(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let full = lines.last().is_some_and(|line| !line.is_empty() && line.len() + 1 + word.len() > COLUMNS);
        if full {
            lines.push(String::new());
        }
        if let Some(line) = lines.last_mut() {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines
}
