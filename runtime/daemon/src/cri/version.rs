//! The Version RPC.

use std::rc::Rc;

use coracle_base::error::Error;

use crate::daemon::Daemon;
use crate::rpc::v1;

/// The only version of the kubelet's runtime API that a kubelet accepts (SKEW-6).
const KUBELET_API_VERSION: &str = "0.1.0";

/// Handles Version. The version in the request is ignored, because kubelets send a constant.
pub(crate) async fn version(_: Rc<Daemon>, _: v1::VersionRequest) -> Result<v1::VersionResponse, Error> {
    Ok(v1::VersionResponse {
        version: KUBELET_API_VERSION.into(),
        runtime_name: "coracle".into(),
        runtime_version: env!("CARGO_PKG_VERSION").into(),
        runtime_api_version: "v1".into(),
    })
}
