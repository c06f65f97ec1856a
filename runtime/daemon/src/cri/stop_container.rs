//! StopContainer (CRI 2.12): signal, grace, SIGKILL; returns when the container is EXITED. The schedule goes on
//! without its caller; an unknown id is success.

use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::Error;

use super::unknown_is_done;
use crate::daemon::Daemon;
use crate::rpc::v1;

/// Longest grace that is taken as it comes (a hundred years): beyond it clocks overflow.
const GRACE_SECONDS_MAX: i64 = 100 * 366 * 24 * 3600;

pub(crate) async fn stop_container(
    daemon: Rc<Daemon>,
    request: v1::StopContainerRequest,
) -> Result<v1::StopContainerResponse, Error> {
    // Zero and less: kill now.
    let seconds = u64::try_from(request.timeout.clamp(0, GRACE_SECONDS_MAX)).unwrap_or(0);
    if let Some(container) = unknown_is_done(daemon.pods.container(&request.container_id))? {
        daemon.pods.stop_container(container, Duration::from_secs(seconds)).await?;
    }
    Ok(v1::StopContainerResponse {})
}
