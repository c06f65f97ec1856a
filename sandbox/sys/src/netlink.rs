//! AF_NETLINK sockets for the kernel's network configuration. Callers encode the messages and send and receive them
//! with [`crate::socket::send`] and [`crate::socket::receive`]; the peer of an unconnected netlink socket is the
//! kernel.

use core::num::NonZeroU32;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType, bind, socket_with};

use crate::arch::call;
use crate::{Errno, Fd, FdRef, bpf, number};

/// Protocol for links, addresses and routes (NETLINK_ROUTE).
pub const ROUTE: u32 = 0;
/// Protocol for nftables and connection tracking (NETLINK_NETFILTER).
pub const NETFILTER: u32 = 12;

/// Option: error replies do not contain the request (NETLINK_CAP_ACK).
pub const SHORT_REPLIES: usize = 10;
/// Option: error replies may contain a text (NETLINK_EXT_ACK).
pub const ERROR_TEXTS: usize = 11;
/// Option: dumps apply the filters in the request (NETLINK_GET_STRICT_CHK, Linux 4.20).
pub const STRICT: usize = 12;

/// Opens a socket in the current network namespace; the socket stays in it if the process changes its namespace.
pub fn open(protocol: u32) -> Result<Fd, Errno> {
    let protocol = NonZeroU32::new(protocol).map(Protocol::from_raw);
    Ok(socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?.into())
}

/// Enables a socket option (setsockopt(2)): [`SHORT_REPLIES`], [`ERROR_TEXTS`] or [`STRICT`].
pub fn switch_on(socket: FdRef<'_>, option: usize) -> Result<(), Errno> {
    const SOL_NETLINK: usize = 270;
    let on: i32 = 1;
    let arguments = [socket.argument(), SOL_NETLINK, option, &raw const on as usize, 4];
    // SAFETY: the kernel reads one i32, the size given, from a local that lives across the call.
    unsafe { call(number::SETSOCKOPT, arguments) }.map(drop)
}

/// Opens a socket like [`open`] that receives a notification for each link that is removed from the network namespace
/// (RTM_DELLINK), and no other messages: the kernel drops them, so that they wake no process.
pub fn removed_links() -> Result<Fd, Errno> {
    /// Group of notifications about links (RTMGRP_LINK).
    const LINKS: u32 = 1;
    let socket = open(ROUTE)?;
    // Before the socket joins the group, so that nothing else arrives.
    bpf::receive_removed_links(socket.borrow())?;
    bind(&socket, &SocketAddrNetlink::new(0, LINKS))?;
    Ok(socket)
}
