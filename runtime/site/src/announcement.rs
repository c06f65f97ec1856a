//! What a pull tells the process that serves neighbours about a blob that it downloads: a file beside the part, locked while the
//! pull has the part. A kill releases the lock, so the file of a killed worker says nothing.
//!
//! `images/parts/HEX-state`: 20 digits, the size of the blob in bytes, or of [`Stage::Changing`] the progress, a space, the letter of a
//! [`Stage`], and 16 digits that stand for the name of the registry (`mark`). It is a temporary file of its worker like
//! others with a `-` in their names: the daemon removes what a killed one has left.
//!
//! The lock is one of the open file (Linux 3.15, `F_OFD_SETLK`), because the serving process can ask for it without the right to take
//! one (`F_OFD_GETLK`): with a lock of a part that it may read, it could hold up pulls.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use sha2::{Digest, Sha256};

/// The stage of a pull of a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The pull has the part, and has not asked a registry for the blob.
    Waiting,
    /// The pull downloads the blob from a registry.
    Fetching,
    /// The pull downloads the rest of the blob from a registry; bytes before it are those of neighbours, and may be wrong.
    Resuming,
    /// The pull downloads from a registry what the node does not have of the layer, which neighbours then take unpacked.
    Changing,
}

impl Stage {
    /// The stages with their words in answers.
    const WORDS: [(Self, &'static str); 4] = [
        (Self::Waiting, "waiting"),
        (Self::Fetching, "fetching"),
        (Self::Resuming, "resuming"),
        (Self::Changing, "changing"),
    ];

    /// The word of the stage in answers; its first letter is that in the file.
    pub fn word(self) -> &'static str {
        Self::WORDS.iter().find(|(stage, _)| *stage == self).map_or("", |(_, word)| word)
    }

    fn letter(self) -> u8 {
        self.word().as_bytes().first().copied().unwrap_or_default()
    }

    fn of(letter: u8) -> Option<Self> {
        Self::WORDS.iter().map(|(stage, _)| *stage).find(|stage| stage.letter() == letter)
    }
}

/// Length in bytes of the size and the space after it.
const SIZE_BYTES: usize = 21;
/// Length in bytes of a registry's mark.
const MARK_BYTES: usize = 16;
/// Length of the file in bytes.
const BYTES: usize = SIZE_BYTES + 1 + MARK_BYTES;

/// The digits that stand for a registry in the file. A download is passed on only to pulls from the same registry: another one, which
/// every user who may create pods can name, could be slow on purpose.
fn mark(registry: &str) -> String {
    let mut mark = data_encoding::HEXLOWER.encode(&Sha256::digest(registry));
    mark.truncate(MARK_BYTES);
    mark
}

/// A lock for writing of the whole file.
fn whole() -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

/// The announcement of a pull. Dropping it removes the file.
pub struct Announcement {
    file: File,
    path: PathBuf,
}

impl Announcement {
    /// Announces that this process has the part at `part` of a blob of `size` bytes, which it pulls from `registry`. Without an
    /// announcement neighbours do not get the blob before it is complete, which is no failure of the pull.
    pub fn new(part: &Path, size: u64, registry: &str) -> Option<Self> {
        let path = path_of(part);
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path).ok()?;
        fcntl(&file, FcntlArg::F_OFD_SETLK(&whole())).ok()?;
        let announcement = Self { file, path };
        announcement.waiting(size, registry).then_some(announcement)
    }

    /// Announces a stage.
    pub fn set(&self, stage: Stage) {
        // If this fails, neighbours see the stage before.
        let _ = self.file.write_all_at(&[stage.letter()], SIZE_BYTES as u64);
    }

    /// Announces [`Stage::Changing`] with this number of downloaded bytes.
    pub fn changing(&self, bytes: u64) {
        // If this fails, neighbours wait for a time with a limit, and then ask the registry.
        let _ = self.file.write_all_at(format!("{bytes:020} c").as_bytes(), 0);
    }

    /// Announces that the pull has asked no registry; returns whether that is written.
    pub fn waiting(&self, size: u64, registry: &str) -> bool {
        self.write(size, Stage::Waiting, registry)
    }

    fn write(&self, size: u64, stage: Stage, registry: &str) -> bool {
        let mut text = format!("{size:020} ").into_bytes();
        text.push(stage.letter());
        text.extend(mark(registry).as_bytes());
        self.file.set_len(BYTES as u64).and_then(|()| self.file.write_all_at(&text, 0)).is_ok()
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        // If this fails, the file is not locked any more, and the daemon removes it.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn path_of(part: &Path) -> PathBuf {
    let mut path = part.as_os_str().to_owned();
    path.push("-state");
    path.into()
}

/// The announcement of another process.
pub struct Announced {
    file: File,
    /// Size of the blob in bytes, or of [`Stage::Changing`] the progress.
    pub size: u64,
    /// Stage of the pull.
    pub stage: Stage,
    mark: [u8; MARK_BYTES],
}

impl Announced {
    /// Reads the announcement for the part at `part` in the file that `open` opens; `None` if no pull has it.
    pub fn read(part: &Path, open: impl FnOnce(&Path) -> Option<File>) -> Option<Self> {
        let file = open(&path_of(part))?;
        let mut text = [0; BYTES];
        file.read_exact_at(&mut text, 0).ok()?;
        let size = std::str::from_utf8(&text[..SIZE_BYTES - 1]).ok()?.parse().ok()?;
        let (stage, mark) = (Stage::of(text[SIZE_BYTES])?, *text.last_chunk()?);
        let announced = Self { file, size, stage, mark };
        announced.is_live().then_some(announced)
    }

    /// Whether the pull is one from this registry.
    pub fn is_of(&self, registry: &str) -> bool {
        self.mark == mark(registry).as_bytes()
    }

    /// Whether the pull still has the part.
    pub fn is_live(&self) -> bool {
        let mut lock = whole();
        let asked = fcntl(&self.file, FcntlArg::F_OFD_GETLK(&mut lock));
        asked.is_ok() && i32::from(lock.l_type) != libc::F_UNLCK
    }
}
