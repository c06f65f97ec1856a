//! AF_UNIX sockets that preserve message boundaries and pass descriptors, epoll and signalfd for event loops, and the
//! ioctl that sets a pod's loopback interface up.

use crate::arch::call;
use crate::process::Signals;
use crate::{Errno, Fd, FdRef, number};

const AF_UNIX: usize = 1;
const SOCK_SEQPACKET: usize = 5;
const SOCK_CLOEXEC: usize = 0o200_0000;
const SOCK_NONBLOCK: usize = 0o4000;
const SOL_SOCKET: i32 = 1;
const SCM_RIGHTS: i32 = 1;
/// Maximum length in bytes of a path in a `sockaddr_un`, including its NUL.
const PATH_BYTES_MAX: usize = 108;

/// Maximum number of descriptors in one message.
pub const DESCRIPTORS_MAX: usize = 8;

/// Opens a non-blocking SOCK_SEQPACKET socket.
pub fn seqpacket() -> Result<Fd, Errno> {
    // SAFETY: the call reads no memory.
    unsafe { call(number::SOCKET, [AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0]) }
        .map(Fd::from_call)
}

/// Opens two connected SOCK_SEQPACKET sockets.
pub fn seqpacket_pair() -> Result<(Fd, Fd), Errno> {
    let mut ends = [0_i32; 2];
    let kind = SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK;
    // SAFETY: the kernel writes two i32 to a local that lives across the call.
    unsafe { call(number::SOCKETPAIR, [AF_UNIX, kind, 0, ends.as_mut_ptr() as usize]) }?;
    Ok((Fd::from_call(ends[0] as usize), Fd::from_call(ends[1] as usize)))
}

/// Opens a non-blocking TCP socket in the current network namespace; the socket stays in it if it is passed to another
/// process.
pub fn tcp(is_ipv6: bool) -> Result<Fd, Errno> {
    const AF_INET: usize = 2;
    const AF_INET6: usize = 10;
    const SOCK_STREAM: usize = 1;
    let family = if is_ipv6 { AF_INET6 } else { AF_INET };
    // SAFETY: the call reads no memory.
    unsafe { call(number::SOCKET, [family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0]) }
        .map(Fd::from_call)
}

/// A socket address with a path, `struct sockaddr_un`.
#[repr(C)]
struct Address {
    family: u16,
    path: [u8; PATH_BYTES_MAX],
}

impl Address {
    fn new(path: &[u8]) -> Result<Self, Errno> {
        let mut address = Self { family: AF_UNIX as u16, path: [0; PATH_BYTES_MAX] };
        // One byte stays for the NUL.
        address.path[..PATH_BYTES_MAX - 1]
            .get_mut(..path.len())
            .ok_or(Errno::ENAMETOOLONG)?
            .copy_from_slice(path);
        Ok(address)
    }
}

/// Binds a socket to a path, at which it is created (bind(2)). ENAMETOOLONG from 108 bytes.
pub fn bind(socket: FdRef<'_>, path: &[u8]) -> Result<(), Errno> {
    let address = Address::new(path)?;
    let arguments = [socket.argument(), &raw const address as usize, size_of::<Address>()];
    // SAFETY: the kernel reads a `sockaddr_un` of the size given from a local that lives across the call.
    unsafe { call(number::BIND, arguments) }.map(drop)
}

/// Connects a socket to a path (connect(2)). ENAMETOOLONG from 108 bytes.
pub fn connect(socket: FdRef<'_>, path: &[u8]) -> Result<(), Errno> {
    let address = Address::new(path)?;
    let arguments = [socket.argument(), &raw const address as usize, size_of::<Address>()];
    // SAFETY: as for `bind`.
    unsafe { call(number::CONNECT, arguments) }.map(drop)
}

/// Accepts connections on a socket (listen(2)).
pub fn listen(socket: FdRef<'_>, backlog: u16) -> Result<(), Errno> {
    // SAFETY: the call reads no memory.
    unsafe { call(number::LISTEN, [socket.argument(), usize::from(backlog)]) }.map(drop)
}

/// Accepts a connection (accept4(2)); the new socket is non-blocking.
pub fn accept(socket: FdRef<'_>) -> Result<Fd, Errno> {
    // SAFETY: the peer's address is not asked for: both pointers are null.
    unsafe { call(number::ACCEPT4, [socket.argument(), 0, 0, SOCK_CLOEXEC | SOCK_NONBLOCK]) }
        .map(Fd::from_call)
}

/// `struct cmsghdr` with descriptors.
#[repr(C)]
struct Control {
    length: usize,
    level: i32,
    kind: i32,
    descriptors: [i32; DESCRIPTORS_MAX],
}

const CONTROL_HEADER_BYTES: usize = 16;

/// `struct msghdr`, with the padding after the two u32.
#[repr(C)]
struct Message {
    name: usize,
    name_length: usize,
    parts: usize,
    parts_count: usize,
    control: usize,
    control_length: usize,
    flags: usize,
}

/// Sends one message with up to [`DESCRIPTORS_MAX`] descriptors (sendmsg(2)); never blocks and never raises SIGPIPE.
/// Repeated if it is interrupted.
///
/// # Errors
/// EAGAIN if the socket buffer is full, EINVAL for too many descriptors.
pub fn send(socket: FdRef<'_>, bytes: &[u8], descriptors: &[FdRef<'_>]) -> Result<(), Errno> {
    const MSG_DONTWAIT_NOSIGNAL: usize = 0x40 | 0x4000;
    let length = CONTROL_HEADER_BYTES + 4 * descriptors.len();
    let mut control =
        Control { length, level: SOL_SOCKET, kind: SCM_RIGHTS, descriptors: [0; DESCRIPTORS_MAX] };
    let places = control.descriptors.get_mut(..descriptors.len()).ok_or(Errno::EINVAL)?;
    for (place, descriptor) in places.iter_mut().zip(descriptors) {
        *place = descriptor.number();
    }
    let part = [bytes.as_ptr() as usize, bytes.len()];
    let has_descriptors = !descriptors.is_empty();
    let message = Message {
        name: 0,
        name_length: 0,
        parts: part.as_ptr() as usize,
        parts_count: 1,
        control: if has_descriptors { &raw const control as usize } else { 0 },
        control_length: if has_descriptors { length.next_multiple_of(8) } else { 0 },
        flags: 0,
    };
    let arguments = [socket.argument(), &raw const message as usize, MSG_DONTWAIT_NOSIGNAL];
    loop {
        // SAFETY: `message` names one part, the borrowed slice, and `length` bytes of `control` (rounded up within it);
        // all live across the call, and the kernel only reads them.
        match unsafe { call(number::SENDMSG, arguments) } {
            Err(Errno::EINTR) => {}
            sent => return sent.map(drop),
        }
    }
}

/// The result of [`receive`].
#[derive(Debug, Default)]
pub struct Received {
    /// Length of the message in bytes; 0 at the end of the connection.
    pub length: usize,
    /// The descriptors, in order, followed by `None`.
    pub descriptors: [Option<Fd>; DESCRIPTORS_MAX],
}

/// Receives one message (recvmsg(2)); never blocks. Repeated if it is interrupted.
///
/// # Errors
/// EMSGSIZE if bytes or descriptors did not fit; received descriptors are then closed.
pub fn receive(socket: FdRef<'_>, buffer: &mut [u8]) -> Result<Received, Errno> {
    const MSG_DONTWAIT_CMSG_CLOEXEC: usize = 0x40 | 0x4000_0000;
    const MSG_TRUNC_CTRUNC: usize = 0x20 | 0x8;
    let mut control = Control { length: 0, level: 0, kind: 0, descriptors: [0; DESCRIPTORS_MAX] };
    let part = [buffer.as_mut_ptr() as usize, buffer.len()];
    let mut message = Message {
        name: 0,
        name_length: 0,
        parts: part.as_ptr() as usize,
        parts_count: 1,
        control: &raw mut control as usize,
        control_length: size_of::<Control>(),
        flags: 0,
    };
    let arguments = [socket.argument(), &raw mut message as usize, MSG_DONTWAIT_CMSG_CLOEXEC];
    let length = loop {
        // SAFETY: the kernel writes at most the slice's length into it, at most `control_length` bytes into `control`, and
        // the lengths and flags into `message`; all are borrowed mutably and live across the call.
        match unsafe { call(number::RECVMSG, arguments) } {
            Err(Errno::EINTR) => {}
            received => break received?,
        }
    };
    // SAFETY: an initialised local; volatile because the compiler did not see the kernel's write.
    let control = unsafe { (&raw const control).read_volatile() };
    // SAFETY: as above.
    let message = unsafe { (&raw const message).read_volatile() };
    let mut received = Received { length, ..Received::default() };
    if message.control_length > 0 && control.level == SOL_SOCKET && control.kind == SCM_RIGHTS {
        let count = control.length.saturating_sub(CONTROL_HEADER_BYTES) / 4;
        for (place, number) in received.descriptors.iter_mut().zip(control.descriptors).take(count) {
            *place = Some(Fd::from_call(number as usize));
        }
    }
    if message.flags & MSG_TRUNC_CTRUNC == 0 { Ok(received) } else { Err(Errno::EMSGSIZE) }
}

/// Event: the descriptor is readable or at its end.
pub const EPOLLIN: u32 = 1;
/// Event: the descriptor is writable.
pub const EPOLLOUT: u32 = 4;
/// Maximum number of events that one [`wait`] returns; the next call returns further events.
pub const EVENTS_MAX: usize = 16;

/// `struct epoll_event`: packed on x86_64 only.
#[cfg_attr(target_arch = "x86_64", repr(C, packed))]
#[cfg_attr(target_arch = "aarch64", repr(C))]
#[derive(Clone, Copy, Default)]
pub struct Event {
    events: u32,
    token: u64,
}

impl Event {
    /// The token with which the descriptor was registered.
    pub fn token(&self) -> u64 {
        self.token
    }

    /// Whether the event reports that the descriptor is writable.
    pub fn is_writable(&self) -> bool {
        self.events & EPOLLOUT != 0
    }

    /// Whether the event reports data, EOF or an error.
    pub fn is_readable(&self) -> bool {
        self.events & !EPOLLOUT != 0
    }
}

/// Creates an epoll instance (epoll_create1(2)).
pub fn epoll() -> Result<Fd, Errno> {
    // SAFETY: the call reads no memory.
    unsafe { call(number::EPOLL_CREATE1, [SOCK_CLOEXEC]) }.map(Fd::from_call)
}

fn epoll_control(epoll: FdRef<'_>, operation: usize, file: FdRef<'_>, event: Event) -> Result<(), Errno> {
    let arguments = [epoll.argument(), operation, file.argument(), &raw const event as usize];
    // SAFETY: the kernel reads one `epoll_event` from a local that lives across the call.
    unsafe { call(number::EPOLL_CTL, arguments) }.map(drop)
}

/// Registers `file` with epoll (level-triggered); its events contain `token`.
pub fn watch(epoll: FdRef<'_>, file: FdRef<'_>, events: u32, token: u64) -> Result<(), Errno> {
    epoll_control(epoll, 1, file, Event { events, token })
}

/// Changes the events for which `file` is registered.
pub fn watch_for(epoll: FdRef<'_>, file: FdRef<'_>, events: u32, token: u64) -> Result<(), Errno> {
    epoll_control(epoll, 3, file, Event { events, token })
}

/// Unregisters `file` from epoll. Required before the file is closed, because a copy in a child keeps the registration.
pub fn unwatch(epoll: FdRef<'_>, file: FdRef<'_>) -> Result<(), Errno> {
    epoll_control(epoll, 2, file, Event::default())
}

/// Waits for events (epoll_pwait(2)): returns pending events after at most `timeout_ms` milliseconds (-1: no timeout).
/// EINTR gives an empty result.
pub fn wait<'a>(
    epoll: FdRef<'_>,
    events: &'a mut [Event; EVENTS_MAX],
    timeout_ms: i32,
) -> Result<&'a [Event], Errno> {
    let arguments =
        [epoll.argument(), events.as_mut_ptr() as usize, EVENTS_MAX, timeout_ms as isize as usize, 0, 8];
    // SAFETY: the kernel writes at most EVENTS_MAX events into an array of that many, borrowed mutably; the signal mask
    // is null, which leaves it.
    match unsafe { call(number::EPOLL_PWAIT, arguments) } {
        Ok(count) => Ok(&events[..count]),
        Err(Errno::EINTR) => Ok(&[]),
        Err(errno) => Err(errno),
    }
}

/// Creates a non-blocking signalfd (signalfd4(2)) for `signals`, which must be blocked.
pub fn signal_fd(signals: Signals) -> Result<Fd, Errno> {
    let flags = SOCK_CLOEXEC | SOCK_NONBLOCK;
    // SAFETY: the kernel reads one u64, the size given, from a local that lives across the call.
    unsafe { call(number::SIGNALFD4, [usize::MAX, &raw const signals as usize, 8, flags]) }.map(Fd::from_call)
}

/// Reads one signal from a descriptor of [`signal_fd`]; `None` if no signal is pending.
pub fn next_signal(signal_fd: FdRef<'_>) -> Option<i32> {
    // `struct signalfd_siginfo`, 128 bytes, starts with the number.
    let mut info = [0; 128];
    let length = crate::fs::read(signal_fd, &mut info).ok()?;
    let number = *info[..length].first_chunk::<4>()?;
    Some(i32::from_ne_bytes(number))
}

/// Sets the interface `lo` of the current network namespace up (SIOCGIFFLAGS, SIOCSIFFLAGS with IFF_UP).
pub fn loopback_up() -> Result<(), Errno> {
    const AF_INET: usize = 2;
    const SOCK_DGRAM: usize = 2;
    const SIOCGIFFLAGS: usize = 0x8913;
    const SIOCSIFFLAGS: usize = 0x8914;
    const IFF_UP: u8 = 1;
    // SAFETY: the call reads no memory.
    let socket =
        unsafe { call(number::SOCKET, [AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0]) }.map(Fd::from_call)?;
    // `struct ifreq`, 40 bytes: the name in 16, then the flags in 2.
    let mut request = [0_u8; 40];
    request[..2].copy_from_slice(b"lo");
    let address = request.as_mut_ptr() as usize;
    // SAFETY: the kernel reads and writes one `ifreq` of 40 bytes, which `request` is.
    unsafe { call(number::IOCTL, [socket.borrow().argument(), SIOCGIFFLAGS, address]) }?;
    request[16] |= IFF_UP;
    let address = request.as_ptr() as usize;
    // SAFETY: the kernel reads one `ifreq` of 40 bytes, which `request` is.
    unsafe { call(number::IOCTL, [socket.borrow().argument(), SIOCSIFFLAGS, address]) }.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_travel_with_their_message() {
        let (left, right) = seqpacket_pair().unwrap();
        let (reader, writer) = crate::fs::pipe().unwrap();
        send(left.borrow(), b"hi", &[writer.borrow()]).unwrap();
        let mut buffer = [0; 8];
        let received = receive(right.borrow(), &mut buffer).unwrap();
        assert_eq!(&buffer[..received.length], b"hi");
        let [Some(copy), None, ..] = received.descriptors else { panic!("one descriptor: {received:?}") };
        crate::fs::write(copy.borrow(), b"x").unwrap();
        assert_eq!(crate::fs::read(reader.borrow(), &mut buffer), Ok(1));
        assert_eq!(receive(right.borrow(), &mut buffer).unwrap_err(), Errno::EAGAIN);
        drop(left);
        assert_eq!(receive(right.borrow(), &mut buffer).unwrap().length, 0);
    }

    #[test]
    fn a_message_that_does_not_fit_is_an_error() {
        let (left, right) = seqpacket_pair().unwrap();
        send(left.borrow(), b"long", &[]).unwrap();
        assert_eq!(receive(right.borrow(), &mut [0; 2]).unwrap_err(), Errno::EMSGSIZE);
    }

    #[test]
    fn a_path_too_long_for_a_socket_is_refused() {
        let socket = seqpacket().unwrap();
        assert_eq!(bind(socket.borrow(), &[b'x'; 108]), Err(Errno::ENAMETOOLONG));
    }
}
