//! Files below a root directory: `/`, or a directory tree with the files of another node. The kernel resolves each path below the
//! root (`RESOLVE_IN_ROOT`, Linux 5.6), so a symbolic link cannot lead out of it. Only regular files of limited size are read and
//! replaced, and a file changes by renaming a complete, synced one over it.
//!
//! Paths are absolute, as they are on the node. The callers are commands in processes of their own, so calls may block.

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use coracle_client::collect;
use coracle_client::describe_io;
use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

/// Maximum length of a file that is read, in bytes; real files have some kilobytes.
const FILE_BYTES_MAX: u64 = coracle_yaml::FILE_BYTES_MAX as u64;
/// Maximum number of entries of a directory that is read. Directories of drop-ins have a dozen.
const ENTRIES_MAX: usize = 4096;
/// End of the name of a file that is being written. No program reads such names from a directory of drop-ins.
const TEMPORARY: &str = ".coracle-new";

/// A problem with a file, in one line that names the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problem(pub(crate) String);

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The files of a node.
pub(crate) struct Host {
    root: OwnedFd,
}

/// An open directory of the node.
pub(crate) struct Directory(OwnedFd);

impl Directory {
    /// A path of the directory for this process and its children before exec, while it is open.
    pub(crate) fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }
}

fn problem(path: &str, what: &str, error: Errno) -> Problem {
    Problem(format!("{path}: {what}: {}", describe_io(&error.into())))
}

/// The directory and the name of a path.
pub(crate) fn split(path: &str) -> (&str, &str) {
    match path.rsplit_once('/') {
        Some(("", name)) => ("/", name),
        Some((directory, name)) => (directory, name),
        None => ("/", path),
    }
}

fn is_absent(error: Errno) -> bool {
    matches!(error, Errno::NOENT | Errno::NOTDIR)
}

impl Host {
    /// Opens the root directory.
    ///
    /// # Errors
    /// The directory cannot be opened.
    pub(crate) fn open(root: &Path) -> Result<Host, Problem> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match fs::open(root, flags, Mode::empty()) {
            Ok(root) => Ok(Host { root }),
            Err(error) => Err(problem(&root.display().to_string(), "open the root directory", error)),
        }
    }

    fn resolve(&self, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
        let inner = path.trim_start_matches('/');
        let inner = if inner.is_empty() { "." } else { inner };
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        fs::openat2(&self.root, inner, flags | OFlags::CLOEXEC, Mode::empty(), resolve)
    }

    /// Whether a file of any kind has this path. A symbolic link at the end of the path is not followed.
    pub(crate) fn exists(&self, path: &str) -> bool {
        self.resolve(path, OFlags::PATH | OFlags::NOFOLLOW).is_ok()
    }

    /// Whether a regular file has this path.
    pub(crate) fn is_file(&self, path: &str) -> bool {
        let about = self.resolve(path, OFlags::PATH).and_then(fs::fstat);
        about.is_ok_and(|about| FileType::from_raw_mode(about.st_mode) == FileType::RegularFile)
    }

    /// The text of a regular file; `None` if there is none.
    ///
    /// # Errors
    /// The file cannot be read, is not a regular file, is longer than 1 MiB, or is not UTF-8.
    pub(crate) fn read(&self, path: &str) -> Result<Option<String>, Problem> {
        // The type is known before the file is opened for reading, because opening a device can have effects.
        let about = match self.resolve(path, OFlags::PATH).and_then(fs::fstat) {
            Ok(about) => about,
            Err(error) if is_absent(error) => return Ok(None),
            Err(error) => return Err(problem(path, "open", error)),
        };
        is_regular(path, &about)?;
        let file = self.resolve(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY);
        let file = file.map_err(|error| problem(path, "open", error))?;
        is_regular(path, &fs::fstat(&file).map_err(|error| problem(path, "fstat", error))?)?;
        let mut text = Vec::new();
        let mut limited = File::from(file).take(FILE_BYTES_MAX + 1);
        limited
            .read_to_end(&mut text)
            .map_err(|error| Problem(format!("{path}: read: {}", describe_io(&error))))?;
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(Problem(format!("{path}: longer than {FILE_BYTES_MAX} bytes")));
        }
        String::from_utf8(text).map(Some).map_err(|_| Problem(format!("{path}: not UTF-8")))
    }

    /// The names in a directory in lexical order, without hidden ones; empty if there is none.
    ///
    /// # Errors
    /// The directory cannot be read, or has too many entries.
    pub(crate) fn list(&self, path: &str) -> Result<Vec<String>, Problem> {
        let directory = match self.resolve(path, OFlags::RDONLY | OFlags::DIRECTORY) {
            Ok(directory) => directory,
            Err(error) if is_absent(error) => return Ok(Vec::new()),
            Err(error) => return Err(problem(path, "open", error)),
        };
        let mut names = Vec::new();
        let entries = Dir::read_from(&directory).map_err(|error| problem(path, "read", error))?;
        for entry in entries {
            let entry = entry.map_err(|error| problem(path, "read", error))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if !name.starts_with('.') {
                names.push(name);
            }
            if names.len() > ENTRIES_MAX {
                return Err(Problem(format!("{path}: more than {ENTRIES_MAX} entries")));
            }
        }
        collect::sort(&mut names);
        Ok(names)
    }

    /// Opens a directory, for a child process that works in it.
    ///
    /// # Errors
    /// There is no such directory.
    pub(crate) fn directory_of(&self, path: &str) -> Result<Directory, Problem> {
        let directory = self.resolve(path, OFlags::PATH | OFlags::DIRECTORY);
        directory.map(Directory).map_err(|error| problem(path, "open", error))
    }

    /// Creates a directory and its parents, with mode 0755.
    ///
    /// # Errors
    /// A directory cannot be created.
    pub(crate) fn make_directories(&self, path: &str) -> Result<(), Problem> {
        if path == "/" || self.resolve(path, OFlags::PATH | OFlags::DIRECTORY).is_ok() {
            return Ok(());
        }
        let (parent, name) = split(path);
        self.make_directories(parent)?;
        let directory = self.directory(path, parent)?;
        let mode = Mode::RWXU | Mode::RGRP | Mode::XGRP | Mode::ROTH | Mode::XOTH;
        fs::mkdirat(&directory, name, mode).map_err(|error| problem(path, "create the directory", error))
    }

    fn directory(&self, path: &str, parent: &str) -> Result<OwnedFd, Problem> {
        let directory = self.resolve(parent, OFlags::RDONLY | OFlags::DIRECTORY);
        directory.map_err(|error| problem(path, &format!("open the directory {parent}"), error))
    }

    /// Replaces or creates a regular file; its directory exists. An existing file keeps its mode and owner, a new one has mode 0644.
    ///
    /// # Errors
    /// The file exists and is not a regular file (symbolic links are not followed here), or a system call fails; the file then has
    /// its previous content.
    pub(crate) fn write(&self, path: &str, text: &str) -> Result<(), Problem> {
        let (parent, name) = split(path);
        let directory = self.directory(path, parent)?;
        let previous = match fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(about) => Some(is_regular(path, &about).map(|()| about)?),
            Err(Errno::NOENT) => None,
            Err(error) => return Err(problem(path, "stat", error)),
        };
        let temporary = format!(".{name}{TEMPORARY}");
        // A killed command leaves this file.
        match fs::unlinkat(&directory, &temporary, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(problem(path, &format!("remove {temporary}"), error)),
        }
        let written = write_aside(&directory, &temporary, text, previous.as_ref())
            .and_then(|()| Ok(fs::renameat(&directory, &temporary, &directory, name)?));
        if let Err(error) = written {
            // The error of the write is the one to report.
            let _ = fs::unlinkat(&directory, &temporary, AtFlags::empty());
            return Err(Problem(format!("{path}: write: {}", describe_io(&error))));
        }
        fs::fsync(&directory).map_err(|error| problem(path, "sync the directory", error))
    }

    /// Removes a file; success if there is none.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub(crate) fn remove(&self, path: &str) -> Result<(), Problem> {
        let (parent, name) = split(path);
        let directory = match self.resolve(parent, OFlags::RDONLY | OFlags::DIRECTORY) {
            Err(error) if is_absent(error) => return Ok(()),
            directory => directory.map_err(|error| problem(path, "open the directory", error))?,
        };
        match fs::unlinkat(&directory, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {
                fs::fsync(&directory).map_err(|error| problem(path, "sync the directory", error))
            }
            Err(error) => Err(problem(path, "remove", error)),
        }
    }

    /// Removes a directory if it is empty.
    ///
    /// # Errors
    /// The directory is empty and cannot be removed.
    pub(crate) fn remove_directory(&self, path: &str) -> Result<(), Problem> {
        let (parent, name) = split(path);
        let Ok(directory) = self.resolve(parent, OFlags::RDONLY | OFlags::DIRECTORY) else { return Ok(()) };
        match fs::unlinkat(&directory, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY | Errno::EXIST | Errno::NOTDIR) => Ok(()),
            Err(error) => Err(problem(path, "remove the directory", error)),
        }
    }
}

fn is_regular(path: &str, about: &Stat) -> Result<(), Problem> {
    match FileType::from_raw_mode(about.st_mode) {
        FileType::RegularFile => Ok(()),
        other => Err(Problem(format!("{path}: {other:?}, not a regular file"))),
    }
}

fn write_aside(directory: &OwnedFd, name: &str, text: &str, previous: Option<&Stat>) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(fs::openat(directory, name, flags, Mode::RUSR | Mode::WUSR)?);
    file.write_all(text.as_bytes())?;
    let mut mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH;
    if let Some(previous) = previous {
        let (user, group) = (fs::Uid::from_raw(previous.st_uid), fs::Gid::from_raw(previous.st_gid));
        fs::fchown(&file, Some(user), Some(group))?;
        mode = Mode::from_raw_mode(previous.st_mode);
    }
    fs::fchmod(&file, mode)?;
    file.sync_all()
}
