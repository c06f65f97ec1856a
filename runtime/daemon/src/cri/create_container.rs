//! CreateContainer (CRI 2.10).
//!
//! | # | where | does | failure reads | leaves behind |
//! |---|---|---|---|---|
//! | 1 | here | validates, finds the sandbox | INVALID_ARGUMENT names the field; NOT_FOUND | nothing |
//! | 2 | `pod::container` `create_container` | reserves the name, joins an identical call | ALREADY_EXISTS | a name |
//! | 3 | `resolve` | image, identity, capabilities, mounts, limits | NOT_FOUND image; INVALID_ARGUMENT | nothing |
//! | 4 | `make_container` | record, layer directories, cgroup, launch record | names op, path, errno | recorded objects |

use std::rc::Rc;

use coracle_base::error::Error;

use super::container_config;
use super::pod_config::missing;
use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn create_container(
    daemon: Rc<Daemon>,
    request: v1::CreateContainerRequest,
) -> Result<v1::CreateContainerResponse, Error> {
    let config = request.config.ok_or_else(|| missing("config"))?;
    let pod = daemon.pods.pod(&request.pod_sandbox_id)?;
    let spec = container_config::container_spec(config)?;
    let id = daemon.pods.create_container(pod, spec).await?;
    Ok(v1::CreateContainerResponse { container_id: id.to_string() })
}
