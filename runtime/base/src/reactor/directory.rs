//! Notification of changes in directories, which may be missing at first (inotify(7)).

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};

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

thread_local! {
    static SHARED: RefCell<Weak<Shared>> = const { RefCell::new(Weak::new()) };
}

/// The inotify instance of all [`Changes`] of a thread. One for all: the kernel gives a user 128 of them (inotify(7)), and closing one stops
/// the event loop until the kernel has freed its watches (13 ms with Linux 6.18).
struct Shared {
    inotify: Watched<Inotify>,
    watches: RefCell<Vec<Watch>>,
}

/// A directory that one [`Changes`] watches. The kernel has one watch per directory, which others may have in common.
struct Watch {
    descriptor: WatchDescriptor,
    events: AddWatchFlags,
    is_reported: Rc<Cell<bool>>,
}

impl Shared {
    fn get() -> io::Result<Rc<Shared>> {
        SHARED.with_borrow_mut(|shared| {
            if let Some(shared) = shared.upgrade() {
                return Ok(shared);
            }
            let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
            let made = Rc::new(Shared { inotify: Watched::new(inotify)?, watches: RefCell::default() });
            *shared = Rc::downgrade(&made);
            Ok(made)
        })
    }

    /// Reads all events, and reports them to their owners.
    ///
    /// # Errors
    /// The error of a read; `WouldBlock`: there are no more events.
    fn read(&self) -> io::Result<()> {
        loop {
            let events = self.inotify.inner().read_events()?;
            events.iter().for_each(|event| self.take(event));
            // The owners may wait for the event that was read here.
            self.inotify.wake_readers();
        }
    }

    fn take(&self, event: &InotifyEvent) {
        let has_ended = event.mask.contains(AddWatchFlags::IN_IGNORED);
        let is_for_all = event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW);
        let (mut is_watched, mut is_wanted) = (false, false);
        self.watches.borrow_mut().retain(|watch| {
            let is_same = watch.descriptor == event.wd;
            is_watched |= is_same;
            if is_for_all || is_same && (has_ended || event.mask.intersects(watch.events)) {
                watch.is_reported.set(true);
                is_wanted = true;
            }
            !(has_ended && is_same)
        });
        if is_watched && !is_wanted {
            // Wanted by one whose watch has ended. The others are told that the watch ends, and begin one without these events.
            let _ = self.inotify.inner().rm_watch(event.wd);
        }
    }
}

/// Reports changes in the directories that are watched for it.
pub struct Changes {
    shared: Rc<Shared>,
    is_reported: Rc<Cell<bool>>,
}

impl Changes {
    fn new() -> io::Result<Changes> {
        Ok(Changes { shared: Shared::get()?, is_reported: Rc::default() })
    }

    fn add(&self, directory: &Path, events: AddWatchFlags) -> nix::Result<()> {
        // What others watch of the same directory is kept.
        let flags = events | AddWatchFlags::from_bits_retain(nix::libc::IN_MASK_ADD);
        let descriptor = self.shared.inotify.inner().add_watch(directory, flags)?;
        let watch = Watch { descriptor, events, is_reported: Rc::clone(&self.is_reported) };
        self.shared.watches.borrow_mut().push(watch);
        Ok(())
    }

    /// Waits for a change since the watches were added or since the last call that returned.
    ///
    /// # Errors
    /// The error of a read, which may be temporary.
    pub async fn next(&self) -> io::Result<()> {
        let reported = |_: BorrowedFd<'_>| {
            let read = self.shared.read();
            if self.is_reported.take() { Ok(()) } else { read }
        };
        self.shared.inotify.read_with(reported).await
    }
}

impl Drop for Changes {
    fn drop(&mut self) {
        let mut watches = self.shared.watches.borrow_mut();
        while let Some(index) =
            watches.iter().position(|watch| Rc::ptr_eq(&watch.is_reported, &self.is_reported))
        {
            let descriptor = watches.swap_remove(index).descriptor;
            if watches.iter().all(|other| other.descriptor != descriptor) {
                // It fails if the directory was removed.
                let _ = self.shared.inotify.inner().rm_watch(descriptor);
            }
        }
    }
}

/// Reports removals of names in a directory, and of the directory itself.
#[derive(Default)]
pub struct Removals {
    /// `None` until the first call of [`Removals::watch`].
    changes: RefCell<Option<Rc<Changes>>>,
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
        let changes = Changes::new()?;
        changes.add(directory, REMOVALS | AddWatchFlags::IN_ONLYDIR)?;
        // The watch of the directory before ends with it, after the next one has begun.
        self.changes.replace(Some(Rc::new(changes)));
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
        let changes = self.changes.borrow().clone().ok_or(Errno::EBADF)?;
        changes.next().await
    }
}

/// Watches `directories` and their direct subdirectories for one change, which may also be that a missing one was created.
/// After it the caller reads the directories and arms again.
///
/// # Errors
/// The error of inotify(7), for example a limit of the user; an error if directories keep being created while
/// the watches are added.
pub fn arm(directories: &[PathBuf]) -> io::Result<Changes> {
    for _ in 0..ARM_TRIES {
        let changes = Changes::new()?;
        let mut all_stable = true;
        for directory in directories {
            all_stable &= is_stable(&changes, directory)?;
        }
        if all_stable {
            return Ok(changes);
        }
    }
    Err(io::Error::other("the directories are created and removed too fast to be watched"))
}

/// Adds the watches. Returns false if a missing directory was created at the same time, because its creation
/// may not be reported.
fn is_stable(changes: &Changes, directory: &Path) -> io::Result<bool> {
    match changes.add(directory, CHANGES) {
        Ok(()) => {
            let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
            for entry in entries.take(FOLDERS_MAX) {
                // Regular files and removed directories need no watch.
                let _ = changes.add(&entry.path(), CHANGES | AddWatchFlags::IN_ONLYDIR);
            }
            return Ok(true);
        }
        Err(Errno::ENOENT | Errno::ENOTDIR) => {}
        Err(errno) => return Err(errno.into()),
    }
    let mut missing = directory;
    for above in directory.ancestors().skip(1) {
        let above = if above.as_os_str().as_bytes().is_empty() { Path::new(".") } else { above };
        match changes.add(above, ARRIVALS | AddWatchFlags::IN_ONLYDIR) {
            Ok(()) => return Ok(!missing.exists()),
            Err(Errno::ENOENT | Errno::ENOTDIR) => missing = above,
            Err(errno) => return Err(errno.into()),
        }
    }
    Err(Errno::ENOENT.into())
}
