//! Exec and attach: the streams of one process over one connection (streaming 6.5, §6.7).
//!
//! ```text
//! client ─► stdin, resize ─► queue ─► the process          client ◄─ stdout, stderr, then one status
//! ```

use std::cell::RefCell;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::log;
use coracle_base::reactor;
use coracle_engine::Container;
use coracle_engine::streams::{Ends, Exec, Wanted};
use rustix::termios::{Winsize, tcsetwinsize};
use serde::Deserialize;

use super::connection::{Connection, EndReason, Incoming, Receiver};
use super::queue::Queue;
use super::status::{self, Dialect};

/// Maximum number of bytes that a client may send before the process reads them from its standard input.
const STDIN_BYTES_MAX: usize = 256 << 10;
/// Maximum length in bytes of an incomplete resize message; complete messages have some 30 bytes.
const RESIZE_BYTES_MAX: usize = 1024;

/// Numbers of the connection's streams by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Roles {
    error: Option<u32>,
    stdin: Option<u32>,
    stdout: Option<u32>,
    stderr: Option<u32>,
    resize: Option<u32>,
}

impl Roles {
    /// The purposes of a WebSocket's channels.
    fn of_channels(wanted: Wanted) -> Roles {
        Roles {
            error: Some(3),
            stdin: wanted.stdin.then_some(0),
            stdout: wanted.stdout.then_some(1),
            stderr: wanted.stderr.then_some(2),
            resize: wanted.tty.then_some(4),
        }
    }

    /// Waits until the client has opened all streams that it requested.
    async fn opened(
        connection: &Connection,
        receiver: &mut Receiver,
        wanted: Wanted,
        has_resize: bool,
    ) -> Result<Roles, EndReason> {
        let mut roles = Roles::default();
        let is_whole = |roles: &Roles| {
            roles.error.is_some()
                && (roles.stdin.is_some() || !wanted.stdin)
                && (roles.stdout.is_some() || !wanted.stdout)
                && (roles.stderr.is_some() || !wanted.stderr)
                && (roles.resize.is_some() || !(wanted.tty && has_resize))
        };
        while !is_whole(&roles) {
            // Every server drops data that arrives before the reply, so clients send none.
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
            connection.update(|peer| peer.spdy().map(|session| session.reply(stream)));
        }
        Ok(roles)
    }
}

/// A connection whose streams have been assigned to their purposes.
pub(super) struct Stdio<'c> {
    connection: &'c Connection,
    receiver: RefCell<Option<Receiver>>,
    wanted: Wanted,
    dialect: Dialect,
    roles: Roles,
    stdin: Queue,
}

/// The reason why the client's input ended.
enum Input {
    Disconnected(EndReason),
    /// The client closed its standard input, which means that it detaches.
    Detached,
}

impl<'c> Stdio<'c> {
    /// Waits for the client's streams and assigns them to their purposes.
    ///
    /// # Errors
    /// [`EndReason`] if the client did not open them within `limit` or the connection ended.
    pub(super) async fn new(
        connection: &'c Connection,
        mut receiver: Receiver,
        wanted: Wanted,
        dialect: Dialect,
        limit: Duration,
    ) -> Result<Stdio<'c>, EndReason> {
        let is_spdy = connection.update(|peer| peer.spdy().is_some());
        let roles = if is_spdy {
            let opened = Roles::opened(connection, &mut receiver, wanted, dialect.has_resize());
            let late = async {
                reactor::sleep(limit).await;
                Err(EndReason::Late)
            };
            // Replies are sent concurrently.
            let transmit = async { Err(connection.transmit().await) };
            smol::future::or(opened, smol::future::or(late, transmit)).await?
        } else {
            let roles = Roles::of_channels(wanted);
            // Signals "connected" to clients that wait for it.
            let first = roles.stdout.or(roles.stderr).or(roles.error).unwrap_or_default();
            connection.update(|peer| peer.send(first, &[]));
            roles
        };
        let stdin = Queue::new(STDIN_BYTES_MAX);
        Ok(Stdio { connection, receiver: RefCell::new(Some(receiver)), wanted, dialect, roles, stdin })
    }

    /// Executes a command for the client, from its start to the status.
    pub(super) async fn exec(&self, container: Rc<Container>, command: Vec<String>) -> Result<(), EndReason> {
        let (exec, mut ends) = match container.exec_streams(command, self.wanted).await {
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
                        drop(stdin); // the process reads end of file
                    }
                } else {
                    self.stdin.close();
                }
                std::future::pending().await
            }),
            async {
                match smol::future::or(self.input(&ends, false), async {
                    Input::Disconnected(self.connection.transmit().await)
                })
                .await
                {
                    Input::Disconnected(reason) => Err(reason),
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
            Err(reason) => {
                exec.abandon(ends);
                Err(reason)
            }
        }
    }

    /// Copies output until its end and waits for the exit; returns the status.
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
                // A broken pipe of the process shows in its exit code; a terminal always ends with an error.
                let _ = self.connection.copy(from, stream).await;
            }
        };
        smol::future::zip(copy(&ends.stdout, self.roles.stdout), copy(&ends.stderr, self.roles.stderr)).await;
    }

    /// Attaches the client to a running container.
    pub(super) async fn attach(&self, container: &Rc<Container>) -> Result<(), EndReason> {
        let mut ends = match container.attach(self.wanted).await {
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
                        && let Err(error) = container.close_stdin().await
                    {
                        log::warn!("cannot close stdin of the container"; ctr = container.id, error = error);
                    }
                }
                None => self.stdin.close(),
            }
            std::future::pending().await
        };
        let output = async {
            self.output(&ends).await;
            if container.record().state.is_running() && ends.stdout.is_some() {
                log::info!("attach ended: the client read too slowly, or the container closed its output"; ctr = container.id);
            }
            Ok(())
        };
        let input = async {
            match smol::future::or(self.input(&ends, !ends_with_stdin), async {
                Input::Disconnected(self.connection.transmit().await)
            })
            .await
            {
                Input::Disconnected(reason) => Err(reason),
                Input::Detached => Ok(()),
            }
        };
        smol::future::or(smol::future::or(output, stdin), input).await?;
        self.finish(&status::success(self.dialect)).await;
        Ok(())
    }

    /// Handles the client's input until the connection ends or, if `detaches` is set, until the client closes
    /// its standard input.
    async fn input(&self, ends: &Ends, detaches: bool) -> Input {
        let Some(mut receiver) = self.receiver.borrow_mut().take() else {
            return std::future::pending().await;
        };
        let mut resize = Resize::default();
        loop {
            let stream = match receiver.next(self.connection).await {
                Err(reason) => return Input::Disconnected(reason),
                Ok(Incoming::Data { stream }) => {
                    if Some(stream) == self.roles.stdin {
                        self.stdin.push(receiver.bytes()).await;
                    } else if Some(stream) == self.roles.resize
                        && let Some(terminal) = &ends.terminal
                    {
                        resize.feed(receiver.bytes(), |size| {
                            // Fails if the process closed the terminal, which then needs no size.
                            let _ = tcsetwinsize(terminal.fd().as_fd(), size);
                        });
                    }
                    continue;
                }
                // An additional stream is accepted, as in every server, and ignored.
                Ok(Incoming::Opened { stream, .. }) => {
                    self.connection.update(|peer| peer.spdy().map(|session| session.reply(stream)));
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

    /// Sends the status, ends all streams, and closes the connection.
    async fn finish(&self, status: &[u8]) {
        let Roles { error, stdin, stdout, stderr, .. } = self.roles;
        self.connection.update(|peer| {
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

/// Parses terminal sizes: a sequence of JSON objects that may be split anywhere.
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
    fn sizes_are_parsed_however_they_are_split_until_one_is_malformed() {
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
