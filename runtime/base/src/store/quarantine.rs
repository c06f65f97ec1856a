//! Where damaged files go: moved, with the reason beside them, so that one bad record costs one object and a person
//! can still look at it. Nothing in `quarantine/` is ever read or deleted by the daemon.

use std::cell::Cell;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::error::Error;

/// Files of one name that are kept. A store that damages the same record more often than that has a dying disk, and
/// the reasons of the first ones say so.
const KEPT_MAX: u32 = 64;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// How many files were set aside since the daemon started: for Status and the metric.
pub fn damaged_count() -> u64 {
    COUNT.get()
}

/// Moves `path` to `root/quarantine/NAME.N` and writes `reason` to `NAME.N.reason`. Gives the new path. Logs nothing:
/// the caller knows what is lost.
///
/// # Errors
/// What the disk says; a name of which 64 files are kept already.
pub fn quarantine(root: &Path, path: &Path, reason: &str) -> Result<PathBuf, Error> {
    COUNT.set(COUNT.get() + 1);
    move_aside(&root.join("quarantine"), path, reason)
        .map_err(|error| Error::from(error).context(format!("set aside {}", path.display())))
}

/// Takes from other users what an earlier build gave them: a container's directory holds what it wrote, set-user-ID
/// programs included.
///
/// # Errors
/// What the disk says.
pub fn close_quarantine(root: &Path) -> Result<(), Error> {
    let shelf = root.join("quarantine");
    match close_directory(&shelf) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::from(error).context(format!("set mode of {}", shelf.display())))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Makes a directory root's alone (0700). One that is so already is not written to: its disk may be read-only, and a daemon has to
/// start all the same.
///
/// # Errors
/// What the disk says.
pub fn close_directory(path: &Path) -> io::Result<()> {
    const PRIVATE: u32 = 0o700;
    match fs::metadata(path)?.permissions().mode() & 0o7777 {
        PRIVATE => Ok(()),
        _ => fs::set_permissions(path, fs::Permissions::from_mode(PRIVATE)),
    }
}

fn move_aside(shelf: &Path, path: &Path, reason: &str) -> io::Result<PathBuf> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
    fs::DirBuilder::new().recursive(true).mode(0o700).create(shelf)?;
    let target = (0..KEPT_MAX)
        .map(|number| shelf.join(format!("{name}.{number}")))
        .find(|target| target.symlink_metadata().is_err())
        .ok_or(io::ErrorKind::QuotaExceeded)?;
    fs::rename(path, &target)?;
    let mut beside = target.clone().into_os_string();
    beside.push(".reason");
    fs::write(beside, format!("{}\n{reason}\n", path.display()))?;
    super::sync_dir(shelf)?;
    Ok(target)
}

#[cfg(test)]
mod tests {
    use super::quarantine;
    use crate::testdir::TestDir;
    use std::fs;

    #[test]
    fn a_file_is_moved_with_its_reason_and_never_over_an_older_one() {
        let root = TestDir::new("quarantine");
        let bad = root.path().join("bad");
        for content in ["first", "second"] {
            fs::write(&bad, content).unwrap();
            let aside = quarantine(root.path(), &bad, "why not").unwrap();
            assert!(!bad.exists());
            assert_eq!(fs::read_to_string(&aside).unwrap(), content);
            let reason = fs::read_to_string(format!("{}.reason", aside.display())).unwrap();
            assert_eq!(reason, format!("{}\nwhy not\n", bad.display()));
        }
    }

    #[test]
    fn a_file_that_is_gone_is_an_error() {
        let root = TestDir::new("quarantine");
        assert!(quarantine(root.path(), &root.path().join("none"), "x").is_err());
    }
}
