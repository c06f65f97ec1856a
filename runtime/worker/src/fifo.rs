//! Opens FIFOs with a time limit. For `coracle image import -` and `export -o -` a worker receives a FIFO
//! whose other end is the client's stream; if the client has ended, the worker must not wait forever, because
//! it counts as a running pull.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags, pipe_with, tee};

/// Time limit for another process to open the other end of the FIFO. Usually the client already waits in its
/// open call.
const OTHER_END_LIMIT: Duration = Duration::from_secs(10);

const INTERVAL: Duration = Duration::from_millis(20);

/// Opens a file for reading. If it is a FIFO, reads wait for its writer.
///
/// # Errors
/// Those of `open(2)`; `TimedOut` if no process opens the FIFO for writing.
pub(crate) fn open_to_read(path: &Path) -> io::Result<File> {
    read_within(path, OTHER_END_LIMIT)
}

fn read_within(path: &Path, limit: Duration) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(no_wait()).open(path)?;
    if file.metadata()?.file_type().is_fifo() {
        // A FIFO without a writer is at its end, one with a silent writer would block. tee(2) tells them apart and takes no byte.
        let (_read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        within(limit, "no process writes to it", || match tee(&file, &write, 1, SpliceFlags::NONBLOCK) {
            Ok(0) => Ok(None),
            Ok(_) | Err(Errno::AGAIN) => Ok(Some(())),
            Err(errno) => Err(errno.into()),
        })?;
    }
    let_block(&file)?;
    Ok(file)
}

/// Opens a FIFO for writing. Writes wait for its reader.
///
/// # Errors
/// Those of `open(2)`; `TimedOut` if no process opens the FIFO for reading.
pub(crate) fn open_to_write(path: &Path) -> io::Result<File> {
    write_within(path, OTHER_END_LIMIT)
}

fn write_within(path: &Path, limit: Duration) -> io::Result<File> {
    let file = within(limit, "no process reads from it", || {
        match OpenOptions::new().write(true).custom_flags(no_wait()).open(path) {
            Err(error) if error.raw_os_error() == Some(Errno::NXIO.raw_os_error()) => Ok(None),
            opened => opened.map(Some),
        }
    })?;
    let_block(&file)?;
    Ok(file)
}

fn no_wait() -> i32 {
    OFlags::NONBLOCK.bits().cast_signed()
}

fn let_block(file: &File) -> io::Result<()> {
    Ok(fcntl_setfl(file, fcntl_getfl(file)? - OFlags::NONBLOCK)?)
}

fn within<T>(
    limit: Duration,
    why: &str,
    mut attempt: impl FnMut() -> io::Result<Option<T>>,
) -> io::Result<T> {
    let begun = Instant::now();
    loop {
        if let Some(done) = attempt()? {
            return Ok(done);
        }
        if begun.elapsed() >= limit {
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        std::thread::sleep(INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};
    use std::path::PathBuf;

    const SHORT: Duration = Duration::from_millis(100);

    /// A file of one test; removed on drop.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            Scratch(std::env::temp_dir().join(format!("coracle-fifo-{}-{name}", std::process::id())))
        }

        fn fifo(name: &str) -> Scratch {
            let scratch = Scratch::new(name);
            nix::unistd::mkfifo(&scratch.0, nix::sys::stat::Mode::S_IRWXU).unwrap();
            scratch
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn an_end_that_is_gone_is_not_waited_for() {
        let fifo = Scratch::fifo("alone");
        // First, because a program that another test starts may have the other end, once it was open, for a moment.
        let error = write_within(&fifo.0, SHORT).unwrap_err();
        assert_eq!(
            (error.kind(), error.to_string().as_str()),
            (io::ErrorKind::TimedOut, "no process reads from it")
        );
        let error = read_within(&fifo.0, SHORT).unwrap_err();
        assert_eq!(
            (error.kind(), error.to_string().as_str()),
            (io::ErrorKind::TimedOut, "no process writes to it")
        );
        assert_eq!(read_within(&Scratch::new("none").0, SHORT).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn streams_pass_whichever_end_is_opened_first() {
        let fifo = Scratch::fifo("stream");
        let path = &fifo.0;
        for late in [Duration::ZERO, SHORT] {
            let (name, pause) = (path.clone(), SHORT);
            let writer = std::thread::spawn(move || {
                std::thread::sleep(late);
                let mut file = File::options().write(true).open(name).unwrap();
                // A silent writer is waited for, in the open call and in the reads.
                std::thread::sleep(pause);
                file.write_all(b"whole").unwrap();
            });
            std::thread::sleep(SHORT - late);
            let mut text = String::new();
            open_to_read(path).unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, "whole");
            writer.join().unwrap();

            let name = path.clone();
            let reader = std::thread::spawn(move || {
                std::thread::sleep(late);
                std::fs::read_to_string(name).unwrap()
            });
            std::thread::sleep(SHORT - late);
            open_to_write(path).unwrap().write_all(b"whole").unwrap();
            assert_eq!(reader.join().unwrap(), "whole");
        }
    }

    #[test]
    fn a_regular_file_is_read() {
        let file = Scratch::new("regular");
        std::fs::write(&file.0, "text").unwrap();
        let mut text = String::new();
        open_to_read(&file.0).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "text");
    }
}
