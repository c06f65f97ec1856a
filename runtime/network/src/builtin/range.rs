//! Address ranges as in `host-local`. The module does no I/O. Rules: host-local's documentation at cni.dev:
//! the first address is the gateway by default, the IPv4 broadcast address is excluded, and the search for a
//! free address starts after the last allocated one.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use coracle_netlink::Network;

/// A range of addresses in a subnet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Range {
    /// The subnet; its host bits are zero.
    pub(super) subnet: Network,
    /// First address that may be allocated.
    pub(super) start: IpAddr,
    /// Last address that may be allocated.
    pub(super) end: IpAddr,
    /// Address of the gateway; it is never allocated.
    pub(super) gateway: IpAddr,
}

impl Range {
    /// Creates a range of `subnet`; missing values are replaced by defaults.
    pub(super) fn new(
        subnet: Network,
        start: Option<IpAddr>,
        end: Option<IpAddr>,
        gateway: Option<IpAddr>,
    ) -> Result<Range, String> {
        let width = if subnet.address.is_ipv4() { 32 } else { 128 };
        if subnet.prefix > width - 2 {
            return Err(format!("{subnet} is too small"));
        }
        if subnet.base() != subnet {
            return Err(format!("{subnet} has host bits set"));
        }
        let first = next(subnet.address);
        let last = if subnet.address.is_ipv4() { previous(subnet.last()) } else { subnet.last() };
        let range = Range {
            subnet,
            start: start.unwrap_or(first),
            end: end.unwrap_or(last),
            gateway: gateway.unwrap_or(first),
        };
        for address in [range.start, range.end] {
            if !subnet.contains(address) {
                return Err(format!("{address} is not in {subnet}"));
            }
        }
        if range.start > range.end || range.gateway.is_ipv4() != subnet.address.is_ipv4() {
            return Err(format!(
                "{} to {} with gateway {} is not a valid range",
                range.start, range.end, range.gateway
            ));
        }
        Ok(range)
    }

    fn contains(&self, address: IpAddr) -> bool {
        address.is_ipv4() == self.start.is_ipv4() && (self.start..=self.end).contains(&address)
    }

    /// Whether the ranges have a common address.
    pub(super) fn overlaps(&self, other: &Range) -> bool {
        self.contains(other.start) || other.contains(self.start)
    }
}

/// The addresses of a set of ranges in the order of the search: circular, starting after `last`, each with
/// its range. Empty for an empty set.
pub(super) fn candidates(set: &[Range], last: Option<IpAddr>) -> impl Iterator<Item = (IpAddr, &Range)> {
    let found = last.and_then(|last| Some((set.iter().position(|range| range.contains(last))?, last)));
    let (first, position) = match found {
        Some((index, last)) if last != set[index].end => (index, Some(next(last))),
        Some((index, _)) => ((index + 1) % set.len(), None),
        None => (0, None),
    };
    // The first range occurs twice: at the end for the addresses before the start of the search.
    let turns = (0..=set.len()).filter_map(move |turn| {
        let range = set.get((first + turn) % set.len().max(1))?;
        match (turn, position) {
            (0, Some(from)) => Some((range, from, range.end)),
            (turn, Some(from)) if turn == set.len() && from > range.start => {
                Some((range, range.start, previous(from)))
            }
            (turn, _) if turn < set.len() => Some((range, range.start, range.end)),
            _ => None,
        }
    });
    let addresses = turns.flat_map(|(range, from, to)| {
        let following = move |address: &IpAddr| (*address != to).then(|| next(*address));
        std::iter::successors(Some(from), following).map(move |address| (address, range))
    });
    addresses.filter(|(address, range)| *address != range.gateway)
}

fn next(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(address) => Ipv4Addr::from(u32::from(address).wrapping_add(1)).into(),
        IpAddr::V6(address) => Ipv6Addr::from(u128::from(address).wrapping_add(1)).into(),
    }
}

fn previous(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(address) => Ipv4Addr::from(u32::from(address).wrapping_sub(1)).into(),
        IpAddr::V6(address) => Ipv6Addr::from(u128::from(address).wrapping_sub(1)).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::{Range, candidates};

    fn range(subnet: &str, start: &str, end: &str, gateway: &str) -> Result<Range, String> {
        let address = |text: &str| text.parse().ok();
        Range::new(subnet.parse().unwrap(), address(start), address(end), address(gateway))
    }

    #[test]
    fn missing_values_have_defaults() {
        let cases = [
            (("10.1.0.0/24", "", "", ""), Ok("10.1.0.1 10.1.0.254 10.1.0.1")),
            (("10.1.0.0/30", "", "", ""), Ok("10.1.0.1 10.1.0.2 10.1.0.1")),
            (("fd00::/126", "", "", ""), Ok("fd00::1 fd00::3 fd00::1")),
            (("10.1.0.0/24", "10.1.0.9", "10.1.0.11", "10.1.0.254"), Ok("10.1.0.9 10.1.0.11 10.1.0.254")),
            (("10.1.0.0/31", "", "", ""), Err("10.1.0.0/31 is too small")),
            (("10.1.0.1/24", "", "", ""), Err("10.1.0.1/24 has host bits set")),
            (("10.1.0.0/24", "10.2.0.9", "", ""), Err("10.2.0.9 is not in 10.1.0.0/24")),
            (("10.1.0.0/24", "fd00::1", "", ""), Err("fd00::1 is not in 10.1.0.0/24")),
            (
                ("10.1.0.0/24", "10.1.0.9", "10.1.0.8", ""),
                Err("10.1.0.9 to 10.1.0.8 with gateway 10.1.0.1 is not a valid range"),
            ),
        ];
        for ((subnet, start, end, gateway), expected) in cases {
            let found = range(subnet, start, end, gateway)
                .map(|range| format!("{} {} {}", range.start, range.end, range.gateway));
            assert_eq!(found.as_deref().map_err(String::as_str), expected, "{subnet} {start} {end}");
        }
    }

    #[test]
    fn the_search_is_circular_and_excludes_the_gateway() {
        let set = [
            range("10.1.0.0/24", "10.1.0.1", "10.1.0.4", "10.1.0.2").unwrap(),
            range("10.2.0.0/30", "", "", "").unwrap(),
        ];
        let cases = [
            ("", "1.0.1 1.0.3 1.0.4 2.0.2"),
            ("10.1.0.1", "1.0.3 1.0.4 2.0.2 1.0.1"),
            ("10.1.0.3", "1.0.4 2.0.2 1.0.1 1.0.3"),
            ("10.1.0.4", "2.0.2 1.0.1 1.0.3 1.0.4"),
            ("10.2.0.2", "1.0.1 1.0.3 1.0.4 2.0.2"),
            ("10.9.0.9", "1.0.1 1.0.3 1.0.4 2.0.2"),
            ("fd00::1", "1.0.1 1.0.3 1.0.4 2.0.2"),
        ];
        for (last, expected) in cases {
            let found: Vec<_> = candidates(&set, last.parse().ok())
                .map(|(address, _)| address.to_string().trim_start_matches("10.").to_owned())
                .collect();
            assert_eq!(found.join(" "), expected, "after {last:?}");
        }
        assert_eq!(candidates(&[], None).count(), 0);
    }

    #[test]
    fn ranges_that_share_an_address_overlap() {
        let first = range("10.1.0.0/24", "10.1.0.10", "10.1.0.20", "").unwrap();
        for (start, end, expected) in [
            ("10.1.0.1", "10.1.0.9", false),
            ("10.1.0.1", "10.1.0.10", true),
            ("10.1.0.12", "10.1.0.13", true),
        ] {
            let other = range("10.1.0.0/24", start, end, "").unwrap();
            assert_eq!(
                (first.overlaps(&other), other.overlaps(&first)),
                (expected, expected),
                "{start} {end}"
            );
        }
        assert!(!first.overlaps(&range("fd00::/64", "", "", "").unwrap()));
    }
}
