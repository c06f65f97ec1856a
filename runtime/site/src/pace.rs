//! How fast a node serves its neighbours: not faster than its rate, and no client that reads too slowly.

use std::io::{self, ErrorKind, Write};
use std::net::TcpStream;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Minimum number of bytes that a client reads in [`SLOW_WINDOW`] of writes: on a slower line it is faster to ask the registry.
const SLOW_BYTES_MIN: u64 = 64 << 10;
/// Time in writes after which the rate of a client is judged.
const SLOW_WINDOW: Duration = Duration::from_secs(20);
/// Maximum number of bytes that are sent at once.
const PIECE_BYTES_MAX: usize = 64 << 10;

/// The limit of the bytes that all connections send in a second.
pub struct Rate {
    bytes_per_second: u32,
    /// Time until which the bytes sent so far use up the rate.
    free: Mutex<Instant>,
}

impl Rate {
    /// A limit; 0: none.
    pub fn new(bytes_per_second: u32) -> Self {
        Self { bytes_per_second, free: Mutex::new(Instant::now()) }
    }

    /// Permits this number of bytes now, or returns the time after which to ask again. Nothing is reserved for a client that waits,
    /// because it may go away.
    pub fn wait_for(&self, bytes: usize) -> Option<Duration> {
        if self.bytes_per_second == 0 {
            return None;
        }
        let (mut free, now) = (self.free.lock().unwrap_or_else(PoisonError::into_inner), Instant::now());
        match free.checked_duration_since(now).filter(|wait| !wait.is_zero()) {
            Some(wait) => Some(wait),
            None => {
                *free = now + Duration::from_secs_f64(bytes as f64 / f64::from(self.bytes_per_second));
                None
            }
        }
    }

    /// The number of bytes to send at once: those of an eighth of a second at most, so that connections share the rate.
    pub fn piece(&self) -> usize {
        const BYTES_MIN: usize = 1024;
        match self.bytes_per_second as usize / 8 {
            0 => PIECE_BYTES_MAX,
            bytes => bytes.clamp(BYTES_MIN, PIECE_BYTES_MAX),
        }
    }
}

/// The rate at which a client reads, measured over the time that writes take.
#[derive(Default)]
pub struct Pace {
    spent: Duration,
    bytes: u64,
}

impl Pace {
    /// Writes all bytes.
    ///
    /// # Errors
    /// An error of the socket; the client reads less than 64 KiB in twenty seconds of writes.
    pub fn write(&mut self, mut client: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let begun = Instant::now();
            let count = match client.write(bytes) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => 0,
                Err(error) => return Err(error),
            };
            bytes = &bytes[count..];
            self.passed(count as u64, begun.elapsed())?;
        }
        Ok(())
    }

    fn passed(&mut self, bytes: u64, took: Duration) -> io::Result<()> {
        self.bytes += bytes;
        self.spent += took;
        if self.spent < SLOW_WINDOW {
            return Ok(());
        }
        match self.bytes < SLOW_BYTES_MIN {
            true => Err(ErrorKind::TimedOut.into()),
            false => {
                *self = Self::default();
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_reads_too_slowly_is_an_error() {
        let mut pace = Pace::default();
        assert!(pace.passed(1, SLOW_WINDOW - Duration::from_secs(1)).is_ok(), "the window is open");
        assert!(pace.passed(SLOW_BYTES_MIN, Duration::from_secs(1)).is_ok(), "just enough");
        assert!(pace.passed(SLOW_BYTES_MIN - 1, SLOW_WINDOW).is_err());
    }

    #[test]
    fn connections_share_the_rate() {
        let rate = Rate::new(100_000);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..5 {
                scope.spawn(|| {
                    while let Some(wait) = rate.wait_for(10_000) {
                        std::thread::sleep(wait);
                    }
                });
            }
        });
        assert!(begun.elapsed() >= Duration::from_millis(400), "{:?}", begun.elapsed());
        assert_eq!(Rate::new(0).piece(), PIECE_BYTES_MAX);
        assert!((1024..=12_500).contains(&rate.piece()));
    }
}
