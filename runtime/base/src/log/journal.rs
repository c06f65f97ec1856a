//! The native protocol of systemd's journal (<https://systemd.io/JOURNAL_NATIVE_PROTOCOL/>): one datagram a message, in which
//! each key of the message is a field of its own, so that `journalctl CORACLE_POD=…` finds the lines of a pod.

use std::fmt::Write as _;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, sendto, socket};

use super::Level;

/// The journal's socket.
pub(super) const SOCKET: &str = "/run/systemd/journal/socket";

/// A socket that sends to the journal without blocking. It is not connected, so that a journal that was restarted gets the
/// next message.
pub(super) struct Journal {
    socket: OwnedFd,
    address: UnixAddr,
}

impl Journal {
    /// Creates the socket; a journal need not run.
    pub(super) fn new(path: &str) -> io::Result<Journal> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Unix, SockType::Datagram, flags, None)?;
        Ok(Journal { socket, address: UnixAddr::new(path)? })
    }

    /// Sends a message that [`compose`] has written.
    ///
    /// # Errors
    /// No journal runs, or it is too slow.
    pub(super) fn send(&self, text: &str) -> io::Result<()> {
        sendto(self.socket.as_raw_fd(), text.as_bytes(), &self.address, MsgFlags::MSG_NOSIGNAL)?;
        Ok(())
    }
}

/// Writes a message in front of its own fields: `line` is the text that people read, which has no line break.
pub(super) fn compose(text: &mut String, level: Level, line: &str) {
    // Writing to a String cannot fail.
    let _ = write!(
        text,
        "PRIORITY={}\nSYSLOG_IDENTIFIER=coracle\nMESSAGE={}\n",
        level.priority(),
        line.trim_end_matches('\n')
    );
}

/// Appends a key of the message as a field; `value` is escaped and has no line break. Keys are lower-case words.
pub(super) fn field(text: &mut String, key: &str, value: &str) {
    text.push_str("CORACLE_");
    text.extend(key.chars().map(|letter| letter.to_ascii_uppercase()));
    let _ = writeln!(text, "={value}");
}

#[cfg(test)]
mod tests {
    use super::{Journal, Level, compose, field};
    use std::os::unix::net::UnixDatagram;

    #[test]
    fn a_message_arrives_with_its_fields_and_a_restarted_journal_gets_the_next_one() {
        let path = std::env::temp_dir().join(format!("coracle-journal-{}", std::process::id()));
        let path = path.to_str().unwrap();
        let journal = Journal::new(path).unwrap();
        let mut text = String::new();
        compose(&mut text, Level::Warn, "level=warn msg=slow\n");
        field(&mut text, "pod", "3f2a9c01b7d4e");
        field(&mut text, "lost_lines", "3");
        let expected = "PRIORITY=4\nSYSLOG_IDENTIFIER=coracle\nMESSAGE=level=warn msg=slow\n\
                        CORACLE_POD=3f2a9c01b7d4e\nCORACLE_LOST_LINES=3\n";
        assert_eq!(text, expected);
        for _ in 0..2 {
            journal.send(&text).unwrap_err();
            let peer = UnixDatagram::bind(path).unwrap();
            journal.send(&text).unwrap();
            let mut got = [0; 256];
            let count = peer.recv(&mut got).unwrap();
            assert_eq!(&got[..count], expected.as_bytes());
            // One that does not read is not waited for.
            assert!((0..100_000).any(|_| journal.send(&text).is_err()));
            std::fs::remove_file(path).unwrap();
        }
    }
}
