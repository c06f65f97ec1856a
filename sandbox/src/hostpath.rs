//! Host paths in requests, whose file systems other programs control: sources of volumes, profiles, devices, logs. An
//! access can block forever in an uninterruptible sleep, for example on a network file system whose server is
//! unreachable or on a FIFO without a writer. [`HostFile::cached`] and [`HostFile::is_local`] detect paths whose access
//! cannot block; [`HostFile::open`] can block.
//!
//! ```text
//!   openat2(O_PATH, RESOLVE_CACHED) ─► resolves the path only through the dentry cache (Linux 5.12)
//!   /proc/self/fdinfo, mountinfo    ─► finds the mount of the file, without asking its file system
//!   type of the mount               ─► local (a disk or a kernel file system): the file may be accessed
//! ```
//! All later accesses use the descriptor, so that the path cannot be exchanged meanwhile.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path, PathBuf};

use coracle_sys::{self as sys, Fd};
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, FcntlArg, OFlag, OpenHow, ResolveFlag, fcntl, openat, openat2};
use nix::sys::stat::{Mode, SFlag, fstat, fstatat, mkdirat};

use crate::{Error, mountinfo, umask};

/// Flag RESOLVE_CACHED of openat2(2), which nix does not define: the call fails with EAGAIN if the kernel would have to
/// access a file system.
const RESOLVE_CACHED: u64 = 0x20;

/// Mode of log files: readable for the group, as with other runtimes.
const LOG_MODE: Mode = Mode::S_IRUSR.union(Mode::S_IWUSR).union(Mode::S_IRGRP);

/// Types of local file systems: the kernel's own and those on disks. A broken disk gives errors; a network block device
/// (iSCSI, NBD) cannot be distinguished from a disk.
const LOCAL: [&str; 35] = [
    "bcachefs",
    "bpf",
    "btrfs",
    "cgroup",
    "cgroup2",
    "configfs",
    "debugfs",
    "devpts",
    "devtmpfs",
    "efivarfs",
    "erofs",
    "exfat",
    "ext2",
    "ext3",
    "ext4",
    "f2fs",
    "hugetlbfs",
    "iso9660",
    "jffs2",
    "jfs",
    "mqueue",
    "nilfs2",
    "nsfs",
    "proc",
    "pstore",
    "ramfs",
    "securityfs",
    "squashfs",
    "sysfs",
    "tmpfs",
    "tracefs",
    "ubifs",
    "vfat",
    "xfs",
    "zfs",
];

/// An existing file or directory, open with O_PATH.
#[derive(Debug)]
pub struct HostFile {
    fd: OwnedFd,
}

/// A cache of the mount table, read at the first use; for checking a few paths at one time.
#[derive(Debug, Default)]
pub struct Mounts {
    text: Option<String>,
}

impl HostFile {
    /// Opens the path; can block forever.
    ///
    /// # Errors
    /// [`Error::Kernel`] if the path does not exist or cannot be opened.
    pub fn open(path: &Path) -> Result<Self, Error> {
        openat(AT_FDCWD, path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())
            .map(|fd| Self { fd })
            .map_err(|errno| Error::kernel("look at", path.display(), errno))
    }

    /// Opens the path if the kernel can resolve it without accessing a file system; never blocks. `None` if the kernel
    /// cannot, or if the path does not exist.
    pub fn cached(path: &Path) -> Option<Self> {
        let how = OpenHow::new()
            .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::from_bits_retain(RESOLVE_CACHED));
        openat2(AT_FDCWD, path, how).ok().map(|fd| Self { fd })
    }

    /// Opens a directory beneath this one, without links, if the kernel can resolve it without accessing a file system;
    /// never blocks.
    pub fn cached_beneath(&self, path: &Path) -> Option<Self> {
        let how = OpenHow::new().flags(OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC).resolve(
            ResolveFlag::RESOLVE_BENEATH
                | ResolveFlag::RESOLVE_NO_SYMLINKS
                | ResolveFlag::from_bits_retain(RESOLVE_CACHED),
        );
        openat2(&self.fd, path, how).ok().map(|fd| Self { fd })
    }

    /// Opens the directory of a log beneath this one; creates its missing parts. None of them may be a link, because a
    /// process with write access to the directory of logs could lead the log to any directory of the node. `path` is the
    /// log's, for error messages. Can block forever.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a part is not a directory, [`Error::Kernel`] if a system call fails.
    pub fn make_beneath(self, beneath: &Path, path: &Path) -> Result<Self, Error> {
        let failed = |errno| Error::kernel("open the directory of log", path.display(), errno);
        let _mask = umask::Public::begin();
        let mut place = self;
        for part in beneath.components() {
            let name = part.as_os_str();
            let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let mut opened = openat(&place.fd, name, flags, Mode::empty());
            if let Err(Errno::ENOENT) = opened {
                match mkdirat(&place.fd, name, Mode::from_bits_retain(0o777)) {
                    Ok(()) | Err(Errno::EEXIST) => {}
                    Err(errno) => return Err(failed(errno)),
                }
                opened = openat(&place.fd, name, flags, Mode::empty());
            }
            place.fd = match opened {
                // The kernel's answers for a link and for other files.
                Err(Errno::ENOTDIR | Errno::ELOOP) => {
                    let text = format!("{} is not a directory: a log's path has no links", name.display());
                    return Err(Error::invalid(path.display().to_string(), text));
                }
                opened => opened.map_err(failed)?,
            };
        }
        Ok(place)
    }

    /// ID of the file's mount; `None` if it is unknown. Never blocks.
    pub fn mount(&self) -> Option<u64> {
        let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", self.fd.as_raw_fd())).ok()?;
        text.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim().parse().ok()
    }

    /// Whether the file system is local; never blocks.
    pub fn is_local(&self, mounts: &mut Mounts) -> bool {
        let kind = self.mount().and_then(|mount| mounts.kind(mount));
        kind.is_some_and(|kind| LOCAL.contains(&kind))
    }

    /// The path without links; never blocks.
    ///
    /// # Errors
    /// [`Error::Kernel`] if /proc is not mounted.
    pub fn real_path(&self) -> Result<PathBuf, Error> {
        let path = self.name();
        fs::read_link(&path).map_err(|error| Error::io("resolve", path, &error))
    }

    /// Reads a regular file of at most `bytes_max` bytes; refuses other types of files without blocking. `path` is used
    /// in error messages.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the file is not regular or is too long, [`Error::Kernel`] if a system call
    /// fails.
    pub fn read(&self, path: &Path, bytes_max: u64) -> Result<Vec<u8>, Error> {
        let bytes = self.read_up_to(path, bytes_max + 1)?;
        match bytes.len() as u64 > bytes_max {
            true => {
                Err(Error::invalid(path.display().to_string(), format!("has more than {bytes_max} bytes")))
            }
            false => Ok(bytes),
        }
    }

    /// Reads at most the first `bytes_max` bytes of a regular file.
    ///
    /// # Errors
    /// Those of [`HostFile::read`], except that a longer file is not an error.
    pub fn read_up_to(&self, path: &Path, bytes_max: u64) -> Result<Vec<u8>, Error> {
        let failed = |error: std::io::Error| Error::io("read", path.display(), &error);
        let kind = fstat(&self.fd).map_err(|errno| Error::kernel("look at", path.display(), errno))?;
        refuse_unless_regular(path, SFlag::from_bits_truncate(kind.st_mode))?;
        let flags = OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let file = OpenOptions::new().read(true).custom_flags(flags.bits()).open(self.name());
        let mut bytes = Vec::new();
        file.map_err(failed)?.take(bytes_max).read_to_end(&mut bytes).map_err(failed)?;
        Ok(bytes)
    }

    /// Opens the log `name` in this directory for appending; creates it if missing. An existing log must be a regular
    /// file, because opening a FIFO would block, and any user with write access to the directory can create one. `path`
    /// is used in error messages.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the log is not a regular file, [`Error::Kernel`] if a system call fails.
    pub fn open_log(&self, name: &OsStr, path: &Path) -> Result<OwnedFd, Error> {
        let failed = |errno| Error::kernel("open log", path.display(), errno);
        // Checked before the open, so that no device is opened, and again after it, because the file may have been
        // exchanged meanwhile.
        match fstatat(&self.fd, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Ok(found) => refuse_unless_regular(path, SFlag::from_bits_truncate(found.st_mode))?,
            Err(Errno::ENOENT) => {}
            Err(errno) => return Err(failed(errno)),
        }
        let flags = OFlag::O_WRONLY
            | OFlag::O_APPEND
            | OFlag::O_CREAT
            | OFlag::O_NOFOLLOW
            | OFlag::O_NONBLOCK
            | OFlag::O_NOCTTY
            | OFlag::O_CLOEXEC;
        let mask = umask::Public::begin();
        let file = openat(&self.fd, name, flags, LOG_MODE).map_err(failed)?;
        drop(mask);
        let found = fstat(&file).map_err(failed)?;
        refuse_unless_regular(path, SFlag::from_bits_truncate(found.st_mode))?;
        fcntl(&file, FcntlArg::F_SETFL(OFlag::O_APPEND)).map_err(failed)?;
        Ok(file)
    }

    fn name(&self) -> String {
        format!("/proc/self/fd/{}", self.fd.as_raw_fd())
    }
}

impl AsFd for HostFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Mounts {
    fn kind(&mut self, mount: u64) -> Option<&str> {
        let text = self.text.get_or_insert_with(|| {
            fs::read_to_string("/proc/self/mountinfo").unwrap_or_default() // no mount is local then
        });
        mountinfo::kind_of(text, mount)
    }
}

fn refuse_unless_regular(path: &Path, mode: SFlag) -> Result<(), Error> {
    let what = match mode & SFlag::S_IFMT {
        SFlag::S_IFREG => return Ok(()),
        SFlag::S_IFIFO => "a FIFO",
        SFlag::S_IFSOCK => "a socket",
        SFlag::S_IFDIR => "a directory",
        SFlag::S_IFLNK => "a symbolic link",
        _ => "a device",
    };
    Err(Error::invalid(path.display().to_string(), format!("is {what}, not a regular file")))
}

/// Reads a regular file of at most `bytes_max` bytes. For files of the node's own configuration, whose file system is
/// trusted not to block. Refuses a FIFO without blocking.
///
/// # Errors
/// Those of [`HostFile::read`]; ENOENT if the file does not exist.
pub fn read(path: &Path, bytes_max: u64) -> Result<Vec<u8>, Error> {
    HostFile::open(path)?.read(path, bytes_max)
}

/// Sends a descriptor over a socket, for [`receive_file`].
///
/// # Errors
/// [`Error::Kernel`] if the other end is closed.
pub fn send_file(socket: BorrowedFd<'_>, file: BorrowedFd<'_>) -> Result<(), Error> {
    sys::socket::send(socket.into(), b"f", &[file.into()])
        .map_err(|errno| Error::kernel("send descriptor", "over a socket", Errno::from_raw(errno.0)))
}

/// Receives a descriptor that [`send_file`] sent.
///
/// # Errors
/// [`Error::Kernel`]: EAGAIN if a non-blocking socket has no message, ENODATA if the message has no
/// descriptor, EMFILE if this process has no free descriptor.
pub fn receive_file(socket: BorrowedFd<'_>) -> Result<OwnedFd, Error> {
    let failed = |errno| Error::kernel("receive descriptor", "over a socket", errno);
    let mut byte = [0; 1];
    let received = match sys::socket::receive(socket.into(), &mut byte) {
        // The byte fits, so it is the descriptor that did not.
        Err(sys::Errno::EMSGSIZE) => return Err(failed(Errno::EMFILE)),
        received => received.map_err(|errno| failed(Errno::from_raw(errno.0)))?,
    };
    let file: Option<Fd> = received.descriptors.into_iter().flatten().next();
    file.map(OwnedFd::from).ok_or(failed(Errno::ENODATA))
}

/// Splits the path of a log into three parts: the directory above the pod's directory of logs, in which the administrator may
/// have links; the directories below it, which others can write to and which may not be links; and the log's name.
/// `None` if the log is not below the pod's directory, or the path has "..".
pub fn split<'a>(path: &'a Path, pod_directory: &'a Path) -> Option<(&'a Path, &'a Path, &'a OsStr)> {
    let above = pod_directory.parent().unwrap_or(pod_directory);
    let beneath = path.strip_prefix(pod_directory).ok().and_then(|_| path.strip_prefix(above).ok())?;
    let is_name = |part| matches!(part, Component::Normal(_));
    if !beneath.components().all(is_name) {
        return None;
    }
    Some((above, beneath.parent()?, beneath.file_name()?))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("coracle-hostpath-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// Opening a FIFO without a writer and without O_NONBLOCK blocks; the test would hang then.
    #[test]
    fn other_file_types_are_refused_without_waiting_for_them() {
        let folder = Folder::new("kinds");
        let file = HostFile::open(&folder.0).unwrap();
        nix::unistd::mkfifo(&folder.0.join("fifo"), Mode::S_IRWXU).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(folder.0.join("socket")).unwrap();
        fs::create_dir(folder.0.join("directory")).unwrap();
        std::os::unix::fs::symlink("/dev/null", folder.0.join("link")).unwrap();
        for (name, what) in [
            ("fifo", "a FIFO"),
            ("socket", "a socket"),
            ("directory", "a directory"),
            ("link", "a symbolic link"),
        ] {
            let path = folder.0.join(name);
            let refused = file.open_log(name.as_ref(), &path).unwrap_err().to_string();
            assert_eq!(refused, format!("{}: is {what}, not a regular file", path.display()));
            if name != "link" {
                let refused = read(&path, 10).unwrap_err().to_string();
                assert_eq!(refused, format!("{}: is {what}, not a regular file", path.display()));
            }
        }
    }

    /// Finding S4: only the last part of a log's path could not be a link.
    #[test]
    fn no_link_below_the_directory_of_all_pods_leads_to_a_log() {
        let folder = Folder::new("beneath");
        let above = |name: &str| folder.0.join("link").join(name);
        std::os::unix::fs::symlink(&folder.0, folder.0.join("link")).unwrap();
        std::os::unix::fs::symlink("/tmp", folder.0.join("pod-link")).unwrap();
        fs::create_dir(folder.0.join("pod")).unwrap();
        std::os::unix::fs::symlink("/tmp", folder.0.join("pod/link")).unwrap();
        fs::write(folder.0.join("pod/file"), "").unwrap();
        for (pod, log, expected) in [
            ("pod", "pod/0.log", None),
            ("pod", "pod/new/er/0.log", None),
            ("new-pod", "new-pod/0.log", None),
            ("pod/", "pod/./0.log", None),
            ("pod", "pod/link/0.log", Some("link is not a directory")),
            ("pod", "pod/file/0.log", Some("file is not a directory")),
            ("pod-link", "pod-link/0.log", Some("pod-link is not a directory")),
        ] {
            let (path, pod) = (above(log), above(pod));
            let (above, beneath, name) = split(&path, &pod).unwrap();
            let place = HostFile::open(above).unwrap();
            let cached = place.cached_beneath(beneath);
            match (place.make_beneath(beneath, &path), expected) {
                (Ok(place), None) => drop(place.open_log(name, &path).unwrap()),
                (Err(error), Some(expected)) => {
                    assert!(error.to_string().contains(expected), "{log}: {error}");
                    assert!(cached.is_none(), "{log}");
                }
                (made, _) => panic!("{log}: {made:?}"),
            }
        }
        for (log, pod) in [("/a/b/c", "/a/x"), ("/a/pod/../c", "/a/pod"), ("/a/b/../c", "/a/b/..")] {
            assert_eq!(split(Path::new(log), Path::new(pod)), None, "{log}");
        }
        assert_eq!(split(Path::new("/c"), Path::new("/")).unwrap().1, Path::new(""));
    }

    #[test]
    fn a_log_is_created_and_appended_to_and_writes_never_return_eagain() {
        let folder = Folder::new("log");
        let file = HostFile::open(&folder.0).unwrap();
        let path = folder.0.join("0.log");
        for text in ["one\n", "two\n"] {
            let log = file.open_log("0.log".as_ref(), &path).unwrap();
            let flags = OFlag::from_bits_retain(fcntl(&log, FcntlArg::F_GETFL).unwrap());
            assert!(flags.contains(OFlag::O_APPEND) && !flags.contains(OFlag::O_NONBLOCK));
            nix::unistd::write(&log, text.as_bytes()).unwrap();
        }
        assert_eq!(fs::read(&path).unwrap(), b"one\ntwo\n");
        assert_eq!(read(&path, 8).unwrap(), b"one\ntwo\n");
        assert!(read(&path, 7).unwrap_err().to_string().ends_with("has more than 7 bytes"));
    }

    #[test]
    fn a_new_directory_is_found_in_the_cache_of_the_kernel() {
        let folder = Folder::new("cached");
        let path = folder.0.join("volume");
        fs::create_dir(&path).unwrap();
        std::os::unix::fs::symlink(&path, folder.0.join("link")).unwrap();
        // `None` on kernels before 5.12, where a worker opens the path.
        if let Some(file) = HostFile::cached(&folder.0.join("link")) {
            assert_eq!(file.real_path().unwrap(), path.canonicalize().unwrap());
            assert!(file.mount().is_some());
        }
        assert!(HostFile::open(Path::new("/proc/self")).unwrap().is_local(&mut Mounts::default()));
        assert!(HostFile::cached(&folder.0.join("absent")).is_none());
    }

    #[test]
    fn a_file_is_sent_over_a_socket() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let file = File::open("/proc/self/status").unwrap();
        send_file(theirs.as_fd(), file.as_fd()).unwrap();
        let mut text = String::new();
        File::from(receive_file(ours.as_fd()).unwrap()).read_to_string(&mut text).unwrap();
        assert!(text.starts_with("Name:"));
        drop(theirs);
        assert!(receive_file(ours.as_fd()).is_err());
    }
}
