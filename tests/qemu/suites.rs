//! The test suites of the host, executed in guests.

use std::time::Duration;

use crate::disk::Tree;
use crate::guest::Guest;
use crate::target::Arch;

/// Time limit: emulation is some ten times slower, and two guests share two cores; three minutes if nothing
/// else runs.
const LIMIT: Duration = Duration::from_secs(40 * 60);

/// Minimum number of tests; with fewer, the guest did not run the suite.
const TESTS_MIN: usize = 90;

/// A comma-separated filter of tests for guests; empty: all.
fn filters() -> String {
    std::env::var("CORACLE_QEMU_ONLY").unwrap_or_default()
}

/// Runs the complete lifecycle suite in a guest with this much memory. Without AppArmor, whose default
/// profile denies operations of these tests (tracing, mounting); it has a guest of its own.
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

/// `make test-qemu-second`.
mod second_class {
    use super::*;

    #[test]
    #[ignore = "a target without releases: make test-qemu-second"]
    fn life_cycle_on_armv7_with_256_mib() {
        life_cycle(Arch::Armv7, 256);
    }
}

/// Each limit in a guest with cgroup v2 is the one that cgroups-rs sets; `cargo test` compares them with the version of the
/// host.
#[test]
fn limits_on_cgroup_v2_are_those_of_cgroups_rs() {
    let guest = Guest::new("reference", Arch::X86_64, 128, &["cgroup_reference"]);
    let report = guest.boot("CORACLE_SUITE=cgroup_reference", LIMIT);
    report.expect_good("cgroup_reference");
    assert_eq!(report.passed, 1, "{}", report.console);
}

/// Attacks that AppArmor's default profile denies before coracle's own defence is reached: tracing, mounting. It has tests of its own.
const OF_APPARMOR: &str = "--skip,trace::,--skip,finding_02,--skip,finding_03,--skip,masks_cannot_be_removed_by_mounts,--skip,no_mount_of_cgroups";

/// Runs attacks in a guest with this much memory, with cgroup v2 and Debian's kernel: all that `filters` leaves.
#[track_caller]
fn attacks(arch: Arch, memory_mib: u32, module: &str, skipped: &str) {
    /// Minimum number of tests; with fewer, the guest did not run the suite.
    const ATTACKS_MIN: usize = 45;
    /// Time limit on a machine that does other work, too; ten minutes if nothing else runs.
    const ATTACKS_LIMIT: Duration = Duration::from_secs(100 * 60);
    let filters = filters();
    let guest = Guest::new(&format!("hostile-{}", skipped.len()), arch, memory_mib, &["hostile"]);
    let words = format!("{module} CORACLE_SUITE=hostile CORACLE_TESTS={filters},{skipped}");
    let report = guest.boot(&words, ATTACKS_LIMIT);
    report.expect_good(arch.name());
    assert!(!filters.is_empty() || report.passed >= ATTACKS_MIN, "{arch:?}: {} passed", report.passed);
}

#[test]
#[ignore = "many minutes under emulation: make test-all PARTS=more-guests"]
fn attacks_on_x86_64() {
    attacks(Arch::X86_64, 512, "apparmor=0", "");
}

#[test]
#[ignore = "many minutes under emulation: make test-all PARTS=more-guests"]
fn attacks_on_x86_64_with_apparmor() {
    attacks(Arch::X86_64, 512, "apparmor=1 security=apparmor", OF_APPARMOR);
}

#[test]
#[ignore = "many minutes under emulation: make test-all PARTS=more-guests"]
fn attacks_on_aarch64() {
    attacks(Arch::Aarch64, 512, "apparmor=0", "");
}

/// The harness must treat all of these as failures.
#[test]
fn a_guest_that_panics_hangs_or_runs_nothing_fails() {
    let guest = Guest::new("bad", Arch::X86_64, 128, &[]);
    let panicked = guest.boot("rdinit=/none root=/dev/none", LIMIT);
    assert_eq!(panicked.code, None);
    assert!(panicked.console.contains("Kernel panic"), "{}", panicked.console);
    let hung = guest.boot("", Duration::from_millis(500));
    assert_eq!((hung.code, hung.passed), (None, 0));
    let empty = guest.boot("CORACLE_SUITE=none", LIMIT);
    assert!(empty.code.is_some_and(|code| code != 0), "{}", empty.console);
}

/// Runs another suite completely in an x86_64 guest with its programs. critest and Debian's registry are
/// larger than the other guests.
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
#[ignore = "too long for each run: make test-all PARTS=more-guests"]
fn nri() {
    whole("nri", 70);
}

#[test]
#[ignore = "too long for each run: make test-all PARTS=more-guests"]
fn images() {
    whole("images", 15);
}

#[test]
#[ignore = "too long for each run: make test-all PARTS=more-guests"]
fn network() {
    whole("network", 8);
}

#[test]
#[ignore = "too long for each run: make test-all PARTS=more-guests"]
fn faults() {
    whole("faults", 9);
}

/// critest's nine AppArmor specs, which are skipped on a host without AppArmor, in a guest with AppArmor.
#[test]
#[ignore = "too long for each run: make test-all PARTS=more-guests"]
fn critest_about_apparmor() {
    let guest = Guest::with("critest-apparmor", Arch::X86_64, 768, &["conformance"], Tree::add_tools);
    let words = "apparmor=1 security=apparmor CORACLE_SUITE=conformance CORACLE_CRITEST_FOCUS=AppArmor";
    let report = guest.boot(words, LIMIT);
    report.expect_good("critest about AppArmor");
    assert!(report.console.contains("critest: 9 passed, 0 failed, 0 skipped"), "{}", report.console);
}

/// With AppArmor, which Debian's kernel supports and the host of the CI may not.
#[test]
#[ignore = "too long for each run: make test-all PARTS=more-guests"]
fn critest() {
    whole("conformance", 1);
}
