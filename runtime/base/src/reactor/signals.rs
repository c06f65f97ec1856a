//! Signals as a stream: they are blocked for the thread and read from a signalfd, so no signal handler
//! exists. The kernel merges pending signals of the same number: a SIGCHLD means that at least one child has
//! ended. The signal mask survives `exec`, so code that starts a program must clear it; a worker does
//! so for itself and its children.

use std::io;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::task::{Context, Poll};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use smol::stream::Stream;

use super::Watched;

/// Size of the kernel's `signalfd_siginfo` in bytes (signalfd(2)). Its first four bytes are the signal
/// number.
const SIGINFO_BYTES: usize = 128;

/// A stream of the requested signals in order of arrival. A process must have only one, because several would
/// split the signals at random.
pub struct Signals {
    watched: Watched,
}

impl Signals {
    /// Blocks `signals` for this thread permanently and watches for them.
    ///
    /// # Errors
    /// The error of `sigprocmask` or `signalfd`.
    pub fn new(signals: &[Signal]) -> io::Result<Signals> {
        let mask: SigSet = signals.iter().copied().collect();
        mask.thread_block()?;
        let signal_fd = SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        // nix does not give its descriptor away; the duplicate refers to the same open file.
        let watched = Watched::new(signal_fd.as_fd().try_clone_to_owned()?)?;
        Ok(Signals { watched })
    }
}

impl Stream for Signals {
    type Item = Signal;

    /// Returns the next signal. The stream does not end; an error of the descriptor is a defect of coracle
    /// and is treated as no signal.
    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Signal>> {
        let mut info = [0; SIGINFO_BYTES];
        loop {
            match self.watched.poll_read_with(context, |fd| Ok(nix::unistd::read(fd, &mut info)?)) {
                Poll::Ready(Ok(SIGINFO_BYTES)) => {
                    let [a, b, c, d, ..] = info;
                    let number = i32::from_ne_bytes([a, b, c, d]);
                    // Only signals of the mask arrive, which all are valid `Signal`s.
                    if let Ok(signal) = Signal::try_from(number) {
                        return Poll::Ready(Some(signal));
                    }
                }
                Poll::Ready(Ok(_) | Err(_)) | Poll::Pending => return Poll::Pending,
            }
        }
    }
}
