//! What a job says while it runs: how far it is, from whichever of its threads, no more often than people look.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use coracle_job::{Answer, Progress, write_message};

/// Progress is for people: more often than this nobody looks.
pub(crate) const PAUSE: Duration = Duration::from_millis(200);

/// From one sign of life to the next, where there is no progress; the daemon waits for minutes.
const PULSE: Duration = Duration::from_secs(5);

/// The job's progress.
#[derive(Default)]
pub(crate) struct Report(Mutex<State>);

#[derive(Default)]
struct State {
    progress: Progress,
    /// When it was told last, and what.
    told: Option<(Instant, Progress)>,
    /// The job's answer comes next: threads that still run are not heard any more.
    is_over: bool,
}

impl Report {
    /// Changes what is known, and tells the daemon where that is due.
    pub(crate) fn update(&self, change: impl FnOnce(&mut Progress)) {
        let mut state = self.lock();
        change(&mut state.progress);
        state.tell_if_due();
    }

    /// Says what has not been said yet, of one that changed before it was due.
    pub(crate) fn catch_up(&self) {
        self.lock().tell_if_due();
    }

    /// Says that the job gets on though nothing that people count changes: a silent one is taken for dead.
    pub(crate) fn pulse(&self) {
        let mut state = self.lock();
        if !state.is_over && state.told.is_none_or(|(at, _)| at.elapsed() >= PULSE) {
            state.tell();
        }
    }

    /// Says how it stands, for the last time.
    pub(crate) fn finish(&self) {
        let mut state = self.lock();
        state.tell();
        state.is_over = true;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Whoever panics with it ends the process (`panic = "abort"`).
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn tell_if_due(&mut self) {
        let is_due = |(at, told): (Instant, Progress)| at.elapsed() >= PAUSE && told != self.progress;
        if !self.is_over && self.told.is_none_or(is_due) {
            self.tell();
        }
    }

    /// With the lock held, so that two messages do not mix.
    fn tell(&mut self) {
        self.told = Some((Instant::now(), self.progress));
        if write_message(&mut std::io::stdout(), &Answer::Progress(self.progress)).is_err() {
            std::process::exit(1); // nobody reads any more: the parts stay for the next worker
        }
    }
}
