//! The errors that are injected: for each system call some that its manual page allows, one that lasts (EIO, ENOSPC, EDQUOT) and one that
//! passes (ENOMEM, EMFILE, EAGAIN, EINTR, ENOBUFS) where there are both.
//!
//! Not injected are errors of close, which frees the descriptor in any case; of calls that can fail only because of their
//! arguments (getpid, kill, rt_sigaction); and of brk and mmap, because a Rust program that gets no memory ends.

use nix::errno::Errno::{
    self, EAGAIN, EDQUOT, EINTR, EIO, EMFILE, ENFILE, ENOBUFS, ENOLCK, ENOMEM, ENOSPC, EPERM,
};
use nix::libc;
use nix::sys::ptrace;
use nix::unistd::Pid;

type Errors = &'static [Errno];

/// Opening, reading and writing files.
const FILES: [(&str, i64, Errors); 41] = [
    ("open", libc::SYS_open, &[EIO, EMFILE, ENOMEM]),
    ("openat", libc::SYS_openat, &[EIO, EMFILE, ENOMEM]),
    ("openat2", libc::SYS_openat2, &[EIO, EMFILE, EAGAIN]),
    ("read", libc::SYS_read, &[EIO, EINTR]),
    ("readv", libc::SYS_readv, &[EIO, EINTR]),
    ("pread64", libc::SYS_pread64, &[EIO, EINTR]),
    ("write", libc::SYS_write, &[EIO, ENOSPC, EDQUOT, EINTR]),
    ("writev", libc::SYS_writev, &[EIO, ENOSPC, EINTR]),
    ("pwrite64", libc::SYS_pwrite64, &[EIO, ENOSPC, EDQUOT, EINTR]),
    ("copy_file_range", libc::SYS_copy_file_range, &[EIO, ENOSPC, ENOMEM]),
    ("sendfile", libc::SYS_sendfile, &[EIO, ENOMEM]),
    ("splice", libc::SYS_splice, &[ENOMEM]),
    ("fsync", libc::SYS_fsync, &[EIO, ENOSPC, EINTR]),
    ("fdatasync", libc::SYS_fdatasync, &[EIO, ENOSPC, EINTR]),
    ("sync_file_range", libc::SYS_sync_file_range, &[EIO, ENOMEM]),
    ("ftruncate", libc::SYS_ftruncate, &[EIO, EINTR]),
    ("fallocate", libc::SYS_fallocate, &[ENOSPC, EDQUOT, EINTR]),
    ("stat", libc::SYS_stat, &[EIO, ENOMEM]),
    ("lstat", libc::SYS_lstat, &[EIO, ENOMEM]),
    ("fstat", libc::SYS_fstat, &[EIO, ENOMEM]),
    ("newfstatat", libc::SYS_newfstatat, &[EIO, ENOMEM]),
    ("statx", libc::SYS_statx, &[EIO, ENOMEM]),
    ("statfs", libc::SYS_statfs, &[EIO, ENOMEM, EINTR]),
    ("fstatfs", libc::SYS_fstatfs, &[EIO, ENOMEM, EINTR]),
    ("access", libc::SYS_access, &[EIO, ENOMEM]),
    ("faccessat", libc::SYS_faccessat, &[EIO, ENOMEM]),
    ("readlink", libc::SYS_readlink, &[EIO, ENOMEM]),
    ("readlinkat", libc::SYS_readlinkat, &[EIO, ENOMEM]),
    ("getdents64", libc::SYS_getdents64, &[EIO, ENOMEM]),
    ("mkdir", libc::SYS_mkdir, &[ENOSPC, EDQUOT, ENOMEM]),
    ("mkdirat", libc::SYS_mkdirat, &[ENOSPC, EDQUOT, ENOMEM]),
    ("mknodat", libc::SYS_mknodat, &[ENOSPC, ENOMEM]),
    ("symlinkat", libc::SYS_symlinkat, &[EIO, ENOSPC, ENOMEM]),
    ("linkat", libc::SYS_linkat, &[EIO, ENOSPC, ENOMEM]),
    ("rename", libc::SYS_rename, &[EIO, ENOSPC, ENOMEM]),
    ("renameat", libc::SYS_renameat, &[EIO, ENOSPC, ENOMEM]),
    ("renameat2", libc::SYS_renameat2, &[EIO, ENOSPC, ENOMEM]),
    ("unlink", libc::SYS_unlink, &[EIO, ENOMEM]),
    ("unlinkat", libc::SYS_unlinkat, &[EIO, ENOMEM]),
    ("rmdir", libc::SYS_rmdir, &[EIO, ENOMEM]),
    ("flock", libc::SYS_flock, &[ENOLCK, EINTR]),
];

/// Attributes of files and directories.
const ATTRIBUTES: [(&str, i64, Errors); 17] = [
    ("chmod", libc::SYS_chmod, &[EIO, ENOMEM]),
    ("fchmod", libc::SYS_fchmod, &[EIO, ENOMEM]),
    ("fchmodat", libc::SYS_fchmodat, &[EIO, ENOMEM]),
    ("chown", libc::SYS_chown, &[EIO, ENOMEM]),
    ("fchown", libc::SYS_fchown, &[EIO, ENOMEM]),
    ("fchownat", libc::SYS_fchownat, &[EIO, ENOMEM]),
    ("utimensat", libc::SYS_utimensat, &[EIO, ENOMEM]),
    ("setxattr", libc::SYS_setxattr, &[ENOSPC, ENOMEM]),
    ("lsetxattr", libc::SYS_lsetxattr, &[ENOSPC, ENOMEM]),
    ("fsetxattr", libc::SYS_fsetxattr, &[ENOSPC, ENOMEM]),
    ("getxattr", libc::SYS_getxattr, &[EIO, ENOMEM]),
    ("fgetxattr", libc::SYS_fgetxattr, &[EIO, ENOMEM]),
    ("chdir", libc::SYS_chdir, &[EIO, ENOMEM]),
    ("fchdir", libc::SYS_fchdir, &[EIO, ENOMEM]),
    ("chroot", libc::SYS_chroot, &[EIO, ENOMEM]),
    ("inotify_init1", libc::SYS_inotify_init1, &[EMFILE, ENOMEM]),
    ("inotify_add_watch", libc::SYS_inotify_add_watch, &[ENOSPC, ENOMEM]),
];

/// Descriptors, sockets and waiting.
const DESCRIPTORS: [(&str, i64, Errors); 27] = [
    ("dup", libc::SYS_dup, &[EMFILE]),
    ("dup3", libc::SYS_dup3, &[EMFILE, EINTR]),
    ("pipe2", libc::SYS_pipe2, &[EMFILE, ENFILE]),
    ("eventfd2", libc::SYS_eventfd2, &[EMFILE, ENOMEM]),
    ("timerfd_create", libc::SYS_timerfd_create, &[EMFILE, ENOMEM]),
    ("signalfd4", libc::SYS_signalfd4, &[EMFILE, ENOMEM]),
    ("memfd_create", libc::SYS_memfd_create, &[EMFILE, ENOMEM]),
    ("epoll_create1", libc::SYS_epoll_create1, &[EMFILE, ENOMEM]),
    ("epoll_ctl", libc::SYS_epoll_ctl, &[ENOSPC, ENOMEM]),
    ("epoll_wait", libc::SYS_epoll_wait, &[EINTR]),
    ("epoll_pwait", libc::SYS_epoll_pwait, &[EINTR]),
    ("epoll_pwait2", libc::SYS_epoll_pwait2, &[EINTR]),
    ("poll", libc::SYS_poll, &[ENOMEM, EINTR]),
    ("ppoll", libc::SYS_ppoll, &[ENOMEM, EINTR]),
    ("socket", libc::SYS_socket, &[EMFILE, ENOBUFS, ENOMEM]),
    ("socketpair", libc::SYS_socketpair, &[EMFILE, ENOMEM]),
    ("bind", libc::SYS_bind, &[EIO, ENOMEM]),
    ("connect", libc::SYS_connect, &[EAGAIN, EINTR]),
    ("accept4", libc::SYS_accept4, &[EMFILE, ENOBUFS, EINTR]),
    ("setsockopt", libc::SYS_setsockopt, &[ENOBUFS, ENOMEM]),
    ("getsockopt", libc::SYS_getsockopt, &[ENOBUFS, ENOMEM]),
    ("sendto", libc::SYS_sendto, &[ENOBUFS, ENOMEM, EINTR]),
    ("sendmsg", libc::SYS_sendmsg, &[ENOBUFS, ENOMEM, EINTR]),
    ("recvfrom", libc::SYS_recvfrom, &[ENOMEM, EINTR]),
    ("recvmsg", libc::SYS_recvmsg, &[ENOMEM, EINTR]),
    ("ioctl", libc::SYS_ioctl, &[EIO, ENOMEM, EINTR]),
    ("getrandom", libc::SYS_getrandom, &[EINTR]),
];

/// Reading and writing sockets: what recv(2) and send(2) allow. The same calls on a pipe can only be interrupted.
const SOCKETS: [(&str, i64, Errors); 4] = [
    ("read", libc::SYS_read, &[ENOMEM, EINTR]),
    ("readv", libc::SYS_readv, &[ENOMEM, EINTR]),
    ("write", libc::SYS_write, &[ENOBUFS, EINTR]),
    ("writev", libc::SYS_writev, &[ENOBUFS, EINTR]),
];

/// Processes, namespaces and mounts.
const PROCESSES: [(&str, i64, Errors); 26] = [
    ("clone", libc::SYS_clone, &[EAGAIN, ENOMEM]),
    ("clone3", libc::SYS_clone3, &[EAGAIN, ENOMEM]),
    ("fork", libc::SYS_fork, &[EAGAIN, ENOMEM]),
    ("vfork", libc::SYS_vfork, &[EAGAIN, ENOMEM]),
    ("execve", libc::SYS_execve, &[EIO, EMFILE, ENOMEM]),
    ("execveat", libc::SYS_execveat, &[EIO, EMFILE, ENOMEM]),
    ("waitid", libc::SYS_waitid, &[EINTR]),
    ("wait4", libc::SYS_wait4, &[EINTR]),
    // A security module may refuse a signal.
    ("pidfd_send_signal", libc::SYS_pidfd_send_signal, &[EPERM]),
    ("pidfd_open", libc::SYS_pidfd_open, &[EMFILE, ENOMEM]),
    ("unshare", libc::SYS_unshare, &[ENOSPC, ENOMEM]),
    ("setns", libc::SYS_setns, &[ENOMEM]),
    ("mount", libc::SYS_mount, &[ENOSPC, ENOMEM]),
    ("umount2", libc::SYS_umount2, &[ENOMEM]),
    ("pivot_root", libc::SYS_pivot_root, &[ENOMEM]),
    ("open_tree", libc::SYS_open_tree, &[EMFILE, ENOMEM]),
    ("move_mount", libc::SYS_move_mount, &[ENOSPC, ENOMEM]),
    ("fsopen", libc::SYS_fsopen, &[EMFILE, ENOMEM]),
    ("fsconfig", libc::SYS_fsconfig, &[EIO, ENOMEM]),
    ("fsmount", libc::SYS_fsmount, &[EMFILE, ENOSPC, ENOMEM]),
    ("mount_setattr", libc::SYS_mount_setattr, &[ENOMEM]),
    ("bpf", libc::SYS_bpf, &[ENOMEM]),
    ("seccomp", libc::SYS_seccomp, &[ENOMEM]),
    ("add_key", libc::SYS_add_key, &[ENOMEM]),
    ("keyctl", libc::SYS_keyctl, &[ENOMEM, EINTR]),
    ("nanosleep", libc::SYS_nanosleep, &[EINTR]),
];

/// The index of an error among those of a call on files, which was seen with so many of them.
pub(crate) fn index_of(call: &str, count: usize, error: Errno) -> Option<usize> {
    let name = call.split('(').next()?;
    let is_it = |(other, _, errors): &&(&str, i64, Errors)| *other == name && errors.len() == count;
    FILES.iter().find(is_it)?.2.iter().position(|other| *other == error)
}

/// The name of the system call that a process begins, and the errors with which it may fail; `None` if it is not to fail.
pub(crate) fn of(pid: Pid) -> Option<(&'static str, Errors)> {
    let registers = ptrace::getregs(pid).ok()?;
    let number = registers.orig_rax;
    let of_sockets = SOCKETS.iter().find(|(_, other, _)| *other as u64 == number);
    if let Some((name, _, errors)) = of_sockets {
        match file(pid, registers.rdi).unwrap_or_default().split(':').next() {
            Some("socket") => return Some((name, errors)),
            Some("pipe") => return Some((name, &[EINTR])),
            _ => {}
        }
    }
    let mut all = FILES.iter().chain(&ATTRIBUTES).chain(&DESCRIPTORS).chain(&PROCESSES);
    all.find(|(_, other, _)| *other as u64 == number).map(|(name, _, errors)| (*name, *errors))
}

/// Replaces the call that a process begins by close(-1), which any seccomp filter allows; returns the first argument, for
/// [`answer`]. The number -1 would also prevent the call, but is refused by filters.
pub(crate) fn skip(pid: Pid) -> u64 {
    let Ok(mut registers) = ptrace::getregs(pid) else { return 0 };
    let argument = registers.rdi;
    registers.orig_rax = libc::SYS_close as u64;
    registers.rdi = u64::MAX;
    let _ = ptrace::setregs(pid, registers); // it has been killed
    argument
}

/// Ends the call of a process with this error, and restores the first argument.
pub(crate) fn answer(pid: Pid, error: Errno, argument: u64) {
    if let Ok(mut registers) = ptrace::getregs(pid) {
        registers.rax = -i64::from(error as i32) as u64;
        registers.rdi = argument;
        let _ = ptrace::setregs(pid, registers); // it has been killed
    }
}

/// The arguments of the call that a process begins: its descriptor and its path, if they look like that.
pub(crate) fn arguments(pid: Pid) -> String {
    let Ok(registers) = ptrace::getregs(pid) else { return String::new() };
    let file = file(pid, registers.rdi);
    let texts = [registers.rdi, registers.rsi].map(|address| text_at(pid, address));
    let shown: Vec<String> = file.into_iter().chain(texts.into_iter().flatten()).collect();
    format!("({})", shown.join(", "))
}

/// File that a descriptor of a process refers to.
fn file(pid: Pid, descriptor: u64) -> Option<String> {
    let path = std::fs::read_link(format!("/proc/{pid}/fd/{descriptor}"));
    path.ok().map(|path| path.display().to_string())
}

/// The printable text at an address of a process.
fn text_at(pid: Pid, address: u64) -> Option<String> {
    use std::os::unix::fs::FileExt;
    let memory = std::fs::File::open(format!("/proc/{pid}/mem")).ok()?;
    let mut bytes = [0; 128];
    let read = memory.read_at(&mut bytes, address).ok()?;
    let text = bytes[..read].split(|byte| *byte == 0).next()?;
    let is_text = text.len() > 1 && text.iter().all(|byte| byte.is_ascii_graphic());
    is_text.then(|| String::from_utf8_lossy(text).into_owned())
}
