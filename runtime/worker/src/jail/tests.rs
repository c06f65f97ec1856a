//! Checks the lists of system calls against the tables of all architectures.

use coracle_sandbox::seccomp::Architecture;

use super::{DECOMPRESS_CALLS, NEVER, SOCKETS, UNPACK_CALLS, mirror};

/// System calls that do not exist on these architectures: I/O ports exist on x86 only, and i386 loads kernels
/// by `kexec_load` only.
const ABSENT: [(&str, &[Architecture]); 3] = [
    ("ioperm", &[Architecture::Aarch64, Architecture::Arm, Architecture::Riscv64]),
    ("iopl", &[Architecture::Aarch64, Architecture::Arm, Architecture::Riscv64]),
    ("kexec_file_load", &[Architecture::X86]),
];

/// Checks finding 9 in docs/results/0.1.0.md: a denied system call has a number on every architecture that
/// supports it. Regression: name_to_handle_at and open_by_handle_at had none on aarch64, so they were allowed
/// there.
#[test]
fn denied_calls_have_numbers_on_every_architecture() {
    for name in NEVER.iter().chain(&SOCKETS) {
        let absent = ABSENT.iter().find(|(absent, _)| absent == name).map_or(&[][..], |(_, absent)| absent);
        for architecture in Architecture::ALL {
            let has_number = architecture.number(name).is_some();
            assert_eq!(has_number, !absent.contains(&architecture), "{name} on {architecture:?}");
        }
    }
}

#[test]
fn allowed_calls_exist() {
    for name in DECOMPRESS_CALLS.iter().chain(UNPACK_CALLS).chain(mirror::CALLS) {
        let is_known = Architecture::ALL.iter().any(|architecture| architecture.number(name).is_some());
        assert!(is_known, "{name}");
    }
}
