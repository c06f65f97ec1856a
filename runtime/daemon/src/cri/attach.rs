//! Attach: returns the URL for the streams of a container's main process.
//!
//! The steps are those of `exec`. The container determines whether there is a terminal; the value in the request only
//! determines the layout of the streams.

use std::rc::Rc;

use coracle_base::error::Error;
use coracle_engine::streams::require_running;

use super::exec::wanted;
use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn attach(
    daemon: Rc<Daemon>,
    request: v1::AttachRequest,
) -> Result<v1::AttachResponse, Error> {
    let wanted = wanted(request.stdin, request.stdout, request.stderr, request.tty)?;
    let container = daemon.pods.container(&request.container_id)?;
    require_running(&container)?;
    Ok(v1::AttachResponse {
        url: daemon.streams.url(coracle_streaming::Request::Attach { container, wanted })?,
    })
}
