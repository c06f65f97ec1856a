//! Who holds the locks of the root and the state directory, which only one daemon may use.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The process that holds the lock of a daemon with this root or state directory: which directory it is, and the PID, if it
/// is visible. `None` if there is none.
pub fn holder(root: &Path, state: &Path) -> Option<String> {
    // A shared lock for a moment: a daemon that starts meanwhile retries.
    let is_locked = |path: &Path| File::open(path).is_ok_and(|file| file.try_lock_shared().is_err());
    let of = |path: &Path, locked: &Path| {
        let pid = File::open(locked).ok().and_then(|file| holder_of(&file));
        let pid = pid.map_or(String::new(), |pid| format!(", process {pid},"));
        is_locked(locked).then(|| format!("a daemon{pid} holds {}", path.display()))
    };
    of(state, &state.join("lock")).or_else(|| of(root, root))
}

/// PID of the process that has locked a file, from proc_locks(5); `None` if it is in another PID namespace.
pub fn holder_of(file: &File) -> Option<i32> {
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
