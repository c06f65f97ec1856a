//! A disk with a volatile cache: written data is in the file only after the guest requested a flush, or wrote
//! with FUA. At a power cut any part of the other data is lost, in units of a sector. Killing QEMU alone
//! would lose the guest's page cache but not the disk's cache, and would not detect a missing flush.
//!
//! QEMU accesses it through NBD (<https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>, fixed
//! newstyle, simple replies) on a socket. The power is cut at the n-th write and not at a time, so that it
//! does not depend on the machine's speed.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use coracle_tests::random::Random;

/// Size in bytes that the disk writes atomically and reports to the guest: a page of flash. A partly written
/// superblock would destroy ext4.
const SECTOR: usize = 4096;

/// Maximum length of a request in bytes: QEMU splits at 32 MiB.
const REQUEST_BYTES_MAX: u32 = 32 << 20;

const OPTION_MAGIC: &[u8; 8] = b"IHAVEOPT";
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const REPLY_UNSUPPORTED: u32 = 0x8000_0001;

/// NBD flags: has flags, supports flush, supports FUA.
const TRANSMISSION_FLAGS: u16 = 1 | 4 | 8;
const FLAG_FUA: u16 = 1;

/// A disk to which QEMU can connect once.
pub(crate) struct Volatile {
    state: Arc<Mutex<State>>,
    socket: PathBuf,
}

struct State {
    file: File,
    /// Written sectors that were not flushed.
    cache: BTreeMap<u64, [u8; SECTOR]>,
    writes: u64,
    /// Number of the write at which the power is cut.
    cut_at: Option<u64>,
    is_cut: bool,
}

/// The effect of a power cut on the cache.
#[derive(Debug)]
pub(crate) struct Loss {
    pub(crate) kept: usize,
    pub(crate) lost: usize,
    /// Number of writes since power on.
    pub(crate) writes: u64,
}

impl Volatile {
    /// Serves `file` on `socket` to the first client.
    pub(crate) fn serve(file: &Path, socket: PathBuf) -> Volatile {
        let file = File::options().read(true).write(true).open(file).expect("a disk");
        let state = State { file, cache: BTreeMap::new(), writes: 0, cut_at: None, is_cut: false };
        let state = Arc::new(Mutex::new(state));
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).expect("a socket");
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            let (stream, _) = listener.accept().expect("QEMU connects");
            // Ends at any time when QEMU is killed.
            let _ = Connection { stream, state: shared }.serve();
        });
        Volatile { state, socket }
    }

    /// QEMU's description of the drive.
    pub(crate) fn drive(&self) -> String {
        format!("file=nbd:unix:{},cache=writeback", self.socket.display())
    }

    /// Cuts the power after this number of further writes.
    pub(crate) fn cut_after(&self, writes: u64) {
        let mut state = lock(&self.state);
        state.cut_at = Some(state.writes + writes);
    }

    pub(crate) fn is_cut(&self) -> bool {
        lock(&self.state).is_cut
    }

    /// After QEMU has ended: writes each sector that was not flushed to the file with this probability in
    /// percent.
    pub(crate) fn settle(self, random: &mut Random, kept_percent: u64) -> Loss {
        let mut state = lock(&self.state);
        // Writes that are still in the socket are ignored.
        state.is_cut = true;
        let cache = std::mem::take(&mut state.cache);
        let (mut kept, all) = (0, cache.len());
        for (sector, bytes) in cache {
            if random.below(100) < kept_percent {
                state.file.write_all_at(&bytes, sector * SECTOR as u64).expect("the disk is written");
                kept += 1;
            }
        }
        Loss { kept, lost: all - kept, writes: state.writes }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().expect("no thread panics with it")
}

impl State {
    /// Reads may have any size: QEMU itself reads the 512 bytes of a partition table.
    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(bytes, offset)?;
        let end = offset + bytes.len() as u64;
        for (sector, cached) in self.cache.range(offset / SECTOR as u64..end.div_ceil(SECTOR as u64)) {
            let start = sector * SECTOR as u64;
            let (from, to) = (start.max(offset), (start + SECTOR as u64).min(end));
            bytes[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&cached[(from - start) as usize..(to - start) as usize]);
        }
        Ok(())
    }

    /// Returns false if the power was cut before this write.
    fn write(&mut self, offset: u64, bytes: &[u8], is_fua: bool) -> io::Result<bool> {
        self.writes += 1;
        self.is_cut |= self.cut_at.is_some_and(|at| self.writes > at);
        if self.is_cut {
            return Ok(false);
        }
        for (index, sector) in bytes.as_chunks::<SECTOR>().0.iter().enumerate() {
            let number = offset / SECTOR as u64 + index as u64;
            if is_fua {
                self.cache.remove(&number);
            } else {
                self.cache.insert(number, *sector);
            }
        }
        if is_fua {
            self.file.write_all_at(bytes, offset)?;
        }
        Ok(true)
    }

    fn flush(&mut self) -> io::Result<()> {
        for (sector, bytes) in std::mem::take(&mut self.cache) {
            self.file.write_all_at(&bytes, sector * SECTOR as u64)?;
        }
        Ok(())
    }
}

struct Connection {
    stream: UnixStream,
    state: Arc<Mutex<State>>,
}

impl Connection {
    fn serve(&mut self) -> io::Result<()> {
        self.shake_hands()?;
        while self.answer()? {}
        // Without power no request is answered; QEMU waits until it is killed.
        io::copy(&mut self.stream, &mut io::sink()).map(drop)
    }

    fn shake_hands(&mut self) -> io::Result<()> {
        /// Fixed newstyle, no zeroes.
        const FLAGS: u16 = 1 | 2;
        self.stream.write_all(b"NBDMAGIC")?;
        self.stream.write_all(OPTION_MAGIC)?;
        self.stream.write_all(&FLAGS.to_be_bytes())?;
        let _client_flags = self.take::<4>()?;
        loop {
            let magic = self.take::<8>()?;
            let option = u32::from_be_bytes(self.take()?);
            let length = u32::from_be_bytes(self.take()?);
            if magic != *OPTION_MAGIC || length > REQUEST_BYTES_MAX {
                return Err(io::Error::other("not an option of NBD"));
            }
            self.stream.read_exact(&mut vec![0; length as usize])?;
            if option != OPTION_GO {
                self.reply_option(option, REPLY_UNSUPPORTED, &[])?;
                continue;
            }
            let size = lock(&self.state).file.metadata()?.len();
            // NBD_INFO_EXPORT is 0.
            let info = [&[0, 0], &size.to_be_bytes()[..], &TRANSMISSION_FLAGS.to_be_bytes()].concat();
            self.reply_option(option, REPLY_INFO, &info)?;
            return self.reply_option(option, REPLY_ACK, &[]);
        }
    }

    fn reply_option(&mut self, option: u32, kind: u32, payload: &[u8]) -> io::Result<()> {
        self.stream.write_all(&OPTION_REPLY_MAGIC.to_be_bytes())?;
        for number in [option, kind, payload.len() as u32] {
            self.stream.write_all(&number.to_be_bytes())?;
        }
        self.stream.write_all(payload)
    }

    /// Handles one request; returns false if the power is cut.
    fn answer(&mut self) -> io::Result<bool> {
        let magic = u32::from_be_bytes(self.take()?);
        let flags = u16::from_be_bytes(self.take()?);
        let command = u16::from_be_bytes(self.take()?);
        let handle = self.take::<8>()?;
        let offset = u64::from_be_bytes(self.take()?);
        let length = u32::from_be_bytes(self.take()?);
        let is_aligned = offset.is_multiple_of(SECTOR as u64) && length.is_multiple_of(SECTOR as u32);
        let is_aligned = is_aligned || command != 1;
        if magic != REQUEST_MAGIC || length > REQUEST_BYTES_MAX || !is_aligned {
            return Err(io::Error::other("not a request of NBD"));
        }
        let mut bytes = Vec::new();
        match command {
            0 => {
                bytes.resize(length as usize, 0);
                lock(&self.state).read(offset, &mut bytes)?;
            }
            1 => {
                let mut written = vec![0; length as usize];
                self.stream.read_exact(&mut written)?;
                if !lock(&self.state).write(offset, &written, flags & FLAG_FUA != 0)? {
                    return Ok(false);
                }
            }
            3 => {
                let mut state = lock(&self.state);
                if state.is_cut {
                    return Ok(false);
                }
                state.flush()?;
            }
            _ => return Err(io::Error::other("it disconnects")),
        }
        self.stream.write_all(&REPLY_MAGIC.to_be_bytes())?;
        self.stream.write_all(&0_u32.to_be_bytes())?;
        self.stream.write_all(&handle)?;
        self.stream.write_all(&bytes)?;
        Ok(true)
    }

    fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

/// A minimal client that shows the effect of a power cut.
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::{FLAG_FUA, OPTION_GO, OPTION_MAGIC, REQUEST_MAGIC, SECTOR, Volatile};
    use coracle_tests::random::Random;

    fn connect(disk: &Volatile) -> UnixStream {
        let mut stream = UnixStream::connect(&disk.socket).expect("it listens");
        stream.read_exact(&mut [0; 18]).expect("a greeting");
        stream.write_all(&3_u32.to_be_bytes()).expect("flags");
        stream.write_all(OPTION_MAGIC).expect("an option");
        stream.write_all(&OPTION_GO.to_be_bytes()).expect("an option");
        stream.write_all(&0_u32.to_be_bytes()).expect("an option");
        // Information of 12 bytes after a header of 20, then the acknowledgement.
        stream.read_exact(&mut [0; 20 + 12 + 20]).expect("an answer");
        stream
    }

    fn ask(stream: &mut UnixStream, flags: u16, command: u16, sector: u64, bytes: &[u8]) {
        let mut request = REQUEST_MAGIC.to_be_bytes().to_vec();
        request.extend(flags.to_be_bytes());
        request.extend(command.to_be_bytes());
        request.extend([7; 8]);
        request.extend((sector * SECTOR as u64).to_be_bytes());
        request.extend((bytes.len() as u32).to_be_bytes());
        request.extend(bytes);
        stream.write_all(&request).expect("a request");
        stream.read_exact(&mut [0; 16]).expect("an answer");
    }

    /// A flushed page, one written with FUA, and one only written; returns which of them are in the file
    /// after the cut.
    fn after_a_cut(kept_percent: u64) -> [bool; 3] {
        let name = format!("coracle-volatile-{}-{kept_percent}", std::process::id());
        let file = std::env::temp_dir().join(name);
        std::fs::write(&file, vec![0; 4 * SECTOR]).expect("a disk");
        let disk = Volatile::serve(&file, file.with_extension("socket"));
        let mut stream = connect(&disk);
        ask(&mut stream, 0, 1, 0, &[1; SECTOR]);
        ask(&mut stream, 0, 3, 0, &[]);
        ask(&mut stream, 0, 1, 2, &[1; SECTOR]);
        ask(&mut stream, FLAG_FUA, 1, 1, &[1; SECTOR]);
        disk.settle(&mut Random::new(1), kept_percent);
        let bytes = std::fs::read(&file).expect("the disk");
        let _ = std::fs::remove_file(file.with_extension("socket"));
        std::fs::remove_file(file).expect("it is ours");
        [0, 1, 2].map(|page| bytes[page * SECTOR] == 1)
    }

    #[test]
    fn only_what_was_flushed_is_certain() {
        assert_eq!(after_a_cut(0), [true, true, false]);
        assert_eq!(after_a_cut(100), [true, true, true]);
    }
}
