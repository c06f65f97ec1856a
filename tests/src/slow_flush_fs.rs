//! A file system with one file whose fsync takes a given time: a FUSE server with the contents in memory. A loop device on
//! this file is a disk whose flush takes that time, because the loop driver completes a flush by an fsync of its file.
//! Requests are served one after the other, as by a card that does nothing else during a flush.
//!
//! The disk has a volatile cache: after [`SlowFlushFs::cut`], a power cut, any part of what was written and not flushed is lost.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::fuse::{
    self, Answer, DIRECTORY, FSYNC, GETATTR, LOOKUP, OPEN, READ, RELEASE, ROOT, Request, Requests, WRITE,
};
use crate::host;
use crate::random::Random;

/// Name of the file.
const NAME: &str = "disk";
/// Inode of the file.
const FILE: u64 = 2;
/// Mode of the file.
const MODE: u32 = 0o100_600;
/// Size in bytes that the disk writes atomically: a page of flash.
const PAGE: usize = 4096;
/// Flag of the answer to OPEN: the page cache is kept (FOPEN_KEEP_CACHE).
const KEEP_CACHE: u32 = 1 << 1;
/// Time in seconds for which the kernel keeps names and attributes, which never change.
const KEPT_SECONDS: u64 = 3600;
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
    cache: Arc<Mutex<Cache>>,
    server: Option<JoinHandle<()>>,
}

impl SlowFlushFs {
    /// Mounts the file system on `path`, which is created. Its file has this many mebibytes, and an fsync of it takes
    /// `flush`.
    pub fn mount(path: &Path, mebibytes: u64, flush: Duration) -> SlowFlushFs {
        let bytes = mebibytes << 20;
        let memory = || {
            let file = memfd_create(c"slow-flush", MFdFlags::MFD_CLOEXEC).expect("memory for a file");
            let file = File::from(file);
            file.set_len(bytes).expect("a sparse file");
            file
        };
        let (dirty, is_cut) = (BTreeSet::new(), false);
        Self::serve(path, Cache { contents: memory(), flushed: memory(), dirty, is_cut }, bytes, flush)
    }

    fn serve(path: &Path, cache: Cache, bytes: u64, flush: Duration) -> SlowFlushFs {
        let cache = Arc::new(Mutex::new(cache));
        let device = fuse::mount_on(path, "slow-flush", true);
        let open = Arc::new(AtomicUsize::new(0));
        let disk = Disk { cache: Arc::clone(&cache), bytes, flush, open: Arc::clone(&open) };
        let server = std::thread::spawn(move || disk.serve(&device));
        SlowFlushFs { path: path.to_owned(), open, cache, server: Some(server) }
    }

    /// Path of the file.
    pub fn file(&self) -> PathBuf {
        self.path.join(NAME)
    }

    /// Cuts the power: nothing that is written or flushed from now on has an effect.
    pub fn cut(&self) {
        lock(&self.cache).is_cut = true;
    }

    /// Turns the power on after a cut: mounts a file system on `path` whose file is that of this one. Of the pages that were written
    /// and not flushed, about `percent` of a hundred are as they were written, and the others as they were before.
    pub fn restored(&self, path: &Path, random: &mut Random, percent: u64) -> SlowFlushFs {
        let cache = &mut *lock(&self.cache);
        for page in std::mem::take(&mut cache.dirty) {
            let is_kept = random.below(100) < percent;
            let (from, to) =
                if is_kept { (&cache.contents, &cache.flushed) } else { (&cache.flushed, &cache.contents) };
            copy_page(from, to, page);
        }
        let copy = |file: &File| file.try_clone().expect("a descriptor");
        let (contents, flushed) = (copy(&cache.contents), copy(&cache.flushed));
        let bytes = contents.metadata().expect("its length").len();
        let cache = Cache { contents, flushed, dirty: BTreeSet::new(), is_cut: false };
        Self::serve(path, cache, bytes, Duration::ZERO)
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

/// The bytes of the file, those that were flushed, and which of them differ.
struct Cache {
    contents: File,
    flushed: File,
    /// Numbers of the pages that were written since the last flush.
    dirty: BTreeSet<u64>,
    is_cut: bool,
}

impl Cache {
    fn flush(&mut self) {
        if !self.is_cut {
            std::mem::take(&mut self.dirty)
                .into_iter()
                .for_each(|page| copy_page(&self.contents, &self.flushed, page));
        }
    }

    fn write(&mut self, data: &[u8], at: u64) -> std::io::Result<()> {
        if !self.is_cut {
            self.contents.write_all_at(data, at)?;
            let last = (at + data.len() as u64).saturating_sub(1);
            self.dirty.extend(at / PAGE as u64..=last / PAGE as u64);
        }
        Ok(())
    }
}

fn copy_page(from: &File, to: &File, page: u64) {
    let (mut bytes, at) = ([0; PAGE], page * PAGE as u64);
    from.read_exact_at(&mut bytes, at).and_then(|()| to.write_all_at(&bytes, at)).expect("memory");
}

fn lock(cache: &Mutex<Cache>) -> MutexGuard<'_, Cache> {
    cache.lock().expect("no thread panics with it")
}

/// The server of the file.
struct Disk {
    cache: Arc<Mutex<Cache>>,
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
                lock(&self.cache).flush();
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
        let length = lock(&self.cache).contents.read_at(&mut data, request.wide_number(8)).map_err(errno)?;
        data.truncate(length);
        Ok(data)
    }

    fn write(&self, request: &Request) -> Answer {
        let data = request.body.get(WRITE_IN_BYTES..).ok_or(Errno::EINVAL)?;
        lock(&self.cache).write(data, request.wide_number(8)).map_err(errno)?;
        Ok([&(data.len() as u32).to_ne_bytes()[..], &[0; 4]].concat())
    }
}

fn errno(error: std::io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(Errno::EIO as i32))
}
