//! ListPodSandbox and its stream (CRI 2.9). One of the two most frequent calls, the other being ListContainers; it uses only
//! memory, and each pod is encoded once for each change of its record.

use std::rc::Rc;

use coracle_base::error::Error;
use coracle_engine::Pod;
use coracle_engine::record::PodRecord;
use smol::stream::Stream;
use tonic::Response;

use super::pod_sandbox_status::state;
use super::{filter, pod_config};
use crate::daemon::Daemon;
use crate::rpc::{self, Items, v1};

pub(crate) async fn list_pod_sandbox(
    daemon: Rc<Daemon>,
    request: v1::ListPodSandboxRequest,
) -> Result<Response<v1::ListPodSandboxResponse>, Error> {
    let mut items = Items::new();
    for pod in matching(&daemon, request.filter) {
        items.push_encoded(&pod.listed(|record| rpc::encode_item(&item(record))));
    }
    items.respond()
}

/// Handles the streaming variant of ListPodSandbox, with messages of limited size (KEP of the streaming lists; clients fall
/// back to the unary call).
pub(crate) async fn stream_pod_sandboxes(
    daemon: Rc<Daemon>,
    request: v1::StreamPodSandboxesRequest,
) -> Result<impl Stream<Item = Result<v1::StreamPodSandboxesResponse, Error>>, Error> {
    let items = matching(&daemon, request.filter).iter().map(|pod| item(&pod.record())).collect();
    Ok(super::chunks(items, |pod_sandboxes| v1::StreamPodSandboxesResponse { pod_sandboxes }))
}

fn matching(daemon: &Daemon, wanted: Option<v1::PodSandboxFilter>) -> Vec<Rc<Pod>> {
    let wanted = wanted.unwrap_or_default();
    let mut pods = daemon.pods.pods_by_id(&wanted.id);
    pods.retain(|pod| {
        let record = pod.record();
        wanted.state.is_none_or(|wanted| wanted.state == i32::from(state(&record)))
            && filter::matches_labels(&record.spec.labels, &wanted.label_selector)
    });
    pods
}

/// Depends on nothing but the record: its encoded form is kept until the record changes.
fn item(record: &PodRecord) -> v1::PodSandbox {
    v1::PodSandbox {
        id: record.id.to_string(),
        metadata: Some(pod_config::metadata(&record.spec.name)),
        state: state(record).into(),
        created_at: record.created_at_ns,
        labels: pod_config::map(&record.spec.labels),
        annotations: pod_config::map(&record.spec.annotations),
        runtime_handler: record.spec.runtime_handler.clone(),
    }
}
