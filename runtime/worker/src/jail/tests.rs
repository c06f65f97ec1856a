//! Checks the lists of system calls against the tables of all architectures.

use coracle_sandbox::seccomp::Architecture;

use super::{DECOMPRESS_CALLS, NEVER, RUNTIME_CALLS, SOCKETS, UNPACK_CALLS, mirror, network};

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
    let conditional = network::CALLS_WITH.iter().chain(mirror::CALLS_WITH).flat_map(|allowed| allowed.calls);
    let own = DECOMPRESS_CALLS.iter().chain(UNPACK_CALLS).chain(network::CALLS).chain(mirror::CALLS);
    for name in RUNTIME_CALLS.iter().chain(own).chain(conditional) {
        let is_known = Architecture::ALL.iter().any(|architecture| architecture.number(name).is_some());
        assert!(is_known, "{name}");
    }
}

/// Applies the fetcher's filter to one thread of this process: TCP, UDP and reading of files are permitted,
/// all other operations are denied. Each denial depends on one condition of [`network::CALLS_WITH`].
#[test]
fn the_fetcher_filter_denies_writing_files_and_starting_processes_as_root() {
    use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};

    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let confined = std::thread::spawn(move || {
        network::set_filter().unwrap();
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
