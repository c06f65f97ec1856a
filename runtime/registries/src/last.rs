//! Reads a configuration file, or the copy of its last valid content, so that a typing error does not disable
//! the node's mirrors (REG-10). The copies are next to the store and have the same permissions as the files.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use coracle_sandbox::describe_io;
use coracle_yaml::Problem;

use crate::node_file;

/// The problems of a file.
#[derive(Debug, Default)]
pub(crate) struct Problems {
    /// The problems, one line each, with the file and usually the line number.
    pub(crate) lines: Vec<String>,
    /// Whether the first problem concerns the whole file, which is then ignored or replaced by the copy.
    pub(crate) is_broken: bool,
}

impl Problems {
    fn broken(line: String) -> Self {
        Self { lines: vec![line], is_broken: true }
    }
}

/// The file's text if `check` accepts it, otherwise the last accepted text from the copy. `None` if there is
/// neither.
pub(crate) fn read(
    path: &Path,
    copy: &Path,
    check: impl Fn(&str) -> Result<(), Problem>,
) -> (Option<String>, Problems) {
    let name = path.display();
    let why = match node_file::read(path) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            match check(&text) {
                Ok(()) => return (Some(text.into_owned()), kept(path, copy, &bytes)),
                Err(Problem { line, text }) => format!("{name}:{line}: {text}"),
            }
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let _ = std::fs::remove_file(copy); // the administrator removed the file
            return (None, Problems::default());
        }
        Err(error) => format!("{name}: cannot be read: {}", describe_io(&error)),
    };
    let last = std::fs::read(copy).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let instead = if last.is_some() { "the last valid version applies" } else { "the whole file is ignored" };
    (last, Problems::broken(format!("{why}: {instead}")))
}

fn kept(path: &Path, copy: &Path, bytes: &[u8]) -> Problems {
    let mut problems = Problems::default();
    if let Err(error) = keep(copy, bytes) {
        let (copy, name) = (copy.display(), path.display());
        problems.lines.push(format!(
            "{copy}: cannot be written, so there is no copy for an invalid {name}: {}",
            describe_io(&error)
        ));
    }
    problems
}

/// Writes the copy if its content differs. The copy is renamed into place, so that it is always complete.
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

/// Returns the text of a file; `None` if it does not exist or cannot be read. A read error is added to
/// `problems`.
pub(crate) fn text_of(path: &Path, problems: &mut Vec<String>) -> Option<String> {
    let text = |bytes| String::from_utf8(bytes).map_err(|_| std::io::Error::other("it is not UTF-8"));
    match node_file::read(path).and_then(text) {
        Ok(text) => Some(text),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => {
            problems.push(format!("{}: {}", path.display(), describe_io(&error)));
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_utf_8_is_a_problem() {
        let path = std::env::temp_dir().join(format!("coracle-not-utf-8-{}", std::process::id()));
        std::fs::write(&path, b"mirrors: \xff\n").unwrap();
        let mut problems = Vec::new();
        assert_eq!(text_of(&path, &mut problems), None);
        assert_eq!(problems, [format!("{}: it is not UTF-8", path.display())]);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn the_last_valid_version_applies_until_the_file_is_removed() {
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
            ("a!", None, Some("file:7: loud: the whole file is ignored")),
            ("one", Some("one"), None),
            ("b!", Some("one"), Some("file:7: loud: the last valid version applies")),
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
        assert!(read().1.is_broken, "a file that cannot be read is invalid, too");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
