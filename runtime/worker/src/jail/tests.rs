//! The lists of calls against the table of every architecture.

use coracle_sandbox::seccomp::Architecture;

use super::{DECOMPRESS_CALLS, NEVER, SOCKETS, UNPACK_CALLS, network};

/// Calls that these architectures do not have: I/O ports are x86's, and i386 loads kernels by `kexec_load` alone.
const ABSENT: [(&str, &[Architecture]); 3] = [
    ("ioperm", &[Architecture::Aarch64, Architecture::Arm]),
    ("iopl", &[Architecture::Aarch64, Architecture::Arm]),
    ("kexec_file_load", &[Architecture::X86]),
];

/// Finding 9 in docs/security.md: a call that is denied has a number on every architecture that has the call. Before,
/// name_to_handle_at and open_by_handle_at had none on aarch64, and the jail let them through there.
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
fn allowed_calls_are_calls() {
    let conditional = network::CALLS_WITH.iter().flat_map(|allowed| allowed.calls);
    for name in DECOMPRESS_CALLS.iter().chain(UNPACK_CALLS).chain(network::CALLS).chain(conditional) {
        let is_known = Architecture::ALL.iter().any(|architecture| architecture.number(name).is_some());
        assert!(is_known, "{name}");
    }
}
