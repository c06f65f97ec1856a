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

/// The filter of the process that speaks to registries, in force for one thread of this process: TCP and UDP, and
/// files for reading, nothing else. Each refusal fails here once its condition is taken out of [`network::CALLS_WITH`].
#[test]
fn who_speaks_to_registries_opens_nothing_for_writing_and_starts_nothing() {
    use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};

    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let confined = std::thread::spawn(move || {
        coracle_sandbox::jail::allow_only_with(network::CALLS, network::CALLS_WITH).unwrap();
        let make = |family, kind, protocol: Option<SockProtocol>| {
            socket(family, kind, SockFlag::empty(), protocol).map(drop)
        };
        let (stream, datagram, raw) = (SockType::Stream, SockType::Datagram, SockType::Raw);
        let target = std::env::temp_dir().join("coracle-filter");
        let may = [
            ("connect", std::net::TcpStream::connect(address).map(drop)),
            ("read a file", std::fs::File::open("/etc/hosts").map(drop)),
            ("UDP", make(AddressFamily::Inet, datagram, Some(SockProtocol::Udp)).map_err(Into::into)),
        ];
        let may_not = [
            ("write a file", std::fs::File::create(&target).map(drop)),
            ("write /etc/hosts", std::fs::File::options().append(true).open("/etc/hosts").map(drop)),
            ("a program", std::process::Command::new("true").spawn().map(drop)),
            ("a directory", std::fs::create_dir(&target)),
            ("listen", std::net::TcpListener::bind("127.0.0.1:0").map(drop)),
            ("AF_UNIX", make(AddressFamily::Unix, stream, None).map_err(Into::into)),
            ("AF_NETLINK", make(AddressFamily::Netlink, raw, None).map_err(Into::into)),
            ("AF_PACKET", make(AddressFamily::Packet, raw, None).map_err(Into::into)),
            ("AF_VSOCK", make(AddressFamily::Vsock, stream, None).map_err(Into::into)),
            ("SCTP", make(AddressFamily::Inet, stream, Some(SockProtocol::Sctp)).map_err(Into::into)),
            ("a namespace", nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWUSER).map_err(Into::into)),
        ];
        (may, may_not)
    });
    let (may, may_not) = confined.join().unwrap();
    for (what, result) in may {
        result.unwrap_or_else(|error| panic!("{what}: {error}"));
    }
    for (what, result) in may_not {
        let error: std::io::Error = result.expect_err(what);
        assert!(matches!(error.raw_os_error(), Some(1 | 38)), "{what}: {error}");
    }
}
