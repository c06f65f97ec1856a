//! Notifies systemd of the state of the service with the datagrams of sd_notify(3), without its library. No
//! effect without NOTIFY_SOCKET.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use coracle_base::{log, reactor};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, sendto, socket};

/// State message: the service has started; sent when the CRI socket accepts calls.
pub(crate) const READY: &str = "READY=1";

/// State message: the service is shutting down.
pub(crate) const STOPPING: &str = "STOPPING=1";

/// State message: keep-alive for the watchdog.
const WATCHDOG: &str = "WATCHDOG=1";

/// The service manager's socket, from `NOTIFY_SOCKET`.
#[derive(Clone)]
pub(crate) struct Notifier {
    address: Option<OsString>,
}

impl Notifier {
    /// Creates a notifier for the service manager that started this process, if any.
    pub(crate) fn from_environment() -> Notifier {
        Notifier { address: std::env::var_os("NOTIFY_SOCKET").filter(|address| !address.is_empty()) }
    }

    /// Sends keep-alive messages twice as often as the manager requires (sd_watchdog_enabled(3)). The messages are sent by an
    /// ordinary task, so a blocked event loop sends none. Without WATCHDOG_USEC there is no task and no timer.
    pub(crate) fn keep_telling(self) {
        let variable = |name| std::env::var(name).ok();
        let limit = watchdog_limit(variable("WATCHDOG_USEC"), variable("WATCHDOG_PID"), std::process::id());
        let Some(pause) = limit.map(|limit| limit / 2) else { return };
        reactor::spawn(async move {
            loop {
                self.tell(WATCHDOG);
                reactor::sleep(pause).await;
            }
        })
        .detach();
    }

    /// Sends the state message `state`. An error is logged, because the manager may kill the daemon as a result.
    pub(crate) fn tell(&self, state: &str) {
        let Some(address) = &self.address else { return };
        if let Err(error) = send(address, state) {
            log::warn!("cannot notify systemd"; state = state, socket = address.display(), error = coracle_base::error::describe_io(&error));
        }
    }
}

/// The watchdog's interval; `None` if the environment has none or it is for another process.
fn watchdog_limit(microseconds: Option<String>, pid: Option<String>, own: u32) -> Option<Duration> {
    if pid.is_some_and(|pid| pid.parse() != Ok(own)) {
        return None;
    }
    let microseconds = microseconds?.parse().ok().filter(|&limit| limit > 0)?;
    Some(Duration::from_micros(microseconds))
}

/// Sends one datagram without blocking. A leading `@` means the abstract namespace.
fn send(address: &OsStr, state: &str) -> io::Result<()> {
    let address = match address.as_bytes().strip_prefix(b"@") {
        Some(name) => UnixAddr::new_abstract(name)?,
        None => UnixAddr::new(address)?,
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Unix, SockType::Datagram, flags, None)?;
    sendto(socket.as_raw_fd(), state.as_bytes(), &address, MsgFlags::MSG_NOSIGNAL)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{READY, send, watchdog_limit};
    use std::ffi::OsStr;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};
    use std::time::Duration;

    #[test]
    fn the_watchdog_applies_only_to_the_process_that_it_names() {
        let cases = [
            (None, None, None),
            (Some("30000000"), None, Some(30)),
            (Some("30000000"), Some("7"), Some(30)),
            (Some("30000000"), Some("8"), None),
            (Some("0"), Some("7"), None),
            (Some("soon"), None, None),
            (None, Some("7"), None),
        ];
        for (microseconds, pid, expected) in cases {
            let limit = watchdog_limit(microseconds.map(str::to_owned), pid.map(str::to_owned), 7);
            assert_eq!(limit, expected.map(Duration::from_secs), "{microseconds:?} {pid:?}");
        }
    }

    #[test]
    fn sockets_by_path_and_by_abstract_name_are_notified() {
        let name = format!("coracle-notify-{}", std::process::id());
        let path = std::env::temp_dir().join(&name);
        let abstract_address = SocketAddr::from_abstract_name(&name).unwrap();
        let cases = [
            (UnixDatagram::bind(&path).unwrap(), path.clone().into_os_string()),
            (UnixDatagram::bind_addr(&abstract_address).unwrap(), format!("@{name}").into()),
        ];
        for (manager, address) in cases {
            send(&address, READY).unwrap();
            let mut got = [0; 64];
            let count = manager.recv(&mut got).unwrap();
            assert_eq!(&got[..count], b"READY=1", "{address:?}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(send(OsStr::new("/nonexistent/notify"), READY).is_err());
    }
}
