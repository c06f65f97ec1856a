//! UpdateRuntimeConfig (CRI 2.4): the node's pod CIDR, kept durably and handed to CNI plugins that ask for
//! `ipRanges`.

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
