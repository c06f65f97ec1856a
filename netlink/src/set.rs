//! Sets and maps of nftables, and their elements. A rule looks a packet up in a set in constant time, so a pod is one
//! element of a set instead of a rule of its own: it is added and removed at a cost that does not depend on the other
//! elements, and a packet is compared with one rule whatever their number. Each element has its owner's name as a
//! comment, like a rule.
//!
//! ```text
//!   key, value   fields one after the other, each padded with zeros to a multiple of 4 bytes
//!   registers    the same: NFT_REG32_00 and following
//! ```
//! An element cannot be added to a set that has it already ([`Errno::EEXIST`]); the caller looks for its owner
//! ([`Socket::owner_of`]) and decides. Rules: include/uapi/linux/netfilter/nf_tables.h; the types of keys are those of
//! nft's listings (nftables: include/datatype.h, `enum datatypes`).

use std::collections::BTreeSet;
use std::net::IpAddr;

use nix::errno::Errno;

use crate::address::octets;
use crate::message::{Batch, Message, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, attributes, text};
use crate::nft::{self, Family, MISSING, NFTA_LIST_ELEM, Protocol, Rules};
use crate::rule::{
    LINK_HEADER, LINK_NAME_BYTES, NETWORK_HEADER, NFT_META_IIFNAME, NFT_META_L4PROTO, NFTA_DATA_VALUE, Rule,
    TRANSPORT_HEADER, link_name,
};
use crate::{Error, Socket};

const NFT_MSG_NEWSET: u16 = 9;
const NFT_MSG_GETSET: u16 = 10;
const NFT_MSG_DELSET: u16 = 11;
const NFT_MSG_NEWSETELEM: u16 = 12;
const NFT_MSG_GETSETELEM: u16 = 13;
const NFT_MSG_DELSETELEM: u16 = 14;

const NFTA_SET_TABLE: u16 = 1;
const NFTA_SET_NAME: u16 = 2;
const NFTA_SET_FLAGS: u16 = 3;
const NFTA_SET_KEY_TYPE: u16 = 4;
const NFTA_SET_KEY_LEN: u16 = 5;
const NFTA_SET_DATA_TYPE: u16 = 6;
const NFTA_SET_DATA_LEN: u16 = 7;
const NFTA_SET_ID: u16 = 10;
const NFT_SET_MAP: u32 = 8;
/// Flag of a removal: refuses to remove an object that contains others (NLM_F_NONREC).
const NLM_F_NONREC: u16 = 0x100;

const NFTA_SET_ELEM_LIST_TABLE: u16 = 1;
const NFTA_SET_ELEM_LIST_SET: u16 = 2;
const NFTA_SET_ELEM_LIST_ELEMENTS: u16 = 3;
const NFTA_SET_ELEM_KEY: u16 = 1;
const NFTA_SET_ELEM_DATA: u16 = 2;
const NFTA_SET_ELEM_USERDATA: u16 = 6;

const NFT_LOOKUP_F_INV: u32 = 1;

/// The first register of 4 bytes (NFT_REG32_00).
const FIRST: u32 = 8;
/// Size of a register in bytes.
const REGISTER_BYTES: usize = 4;
/// Bits of a field's type in the type of a key of several fields.
const TYPE_BITS: u32 = 6;

/// One field of a key or a value, and where a packet has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// The address of the sender.
    Source,
    /// The address of the receiver.
    Destination,
    /// The protocol above IP.
    Protocol,
    /// The receiver's port.
    Port,
    /// The link on which a packet arrived, by its name.
    Link,
    /// The MAC address of a frame's sender, for [`Family::Bridge`] as all following fields.
    Hardware,
    /// The MAC address of an ARP message's sender (RFC 826).
    ArpHardware,
    /// The IPv4 address of an ARP message's sender.
    ArpAddress,
    /// The address of the sender of an IPv6 packet.
    Ipv6Source,
    /// The address whose owner an ICMPv6 neighbour advertisement names (RFC 4861, section 4.4).
    AdvertisedTarget,
}

/// The value of one field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Value of a field with an IP address.
    Address(IpAddr),
    /// Value of [`Field::Protocol`].
    Protocol(Protocol),
    /// Value of [`Field::Port`].
    Port(u16),
    /// Value of [`Field::Link`], at most 15 bytes.
    Link(String),
    /// Value of [`Field::Hardware`] or [`Field::ArpHardware`].
    Hardware([u8; 6]),
}

/// A set, or a map if it has fields of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set {
    /// Name of the set in its table.
    pub name: String,
    /// Fields of the key.
    pub key: &'static [Field],
    /// Fields of the value; empty for a set.
    pub value: &'static [Field],
}

impl Field {
    /// Number of nft's type, and length in bytes.
    fn kind(self, family: Family) -> (u32, usize) {
        match (self, family) {
            (Self::Source | Self::Destination, Family::Ipv6)
            | (Self::Ipv6Source | Self::AdvertisedTarget, _) => (8, 16),
            (Self::Source | Self::Destination | Self::ArpAddress, _) => (7, 4),
            (Self::Hardware | Self::ArpHardware, _) => (9, 6),
            (Self::Protocol, _) => (12, 1),
            (Self::Port, _) => (13, 2),
            (Self::Link, _) => (41, LINK_NAME_BYTES),
        }
    }

    fn registers(self, family: Family) -> u32 {
        self.kind(family).1.div_ceil(REGISTER_BYTES) as u32
    }
}

/// Type of a key or value, and its length in bytes. A single field is not padded.
fn layout(fields: &[Field], family: Family) -> (u32, usize) {
    match fields {
        [field] => field.kind(family),
        _ => fields.iter().fold((0, 0), |(kind, bytes), field| {
            let registers = field.registers(family) as usize;
            (kind << TYPE_BITS | field.kind(family).0, bytes + registers * REGISTER_BYTES)
        }),
    }
}

/// The bytes of a key or value.
fn encode(values: &[Value]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for value in values {
        match value {
            Value::Address(address) => bytes.extend(octets(*address)),
            Value::Protocol(protocol) => bytes.push(*protocol as u8),
            Value::Port(port) => bytes.extend(port.to_be_bytes()),
            Value::Link(name) => bytes.extend(link_name(name)),
            Value::Hardware(address) => bytes.extend(address),
        }
        if values.len() > 1 {
            bytes.resize(bytes.len().next_multiple_of(REGISTER_BYTES), 0);
        }
    }
    bytes
}

/// Starts a message about elements of a set and adds one element; `owner` is the comment of an element to be added.
fn element(
    batch: &mut Batch,
    (message, flags, op): (u16, u16, &'static str),
    (family, table, set): (Family, &str, &str),
    key: &[u8],
    content: Option<(&[u8], &str)>,
) {
    batch.message(nft::kind(message), flags, &[family.number(), 0, 0, 0], op, format!("{table} {set}"));
    batch.text(NFTA_SET_ELEM_LIST_TABLE, table);
    batch.text(NFTA_SET_ELEM_LIST_SET, set);
    let list = batch.nest(NFTA_SET_ELEM_LIST_ELEMENTS);
    let nest = batch.nest(NFTA_LIST_ELEM);
    data(batch, NFTA_SET_ELEM_KEY, key);
    if let Some((value, owner)) = content {
        if !value.is_empty() {
            data(batch, NFTA_SET_ELEM_DATA, value);
        }
        batch.attribute(NFTA_SET_ELEM_USERDATA, &nft::comment(owner));
    }
    batch.end(nest);
    batch.end(list);
}

fn data(batch: &mut Batch, kind: u16, value: &[u8]) {
    let nest = batch.nest(kind);
    batch.attribute(NFTA_DATA_VALUE, value);
    batch.end(nest);
}

const ADD: (u16, u16, &str) = (NFT_MSG_NEWSETELEM, NLM_F_CREATE | NLM_F_EXCL, "add nftables element to");
const REMOVE: (u16, u16, &str) = (NFT_MSG_DELSETELEM, 0, "remove nftables element of");
const FIND: (u16, u16, &str) = (NFT_MSG_GETSETELEM, 0, "find nftables element of");

impl Rules<'_> {
    /// Adds a set or map if it does not exist.
    pub fn set(&mut self, set: &Set) {
        let (header, target) = ([self.family.number(), 0, 0, 0], format!("{} {}", self.table, set.name));
        let id = self.batch.len() as u32;
        let ((key, key_bytes), (value, value_bytes)) =
            (layout(set.key, self.family), layout(set.value, self.family));
        let batch = &mut self.batch;
        batch.message(nft::kind(NFT_MSG_NEWSET), NLM_F_CREATE, &header, "make nftables set", target);
        batch.text(NFTA_SET_TABLE, self.table);
        batch.text(NFTA_SET_NAME, &set.name);
        batch.number(NFTA_SET_FLAGS, if set.value.is_empty() { 0 } else { NFT_SET_MAP });
        batch.number(NFTA_SET_KEY_TYPE, key);
        batch.number(NFTA_SET_KEY_LEN, key_bytes as u32);
        if !set.value.is_empty() {
            batch.number(NFTA_SET_DATA_TYPE, value);
            batch.number(NFTA_SET_DATA_LEN, value_bytes as u32);
        }
        // Required, and unique in the transaction; the rules refer to the set by its name.
        batch.number(NFTA_SET_ID, id);
    }

    /// Adds an element of this owner; an existing one with this key is an error (EEXIST).
    pub fn element(&mut self, set: &Set, key: &[Value], value: &[Value]) {
        let content = Some((&encode(value)[..], self.owner));
        element(&mut self.batch, ADD, (self.family, self.table, &set.name), &encode(key), content);
    }

    /// Removes the element with this key, of any owner; a missing one is an error (ENOENT).
    pub fn remove_element(&mut self, set: &Set, key: &[Value]) {
        element(&mut self.batch, REMOVE, (self.family, self.table, &set.name), &encode(key), None);
    }
}

impl Rule<'_> {
    /// Loads the fields of the packet into the first registers.
    fn load_fields(&mut self, fields: &[Field]) {
        let mut register = FIRST;
        for field in fields {
            let (_, length) = field.kind(self.family);
            let (base, offset) = match (field, self.family) {
                (Field::Source, Family::Ipv6) | (Field::Ipv6Source, _) => (NETWORK_HEADER, 8),
                (Field::Source, _) => (NETWORK_HEADER, 12),
                (Field::Destination, Family::Ipv6) => (NETWORK_HEADER, 24),
                (Field::Destination, _) => (NETWORK_HEADER, 16),
                (Field::Port, _) => (TRANSPORT_HEADER, 2),
                (Field::Hardware, _) => (LINK_HEADER, 6),
                (Field::ArpHardware, _) => (NETWORK_HEADER, 8),
                (Field::ArpAddress, _) => (NETWORK_HEADER, 14),
                (Field::AdvertisedTarget, _) => (TRANSPORT_HEADER, 8),
                (Field::Protocol | Field::Link, _) => {
                    let key = if *field == Field::Link { NFT_META_IIFNAME } else { NFT_META_L4PROTO };
                    // NFTA_META_DREG, _KEY
                    self.expression("meta", &[(1, register), (2, key)], &[]);
                    register += field.registers(self.family);
                    continue;
                }
            };
            self.load_into(register, base, offset, length as u32);
            register += field.registers(self.family);
        }
    }

    /// Matches packets whose fields are a key of the set.
    pub fn is_in(&mut self, set: &Set) {
        self.look_up(set, 0);
    }

    /// Matches packets whose fields are no key of the set.
    pub fn is_not_in(&mut self, set: &Set) {
        self.look_up(set, NFT_LOOKUP_F_INV);
    }

    /// Looks the packet up in a set (NFTA_LOOKUP_SET, _SREG, _FLAGS).
    fn look_up(&mut self, set: &Set, flags: u32) {
        self.load_fields(set.key);
        self.express("lookup", &|batch| {
            batch.text(1, &set.name);
            batch.number(2, FIRST);
            batch.number(5, flags);
        });
    }

    /// Redirects packets whose fields are a key of the map to its value, an address and a port (NFTA_LOOKUP_SET, _SREG,
    /// _DREG).
    pub fn redirect_by(&mut self, map: &Set) {
        self.load_fields(map.key);
        self.express("lookup", &|batch| {
            batch.text(1, &map.name);
            batch.number(2, FIRST);
            batch.number(3, FIRST);
        });
        let port = FIRST + Field::Destination.registers(self.family);
        self.translate(FIRST, port);
    }
}

/// An element that was found: the name of its set, and its key.
pub(crate) type Found = (String, Vec<u8>);

impl Socket {
    /// The owner of the element with this key; `None` if there is no such element, set or table.
    ///
    /// # Errors
    /// [`Error`] if the kernel refuses the request.
    pub fn owner_of(
        &self,
        table: &str,
        family: Family,
        set: &Set,
        key: &[Value],
    ) -> Result<Option<String>, Error> {
        let mut batch = Batch::default();
        element(&mut batch, FIND, (family, table, &set.name), &encode(key), None);
        batch.tolerate(&[Errno::ENOENT]);
        batch.acknowledge();
        let mut owner = None;
        self.ask(batch, &mut |message| {
            elements(message, &mut |_, comment| owner = nft::owner(comment).map(str::to_owned));
        })?;
        Ok(owner)
    }

    /// The names of the sets of a table.
    pub(crate) fn sets_of(&self, table: &str, family: Family) -> Result<Vec<String>, Error> {
        self.dump(
            || list(NFT_MSG_GETSET, "list nftables sets of", family, table, None),
            |message| {
                let mut names = message.attributes(nft::HEADER_BYTES);
                let is_set = message.kind == nft::kind(NFT_MSG_NEWSET);
                let name = names.find(|(kind, _)| is_set && *kind == NFTA_SET_NAME);
                name.map(|(_, name)| text(name).to_owned())
            },
        )
    }

    /// The elements of `owner` in all sets of a table.
    pub(crate) fn elements_of(&self, table: &str, owner: &str, family: Family) -> Result<Vec<Found>, Error> {
        let take =
            |set: &str, key: &[u8], found: &str| (found == owner).then(|| (set.to_owned(), key.to_vec()));
        self.elements_if(table, family, &|_| true, take)
    }

    /// The owners of the elements in the sets of a table, of all families, whose names are accepted by `is_set`.
    ///
    /// # Errors
    /// [`Error`] if the kernel refuses the request.
    pub fn owners_in(&self, table: &str, is_set: &dyn Fn(&str) -> bool) -> Result<BTreeSet<String>, Error> {
        let mut found = BTreeSet::new();
        for family in Family::ALL {
            found.extend(self.elements_if(table, family, is_set, |_, _, owner| Some(owner.to_owned()))?);
        }
        Ok(found)
    }

    /// Collects what `take` returns for the set, the key and the owner of each element in the accepted sets of a table.
    fn elements_if<T>(
        &self,
        table: &str,
        family: Family,
        is_set: &dyn Fn(&str) -> bool,
        take: impl Fn(&str, &[u8], &str) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        let mut found = Vec::new();
        for set in self.sets_of(table, family)?.into_iter().filter(|set| is_set(set)) {
            let listing = || list(NFT_MSG_GETSETELEM, "list nftables elements of", family, table, Some(&set));
            let taken = self.dump(listing, |message| {
                let mut taken = Vec::new();
                elements(message, &mut |key, comment| {
                    taken.extend(nft::owner(comment).and_then(|owner| take(&set, key, owner)));
                });
                Some(taken)
            })?;
            found.extend(taken.into_iter().flatten());
        }
        Ok(found)
    }
}

/// Adds the removal of a found element to a transaction.
pub(crate) fn remove(batch: &mut Batch, family: Family, table: &str, (set, key): &Found) {
    element(batch, REMOVE, (family, table, set), key, None);
}

/// Adds the removal of a set to a transaction; one with elements is an error (EBUSY).
pub(crate) fn remove_if_empty(batch: &mut Batch, family: Family, table: &str, set: &str) {
    let (header, target) = ([family.number(), 0, 0, 0], format!("{table} {set}"));
    batch.message(nft::kind(NFT_MSG_DELSET), NLM_F_NONREC, &header, "remove nftables set", target);
    batch.text(NFTA_SET_TABLE, table);
    batch.text(NFTA_SET_NAME, set);
}

fn list(message: u16, op: &'static str, family: Family, table: &str, set: Option<&str>) -> Batch {
    let mut batch = Batch::default();
    batch.message(nft::kind(message), NLM_F_DUMP, &[family.number(), 0, 0, 0], op, table);
    batch.tolerate(&MISSING);
    // The number of the table's attribute is 1 in both kinds of messages.
    batch.text(NFTA_SET_TABLE, table);
    if let Some(set) = set {
        batch.text(NFTA_SET_ELEM_LIST_SET, set);
    }
    batch
}

/// Calls `read` with the key and the user data of each element in a message.
fn elements(message: &Message<'_>, read: &mut dyn FnMut(&[u8], &[u8])) {
    if message.kind != nft::kind(NFT_MSG_NEWSETELEM) {
        return;
    }
    let lists =
        message.attributes(nft::HEADER_BYTES).filter(|(kind, _)| *kind == NFTA_SET_ELEM_LIST_ELEMENTS);
    for (_, element) in lists.flat_map(|(_, list)| attributes(list)) {
        let value = |wanted| attributes(element).find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
        let key = value(NFTA_SET_ELEM_KEY).and_then(|key| attributes(key).next());
        if let (Some((NFTA_DATA_VALUE, key)), Some(comment)) = (key, value(NFTA_SET_ELEM_USERDATA)) {
            read(key, comment);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_padded_as_registers_are() {
        let port = [Value::Protocol(Protocol::Udp), Value::Port(0x1234)];
        assert_eq!(encode(&port), [17, 0, 0, 0, 0x12, 0x34, 0, 0]);
        let fields = [Field::Destination, Field::Protocol, Field::Port];
        assert_eq!(layout(&fields, Family::Ipv4), (7 << 12 | 12 << 6 | 13, 12));
        assert_eq!(layout(&fields, Family::Ipv6), (8 << 12 | 12 << 6 | 13, 24));
        let address = [Value::Address([10, 1, 0, 5].into())];
        assert_eq!((encode(&address), layout(&[Field::Source], Family::Ipv4)), (vec![10, 1, 0, 5], (7, 4)));
        let port = [Value::Link("veth0".into()), Value::Hardware([2; 6])];
        assert_eq!(encode(&port), b"veth0\0\0\0\0\0\0\0\0\0\0\0\x02\x02\x02\x02\x02\x02\0\0");
        assert_eq!(layout(&[Field::Link, Field::Hardware], Family::Bridge), (41 << 6 | 9, 24));
    }
}
