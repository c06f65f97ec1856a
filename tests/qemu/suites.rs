//! The suites that test the host, in guests.

use std::time::Duration;

use crate::guest::{Arch, Guest};

/// Emulation is some ten times slower, and two guests share two cores: three minutes, when nothing else runs.
const LIMIT: Duration = Duration::from_secs(20 * 60);

/// Fewer tests than that, and the guest ran something else.
const TESTS_MIN: usize = 90;

/// Runs the whole life-cycle suite in a guest with this much memory.
#[track_caller]
fn life_cycle(arch: Arch, memory_mib: u32) {
    let filters = std::env::var("CORACLE_QEMU_ONLY").unwrap_or_default();
    let guest = Guest::new("lifecycle", arch, memory_mib, &["lifecycle"]);
    let report = guest.boot(&format!("CORACLE_SUITE=lifecycle CORACLE_TESTS={filters}"), LIMIT);
    report.expect_good(arch.name());
    assert!(!filters.is_empty() || report.passed >= TESTS_MIN, "{arch:?}: {} passed", report.passed);
}

#[test]
fn life_cycle_on_x86_64_with_256_mib() {
    life_cycle(Arch::X86_64, 256);
}

#[test]
fn life_cycle_on_aarch64_with_128_mib() {
    life_cycle(Arch::Aarch64, 128);
}
