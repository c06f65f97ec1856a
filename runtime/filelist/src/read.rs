//! Reads files from the disk: what the page cache has may be right while the disk is not, and a damaged file stays unnoticed until the next
//! boot. Files are opened with O_DIRECT; on a file system without it, or that may serve it from the page cache, their pages are dropped before
//! they are read. A page that a process has mapped is not dropped, and then compared in place of the disk.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use flate2::Crc;
use rustix::fs::{Advice, Mode, OFlags, fadvise, fstatfs, openat};
use rustix::io::Errno;
use rustix::path::Arg;

/// Number of bytes of one read: large enough for the rate of flash, and short in time at a limited rate.
const READ_BYTES: usize = 128 << 10;
/// Alignment of buffers for O_DIRECT: the largest block of a disk.
const ALIGNMENT: usize = 4096;
/// Minimum number of bytes by which a file or directory counts against the read rate: with many small files, the time of a disk
/// depends on their number and not on their bytes.
pub(crate) const FILE_BYTES_MIN: u64 = 16 << 10;
/// Types of file systems that read compressed files through the page cache, also with O_DIRECT.
const BTRFS: u32 = 0x9123_683e;
const F2FS: u32 = 0xf2f5_2010;
/// Shortest pause: many short ones would only use CPU time.
const PAUSE_MIN: Duration = Duration::from_millis(20);

/// Reads files of layers from the disk.
pub struct Reader<'a> {
    /// Bytes per second at most; 0: as fast as possible.
    rate: u64,
    /// Called repeatedly while files are read.
    pulse: &'a mut dyn FnMut(),
    buffer: Vec<u8>,
    /// Time at which the bytes that were read are within the rate.
    due: Instant,
    bytes: u64,
}

impl<'a> Reader<'a> {
    /// Creates a reader of at most `rate` bytes per second, or without a limit if it is 0. `pulse` is called repeatedly.
    pub fn new(rate: u64, pulse: &'a mut dyn FnMut()) -> Self {
        let buffer = vec![0; READ_BYTES + ALIGNMENT];
        Self { rate, pulse, buffer, due: Instant::now(), bytes: 0 }
    }

    /// Number of bytes that were read.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Length and checksum of the content of a file that has `size` bytes.
    pub(crate) fn sum(&mut self, directory: &OwnedFd, name: &CStr, size: u64) -> io::Result<(u64, u32)> {
        self.read(directory, name, size, Crc::update).map(|(length, sum)| (length, sum.sum()))
    }

    /// Reads a file that has `size` bytes; `add` adds its content to a new sum. Returns its length and the sum.
    pub(crate) fn read<S: Default>(
        &mut self,
        at: impl AsFd,
        path: impl Arg + Copy,
        size: u64,
        add: impl Fn(&mut S, &[u8]),
    ) -> io::Result<(u64, S)> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOATIME;
        // EINVAL: the file system has no O_DIRECT, which some say only at the read.
        match openat(&at, path, flags | OFlags::DIRECT, Mode::empty()).and_then(|file| {
            match fstatfs(&file)?.f_type as u32 {
                BTRFS | F2FS => Err(Errno::INVAL),
                _ => self.read_all(&file, size, &add),
            }
        }) {
            Err(Errno::INVAL) => {}
            read => return Ok(read?),
        }
        let file = openat(&at, path, flags, Mode::empty())?;
        drop_pages(&file);
        let read = self.read_all(&file, size, &add)?;
        // What is read only once should not displace what the node needs.
        drop_pages(&file);
        Ok(read)
    }

    fn read_all<S: Default>(
        &mut self,
        file: &OwnedFd,
        size: u64,
        add: impl Fn(&mut S, &[u8]),
    ) -> Result<(u64, S), Errno> {
        let (mut sum, mut length) = (S::default(), 0);
        let begin = self.buffer.as_ptr().align_offset(ALIGNMENT);
        loop {
            let buffer = &mut self.buffer[begin..begin + READ_BYTES];
            let count = rustix::io::retry_on_intr(|| rustix::io::read(file, &mut *buffer))?;
            add(&mut sum, &buffer[..count]);
            length += count as u64;
            let is_end = count == 0 || length >= size;
            self.pass(if is_end { (count as u64).max(FILE_BYTES_MIN) } else { count as u64 });
            if is_end {
                self.bytes += length;
                return Ok((length, sum));
            }
        }
    }

    /// Counts bytes, and pauses until they are within the rate.
    pub(crate) fn pass(&mut self, bytes: u64) {
        (self.pulse)();
        if self.rate == 0 {
            return;
        }
        let now = Instant::now();
        // What was slower than permitted is not made up for.
        self.due = self.due.max(now) + Duration::from_nanos(bytes.saturating_mul(1_000_000_000) / self.rate);
        let pause = self.due.duration_since(now);
        if pause >= PAUSE_MIN {
            std::thread::sleep(pause);
        }
    }
}

/// Drops the pages of a file that are on the disk from the page cache. It is an advice: an error has no effect.
pub fn drop_pages(file: impl AsFd) {
    let _ = fadvise(file, 0, None, Advice::DontNeed);
}
