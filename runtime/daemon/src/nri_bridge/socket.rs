//! The socket for external plugins. A plugin has the same power as root, so only root may connect; a socket on which another
//! runtime listens is not replaced (NRI-R24).

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Error, describe_io};
use coracle_base::listen::Listener;
use coracle_base::log;
use coracle_base::reactor::{self, Task, Watched};
use coracle_nri::{Dispatcher, Peer, Stream};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

/// Pause before the next accept when there are no free descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A listening socket. Dropping it closes the socket, and removes the socket file unless it was replaced.
pub(super) struct Socket {
    path: PathBuf,
    inode: Option<(u64, u64)>,
    _accepting: Task<()>,
}

impl Socket {
    /// Listens on `path`, and passes every connection to the dispatcher.
    pub(super) fn listen(path: &Path, dispatcher: Rc<Dispatcher>) -> Result<Self, Error> {
        let listener = Listener::bind_for_root(path)?;
        log::info!("accepting NRI plugins"; path = path.display());
        let accepting = reactor::spawn(async move {
            loop {
                match listener.accept().await {
                    Ok(stream) => {
                        let peer = peer(&stream);
                        dispatcher.accept(split(stream), peer);
                    }
                    Err(error) => {
                        log::warn!("cannot accept the connection of an NRI plugin"; error = describe_io(&error));
                        reactor::sleep(ACCEPT_PAUSE).await;
                    }
                }
            }
        });
        Ok(Self { path: path.to_owned(), inode: inode(path), _accepting: accepting })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if self.inode.is_some() && inode(&self.path) == self.inode {
            let _ = std::fs::remove_file(&self.path); // the next start replaces what stays
        }
    }
}

fn inode(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

fn peer(stream: &Watched) -> Peer {
    let credentials = getsockopt(&stream.fd(), PeerCredentials);
    credentials.map(|peer| Peer { pid: peer.pid(), uid: peer.uid() }).unwrap_or_default()
}

/// Splits a connection into its two directions for two tasks.
pub(super) fn split(stream: Watched) -> Stream {
    let stream = Rc::new(stream);
    Stream { reader: Box::new(Half(Rc::clone(&stream))), writer: Box::new(Half(stream)) }
}

/// One direction of a connection, which is closed when both directions are dropped.
struct Half(Rc<Watched>);

impl smol::io::AsyncRead for Half {
    fn poll_read(
        self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
        buffer: &mut [u8],
    ) -> std::task::Poll<std::io::Result<usize>> {
        std::pin::Pin::new(&mut &*self.0).poll_read(context, buffer)
    }
}

impl smol::io::AsyncWrite for Half {
    fn poll_write(
        self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
        bytes: &[u8],
    ) -> std::task::Poll<std::io::Result<usize>> {
        std::pin::Pin::new(&mut &*self.0).poll_write(context, bytes)
    }

    fn poll_flush(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn poll_close(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::task::Poll::Ready(Ok(()))
    }
}
