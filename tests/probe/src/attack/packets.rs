//! Packets that pods send to disturb their neighbours and the node: neighbour advertisements in pieces, redirects, queries for
//! multicast groups, and packets from many addresses and ports, which fill tables of the node. Without extra capabilities except
//! NET_RAW, which every container has by default.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use nix::libc;

use super::net::{ALL_NODES, checksum, icmpv6, index, ipv4, neighbour, own_mac, parse_mac};
use super::raw;
use crate::act;
use crate::see::Outcome;

/// Number of bytes of an IPv6 header, and of each extension header that this module makes.
const IPV6_HEADER: usize = 40;
const EXTENSION: usize = 8;
const DESTINATION_OPTIONS: u8 = 60;
const FRAGMENT: u8 = 44;
const ICMPV6: u8 = 58;

fn sent(what: &str, outcome: Result<usize, nix::errno::Errno>) {
    match outcome {
        Ok(_) => println!("saw sent"),
        Err(errno) => println!("held {what}: {errno}"),
    }
}

/// Says to all neighbours by a neighbour advertisement (RFC 4861, section 4.4) that `address` belongs to the link's MAC address,
/// in one of these ways:
///
/// | way | packet |
/// |---|---|
/// | `whole` | behind a header with destination options |
/// | `visible` | two fragments; the first one has the beginning of the message |
/// | `hidden` | two fragments; the first one ends before the message, which RFC 7112 forbids |
/// | `chained` | two fragments; the first one ends before a second extension header |
pub(crate) fn fragments(way: &str, link: &str, address: &str) -> Outcome {
    let address: Ipv6Addr = address.parse().map_err(|_| format!("{address:?} is no IPv6 address"))?;
    let mac = own_mac(link)?;
    let message = [&[136, 0, 0, 0, 0x20, 0, 0, 0][..], &address.octets(), &[2, 1], &mac].concat();
    let all = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    let plain = icmpv6(address, all, message);
    let (header, message) = plain.split_at(IPV6_HEADER);
    // The length of the options, which are padding (RFC 8200, section 4.2).
    let options = |next: u8| [next, 0, 1, 4, 0, 0, 0, 0];
    let (first, body, cut) = match way {
        "whole" => (DESTINATION_OPTIONS, [&options(ICMPV6)[..], message].concat(), None),
        "visible" => (ICMPV6, message.to_vec(), Some(EXTENSION)),
        "hidden" => (DESTINATION_OPTIONS, [&options(ICMPV6)[..], message].concat(), Some(EXTENSION)),
        "chained" => {
            let body = [&options(DESTINATION_OPTIONS)[..], &options(ICMPV6), message].concat();
            (DESTINATION_OPTIONS, body, Some(EXTENSION))
        }
        _ => return Err(format!("no such way: {way}")),
    };
    let packet = |next: u8, payload: &[u8]| {
        let mut packet = header.to_vec();
        packet[4..6].copy_from_slice(&(payload.len() as u16).to_be_bytes());
        packet[6] = next;
        packet.extend(payload);
        packet
    };
    let packets = match cut {
        None => vec![packet(first, &body)],
        Some(cut) => {
            let id = std::process::id().to_be_bytes();
            let piece = |offset: usize, more: u16, bytes: &[u8]| {
                let offset = (offset as u16 | more).to_be_bytes();
                packet(FRAGMENT, &[&[first, 0][..], &offset, &id, bytes].concat())
            };
            vec![piece(0, 1, &body[..cut]), piece(cut, 0, &body[cut..])]
        }
    };
    for packet in packets {
        sent("fragment", raw::send_packet(libc::ETH_P_IPV6, index(link)?, ALL_NODES, &packet));
    }
    Ok(0)
}

/// Says to `victim`, which has the MAC address `mac`, as its router that `via` is the better router to `destination`: an ICMP
/// redirect (RFC 792; RFC 4861, section 4.5).
pub(crate) fn redirect(
    link: &str,
    victim: &str,
    mac: &str,
    router: &str,
    destination: &str,
    via: &str,
) -> Outcome {
    const REDIRECT: u8 = 137;
    let to = parse_mac(mac)?;
    let parse = |text: &str| text.parse::<IpAddr>().map_err(|_| format!("{text:?} is no address"));
    let addresses = (parse(victim)?, parse(router)?, parse(destination)?, parse(via)?);
    let (protocol, packet) = match addresses {
        (IpAddr::V4(victim), IpAddr::V4(router), IpAddr::V4(destination), IpAddr::V4(via)) => {
            // The beginning of the packet that went to the wrong router: an echo reply.
            let wrong = ipv4(victim, destination, 1, &[], &[0; 8]);
            // Type, code "for the host", checksum.
            let mut message = [&[5, 1, 0, 0][..], &via.octets(), &wrong].concat();
            let sum = checksum(&message);
            message[2..4].copy_from_slice(&sum);
            (libc::ETH_P_IP, ipv4(router, victim, 1, &[], &message))
        }
        (IpAddr::V6(victim), IpAddr::V6(router), IpAddr::V6(destination), IpAddr::V6(via)) => {
            let message =
                [&[REDIRECT, 0, 0, 0, 0, 0, 0, 0][..], &via.octets(), &destination.octets()].concat();
            (libc::ETH_P_IPV6, icmpv6(router, victim, message))
        }
        _ => return Err("addresses of two families".into()),
    };
    sent("redirect", raw::send_packet(protocol, index(link)?, to, &packet));
    Ok(0)
}

/// Asks all neighbours for their IPv4 multicast groups, as a multicast router does: IGMPv2 (RFC 2236), with a time of 0.1 s for
/// answers.
pub(crate) fn query(link: &str, from: &str) -> Outcome {
    const IGMP: u8 = 2;
    const ROUTER_ALERT: [u8; 4] = [0x94, 4, 0, 0];
    const ALL_HOSTS: [u8; 6] = [0x01, 0, 0x5e, 0, 0, 1];
    let from: Ipv4Addr = from.parse().map_err(|_| format!("{from:?} is no address"))?;
    let mut message = vec![0x11, 1, 0, 0, 0, 0, 0, 0];
    let sum = checksum(&message);
    message[2..4].copy_from_slice(&sum);
    let packet = ipv4(from, Ipv4Addr::new(224, 0, 0, 1), IGMP, &ROUTER_ALERT, &message);
    sent("query", raw::send_packet(libc::ETH_P_IP, index(link)?, ALL_HOSTS, &packet));
    Ok(0)
}

fn ipv4_address(text: &str) -> Result<Ipv4Addr, String> {
    text.parse().map_err(|_| format!("{text:?} is no IPv4 address"))
}

/// The addresses from `first` on.
fn following(first: &str, count: u64) -> Result<impl Iterator<Item = Ipv4Addr>, String> {
    let first = u32::from(ipv4_address(first)?);
    Ok((first..).take(count as usize).map(Ipv4Addr::from))
}

/// Sends an echo request to the gateway from each of `count` addresses; the gateway asks for the MAC address of each to answer.
pub(crate) fn sources(link: &str, gateway: &str, first: &str, count: u64) -> Outcome {
    let gateway = ipv4_address(gateway)?;
    // So that its MAC address is known.
    let known = UdpSocket::bind("0.0.0.0:0").and_then(|socket| socket.send_to(b"hello", (gateway, 9)));
    known.map_err(|error| format!("send to {gateway}: {error}"))?;
    let mac = neighbour(gateway).ok_or("the gateway has no hardware address")?;
    let mut message = vec![8, 0, 0, 0, 0, 1, 0, 1];
    let sum = checksum(&message);
    message[2..4].copy_from_slice(&sum);
    let mut done = 0;
    for source in following(first, count)? {
        let packet = ipv4(source, gateway, 1, &[], &message);
        done += u64::from(raw::send_packet(libc::ETH_P_IP, index(link)?, mac, &packet).is_ok());
    }
    println!("saw sent {done}");
    Ok(0)
}

/// Asks for the gateway's MAC address by ARP from each of `count` addresses; a host remembers who asks for it (RFC 826).
pub(crate) fn askers(link: &str, gateway: &str, first: &str, count: u64) -> Outcome {
    const ALL: [u8; 6] = [0xff; 6];
    let (gateway, mac) = (ipv4_address(gateway)?, own_mac(link)?);
    let mut done = 0;
    for source in following(first, count)? {
        let head = [0, 1, 8, 0, 6, 4, 0, 1];
        let packet = [&head[..], &mac, &source.octets(), &[0; 6], &gateway.octets()].concat();
        done += u64::from(raw::send_packet(libc::ETH_P_ARP, index(link)?, ALL, &packet).is_ok());
    }
    println!("saw sent {done}");
    Ok(0)
}

/// Sends a datagram to an address and port from each of the `count` highest ports, without any capability.
pub(crate) fn flows(address: &str, count: u64) -> Outcome {
    let address: SocketAddr = address.parse().map_err(|_| format!("{address:?} is no address"))?;
    let mut done = 0;
    for port in (1..=u16::MAX).rev().take(count as usize) {
        let socket = UdpSocket::bind(("0.0.0.0", port)).map_err(|error| format!("bind {port}: {error}"))?;
        done += u64::from(socket.send_to(b"x", address).is_ok());
    }
    println!("saw sent {done}");
    Ok(0)
}

/// Makes `count` connections to an address, or as many as can be made, and holds them without an end.
pub(crate) fn connections(address: &str, count: u64) -> Outcome {
    /// Time for each: a packet that the node drops is not answered.
    const LIMIT: Duration = Duration::from_secs(2);
    let address: SocketAddr = address.parse().map_err(|_| format!("{address:?} is no address"))?;
    let connect = |_| TcpStream::connect_timeout(&address, LIMIT).ok();
    let held: Vec<TcpStream> = (0..count).map_while(connect).collect();
    println!("saw connected {}", held.len());
    act::sleep_forever()
}
