//! Requests like those of a kubelet, with common values; tests change the fields that matter to them.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::cri::proto::{
    ContainerConfig, ContainerMetadata, CreateContainerRequest, DnsConfig, ExecSyncRequest, IdMapping,
    ImageSpec, LinuxContainerConfig, LinuxContainerSecurityContext, LinuxPodSandboxConfig,
    LinuxSandboxSecurityContext, NamespaceMode, NamespaceOption, PodSandboxConfig, PodSandboxMetadata,
    PullImageRequest, RunPodSandboxRequest, UserNamespace,
};

/// A unique number within this process.
pub fn fresh() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Namespace options: the given network mode, a PID namespace per container, an IPC namespace per pod.
pub fn namespaces(network: NamespaceMode) -> NamespaceOption {
    NamespaceOption {
        network: network.into(),
        pid: NamespaceMode::Container.into(),
        ipc: NamespaceMode::Pod.into(),
        target_id: String::new(),
        userns_options: None,
    }
}

/// Configuration of a pod with the host's network, which needs no CNI.
pub fn host_pod(name: &str) -> PodSandboxConfig {
    pod(name, NamespaceMode::Node)
}

/// Configuration of a pod with its own network namespace.
pub fn bridge_pod(name: &str) -> PodSandboxConfig {
    pod(name, NamespaceMode::Pod)
}

/// Lets the containers of the pod share its PID namespace, if they are created from this configuration.
pub fn share_pids(pod: &mut PodSandboxConfig) {
    pod_namespaces(pod).pid = NamespaceMode::Pod.into();
}

/// A mapping of 65536 IDs, from 0 in the container and from `host_id` on the node.
pub fn id_mapping(host_id: u32) -> IdMapping {
    IdMapping { container_id: 0, host_id, length: 65_536 }
}

/// A user namespace with this [`id_mapping`] for users and groups.
pub fn user_namespace(host_id: u32) -> UserNamespace {
    let mapping = id_mapping(host_id);
    UserNamespace { mode: NamespaceMode::Pod.into(), uids: vec![mapping], gids: vec![mapping] }
}

/// The pod with a [`user_namespace`].
pub fn mapped(mut pod: PodSandboxConfig, host_id: u32) -> PodSandboxConfig {
    pod_namespaces(&mut pod).userns_options = Some(user_namespace(host_id));
    pod
}

/// The namespaces of a pod from this module.
pub fn pod_namespaces(pod: &mut PodSandboxConfig) -> &mut NamespaceOption {
    let context = pod.linux.as_mut().and_then(|linux| linux.security_context.as_mut());
    context.and_then(|context| context.namespace_options.as_mut()).expect("every pod of this module has them")
}

/// Configuration of a pod with a unique UID.
fn pod(name: &str, network: NamespaceMode) -> PodSandboxConfig {
    let uid = format!("uid-{name}-{}", fresh());
    PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: name.into(),
            uid: uid.clone(),
            namespace: "default".into(),
            attempt: 0,
        }),
        hostname: if network == NamespaceMode::Node { String::new() } else { name.into() },
        dns_config: Some(DnsConfig { servers: vec!["192.0.2.53".into()], ..Default::default() }),
        labels: [
            ("io.kubernetes.pod.name".into(), name.into()),
            ("io.kubernetes.pod.namespace".into(), "default".into()),
            ("io.kubernetes.pod.uid".into(), uid),
        ]
        .into(),
        linux: Some(LinuxPodSandboxConfig {
            security_context: Some(LinuxSandboxSecurityContext {
                namespace_options: Some(namespaces(network)),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// Configuration of the built-in default network with the node's own bridge and subnet.
pub const DEFAULT_NETWORK: &str =
    "[network]\ndefault = \"builtin\"\nbridge = \"BRIDGE\"\nsubnets = [\"SUBNET.0/24\"]\n";

/// A RunPodSandbox request with the default handler.
pub fn run(config: &PodSandboxConfig) -> RunPodSandboxRequest {
    RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: String::new() }
}

/// Configuration of a container of `image` that runs the probe with these arguments, in the namespaces of its
/// pod.
pub fn container(name: &str, image: &str, words: &[&str], pod: &PodSandboxConfig) -> ContainerConfig {
    let options = pod
        .linux
        .as_ref()
        .and_then(|linux| linux.security_context.as_ref())
        .and_then(|context| context.namespace_options.clone());
    ContainerConfig {
        metadata: Some(ContainerMetadata { name: name.into(), attempt: 0 }),
        image: Some(image_spec(image)),
        args: words.iter().map(|word| (*word).to_owned()).collect(),
        labels: [("io.kubernetes.container.name".into(), name.into())].into(),
        log_path: format!("{name}/0.log"),
        linux: Some(LinuxContainerConfig {
            security_context: Some(LinuxContainerSecurityContext {
                namespace_options: options,
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// The security context of a container from [`container`].
pub fn security(config: &mut ContainerConfig) -> &mut LinuxContainerSecurityContext {
    config
        .linux
        .get_or_insert_with(LinuxContainerConfig::default)
        .security_context
        .get_or_insert_with(LinuxContainerSecurityContext::default)
}

/// A CreateContainer request.
pub fn create(pod_id: &str, config: &ContainerConfig, pod: &PodSandboxConfig) -> CreateContainerRequest {
    CreateContainerRequest {
        pod_sandbox_id: pod_id.into(),
        config: Some(config.clone()),
        sandbox_config: Some(pod.clone()),
    }
}

/// An ExecSync request for the probe.
pub fn exec(container_id: &str, words: &[&str], timeout: i64) -> ExecSyncRequest {
    let mut cmd = vec!["/probe".to_owned()];
    cmd.extend(words.iter().map(|word| (*word).to_owned()));
    ExecSyncRequest { container_id: container_id.into(), cmd, timeout }
}

/// The ImageSpec of an image given by its name.
pub fn image_spec(name: &str) -> ImageSpec {
    ImageSpec { image: name.into(), user_specified_image: name.into(), ..Default::default() }
}

/// A PullImage request without credentials.
pub fn pull(name: &str) -> PullImageRequest {
    PullImageRequest { image: Some(image_spec(name)), ..Default::default() }
}
