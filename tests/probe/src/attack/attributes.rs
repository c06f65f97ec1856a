//! The attributes of inodes: a mount or descriptor whose inode is shared with the node lets root in a container
//! change the node's file without writing to it. Every change sets the value that is already there, so that a
//! success leaves no trace.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rustix::fs::{AtFlags, CWD, FlockOperation, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;

use super::verdict;
use crate::see::Outcome;

/// Extended attributes: one that root in a container may set on any file (capabilities(7), "File capability extended attribute
/// versioning"), one for CAP_SYS_ADMIN, and one for the owner of a file or directory.
const ATTRIBUTES: [(&str, &[u8]); 3] = [
    ("security.capability", b"\x00\x00\x00\x02\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"),
    ("trusted.coracle-test", b"x"),
    ("user.coracle-test", b"x"),
];

/// Tries all changes at the root of every mount, through every descriptor, and at these paths. Each verdict ends with the device number
/// of the file system and the path. A line `saw inode DEVICE INODE PATH` comes before them.
pub(crate) fn all(paths: &[&str]) -> Outcome {
    let text = fs::read_to_string("/proc/self/mountinfo").map_err(|error| format!("mountinfo: {error}"))?;
    for line in text.lines() {
        // ID PARENT DEVICE ROOT PLACE …
        let words: Vec<&str> = line.split(' ').collect();
        let [_, _, device, _, place, ..] = words[..] else { continue };
        change(place, device);
    }
    for number in 0..64 {
        let path = format!("/proc/self/fd/{number}");
        // A pipe is the container's own.
        let Ok(about) = fs::metadata(&path) else { continue };
        if !about.file_type().is_fifo() {
            change(&path, &device_of(&about));
        }
    }
    for path in paths {
        if let Ok(about) = fs::metadata(path) {
            change(path, &device_of(&about));
        }
    }
    Ok(0)
}

/// The device number of a file's file system.
fn device_of(about: &fs::Metadata) -> String {
    let device = about.dev();
    format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device))
}

fn change(path: &str, device: &str) {
    let Ok(about) = fs::metadata(path) else {
        println!("saw nothing at {device} {path}");
        return;
    };
    println!("saw inode {} {} {path}", device_of(&about), about.ino());
    let tell = |what: &str, done: Result<(), Errno>| verdict(&format!("{what} {device} {path}"), done);
    let mode = Mode::from_raw_mode(about.mode() & 0o7777);
    tell("chmod", rustix::fs::chmodat(CWD, path, mode, AtFlags::empty()));
    let owner = (Uid::from_raw(about.uid()), Gid::from_raw(about.gid()));
    tell("chown", rustix::fs::chownat(CWD, path, Some(owner.0), Some(owner.1), AtFlags::empty()));
    let time = |seconds, nanoseconds| Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
    let times = Timestamps {
        last_access: time(about.atime(), about.atime_nsec()),
        last_modification: time(about.mtime(), about.mtime_nsec()),
    };
    tell("utimes", rustix::fs::utimensat(CWD, path, &times, AtFlags::empty()));
    for (name, value) in ATTRIBUTES {
        let set = rustix::fs::setxattr(path, name, value, XattrFlags::CREATE);
        if set.is_ok() {
            let _ = rustix::fs::removexattr(path, name);
        }
        tell(&format!("setxattr-{name}"), set);
    }
    tell(
        "lock",
        open(path).and_then(|file| rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive)),
    );
    tell("lock-range", open(path).and_then(|file| lock_range(&file)));
    let flags = open(path).and_then(|file| Ok((rustix::fs::ioctl_getflags(&file)?, file)));
    tell("ioctl", flags.and_then(|(flags, file)| rustix::fs::ioctl_setflags(file, flags)));
    if about.is_file() {
        let truncated = fs::File::options().write(true).open(path).and_then(|file| file.set_len(about.len()));
        verdict(&format!("truncate {device} {path}"), truncated);
    }
    let removed = match about.is_dir() {
        true => fs::remove_dir(path),
        false => fs::remove_file(Path::new(path)),
    };
    verdict(&format!("unlink {device} {path}"), removed);
}

fn open(path: &str) -> Result<OwnedFd, Errno> {
    // Of a directory, a FIFO or a terminal as well.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty())
}

/// A lock of the first byte that belongs to the open file (fcntl(2), F_OFD_SETLK); one for reading, which needs no right to write.
fn lock_range(file: &OwnedFd) -> Result<(), Errno> {
    let lock = libc::flock {
        l_type: libc::F_RDLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 1,
        l_pid: 0,
    };
    let done = fcntl(file, FcntlArg::F_OFD_SETLK(&lock)).map(drop);
    done.map_err(|errno| Errno::from_raw_os_error(errno as i32))
}
