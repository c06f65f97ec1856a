//! Addresses of links, IPv4 and IPv6.
//! Rules: rtnetlink(7); include/uapi/linux/if_addr.h.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use nix::errno::Errno;

use crate::message::{Batch, Message, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL};
use crate::{Error, Socket};

const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_GETADDR: u16 = 22;

const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_BROADCAST: u16 = 4;
const IFA_FLAGS: u16 = 8;
/// The attributes that [`CopiedAddress`] keeps. The label contains the name of the link, and the times of the cache are
/// those of the old address.
const COPIED: [u16; 4] = [IFA_ADDRESS, IFA_LOCAL, IFA_BROADCAST, IFA_FLAGS];

/// Scope of addresses that are valid beyond their host and link (rtnetlink(7)).
const RT_SCOPE_UNIVERSE: u8 = 0;

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
/// The address is usable immediately, without duplicate address detection.
const IFA_F_NODAD: u8 = 2;
/// Longest prefix of an IPv4 network with a broadcast address, in bits (RFC 3021).
const BROADCAST_BITS_MAX: u8 = 30;

/// Size of `struct ifaddrmsg` in bytes.
const HEADER_BYTES: usize = 8;

/// An address and the length of its network prefix, for example `10.0.0.5/24`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    /// The address; it may have bits beyond the prefix.
    pub address: IpAddr,
    /// Prefix length in bits.
    pub prefix: u8,
}

impl Network {
    /// The network with only this address.
    pub fn host(address: IpAddr) -> Self {
        Self { address, prefix: if address.is_ipv4() { 32 } else { 128 } }
    }

    /// The network address, without host bits.
    #[must_use]
    pub fn base(self) -> Self {
        Self { address: from_bits(self, bits(self.address) & self.mask()), ..self }
    }

    /// Whether an address is in the network; false for the other address family.
    pub fn contains(self, address: IpAddr) -> bool {
        address.is_ipv4() == self.address.is_ipv4() && (bits(address) ^ bits(self.address)) & self.mask() == 0
    }

    /// The last address of the network.
    pub fn last(self) -> IpAddr {
        let host = !self.mask() & (u128::MAX >> (128 - self.width()));
        from_bits(self, bits(self.address) | host)
    }

    /// The netmask, with as many bytes as the address.
    pub(crate) fn mask_bytes(self) -> Vec<u8> {
        octets(from_bits(self, self.mask()))
    }

    fn width(self) -> u32 {
        if self.address.is_ipv4() { 32 } else { 128 }
    }

    /// The netmask as a number.
    fn mask(self) -> u128 {
        let all = u128::MAX >> (128 - self.width());
        all & !all.checked_shr(u32::from(self.prefix)).unwrap_or(0)
    }
}

/// An address of a link as the kernel describes it, which can be added to another link: with its peer, its broadcast address
/// and its flags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopiedAddress {
    network: Network,
    flags: u8,
    attributes: Vec<(u16, Vec<u8>)>,
}

impl CopiedAddress {
    /// `None` unless the message is an address of this link with global scope.
    fn read(message: &Message<'_>, index: u32) -> Option<Self> {
        let network = read(message, index)?;
        let [_, _, flags, scope] = *message.body.first_chunk()?;
        let attributes = message.attributes(HEADER_BYTES).filter(|(kind, _)| COPIED.contains(kind));
        let attributes = attributes.map(|(kind, value)| (kind, value.to_vec())).collect();
        (scope == RT_SCOPE_UNIVERSE).then_some(Self { network, flags, attributes })
    }
}

/// The address as a number.
fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u32::from(address).into(),
        IpAddr::V6(address) => address.into(),
    }
}

fn from_bits(like: Network, bits: u128) -> IpAddr {
    match like.address {
        IpAddr::V4(_) => Ipv4Addr::from(bits as u32).into(),
        IpAddr::V6(_) => Ipv6Addr::from(bits).into(),
    }
}

/// The bytes of an address in network order.
pub(crate) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// The kernel's number of the address family.
pub(crate) fn family(address: IpAddr) -> u8 {
    if address.is_ipv4() { AF_INET } else { AF_INET6 }
}

impl fmt::Display for Network {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.address, self.prefix)
    }
}

impl FromStr for Network {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (address, prefix) = text.split_once('/').ok_or(())?;
        let network = Self { address: address.parse().map_err(drop)?, prefix: prefix.parse().map_err(drop)? };
        if u32::from(network.prefix) > network.width() { Err(()) } else { Ok(network) }
    }
}

impl Batch {
    /// Adds an address that is usable immediately. An existing address is an error, unless `is_shared`.
    pub fn add_address(&mut self, index: u32, address: Network, is_shared: bool) {
        self.address_message(RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, index, address, "add address");
        if is_shared {
            self.tolerate(&[Errno::EEXIST]);
        }
        if address.address.is_ipv4() && address.prefix <= BROADCAST_BITS_MAX {
            self.attribute(IFA_BROADCAST, &octets(address.last()));
        }
    }

    /// Adds an address that another link had. An existing address is an error.
    pub fn add_copied_address(&mut self, index: u32, address: &CopiedAddress) {
        let CopiedAddress { network, flags, attributes } = address;
        let mut header = [family(network.address), network.prefix, *flags, RT_SCOPE_UNIVERSE, 0, 0, 0, 0];
        header[4..].copy_from_slice(&index.to_ne_bytes());
        let new = NLM_F_CREATE | NLM_F_EXCL;
        self.message(RTM_NEWADDR, new, &header, "add address", network.to_string());
        for (kind, value) in attributes {
            self.attribute(*kind, value);
        }
    }

    /// Removes an address. A missing address is success.
    pub fn remove_address(&mut self, index: u32, address: Network) {
        self.address_message(RTM_DELADDR, 0, index, address, "remove address");
        self.tolerate(&[Errno::EADDRNOTAVAIL, Errno::ENODEV]);
    }

    fn address_message(&mut self, kind: u16, flags: u16, index: u32, address: Network, op: &'static str) {
        let bytes = octets(address.address);
        let mut header = [family(address.address), address.prefix, 0, 0, 0, 0, 0, 0];
        header[2] = if address.address.is_ipv6() { IFA_F_NODAD } else { 0 };
        header[4..].copy_from_slice(&index.to_ne_bytes());
        self.message(kind, flags, &header, op, address.to_string());
        self.attribute(IFA_LOCAL, &bytes);
        self.attribute(IFA_ADDRESS, &bytes);
    }
}

impl Socket {
    /// The addresses of a link.
    ///
    /// # Errors
    /// [`Error`] if the kernel refuses the request.
    pub fn addresses(&self, index: u32) -> Result<Vec<Network>, Error> {
        self.dump(|| list(index), |message| read(message, index))
    }

    /// The addresses of a link with global scope, for [`Batch::add_copied_address`].
    ///
    /// # Errors
    /// [`Error`] if the kernel refuses the request.
    pub fn global_addresses(&self, index: u32) -> Result<Vec<CopiedAddress>, Error> {
        self.dump(|| list(index), |message| CopiedAddress::read(message, index))
    }
}

/// Lists the addresses of a link.
fn list(index: u32) -> Batch {
    let mut header = [0; HEADER_BYTES];
    header[4..].copy_from_slice(&index.to_ne_bytes());
    let mut batch = Batch::default();
    batch.message(RTM_GETADDR, NLM_F_DUMP, &header, "list addresses of link", index.to_string());
    batch
}

fn read(message: &Message<'_>, index: u32) -> Option<Network> {
    let header: &[u8; HEADER_BYTES] = message.body.first_chunk()?;
    let is_its = header[4..] == index.to_ne_bytes() && message.kind == RTM_NEWADDR;
    let found = |wanted| message.attributes(HEADER_BYTES).find(|(kind, _)| *kind == wanted);
    let (_, bytes) = found(IFA_LOCAL).or_else(|| found(IFA_ADDRESS)).filter(|_| is_its)?;
    let address = match bytes.len() {
        4 => IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?),
        _ => IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?),
    };
    Some(Network { address, prefix: header[1] })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::parse;

    #[test]
    fn labels_cache_times_and_other_links_are_not_copied() {
        const IFA_LABEL: u16 = 3;
        const IFA_CACHEINFO: u16 = 6;
        let message = |scope: u8, index: u8, local: &[u8]| {
            let mut batch = Batch::default();
            batch.message(RTM_NEWADDR, 0, &[AF_INET, 24, 0x80, scope, index, 0, 0, 0], "test", "a");
            batch.attribute(IFA_LOCAL, local);
            batch.attribute(IFA_LABEL, b"eth0\0");
            batch.attribute(IFA_CACHEINFO, &[0; 16]);
            batch.attribute(IFA_FLAGS, &[0x80, 0, 0, 0]);
            batch.finish().0
        };
        let copied = |bytes: &[u8]| parse(bytes).find_map(|message| CopiedAddress::read(&message, 7));
        let whole = message(0, 7, &[10, 0, 0, 1]);
        let address = copied(&whole).unwrap();
        assert_eq!((address.network.to_string().as_str(), address.flags), ("10.0.0.1/24", 0x80));
        let expected = [(IFA_LOCAL, vec![10, 0, 0, 1]), (IFA_FLAGS, vec![0x80, 0, 0, 0])];
        assert_eq!(address.attributes, expected);
        for (scope, index, local) in
            [(253, 7, &[10, 0, 0, 1][..]), (0, 8, &[10, 0, 0, 1]), (0, 7, &[10, 0, 0])]
        {
            assert_eq!(copied(&message(scope, index, local)), None, "{scope} {index} {local:?}");
        }
        for length in 0..whole.len() {
            let damaged = copied(&whole[..length]);
            assert!(damaged.is_none(), "{length}: {damaged:?}");
        }
    }

    #[test]
    fn first_and_last_addresses_of_networks_are_computed() {
        let cases = [
            ("10.1.2.3/24", "10.1.2.0/24", "10.1.2.255"),
            ("10.1.2.3/32", "10.1.2.3/32", "10.1.2.3"),
            ("10.1.2.3/0", "0.0.0.0/0", "255.255.255.255"),
            ("192.168.77.9/22", "192.168.76.0/22", "192.168.79.255"),
            ("fd00::1:5/112", "fd00::1:0/112", "fd00::1:ffff"),
            ("fd00::5/128", "fd00::5/128", "fd00::5"),
            ("::1/0", "::/0", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
        ];
        for (text, base, last) in cases {
            let network: Network = text.parse().unwrap();
            assert_eq!(network.to_string(), text);
            assert_eq!(network.base().to_string(), base, "{text}");
            assert_eq!(network.last().to_string(), last, "{text}");
            assert!(network.contains(network.last()) && network.contains(network.address), "{text}");
        }
        let network: Network = "10.1.2.0/24".parse().unwrap();
        for (address, expected) in [("10.1.3.0", false), ("10.1.2.255", true), ("::a01:200", false)] {
            assert_eq!(network.contains(address.parse().unwrap()), expected, "{address}");
        }
        assert_eq!(network.mask_bytes(), [255, 255, 255, 0]);
        for text in
            ["10.0.0.0", "10.0.0.0/33", "fd00::/129", "10.0.0/8", "/8", "10.0.0.0/", "a/1", "10.0.0.0/-1"]
        {
            assert_eq!(text.parse::<Network>(), Err(()), "{text}");
        }
    }
}
