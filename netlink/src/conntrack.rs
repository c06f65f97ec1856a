//! Connection tracking: deletes entries of existing connections, so that rules that were added later apply to them.
//! Otherwise datagrams of a client that used a port before the port's rule existed would never reach the rule's target.
//! Rules: include/uapi/linux/netfilter/nfnetlink_conntrack.h. Numbers in attributes are big endian.

use nix::errno::Errno;

use crate::message::{Batch, Message, NLM_F_DUMP, attributes};
use crate::nft::Protocol;
use crate::{Error, Socket};

/// Subsystem and message (NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_…).
const NEW: u16 = 1 << 8;
const GET: u16 = 1 << 8 | 1;
const DELETE: u16 = 1 << 8 | 2;

const CTA_TUPLE_ORIG: u16 = 1;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_FILTER: u16 = 25;
const CTA_FILTER_ORIG_FLAGS: u16 = 1;
const CTA_FILTER_REPLY_FLAGS: u16 = 2;
/// The filter compares the protocol and the destination port of the tuple (CTA_FILTER_FLAG of CTA_PROTO_NUM,
/// CTA_PROTO_DST_PORT; Linux 5.8).
const PROTOCOL_AND_PORT: u32 = 1 << 3 | 1 << 5;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_DST_PORT: u16 = 3;
/// The flag of nested attributes, which the kernel expects also in a deletion.
const NLA_F_NESTED: u16 = 0x8000;

/// Size of `struct nfgenmsg` in bytes.
const HEADER_BYTES: usize = 4;

impl Socket {
    /// Deletes the entries of connections to this port, for one address family.
    ///
    /// # Errors
    /// [`Error`] if the kernel refuses the request.
    pub fn forget_connections(&self, protocol: Protocol, port: u16, is_ipv6: bool) -> Result<(), Error> {
        let header = [if is_ipv6 { 10 } else { 2 }, 0, 0, 0];
        let found = self.dump(|| list(protocol, port, header), |message| read(message, protocol, port))?;
        let mut batch = Batch::default();
        for parts in found {
            batch.message(DELETE, 0, &header, "forget connections to port", port.to_string());
            batch.tolerate(&[Errno::ENOENT]);
            for (kind, value) in parts {
                batch.attribute(kind, &value);
            }
        }
        self.run(batch)
    }
}

fn list(protocol: Protocol, port: u16, header: [u8; HEADER_BYTES]) -> Batch {
    let mut batch = Batch::default();
    batch.message(GET, NLM_F_DUMP, &header, "list connections to port", port.to_string());
    let tuple = batch.nest(CTA_TUPLE_ORIG);
    let part = batch.nest(CTA_TUPLE_PROTO);
    batch.attribute(CTA_PROTO_NUM, &[protocol as u8]);
    batch.attribute(CTA_PROTO_DST_PORT, &port.to_be_bytes());
    batch.end(part);
    batch.end(tuple);
    let filter = batch.nest(CTA_FILTER);
    batch.attribute(CTA_FILTER_ORIG_FLAGS, &PROTOCOL_AND_PORT.to_ne_bytes());
    batch.attribute(CTA_FILTER_REPLY_FLAGS, &0_u32.to_ne_bytes());
    batch.end(filter);
    batch
}

/// The attributes that identify a connection for its deletion; `None` if the connection has another destination port.
fn read(message: &Message<'_>, protocol: Protocol, port: u16) -> Option<Vec<(u16, Vec<u8>)>> {
    if message.kind != NEW {
        return None;
    }
    let (_, tuple) = message.attributes(HEADER_BYTES).find(|(kind, _)| *kind == CTA_TUPLE_ORIG)?;
    let (_, part) = attributes(tuple).find(|(kind, _)| *kind == CTA_TUPLE_PROTO)?;
    let is = |wanted: u16, bytes: &[u8]| attributes(part).any(|found| found == (wanted, bytes));
    if !is(CTA_PROTO_NUM, &[protocol as u8]) || !is(CTA_PROTO_DST_PORT, &port.to_be_bytes()) {
        return None;
    }
    let parts = message.attributes(HEADER_BYTES).filter_map(|(kind, value)| match kind {
        CTA_TUPLE_ORIG => Some((kind | NLA_F_NESTED, value.to_vec())),
        CTA_ID | CTA_ZONE => Some((kind, value.to_vec())),
        _ => None,
    });
    Some(parts.collect())
}
