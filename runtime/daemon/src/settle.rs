//! Lets go of code that is not in use. The program's file is mapped, and what a start or a burst of pods has touched would
//! stay mapped for as long as the daemon lives: two thirds of its memory. Some seconds after work began it is let go of
//! as a whole; what the next call needs comes back from the page cache, some sixteen pages at a time and within
//! microseconds. Nothing wakes up where nothing was done.

use std::cell::Cell;
use std::time::Duration;

use coracle_base::reactor;

/// From the first work after the last time.
const PAUSE: Duration = Duration::from_secs(10);

thread_local! {
    static IS_DUE: Cell<bool> = const { Cell::new(false) };
}

/// There was work: its code will be let go of.
pub(crate) fn after_work() {
    if IS_DUE.replace(true) {
        return;
    }
    reactor::spawn(async {
        reactor::sleep(PAUSE).await;
        IS_DUE.set(false);
        coracle_sandbox::forget_code();
    })
    .detach();
}
