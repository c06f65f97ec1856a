//! Deleting trees that nothing refers to any more: what containers wrote, layers, blobs. Their makers may have been
//! hostile, so nothing follows a symlink, and no depth of directories costs stack or descriptors: each subdirectory is
//! moved up to the top before it is looked into, so two open directories are the most there ever are.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use coracle_job::Failure;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, openat2, renameat, statat, unlinkat};
use rustix::io::Errno;

use crate::failure::{invalid, io_failure};

/// Fewer components than this name no tree of ours: `/`, `/var`, `/var/lib`.
const COMPONENTS_MIN: usize = 3;

/// Deletes each path with all below it. A missing one is success; the first failure is told after all were tried.
pub(crate) fn run(paths: &[PathBuf]) -> Result<(), Failure> {
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
        return Err(invalid(format!("remove {}: it is not a path of the store", path.display())));
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

/// Opens a directory below another one; a mount point is EXDEV, before anything in it is touched.
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

/// Empties the directory `name` in `parent`. Each round deletes every directory that was in it when the round began, and
/// brings their subdirectories up; so there are as many rounds as the tree is deep.
pub(crate) fn empty(parent: BorrowedFd<'_>, name: &CStr) -> Result<(), Errno> {
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

/// Moves a directory to the top under a name that is free there.
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

/// Deletes what is no directory, and names what is.
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
    fn deep_and_wide_trees_go_and_links_are_not_followed() {
        let base = std::env::temp_dir().join(format!("coracle-remove-{}", std::process::id()));
        let (tree, kept) = (base.join("a/tree"), base.join("kept"));
        fs::create_dir_all(&tree).unwrap();
        fs::create_dir_all(&kept).unwrap();
        fs::write(kept.join("file"), "").unwrap();
        std::os::unix::fs::symlink(&kept, tree.join("link")).unwrap();
        // Deeper than a path can name, and with a name we would choose ourselves.
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

    /// A mount is somebody else's, even inside a tree that goes: /proc stands for one.
    #[test]
    fn mounts_are_not_entered() {
        let error = empty_at(Path::new("/proc")).unwrap_err();
        assert_eq!(error, Errno::XDEV);
    }

    #[test]
    fn what_cannot_be_ours_is_refused() {
        for path in ["/", "/var/lib", "relative/path/of/some/depth", "/var/lib/x/../../../etc"] {
            assert!(run(&[path.into()]).is_err(), "{path}");
        }
    }
}
