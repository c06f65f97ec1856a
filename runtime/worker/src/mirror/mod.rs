//! Serves a node's manifests and blobs to its neighbours by the OCI distribution protocol, read-only, while they ask. The
//! daemon only polls the listening socket; at the first connection it starts `coracle-worker mirror`, whose standard input is
//! that socket.
//!
//! ```text
//! daemon: poll ─► worker: key, tags ─► child: accept ─► a thread for each connection ─► ROOT/images, read-only
//!    ▲                                   │
//!    └───────────── no request for IDLE ◄┘
//! ```
//! The child parses what neighbours send. It sees one directory, read-only, and has a network namespace of its own, without
//! interfaces: it can accept connections of the socket that it inherited, and can make none ([`crate::jail::mirror`]). It has the
//! site's key. It ends with the daemon (parent-death signals).

mod answer;
mod content;
mod key;
mod request;
pub(crate) mod state;

use std::collections::BTreeMap;
use std::ffi::{CString, OsString};
use std::fs::File;
use std::io;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use coracle_job::{WORKER, read_message, write_message};
use coracle_sandbox::jail::{self, Ended};
use coracle_sandbox::{describe_errno, describe_io};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::{Deserialize, Serialize};

use answer::{Rate, Service};
use content::Shelf;
use key::Nonces;

pub(crate) use answer::STATE;
pub(crate) use key::{SCHEME, Signed, SiteKey};

/// Name of the subcommand `coracle-worker mirror ROOT KEY_FILE RATE [NAME@DIGEST…]`. An empty KEY_FILE means that no key is
/// required, RATE is in bytes per second, and the names are the tags that are answered.
pub(crate) const SUBCOMMAND: &str = "mirror";
/// Name of the subcommand of the confined child.
pub(crate) const CHILD_SUBCOMMAND: &str = "mirror-child";

/// Time without a connection after which the process ends.
const IDLE: Duration = Duration::from_secs(10);
/// Maximum number of connections: two of each of thirty neighbours at a rollout, and some to spare.
const CONNECTIONS_MAX: usize = 64;
/// Maximum number of connections of one address: those of a pull with `[registry] connections` of 16, and some that ask.
const CONNECTIONS_PER_ADDRESS_MAX: usize = 24;
/// Stack size in bytes of a connection's thread, whose buffer is on the heap.
const STACK_BYTES: usize = 128 << 10;
/// Pause after a failed accept, in which descriptors may become free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Settings that the child gets from its parent.
#[derive(Serialize, Deserialize)]
struct Settings {
    key: Option<SiteKey>,
    /// Maximum number of bytes per second; 0: no limit.
    rate: u32,
    /// Digests of manifests by the tags that are answered.
    tags: BTreeMap<String, String>,
}

/// Executes the subcommand [`SUBCOMMAND`]: starts the child and waits for its end.
pub(crate) fn run(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    match start(arguments) {
        Ok(Ended::Code(0)) => ExitCode::SUCCESS,
        // The child has logged the reason.
        Ok(Ended::Code(_)) => ExitCode::FAILURE,
        Ok(ended) => fail(&format!("the serving process ended: {ended}")),
        Err(error) => fail(&error),
    }
}

fn fail(error: &str) -> ExitCode {
    eprintln!("{SUBCOMMAND}: {error}");
    ExitCode::FAILURE
}

fn start(mut arguments: impl Iterator<Item = OsString>) -> Result<Ended, String> {
    let (Some(root), Some(key_file), Some(rate)) = (arguments.next(), arguments.next(), arguments.next())
    else {
        return Err("needs a root directory, a key file and a rate".to_owned());
    };
    let key = match key_file.is_empty() {
        true => None,
        false => Some(SiteKey::read(Path::new(&key_file))?),
    };
    let rate = rate.to_str().and_then(|rate| rate.parse().ok()).ok_or("the rate is no number")?;
    let name = |argument: OsString| {
        argument
            .to_str()
            .and_then(|text| text.rsplit_once('@'))
            .map(|(name, digest)| (name.to_owned(), digest.to_owned()))
    };
    let tags = arguments.filter_map(name).collect();
    let images = PathBuf::from(root).join("images");
    let opened = |path: &Path| {
        File::open(path).map_err(|error| format!("open {}: {}", path.display(), describe_io(&error)))
    };
    let (directory, program) = (opened(&images)?, opened(Path::new("/proc/self/exe"))?);
    let (settings, mut writer) =
        io::pipe().map_err(|error| format!("create a pipe: {}", describe_io(&error)))?;
    let (stdin, stdout) = (io::stdin(), io::stdout());
    let child = jail::start(&jail::Start {
        program: program.as_fd(),
        arguments: &[WORKER, CHILD_SUBCOMMAND].map(|word| CString::new(word).unwrap_or_default()),
        directory: directory.as_fd(),
        streams: [stdin.as_fd(), stdout.as_fd()],
        output: Some(settings.as_fd()),
    })
    .map_err(|error| error.to_string())?;
    drop(settings);
    // A child that has ended already has logged the reason.
    let _ = write_message(&mut writer, &Settings { key, rate, tags });
    drop(writer);
    jail::keep_capabilities(&[]).map_err(|error| error.to_string())?;
    child.wait().map_err(|error| error.to_string())
}

/// Executes the subcommand [`CHILD_SUBCOMMAND`]: standard input is the listening socket, descriptor 3 has the settings.
pub(crate) fn live() -> ExitCode {
    match confine_and_serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

fn confine_and_serve() -> Result<(), String> {
    let mut settings = crate::jail::mirror::confine()?;
    let settings = read_message::<Settings>(&mut settings);
    let Settings { key, rate, tags } =
        settings.map_err(|error| format!("read the settings: {error}"))?.ok_or("there are no settings")?;
    let listener = io::stdin().as_fd().try_clone_to_owned();
    let listener = listener.map_err(|error| format!("the listening socket: {}", describe_io(&error)))?;
    let service = Service {
        shelf: Shelf::new(Path::new("/"), tags),
        key,
        nonces: Nonces::new()?,
        rate: Rate::new(rate),
    };
    accept(&TcpListener::from(listener), &Arc::new(service))
}

/// The addresses of the clients that are connected, and the time of the last change.
struct Connected {
    clients: Vec<IpAddr>,
    changed: Instant,
}

/// Accepts connections until there was none for [`IDLE`].
fn accept(listener: &TcpListener, service: &Arc<Service>) -> Result<(), String> {
    let connected = Arc::new(Mutex::new(Connected { clients: Vec::new(), changed: Instant::now() }));
    loop {
        let mut fds = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::from(1000_u16)) {
            Ok(0) => {
                let now = lock(&connected);
                if now.clients.is_empty() && now.changed.elapsed() >= IDLE {
                    return Ok(());
                }
                continue;
            }
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(format!("poll: {}", describe_errno(errno))),
        }
        match listener.accept() {
            Ok((client, address)) => admit(client, address.ip().to_canonical(), service, &connected),
            // The client has gone, or this is not the event that was waited for.
            Err(error)
                if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) => {}
            Err(error) => {
                eprintln!("{SUBCOMMAND}: accept: {}", describe_io(&error));
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

/// Serves a client in a thread of its own, unless there are too many.
fn admit(client: TcpStream, address: IpAddr, service: &Arc<Service>, connected: &Arc<Mutex<Connected>>) {
    {
        let mut now = lock(connected);
        let own = now.clients.iter().filter(|other| **other == address).count();
        if now.clients.len() >= CONNECTIONS_MAX || own >= CONNECTIONS_PER_ADDRESS_MAX {
            return answer::refuse(client);
        }
        now.clients.push(address);
        now.changed = Instant::now();
    }
    let guard = Guard { address, connected: connected.clone() };
    let service = service.clone();
    let work = move || {
        let _guard = guard;
        // Whatever ends a connection affects its client only.
        let _ = answer::serve(&service, client);
    };
    if let Err(error) = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(work) {
        eprintln!("{SUBCOMMAND}: start a thread: {}", describe_io(&error));
    }
}

/// A client in the list; dropping the value removes it.
struct Guard {
    address: IpAddr,
    connected: Arc<Mutex<Connected>>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut now = lock(&self.connected);
        if let Some(index) = now.clients.iter().position(|address| *address == self.address) {
            now.clients.swap_remove(index);
        }
        now.changed = Instant::now();
    }
}

fn lock(connected: &Mutex<Connected>) -> std::sync::MutexGuard<'_, Connected> {
    // A panic ends the process (`panic = "abort"`), so the lock cannot be poisoned.
    connected.lock().unwrap_or_else(PoisonError::into_inner)
}
