//! Traffic limits of links, equivalent to those of tc(8): a token bucket for packets that a link sends; packets that a
//! link receives are redirected through another link that has a token bucket.
//!
//! ```text
//!   pod <── veth, bucket                     what the pod receives
//!   pod ──> veth, ingress ── u32, mirred ──> ifb, bucket ──> continues as if from the veth  
//! ```
//! Rules: include/uapi/linux/{rtnetlink,pkt_sched,pkt_cls}.h, tc_act/tc_mirred.h; tc-tbf(8).

use crate::message::{Batch, NLM_F_CREATE, NLM_F_EXCL};

const RTM_NEWQDISC: u16 = 36;
const RTM_NEWTFILTER: u16 = 44;

const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_TBF_PARMS: u16 = 1;
const TCA_TBF_RATE64: u16 = 4;
const TCA_U32_CLASSID: u16 = 1;
const TCA_U32_SEL: u16 = 5;
const TCA_U32_ACT: u16 = 7;
const TCA_ACT_KIND: u16 = 1;
const TCA_ACT_OPTIONS: u16 = 2;
const TCA_MIRRED_PARMS: u16 = 2;

const TC_H_ROOT: u32 = 0xffff_ffff;
const TC_H_INGRESS: u32 = 0xffff_fff1;
/// Handle `1:` of the token bucket.
const BUCKET: u32 = 0x1_0000;
const INGRESS: u32 = 0xffff_0000;
const CLASS: u32 = 0x1_0001;
/// Info field of a filter: priority 1, packets of all protocols (ETH_P_ALL, big endian).
const EVERY_PACKET: u32 = 1 << 16 | 0x0300;
const TC_U32_TERMINAL: u8 = 1;
const TC_ACT_STOLEN: u32 = 4;
const TCA_EGRESS_REDIR: u32 = 1;

/// Maximum time in milliseconds that a packet waits for tokens.
const LATENCY_MS: u64 = 25;
/// Numerator of the kernel's packet scheduler clock: 15.625 ticks per microsecond, on every machine (PSCHED_SHIFT).
const TICKS: u64 = 125;
const TICKS_US: u64 = 8;

/// A limit of traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Bytes per second; not 0.
    pub bytes_per_second: u64,
    /// Burst in bytes.
    pub burst_bytes: u64,
}

impl Rate {
    /// The burst as the time in ticks that its tokens take to accumulate, and the length of the queue in bytes. Values
    /// are limited to the maximum of the kernel's fields.
    fn buffer_and_queue(self) -> (u32, u32) {
        let microseconds =
            u128::from(self.burst_bytes) * 1_000_000 / u128::from(self.bytes_per_second.max(1));
        let ticks = microseconds * u128::from(TICKS) / u128::from(TICKS_US);
        let waiting = u128::from(self.bytes_per_second) * u128::from(LATENCY_MS) / 1000;
        let most = |number: u128| u32::try_from(number).unwrap_or(u32::MAX);
        (most(ticks), most(waiting + u128::from(self.burst_bytes)))
    }
}

/// Encodes `struct tcmsg`.
fn header(link: u32, handle: u32, parent: u32, info: u32) -> Vec<u8> {
    let numbers = [0, link, handle, parent, info];
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

impl Batch {
    /// Limits the packets that a link sends; an existing limit is an error.
    pub fn limit(&mut self, link: u32, name: &str, rate: Rate) {
        let flags = NLM_F_CREATE | NLM_F_EXCL;
        self.message(RTM_NEWQDISC, flags, &header(link, BUCKET, TC_H_ROOT, 0), "limit traffic of", name);
        self.text(TCA_KIND, "tbf");
        let options = self.nest(TCA_OPTIONS);
        let (buffer, queue) = rate.buffer_and_queue();
        let low = rate.bytes_per_second as u32;
        // struct tc_tbf_qopt: two rates of 12 bytes, whose last 4 are the number, then limit, buffer, mtu.
        let numbers = [0, 0, low, 0, 0, 0, queue, buffer, 0];
        let parameters: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
        self.attribute(TCA_TBF_PARMS, &parameters);
        if rate.bytes_per_second > u64::from(u32::MAX) {
            self.attribute(TCA_TBF_RATE64, &rate.bytes_per_second.to_ne_bytes());
        }
        self.end(options);
    }

    /// Redirects all packets that a link receives through the link `to`.
    pub fn redirect(&mut self, link: u32, name: &str, to: u32) {
        let flags = NLM_F_CREATE | NLM_F_EXCL;
        self.message(RTM_NEWQDISC, flags, &header(link, INGRESS, TC_H_INGRESS, 0), "take traffic of", name);
        self.text(TCA_KIND, "ingress");
        self.message(
            RTM_NEWTFILTER,
            flags,
            &header(link, 0, INGRESS, EVERY_PACKET),
            "redirect traffic of",
            name,
        );
        self.text(TCA_KIND, "u32");
        let options = self.nest(TCA_OPTIONS);
        self.attribute(TCA_U32_CLASSID, &CLASS.to_ne_bytes());
        // struct tc_u32_sel, and one struct tc_u32_key that every packet fits.
        let mut selector = [0; 32];
        (selector[0], selector[2]) = (TC_U32_TERMINAL, 1);
        self.attribute(TCA_U32_SEL, &selector);
        let actions = self.nest(TCA_U32_ACT);
        let first = self.nest(1);
        self.text(TCA_ACT_KIND, "mirred");
        let mirred = self.nest(TCA_ACT_OPTIONS);
        // struct tc_mirred: index, capabilities, action, two counts, what to do, where to.
        let numbers = [0, 0, TC_ACT_STOLEN, 0, 0, TCA_EGRESS_REDIR, to];
        let parameters: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
        self.attribute(TCA_MIRRED_PARMS, &parameters);
        self.end(mirred);
        self.end(first);
        self.end(actions);
        self.end(options);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_have_the_sizes_of_the_bandwidth_plugin() {
        let cases = [
            // 8 Mbit/s with 80 kbit, 1 Gbit/s with 1 Mbit, the slowest with the longest burst.
            ((1_000_000, 10_000), (156_250, 35_000)),
            ((125_000_000, 125_000), (15_625, 3_250_000)),
            ((125, 536_870_911), (u32::MAX, 536_870_914)),
            ((125_000_000_000_000, 536_870_911), (62, u32::MAX)),
        ];
        for ((bytes_per_second, burst_bytes), expected) in cases {
            let rate = Rate { bytes_per_second, burst_bytes };
            assert_eq!(rate.buffer_and_queue(), expected, "{rate:?}");
        }
    }
}
