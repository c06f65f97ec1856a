//! ListPodSandbox and its stream (CRI 2.9). One of the two most frequent calls, the other being ListContainers; it uses only
//! memory.

use std::rc::Rc;

use coracle_base::error::Error;
use coracle_engine::Pod;
use smol::stream::Stream;

use super::pod_sandbox_status::state;
use super::{filter, pod_config};
use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn list_pod_sandbox(
    daemon: Rc<Daemon>,
    request: v1::ListPodSandboxRequest,
) -> Result<v1::ListPodSandboxResponse, Error> {
    Ok(v1::ListPodSandboxResponse { items: matching(&daemon, request.filter) })
}

/// Handles the streaming variant of ListPodSandbox, with messages of limited size (KEP of the streaming lists; clients fall
/// back to the unary call).
pub(crate) async fn stream_pod_sandboxes(
    daemon: Rc<Daemon>,
    request: v1::StreamPodSandboxesRequest,
) -> Result<impl Stream<Item = Result<v1::StreamPodSandboxesResponse, Error>>, Error> {
    let items = matching(&daemon, request.filter);
    Ok(super::chunks(items, |pod_sandboxes| v1::StreamPodSandboxesResponse { pod_sandboxes }))
}

fn matching(daemon: &Daemon, wanted: Option<v1::PodSandboxFilter>) -> Vec<v1::PodSandbox> {
    let wanted = wanted.unwrap_or_default();
    let pods = daemon.pods.pods();
    let matching = pods.iter().filter(|pod| {
        filter::matches_id(&pod.id, &wanted.id)
            && wanted.state.is_none_or(|wanted| wanted.state == i32::from(state(pod)))
            && filter::matches_labels(&pod.record().spec.labels, &wanted.label_selector)
    });
    matching.map(|pod| item(pod)).collect()
}

fn item(pod: &Pod) -> v1::PodSandbox {
    let record = pod.record();
    v1::PodSandbox {
        id: pod.id.to_string(),
        metadata: Some(pod_config::metadata(&record.spec.name)),
        state: state(pod).into(),
        created_at: record.created_at_ns,
        labels: pod_config::map(&record.spec.labels),
        annotations: pod_config::map(&record.spec.annotations),
        runtime_handler: record.spec.runtime_handler.clone(),
    }
}
