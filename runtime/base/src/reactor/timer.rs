//! Timers on the monotonic clock, because boards without a real-time clock change their wall-clock time by
//! decades. The resolution is that of epoll, one millisecond; timers fire late rather than early.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use pin_project_lite::pin_project;

use super::driver::WaitId;
use super::{driver, try_driver};
use crate::time;

/// Maximum wait; a longer one (or an overflow of `Instant`) is treated as this long.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Error: the time limit of [`deadline`] has passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Elapsed {
    /// The time limit that has passed.
    pub limit: Duration,
}

impl fmt::Display for Elapsed {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "no answer within {} ms", self.limit.as_millis())
    }
}

impl std::error::Error for Elapsed {}

/// Sleeps for `limit`. Dropping the future cancels the timer.
pub fn sleep(limit: Duration) -> Sleep {
    sleep_until(time::now() + limit.min(FOREVER))
}

/// Sleeps until `due`; completes immediately if that time has passed.
pub(super) fn sleep_until(due: Instant) -> Sleep {
    Sleep { due, id: None }
}

/// Runs `future` for at most `limit`; on timeout the future is dropped, which cancels its operation. A future
/// that completes in the same turn as the timeout succeeds.
///
/// # Errors
/// `Elapsed` if the limit passed first.
pub fn deadline<F: Future>(limit: Duration, future: F) -> Deadline<F> {
    Deadline { limit, timer: sleep(limit), future }
}

pin_project! {
    /// The future of [`deadline`]. Not an `async fn`, which would contain `future` twice.
    #[must_use = "a future runs only when awaited"]
    pub struct Deadline<F> {
        limit: Duration,
        timer: Sleep,
        #[pin]
        future: F,
    }
}

impl<F: Future> Future for Deadline<F> {
    type Output = Result<F::Output, Elapsed>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        if let Poll::Ready(output) = this.future.poll(context) {
            return Poll::Ready(Ok(output));
        }
        Pin::new(this.timer).poll(context).map(|()| Err(Elapsed { limit: *this.limit }))
    }
}

/// The future of [`sleep`] and [`sleep_until`].
#[must_use = "a sleep waits only when awaited"]
pub struct Sleep {
    due: Instant,
    /// ID of the driver's timer; `None` if there is none.
    id: Option<WaitId>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.due <= time::now() {
            return Poll::Ready(());
        }
        let driver = driver();
        let id = *self.id.get_or_insert_with(|| driver.next_id());
        driver.wake_at(self.due, id, context.waker());
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let (Some(id), Some(driver)) = (self.id, try_driver()) {
            driver.cancel(self.due, id);
        }
    }
}
