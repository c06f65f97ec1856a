//! How long the loop's thread is held: the time of each turn, from the end of one wait for events to the beginning of the
//! next. No other call is answered meanwhile, so no call may hold the thread for longer than a few milliseconds; one that
//! handles many objects shares the thread between them ([`Slice`]).

use std::cell::Cell;
use std::time::{Duration, Instant};

use crate::counters::Times;
use crate::time;

/// Upper bounds of the histogram of turns, in seconds.
pub const HOLD_BOUNDS: [f64; 9] = [0.000_1, 0.000_25, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1];
/// Time after which a turn ends, although tasks could continue, and after which a [`Slice`] yields: two slices and
/// something else take less than 2 ms.
const SLICE: Duration = Duration::from_micros(500);

/// The turns of the loop so far, by their time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Holds {
    /// The times of all turns, with the bounds [`HOLD_BOUNDS`].
    pub times: Times<10>,
    /// Longest time of a turn.
    pub longest: Duration,
}

/// The turn that is in progress, and those before it.
pub(super) struct Turns {
    begun: Cell<Instant>,
    holds: Cell<Holds>,
}

impl Turns {
    pub(super) fn new() -> Turns {
        Turns { begun: Cell::new(Instant::now()), holds: Cell::default() }
    }

    /// Whether the turn in progress has lasted for so long that events must be looked at.
    pub(super) fn is_over(&self) -> bool {
        self.begun.get().elapsed() >= SLICE
    }

    /// Counts the turn in progress, before the wait for events.
    pub(super) fn end(&self) {
        let held = self.begun.get().elapsed();
        let mut holds = self.holds.get();
        holds.times.add(&HOLD_BOUNDS, held);
        holds.longest = holds.longest.max(held);
        self.holds.set(holds);
    }

    /// Begins a turn, after the wait for events.
    pub(super) fn begin(&self) {
        self.begun.set(Instant::now());
    }

    pub(super) fn holds(&self) -> Holds {
        self.holds.get()
    }
}

/// The use of the thread by a task with many objects to handle, one after the other.
///
/// ```ignore
/// let mut slice = Slice::new();
/// for object in objects {
///     handle(object);
///     slice.share().await;
/// }
/// ```
#[derive(Debug)]
pub struct Slice(Instant);

impl Slice {
    /// Begins a slice.
    #[expect(clippy::new_without_default, reason = "it begins now")]
    pub fn new() -> Slice {
        Slice(time::now())
    }

    /// Lets other tasks run, and checks for events, if the task has used the thread for half a millisecond.
    pub async fn share(&mut self) {
        if time::now().saturating_duration_since(self.0) >= SLICE {
            super::yield_now().await;
            self.0 = time::now();
        }
    }
}
