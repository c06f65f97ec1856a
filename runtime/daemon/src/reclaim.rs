//! Releases memory of unused program code and constants. The program's file is mapped, and pages that the start or a burst of
//! pods has used would stay mapped as long as the daemon runs: most of its memory. Some seconds after work has started, all pages
//! are released (MADV_DONTNEED) when the event loop has nothing left to do; the next call loads the pages that it needs from the
//! page cache, some sixteen at a time and within microseconds. The buffer that is kept for the next response is freed with them. An idle
//! daemon is not woken up.

use std::cell::Cell;
use std::time::Duration;

use coracle_base::reactor;

use crate::rpc;

/// Time between the first work after a release and the next release.
const PAUSE: Duration = Duration::from_secs(10);

thread_local! {
    static IS_DUE: Cell<bool> = const { Cell::new(false) };
}

/// Schedules the release; called when work has started.
pub(crate) fn schedule() {
    if IS_DUE.replace(true) {
        return;
    }
    reactor::spawn(async {
        reactor::sleep(PAUSE).await;
        IS_DUE.set(false);
        // What runs between the release and the wait would be mapped again.
        reactor::before_sleep(release);
    })
    .detach();
}

fn release() {
    rpc::free_spare_buffer();
    coracle_sandbox::forget_constant_pages();
}
