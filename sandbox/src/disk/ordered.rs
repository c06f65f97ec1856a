//! Whether a file system makes changes of names durable in their order. On one that does, a file that was renamed has its old
//! or its new name after a power cut; on others it may have none.

use std::fs;
use std::path::Path;

use nix::sys::stat::{major, minor, stat};
use nix::sys::statfs::{FsType, statfs};

/// Magic numbers of file systems with a log of metadata: XFS, btrfs, F2FS, bcachefs, tmpfs (include/uapi/linux/magic.h,
/// fs/xfs/libxfs/xfs_format.h, fs/bcachefs/bcachefs_format.h).
const ORDERED: [i128; 5] = [0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0xca45_1a4e, 0x0102_1994];
const EXT4: i128 = 0xef53;

/// Whether the file system at `path` orders changes of names; false if that is unknown. ext4 does if it has a journal:
/// `/sys/fs/ext4/DEVICE/journal_task` is then a PID (Linux 4.20).
pub(super) fn orders_names(path: &Path) -> bool {
    let Ok(about) = statfs(path) else { return false };
    let FsType(magic) = about.filesystem_type();
    // Its type depends on the C library.
    let magic = i128::from(magic);
    if magic != EXT4 {
        return ORDERED.contains(&magic);
    }
    let Ok(device) = stat(path).map(|about| about.st_dev) else { return false };
    let device = format!("/sys/dev/block/{}:{}", major(device), minor(device));
    let Some(target) = fs::read_link(device).ok() else { return false };
    let Some(name) = target.file_name() else { return false };
    let task = fs::read_to_string(Path::new("/sys/fs/ext4").join(name).join("journal_task"));
    task.is_ok_and(|task| task.trim().parse::<u32>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_file_systems_do_not_order_names() {
        assert!(!orders_names(Path::new("/proc")));
        assert!(!orders_names(Path::new("/none")));
        assert!(orders_names(Path::new("/dev/shm")), "a tmpfs has no names after a power cut");
    }
}
