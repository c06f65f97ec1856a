//! A new ext4 file system on a loop device. The kernel counts the written bytes, including journal and
//! inodes, and earlier tests have no influence on the placement of files. A flush of the device may take a given time, and its power
//! may be cut.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::host;
use crate::random::Random;
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

    /// Cuts the power of a disk with a slow flush: nothing that is written or flushed from now on has an effect.
    pub fn cut(&self) {
        self.slow.as_ref().expect("a disk in memory").cut();
    }

    /// Mounts the disk after a cut again, with about `percent` of a hundred pages that were written and not flushed. What had files
    /// open there has ended.
    pub fn restore(&mut self, random: &mut Random, percent: u64) {
        let place = self.place.to_str().expect("a UTF-8 path").to_owned();
        // A process that was killed may have files open for a moment.
        host::wait_until("the disk is not in use", || {
            Command::new("umount").arg(&place).output().expect("umount").status.success()
        });
        run("losetup", &["--detach", &self.device]);
        // Another one, because a mount namespace of another process may have a copy of the mount.
        let slow = self.slow.as_ref().expect("a disk in memory");
        let slow = slow.restored(&self.place.with_extension(format!("fuse-{}", fresh())), random, percent);
        self.device = attach(slow.file().to_str().expect("a UTF-8 path"));
        self.slow = Some(slow);
        run("mount", &[&self.device, &place]);
    }

    fn on(image: PathBuf, place: PathBuf, slow: Option<SlowFlushFs>) -> FreshDisk {
        fs::create_dir_all(&place).expect("a mount point");
        let image_name = image.to_str().expect("a UTF-8 path");
        // Initialises everything, because the kernel's later initialisation would be counted.
        run("mkfs.ext4", &["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", image_name]);
        let device = attach(image_name);
        let disk = FreshDisk { image, place, device, slow };
        run("mount", &[&disk.device, disk.place.to_str().expect("a UTF-8 path")]);
        disk
    }

    /// The mount point of the disk.
    pub fn path(&self) -> &Path {
        &self.place
    }

    /// Changes bytes on the device that are there once, behind the caches of the file system on it.
    pub fn change(&self, from: &[u8], to: &[u8]) {
        use std::os::unix::fs::FileExt;
        assert_eq!(from.len(), to.len());
        let bytes = fs::read(&self.image).expect("the device's file");
        let mut places = bytes.windows(from.len()).enumerate().filter(|(_, window)| *window == from);
        let (Some((place, _)), None) = (places.next(), places.next()) else { panic!("not there once") };
        let file = fs::File::options().write(true).open(&self.image).expect("the device's file");
        file.write_all_at(to, place as u64).expect("ours to change");
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

/// Makes a loop device of a file; returns its path.
fn attach(image: &str) -> String {
    run("losetup", &["--find", "--show", image]).trim().to_owned()
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}
