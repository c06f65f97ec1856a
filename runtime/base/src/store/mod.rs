//! Records on disk: the one way a file under `--root` comes to be, is read back, and is set aside when it is damaged.
//! Promises: a record is whole or absent, whatever instant the power goes; bytes that do not verify are never handed
//! out, never deleted and never fatal. Keeps out what a record means: a body is bytes here.
//!
//! A record, byte by byte (formats only grow):
//!
//! | at | bytes | what |
//! |---|---|---|
//! | 0 | 4 | `CORR` |
//! | 4 | 1 | kind: [`Kind`] |
//! | 5 | 1 | version of the body, by kind |
//! | 6 | 4 | length of the body, little-endian |
//! | 10 | length | body |
//! | 10 + length | 4 | CRC-32 over everything before it, little-endian |
//!
//! Syncs run inline. A record is small, so a commit costs one flush of the disk; that it is done here and nowhere
//! else is what lets it be measured and moved.

mod checksum;
mod quarantine;

pub use quarantine::{close_directory, close_quarantine, damaged_count, quarantine};

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::error::{self, Error};

/// Longest body: an image record with a config at its limit (4 MiB) and its names.
pub(crate) const BODY_BYTES_MAX: usize = 8 << 20;

/// What temporary names start with. Records are named by ids and digests, which never do.
const TEMPORARY: &str = ".new-";

const MAGIC: &[u8; 4] = b"CORR";
const HEADER_BYTES: usize = 10;
const CHECKSUM_BYTES: usize = 4;

/// What a record is about. The numbers are on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// `images/records/HEX`.
    Image = 1,
    /// A pod sandbox.
    Pod = 2,
    /// A container.
    Container = 3,
    /// The node's pod CIDR.
    PodCidr = 4,
    /// Images that are pinned by hand.
    Pins = 5,
    /// What the import directories brought.
    Bundles = 6,
}

/// A record that verified.
#[derive(Debug, PartialEq, Eq)]
pub struct Loaded {
    /// Version of the body. Newer than the reader knows: the reader's matter.
    pub version: u8,
    /// The body.
    pub body: Vec<u8>,
}

/// Why a record cannot be had.
#[derive(Debug)]
pub enum Damage {
    /// There is none of this name.
    Absent,
    /// The disk: maybe only now, so the file stays where it is.
    Io(io::Error),
    /// The bytes do not verify: for [`quarantine()`], with this reason.
    Damaged(String),
}

impl fmt::Display for Damage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => out.write_str("no such record"),
            Self::Io(error) => out.write_str(&error::plain(error)),
            Self::Damaged(reason) => write!(out, "damaged record: {reason}"),
        }
    }
}

/// Writes the record `name` in `dir`: temporary name, write, sync, rename, sync the directory. On an error the old
/// record stands, except that a failed last step leaves open which of the two a power cut would find.
///
/// # Errors
/// `ResourceExhausted` for a full disk or a body longer than 8 MiB, else what the disk says.
pub fn commit(dir: &Path, name: &str, kind: Kind, version: u8, body: &[u8]) -> Result<(), Error> {
    let tried = || format!("write record {}", dir.join(name).display());
    if body.len() > BODY_BYTES_MAX {
        let text = format!("{} bytes, at most {BODY_BYTES_MAX}", body.len());
        return Err(Error::new(error::Kind::ResourceExhausted, text).context(tried()));
    }
    let bytes = encode(kind, version, body);
    assert!(
        decode(&bytes, kind).is_ok_and(|loaded| loaded.version == version && loaded.body == body),
        "a record reads back as it was written"
    );
    replace(dir, name, |temporary| write_synced(temporary, &bytes))
        .and_then(|()| sync_dir(dir))
        .map_err(|error| Error::from(error).context(tried()))
}

/// As [`commit`] without a sync, for a directory below `--state`, which is made where it is missing: whole or absent whenever
/// the daemon is killed, and gone with the next boot.
///
/// # Errors
/// What the file system says.
pub fn note(dir: &Path, name: &str, kind: Kind, version: u8, body: &[u8]) -> Result<(), Error> {
    let bytes = encode(kind, version, body);
    fs::create_dir_all(dir)
        .and_then(|()| replace(dir, name, |temporary| create(temporary)?.write_all(&bytes)))
        .map_err(|error| Error::from(error).context(format!("note record {}", dir.join(name).display())))
}

/// Takes a note away. Not there is success.
///
/// # Errors
/// What the file system says.
pub fn forget_note(dir: &Path, name: &str) -> Result<(), Error> {
    match fs::remove_file(dir.join(name)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::from(error).context(format!("delete note {}", dir.join(name).display())))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Reads and verifies the record `name` in `dir`.
///
/// # Errors
/// [`Damage`]: there is none, the disk did not give it, or its bytes do not verify.
pub fn load(dir: &Path, name: &str, kind: Kind) -> Result<Loaded, Damage> {
    let file = match File::open(dir.join(name)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Damage::Absent),
        // Not an error that passes: something else is in the place of its directory.
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            return Err(Damage::Damaged(format!("{} is not a directory", dir.display())));
        }
        Err(error) => return Err(Damage::Io(error)),
    };
    let longest = (HEADER_BYTES + BODY_BYTES_MAX + CHECKSUM_BYTES) as u64;
    let mut bytes = Vec::new();
    // One byte more than the longest record tells a longer file from it, however long it really is.
    file.take(longest + 1).read_to_end(&mut bytes).map_err(Damage::Io)?;
    decode(&bytes, kind).map_err(Damage::Damaged)
}

/// Deletes the record `name` in `dir`, for good when this returns. Not there is success.
///
/// # Errors
/// What the disk says.
pub fn remove(dir: &Path, name: &str) -> Result<(), Error> {
    match fs::remove_file(dir.join(name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other,
    }
    .and_then(|()| sync_dir(dir))
    .map_err(|error| Error::from(error).context(format!("delete record {}", dir.join(name).display())))
}

/// Names of the records in `dir`, sorted. What a crash left half-written is deleted on the way.
///
/// # Errors
/// What the disk says.
pub fn names(dir: &Path) -> Result<Vec<String>, Error> {
    let listed = || -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(dir)? {
            // A name that is not UTF-8 is none of ours.
            let Ok(name) = entry?.file_name().into_string() else { continue };
            if name.starts_with(TEMPORARY) {
                match fs::remove_file(dir.join(&name)) {
                    // It is in nobody's way: the records are read all the same.
                    Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {}
                    removed => removed?,
                }
            } else {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    };
    listed().map_err(|error| Error::from(error).context(format!("list records in {}", dir.display())))
}

/// Makes names in `dir` durable.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Has a file written by a temporary name, then renames it: whole, or as it was.
fn replace(dir: &Path, name: &str, write: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let temporary = dir.join(format!("{TEMPORARY}{name}"));
    write(&temporary)
        .and_then(|()| fs::rename(&temporary, dir.join(name)))
        .inspect_err(|_| drop(fs::remove_file(&temporary)))
}

fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)
}

fn encode(kind: Kind, version: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len() + CHECKSUM_BYTES);
    bytes.extend_from_slice(MAGIC);
    bytes.push(kind as u8);
    bytes.push(version);
    bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(body);
    let checksum = checksum::crc32(&bytes);
    bytes.extend_from_slice(&checksum.to_le_bytes());
    bytes
}

fn decode(bytes: &[u8], kind: Kind) -> Result<Loaded, String> {
    let (whole, checksum) =
        bytes.split_last_chunk::<CHECKSUM_BYTES>().ok_or_else(|| format!("{} bytes", bytes.len()))?;
    let (magic, rest) = whole.split_first_chunk::<4>().ok_or_else(|| format!("{} bytes", bytes.len()))?;
    if magic != MAGIC {
        return Err("it does not start with CORR".into());
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
    if checksum::crc32(whole) != u32::from_le_bytes(*checksum) {
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
    fn the_bytes_of_version_1_stay_as_they_are() {
        let golden = b"CORR\x01\x07\x03\0\0\0abc\xe1\x3e\xc4\x36";
        assert_eq!(encode(Kind::Image, 7, b"abc"), golden, "{:x?}", encode(Kind::Image, 7, b"abc"));
        assert_eq!(decode(golden, Kind::Image).unwrap().body, b"abc");
    }

    #[test]
    fn a_commit_is_read_back_replaced_and_removed() {
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
    fn a_note_makes_its_directory_and_is_forgotten() {
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
    fn every_cut_and_every_flipped_bit_is_damage() {
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
    fn an_endless_file_is_damage_and_not_memory() {
        let dir = TestDir::new("store");
        let file = fs::File::create(dir.path().join("x")).unwrap();
        file.set_len(1 << 40).unwrap();
        assert!(matches!(load(dir.path(), "x", Kind::Pod), Err(Damage::Damaged(_))));
        let mut header = encode(Kind::Pod, 1, b"");
        header[6..10].copy_from_slice(&(BODY_BYTES_MAX as u32 + 1).to_le_bytes());
        assert!(decode(&header, Kind::Pod).unwrap_err().contains("at most"));
    }

    #[test]
    fn what_a_crash_left_half_written_is_not_listed() {
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
