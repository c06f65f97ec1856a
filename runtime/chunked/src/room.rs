//! The memory for the tables of the layers that a pull rebuilds at once: the sum is limited, so that an image of many layers with long
//! tables needs no more than one with one of them. Short ones do not wait for each other.

use std::sync::{Condvar, Mutex, PoisonError};

/// Number of bytes of all tables together; a longer one is read alone.
const ROOM_BYTES: u64 = 8 << 20;

/// The memory that is free.
#[derive(Debug)]
pub struct Room {
    free: Mutex<u64>,
    freed: Condvar,
}

impl Default for Room {
    fn default() -> Self {
        Self { free: Mutex::new(ROOM_BYTES), freed: Condvar::new() }
    }
}

impl Room {
    /// Waits until there is memory for a table of this many bytes.
    pub fn take(&self, bytes: u64) -> Taken<'_> {
        let bytes = bytes.min(ROOM_BYTES);
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.freed.wait_while(free, |free| *free < bytes);
        *waited.unwrap_or_else(PoisonError::into_inner) -= bytes;
        Taken { room: self, bytes }
    }
}

/// Memory of one table; free again on drop.
#[must_use]
#[derive(Debug)]
pub struct Taken<'a> {
    room: &'a Room,
    bytes: u64,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        *self.room.free.lock().unwrap_or_else(PoisonError::into_inner) += self.bytes;
        self.room.freed.notify_all();
    }
}
