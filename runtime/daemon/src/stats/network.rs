//! Parses `/proc/PID/net/dev`: two header lines, then one line per interface.
//!
//! ```text
//! face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier
//! compressed
//! eth0: 1234  12      0    0    0    0     0          0         5678  56      0    …
//! ```

/// Counters of one network interface since its creation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) name: String,
    pub(crate) received_bytes: u64,
    pub(crate) received_packets: u64,
    pub(crate) received_errors: u64,
    pub(crate) received_dropped: u64,
    pub(crate) sent_bytes: u64,
    pub(crate) sent_packets: u64,
    pub(crate) sent_errors: u64,
    pub(crate) sent_dropped: u64,
}

/// Parses all interfaces except the loopback interface, in the kernel's order.
pub(super) fn parse(text: &str) -> Vec<Interface> {
    text.lines().filter_map(line).filter(|interface| interface.name != "lo").collect()
}

fn line(line: &str) -> Option<Interface> {
    let (name, rest) = line.split_once(':')?;
    let numbers: Vec<u64> = rest.split_whitespace().map_while(|number| number.parse().ok()).collect();
    let (received, sent) = numbers.split_at_checked(8)?;
    let (
        [received_bytes, received_packets, received_errors, received_dropped, ..],
        [sent_bytes, sent_packets, sent_errors, sent_dropped, ..],
    ) = (received, sent)
    else {
        return None;
    };
    Some(Interface {
        name: name.trim().to_owned(),
        received_bytes: *received_bytes,
        received_packets: *received_packets,
        received_errors: *received_errors,
        received_dropped: *received_dropped,
        sent_bytes: *sent_bytes,
        sent_packets: *sent_packets,
        sent_errors: *sent_errors,
        sent_dropped: *sent_dropped,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_interfaces_except_the_loopback_are_read() {
        let text = "Inter-|   Receive | Transmit\n face |bytes packets|bytes packets\n    lo: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n  \
                    eth0: 100 2 3 4 5 6 7 8 900 10 11 12 13 14 15 16\nbroken: 1 2\n";
        let expected = Interface {
            name: "eth0".into(),
            received_bytes: 100,
            received_packets: 2,
            received_errors: 3,
            received_dropped: 4,
            sent_bytes: 900,
            sent_packets: 10,
            sent_errors: 11,
            sent_dropped: 12,
        };
        assert_eq!(parse(text), [expected]);
    }
}
