//! Where things are in the store, and how they get there: written aside, synced, renamed, so that each is whole or
//! absent whatever instant the power goes (the table is in `coracle_job`'s image module).

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use coracle_job::{Failure, FailureKind};

use crate::failure::{invalid, io_failure};
use crate::image_config::DOCUMENT_BYTES_MAX;

/// Inodes without which no layer is begun: its directory, a few files, records.
const INODES_MIN: u64 = 16;

/// Something whole, and the name that it gets when it is published.
pub(crate) type Move = (PathBuf, PathBuf);

/// The store below `--root`.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    root: PathBuf,
}

impl Store {
    /// Opens it, and makes the directories that a new one lacks.
    pub(crate) fn open(root: &Path) -> Result<Self, Failure> {
        let store = Self { root: root.to_owned() };
        for directory in ["images/blobs/sha256", "images/parts", "images/users", "layers"] {
            let path = root.join(directory);
            let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&path);
            made.map_err(|error| io_failure("make directory", &path, &error))?;
        }
        Ok(store)
    }

    /// A whole blob, by `sha256:HEX`.
    pub(crate) fn blob(&self, digest: &str) -> Result<PathBuf, Failure> {
        Ok(self.root.join("images/blobs/sha256").join(hex(digest)?))
    }

    /// A manifest, index or config, whole; `None` for a blob that is not there, or longer than those may be.
    pub(crate) fn document(&self, digest: &str) -> Option<Vec<u8>> {
        let path = self.blob(digest).ok()?;
        let is_short = path.metadata().is_ok_and(|about| about.len() <= DOCUMENT_BYTES_MAX);
        is_short.then(|| fs::read(path).ok()).flatten()
    }

    /// The beginning of a blob.
    pub(crate) fn part(&self, digest: &str) -> Result<PathBuf, Failure> {
        Ok(self.root.join("images/parts").join(hex(digest)?))
    }

    /// An unpacked layer, by its name.
    pub(crate) fn layer(&self, name: &str) -> PathBuf {
        self.root.join("layers").join(name)
    }

    /// A name of this worker's own for a blob that is written whole.
    pub(crate) fn aside(&self, digest: &str) -> Result<PathBuf, Failure> {
        Ok(self.root.join("images/parts").join(format!("{}-{}", hex(digest)?, std::process::id())))
    }

    /// A new, empty directory for a layer that is being unpacked. What a killed worker leaves of it is swept by the
    /// daemon.
    pub(crate) fn new_layer(&self) -> Result<PathBuf, Failure> {
        self.new_directory("layers")
    }

    /// A new, empty directory for an archive's blobs; swept as those of layers are.
    pub(crate) fn new_spool(&self) -> Result<PathBuf, Failure> {
        self.new_directory("layers")
    }

    /// Says how full the disk is, where that is why.
    pub(crate) fn explain(&self, failure: Failure) -> Failure {
        explain(&self.root, failure)
    }

    /// Checks that so many bytes and inodes, and a few inodes more, can be written, before any of them is.
    pub(crate) fn need(&self, bytes: u64, inodes: u64) -> Result<(), Failure> {
        // What cannot be asked is found out by writing.
        let Ok(room) = rustix::fs::statvfs(&self.root) else { return Ok(()) };
        let free = room.f_bavail.saturating_mul(room.f_frsize);
        let inodes = inodes.saturating_add(INODES_MIN);
        // Some file systems make inodes as they go, and say that there are none at all.
        let has_inodes = room.f_files == 0 || room.f_favail >= inodes;
        if free >= bytes && has_inodes {
            return Ok(());
        }
        let text = format!("it needs {bytes} bytes and {inodes} inodes at least: no space left on device");
        Err(self.explain(crate::failure::failure(FailureKind::NoSpace, text)))
    }

    /// Whether more than so many bytes are free.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        rustix::fs::statvfs(&self.root).is_ok_and(|room| room.f_bavail.saturating_mul(room.f_frsize) > bytes)
    }

    /// Directory of an image's users files.
    pub(crate) fn users(&self, id: &str) -> Result<PathBuf, Failure> {
        Ok(self.root.join("images/users").join(hex(id)?))
    }

    fn new_directory(&self, below: &str) -> Result<PathBuf, Failure> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let parent = self.root.join(below);
        // Another worker's, or one of another boot, may be there under the same pid.
        let nanoseconds =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_nanos();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("tmp-{}-{number}-{nanoseconds}", std::process::id()));
        // 0755, whatever the umask: it becomes the root directory of containers, which other users enter.
        let made = fs::create_dir(&path);
        made.and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o755)))
            .map_err(|error| io_failure("make directory", &path, &error))?;
        Ok(path)
    }

    /// Writes a document aside; none where it is there already.
    pub(crate) fn keep(&self, digest: &str, bytes: &[u8]) -> Result<Option<Move>, Failure> {
        let (part, path) = (self.aside(digest)?, self.blob(digest)?);
        if path.exists() {
            return Ok(None);
        }
        fs::write(&part, bytes).map_err(|error| io_failure("write", &part, &error))?;
        Ok(Some((part, path)))
    }

    /// Makes a whole file or tree durable and gives it its name. One that is there already stays, and `from` goes.
    pub(crate) fn publish(&self, from: &Path, to: &Path) -> Result<(), Failure> {
        self.publish_all(&[(from.to_owned(), to.to_owned())])
    }

    /// The same for many, from one name to another, in this order and by one sync.
    pub(crate) fn publish_all(&self, moves: &[Move]) -> Result<(), Failure> {
        match moves {
            [] => return Ok(()),
            [(one, _)] => sync(one)?,
            _ => sync(&self.root)?,
        }
        let mut directories = BTreeSet::new();
        for (from, to) in moves {
            match fs::rename(from, to) {
                Ok(()) => drop(directories.insert(to.parent().unwrap_or(&self.root))),
                // Another worker was first with the same content.
                Err(_) if to.is_dir() => {
                    fs::remove_dir_all(from).map_err(|error| io_failure("remove", from, &error))?;
                }
                Err(error) => return Err(io_failure("rename", from, &error)),
            }
        }
        for directory in directories {
            File::open(directory)
                .and_then(|directory| directory.sync_all())
                .map_err(|error| io_failure("sync", directory, &error))?;
        }
        Ok(())
    }
}

/// How much room a file system has. Unit tests unpack in this process, without the pipeline that looks at it.
#[cfg(not(test))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    /// Bytes that may be written.
    pub(crate) free: u64,
    /// Bytes of these that layers leave to the rest of the node: to records, logs and writable layers, without which it
    /// cannot even remove the image that filled it.
    pub(crate) reserve: u64,
}

#[cfg(not(test))]
impl Room {
    /// Of the file system that `path` is on; none where it does not say.
    pub(crate) fn at(path: &Path) -> Option<Self> {
        let room = rustix::fs::statvfs(path).ok()?;
        let free = room.f_bavail.saturating_mul(room.f_frsize);
        Some(Self { free, reserve: reserve(room.f_blocks.saturating_mul(room.f_frsize)) })
    }

    /// Whether the reserve is reached.
    pub(crate) fn is_used_up(self) -> bool {
        self.free < self.reserve
    }
}

/// What is left free of a file system of so many bytes: a twentieth and at least 64 MiB, but of a small one a tenth.
fn reserve(size: u64) -> u64 {
    const LEAST: u64 = 64 << 20;
    (size / 20).max(LEAST).min(size / 10)
}

/// Says how full the disk is at `root`, where that is why, and where it is not said yet.
pub(crate) fn explain(root: &Path, failure: Failure) -> Failure {
    const SAID: &str = "inodes are free at";
    if failure.kind != FailureKind::NoSpace || failure.message.contains(SAID) {
        return failure;
    }
    let Ok(room) = rustix::fs::statvfs(root) else { return failure };
    let bytes = room.f_bavail.saturating_mul(room.f_frsize);
    let room = format!("{bytes} bytes and {} {SAID} {}", room.f_favail, root.display());
    Failure { message: format!("{}; {room}", failure.message), ..failure }
}

/// Opens what an inmate, or a worker before this one, has written: a regular file and nothing else.
pub(crate) fn open_plain(path: &Path) -> Result<File, Failure> {
    use std::os::unix::fs::OpenOptionsExt;
    let flags = (rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK).bits();
    let file = fs::OpenOptions::new().read(true).custom_flags(flags as i32).open(path);
    let file = file.map_err(|error| io_failure("open", path, &error))?;
    match file.metadata() {
        Ok(about) if about.is_file() => Ok(file),
        Ok(_) => Err(invalid(format!("open {}: not a file", path.display()))),
        Err(error) => Err(io_failure("stat", path, &error)),
    }
}

/// A file by fsync; a tree by one syncfs of its file system, which is cheaper than a call for each of its files.
fn sync(path: &Path) -> Result<(), Failure> {
    let file = File::open(path).map_err(|error| io_failure("open", path, &error))?;
    let metadata = file.metadata().map_err(|error| io_failure("stat", path, &error))?;
    if metadata.is_dir() {
        nix::unistd::syncfs(&file).map_err(|errno| io_failure("sync", path, &errno.into()))
    } else {
        file.sync_all().map_err(|error| io_failure("sync", path, &error))
    }
}

/// The hex digits of a `sha256:` digest: the only thing from outside that becomes part of a path.
pub(crate) fn hex(digest: &str) -> Result<&str, Failure> {
    let digits = digest.strip_prefix("sha256:").unwrap_or_default();
    let is_hex = digits.len() == 64 && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if is_hex { Ok(digits) } else { Err(invalid(format!("{digest:?} is not a sha256 digest"))) }
}

#[cfg(test)]
mod tests {
    use super::{hex, reserve};

    #[test]
    fn a_reserve_is_left_of_every_disk() {
        for (size, expected) in [
            (0, 0),
            (8 << 20, (8 << 20) / 10),
            (640 << 20, 64 << 20),
            (1 << 30, 64 << 20),
            (2 << 30, (2 << 30) / 20),
            (1 << 40, (1 << 40) / 20),
        ] {
            assert_eq!(reserve(size), expected, "{size}");
        }
    }

    #[test]
    fn only_digests_become_paths() {
        let good = format!("sha256:{}", "0a".repeat(32));
        assert_eq!(hex(&good).unwrap(), "0a".repeat(32));
        for bad in ["", "sha256:", "sha256:../../x", "sha512:00", &good.to_uppercase(), &good[..70]] {
            assert!(hex(bad).is_err(), "{bad:?}");
        }
    }
}
