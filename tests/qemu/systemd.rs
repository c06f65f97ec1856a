//! A guest with Debian's systemd as init system: coracle installed by its package, and everything that
//! depends on the systemd cgroup driver. The tests themselves are `tests/inside/systemd.rs`, which a unit
//! runs.

use std::time::Duration;

use crate::disk::workspace;
use crate::guest::Guest;
use crate::target::Arch;

/// systemd's boot takes 15 seconds under emulation, dpkg and its scripts some seconds each time.
const LIMIT: Duration = Duration::from_secs(20 * 60);

#[track_caller]
fn packaged(arch: Arch) {
    let guest = Guest::systemd("systemd", arch, 256, &["inside"], |_| {});
    let words = "CORACLE_SUITE=inside CORACLE_TESTS=systemd:: CORACLE_FLAGS=--skip=systemd::kubelet::";
    let report = guest.boot(words, LIMIT);
    report.expect_good(&format!("systemd on {}", arch.name()));
    assert!(report.passed >= 8, "{}", report.console);
}

#[test]
fn packaged_under_systemd_on_x86_64() {
    packaged(Arch::X86_64);
}

#[test]
#[ignore = "the same scripts on another CPU: make test-all PARTS=more-guests"]
fn packaged_under_systemd_on_aarch64() {
    packaged(Arch::Aarch64);
}

/// A real kubelet with static pods (`tests/inside/systemd/kubelet.rs`).
#[test]
fn a_kubelet_with_the_systemd_driver_on_x86_64() {
    let guest = Guest::systemd("kubelet", Arch::X86_64, 1024, &["inside"], |tree| {
        let program = workspace().join("target/tools/bin/kubelet");
        tree.copy(&program, "opt/kubelet");
    });
    let report = guest.boot("CORACLE_SUITE=inside CORACLE_TESTS=systemd::kubelet::", LIMIT);
    report.expect_good("a kubelet under systemd");
    assert_eq!(report.passed, 1, "{}", report.console);
}
