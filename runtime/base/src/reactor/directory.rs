//! Notification of changes in directories, which may be missing at first (inotify(7)).

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use super::Watched;

/// Number of attempts to add the watches while directories are being created.
const ARM_TRIES: u32 = 8;
/// Maximum number of subdirectories of one directory that are watched.
const FOLDERS_MAX: usize = 256;

/// Events that mean a change in a directory.
const CHANGES: AddWatchFlags = AddWatchFlags::IN_CREATE
    .union(AddWatchFlags::IN_CLOSE_WRITE)
    .union(AddWatchFlags::IN_MOVE)
    .union(AddWatchFlags::IN_DELETE)
    .union(AddWatchFlags::IN_DELETE_SELF)
    .union(AddWatchFlags::IN_MOVE_SELF);

/// Events in an existing ancestor that mean that a missing directory may have been created.
const ARRIVALS: AddWatchFlags = AddWatchFlags::IN_CREATE
    .union(AddWatchFlags::IN_MOVED_TO)
    .union(AddWatchFlags::IN_DELETE_SELF)
    .union(AddWatchFlags::IN_MOVE_SELF);

/// Events of removed names, and of the removal of the directory itself.
const REMOVALS: AddWatchFlags = AddWatchFlags::IN_DELETE
    .union(AddWatchFlags::IN_MOVED_FROM)
    .union(AddWatchFlags::IN_DELETE_SELF)
    .union(AddWatchFlags::IN_MOVE_SELF);

/// Reports removals of names in a directory, and of the directory itself. One for all removals: closing it would stop
/// the event loop until the kernel has freed the watches (13 ms with Linux 6.18).
#[derive(Default)]
pub struct Removals {
    /// `None` until the first call of [`Removals::watch`].
    inotify: RefCell<Option<Rc<Watched<Inotify>>>>,
    #[cfg(feature = "simulation")]
    simulated: RefCell<Option<Rc<Watched>>>,
    /// Whether nothing was reported since the last watch was added.
    is_watching: Cell<bool>,
}

impl Removals {
    /// Watches a directory. Called again before each look at the directory, which may be another one with the same path.
    ///
    /// # Errors
    /// The error of inotify(7): the directory does not exist, or a limit of the user or of descriptors.
    pub fn watch(&self, directory: &Path) -> io::Result<()> {
        // A directory that was removed since then has been reported.
        if self.is_watching.get() {
            return Ok(());
        }
        self.add_watch(directory)?;
        self.is_watching.set(true);
        Ok(())
    }

    fn add_watch(&self, directory: &Path) -> io::Result<()> {
        #[cfg(feature = "simulation")]
        if let Some(node) = coracle_sandbox::simulation::node().filter(|node| node.has_path(directory)) {
            *self.simulated.borrow_mut() = Some(Rc::new(Watched::new(node.arm_removals(directory)?)?));
            return Ok(());
        }
        let mut kept = self.inotify.borrow_mut();
        let inotify = match kept.take() {
            Some(inotify) => inotify,
            None => {
                let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
                Rc::new(Watched::new(inotify)?)
            }
        };
        kept.insert(inotify).inner().add_watch(directory, REMOVALS | AddWatchFlags::IN_ONLYDIR)?;
        Ok(())
    }

    /// Waits until something was removed since the last call. [`Removals::watch`] has succeeded before.
    ///
    /// # Errors
    /// The error of a read, which may be temporary.
    pub async fn next(&self) -> io::Result<()> {
        let reported = self.reported().await;
        self.is_watching.set(false);
        reported
    }

    async fn reported(&self) -> io::Result<()> {
        #[cfg(feature = "simulation")]
        {
            let simulated = self.simulated.borrow().clone();
            if let Some(simulated) = simulated {
                return simulated.readable().await;
            }
        }
        let inotify = self.inotify.borrow().clone().ok_or(Errno::EBADF)?;
        inotify.read_with(|_| Ok(inotify.inner().read_events()?)).await?;
        // Many removals at once are one.
        while inotify.inner().read_events().is_ok() {}
        Ok(())
    }
}

/// Returns a descriptor that becomes readable at the next change in one of `directories` or their direct
/// subdirectories, or when a missing one may have been created. It reports one change; after it the caller
/// reads the directories and arms again.
///
/// # Errors
/// The error of inotify(7), for example a limit of the user; an error if directories keep being created while
/// the watches are added.
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
    Err(io::Error::other("the directories are created and removed too fast to be watched"))
}

/// Adds the watches. Returns false if a missing directory was created at the same time, because its creation
/// may not be reported.
fn is_stable(inotify: &Inotify, directory: &Path) -> io::Result<bool> {
    match inotify.add_watch(directory, CHANGES) {
        Ok(_) => {
            let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
            for entry in entries.take(FOLDERS_MAX) {
                // Regular files and removed directories need no watch.
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
