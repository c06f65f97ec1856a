//! ReopenContainerLog (CRI 2.17): after the answer all lines are written to the new file.

use std::rc::Rc;

use coracle_base::error::Error;

use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn reopen_container_log(
    daemon: Rc<Daemon>,
    request: v1::ReopenContainerLogRequest,
) -> Result<v1::ReopenContainerLogResponse, Error> {
    let container = daemon.pods.container(&request.container_id)?;
    container.reopen_log().await?;
    Ok(v1::ReopenContainerLogResponse {})
}
