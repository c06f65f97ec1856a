//! System calls of attacks without a safe wrapper: keyrings, frames on a link, and calls that only show which
//! mechanism refuses them. This is the only `unsafe` code of the probe; it is safe for its own memory, while
//! the effect on the node is the purpose.
#![expect(unsafe_code, reason = "system calls without a safe wrapper in nix or rustix")]

use std::ffi::CString;

use nix::errno::Errno;
use nix::libc::{self, c_long};

/// `keyctl(2)`: KEYCTL_GET_KEYRING_ID.
const GET_KEYRING_ID: c_long = 0;
/// `keyctl(2)`: KEYCTL_JOIN_SESSION_KEYRING.
const JOIN_SESSION_KEYRING: c_long = 1;
/// `keyctl(2)`: KEYCTL_SEARCH.
const SEARCH: c_long = 10;
/// `keyctl(2)`: KEYCTL_READ.
const READ: c_long = 11;
/// `keyctl(2)`: KEYCTL_LINK.
const LINK: c_long = 8;

fn answer(value: c_long) -> Result<i64, Errno> {
    // `c_long` is i64 on both targets, and i32 where this is built for 32-bit arm.
    #[allow(clippy::useless_conversion, reason = "it is another type on 32-bit targets")]
    Errno::result(value).map(i64::from)
}

fn text(text: &str) -> Result<CString, Errno> {
    CString::new(text).map_err(|_| Errno::EINVAL)
}

/// `add_key(2)` of a key of type `user`.
///
/// # Errors
/// What the kernel, or a filter before it, answers.
pub(crate) fn add_key(name: &str, payload: &str, ring: i32) -> Result<i64, Errno> {
    let (kind, name) = (text("user")?, text(name)?);
    // SAFETY: two terminated strings and a buffer with its length, all of which live through the call.
    answer(unsafe {
        libc::syscall(
            libc::SYS_add_key,
            kind.as_ptr(),
            name.as_ptr(),
            payload.as_ptr(),
            payload.len(),
            c_long::from(ring),
        )
    })
}

/// The serial of a keyring, given by its special number.
///
/// # Errors
/// The error of the kernel or of a seccomp filter.
pub(crate) fn ring_id(ring: i32) -> Result<i64, Errno> {
    // SAFETY: numbers only.
    answer(unsafe { libc::syscall(libc::SYS_keyctl, GET_KEYRING_ID, c_long::from(ring), c_long::from(0)) })
}

/// Whether the session keyring is another than that of the user's sessions, which a process without one gets.
///
/// # Errors
/// The error of the kernel or of a seccomp filter.
pub(crate) fn has_own_session() -> Result<bool, Errno> {
    const SESSION: i32 = -3;
    const OF_USER: i32 = -5;
    Ok(ring_id(SESSION)? != ring_id(OF_USER)?)
}

/// Joins the session keyring of this name; creates it if missing.
///
/// # Errors
/// The error of the kernel or of a seccomp filter.
pub(crate) fn join_session(name: &str) -> Result<i64, Errno> {
    let name = text(name)?;
    // SAFETY: a terminated string, which lives through the call.
    answer(unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, name.as_ptr()) })
}

/// Joins a new session keyring without a name.
///
/// # Errors
/// The error of the kernel.
pub(crate) fn new_session() -> Result<i64, Errno> {
    harmless(libc::SYS_keyctl, JOIN_SESSION_KEYRING, 0)
}

/// Searches for the `user` key of this name in a keyring and in the keyrings linked to it; returns its
/// serial.
///
/// # Errors
/// The error of the kernel or of a seccomp filter.
pub(crate) fn search(ring: i64, name: &str) -> Result<i64, Errno> {
    let (kind, name) = (text("user")?, text(name)?);
    // SAFETY: two terminated strings, which live through the call, and numbers.
    answer(unsafe {
        libc::syscall(libc::SYS_keyctl, SEARCH, ring, kind.as_ptr(), name.as_ptr(), c_long::from(0))
    })
}

/// Links a key to a keyring.
///
/// # Errors
/// The error of the kernel or of a seccomp filter.
pub(crate) fn link_key(key: i64, ring: i32) -> Result<i64, Errno> {
    // SAFETY: numbers only.
    answer(unsafe { libc::syscall(libc::SYS_keyctl, LINK, key, c_long::from(ring)) })
}

/// The content of a key, at most 256 bytes.
///
/// # Errors
/// The error of the kernel or of a seccomp filter.
pub(crate) fn read_key(key: i64) -> Result<Vec<u8>, Errno> {
    let mut buffer = vec![0_u8; 256];
    // SAFETY: a buffer with its length, of which the kernel fills no more.
    let length =
        answer(unsafe { libc::syscall(libc::SYS_keyctl, READ, key, buffer.as_mut_ptr(), buffer.len()) })?;
    buffer.truncate(length as usize);
    Ok(buffer)
}

/// Name, number and the first two arguments; all others are null. The kernel returns EINVAL, EFAULT, EBADF or
/// EOPNOTSUPP for each, or the call succeeds without effect.
const CALLS: [(&str, c_long, c_long, c_long); 30] = [
    ("io_uring_setup", libc::SYS_io_uring_setup, 0, 0),
    ("io_uring_enter", libc::SYS_io_uring_enter, -1, 0),
    ("io_uring_register", libc::SYS_io_uring_register, -1, 0),
    ("bpf", libc::SYS_bpf, 9999, 0),
    ("userfaultfd", libc::SYS_userfaultfd, 0xff, 0),
    ("perf_event_open", libc::SYS_perf_event_open, 0, 0),
    ("keyctl", libc::SYS_keyctl, 9999, 0),
    ("add_key", libc::SYS_add_key, 0, 0),
    ("request_key", libc::SYS_request_key, 0, 0),
    ("open_by_handle_at", libc::SYS_open_by_handle_at, -1, 0),
    ("kexec_load", libc::SYS_kexec_load, 0, 0),
    ("init_module", libc::SYS_init_module, 0, 0),
    ("finit_module", libc::SYS_finit_module, -1, 0),
    ("delete_module", libc::SYS_delete_module, 0, 0),
    ("mount", libc::SYS_mount, 0, 0),
    ("umount2", libc::SYS_umount2, 0, 0),
    ("pivot_root", libc::SYS_pivot_root, 0, 0),
    ("open_tree", libc::SYS_open_tree, -1, 0),
    ("move_mount", libc::SYS_move_mount, -1, 0),
    ("fsopen", libc::SYS_fsopen, 0, 0),
    ("fsconfig", libc::SYS_fsconfig, -1, 0),
    ("mount_setattr", libc::SYS_mount_setattr, -1, 0),
    ("setns", libc::SYS_setns, -1, 0),
    ("unshare", libc::SYS_unshare, 0x1000_0000, 0),
    ("swapon", libc::SYS_swapon, 0, 0),
    ("quotactl", libc::SYS_quotactl, -1, 0),
    ("fanotify_init", libc::SYS_fanotify_init, 0xffff, 0),
    ("syslog", libc::SYS_syslog, 3, 0),
    ("lookup_dcookie", libc::SYS_lookup_dcookie, 0, 0),
    ("move_pages", libc::SYS_move_pages, 0, 0),
];

/// Socket families that no container needs: AF_ALG (CVE-2026-31431), AF_VSOCK.
const FAMILIES: [(&str, c_long); 2] = [("AF_ALG", 38), ("AF_VSOCK", 40)];

/// Makes all these calls; returns the result of the kernel or of a seccomp filter.
pub(crate) fn calls_to_be_refused() -> Vec<(&'static str, Result<i64, Errno>)> {
    let calls = CALLS.map(|(name, number, first, second)| (name, harmless(number, first, second)));
    let seqpacket = c_long::from(libc::SOCK_SEQPACKET);
    let families = FAMILIES.map(|(name, family)| (name, harmless(libc::SYS_socket, family, seqpacket)));
    calls.into_iter().chain(families).collect()
}

/// Makes a system call whose pointers are all null: no memory of this process can be accessed, and the
/// kernel's error differs from the filter's.
fn harmless(number: c_long, first: c_long, second: c_long) -> Result<i64, Errno> {
    // SAFETY: all callers are in this file and pass calls for which these numbers and null pointers are refused, or that
    // change no memory of this process.
    answer(unsafe {
        let none = c_long::from(0);
        libc::syscall(number, first, second, none, none, none, none)
    })
}

/// Makes any system call with arguments that are no address, no descriptor and no valid number.
///
/// # Errors
/// What the kernel, or a filter before it, answers.
pub(crate) fn call(number: u32) -> Result<i64, Errno> {
    const NONE: c_long = -1;
    // SAFETY: the last page of the address space is no process's: the kernel can neither read nor write through these.
    answer(unsafe { libc::syscall(c_long::from(number), NONE, NONE, NONE, NONE, NONE, NONE) })
}

/// Makes a datagram socket of this address family, and closes it.
///
/// # Errors
/// What the kernel, or a filter before it, answers.
pub(crate) fn socket(family: i32) -> Result<(), Errno> {
    let made = harmless(libc::SYS_socket, c_long::from(family), c_long::from(libc::SOCK_DGRAM))?;
    // SAFETY: the descriptor is from this function and has no other owner.
    unsafe { libc::close(made as libc::c_int) };
    Ok(())
}

/// Sends one packet of a protocol (`ETH_P_…`) on the link `index` to the hardware address `to`.
///
/// # Errors
/// What the kernel, or a filter before it, answers.
pub(crate) fn send_packet(protocol: i32, index: u32, to: [u8; 6], packet: &[u8]) -> Result<usize, Errno> {
    send_by(libc::SOCK_DGRAM, protocol, index, to, packet)
}

/// Sends one frame with its own header on the link `index`.
///
/// # Errors
/// What the kernel, or a filter before it, answers.
pub(crate) fn send_frame(index: u32, frame: &[u8]) -> Result<usize, Errno> {
    send_by(libc::SOCK_RAW, libc::ETH_P_ALL, index, [0; 6], frame)
}

fn send_by(kind: i32, protocol: i32, index: u32, to: [u8; 6], packet: &[u8]) -> Result<usize, Errno> {
    let protocol = (protocol as u16).to_be();
    // SAFETY: numbers only.
    let socket = answer(unsafe {
        libc::syscall(libc::SYS_socket, libc::AF_PACKET, kind, libc::c_int::from(protocol))
    })? as libc::c_int;
    let mut hardware = [0; 8];
    hardware[..6].copy_from_slice(&to);
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: protocol,
        sll_ifindex: index as i32,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 6,
        sll_addr: hardware,
    };
    let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: a buffer and an address, each with its length, which live through the call.
    let sent = unsafe {
        libc::sendto(socket, packet.as_ptr().cast(), packet.len(), 0, (&raw const address).cast(), length)
    };
    let sent = Errno::result(sent);
    // SAFETY: the descriptor is from this function and has no other owner.
    unsafe { libc::close(socket) };
    sent.map(|sent| sent as usize)
}

/// Sets the I/O class of another process: `ioprio_set(2)`, IOPRIO_WHO_PROCESS, idle.
///
/// # Errors
/// What the kernel, or a filter before it, answers.
pub(crate) fn set_idle_io(pid: i32) -> Result<i64, Errno> {
    const WHO_PROCESS: c_long = 1;
    const IDLE: c_long = 3 << 13;
    // SAFETY: numbers only, of a call that takes no pointer.
    answer(unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, c_long::from(pid), IDLE) })
}

/// Name, number and first two arguments of system calls of i386 (arch/x86/entry/syscalls/syscall_32.tbl), as in [`CALLS`].
/// `socketcall` reads its arguments from memory.
#[cfg(target_arch = "x86_64")]
const I386: [(&str, u32, u32, u32); 36] = [
    ("mount", 21, 0, 0),
    ("umount", 22, 0, 0),
    ("umount2", 52, 0, 0),
    ("swapon", 87, 0, 0),
    ("reboot", 88, 0, 0),
    ("syslog", 103, 3, 0),
    ("iopl", 110, 9, 0),
    ("vm86old", 113, 0, 0),
    ("init_module", 128, 0, 0),
    ("delete_module", 129, 0, 0),
    ("quotactl", 131, 0xffff_ffff, 0),
    ("vm86", 166, 9, 0),
    ("pivot_root", 217, 0, 0),
    ("lookup_dcookie", 253, 0, 0),
    ("kexec_load", 283, 0, 0),
    ("add_key", 286, 0, 0),
    ("request_key", 287, 0, 0),
    ("keyctl", 288, 9999, 0),
    ("unshare", 310, 0x1000_0000, 0),
    ("move_pages", 317, 0, 0),
    ("perf_event_open", 336, 0, 0),
    ("fanotify_init", 338, 0xffff, 0),
    ("open_by_handle_at", 342, 0xffff_ffff, 0),
    ("setns", 346, 0xffff_ffff, 0),
    ("finit_module", 350, 0xffff_ffff, 0),
    ("bpf", 357, 9999, 0),
    ("AF_ALG", 359, 38, 5),
    ("AF_VSOCK", 359, 40, 5),
    ("userfaultfd", 374, 0xff, 0),
    ("io_uring_setup", 425, 0, 0),
    ("io_uring_enter", 426, 0xffff_ffff, 0),
    ("open_tree", 428, 0xffff_ffff, 0),
    ("move_mount", 429, 0xffff_ffff, 0),
    ("fsopen", 430, 0, 0),
    ("fsconfig", 431, 0xffff_ffff, 0),
    ("mount_setattr", 442, 0xffff_ffff, 0),
];

/// Makes a system call by the entry of i386. No argument is an address of this process.
#[cfg(target_arch = "x86_64")]
fn by_i386(number: u32, first: u32, second: u32) -> Result<i64, Errno> {
    let mut result = u64::from(number);
    // SAFETY: the kernel keeps all registers but rax, and by this entry clears r8 to r11 on old kernels; rbx, which the
    // compiler may use itself, is exchanged back. The stack below is not used.
    unsafe {
        std::arch::asm!(
            "xchg {first}, rbx",
            "int 0x80",
            "xchg {first}, rbx",
            first = inout(reg) u64::from(first) => _,
            inout("rax") result,
            in("rcx") u64::from(second),
            in("rdx") 0_u64,
            in("rsi") 0_u64,
            in("rdi") 0_u64,
            out("r8") _,
            out("r9") _,
            out("r10") _,
            out("r11") _,
        );
    }
    // The result has 32 bits, with a sign.
    answer(match result as u32 as i32 {
        errno @ -4095..=-1 => return Err(Errno::from_raw(-errno)),
        value => c_long::from(value),
    })
}

/// Makes the calls of this file, and `socketcall` for the refused address families, by the entry of i386 (`int 0x80`).
#[cfg(target_arch = "x86_64")]
pub(crate) fn calls_by_i386() -> Vec<(&'static str, Result<i64, Errno>)> {
    let calls = I386.map(|(name, number, first, second)| (name, by_i386(number, first, second)));
    calls.into_iter().chain([("socketcall", by_i386(102, 1, 0))]).collect()
}

/// Makes the calls of this file with the bit of x32 in their number.
#[cfg(target_arch = "x86_64")]
pub(crate) fn calls_by_x32() -> Vec<(&'static str, Result<i64, Errno>)> {
    const X32: c_long = 0x4000_0000;
    CALLS.map(|(name, number, first, second)| (name, harmless(number | X32, first, second))).into()
}

/// Other machines have no entry of i386.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn calls_by_i386() -> Vec<(&'static str, Result<i64, Errno>)> {
    Vec::new()
}

/// Other machines have no x32.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn calls_by_x32() -> Vec<(&'static str, Result<i64, Errno>)> {
    Vec::new()
}

/// Whose core dump the kernel would write if the process were killed by a fault now: `none`, `user` or `root`
/// (PIDFD_GET_INFO with PIDFD_INFO_COREDUMP, since Linux 6.16); `None` if the kernel does not say.
///
/// # Errors
/// The process does not exist.
pub(crate) fn dump_mode(pid: i32) -> Result<Option<&'static str>, Errno> {
    /// `struct pidfd_info` with the fields up to `coredump_signal`.
    const WORDS: usize = 9;
    const GET_INFO: u32 = 3 << 30 | (8 * WORDS as u32) << 16 | 0xff << 8 | 11;
    const COREDUMP: u64 = 1 << 4;
    const MODES: [(u32, &str); 3] = [(1 << 1, "none"), (1 << 2, "user"), (1 << 3, "root")];
    let mut info = [0_u64; WORDS];
    info[0] = COREDUMP;
    // SAFETY: numbers only.
    let process = answer(unsafe { libc::syscall(libc::SYS_pidfd_open, c_long::from(pid), c_long::from(0)) })?;
    let process = process as libc::c_int;
    // SAFETY: the number of the call contains the length of the array, of which the kernel writes no more.
    let asked = Errno::result(unsafe { libc::ioctl(process, GET_INFO as _, info.as_mut_ptr()) });
    // SAFETY: the descriptor is from this function and has no other owner.
    unsafe { libc::close(process) };
    if asked.is_err() || info[0] & COREDUMP == 0 {
        return Ok(None);
    }
    let mask = info[8] as u32;
    Ok(MODES.iter().find(|(bit, _)| mask & bit != 0).map(|(_, name)| *name))
}
