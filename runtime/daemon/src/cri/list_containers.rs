//! ListContainers and its stream (CRI 2.15). `image_id` equals Image.id, by which the kubelet's image garbage
//! collection finds images in use.

use std::rc::Rc;

use coracle_base::error::Error;
use coracle_engine::Container;
use smol::stream::Stream;

use super::container_status::{image_spec, state};
use super::{container_config, filter, pod_config};
use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn list_containers(
    daemon: Rc<Daemon>,
    request: v1::ListContainersRequest,
) -> Result<v1::ListContainersResponse, Error> {
    Ok(v1::ListContainersResponse { containers: matching(&daemon, request.filter) })
}

/// Handles the streaming variant of ListContainers, with messages of limited size.
pub(crate) async fn stream_containers(
    daemon: Rc<Daemon>,
    request: v1::StreamContainersRequest,
) -> Result<impl Stream<Item = Result<v1::StreamContainersResponse, Error>>, Error> {
    let items = matching(&daemon, request.filter);
    Ok(super::chunks(items, |containers| v1::StreamContainersResponse { containers }))
}

fn matching(daemon: &Daemon, wanted: Option<v1::ContainerFilter>) -> Vec<v1::Container> {
    let wanted = wanted.unwrap_or_default();
    let containers = daemon.pods.containers();
    let matching = containers.iter().filter(|container| {
        let record = container.record();
        filter::matches_id(&container.id, &wanted.id)
            && filter::matches_id(&container.pod.id, &wanted.pod_sandbox_id)
            && wanted.state.is_none_or(|wanted| wanted.state == i32::from(state(&record.state)))
            && filter::matches_labels(&record.spec.labels, &wanted.label_selector)
    });
    matching.map(|container| item(container)).collect()
}

fn item(container: &Container) -> v1::Container {
    let record = container.record();
    v1::Container {
        id: container.id.to_string(),
        pod_sandbox_id: container.pod.id.to_string(),
        metadata: Some(container_config::metadata(&record.spec.name)),
        image: Some(image_spec(&record)),
        image_ref: record.image.reference.clone(),
        state: state(&record.state).into(),
        created_at: record.created_at_ns,
        labels: pod_config::map(&record.spec.labels),
        annotations: pod_config::map(&record.spec.annotations),
        image_id: record.image.id.clone(),
    }
}
