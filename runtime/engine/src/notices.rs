//! Notification of listeners about changes of pods and containers, in the order of the changes. A listener is
//! called directly at the change, so that it reads the state of that moment; a listener must not wait.

use std::cell::RefCell;
use std::rc::Rc;

/// The kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    /// The container was created, or the pod sandbox is ready.
    Created,
    /// The container is running; for a pod sandbox together with `Created`.
    Started,
    /// The container has exited, or the pod sandbox was stopped.
    Stopped,
    /// The container or pod sandbox was removed.
    Deleted,
}

/// A change of a container or a pod sandbox. `P`: [`Pod`](crate::Pod).
pub struct Notice<'a, P> {
    /// The kind of the change.
    pub kind: ChangeKind,
    /// ID of the container, or of the pod sandbox itself.
    pub id: String,
    /// Name of the container in its pod; empty if the notice is about the pod sandbox itself.
    pub container: &'a str,
    /// The pod sandbox, or the pod sandbox of the container.
    pub pod: &'a Rc<P>,
    /// Wall clock in nanoseconds since 1970; later than that of all earlier notices.
    pub at_ns: i64,
}

/// A listener; it returns whether it wants further notices.
pub type Listener<P> = Box<dyn Fn(&Notice<'_, P>) -> bool>;

/// All listeners for changes.
pub(crate) struct Listeners<P>(RefCell<Vec<Listener<P>>>);

impl<P> Default for Listeners<P> {
    fn default() -> Self {
        Self(RefCell::default())
    }
}

impl<P> Listeners<P> {
    pub(crate) fn add(&self, listener: Listener<P>) {
        self.0.borrow_mut().push(listener);
    }

    pub(crate) fn tell(&self, notice: &Notice<'_, P>) {
        // Taken out during the calls, because a listener may access the list.
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
