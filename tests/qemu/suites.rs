//! The suites that test the host, in guests.

use std::time::Duration;

use crate::disk::Tree;
use crate::guest::Guest;
use crate::target::Arch;

/// Emulation is some ten times slower, and two guests share two cores: three minutes, when nothing else runs.
const LIMIT: Duration = Duration::from_secs(40 * 60);

/// Fewer tests than that, and the guest ran something else.
const TESTS_MIN: usize = 90;

/// Names, or parts of names, of the only tests to run in guests, with commas between them; empty: all of them.
fn filters() -> String {
    std::env::var("CORACLE_QEMU_ONLY").unwrap_or_default()
}

/// Runs the whole life-cycle suite in a guest with this much memory. Without AppArmor, whose default profile refuses some of
/// what these tests do in containers on purpose (trace others, mount); it has a guest of its own.
#[track_caller]
fn life_cycle(arch: Arch, memory_mib: u32) {
    let filters = filters();
    let guest = Guest::new("lifecycle", arch, memory_mib, &["lifecycle"]);
    let report = guest.boot(&format!("apparmor=0 CORACLE_SUITE=lifecycle CORACLE_TESTS={filters}"), LIMIT);
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

/// Runs every attack in a guest with this much memory: on cgroup v2, with Debian's kernel.
#[track_caller]
fn attacks(arch: Arch, memory_mib: u32) {
    /// Fewer tests than that, and the guest ran something else.
    const ATTACKS_MIN: usize = 45;
    let filters = filters();
    let guest = Guest::new("hostile", arch, memory_mib, &["hostile"]);
    let report = guest.boot(&format!("apparmor=0 CORACLE_SUITE=hostile CORACLE_TESTS={filters}"), LIMIT);
    report.expect_good(arch.name());
    assert!(!filters.is_empty() || report.passed >= ATTACKS_MIN, "{arch:?}: {} passed", report.passed);
}

#[test]
#[ignore = "many minutes under emulation: make test-qemu"]
fn attacks_on_x86_64() {
    attacks(Arch::X86_64, 512);
}

#[test]
#[ignore = "many minutes under emulation: make test-qemu"]
fn attacks_on_aarch64() {
    attacks(Arch::Aarch64, 512);
}

/// What this harness must never take for a success.
#[test]
fn a_guest_that_panics_hangs_or_runs_nothing_has_not_passed() {
    let guest = Guest::new("bad", Arch::X86_64, 128, &[]);
    let panicked = guest.boot("rdinit=/none root=/dev/none", LIMIT);
    assert_eq!(panicked.code, None);
    assert!(panicked.console.contains("Kernel panic"), "{}", panicked.console);
    let hung = guest.boot("", Duration::from_millis(500));
    assert_eq!((hung.code, hung.passed), (None, 0));
    let empty = guest.boot("CORACLE_SUITE=none", LIMIT);
    assert!(empty.code.is_some_and(|code| code != 0), "{}", empty.console);
}

/// Runs another suite, whole, in an x86_64 guest with what its tests call. critest and Debian's registry alone are larger
/// than the guests above.
#[track_caller]
fn whole(suite: &str, tests_min: usize) {
    const LIMIT: Duration = Duration::from_secs(3 * 60 * 60);
    let guest = Guest::with(suite, Arch::X86_64, 768, &[suite], Tree::add_tools);
    let filters = filters();
    let report = guest.boot(&format!("CORACLE_SUITE={suite} CORACLE_TESTS={filters}"), LIMIT);
    report.expect_good(suite);
    assert!(!filters.is_empty() || report.passed >= tests_min, "{suite}: {} passed", report.passed);
}

#[test]
#[ignore = "too long for each run: make test-qemu"]
fn nri() {
    whole("nri", 70);
}

#[test]
#[ignore = "too long for each run: make test-qemu"]
fn images() {
    whole("images", 15);
}

#[test]
#[ignore = "too long for each run: make test-qemu"]
fn network() {
    whole("network", 8);
}

#[test]
#[ignore = "too long for each run: make test-qemu"]
fn faults() {
    whole("faults", 9);
}

/// critest's nine AppArmor specs, which it skips on a host without AppArmor, in a guest that has it.
#[test]
#[ignore = "too long for each run: make test-qemu"]
fn critest_about_apparmor() {
    let guest = Guest::with("critest-apparmor", Arch::X86_64, 768, &["conformance"], Tree::add_tools);
    let words = "apparmor=1 security=apparmor CORACLE_SUITE=conformance CORACLE_CRITEST_FOCUS=AppArmor";
    let report = guest.boot(words, LIMIT);
    report.expect_good("critest about AppArmor");
    assert!(report.console.contains("critest: 9 passed, 0 failed, 0 skipped"), "{}", report.console);
}

/// With AppArmor, which Debian's kernel has and a host of CI may not.
#[test]
#[ignore = "too long for each run: make test-qemu"]
fn critest() {
    whole("conformance", 1);
}
