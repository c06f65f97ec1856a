//! The metrics endpoint: one `GET /metrics` per connection, limited in length, time and number.

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::clients::{Client, Clients};
use coracle_base::error::{Context, Error, describe_io};
use coracle_base::listen::Listener;
use coracle_base::log;
use coracle_base::reactor::{self, Task, Watched};

use crate::daemon::Daemon;
use coracle_config::Address;

/// Maximum length of a request header in bytes.
const HEAD_BYTES_MAX: usize = 8 << 10;
/// Time limit of a request from the connection to its answer.
const CLIENT_PATIENCE: Duration = Duration::from_secs(10);
/// Maximum number of connections without a complete request; the oldest is closed for a further one.
const WAITING_MAX: usize = 32;
/// Maximum number of answers in progress; the oldest is ended for a further one.
const ANSWERS_MAX: usize = 8;
/// Pause before the next accept when there are no free descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The metrics endpoint; serves until it is dropped.
pub(crate) struct Server {
    _accepting: Task<()>,
}

/// A TCP or unix listening socket.
enum Door {
    Tcp(TcpListener, Watched),
    Unix(Listener),
}

impl Server {
    /// Starts to listen on the address.
    ///
    /// # Errors
    /// The error of listening on the address.
    pub(crate) fn start(address: &Address, daemon: Rc<Daemon>) -> Result<Self, Error> {
        coracle_base::counters::started_s();
        let door = match address {
            Address::Tcp(address) => {
                let listener = TcpListener::bind(address).context(|| format!("metrics on {address}"))?;
                listener.set_nonblocking(true)?;
                let watched = Watched::new(OwnedFd::from(listener.try_clone()?))?;
                log::info!("serving metrics"; address = listener.local_addr()?);
                Door::Tcp(listener, watched)
            }
            Address::Unix(path) => Door::Unix(Listener::bind(path)?),
        };
        let (waiting, answering) = (Clients::new(WAITING_MAX), Clients::new(ANSWERS_MAX));
        let accepting = reactor::spawn(async move {
            loop {
                match door.accept().await {
                    Ok(client) => {
                        let (daemon, answering) = (Rc::clone(&daemon), Rc::clone(&answering));
                        waiting.serve(move |place| async move {
                            // A slow or disconnected client affects no other.
                            let served = serve(&client, &daemon, place, &answering);
                            let _ = reactor::deadline(CLIENT_PATIENCE, served).await;
                        });
                    }
                    Err(error) => {
                        log::warn!("cannot accept a metrics connection"; error = describe_io(&error));
                        reactor::sleep(ACCEPT_PAUSE).await;
                    }
                }
            }
        });
        Ok(Self { _accepting: accepting })
    }
}

impl Door {
    async fn accept(&self) -> std::io::Result<Watched> {
        match self {
            Self::Tcp(listener, watched) => {
                let (stream, _) = watched.read_with(|_| listener.accept()).await?;
                stream.set_nonblocking(true)?;
                Watched::new(OwnedFd::from(stream))
            }
            Self::Unix(listener) => listener.accept().await,
        }
    }
}

async fn serve(
    client: &Watched,
    daemon: &Rc<Daemon>,
    place: Client,
    answering: &Rc<Clients>,
) -> std::io::Result<()> {
    let mut head = Vec::new();
    let mut buffer = [0; 1024];
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        match client.read(&mut buffer).await? {
            0 => return Ok(()),
            _ if head.len() > HEAD_BYTES_MAX => return Ok(()),
            count => head.extend(&buffer[..count]),
        }
    }
    let _place = place.pass_to(answering);
    let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let mut words = line.split(|byte| *byte == b' ');
    let (status, body) = match (words.next(), words.next()) {
        (Some(b"GET"), Some(b"/metrics")) => ("200 OK", super::render(daemon).await),
        (Some(b"GET"), _) => ("404 Not Found", "metrics are at /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "GET /metrics\n".to_owned()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    client.write_all(head.as_bytes()).await?;
    client.write_all(body.as_bytes()).await
}
