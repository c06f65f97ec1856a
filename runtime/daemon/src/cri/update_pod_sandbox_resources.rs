//! UpdatePodSandboxResources (CRI 2.26). The kubelet calls it after it has changed the pod's cgroup, so the
//! values are stored and the cgroup is not written.

use std::rc::Rc;

use coracle_base::error::Error;

use super::container_config::resources;
use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn update_pod_sandbox_resources(
    daemon: Rc<Daemon>,
    request: v1::UpdatePodSandboxResourcesRequest,
) -> Result<v1::UpdatePodSandboxResourcesResponse, Error> {
    let pod = daemon.pods.pod(&request.pod_sandbox_id)?;
    pod.update(request.overhead.map(resources), request.resources.map(resources)).await?;
    Ok(v1::UpdatePodSandboxResourcesResponse {})
}
