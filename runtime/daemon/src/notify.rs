//! Tells systemd how far we are: sd_notify(3)'s datagrams, without its library. Where nobody listens nothing happens.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use coracle_base::{log, reactor};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, sendto, socket};

/// The unit is up: sent once the CRI socket answers.
pub(crate) const READY: &str = "READY=1";

/// The unit is going down.
pub(crate) const STOPPING: &str = "STOPPING=1";

/// The loop still turns.
const WATCHDOG: &str = "WATCHDOG=1";

/// Where to tell: `NOTIFY_SOCKET` of the environment we were started with.
#[derive(Clone)]
pub(crate) struct Notifier {
    address: Option<OsString>,
}

impl Notifier {
    /// For the service manager that started us, if one did.
    pub(crate) fn from_environment() -> Notifier {
        Notifier { address: std::env::var_os("NOTIFY_SOCKET").filter(|address| !address.is_empty()) }
    }

    /// Says from now on that the loop turns, twice as often as the manager wants to hear it (sd_watchdog_enabled(3)). It is
    /// a task like all others, so a loop that is stuck is silent. Without WATCHDOG_USEC there is no task and no timer.
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

    /// Sends `state`. A manager that cannot be told is logged: it will take us for dead, which must have a trace.
    pub(crate) fn tell(&self, state: &str) {
        let Some(address) = &self.address else { return };
        if let Err(error) = send(address, state) {
            log::warn!("notify"; state = state, socket = address.display(), error = coracle_base::error::plain(&error));
        }
    }
}

/// How long the manager waits for a word, if it is ours to give.
fn watchdog_limit(microseconds: Option<String>, pid: Option<String>, own: u32) -> Option<Duration> {
    if pid.is_some_and(|pid| pid.parse() != Ok(own)) {
        return None;
    }
    let microseconds = microseconds?.parse().ok().filter(|&limit| limit > 0)?;
    Some(Duration::from_micros(microseconds))
}

/// One datagram; never blocks. `@` in front means the abstract namespace.
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
    fn the_watchdog_is_ours_or_nobodys() {
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
    fn paths_and_abstract_names_are_told() {
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
