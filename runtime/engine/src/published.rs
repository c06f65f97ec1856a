//! The record of a pod or container in memory, with its encoded form for lists. A kubelet asks for the lists every second, and
//! records change rarely: each is encoded once for each change, and not once for each call.

use std::cell::{Ref, RefCell, RefMut};
use std::rc::Rc;

/// A record and its encoded form, which every change drops.
pub(crate) struct Published<T> {
    record: RefCell<T>,
    encoded: RefCell<Option<Rc<[u8]>>>,
}

impl<T> Published<T> {
    pub(crate) fn new(record: T) -> Self {
        Self { record: RefCell::new(record), encoded: RefCell::default() }
    }

    pub(crate) fn borrow(&self) -> Ref<'_, T> {
        self.record.borrow()
    }

    pub(crate) fn borrow_mut(&self) -> RefMut<'_, T> {
        let record = self.record.borrow_mut();
        *self.encoded.borrow_mut() = None;
        record
    }

    /// The encoded form; `encode` is called if the record has changed since it was called last.
    pub(crate) fn encoded(&self, encode: impl FnOnce(&T) -> Vec<u8>) -> Rc<[u8]> {
        // The record is borrowed, so it does not change meanwhile.
        let record = self.record.borrow();
        Rc::clone(self.encoded.borrow_mut().get_or_insert_with(|| encode(&record).into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_encoded_once_for_each_change() {
        let record = Published::new(1_u8);
        let mut calls = 0;
        let mut encoded = |expected: u8| {
            let found = record.encoded(|record| {
                calls += 1;
                vec![*record]
            });
            assert_eq!(found[..], [expected]);
            calls
        };
        assert_eq!([encoded(1), encoded(1)], [1, 1]);
        *record.borrow_mut() = 2;
        assert_eq!([encoded(2), encoded(2)], [2, 2]);
    }
}
