//! A new ext4 of its own on a loop device. What is written to it is counted by the kernel, journal and inodes included, and
//! no earlier test has an influence on where it puts files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::host;
use crate::request::fresh;

/// What the kernel counts sectors in, whatever the device has.
const SECTOR_BYTES: u64 = 512;

/// A mounted file system; unmounted when dropped, whatever happened.
pub struct FreshDisk {
    image: PathBuf,
    place: PathBuf,
    device: String,
}

impl FreshDisk {
    /// Makes one of so many mebibytes in `folder`; the file behind it is sparse.
    pub fn new(folder: &Path, mebibytes: u64) -> FreshDisk {
        host::require_root();
        let image = folder.join(format!("disk-{}", fresh()));
        let place = image.with_extension("mount");
        fs::create_dir_all(&place).expect("a mount point");
        fs::File::create(&image).and_then(|file| file.set_len(mebibytes << 20)).expect("a sparse file");
        let image_name = image.to_str().expect("a path of ours");
        // Nothing is left for the kernel to make in the background, which would be counted.
        run("mkfs.ext4", &["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", image_name]);
        let device = run("losetup", &["--find", "--show", image_name]).trim().to_owned();
        let disk = FreshDisk { image, place, device };
        run("mount", &[&disk.device, disk.place.to_str().expect("a path of ours")]);
        disk
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.place
    }

    /// Bytes that were ever written to the device; what is in memory alone is written first.
    pub fn written(&self) -> u64 {
        let root = fs::File::open(&self.place).expect("its root");
        nix::unistd::syncfs(&root).expect("it syncs");
        let name = self.device.trim_start_matches("/dev/");
        let text = fs::read_to_string(format!("/sys/block/{name}/stat")).expect("the device's counters");
        let sectors = text.split_whitespace().nth(6).and_then(|field| field.parse::<u64>().ok());
        sectors.expect("sectors written") * SECTOR_BYTES
    }
}

impl Drop for FreshDisk {
    fn drop(&mut self) {
        // What was not made is not there to go.
        let _ = Command::new("umount").arg("--lazy").arg(&self.place).status();
        let _ = Command::new("losetup").arg("--detach").arg(&self.device).status();
        let _ = fs::remove_dir(&self.place);
        let _ = fs::remove_file(&self.image);
    }
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}
