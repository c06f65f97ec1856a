//! ListContainers and its stream (CRI 2.15). Each container is encoded once for each change of its record. `image_id` equals Image.id, by which the kubelet's image garbage
//! collection finds images in use.

use std::rc::Rc;

use coracle_base::error::Error;
use coracle_engine::Container;
use coracle_engine::record::ContainerRecord;
use smol::stream::Stream;
use tonic::Response;

use super::container_status::{image_spec, state};
use super::{container_config, filter, pod_config};
use crate::daemon::Daemon;
use crate::rpc::{self, Items, v1};

pub(crate) async fn list_containers(
    daemon: Rc<Daemon>,
    request: v1::ListContainersRequest,
) -> Result<Response<v1::ListContainersResponse>, Error> {
    let mut items = Items::new();
    for container in matching(&daemon, request.filter) {
        let encode = |record: &ContainerRecord| rpc::encode_item(&item(&container, record));
        items.push_encoded(&container.listed(encode));
    }
    items.respond()
}

/// Handles the streaming variant of ListContainers, with messages of limited size.
pub(crate) async fn stream_containers(
    daemon: Rc<Daemon>,
    request: v1::StreamContainersRequest,
) -> Result<impl Stream<Item = Result<v1::StreamContainersResponse, Error>>, Error> {
    let containers = matching(&daemon, request.filter);
    let items = containers.iter().map(|container| item(container, &container.record())).collect();
    Ok(super::chunks(items, |containers| v1::StreamContainersResponse { containers }))
}

fn matching(daemon: &Daemon, wanted: Option<v1::ContainerFilter>) -> Vec<Rc<Container>> {
    let wanted = wanted.unwrap_or_default();
    let mut containers = daemon.pods.containers_by_id(&wanted.id, &wanted.pod_sandbox_id);
    containers.retain(|container| {
        let record = container.record();
        wanted.state.is_none_or(|wanted| wanted.state == i32::from(state(&record.state)))
            && filter::matches_labels(&record.spec.labels, &wanted.label_selector)
    });
    containers
}

/// Depends on nothing but the record and the IDs: its encoded form is kept until the record changes.
fn item(container: &Container, record: &ContainerRecord) -> v1::Container {
    v1::Container {
        id: container.id.to_string(),
        pod_sandbox_id: container.pod.id.to_string(),
        metadata: Some(container_config::metadata(&record.spec.name)),
        image: Some(image_spec(record)),
        image_ref: record.image.reference.clone(),
        state: state(&record.state).into(),
        created_at: record.created_at_ns,
        labels: pod_config::map(&record.spec.labels),
        annotations: pod_config::map(&record.spec.annotations),
        image_id: record.image.id.clone(),
    }
}
