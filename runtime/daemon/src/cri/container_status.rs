//! ContainerStatus (CRI 2.14). Mounts are those of the request in their order; the most used field of the verbose info is
//! `.info.pid`.

use std::collections::HashMap;
use std::rc::Rc;

use coracle_base::error::Error;
use coracle_engine::record::ContainerRecord;
use coracle_engine::{Container, signal, spec, state};
use coracle_sandbox::capability;
use serde_json::{Value, json};

use super::{container_config, pod_config};
use crate::daemon::Daemon;
use crate::rpc::v1;

pub(crate) async fn container_status(
    daemon: Rc<Daemon>,
    request: v1::ContainerStatusRequest,
) -> Result<v1::ContainerStatusResponse, Error> {
    let container = daemon.pods.container(&request.container_id)?;
    Ok(v1::ContainerStatusResponse {
        status: Some(status(&container)),
        info: if request.verbose {
            HashMap::from([("info".to_owned(), info(&container))])
        } else {
            HashMap::new()
        },
    })
}

/// Converts the state to the CRI's enum.
pub(super) fn state(state: &state::Container) -> v1::ContainerState {
    match state {
        // Those that are being created are not listed.
        state::Container::Creating | state::Container::Created { .. } => v1::ContainerState::ContainerCreated,
        state::Container::Running { .. } => v1::ContainerState::ContainerRunning,
        state::Container::Exited { .. } | state::Container::Gone => v1::ContainerState::ContainerExited,
    }
}

/// The image of a container, with the name that users know.
pub(super) fn image_spec(record: &ContainerRecord) -> v1::ImageSpec {
    v1::ImageSpec {
        image: record.image.name.clone(),
        user_specified_image: record.spec.user_specified_image.clone(),
        ..Default::default()
    }
}

/// The complete status of a container.
pub(super) fn status(container: &Container) -> v1::ContainerStatus {
    let record = container.record();
    let identity = &record.process.identity;
    let user = v1::LinuxContainerUser {
        uid: identity.uid.into(),
        gid: identity.gid.into(),
        supplemental_groups: identity.groups.iter().map(|gid| i64::from(*gid)).collect(),
    };
    let (started_at, ended) = (record.state.started_at_ns(), record.state.ended());
    v1::ContainerStatus {
        id: container.id.to_string(),
        metadata: Some(container_config::metadata(&record.spec.name)),
        state: state(&record.state).into(),
        created_at: record.created_at_ns,
        started_at,
        finished_at: ended.map_or(0, |ended| ended.finished_at_ns),
        exit_code: ended.map_or(0, state::Ended::exit_code),
        reason: ended.map_or("", state::Ended::reason).to_owned(),
        message: ended.map_or("", state::Ended::message).to_owned(),
        image: Some(image_spec(&record)),
        image_ref: record.image.reference.clone(),
        labels: pod_config::map(&record.spec.labels),
        annotations: pod_config::map(&record.spec.annotations),
        mounts: mounts(&record),
        log_path: record.log_path.clone(),
        resources: Some(v1::ContainerResources {
            linux: Some(container_config::linux_resources(&record.limits().resources)),
        }),
        image_id: record.image.id.clone(),
        user: Some(v1::ContainerUser { linux: Some(user) }),
        stop_signal: signal::to_cri(record.stop_signal),
    }
}

fn mounts(record: &ContainerRecord) -> Vec<v1::Mount> {
    let mut volumes = record.image_volumes.iter();
    let show = |mount: &spec::Mount| {
        let image_ref = mount.image.as_ref().and_then(|_| volumes.next()).map(|volume| volume.id.as_str());
        container_config::cri_mount(mount, image_ref)
    };
    record.spec.mounts.iter().map(show).collect()
}

/// The verbose info, in containerd's format. The environment is omitted, because values may be secrets.
fn info(container: &Container) -> String {
    let record = container.record();
    let spec = &record.spec;
    json!({
        "sandboxID": container.pod.id.to_string(),
        "pid": container.pid(),
        "snapshotter": "overlayfs",
        "snapshotKey": container.id.to_string(),
        "runtimeType": "coracle",
        "privileged": spec.security.privileged,
        "config": {
            "metadata": {"name": spec.name.name, "attempt": spec.name.attempt},
            "image": {"image": spec.image, "user_specified_image": spec.user_specified_image},
            "command": spec.command,
            "args": spec.arguments,
            "working_dir": spec.working_directory,
            "labels": pod_config::map(&spec.labels),
            "annotations": pod_config::map(&spec.annotations),
            "log_path": spec.log_path,
            "stdin": spec.stdin,
            "stdin_once": spec.stdin_once,
            "tty": spec.tty,
            "linux": {"resources": container_config::resources_info(&spec.resources)["linux"]},
        },
        "runtimeSpec": runtime_spec(container, &record),
    })
    .to_string()
}

/// The parts of the OCI specification that this container would have.
fn runtime_spec(container: &Container, record: &ContainerRecord) -> Value {
    let (spec, process) = (&record.spec, &record.process);
    let identity = &process.identity;
    let sets = &process.capabilities;
    let [bounding, effective, permitted, ambient] =
        [sets.bounding, sets.effective, sets.permitted, sets.ambient].map(capability::names);
    let resources = &record.limits().resources;
    let mounts = spec
        .mounts
        .iter()
        .map(|mount| json!({"destination": mount.container_path, "source": mount.host_path}));
    json!({
        "process": {
            "terminal": spec.tty,
            "args": process.arguments,
            "cwd": process.working_directory,
            "user": {"uid": identity.uid, "gid": identity.gid, "additionalGids": identity.groups},
            "capabilities": {
                "bounding": bounding, "effective": effective, "permitted": permitted, "ambient": ambient,
            },
            "noNewPrivileges": process.attributes.no_new_privileges,
            "oomScoreAdj": process.oom_score_adj,
        },
        "root": {"readonly": spec.security.readonly_rootfs},
        "mounts": mounts.collect::<Vec<_>>(),
        "linux": {
            "cgroupsPath": container.pod.record().oci_cgroup(&container.id),
            "resources": {
                "memory": {
                    "limit": resources.memory_limit_bytes,
                    "swap": resources.memory_and_swap_limit_bytes(),
                },
                "cpu": {
                    "shares": resources.cpu_shares,
                    "quota": resources.cpu_quota_us,
                    "period": resources.cpu_period_us,
                    "cpus": resources.cpuset_cpus,
                    "mems": resources.cpuset_mems,
                },
                "unified": pod_config::map(&resources.unified),
            },
            "maskedPaths": spec.security.masked_paths,
            "readonlyPaths": spec.security.readonly_paths,
        },
        "annotations": pod_config::map(&spec.annotations),
    })
}
