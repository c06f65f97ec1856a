//! What the download of a blob has written to its part file, as shared with the thread that unpacks the blob
//! meanwhile (`follow` in the worker).
//!
//! | event | the download | the unpacking thread |
//! |---|---|---|
//! | data was written | [`Arrival::wrote`] | reads up to it |
//! | the part is started again, because its data is wrong or cannot be resumed | [`Arrival::restart`], then truncates | discards what it unpacked, and begins again |
//! | the digest of the whole blob was verified | [`Arrival::end`] with true | its result counts |
//! | the download failed | [`Arrival::end`] with false | discards what it unpacked |
//!
//! Nothing that happens to data before its verification ends the download: the data may be another endpoint's
//! fault.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The state of one blob's download. Both threads hold a reference; the download ends in any case, so no wait
/// lasts for ever.
#[derive(Debug, Default)]
pub struct Arrival {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Number of bytes of the part file that were written in this attempt.
    bytes: u64,
    /// Number of restarts of the download.
    attempt: u32,
    end: Option<bool>,
}

/// The answer to a thread that has used all data up to its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The part file has data up to this offset.
    Upto(u64),
    /// The whole blob was read, and its digest has been verified.
    Verified,
    /// The data of this attempt is void: the download began again or failed.
    Void,
}

impl Arrival {
    /// The part file has `bytes` bytes now.
    pub fn wrote(&self, bytes: u64) {
        self.lock().bytes = bytes;
        self.changed.notify_all();
    }

    /// The data of the part file is about to be discarded.
    pub fn restart(&self) {
        let mut state = self.lock();
        (state.bytes, state.attempt) = (0, state.attempt + 1);
        self.changed.notify_all();
    }

    /// The download has ended; `is_verified`: with the whole blob, whose digest is right.
    pub fn end(&self, is_verified: bool) {
        self.lock().end = Some(is_verified);
        self.changed.notify_all();
    }

    /// The number of the current attempt; `None` if the download has failed.
    pub fn attempt(&self) -> Option<u32> {
        let state = self.lock();
        (state.end != Some(false)).then_some(state.attempt)
    }

    /// Waits for data of this attempt beyond `position`, or for the end of the download.
    pub fn next(&self, attempt: u32, position: u64) -> Next {
        let mut state = self.lock();
        loop {
            match state.end {
                _ if state.attempt != attempt => return Next::Void,
                Some(false) => return Next::Void,
                _ if state.bytes > position => return Next::Upto(state.bytes),
                Some(true) => return Next::Verified,
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Waits until it is known whether the data of this attempt is the verified blob.
    pub fn is_verified(&self, attempt: u32) -> bool {
        self.next(attempt, u64::MAX) == Next::Verified
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::{Arrival, Next};

    #[test]
    fn downloaded_data_is_passed_on_until_the_blob_is_verified() {
        let arrival = Arrival::default();
        arrival.wrote(10);
        assert_eq!(arrival.next(0, 0), Next::Upto(10));
        arrival.end(true);
        assert_eq!(arrival.next(0, 4), Next::Upto(10), "the rest comes before the end");
        assert_eq!(arrival.next(0, 10), Next::Verified);
        assert!(arrival.is_verified(0));
    }

    #[test]
    fn a_restart_voids_the_data_before_it() {
        let arrival = Arrival::default();
        arrival.wrote(10);
        arrival.restart();
        assert_eq!((arrival.next(0, 5), arrival.attempt()), (Next::Void, Some(1)));
        arrival.wrote(3);
        assert_eq!(arrival.next(1, 0), Next::Upto(3));
        arrival.end(true);
        assert!(arrival.is_verified(1) && !arrival.is_verified(0));
    }

    #[test]
    fn a_failed_download_voids_all_data() {
        let arrival = Arrival::default();
        arrival.wrote(10);
        arrival.end(false);
        assert_eq!((arrival.next(0, 0), arrival.attempt()), (Next::Void, None));
    }

    #[test]
    fn a_waiting_thread_is_woken_by_data_and_by_the_end() {
        let arrival = Arrival::default();
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| (arrival.next(0, 0), arrival.next(0, 1)));
            arrival.wrote(1);
            arrival.end(true);
            assert_eq!(reader.join().unwrap(), (Next::Upto(1), Next::Verified));
        });
    }
}
