//! The kernel's files: all files of /proc and /sys that can be opened for writing, and all ineffective masks.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use super::trace::CAREFUL;
use crate::see::Outcome;

/// Maximum depth of paths, which these file systems do not reach.
const DEPTH_MAX: usize = 24;

/// `makedev(1, 3)`: /dev/null, which covers masked files.
const NULL: u64 = 0x103;

/// Prints `GOT write PATH` for each file below /proc (except processes) and /sys that can be opened for
/// writing; nothing is written.
pub(crate) fn kernel() -> Outcome {
    let mut seen = 0;
    for top in ["/proc", "/sys"] {
        walk(Path::new(top), 0, &mut seen);
    }
    println!("saw files {seen}");
    Ok(0)
}

fn walk(folder: &Path, depth: usize, seen: &mut u64) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_of_a_process = folder == Path::new("/proc")
            && (name.bytes().all(|byte| byte.is_ascii_digit()) || is_self(&name));
        let Ok(kind) = entry.file_type() else { continue };
        if is_of_a_process || depth > DEPTH_MAX {
            continue;
        }
        if kind.is_dir() {
            walk(&entry.path(), depth + 1, seen);
        } else if kind.is_file() {
            *seen += 1;
            let path = entry.path();
            // Root can open a file without write permissions, and a mask may be a device.
            let is_writable =
                fs::metadata(&path).is_ok_and(|about| about.is_file() && about.mode() & 0o222 != 0);
            if is_writable && fs::OpenOptions::new().write(true).custom_flags(CAREFUL).open(&path).is_ok() {
                println!("GOT write {}", path.display());
            }
        }
    }
}

/// Links to a process' own directory.
fn is_self(name: &str) -> bool {
    ["self", "thread-self"].contains(&name)
}

/// Prints `GOT unmasked PATH` for each existing path that is neither /dev/null nor an empty directory.
pub(crate) fn masks(paths: &[&str]) -> Outcome {
    for path in paths {
        let Ok(about) = fs::metadata(path) else {
            println!("held {path}: not there");
            continue;
        };
        let is_null = about.file_type().is_char_device() && about.rdev() == NULL;
        let is_empty = about.is_dir() && fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
        if is_null || is_empty {
            println!("held {path}: masked");
        } else {
            println!("GOT unmasked {path}");
        }
    }
    Ok(0)
}

/// Creates empty files in a directory until it is refused, prints their number, and sleeps.
pub(crate) fn inodes(folder: &str) -> Outcome {
    /// More than a small file system has.
    const ENOUGH: u64 = 200_000;
    fs::create_dir_all(folder).map_err(|error| format!("create {folder}: {error}"))?;
    for made in 0..ENOUGH {
        if let Err(error) = fs::File::create(format!("{folder}/{made}")) {
            println!("saw inodes {made}: {error}");
            break;
        }
    }
    crate::act::sleep_forever()
}
