//! Unix listening sockets at a configured path. A socket is bound to a temporary name and renamed, so that
//! its path is never missing for a moment and no stale file blocks the next start; a socket on which another
//! daemon accepts connections is never replaced. A socket that another program removes, alone or with its directory, is made
//! again.

use std::cell::RefCell;
use std::fs::{DirBuilder, File, Permissions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use coracle_sandbox::umask;
use nix::errno::Errno;
use nix::fcntl::{OFlag, renameat};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

use crate::error::{Context, Error, Kind};
use crate::log;
use crate::reactor::{self, Removals, Watched};

/// Maximum length in bytes of a unix socket path: `sun_path` of unix(7) without the terminating NUL.
pub const PATH_BYTES_MAX: usize = 107;

/// Mode of a socket: only owner and group may connect, because every client can run any program as root.
const SOCKET_MODE: u32 = 0o660;

/// Mode of a directory that was created for a socket: the group can access files in it but not list it.
const DIRECTORY_MODE: u32 = 0o710;

/// Number of sockets that this process has bound, for unique temporary names.
static BOUND: AtomicU32 = AtomicU32::new(0);

/// Prefix of temporary names; the process ID, `-` and a number follow.
const TEMPORARY: &str = ".coracle-";

/// Maximum time for which a socket stays open after its daemon was killed: a child between clone and exec has
/// copies of the daemon's descriptors until it ends.
const OUTLIVE_LIMIT: Duration = Duration::from_secs(2);

/// Waits, for at most 2 s, until no process accepts connections on `path`. The caller must ensure that no
/// other daemon is running; otherwise [`Listener::bind`] returns an error.
pub async fn wait_until_free(path: &Path) {
    let end = Instant::now() + OUTLIVE_LIMIT;
    let is_taken = || refuse_if_taken(path).is_err_and(|error| error.kind() == Kind::FailedPrecondition);
    while is_taken() && Instant::now() < end {
        reactor::sleep(Duration::from_millis(2)).await;
    }
}

/// Mode of a directory that is made again. The daemon's state directory may be the directory of a socket, and monitors of pods
/// with user namespaces pass through it as other users.
const REMADE_DIRECTORY_MODE: u32 = 0o711;

/// Pause after a removal, so that a program that removes a directory with all that is in it can finish.
const REMOVAL_PAUSE: Duration = Duration::from_millis(100);

/// Pause after a failed attempt to listen or to watch the directory again.
const AGAIN_PAUSE: Duration = Duration::from_secs(5);

/// A socket that accepts connections. Dropping it closes the socket but leaves the path, so that clients get
/// "connection refused" and retry.
pub struct Listener {
    path: PathBuf,
    socket_mode: u32,
    bound: RefCell<Rc<Bound>>,
    /// Reports removals in the socket's directory.
    removals: Removals,
}

struct Bound {
    listener: UnixListener,
    watched: Watched,
}

impl Listener {
    /// Listens on the socket `path`, which must be absolute.
    ///
    /// # Errors
    /// `InvalidArgument` if a socket cannot have this path or another kind of file is there;
    /// `FailedPrecondition` if another daemon accepts connections there; otherwise the kernel's error.
    pub fn bind(path: &Path) -> Result<Listener, Error> {
        Listener::with_modes(path, SOCKET_MODE, DIRECTORY_MODE)
    }

    /// Listens like [`Listener::bind`], but only root can connect, because a client of this socket can do
    /// everything that root can.
    ///
    /// # Errors
    /// Those of [`Listener::bind`].
    pub fn bind_for_root(path: &Path) -> Result<Listener, Error> {
        Listener::with_modes(path, 0o600, 0o700)
    }

    fn with_modes(path: &Path, socket_mode: u32, directory_mode: u32) -> Result<Listener, Error> {
        let bound = Bound::make(path, socket_mode, directory_mode)?;
        let bound = RefCell::new(Rc::new(bound));
        Ok(Listener { path: path.to_owned(), socket_mode, bound, removals: Removals::default() })
    }

    /// Accepts the next connection.
    ///
    /// # Errors
    /// The error of `accept`, either of one connection (`ECONNABORTED`) or because of a limit (`EMFILE`);
    /// later calls may succeed.
    pub async fn accept(&self) -> io::Result<Watched> {
        loop {
            let bound = Rc::clone(&self.bound.borrow());
            let accepted = async { Some(bound.watched.read_with(|_| bound.listener.accept()).await) };
            let removed = async {
                self.removed().await;
                None
            };
            match smol::future::or(accepted, removed).await {
                Some(accepted) => return Watched::new(accepted?.0.into()),
                None => self.bind_again().await,
            }
        }
    }

    /// Waits until no file is at the socket's path.
    async fn removed(&self) {
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        loop {
            let watched = self.removals.watch(directory);
            if is_missing(&self.path) {
                return;
            }
            match watched {
                Ok(()) => {
                    let _ = self.removals.next().await; // after an error the path is looked at, too
                    reactor::sleep(REMOVAL_PAUSE).await;
                }
                Err(_) => reactor::sleep(AGAIN_PAUSE).await,
            }
        }
    }

    async fn bind_again(&self) {
        match Bound::make(&self.path, self.socket_mode, REMADE_DIRECTORY_MODE) {
            Ok(bound) => {
                log::warn!("a socket was removed by another program, listening again"; path = self.path.display());
                *self.bound.borrow_mut() = Rc::new(bound);
            }
            Err(error) => {
                log::warn!("cannot listen again at a socket that another program removed, will retry"; error = error);
                reactor::sleep(AGAIN_PAUSE).await;
            }
        }
    }
}

fn is_missing(path: &Path) -> bool {
    path.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

impl Bound {
    /// Listens on the path; the error names it.
    fn make(path: &Path, socket_mode: u32, directory_mode: u32) -> Result<Bound, Error> {
        Bound::try_make(path, socket_mode, directory_mode)
            .map_err(|error| error.context(format_args!("listen on {}", path.display())))
    }

    fn try_make(path: &Path, socket_mode: u32, directory_mode: u32) -> Result<Bound, Error> {
        let (directory, name) = split(path)?;
        make_directory(directory, directory_mode)?;
        refuse_if_taken(path)?;
        let directory = File::options()
            .read(true)
            .custom_flags((OFlag::O_PATH | OFlag::O_DIRECTORY).bits())
            .open(directory)
            .context(|| "open the socket's directory")?;
        // The path through the descriptor is short even if the directory's path is long.
        let count = BOUND.fetch_add(1, Ordering::Relaxed);
        let temporary_name = format!("{TEMPORARY}{}-{count}", std::process::id());
        let place: PathBuf = format!("/proc/self/fd/{}", directory.as_raw_fd()).into();
        sweep_temporary(&place)?;
        let temporary = place.join(&temporary_name);
        let listener = UnixListener::bind(&temporary).context(|| "bind")?;
        std::fs::set_permissions(&temporary, Permissions::from_mode(socket_mode))
            .context(|| "set the socket's mode")?;
        renameat(&directory, temporary_name.as_str(), &directory, name).context(|| "rename into place")?;
        let watched = Watched::new(OwnedFd::from(listener.try_clone()?))?;
        Ok(Bound { listener, watched })
    }
}

/// Removes temporary sockets of daemons that were killed before the rename. Those of running processes are
/// kept; this process has none, because it renames each socket before it binds the next one.
fn sweep_temporary(place: &Path) -> Result<(), Error> {
    let listed = || -> io::Result<()> {
        for entry in std::fs::read_dir(place)? {
            let name = entry?.file_name();
            let numbers = name.to_str().and_then(|name| name.strip_prefix(TEMPORARY)?.split_once('-'));
            let Some((Ok(pid), Ok(_))) =
                numbers.map(|(pid, count)| (pid.parse::<u32>(), count.parse::<u32>()))
            else {
                continue;
            };
            let path = place.join(&name);
            let is_over = pid == std::process::id() || !Path::new("/proc").join(pid.to_string()).exists();
            if is_over && path.symlink_metadata().is_ok_and(|found| found.file_type().is_socket()) {
                std::fs::remove_file(&path)?;
            }
        }
        Ok(())
    };
    listed().context(|| "remove old temporary sockets")
}

fn make_directory(path: &Path, mode: u32) -> Result<(), Error> {
    let _mask = umask::Public::begin();
    let created = coracle_sandbox::disk::create_all(DirBuilder::new().recursive(true).mode(mode), path);
    created.context(|| "create the socket's directory")
}

/// Splits a socket path into directory and file name; fails if the path is not valid.
fn split(path: &Path) -> Result<(&Path, &std::ffi::OsStr), Error> {
    let invalid = |why: String| Error::new(Kind::InvalidArgument, why);
    let length = path.as_os_str().len();
    if length > PATH_BYTES_MAX {
        return Err(invalid(format!(
            "the path has {length} bytes, but a unix socket's path can have at most {PATH_BYTES_MAX}"
        )));
    }
    match (path.is_absolute(), path.parent(), path.file_name()) {
        (true, Some(directory), Some(name)) => Ok((directory, name)),
        _ => Err(invalid("not an absolute file path".into())),
    }
}

/// Fails unless the path does not exist or is a socket without a listening process.
fn refuse_if_taken(path: &Path) -> Result<(), Error> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error.into()),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(Error::new(Kind::InvalidArgument, "the path exists and is not a socket"));
        }
        Ok(_) => {}
    }
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let probe = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    match connect(probe.as_raw_fd(), &UnixAddr::new(path)?) {
        Err(Errno::ECONNREFUSED | Errno::ENOENT) => Ok(()),
        Ok(()) => Err(Error::new(
            Kind::FailedPrecondition,
            "another daemon listens there: stop it, or use another path",
        )),
        // The queue of connections is full, so a process listens.
        Err(errno @ Errno::EAGAIN) => Err(Error::new(
            Kind::FailedPrecondition,
            format!(
                "another daemon listens there and accepts no connections ({}): stop it, or use another path",
                coracle_sandbox::describe_errno(errno)
            ),
        )),
        Err(errno) => Err(errno).context(|| "check whether another daemon listens"),
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

    /// A directory of one test; removed on drop.
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
    fn a_stale_socket_is_replaced_and_a_listening_one_is_kept() {
        let scratch = Scratch::new("listen");
        let path = scratch.0.join("made/on/the/way/coracle.sock");
        reactor::run(async {
            let first = Listener::bind(&path).unwrap();
            let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode(&path), 0o660);
            assert_eq!(mode(path.parent().unwrap()) & 0o027, 0, "group or others can list the directory");
            let second = Listener::bind(&path).err().unwrap();
            assert_eq!(second.kind(), Kind::FailedPrecondition);
            assert!(second.to_string().contains("another daemon listens"), "{second}");
            drop(first);
            // A program that another test starts may have a copy until its exec.
            super::wait_until_free(&path).await;
            assert!(UnixStream::connect(&path).is_err());
            let third = Listener::bind(&path).unwrap();
            let _client = UnixStream::connect(&path).unwrap();
            third.accept().await.unwrap();
            assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "temporary names left");
        });
    }

    /// Regression: the next daemon failed with "another daemon listens there".
    #[test]
    fn start_waits_for_a_socket_that_a_forked_child_of_the_old_daemon_holds() {
        let scratch = Scratch::new("outlive");
        let path = scratch.0.join("coracle.sock");
        reactor::run(async {
            let first = Listener::bind(&path).unwrap();
            // The copy that a child before its exec holds.
            let copy = first.bound.borrow().listener.try_clone().unwrap();
            drop(first);
            let ends = reactor::spawn(async move {
                reactor::sleep(std::time::Duration::from_millis(200)).await;
                drop(copy);
            });
            assert_eq!(Listener::bind(&path).err().unwrap().kind(), Kind::FailedPrecondition);
            super::wait_until_free(&path).await;
            Listener::bind(&path).unwrap();
            ends.await;
            let start = std::time::Instant::now();
            let _lives = Listener::bind(&path).unwrap();
            super::wait_until_free(&path).await;
            assert!(
                start.elapsed() < std::time::Duration::from_secs(3),
                "the socket of a running daemon is not replaced"
            );
        });
    }

    /// Regression: temporary sockets of killed daemons were never removed.
    #[test]
    fn temporary_sockets_of_killed_daemons_are_removed() {
        let scratch = Scratch::new("swept");
        // Larger than any process ID of Linux.
        let dead = scratch.0.join(".coracle-4194305-0");
        let earlier = scratch.0.join(format!(".coracle-{}-99", std::process::id()));
        let alive = scratch.0.join(".coracle-1-0");
        let file = scratch.0.join(".coracle-4194305-1");
        for path in [&dead, &earlier, &alive] {
            drop(std::os::unix::net::UnixListener::bind(path).unwrap());
        }
        std::fs::write(&file, "precious").unwrap();
        reactor::run(async {
            Listener::bind(&scratch.0.join("coracle.sock")).unwrap();
        });
        assert!(!dead.exists() && !earlier.exists());
        assert!(alive.exists() && file.exists());
    }

    #[test]
    fn invalid_socket_paths_are_refused() {
        let scratch = Scratch::new("refuse");
        let file = scratch.0.join("file");
        std::fs::write(&file, "precious").unwrap();
        let cases: [(PathBuf, &str); 4] = [
            (file.clone(), "not a socket"),
            (scratch.0.join("x".repeat(PATH_BYTES_MAX)), "at most 107"),
            ("relative.sock".into(), "not an absolute file path"),
            ("/".into(), "not an absolute file path"),
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
