//! A value that is set once and waited for by any number of tasks: how a creation ended, that a container is over.

use std::cell::RefCell;

use event_listener::Event;

/// Empty until the first [`Latch::set`].
pub(super) struct Latch<T> {
    value: RefCell<Option<T>>,
    changed: Event,
}

impl<T> Default for Latch<T> {
    fn default() -> Self {
        Self { value: RefCell::new(None), changed: Event::new() }
    }
}

impl<T: Clone> Latch<T> {
    /// Sets the value; what was set before stays.
    pub(super) fn set(&self, value: T) {
        self.value.borrow_mut().get_or_insert(value);
        self.changed.notify(usize::MAX);
    }

    /// The value, if it is set.
    pub(super) fn get(&self) -> Option<T> {
        self.value.borrow().clone()
    }

    /// Waits for the value.
    pub(super) async fn wait(&self) -> T {
        loop {
            let changed = self.changed.listen(); // before the look: a set in between is not missed
            if let Some(value) = self.get() {
                return value;
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_value_stays() {
        let latch = Latch::default();
        assert_eq!(latch.get(), None);
        latch.set(1);
        latch.set(2);
        assert_eq!(latch.get(), Some(1));
    }
}
