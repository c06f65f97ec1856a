//! A file system with one file whose fsync takes a given time: a FUSE server with the contents in memory. A loop device on
//! this file is a disk whose flush takes that time, because the loop driver completes a flush by an fsync of its file.
//! Requests are served one after the other, as by a card that does nothing else during a flush.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::fuse::{
    self, Answer, DIRECTORY, FSYNC, GETATTR, LOOKUP, OPEN, READ, RELEASE, ROOT, Request, Requests, WRITE,
};
use crate::host;

/// Name of the file.
const NAME: &str = "disk";
/// Inode of the file.
const FILE: u64 = 2;
/// Mode of the file.
const MODE: u32 = 0o100_600;
/// Time in seconds for which the kernel keeps names and attributes, which never change.
const KEPT_SECONDS: u64 = 3600;
/// Flag of the answer to OPEN: the page cache is kept (FOPEN_KEEP_CACHE).
const KEEP_CACHE: u32 = 1 << 1;
/// Size of the structure before the data of a write request.
const WRITE_IN_BYTES: usize = 40;
/// Time limit until the users of a file system have ended, when it is dropped.
const RELEASED: Duration = Duration::from_secs(5);

/// The mounted file system. On drop it waits a few seconds until its file is not in use; after that, users of the file
/// receive errors.
pub struct SlowFlushFs {
    path: PathBuf,
    /// Number of descriptions of the file that are open.
    open: Arc<AtomicUsize>,
    server: Option<JoinHandle<()>>,
}

impl SlowFlushFs {
    /// Mounts the file system on `path`, which is created. Its file has this many mebibytes, and an fsync of it takes
    /// `flush`.
    pub fn mount(path: &Path, mebibytes: u64, flush: Duration) -> SlowFlushFs {
        let contents = memfd_create(c"slow-flush", MFdFlags::MFD_CLOEXEC).expect("memory for a file");
        let contents = File::from(contents);
        let bytes = mebibytes << 20;
        contents.set_len(bytes).expect("a sparse file");
        let device = fuse::mount_on(path, "slow-flush", true);
        let open = Arc::new(AtomicUsize::new(0));
        let disk = Disk { contents, bytes, flush, open: Arc::clone(&open) };
        let server = std::thread::spawn(move || disk.serve(&device));
        SlowFlushFs { path: path.to_owned(), open, server: Some(server) }
    }

    /// Path of the file.
    pub fn file(&self) -> PathBuf {
        self.path.join(NAME)
    }
}

impl Drop for SlowFlushFs {
    fn drop(&mut self) {
        let released = || (self.open.load(Ordering::Relaxed) == 0).then_some(());
        let _ = host::wait_within(RELEASED, released);
        // Ends the connection. Unmounting it would not, if another mount namespace has a copy of the mount.
        let _ = umount2(&self.path, MntFlags::MNT_FORCE);
        let _ = umount2(&self.path, MntFlags::MNT_DETACH);
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
        let _ = std::fs::remove_dir(&self.path);
    }
}

/// Contents of the file, and its server.
struct Disk {
    contents: File,
    bytes: u64,
    flush: Duration,
    open: Arc<AtomicUsize>,
}

impl Disk {
    /// Answers requests until the connection has ended.
    fn serve(&self, device: &File) {
        let mut requests = Requests::new();
        while let Ok(request) = requests.next(device) {
            let Some(request) = request else { continue };
            if let Some(answer) = self.answer(&request) {
                fuse::reply(device, request.unique, answer);
            }
        }
    }

    fn answer(&self, request: &Request) -> Option<Answer> {
        Some(match request.opcode {
            LOOKUP if request.node == ROOT && request.body == [NAME.as_bytes(), b"\0"].concat() => {
                Ok(self.entry())
            }
            LOOKUP => Err(Errno::ENOENT),
            GETATTR if request.node == ROOT => {
                Ok(fuse::attributes_answer(KEPT_SECONDS, &fuse::attributes(ROOT, DIRECTORY, 0)))
            }
            GETATTR => Ok(fuse::attributes_answer(KEPT_SECONDS, &self.attributes())),
            OPEN => {
                self.open.fetch_add(1, Ordering::Relaxed);
                Ok([&[0; 8][..], &KEEP_CACHE.to_ne_bytes(), &[0; 4]].concat())
            }
            RELEASE => {
                self.open.fetch_sub(1, Ordering::Relaxed);
                Ok(Vec::new())
            }
            READ => self.read(request),
            WRITE => self.write(request),
            FSYNC => {
                std::thread::sleep(self.flush);
                Ok(Vec::new())
            }
            other => return fuse::usual(other),
        })
    }

    fn attributes(&self) -> Vec<u8> {
        fuse::attributes(FILE, MODE, self.bytes)
    }

    /// The answer to LOOKUP: inode, generation, how long the kernel keeps name and attributes, attributes.
    fn entry(&self) -> Vec<u8> {
        let kept = KEPT_SECONDS.to_ne_bytes();
        [&FILE.to_ne_bytes()[..], &[0; 8], &kept, &kept, &[0; 8], &self.attributes()].concat()
    }

    fn read(&self, request: &Request) -> Answer {
        let mut data = vec![0; request.number(16) as usize];
        let length = self.contents.read_at(&mut data, request.wide_number(8)).map_err(errno)?;
        data.truncate(length);
        Ok(data)
    }

    fn write(&self, request: &Request) -> Answer {
        let data = request.body.get(WRITE_IN_BYTES..).ok_or(Errno::EINVAL)?;
        self.contents.write_all_at(data, request.wide_number(8)).map_err(errno)?;
        Ok([&(data.len() as u32).to_ne_bytes()[..], &[0; 4]].concat())
    }
}

fn errno(error: std::io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(Errno::EIO as i32))
}
