//! The waits of operations at the moment: for programs of others, worker processes, the steps of a pod. A
//! long wait is logged after [`FIRST`] and then every [`INTERVAL`], and SIGUSR1 logs all waits, so that a pod
//! that hangs is visible before its time limit has passed.
//!
//! ```text
//! begin("3f2a…", "web/nginx", "step network") ──> Wait ── now("CNI plugin calico") ──> … ──> dropped: the
//! wait has ended
//! └── task: after 10 s, 60 s, 120 s, … a log message
//! ```
//! An entry exists as long as its [`Wait`]. If a pod has several, only the latest one is logged, because it
//! is part of the others.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::reactor::{self, Task};
use crate::{log, time};

/// Time after which a wait is logged.
pub const FIRST: Duration = Duration::from_secs(10);

/// Interval between two log messages about a wait.
pub const INTERVAL: Duration = Duration::from_secs(60);

thread_local! {
    static ENTRIES: RefCell<Vec<Rc<Entry>>> = const { RefCell::new(Vec::new()) };
}

struct Entry {
    pod: String,
    name: String,
    what: RefCell<String>,
    since: Cell<Instant>,
    /// Duration of the wait at which it is logged next.
    due: Cell<Duration>,
}

/// The wait of an operation; ends when the value is dropped.
#[must_use]
pub struct Wait {
    entry: Rc<Entry>,
    _watch: Task<()>,
}

/// A wait in progress, for lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// ID of the pod sandbox; empty if the wait is not for a pod.
    pub pod: String,
    /// `namespace/name` of the pod; empty if it is unknown.
    pub name: String,
    /// The event or program that is waited for.
    pub what: String,
    /// Time since the wait began.
    pub since: Duration,
}

/// Records that an operation for this pod waits for `what`.
///
/// # Panics
/// Outside of [`reactor::run`].
pub fn begin(pod: impl ToString, name: impl ToString, what: impl Into<String>) -> Wait {
    let entry = Rc::new(Entry {
        pod: pod.to_string(),
        name: name.to_string(),
        what: RefCell::new(what.into()),
        since: Cell::new(time::now()),
        due: Cell::new(FIRST),
    });
    ENTRIES.with_borrow_mut(|entries| entries.push(Rc::clone(&entry)));
    Wait { _watch: reactor::spawn(watch(Rc::clone(&entry))), entry }
}

/// All waits in progress, oldest first.
pub fn list() -> Vec<Waiting> {
    ENTRIES.with_borrow(|entries| entries.iter().map(|entry| entry.view()).collect())
}

impl Wait {
    /// Records that the operation now waits for `what`.
    pub fn now(&self, what: impl Into<String>) {
        *self.entry.what.borrow_mut() = what.into();
        self.entry.since.set(time::now());
        self.entry.due.set(FIRST);
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        ENTRIES.with_borrow_mut(|entries| {
            entries.retain(|other| !Rc::ptr_eq(other, &self.entry));
            if entries.is_empty() {
                entries.shrink_to_fit();
            }
        });
    }
}

impl Entry {
    fn view(&self) -> Waiting {
        Waiting {
            pod: self.pod.clone(),
            name: self.name.clone(),
            what: self.what.borrow().clone(),
            since: time::now().saturating_duration_since(self.since.get()),
        }
    }

    /// Whether this is the latest wait of its pod; true for a wait without a pod.
    fn is_youngest(&self) -> bool {
        ENTRIES.with_borrow(|entries| {
            let of_pod = entries.iter().rev().find(|other| !self.pod.is_empty() && other.pod == self.pod);
            of_pod.is_none_or(|last| std::ptr::eq(Rc::as_ptr(last), self))
        })
    }
}

/// Logs the wait whenever a message is due, until the wait ends and this task is cancelled.
async fn watch(entry: Rc<Entry>) {
    loop {
        let left = entry.due.get().saturating_sub(time::now().saturating_duration_since(entry.since.get()));
        if !left.is_zero() {
            reactor::sleep(left).await;
            continue;
        }
        if entry.is_youngest() {
            let Waiting { pod, name, what, since } = entry.view();
            let text = format!("waiting for {what}, {} s", since.as_secs());
            if pod.is_empty() {
                log::warn!(text);
            } else {
                log::warn!(text; pod = pod, name = name);
            }
        }
        let due = entry.due.get();
        entry.due.set(if due == FIRST { INTERVAL } else { due + INTERVAL });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_listed_while_they_last_and_the_youngest_of_a_pod_is_known() {
        reactor::run(async {
            let outer = begin("p", "ns/pod", "step network");
            let inner = begin("p", "ns/pod", "a worker");
            inner.now("CNI plugin x");
            let what: Vec<_> = list().into_iter().map(|waiting| waiting.what).collect();
            assert_eq!(what, ["step network", "CNI plugin x"]);
            assert!(!outer.entry.is_youngest() && inner.entry.is_youngest());
            drop(inner);
            assert!(outer.entry.is_youngest());
            let other = begin("", "", "a scan");
            assert!(other.entry.is_youngest() && outer.entry.is_youngest());
            drop((outer, other));
            assert!(list().is_empty());
        });
    }
}
