//! Decides when the writable layers are measured again; pure, except for the system call that reads a file system's usage.
//!
//! A measurement reads every directory of every layer, so it is not repeated while nothing shows a change. All layers are on one
//! file system, whose used bytes and inodes change with what containers write: one statvfs(2) for all containers.
//!
//! | since the end of the last measurement | a request starts a measurement |
//! |---|---|
//! | less than 9 s | no |
//! | 9 s to a minute | if the usage of the file system differs by more than 1 MiB or 1000 inodes, if a running container has not been measured, or if the interval has passed |
//! | a minute or more | yes |
//!
//! The interval doubles, from 9 s, with each measurement that finds the layers as before. A request that comes during the
//! interval therefore reports a usage that is wrong by at most 1 MiB, unless as much was freed elsewhere on the file system
//! meanwhile; then it is wrong for at most a minute. The used bytes include data that was not written back yet, except on btrfs, where
//! they follow within the 30 s of the kernel's write-back.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::statvfs;

/// Minimum time between two measurements: below the 10 s between the kubelet's requests, so that each of them may start one.
const INTERVAL_MIN: Duration = Duration::from_secs(9);
/// Maximum time between two measurements while there are requests.
const INTERVAL_MAX: Duration = Duration::from_secs(60);
/// Change of the used bytes that needs no measurement: what the node's own records and logs use in a minute.
const BYTES_IGNORED: u64 = 1 << 20;
/// Change of the used inodes that needs no measurement: the kubelet limits those of the node, not of a container.
const INODES_IGNORED: u64 = 1000;

/// Usage of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Used {
    bytes: u64,
    inodes: u64,
}

impl Used {
    /// Reads the usage of the file system of `path`; `None` if it is unknown.
    pub(super) fn of(path: &Path) -> Option<Used> {
        let about = statvfs(path).ok()?;
        Some(Used {
            bytes: about.f_blocks.saturating_sub(about.f_bfree).saturating_mul(about.f_frsize),
            inodes: about.f_files.saturating_sub(about.f_ffree), // on file systems without a limit both are 0
        })
    }

    fn differs_from(self, other: Used) -> bool {
        self.bytes.abs_diff(other.bytes) > BYTES_IGNORED
            || self.inodes.abs_diff(other.inodes) > INODES_IGNORED
    }
}

/// Signs at a request that a measurement may have a new result.
#[derive(Clone, Copy, Debug)]
pub(super) struct Signs {
    /// Whether a running container has not been measured.
    pub(super) has_new: bool,
    /// Usage of the file system of the layers; `None` if it is unknown.
    pub(super) used: Option<Used>,
}

/// The last measurement, and with it the time of the next one.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    last: Option<Measured>,
}

#[derive(Debug)]
struct Measured {
    ended: Instant,
    /// Usage of the file system before the measurement.
    used: Option<Used>,
    /// Time after which the measurement is repeated without a sign.
    interval: Duration,
}

impl Schedule {
    /// Whether a request at `now` starts a measurement; the signs are read only if they matter.
    pub(super) fn is_due(&self, now: Instant, signs: impl FnOnce() -> Signs) -> bool {
        let Some(last) = &self.last else { return true };
        let age = now.saturating_duration_since(last.ended);
        if age < INTERVAL_MIN || age >= last.interval {
            return age >= INTERVAL_MIN;
        }
        let signs = signs();
        let is_same = match (last.used, signs.used) {
            (Some(before), Some(now)) => !now.differs_from(before),
            _ => false,
        };
        signs.has_new || !is_same
    }

    /// Notes a measurement that ended at `ended`, with the file system's usage before it, and whether it found another usage of
    /// any layer than the one before.
    pub(super) fn note(&mut self, ended: Instant, used: Option<Used>, has_changed: bool) {
        let interval = match &self.last {
            Some(last) if !has_changed => (last.interval * 2).min(INTERVAL_MAX),
            _ => INTERVAL_MIN,
        };
        self.last = Some(Measured { ended, used, interval });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn signs(has_new: bool, bytes: u64, inodes: u64) -> Signs {
        Signs { has_new, used: Some(Used { bytes, inodes }) }
    }

    /// Measures at each second at which a request finds a measurement due; returns these seconds.
    fn seconds(schedule: &mut Schedule, last: u64, at: impl Fn(u64) -> Signs) -> Vec<u64> {
        let start = Instant::now();
        let mut measured = Vec::new();
        for second in 0..=last {
            let now = start + Duration::from_secs(second);
            if schedule.is_due(now, || at(second)) {
                let has_changed = measured.last().is_none_or(|before| at(*before).used != at(second).used);
                schedule.note(now, at(second).used, has_changed);
                measured.push(second);
            }
        }
        measured
    }

    #[test]
    fn the_interval_doubles_up_to_a_minute_while_nothing_changes() {
        let measured = seconds(&mut Schedule::default(), 300, |_| signs(false, 0, 0));
        assert_eq!(measured, [0, 9, 27, 63, 123, 183, 243]);
    }

    #[test]
    fn a_change_of_the_file_system_or_a_new_container_is_measured_at_once() {
        let at_200 = |sign: Signs| {
            let at = move |second| if second < 200 { signs(false, 100 * MIB, 5000) } else { sign };
            seconds(&mut Schedule::default(), 210, at).contains(&200)
        };
        for sign in [
            signs(false, 101 * MIB + 1, 5000),
            signs(false, 99 * MIB - 1, 5000),
            signs(false, 100 * MIB, 6001),
            signs(false, 100 * MIB, 3999),
            signs(true, 100 * MIB, 5000),
            Signs { has_new: false, used: None },
        ] {
            assert!(at_200(sign), "{sign:?}");
        }
        assert!(!at_200(signs(false, 101 * MIB, 6000)));
    }

    #[test]
    fn the_first_interval_returns_after_a_change() {
        let at = |second| signs(false, if second < 200 { 0 } else { 2 * MIB }, 0);
        assert_eq!(seconds(&mut Schedule::default(), 240, at), [0, 9, 27, 63, 123, 183, 200, 209, 227]);
    }

    #[test]
    fn without_the_file_systems_usage_each_request_of_the_kubelet_measures() {
        let at = |_| Signs { has_new: false, used: None };
        assert_eq!(seconds(&mut Schedule::default(), 40, at), [0, 9, 18, 27, 36]);
    }

    /// Random histories of requests and of the file system's usage, against the table in the module's documentation.
    #[test]
    fn no_history_reports_a_usage_that_is_too_old() {
        for seed in 1..500_u64 {
            let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let mut next = |below: u64| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                random % below
            };
            let mut schedule = Schedule::default();
            let (mut now, mut used) = (Instant::now(), Used { bytes: 1 << 30, inodes: 10_000 });
            let mut last: Option<(Instant, Used)> = None;
            for _ in 0..200 {
                now += Duration::from_millis(next(20_000));
                match next(4) {
                    0 => used.bytes += next(2 * MIB),
                    1 => used.bytes = used.bytes.saturating_sub(next(2 * MIB)),
                    2 => used.inodes += next(700),
                    _ => {}
                }
                let is_due = schedule.is_due(now, || Signs { has_new: false, used: Some(used) });
                if let Some((at, before)) = last {
                    let age = now - at;
                    assert!(!is_due || age >= INTERVAL_MIN, "seed {seed}: too soon, {age:?}");
                    let must = age >= INTERVAL_MAX || age >= INTERVAL_MIN && used.differs_from(before);
                    assert!(is_due || !must, "seed {seed}: {age:?} old, {before:?} is {used:?}");
                }
                if is_due {
                    now += Duration::from_millis(next(3_000)); // the measurement
                    schedule.note(now, Some(used), last.is_none_or(|(_, before)| before != used));
                    last = Some((now, used));
                }
            }
        }
    }
}
