//! StopPodSandbox (CRI 2.6): kills all containers, then removes network and namespaces. Idempotent; an
//! unknown ID is not an error.

use std::rc::Rc;

use coracle_base::error::Error;

use super::unknown_is_done;
use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn stop_pod_sandbox(
    daemon: Rc<Daemon>,
    request: v1::StopPodSandboxRequest,
) -> Result<v1::StopPodSandboxResponse, Error> {
    if let Some(pod) = unknown_is_done(daemon.pods.pod(&request.pod_sandbox_id))? {
        pod.stop().await?;
    }
    Ok(v1::StopPodSandboxResponse {})
}
