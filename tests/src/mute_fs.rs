//! A file system that stops responding, like NFS without its server: a minimal FUSE server. All requests wait
//! in the kernel until the server responds again; then requests that were made before are answered, too.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

// Constants of include/uapi/linux/fuse.h.
const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const STATFS: u32 = 17;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;
const IN_HEADER_BYTES: usize = 40;

/// Maximum size of a request in bytes: several times the kernel's minimum.
const REQUEST_BYTES_MAX: usize = 128 << 10;

/// A mounted file system with an empty root directory. On drop it is unmounted, and waiting processes receive
/// errors.
pub struct MuteFs {
    path: PathBuf,
    answers: Arc<AtomicBool>,
    over: Arc<AtomicBool>,
    server: Option<JoinHandle<()>>,
}

impl MuteFs {
    /// Mounts the file system on `path`, which is created. The server responds until [`MuteFs::fall_silent`].
    pub fn mount(path: &Path) -> MuteFs {
        std::fs::create_dir_all(path).expect("a directory to mount on");
        let device = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(nix::libc::O_NONBLOCK)
            .open("/dev/fuse")
            .expect("/dev/fuse: the kernel has FUSE");
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", device.as_raw_fd());
        mount(Some("mute"), path, Some("fuse"), MsFlags::empty(), Some(options.as_str()))
            .expect("root may mount FUSE");
        let (answers, over) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicBool::new(false)));
        let server = {
            let (answers, over) = (Arc::clone(&answers), Arc::clone(&over));
            std::thread::spawn(move || serve(device, &answers, &over))
        };
        MuteFs { path: path.to_owned(), answers, over, server: Some(server) }
    }

    /// The mount point of the file system.
    pub fn path(&self) -> String {
        self.path.display().to_string()
    }

    /// Lets the server stop responding.
    pub fn fall_silent(&self) {
        self.answers.store(false, Ordering::Relaxed);
    }

    /// Lets the server answer waiting and further requests.
    pub fn answer(&self) {
        self.answers.store(true, Ordering::Relaxed);
    }
}

impl Drop for MuteFs {
    fn drop(&mut self) {
        let _ = umount2(&self.path, MntFlags::MNT_DETACH);
        self.over.store(true, Ordering::Relaxed);
        if let Some(server) = self.server.take() {
            let _ = server.join(); // closes the device, which aborts the connection
        }
    }
}

fn serve(mut device: File, answers: &AtomicBool, over: &AtomicBool) {
    let mut waiting = VecDeque::new();
    let mut buffer = vec![0; REQUEST_BYTES_MAX];
    while !over.load(Ordering::Relaxed) {
        match device.read(&mut buffer) {
            Ok(length) if length >= IN_HEADER_BYTES => {
                let number =
                    |at: usize| u32::from_ne_bytes(buffer[at..at + 4].try_into().expect("four bytes"));
                let unique = u64::from_ne_bytes(buffer[8..16].try_into().expect("eight bytes"));
                waiting.push_back((number(4), unique));
            }
            Ok(_) => {}
            // ENOENT: the request was cancelled meanwhile.
            Err(error)
                if matches!(
                    error.raw_os_error().map(Errno::from_raw),
                    Some(Errno::EAGAIN | Errno::EINTR | Errno::ENOENT)
                ) =>
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(_) => return, // unmounted
        }
        // Requests of the mount itself are always answered.
        while let Some((opcode, unique)) = waiting.front().copied() {
            if opcode != INIT && !answers.load(Ordering::Relaxed) {
                break;
            }
            waiting.pop_front();
            reply(&mut device, opcode, unique);
        }
    }
}

fn reply(device: &mut File, opcode: u32, unique: u64) {
    let (error, body) = match opcode {
        FORGET | INTERRUPT | BATCH_FORGET => return,
        INIT => (0, init()),
        GETATTR => (0, root_attributes()),
        STATFS => (0, vec![0; 80]),
        LOOKUP => (-(Errno::ENOENT as i32), Vec::new()),
        _ => (-(Errno::ENOSYS as i32), Vec::new()),
    };
    let length = 16 + body.len() as u32;
    let message = [&length.to_ne_bytes()[..], &error.to_ne_bytes(), &unique.to_ne_bytes(), &body].concat();
    let _ = device.write(&message); // ENOENT: who asked is gone
}

/// The answer to FUSE's INIT: version 7.31 without features.
fn init() -> Vec<u8> {
    let mut body = vec![0; 64];
    body[0..4].copy_from_slice(&7u32.to_ne_bytes());
    body[4..8].copy_from_slice(&31u32.to_ne_bytes());
    body[20..24].copy_from_slice(&4096u32.to_ne_bytes()); // max_write
    body
}

/// Attributes of the root directory: world-readable, owned by root, without attribute caching.
fn root_attributes() -> Vec<u8> {
    let mut body = vec![0; 104];
    body[16..24].copy_from_slice(&1u64.to_ne_bytes()); // inode
    body[76..80].copy_from_slice(&0o40755u32.to_ne_bytes()); // mode
    body[80..84].copy_from_slice(&2u32.to_ne_bytes()); // links
    body[96..100].copy_from_slice(&4096u32.to_ne_bytes()); // block size
    body
}
