//! Status (CRI 2.2). The conditions RuntimeReady and NetworkReady determine whether the node is ready; further conditions
//! report damaged records, a full or read-only root, invalid registry configuration files, images that the policy would refuse,
//! and problems of AppArmor and SELinux. The kubelet calls it every 5 s, so it is answered from memory, except for one statvfs(2).

use std::collections::HashMap;
use std::rc::Rc;

use coracle_base::error::Error;
use coracle_base::store;
use coracle_base::time::rfc3339;
use coracle_control::Configuration;
use coracle_sandbox::describe_errno;
use nix::sys::statvfs::{FsFlags, statvfs};
use serde_json::json;

use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn status(
    daemon: Rc<Daemon>,
    request: v1::StatusRequest,
) -> Result<v1::StatusResponse, Error> {
    let network = daemon.network().ready();
    // Calls are served only after recovery is complete, so the runtime is ready.
    let mut conditions = vec![
        condition("RuntimeReady", Ok(())),
        condition("NetworkReady", network.clone().map_err(|message| ("NetworkPluginNotReady", message))),
    ];
    let has_user_namespaces = daemon.pods.node().kernel.user_namespaces.is_ok();
    conditions.push(condition("StoreHealthy", store_healthy(&daemon)));
    conditions.push(condition("RootWritable", root_writable(&daemon)));
    let known = daemon.pods.unknown().map_or(Ok(()), |(count, first)| {
        let text = format!("{count} pods are not wholly known since the start, and are tried again: {first}");
        Err(("NotWhollyKnown", text))
    });
    conditions.push(condition("PodsRecovered", known));
    let trouble = daemon.images.registries_trouble();
    let readable = trouble.map_or(Ok(()), |message| Err(("BrokenFile", message)));
    conditions.push(condition("RegistriesReadable", readable));
    if daemon.images.has_policy() {
        let trouble = daemon.images.policy_trouble();
        conditions.push(condition("ImagesAccepted", trouble.map_or(Ok(()), Err)));
    }
    conditions.push(configuration_applied(&daemon.reloadable.loaded.borrow()));
    conditions.extend(pods_need_restart(daemon.pods.outdated()));
    let trouble = daemon.pods.node().kernel.modules.trouble();
    conditions.push(condition("SecurityModulesReady", trouble.map_or(Ok(()), Err)));
    let served = daemon.cadvisor_served();
    conditions.extend(served.map(cadvisor_served));
    Ok(v1::StatusResponse {
        status: Some(v1::RuntimeStatus { conditions }),
        info: if request.verbose { info(&daemon) } else { HashMap::new() },
        runtime_handlers: runtime_handlers(&daemon),
        features: Some(v1::RuntimeFeatures {
            supplemental_groups_policy: true,
            user_namespaces_host_network: has_user_namespaces,
            mount_options: true,
        }),
    })
}

/// The conditions of the node for clients other than the kubelet: type, whether it is true, reason, message.
///
/// # Errors
/// Those of Status.
pub(crate) async fn conditions(daemon: &Rc<Daemon>) -> Result<Vec<(String, bool, String, String)>, Error> {
    let answer = status(Rc::clone(daemon), v1::StatusRequest::default()).await?;
    let conditions = answer.status.map(|status| status.conditions).unwrap_or_default();
    let parts = conditions
        .into_iter()
        .map(|condition| (condition.r#type, condition.status, condition.reason, condition.message));
    Ok(parts.collect())
}

/// The runtime handler without a name, and its other names; all have the same features.
fn runtime_handlers(daemon: &Daemon) -> Vec<v1::RuntimeHandler> {
    let kernel = &daemon.pods.node().kernel;
    let features = v1::RuntimeHandlerFeatures {
        recursive_read_only_mounts: kernel.has_recursive_read_only,
        user_namespaces: kernel.user_namespaces.is_ok(),
    };
    let handlers = daemon.reloadable.runtime_handlers.borrow();
    let names = std::iter::once(String::new()).chain(handlers.aliases.iter().cloned());
    names.map(|name| v1::RuntimeHandler { name, features: Some(features) }).collect()
}

/// Reports image records that cannot be read at the moment, records in quarantine, and damaged layers.
fn store_healthy(daemon: &Daemon) -> Result<(), (&'static str, String)> {
    let unread = daemon.images.unread_first().map(|first| {
        let text = format!(
            "{} records of images cannot be read and are tried again, and until then no layer of an image is removed, the first: {first}; \
             check the disk (dmesg), or pull the image again; after ten minutes of I/O errors a record is moved to quarantine",
            daemon.images.unread_count()
        );
        ("UnreadRecords", text)
    });
    let damaged = (store::damaged_count() > 0).then(|| {
        let text = format!(
            "{} damaged records are set aside in {}/quarantine, the last: {}; `coracle why POD` says what a pod has lost; \
             check the disk (dmesg)",
            store::damaged_count(),
            daemon.pods.node().paths.root.display(),
            store::damaged_last()
        );
        ("DamagedRecords", text)
    });
    let (count, first) = daemon.images.damaged();
    let layers = first.map(|first| {
        let text = format!(
            "damaged layers: {count}, the first: {first}; `coracle image check --repair` makes them again if a blob, \
             a registry or a neighbour has them, and else removes their images; check the disk (dmesg)"
        );
        ("DamagedLayers", text)
    });
    let mut troubles = [unread, damaged, layers].into_iter().flatten();
    let Some((reason, text)) = troubles.next() else { return Ok(()) };
    Err((reason, troubles.fold(text, |all, (_, text)| format!("{all}. {text}"))))
}

/// Reports whether new records can be written. Existing pods are not affected: they can be listed and
/// stopped, and exec works.
fn root_writable(daemon: &Daemon) -> Result<(), (&'static str, String)> {
    let root = daemon.pods.node().paths.root.display();
    let room = statvfs(&daemon.pods.node().paths.root)
        .map_err(|errno| ("Unknown", format!("{root}: {}", describe_errno(errno))))?;
    let consequence = "no pod, container or image can be created or removed";
    if room.flags().contains(FsFlags::ST_RDONLY) {
        let cure = "check the disk (dmesg), then `mount -o remount,rw`";
        return Err(("ReadOnly", format!("{root} is on a read-only file system: {consequence}; {cure}")));
    }
    // Some file systems allocate inodes dynamically and report a total of zero.
    let has_inodes = room.files() == 0 || room.files_available() > 0;
    if room.blocks_available() == 0 || !has_inodes {
        let cure = "delete other files on it (`df`, `du -x`)";
        return Err(("Full", format!("{root} is on a full file system: {consequence}; {cure}")));
    }
    Ok(())
}

/// Reports whether the configuration of the last reload is in force. Keys that need a restart are named, too; they are
/// no fault.
fn configuration_applied(loaded: &Configuration) -> v1::RuntimeCondition {
    let refused = match loaded.mistakes.first() {
        None => Ok(()),
        Some(first) => Err((
            "RefusedReload",
            format!(
                "the reload at {} found {} mistakes, and the configuration from before stays in force: {first}",
                rfc3339(loaded.refused_at_ns),
                loaded.mistakes_count
            ),
        )),
    };
    let mut condition = condition("ConfigurationApplied", refused);
    if condition.status && !loaded.needs_restart.is_empty() {
        "NeedsRestart".clone_into(&mut condition.reason);
        condition.message = format!("changed keys that need a restart: {}", loaded.needs_restart.join(", "));
    }
    condition
}

/// Reports pods whose monitor is of an earlier build, which lacks later hardening.
fn pods_need_restart(count: usize) -> Option<v1::RuntimeCondition> {
    (count > 0).then(|| v1::RuntimeCondition {
        r#type: "PodsNeedRestart".to_owned(),
        status: true,
        reason: "OldMonitor".to_owned(),
        message: format!(
            "{count} pods run under the monitor of an earlier build, without the isolation of this one \
             (docs/security.md): restart them"
        ),
    })
}

/// Reports whether the kubelet's cAdvisor can find the pods and containers of cgroups. The condition is omitted if the API for
/// cAdvisor is disabled.
fn cadvisor_served(served: &Result<(), String>) -> v1::RuntimeCondition {
    let served = served.as_ref().map_err(|why| {
        let text = format!(
            "{why}: a kubelet without PodAndContainerStatsFromCRI serves metrics without names of pods and containers, \
             and no network statistics of pods (metrics.containerd_socket)"
        );
        ("NotServed", text)
    });
    condition("CadvisorServed", served.copied())
}

fn condition(kind: &str, state: Result<(), (&str, String)>) -> v1::RuntimeCondition {
    let (reason, message) = state.as_ref().err().cloned().unwrap_or_default();
    v1::RuntimeCondition {
        r#type: kind.to_owned(),
        status: state.is_ok(),
        reason: reason.to_owned(),
        message,
    }
}

fn info(daemon: &Daemon) -> HashMap<String, String> {
    let config = json!({
        "rootDir": daemon.pods.node().paths.root,
        "stateDir": daemon.pods.node().paths.state,
        "cgroupDriver": daemon.pods.node().placement.driver.name(),
        "version": env!("CARGO_PKG_VERSION"),
    });
    let last = daemon.network().load_status().err().unwrap_or_else(|| "OK".to_owned());
    HashMap::from([
        ("config".to_owned(), config.to_string()),
        ("cniconfig".to_owned(), daemon.network().conflist().unwrap_or_else(|| "null".to_owned())),
        ("security".to_owned(), daemon.pods.node().kernel.modules.report().to_string()),
        ("nri".to_owned(), daemon.nri_bridge.report().to_string()),
        ("lastCNILoadStatus".to_owned(), json!(last).to_string()),
    ])
}
