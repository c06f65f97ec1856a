//! A descriptor under watch: non-blocking, registered edge-triggered, deregistered and closed on drop.
//! Sockets, pipes, pidfds, signalfds, inotify and the event files of cgroups; not regular files, which epoll refuses.
//!
//! Two ways to use it: [`Watched::read_with`]/[`Watched::write_with`] (and what is built on them) try a call and wait on
//! `WouldBlock`; [`Watched::readable`]/[`Watched::writable`] look at the descriptor first, so they are right both before
//! the first try and after one, at the price of one `poll` call.

use std::future::Future;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::task::{Context, Poll};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout};
use smol::io::{AsyncRead, AsyncWrite};

use super::driver::{Direction, POLLER, Token, WaitId};
use super::{driver, try_driver};

/// An owned descriptor that tasks can wait for.
pub struct Watched {
    fd: OwnedFd,
    token: Token,
}

impl Watched {
    /// Takes `fd` over: sets `O_NONBLOCK` (on the open file, so also for whoever shares it) and watches it.
    ///
    /// # Errors
    /// `EPERM` for a file epoll cannot watch; limits of the kernel.
    ///
    /// # Panics
    /// Outside [`super::run`].
    pub fn new(fd: OwnedFd) -> io::Result<Watched> {
        let flags = OFlag::from_bits_retain(fcntl(&fd, FcntlArg::F_GETFL)?);
        if !flags.contains(OFlag::O_NONBLOCK) {
            fcntl(&fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        }
        let token = driver().register(fd.as_fd())?;
        Ok(Watched { fd, token })
    }

    /// The descriptor, for calls of the caller's own.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Waits until a read can get on: data, end of file, an error; for a pidfd, the process's end.
    ///
    /// # Errors
    /// What `poll` says; a hang-up or error of the descriptor is readiness.
    pub async fn readable(&self) -> io::Result<()> {
        self.ready(Direction::Read, PollFlags::POLLIN | PollFlags::POLLPRI).await
    }

    /// Waits until a write can get on: room, or an error.
    ///
    /// # Errors
    /// As [`Watched::readable`].
    pub async fn writable(&self) -> io::Result<()> {
        self.ready(Direction::Write, PollFlags::POLLOUT).await
    }

    async fn ready(&self, direction: Direction, asked: PollFlags) -> io::Result<()> {
        let mut poll = [PollFd::new(self.fd(), asked)];
        if nix::poll::poll(&mut poll, PollTimeout::ZERO)? == 0 {
            self.next_edge(direction).await;
        }
        Ok(())
    }

    /// Calls `call` until it says something else than `WouldBlock`, waiting for readability in between.
    ///
    /// # Errors
    /// What `call` says; `Interrupted` is tried again.
    pub async fn read_with<T>(&self, call: impl FnMut(BorrowedFd<'_>) -> io::Result<T>) -> io::Result<T> {
        self.retry(Direction::Read, call).await
    }

    /// As [`Watched::read_with`], waiting for room to write.
    ///
    /// # Errors
    /// What `call` says.
    pub async fn write_with<T>(&self, call: impl FnMut(BorrowedFd<'_>) -> io::Result<T>) -> io::Result<T> {
        self.retry(Direction::Write, call).await
    }

    async fn retry<T>(
        &self,
        direction: Direction,
        mut call: impl FnMut(BorrowedFd<'_>) -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            match call(self.fd()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.next_edge(direction).await,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => return done,
            }
        }
    }

    /// Reads what is there; 0 is the end of file.
    ///
    /// # Errors
    /// What `read` says.
    pub async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.read_with(|fd| Ok(nix::unistd::read(fd, buffer)?)).await
    }

    /// Writes all of `bytes`.
    ///
    /// # Errors
    /// What `write` says; how much went out before is not known then.
    pub async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let count = self.write_with(|fd| Ok(nix::unistd::write(fd, bytes)?)).await?;
            if count == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            bytes = &bytes[count..];
        }
        Ok(())
    }

    /// For hand-written futures: calls `call`; on `WouldBlock` the task is woken at the next edge. One task per direction.
    pub fn poll_read_with<T>(
        &self,
        context: &Context<'_>,
        call: impl FnMut(BorrowedFd<'_>) -> io::Result<T>,
    ) -> Poll<io::Result<T>> {
        self.poll_with(Direction::Read, context, call)
    }

    /// As [`Watched::poll_read_with`], for writing.
    pub fn poll_write_with<T>(
        &self,
        context: &Context<'_>,
        call: impl FnMut(BorrowedFd<'_>) -> io::Result<T>,
    ) -> Poll<io::Result<T>> {
        self.poll_with(Direction::Write, context, call)
    }

    fn poll_with<T>(
        &self,
        direction: Direction,
        context: &Context<'_>,
        mut call: impl FnMut(BorrowedFd<'_>) -> io::Result<T>,
    ) -> Poll<io::Result<T>> {
        loop {
            match call(self.fd()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    driver().wait(self.token, direction, POLLER, context.waker());
                    return Poll::Pending;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => return Poll::Ready(done),
            }
        }
    }

    fn next_edge(&self, direction: Direction) -> Edge<'_> {
        let driver = driver();
        Edge { watched: self, direction, id: driver.next_id(), seen: driver.edges(self.token, direction) }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if let Some(driver) = try_driver() {
            driver.deregister(self.token, self.fd.as_fd());
        }
    }
}

/// The wait for the next edge; dropping it takes the wait back.
struct Edge<'a> {
    watched: &'a Watched,
    direction: Direction,
    id: WaitId,
    seen: u32,
}

impl Future for Edge<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let driver = driver();
        if driver.edges(self.watched.token, self.direction) != self.seen {
            return Poll::Ready(());
        }
        driver.wait(self.watched.token, self.direction, self.id, context.waker());
        Poll::Pending
    }
}

impl Drop for Edge<'_> {
    fn drop(&mut self) {
        if let Some(driver) = try_driver() {
            driver.forget(self.watched.token, self.direction, self.id);
        }
    }
}

impl AsyncRead for &Watched {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_read_with(context, |fd| Ok(nix::unistd::read(fd, buffer)?))
    }
}

impl AsyncWrite for &Watched {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_with(context, |fd| Ok(nix::unistd::write(fd, bytes)?))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_close(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(shut_down_writing(self.fd()))
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut &*self).poll_read(context, buffer)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut &*self).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut &*self).poll_flush(context)
    }

    fn poll_close(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut &*self).poll_close(context)
    }
}

/// Half-closes a socket; a pipe says its end when it is dropped, and a peer that is gone needs no telling.
fn shut_down_writing(fd: BorrowedFd<'_>) -> io::Result<()> {
    use nix::errno::Errno;
    use std::os::fd::AsRawFd;
    match nix::sys::socket::shutdown(fd.as_raw_fd(), nix::sys::socket::Shutdown::Write) {
        Ok(()) | Err(Errno::ENOTSOCK | Errno::ENOTCONN) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
