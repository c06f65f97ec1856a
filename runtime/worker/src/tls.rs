//! Terminates TLS for one client of the streaming server: standard input is the client's connection, standard
//! output a socket of the daemon, and this process relays data between them until either is closed. Therefore
//! the daemon has no key and no TLS code, and an attack on TLS affects one connection only.

use std::ffi::OsString;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use coracle_sandbox::{describe_errno, describe_io};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustls::{ServerConfig, ServerConnection};

use coracle_registries::{certificates, private_key};

/// Name of the subcommand `coracle-worker tls CERTIFICATE KEY`.
pub(crate) const SUBCOMMAND: &str = "tls";

/// Maximum number of bytes buffered in each direction; if a buffer is full, the sender is not read.
const WAITING_BYTES_MAX: usize = 64 << 10;
/// Maximum number of bytes of one read.
const READ_BYTES: usize = 16 << 10;
/// Time limit of the handshake in milliseconds. After the handshake the daemon's idle limit applies.
const HANDSHAKE_MS_MAX: u16 = 30_000;
/// Time limit for the client's end of file after the last byte was sent to it; equal to the daemon's.
const LINGER: Duration = Duration::from_secs(12);

/// Name of the subcommand `coracle-worker check-tls CERTIFICATE KEY`, which checks whether connections could
/// be served with these files and prints problems to standard output.
pub(crate) const CHECK_SUBCOMMAND: &str = "check-tls";

/// Executes the subcommand [`CHECK_SUBCOMMAND`].
pub(crate) fn check(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let (Some(certificate), Some(key)) = (arguments.next(), arguments.next()) else {
        return ExitCode::FAILURE;
    };
    match config(Path::new(&certificate), Path::new(&key)) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Relays between the client and the daemon until one of the two closes its connection.
pub(crate) fn run(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let (Some(certificate), Some(key)) = (arguments.next(), arguments.next()) else {
        eprintln!("{SUBCOMMAND}: needs a certificate and a key");
        return ExitCode::FAILURE;
    };
    match between(Path::new(&certificate), Path::new(&key)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{SUBCOMMAND}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn between(certificate: &Path, key: &Path) -> Result<(), String> {
    let client =
        TcpStream::from(io::stdin().as_fd().try_clone_to_owned().map_err(|error| describe_io(&error))?);
    let plain =
        UnixStream::from(io::stdout().as_fd().try_clone_to_owned().map_err(|error| describe_io(&error))?);
    // The standard descriptors are the same sockets: all copies must be closed for the peers to see end of
    // file.
    close_standard_streams()?;
    let connection =
        ServerConnection::new(Arc::new(config(certificate, key)?)).map_err(|error| error.to_string())?;
    for result in [client.set_nonblocking(true), plain.set_nonblocking(true)] {
        result.map_err(|error| format!("set a socket non-blocking: {}", describe_io(&error)))?;
    }
    Bridge {
        connection,
        client,
        plain,
        to_plain: Vec::new(),
        client_ended: false,
        plain_ended: false,
        has_answer: false,
    }
    .run()
}

/// Replaces the standard descriptors by /dev/null.
fn close_standard_streams() -> Result<(), String> {
    let null = std::fs::File::options().read(true).write(true).open("/dev/null");
    let null = null.map_err(|error| format!("open /dev/null: {}", describe_io(&error)))?;
    let replaced = rustix::stdio::dup2_stdin(&null).and_then(|()| rustix::stdio::dup2_stdout(&null));
    replaced.map_err(|error| format!("replace the standard streams: {}", describe_io(&error.into())))
}

fn config(certificate: &Path, key: &Path) -> Result<ServerConfig, String> {
    let wrong = |path: &Path, error: &str| format!("{}: {error}", path.display());
    let chain = certificates(certificate).map_err(|error| wrong(certificate, &error))?;
    let key_der = private_key(key).map_err(|error| wrong(key, &error))?;
    ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_no_client_auth()
        .with_single_cert(chain, key_der)
        .map_err(|error| wrong(certificate, &error.to_string()))
}

struct Bridge {
    connection: ServerConnection,
    client: TcpStream,
    plain: UnixStream,
    /// Decrypted data that the daemon has not read yet.
    to_plain: Vec<u8>,
    client_ended: bool,
    plain_ended: bool,
    /// Whether the daemon has sent data. A client that has received no data loses nothing if the connection
    /// is closed at once.
    has_answer: bool,
}

impl Bridge {
    fn run(mut self) -> Result<(), String> {
        loop {
            if self.plain_ended && !self.connection.wants_write() {
                if self.has_answer {
                    self.linger();
                }
                return Ok(());
            }
            let (from_client, from_plain) = self.wait()?;
            if from_client {
                self.receive()?;
            }
            self.hand_over()?;
            if from_plain {
                self.send()?;
            }
            while self.connection.wants_write() {
                match self.connection.write_tls(&mut self.client) {
                    Ok(_) => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    // The client has disconnected: pending data is dropped.
                    Err(_) => return Ok(()),
                }
            }
        }
    }

    /// Waits for an event; returns whether data of the client and of the daemon can be read.
    fn wait(&self) -> Result<(bool, bool), String> {
        let flag = |is_wanted: bool, flag: PollFlags| if is_wanted { flag } else { PollFlags::empty() };
        let (owes_client, owes_plain) = (self.connection.wants_write(), !self.to_plain.is_empty());
        let reads_client = !self.client_ended && self.to_plain.len() < WAITING_BYTES_MAX;
        let reads_plain = !self.plain_ended && !self.connection.is_handshaking() && !owes_client;
        let client = flag(reads_client, PollFlags::POLLIN) | flag(owes_client, PollFlags::POLLOUT);
        let plain = flag(reads_plain, PollFlags::POLLIN) | flag(owes_plain, PollFlags::POLLOUT);
        let mut fds = vec![PollFd::new(self.client.as_fd(), client)];
        // The daemon may have closed while the client still reads; polling its socket would then always
        // return immediately.
        if !plain.is_empty() || !owes_client {
            fds.push(PollFd::new(self.plain.as_fd(), plain));
        }
        let limit = match self.connection.is_handshaking() {
            true => PollTimeout::from(HANDSHAKE_MS_MAX),
            false => PollTimeout::NONE,
        };
        match poll(&mut fds, limit) {
            Ok(0) => return Err("the client did not finish its handshake".to_owned()),
            Ok(_) => {}
            Err(nix::errno::Errno::EINTR) => return Ok((false, false)),
            Err(errno) => return Err(format!("poll: {}", describe_errno(errno))),
        }
        let has = |index: usize, flags: PollFlags| {
            fds.get(index).and_then(PollFd::revents).is_some_and(|events| events.intersects(flags))
        };
        // A side that hung up while no event is requested would also make poll return immediately.
        if (client.is_empty() && has(0, GONE)) || (plain.is_empty() && has(1, GONE)) {
            return Err("a side hung up".to_owned());
        }
        Ok((reads_client && has(0, READABLE), reads_plain && has(1, READABLE)))
    }

    /// Closes the connection without losing data: closing a socket with unread data resets the connection,
    /// and the client would lose the last data. Therefore the sending direction is shut down first, and
    /// further data is read and dropped.
    fn linger(&mut self) {
        let mut rest = [0; READ_BYTES];
        let can_wait = self.client.set_nonblocking(false).and(self.client.set_read_timeout(Some(LINGER)));
        if can_wait.and_then(|()| self.client.shutdown(Shutdown::Write)).is_ok() {
            while let Ok(1..) = self.client.read(&mut rest) {}
        }
    }

    /// Reads data from the client and decrypts it.
    fn receive(&mut self) -> Result<(), String> {
        match self.connection.read_tls(&mut self.client) {
            Ok(0) => self.client_ended = true,
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(format!("the client: {}", describe_io(&error))),
        }
        let state = self.connection.process_new_packets().map_err(|error| {
            // Sends the alert if the client still reads.
            let _ = self.connection.write_tls(&mut self.client);
            format!("the client: {error}")
        })?;
        self.client_ended |= state.peer_has_closed();
        let mut piece = [0; READ_BYTES];
        loop {
            match self.connection.reader().read(&mut piece) {
                Ok(0) => break,
                Ok(count) => self.to_plain.extend_from_slice(&piece[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // It disconnected without a TLS close_notify.
                Err(_) => {
                    self.client_ended = true;
                    break;
                }
            }
        }
        Ok(())
    }

    fn hand_over(&mut self) -> Result<(), String> {
        while !self.to_plain.is_empty() {
            match self.plain.write(&self.to_plain) {
                Ok(count) => drop(self.to_plain.drain(..count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(format!("the daemon: {}", describe_io(&error))),
            }
        }
        if self.client_ended {
            // Fails if it is already shut down.
            let _ = self.plain.shutdown(Shutdown::Write);
        }
        Ok(())
    }

    /// Reads data from the daemon and encrypts it.
    fn send(&mut self) -> Result<(), String> {
        let mut piece = [0; READ_BYTES];
        match self.plain.read(&mut piece) {
            Ok(0) => {
                self.plain_ended = true;
                self.connection.send_close_notify();
            }
            Ok(count) => {
                self.has_answer = true;
                let written = self.connection.writer().write_all(&piece[..count]);
                written.map_err(|error| format!("the daemon: {}", describe_io(&error)))?;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(format!("the daemon: {}", describe_io(&error))),
        }
        Ok(())
    }
}

const READABLE: PollFlags = PollFlags::POLLIN.union(GONE);
const GONE: PollFlags = PollFlags::POLLHUP.union(PollFlags::POLLERR);
