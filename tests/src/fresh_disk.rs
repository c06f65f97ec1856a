//! A new ext4 file system on a loop device. The kernel counts the written bytes, including journal and
//! inodes, and earlier tests have no influence on the placement of files. A flush of the device may take a given time.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::host;
use crate::request::fresh;
use crate::slow_flush_fs::SlowFlushFs;

/// Unit of the kernel's sector counters in bytes, independent of the device.
const SECTOR_BYTES: u64 = 512;

/// A mounted file system; unmounted on drop.
pub struct FreshDisk {
    image: PathBuf,
    place: PathBuf,
    device: String,
    /// The file system of `image`, if it is not that of the folder; it is dropped after the device was detached.
    slow: Option<SlowFlushFs>,
}

impl FreshDisk {
    /// Creates a file system of this many mebibytes in `folder`; its file is sparse.
    pub fn new(folder: &Path, mebibytes: u64) -> FreshDisk {
        host::require_root();
        let image = folder.join(format!("disk-{}", fresh()));
        fs::File::create(&image).and_then(|file| file.set_len(mebibytes << 20)).expect("a sparse file");
        let place = image.with_extension("mount");
        FreshDisk::on(image, place, None)
    }

    /// Creates a file system of this many mebibytes, in memory, on a device whose flush takes `flush`; `folder` has its mount
    /// point.
    pub fn with_slow_flush(folder: &Path, mebibytes: u64, flush: Duration) -> FreshDisk {
        host::require_root();
        let place = folder.join(format!("slow-disk-{}", fresh()));
        let slow = SlowFlushFs::mount(&place.with_extension("fuse"), mebibytes, flush);
        FreshDisk::on(slow.file(), place.with_extension("mount"), Some(slow))
    }

    fn on(image: PathBuf, place: PathBuf, slow: Option<SlowFlushFs>) -> FreshDisk {
        fs::create_dir_all(&place).expect("a mount point");
        let image_name = image.to_str().expect("a UTF-8 path");
        // Initialises everything, because the kernel's later initialisation would be counted.
        run("mkfs.ext4", &["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", image_name]);
        let device = run("losetup", &["--find", "--show", image_name]).trim().to_owned();
        let disk = FreshDisk { image, place, device, slow };
        run("mount", &[&disk.device, disk.place.to_str().expect("a UTF-8 path")]);
        disk
    }

    /// The mount point of the disk.
    pub fn path(&self) -> &Path {
        &self.place
    }

    /// Number of bytes written to the device so far, after writing back all dirty data.
    pub fn written(&self) -> u64 {
        let root = fs::File::open(&self.place).expect("its root");
        nix::unistd::syncfs(&root).expect("it syncs");
        self.counter(6) * SECTOR_BYTES
    }

    /// Number of flushes that the device has completed so far. A device without FUA, as this one, completes two for
    /// each commit of the file system's journal.
    pub fn flushes(&self) -> u64 {
        self.counter(15)
    }

    /// A field of the device's counters (Documentation/block/stat.rst), from 0.
    fn counter(&self, index: usize) -> u64 {
        let name = self.device.trim_start_matches("/dev/");
        let text = fs::read_to_string(format!("/sys/block/{name}/stat")).expect("the device's counters");
        let field = text.split_whitespace().nth(index).and_then(|field| field.parse::<u64>().ok());
        field.expect("a counter")
    }
}

impl Drop for FreshDisk {
    fn drop(&mut self) {
        // Fails if the set-up was not completed.
        let _ = Command::new("umount").arg("--lazy").arg(&self.place).status();
        let _ = Command::new("losetup").arg("--detach").arg(&self.device).status();
        let _ = fs::remove_dir(&self.place);
        if self.slow.is_none() {
            let _ = fs::remove_file(&self.image);
        }
    }
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}
