//! Paths of the store, and publication of its entries: each entry is written under a temporary name, synced
//! and renamed, so that it is complete or absent after a power cut at any moment (the layout is documented in
//! `coracle_job`'s module `image`).

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use coracle_chunked::Extent;
use coracle_chunked::outline::Purpose;
use coracle_job::{Failure, FailureKind, Remake};
use coracle_manifest::{DOCUMENT_BYTES_MAX, digest_text, hex};
use coracle_sandbox::collect::ordered;
use coracle_sandbox::disk::read_up_to;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, fstat, openat, statat};
use rustix::io::Errno;
use rustix::path::Arg;
use sha2::{Digest, Sha256};

use crate::failure::io_failure;

/// Minimum number of free inodes for a new layer: for its directory, a few files, and records.
const INODES_MIN: u64 = 16;

/// Path of a complete file or directory, and the path to which publication renames it.
pub(crate) type Move = (PathBuf, PathBuf);

/// The store below `--root`.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    root: PathBuf,
    /// The purpose of the outlines that layers get when they are unpacked; `None`: they get none.
    outlines: Option<Purpose>,
    /// Layers that are made again, which are not those of their place.
    remake: Option<Remake>,
}

impl Store {
    /// Opens the store and creates missing directories.
    pub(crate) fn open(root: &Path) -> Result<Self, Failure> {
        let store = Self::at(root);
        for directory in [
            "images/blobs/sha256",
            "images/contents",
            "images/damage",
            "images/lists",
            "images/parts",
            "images/signatures",
            "images/users",
            "layers",
        ] {
            let path = root.join(directory);
            let made = coracle_sandbox::disk::create_private_dir_all(&path);
            made.map_err(|error| io_failure("create directory", &path, &error))?;
        }
        Ok(store)
    }

    /// A store that is only read.
    pub(crate) fn at(root: &Path) -> Self {
        Self { root: root.to_owned(), outlines: None, remake: None }
    }

    /// This store, in which layers that are unpacked get an outline ([`coracle_chunked::outline`]) for this purpose.
    pub(crate) fn with_outlines(&self, outlines: Option<Purpose>) -> Self {
        Self { outlines, ..self.clone() }
    }

    /// This store, in which the layers of `remake` are in another directory, which is created: they are missing until they are made again.
    pub(crate) fn remaking(&self, remake: Option<Remake>) -> Result<Self, Failure> {
        if let Some(Remake { into, .. }) = &remake {
            let made = coracle_sandbox::disk::create_private_dir_all(into);
            made.map_err(|error| io_failure("create directory", into, &error))?;
        }
        Ok(Self { remake, ..self.clone() })
    }

    /// Whether layers are made again.
    pub(crate) fn is_remaking(&self) -> bool {
        self.remake.is_some()
    }

    /// The purpose of the outlines of layers that are unpacked.
    pub(crate) fn outlines(&self) -> Option<Purpose> {
        self.outlines
    }

    /// Path of a complete blob by its digest `sha256:HEX`.
    pub(crate) fn blob(&self, digest: &str) -> Result<PathBuf, Failure> {
        Ok(self.root.join("images/blobs/sha256").join(hex(digest)?))
    }

    /// Reads a manifest, index or config; `None` if the blob is missing or above the maximum size.
    ///
    /// # Errors
    /// It cannot be read.
    pub(crate) fn document(&self, digest: &str) -> Result<Option<Vec<u8>>, Failure> {
        let path = self.blob(digest)?;
        match read_up_to(&path, DOCUMENT_BYTES_MAX + 1) {
            Ok(bytes) => Ok((bytes.len() as u64 <= DOCUMENT_BYTES_MAX).then_some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(io_failure("read", &path, &error)),
        }
    }

    /// Path of a partly downloaded blob.
    pub(crate) fn part(&self, digest: &str) -> Result<PathBuf, Failure> {
        Ok(self.root.join("images/parts").join(hex(digest)?))
    }

    /// Path of the part that has these ranges of a blob. Another choice of ranges has another path.
    pub(crate) fn ranges(&self, digest: &str, extents: &[Extent]) -> Result<PathBuf, Failure> {
        let mut hash = Sha256::new();
        for extent in extents {
            hash.update(extent.begin.to_le_bytes());
            hash.update(extent.end.to_le_bytes());
        }
        let name = format!("{}.{}", hex(digest)?, &digest_text(&hash.finalize())["sha256:".len()..][..16]);
        Ok(self.root.join("images/parts").join(name))
    }

    /// Paths of the parts of a blob that exist.
    pub(crate) fn parts(&self, digest: &str) -> Vec<PathBuf> {
        let Ok(hex) = hex(digest) else { return Vec::new() };
        let is_part =
            |name: &str| name.strip_prefix(hex).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        let all = fs::read_dir(self.root.join("images/parts")).into_iter().flatten().flatten();
        all.filter(|entry| entry.file_name().to_str().is_some_and(is_part))
            .map(|entry| entry.path())
            .collect()
    }

    /// Path of the index of an unpacked layer ([`coracle_chunked::index`]), or of its outline.
    pub(crate) fn index(&self, layer: &str) -> PathBuf {
        self.root.join("images/contents").join(layer)
    }

    /// Path of the list of an unpacked layer ([`coracle_filelist`]).
    pub(crate) fn list(&self, layer: &str) -> PathBuf {
        self.root.join("images/lists").join(layer)
    }

    /// Path of the text about damage of a layer.
    pub(crate) fn damage(&self, layer: &str) -> PathBuf {
        self.root.join("images/damage").join(layer)
    }

    /// Path of the file that says which layer was checked last in the background.
    pub(crate) fn checked(&self) -> PathBuf {
        self.root.join("images/checked")
    }

    /// Path to which the new index or outline of a layer is moved.
    pub(crate) fn place_of_index(&self, layer: &str) -> PathBuf {
        Self::place(self.index(layer))
    }

    /// A path to which a file is moved. A directory, which another program has left there, is removed, because a file would not take
    /// its place.
    pub(crate) fn place(path: PathBuf) -> PathBuf {
        if path.is_dir() {
            // The move fails otherwise, which says why.
            let _ = fs::remove_dir_all(&path);
        }
        path
    }

    /// Path of an unpacked layer by its name.
    pub(crate) fn layer(&self, name: &str) -> PathBuf {
        match &self.remake {
            Some(remake) if remake.layers.iter().any(|layer| layer == name) => remake.into.join(name),
            _ => self.present_layer(name),
        }
    }

    /// Path of an unpacked layer by its name, also of a damaged one that is made again: its good files need not be downloaded.
    pub(crate) fn present_layer(&self, name: &str) -> PathBuf {
        self.root.join("layers").join(name)
    }

    /// Names of the unpacked layers in their order, without those of additional stores that are not there.
    pub(crate) fn layers(&self) -> io::Result<BTreeSet<String>> {
        let is_layer = |name: &String| {
            let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
            let is_name = matches!(name.len(), 32 | 64) && name.bytes().all(is_digit);
            is_name && self.layer(name).is_dir()
        };
        let names = fs::read_dir(self.root.join("layers"))?
            .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()));
        Ok(ordered(names.collect::<io::Result<Vec<_>>>()?.into_iter().filter(is_layer)))
    }

    /// Names of the layers that are links to those of an additional store, which may be gone.
    pub(crate) fn links_to(&self, additional: &Self) -> Result<Vec<String>, Failure> {
        let directory = self.root.join("layers");
        let entries = fs::read_dir(&directory).map_err(|error| io_failure("list", &directory, &error))?;
        let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        let leads =
            |name: &String| fs::read_link(self.layer(name)).is_ok_and(|to| to == additional.layer(name));
        Ok(names.filter(leads).collect())
    }

    /// A temporary path for a blob, unique to this worker process.
    pub(crate) fn aside(&self, digest: &str) -> Result<PathBuf, Failure> {
        Ok(self.root.join("images/parts").join(format!("{}-{}", hex(digest)?, std::process::id())))
    }

    /// A temporary path for the outline, the list or the text about a layer, unique to this worker process.
    pub(crate) fn aside_of_layer(&self, chain_id: &str, what: &str) -> Result<PathBuf, Failure> {
        let mut path = self.aside(chain_id)?.into_os_string();
        path.push(format!("-{what}"));
        Ok(path.into())
    }

    /// Creates a temporary directory for a layer. The daemon removes those of killed workers.
    pub(crate) fn new_layer(&self) -> Result<PathBuf, Failure> {
        self.new_directory()
    }

    /// Creates a temporary directory for the blobs of an archive. The daemon removes those of killed workers.
    pub(crate) fn new_spool(&self) -> Result<PathBuf, Failure> {
        self.new_directory()
    }

    /// Adds the free space to the text of a failure because of a full disk.
    pub(crate) fn explain(&self, failure: Failure) -> Failure {
        explain(&self.root, failure)
    }

    /// Checks, before anything is written, that this number of bytes and inodes is free in addition to a
    /// reserve of inodes.
    pub(crate) fn need(&self, bytes: u64, inodes: u64) -> Result<(), Failure> {
        // If the free space is unknown, a full disk is detected by the write.
        let Ok(room) = rustix::fs::statvfs(&self.root) else { return Ok(()) };
        let free = room.f_bavail.saturating_mul(room.f_frsize);
        let inodes = inodes.saturating_add(INODES_MIN);
        // Some file systems allocate inodes dynamically and report a total of zero.
        let has_inodes = room.f_files == 0 || room.f_favail >= inodes;
        if free >= bytes && has_inodes {
            return Ok(());
        }
        let text = format!("at least {bytes} bytes and {inodes} inodes are needed: no space left on device");
        Err(self.explain(Failure::new(FailureKind::NoSpace, text)))
    }

    /// Whether more than this number of bytes is free.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        rustix::fs::statvfs(&self.root).is_ok_and(|room| room.f_bavail.saturating_mul(room.f_frsize) > bytes)
    }

    /// Directory of an image's user files.
    pub(crate) fn users(&self, id: &str) -> Result<PathBuf, Failure> {
        Ok(self.root.join("images/users").join(hex(id)?))
    }

    /// File of an image's signatures.
    pub(crate) fn signatures(&self, id: &str) -> Result<PathBuf, Failure> {
        Ok(self.root.join("images/signatures").join(hex(id)?))
    }

    /// Makes a temporary link to the layer `name` of an additional store. The daemon removes those of killed workers.
    pub(crate) fn new_link(&self, additional: &Self, name: &str) -> Result<PathBuf, Failure> {
        let path = self.temporary_name();
        symlink(additional.layer(name), &path).map_err(|error| io_failure("link", &path, &error))?;
        Ok(path)
    }

    /// A path in the directory of layers that no other worker uses.
    fn temporary_name(&self) -> PathBuf {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // Another worker, or one of an earlier boot, may have used the same process ID.
        let nanoseconds =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_nanos();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        self.root.join("layers").join(format!("tmp-{}-{number}-{nanoseconds}", std::process::id()))
    }

    fn new_directory(&self) -> Result<PathBuf, Failure> {
        let path = self.temporary_name();
        fs::create_dir(&path)
            // 0755, whatever the umask: it becomes the root directory of containers, which other users must be able to enter.
            .and_then(|()| {
                let changed = fs::set_permissions(&path, fs::Permissions::from_mode(0o755));
                changed.inspect_err(|_| drop(fs::remove_dir(&path)))
            })
            .map_err(|error| io_failure("create directory", &path, &error))?;
        Ok(path)
    }

    /// Writes a document under a temporary name; returns the move that publishes it, or `None` if the store
    /// already has it.
    pub(crate) fn keep(&self, digest: &str, bytes: &[u8]) -> Result<Option<Move>, Failure> {
        let (part, path) = (self.aside(digest)?, self.blob(digest)?);
        if path.exists() {
            return Ok(None);
        }
        fs::write(&part, bytes).map_err(|error| io_failure("write", &part, &error))?;
        Ok(Some((part, path)))
    }

    /// Makes a complete file or tree durable and renames it to `to`. If the target exists, it is kept and
    /// `from` is removed.
    pub(crate) fn publish(&self, from: &Path, to: &Path) -> Result<(), Failure> {
        self.publish_all(&[(from.to_owned(), to.to_owned())])
    }

    /// Publishes several files or trees, in this order and with one sync.
    pub(crate) fn publish_all(&self, moves: &[Move]) -> Result<(), Failure> {
        match moves {
            [] => return Ok(()),
            [(one, _)] => sync(one)?,
            _ => sync(&self.root)?,
        }
        let (mut directories, layers) = (BTreeSet::new(), self.root.join("layers"));
        for (from, to) in moves {
            let mut renamed = fs::rename(from, to);
            if renamed.is_err() && to.is_symlink() && !to.is_dir() {
                // A link to a layer of an additional store that is not there any more.
                renamed = fs::remove_file(to).and_then(|()| fs::rename(from, to));
            }
            match renamed {
                Ok(()) => {
                    directories.insert(to.parent().unwrap_or(&self.root));
                    if let Some(name) = to.strip_prefix(&layers).ok().and_then(Path::to_str) {
                        // A new layer has none of the damage of one that was there before.
                        let _ = fs::remove_file(self.damage(name));
                    }
                }
                // Another worker published the same content first.
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

/// Free space of a file system. In unit tests, which unpack in one process, no pipeline checks the space.
#[cfg(not(test))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    /// Number of free bytes.
    pub(crate) free: u64,
    /// Number of bytes that layers must leave free for records, logs and writable layers of the node; without
    /// free space not even the image that filled the disk could be removed.
    pub(crate) reserve: u64,
}

#[cfg(not(test))]
impl Room {
    /// Free space of the file system of `path`; `None` if it is unknown.
    pub(crate) fn at(path: &Path) -> Option<Self> {
        let room = rustix::fs::statvfs(path).ok()?;
        let free = room.f_bavail.saturating_mul(room.f_frsize);
        Some(Self { free, reserve: reserve(room.f_blocks.saturating_mul(room.f_frsize)) })
    }

    /// Whether only the reserve is free.
    pub(crate) fn is_used_up(self) -> bool {
        self.free < self.reserve
    }
}

/// The reserve of a file system of `size` bytes: a twentieth, at least 64 MiB and at most 2 GiB, but never
/// more than a tenth. The space that the node's own programs, logs and records need does not grow with the
/// disk.
fn reserve(size: u64) -> u64 {
    (size / 20).clamp(64 << 20, 2 << 30).min(size / 10)
}

/// Adds the free space at `root` to the text of a failure because of a full disk, unless the text already
/// contains it.
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

/// Opens a file that a confined process or an earlier worker wrote; fails if it is not a regular file.
pub(crate) fn open_plain(path: &Path) -> Result<File, Failure> {
    use std::os::unix::fs::OpenOptionsExt;
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits();
    let file = fs::OpenOptions::new().read(true).custom_flags(flags as i32).open(path);
    let other_kind = || Failure::invalid(format!("open {}: not a regular file", path.display()));
    let is_link = |error: &io::Error| error.raw_os_error() == Some(Errno::LOOP.raw_os_error());
    let file = file.map_err(|error| match is_link(&error) {
        true => other_kind(),
        false => io_failure("open", path, &error),
    })?;
    match file.metadata() {
        Ok(about) if about.is_file() => Ok(file),
        Ok(_) => Err(other_kind()),
        Err(error) => Err(io_failure("stat", path, &error)),
    }
}

/// Opens a directory, which may not be a link, to look for what is in it.
///
/// # Errors
/// Errors of the file system.
pub(crate) fn open_directory(at: impl AsFd, path: impl Arg) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(at, path, flags, Mode::empty())?)
}

/// Opens a regular file of the layer at `root`, name by name without links: the author of the image chooses what is in a tree. This is not
/// openat2(2), because the filter of system calls of the process that serves neighbours can see then that nothing is opened for writing.
///
/// # Errors
/// The path leads through a link, or to something else than a regular file.
pub(crate) fn open_in_layer(root: &OwnedFd, path: &[u8]) -> io::Result<File> {
    let (parents, name) = match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (&[][..], path),
    };
    let mut directory = None::<OwnedFd>;
    for name in parents.split(|byte| *byte == b'/').filter(|_| !parents.is_empty()) {
        let at = directory.as_ref().unwrap_or(root);
        directory = Some(open_directory(at, plain_name(name)?)?);
    }
    let (at, name) = (directory.as_ref().unwrap_or(root), plain_name(name)?);
    let is_file = |mode| FileType::from_raw_mode(mode) == FileType::RegularFile;
    // To open a FIFO or a device has effects, also if nothing is read (a watchdog starts). A layer does not change.
    if !is_file(statat(at, name, AtFlags::SYMLINK_NOFOLLOW)?.st_mode) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = openat(at, name, flags, Mode::empty())?;
    match is_file(fstat(&file)?.st_mode) {
        true => Ok(file.into()),
        false => Err(io::ErrorKind::InvalidInput.into()),
    }
}

fn plain_name(name: &[u8]) -> io::Result<&[u8]> {
    if matches!(name, b"" | b"." | b"..") { Err(io::ErrorKind::InvalidInput.into()) } else { Ok(name) }
}

/// Syncs a file by fsync, or a tree by one syncfs of its file system, which is cheaper than one fsync per
/// file.
fn sync(path: &Path) -> Result<(), Failure> {
    let file = File::open(path).map_err(|error| io_failure("open", path, &error))?;
    let metadata = file.metadata().map_err(|error| io_failure("stat", path, &error))?;
    if metadata.is_dir() {
        nix::unistd::syncfs(&file).map_err(|errno| io_failure("sync", path, &errno.into()))
    } else {
        file.sync_all().map_err(|error| io_failure("sync", path, &error))
    }
}

#[cfg(test)]
mod tests {
    use super::reserve;

    #[test]
    fn the_reserve_depends_on_the_size_of_the_disk() {
        for (size, expected) in [
            (0, 0),
            (8 << 20, (8 << 20) / 10),
            (640 << 20, 64 << 20),
            (1 << 30, 64 << 20),
            (2 << 30, (2 << 30) / 20),
            (40 << 30, 2 << 30),
            (1 << 40, 2 << 30),
        ] {
            assert_eq!(reserve(size), expected, "{size}");
        }
    }
}
