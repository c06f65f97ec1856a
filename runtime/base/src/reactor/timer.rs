//! Waits for a time, always on the monotonic clock: boards without a real-time clock step their wall clock by decades.
//! Resolution is epoll's, one millisecond, late rather than early.

use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::driver::WaitId;
use super::{driver, try_driver};

/// The longest wait that is kept as such; beyond it (and where `Instant` would overflow) a sleep is for ever in practice.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// The time limit of [`deadline`] passed first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Elapsed {
    /// The limit that was given.
    pub limit: Duration,
}

impl fmt::Display for Elapsed {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "no answer within {} ms", self.limit.as_millis())
    }
}

impl std::error::Error for Elapsed {}

/// Sleeps for `time`. Dropping it takes the timer back.
pub fn sleep(time: Duration) -> Sleep {
    sleep_until(Instant::now() + time.min(FOREVER))
}

/// Sleeps until `due`; ready at once if that has passed.
pub(super) fn sleep_until(due: Instant) -> Sleep {
    Sleep { due, id: None }
}

/// Runs `future` for at most `limit`; on `Elapsed` it has been dropped, which is how what it does is cancelled.
/// A future that is ready in the turn the limit passes wins.
///
/// # Errors
/// `Elapsed` when the limit passed first.
pub async fn deadline<T>(limit: Duration, future: impl Future<Output = T>) -> Result<T, Elapsed> {
    let mut future = pin!(future);
    let mut timer = pin!(sleep(limit));
    std::future::poll_fn(|context| {
        if let Poll::Ready(output) = future.as_mut().poll(context) {
            return Poll::Ready(Ok(output));
        }
        timer.as_mut().poll(context).map(|()| Err(Elapsed { limit }))
    })
    .await
}

/// A wait for a time; from [`sleep`] and [`sleep_until`].
#[must_use = "a sleep waits only when awaited"]
pub struct Sleep {
    due: Instant,
    /// Some: the driver holds a timer under this id.
    id: Option<WaitId>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.due <= Instant::now() {
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
