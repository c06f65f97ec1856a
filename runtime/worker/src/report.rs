//! Reports the progress of a job from any of its threads, at a limited rate.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use coracle_job::{Answer, Progress, write_message};

/// Minimum interval between progress messages, which are displayed to users.
pub(crate) const PAUSE: Duration = Duration::from_millis(200);

/// Interval of keep-alive messages without progress; the daemon kills a worker that is silent for some
/// minutes.
const PULSE: Duration = Duration::from_secs(5);

/// The progress of a job.
#[derive(Default)]
pub(crate) struct Report(Mutex<State>);

#[derive(Default)]
struct State {
    progress: Progress,
    /// Time and content of the last message; `None` before the first one.
    told: Option<(Instant, Progress)>,
    /// Whether the job has ended: the answer follows, and later messages of remaining threads are dropped.
    is_over: bool,
}

impl Report {
    /// Updates the progress and sends a message if one is due, also without a change: the job is alive.
    pub(crate) fn update(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.lock().progress);
        self.catch_up();
        self.pulse();
    }

    /// Sends changes of the progress that were not sent yet because no message was due.
    pub(crate) fn catch_up(&self) {
        self.lock().tell_if_due();
    }

    /// Sends a keep-alive message if one is due, because the daemon kills a silent worker.
    pub(crate) fn pulse(&self) {
        let mut state = self.lock();
        if !state.is_over && state.told.is_none_or(|(at, _)| at.elapsed() >= PULSE) {
            state.tell();
        }
    }

    /// Sends the final progress.
    pub(crate) fn finish(&self) {
        let mut state = self.lock();
        state.tell();
        state.is_over = true;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic ends the process (`panic = "abort"`), so the lock cannot be poisoned.
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

    /// Sends the current progress. Called with the lock held, so that messages are not interleaved.
    fn tell(&mut self) {
        self.told = Some((Instant::now(), self.progress));
        if write_message(&mut std::io::stdout(), &Answer::Progress(self.progress)).is_err() {
            std::process::exit(1); // the daemon has ended: the parts stay for the next worker
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_whose_numbers_do_not_change_is_alive() {
        let report = Report::default();
        report.update(|_| ());
        let told = || report.lock().told.expect("a message").0;
        let first = told();
        report.update(|_| ());
        assert_eq!(told(), first, "nothing is due yet");
        let past = Instant::now().checked_sub(PULSE).expect("the machine runs for longer");
        report.lock().told = Some((past, Progress::default()));
        report.catch_up();
        assert_eq!(told(), past, "a timer is no sign of life");
        report.update(|_| ());
        assert!(told() > past);
        report.finish();
        report.lock().told = Some((past, Progress::default()));
        report.update(|_| ());
        assert_eq!(told(), past, "the answer follows");
    }
}
