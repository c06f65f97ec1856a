//! The FUSE protocol as far as the file systems of tests need it: mounting, requests, replies. A file system that is
//! served by this process needs no library and no program. Structures: include/uapi/linux/fuse.h.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};

pub(crate) const LOOKUP: u32 = 1;
pub(crate) const FORGET: u32 = 2;
pub(crate) const GETATTR: u32 = 3;
pub(crate) const OPEN: u32 = 14;
pub(crate) const READ: u32 = 15;
pub(crate) const WRITE: u32 = 16;
pub(crate) const STATFS: u32 = 17;
pub(crate) const RELEASE: u32 = 18;
pub(crate) const FSYNC: u32 = 20;
pub(crate) const INIT: u32 = 26;
pub(crate) const ACCESS: u32 = 34;
pub(crate) const INTERRUPT: u32 = 36;
pub(crate) const BATCH_FORGET: u32 = 42;

const IN_HEADER_BYTES: usize = 40;
const OUT_HEADER_BYTES: usize = 16;
/// Size of the answer to STATFS.
const STATFS_BYTES: usize = 80;

/// Maximum size of the data of a read or write request in bytes: 32 pages, the kernel's default for a file system that
/// does not ask for more.
const DATA_BYTES_MAX: usize = 128 << 10;

/// Maximum size of a request in bytes: the data and its headers. The kernel refuses to fill a smaller buffer.
const REQUEST_BYTES_MAX: usize = DATA_BYTES_MAX + 4096;

/// Inode of the root directory, fixed by the protocol.
pub(crate) const ROOT: u64 = 1;

/// Mounts a file system of this name on `path`, which is created; returns the device of its requests.
pub(crate) fn mount_on(path: &Path, name: &str, is_blocking: bool) -> File {
    std::fs::create_dir_all(path).expect("a directory to mount on");
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(if is_blocking { 0 } else { nix::libc::O_NONBLOCK })
        .open("/dev/fuse")
        .expect("/dev/fuse: the kernel has FUSE");
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", device.as_raw_fd());
    mount(Some(name), path, Some("fuse"), MsFlags::empty(), Some(options.as_str()))
        .expect("root may mount FUSE");
    device
}

/// A request of the kernel.
pub(crate) struct Request {
    pub(crate) opcode: u32,
    /// Identifies the request in the reply.
    pub(crate) unique: u64,
    /// Inode that the request is about.
    pub(crate) node: u64,
    /// User of the process that made the request.
    pub(crate) uid: u32,
    /// Bytes after the header.
    pub(crate) body: Vec<u8>,
}

impl Request {
    /// The number of 32 bits at this offset of the body; 0 if the body is shorter.
    pub(crate) fn number(&self, at: usize) -> u32 {
        self.body.get(at..at + 4).map_or(0, |bytes| u32::from_ne_bytes(bytes.try_into().expect("four")))
    }

    /// The number of 64 bits at this offset of the body; 0 if the body is shorter.
    pub(crate) fn wide_number(&self, at: usize) -> u64 {
        self.body.get(at..at + 8).map_or(0, |bytes| u64::from_ne_bytes(bytes.try_into().expect("eight")))
    }
}

/// Reads requests of a device.
pub(crate) struct Requests {
    buffer: Vec<u8>,
}

impl Requests {
    pub(crate) fn new() -> Requests {
        Requests { buffer: vec![0; REQUEST_BYTES_MAX] }
    }

    /// Reads one request; `None`: there is none now, or the request was cancelled.
    ///
    /// # Errors
    /// The file system does not exist any more.
    pub(crate) fn next(&mut self, mut device: &File) -> io::Result<Option<Request>> {
        match device.read(&mut self.buffer) {
            Ok(length) if length >= IN_HEADER_BYTES => {
                let wide =
                    |at: usize| u64::from_ne_bytes(self.buffer[at..at + 8].try_into().expect("eight bytes"));
                Ok(Some(Request {
                    opcode: u32::from_ne_bytes(self.buffer[4..8].try_into().expect("four bytes")),
                    unique: wide(8),
                    node: wide(16),
                    uid: u32::from_ne_bytes(self.buffer[24..28].try_into().expect("four bytes")),
                    body: self.buffer[IN_HEADER_BYTES..length].to_vec(),
                }))
            }
            Ok(_) => Ok(None),
            Err(error) => match error.raw_os_error().map(Errno::from_raw) {
                // ENOENT: the request was cancelled meanwhile.
                Some(Errno::EAGAIN | Errno::EINTR | Errno::ENOENT) => Ok(None),
                _ => Err(error),
            },
        }
    }
}

/// An answer: the body of a reply, or an error.
pub(crate) type Answer = Result<Vec<u8>, Errno>;

/// Replies to a request.
pub(crate) fn reply(mut device: &File, unique: u64, answer: Answer) {
    let (error, body) = match answer {
        Ok(body) => (0, body),
        Err(errno) => (-(errno as i32), Vec::new()),
    };
    let length = (OUT_HEADER_BYTES + body.len()) as u32;
    let message = [&length.to_ne_bytes()[..], &error.to_ne_bytes(), &unique.to_ne_bytes(), &body].concat();
    let _ = device.write(&message); // ENOENT: who asked is gone
}

/// The answer to a request that all file systems answer in the same way; `None`: none is sent.
pub(crate) fn usual(opcode: u32) -> Option<Answer> {
    match opcode {
        FORGET | INTERRUPT | BATCH_FORGET => None,
        INIT => Some(Ok(init())),
        STATFS => Some(Ok(vec![0; STATFS_BYTES])),
        _ => Some(Err(Errno::ENOSYS)),
    }
}

/// The answer to INIT: version 7.31 without features.
fn init() -> Vec<u8> {
    let mut body = vec![0; 64];
    body[0..4].copy_from_slice(&7u32.to_ne_bytes());
    body[4..8].copy_from_slice(&31u32.to_ne_bytes());
    body[20..24].copy_from_slice(&(DATA_BYTES_MAX as u32).to_ne_bytes()); // max_write
    body
}

/// Attributes of a file that is owned by root: `struct fuse_attr`.
pub(crate) fn attributes(node: u64, mode: u32, bytes: u64) -> Vec<u8> {
    let mut body = vec![0; 88];
    body[0..8].copy_from_slice(&node.to_ne_bytes());
    body[8..16].copy_from_slice(&bytes.to_ne_bytes());
    body[60..64].copy_from_slice(&mode.to_ne_bytes());
    body[64..68].copy_from_slice(&2u32.to_ne_bytes()); // links
    body[80..84].copy_from_slice(&4096u32.to_ne_bytes()); // block size
    body
}

/// The answer to GETATTR: attributes that the kernel keeps for this number of seconds.
pub(crate) fn attributes_answer(kept_seconds: u64, attributes: &[u8]) -> Vec<u8> {
    [&kept_seconds.to_ne_bytes()[..], &[0; 8], attributes].concat()
}

/// Mode of a directory that everyone can read.
pub(crate) const DIRECTORY: u32 = 0o40755;
