//! The unix socket that clients find by its path. It is made under another name and renamed into place, so that there is
//! neither a moment without a socket nor a stale file after a crash; a path on which another daemon answers is left alone.

use std::fs::{DirBuilder, File, Permissions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use coracle_sandbox::umask;
use nix::errno::Errno;
use nix::fcntl::{OFlag, renameat};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

use crate::error::{Context, Error, Kind};
use crate::reactor::Watched;

/// Longest path of a unix socket: `sun_path` of unix(7), less the closing zero.
pub const PATH_BYTES_MAX: usize = 107;

/// Owner and group may call us, others may not: whoever may call runs what they like as root.
const SOCKET_MODE: u32 = 0o660;

/// For a directory that had to be made: the group passes, but does not look around.
const DIRECTORY_MODE: u32 = 0o710;

/// Sockets that this process bound so far: makes their temporary names different.
static BOUND: AtomicU32 = AtomicU32::new(0);

/// A socket that accepts connections. Dropping it stops that; the path stays, so that clients see "refused, try again".
pub struct Listener {
    listener: UnixListener,
    watched: Watched,
}

impl Listener {
    /// Listens on the socket `path`, which must be absolute.
    ///
    /// # Errors
    /// `InvalidArgument` for a path no socket can have or that something else holds, `FailedPrecondition` where another
    /// daemon answers, else what the kernel says.
    pub fn bind(path: &Path) -> Result<Listener, Error> {
        Listener::try_bind(path, SOCKET_MODE, DIRECTORY_MODE)
            .map_err(|error| error.context(format_args!("listen on {}", path.display())))
    }

    /// As [`Listener::bind`], for root alone: whoever may call can do what root can.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub fn bind_for_root(path: &Path) -> Result<Listener, Error> {
        Listener::try_bind(path, 0o600, 0o700)
            .map_err(|error| error.context(format_args!("listen on {}", path.display())))
    }

    fn try_bind(path: &Path, socket_mode: u32, directory_mode: u32) -> Result<Listener, Error> {
        let (directory, name) = split(path)?;
        make_directory(directory, directory_mode)?;
        refuse_if_taken(path)?;
        let directory = File::options()
            .read(true)
            .custom_flags((OFlag::O_PATH | OFlag::O_DIRECTORY).bits())
            .open(directory)
            .context(|| "open its directory")?;
        // Through the descriptor the temporary name is short however long the directory's path is.
        let count = BOUND.fetch_add(1, Ordering::Relaxed);
        let temporary_name = format!(".coracle-{}-{count}", std::process::id());
        let temporary: PathBuf = format!("/proc/self/fd/{}/{temporary_name}", directory.as_raw_fd()).into();
        match std::fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).context(|| "clear an old socket")?
            }
            _ => {}
        }
        let listener = UnixListener::bind(&temporary).context(|| "bind")?;
        std::fs::set_permissions(&temporary, Permissions::from_mode(socket_mode))
            .context(|| "set its mode")?;
        renameat(&directory, temporary_name.as_str(), &directory, name).context(|| "rename into place")?;
        let watched = Watched::new(OwnedFd::from(listener.try_clone()?))?;
        Ok(Listener { listener, watched })
    }

    /// Waits for the next connection.
    ///
    /// # Errors
    /// What `accept` says: of one connection (`ECONNABORTED`) or of limits (`EMFILE`); later calls may work again.
    pub async fn accept(&self) -> io::Result<Watched> {
        let (stream, _) = self.watched.read_with(|_| self.listener.accept()).await?;
        Watched::new(stream.into())
    }
}

fn make_directory(path: &Path, mode: u32) -> Result<(), Error> {
    let _mask = umask::Public::begin();
    DirBuilder::new().recursive(true).mode(mode).create(path).context(|| "make its directory")
}

/// Directory and file name of a path that a socket can have.
fn split(path: &Path) -> Result<(&Path, &std::ffi::OsStr), Error> {
    let invalid = |why: String| Error::new(Kind::InvalidArgument, why);
    let length = path.as_os_str().len();
    if length > PATH_BYTES_MAX {
        return Err(invalid(format!(
            "the path has {length} bytes, a unix socket's has {PATH_BYTES_MAX} at most"
        )));
    }
    match (path.is_absolute(), path.parent(), path.file_name()) {
        (true, Some(directory), Some(name)) => Ok((directory, name)),
        _ => Err(invalid("not an absolute path of a file".into())),
    }
}

/// Only a socket that nobody answers on may be replaced.
fn refuse_if_taken(path: &Path) -> Result<(), Error> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error.into()),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(Error::new(Kind::InvalidArgument, "the path holds something that is no socket"));
        }
        Ok(_) => {}
    }
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let probe = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    match connect(probe.as_raw_fd(), &UnixAddr::new(path)?) {
        Err(Errno::ECONNREFUSED | Errno::ENOENT) => Ok(()),
        // EAGAIN: its queue is full, so somebody keeps it.
        Ok(()) | Err(Errno::EAGAIN) => Err(Error::new(
            Kind::FailedPrecondition,
            "another daemon answers there: stop it, or use another path",
        )),
        Err(errno) => Err(errno).context(|| "ask whether another daemon answers"),
    }
}

#[cfg(test)]
mod tests {
    use super::{Listener, PATH_BYTES_MAX};
    use crate::error::Kind;
    use crate::reactor;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;
    use std::path::PathBuf;

    /// A directory that goes away with the test.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let path = std::env::temp_dir().join(format!("coracle-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Scratch(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn replaces_a_dead_socket_and_leaves_a_live_one() {
        let scratch = Scratch::new("listen");
        let path = scratch.0.join("made/on/the/way/coracle.sock");
        reactor::run(async {
            let first = Listener::bind(&path).unwrap();
            let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode(&path), 0o660);
            assert_eq!(mode(path.parent().unwrap()) & 0o027, 0, "others and group look around");
            let second = Listener::bind(&path).err().unwrap();
            assert_eq!(second.kind(), Kind::FailedPrecondition);
            assert!(second.to_string().contains("another daemon answers"), "{second}");
            drop(first);
            assert!(UnixStream::connect(&path).is_err());
            let third = Listener::bind(&path).unwrap();
            let _client = UnixStream::connect(&path).unwrap();
            third.accept().await.unwrap();
            assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "temporary names left");
        });
    }

    #[test]
    fn refuses_paths_no_socket_can_have() {
        let scratch = Scratch::new("refuse");
        let file = scratch.0.join("file");
        std::fs::write(&file, "precious").unwrap();
        let cases: [(PathBuf, &str); 4] = [
            (file.clone(), "no socket"),
            (scratch.0.join("x".repeat(PATH_BYTES_MAX)), "107 at most"),
            ("relative.sock".into(), "not an absolute path"),
            ("/".into(), "not an absolute path"),
        ];
        reactor::run(async {
            for (path, expected) in &cases {
                let error = Listener::bind(path).err().unwrap();
                assert_eq!(error.kind(), Kind::InvalidArgument, "{path:?}");
                assert!(error.to_string().contains(expected), "{error}");
            }
            let name = "y".repeat(PATH_BYTES_MAX - scratch.0.as_os_str().len() - 1);
            Listener::bind(&scratch.0.join(name)).unwrap();
        });
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
    }
}
