//! UpdateRuntimeConfig (CRI 2.4): stores the node's pod CIDR durably; CNI plugins with the capability
//! `ipRanges` receive it.

use std::rc::Rc;

use coracle_base::error::Error;

use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn update_runtime_config(
    daemon: Rc<Daemon>,
    request: v1::UpdateRuntimeConfigRequest,
) -> Result<v1::UpdateRuntimeConfigResponse, Error> {
    let network = request.runtime_config.and_then(|config| config.network_config).unwrap_or_default();
    if !network.pod_cidr.is_empty() {
        daemon.set_pod_cidr(&network.pod_cidr)?;
    }
    Ok(v1::UpdateRuntimeConfigResponse {})
}
