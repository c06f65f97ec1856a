//! StartContainer (CRI 2.11): returns when the program was executed, or with the reason of the failure, in which case the
//! container is EXITED with reason StartError.

use std::rc::Rc;

use coracle_base::error::Error;

use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn start_container(
    daemon: Rc<Daemon>,
    request: v1::StartContainerRequest,
) -> Result<v1::StartContainerResponse, Error> {
    let container = daemon.pods.container(&request.container_id)?;
    container.start().await?;
    Ok(v1::StartContainerResponse {})
}
