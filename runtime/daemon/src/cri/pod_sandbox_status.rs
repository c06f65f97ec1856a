//! PodSandboxStatus (CRI 2.8), answered from memory. The verbose info contains data that Cilium, Falco and others need: the
//! sandbox's PID, its namespaces and addresses.

use std::collections::HashMap;
use std::rc::Rc;

use coracle_base::error::Error;
use coracle_engine::record::PodRecord;
use coracle_engine::spec::{PodPid, Sharing};
use coracle_engine::{Pod, paths};
use coracle_sandbox::collect::ordered;
use serde_json::{Value, json};

use super::{container_config, container_status, pod_config};
use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn pod_sandbox_status(
    daemon: Rc<Daemon>,
    request: v1::PodSandboxStatusRequest,
) -> Result<v1::PodSandboxStatusResponse, Error> {
    let pod = daemon.pods.pod(&request.pod_sandbox_id)?;
    let containers = daemon.pods.listed_containers_of(pod.id);
    Ok(v1::PodSandboxStatusResponse {
        status: Some(status(&pod)),
        info: if request.verbose { HashMap::from([("info".to_owned(), info(&pod))]) } else { HashMap::new() },
        containers_statuses: containers.iter().map(|container| container_status::status(container)).collect(),
        timestamp: daemon.pods.node().kernel.clock.now_ns(),
    })
}

/// Converts the state of a pod to the CRI's enum.
pub(super) fn state(record: &PodRecord) -> v1::PodSandboxState {
    match record.state.is_ready() {
        true => v1::PodSandboxState::SandboxReady,
        false => v1::PodSandboxState::SandboxNotready,
    }
}

/// The status of a pod, for PodSandboxStatus and events.
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
        state: state(&record).into(),
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
    let result: Value = result.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    json!({
        "pid": pid,
        "netNsClosed": pid == 0,
        "runtimeType": "coracle",
        "cniResult": as_containerd(&result),
        "cniRawResult": result,
        "overhead": record.spec.overhead.as_ref().map(container_config::resources_info),
        "resources": record.spec.resources.as_ref().map(container_config::resources_info),
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

/// Converts a CNI result to containerd's format (`Result` of its library go-cni): interfaces by name with their addresses.
/// `null` for a pod without a CNI result.
fn as_containerd(result: &Value) -> Value {
    if !result.is_object() {
        return Value::Null;
    }
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let (interfaces, addresses) = (list(&result["interfaces"]), list(&result["ips"]));
    let of_interface = |index: usize| {
        let belongs = |address: &&Value| address["interface"].as_u64() == u64::try_from(index).ok();
        let own = addresses.iter().filter(belongs).map(|address| {
            let ip = address["address"].as_str().and_then(|text| text.split('/').next()).unwrap_or_default();
            json!({"IP": ip, "Gateway": address["gateway"].as_str().unwrap_or_default()})
        });
        let own: Vec<Value> = own.collect();
        if own.is_empty() { Value::Null } else { Value::from(own) }
    };
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let named = interfaces.iter().enumerate().map(|(index, interface)| {
        let config = json!({
            "IPConfigs": of_interface(index),
            "Mac": text(&interface["mac"]),
            "Sandbox": text(&interface["sandbox"]),
            "PciID": text(&interface["pciID"]),
            "SocketPath": text(&interface["socketPath"]),
        });
        (text(&interface["name"]), config)
    });
    let dns = if result["dns"].is_object() { result["dns"].clone() } else { json!({}) };
    json!({
        "Interfaces": ordered::<_, serde_json::Map<String, Value>>(named),
        "DNS": [dns],
        "Routes": result.get("routes"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cni_result_is_shown_as_containerd_shows_it() {
        let result = json!({
            "cniVersion": "1.1.0",
            "interfaces": [
                {"name": "cni0", "mac": "02:00:00:00:00:01"},
                {"name": "eth0", "mac": "02:00:00:00:00:02", "sandbox": "/run/netns/x"},
            ],
            "ips": [
                {"interface": 1, "address": "10.1.0.2/24", "gateway": "10.1.0.1"},
                {"interface": 1, "address": "fd00::2/64"},
            ],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dns": {"nameservers": ["10.1.0.1"]},
        });
        let expected = json!({
            "Interfaces": {
                "cni0": {
                    "IPConfigs": null, "Mac": "02:00:00:00:00:01", "Sandbox": "", "PciID": "", "SocketPath": "",
                },
                "eth0": {
                    "IPConfigs": [{"IP": "10.1.0.2", "Gateway": "10.1.0.1"}, {"IP": "fd00::2", "Gateway": ""}],
                    "Mac": "02:00:00:00:00:02", "Sandbox": "/run/netns/x", "PciID": "", "SocketPath": "",
                },
            },
            "DNS": [{"nameservers": ["10.1.0.1"]}],
            "Routes": [{"dst": "0.0.0.0/0"}],
        });
        assert_eq!(as_containerd(&result), expected);
        let empty = json!({"Interfaces": {}, "DNS": [{}], "Routes": null});
        assert_eq!(as_containerd(&json!({"cniVersion": "1.0.0"})), empty);
        assert_eq!(as_containerd(&Value::Null), Value::Null);
    }
}
