//! The daemon's event loop: one thread, tasks on a `LocalExecutor`, and epoll.
//!
//! ```text
//! run(main) ── turn ──> main, then up to TASKS_PER_TURN tasks ──> epoll_wait ──> wake what became ready
//!                 ^                (timeout: 0 with work left, else the next timer, else none)        │
//!                 └───────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! coracle has its own reactor because those of the smol family start a thread at their first use, but the
//! daemon has a single thread (ARCHITECTURE.md, "Invariants"). The reactor guarantees: no thread, no wake-up
//! without work, no allocation per wait, and a bounded amount of work between two calls of `epoll_wait`: a turn ends after
//! a number of polls or half a millisecond, whichever is first.
//! Signals arrive through a signalfd and process exits through pidfds, so both are descriptors like any
//! other. There is one reactor per thread, which exists during [`run`]; each thread of a test program has its
//! own.

mod directory;
mod driver;
mod holds;
mod signals;
#[cfg(test)]
mod tests;
mod timer;
mod watched;

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use smol::LocalExecutor;

use driver::Driver;

pub use directory::{Changes, Removals, arm};
pub use holds::{HOLD_BOUNDS, Holds, Slice};
pub use signals::Signals;
pub use timer::{deadline, sleep};
pub use watched::Watched;

/// A spawned task: awaiting it returns its result, dropping cancels it, and `detach` lets it run without a
/// handle.
pub use smol::Task;

/// Number of task polls between two calls of `epoll_wait`: large enough that the cost of the call (1 µs) does
/// not matter, small enough that a ready timer or descriptor waits for less than a millisecond of typical
/// polls.
const TASKS_PER_TURN: usize = 64;

thread_local! {
    static DRIVER: RefCell<Option<Rc<Driver>>> = const { RefCell::new(None) };
    static EXECUTOR: RefCell<Option<Rc<LocalExecutor<'static>>>> = const { RefCell::new(None) };
    static TASKS: Cell<usize> = const { Cell::new(0) };
}

/// Runs `main`, and all tasks that are spawned during it, until `main` completes. Remaining tasks are
/// dropped.
///
/// # Panics
/// If called within another `run` on the same thread, and if the kernel denies an epoll descriptor or a wait
/// on it, without which the daemon cannot work.
pub fn run<T>(main: impl Future<Output = T>) -> T {
    try_run(main).expect("create an epoll descriptor")
}

/// Runs the loop like [`run`].
///
/// # Errors
/// The kernel has no descriptor or no memory for the loop; `main` was not polled.
///
/// # Panics
/// Like [`run`], except for that error.
pub fn try_run<T>(main: impl Future<Output = T>) -> io::Result<T> {
    let _teardown = Installed::new()?;
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
            return Ok(output);
        }
        let mut is_idle = false;
        for _ in 0..TASKS_PER_TURN {
            is_idle = !executor.try_tick();
            if is_idle || driver.is_turn_over() {
                break;
            }
        }
        driver.turn(is_idle && !main_wake.0.load(Ordering::Relaxed));
    }
}

/// Starts a task on this thread's executor. Dropping the [`Task`] cancels it; `.detach()` lets it continue.
///
/// # Panics
/// Outside of [`run`].
pub fn spawn<T: 'static>(future: impl Future<Output = T> + 'static) -> Task<T> {
    // Boxed, so that the executor's code is compiled once per output type and not once per future. This saves
    // 150 KB; the allocation costs less than the page faults of that code.
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

/// Whether [`run`] is active. Destructors of tasks that are dropped at its end must not spawn tasks.
pub fn is_running() -> bool {
    EXECUTOR.with(|slot| slot.borrow().is_some())
}

/// Lets all other ready tasks run, and checks for events, before the caller continues.
pub async fn yield_now() {
    smol::future::yield_now().await;
}

/// Calls `action` once, directly before the loop waits for events with nothing else to do.
///
/// # Panics
/// Outside of [`run`].
pub fn before_sleep(action: fn()) {
    driver().before_sleep(action);
}

/// Current state of the reactor, for the SIGUSR1 dump and for tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stats {
    /// Number of tasks that have not completed.
    pub tasks: usize,
    /// Number of watched descriptors.
    pub descriptors: usize,
    /// Number of pending sleeps and deadlines.
    pub timers: usize,
    /// Number of turns of the loop since [`run`] started.
    pub turns: u64,
}

/// Returns the counts of this thread's reactor.
///
/// # Panics
/// Outside of [`run`].
pub fn stats() -> Stats {
    let driver = driver();
    Stats {
        tasks: TASKS.get(),
        descriptors: driver.descriptors(),
        timers: driver.timers(),
        turns: driver.turns(),
    }
}

/// The times of the turns of this thread's loop since [`run`] started.
///
/// # Panics
/// Outside of [`run`].
pub fn holds() -> Holds {
    driver().holds()
}

/// Returns this thread's driver. A call outside of [`run`] is a defect of the caller and panics.
fn driver() -> Rc<Driver> {
    try_driver().expect("reactor used outside reactor::run")
}

/// Returns this thread's driver; `None` outside of [`run`]. For destructors, which may run after the end of
/// [`run`].
fn try_driver() -> Option<Rc<Driver>> {
    DRIVER.try_with(|slot| slot.borrow().clone()).ok().flatten()
}

fn executor() -> Rc<LocalExecutor<'static>> {
    let executor = EXECUTOR.with(|slot| slot.borrow().clone());
    executor.expect("task spawned outside reactor::run")
}

/// Installs the reactor and the executor, and removes them in an order in which dropped tasks can deregister
/// their descriptors.
struct Installed;

impl Installed {
    fn new() -> io::Result<Installed> {
        let driver = Driver::new()?;
        let previous = DRIVER.with(|slot| slot.borrow_mut().replace(Rc::new(driver)));
        assert!(previous.is_none(), "reactor::run called within reactor::run");
        EXECUTOR.with(|slot| slot.borrow_mut().replace(Rc::new(LocalExecutor::new())));
        Ok(Installed)
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

/// A task in the counter [`TASKS`], from its spawn to its completion or cancellation.
struct Counted;

impl Counted {
    fn new() -> Counted {
        TASKS.set(TASKS.get() + 1);
        Counted
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        // After the thread-local variables are destroyed there is no counter to decrement.
        let _ = TASKS.try_with(|tasks| tasks.set(tasks.get() - 1));
    }
}
