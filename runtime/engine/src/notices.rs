//! What happens to pods and containers, told to whoever listens, in the order in which it happens. A listener is called at
//! the change itself, so that what it reads of the pod is what was true then; it must not wait.

use std::cell::RefCell;
use std::rc::Rc;

use crate::Pod;

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happened {
    /// It was made; a pod sandbox is ready.
    Created,
    /// It runs; for a pod sandbox together with `Created`.
    Started,
    /// It has ended.
    Stopped,
    /// It is removed.
    Deleted,
}

/// One change.
pub struct Notice<'a> {
    /// What happened to it.
    pub happened: Happened,
    /// Of the container, or of the pod sandbox itself.
    pub id: String,
    /// The pod sandbox, or the one that the container is in.
    pub pod: &'a Rc<Pod>,
    /// Wall clock, nanoseconds since 1970; later than that of every notice before.
    pub at_ns: i64,
}

/// Answers whether it still listens.
type Listener = Box<dyn Fn(&Notice<'_>) -> bool>;

/// Who listens.
#[derive(Default)]
pub(crate) struct Listeners(RefCell<Vec<Listener>>);

impl Listeners {
    pub(crate) fn add(&self, listener: Listener) {
        self.0.borrow_mut().push(listener);
    }

    pub(crate) fn tell(&self, notice: &Notice<'_>) {
        // Taken out for the calls: nobody may find the list borrowed.
        let mut listeners = self.0.take();
        listeners.retain(|listener| listener(notice));
        let added = self.0.replace(listeners);
        self.0.borrow_mut().extend(added);
    }

    pub(crate) fn clear(&self) {
        self.0.take();
    }

    pub(crate) fn len(&self) -> usize {
        self.0.borrow().len()
    }
}
