//! The objects of `-o json` and `-o yaml`: the messages of the CRI in the JSON format of protobuf, as crictl
//! prints them. 64-bit numbers are strings in this format.

use coracle_control::{Answer, Container, Pod, Stats};
use serde_json::{Value, json};

use super::select::{container_state, pod_state};

/// The JSON object of a pod sandbox, as crictl prints it. States that the CRI does not have are shown as
/// SANDBOX_NOTREADY.
pub(super) fn pod(pod: &Pod) -> Value {
    let state = if pod_state(pod) == "Ready" { "SANDBOX_READY" } else { "SANDBOX_NOTREADY" };
    json!({
        "id": pod.id,
        "metadata": { "name": pod.name, "uid": pod.uid, "namespace": pod.namespace, "attempt": pod.attempt },
        "state": state,
        "createdAt": pod.created_at_ns.to_string(),
        "labels": pod.labels,
        "annotations": pod.annotations,
        "runtimeHandler": pod.runtime_handler,
    })
}

/// The JSON object of a container, as crictl prints it.
pub(super) fn container(container: &Container) -> Value {
    let state = match container_state(container) {
        "Running" => "CONTAINER_RUNNING",
        "Exited" => "CONTAINER_EXITED",
        "Unknown" => "CONTAINER_UNKNOWN",
        _ => "CONTAINER_CREATED",
    };
    json!({
        "id": container.id,
        "podSandboxId": container.pod_id,
        "metadata": { "name": container.name, "attempt": container.attempt },
        "image": {
            "image": container.image_name,
            "annotations": {},
            "userSpecifiedImage": container.user_specified_image,
            "runtimeHandler": "",
            "imageRef": "",
        },
        "imageRef": container.image_ref,
        "state": state,
        "createdAt": container.created_at_ns.to_string(),
        "labels": container.labels,
        "annotations": container.annotations,
        "imageId": container.image_id,
    })
}

/// The JSON object of an image, as crictl prints it; null if the answer is not an image.
pub(super) fn image(answer: &Answer) -> Value {
    let Answer::Image { id, tags, digests, size_bytes, pinned, user } = answer else { return Value::Null };
    let user = user.split(':').next().unwrap_or_default();
    let uid = user.parse().ok().filter(|uid: &i64| *uid >= 0);
    let mut image = json!({
        "id": id,
        "repoTags": tags,
        "repoDigests": digests,
        "size": size_bytes.to_string(),
        "username": if uid.is_some() { "" } else { user },
        "spec": { "image": id, "annotations": {}, "userSpecifiedImage": "", "runtimeHandler": "", "imageRef": "" },
        "pinned": pinned,
    });
    if let Some(uid) = uid {
        image["uid"] = json!({ "value": uid.to_string() });
    }
    image
}

/// The JSON object of a container's statistics (ContainerStats), without pressure stall information.
pub(super) fn stats(stats: &Stats) -> Value {
    let at = stats.at_ns.to_string();
    let number = |value: Option<u64>| value.map(|value| json!({ "value": value.to_string() }));
    let mut object = json!({
        "attributes": {
            "id": stats.id,
            "metadata": { "name": stats.name, "attempt": stats.attempt },
            "labels": stats.labels,
            "annotations": stats.annotations,
        },
        "cpu": stats.cpu_ns.map(|used| json!({
            "timestamp": at,
            "usageCoreNanoSeconds": number(Some(used)),
            "usageNanoCores": number(stats.nanocores),
        })),
        "memory": stats.memory.as_ref().map(|memory| json!({
            "timestamp": at,
            "workingSetBytes": number(Some(memory.working_set_bytes)),
            "availableBytes": number(memory.available_bytes),
            "usageBytes": number(Some(memory.usage_bytes)),
            "rssBytes": number(Some(memory.rss_bytes)),
            "pageFaults": number(Some(memory.page_faults)),
            "majorPageFaults": number(Some(memory.major_page_faults)),
        })),
        "writableLayer": stats.layer.as_ref().map(|layer| json!({
            "timestamp": layer.at_ns.to_string(),
            "fsId": { "mountpoint": layer.directory },
            "usedBytes": number(Some(layer.used_bytes)),
            "inodesUsed": number(Some(layer.inodes)),
        })),
        "swap": stats.swap.as_ref().map(|swap| json!({
            "timestamp": at,
            "swapAvailableBytes": number(swap.available_bytes),
            "swapUsageBytes": number(Some(swap.usage_bytes)),
        })),
    });
    without_nulls(&mut object);
    object
}

/// Removes members without a value, which protobuf's JSON format omits.
fn without_nulls(value: &mut Value) {
    if let Value::Object(members) = value {
        members.retain(|_, member| !member.is_null());
        members.values_mut().for_each(without_nulls);
    }
}
