//! UpdateContainerResources (CRI 2.16), used for in-place resize and by the CPU and memory managers. Zero and empty values
//! leave a field unchanged; a created container starts with the new values.
//!
//! Steps: this module validates ID and resources → the engine merges, applies all or nothing, commits → reply. Annotations are
//! hints, which coracle ignores.

use std::rc::Rc;

use coracle_base::error::Error;

use super::container_config::resources;
use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn update_container_resources(
    daemon: Rc<Daemon>,
    request: v1::UpdateContainerResourcesRequest,
) -> Result<v1::UpdateContainerResourcesResponse, Error> {
    let container = daemon.pods.container(&request.container_id)?;
    if let Some(linux) = request.linux {
        container.update(resources(linux)).await?;
    }
    Ok(v1::UpdateContainerResourcesResponse {})
}
