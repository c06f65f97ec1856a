//! Status (CRI 2.2): two conditions decide over the node, RuntimeReady and NetworkReady; ours beside them show
//! records that were set aside, a root that takes no records, files of registries that cannot be read, and what AppArmor and SELinux lack. Asked every 5 s: from
//! memory, but for one statvfs(2).

use std::collections::HashMap;
use std::rc::Rc;

use coracle_base::error::Error;
use coracle_base::store;
use nix::sys::statvfs::{FsFlags, statvfs};
use serde_json::json;

use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn status(
    daemon: Rc<Daemon>,
    request: v1::StatusRequest,
) -> Result<v1::StatusResponse, Error> {
    let network = daemon.network.ready();
    // Calls are served only after recovery is through, so whoever gets an answer finds the runtime ready.
    let mut conditions = vec![
        condition("RuntimeReady", Ok(())),
        condition("NetworkReady", network.clone().map_err(|message| ("NetworkPluginNotReady", message))),
    ];
    let has_user_namespaces = daemon.pods.node.kernel.user_namespaces.is_ok();
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
    conditions.extend(pods_need_restart(daemon.pods.outdated()));
    let trouble = daemon.pods.node.kernel.modules.trouble();
    conditions.push(condition("SecurityModulesReady", trouble.map_or(Ok(()), Err)));
    Ok(v1::StatusResponse {
        status: Some(v1::RuntimeStatus { conditions }),
        info: if request.verbose { info(&daemon) } else { HashMap::new() },
        runtime_handlers: vec![v1::RuntimeHandler {
            name: String::new(),
            features: Some(v1::RuntimeHandlerFeatures {
                recursive_read_only_mounts: daemon.pods.node.kernel.has_recursive_read_only,
                user_namespaces: has_user_namespaces,
            }),
        }],
        features: Some(v1::RuntimeFeatures {
            supplemental_groups_policy: true,
            user_namespaces_host_network: has_user_namespaces,
            mount_options: true,
        }),
    })
}

/// Records that were set aside, and those of images that cannot be read for now.
fn store_healthy(daemon: &Daemon) -> Result<(), (&'static str, String)> {
    match (store::damaged_count(), daemon.images.unread_count()) {
        (0, 0) => Ok(()),
        (0, unread) => Err((
            "UnreadRecords",
            format!("{unread} records of images cannot be read for now, and are tried again"),
        )),
        (count, _) => Err((
            "DamagedRecords",
            format!(
                "{count} damaged records are set aside in {}/quarantine",
                daemon.pods.node.paths.root.display()
            ),
        )),
    }
}

/// Whether anything new can be recorded. What runs goes on without, and can be listed, stopped and exec'ed into.
fn root_writable(daemon: &Daemon) -> Result<(), (&'static str, String)> {
    let root = daemon.pods.node.paths.root.display();
    let room = statvfs(&daemon.pods.node.paths.root)
        .map_err(|errno| ("Unknown", format!("{root}: {}", errno.desc())))?;
    let consequence = "no pod, container or image can be created or removed";
    if room.flags().contains(FsFlags::ST_RDONLY) {
        return Err(("ReadOnly", format!("{root} is on a read-only file system: {consequence}")));
    }
    // Some file systems make inodes as they go, and say that there are none at all.
    let has_inodes = room.files() == 0 || room.files_available() > 0;
    if room.blocks_available() == 0 || !has_inodes {
        return Err(("Full", format!("{root} is on a full file system: {consequence}")));
    }
    Ok(())
}

/// Shown while there are pods of an earlier build, which run on without its later defences.
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
        "rootDir": daemon.pods.node.paths.root,
        "stateDir": daemon.pods.node.paths.state,
        "cgroupDriver": "cgroupfs",
        "version": env!("CARGO_PKG_VERSION"),
    });
    let last = daemon.network.load_status().err().unwrap_or_else(|| "OK".to_owned());
    HashMap::from([
        ("config".to_owned(), config.to_string()),
        ("cniconfig".to_owned(), daemon.network.conflist().unwrap_or_else(|| "null".to_owned())),
        ("security".to_owned(), daemon.pods.node.kernel.modules.report().to_string()),
        ("nri".to_owned(), daemon.plugins.report().to_string()),
        ("lastCNILoadStatus".to_owned(), json!(last).to_string()),
    ])
}
