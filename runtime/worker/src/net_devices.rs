//! Moves network interfaces of the node into a pod's network namespace (OCI runtime specification,
//! config-linux.md, "Network Devices"): with a new name and their global addresses, and sets them up. It runs
//! in a worker, because it enters the namespace permanently. The module also removes interfaces, for which
//! the kernel may need a long time.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use coracle_job::{Failure, FailureKind};
use nix::errno::Errno;
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, connect, recv, send, socket,
};

use crate::failure::{Context, failure, io_failure};

// Constants of rtnetlink(7) and netlink(7).
const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_CREATE: u16 = 0x400;
const NLM_F_EXCL: u16 = 0x200;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const IFLA_IFNAME: u16 = 3;
const IFLA_NET_NS_FD: u16 = 28;
const IFF_UP: u32 = 1;
const IFF_LOOPBACK: u32 = 8;
const RT_SCOPE_UNIVERSE: u8 = 0;

const HEADER_BYTES: usize = 16;
const LINK_BYTES: usize = 16;
const ADDRESS_BYTES: usize = 8;

/// Moves all interfaces; stops at the first error.
pub(crate) fn run(netns: &Path, devices: &[(String, String)]) -> Result<(), Failure> {
    let namespace = File::open(netns).map_err(|error| io_failure("open", netns, &error))?;
    let node = Netlink::open()?;
    let mut moved = Vec::new();
    for (host, name) in devices {
        let addresses = node
            .link(host)
            .and_then(|link| {
                if link.flags & IFF_LOOPBACK != 0 {
                    return Err(failure(FailureKind::Invalid, "the loopback interface cannot be moved"));
                }
                let addresses = node.addresses(link.index)?;
                node.give(link.index, name, &namespace)?;
                Ok(addresses)
            })
            .context(|| format!("network interface {host}"))?;
        moved.push((name, addresses));
    }
    setns(&namespace, CloneFlags::CLONE_NEWNET)
        .map_err(|errno| io_failure("enter", netns, &std::io::Error::from(errno)))?;
    let pod = Netlink::open()?;
    for (name, addresses) in moved {
        pod.link(name)
            .and_then(|link| pod.bring_up(link.index, &addresses))
            .context(|| format!("network interface {name} in the pod"))?;
    }
    Ok(())
}

/// Removes an interface of the node, for which the kernel may need a long time. A missing interface is not an
/// error.
pub(crate) fn remove(name: &str) -> Result<(), Failure> {
    let mut body = link_header(0, 0, 0);
    push_attribute(&mut body, IFLA_IFNAME, &with_nul(name));
    match Netlink::open()?.ask(RTM_DELLINK, NLM_F_REQUEST | NLM_F_ACK, &body) {
        Err(_) if !Path::new("/sys/class/net").join(name).exists() => Ok(()),
        outcome => outcome.map(drop).context(|| format!("remove network interface {name}")),
    }
}

/// The properties of an interface that a move requires.
struct Link {
    index: i32,
    flags: u32,
}

/// An address in the kernel's format: its header and attributes, except for the interface index.
struct Address {
    family: u8,
    prefix: u8,
    flags: u8,
    attributes: Vec<u8>,
}

/// A NETLINK_ROUTE socket in one network namespace.
struct Netlink(OwnedFd);

impl Netlink {
    fn open() -> Result<Self, Failure> {
        let opened =
            socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkRoute);
        let socket = opened.map_err(|errno| kernel("open a netlink socket", errno))?;
        connect(socket.as_raw_fd(), &NetlinkAddr::new(0, 0)).map_err(|errno| kernel("netlink", errno))?;
        Ok(Self(socket))
    }

    fn link(&self, name: &str) -> Result<Link, Failure> {
        let mut body = link_header(0, 0, 0);
        push_attribute(&mut body, IFLA_IFNAME, &with_nul(name));
        let answers = self.ask(RTM_GETLINK, NLM_F_REQUEST | NLM_F_ACK, &body)?;
        let found = answers.iter().find(|(kind, body)| *kind == RTM_NEWLINK && body.len() >= LINK_BYTES);
        let (_, body) = found.ok_or_else(|| failure(FailureKind::NotFound, "does not exist"))?;
        Ok(Link { index: i32::from_ne_bytes(word(body, 4)), flags: u32::from_ne_bytes(word(body, 8)) })
    }

    /// Addresses with global scope of the interface `index`.
    fn addresses(&self, index: i32) -> Result<Vec<Address>, Failure> {
        let answers = self.ask(RTM_GETADDR, NLM_F_REQUEST | NLM_F_DUMP, &[0; ADDRESS_BYTES])?;
        let of_link = answers.iter().filter(|(kind, body)| {
            *kind == RTM_NEWADDR
                && body.len() >= ADDRESS_BYTES
                && i32::from_ne_bytes(word(body, 4)) == index
                && body[3] == RT_SCOPE_UNIVERSE
        });
        let address = |(_, body): &(u16, Vec<u8>)| Address {
            family: body[0],
            prefix: body[1],
            flags: body[2],
            attributes: portable(&body[ADDRESS_BYTES..]),
        };
        Ok(of_link.map(address).collect())
    }

    /// Moves and renames an interface in one request, so that the new name must be free only in the pod.
    fn give(&self, index: i32, name: &str, namespace: &File) -> Result<(), Failure> {
        let mut body = link_header(index, 0, 0);
        push_attribute(&mut body, IFLA_NET_NS_FD, &namespace.as_raw_fd().to_ne_bytes());
        push_attribute(&mut body, IFLA_IFNAME, &with_nul(name));
        self.ask(RTM_NEWLINK, NLM_F_REQUEST | NLM_F_ACK, &body).map(drop)
    }

    fn bring_up(&self, index: i32, addresses: &[Address]) -> Result<(), Failure> {
        for address in addresses {
            let mut body = vec![address.family, address.prefix, address.flags, RT_SCOPE_UNIVERSE];
            body.extend(index.to_ne_bytes());
            body.extend(&address.attributes);
            let flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL;
            self.ask(RTM_NEWADDR, flags, &body)?;
        }
        self.ask(RTM_NEWLINK, NLM_F_REQUEST | NLM_F_ACK, &link_header(index, IFF_UP, IFF_UP)).map(drop)
    }

    /// Sends a request and receives all messages up to the acknowledgement or the end of a dump.
    fn ask(&self, kind: u16, flags: u16, body: &[u8]) -> Result<Vec<(u16, Vec<u8>)>, Failure> {
        let length = (HEADER_BYTES + body.len()) as u32;
        let mut message = length.to_ne_bytes().to_vec();
        message.extend(kind.to_ne_bytes());
        message.extend(flags.to_ne_bytes());
        message.extend([0; 8]); // sequence and port: one request at a time on this socket
        message.extend(body);
        send(self.0.as_raw_fd(), &message, MsgFlags::empty())
            .map_err(|errno| kernel("netlink send", errno))?;
        let mut answers = Vec::new();
        let mut buffer = vec![0; 32 << 10];
        loop {
            let count = recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty())
                .map_err(|errno| kernel("netlink receive", errno))?;
            if count == 0 {
                return Err(failure(FailureKind::Internal, "netlink: end of file"));
            }
            for (kind, body) in messages(&buffer[..count]) {
                match kind {
                    NLMSG_DONE => return Ok(answers),
                    NLMSG_ERROR if body.len() >= 4 => match i32::from_ne_bytes(word(body, 0)) {
                        0 => return Ok(answers),
                        error => {
                            let text = Errno::from_raw(-error).desc().to_lowercase();
                            return Err(failure(FailureKind::Internal, text));
                        }
                    },
                    _ => answers.push((kind, body.to_vec())),
                }
            }
        }
    }
}

fn kernel(op: &str, errno: Errno) -> Failure {
    failure(FailureKind::Internal, format!("{op}: {}", errno.desc().to_lowercase()))
}

/// Encodes `struct ifinfomsg`.
fn link_header(index: i32, flags: u32, change: u32) -> Vec<u8> {
    let mut header = vec![0; 4];
    header.extend(index.to_ne_bytes());
    header.extend(flags.to_ne_bytes());
    header.extend(change.to_ne_bytes());
    header
}

fn push_attribute(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    body.extend(((4 + value.len()) as u16).to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(value);
    body.resize(body.len().next_multiple_of(4), 0);
}

fn with_nul(name: &str) -> Vec<u8> {
    [name.as_bytes(), &[0]].concat()
}

/// The attributes of an address that are copied: the address, the peer, the broadcast address and the flags.
/// Not copied: the label, which contains the old interface name, and the cache times.
fn portable(attributes: &[u8]) -> Vec<u8> {
    const KEPT: [u16; 4] = [1, 2, 4, 8]; // IFA_ADDRESS, IFA_LOCAL, IFA_BROADCAST, IFA_FLAGS
    let mut kept = Vec::new();
    let mut rest = attributes;
    while rest.len() >= 4 {
        let length = usize::from(u16::from_ne_bytes([rest[0], rest[1]]));
        if length < 4 || length > rest.len() {
            break;
        }
        let kind = u16::from_ne_bytes([rest[2], rest[3]]);
        if KEPT.contains(&kind) {
            push_attribute(&mut kept, kind, &rest[4..length]);
        }
        rest = &rest[length.next_multiple_of(4).min(rest.len())..];
    }
    kept
}

/// Splits a buffer into messages; returns type and body of each.
fn messages(mut bytes: &[u8]) -> Vec<(u16, &[u8])> {
    let mut found = Vec::new();
    while bytes.len() >= HEADER_BYTES {
        let length = u32::from_ne_bytes(word(bytes, 0)) as usize;
        if length < HEADER_BYTES || length > bytes.len() {
            break;
        }
        found.push((u16::from_ne_bytes([bytes[4], bytes[5]]), &bytes[HEADER_BYTES..length]));
        bytes = &bytes[length.next_multiple_of(4).min(bytes.len())..];
    }
    found
}

fn word(bytes: &[u8], at: usize) -> [u8; 4] {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    word
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_with_wrong_lengths_end_the_parsing() {
        let mut message = vec![20, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4];
        assert_eq!(messages(&message), [(16, &[1, 2, 3, 4][..])]);
        for length in [0u32, 15, 21, u32::MAX] {
            message[..4].copy_from_slice(&length.to_ne_bytes());
            assert_eq!(messages(&message), [], "{length}");
        }
    }

    #[test]
    fn labels_and_cache_times_are_not_copied() {
        let mut attributes = Vec::new();
        push_attribute(&mut attributes, 2, &[10, 0, 0, 1]);
        push_attribute(&mut attributes, 3, b"eth0\0");
        push_attribute(&mut attributes, 6, &[0; 16]);
        let mut expected = Vec::new();
        push_attribute(&mut expected, 2, &[10, 0, 0, 1]);
        assert_eq!(portable(&attributes), expected);
        assert!(portable(&attributes[..7]).is_empty());
    }
}
