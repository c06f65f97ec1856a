//! Signals as events: they are blocked for the thread and read from a signalfd, so no signal handler
//! exists. The kernel merges pending signals of the same number: a SIGCHLD means that at least one child has
//! ended. The signal mask survives `exec`, so code that starts a program must clear it; a worker does
//! so for itself and its children.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::{Watched, sleep};
use crate::error::describe_io;
use crate::log;

/// Size of the kernel's `signalfd_siginfo` in bytes (signalfd(2)). Its first four bytes are the signal
/// number.
const SIGINFO_BYTES: usize = 128;
/// Pause after a read that failed.
const READ_PAUSE: Duration = Duration::from_secs(1);

/// The requested signals in order of arrival. A process must have only one, because several would
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

    /// Waits for the next signal. An error of the descriptor, after which a signal may still be queued, is logged, and the
    /// descriptor is read again after a pause: a daemon that no longer reads its signals could not be stopped.
    pub async fn next(&mut self) -> Signal {
        let mut info = [0; SIGINFO_BYTES];
        loop {
            match self.watched.read(&mut info).await {
                Ok(_) => {
                    let [a, b, c, d, ..] = info;
                    let number = i32::from_ne_bytes([a, b, c, d]);
                    // The kernel returns whole records, and only signals of the mask, which all are valid `Signal`s.
                    if let Ok(signal) = Signal::try_from(number) {
                        return signal;
                    }
                }
                Err(error) => {
                    log::warn!("cannot read a signal, will retry"; error = describe_io(&error));
                    sleep(READ_PAUSE).await;
                }
            }
        }
    }
}
