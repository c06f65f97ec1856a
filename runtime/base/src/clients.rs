//! Connections whose number is limited by closing the oldest of them: clients that send nothing, or do not read their
//! answer, keep no other client away. Used by each listener that any process of the node can connect to (streaming, metrics)
//! and by the control socket. The listeners of gRPC and of NRI plugins have the same rule for their own tables
//! (`rpc::peers`, `nri::join`).

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use crate::reactor::{self, Task};

/// Tasks of clients, at most a fixed number.
pub struct Clients {
    max: usize,
    last: Cell<u64>,
    /// Tasks of the clients by a rising number, so oldest first.
    tasks: RefCell<BTreeMap<u64, Task<()>>>,
}

/// The place of one client in [`Clients`]. Dropping it frees the place; the task continues.
pub struct Client {
    clients: Rc<Clients>,
    number: u64,
}

impl Clients {
    /// Creates the table for at most `max` clients.
    pub fn new(max: usize) -> Rc<Self> {
        Rc::new(Self { max, last: Cell::new(0), tasks: RefCell::default() })
    }

    /// Starts the task of a client; it gets its place. Returns whether the oldest client was closed for it.
    pub fn serve<F: Future<Output = ()> + 'static>(self: &Rc<Self>, serve: impl FnOnce(Client) -> F) -> bool {
        let client = self.place();
        let number = client.number;
        self.insert(number, reactor::spawn(serve(client)))
    }

    fn place(self: &Rc<Self>) -> Client {
        self.last.set(self.last.get() + 1);
        Client { clients: Rc::clone(self), number: self.last.get() }
    }

    fn insert(&self, number: u64, task: Task<()>) -> bool {
        let oldest = {
            let mut tasks = self.tasks.borrow_mut();
            let oldest = if tasks.len() >= self.max { tasks.pop_first() } else { None };
            tasks.insert(number, task);
            oldest
        };
        // Cancels the task, which drops its own place: the table must not be borrowed.
        oldest.is_some()
    }
}

impl Client {
    /// Moves the client to another table, whose oldest client is closed if it is full.
    #[must_use]
    pub fn pass_to(self, clients: &Rc<Clients>) -> Client {
        let task = self.clients.tasks.borrow_mut().remove(&self.number);
        let client = clients.place();
        if let Some(task) = task {
            clients.insert(client.number, task);
        }
        client
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let task = self.clients.tasks.borrow_mut().remove(&self.number);
        if let Some(task) = task {
            task.detach();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Each task appends its number when it ends, and a cancelled one appends nothing.
    #[test]
    fn the_oldest_client_is_closed_for_a_new_one_and_a_freed_place_is_used_again() {
        let ended = reactor::run(async {
            let ended = Rc::new(RefCell::new(Vec::new()));
            let (waiting, answering) = (Clients::new(2), Clients::new(1));
            // A task ends when the sender of its kind is dropped.
            let (end_complete, complete) = smol::channel::bounded::<()>(1);
            let (end_others, others) = smol::channel::bounded::<()>(1);
            let start = |number: u32, is_complete: bool| {
                let (ended, answering) = (Rc::clone(&ended), Rc::clone(&answering));
                let end = if is_complete { complete.clone() } else { others.clone() };
                waiting.serve(move |mut place| async move {
                    if is_complete {
                        place = place.pass_to(&answering);
                    }
                    let _ = end.recv().await;
                    ended.borrow_mut().push(number);
                    drop(place);
                })
            };
            // The third and the fourth one close the first two.
            assert_eq!([start(1, false), start(2, false), start(3, false)], [false, false, true]);
            assert!(start(4, true));
            reactor::sleep(Duration::from_millis(5)).await;
            // The fourth one has left the table for the other one, where it is closed for the fifth one.
            assert!(!start(5, true));
            reactor::sleep(Duration::from_millis(5)).await;
            assert_eq!((waiting.tasks.borrow().len(), answering.tasks.borrow().len()), (1, 1));
            drop(end_complete);
            reactor::sleep(Duration::from_millis(5)).await;
            drop(end_others);
            reactor::sleep(Duration::from_millis(5)).await;
            assert_eq!((waiting.tasks.borrow().len(), answering.tasks.borrow().len()), (0, 0));
            ended.borrow().clone()
        });
        assert_eq!(ended, [5, 3]);
    }
}
