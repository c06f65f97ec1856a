//! RemovePodSandbox (CRI 2.7): stops the pod if necessary, removes all containers, then the record. Log files
//! are kept, because the kubelet owns them. An unknown ID is not an error.

use std::rc::Rc;

use coracle_base::error::Error;

use super::unknown_is_done;
use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn remove_pod_sandbox(
    daemon: Rc<Daemon>,
    request: v1::RemovePodSandboxRequest,
) -> Result<v1::RemovePodSandboxResponse, Error> {
    daemon.pods.remove_unread(&request.pod_sandbox_id).await?;
    if let Some(pod) = unknown_is_done(daemon.pods.pod(&request.pod_sandbox_id))? {
        pod.remove().await?;
    }
    Ok(v1::RemovePodSandboxResponse {})
}
