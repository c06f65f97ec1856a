//! CreateContainer (CRI 2.10).
//!
//! | # | where | action | error | remaining objects |
//! |---|---|---|---|---|
//! | 1 | this module | validates, finds the sandbox | INVALID_ARGUMENT names the field; NOT_FOUND | nothing |
//! | 2 | `Pod::create_container` | reserves the name, joins an identical call | ALREADY_EXISTS | a name |
//! | 3 | `Pod::resolve` | image, user, capabilities, mounts, limits | NOT_FOUND image; INVALID_ARGUMENT | nothing |
//! | 4 | `Container::make_objects` | record, directories, cgroup, plan of the launch | names operation, path, errno | recorded objects |

use std::rc::Rc;

use coracle_base::error::{Error, Kind};
use coracle_engine::spec::UserNamespace;

use super::pod_config::{missing, user_namespace};
use super::{container_config, handler_defaults};
use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn create_container(
    daemon: Rc<Daemon>,
    request: v1::CreateContainerRequest,
) -> Result<v1::CreateContainerResponse, Error> {
    let config = request.config.ok_or_else(|| missing("config"))?;
    let pod = daemon.pods.pod(&request.pod_sandbox_id)?;
    refuse_other_user_namespace(&config, pod.record().spec.user_namespace.as_ref())?;
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

/// Refuses a container that asks for another user namespace than its pod's: it would run as other users of the node than asked
/// for. So does containerd 2.4 (internal/cri/server/container_create.go, `sameUsernsConfig`). Without a request it gets its pod's.
fn refuse_other_user_namespace(
    config: &v1::ContainerConfig,
    of_pod: Option<&UserNamespace>,
) -> Result<(), Error> {
    let field = "config.linux.security_context.namespace_options.userns_options";
    let context = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    let options = context.and_then(|context| context.namespace_options.as_ref());
    let asked = user_namespace(field, options.and_then(|options| options.userns_options.as_ref()))?;
    match asked {
        Some(asked) if Some(&asked) != of_pod => {
            let text = format!("{field}: is not the user namespace of the pod sandbox");
            Err(Error::new(Kind::InvalidArgument, text))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_has_the_user_namespace_of_its_pod_or_is_refused() {
        let config = |host_id: Option<u32>| {
            let mapping = |host_id| vec![v1::IdMapping { container_id: 0, host_id, length: 65_536 }];
            let userns_options = host_id.map(|host_id| v1::UserNamespace {
                mode: v1::NamespaceMode::Pod.into(),
                uids: mapping(host_id),
                gids: mapping(host_id),
            });
            let namespace_options = Some(v1::NamespaceOption { userns_options, ..Default::default() });
            let security_context =
                Some(v1::LinuxContainerSecurityContext { namespace_options, ..Default::default() });
            let linux = Some(v1::LinuxContainerConfig { security_context, ..Default::default() });
            v1::ContainerConfig { linux, ..Default::default() }
        };
        let namespace = |host_id: u32| {
            let mapping = vec![coracle_engine::spec::IdMapping { container_id: 0, host_id, length: 65_536 }];
            UserNamespace { uids: mapping.clone(), gids: mapping }
        };
        for (asked, of_pod, is_accepted) in [
            (None, None, true),
            (None, Some(100_000), true),
            (Some(100_000), Some(100_000), true),
            (Some(200_000), Some(100_000), false),
            (Some(100_000), None, false),
        ] {
            let answer = refuse_other_user_namespace(&config(asked), of_pod.map(namespace).as_ref());
            assert_eq!(answer.is_ok(), is_accepted, "{asked:?} in a pod with {of_pod:?}: {answer:?}");
        }
    }
}
