//! Serves a node's manifests and blobs to its neighbours by the OCI distribution protocol, read-only, while they ask. The
//! daemon only polls the listening socket; at the first connection it starts `coracle-worker mirror`, whose standard input is
//! that socket.
//!
//! ```text
//! daemon: poll ─► worker: key, names ─► child: accept ─► a thread for each connection ─► blobs, layers, read-only
//!    ▲                                   │
//!    └───────────── no request for IDLE ◄┘
//! ```
//! The child parses what neighbours send. It sees the directories of blobs, parts, outlines and layers, read-only, and has a network
//! namespace of its own, without interfaces: it can accept connections of the socket that it inherited, and can make none
//! ([`crate::jail::mirror`]). It has the site's key. It ends with the daemon (parent-death signals), and when the daemon has other
//! settings.

mod answer;
mod content;
mod unpacked;

use std::ffi::{CString, OsString};
use std::fs::File;
use std::io;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use coracle_job::{Serve, WORKER, read_message, write_message};
use coracle_sandbox::jail::{self, Ended, Jailed};
use coracle_sandbox::{describe_errno, describe_io};
use coracle_site::pace::Rate;
use coracle_site::slots::{Place, Slots};
use coracle_site::{Nonces, SiteKey, share};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::{Deserialize, Serialize};

use answer::Service;
use content::Shelf;
use unpacked::Layers;

/// Name of the subcommand: standard input is the listening socket, standard output a socket over which the daemon sends the
/// settings. The process ends when the daemon closes it.
pub(crate) const SUBCOMMAND: &str = "mirror";
/// Name of the subcommand `coracle-worker check-site-key FILE`, which checks whether the file has a key; otherwise it prints why.
pub(crate) const CHECK_SUBCOMMAND: &str = "check-site-key";
/// Name of the subcommand of the confined child.
pub(crate) const CHILD_SUBCOMMAND: &str = "mirror-child";

/// Time without a connection after which the process ends.
const IDLE: Duration = Duration::from_secs(10);
/// Stack size in bytes of a connection's thread, whose buffer is on the heap.
const STACK_BYTES: usize = 128 << 10;
/// Pause while connections wait in the kernel for room.
const FULL_PAUSE: Duration = Duration::from_millis(20);
/// Pause after a failed accept, in which descriptors may become free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Settings that the child gets from its parent.
#[derive(Serialize, Deserialize)]
struct Settings {
    key: Option<SiteKey>,
    /// The node's name in answers ([`share::identity`]).
    id: String,
    serve: Serve,
}

/// Executes the subcommand [`CHECK_SUBCOMMAND`].
pub(crate) fn check(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let Some(path) = arguments.next() else { return ExitCode::FAILURE };
    match SiteKey::read(Path::new(&path)) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Executes the subcommand [`SUBCOMMAND`]: starts the child and waits for its end.
pub(crate) fn run() -> ExitCode {
    match start() {
        Ok(None | Some(Ended::Code(0))) => ExitCode::SUCCESS,
        // The child has logged the reason.
        Ok(Some(Ended::Code(_))) => ExitCode::FAILURE,
        Ok(Some(ended)) => fail(&format!("the serving process ended: {ended}")),
        Err(error) => fail(&error),
    }
}

fn fail(error: &str) -> ExitCode {
    eprintln!("{SUBCOMMAND}: {error}");
    ExitCode::FAILURE
}

/// Runs the child; returns its end, or `None` if the daemon has ended it.
fn start() -> Result<Option<Ended>, String> {
    let control = io::stdout().as_fd().try_clone_to_owned();
    let mut control =
        UnixStream::from(control.map_err(|error| format!("the daemon's socket: {}", describe_io(&error)))?);
    let serve = read_message::<Serve>(&mut control).map_err(|error| format!("read the settings: {error}"))?;
    let serve = serve.ok_or("there are no settings")?;
    let key = serve.key_file.as_deref().map(SiteKey::read).transpose()?;
    let opened = |path: &Path| {
        File::open(path).map_err(|error| format!("open {}: {}", path.display(), describe_io(&error)))
    };
    let (directory, program) = (opened(&serve.root)?, opened(Path::new("/proc/self/exe"))?);
    let settings = Settings { key, id: share::identity(&serve.root)?, serve };
    let (reader, mut writer) =
        io::pipe().map_err(|error| format!("create a pipe: {}", describe_io(&error)))?;
    let stdin = io::stdin();
    let child = jail::start(&jail::Start {
        program: program.as_fd(),
        arguments: &[WORKER, CHILD_SUBCOMMAND].map(|word| CString::new(word).unwrap_or_default()),
        directory: directory.as_fd(),
        // It has no output, and does not get the daemon's socket.
        streams: [stdin.as_fd(), stdin.as_fd()],
        output: Some(reader.as_fd()),
    })
    .map_err(|error| error.to_string())?;
    drop(reader);
    // A child that has ended already has logged the reason.
    let _ = write_message(&mut writer, &settings);
    drop((writer, settings));
    jail::keep_capabilities(&[]).map_err(|error| error.to_string())?;
    wait(child, &control)
}

/// Waits until the child ends, or the daemon closes its socket, which ends the child.
fn wait(child: Jailed, control: &UnixStream) -> Result<Option<Ended>, String> {
    let mut fds = [child.as_fd(), control.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
    while let Err(errno) = poll(&mut fds, PollTimeout::NONE) {
        if errno != nix::errno::Errno::EINTR {
            return Err(format!("poll: {}", describe_errno(errno)));
        }
    }
    let has_ended = fds[0].any() != Some(false);
    child.kill();
    let ended = child.wait().map_err(|error| error.to_string())?;
    Ok(has_ended.then_some(ended))
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
    let Settings { key, id, serve } =
        settings.map_err(|error| format!("read the settings: {error}"))?.ok_or("there are no settings")?;
    let listener = io::stdin().as_fd().try_clone_to_owned();
    let listener = listener.map_err(|error| format!("the listening socket: {}", describe_io(&error)))?;
    let service = Service {
        shelf: Shelf::new(Path::new("/images"), &serve.images),
        layers: Layers::new(Path::new("/")),
        id,
        key,
        nonces: Nonces::new()?,
        rate: Rate::new(serve.rate),
    };
    accept(&TcpListener::from(listener), &Arc::new(service))
}

/// Accepts connections until there was none for [`IDLE`].
fn accept(listener: &TcpListener, service: &Arc<Service>) -> Result<(), String> {
    let slots = Slots::new();
    loop {
        if !slots.have_room() {
            std::thread::sleep(FULL_PAUSE);
            continue;
        }
        let mut fds = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::from(1000_u16)) {
            Ok(0) if slots.are_idle_for(IDLE) => return Ok(()),
            Ok(0) => continue,
            // The daemon makes another one. accept would not tell: musl's repeats it after EINVAL in another way, which is forbidden here.
            Ok(_) if fds[0].revents().is_some_and(|events| events.contains(PollFlags::POLLHUP)) => {
                return Err("the socket does not listen any more".to_owned());
            }
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(format!("poll: {}", describe_errno(errno))),
        }
        match listener.accept() {
            Ok((client, address)) => serve(service, slots.admit(client, address.ip().to_canonical())),
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

/// Serves a client in a thread of its own.
fn serve(service: &Arc<Service>, mut place: Place) {
    let service = service.clone();
    // Whatever ends a connection affects its client only.
    let work = move || drop(answer::serve(&service, &mut place));
    if let Err(error) = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(work) {
        eprintln!("{SUBCOMMAND}: start a thread: {}", describe_io(&error));
    }
}
