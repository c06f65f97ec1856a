//! The expressions of a rule of nftables: matches, followed by actions. Kernel: include/uapi/linux/netfilter/nf_tables.h; numbers in
//! attributes are big endian, except those that the kernel compares with its own (marks, results of routing look-ups).

use std::net::IpAddr;

use crate::address::{Network, octets};
use crate::message::Batch;
use crate::nft::{Family, NFTA_EXPR_NAME, NFTA_LIST_ELEM, Protocol};

const NFTA_EXPR_DATA: u16 = 2;
pub(crate) const NFTA_DATA_VALUE: u16 = 1;
/// The first of the two registers that rules use, 16 bytes each (NFT_REG_1).
const FIRST: u32 = 1;
const SECOND: u32 = 2;
const NFT_CMP_EQ: u32 = 0;
const NFT_CMP_NEQ: u32 = 1;
const NFT_CMP_GTE: u32 = 5;
/// Base of offsets in a frame's header (NFT_PAYLOAD_LL_HEADER).
pub(crate) const LINK_HEADER: u32 = 0;
/// Base of offsets in a packet's network header (NFT_PAYLOAD_NETWORK_HEADER).
pub(crate) const NETWORK_HEADER: u32 = 1;
pub(crate) const TRANSPORT_HEADER: u32 = 2;
const NFT_META_PROTOCOL: u32 = 1;
const NFT_META_MARK: u32 = 3;
pub(crate) const NFT_META_IIFNAME: u32 = 6;
pub(crate) const NFT_META_L4PROTO: u32 = 16;
/// The protocol ICMPv6 (IPPROTO_ICMPV6).
const ICMPV6: u8 = 58;
/// The header of fragments of IPv6 (IPPROTO_FRAGMENT).
const FRAGMENT: u8 = 44;
/// The Ethernet protocol IPv6 (include/uapi/linux/if_ether.h).
pub const ETH_P_IPV6: u16 = 0x86dd;
/// Maximum length of a link's name, with its NUL (IFNAMSIZ).
pub(crate) const LINK_NAME_BYTES: usize = 16;
const NF_DROP: u32 = 0;
const NF_ACCEPT: u32 = 1;
const NFT_FIB_RESULT_ADDRTYPE: u32 = 3;
const NFTA_FIB_F_DADDR: u32 = 2;
const RTN_LOCAL: u32 = 2;
const NFT_NAT_DNAT: u32 = 1;
pub(crate) const NFT_JUMP: u32 = -3_i32 as u32;

/// A rule under construction: its matches, followed by its actions.
#[derive(Debug)]
pub struct Rule<'a> {
    pub(crate) batch: &'a mut Batch,
    pub(crate) family: Family,
}

/// The name of a link as the kernel compares it.
pub(crate) fn link_name(name: &str) -> Vec<u8> {
    let mut bytes = name.as_bytes().to_vec();
    bytes.resize(LINK_NAME_BYTES, 0);
    bytes
}

impl Rule<'_> {
    /// Adds an expression with its name and a function that writes its attributes.
    pub(crate) fn express(&mut self, name: &str, write: &dyn Fn(&mut Batch)) {
        let element = self.batch.nest_unmarked(NFTA_LIST_ELEM);
        self.batch.text(NFTA_EXPR_NAME, name);
        let data = self.batch.nest_unmarked(NFTA_EXPR_DATA);
        write(self.batch);
        self.batch.end(data);
        self.batch.end(element);
    }

    /// Adds an expression with its name and its attributes, numbers or values.
    pub(crate) fn expression(&mut self, name: &str, numbers: &[(u16, u32)], values: &[(u16, &[u8])]) {
        self.express(name, &|batch| {
            for (kind, number) in numbers {
                batch.number(*kind, *number);
            }
            for (kind, value) in values {
                let nest = batch.nest_unmarked(*kind);
                batch.attribute(NFTA_DATA_VALUE, value);
                batch.end(nest);
            }
        });
    }

    /// Loads `length` bytes of the packet.
    fn load(&mut self, base: u32, offset: u32, length: u32) {
        self.load_into(FIRST, base, offset, length);
    }

    /// Loads `length` bytes of the packet into a register (NFTA_PAYLOAD_DREG, _BASE, _OFFSET, _LEN).
    pub(crate) fn load_into(&mut self, register: u32, base: u32, offset: u32, length: u32) {
        self.expression("payload", &[(1, register), (2, base), (3, offset), (4, length)], &[]);
    }

    /// Continues if the comparison with the first register holds (NFTA_CMP_SREG, _OP, _DATA).
    fn compare(&mut self, operation: u32, value: &[u8]) {
        self.expression("cmp", &[(1, FIRST), (2, operation)], &[(3, value)]);
    }

    /// Applies `mask` and then XOR with `flip` to the first register (NFTA_BITWISE_SREG to _XOR).
    fn mask(&mut self, mask: &[u8], flip: &[u8]) {
        let length = mask.len() as u32;
        self.expression("bitwise", &[(1, FIRST), (2, FIRST), (3, length)], &[(4, mask), (5, flip)]);
    }

    /// Loads metadata of the packet (NFTA_META_DREG, _KEY).
    fn load_meta(&mut self, key: u32) {
        self.expression("meta", &[(1, FIRST), (2, key)], &[]);
    }

    fn address(&mut self, offsets: [u32; 2], network: Network, operation: u32) {
        let (offset, length) = if self.family == Family::Ipv6 { (offsets[1], 16) } else { (offsets[0], 4) };
        self.load(NETWORK_HEADER, offset, length);
        if network != Network::host(network.address) {
            let mask = network.mask_bytes();
            self.mask(&mask, &vec![0; mask.len()]);
        }
        self.compare(operation, &octets(network.base().address));
    }

    /// Matches packets that did not arrive on the link `name`.
    pub(crate) fn not_from_link(&mut self, name: &str) {
        self.load_meta(NFT_META_IIFNAME);
        self.compare(NFT_CMP_NEQ, &link_name(name));
    }

    /// Matches packets from an address of `network`.
    pub fn from(&mut self, network: Network) {
        self.address([12, 8], network, NFT_CMP_EQ);
    }

    /// Matches packets to an address of `network`.
    pub fn to(&mut self, network: Network) {
        self.address([16, 24], network, NFT_CMP_EQ);
    }

    /// Matches packets to an address outside of `network`.
    pub fn not_to(&mut self, network: Network) {
        self.address([16, 24], network, NFT_CMP_NEQ);
    }

    /// Matches packets to an address of this host (NFTA_FIB_DREG, _RESULT, _FLAGS).
    pub fn to_this_host(&mut self) {
        self.expression("fib", &[(1, FIRST), (2, NFT_FIB_RESULT_ADDRTYPE), (3, NFTA_FIB_F_DADDR)], &[]);
        self.compare(NFT_CMP_EQ, &RTN_LOCAL.to_ne_bytes());
    }

    /// Matches packets to this port.
    pub fn to_port(&mut self, protocol: Protocol, port: u16) {
        self.load_meta(NFT_META_L4PROTO);
        self.compare(NFT_CMP_EQ, &[protocol as u8]);
        self.load(TRANSPORT_HEADER, 2, 2);
        self.compare(NFT_CMP_EQ, &port.to_be_bytes());
    }

    /// Matches frames with this protocol (`ETH_P_…`), behind a VLAN tag if there is one, for [`Family::Bridge`].
    pub fn of_ethernet_protocol(&mut self, protocol: u16) {
        self.load_meta(NFT_META_PROTOCOL);
        self.compare(NFT_CMP_EQ, &protocol.to_be_bytes());
    }

    /// Matches ICMPv6 messages of this type (RFC 4443), also behind extension headers.
    pub fn of_icmpv6_type(&mut self, number: u8) {
        self.load_meta(NFT_META_L4PROTO);
        self.compare(NFT_CMP_EQ, &[ICMPV6]);
        self.load(TRANSPORT_HEADER, 0, 1);
        self.compare(NFT_CMP_EQ, &[number]);
    }

    /// Matches IPv6 packets whose upper-layer header, behind all extension headers, begins in the packet: those that are not
    /// fragments, and first fragments as RFC 7112 requires them. Of others nothing about the upper layer can be matched.
    pub fn has_upper_layer_header(&mut self) {
        self.of_ethernet_protocol(ETH_P_IPV6);
        // The comparison holds for each value: what counts is that there is one.
        self.load(TRANSPORT_HEADER, 0, 1);
        self.compare(NFT_CMP_GTE, &[0]);
    }

    /// Matches IPv6 fragments that are not the first of their packet, if their header is directly behind that of IPv6.
    pub fn is_later_fragment(&mut self) {
        const NEXT_HEADER: u32 = 6;
        const FRAGMENT_OFFSET: u32 = 42;
        self.of_ethernet_protocol(ETH_P_IPV6);
        self.load(NETWORK_HEADER, NEXT_HEADER, 1);
        self.compare(NFT_CMP_EQ, &[FRAGMENT]);
        self.load(NETWORK_HEADER, FRAGMENT_OFFSET, 2);
        self.mask(&[0xff, 0xf8], &[0; 2]);
        self.compare(NFT_CMP_NEQ, &[0; 2]);
    }

    /// Matches frames to the addresses 01:80:c2:00:00:00 to 0f, which bridges do not forward (IEEE 802.1D, 7.12.6).
    pub fn to_bridges_only(&mut self) {
        self.load(LINK_HEADER, 0, 6);
        self.mask(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xf0], &[0; 6]);
        self.compare(NFT_CMP_EQ, &[0x01, 0x80, 0xc2, 0, 0, 0]);
    }

    /// Accepts the packet for this hook.
    pub fn accept_packet(&mut self) {
        self.verdict(NF_ACCEPT, "");
    }

    /// Drops the packet.
    pub fn drop_packet(&mut self) {
        self.verdict(NF_DROP, "");
    }

    /// Matches packets with this bit in the mark.
    pub fn marked(&mut self, bit: u32) {
        self.load_meta(NFT_META_MARK);
        self.mask(&bit.to_ne_bytes(), &[0; 4]);
        self.compare(NFT_CMP_NEQ, &[0; 4]);
    }

    /// Sets a bit of the mark; evaluation continues with the next rule (NFTA_META_KEY, NFTA_META_SREG).
    pub fn set_mark(&mut self, bit: u32) {
        self.load_meta(NFT_META_MARK);
        self.mask(&(!bit).to_ne_bytes(), &bit.to_ne_bytes());
        self.expression("meta", &[(2, NFT_META_MARK), (3, FIRST)], &[]);
    }

    /// Continues with the rules of another chain.
    pub fn jump(&mut self, chain: &str) {
        self.verdict(NFT_JUMP, chain);
    }

    /// Redirects the packet to the address and port in these registers (NFTA_NAT_TYPE, _FAMILY, _REG_ADDR_MIN,
    /// _REG_PROTO_MIN).
    pub(crate) fn translate(&mut self, address: u32, port: u32) {
        let family = u32::from(self.family.number());
        self.expression("nat", &[(1, NFT_NAT_DNAT), (2, family), (3, address), (5, port)], &[]);
    }

    /// Redirects the packet to another address and port (NFTA_IMMEDIATE_DREG, _DATA).
    pub fn redirect(&mut self, address: IpAddr, port: u16) {
        self.expression("immediate", &[(1, FIRST)], &[(2, &octets(address))]);
        self.expression("immediate", &[(1, SECOND)], &[(2, &port.to_be_bytes())]);
        self.translate(FIRST, SECOND);
    }

    /// Replaces the source address with an address of this host.
    pub fn masquerade(&mut self) {
        self.expression("masq", &[], &[]);
    }
}
