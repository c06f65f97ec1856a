//! Measures the disk usage of writable layers, whose content is untrusted and which containers may change
//! during the measurement. Symbolic links are not followed and mounts not crossed. Stack and number of
//! descriptors do not depend on the depth of directories: each directory is opened by its path from the top,
//! component by component.

use std::collections::HashSet;
use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use coracle_job::TreeUsage;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, openat2, statat};
use rustix::io::Errno;

/// Maximum number of directories of one tree; further directories are not counted.
const DIRECTORIES_MAX: usize = 1 << 20;
/// Size of a block in stat(2), independent of the file system.
const BLOCK_BYTES: u64 = 512;

/// Measures each tree; the usage of a missing one is zero.
pub fn run(paths: &[PathBuf]) -> Vec<TreeUsage> {
    paths.iter().map(|path| measure(path).unwrap_or_default()).collect()
}

fn measure(path: &Path) -> Result<TreeUsage, Errno> {
    // A link leads to a layer of an additional store, which is none of the disk's.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let top = rustix::fs::open(path, flags, Mode::empty())?;
    let mut tree =
        Tree { top, usage: TreeUsage::default(), linked: HashSet::new(), waiting: Vec::new(), seen: 0 };
    let own = rustix::fs::fstat(&tree.top)?;
    tree.count(&own);
    tree.waiting.push(CString::from(c"."));
    while let Some(directory) = tree.waiting.pop() {
        // A directory that was removed or replaced meanwhile is not counted.
        let _ = tree.look_into(&directory);
    }
    Ok(tree.usage)
}

struct Tree {
    top: OwnedFd,
    usage: TreeUsage,
    /// Device and inode of files with several hard links that have been counted.
    linked: HashSet<(u64, u64)>,
    /// Directories that are still to be read, as paths relative to the top.
    waiting: Vec<CString>,
    seen: usize,
}

impl Tree {
    fn count(&mut self, status: &rustix::fs::Stat) {
        let is_directory = FileType::from_raw_mode(status.st_mode) == FileType::Directory;
        let identity = (status.st_dev, status.st_ino);
        if !is_directory && status.st_nlink > 1 && !self.linked.insert(identity) {
            return;
        }
        let bytes = u64::try_from(status.st_blocks).unwrap_or(0).saturating_mul(BLOCK_BYTES);
        self.usage.bytes = self.usage.bytes.saturating_add(bytes);
        self.usage.inodes = self.usage.inodes.saturating_add(1);
    }

    fn look_into(&mut self, path: &CString) -> Result<(), Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let directory = openat2(&self.top, path, flags, Mode::empty(), resolve)?;
        for entry in Dir::read_from(&directory)? {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let Ok(status) = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            self.count(&status);
            let is_directory = FileType::from_raw_mode(status.st_mode) == FileType::Directory;
            if is_directory && self.seen < DIRECTORIES_MAX {
                self.seen += 1;
                let below = [path.as_bytes(), b"/", name.to_bytes()].concat();
                // A path that is too long fails when it is opened.
                self.waiting.extend(CString::new(below).ok());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hard_links_count_once_and_symbolic_links_are_not_followed() {
        let folder = std::env::temp_dir().join(format!("coracle-measure-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("a/b")).unwrap();
        std::fs::write(folder.join("a/b/file"), vec![1; 100_000]).unwrap();
        std::fs::hard_link(folder.join("a/b/file"), folder.join("again")).unwrap();
        std::os::unix::fs::symlink("/usr", folder.join("elsewhere")).unwrap();
        let measured = run(&[folder.clone(), folder.join("gone")]);
        // The tree itself, two directories, one file, one symbolic link.
        assert_eq!(measured[0].inodes, 5);
        assert!((100_000..200_000).contains(&measured[0].bytes), "{measured:?}");
        assert_eq!(measured[1], TreeUsage::default());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
