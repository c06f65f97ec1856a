//! GetContainerEvents (CRI 2.19): every change of a pod or container after the call, with the statuses of
//! that moment, for the kubelet's evented PLEG. Earlier events are not repeated.
//!
//! Steps: the engine calls a listener at each change → conversion, immediately → one bounded queue per client
//! → stream. A client that reads too slowly gets an error and is disconnected; it must list all pods and call
//! again.

use std::cell::Cell;
use std::rc::Rc;

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_engine::Pod;
use coracle_engine::notices::{ChangeKind, Notice};
use prost::Message;
use smol::channel::TrySendError;
use smol::stream::{Stream, StreamExt};

use super::{container_status, pod_sandbox_status};
use crate::daemon::Daemon;
use crate::rpc::v1;

/// Maximum number of queued events of one client: several times the number of events if all pods of a full node change.
const EVENTS_MAX: usize = 1000;
/// Maximum size in bytes of the queued events of one client: each event contains the pod's annotations, which may be long.
const EVENTS_BYTES_MAX: usize = 4 << 20;
/// Maximum number of clients of this call; a node has one kubelet.
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
                log::warn!("event client reads too slowly, disconnected"; waiting = sender.len());
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
    // The stream ends with the queue; if the client was too slow, with an error.
    let last = smol::stream::once(()).filter_map(move |()| {
        let text = "the client reads events too slowly, and some were dropped: list containers again";
        let error = || Error::new(Kind::ResourceExhausted, text);
        fell_behind.get().then(|| Err(error()))
    });
    Ok(receiver.map(Ok).chain(last))
}

fn event(daemon: &Daemon, notice: &Notice<'_, Pod>) -> v1::ContainerEventResponse {
    let kind = match notice.kind {
        ChangeKind::Created => v1::ContainerEventType::ContainerCreatedEvent,
        ChangeKind::Started => v1::ContainerEventType::ContainerStartedEvent,
        ChangeKind::Stopped => v1::ContainerEventType::ContainerStoppedEvent,
        ChangeKind::Deleted => v1::ContainerEventType::ContainerDeletedEvent,
    };
    let containers = daemon.pods.listed_containers_of(notice.pod.id);
    v1::ContainerEventResponse {
        container_id: notice.id.clone(),
        container_event_type: kind.into(),
        created_at: notice.at_ns,
        pod_sandbox_status: Some(pod_sandbox_status::status(notice.pod)),
        containers_statuses: containers.iter().map(|container| container_status::status(container)).collect(),
    }
}
