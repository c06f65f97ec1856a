//! Both targets for real: a guest of each architecture boots Debian's kernel under QEMU and runs the life-cycle suite on
//! cgroup v2 with full privileges (no emulation by the host's kernel, no namespaces of it). Needs root for nothing, but
//! QEMU, Debian's kernels and the programs of both targets: `tests/tools/install qemu`, `make guests`.
//!
//! What hangs, panics or says nothing is a failure: only a guest that says how its suite ended has passed.
#![forbid(unsafe_code)]

mod guest;
mod initramfs;

use std::time::Duration;

use guest::{Arch, Guest};

/// Emulation is some ten times slower, and two guests share two cores: three minutes, when nothing else runs.
const LIMIT: Duration = Duration::from_secs(20 * 60);

/// Fewer tests than that, and the guest ran something else.
const TESTS_MIN: usize = 90;

/// Runs the whole suite in a guest with this much memory.
#[track_caller]
fn life_cycle(arch: Arch, memory_mib: u32) {
    let filters = std::env::var("CORACLE_QEMU_ONLY").unwrap_or_default();
    let report = Guest::new(arch, memory_mib, &filters).boot(LIMIT);
    let name = arch.name();
    println!("{name}: {} passed in {:?}", report.passed, report.took);
    assert!(report.failed.is_empty(), "{name}: {:?}\n{}", report.failed, report.console);
    assert_eq!(report.code, Some(0), "{name}: no good end\n{}", report.console);
    assert!(!filters.is_empty() || report.passed >= TESTS_MIN, "{name}: {} passed", report.passed);
}

#[test]
fn life_cycle_on_x86_64_with_256_mib() {
    life_cycle(Arch::X86_64, 256);
}

#[test]
fn life_cycle_on_aarch64_with_128_mib() {
    life_cycle(Arch::Aarch64, 128);
}
