//! StopContainer (CRI 2.12): signal, grace period, SIGKILL; returns when the container is EXITED. The stop
//! continues if its caller disconnects; an unknown ID is not an error.

use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::Error;

use super::unknown_is_done;
use crate::daemon::Daemon;
use crate::rpc::v1;

/// Maximum grace period in seconds, a hundred years: clocks would overflow with a longer one.
const GRACE_SECONDS_MAX: i64 = 100 * 366 * 24 * 3600;

pub(crate) async fn stop_container(
    daemon: Rc<Daemon>,
    request: v1::StopContainerRequest,
) -> Result<v1::StopContainerResponse, Error> {
    // Zero and negative values mean SIGKILL immediately.
    let seconds = u64::try_from(request.timeout.clamp(0, GRACE_SECONDS_MAX)).unwrap_or(0);
    if let Some(container) = unknown_is_done(daemon.pods.container(&request.container_id))? {
        container.stop(Duration::from_secs(seconds)).await?;
    }
    Ok(v1::StopContainerResponse {})
}
