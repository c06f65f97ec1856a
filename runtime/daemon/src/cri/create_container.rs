//! CreateContainer (CRI 2.10).
//!
//! | # | where | action | error | remaining objects |
//! |---|---|---|---|---|
//! | 1 | this module | validates, finds the sandbox | INVALID_ARGUMENT names the field; NOT_FOUND | nothing |
//! | 2 | `pod::container` `create_container` | reserves the name, joins an identical call | ALREADY_EXISTS | a name |
//! | 3 | `resolve` | image, user, capabilities, mounts, limits | NOT_FOUND image; INVALID_ARGUMENT | nothing |
//! | 4 | `make_container` | record, layer directories, cgroup, launch record | names operation, path, errno | recorded objects |

use std::rc::Rc;

use coracle_base::error::{Error, Kind};

use super::pod_config::missing;
use super::{container_config, handler_defaults};
use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn create_container(
    daemon: Rc<Daemon>,
    request: v1::CreateContainerRequest,
) -> Result<v1::CreateContainerResponse, Error> {
    let config = request.config.ok_or_else(|| missing("config"))?;
    let pod = daemon.pods.pod(&request.pod_sandbox_id)?;
    let mut spec = container_config::container_spec(config)?;
    handler_defaults::apply(
        &mut spec,
        &pod.record().spec.runtime_handler,
        &daemon.reloadable.runtime_handlers.borrow(),
    );
    // The pod's configuration as it is now counts, as with containerd: a debug container may be the first privileged one
    // of a pod (`kubectl debug --profile=sysadmin`), and the kubelet then says so here.
    let of_pod = request.sandbox_config.and_then(|config| config.linux?.security_context);
    let is_allowed = pod.record().spec.privileged || of_pod.is_some_and(|context| context.privileged);
    if spec.security.privileged && !is_allowed {
        let text = "config.linux.security_context.privileged: the pod sandbox is not privileged";
        return Err(Error::new(Kind::InvalidArgument, text));
    }
    let id = pod.create_container(spec).await?;
    Ok(v1::CreateContainerResponse { container_id: id.to_string() })
}
