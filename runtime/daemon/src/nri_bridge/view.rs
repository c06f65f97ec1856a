//! Converts pods and containers to NRI messages (NRI 5). The messages are created from the records, with the adjustments of
//! plugins applied, so that they are equal after a restart.

use std::collections::BTreeMap;

use coracle_engine::record::{ContainerRecord, PodRecord};
use coracle_engine::spec::{ContainerPid, MountPropagation, PodPid, Sharing};
use coracle_engine::{Container, Pod, Resolved, paths, state};
use coracle_nri::api;
use coracle_sandbox::collect::ordered;
use coracle_sandbox::netns;
use prost::Message;

use super::limits;

/// Prefix of the annotations that CRI runtimes set on containers.
const CRI: &str = "io.kubernetes.cri";

/// Converts a pod to an NRI message.
pub(super) fn pod(pod: &Pod) -> api::PodSandbox {
    let record = pod.record();
    let spec = &record.spec;
    let name = &spec.name;
    let id = pod.id.to_string();
    let mut annotations = well_known([
        ("container-type", "sandbox"),
        ("sandbox-id", &id),
        ("sandbox-name", &name.name),
        ("sandbox-namespace", &name.namespace),
        ("sandbox-uid", &name.uid),
    ]);
    annotations.extend(spec.annotations.iter().cloned());
    let ips = match &record.network {
        Some(network) if !network.addresses.is_empty() => &network.addresses,
        Some(_) | None => &record.addresses,
    };
    api::PodSandbox {
        name: name.name.clone(),
        uid: name.uid.clone(),
        namespace: name.namespace.clone(),
        labels: ordered(spec.labels.iter().cloned()),
        annotations,
        runtime_handler: spec.runtime_handler.clone(),
        linux: Some(api::LinuxPodSandbox {
            pod_overhead: spec.overhead.as_ref().map(limits::of_resources),
            pod_resources: spec.resources.as_ref().map(limits::of_resources),
            cgroup_parent: spec.cgroup_parent.clone(),
            cgroups_path: record.oci_cgroup(&id),
            namespaces: pod_namespaces(pod, &record),
            resources: None,
        }),
        pid: u32::try_from(pod.pid()).unwrap_or(0),
        ips: ips.clone(),
        id,
    }
}

/// The pod's own namespaces that exist at the moment.
fn pod_namespaces(pod: &Pod, record: &PodRecord) -> Vec<api::LinuxNamespace> {
    let namespaces = record.spec.namespaces;
    let mut converted = Vec::new();
    let mut tell = |kind: &str, path: String| {
        converted.push(api::LinuxNamespace { r#type: kind.to_owned(), path });
    };
    let network = paths::netns(pod.id);
    if namespaces.network == Sharing::Pod && netns::exists(&network) {
        tell("network", network.to_string_lossy().into_owned());
    }
    let pid = pod.pid();
    if pid > 0 {
        let of_monitor = [
            ("ipc", "ipc", namespaces.ipc == Sharing::Pod),
            ("uts", "uts", namespaces.network == Sharing::Pod),
            ("pid", "pid", namespaces.pid == PodPid::Pod),
            ("user", "user", record.spec.user_namespace.is_some()),
        ];
        for (kind, file, _) in of_monitor.into_iter().filter(|(_, _, is_own)| *is_own) {
            tell(kind, format!("/proc/{pid}/ns/{file}"));
        }
    }
    converted
}

/// Converts an existing container to an NRI message.
pub(super) fn container(container: &Container) -> api::Container {
    let record = container.record();
    let mut converted = of_record(&container.pod, &record);
    converted.pid = u32::try_from(container.pid()).unwrap_or(0);
    converted
}

/// Converts a container that has exited or never ran to an NRI message.
pub(super) fn stopped(container: &Container) -> api::Container {
    let record = container.record();
    let mut converted = of_record(&container.pod, &record);
    converted.set_state(api::ContainerState::ContainerStopped);
    converted.pid = u32::try_from(container.last_pid()).unwrap_or(0);
    converted
}

/// Converts a container that is being created to an NRI message.
pub(super) fn resolved(pod: &Pod, resolved: &Resolved) -> api::Container {
    let mut converted = of_record(pod, &resolved.record);
    converted.set_state(api::ContainerState::ContainerUnknown);
    (converted.created_at, converted.pid) = (0, 0);
    converted
}

fn of_record(pod: &Pod, record: &ContainerRecord) -> api::Container {
    let pod_record = pod.record();
    let (spec, process, identity) = (&record.spec, &record.process, &record.process.identity);
    let pod_id = pod.id.to_string();
    let mut converted = api::Container {
        id: record.id.to_string(),
        pod_sandbox_id: pod_id.clone(),
        name: spec.name.name.clone(),
        labels: ordered(spec.labels.iter().cloned()),
        annotations: annotations(&pod_record, record, &pod_id),
        args: process.arguments.clone(),
        env: process.environment.iter().map(|text| String::from_utf8_lossy(text).into_owned()).collect(),
        mounts: mounts(record),
        rlimits: vec![api::PosixRlimit {
            r#type: "RLIMIT_NOFILE".to_owned(),
            soft: coracle_engine::record::OPEN_FILES_SOFT,
            hard: coracle_engine::record::OPEN_FILES_HARD,
        }],
        linux: Some(linux(pod, &pod_record, record)),
        cdi_devices: spec.cdi_devices.iter().map(|name| api::CdiDevice { name: name.clone() }).collect(),
        user: Some(api::User {
            uid: identity.uid,
            gid: identity.gid,
            additional_gids: identity.groups.clone(),
        }),
        image: Some(api::Image {
            name: record.image.name.clone(),
            digest: record
                .image
                .reference
                .rsplit_once('@')
                .map(|(_, digest)| digest.to_owned())
                .unwrap_or_default(),
            config_digest: record.image.id.clone(),
        }),
        created_at: record.created_at_ns,
        ..api::Container::default()
    };
    life(&mut converted, &record.state);
    if let Ok(adjustment) = api::ContainerAdjustment::decode(&record.adjusted.adjustment[..]) {
        coracle_nri::apply_to(&mut converted, &adjustment);
    }
    converted
}

fn life(converted: &mut api::Container, now: &state::Container) {
    match now {
        // Plugins are asked to change it before it is created.
        state::Container::Creating | state::Container::Created { .. } | state::Container::Gone => {
            converted.set_state(api::ContainerState::ContainerCreated);
        }
        state::Container::Running { started_at_ns, .. } => {
            converted.set_state(api::ContainerState::ContainerRunning);
            converted.started_at = *started_at_ns;
        }
        state::Container::Exited { ended, .. } => {
            converted.set_state(api::ContainerState::ContainerStopped);
            (converted.started_at, converted.finished_at) = (ended.started_at_ns, ended.finished_at_ns);
            converted.exit_code = ended.exit_code();
            converted.status_reason = ended.reason().to_owned();
            converted.status_message = ended.message().to_owned();
        }
    }
}

fn annotations(pod: &PodRecord, record: &ContainerRecord, pod_id: &str) -> BTreeMap<String, String> {
    let mut annotations = well_known([
        ("container-type", "container"),
        ("sandbox-id", pod_id),
        ("sandbox-name", &pod.spec.name.name),
        ("sandbox-namespace", &pod.spec.name.namespace),
        ("container-name", &record.spec.name.name),
        ("image-name", &record.image.name),
    ]);
    annotations.extend(record.spec.annotations.iter().cloned());
    annotations
}

fn well_known<const N: usize>(pairs: [(&str, &str); N]) -> BTreeMap<String, String> {
    ordered(pairs.into_iter().map(|(key, value)| (format!("{CRI}.{key}"), value.to_owned())))
}

/// The default file systems, then the requested mounts that do not replace one of them.
fn mounts(record: &ContainerRecord) -> Vec<api::Mount> {
    const DEFAULTS: [(&str, &str, &[&str]); 7] = [
        ("/proc", "proc", &["nosuid", "noexec", "nodev"]),
        ("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        ("/dev/pts", "devpts", &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]),
        ("/dev/shm", "bind", &["rbind"]),
        ("/dev/mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
        ("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
        ("/sys/fs/cgroup", "cgroup", &["nosuid", "noexec", "nodev", "relatime", "ro"]),
    ];
    let is_privileged = record.spec.security.privileged;
    let default = |(destination, kind, options): (&str, &str, &[&str])| api::Mount {
        destination: destination.to_owned(),
        r#type: kind.to_owned(),
        source: kind.to_owned(),
        options: options
            .iter()
            .filter(|option| !(is_privileged && **option == "ro"))
            .map(|one| (*one).to_owned())
            .collect(),
    };
    let mut converted: Vec<api::Mount> = DEFAULTS.into_iter().map(default).collect();
    for mount in &record.spec.mounts {
        let propagation = match mount.propagation {
            MountPropagation::Private => "rprivate",
            MountPropagation::HostToContainer => "rslave",
            MountPropagation::Bidirectional => "rshared",
        };
        let options = ["rbind", propagation, if mount.readonly { "ro" } else { "rw" }];
        converted.retain(|other| other.destination != mount.container_path);
        converted.push(api::Mount {
            destination: mount.container_path.clone(),
            r#type: "bind".to_owned(),
            source: mount.host_path.clone(),
            options: options.into_iter().map(str::to_owned).chain(mount.options.iter().cloned()).collect(),
        });
    }
    converted
}

fn linux(pod: &Pod, pod_record: &PodRecord, record: &ContainerRecord) -> api::LinuxContainer {
    let spec = &record.spec;
    let security = &spec.security;
    let profile = |profile_type: api::ProfileType, localhost_ref: &str| api::SecurityProfile {
        profile_type: profile_type.into(),
        localhost_ref: localhost_ref.to_owned(),
    };
    let seccomp_profile = match (security.localhost_seccomp.as_str(), security.wants_default_seccomp) {
        ("", true) => Some(profile(api::ProfileType::RuntimeDefault, "")),
        ("", false) => None,
        (path, _) => Some(profile(api::ProfileType::Localhost, path)),
    };
    let cgroup = match record.adjusted.cgroup.as_str() {
        "" => pod_record.oci_cgroup(&record.id),
        cgroup => cgroup.to_owned(),
    };
    api::LinuxContainer {
        namespaces: container_namespaces(pod, pod_record, record),
        devices: devices(record),
        resources: Some(limits::of_limits(&record.limits())),
        oom_score_adj: Some(api::OptionalInt { value: record.process.oom_score_adj.into() }),
        cgroups_path: cgroup,
        seccomp_profile,
        ..api::LinuxContainer::default()
    }
}

fn container_namespaces(
    pod: &Pod,
    pod_record: &PodRecord,
    record: &ContainerRecord,
) -> Vec<api::LinuxNamespace> {
    let mut converted: Vec<_> =
        pod_namespaces(pod, pod_record).into_iter().filter(|namespace| namespace.r#type != "pid").collect();
    let new = |kind: &str| api::LinuxNamespace { r#type: kind.to_owned(), path: String::new() };
    converted.push(new("mount"));
    match record.pid() {
        ContainerPid::Own => converted.push(new("pid")),
        ContainerPid::Pod if pod_record.spec.namespaces.pid == PodPid::Container => {
            converted.push(new("pid"))
        }
        ContainerPid::Pod if pod_record.spec.namespaces.pid == PodPid::Pod && pod.pid() > 0 => {
            let path = format!("/proc/{}/ns/pid", pod.pid());
            converted.push(api::LinuxNamespace { r#type: "pid".to_owned(), path });
        }
        ContainerPid::Pod | ContainerPid::Node | ContainerPid::Target(_) => {}
    }
    converted
}

/// The requested devices that exist on the node.
fn devices(record: &ContainerRecord) -> Vec<api::LinuxDevice> {
    let found = record.spec.devices.iter().filter_map(|device| {
        coracle_sandbox::device::resolve(std::path::Path::new(&device.host_path), &device.container_path).ok()
    });
    let converted = |node: coracle_sandbox::plan::DeviceNode| api::LinuxDevice {
        path: node.path,
        r#type: match node.kind {
            coracle_sandbox::plan::DeviceKind::Character => "c".to_owned(),
            coracle_sandbox::plan::DeviceKind::Block => "b".to_owned(),
        },
        major: node.major.into(),
        minor: node.minor.into(),
        file_mode: Some(api::OptionalFileMode { value: node.mode }),
        uid: Some(api::OptionalUInt32 { value: node.owner.0 }),
        gid: Some(api::OptionalUInt32 { value: node.owner.1 }),
    };
    found.flatten().map(converted).collect()
}
