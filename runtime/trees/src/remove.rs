//! Removes trees without references: writable layers, image layers, blobs. Their content is untrusted, so
//! symbolic links are not followed. Stack and number of descriptors do not depend on the depth of
//! directories: each subdirectory is moved up to the top before it is emptied, so at most two directories are
//! open.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use coracle_job::Failure;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, openat2, renameat, statat, unlinkat};
use rustix::io::Errno;

use crate::io_failure;

/// Minimum number of path components: paths of the store have more than `/`, `/var` or `/var/lib`.
const COMPONENTS_MIN: usize = 3;

/// Removes each path recursively. A missing path is not an error.
///
/// # Errors
/// The first failure, after all paths were tried.
pub fn run(paths: &[PathBuf]) -> Result<(), Failure> {
    let mut outcome = Ok(());
    for path in paths {
        outcome = outcome.and(remove(path));
    }
    outcome
}

fn remove(path: &Path) -> Result<(), Failure> {
    let names = path.components().filter(|component| matches!(component, Component::Normal(_))).count();
    let is_plain =
        path.components().all(|component| !matches!(component, Component::ParentDir | Component::CurDir));
    if !path.is_absolute() || !is_plain || names < COMPONENTS_MIN {
        return Err(Failure::invalid(format!("remove {}: not a path of the store", path.display())));
    }
    let removed = match path.symlink_metadata() {
        Err(error) => Err(error),
        Ok(metadata) if metadata.is_dir() => {
            empty_at(path).map_err(io::Error::from).and_then(|()| std::fs::remove_dir(path))
        }
        Ok(_) => std::fs::remove_file(path),
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(|error| io_failure("remove", path, &error)),
    }
}

/// Opens a subdirectory; fails for a mount point with EXDEV before anything in it is changed.
fn open(directory: impl AsFd, name: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat2(directory, name, flags, Mode::empty(), ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS)
}

fn empty_at(path: &Path) -> Result<(), Errno> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Err(Errno::INVAL) };
    let parent = rustix::fs::open(parent, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let name = std::ffi::CString::new(name.as_encoded_bytes()).map_err(|_| Errno::INVAL)?;
    empty(parent.as_fd(), &name)
}

/// Empties the directory `name` in `parent`. Each round removes all subdirectories of its start and moves
/// their subdirectories up, so there are as many rounds as the tree has levels.
///
/// # Errors
/// Those of the system calls; EXDEV for a mount point, before anything in it is changed.
pub fn empty(parent: BorrowedFd<'_>, name: &CStr) -> Result<(), Errno> {
    let top = open(parent, name)?;
    let mut moved = 0;
    loop {
        let directories = empty_of_files(&top)?;
        if directories.is_empty() {
            return Ok(());
        }
        for name in directories {
            let directory = open(&top, &name)?;
            for below in empty_of_files(&directory)? {
                moved = bring_up(&directory, &below, &top, moved)?;
            }
            drop(directory);
            unlinkat(&top, &name, AtFlags::REMOVEDIR)?;
        }
    }
}

/// Moves a directory to the top under an unused name.
fn bring_up(from: &OwnedFd, name: &CStr, top: &OwnedFd, mut number: u64) -> Result<u64, Errno> {
    loop {
        number += 1;
        let free = format!(".coracle-{number}");
        match statat(top, &free, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => {
                renameat(from, name, top, &free)?;
                return Ok(number);
            }
            Ok(_) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Removes everything except directories; returns the names of the directories.
fn empty_of_files(directory: &OwnedFd) -> Result<Vec<std::ffi::CString>, Errno> {
    let mut directories = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let is_directory = match entry.file_type() {
            FileType::Directory => true,
            FileType::Unknown => {
                let status = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
                FileType::from_raw_mode(status.st_mode) == FileType::Directory
            }
            _ => false,
        };
        if is_directory {
            directories.push(name.to_owned());
        } else {
            unlinkat(directory, name, AtFlags::empty())?;
        }
    }
    Ok(directories)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn deep_and_wide_trees_are_removed_without_following_links_as_root() {
        let base = std::env::temp_dir().join(format!("coracle-remove-{}", std::process::id()));
        let (tree, kept) = (base.join("a/tree"), base.join("kept"));
        fs::create_dir_all(&tree).unwrap();
        fs::create_dir_all(&kept).unwrap();
        fs::write(kept.join("file"), "").unwrap();
        std::os::unix::fs::symlink(&kept, tree.join("link")).unwrap();
        // Deeper than the longest path, and with the name that this module would choose.
        let mut directory = rustix::fs::open(&tree, OFlags::PATH, Mode::empty()).unwrap();
        for _ in 0..3000 {
            rustix::fs::mkdirat(&directory, ".coracle-1", Mode::from_raw_mode(0)).unwrap();
            directory = open(&directory, c".coracle-1").unwrap();
        }
        drop(directory);
        run(&[tree.clone(), base.join("a/missing")]).unwrap();
        assert!(!tree.exists() && kept.join("file").exists());
        fs::remove_dir_all(&base).unwrap();
    }

    /// A mount within a removed tree is not emptied; the test uses /proc.
    #[test]
    fn mounts_are_not_entered() {
        let error = empty_at(Path::new("/proc")).unwrap_err();
        assert_eq!(error, Errno::XDEV);
    }

    #[test]
    fn paths_outside_of_a_store_are_refused() {
        for path in ["/", "/var/lib", "relative/path/of/some/depth", "/var/lib/x/../../../etc"] {
            assert!(run(&[path.into()]).is_err(), "{path}");
        }
    }
}
