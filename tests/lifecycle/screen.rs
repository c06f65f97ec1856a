//! A terminal of the test for the client: the test holds both ends, reads what is shown and types.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};

use coracle_tests::host::wait_until;
use rustix::io::ioctl_fionbio;
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

pub(crate) struct Screen {
    /// The end of the terminal emulator; it does not block.
    master: OwnedFd,
    terminal: OwnedFd,
    shown: RefCell<String>,
}

impl Screen {
    pub(crate) fn new() -> Screen {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags).expect("a terminal");
        unlockpt(&master).expect("a terminal");
        let terminal = ioctl_tiocgptpeer(&master, flags).expect("its other end");
        ioctl_fionbio(&master, true).expect("a terminal");
        Screen { master, terminal, shown: RefCell::default() }
    }

    /// Starts a command with the terminal as its three streams.
    pub(crate) fn run(&self, mut command: Command) -> Child {
        let ends = [(); 3].map(|()| self.terminal.try_clone().expect("a descriptor"));
        let [stdin, stdout, stderr] = ends.map(Stdio::from);
        command.stdin(stdin).stdout(stdout).stderr(stderr).spawn().expect("it runs")
    }

    pub(crate) fn resize(&self, columns: u16, rows: u16) {
        let size = Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.terminal, size).expect("a terminal");
    }

    pub(crate) fn is_raw(&self) -> bool {
        let modes = tcgetattr(&self.terminal).expect("a terminal").local_modes;
        let cooked = LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
        assert!(modes.contains(cooked) || !modes.intersects(cooked), "{modes:?}");
        !modes.intersects(cooked)
    }

    pub(crate) fn type_in(&self, keys: &str) {
        let written = rustix::io::write(&self.master, keys.as_bytes());
        assert_eq!(written, Ok(keys.len()));
    }

    /// Waits until the text was printed on the terminal.
    #[track_caller]
    pub(crate) fn shows(&self, expected: &str) {
        let mut shown = self.shown.borrow_mut();
        wait_until(&format!("{expected:?} is on the terminal"), || {
            let mut buffer = [0; 4096];
            if let Ok(count) = rustix::io::read(&self.master, &mut buffer) {
                shown.push_str(&String::from_utf8_lossy(&buffer[..count]));
            }
            shown.contains(expected)
        });
    }
}
