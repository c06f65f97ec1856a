//! Connection tracking: deletes entries of existing connections, so that rules that were added later apply to them.
//! Otherwise datagrams of a client that used a port before the port's rule existed would never reach the rule's target, and
//! those of a client that used it before the rule was removed would go to the earlier target for ever.
//! Rules: include/uapi/linux/netfilter/nfnetlink_conntrack.h. Numbers in attributes are big endian.

use std::net::IpAddr;

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

/// The connections that are deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// Connections to a port, before the translation of addresses, of the family IPv6 or IPv4.
    Port { port: u16, is_ipv6: bool },
    /// Connections that this address answers, after the translation of addresses.
    Address(IpAddr),
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

    fn forget(&self, protocol: Protocol, wanted: Wanted) -> Result<(), Error> {
        let found = self.dump(|| list(protocol, wanted), |message| read(message, protocol, wanted))?;
        let mut batch = Batch::default();
        for parts in found {
            batch.message(DELETE, 0, &wanted.header(), "forget connections to", wanted.target());
            batch.tolerate(&[Errno::ENOENT]);
            for (kind, value) in parts {
                batch.attribute(kind, &value);
            }
        }
        self.run(batch)
    }
}

impl Wanted {
    fn header(self) -> [u8; HEADER_BYTES] {
        let is_ipv6 = match self {
            Self::Port { is_ipv6, .. } => is_ipv6,
            Self::Address(address) => address.is_ipv6(),
        };
        [if is_ipv6 { 10 } else { 2 }, 0, 0, 0]
    }

    fn target(self) -> String {
        match self {
            Self::Port { port, .. } => format!("port {port}"),
            Self::Address(address) => address.to_string(),
        }
    }

    /// The attribute with the address, inside of the tuple's part for addresses; `None` if no address is compared.
    fn source(self) -> Option<(u16, Vec<u8>)> {
        match self {
            Self::Port { .. } => None,
            Self::Address(IpAddr::V4(address)) => Some((CTA_IP_V4_SRC, address.octets().to_vec())),
            Self::Address(IpAddr::V6(address)) => Some((CTA_IP_V6_SRC, address.octets().to_vec())),
        }
    }

    /// The attributes of the tuple's part for the protocol.
    fn parts(self, protocol: Protocol) -> Vec<(u16, Vec<u8>)> {
        let number = (CTA_PROTO_NUM, vec![protocol as u8]);
        match self {
            Self::Port { port, .. } => vec![number, (CTA_PROTO_DST_PORT, port.to_be_bytes().to_vec())],
            Self::Address(_) => vec![number],
        }
    }

    /// The tuple that is compared, and the flags of the compared fields: those of the original tuple and of the reply's.
    fn compared(self) -> (u16, [u32; 2]) {
        match self {
            Self::Port { .. } => (CTA_TUPLE_ORIG, [PROTOCOL | DESTINATION_PORT, 0]),
            Self::Address(IpAddr::V4(_)) => (CTA_TUPLE_REPLY, [0, SOURCE | PROTOCOL]),
            // Linux 6.18 does not find an equal address of IPv6 with SOURCE: `read` compares it.
            Self::Address(IpAddr::V6(_)) => (CTA_TUPLE_REPLY, [0, PROTOCOL]),
        }
    }
}

fn list(protocol: Protocol, wanted: Wanted) -> Batch {
    let mut batch = Batch::default();
    batch.message(GET, NLM_F_DUMP, &wanted.header(), "list connections to", wanted.target());
    let (kind, [original, reply]) = wanted.compared();
    let tuple = batch.nest(kind);
    if let Some((kind, address)) = wanted.source() {
        let part = batch.nest(CTA_TUPLE_IP);
        batch.attribute(kind, &address);
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
fn read(message: &Message<'_>, protocol: Protocol, wanted: Wanted) -> Option<Vec<(u16, Vec<u8>)>> {
    if message.kind != NEW {
        return None;
    }
    let (compared, _) = wanted.compared();
    let (_, tuple) = message.attributes(HEADER_BYTES).find(|(kind, _)| *kind == compared)?;
    let has = |part: u16, (wanted, value): &(u16, Vec<u8>)| {
        let (_, part) = attributes(tuple).find(|(kind, _)| *kind == part)?;
        attributes(part).any(|found| found == (*wanted, value.as_slice())).then_some(())
    };
    wanted.source().map_or(Some(()), |source| has(CTA_TUPLE_IP, &source))?;
    wanted.parts(protocol).iter().try_for_each(|part| has(CTA_TUPLE_PROTO, part))?;
    let parts = message.attributes(HEADER_BYTES).filter_map(|(kind, value)| match kind {
        CTA_TUPLE_ORIG => Some((kind | NLA_F_NESTED, value.to_vec())),
        CTA_ID | CTA_ZONE => Some((kind, value.to_vec())),
        _ => None,
    });
    Some(parts.collect())
}
