//! ListPodSandbox (CRI section 2.9). With ListContainers the hottest call of all: memory only.

use std::rc::Rc;

use super::pod_sandbox_status::state;
use super::{filter, pod_config};
use crate::daemon::Daemon;
use crate::error::Error;
use crate::pod::Pod;
use crate::rpc::v1;

pub(crate) async fn list_pod_sandbox(
    daemon: Rc<Daemon>,
    request: v1::ListPodSandboxRequest,
) -> Result<v1::ListPodSandboxResponse, Error> {
    let wanted = request.filter.unwrap_or_default();
    let pods = daemon.pods.pods();
    let matching = pods.iter().filter(|pod| {
        filter::matches_id(&pod.id, &wanted.id)
            && wanted.state.is_none_or(|wanted| wanted.state == i32::from(state(pod)))
            && filter::matches_labels(&pod.record().spec.labels, &wanted.label_selector)
    });
    Ok(v1::ListPodSandboxResponse { items: matching.map(|pod| item(pod)).collect() })
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
