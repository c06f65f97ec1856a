//! Being told of changes in directories, which need not be there yet (inotify(7)).

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use super::Watched;

/// How often arming starts over when directories appear meanwhile.
const ARM_TRIES: u32 = 8;
/// Folders of one directory that are watched with it.
const FOLDERS_MAX: usize = 256;

/// What changes a directory.
const CHANGES: AddWatchFlags = AddWatchFlags::IN_CREATE
    .union(AddWatchFlags::IN_CLOSE_WRITE)
    .union(AddWatchFlags::IN_MOVE)
    .union(AddWatchFlags::IN_DELETE)
    .union(AddWatchFlags::IN_DELETE_SELF)
    .union(AddWatchFlags::IN_MOVE_SELF);

/// What can bring a missing directory about, seen from one above it.
const ARRIVALS: AddWatchFlags = AddWatchFlags::IN_CREATE
    .union(AddWatchFlags::IN_MOVED_TO)
    .union(AddWatchFlags::IN_DELETE_SELF)
    .union(AddWatchFlags::IN_MOVE_SELF);

/// A descriptor that becomes readable at the next change of one of `directories` and the folders in it, or, while there is
/// no such directory, at a change that may bring it. It is good for one change: look, then arm again.
///
/// # Errors
/// What inotify(7) says, limits of the user among it; directories that keep changing while they are armed.
pub fn arm(directories: &[PathBuf]) -> io::Result<Watched> {
    for _ in 0..ARM_TRIES {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        let mut all_stable = true;
        for directory in directories {
            all_stable &= is_stable(&inotify, directory)?;
        }
        if all_stable {
            return Watched::new(OwnedFd::from(inotify));
        }
    }
    Err(io::Error::other("directories come and go too fast"))
}

/// Adds the watches. False when what was missing is there by now, so that its arrival may have been overlooked.
fn is_stable(inotify: &Inotify, directory: &Path) -> io::Result<bool> {
    match inotify.add_watch(directory, CHANGES) {
        Ok(_) => {
            let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
            for entry in entries.take(FOLDERS_MAX) {
                // Files and what is gone again are no folders: nothing to watch.
                let _ = inotify.add_watch(&entry.path(), CHANGES | AddWatchFlags::IN_ONLYDIR);
            }
            return Ok(true);
        }
        Err(Errno::ENOENT | Errno::ENOTDIR) => {}
        Err(errno) => return Err(errno.into()),
    }
    let mut missing = directory;
    for above in directory.ancestors().skip(1) {
        let above = if above.as_os_str().as_bytes().is_empty() { Path::new(".") } else { above };
        match inotify.add_watch(above, ARRIVALS | AddWatchFlags::IN_ONLYDIR) {
            Ok(_) => return Ok(!missing.exists()),
            Err(Errno::ENOENT | Errno::ENOTDIR) => missing = above,
            Err(errno) => return Err(errno.into()),
        }
    }
    Err(Errno::ENOENT.into())
}
