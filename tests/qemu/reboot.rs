//! A machine that is powered off with running pods and boots again from the same disk:
//! `tests/inside/reboot.rs`. It also measures the time from the kernel's start to a running pod on a node
//! with the minimum of memory.

use std::time::Duration;

use crate::cargo;
use crate::guest::Guest;
use crate::target::Arch;

/// A boot takes some seconds, a pod's lifecycle one; twenty times as long if the machine is busy.
const LIMIT: Duration = Duration::from_secs(15 * 60);

#[track_caller]
fn reboot(arch: Arch) {
    boot_twice(&guest(arch), arch);
}

/// A guest with 128 MiB and the images of the two boots.
#[track_caller]
pub(crate) fn guest(arch: Arch) -> Guest {
    Guest::with("reboot", arch, 128, &["inside"], |tree| cargo::add(tree, arch))
}

/// Boots the guest twice; prints what the second boot measured.
#[track_caller]
pub(crate) fn boot_twice(guest: &Guest, arch: Arch) {
    let tests = ["pods_run_until_the_machine_is_powered_off", "pods_of_the_boot_before_can_be_removed"];
    for (boot, test) in ["first", "second"].into_iter().zip(tests) {
        let report = guest.boot(
            &format!("CORACLE_SUITE=inside CORACLE_TEST_DIR=/run/tests CORACLE_TESTS=reboot::{test}"),
            LIMIT,
        );
        report.expect_good(&format!("{boot} boot of {}", arch.name()));
        assert_eq!(report.passed, 1, "{}", report.console);
    }
}

#[test]
fn reboot_on_x86_64_with_128_mib() {
    reboot(Arch::X86_64);
}

#[test]
fn reboot_on_aarch64_with_128_mib() {
    reboot(Arch::Aarch64);
}
