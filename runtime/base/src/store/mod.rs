//! Records on disk. All records below `--root` are written, read, and moved to quarantine by this module. The
//! module guarantees that a record is complete or absent after a power cut at any moment, and that bytes that
//! fail verification are never returned, never deleted and never fatal. The module does not interpret the
//! body.
//!
//! Format of a record (formats are only extended):
//!
//! | offset | bytes | content |
//! |---|---|---|
//! | 0 | 4 | `CORR` |
//! | 4 | 1 | kind: [`Kind`] |
//! | 5 | 1 | version of the body, by kind |
//! | 6 | 4 | length of the body, little-endian |
//! | 10 | length | body |
//! | 10 + length | 4 | CRC-32 over everything before it, little-endian |
//!
//! Records that change often are in files with two slots, with another header ([`Slots`]).
//!
//! Syncs block the daemon's thread. Records are small: a commit takes four flushes of the disk on ext4, and one for a
//! record in slots.

mod quarantine;
mod slots;
mod unread;

pub use coracle_sandbox::disk::close_directory;
pub use quarantine::{close_quarantine, damaged_count, damaged_last, quarantine, require_quarantine};
pub use slots::Slots;
pub use unread::{UNREAD_LIMIT, Unread, is_shortage};

use std::fmt;
use std::io;
use std::path::Path;

use coracle_sandbox::collect;
use coracle_sandbox::{crc32, disk};

use crate::error::{self, Error};

/// Maximum size of a body in bytes; sufficient for an image record with a config of the maximum size (4 MiB)
/// and its names.
pub(crate) const BODY_BYTES_MAX: usize = 8 << 20;

/// Prefix of temporary file names. Record names are IDs and digests, which never start with it.
const TEMPORARY: &str = ".new-";

const MAGIC: &[u8; 4] = b"CORR";
const HEADER_BYTES: usize = 10;
const CHECKSUM_BYTES: usize = 4;

/// The kind of object that a record describes. The numbers are part of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The record of an image, `images/records/HEX`.
    Image = 1,
    /// The record of a pod sandbox.
    Pod = 2,
    /// The record of a container.
    Container = 3,
    /// The record of the node's pod CIDR.
    PodCidr = 4,
    /// The record of the images that an administrator pinned.
    Pins = 5,
    /// The record of the images that were imported from the import directories.
    Bundles = 6,
    /// The confinement of a container's processes.
    Confinement = 7,
    /// The plan of a container that was not started.
    Plan = 8,
    /// The containers that may use a damaged layer that was replaced.
    Replaced = 9,
}

/// A record that passed verification.
#[derive(Debug, PartialEq, Eq)]
pub struct Loaded {
    /// Version of the body. The reader must handle versions that are newer than it supports.
    pub version: u8,
    /// The body of the record, which passed verification.
    pub body: Vec<u8>,
}

/// The reason why a record could not be loaded.
#[derive(Debug)]
pub enum Damage {
    /// There is no record with this name.
    Absent,
    /// An I/O error. The error may be temporary, so the file is kept.
    Io(io::Error),
    /// The bytes fail verification for this reason; the caller moves them with [`quarantine()`].
    Damaged(String),
}

impl fmt::Display for Damage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => out.write_str("no such record"),
            Self::Io(error) => out.write_str(&error::describe_io(error)),
            Self::Damaged(reason) => write!(out, "damaged record: {reason}"),
        }
    }
}

/// Writes the record `name` in `dir`: writes and syncs a temporary file, renames it, and syncs the directory.
/// After an error the old record is unchanged; only if the last sync fails, a power cut may leave either
/// record.
///
/// # Errors
/// `ResourceExhausted` if the disk is full or the body is larger than 8 MiB; otherwise the I/O error.
pub fn commit(dir: &Path, name: &str, kind: Kind, version: u8, body: &[u8]) -> Result<(), Error> {
    let tried = || format!("write record {}", dir.join(name).display());
    if body.len() > BODY_BYTES_MAX {
        let text = format!("{} bytes, but at most {BODY_BYTES_MAX} are allowed", body.len());
        return Err(Error::new(error::Kind::ResourceExhausted, text).context(tried()));
    }
    let bytes = encode(kind, version, body);
    assert!(
        decode(&bytes, kind).is_ok_and(|loaded| loaded.version == version && loaded.body == body),
        "a record reads back as it was written"
    );
    replace(dir, name, |temporary| disk::write_synced(temporary, &bytes))
        .and_then(|()| sync_dir(dir))
        .map_err(|error| {
            let room = error::free_space(&dir.join(name), &error);
            let error = Error::from(error).context(tried());
            Error::new(error.kind(), format!("{error}{room}"))
        })
}

/// Writes a note: a record without a sync, in a directory below `--state`, which is created if missing. The
/// note is complete or absent if the daemon is killed, and does not survive a reboot.
///
/// # Errors
/// The error of the file system.
pub fn note(dir: &Path, name: &str, kind: Kind, version: u8, body: &[u8]) -> Result<(), Error> {
    let bytes = encode(kind, version, body);
    disk::create_dir_all(dir)
        .and_then(|()| replace(dir, name, |temporary| disk::write_unsynced(temporary, &bytes)))
        .map_err(|error| Error::from(error).context(format!("write note {}", dir.join(name).display())))
}

/// Writes a file that is not a record, without a sync, in an existing directory. The file is complete or
/// absent if the daemon is killed at any moment.
///
/// # Errors
/// The error of the file system.
pub fn write_unsynced(dir: &Path, name: &str, bytes: &[u8]) -> Result<(), Error> {
    replace(dir, name, |temporary| disk::write_unsynced(temporary, bytes))
        .map_err(|error| Error::from(error).context(format!("write {}", dir.join(name).display())))
}

/// Removes a note. A missing note is success.
///
/// # Errors
/// The error of the file system.
pub fn forget_note(dir: &Path, name: &str) -> Result<(), Error> {
    match disk::remove_file(&dir.join(name)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::from(error).context(format!("delete note {}", dir.join(name).display())))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Reads and verifies the record `name` in `dir`.
///
/// # Errors
/// [`Damage`] if there is no such record, it cannot be read, or it fails verification.
pub fn load(dir: &Path, name: &str, kind: Kind) -> Result<Loaded, Damage> {
    let longest = (HEADER_BYTES + BODY_BYTES_MAX + CHECKSUM_BYTES) as u64;
    // One byte more than the longest record is enough to recognise a file that is too long.
    match disk::read_up_to(&dir.join(name), longest + 1) {
        Ok(bytes) if slots::is_slotted(&bytes) => slots::decode(&bytes, kind).map_err(Damage::Damaged),
        Ok(bytes) => decode(&bytes, kind).map_err(Damage::Damaged),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Damage::Absent),
        // A permanent error: the parent is not a directory.
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            Err(Damage::Damaged(format!("{} is not a directory", dir.display())))
        }
        Err(error) => Err(Damage::Io(error)),
    }
}

/// Removes the record `name` in `dir`; the removal is durable when the function returns. A missing record is
/// not an error.
///
/// # Errors
/// The I/O error.
pub fn remove(dir: &Path, name: &str) -> Result<(), Error> {
    match disk::remove_file(&dir.join(name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other,
    }
    .and_then(|()| sync_dir(dir))
    .map_err(|error| Error::from(error).context(format!("delete record {}", dir.join(name).display())))
}

/// Returns the sorted names of the records in `dir`. Removes temporary files that a crash left.
///
/// # Errors
/// The I/O error.
pub fn names(dir: &Path) -> Result<Vec<String>, Error> {
    entries(dir).map_err(|error| Error::from(error).context(format!("list records in {}", dir.display())))
}

/// Returns the sorted names of the files and directories in `dir`. Removes temporary files that a crash left.
///
/// # Errors
/// The I/O error.
pub fn entries(dir: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in disk::entries(dir)? {
        // coracle writes no names that are not UTF-8.
        let Ok(name) = entry?.name.into_string() else { continue };
        if name.starts_with(TEMPORARY) {
            match disk::remove_file(&dir.join(&name)) {
                // The file does no harm: the records can still be read.
                Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {}
                removed => removed?,
            }
        } else {
            names.push(name);
        }
    }
    collect::sort(&mut names);
    Ok(names)
}

/// Makes the entries of `dir` durable.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    disk::sync_dir(dir)
}

/// Removes a file that [`write_unsynced`] wrote, and the temporary file of a failed write. Missing files are
/// success.
///
/// # Errors
/// A file cannot be removed.
pub fn remove_note(dir: &Path, name: &str) -> Result<(), Error> {
    for path in [dir.join(name), dir.join(format!("{TEMPORARY}{name}"))] {
        match disk::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error::failed("remove", &path, &error));
            }
            Ok(()) | Err(_) => {}
        }
    }
    Ok(())
}

/// Calls `write` with a temporary path, then renames that file to `name`, so that the name always refers to a
/// complete file.
fn replace(dir: &Path, name: &str, write: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let temporary = dir.join(format!("{TEMPORARY}{name}"));
    write(&temporary)
        .and_then(|()| disk::rename(&temporary, &dir.join(name)))
        .inspect_err(|_| drop(disk::remove_file(&temporary)))
}

fn encode(kind: Kind, version: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len() + CHECKSUM_BYTES);
    bytes.extend_from_slice(MAGIC);
    bytes.push(kind as u8);
    bytes.push(version);
    bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(body);
    let checksum = crc32(&bytes);
    bytes.extend_from_slice(&checksum.to_le_bytes());
    bytes
}

fn decode(bytes: &[u8], kind: Kind) -> Result<Loaded, String> {
    let (whole, checksum) =
        bytes.split_last_chunk::<CHECKSUM_BYTES>().ok_or_else(|| format!("{} bytes", bytes.len()))?;
    let (magic, rest) = whole.split_first_chunk::<4>().ok_or_else(|| format!("{} bytes", bytes.len()))?;
    if magic != MAGIC {
        return Err("the file does not start with CORR".into());
    }
    let ([found, version], rest) =
        rest.split_first_chunk::<2>().ok_or_else(|| format!("{} bytes", bytes.len()))?;
    let (length, body) = rest.split_first_chunk::<4>().ok_or_else(|| format!("{} bytes", bytes.len()))?;
    let length = u32::from_le_bytes(*length) as usize;
    if length > BODY_BYTES_MAX {
        return Err(format!("a body of {length} bytes, at most {BODY_BYTES_MAX}"));
    }
    if length != body.len() {
        return Err(format!("a body of {} bytes instead of {length}", body.len()));
    }
    if crc32(whole) != u32::from_le_bytes(*checksum) {
        return Err("the checksum does not match".into());
    }
    if *found != kind as u8 {
        return Err(format!("kind {found} instead of {}", kind as u8));
    }
    Ok(Loaded { version: *version, body: body.to_vec() })
}

#[cfg(test)]
mod tests {
    use super::{
        BODY_BYTES_MAX, Damage, Kind, commit, decode, encode, forget_note, load, names, note, remove,
    };
    use crate::testdir::TestDir;
    use std::fs;

    #[test]
    fn the_format_of_version_1_is_unchanged() {
        let golden = b"CORR\x01\x07\x03\0\0\0abc\xe1\x3e\xc4\x36";
        assert_eq!(encode(Kind::Image, 7, b"abc"), golden, "{:x?}", encode(Kind::Image, 7, b"abc"));
        assert_eq!(decode(golden, Kind::Image).unwrap().body, b"abc");
    }

    #[test]
    fn a_record_can_be_loaded_replaced_and_removed() {
        let dir = TestDir::new("store");
        for body in [&b"one"[..], b"", &[0xa5; 100_000]] {
            commit(dir.path(), "x", Kind::Pod, 3, body).unwrap();
            let loaded = load(dir.path(), "x", Kind::Pod).unwrap();
            assert_eq!((loaded.version, loaded.body.as_slice()), (3, body));
        }
        assert_eq!(names(dir.path()).unwrap(), ["x"]);
        remove(dir.path(), "x").unwrap();
        remove(dir.path(), "x").unwrap();
        assert!(matches!(load(dir.path(), "x", Kind::Pod), Err(Damage::Absent)));
    }

    #[test]
    fn a_note_creates_its_directory_and_can_be_removed() {
        let dir = TestDir::new("store");
        let below = dir.path().join("a/b");
        for body in [&b"one"[..], b"two"] {
            note(&below, "x", Kind::Container, 1, body).unwrap();
            assert_eq!(load(&below, "x", Kind::Container).unwrap().body, body);
        }
        forget_note(&below, "x").unwrap();
        forget_note(&below, "x").unwrap();
        assert!(matches!(load(&below, "x", Kind::Container), Err(Damage::Absent)));
    }

    #[test]
    fn every_truncation_and_every_flipped_bit_is_detected() {
        let whole = encode(Kind::Container, 1, b"a small body");
        for cut in 0..whole.len() {
            assert!(decode(&whole[..cut], Kind::Container).is_err(), "cut at {cut}");
        }
        for bit in 0..whole.len() * 8 {
            let mut flipped = whole.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(&flipped, Kind::Container).is_err(), "bit {bit}");
        }
        let mut longer = whole.clone();
        longer.push(0);
        assert!(decode(&longer, Kind::Container).is_err());
        assert!(decode(&whole, Kind::Pod).is_err());
        assert!(decode(&vec![0; 4096], Kind::Pod).is_err());
    }

    #[test]
    fn an_endless_file_is_damaged_and_uses_bounded_memory() {
        let dir = TestDir::new("store");
        let file = fs::File::create(dir.path().join("x")).unwrap();
        file.set_len(1 << 40).unwrap();
        assert!(matches!(load(dir.path(), "x", Kind::Pod), Err(Damage::Damaged(_))));
        let mut header = encode(Kind::Pod, 1, b"");
        header[6..10].copy_from_slice(&(BODY_BYTES_MAX as u32 + 1).to_le_bytes());
        assert!(decode(&header, Kind::Pod).unwrap_err().contains("at most"));
    }

    #[test]
    fn a_note_is_removed_with_its_temporary_file() {
        let dir = TestDir::new("store-note");
        for name in ["a", ".new-a", ".new-b"] {
            fs::write(dir.path().join(name), b"x").unwrap();
        }
        for _ in 0..2 {
            super::remove_note(dir.path(), "a").unwrap();
            let left: Vec<_> =
                fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            assert_eq!(left, [".new-b"]);
        }
    }

    #[test]
    fn temporary_files_of_a_crash_are_not_listed() {
        let dir = TestDir::new("store");
        fs::write(dir.path().join(".new-x"), b"CORR").unwrap();
        assert!(names(dir.path()).unwrap().is_empty());
        assert!(!dir.path().join(".new-x").exists());
    }

    #[test]
    fn an_error_names_the_record() {
        let error = commit("/proc/none".as_ref(), "x", Kind::Pod, 1, b"").unwrap_err();
        assert_eq!(error.to_string(), "write record /proc/none/x: no such file or directory");
    }
}
