//! RunPodSandbox (CRI 2.5).
//!
//! | # | where | action | error | remaining objects |
//! |---|---|---|---|---|
//! | 1 | this module | validates, resolves the handler | INVALID_ARGUMENT, names the field | nothing |
//! | 2 | `Pods::run` | reserves the name, joins an identical call | ALREADY_EXISTS, names the other pod | a name |
//! | 3 | `Pod::prepare` | intent record, directories | RESOURCE_EXHAUSTED on a full disk | files |
//! | 4 | `Pod::make` | cgroup, monitor, netns, CNI | names operation, target, errno; plugin and its message | recorded objects |
//! | 5 | `Pod::change` | Creating to Ready, committed; the reply | as 3 | – |

use std::rc::Rc;

use coracle_base::error::{Error, Kind};

use super::{handler_defaults, pod_config};
use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn run_pod_sandbox(
    daemon: Rc<Daemon>,
    request: v1::RunPodSandboxRequest,
) -> Result<v1::RunPodSandboxResponse, Error> {
    let handler = &request.runtime_handler;
    if !handler.is_empty() && !daemon.reloadable.runtime_handlers.borrow().aliases.contains(handler) {
        let text = format!(
            "runtime_handler: no runtime for {handler:?} is configured: [runtime_handlers] aliases has the names that \
             mean this runtime"
        );
        return Err(Error::new(Kind::InvalidArgument, text));
    }
    let config = request.config.ok_or_else(|| pod_config::missing("config"))?;
    let mut spec = pod_config::pod_spec(config, request.runtime_handler)?;
    handler_defaults::annotate(
        &mut spec.annotations,
        &spec.runtime_handler,
        &daemon.reloadable.runtime_handlers.borrow(),
    );
    let id = daemon.pods.run(spec).await?;
    Ok(v1::RunPodSandboxResponse { pod_sandbox_id: id.to_string() })
}
