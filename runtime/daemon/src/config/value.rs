//! Values as they are written, and the parsers from there to what the daemon works with. Each parser's error says what
//! was expected and what was found; the key and the place are put in front by who calls.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use coracle_base::listen::PATH_BYTES_MAX;

use super::types::Address;

/// Where a value was given.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Origin {
    /// File and line, from 1; line 0 is the file as a whole.
    File(PathBuf, usize),
    /// The flag's name.
    Flag(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::File(path, 0) => write!(out, "{}", path.display()),
            Origin::File(path, line) => write!(out, "{}:{line}", path.display()),
            Origin::Flag(name) => out.write_str(name),
        }
    }
}

/// A value before its key's parser saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Raw {
    Text(String),
    Number(i64),
    Boolean(bool),
    List(Vec<Raw>),
    /// A TOML type that no key takes; its name.
    Other(&'static str),
}

impl Raw {
    fn expected<T>(&self, what: &str) -> Result<T, String> {
        let found = match self {
            Raw::Text(text) => format!("{text:?}"),
            Raw::Number(number) => number.to_string(),
            Raw::Boolean(value) => value.to_string(),
            Raw::List(_) => "a list".into(),
            Raw::Other(kind) => format!("a {kind}"),
        };
        Err(format!("expected {what}, found {found}"))
    }

    pub(super) fn text(&self) -> Result<String, String> {
        match self {
            Raw::Text(text) if !text.contains('\0') => Ok(text.clone()),
            _ => self.expected("a text in quotes"),
        }
    }

    /// `None` for the empty text.
    pub(super) fn optional_text(&self) -> Result<Option<String>, String> {
        self.text().map(|text| Some(text).filter(|text| !text.is_empty()))
    }

    pub(super) fn boolean(&self) -> Result<bool, String> {
        match self {
            Raw::Boolean(value) => Ok(*value),
            _ => self.expected("true or false"),
        }
    }

    pub(super) fn number(&self, bounds: RangeInclusive<u32>) -> Result<u32, String> {
        match self {
            Raw::Number(number) => u32::try_from(*number).ok().filter(|number| bounds.contains(number)),
            _ => None,
        }
        .map_or_else(|| self.expected(&format!("a number from {} to {}", bounds.start(), bounds.end())), Ok)
    }

    /// A number with its unit: `"500ms"`, `"5s"`, `"2m"`; the bounds are in milliseconds.
    pub(super) fn duration(&self, bounds_ms: RangeInclusive<u64>) -> Result<Duration, String> {
        let millis = match self {
            Raw::Text(text) => millis(text).filter(|millis| bounds_ms.contains(millis)),
            _ => None,
        };
        let expected = || {
            format!(
                "a time like \"5s\" or \"500ms\", from {} ms to {} ms",
                bounds_ms.start(),
                bounds_ms.end()
            )
        };
        millis.map(Duration::from_millis).map_or_else(|| self.expected(&expected()), Ok)
    }

    pub(super) fn path(&self) -> Result<PathBuf, String> {
        match self.text() {
            Ok(text) if text.starts_with('/') => Ok(text.into()),
            _ => self.expected("an absolute path"),
        }
    }

    pub(super) fn optional_path(&self) -> Result<Option<PathBuf>, String> {
        if *self == Raw::Text(String::new()) { Ok(None) } else { self.path().map(Some) }
    }

    /// As [`Raw::socket`]; empty is none.
    pub(super) fn optional_socket(&self) -> Result<Option<PathBuf>, String> {
        if *self == Raw::Text(String::new()) { Ok(None) } else { self.socket().map(Some) }
    }

    /// `unix:///PATH` or a bare path, short enough for a socket.
    pub(super) fn socket(&self) -> Result<PathBuf, String> {
        let path = match self.text() {
            Ok(text) => text.strip_prefix("unix://").unwrap_or(&text).to_owned(),
            Err(error) => return Err(error),
        };
        if !path.starts_with('/') || path.ends_with('/') {
            return self.expected("unix:///PATH or an absolute path");
        }
        if path.len() > PATH_BYTES_MAX {
            return Err(format!(
                "the path has {} bytes, a unix socket's has {PATH_BYTES_MAX} at most: {path}",
                path.len()
            ));
        }
        Ok(path.into())
    }

    pub(super) fn ip_address(&self) -> Result<IpAddr, String> {
        match self {
            Raw::Text(text) => text.parse().ok(),
            _ => None,
        }
        .map_or_else(|| self.expected("an IP address"), Ok)
    }

    /// `ADDRESS:PORT`, `unix:///PATH`, or empty.
    pub(super) fn optional_address(&self) -> Result<Option<Address>, String> {
        match self {
            Raw::Text(text) if text.is_empty() => Ok(None),
            Raw::Text(text) if text.starts_with("unix://") => Ok(Some(Address::Unix(self.socket()?))),
            Raw::Text(text) => match text.parse::<SocketAddr>() {
                Ok(address) => Ok(Some(Address::Tcp(address))),
                Err(_) => self.expected("ADDRESS:PORT or unix:///PATH"),
            },
            _ => self.expected("ADDRESS:PORT or unix:///PATH"),
        }
    }

    /// One of the names given with their values.
    pub(super) fn choice<T: Copy>(&self, choices: &[(&str, T)]) -> Result<T, String> {
        let found = match self {
            Raw::Text(text) => choices.iter().find(|(name, _)| name == text),
            _ => None,
        };
        match found {
            Some((_, value)) => Ok(*value),
            None => {
                let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
                self.expected(&format!("one of {}", names.join(", ")))
            }
        }
    }

    pub(super) fn texts(&self) -> Result<Vec<String>, String> {
        self.list(Raw::text)
    }

    pub(super) fn paths(&self) -> Result<Vec<PathBuf>, String> {
        self.list(Raw::path)
    }

    /// One path or several; `None` for the empty text.
    pub(super) fn optional_paths(&self) -> Result<Option<Vec<PathBuf>>, String> {
        match self {
            Raw::List(_) => self.paths().map(Some),
            Raw::Text(_) => self.optional_path().map(|path| path.map(|path| vec![path])),
            _ => self.expected("an absolute path, or a list of such"),
        }
    }

    fn list<T>(&self, item: impl Fn(&Raw) -> Result<T, String>) -> Result<Vec<T>, String> {
        match self {
            Raw::List(items) => items.iter().map(item).collect(),
            _ => self.expected("a list in brackets"),
        }
    }
}

fn millis(text: &str) -> Option<u64> {
    let digits_end = text.find(|letter: char| !letter.is_ascii_digit())?;
    let (digits, unit) = text.split_at(digits_end);
    let factor = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(factor)
}
