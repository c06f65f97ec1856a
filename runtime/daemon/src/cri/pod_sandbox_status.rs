//! PodSandboxStatus (CRI 2.8): from memory, never slow. Verbose adds what Cilium, Falco and others read: the
//! sandbox's pid and its namespaces.

use std::collections::HashMap;
use std::rc::Rc;

use coracle_base::error::Error;
use coracle_engine::spec::{PodPid, Sharing};
use coracle_engine::{Pod, paths};
use serde_json::json;

use super::{container_status, pod_config};
use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn pod_sandbox_status(
    daemon: Rc<Daemon>,
    request: v1::PodSandboxStatusRequest,
) -> Result<v1::PodSandboxStatusResponse, Error> {
    let pod = daemon.pods.pod(&request.pod_sandbox_id)?;
    let containers = daemon.pods.containers();
    let of_pod = containers.iter().filter(|container| container.pod.id == pod.id);
    Ok(v1::PodSandboxStatusResponse {
        status: Some(status(&pod)),
        info: if request.verbose { HashMap::from([("info".to_owned(), info(&pod))]) } else { HashMap::new() },
        containers_statuses: of_pod.map(|container| container_status::status(container)).collect(),
        timestamp: daemon.pods.node.kernel.clock.now_ns(),
    })
}

/// CRI's enum for our state.
pub(super) fn state(pod: &Pod) -> v1::PodSandboxState {
    match pod.record().state.is_ready() {
        true => v1::PodSandboxState::SandboxReady,
        false => v1::PodSandboxState::SandboxNotready,
    }
}

/// The same in statuses and events.
pub(super) fn status(pod: &Pod) -> v1::PodSandboxStatus {
    let record = pod.record();
    let mut addresses = record.network.iter().flat_map(|network| network.addresses.iter().cloned());
    let network = v1::PodSandboxNetworkStatus {
        ip: addresses.next().unwrap_or_default(),
        additional_ips: addresses.map(|ip| v1::PodIp { ip }).collect(),
    };
    let options = pod_config::namespace_options(&record.spec);
    v1::PodSandboxStatus {
        id: pod.id.to_string(),
        metadata: Some(pod_config::metadata(&record.spec.name)),
        state: state(pod).into(),
        created_at: record.created_at_ns,
        network: Some(network),
        linux: Some(v1::LinuxPodSandboxStatus { namespaces: Some(v1::Namespace { options: Some(options) }) }),
        labels: pod_config::map(&record.spec.labels),
        annotations: pod_config::map(&record.spec.annotations),
        runtime_handler: record.spec.runtime_handler.clone(),
    }
}

fn info(pod: &Pod) -> String {
    let (record, pid) = (pod.record(), pod.pid());
    let namespaces = record.spec.namespaces;
    let path = |name: &str| format!("/proc/{pid}/ns/{name}");
    let mut list = Vec::new();
    if namespaces.network == Sharing::Pod {
        list.push(json!({"type": "network", "path": paths::netns(pod.id)}));
        list.push(json!({"type": "uts", "path": path("uts")}));
    }
    if namespaces.ipc == Sharing::Pod {
        list.push(json!({"type": "ipc", "path": path("ipc")}));
    }
    if namespaces.pid == PodPid::Pod {
        list.push(json!({"type": "pid", "path": path("pid")}));
    }
    let result = record.network.as_ref().and_then(|network| network.result.as_deref());
    let result: serde_json::Value =
        result.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    json!({
        "pid": pid,
        "netNsClosed": pid == 0,
        "runtimeType": "coracle",
        "cniResult": result,
        "metadata": {
            "name": record.spec.name.name,
            "namespace": record.spec.name.namespace,
            "uid": record.spec.name.uid,
            "attempt": record.spec.name.attempt,
        },
        "runtimeSpec": {
            "hostname": record.spec.hostname,
            "linux": {
                "cgroupsPath": record.oci_cgroup(&pod.id),
                "namespaces": list,
                "sysctl": pod_config::map(&record.spec.sysctls),
            },
            "annotations": pod_config::map(&record.spec.annotations),
        },
    })
    .to_string()
}
