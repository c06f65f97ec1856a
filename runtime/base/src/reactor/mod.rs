//! The daemon's only loop: one thread, tasks on a `LocalExecutor`, and epoll underneath.
//!
//! ```text
//!   run(main) ── turn ──> main, then up to TASKS_PER_TURN tasks ──> epoll_wait ──> wake what became ready
//!                 ^                (timeout: 0 with work left, else the next timer, else none)        │
//!                 └───────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Ours because every ready-made reactor of the smol family starts a thread at its first use (the daemon has one: ARCHITECTURE.md, "Invariants").
//! It promises: no thread, no wakeup without work, no allocation per wait, a bounded amount of work between two looks at
//! epoll. Signals arrive through a signalfd and processes through pidfds, so both are descriptors like any other.
//! One reactor per thread, alive while [`run`] runs; tests on several threads each have their own.

mod directory;
mod driver;
mod signals;
#[cfg(test)]
mod tests;
mod timer;
mod watched;

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use smol::LocalExecutor;

use driver::Driver;

pub use directory::arm;
pub use signals::Signals;
pub use timer::{deadline, sleep};
pub use watched::Watched;

/// A spawned task: awaits its result, cancels when dropped, runs on alone after `detach`.
pub use smol::Task;

/// Polls of tasks between two looks at epoll: enough that the look costs little (1 µs), few enough that a ready timer or
/// descriptor waits for less than a millisecond of ordinary polls.
const TASKS_PER_TURN: usize = 64;

thread_local! {
    static DRIVER: RefCell<Option<Rc<Driver>>> = const { RefCell::new(None) };
    static EXECUTOR: RefCell<Option<Rc<LocalExecutor<'static>>>> = const { RefCell::new(None) };
    static TASKS: Cell<usize> = const { Cell::new(0) };
}

/// Runs `main` and every task spawned meanwhile, until `main` is ready. Tasks still alive then are dropped.
///
/// # Panics
/// Inside another `run` on the same thread, and where the kernel refuses an epoll descriptor or a wait on it: nothing
/// can run without, so there is nobody to report to.
pub fn run<T>(main: impl Future<Output = T>) -> T {
    let _teardown = Installed::new();
    let driver = driver();
    let executor = executor();
    let mut main = pin!(main);
    let main_wake = Arc::new(MainWake(AtomicBool::new(true)));
    let waker = Waker::from(main_wake.clone());
    let mut context = Context::from_waker(&waker);
    loop {
        if main_wake.0.swap(false, Ordering::Relaxed)
            && let Poll::Ready(output) = main.as_mut().poll(&mut context)
        {
            return output;
        }
        let is_idle = (0..TASKS_PER_TURN).any(|_| !executor.try_tick());
        driver.turn(is_idle && !main_wake.0.load(Ordering::Relaxed));
    }
}

/// Starts a task on this thread's executor. Dropping the [`Task`] cancels it; `.detach()` lets it run on.
///
/// # Panics
/// Outside [`run`].
pub fn spawn<T: 'static>(future: impl Future<Output = T> + 'static) -> Task<T> {
    // Behind one pointer: the executor's code for a task is there once for each output, not for each of our futures, which
    // is 150 KB less; the allocation costs less than the page faults of that code.
    let future: Pin<Box<dyn Future<Output = T>>> = Box::pin(future);
    spawn_boxed(future)
}

fn spawn_boxed<T: 'static>(future: Pin<Box<dyn Future<Output = T>>>) -> Task<T> {
    let counted = Counted::new();
    executor().spawn(async move {
        let _counted = counted;
        future.await
    })
}

/// Whether [`run`] runs: destructors of tasks that are dropped at its end cannot spawn any more.
pub fn is_running() -> bool {
    EXECUTOR.with(|slot| slot.borrow().is_some())
}

/// Lets every other ready task, and epoll, have its turn first.
pub async fn yield_now() {
    smol::future::yield_now().await;
}

/// What the reactor holds right now, for the SIGUSR1 dump and for tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stats {
    /// Tasks that are spawned and not finished.
    pub tasks: usize,
    /// Descriptors under watch.
    pub descriptors: usize,
    /// Sleeps and deadlines under way.
    pub timers: usize,
    /// Turns of the loop since [`run`] began.
    pub turns: u64,
}

/// Counts of this thread's reactor.
///
/// # Panics
/// Outside [`run`].
pub fn stats() -> Stats {
    let driver = driver();
    Stats {
        tasks: TASKS.get(),
        descriptors: driver.descriptors(),
        timers: driver.timers(),
        turns: driver.turns(),
    }
}

/// This thread's driver. Reaching for it outside [`run`] is a bug of the caller's, not an event.
fn driver() -> Rc<Driver> {
    try_driver().expect("reactor used outside reactor::run")
}

/// The same as [`driver()`], for destructors, which may run after the reactor is gone.
fn try_driver() -> Option<Rc<Driver>> {
    DRIVER.try_with(|slot| slot.borrow().clone()).ok().flatten()
}

fn executor() -> Rc<LocalExecutor<'static>> {
    let executor = EXECUTOR.with(|slot| slot.borrow().clone());
    executor.expect("task spawned outside reactor::run")
}

/// Puts reactor and executor in place and takes them away in the order that lets tasks deregister while they drop.
struct Installed;

impl Installed {
    fn new() -> Installed {
        let driver = Driver::new().expect("epoll: the daemon cannot run without");
        let previous = DRIVER.with(|slot| slot.borrow_mut().replace(Rc::new(driver)));
        assert!(previous.is_none(), "reactor::run inside reactor::run");
        EXECUTOR.with(|slot| slot.borrow_mut().replace(Rc::new(LocalExecutor::new())));
        Installed
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        let executor = EXECUTOR.with(|slot| slot.borrow_mut().take());
        drop(executor); // drops every task, and with it its descriptors and timers
        let driver = DRIVER.with(|slot| slot.borrow_mut().take());
        drop(driver);
    }
}

struct MainWake(AtomicBool);

impl Wake for MainWake {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// One task in [`TASKS`], from its spawn to its end or cancellation.
struct Counted;

impl Counted {
    fn new() -> Counted {
        TASKS.set(TASKS.get() + 1);
        Counted
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        // After the thread's locals are gone there is nothing left to count.
        let _ = TASKS.try_with(|tasks| tasks.set(tasks.get() - 1));
    }
}
