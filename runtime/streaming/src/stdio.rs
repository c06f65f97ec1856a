//! Exec and attach: one process's streams on one connection (streaming 6.5, §6.7).
//!
//! ```text
//!   client ─► stdin, resize ─► queue ─► the process          client ◄─ stdout, stderr, then one status
//! ```

use std::cell::RefCell;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::log;
use coracle_base::reactor;
use coracle_engine::streams::{Ends, Exec, Wanted};
use coracle_engine::{Container, Pods};
use rustix::termios::{Winsize, tcsetwinsize};
use serde::Deserialize;

use super::connection::{Connection, Incoming, Lost, Receiver};
use super::queue::Queue;
use super::status::{self, Dialect};

/// What a client may send ahead of a process that does not read its stdin.
const STDIN_BYTES_MAX: usize = 256 << 10;
/// An unfinished resize message; whole ones have 30 bytes.
const RESIZE_BYTES_MAX: usize = 1024;

/// Which stream of the connection is what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Roles {
    error: Option<u32>,
    stdin: Option<u32>,
    stdout: Option<u32>,
    stderr: Option<u32>,
    resize: Option<u32>,
}

impl Roles {
    /// The channels of a WebSocket.
    fn of_channels(wanted: Wanted) -> Roles {
        Roles {
            error: Some(3),
            stdin: wanted.stdin.then_some(0),
            stdout: wanted.stdout.then_some(1),
            stderr: wanted.stderr.then_some(2),
            resize: wanted.tty.then_some(4),
        }
    }

    /// Waits until the client has opened every stream that belongs to `wanted`.
    async fn opened(
        connection: &Connection,
        receiver: &mut Receiver,
        wanted: Wanted,
        has_resize: bool,
    ) -> Result<Roles, Lost> {
        let mut roles = Roles::default();
        let is_whole = |roles: &Roles| {
            roles.error.is_some()
                && (roles.stdin.is_some() || !wanted.stdin)
                && (roles.stdout.is_some() || !wanted.stdout)
                && (roles.stderr.is_some() || !wanted.stderr)
                && (roles.resize.is_some() || !(wanted.tty && has_resize))
        };
        while !is_whole(&roles) {
            // Bytes before the reply are dropped by every server, so no client sends any.
            let Incoming::Opened { stream, headers } = receiver.next(connection).await? else { continue };
            let name = headers.iter().find(|(name, _)| name == "streamtype").map(|(_, value)| value.as_str());
            let role = match name {
                Some("error") => Some(&mut roles.error),
                Some("stdin") => Some(&mut roles.stdin),
                Some("stdout") => Some(&mut roles.stdout),
                Some("stderr") => Some(&mut roles.stderr),
                Some("resize") => Some(&mut roles.resize),
                _ => None,
            };
            if let Some(role) = role {
                *role = Some(stream);
            }
            connection.tell(|peer| peer.spdy().map(|session| session.reply(stream)));
        }
        Ok(roles)
    }
}

/// A connection whose streams have their roles.
pub(super) struct Stdio<'c> {
    connection: &'c Connection,
    receiver: RefCell<Option<Receiver>>,
    wanted: Wanted,
    dialect: Dialect,
    roles: Roles,
    stdin: Queue,
}

/// Why the client's half is over.
enum Input {
    Lost(Lost),
    /// It closed its stdin, which means that it leaves.
    Detached,
}

impl<'c> Stdio<'c> {
    /// Gives every stream its role.
    ///
    /// # Errors
    /// The client did not open them, or not within `limit`.
    pub(super) async fn new(
        connection: &'c Connection,
        mut receiver: Receiver,
        wanted: Wanted,
        dialect: Dialect,
        limit: Duration,
    ) -> Result<Stdio<'c>, Lost> {
        let is_spdy = connection.tell(|peer| peer.spdy().is_some());
        let roles = if is_spdy {
            let opened = Roles::opened(connection, &mut receiver, wanted, dialect.has_resize());
            let late = async {
                reactor::sleep(limit).await;
                Err(Lost::Late)
            };
            // Replies go out beside.
            let transmit = async { Err(connection.transmit().await) };
            smol::future::or(opened, smol::future::or(late, transmit)).await?
        } else {
            let roles = Roles::of_channels(wanted);
            // "Connected", to clients that wait for it.
            let first = roles.stdout.or(roles.stderr).or(roles.error).unwrap_or_default();
            connection.tell(|peer| peer.send(first, &[]));
            roles
        };
        let stdin = Queue::new(STDIN_BYTES_MAX);
        Ok(Stdio { connection, receiver: RefCell::new(Some(receiver)), wanted, dialect, roles, stdin })
    }

    /// Runs a command for the client, from its start to its status.
    pub(super) async fn exec(
        &self,
        pods: &Rc<Pods>,
        container: Rc<Container>,
        command: Vec<String>,
    ) -> Result<(), Lost> {
        let (exec, mut ends) = match pods.exec_streams(container, command, self.wanted).await {
            Ok(started) => started,
            Err(error) => {
                self.finish(&status::failed(self.dialect, &error.to_string())).await;
                return Ok(());
            }
        };
        let stdin = ends.stdin.take();
        let done = smol::future::or(
            smol::future::or(async { Ok(self.run(&exec, &ends).await) }, async {
                if let Some(stdin) = stdin {
                    self.stdin.drain(&stdin).await;
                    if !self.wanted.tty {
                        drop(stdin); // the process reads its end
                    }
                } else {
                    self.stdin.close();
                }
                std::future::pending().await
            }),
            async {
                match smol::future::or(self.input(&ends, false), async {
                    Input::Lost(self.connection.transmit().await)
                })
                .await
                {
                    Input::Lost(lost) => Err(lost),
                    Input::Detached => std::future::pending().await,
                }
            },
        )
        .await;
        match done {
            Ok(status) => {
                exec.release();
                self.finish(&status).await;
                Ok(())
            }
            Err(lost) => {
                exec.abandon(ends);
                Err(lost)
            }
        }
    }

    /// Output until its end, then the exit: what a status is made of.
    async fn run(&self, exec: &Exec, ends: &Ends) -> Vec<u8> {
        self.output(ends).await;
        match exec.ended().await {
            Ok(exit) => status::exited(self.dialect, exit.code()),
            Err(error) => status::failed(self.dialect, &error.to_string()),
        }
    }

    async fn output(&self, ends: &Ends) {
        let copy = async |from: &Option<Rc<reactor::Watched>>, stream: Option<u32>| {
            if let (Some(from), Some(stream)) = (from, stream) {
                // Whatever broke a process's end of a pipe is in its exit code; a terminal always breaks.
                let _ = self.connection.copy(from, stream).await;
            }
        };
        smol::future::zip(copy(&ends.stdout, self.roles.stdout), copy(&ends.stderr, self.roles.stderr)).await;
    }

    /// Connects the client to a running container.
    pub(super) async fn attach(&self, pods: &Rc<Pods>, container: &Rc<Container>) -> Result<(), Lost> {
        let mut ends = match pods.attach_streams(container, self.wanted).await {
            Ok(ends) => ends,
            Err(error) => {
                self.finish(&status::failed(self.dialect, &error.to_string())).await;
                return Ok(());
            }
        };
        let ends_with_stdin = {
            let spec = &container.record().spec;
            spec.stdin_once && !spec.tty
        };
        let stdin = ends.stdin.take();
        let stdin = async {
            match stdin {
                Some(stdin) => {
                    let is_whole = self.stdin.drain(&stdin).await;
                    drop(stdin);
                    if is_whole
                        && ends_with_stdin
                        && let Err(error) = pods.close_stdin(container).await
                    {
                        log::warn!("stdin not closed"; ctr = container.id, error = error);
                    }
                }
                None => self.stdin.close(),
            }
            std::future::pending().await
        };
        let output = async {
            self.output(&ends).await;
            if container.record().state.is_running() && ends.stdout.is_some() {
                log::info!("an attached client fell behind, or the container closed its output"; ctr = container.id);
            }
            Ok(())
        };
        let input = async {
            match smol::future::or(self.input(&ends, !ends_with_stdin), async {
                Input::Lost(self.connection.transmit().await)
            })
            .await
            {
                Input::Lost(lost) => Err(lost),
                Input::Detached => Ok(()),
            }
        };
        smol::future::or(smol::future::or(output, stdin), input).await?;
        self.finish(&status::success(self.dialect)).await;
        Ok(())
    }

    /// What the client sends, until it is gone; with `detaches`, until it closes its stdin.
    async fn input(&self, ends: &Ends, detaches: bool) -> Input {
        let Some(mut receiver) = self.receiver.borrow_mut().take() else {
            return std::future::pending().await;
        };
        let mut resize = Resize::default();
        loop {
            let stream = match receiver.next(self.connection).await {
                Err(lost) => return Input::Lost(lost),
                Ok(Incoming::Data { stream }) => {
                    if Some(stream) == self.roles.stdin {
                        self.stdin.push(receiver.bytes()).await;
                    } else if Some(stream) == self.roles.resize
                        && let Some(terminal) = &ends.terminal
                    {
                        resize.feed(receiver.bytes(), |size| {
                            // The process may have closed it: nobody looks at the size then.
                            let _ = tcsetwinsize(terminal.fd().as_fd(), size);
                        });
                    }
                    continue;
                }
                // More than it asked for: accepted, as every server does, and not looked at.
                Ok(Incoming::Opened { stream, .. }) => {
                    self.connection.tell(|peer| peer.spdy().map(|session| session.reply(stream)));
                    continue;
                }
                Ok(Incoming::Ended { stream } | Incoming::Reset { stream }) => stream,
            };
            if Some(stream) == self.roles.stdin {
                self.stdin.end();
                if detaches {
                    return Input::Detached;
                }
            }
        }
    }

    /// The status, the end of every stream, and goodbye.
    async fn finish(&self, status: &[u8]) {
        let Roles { error, stdin, stdout, stderr, .. } = self.roles;
        self.connection.tell(|peer| {
            if let Some(error) = error.filter(|_| !status.is_empty()) {
                peer.send(error, status);
            }
            for stream in [stdin, stdout, stderr, error].into_iter().flatten() {
                peer.finish(stream);
            }
        });
        self.connection.close().await;
    }
}

/// Sizes of a terminal: JSON objects one after the other, cut anywhere.
#[derive(Default)]
struct Resize {
    pending: Vec<u8>,
    is_broken: bool,
}

impl Resize {
    fn feed(&mut self, bytes: &[u8], mut apply: impl FnMut(Winsize)) {
        #[derive(Deserialize)]
        struct Size {
            #[serde(alias = "Width", default)]
            width: u16,
            #[serde(alias = "Height", default)]
            height: u16,
        }
        if self.is_broken {
            return;
        }
        self.pending.extend_from_slice(bytes);
        let mut sizes = serde_json::Deserializer::from_slice(&self.pending).into_iter::<Size>();
        for size in sizes.by_ref() {
            match size {
                Ok(Size { width, height }) if width > 0 && height > 0 => {
                    apply(Winsize { ws_row: height, ws_col: width, ws_xpixel: 0, ws_ypixel: 0 });
                }
                Ok(_) => {}
                Err(error) => {
                    self.is_broken = !error.is_eof();
                    break;
                }
            }
        }
        let used = sizes.byte_offset();
        self.pending.drain(..used.min(self.pending.len()));
        self.is_broken |= self.pending.len() > RESIZE_BYTES_MAX;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_come_cut_anywhere_and_until_one_is_broken() {
        let text = b"{\"Width\":80,\"Height\":24}\n{\"width\":1,\"height\":0}{\"Width\":132,\"Height\":50}";
        for cut in 0..text.len() {
            let (mut resize, mut seen) = (Resize::default(), Vec::new());
            for part in [&text[..cut], &text[cut..]] {
                resize.feed(part, |size| seen.push((size.ws_col, size.ws_row)));
            }
            assert_eq!(seen, [(80, 24), (132, 50)], "cut at {cut}");
        }
        let (mut resize, mut seen) = (Resize::default(), 0);
        for part in [&b"{\"Width\":80,\"Height\":24}"[..], b"nonsense", b"{\"Width\":80,\"Height\":24}"] {
            resize.feed(part, |_| seen += 1);
        }
        assert_eq!(seen, 1);
        resize = Resize::default();
        resize.feed(&[b' '; 4096], |_| ());
        resize.feed(&[b'{'; 4096], |_| ());
        assert!(resize.is_broken);
    }
}
