//! GetContainerEvents (CRI 2.19): every change of a pod or container, with the statuses as they were then, for the
//! kubelet's evented PLEG. No replay: from the call on.
//!
//! Table: `pod` calls at each change → translated here, at once → one bounded queue a client → stream. A client that does
//! not keep up is told so and cut off; it lists anew and calls again.

use std::cell::Cell;
use std::rc::Rc;

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_engine::notices::{Happened, Notice};
use prost::Message;
use smol::channel::TrySendError;
use smol::stream::{Stream, StreamExt};

use super::{container_status, pod_sandbox_status};
use crate::daemon::Daemon;
use crate::rpc::v1;

/// Events that wait for one client: a node full of pods that all change at once, several times.
const EVENTS_MAX: usize = 1000;
/// And their bytes: a pod's annotations may be long, and come with each of its events.
const EVENTS_BYTES_MAX: usize = 4 << 20;
/// Clients at once; a node has one kubelet.
const CLIENTS_MAX: usize = 16;

pub(crate) async fn get_container_events(
    daemon: Rc<Daemon>,
    _: v1::GetEventsRequest,
) -> Result<impl Stream<Item = Result<v1::ContainerEventResponse, Error>>, Error> {
    if daemon.pods.listeners() >= CLIENTS_MAX {
        let text = format!("{CLIENTS_MAX} clients listen for events already");
        return Err(Error::new(Kind::ResourceExhausted, text));
    }
    let (sender, receiver) = smol::channel::bounded(EVENTS_MAX);
    let fell_behind = Rc::new(Cell::new(false));
    let waiting_bytes = Rc::new(Cell::new(0));
    let (weak, behind, waiting) =
        (Rc::downgrade(&daemon), Rc::clone(&fell_behind), Rc::clone(&waiting_bytes));
    daemon.pods.listen(Box::new(move |notice| {
        let Some(daemon) = weak.upgrade() else { return false };
        let event = event(&daemon, notice);
        let bytes = waiting.get() + event.encoded_len();
        let sent = match bytes <= EVENTS_BYTES_MAX {
            true => sender.try_send(event),
            false => Err(TrySendError::Full(event)),
        };
        match sent {
            Ok(()) => {
                waiting.set(bytes);
                true
            }
            Err(TrySendError::Closed(_)) => false,
            Err(TrySendError::Full(_)) => {
                log::warn!("a client of events falls behind and is cut off"; waiting = sender.len());
                behind.set(true);
                sender.close();
                false
            }
        }
    }));
    let receiver = receiver.map(move |event: v1::ContainerEventResponse| {
        waiting_bytes.set(waiting_bytes.get().saturating_sub(event.encoded_len()));
        event
    });
    // The end of the queue is the end of the stream: with a word on why, where the client is the reason.
    let last = smol::stream::once(()).filter_map(move |()| {
        let error = || Error::new(Kind::ResourceExhausted, "more events wait than are kept: list anew");
        fell_behind.get().then(|| Err(error()))
    });
    Ok(receiver.map(Ok).chain(last))
}

fn event(daemon: &Daemon, notice: &Notice<'_>) -> v1::ContainerEventResponse {
    let kind = match notice.happened {
        Happened::Created => v1::ContainerEventType::ContainerCreatedEvent,
        Happened::Started => v1::ContainerEventType::ContainerStartedEvent,
        Happened::Stopped => v1::ContainerEventType::ContainerStoppedEvent,
        Happened::Deleted => v1::ContainerEventType::ContainerDeletedEvent,
    };
    let containers = daemon.pods.containers();
    let of_pod = containers.iter().filter(|container| container.pod.id == notice.pod.id);
    v1::ContainerEventResponse {
        container_id: notice.id.clone(),
        container_event_type: kind.into(),
        created_at: notice.at_ns,
        pod_sandbox_status: Some(pod_sandbox_status::status(notice.pod)),
        containers_statuses: of_pod.map(|container| container_status::status(container)).collect(),
    }
}
