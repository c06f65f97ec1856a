//! A descriptor that the reactor watches: non-blocking, registered edge-triggered when it is created or at its
//! first wait ([`Watched::unregistered`]), deregistered on drop, and closed then if nothing else uses it. Each wait may return the error of that
//! registration. Sockets, pipes, pidfds, signalfds, inotify and cgroup event files are supported; regular files are
//! not, because epoll refuses them.
//!
//! There are two ways to use it: [`Watched::read_with`]/[`Watched::write_with`] (and the functions based on
//! them) try a call and wait on `WouldBlock`; [`Watched::readable`]/[`Watched::writable`] poll the descriptor
//! first, so they are correct both before and after the first call, at the cost of one `poll` call.

use std::cell::Cell;
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

/// A descriptor for whose events tasks can wait: an owned one, or an `Rc` of one that others use, too.
pub struct Watched<F: AsFd = OwnedFd> {
    fd: F,
    /// `None` if it is not registered yet.
    token: Cell<Option<Token>>,
}

impl<F: AsFd> Watched<F> {
    /// Takes ownership of `fd`, sets `O_NONBLOCK` (on the open file, so also for other processes that share
    /// it) and watches it.
    ///
    /// # Errors
    /// `EPERM` for a file that epoll does not support; errors because of kernel limits.
    ///
    /// # Panics
    /// Outside of [`super::run`].
    pub fn new(fd: F) -> io::Result<Self> {
        let flags = OFlag::from_bits_retain(fcntl(&fd, FcntlArg::F_GETFL)?);
        if !flags.contains(OFlag::O_NONBLOCK) {
            fcntl(&fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        }
        let watched = Self::unregistered(fd);
        watched.token()?;
        Ok(watched)
    }

    /// Takes ownership of a descriptor with `O_NONBLOCK`, which is registered at its first wait: a read that does not
    /// have to wait costs no registration, and events before it do not wake the loop.
    pub fn unregistered(fd: F) -> Self {
        Self { fd, token: Cell::new(None) }
    }

    /// The descriptor's registration. The kernel reports an event at once if the descriptor is ready when it is
    /// registered, so none is missed between a call that would have blocked and the registration.
    fn token(&self) -> io::Result<Token> {
        if let Some(token) = self.token.get() {
            return Ok(token);
        }
        let token = driver().register(self.fd.as_fd())?;
        self.token.set(Some(token));
        Ok(token)
    }

    /// The object that owns the descriptor.
    pub fn inner(&self) -> &F {
        &self.fd
    }

    /// The descriptor, for system calls of the caller.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Waits until a read does not block: data, end of file or an error; for a pidfd, the exit of the
    /// process.
    ///
    /// # Errors
    /// The error of `poll`. A hang-up or error of the descriptor is not an error here.
    pub async fn readable(&self) -> io::Result<()> {
        self.ready(Direction::Read, PollFlags::POLLIN | PollFlags::POLLPRI).await
    }

    /// Waits until a write does not block: free space or an error.
    ///
    /// # Errors
    /// The error of `poll`. A hang-up or error of the descriptor is not an error here.
    pub async fn writable(&self) -> io::Result<()> {
        self.ready(Direction::Write, PollFlags::POLLOUT).await
    }

    /// Waits for the next event after a read that would have blocked, without the `poll` call of [`Watched::readable`]. The
    /// task must not have waited since that read.
    ///
    /// # Errors
    /// The error of the registration, if this is the first wait.
    pub async fn readable_again(&self) -> io::Result<()> {
        self.next_edge(Direction::Read).await
    }

    async fn ready(&self, direction: Direction, asked: PollFlags) -> io::Result<()> {
        let mut poll = [PollFd::new(self.fd(), asked)];
        if nix::poll::poll(&mut poll, PollTimeout::ZERO)? == 0 {
            self.next_edge(direction).await?;
        }
        Ok(())
    }

    /// Wakes all tasks that wait until a read does not block.
    pub(super) fn wake_readers(&self) {
        if let Some(token) = self.token.get() {
            driver().wake(token, Direction::Read);
        }
    }

    /// Repeats `call` until it returns something other than `WouldBlock`; waits for readability in between.
    ///
    /// # Errors
    /// The error of `call`; `Interrupted` is retried.
    pub async fn read_with<T>(&self, call: impl FnMut(BorrowedFd<'_>) -> io::Result<T>) -> io::Result<T> {
        self.retry(Direction::Read, call).await
    }

    /// Repeats `call` until it returns something other than `WouldBlock`; waits for writability in between.
    ///
    /// # Errors
    /// The error of `call`; `Interrupted` is retried.
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
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.next_edge(direction).await?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => return done,
            }
        }
    }

    /// Reads available bytes; 0 means end of file.
    ///
    /// # Errors
    /// The error of `read`.
    pub async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.read_with(|fd| Ok(nix::unistd::read(fd, buffer)?)).await
    }

    /// Writes all of `bytes`.
    ///
    /// # Errors
    /// The error of `write`; the number of bytes that were written before is then unknown.
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

    /// Calls `call`; on `WouldBlock` the task is woken at the next event. For hand-written futures; one task
    /// per direction.
    pub fn poll_read_with<T>(
        &self,
        context: &Context<'_>,
        call: impl FnMut(BorrowedFd<'_>) -> io::Result<T>,
    ) -> Poll<io::Result<T>> {
        self.poll_with(Direction::Read, context, call)
    }

    /// Calls `call` like [`Watched::poll_read_with`], but waits for writability.
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
                    let token = match self.token() {
                        Ok(token) => token,
                        Err(error) => return Poll::Ready(Err(error)),
                    };
                    driver().wait((token, self.fd()), direction, POLLER, context.waker());
                    return Poll::Pending;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => return Poll::Ready(done),
            }
        }
    }

    async fn next_edge(&self, direction: Direction) -> io::Result<()> {
        let (driver, token) = (driver(), self.token()?);
        let seen = driver.edges(token, direction);
        Edge { fd: self.fd(), token, direction, id: driver.next_id(), seen }.await;
        Ok(())
    }
}

impl<F: AsFd> Drop for Watched<F> {
    fn drop(&mut self) {
        if let (Some(driver), Some(token)) = (try_driver(), self.token.get()) {
            driver.deregister(token, self.fd.as_fd());
        }
    }
}

/// A future that waits for the next event; dropping the future cancels the wait.
struct Edge<'a> {
    fd: BorrowedFd<'a>,
    token: Token,
    direction: Direction,
    id: WaitId,
    seen: u32,
}

impl Future for Edge<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let driver = driver();
        if driver.edges(self.token, self.direction) != self.seen {
            return Poll::Ready(());
        }
        driver.wait((self.token, self.fd), self.direction, self.id, context.waker());
        Poll::Pending
    }
}

impl Drop for Edge<'_> {
    fn drop(&mut self) {
        if let Some(driver) = try_driver() {
            driver.forget(self.token, self.direction, self.id);
        }
    }
}

impl<F: AsFd> AsyncRead for &Watched<F> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_read_with(context, |fd| Ok(nix::unistd::read(fd, buffer)?))
    }
}

impl<F: AsFd> AsyncWrite for &Watched<F> {
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

impl<F: AsFd + Unpin> AsyncRead for Watched<F> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut &*self).poll_read(context, buffer)
    }
}

impl<F: AsFd + Unpin> AsyncWrite for Watched<F> {
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

/// Shuts down the sending direction of a socket. Not needed for a pipe, which reports its end when it is
/// closed, and for a disconnected peer.
fn shut_down_writing(fd: BorrowedFd<'_>) -> io::Result<()> {
    use nix::errno::Errno;
    use std::os::fd::AsRawFd;
    match nix::sys::socket::shutdown(fd.as_raw_fd(), nix::sys::socket::Shutdown::Write) {
        Ok(()) | Err(Errno::ENOTSOCK | Errno::ENOTCONN) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
