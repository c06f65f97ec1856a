//! Files through descriptors: open below a root, create, write, stat.

use core::ffi::CStr;

use rustix::fs::{AtFlags, FileType, Gid, Mode, StatxAttributes, StatxFlags, Uid};
pub use rustix::fs::{OFlags, ResolveFlags};
use rustix::io::{IoSlice, retry_on_intr};
use rustix::pipe::PipeFlags;
use rustix::pty::OpenptFlags;

use crate::arch::call;
use crate::mark::Mark;
use crate::{Errno, Fd, FdRef, number};

/// Flag: open for reading.
pub const O_RDONLY: OFlags = OFlags::RDONLY;
/// Flag: open for writing.
pub const O_WRONLY: OFlags = OFlags::WRONLY;
/// Flag: open for reading and writing.
pub const O_RDWR: OFlags = OFlags::RDWR;
/// Flag: create the file if it does not exist.
pub const O_CREAT: OFlags = OFlags::CREATE;
/// Flag: truncate the file.
pub const O_TRUNC: OFlags = OFlags::TRUNC;
/// Flag: do not make a terminal the controlling terminal.
pub const O_NOCTTY: OFlags = OFlags::NOCTTY;
/// Flag: return EAGAIN instead of blocking.
pub const O_NONBLOCK: OFlags = OFlags::NONBLOCK;
/// Flag: open only a directory.
pub const O_DIRECTORY: OFlags = OFlags::DIRECTORY;
/// Flag: if the last component of a path is a symbolic link, open the link itself.
pub const O_NOFOLLOW: OFlags = OFlags::NOFOLLOW;
/// Flag: open only a location in the tree, without access to the content.
pub const O_PATH: OFlags = OFlags::PATH;

/// Flag of openat2: paths are resolved as if the directory descriptor were `/`.
pub const RESOLVE_IN_ROOT: ResolveFlags = ResolveFlags::IN_ROOT;
/// Flag of openat2: no magic links such as /proc/PID/root are followed.
pub const RESOLVE_NO_MAGICLINKS: ResolveFlags = ResolveFlags::NO_MAGICLINKS;

/// File type of a directory.
pub const S_IFDIR: u32 = 0o040_000;
/// File type of a character device.
pub const S_IFCHR: u32 = 0o020_000;
/// File type of a regular file.
pub const S_IFREG: u32 = 0o100_000;
/// File type of a symbolic link.
pub const S_IFLNK: u32 = 0o120_000;
/// File type of a pipe.
pub const S_IFIFO: u32 = 0o010_000;
/// Mask of the file type in mode bits.
pub const S_IFMT: u32 = 0o170_000;

/// Opens a file (openat(2)).
pub fn open(directory: FdRef<'_>, path: &CStr, flags: OFlags, mode: u32) -> Result<Fd, Errno> {
    Ok(rustix::fs::openat(directory, path, flags | OFlags::CLOEXEC, Mode::from_raw_mode(mode))?.into())
}

/// Opens a file (openat2, Linux 5.6); `resolve`: RESOLVE_….
pub fn open_resolved(
    directory: FdRef<'_>,
    path: &CStr,
    flags: OFlags,
    resolve: ResolveFlags,
) -> Result<Fd, Errno> {
    Ok(rustix::fs::openat2(directory, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve)?.into())
}

/// Reads from a file (read(2)); repeated if it is interrupted.
pub fn read(file: FdRef<'_>, buffer: &mut [u8]) -> Result<usize, Errno> {
    Ok(retry_on_intr(|| rustix::io::read(file, &mut *buffer))?)
}

/// Reads from the start of a file (pread64(2)); returns the number of bytes.
pub fn read_from_start(file: FdRef<'_>, buffer: &mut [u8]) -> Result<usize, Errno> {
    Ok(rustix::io::pread(file, buffer, 0)?)
}

/// Writes to a file (write(2)), repeated if it is interrupted; returns the number of written bytes.
pub fn write(file: FdRef<'_>, bytes: &[u8]) -> Result<usize, Errno> {
    Ok(retry_on_intr(|| rustix::io::write(file, bytes))?)
}

/// Writes up to four parts (writev(2)); returns the number of written bytes.
pub fn write_parts(file: FdRef<'_>, parts: [&[u8]; 4]) -> Result<usize, Errno> {
    Ok(rustix::io::writev(file, &parts.map(IoSlice::new))?)
}

/// The file offset (lseek, SEEK_CUR): after an append, the end of the written data.
pub fn position(file: FdRef<'_>) -> Result<u64, Errno> {
    Ok(rustix::fs::tell(file)?)
}

/// Sets the size of a file (ftruncate(2)).
pub fn truncate(file: FdRef<'_>, size: u64) -> Result<(), Errno> {
    Ok(rustix::fs::ftruncate(file, size)?)
}

/// Writes a file to its disk (fsync(2)).
pub fn sync(file: FdRef<'_>) -> Result<(), Errno> {
    Ok(rustix::fs::fsync(file)?)
}

/// Creates a directory (mkdirat(2)).
pub fn make_directory(directory: FdRef<'_>, name: &CStr, mode: u32) -> Result<(), Errno> {
    Ok(rustix::fs::mkdirat(directory, name, Mode::from_raw_mode(mode))?)
}

/// Creates a file of any type (mknodat(2)); `device` is in the kernel's encoding.
pub fn make_node(directory: FdRef<'_>, name: &CStr, mode: u32, device: u64) -> Result<(), Errno> {
    let (kind, mode) = (FileType::from_raw_mode(mode), Mode::from_raw_mode(mode));
    Ok(rustix::fs::mknodat(directory, name, kind, mode, device)?)
}

/// Reads the target of a symbolic link (readlinkat(2)), truncated to the buffer and without a NUL; returns its length.
pub fn read_link(directory: FdRef<'_>, name: &CStr, buffer: &mut [u8]) -> Result<usize, Errno> {
    Ok(rustix::fs::readlinkat_raw(directory, name, buffer)?)
}

/// Creates a symbolic link (symlinkat(2)).
pub fn make_symlink(content: &CStr, directory: FdRef<'_>, name: &CStr) -> Result<(), Errno> {
    Ok(rustix::fs::symlinkat(content, directory, name)?)
}

/// Renames a file within one directory (renameat(2)).
pub fn rename(directory: FdRef<'_>, from: &CStr, to: &CStr) -> Result<(), Errno> {
    Ok(rustix::fs::renameat(directory, from, directory, to)?)
}

/// Removes a file (unlinkat(2)).
pub fn remove_file(directory: FdRef<'_>, name: &CStr) -> Result<(), Errno> {
    Ok(rustix::fs::unlinkat(directory, name, AtFlags::empty())?)
}

/// Changes the working directory to an open one (fchdir(2)).
pub fn change_directory(directory: FdRef<'_>) -> Result<(), Errno> {
    Ok(rustix::process::fchdir(directory)?)
}

/// Changes the working directory (chdir(2)).
pub fn change_directory_to(path: &CStr) -> Result<(), Errno> {
    Ok(rustix::process::chdir(path)?)
}

/// Changes the owner of the file `name` (fchownat(2)); symbolic links are not followed.
pub fn change_owner_of(directory: FdRef<'_>, name: &CStr, uid: u32, gid: u32) -> Result<(), Errno> {
    let (uid, gid) = (Uid::from_raw_unchecked(uid), Gid::from_raw_unchecked(gid));
    Ok(rustix::fs::chownat(directory, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Changes the user of an open file (fchown(2)); the group is not changed.
pub fn change_owner(file: FdRef<'_>, uid: u32) -> Result<(), Errno> {
    Ok(rustix::fs::fchown(file, Some(Uid::from_raw_unchecked(uid)), None)?)
}

/// Properties of a file, the result of [`stat`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// File type and permission bits.
    pub mode: u32,
    /// Major number, if the file is a device.
    pub device_major: u32,
    /// Minor number, if the file is a device.
    pub device_minor: u32,
    /// Identity of the file: file system (major, minor) and inode number.
    pub identity: (u32, u32, u64),
    /// ID of the file's mount, as in /proc/self/mountinfo; 0 before Linux 5.8.
    pub mount: u64,
    /// Whether the file is the root of its mount; false before Linux 5.8.
    pub is_mount_root: bool,
}

impl Stat {
    /// The device of the file's file system: major, minor.
    pub fn device(self) -> (u32, u32) {
        (self.identity.0, self.identity.1)
    }

    /// Whether the file is a directory.
    pub fn is_directory(self) -> bool {
        self.mode & S_IFMT == S_IFDIR
    }
}

/// Reads the properties of an open file (statx(2), Linux 4.11; the mount since 5.8).
pub fn stat(file: FdRef<'_>) -> Result<Stat, Errno> {
    let mask = StatxFlags::TYPE | StatxFlags::MODE | StatxFlags::INO | StatxFlags::MNT_ID;
    let stat = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, mask)?;
    let has_mount = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::MNT_ID);
    Ok(Stat {
        mode: stat.stx_mode.into(),
        device_major: stat.stx_rdev_major,
        device_minor: stat.stx_rdev_minor,
        identity: (stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino),
        mount: if has_mount { stat.stx_mnt_id } else { 0 },
        is_mount_root: stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT),
    })
}

/// Whether a directory that is open for reading has only the entries `.` and `..` (getdents64(2)). The function reads
/// from the directory's current offset, so it works only once per descriptor.
pub fn is_empty_directory(directory: FdRef<'_>) -> Result<bool, Errno> {
    // `struct linux_dirent64` is 19 bytes and the name with its NUL, in steps of 8: 24 bytes for each of the two.
    const BOTH_BYTES: usize = 48;
    let mut buffer = [0_u64; 16];
    let arguments = [directory.argument(), buffer.as_mut_ptr() as usize, size_of_val(&buffer)];
    // SAFETY: the kernel writes at most the length given into a local that lives across the call.
    let length = unsafe { call(number::GETDENTS64, arguments) }?;
    Ok(length <= BOTH_BYTES)
}

/// `f_flags` (the mount's ST_… bits) and `f_type` of a file's file system (fstatfs(2)).
pub fn mount_flags_and_type(file: FdRef<'_>) -> Result<(u64, u64), Errno> {
    let stat = rustix::fs::fstatfs(file)?;
    Ok((stat.f_flags as u64, stat.f_type as u64))
}

/// Creates a pipe (pipe2(2)); returns the read end and the write end.
pub fn pipe() -> Result<(Fd, Fd), Errno> {
    pipe_with(PipeFlags::empty())
}

/// Creates a pipe with O_NONBLOCK at both ends; returns the read end and the write end.
pub fn nonblocking_pipe() -> Result<(Fd, Fd), Errno> {
    pipe_with(PipeFlags::NONBLOCK)
}

fn pipe_with(flags: PipeFlags) -> Result<(Fd, Fd), Errno> {
    let (reader, writer) = rustix::pipe::pipe_with(flags | PipeFlags::CLOEXEC)?;
    Ok((reader.into(), writer.into()))
}

/// Sets O_NONBLOCK on the open file (fcntl F_SETFL). Other status flags are cleared.
pub fn set_nonblocking(file: FdRef<'_>) -> Result<(), Errno> {
    Ok(rustix::fs::fcntl_setfl(file, OFlags::NONBLOCK)?)
}

/// Creates a second descriptor for the same open file, numbered `lowest` or above (fcntl F_DUPFD_CLOEXEC).
pub fn duplicate(file: FdRef<'_>, lowest: i32) -> Result<Fd, Errno> {
    Ok(rustix::io::fcntl_dupfd_cloexec(file, lowest)?.into())
}

/// Makes descriptor `to` refer to the same open file, after closing the previous file of `to` (dup3(2)); inherited
/// through exec unless `close_on_exec`.
pub fn duplicate_to(file: FdRef<'_>, to: i32, close_on_exec: bool) -> Result<(), Errno> {
    let flags = if close_on_exec { OFlags::CLOEXEC.bits() as usize } else { 0 };
    // SAFETY: the call reads no memory. The caller plans its own descriptor table and knows what `to` was.
    unsafe { call(number::DUP3, [file.argument(), to as usize, flags]) }.map(drop)
}

/// Moves these open files to the descriptors 0, 1, … and closes all others. The boolean is whether close-on-exec is
/// set. For `None` the descriptor is closed. Only for a new child process, like
/// [`close_from`].
pub fn arrange<const N: usize>(
    files: [Option<(FdRef<'_>, bool)>; N],
) -> Result<[Option<FdRef<'static>>; N], Errno> {
    // Not owned: after an error the files must still be open, among them the one that reports it.
    let mut moved = [None; N];
    let mut placed = [None; N];
    // First duplicate the files with numbers below N to higher ones, so that none is overwritten before it is moved.
    for (moved, file) in moved.iter_mut().zip(&files) {
        *moved = match *file {
            Some((file, _)) if file.number() < N as i32 => Some(duplicate(file, N as i32)?.leak()),
            file => file.map(|(file, _)| file),
        };
    }
    let mut first_unused = 0;
    for (number, ((placed, moved), file)) in (0..).zip(placed.iter_mut().zip(&moved).zip(&files)) {
        let Some(moved) = *moved else { continue };
        if first_unused < number {
            close_range(first_unused, number as u32 - 1)?;
        }
        first_unused = number + 1;
        duplicate_to(moved, number, file.is_some_and(|(_, on_exec)| on_exec))?;
        // SAFETY: the call before opened it, and it stays open: this process owns none of these numbers.
        *placed = Some(unsafe { FdRef::standing(number) });
    }
    // One call closes all of them, whose numbers are N and above.
    close_from(first_unused)?;
    Ok(placed)
}

/// Closes all descriptors from `first` on (close_range, Linux 5.9). Only for a new child process, which no longer uses
/// its [`Fd`] values.
pub fn close_from(first: i32) -> Result<(), Errno> {
    close_range(first, u32::MAX)
}

fn close_range(first: i32, last: u32) -> Result<(), Errno> {
    // SAFETY: the call reads no memory.
    unsafe { call(number::CLOSE_RANGE, [first as usize, last as usize, 0]) }.map(drop)
}

/// Unlocks and opens the slave side of a pseudo terminal (TIOCSPTLCK; TIOCGPTPEER, Linux 4.13).
pub fn open_terminal_peer(master: FdRef<'_>) -> Result<Fd, Errno> {
    rustix::pty::unlockpt(master)?;
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    Ok(rustix::pty::ioctl_tiocgptpeer(master, flags)?.into())
}

/// ioctl(2) request of [`set_controlling_terminal`], which seccomp filters may examine.
pub const TIOCSCTTY: u32 = 0x540e;

/// Makes `terminal` the controlling terminal of this session (TIOCSCTTY).
pub fn set_controlling_terminal(terminal: FdRef<'_>, mark: Mark) -> Result<(), Errno> {
    let [fourth, fifth] = mark.arguments();
    // SAFETY: TIOCSCTTY takes a number; 0 does not steal it from another session.
    unsafe { call(number::IOCTL, [terminal.argument(), TIOCSCTTY as usize, 0, fourth, fifth]) }.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_empty_without_entries() {
        let path = std::env::temp_dir().join(format!("coracle-sys-empty-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        let is_empty = || {
            let directory = open(FdRef::WORKING_DIRECTORY, &name, O_RDONLY | O_DIRECTORY, 0).unwrap();
            is_empty_directory(directory.borrow())
        };
        assert_eq!(is_empty(), Ok(true));
        std::fs::write(path.join("x"), "").unwrap();
        assert_eq!(is_empty(), Ok(false));
        std::fs::remove_dir_all(&path).unwrap();
        let null = open(FdRef::WORKING_DIRECTORY, c"/dev/null", O_RDONLY, 0).unwrap();
        assert_eq!(is_empty_directory(null.borrow()), Err(Errno::ENOTDIR));
    }

    #[test]
    fn stat_reads_the_fields_it_names() {
        let null = open(FdRef::WORKING_DIRECTORY, c"/dev/null", O_RDONLY, 0).unwrap();
        let stat = stat(null.borrow()).unwrap();
        assert_eq!((stat.mode & S_IFMT, stat.device_major, stat.device_minor), (S_IFCHR, 1, 3));
        assert!(!stat.is_mount_root);
        let proc = open(FdRef::WORKING_DIRECTORY, c"/proc", O_PATH, 0).unwrap();
        let mounted = super::stat(proc.borrow()).unwrap();
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let line = table.lines().find(|line| line.split(' ').nth(4) == Some("/proc")).unwrap();
        assert!(
            mounted.is_mount_root && line.starts_with(&format!("{} ", mounted.mount)),
            "{mounted:?}: {line}"
        );
        assert_eq!(mount_flags_and_type(proc.borrow()).unwrap().1, 0x9fa0);
    }
}
