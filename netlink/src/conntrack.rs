//! Connection tracking: deletes entries of existing connections, so that rules that were added later apply to them.
//! Otherwise datagrams of a client that used a port before the port's rule existed would never reach the rule's target, and
//! those of a client that used it before the rule was removed would go to the earlier target for ever.
//! Rules: include/uapi/linux/netfilter/nfnetlink_conntrack.h. Numbers in attributes are big endian.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use nix::errno::Errno;

use crate::message::{Batch, Message, NLM_F_DUMP, attributes};
use crate::nft::Protocol;
use crate::{Error, Socket};

/// Subsystem and message (NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_…).
const NEW: u16 = 1 << 8;
const GET: u16 = 1 << 8 | 1;
const DELETE: u16 = 1 << 8 | 2;

const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_FILTER: u16 = 25;
const CTA_FILTER_ORIG_FLAGS: u16 = 1;
const CTA_FILTER_REPLY_FLAGS: u16 = 2;
/// Fields that the filter compares, by their CTA_FILTER_FLAG (Linux 5.8): the source address, the protocol, the
/// destination port.
const SOURCE: u32 = 1;
const PROTOCOL: u32 = 1 << 3;
const DESTINATION_PORT: u32 = 1 << 5;
const CTA_TUPLE_IP: u16 = 1;
const CTA_IP_V4_SRC: u16 = 1;
const CTA_IP_V6_SRC: u16 = 3;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_DST_PORT: u16 = 3;
/// The flag of nested attributes, which the kernel expects also in a deletion.
const NLA_F_NESTED: u16 = 0x8000;

/// Size of `struct nfgenmsg` in bytes.
const HEADER_BYTES: usize = 4;
/// Size of deletions that are sent together, in bytes. The kernel refuses more than the socket's send buffer at once (EMSGSIZE),
/// which is 208 KiB by default.
const DELETIONS_BYTES: usize = 32 << 10;

/// The connections that are deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted<'a> {
    /// Connections to a port, before the translation of addresses, of the family IPv6 or IPv4.
    Port { port: u16, is_ipv6: bool },
    /// Connections that this address answers, after the translation of addresses.
    Address(IpAddr),
    /// Connections that one of these addresses began, of the family IPv6 or IPv4.
    From { addresses: &'a BTreeSet<IpAddr>, is_ipv6: bool },
}

impl Socket {
    /// Deletes the entries of connections to this port, for one address family.
    ///
    /// # Errors
    /// [`Error`] if the kernel refuses the request.
    pub fn forget_connections(&self, protocol: Protocol, port: u16, is_ipv6: bool) -> Result<(), Error> {
        self.forget(protocol, Wanted::Port { port, is_ipv6 })
    }

    /// Deletes the entries of connections to this address, also those that were redirected to it.
    ///
    /// # Errors
    /// [`Error`] if the kernel refuses the request.
    pub fn forget_connections_to(&self, protocol: Protocol, address: IpAddr) -> Result<(), Error> {
        self.forget(protocol, Wanted::Address(address))
    }

    /// Deletes the entries of connections that these addresses began. The answers to a pod that was masqueraded would otherwise go
    /// to the next pod with the address, as long as there are any.
    ///
    /// # Errors
    /// [`Error`] if the kernel refuses the request.
    pub fn forget_connections_from(
        &self,
        protocol: Protocol,
        addresses: &BTreeSet<IpAddr>,
    ) -> Result<(), Error> {
        let families = [false, true].into_iter();
        let mut wanted =
            families.filter(|is_ipv6| addresses.iter().any(|address| address.is_ipv6() == *is_ipv6));
        wanted.try_for_each(|is_ipv6| self.forget(protocol, Wanted::From { addresses, is_ipv6 }))
    }

    /// Deletes entries while the kernel lists them: there may be as many as the table has, which a pod's peers decide. A change
    /// during the listing is no reason to repeat it, because the deletions are changes.
    fn forget(&self, protocol: Protocol, wanted: Wanted<'_>) -> Result<(), Error> {
        let (mut batch, mut second, mut outcome) = (Batch::default(), None, Ok(()));
        self.ask(list(protocol, wanted), &mut |message| {
            let Some(parts) = read(message, protocol, wanted) else { return };
            batch.message(DELETE, 0, &wanted.header(), "forget connections to", wanted.target());
            batch.tolerate(&[Errno::ENOENT]);
            for (kind, value) in parts {
                batch.attribute(kind, &value);
            }
            if batch.len() > DELETIONS_BYTES && outcome.is_ok() {
                outcome = by_another(&mut second, std::mem::take(&mut batch));
            }
        })?;
        outcome?;
        self.run(batch)
    }
}

/// Sends a batch by another socket, because the first one is receiving a listing.
fn by_another(socket: &mut Option<Socket>, batch: Batch) -> Result<(), Error> {
    if socket.is_none() {
        *socket = Some(Socket::netfilter()?);
    }
    socket.as_ref().map_or(Ok(()), |socket| socket.run(batch))
}

impl Wanted<'_> {
    fn header(self) -> [u8; HEADER_BYTES] {
        let is_ipv6 = match self {
            Self::Port { is_ipv6, .. } | Self::From { is_ipv6, .. } => is_ipv6,
            Self::Address(address) => address.is_ipv6(),
        };
        [if is_ipv6 { 10 } else { 2 }, 0, 0, 0]
    }

    fn target(self) -> String {
        match self {
            Self::Port { port, .. } => format!("port {port}"),
            Self::Address(address) => address.to_string(),
            Self::From { .. } => "peers of pods".to_owned(),
        }
    }

    /// Whether a connection with this source address in the compared tuple is wanted.
    fn is_from(self, address: IpAddr) -> bool {
        match self {
            Self::Port { .. } => true,
            Self::Address(wanted) => wanted == address,
            Self::From { addresses, .. } => addresses.contains(&address),
        }
    }

    /// The IPv4 address that the kernel compares; `None` if it compares no address. Linux 6.18 does not find an equal address of
    /// IPv6, and it can compare only one: `read` compares all.
    fn filtered(self) -> Option<Ipv4Addr> {
        let only = match self {
            Self::Port { .. } => None,
            Self::Address(address) => Some(address),
            Self::From { addresses, .. } => addresses.first().copied().filter(|_| addresses.len() == 1),
        };
        match only {
            Some(IpAddr::V4(address)) => Some(address),
            _ => None,
        }
    }

    /// The attributes of the tuple's part for the protocol.
    fn parts(self, protocol: Protocol) -> Vec<(u16, Vec<u8>)> {
        let number = (CTA_PROTO_NUM, vec![protocol as u8]);
        match self {
            Self::Port { port, .. } => vec![number, (CTA_PROTO_DST_PORT, port.to_be_bytes().to_vec())],
            Self::Address(_) | Self::From { .. } => vec![number],
        }
    }

    /// The tuple that is compared, and the flags of the compared fields: those of the original tuple and of the reply's.
    fn compared(self) -> (u16, [u32; 2]) {
        let source = if self.filtered().is_some() { SOURCE } else { 0 };
        match self {
            Self::Port { .. } => (CTA_TUPLE_ORIG, [PROTOCOL | DESTINATION_PORT, 0]),
            Self::From { .. } => (CTA_TUPLE_ORIG, [source | PROTOCOL, 0]),
            Self::Address(_) => (CTA_TUPLE_REPLY, [0, source | PROTOCOL]),
        }
    }
}

fn list(protocol: Protocol, wanted: Wanted<'_>) -> Batch {
    let mut batch = Batch::default();
    batch.message(GET, NLM_F_DUMP, &wanted.header(), "list connections to", wanted.target());
    let (kind, [original, reply]) = wanted.compared();
    let tuple = batch.nest(kind);
    if let Some(address) = wanted.filtered() {
        let part = batch.nest(CTA_TUPLE_IP);
        batch.attribute(CTA_IP_V4_SRC, &address.octets());
        batch.end(part);
    }
    let part = batch.nest(CTA_TUPLE_PROTO);
    for (kind, value) in wanted.parts(protocol) {
        batch.attribute(kind, &value);
    }
    batch.end(part);
    batch.end(tuple);
    let filter = batch.nest(CTA_FILTER);
    batch.attribute(CTA_FILTER_ORIG_FLAGS, &original.to_ne_bytes());
    batch.attribute(CTA_FILTER_REPLY_FLAGS, &reply.to_ne_bytes());
    batch.end(filter);
    batch
}

/// The attributes that identify a connection for its deletion; `None` if it is another one than wanted.
fn read(message: &Message<'_>, protocol: Protocol, wanted: Wanted<'_>) -> Option<Vec<(u16, Vec<u8>)>> {
    if message.kind != NEW {
        return None;
    }
    let (compared, _) = wanted.compared();
    let (_, tuple) = message.attributes(HEADER_BYTES).find(|(kind, _)| *kind == compared)?;
    let part = |wanted: u16| attributes(tuple).find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
    wanted.is_from(source(part(CTA_TUPLE_IP)?)?).then_some(())?;
    let own = part(CTA_TUPLE_PROTO)?;
    let has = |(wanted, value): &(u16, Vec<u8>)| attributes(own).any(|found| found == (*wanted, value));
    wanted.parts(protocol).iter().all(has).then_some(())?;
    let parts = message.attributes(HEADER_BYTES).filter_map(|(kind, value)| match kind {
        CTA_TUPLE_ORIG => Some((kind | NLA_F_NESTED, value.to_vec())),
        CTA_ID | CTA_ZONE => Some((kind, value.to_vec())),
        _ => None,
    });
    Some(parts.collect())
}

/// The source address of a tuple's part for addresses.
fn source(part: &[u8]) -> Option<IpAddr> {
    attributes(part).find_map(|(kind, value)| match kind {
        CTA_IP_V4_SRC => value.first_chunk::<4>().map(|octets| IpAddr::from(*octets)),
        CTA_IP_V6_SRC => value.first_chunk::<16>().map(|octets| IpAddr::from(*octets)),
        _ => None,
    })
}
