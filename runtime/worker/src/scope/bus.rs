//! A connection to systemd: its own socket, which only root may use and which needs no bus daemon, else the system bus.
//! Every wait has one common end.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use coracle_job::{Failure, FailureKind};

use super::message::{self, HEAD_BYTES, Kind, Message, Method, Reader};
use crate::failure::failure;

/// systemd's own socket, and the system bus.
const PRIVATE: &str = "/run/systemd/private";
const SYSTEM_BUS: &str = "/run/dbus/system_bus_socket";

const SYSTEMD: &str = "org.freedesktop.systemd1";
const MANAGER_PATH: &str = "/org/freedesktop/systemd1";
const MANAGER: &str = "org.freedesktop.systemd1.Manager";

/// Longest line of the authentication (D-Bus specification: 16 KiB; real ones are 40 bytes).
const LINE_BYTES_MAX: usize = 1024;

/// See the module.
#[derive(Debug)]
pub(super) struct Bus {
    stream: UnixStream,
    /// Whether there is a bus between us and systemd.
    is_bus: bool,
    serial: u32,
    end: Instant,
    /// Jobs that have ended: signals may come before the reply that names the job.
    ended: Vec<(String, String)>,
}

impl Bus {
    /// Connects to systemd; everything that is asked of it must end within `limit`.
    pub(super) fn connect(limit: Duration) -> Result<Bus, Failure> {
        let direct = Self::open(Path::new(PRIVATE), false, limit);
        direct.or_else(|first| {
            Self::open(Path::new(SYSTEM_BUS), true, limit).map_err(|second| {
                let message = format!("{}; {}", first.message, second.message);
                failure(FailureKind::Unavailable, message)
            })
        })
    }

    /// Connects to the socket at `path`.
    pub(super) fn open(path: &Path, is_bus: bool, limit: Duration) -> Result<Bus, Failure> {
        let at = |error: &dyn std::fmt::Display| unavailable(format!("{}: {error}", path.display()));
        let stream = UnixStream::connect(path).map_err(|error| at(&error))?;
        let end = Instant::now() + limit;
        let mut bus = Bus { stream, is_bus, serial: 0, end, ended: Vec::new() };
        bus.authenticate().map_err(|failure| at(&failure.message))?;
        if is_bus {
            bus.call(
                "org.freedesktop.DBus",
                "/org/freedesktop/DBus",
                "org.freedesktop.DBus",
                "Hello",
                "",
                &[],
            )?;
            let mut rule = message::Writer::default();
            rule.string("type='signal',interface='org.freedesktop.systemd1.Manager',member='JobRemoved'");
            let body = rule.into_bytes();
            bus.call(
                "org.freedesktop.DBus",
                "/org/freedesktop/DBus",
                "org.freedesktop.DBus",
                "AddMatch",
                "s",
                &body,
            )?;
        }
        Ok(bus)
    }

    /// A call of systemd's manager: the body of its answer.
    pub(super) fn manager(&mut self, member: &str, signature: &str, body: &[u8]) -> Result<Message, Failure> {
        self.call(SYSTEMD, MANAGER_PATH, MANAGER, member, signature, body)
    }

    /// Waits until the job has ended: how.
    pub(super) fn job_result(&mut self, job: &str) -> Result<String, Failure> {
        loop {
            if let Some((_, result)) = self.ended.iter().find(|(path, _)| path == job) {
                return Ok(result.clone());
            }
            let message = self.read_message()?;
            self.note(&message);
        }
    }

    fn call(
        &mut self,
        destination: &str,
        path: &str,
        interface: &str,
        member: &str,
        signature: &str,
        body: &[u8],
    ) -> Result<Message, Failure> {
        self.serial += 1;
        let destination = self.is_bus.then_some(destination);
        let bytes =
            message::call(self.serial, &Method { destination, path, interface, member }, signature, body);
        self.write(&bytes)?;
        loop {
            let message = self.read_message()?;
            self.note(&message);
            if message.reply_serial != self.serial {
                continue;
            }
            match message.kind {
                Kind::Reply => return Ok(message),
                Kind::Error => return Err(refused(member, &message)),
                Kind::Signal | Kind::Other => {}
            }
        }
    }

    /// Remembers how a job ended: `JobRemoved(u id, o job, s unit, s result)`.
    fn note(&mut self, message: &Message) {
        if message.kind != Kind::Signal || message.member != "JobRemoved" || message.signature != "uoss" {
            return;
        }
        let mut reader = Reader::new(&message.body);
        let parts = reader.u32().and_then(|_| Ok((reader.string()?, reader.string()?, reader.string()?)));
        if let Ok((job, _, result)) = parts {
            self.ended.push((job, result));
        }
    }

    /// The mechanism EXTERNAL: the kernel tells who we are. BEGIN goes with it, as sd-bus' own clients do: systemd 252 looks at
    /// a message that comes in one packet with BEGIN only when the next one comes.
    fn authenticate(&mut self) -> Result<(), Failure> {
        let uid: String =
            nix::unistd::geteuid().to_string().bytes().map(|byte| format!("{byte:02x}")).collect();
        self.write(format!("\0AUTH EXTERNAL {uid}\r\nBEGIN\r\n").as_bytes())?;
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            let mut byte = [0];
            self.read(&mut byte)?;
            line.push(byte[0]);
            if line.len() > LINE_BYTES_MAX {
                return Err(unavailable("an endless answer to AUTH".into()));
            }
        }
        if !line.starts_with(b"OK ") {
            return Err(unavailable(format!(
                "AUTH was answered {}",
                String::from_utf8_lossy(line.trim_ascii())
            )));
        }
        Ok(())
    }

    fn read_message(&mut self) -> Result<Message, Failure> {
        let garbled = |why| failure(FailureKind::Internal, format!("systemd sent {why}"));
        let mut bytes = vec![0; HEAD_BYTES];
        self.read(&mut bytes)?;
        let head = bytes.first_chunk().ok_or_else(|| garbled("nothing".into()))?;
        let length = message::length(head).map_err(garbled)?;
        bytes.resize(length, 0);
        self.read(&mut bytes[HEAD_BYTES..])?;
        message::parse(&bytes).map_err(garbled)
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<(), Failure> {
        let mut filled = 0;
        while filled < buffer.len() {
            let left = self.left()?;
            let read = self
                .stream
                .set_read_timeout(Some(left))
                .and_then(|()| self.stream.read(&mut buffer[filled..]));
            match read.map_err(|error| self.broken("read from", &error))? {
                0 => return Err(unavailable("systemd closed the connection".into())),
                count => filled += count,
            }
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let left = self.left()?;
        let written = self.stream.set_write_timeout(Some(left)).and_then(|()| self.stream.write_all(bytes));
        written.map_err(|error| self.broken("write to", &error))
    }

    fn left(&self) -> Result<Duration, Failure> {
        let left = self.end.saturating_duration_since(Instant::now());
        // A timeout of nothing would mean none.
        if left.is_zero() { Err(unavailable("systemd does not answer".into())) } else { Ok(left) }
    }

    fn broken(&self, op: &str, error: &std::io::Error) -> Failure {
        match error.kind() {
            std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
                unavailable("systemd does not answer".into())
            }
            _ => unavailable(format!("{op} systemd: {error}")),
        }
    }
}

fn unavailable(message: String) -> Failure {
    failure(FailureKind::Unavailable, message)
}

/// Its own words; a process or unit that is gone is told apart.
fn refused(member: &str, message: &Message) -> Failure {
    let words = match message.signature.starts_with('s') {
        true => Reader::new(&message.body).string().unwrap_or_default(),
        false => String::new(),
    };
    let kind = match message.error.as_str() {
        "org.freedesktop.systemd1.NoSuchUnit"
        | "org.freedesktop.systemd1.NoSuchProcess"
        | "org.freedesktop.DBus.Error.UnixProcessIdUnknown"
        | "System.Error.ESRCH" => FailureKind::NotFound,
        _ => FailureKind::Internal,
    };
    failure(kind, format!("{member}: {words} ({})", message.error))
}
