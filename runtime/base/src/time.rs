//! The clocks of the daemon: monotonic time for timers and limits, wall-clock time for records, and the time
//! since boot for operations that continue across restarts of the daemon. In a simulation all three are those
//! of the simulated node.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Current monotonic time.
pub fn now() -> Instant {
    #[cfg(feature = "simulation")]
    if let Some(node) = coracle_sandbox::simulation::node() {
        return simulated::instant(node.now_ns());
    }
    Instant::now()
}

/// Current wall-clock time since 1970; zero if the clock is set to an earlier time.
pub fn wall() -> Duration {
    #[cfg(feature = "simulation")]
    if let Some(node) = coracle_sandbox::simulation::node() {
        return Duration::from_nanos(node.wall_ns());
    }
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Formats a time in nanoseconds since 1970 as RFC 3339 in UTC, like in log files of containers.
pub fn rfc3339(ns: i64) -> String {
    coracle_wire::timestamp(ns).iter().map(|byte| char::from(*byte)).collect()
}

/// Milliseconds since boot including suspend: a clock that continues across restarts of the daemon and is
/// never adjusted.
pub fn boot_ms() -> u64 {
    #[cfg(feature = "simulation")]
    if let Some(node) = coracle_sandbox::simulation::node() {
        return node.now_ns() / 1_000_000;
    }
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME);
    now.map(|now| Duration::from(now).as_millis()).ok().and_then(|ms| u64::try_from(ms).ok()).unwrap_or(0)
}

/// Conversion between simulated time and `Instant`, which has no constructor.
#[cfg(feature = "simulation")]
pub(crate) mod simulated {
    use super::{Duration, Instant};

    thread_local! {
        static BOOT: Instant = Instant::now();
    }

    pub(crate) fn instant(ns: u64) -> Instant {
        BOOT.with(|boot| *boot + Duration::from_nanos(ns))
    }

    pub(crate) fn ns(instant: Instant) -> u64 {
        let since = BOOT.with(|boot| instant.saturating_duration_since(*boot));
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }
}
