//! The terminal of `coracle exec -t`: keys are passed to the command unchanged, and the command's terminal
//! has the size of the user's. The settings of the user's terminal are restored at the end, also after
//! SIGTERM and SIGHUP.

use std::io::{self, IsTerminal as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr, tcsetwinsize};

/// The user's terminal, and the master side of the command's terminal.
pub(super) struct Terminal {
    master: OwnedFd,
    signals: SignalFd,
    /// The original settings of the user's terminal; `None` if standard input is not a terminal or is not
    /// used.
    before: Option<Termios>,
}

impl Terminal {
    /// Sets the user's terminal to raw mode if it is used for input, and sets the size of the command's
    /// terminal.
    ///
    /// # Errors
    /// The kernel's error.
    pub(super) fn take(master: OwnedFd, is_interactive: bool) -> io::Result<Terminal> {
        let wanted: SigSet = [Signal::SIGWINCH, Signal::SIGTERM, Signal::SIGHUP].into_iter().collect();
        wanted.thread_block()?;
        let signals = SignalFd::with_flags(&wanted, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        let mut terminal = Terminal { master, signals, before: None };
        let stdin = io::stdin();
        if is_interactive && stdin.is_terminal() {
            let before = tcgetattr(stdin.as_fd())?;
            let mut raw = before.clone();
            raw.make_raw();
            tcsetattr(stdin.as_fd(), OptionalActions::Drain, &raw)?;
            terminal.before = Some(before);
        }
        terminal.resize();
        Ok(terminal)
    }

    /// Descriptor that becomes readable when a signal arrives.
    pub(super) fn signals(&self) -> BorrowedFd<'_> {
        self.signals.as_fd()
    }

    /// Handles a signal: after a change of the user's terminal size, sets that of the command's terminal.
    ///
    /// # Errors
    /// The signal is one that ends this process.
    pub(super) fn on_signal(&mut self) -> io::Result<()> {
        while let Ok(Some(signal)) = self.signals.read_signal() {
            if signal.ssi_signo != Signal::SIGWINCH as u32 {
                return Err(io::Error::other("ended by a signal"));
            }
        }
        self.resize();
        Ok(())
    }

    /// Sets the size of the command's terminal to that of the user's, if one of the standard streams is a
    /// terminal.
    fn resize(&self) {
        let (stdin, stdout) = (io::stdin(), io::stdout());
        let size = tcgetwinsize(stdout.as_fd()).or_else(|_| tcgetwinsize(stdin.as_fd()));
        if let Ok(size) = size {
            // Without the size the command is still usable.
            let _ = tcsetwinsize(&self.master, size);
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = tcsetattr(io::stdin().as_fd(), OptionalActions::Drain, before);
        }
    }
}
