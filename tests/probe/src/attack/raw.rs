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
