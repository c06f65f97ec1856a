//! RemoveContainer (CRI 2.13): kills a running container; its log is kept. An unknown ID is not an error.

use std::rc::Rc;

use coracle_base::error::Error;

use super::unknown_is_done;
use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn remove_container(
    daemon: Rc<Daemon>,
    request: v1::RemoveContainerRequest,
) -> Result<v1::RemoveContainerResponse, Error> {
    if let Some(container) = unknown_is_done(daemon.pods.container(&request.container_id))? {
        container.remove().await?;
    }
    Ok(v1::RemoveContainerResponse {})
}
