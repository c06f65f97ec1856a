//! The unix socket that clients find by its path. It is made under another name and renamed into place, so that there is
//! neither a moment without a socket nor a stale file after a crash; a path on which another daemon answers is left alone.

use std::fs::{DirBuilder, File, Permissions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use coracle_sandbox::umask;
use nix::errno::Errno;
use nix::fcntl::{OFlag, renameat};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

use crate::error::{Context, Error, Kind};
use crate::reactor::{self, Watched};

/// Longest path of a unix socket: `sun_path` of unix(7), less the closing zero.
pub const PATH_BYTES_MAX: usize = 107;

/// Owner and group may call us, others may not: whoever may call runs what they like as root.
const SOCKET_MODE: u32 = 0o660;

/// For a directory that had to be made: the group passes, but does not look around.
const DIRECTORY_MODE: u32 = 0o710;

/// Sockets that this process bound so far: makes their temporary names different.
static BOUND: AtomicU32 = AtomicU32::new(0);

/// What temporary names start with; the process's id, `-` and a number follow.
const TEMPORARY: &str = ".coracle-";

/// How long a socket may outlive its daemon: a child that was cloned but had not exec'ed when the daemon was killed holds copies of
/// its descriptors, until it notices and ends.
const OUTLIVE_LIMIT: Duration = Duration::from_secs(2);

/// Waits until nobody answers on `path` any more, for 2 s at most: [`Listener::bind`] says so of a daemon that does. To be
/// called once it is known that no other daemon runs.
pub async fn wait_until_free(path: &Path) {
    let end = Instant::now() + OUTLIVE_LIMIT;
    let is_taken = || refuse_if_taken(path).is_err_and(|error| error.kind() == Kind::FailedPrecondition);
    while is_taken() && Instant::now() < end {
        reactor::sleep(Duration::from_millis(2)).await;
    }
}

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
        let temporary_name = format!("{TEMPORARY}{}-{count}", std::process::id());
        let place: PathBuf = format!("/proc/self/fd/{}", directory.as_raw_fd()).into();
        sweep_temporary(&place)?;
        let temporary = place.join(&temporary_name);
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

/// Removes sockets that a daemon left which was killed before it could rename them. One of a process that lives stays; there is none
/// of this process, which renames what it has made before it makes another.
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
    listed().context(|| "clear old sockets")
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

    /// Without the fix the next daemon ends with "another daemon answers there".
    #[test]
    fn a_socket_that_outlives_its_daemon_for_a_moment_is_waited_for() {
        let scratch = Scratch::new("outlive");
        let path = scratch.0.join("coracle.sock");
        reactor::run(async {
            let first = Listener::bind(&path).unwrap();
            // The copy of a child that has not exec'ed yet.
            let copy = first.listener.try_clone().unwrap();
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
                "a daemon that lives is not waited for"
            );
        });
    }

    /// Without the fix they stay until somebody empties the directory.
    #[test]
    fn sockets_of_killed_daemons_are_swept() {
        let scratch = Scratch::new("swept");
        // Larger than any pid of Linux.
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
