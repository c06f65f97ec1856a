//! Signals as a stream: blocked for the thread, read from a signalfd, so that no handler ever runs.
//! The kernel merges equal signals that wait: a SIGCHLD says "some children ended", not how many.
//! A blocked mask survives `exec`: whoever starts a program has to clear it (`workers`, `sandbox::monitor`).

use std::io;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::task::{Context, Poll};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use smol::stream::Stream;

use super::Watched;

/// Size of the kernel's `signalfd_siginfo`: signalfd(2). Its first four bytes are the signal's number.
const SIGINFO_BYTES: usize = 128;

/// The signals asked for, in the order they arrive. There is one per process: two would share them at random.
pub struct Signals {
    watched: Watched,
}

impl Signals {
    /// Blocks `signals` for this thread from now on and watches for them.
    ///
    /// # Errors
    /// What `sigprocmask` and `signalfd` say.
    pub fn new(signals: &[Signal]) -> io::Result<Signals> {
        let mask: SigSet = signals.iter().copied().collect();
        mask.thread_block()?;
        let signal_fd = SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        // nix keeps its descriptor to itself; a duplicate is the same open file.
        let watched = Watched::new(signal_fd.as_fd().try_clone_to_owned()?)?;
        Ok(Signals { watched })
    }
}

impl Stream for Signals {
    type Item = Signal;

    /// Never ends. An error of the descriptor is a bug of ours; it reads as silence, not as a signal.
    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Signal>> {
        let mut info = [0; SIGINFO_BYTES];
        loop {
            match self.watched.poll_read_with(context, |fd| Ok(nix::unistd::read(fd, &mut info)?)) {
                Poll::Ready(Ok(SIGINFO_BYTES)) => {
                    let [a, b, c, d, ..] = info;
                    let number = i32::from_ne_bytes([a, b, c, d]);
                    // Only signals of the mask arrive, and those came as `Signal`.
                    if let Ok(signal) = Signal::try_from(number) {
                        return Poll::Ready(Some(signal));
                    }
                }
                Poll::Ready(Ok(_) | Err(_)) | Poll::Pending => return Poll::Pending,
            }
        }
    }
}
