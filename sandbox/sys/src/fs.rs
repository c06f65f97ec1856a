//! Files through descriptors: open below a root, create, write, stat.

use core::ffi::CStr;

use crate::arch::call;
use crate::mark::Mark;
use crate::{Errno, Fd, FdRef, number};

/// Flag: open for reading.
pub const O_RDONLY: u64 = 0;
/// Flag: open for writing.
pub const O_WRONLY: u64 = 1;
/// Flag: open for reading and writing.
pub const O_RDWR: u64 = 2;
/// Flag: create the file if it does not exist.
pub const O_CREAT: u64 = 0o100;
/// Flag: truncate the file.
pub const O_TRUNC: u64 = 0o1000;
/// Flag: do not make a terminal the controlling terminal.
pub const O_NOCTTY: u64 = 0o400;
/// Flag: return EAGAIN instead of blocking.
pub const O_NONBLOCK: u64 = 0o4000;
/// Flag: open only a directory.
#[cfg(target_arch = "x86_64")]
pub const O_DIRECTORY: u64 = 0o200_000;
/// Flag: open only a directory.
#[cfg(target_arch = "aarch64")]
pub const O_DIRECTORY: u64 = 0o40_000;
/// Flag: if the last component of a path is a symbolic link, open the link itself.
#[cfg(target_arch = "x86_64")]
pub const O_NOFOLLOW: u64 = 0o400_000;
/// Flag: if the last component of a path is a symbolic link, open the link itself.
#[cfg(target_arch = "aarch64")]
pub const O_NOFOLLOW: u64 = 0o100_000;
/// Flag: open only a location in the tree, without access to the content.
pub const O_PATH: u64 = 0o1000_0000;
const O_CLOEXEC: u64 = 0o200_0000;

/// Flag of openat2: paths are resolved as if the directory descriptor were `/`.
pub const RESOLVE_IN_ROOT: u64 = 0x10;
/// Flag of openat2: no magic links such as /proc/PID/root are followed.
pub const RESOLVE_NO_MAGICLINKS: u64 = 0x02;

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

const AT_EMPTY_PATH: usize = 0x1000;

/// Opens a file (openat(2)).
pub fn open(directory: FdRef<'_>, path: &CStr, flags: u64, mode: u32) -> Result<Fd, Errno> {
    let arguments =
        [directory.argument(), path.as_ptr() as usize, (flags | O_CLOEXEC) as usize, mode as usize];
    // SAFETY: `path` is a NUL-terminated string borrowed for the call.
    unsafe { call(number::OPENAT, arguments) }.map(Fd::from_call)
}

/// Opens a file (openat2, Linux 5.6); `resolve`: RESOLVE_….
pub fn open_resolved(directory: FdRef<'_>, path: &CStr, flags: u64, resolve: u64) -> Result<Fd, Errno> {
    let how = [flags | O_CLOEXEC, 0, resolve];
    let arguments = [directory.argument(), path.as_ptr() as usize, how.as_ptr() as usize, size_of_val(&how)];
    // SAFETY: `path` is NUL-terminated; the kernel reads a `struct open_how`, three u64, of the size given.
    unsafe { call(number::OPENAT2, arguments) }.map(Fd::from_call)
}

/// Reads from a file (read(2)); repeated if it is interrupted.
pub fn read(file: FdRef<'_>, buffer: &mut [u8]) -> Result<usize, Errno> {
    loop {
        // SAFETY: the kernel writes at most `len` bytes into a slice borrowed mutably for the call.
        match unsafe { call(number::READ, [file.argument(), buffer.as_mut_ptr() as usize, buffer.len()]) } {
            Err(Errno::EINTR) => {}
            read => return read,
        }
    }
}

/// Reads from the start of a file (pread64(2)); returns the number of bytes.
pub fn read_from_start(file: FdRef<'_>, buffer: &mut [u8]) -> Result<usize, Errno> {
    // SAFETY: as for `read`.
    unsafe { call(number::PREAD64, [file.argument(), buffer.as_mut_ptr() as usize, buffer.len(), 0]) }
}

/// Writes to a file (write(2)), repeated if it is interrupted; returns the number of written bytes.
pub fn write(file: FdRef<'_>, bytes: &[u8]) -> Result<usize, Errno> {
    loop {
        // SAFETY: the kernel reads `len` bytes of the slice.
        match unsafe { call(number::WRITE, [file.argument(), bytes.as_ptr() as usize, bytes.len()]) } {
            Err(Errno::EINTR) => {}
            written => return written,
        }
    }
}

/// Writes up to four parts (writev(2)); returns the number of written bytes.
pub fn write_parts(file: FdRef<'_>, parts: [&[u8]; 4]) -> Result<usize, Errno> {
    let vectors = parts.map(|part| [part.as_ptr() as usize, part.len()]);
    // SAFETY: `struct iovec` is a pointer and a length, as these pairs are; each names a slice borrowed for the call.
    unsafe { call(number::WRITEV, [file.argument(), vectors.as_ptr() as usize, vectors.len()]) }
}

/// The file offset (lseek, SEEK_CUR): after an append, the end of the written data.
pub fn position(file: FdRef<'_>) -> Result<u64, Errno> {
    // SAFETY: the call reads no memory.
    unsafe { call(number::LSEEK, [file.argument(), 0, 1]) }.map(|position| position as u64)
}

/// Sets the size of a file (ftruncate(2)).
pub fn truncate(file: FdRef<'_>, size: u64) -> Result<(), Errno> {
    // SAFETY: the call reads no memory.
    unsafe { call(number::FTRUNCATE, [file.argument(), size as usize]) }.map(drop)
}

/// Writes a file to its disk (fsync(2)).
pub fn sync(file: FdRef<'_>) -> Result<(), Errno> {
    // SAFETY: the call reads no memory.
    unsafe { call(number::FSYNC, [file.argument()]) }.map(drop)
}

/// Creates a directory (mkdirat(2)).
pub fn make_directory(directory: FdRef<'_>, name: &CStr, mode: u32) -> Result<(), Errno> {
    // SAFETY: `name` is a NUL-terminated string borrowed for the call.
    unsafe { call(number::MKDIRAT, [directory.argument(), name.as_ptr() as usize, mode as usize]) }.map(drop)
}

/// Creates a file of any type (mknodat(2)); `device` is in the kernel's encoding.
pub fn make_node(directory: FdRef<'_>, name: &CStr, mode: u32, device: u64) -> Result<(), Errno> {
    let arguments = [directory.argument(), name.as_ptr() as usize, mode as usize, device as usize];
    // SAFETY: `name` is a NUL-terminated string borrowed for the call.
    unsafe { call(number::MKNODAT, arguments) }.map(drop)
}

/// Reads the target of a symbolic link (readlinkat(2)), truncated to the buffer and without a NUL; returns its length.
pub fn read_link(directory: FdRef<'_>, name: &CStr, buffer: &mut [u8]) -> Result<usize, Errno> {
    let arguments =
        [directory.argument(), name.as_ptr() as usize, buffer.as_mut_ptr() as usize, buffer.len()];
    // SAFETY: `name` is NUL-terminated; the kernel writes at most `len` bytes into a slice borrowed mutably.
    unsafe { call(number::READLINKAT, arguments) }
}

/// Creates a symbolic link (symlinkat(2)).
pub fn make_symlink(content: &CStr, directory: FdRef<'_>, name: &CStr) -> Result<(), Errno> {
    let arguments = [content.as_ptr() as usize, directory.argument(), name.as_ptr() as usize];
    // SAFETY: both are NUL-terminated strings borrowed for the call.
    unsafe { call(number::SYMLINKAT, arguments) }.map(drop)
}

/// Renames a file within one directory (renameat(2)).
pub fn rename(directory: FdRef<'_>, from: &CStr, to: &CStr) -> Result<(), Errno> {
    let directory = directory.argument();
    let arguments = [directory, from.as_ptr() as usize, directory, to.as_ptr() as usize];
    // SAFETY: both are NUL-terminated strings borrowed for the call.
    unsafe { call(number::RENAMEAT, arguments) }.map(drop)
}

/// Removes a file (unlinkat(2)).
pub fn remove_file(directory: FdRef<'_>, name: &CStr) -> Result<(), Errno> {
    // SAFETY: `name` is a NUL-terminated string borrowed for the call.
    unsafe { call(number::UNLINKAT, [directory.argument(), name.as_ptr() as usize, 0]) }.map(drop)
}

/// Changes the working directory to an open one (fchdir(2)).
pub fn change_directory(directory: FdRef<'_>) -> Result<(), Errno> {
    // SAFETY: the call reads no memory.
    unsafe { call(number::FCHDIR, [directory.argument()]) }.map(drop)
}

/// Changes the working directory (chdir(2)).
pub fn change_directory_to(path: &CStr) -> Result<(), Errno> {
    let directory = open(FdRef::WORKING_DIRECTORY, path, O_PATH | O_DIRECTORY, 0)?;
    change_directory(directory.borrow())
}

/// Changes the owner of the file `name` (fchownat(2)); symbolic links are not followed.
pub fn change_owner_of(directory: FdRef<'_>, name: &CStr, uid: u32, gid: u32) -> Result<(), Errno> {
    const AT_SYMLINK_NOFOLLOW: usize = 0x100;
    let arguments = [
        directory.number() as usize,
        name.as_ptr() as usize,
        uid as usize,
        gid as usize,
        AT_SYMLINK_NOFOLLOW,
    ];
    // SAFETY: the kernel reads up to the NUL of a string borrowed for the call.
    unsafe { call(number::FCHOWNAT, arguments) }.map(drop)
}

/// Changes the user of an open file (fchown(2)); the group is not changed.
pub fn change_owner(file: FdRef<'_>, uid: u32) -> Result<(), Errno> {
    // SAFETY: the call reads no memory; -1 leaves the group.
    unsafe { call(number::FCHOWN, [file.argument(), uid as usize, u32::MAX as usize]) }.map(drop)
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
    const STATX_MNT_ID: u32 = 0x1000;
    const STATX_TYPE_MODE_INODE: u32 = 0x103;
    const STATX_ATTR_MOUNT_ROOT: u32 = 0x2000;
    // `struct statx`, 256 bytes: stx_mask is a u32 at 0, stx_attributes a u64 at 8, stx_mode a u16 at 28, stx_ino a u64 at 32,
    // stx_rdev_major and stx_rdev_minor are u32 at 128, stx_dev_major and stx_dev_minor follow, stx_mnt_id is a u64 at 144.
    let mut buffer = [0_u32; 64];
    let arguments = [
        file.argument(),
        c"".as_ptr() as usize,
        AT_EMPTY_PATH,
        (STATX_TYPE_MODE_INODE | STATX_MNT_ID) as usize,
        buffer.as_mut_ptr() as usize,
    ];
    // SAFETY: the path is a static empty string; the kernel writes 256 bytes, the size of `buffer`.
    unsafe { call(number::STATX, arguments) }?;
    let long = |at: usize| u64::from(buffer[at]) | u64::from(buffer[at + 1]) << 32;
    Ok(Stat {
        mode: buffer[7] & 0xffff,
        device_major: buffer[32],
        device_minor: buffer[33],
        identity: (buffer[34], buffer[35], long(8)),
        mount: if buffer[0] & STATX_MNT_ID == 0 { 0 } else { long(36) },
        is_mount_root: buffer[2] & STATX_ATTR_MOUNT_ROOT != 0,
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
    // `struct statfs`, 120 bytes on both architectures: f_type is the word at 0, f_flags that at 80.
    let mut buffer = [0_u64; 15];
    // SAFETY: the kernel writes 120 bytes, the size of `buffer`.
    unsafe { call(number::FSTATFS, [file.argument(), buffer.as_mut_ptr() as usize]) }?;
    Ok((buffer[10], buffer[0]))
}

/// Creates a pipe (pipe2(2)); returns the read end and the write end.
pub fn pipe() -> Result<(Fd, Fd), Errno> {
    pipe_with(O_CLOEXEC)
}

/// Creates a pipe with O_NONBLOCK at both ends; returns the read end and the write end.
pub fn nonblocking_pipe() -> Result<(Fd, Fd), Errno> {
    pipe_with(O_CLOEXEC | O_NONBLOCK)
}

fn pipe_with(flags: u64) -> Result<(Fd, Fd), Errno> {
    let mut ends = [0_i32; 2];
    // SAFETY: the kernel writes two i32 to a local that lives across the call.
    unsafe { call(number::PIPE2, [ends.as_mut_ptr() as usize, flags as usize]) }?;
    Ok((Fd::from_call(ends[0] as usize), Fd::from_call(ends[1] as usize)))
}

/// Sets O_NONBLOCK on the open file (fcntl F_SETFL). Other status flags are cleared.
pub fn set_nonblocking(file: FdRef<'_>) -> Result<(), Errno> {
    // SAFETY: F_SETFL takes a number.
    unsafe { call(number::FCNTL, [file.argument(), 4, O_NONBLOCK as usize]) }.map(drop)
}

/// Creates a second descriptor for the same open file, numbered `lowest` or above (fcntl F_DUPFD_CLOEXEC).
pub fn duplicate(file: FdRef<'_>, lowest: i32) -> Result<Fd, Errno> {
    // SAFETY: F_DUPFD_CLOEXEC takes a number.
    unsafe { call(number::FCNTL, [file.argument(), 1030, lowest as usize]) }.map(Fd::from_call)
}

/// Makes descriptor `to` refer to the same open file, after closing the previous file of `to` (dup3(2)); inherited
/// through exec unless `close_on_exec`.
pub fn duplicate_to(file: FdRef<'_>, to: i32, close_on_exec: bool) -> Result<(), Errno> {
    let flags = if close_on_exec { O_CLOEXEC as usize } else { 0 };
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
    const TIOCSPTLCK: usize = 0x4004_5431;
    const TIOCGPTPEER: usize = 0x5441;
    let unlock: i32 = 0;
    // SAFETY: TIOCSPTLCK reads one i32, which lives across the call.
    unsafe { call(number::IOCTL, [master.argument(), TIOCSPTLCK, &raw const unlock as usize]) }?;
    let flags = O_RDWR | O_NOCTTY | O_CLOEXEC;
    // SAFETY: TIOCGPTPEER takes open flags, a number.
    unsafe { call(number::IOCTL, [master.argument(), TIOCGPTPEER, flags as usize]) }.map(Fd::from_call)
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
