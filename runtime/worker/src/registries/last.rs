//! A file as it is, or as it was when it last could be read as a whole: somebody who slips with an editor should not cut
//! the node off from its mirrors (REG-10). Copies are kept beside the store, as secret as the files.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::yaml::Problem;

/// What is wrong with a file.
#[derive(Debug, Default)]
pub(super) struct Problems {
    /// One each, with the file and mostly the line.
    pub(super) lines: Vec<String>,
    /// The first of them is of the whole file: it does not count, or only as it was.
    pub(super) is_broken: bool,
}

impl Problems {
    fn broken(line: String) -> Self {
        Self { lines: vec![line], is_broken: true }
    }
}

/// The file's text, where `check` finds it whole; else the last that was, of which `copy` is kept. None where there is no
/// file, or none that can be read.
pub(super) fn read(
    path: &Path,
    copy: &Path,
    check: impl Fn(&str) -> Result<(), Problem>,
) -> (Option<String>, Problems) {
    let name = path.display();
    let why = match std::fs::read(path) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            match check(&text) {
                Ok(()) => return (Some(text.into_owned()), kept(path, copy, &bytes)),
                Err(Problem { line, text }) => format!("{name}:{line}: {text}"),
            }
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let _ = std::fs::remove_file(copy); // it was taken away on purpose
            return (None, Problems::default());
        }
        Err(error) => format!("{name}: not read: {error}"),
    };
    let last = std::fs::read(copy).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let instead = if last.is_some() { "the last good one counts" } else { "the whole file is passed over" };
    (last, Problems::broken(format!("{why}: {instead}")))
}

fn kept(path: &Path, copy: &Path, bytes: &[u8]) -> Problems {
    let mut problems = Problems::default();
    if let Err(error) = keep(copy, bytes) {
        let (copy, name) = (copy.display(), path.display());
        problems.lines.push(format!("{copy}: not written, a broken {name} would be none: {error}"));
    }
    problems
}

/// Writes the copy where it differs; renamed into place, so that it is whole.
fn keep(copy: &Path, bytes: &[u8]) -> std::io::Result<()> {
    if std::fs::read(copy).is_ok_and(|known| known == bytes) {
        return Ok(());
    }
    let aside = copy.with_extension(std::process::id().to_string());
    let _ = std::fs::remove_file(&aside);
    let mut file = OpenOptions::new().create_new(true).write(true).mode(0o600).open(&aside)?;
    file.write_all(bytes)?;
    std::fs::rename(&aside, copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_file_counts_as_it_last_was_until_it_is_taken_away() {
        let folder = std::env::temp_dir().join(format!("coracle-last-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (path, copy) = (folder.join("file"), folder.join("copy.last"));
        let check = |text: &str| match text.contains('!') {
            true => Err(Problem { line: 7, text: "loud".into() }),
            false => Ok(()),
        };
        let read = || read(&path, &copy, check);
        assert!(matches!(read(), (None, Problems { is_broken: false, .. })));
        for (written, expected, said) in [
            ("a!", None, Some("file:7: loud: the whole file is passed over")),
            ("one", Some("one"), None),
            ("b!", Some("one"), Some("file:7: loud: the last good one counts")),
            ("two", Some("two"), None),
        ] {
            std::fs::write(&path, written).unwrap();
            let (text, problems) = read();
            assert_eq!((text.as_deref(), problems.is_broken), (expected, said.is_some()), "{written}");
            assert!(problems.lines.iter().zip(said).all(|(line, said)| line.ends_with(said)), "{problems:?}");
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!((read().0, copy.exists()), (None, false));
        std::fs::create_dir(&path).unwrap();
        assert!(read().1.is_broken, "what cannot be read is broken, too");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
