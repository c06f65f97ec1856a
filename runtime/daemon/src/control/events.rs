//! `coracle events`: changes of pods and containers for clients of the control socket. All clients share one listener of the
//! engine, and do not count against the limit of the CRI's event streams, which kubelets need.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use coracle_control::Event;
use coracle_engine::notices::{ChangeKind, Notice};
use coracle_engine::{Pod, Pods};
use smol::channel::{Receiver, Sender};

/// Maximum number of events that a client has not read; a client that has more is disconnected.
const EVENTS_MAX: usize = 256;

/// The clients that receive events.
#[derive(Debug, Default)]
pub(super) struct Watchers {
    clients: RefCell<Vec<Sender<Event>>>,
    is_listening: Cell<bool>,
}

impl Watchers {
    /// A channel with all later events, which is closed when the client has too many unread events.
    pub(super) fn add(self: &Rc<Self>, pods: &Pods) -> Receiver<Event> {
        if !self.is_listening.replace(true) {
            let watchers = Rc::clone(self);
            pods.listen(Box::new(move |notice| watchers.tell(notice)));
        }
        let (sender, receiver) = smol::channel::bounded(EVENTS_MAX);
        let mut clients = self.clients.borrow_mut();
        clients.retain(|client| !client.is_closed());
        clients.push(sender);
        receiver
    }

    /// Sends an event to all clients; returns whether there are clients left.
    fn tell(&self, notice: &Notice<'_, Pod>) -> bool {
        let mut clients = self.clients.borrow_mut();
        if !clients.is_empty() {
            let event = event(notice);
            // One whose queue is full is dropped, which closes its channel.
            clients.retain(|client| client.try_send(event.clone()).is_ok());
        }
        self.is_listening.set(!clients.is_empty());
        self.is_listening.get()
    }
}

fn event(notice: &Notice<'_, Pod>) -> Event {
    let record = notice.pod.record();
    Event {
        at_ns: notice.at_ns,
        happened: word(notice.kind).to_owned(),
        id: notice.id.clone(),
        name: notice.container.to_owned(),
        pod_id: notice.pod.id.to_string(),
        pod_name: record.spec.name.name.clone(),
        namespace: record.spec.name.namespace.clone(),
    }
}

/// The CRI's type of an event in lower case.
fn word(kind: ChangeKind) -> &'static str {
    match kind {
        ChangeKind::Created => "created",
        ChangeKind::Started => "started",
        ChangeKind::Stopped => "stopped",
        ChangeKind::Deleted => "deleted",
    }
}
