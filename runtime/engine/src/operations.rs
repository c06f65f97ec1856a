//! Operations of pods and containers run as tasks of the daemon, not of the calls that requested them. If a
//! client disconnects or its deadline passes, the operation continues, and lists show its result. An
//! identical request during the operation waits for it and gets the same answer.
//!
//! The reason: dropping a smol `Task` cancels it. Otherwise a cancelled call would interrupt a start in the
//! middle, and the container would run while the daemon considers it created. Each operation ends by itself,
//! because all its waits have limits.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::Future;
use std::rc::Rc;

use coracle_base::error::Error;
use coracle_base::reactor;
use coracle_sandbox::{ContainerId, PodId};
use event_listener::Event;
use smol::lock::OnceCell;

/// The key of an operation that identical requests share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Key {
    Start(ContainerId),
    RemoveContainer(ContainerId),
    StopPod(PodId),
    RemovePod(PodId),
    /// The first part of a removal, after which the pod may be listed. A request for a listed pod must not join it.
    RemoveUnread(PodId),
}

/// The result of an operation.
type Outcome = Rc<OnceCell<Result<(), Error>>>;

/// All operations on pods and containers in progress, which identical requests join.
#[derive(Default)]
pub struct Operations {
    shared: RefCell<HashMap<Key, Outcome>>,
    running: Cell<usize>,
    ended: Event,
}

impl Operations {
    /// Waits for the operation with this key; starts `work` as this operation if there is none.
    pub(crate) async fn share(
        self: &Rc<Self>,
        key: Key,
        work: impl Future<Output = Result<(), Error>> + 'static,
    ) -> Result<(), Error> {
        let under_way = self.shared.borrow().get(&key).cloned();
        let outcome = under_way.unwrap_or_else(|| {
            // Boxed, because each future around it would contain it twice.
            let work = Box::pin(work);
            let outcome = Outcome::default();
            self.shared.borrow_mut().insert(key, Rc::clone(&outcome));
            let (operations, told) = (Rc::clone(self), Rc::clone(&outcome));
            self.detach(async move {
                let result = work.await;
                operations.shared.borrow_mut().remove(&key);
                let _ = told.try_set(result);
            });
            outcome
        });
        outcome.wait().await.clone()
    }

    /// Whether an operation with this key is running.
    pub(crate) fn is_under_way(&self, key: Key) -> bool {
        self.shared.borrow().contains_key(&key)
    }

    /// Waits until the operation with this key has ended; returns at once if there is none.
    pub(crate) async fn ended(&self, key: Key) {
        let under_way = self.shared.borrow().get(&key).cloned();
        if let Some(outcome) = under_way {
            outcome.wait().await;
        }
    }

    /// Starts `work` as an operation without a key and waits for its end.
    pub(crate) async fn run(
        self: &Rc<Self>,
        work: impl Future<Output = Result<(), Error>> + 'static,
    ) -> Result<(), Error> {
        let outcome = Outcome::default();
        let (told, work) = (Rc::clone(&outcome), Box::pin(work));
        self.detach(async move {
            let _ = told.try_set(work.await);
        });
        outcome.wait().await.clone()
    }

    /// Starts `work` as an operation without waiting; `work` reports its result itself.
    pub(crate) fn detach(self: &Rc<Self>, work: impl Future<Output = ()> + 'static) {
        let running = Running::new(Rc::clone(self));
        reactor::spawn(async move {
            let _running = running;
            work.await;
        })
        .detach();
    }

    /// Waits until no operation is running.
    pub async fn none_left(&self) {
        loop {
            let ended = self.ended.listen(); // before the look: an end in between is not missed
            if self.running.get() == 0 {
                return;
            }
            ended.await;
        }
    }
}

/// A running operation in the counter; dropping the value decrements the counter, also when the daemon ends
/// before the operation.
struct Running(Rc<Operations>);

impl Running {
    fn new(operations: Rc<Operations>) -> Self {
        operations.running.set(operations.running.get() + 1);
        Self(operations)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.set(self.0.running.get() - 1);
        self.0.ended.notify(usize::MAX);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use coracle_base::error::Kind;

    const ID: ContainerId = ContainerId::from_bytes([3; 32]);

    /// Fails if the call awaits the operation's task directly: the test's counter then stays 0.
    #[test]
    fn an_operation_outlives_its_call_and_a_retry_joins_it() {
        reactor::run(async {
            let (operations, done) = (Rc::new(Operations::default()), Rc::new(Cell::new(0)));
            let work = || {
                let done = Rc::clone(&done);
                async move {
                    reactor::sleep(Duration::from_millis(20)).await;
                    done.set(done.get() + 1);
                    Err(Error::new(Kind::Unknown, "no such program"))
                }
            };
            let gone = operations.share(Key::Start(ID), work());
            assert!(reactor::deadline(Duration::from_millis(1), gone).await.is_err());
            let joined = operations.share(Key::Start(ID), work()).await;
            assert_eq!(joined.unwrap_err().message(), "no such program");
            assert_eq!(done.get(), 1);
            let gone = operations.run(work());
            assert!(reactor::deadline(Duration::from_millis(1), gone).await.is_err());
            operations.none_left().await;
            assert_eq!(done.get(), 2);
            // The operation has ended: the next request starts a new one.
            assert!(operations.share(Key::Start(ID), work()).await.is_err());
            assert_eq!(done.get(), 3);
        });
    }
}
