//! Netlink messages of a pod on a bridge: links, addresses, routes, one masquerading rule of nftables. Rules:
//! rtnetlink(7); include/uapi/linux/{if_link,veth,rtnetlink}.h and netfilter/{nfnetlink,nf_tables}.h.

use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};

use crate::{Outcome, failed};

const HEADER_BYTES: usize = 16;
const NLMSG_ERROR: u16 = 2;
const REQUEST: u16 = 1;
const ACK: u16 = 4;
const NEW: u16 = 0x600; // NLM_F_CREATE | NLM_F_EXCL
const CREATE: u16 = 0x400;
const APPEND: u16 = 0x800;
const NESTED: u16 = 0x8000;

const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_NEWADDR: u16 = 20;
const RTM_NEWROUTE: u16 = 24;
const IFF_UP: u32 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MASTER: u16 = 10;
const IFLA_LINKINFO: u16 = 18;
const IFLA_NET_NS_FD: u16 = 28;

/// NFNL_SUBSYS_NFTABLES in the upper half of a message's kind.
const NFTABLES: u16 = 10 << 8;
const NFPROTO_IPV4: u8 = 2;

/// A netlink socket of one protocol in the network namespace in which it was created.
#[derive(Debug)]
pub(crate) struct Socket(OwnedFd);

impl Socket {
    /// A socket for links, addresses and routes.
    ///
    /// # Errors
    /// The error of the kernel.
    pub(crate) fn route() -> Outcome<Socket> {
        Socket::of(SockProtocol::NetlinkRoute)
    }

    /// A socket for nftables.
    ///
    /// # Errors
    /// The error of the kernel.
    pub(crate) fn nftables() -> Outcome<Socket> {
        Socket::of(SockProtocol::NetlinkNetFilter)
    }

    fn of(protocol: SockProtocol) -> Outcome<Socket> {
        let made = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol);
        made.map(Socket).map_err(|errno| failed("make a netlink socket", errno))
    }

    /// Sends messages in one system call and waits for the last one's acknowledgement or the first error.
    ///
    /// # Errors
    /// `what` with the error of the kernel.
    pub(crate) fn run(&self, what: &str, batch: Batch) -> Outcome<()> {
        let socket = self.0.as_raw_fd();
        send(socket, &batch.bytes, MsgFlags::empty()).map_err(|errno| failed(what, errno))?;
        let mut answer = [0; 16 << 10];
        let length = recv(socket, &mut answer, MsgFlags::empty()).map_err(|errno| failed(what, errno))?;
        let body: Option<[u8; 4]> =
            answer[..length].get(HEADER_BYTES..).and_then(|body| body.first_chunk().copied());
        let kind = u16::from_ne_bytes([answer[4], answer[5]]);
        let code = body.filter(|_| kind == NLMSG_ERROR).map(i32::from_ne_bytes);
        match code {
            Some(0) => Ok(()),
            Some(code) => Err(failed(what, Errno::from_raw(code.saturating_neg()))),
            None => Err(format!("{what}: netlink message of kind {kind}")),
        }
    }
}

/// Messages that are sent together.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    bytes: Vec<u8>,
    start: usize,
}

/// The position of an attribute that contains attributes.
#[must_use]
struct Nest(usize);

fn link_header(index: u32, flags: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[4..8].copy_from_slice(&index.to_ne_bytes());
    bytes[8..12].copy_from_slice(&flags.to_ne_bytes());
    bytes[12..].copy_from_slice(&flags.to_ne_bytes());
    bytes
}

impl Batch {
    fn message(&mut self, kind: u16, flags: u16, header: &[u8]) {
        self.start = self.bytes.len();
        self.bytes.extend([0; 4]);
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend((flags | REQUEST).to_ne_bytes());
        self.bytes.extend([0; 8]);
        self.put(header);
    }

    fn put(&mut self, value: &[u8]) {
        self.bytes.extend(value);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        let length = (self.bytes.len() - self.start) as u32;
        self.bytes[self.start..self.start + 4].copy_from_slice(&length.to_ne_bytes());
    }

    fn attribute(&mut self, kind: u16, value: &[u8]) {
        self.bytes.extend((value.len() as u16 + 4).to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.put(value);
    }

    fn text(&mut self, kind: u16, value: &str) {
        self.attribute(kind, format!("{value}\0").as_bytes());
    }

    fn nest(&mut self, kind: u16) -> Nest {
        let nest = Nest(self.bytes.len());
        self.attribute(kind | NESTED, &[]);
        nest
    }

    fn end(&mut self, nest: Nest) {
        let length = (self.bytes.len() - nest.0) as u16;
        self.bytes[nest.0..nest.0 + 2].copy_from_slice(&length.to_ne_bytes());
    }

    /// Requests an acknowledgement of the last message.
    pub(crate) fn acknowledge(mut self) -> Batch {
        self.bytes[self.start + 6] |= ACK as u8;
        self
    }

    /// Creates a bridge and sets it up.
    pub(crate) fn add_bridge(&mut self, name: &str) {
        self.message(RTM_NEWLINK, NEW, &link_header(0, IFF_UP));
        self.text(IFLA_IFNAME, name);
        let info = self.nest(IFLA_LINKINFO);
        self.attribute(1, b"bridge");
        self.end(info);
    }

    /// Creates a veth pair: `name` here, up, as a port of the bridge, and `eth0` in `namespace`.
    pub(crate) fn add_veth(&mut self, name: &str, bridge: u32, namespace: BorrowedFd<'_>) {
        self.message(RTM_NEWLINK, NEW, &link_header(0, IFF_UP));
        self.text(IFLA_IFNAME, name);
        self.attribute(IFLA_MASTER, &bridge.to_ne_bytes());
        let info = self.nest(IFLA_LINKINFO);
        self.attribute(1, b"veth");
        let data = self.nest(2);
        let peer = self.nest(1); // VETH_INFO_PEER
        self.put(&link_header(0, 0));
        self.text(IFLA_IFNAME, "eth0");
        self.attribute(IFLA_NET_NS_FD, &namespace.as_raw_fd().to_ne_bytes());
        self.end(peer);
        self.end(data);
        self.end(info);
    }

    /// Sets the hairpin mode of a bridge's port.
    pub(crate) fn set_hairpin(&mut self, port: &str) {
        self.message(RTM_NEWLINK, 0, &link_header(0, 0));
        self.text(IFLA_IFNAME, port);
        let info = self.nest(IFLA_LINKINFO);
        self.attribute(4, b"bridge"); // IFLA_INFO_SLAVE_KIND
        let data = self.nest(5); // IFLA_INFO_SLAVE_DATA
        self.attribute(4, &[1]); // IFLA_BRPORT_MODE
        self.end(data);
        self.end(info);
    }

    /// Sets a link up.
    pub(crate) fn set_up(&mut self, index: u32) {
        self.message(RTM_NEWLINK, 0, &link_header(index, IFF_UP));
    }

    /// Sets a link down.
    pub(crate) fn set_down(&mut self, name: &str) {
        let mut header = link_header(0, IFF_UP);
        header[8..12].fill(0);
        self.message(RTM_NEWLINK, 0, &header);
        self.text(IFLA_IFNAME, name);
    }

    /// Removes a link.
    pub(crate) fn remove_link(&mut self, name: &str) {
        self.message(RTM_DELLINK, 0, &link_header(0, 0));
        self.text(IFLA_IFNAME, name);
    }

    /// Adds an address with a prefix of 24 bits.
    pub(crate) fn add_address(&mut self, index: u32, address: Ipv4Addr) {
        let mut header = [nix::libc::AF_INET as u8, 24, 0, 0, 0, 0, 0, 0];
        header[4..].copy_from_slice(&index.to_ne_bytes());
        self.message(RTM_NEWADDR, NEW, &header);
        self.attribute(2, &address.octets()); // IFA_LOCAL
        self.attribute(1, &address.octets()); // IFA_ADDRESS
    }

    /// Adds the default route.
    pub(crate) fn add_default_route(&mut self, index: u32, gateway: Ipv4Addr) {
        // Family, lengths, TOS, main table, RTPROT_BOOT, universe, RTN_UNICAST, flags.
        self.message(RTM_NEWROUTE, NEW, &[nix::libc::AF_INET as u8, 0, 0, 0, 254, 3, 0, 1, 0, 0, 0, 0]);
        self.attribute(4, &index.to_ne_bytes()); // RTA_OIF
        self.attribute(5, &gateway.octets()); // RTA_GATEWAY
    }

    fn nft(&mut self, kind: u16, flags: u16, table: &str) {
        self.message(NFTABLES | kind, flags, &[NFPROTO_IPV4, 0, 0, 0]);
        self.text(1, table); // NFTA_TABLE_NAME, NFTA_CHAIN_TABLE, NFTA_RULE_TABLE
    }

    /// Starts (0x10) or commits (0x11) a transaction of nftables.
    fn border(&mut self, kind: u16) {
        self.message(kind, 0, &[0, 0, 0, 10]);
    }

    fn number(&mut self, kind: u16, value: u32) {
        self.attribute(kind, &value.to_be_bytes());
    }

    fn expression(&mut self, name: &str, numbers: &[(u16, u32)], values: &[(u16, &[u8])]) {
        let element = self.nest(1); // NFTA_LIST_ELEM
        self.text(1, name);
        let data = self.nest(2);
        for (kind, number) in numbers {
            self.number(*kind, *number);
        }
        for (kind, value) in values {
            let nest = self.nest(*kind);
            self.attribute(1, value); // NFTA_DATA_VALUE
            self.end(nest);
        }
        self.end(data);
        self.end(element);
    }

    /// Matches the four bytes at `offset` of the network header, masked: equal (0) or not (1).
    fn compare(&mut self, offset: u32, mask: [u8; 4], operation: u32, value: [u8; 4]) {
        self.expression("payload", &[(1, 1), (2, 1), (3, offset), (4, 4)], &[]);
        if mask != [0xff; 4] {
            self.expression("bitwise", &[(1, 1), (2, 1), (3, 4)], &[(4, &mask), (5, &[0; 4])]);
        }
        self.expression("cmp", &[(1, 1), (2, operation)], &[(3, &value)]);
    }

    /// A transaction that adds a table and its chain if they are missing, and the rule that masquerades packets
    /// from `address` to other networks.
    pub(crate) fn masquerade(table: &str, address: Ipv4Addr) -> Batch {
        let mut batch = Batch::default();
        batch.border(0x10);
        batch.nft(0, CREATE, table); // NFT_MSG_NEWTABLE
        batch.nft(3, CREATE, table); // NFT_MSG_NEWCHAIN
        batch.text(3, "postrouting");
        let hook = batch.nest(4);
        batch.number(1, 4); // NF_INET_POST_ROUTING
        batch.number(2, 100); // NF_IP_PRI_NAT_SRC
        batch.end(hook);
        batch.text(7, "nat");
        batch.nft(6, CREATE | APPEND, table); // NFT_MSG_NEWRULE
        batch.text(2, "postrouting");
        let expressions = batch.nest(4);
        let [a, b, c, _] = address.octets();
        batch.compare(12, [0xff; 4], 0, address.octets());
        batch.compare(16, [0xff, 0xff, 0xff, 0], 1, [a, b, c, 0]);
        batch.compare(16, [0xf0, 0, 0, 0], 1, [0xe0, 0, 0, 0]);
        batch.expression("masq", &[], &[]);
        batch.end(expressions);
        let mut batch = batch.acknowledge();
        batch.border(0x11);
        batch
    }

    /// A transaction that removes all rules of the chain.
    pub(crate) fn remove_rules(table: &str) -> Batch {
        let mut batch = Batch::default();
        batch.border(0x10);
        batch.nft(8, 0, table); // NFT_MSG_DELRULE
        batch.text(2, "postrouting");
        let mut batch = batch.acknowledge();
        batch.border(0x11);
        batch
    }

    /// A transaction that removes the table.
    pub(crate) fn remove_table(table: &str) -> Batch {
        let mut batch = Batch::default();
        batch.border(0x10);
        batch.nft(2, 0, table); // NFT_MSG_DELTABLE
        let mut batch = batch.acknowledge();
        batch.border(0x11);
        batch
    }
}
