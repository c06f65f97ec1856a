//! RemovePodSandbox (CRI 2.7): a full stop where there was none, every container, then the record. Log files
//! stay: the kubelet owns them. An unknown id is success.

use std::rc::Rc;

use coracle_base::error::Error;

use super::unknown_is_done;
use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn remove_pod_sandbox(
    daemon: Rc<Daemon>,
    request: v1::RemovePodSandboxRequest,
) -> Result<v1::RemovePodSandboxResponse, Error> {
    if let Some(pod) = unknown_is_done(daemon.pods.pod(&request.pod_sandbox_id))? {
        daemon.pods.remove_pod(pod).await?;
    }
    Ok(v1::RemovePodSandboxResponse {})
}
