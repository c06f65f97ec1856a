//! Locks of the root and the state directory, which only one daemon may use: a second one with the same state would
//! disconnect the first one's monitors, one with the same root would kill all pods that it does not know.

use std::fs::{File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use coracle_base::error::{Context, Error, Kind};
use coracle_base::reactor;

/// Maximum time for which a lock stays held after its daemon was killed: a child between clone and exec has copies of the
/// daemon's descriptors until it ends.
const LIMIT: Duration = Duration::from_secs(2);

/// Locks both directories, before any pod is accessed; the locks are held until the files are closed. The root directory
/// itself is locked, because it may be read-only, and the file `lock` in the state directory.
///
/// # Errors
/// `FailedPrecondition`, naming the directory and the process that holds its lock.
pub(crate) async fn both(root: &Path, state: &Path) -> Result<[File; 2], Error> {
    let path = state.join("lock");
    let file = File::create(&path).context(|| format!("make {}", path.display()))?;
    let state = lock(file, &path, "state").await?;
    let file = File::open(root).context(|| format!("open {}", root.display()))?;
    Ok([state, lock(file, root, "root").await?])
}

/// The process that holds the lock of a daemon with this root or state directory: which directory it is, and the PID, if it
/// is visible. `None` if there is none.
pub(crate) fn holder(root: &Path, state: &Path) -> Option<String> {
    // A shared lock for a moment: a daemon that starts meanwhile retries.
    let is_locked = |path: &Path| File::open(path).is_ok_and(|file| file.try_lock_shared().is_err());
    let of = |path: &Path, locked: &Path| {
        let pid = File::open(locked).ok().and_then(|file| holder_of(&file));
        let pid = pid.map_or(String::new(), |pid| format!(", process {pid},"));
        is_locked(locked).then(|| format!("a daemon{pid} holds {}", path.display()))
    };
    of(state, &state.join("lock")).or_else(|| of(root, root))
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

/// PID of the process that has locked a file, from proc_locks(5); `None` if it is in another PID namespace.
fn holder_of(file: &File) -> Option<i32> {
    let about = file.metadata().ok()?;
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    holder_in(&locks, about.dev(), about.ino())
}

fn holder_in(locks: &str, device: u64, inode: u64) -> Option<i32> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let wanted = format!("{major:02x}:{minor:02x}:{inode}");
    // NUMBER: FLOCK ADVISORY WRITE PID DEVICE:INODE START END; a process that waits for it has `->` after the number.
    locks.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace().skip(1);
        let is_it = words.next() == Some("FLOCK");
        let (pid, locked) = (words.nth(2)?.parse().ok()?, words.next()?);
        (is_it && locked == wanted && pid > 0).then_some(pid)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_lock_is_found() {
        let locks = "1: POSIX  ADVISORY  WRITE 11 08:01:77 0 EOF\n2: FLOCK  ADVISORY  WRITE 12 08:02:77 0 EOF\n\
            3: FLOCK  ADVISORY  WRITE 13 08:01:77 0 EOF\n3: -> FLOCK  ADVISORY  WRITE 14 08:01:77 0 EOF\n\
            4: FLOCK  ADVISORY  WRITE 0 08:03:77 0 EOF\n";
        for (minor, expected) in [(1, Some(13)), (2, Some(12)), (3, None), (4, None)] {
            assert_eq!(holder_in(locks, rustix::fs::makedev(8, minor), 77), expected, "{minor}");
        }
    }
}
