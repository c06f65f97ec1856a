//! Guests whose kernel confines containers by a security module. The tests themselves are
//! `tests/inside/apparmor.rs` and `tests/inside/selinux.rs`.

use std::process::Command;
use std::time::Duration;

use crate::disk::{Tree, packages, workspace};
use crate::guest::Guest;
use crate::target::Arch;

/// A boot and some twenty containers.
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// A profile that allows everything, for containers that request it by name.
const OTHER_PROFILE: &str =
    "profile coracle-test flags=(attach_disconnected) { file, capability, signal, ptrace, mount, umount, }\n";

/// Adds the AppArmor profile, compiled on this machine: the kernel's format does not depend on the architecture.
fn add_other_profile(tree: &Tree) {
    tree.write("opt/coracle-test.profile", OTHER_PROFILE);
    let compiled = Command::new(packages("tools-amd64").join("sbin/apparmor_parser"))
        .args(["--config-file", "/dev/null", "--features-file"])
        .arg(workspace().join("sandbox/apparmor/features"))
        .args(["--skip-kernel-load", "--skip-cache", "--stdout"])
        .arg(tree.path("opt/coracle-test.profile"))
        .output()
        .expect("apparmor_parser: tests/tools/install qemu");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    tree.write("opt/coracle-test.bin", compiled.stdout);
}

#[track_caller]
fn apparmor(arch: Arch) {
    let guest = Guest::with("apparmor", arch, 128, &["inside"], add_other_profile);
    let words = "apparmor=1 security=apparmor CORACLE_SUITE=inside CORACLE_TESTS=apparmor::";
    let report = guest.boot(words, LIMIT);
    report.expect_good(&format!("AppArmor on {}", arch.name()));
    assert!(report.passed >= 4, "{}", report.console);
}

#[test]
fn apparmor_on_x86_64() {
    apparmor(Arch::X86_64);
}

#[test]
#[ignore = "the same profile on another CPU: make test-all PARTS=more-guests"]
fn apparmor_on_aarch64() {
    apparmor(Arch::Aarch64);
}

/// Adds Debian's policy, a variant with container types, and the files with which runtimes find these types.
fn add_policies(tree: &Tree) {
    let package = packages("selinux");
    for name in ["debian.policy", "containers.policy"] {
        tree.copy(&package.join(name), &format!("opt/selinux/{name}"));
    }
    let contexts = "etc/selinux/default/contexts/lxc_contexts";
    tree.copy(&package.join(contexts), contexts);
    tree.write("etc/selinux/config", "SELINUX=enforcing\nSELINUXTYPE=default\n");
}

#[track_caller]
fn selinux(arch: Arch) {
    let guest = Guest::with("selinux", arch, 256, &["inside"], add_policies);
    let words = "selinux=1 security=selinux CORACLE_SUITE=inside CORACLE_TESTS=selinux::";
    let report = guest.boot(words, LIMIT);
    report.expect_good(&format!("SELinux on {}", arch.name()));
    assert!(report.passed >= 4, "{}", report.console);
}

#[test]
fn selinux_on_x86_64() {
    selinux(Arch::X86_64);
}

#[test]
#[ignore = "the same policy on another CPU: make test-all PARTS=more-guests"]
fn selinux_on_aarch64() {
    selinux(Arch::Aarch64);
}
