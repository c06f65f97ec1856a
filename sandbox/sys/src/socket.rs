//! AF_UNIX sockets that preserve message boundaries and pass descriptors, epoll and signalfd for event loops, and the
//! ioctl that sets a pod's loopback interface up.

use core::mem::MaybeUninit;

use rustix::event::Timespec;
pub use rustix::event::epoll::Event;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with, socketpair};

use crate::arch::call;
use crate::process::Signals;
use crate::{Errno, Fd, FdRef, number};

const SOL_SOCKET: i32 = 1;
const SCM_RIGHTS: i32 = 1;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// Maximum number of descriptors in one message.
pub const DESCRIPTORS_MAX: usize = 8;

/// Opens two connected SOCK_SEQPACKET sockets.
pub fn seqpacket_pair() -> Result<(Fd, Fd), Errno> {
    let (left, right) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
    Ok((left.into(), right.into()))
}

/// Opens a non-blocking TCP socket in the current network namespace; the socket stays in it if it is passed to another
/// process.
pub fn tcp(is_ipv6: bool) -> Result<Fd, Errno> {
    let family = if is_ipv6 { AddressFamily::INET6 } else { AddressFamily::INET };
    Ok(socket_with(family, SocketType::STREAM, FLAGS, None)?.into())
}

/// Accepts a connection (accept4(2)); the new socket is non-blocking.
pub fn accept(socket: FdRef<'_>) -> Result<Fd, Errno> {
    Ok(rustix::net::accept_with(socket, FLAGS)?.into())
}

/// `struct cmsghdr` with descriptors.
#[repr(C)]
struct Control {
    length: usize,
    level: i32,
    kind: i32,
    descriptors: [i32; DESCRIPTORS_MAX],
}

const CONTROL_HEADER_BYTES: usize = size_of::<usize>() + 8;

/// `struct msghdr`; on 64-bit architectures with the padding after the two u32.
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
    let numbers = control.descriptors.get_mut(..descriptors.len()).ok_or(Errno::EINVAL)?;
    for (to, descriptor) in numbers.iter_mut().zip(descriptors) {
        *to = descriptor.number();
    }
    let part = [bytes.as_ptr() as usize, bytes.len()];
    let has_descriptors = !descriptors.is_empty();
    let message = Message {
        name: 0,
        name_length: 0,
        parts: part.as_ptr() as usize,
        parts_count: 1,
        control: if has_descriptors { &raw const control as usize } else { 0 },
        control_length: if has_descriptors { length.next_multiple_of(size_of::<usize>()) } else { 0 },
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
        for (to, number) in received.descriptors.iter_mut().zip(control.descriptors).take(count) {
            *to = Some(Fd::from_call(number as usize));
        }
    }
    if message.flags & MSG_TRUNC_CTRUNC == 0 { Ok(received) } else { Err(Errno::EMSGSIZE) }
}

/// Event: the descriptor is readable or at its end.
pub const EPOLLIN: EventFlags = EventFlags::IN;
/// Event: the descriptor is writable.
pub const EPOLLOUT: EventFlags = EventFlags::OUT;
/// Maximum number of events that one [`wait`] returns; the next call returns further events.
pub const EVENTS_MAX: usize = 16;

/// Whether the event reports that the descriptor is writable.
pub fn is_writable(event: &Event) -> bool {
    let flags = event.flags;
    flags.contains(EPOLLOUT)
}

/// Whether the event reports data, EOF or an error.
pub fn is_readable(event: &Event) -> bool {
    let flags = event.flags;
    !flags.difference(EPOLLOUT).is_empty()
}

/// Creates an epoll instance (epoll_create1(2)).
pub fn epoll() -> Result<Fd, Errno> {
    Ok(epoll::create(CreateFlags::CLOEXEC)?.into())
}

/// Registers `file` with epoll (level-triggered); its events contain `token`.
pub fn watch(epoll: FdRef<'_>, file: FdRef<'_>, events: EventFlags, token: u64) -> Result<(), Errno> {
    Ok(epoll::add(epoll, file, EventData::new_u64(token), events)?)
}

/// Changes the events for which `file` is registered.
pub fn watch_for(epoll: FdRef<'_>, file: FdRef<'_>, events: EventFlags, token: u64) -> Result<(), Errno> {
    Ok(epoll::modify(epoll, file, EventData::new_u64(token), events)?)
}

/// Unregisters `file` from epoll. Required before the file is closed, because a copy in a child keeps the registration.
pub fn unwatch(epoll: FdRef<'_>, file: FdRef<'_>) -> Result<(), Errno> {
    Ok(epoll::delete(epoll, file)?)
}

/// Waits for events (epoll_pwait(2)): returns pending events after at most `timeout_ms` milliseconds (-1: no timeout).
/// EINTR gives an empty result.
pub fn wait<'a>(
    epoll: FdRef<'_>,
    events: &'a mut [MaybeUninit<Event>; EVENTS_MAX],
    timeout_ms: i32,
) -> Result<&'a [Event], Errno> {
    let milliseconds = i64::from(timeout_ms);
    let timeout = Timespec { tv_sec: milliseconds / 1000, tv_nsec: milliseconds % 1000 * 1_000_000 };
    match epoll::wait(epoll, &mut events[..], (timeout_ms >= 0).then_some(&timeout)) {
        Ok((events, _)) => Ok(events),
        Err(rustix::io::Errno::INTR) => Ok(&[]),
        Err(errno) => Err(errno.into()),
    }
}

/// Creates a non-blocking signalfd (signalfd4(2)) for `signals`, which must be blocked.
pub fn signal_fd(signals: Signals) -> Result<Fd, Errno> {
    let flags = FLAGS.bits() as usize;
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
    const SIOCGIFFLAGS: usize = 0x8913;
    const SIOCSIFFLAGS: usize = 0x8914;
    const IFF_UP: u8 = 1;
    let socket: Fd = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?.into();
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
    fn descriptors_are_sent_with_their_message() {
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
}
