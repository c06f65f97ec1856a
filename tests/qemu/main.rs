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

/// A slice through the suite for every `make test`: each part of the program once, in a minute or two of emulation.
const SHORT: [&str; 14] = [
    "containers::",
    "devices::",
    "escapes::cve_2022_0492",
    "escapes::cve_2025_31133",
    "exec::streams_and_codes_come_back",
    "exec::an_exec_is_who_the_container_is",
    "limits::",
    "logs::",
    "pods::",
    "seccomp::",
    "stats::",
    "userns::files_belong",
    "userns::root_inside",
    "volumes::an_image",
];

/// Emulation is some twenty times slower, and two guests share two cores.
const SHORT_LIMIT: Duration = Duration::from_secs(12 * 60);
const FULL_LIMIT: Duration = Duration::from_secs(60 * 60);

/// Runs these tests of the suite in a guest with this much memory; all where there are none.
#[track_caller]
fn runs(arch: Arch, memory_mib: u32, filters: &[&str], limit: Duration) {
    let report = Guest::new(arch, memory_mib, filters).boot(limit);
    println!("{}: {} passed in {:?}", arch.name(), report.passed, report.took);
    assert!(report.failed.is_empty(), "{}: {:?}\n{}", arch.name(), report.failed, report.console);
    assert_eq!(report.code, Some(0), "{}: no good end\n{}", arch.name(), report.console);
    assert!(report.passed >= filters.len().max(1), "{}: {} passed", arch.name(), report.passed);
}

/// Whether `make test-qemu` asks for all of it.
fn wants_all() -> bool {
    std::env::var_os("CORACLE_QEMU_FULL").is_some()
}

fn life_cycle(arch: Arch) {
    match wants_all() {
        true => runs(arch, 512, &[], FULL_LIMIT),
        false => runs(arch, 256, &SHORT, SHORT_LIMIT),
    }
}

#[test]
fn life_cycle_on_x86_64() {
    life_cycle(Arch::X86_64);
}

#[test]
fn life_cycle_on_aarch64() {
    life_cycle(Arch::Aarch64);
}
