//! The quarantine directory. A damaged file is moved there together with the reason, so that it affects one
//! object only and can still be examined. The daemon never reads or deletes files in `quarantine/`.

use std::cell::{Cell, RefCell};
use std::io;
use std::path::{Path, PathBuf};

use coracle_sandbox::disk::{self, close_directory};

use crate::error::{Error, failed};

/// Maximum number of files in quarantine per name. If the same record is damaged more often, the disk is
/// failing, which the first reasons show.
const KEPT_MAX: u32 = 64;

/// Maximum length of the reason that is kept in memory, in characters.
const REASON_CHARS_MAX: usize = 300;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Number of files that were moved to quarantine since the daemon started, for Status and the metric.
pub fn damaged_count() -> u64 {
    COUNT.get()
}

/// The file that was moved to quarantine last and the reason, for Status; empty if there is none.
pub fn damaged_last() -> String {
    LAST.with_borrow(String::clone)
}

/// Moves `path` to `root/quarantine/NAME.N`, writes `reason` to `NAME.N.reason`, and returns the new path.
/// The caller logs the loss.
///
/// # Errors
/// The I/O error; an error if there are 64 files of this name already.
pub fn quarantine(root: &Path, path: &Path, reason: &str) -> Result<PathBuf, Error> {
    let moved = move_aside(&root.join("quarantine"), path, reason)
        .map_err(|error| Error::from(error).context(format!("move {} to quarantine", path.display())))?;
    COUNT.set(COUNT.get() + 1);
    let reason = reason.chars().take(REASON_CHARS_MAX);
    LAST.set(format!("{}: {}", path.display(), reason.collect::<String>()));
    Ok(moved)
}

/// Checks that files can be moved to quarantine: writes a file there, makes it durable, and removes it.
///
/// # Errors
/// The error of the file system.
pub fn require_quarantine(root: &Path) -> Result<(), Error> {
    let shelf = root.join("quarantine");
    let probe = shelf.join(".new-probe");
    let written = disk::create_private_dir_all(&shelf)
        .and_then(|()| disk::write_synced(&probe, b"a"))
        .and_then(|()| disk::remove_file(&probe));
    written.map_err(|error| failed("write to", &shelf, &error))
}

/// Restricts an existing quarantine directory to root (mode 0700). Earlier builds created it readable for
/// other users, although it can contain a container's files, including set-user-ID programs.
///
/// # Errors
/// The error of the file system.
pub fn close_quarantine(root: &Path) -> Result<(), Error> {
    let shelf = root.join("quarantine");
    match close_directory(&shelf) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::from(error).context(format!("set mode of {}", shelf.display())))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

fn move_aside(shelf: &Path, path: &Path, reason: &str) -> io::Result<PathBuf> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
    disk::create_private_dir_all(shelf)?;
    let target = (0..KEPT_MAX)
        .map(|number| shelf.join(format!("{name}.{number}")))
        .find(|target| disk::inspect(target).is_err())
        .ok_or(io::ErrorKind::QuotaExceeded)?;
    disk::rename(path, &target)?;
    let mut beside = target.clone().into_os_string();
    beside.push(".reason");
    disk::write(Path::new(&beside), format!("{}\n{reason}\n", path.display()).as_bytes())?;
    super::sync_dir(shelf)?;
    Ok(target)
}

#[cfg(test)]
mod tests {
    use super::quarantine;
    use crate::testdir::TestDir;
    use std::fs;

    #[test]
    fn a_file_is_moved_with_its_reason_and_overwrites_none() {
        let root = TestDir::new("quarantine");
        let bad = root.path().join("bad");
        for content in ["first", "second"] {
            fs::write(&bad, content).unwrap();
            let aside = quarantine(root.path(), &bad, "why not").unwrap();
            assert!(!bad.exists());
            assert_eq!(fs::read_to_string(&aside).unwrap(), content);
            let reason = fs::read_to_string(format!("{}.reason", aside.display())).unwrap();
            assert_eq!(reason, format!("{}\nwhy not\n", bad.display()));
            assert_eq!(super::damaged_last(), format!("{}: why not", bad.display()));
        }
    }

    #[test]
    fn a_missing_file_is_an_error() {
        let root = TestDir::new("quarantine");
        assert!(quarantine(root.path(), &root.path().join("none"), "x").is_err());
    }
}
