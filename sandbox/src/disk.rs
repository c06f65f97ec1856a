//! File system calls on the daemon's root and state directories, and on procfs, by the standard library. In tests a
//! simulated disk that can lose power replaces them (see `simulation`).

mod ordered;

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use rustix::fs::{Mode, OFlags};

#[cfg(feature = "simulation")]
use crate::simulation::node_of;

/// Calls the simulated node and returns its result, if the path belongs to the simulated node.
macro_rules! simulated {
    ($path:expr, $node:ident => $call:expr) => {
        #[cfg(feature = "simulation")]
        if let Some($node) = node_of($path) {
            return $call;
        }
    };
}

/// Space for the first read of a file. Records, and most files of procfs and of cgroups, are complete after it; the standard
/// library begins with 32 bytes and doubles them, which is eight calls for 4 KiB.
const FIRST_READ_BYTES: usize = 8 << 10;

/// Lets an open of a FIFO fail or find nothing, where it would wait for the other end: the daemon opens files by name that another
/// program of root may have put there. It has no effect on regular files.
const WITHOUT_WAIT: i32 = nix::libc::O_NONBLOCK;

/// Opens a file for reading with one system call: musl makes a second one for `O_CLOEXEC`.
fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let open = || rustix::fs::open(path, flags, Mode::empty());
    Ok(rustix::io::retry_on_intr(open)?.into())
}

/// Reads a file.
///
/// # Errors
/// The I/O error.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    read_up_to(path, u64::MAX)
}

/// Reads a text file.
///
/// # Errors
/// The I/O error; `InvalidData` if it is not UTF-8.
pub fn read_to_string(path: &Path) -> io::Result<String> {
    read_text_up_to(path, u64::MAX)
}

/// Reads at most `bytes_max` bytes of a text file.
///
/// # Errors
/// The I/O error; `InvalidData` if it is not UTF-8.
pub fn read_text_up_to(path: &Path, bytes_max: u64) -> io::Result<String> {
    String::from_utf8(read_up_to(path, bytes_max)?).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Reads at most `bytes_max` bytes of a file.
///
/// # Errors
/// The I/O error.
pub fn read_up_to(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    simulated!(path, node => node.read(path));
    let mut bytes = Vec::with_capacity(FIRST_READ_BYTES);
    open(path)?.take(bytes_max).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Writes a file with the modes that the umask permits.
///
/// # Errors
/// The I/O error.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    simulated!(path, node => node.write(path, bytes, false));
    fs::write(path, bytes)
}

/// Writes a file that only root can access, without a sync.
///
/// # Errors
/// The I/O error.
pub fn write_unsynced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    simulated!(path, node => node.write(path, bytes, false));
    create(path)?.write_all(bytes)
}

/// Writes a file that only root can access, and makes its content durable.
///
/// # Errors
/// The I/O error.
pub fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    simulated!(path, node => node.write(path, bytes, true));
    let mut file = create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Writes a file that only root can access, without a sync, and lets the kernel begin to write it to the disk. So the
/// file system assigns blocks to it at once and not some 30 seconds later: what is written over it afterwards becomes
/// durable without a commit of the file system's journal.
///
/// # Errors
/// The I/O error.
pub fn write_allocated(path: &Path, bytes: &[u8]) -> io::Result<()> {
    simulated!(path, node => node.write(path, bytes, false));
    let mut file = create(path)?;
    file.write_all(bytes)?;
    // The advice begins to write what is not written yet (mm/fadvise.c). A file system that ignores it assigns the blocks later.
    let _ = posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
    Ok(())
}

/// Writes over a part of an existing file. With `is_synced` the content of the file is made durable, but no change of
/// names, such as that of the file itself (fdatasync(2)).
///
/// # Errors
/// The I/O error; `NotFound` if there is no such file. The part may then contain any mixture of old and new bytes.
pub fn write_over(path: &Path, offset: u64, bytes: &[u8], is_synced: bool) -> io::Result<()> {
    simulated!(path, node => node.write_over(path, offset, bytes, is_synced));
    let file = OpenOptions::new().write(true).custom_flags(WITHOUT_WAIT).open(path)?;
    file.write_all_at(bytes, offset)?;
    if is_synced { file.sync_data() } else { Ok(()) }
}

fn create(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600).custom_flags(WITHOUT_WAIT).open(path)
}

/// Opens a file that is not part of the daemon's data: a device or a namespace.
///
/// # Errors
/// The I/O error.
pub fn open_device(path: &Path) -> io::Result<File> {
    #[cfg(feature = "simulation")]
    if let Some(node) = crate::simulation::node() {
        node.open_device(path)?;
    }
    File::open(path)
}

/// Renames a file or directory.
///
/// # Errors
/// The I/O error.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    simulated!(from, node => node.rename(from, to));
    fs::rename(from, to)
}

/// Removes a file.
///
/// # Errors
/// The I/O error.
pub fn remove_file(path: &Path) -> io::Result<()> {
    simulated!(path, node => node.remove_file(path));
    fs::remove_file(path)
}

/// Removes a directory with its content.
///
/// # Errors
/// The I/O error.
pub fn remove_dir_all(path: &Path) -> io::Result<()> {
    simulated!(path, node => node.remove_dir_all(path));
    fs::remove_dir_all(path)
}

/// Creates a directory with its parents.
///
/// # Errors
/// The I/O error.
pub fn create_dir_all(path: &Path) -> io::Result<()> {
    simulated!(path, node => node.create_dir_all(path));
    create_all(fs::DirBuilder::new().recursive(true), path)
}

/// Creates a directory with its parents; only root can access the new directories.
///
/// # Errors
/// The I/O error.
pub fn create_private_dir_all(path: &Path) -> io::Result<()> {
    simulated!(path, node => node.create_dir_all(path));
    create_all(fs::DirBuilder::new().recursive(true).mode(0o700), path)
}

/// Creates directories on a real disk. If a directory exists but cannot be looked up, the standard library returns
/// `AlreadyExists`, which clients would interpret as a name in use; this function returns the error of the look-up.
///
/// # Errors
/// The I/O error.
pub fn create_all(builder: &fs::DirBuilder, path: &Path) -> io::Result<()> {
    match builder.create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && fs::metadata(path)?.is_dir() => Ok(()),
        created => created,
    }
}

/// Makes the entries of a directory durable.
///
/// # Errors
/// The I/O error.
pub fn sync_dir(path: &Path) -> io::Result<()> {
    simulated!(path, node => node.sync_dir(path));
    File::open(path)?.sync_all()
}

/// Makes all content and all names of a file system durable (syncfs(2)).
///
/// # Errors
/// The I/O error.
pub fn sync_file_system(path: &Path) -> io::Result<()> {
    simulated!(path, node => node.sync_file_system(path));
    Ok(nix::unistd::syncfs(File::open(path)?)?)
}

/// Checks that a path exists, without following a link at its end.
///
/// # Errors
/// The I/O error; `NotFound` if the path does not exist.
pub fn inspect(path: &Path) -> io::Result<()> {
    simulated!(path, node => node.inspect(path));
    path.symlink_metadata().map(drop)
}

/// Whether there is a file at `path`.
///
/// # Errors
/// The I/O error, if this is not known.
pub fn exists(path: &Path) -> io::Result<bool> {
    match inspect(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Restricts a directory to root (mode 0700). The mode is changed only if it differs, because the daemon must be able
/// to start on a read-only disk.
///
/// # Errors
/// The I/O error.
pub fn close_directory(path: &Path) -> io::Result<()> {
    const PRIVATE: u32 = 0o700;
    simulated!(path, node => node.inspect(path));
    match fs::metadata(path)?.permissions().mode() & 0o7777 {
        PRIVATE => Ok(()),
        _ => fs::set_permissions(path, fs::Permissions::from_mode(PRIVATE)),
    }
}

/// Whether a file that was renamed has its old or its new name after a power cut, also without a sync; false if that
/// is unknown. On a file system without a log of its metadata it may have none.
pub fn orders_names(path: &Path) -> bool {
    simulated!(path, _node => true);
    ordered::orders_names(path)
}

/// One entry of a directory.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Name of the file or directory.
    pub name: OsString,
    /// Whether the entry is a directory; false if the type cannot be determined.
    pub is_dir: bool,
}

/// Iterator over the entries of a directory; reads them lazily.
#[derive(Debug)]
pub struct Entries(Source);

#[derive(Debug)]
enum Source {
    Directory(fs::ReadDir),
    #[cfg(feature = "simulation")]
    Simulated(std::vec::IntoIter<(OsString, bool)>),
}

/// Lists a directory.
///
/// # Errors
/// The I/O error.
pub fn entries(path: &Path) -> io::Result<Entries> {
    simulated!(path, node => Ok(Entries(Source::Simulated(node.entries(path)?.into_iter()))));
    fs::read_dir(path).map(Source::Directory).map(Entries)
}

impl Iterator for Entries {
    type Item = io::Result<Entry>;

    fn next(&mut self) -> Option<Self::Item> {
        let entry = match &mut self.0 {
            Source::Directory(entries) => entries.next()?,
            #[cfg(feature = "simulation")]
            Source::Simulated(entries) => {
                return entries.next().map(|(name, is_dir)| Ok(Entry { name, is_dir }));
            }
        };
        Some(entry.map(|entry| Entry {
            is_dir: entry.file_type().is_ok_and(|kind| kind.is_dir()),
            name: entry.file_name(),
        }))
    }
}
