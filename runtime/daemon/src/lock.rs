//! Locks of the root and the state directory, which only one daemon may use: a second one with the same state would
//! disconnect the first one's monitors, one with the same root would kill all pods that it does not know. The lock of a directory
//! that another program removes is taken again in the new one; a daemon that starts within that moment is not refused, and reported.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coracle_base::error::{Context, Error, Kind};
use coracle_base::log;
use coracle_base::reactor::{self, Removals, Task};
use coracle_preflight::lock::holder_of;

/// Maximum time for which a lock stays held after its daemon was killed: a child between clone and exec has copies of the
/// daemon's descriptors until it ends.
const LIMIT: Duration = Duration::from_secs(2);

/// Pause after a removal, so that a program that removes a tree can finish.
const REMOVAL_PAUSE: Duration = Duration::from_millis(50);

/// Pause before another attempt after an error.
const AGAIN_PAUSE: Duration = Duration::from_secs(5);

/// The locks of both directories, which are held until the value is dropped.
pub(crate) struct Locks {
    _root: Task<()>,
    _state: Task<()>,
}

/// Locks both directories, before any pod is accessed. The root directory itself is locked, because it may be read-only, and the
/// file `lock` in the state directory.
///
/// # Errors
/// `FailedPrecondition`, naming the directory and the process that holds its lock.
pub(crate) async fn both(root: &Path, state: &Path) -> Result<Locks, Error> {
    let state = Place { what: "state", directory: state.to_owned(), path: state.join("lock") };
    let root = Place { what: "root", directory: root.to_owned(), path: root.to_owned() };
    let (of_state, of_root) = (state.lock().await?, root.lock().await?);
    Ok(Locks { _root: reactor::spawn(hold(root, of_root)), _state: reactor::spawn(hold(state, of_state)) })
}

/// A file or directory that is locked, and its directory, or itself.
struct Place {
    what: &'static str,
    directory: PathBuf,
    path: PathBuf,
}

impl Place {
    async fn lock(&self) -> Result<File, Error> {
        let path = self.path.as_path();
        let file = if path == self.directory { File::open(path) } else { File::create(path) };
        lock(file.context(|| format!("open {}", path.display()))?, path, self.what).await
    }

    async fn lock_again(&self) -> Result<File, Error> {
        // Others make it again, too: the control socket that of the state.
        crate::daemon::prepare_directory(&self.directory)?;
        self.lock().await
    }
}

/// Holds a lock. The kernel reports removals, so an idle node causes no work.
async fn hold(place: Place, mut held: File) {
    let removals = Removals::default();
    let (path, mut is_reported) = (place.path.as_path(), false);
    loop {
        // First the watch, so that nothing that is removed after the look is missed.
        // The parent: the removal of a directory that is open, as a locked one is, is not reported by itself.
        let watched = path.parent().map_or(Ok(()), |parent| removals.watch(parent));
        match is_at(&held, path) {
            Ok(true) if watched.is_ok() => {
                let _ = removals.next().await; // after an error the file is looked at, too
                reactor::sleep(REMOVAL_PAUSE).await;
                continue;
            }
            Ok(false) => match place.lock_again().await {
                Ok(file) => {
                    log::warn!("another program removed the lock of a directory, locked again"; path = path.display());
                    (held, is_reported) = (file, false);
                    continue;
                }
                Err(error) if !is_reported => {
                    log::error!("cannot lock a directory again, will retry"; error = error);
                    is_reported = true;
                }
                Err(_) => {} // logged before
            },
            Ok(true) | Err(_) => {}
        }
        reactor::sleep(AGAIN_PAUSE).await;
    }
}

/// Whether the path leads to this file.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let file = file.metadata()?;
    match path.metadata() {
        Ok(about) => Ok((about.dev(), about.ino()) == (file.dev(), file.ino())),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

async fn lock(file: File, path: &Path, what: &str) -> Result<File, Error> {
    let end = Instant::now() + LIMIT;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if Instant::now() < end => {
                reactor::sleep(Duration::from_millis(1)).await;
            }
            Err(TryLockError::WouldBlock) => {
                let pid = holder_of(&file).map_or(String::new(), |pid| format!(": process {pid}"));
                let text = format!("{}: another daemon runs on this {what} directory{pid}", path.display());
                return Err(Error::new(Kind::FailedPrecondition, text));
            }
            Err(TryLockError::Error(error)) => {
                return Err(error).context(|| format!("lock {}", path.display()));
            }
        }
    }
}
