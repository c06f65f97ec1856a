//! Confinement of the fetcher process, whose only access is to the network: TCP and UDP of the host, no other sockets. Its root
//! directory contains the two files of the resolver, read-only; its user, 65534, owns no files and has no capabilities.

use std::fs::File;

use coracle_job::{Failure, FailureKind};
use coracle_sandbox::jail::{self, AllowedWith, INT, Limits, OPEN_TO_READ, TCP_OPTIONS, THREADS};

use super::names::FILES;

/// Memory of the stacks and buffers of 128 threads, and certificates; a connection, a pipe and a resolver socket for each request, and
/// idle connections.
const LIMITS: Limits =
    Limits { memory_bytes: 256 << 20, descriptors: 512, file_bytes: jail::FILES_BYTES_MAX };

/// System calls in addition to [`jail::RUNTIME_CALLS`].
const CALLS: &[&str] = &[
    "nanosleep",
    "clock_nanosleep",
    "sigaltstack",
    // There is no other process in its PID namespace, and any thread may call abort(3).
    "tkill",
    "fcntl",
    // The files in its root directory.
    "pwrite64",
    "ftruncate",
    // Operations on open sockets.
    "connect",
    "bind",
    "sendto",
    "sendmsg",
    "recvfrom",
    "recvmsg",
    "getsockname",
    "getpeername",
    "getsockopt",
    "shutdown",
];

const AF_INET: u64 = 2;
const AF_INET6: u64 = 10;
const IPPROTO_TCP: u64 = 6;
const IPPROTO_UDP: u64 = 17;
const IPPROTO_IPV6: u64 = 41;
const FIONBIO: u64 = 0x5421;

/// Sockets of TCP and UDP over IPv4 and IPv6, which may not block; there is no other protocol family.
const SOCKETS: [AllowedWith; 8] = [
    AllowedWith { calls: &["socket"], arguments: &[(0, INT, AF_INET), (2, INT, 0)] },
    AllowedWith { calls: &["socket"], arguments: &[(0, INT, AF_INET), (2, INT, IPPROTO_TCP)] },
    AllowedWith { calls: &["socket"], arguments: &[(0, INT, AF_INET), (2, INT, IPPROTO_UDP)] },
    AllowedWith { calls: &["socket"], arguments: &[(0, INT, AF_INET6), (2, INT, 0)] },
    AllowedWith { calls: &["socket"], arguments: &[(0, INT, AF_INET6), (2, INT, IPPROTO_TCP)] },
    AllowedWith { calls: &["socket"], arguments: &[(0, INT, AF_INET6), (2, INT, IPPROTO_UDP)] },
    AllowedWith { calls: &["setsockopt"], arguments: &[(1, INT, IPPROTO_IPV6)] },
    AllowedWith { calls: &["ioctl"], arguments: &[(1, INT, FIONBIO)] },
];

/// Confines this process permanently before it reads any data; returns the files of its root directory,
/// opened for writing.
///
/// # Errors
/// The step that this host does not permit.
pub(super) fn confine() -> Result<Vec<File>, String> {
    let tried = |error: coracle_sandbox::Error| error.to_string();
    jail::close_descriptors(3).map_err(tried)?;
    jail::limit(LIMITS).map_err(tried)?;
    let files = jail::shut_in_on_network(&FILES).map_err(tried)?;
    jail::become_nobody().map_err(tried)?;
    set_filter().map_err(tried)?;
    Ok(files)
}

/// The failure of a fetcher that could not be started or confined.
pub(super) fn not_without(why: &str) -> Failure {
    Failure::new(FailureKind::Internal, format!("jail: {why}: no registry is contacted without it"))
}

/// Permits only the system calls above, the opening of files to read them, and threads from now on.
///
/// # Errors
/// Those of [`jail::allow_only_with`].
fn set_filter() -> Result<(), coracle_sandbox::Error> {
    jail::allow_only_with(CALLS, &[&OPEN_TO_READ[..], &THREADS, &TCP_OPTIONS, &SOCKETS].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Applies the fetcher's filter to one thread of this process: TCP, UDP and reading of files are permitted,
    /// all other operations are denied. Each denial depends on one condition.
    #[test]
    fn the_fetcher_filter_denies_writing_files_and_starting_processes_as_root() {
        use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};

        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let confined = std::thread::spawn(move || {
            set_filter().unwrap();
            let make = |family, kind, protocol: Option<SockProtocol>| {
                socket(family, kind, SockFlag::empty(), protocol).map(drop)
            };
            let (stream, datagram, raw) = (SockType::Stream, SockType::Datagram, SockType::Raw);
            let target = std::env::temp_dir().join("coracle-filter");
            let may = [
                ("connect", std::net::TcpStream::connect(address).map(drop)),
                ("read a file", File::open("/etc/hosts").map(drop)),
                ("UDP", make(AddressFamily::Inet, datagram, Some(SockProtocol::Udp)).map_err(Into::into)),
            ];
            let may_not = [
                ("write a file", File::create(&target).map(drop)),
                ("write /etc/hosts", File::options().append(true).open("/etc/hosts").map(drop)),
                ("a program", std::process::Command::new("true").spawn().map(drop)),
                ("a directory", std::fs::create_dir(&target)),
                ("listen", std::net::TcpListener::bind("127.0.0.1:0").map(drop)),
                ("AF_UNIX", make(AddressFamily::Unix, stream, None).map_err(Into::into)),
                ("AF_NETLINK", make(AddressFamily::Netlink, raw, None).map_err(Into::into)),
                ("AF_PACKET", make(AddressFamily::Packet, raw, None).map_err(Into::into)),
                ("AF_VSOCK", make(AddressFamily::Vsock, stream, None).map_err(Into::into)),
                ("SCTP", make(AddressFamily::Inet, stream, Some(SockProtocol::Sctp)).map_err(Into::into)),
                (
                    "a namespace",
                    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWUSER).map_err(Into::into),
                ),
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
}
