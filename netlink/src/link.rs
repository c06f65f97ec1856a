//! Links: veth pairs, bridges and their ports, and intermediate functional blocks (ifb). Rules: rtnetlink(7);
//! include/uapi/linux/{if_link,veth}.h.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd};

use coracle_sys::{Fd, netlink, socket};
use nix::errno::Errno;

use crate::message::{Batch, Message, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, Nest, attributes, parse, text};
use crate::{BUFFER_BYTES, Error, Socket, refused};

const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;

const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINK: u16 = 5;
const IFLA_MASTER: u16 = 10;
const IFLA_OPERSTATE: u16 = 16;
const IFLA_LINKINFO: u16 = 18;
const IFLA_NET_NS_FD: u16 = 28;
const IFLA_EXT_MASK: u16 = 29;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const IFLA_INFO_SLAVE_KIND: u16 = 4;
const IFLA_INFO_SLAVE_DATA: u16 = 5;
const VETH_INFO_PEER: u16 = 1;
const IFLA_BRPORT_MODE: u16 = 4;
/// Flag that excludes counters from the reply.
const RTEXT_FILTER_SKIP_STATS: u32 = 1 << 3;

const IFF_UP: u32 = 1;
const IFF_LOOPBACK: u32 = 8;
const IFF_PROMISC: u32 = 0x100;
/// Operational state "up" (RFC 2863).
const IF_OPER_UP: u8 = 6;

/// Maximum number of reports of removed links that are read at once.
const REPORTS_MAX: usize = 1024;
/// Size of `struct ifinfomsg` in bytes.
const HEADER_BYTES: usize = 16;

/// Encodes `struct ifinfomsg` with the flags in `changed` set to `flags`.
fn header(index: u32, flags: u32, changed: u32) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[4..8].copy_from_slice(&index.to_ne_bytes());
    bytes[8..12].copy_from_slice(&flags.to_ne_bytes());
    bytes[12..].copy_from_slice(&changed.to_ne_bytes());
    bytes
}

/// A link that exists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// Interface index in its namespace.
    pub index: u32,
    /// Interface name.
    pub name: String,
    /// MTU in bytes.
    pub mtu: u32,
    /// Index of the other end of a veth pair, in that end's namespace; 0: none.
    pub peer: u32,
    /// Index of the bridge of which the link is a port; 0: none.
    pub bridge: u32,
    /// Kind: `bridge`, `veth`, …; empty for hardware.
    pub kind: String,
    /// MAC address.
    pub mac: [u8; 6],
    /// Whether the link is administratively up.
    pub is_up: bool,
    /// Whether the link is operationally up.
    pub is_running: bool,
    /// Whether the link is its namespace's loopback interface, which can be neither moved nor removed.
    pub is_loopback: bool,
}

/// A veth pair to be created: one end is in this namespace and set up, the other end is in another namespace and down.
#[derive(Debug)]
pub struct Veth<'a> {
    /// Interface name of the end in this namespace.
    pub name: &'a str,
    /// MAC address of the end in this namespace.
    pub mac: [u8; 6],
    /// Index of the bridge to which the end in this namespace is added as a port; `None`: no bridge.
    pub bridge: Option<u32>,
    /// Interface name of the other end.
    pub peer_name: &'a str,
    /// MAC address of the other end.
    pub peer_mac: [u8; 6],
    /// Descriptor number of the other end's network namespace.
    pub peer_namespace: i32,
    /// MTU in bytes; 0: the default of the kernel.
    pub mtu: u32,
}

/// A bridge to be created.
#[derive(Debug)]
pub struct Bridge<'a> {
    /// Name of the bridge.
    pub name: &'a str,
    /// MTU in bytes; 0: the default of the kernel.
    pub mtu: u32,
    /// A fixed MAC address; `None`: the bridge uses the address of a port.
    pub mac: Option<[u8; 6]>,
}

impl Batch {
    fn link_info(&mut self, kind: &str) -> Nest {
        let info = self.nest(IFLA_LINKINFO);
        self.attribute(IFLA_INFO_KIND, kind.as_bytes());
        info
    }

    fn mtu(&mut self, mtu: u32) {
        if mtu > 0 {
            self.attribute(IFLA_MTU, &mtu.to_ne_bytes());
        }
    }

    /// Creates a veth pair; an existing one is an error.
    pub fn add_veth(&mut self, veth: &Veth<'_>) {
        let flags = NLM_F_CREATE | NLM_F_EXCL;
        let target = format!("{} with {} in the pod", veth.name, veth.peer_name);
        self.message(RTM_NEWLINK, flags, &header(0, IFF_UP, IFF_UP), "make link", target);
        self.text(IFLA_IFNAME, veth.name);
        self.attribute(IFLA_ADDRESS, &veth.mac);
        self.mtu(veth.mtu);
        if let Some(bridge) = veth.bridge {
            self.attribute(IFLA_MASTER, &bridge.to_ne_bytes());
        }
        let info = self.link_info("veth");
        let data = self.nest(IFLA_INFO_DATA);
        let peer = self.nest(VETH_INFO_PEER);
        self.put(&header(0, 0, 0));
        self.text(IFLA_IFNAME, veth.peer_name);
        self.attribute(IFLA_ADDRESS, &veth.peer_mac);
        self.mtu(veth.mtu);
        self.attribute(IFLA_NET_NS_FD, &veth.peer_namespace.to_ne_bytes());
        self.end(peer);
        self.end(data);
        self.end(info);
    }

    /// Creates a bridge and sets it up. An existing bridge is not changed.
    pub fn add_bridge(&mut self, bridge: &Bridge<'_>) {
        let flags = NLM_F_CREATE | NLM_F_EXCL;
        self.message(RTM_NEWLINK, flags, &header(0, IFF_UP, IFF_UP), "make bridge", bridge.name);
        self.tolerate(&[Errno::EEXIST]);
        self.text(IFLA_IFNAME, bridge.name);
        self.mtu(bridge.mtu);
        if let Some(mac) = bridge.mac {
            self.attribute(IFLA_ADDRESS, &mac);
        }
        let info = self.link_info("bridge");
        self.end(info);
    }

    /// Creates an intermediate functional block (ifb) and sets it up.
    pub fn add_ifb(&mut self, name: &str, mtu: u32) {
        let flags = NLM_F_CREATE | NLM_F_EXCL;
        self.message(RTM_NEWLINK, flags, &header(0, IFF_UP, IFF_UP), "make link", name);
        self.text(IFLA_IFNAME, name);
        self.mtu(mtu);
        let info = self.link_info("ifb");
        self.end(info);
    }

    /// Sets the hairpin mode of a bridge's port: whether packets are sent back through the port they arrived on.
    pub fn set_hairpin(&mut self, port: &str, is_on: bool) {
        self.message(RTM_NEWLINK, 0, &header(0, 0, 0), "set hairpin mode of", port);
        self.text(IFLA_IFNAME, port);
        let info = self.nest(IFLA_LINKINFO);
        self.attribute(IFLA_INFO_SLAVE_KIND, b"bridge");
        let data = self.nest(IFLA_INFO_SLAVE_DATA);
        self.attribute(IFLA_BRPORT_MODE, &[u8::from(is_on)]);
        self.end(data);
        self.end(info);
    }

    /// Sets a link up.
    pub fn set_up(&mut self, index: u32, name: &str) {
        self.message(RTM_NEWLINK, 0, &header(index, IFF_UP, IFF_UP), "set up", name);
    }

    /// Moves a link to the network namespace with this descriptor number and renames it, in one request: the new name must be
    /// free only in that namespace. The link is down and without addresses afterwards.
    pub fn move_link(&mut self, link: &Link, namespace: i32, name: &str) {
        let target = format!("{} to the pod as {name}", link.name);
        self.message(RTM_NEWLINK, 0, &header(link.index, 0, 0), "move link", target);
        self.attribute(IFLA_NET_NS_FD, &namespace.to_ne_bytes());
        self.text(IFLA_IFNAME, name);
    }

    /// Sets a link to promiscuous mode.
    pub fn set_promiscuous(&mut self, index: u32, name: &str) {
        let header = header(index, IFF_PROMISC, IFF_PROMISC);
        self.message(RTM_NEWLINK, 0, &header, "set promiscuous mode of", name);
    }

    /// Sets the MAC address of a link.
    pub fn set_mac(&mut self, index: u32, name: &str, mac: [u8; 6]) {
        self.message(RTM_NEWLINK, 0, &header(index, 0, 0), "set hardware address of", name);
        self.attribute(IFLA_ADDRESS, &mac);
    }

    /// Sets a link down, which takes the kernel little time and stops all traffic. A missing link is success.
    pub fn set_down(&mut self, name: &str) {
        self.message(RTM_NEWLINK, 0, &header(0, 0, IFF_UP), "set down", name);
        self.tolerate(&[Errno::ENODEV]);
        self.text(IFLA_IFNAME, name);
    }

    /// Removes a link, which takes the kernel tens of milliseconds. A missing link is success.
    pub fn remove_link(&mut self, name: &str) {
        self.message(RTM_DELLINK, 0, &header(0, 0, 0), "remove link", name);
        self.tolerate(&[Errno::ENODEV]);
        self.text(IFLA_IFNAME, name);
    }
}

impl Socket {
    /// The link with this name; `None` if there is none.
    ///
    /// # Errors
    /// [`Error`] if the kernel refuses the request.
    pub fn link(&self, name: &str) -> Result<Option<Link>, Error> {
        let mut batch = Batch::default();
        batch.message(RTM_GETLINK, 0, &header(0, 0, 0), "find link", name);
        batch.text(IFLA_IFNAME, name);
        self.find(batch)
    }

    /// The link with this index; `None` if there is none.
    ///
    /// # Errors
    /// [`Error`] if the kernel refuses the request.
    pub fn link_at(&self, index: u32) -> Result<Option<Link>, Error> {
        let mut batch = Batch::default();
        batch.message(RTM_GETLINK, 0, &header(index, 0, 0), "find link", index.to_string());
        self.find(batch)
    }

    /// All links of the socket's namespace by their names.
    ///
    /// # Errors
    /// [`Error`] if the kernel refuses the request.
    pub fn links(&self) -> Result<BTreeMap<String, Link>, Error> {
        let list = || {
            let mut batch = Batch::default();
            batch.message(RTM_GETLINK, NLM_F_DUMP, &header(0, 0, 0), "list", "links");
            batch.attribute(IFLA_EXT_MASK, &RTEXT_FILTER_SKIP_STATS.to_ne_bytes());
            batch
        };
        // Not collected: that would sort them first, with code of its own.
        let mut links = BTreeMap::new();
        links.extend(self.dump(list, read)?.into_iter().map(|link: Link| (link.name.clone(), link)));
        Ok(links)
    }

    fn find(&self, mut batch: Batch) -> Result<Option<Link>, Error> {
        batch.tolerate(&[Errno::ENODEV]);
        batch.attribute(IFLA_EXT_MASK, &RTEXT_FILTER_SKIP_STATS.to_ne_bytes());
        batch.acknowledge();
        let mut found = None;
        self.ask(batch, &mut |message| found = read(message).or(found.take()))?;
        Ok(found)
    }
}

/// A socket that reports links which are removed from the network namespace in which it was opened.
#[derive(Debug)]
pub struct RemovedLinks(Fd);

impl RemovedLinks {
    /// Opens the socket, which reports removals from now on.
    ///
    /// # Errors
    /// [`Error`] if the kernel refuses the request.
    pub fn open() -> Result<Self, Error> {
        netlink::removed_links().map(Self).map_err(|errno| refused("listen for", "removed links", errno))
    }

    /// The names of the links that were removed since the last call; does not block. `None`: the kernel had no room for all
    /// reports.
    ///
    /// # Errors
    /// [`Error`] if the socket cannot be read.
    pub fn names(&self) -> Result<Option<BTreeSet<String>>, Error> {
        let (mut names, mut is_complete) = (BTreeSet::new(), true);
        let mut buffer = [0; BUFFER_BYTES];
        // At the end a whole check is cheaper than more reports.
        for _ in 0..REPORTS_MAX {
            let length = match socket::receive(self.0.borrow(), &mut buffer) {
                Ok(received) => received.length,
                Err(coracle_sys::Errno::EAGAIN) => return Ok(is_complete.then_some(names)),
                Err(coracle_sys::Errno::ENOBUFS | coracle_sys::Errno::EMSGSIZE) => {
                    is_complete = false;
                    continue;
                }
                Err(errno) => return Err(refused("read", "reports of removed links", errno)),
            };
            for message in parse(&buffer[..length]).filter(|message| message.kind == RTM_DELLINK) {
                let name = message.attributes(HEADER_BYTES).find(|(kind, _)| *kind == IFLA_IFNAME);
                names.extend(name.map(|(_, value)| text(value).to_owned()));
            }
        }
        Ok(None)
    }
}

impl AsFd for RemovedLinks {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn number(value: &[u8]) -> u32 {
    value.try_into().map_or(0, u32::from_ne_bytes)
}

fn read(message: &Message<'_>) -> Option<Link> {
    let header: &[u8; HEADER_BYTES] = message.body.first_chunk()?;
    if message.kind != RTM_NEWLINK {
        return None;
    }
    let mut link = Link {
        index: u32::from_ne_bytes([header[4], header[5], header[6], header[7]]),
        is_up: u32::from(header[8]) & IFF_UP != 0,
        is_loopback: u32::from(header[8]) & IFF_LOOPBACK != 0,
        ..Link::default()
    };
    for (kind, value) in message.attributes(HEADER_BYTES) {
        match kind {
            IFLA_IFNAME => link.name = text(value).to_owned(),
            IFLA_MTU => link.mtu = number(value),
            IFLA_LINK => link.peer = number(value),
            IFLA_MASTER => link.bridge = number(value),
            IFLA_ADDRESS => link.mac = value.try_into().unwrap_or_default(),
            IFLA_OPERSTATE => link.is_running = value.first() == Some(&IF_OPER_UP),
            IFLA_LINKINFO => {
                let kind = attributes(value).find(|(kind, _)| *kind == IFLA_INFO_KIND);
                link.kind = kind.map_or_else(String::new, |(_, value)| text(value).to_owned());
            }
            _ => {}
        }
    }
    Some(link)
}
