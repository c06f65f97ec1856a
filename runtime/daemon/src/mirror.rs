//! The listening socket for the nodes of the site. The daemon only waits for a connection: a worker accepts and serves it and all
//! that follow, and ends when no one asks for a while. So the daemon needs a socket and a task, and has no server for neighbours.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::error::describe_io;
use coracle_base::log;
use coracle_base::reactor::{self, Watched};
use coracle_base::workers::Workers;
use coracle_config::{Mirror, Offline};
use coracle_images::Images;

/// Number of attempts to listen in which the worker of a daemon that was killed ends, and the pause between them.
const QUICK_ATTEMPTS: u32 = 20;
const QUICK_PAUSE: Duration = Duration::from_millis(100);
/// Pause before further attempts, for example if the address is not configured yet.
const LISTEN_PAUSE: Duration = Duration::from_secs(5);
/// A worker that served for a shorter time has failed: it ends after ten seconds without a request.
const SERVED_MIN: Duration = Duration::from_secs(5);
/// Pause after a worker that failed.
const FAILED_PAUSE: Duration = Duration::from_secs(10);

/// The server of this node's images for its neighbours.
pub(crate) struct MirrorServer {
    settings: RefCell<Mirror>,
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
        let server = Rc::new(Self { settings: RefCell::new(settings.clone()), root, images, workers });
        if let Some(address) = settings.listen {
            reactor::spawn(Rc::clone(&server).serve(address)).detach();
        }
        server
    }

    /// Replaces the settings with which the next worker is started.
    pub(crate) fn configure(&self, settings: &Mirror) {
        self.settings.borrow_mut().clone_from(settings);
    }

    async fn serve(self: Rc<Self>, address: SocketAddr) {
        let socket = listen(address).await;
        loop {
            if let Err(error) = socket.readable().await {
                log::warn!("cannot wait for neighbours"; error = describe_io(&error));
                reactor::sleep(FAILED_PAUSE).await;
                continue;
            }
            let begun = Instant::now();
            match self.start_worker(&socket) {
                Ok(serving) => serving.ended().await,
                Err(error) => log::warn!("cannot serve neighbours"; error = error),
            }
            if begun.elapsed() < SERVED_MIN {
                reactor::sleep(FAILED_PAUSE).await;
            }
        }
    }

    fn start_worker(&self, socket: &Watched) -> Result<coracle_base::workers::Serving, String> {
        let settings = self.settings.borrow();
        let copy = socket.fd().as_fd().try_clone_to_owned().map_err(|error| describe_io(&error))?;
        let tags = match settings.offline {
            Offline::None => Vec::new(),
            Offline::Neighbours => self.images.digests_of_tags(),
        };
        let key_file = settings.key_file.as_ref().map_or(OsStr::new(""), |path| path.as_os_str());
        let rate = settings.rate_max.to_string();
        let mut arguments = vec![OsStr::new("mirror"), self.root.as_os_str(), key_file, OsStr::new(&rate)];
        arguments.extend(tags.iter().map(OsStr::new));
        self.workers.serve_neighbours(copy, &arguments).map_err(|error| error.to_string())
    }
}

/// Listens on the address; repeated until it succeeds, because the daemon may start before the network, and the worker of a daemon
/// that was killed has the socket for a moment.
async fn listen(address: SocketAddr) -> Watched {
    for attempt in 1_u32.. {
        let bound = TcpListener::bind(address).and_then(|listener| Watched::new(OwnedFd::from(listener)));
        match bound {
            Ok(watched) => {
                log::info!("serving neighbours"; address = address);
                return watched;
            }
            Err(error) if attempt == QUICK_ATTEMPTS => {
                log::warn!("cannot listen for neighbours, will retry"; address = address, error = describe_io(&error));
            }
            Err(_) => {}
        }
        reactor::sleep(if attempt < QUICK_ATTEMPTS { QUICK_PAUSE } else { LISTEN_PAUSE }).await;
    }
    std::future::pending().await
}
