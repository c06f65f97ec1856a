//! The listening socket for the nodes of the site. The daemon only waits for a connection: a worker accepts and serves it and all
//! that follow, and ends when no one asks for a while. So the daemon needs a socket and a task, and has no server for neighbours.

use std::cell::RefCell;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::error::describe_io;
use coracle_base::reactor::{self, Watched};
use coracle_base::workers::{Serving, Workers};
use coracle_base::{counters, log};
use coracle_config::{Mirror, Offline};
use coracle_images::Images;
use coracle_job::Serve;
use nix::sys::socket::{getsockopt, sockopt};
use smol::channel::{Receiver, Sender};

/// Number of attempts to listen in which the worker of a daemon that was killed ends, and the pause between them.
const QUICK_ATTEMPTS: u32 = 20;
const QUICK_PAUSE: Duration = Duration::from_millis(100);
/// Pause before further attempts, for example if the address is not configured yet.
const LISTEN_PAUSE: Duration = Duration::from_secs(5);
/// A worker that served for a shorter time has failed: it ends after ten seconds without a request.
const SERVED_MIN: Duration = Duration::from_secs(5);
/// Pause after a worker that failed; each further pause is twice as long, up to the maximum.
const FAILED_PAUSE: Duration = Duration::from_secs(10);
const FAILED_PAUSE_MAX: Duration = Duration::from_secs(300);
/// Maximum number of waiting connections that are closed at once: the length of the queue.
const CLOSED_MAX: usize = 128;

/// The server of this node's images for its neighbours.
pub(crate) struct MirrorServer {
    settings: RefCell<Mirror>,
    /// The process that serves.
    serving: RefCell<Option<Serving>>,
    /// Receives a message at each reload.
    reloads: (Sender<()>, Receiver<()>),
    root: PathBuf,
    images: Rc<Images>,
    workers: Rc<Workers>,
}

impl MirrorServer {
    /// Starts to listen, if the configuration says so; serves until the reactor ends.
    pub(crate) fn start(
        settings: &Mirror,
        root: PathBuf,
        images: Rc<Images>,
        workers: Rc<Workers>,
    ) -> Rc<Self> {
        let (settings, listen) = (RefCell::new(settings.clone()), settings.listen);
        let (serving, reloads) = (RefCell::default(), smol::channel::bounded(1));
        let server = Rc::new(Self { settings, serving, reloads, root, images, workers });
        if let Some(address) = listen {
            reactor::spawn(Rc::clone(&server).serve(address)).detach();
        }
        server
    }

    /// Replaces the settings, and ends the process that serves: the next one reads the key again.
    pub(crate) fn configure(&self, settings: &Mirror) {
        self.settings.borrow_mut().clone_from(settings);
        self.serving.take();
        // If it is full, the message before has not been seen yet.
        let _ = self.reloads.0.try_send(());
    }

    async fn serve(self: Rc<Self>, address: SocketAddr) {
        let mut listener = listen(address).await;
        let mut pause = FAILED_PAUSE;
        loop {
            let waited = wait_for_client(&listener).await;
            // A worker has the same socket: one that an attacker has taken over may have shut it down.
            if !is_listening(&listener) {
                drop(listener);
                listener = listen(address).await;
                continue;
            }
            let served = match waited {
                Ok(()) => self.serve_once(&listener).await,
                Err(error) => Err(describe_io(&error)),
            };
            let Err(error) = served else {
                pause = FAILED_PAUSE;
                continue;
            };
            if pause == FAILED_PAUSE {
                log::warn!("cannot serve images to other nodes, will retry"; error = error);
            }
            let reload = async {
                // The server has both ends of the channel.
                let _ = self.reloads.1.recv().await;
            };
            let until = smol::future::or(reload, close_all(&listener));
            pause = match reactor::deadline(pause, until).await {
                Ok(()) => FAILED_PAUSE,
                Err(_) => (pause * 2).min(FAILED_PAUSE_MAX),
            };
        }
    }

    /// Starts a worker and waits for its end; an error if it has not served.
    async fn serve_once(&self, listener: &TcpListener) -> Result<(), String> {
        let begun = Instant::now();
        // A reload before this moment has no effect on the worker.
        let _ = self.reloads.1.try_recv();
        let settings = self.worker_settings()?;
        let copy = listener.as_fd().try_clone_to_owned().map_err(|error| describe_io(&error))?;
        let serving =
            self.workers.serve_neighbours(copy, &settings).await.map_err(|error| error.to_string())?;
        if self.reloads.1.try_recv().is_ok() {
            // It has the settings of before.
            return Ok(());
        }
        let ended = serving.ended();
        self.serving.replace(Some(serving));
        ended.await;
        self.serving.take();
        let has_served = begun.elapsed() >= SERVED_MIN || self.reloads.1.try_recv().is_ok();
        counters::worker("mirror", has_served, begun.elapsed());
        match has_served {
            true => Ok(()),
            false => Err("the worker has ended; its output is in the log".to_owned()),
        }
    }

    fn worker_settings(&self) -> Result<Serve, String> {
        let settings = self.settings.borrow();
        settings.check()?;
        Ok(Serve {
            root: self.root.clone(),
            key_file: settings.key_file.clone(),
            rate: settings.rate_max,
            images: self.images.served(settings.offline == Offline::Neighbours),
        })
    }
}

/// Waits for a connection. The socket is registered for this time only: while a worker accepts them, connections do not concern the
/// daemon.
async fn wait_for_client(listener: &TcpListener) -> io::Result<()> {
    Watched::new(listener.as_fd())?.readable().await
}

fn is_listening(listener: &TcpListener) -> bool {
    getsockopt(listener, sockopt::AcceptConn).unwrap_or(false)
}

/// Closes the connections that wait, so that clients do not wait for an answer; never ends.
async fn close_all(listener: &TcpListener) {
    loop {
        // Also sets O_NONBLOCK, which the worker could have taken away.
        let closed = wait_for_client(listener).await.and_then(|()| close_waiting(listener));
        if closed.is_err() {
            reactor::sleep(FAILED_PAUSE).await;
        }
        reactor::yield_now().await;
    }
}

fn close_waiting(listener: &TcpListener) -> io::Result<()> {
    for _ in 0..CLOSED_MAX {
        match listener.accept() {
            Ok((client, _)) => drop(client),
            Err(error)
                if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) =>
            {
                break;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Listens on the address; repeated until it succeeds, because the daemon may start before the network, and the worker of a daemon
/// that was killed has the socket for a moment.
async fn listen(address: SocketAddr) -> TcpListener {
    for attempt in 1_u32.. {
        match TcpListener::bind(address) {
            Ok(listener) => {
                log::info!("serving images to other nodes"; address = address);
                return listener;
            }
            Err(error) if attempt == QUICK_ATTEMPTS => {
                log::warn!("cannot listen for other nodes that request images, will retry"; address = address, error = describe_io(&error));
            }
            Err(_) => {}
        }
        reactor::sleep(if attempt < QUICK_ATTEMPTS { QUICK_PAUSE } else { LISTEN_PAUSE }).await;
    }
    std::future::pending().await
}
