//! Reads TOML files into one raw value per key with its line. All syntax errors of a file are reported.

use std::io;
use std::path::{Path, PathBuf};

use coracle_base::collect;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::keys::{KEYS, Key};
use super::suggest;
use super::value::{Origin, Raw};
use super::{Hides, Problem};

/// Maximum size of a configuration file in bytes: a hundred times the default file.
const FILE_BYTES_MAX: u64 = 1024 * 1024;

/// Maximum number of drop-in files.
const DROP_INS_MAX: usize = 256;

type Values = [Option<(Raw, Origin)>];

/// Reads `file` and `conf.d/*.toml` in its directory. `must_exist`: whether the file must exist, because the user named it;
/// `written`: a drop-in that is read as if it had this text.
pub(super) fn files(
    file: &Path,
    must_exist: bool,
    written: Option<(&Path, &str)>,
    values: &mut Values,
    problems: &mut Vec<Problem>,
) {
    match load(file) {
        Ok(text) => parse(file, &text, values, problems),
        Err(error) if error.kind() == io::ErrorKind::NotFound && !must_exist => {}
        Err(error) => problems.push(unreadable(file, &error)),
    }
    let directory = file.with_file_name("conf.d");
    let mut drop_ins = match drop_ins(&directory) {
        Ok(paths) => paths,
        Err(error) => return problems.push(unreadable(&directory, &error)),
    };
    if drop_ins.len() > DROP_INS_MAX {
        let text = format!("{} files, {DROP_INS_MAX} at most", drop_ins.len());
        return problems.push(Problem { origin: Origin::File(directory, 0), text, hides: Hides::File });
    }
    if let Some((path, _)) = written
        && let Err(place) = drop_ins.binary_search_by(|other| other.as_path().cmp(path))
    {
        drop_ins.insert(place, path.to_owned());
    }
    for path in drop_ins {
        let text = written.filter(|(written, _)| *written == path).map(|(_, text)| Ok(text.to_owned()));
        match text.unwrap_or_else(|| load(&path)) {
            Ok(text) => parse(&path, &text, values, problems),
            Err(error) => problems.push(unreadable(&path, &error)),
        }
    }
}

fn unreadable(path: &Path, error: &io::Error) -> Problem {
    Problem {
        origin: Origin::File(path.into(), 0),
        text: format!("read: {}", coracle_base::error::describe_io(error)),
        hides: Hides::File,
    }
}

fn load(path: &Path) -> io::Result<String> {
    let about = std::fs::metadata(path)?;
    // Opening a FIFO without a writer would block. A directory has an error of its own.
    if !about.is_file() && !about.is_dir() {
        return Err(io::Error::other("is not a regular file"));
    }
    let size = about.len();
    if size > FILE_BYTES_MAX {
        return Err(io::Error::other(format!("{size} bytes, {FILE_BYTES_MAX} at most")));
    }
    std::fs::read_to_string(path)
}

/// The files `*.toml` of a directory in lexical order; empty if the directory does not exist.
pub(super) fn drop_ins(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            paths.push(path);
        }
    }
    collect::sort(&mut paths);
    Ok(paths)
}

/// Reads all keys of one document; they replace the values of earlier documents.
pub(super) fn parse(path: &Path, text: &str, values: &mut Values, problems: &mut Vec<Problem>) {
    let (table, errors) = DeTable::parse_recoverable(text);
    let mut walk = Walk { path, text, values, problems };
    for error in &errors {
        let at = error.span().map_or(0, |span| span.start);
        walk.problem(at, error.message().trim().replace('\n', "; "), Hides::File);
    }
    // The error recovery of the parser would cause further, wrong problems.
    if errors.is_empty() {
        walk.table(table.get_ref(), "");
    }
}

struct Walk<'a> {
    path: &'a Path,
    text: &'a str,
    values: &'a mut Values,
    problems: &'a mut Vec<Problem>,
}

impl Walk<'_> {
    fn table(&mut self, table: &DeTable<'_>, prefix: &str) {
        for (key, value) in table {
            let name = format!("{prefix}{}", key.get_ref());
            let section = format!("{name}.");
            if let Some(index) = KEYS.iter().position(|key| key.name == name) {
                self.values[index] = Some((raw(value.get_ref()), self.origin(key.span().start)));
            } else if let (true, DeValue::Table(inner)) = (is_section(&section), value.get_ref()) {
                self.table(inner, &section);
            } else {
                let meant = suggest::nearest(&name, KEYS.iter().map(|key: &Key| key.name));
                self.problem(key.span().start, unknown(&name, meant), Hides::Key(meant.unwrap_or_default()));
            }
        }
    }

    fn origin(&self, at: usize) -> Origin {
        let before = &self.text.as_bytes()[..at.min(self.text.len())];
        Origin::File(self.path.into(), 1 + before.iter().filter(|&&byte| byte == b'\n').count())
    }

    fn problem(&mut self, at: usize, text: String, hides: Hides) {
        let origin = self.origin(at);
        self.problems.push(Problem { origin, text, hides });
    }
}

fn is_section(prefix: &str) -> bool {
    KEYS.iter().any(|key| key.name.starts_with(prefix))
}

fn unknown(name: &str, meant: Option<&str>) -> String {
    let what = if is_section(&format!("{name}.")) {
        return format!("{name}: expected a table, written [{name}]");
    } else {
        format!("unknown key `{name}`")
    };
    match meant {
        Some(near) => format!("{what}, did you mean `{near}`?"),
        None => what,
    }
}

fn raw(value: &DeValue<'_>) -> Raw {
    match value {
        DeValue::String(text) => Raw::Text(text.to_string()),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map_or(Raw::Other("number beyond 64 bits"), Raw::Number),
        DeValue::Boolean(value) => Raw::Boolean(*value),
        DeValue::Array(items) => {
            Raw::List(items.iter().map(|item: &Spanned<DeValue<'_>>| raw(item.get_ref())).collect())
        }
        DeValue::Float(_) => Raw::Other("fraction"),
        DeValue::Datetime(_) => Raw::Other("date"),
        DeValue::Table(_) => Raw::Other("table"),
    }
}

/// Parses a single value in the format of the table's defaults.
pub(super) fn literal(text: &str) -> Result<Raw, String> {
    DeValue::parse(text).map(|value| raw(value.get_ref())).map_err(|error| error.message().to_owned())
}
