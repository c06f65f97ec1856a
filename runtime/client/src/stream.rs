//! Standard input and output for `coracle image import -` and `export -o -`. The daemon's worker opens
//! archives by path, so a FIFO in the state directory represents the stream: data is not stored twice, and
//! only root can open the FIFO.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use nix::sys::stat::Mode;

/// A FIFO whose other end is a stream of this process; the FIFO is removed when the value is dropped.
pub(crate) struct Stream {
    path: PathBuf,
    copier: JoinHandle<io::Result<u64>>,
}

impl Stream {
    /// Creates a FIFO from which the daemon can read standard input.
    ///
    /// # Errors
    /// The FIFO cannot be created.
    pub(crate) fn from_stdin(state: &Path) -> io::Result<Stream> {
        Stream::start(state, "stdin", |path| {
            let mut fifo = File::options().write(true).open(path)?;
            io::copy(&mut io::stdin().lock(), &mut fifo)
        })
    }

    /// Creates a FIFO whose content is copied to standard output.
    ///
    /// # Errors
    /// The FIFO cannot be created.
    pub(crate) fn to_stdout(state: &Path) -> io::Result<Stream> {
        Stream::start(state, "stdout", |path| {
            let out = io::stdout().as_fd().try_clone_to_owned()?;
            copy(&mut File::open(path)?, &mut File::from(out))
        })
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "the client is a process of its own, which may have threads"
    )]
    fn start(
        state: &Path,
        name: &str,
        copy: impl FnOnce(&Path) -> io::Result<u64> + Send + 'static,
    ) -> io::Result<Stream> {
        // Errors and the log have this name.
        let path = state.join(format!("{name}-{}", std::process::id()));
        // One that exists is of an earlier process with this ID that was killed.
        let _ = std::fs::remove_file(&path);
        nix::unistd::mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR)?;
        let opened = path.clone();
        // Opening it waits for the worker. Where none comes, the thread ends with the process.
        Ok(Stream { path, copier: std::thread::spawn(move || copy(&opened)) })
    }

    /// The path of the FIFO, for the daemon.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Waits until all data is copied, after the daemon has reported the end; returns the number of bytes.
    ///
    /// # Errors
    /// The error of a stream.
    pub(crate) fn finish(self) -> io::Result<u64> {
        let Stream { path, copier } = self;
        // A name that stays does no harm: the directory is empty after the next boot.
        let _ = std::fs::remove_file(path);
        copier.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
    }

    /// Closes the stream, because the daemon has refused the request.
    pub(crate) fn abandon(self) {
        let _ = std::fs::remove_file(self.path);
    }
}

/// Copies until the end of `from`. `std` would call splice(2) between two pipes, which fails with EPIPE if the reader has everything
/// and has gone before `from` ends, as `tar -t` does behind the last block of an archive.
fn copy(from: &mut File, mut to: &mut dyn io::Write) -> io::Result<u64> {
    io::copy(from, &mut to)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;

    #[expect(clippy::disallowed_methods, reason = "a test of a copy that another thread feeds")]
    #[test]
    fn a_reader_that_ends_after_all_output_is_no_error() {
        let pipe =
            || nix::unistd::pipe().map(|(from, to)| (File::from(from), File::from(to))).expect("a pipe");
        let ((mut from, mut feed), (mut reader, mut to)) = (pipe(), pipe());
        let copier = std::thread::spawn(move || copy(&mut from, &mut to));
        feed.write_all(b"all").expect("there is room");
        reader.read_exact(&mut [0; 3]).expect("what was written");
        drop(reader);
        drop(feed);
        assert_eq!(copier.join().expect("no panic").expect("nothing was left to write"), 3);
    }
}
