//! A tmpfs of its own: a file system of a known size that can be full or read-only, where no other process writes, and that needs no
//! program to be created, so that guests have it, too.

use std::fs;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::host;
use crate::request::fresh;

/// A small file system; unmounted on drop.
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Creates a small disk of this many mebibytes.
    pub fn new(mebibytes: u32) -> SmallDisk {
        SmallDisk::with(&format!("size={mebibytes}m"))
    }

    /// Creates a small disk with limits in the format of tmpfs(5).
    pub fn with(limits: &str) -> SmallDisk {
        host::require_root();
        let place = PathBuf::from(format!("/var/tmp/coracle-tests/disk-{}-{}", std::process::id(), fresh()));
        fs::create_dir_all(&place).expect("a mount point");
        mount(Some("coracle-test"), &place, Some("tmpfs"), MsFlags::empty(), Some(limits)).expect("a tmpfs");
        SmallDisk(place)
    }

    /// The mount point of the disk.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Makes the disk read-only, or writable again.
    pub fn read_only(&self, is: bool) {
        let flags = if is { MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY } else { MsFlags::MS_REMOUNT };
        mount(None::<&str>, &self.0, None::<&str>, flags, None::<&str>).expect("remount");
    }

    /// Fills the disk completely.
    pub fn fill(&self) {
        let mut bytes = 1 << 20;
        let file = fs::File::create(self.0.join("filler")).expect("a file");
        let mut file = std::io::BufWriter::with_capacity(0, file);
        while bytes > 0 {
            if std::io::Write::write_all(&mut file, &vec![0; bytes]).is_err() {
                bytes /= 2;
            }
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // A failed test may have left files in it: it is detached.
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
        let _ = fs::remove_dir(&self.0);
    }
}
