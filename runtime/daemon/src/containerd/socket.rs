//! The socket of the containerd API for cAdvisor: determines whether and where it is created, and removes it at shutdown.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use coracle_base::error::{Context, Error, Kind, describe_io};
use coracle_base::listen::Listener;
use coracle_base::log;

use super::service;
use crate::daemon::Daemon;
use crate::rpc::Server;
use coracle_config::{Config, ContainerdSocket, STATE_DEFAULT};

/// The socket on which cAdvisor expects containerd.
const USUAL_SOCKET: &str = "/run/containerd/containerd.sock";
/// Directories in which distributions, and containerd's own archives, install programs.
const PROGRAM_DIRECTORIES: [&str; 5] =
    ["/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin", "/opt/containerd/bin"];

/// The socket of the containerd API; dropping it closes the socket.
pub(crate) struct Socket {
    path: PathBuf,
    /// Device and inode of the socket file that this daemon created.
    file: (u64, u64),
    _server: Server,
}

impl Socket {
    /// Serves the API on the configured socket. `None` if it is disabled, or another process answers on the socket; the
    /// condition in Status has the reason.
    pub(crate) fn serve(config: &Config, daemon: &Rc<Daemon>, cri: &Server) -> Option<Socket> {
        let path = wanted(config, &PROGRAM_DIRECTORIES.map(Path::new)).transpose()?;
        let (socket, outcome) = match path.and_then(|path| Socket::bind(path, daemon, cri)) {
            Ok(socket) => (Some(socket), Ok(())),
            Err(error) => {
                log::warn!("cannot serve the containerd API"; error = error);
                (None, Err(error.to_string()))
            }
        };
        daemon.set_cadvisor_served(outcome);
        socket
    }

    fn bind(path: PathBuf, daemon: &Rc<Daemon>, cri: &Server) -> Result<Socket, Error> {
        let listener = Listener::bind(&path)?;
        let about = std::fs::symlink_metadata(&path).context(|| "look at the socket")?;
        let server = cri.start_beside(listener, service(Rc::clone(daemon)));
        Ok(Socket { path, file: identity(&about), _server: server })
    }

    /// Removes the socket, so that no program assumes that the node has containerd. A socket that another process has created
    /// in its place is not removed.
    pub(crate) fn remove(self) {
        let is_own = std::fs::symlink_metadata(&self.path).is_ok_and(|about| identity(&about) == self.file);
        if !is_own {
            return;
        }
        if let Err(error) = std::fs::remove_file(&self.path) {
            log::warn!("cannot remove a socket"; path = self.path.display(), error = describe_io(&error));
        }
        if self.path == Path::new(USUAL_SOCKET) {
            // Where others have files in there, it is not empty.
            let _ = self.path.parent().map(std::fs::remove_dir);
        }
    }
}

fn identity(about: &Metadata) -> (u64, u64) {
    (about.dev(), about.ino())
}

/// The path of the socket to serve; `None` if the API is disabled.
///
/// # Errors
/// The API is to be served on containerd's own socket, but containerd is installed on the node.
fn wanted(config: &Config, program_directories: &[&Path]) -> Result<Option<PathBuf>, Error> {
    match &config.containerd_socket {
        ContainerdSocket::Off => return Ok(None),
        ContainerdSocket::At(path) => return Ok(Some(path.clone())),
        // The socket is the node's, and so it belongs to the node's daemon.
        ContainerdSocket::Automatic if config.state != Path::new(STATE_DEFAULT) => return Ok(None),
        ContainerdSocket::Automatic => {}
    }
    let mut programs = program_directories.iter().map(|directory| directory.join("containerd"));
    match programs.find(|program| program.is_file()) {
        None => Ok(Some(USUAL_SOCKET.into())),
        Some(program) => {
            let text = format!("{USUAL_SOCKET} is left to {}, which this node has", program.display());
            Err(Error::new(Kind::FailedPrecondition, text))
        }
    }
}

#[cfg(test)]
mod tests {
    use coracle_base::testdir::TestDir;

    use super::*;
    use coracle_config::{self as config, Sources};

    #[test]
    fn containerds_own_socket_is_for_the_nodes_daemon_where_no_containerd_is_installed() {
        let dir = TestDir::new("containerd-socket");
        let program = dir.path().join("bin/containerd");
        std::fs::create_dir_all(&program).unwrap();
        let (empty, bin) = (dir.path().join("empty"), dir.path().join("bin"));
        let directories = [empty.as_path(), bin.as_path()];
        let mut config = config::load(&Sources::default()).unwrap();
        let usual = Some(PathBuf::from(USUAL_SOCKET));
        assert_eq!(wanted(&config, &directories).unwrap(), usual, "a directory is not a program");
        std::fs::remove_dir(&program).unwrap();
        std::fs::write(&program, "").unwrap();
        let refused = wanted(&config, &directories).unwrap_err().to_string();
        assert!(refused.contains("bin/containerd, which this node has"), "{refused}");
        config.state = dir.path().to_owned();
        assert_eq!(wanted(&config, &[]).unwrap(), None, "another daemon than the node's");
        config.containerd_socket = ContainerdSocket::At("/run/x.sock".into());
        assert_eq!(wanted(&config, &directories).unwrap(), Some("/run/x.sock".into()));
        config.containerd_socket = ContainerdSocket::Off;
        assert_eq!(wanted(&config, &directories).unwrap(), None);
    }
}
