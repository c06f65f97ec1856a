//! Makes untrusted text safe for display: archives, registries, plugins and containers determine parts of
//! error texts, and terminals execute control characters.

use std::fmt::{self, Display, Write as _};
use std::io::Write as _;
use std::process::ExitCode;

/// Whether a terminal would execute or hide `letter`, or reverse the text around it: control characters,
/// marks of the direction of writing, and characters without width.
pub fn is_hidden(letter: char) -> bool {
    letter.is_control()
        || matches!(
            letter,
            '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}'
        )
}

/// Formats a text with its hidden characters as `\u{1b}`; line feeds and tabs are not changed.
#[derive(Clone, Copy, Debug)]
pub struct Escaped<'a>(pub &'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for letter in self.0.chars() {
            match letter {
                '\n' | '\t' => out.write_char(letter)?,
                _ if is_hidden(letter) => write!(out, "\\u{{{:x}}}", u32::from(letter))?,
                _ => out.write_char(letter)?,
            }
        }
        Ok(())
    }
}

/// Prints a text to stdout; characters that a terminal would execute are escaped. If the reader has closed
/// the pipe, the exit code is a failure, without a message.
pub fn print(text: &str) -> ExitCode {
    match write!(std::io::stdout(), "{}", Escaped(text)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

#[cfg(test)]
mod tests {
    use super::Escaped;

    #[test]
    fn control_characters_are_escaped() {
        for (text, expected) in [
            ("plain größe", "plain größe"),
            ("two\nlines\tand a tab", "two\nlines\tand a tab"),
            ("\u{1b}]0;title\u{7}\u{1b}[31m", "\\u{1b}]0;title\\u{7}\\u{1b}[31m"),
            ("\u{9b}31m\r", "\\u{9b}31m\\u{d}"),
            ("a\u{202e}b\u{2066}c\u{feff}", "a\\u{202e}b\\u{2066}c\\u{feff}"),
        ] {
            assert_eq!(Escaped(text).to_string(), expected);
        }
    }
}
