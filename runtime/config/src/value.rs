//! Raw values and their parsers. The error of a parser describes the expected value and the actual one; the caller adds the key
//! and the origin.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use coracle_base::listen::PATH_BYTES_MAX;

use super::types::{Address, ContainerdSocket};

/// Origin of a value.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Origin {
    /// File and line number, from 1; line 0 means the whole file.
    File(PathBuf, usize),
    /// Name of the flag that set the value.
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

/// An unparsed value with its TOML type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Raw {
    Text(String),
    Number(i64),
    Boolean(bool),
    List(Vec<Raw>),
    /// A value of a TOML type that no key has; with the name of the type.
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

    /// Parses a text; `None` if it is empty.
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

    /// Parses a number with a unit: `"500ms"`, `"5s"`, `"2m"`; the bounds are in milliseconds.
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

    /// Parses a day `YYYY-MM-DD` from 1970 on, which may be empty.
    pub(super) fn day(&self) -> Result<String, String> {
        let text = self.text()?;
        let parts: Vec<&str> = text.split('-').collect();
        let is_number = |part: &str, length: usize, range: RangeInclusive<u16>| {
            let is_digits = part.len() == length && part.bytes().all(|byte| byte.is_ascii_digit());
            is_digits && part.parse().is_ok_and(|number| range.contains(&number))
        };
        let is_day = match parts[..] {
            [year, month, day] => {
                is_number(year, 4, 1970..=9999) && is_number(month, 2, 1..=12) && is_number(day, 2, 1..=31)
            }
            _ => text.is_empty(),
        };
        if is_day { Ok(text) } else { self.expected("a day like \"2026-01-31\"") }
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

    /// Parses a socket path like [`Raw::socket`]; an empty text means disabled, `auto` means
    /// [`ContainerdSocket::Automatic`].
    pub(super) fn containerd_socket(&self) -> Result<ContainerdSocket, String> {
        match self {
            Raw::Text(text) if text.is_empty() => Ok(ContainerdSocket::Off),
            Raw::Text(text) if text == "auto" => Ok(ContainerdSocket::Automatic),
            other => other.socket().map(ContainerdSocket::At),
        }
    }

    /// Parses a socket path, `unix:///PATH` or a plain path, and checks its length.
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

    /// Parses `ADDRESS:PORT` or `unix:///PATH`; `None` if the text is empty.
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

    /// Parses `ADDRESS:PORT`; `None` if the text is empty.
    pub(super) fn optional_tcp_address(&self) -> Result<Option<SocketAddr>, String> {
        match self {
            Raw::Text(text) if text.is_empty() => Ok(None),
            Raw::Text(text) => text.parse().map(Some).or_else(|_| self.expected("ADDRESS:PORT")),
            _ => self.expected("ADDRESS:PORT"),
        }
    }

    /// Parses a list of `ADDRESS:PORT` and `dns:NAME:PORT`.
    pub(super) fn neighbours(&self) -> Result<Vec<String>, String> {
        let is_dns = |text: &str| {
            let name = text.strip_prefix("dns:").and_then(|rest| rest.rsplit_once(':'));
            name.is_some_and(|(name, port)| {
                !name.is_empty()
                    && !name.contains([':', '/'])
                    && port.parse::<u16>().is_ok_and(|port| port > 0)
            })
        };
        let is_address = |text: &str| text.parse::<SocketAddr>().is_ok_and(|address| address.port() > 0);
        self.list(|raw| match raw.text() {
            Ok(text) if is_address(&text) || is_dns(&text) => Ok(text),
            _ => raw.expected("ADDRESS:PORT or dns:NAME:PORT"),
        })
    }

    /// Parses one of the given words; returns the value that belongs to it.
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

    /// Parses one or several paths; `None` for an empty text.
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
        "h" => 3_600_000,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(factor)
}
