//! PortForward: returns the URL for connections into a pod, to any port.
//!
//! Steps: this module validates ID and ports, the sandbox must be READY → `streaming` stores the request with a token → reply.

use std::rc::Rc;

use coracle_base::error::{Error, Kind};

use super::pod_config::invalid;
use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn port_forward(
    daemon: Rc<Daemon>,
    request: v1::PortForwardRequest,
) -> Result<v1::PortForwardResponse, Error> {
    let port = |port: &i32| {
        u16::try_from(*port)
            .ok()
            .filter(|port| *port > 0)
            .ok_or_else(|| invalid("port", &format!("{port} is not between 1 and 65535")))
    };
    let ports = request.port.iter().map(port).collect::<Result<Vec<u16>, Error>>()?;
    let pod = daemon.pods.pod(&request.pod_sandbox_id)?;
    if !pod.record().state.is_ready() {
        let text = format!("pod sandbox {:.13} is {}", pod.id, pod.record().state.name());
        return Err(Error::new(Kind::FailedPrecondition, text));
    }
    Ok(v1::PortForwardResponse {
        url: daemon.streams.url(coracle_streaming::Request::Forward { pod, ports })?,
    })
}
