//! Converts `ContainerConfig` to [`ContainerSpec`] and back; no other module accesses the container's CRI
//! fields.
//!
//! Refused with the name of the field: values that are missing, out of range, or would be ignored although
//! they change the privileges of the container. Rules: CRI 2.10, CRI 2.14, CRI 2.36 and CRI 3.

use coracle_base::error::Error;
use coracle_engine::spec::{
    APPARMOR_RUNTIME_DEFAULT, APPARMOR_UNCONFINED, ContainerName, ContainerPid, ContainerSpec, Device,
    GroupsPolicy, ImageVolume, Mount, MountPropagation, Pairs, Security, SelinuxLabel,
};
use coracle_sandbox::cgroup::Resources;
use coracle_sandbox::{ContainerId, lsm, plan};
use serde_json::{Value, json};

use super::pod_config::{
    SeccompAsked, cri_mappings, id_mappings, invalid, missing, pairs, required, seccomp, user_namespace,
};
use crate::rpc::v1;

/// Prefix of annotations with CDI device names, which device plugins used before the CRI had a field for them (CDI
/// specification, "annotations").
const CDI_ANNOTATION: &str = "cdi.k8s.io/";

/// Supported options of a mount (CRI API of Kubernetes 1.37).
const MOUNT_OPTIONS: [&str; 3] = ["noexec", "nosuid", "nodev"];

/// Validates and converts `config`.
pub(crate) fn container_spec(config: v1::ContainerConfig) -> Result<ContainerSpec, Error> {
    let metadata = config.metadata.ok_or_else(|| missing("config.metadata"))?;
    let image = config.image.ok_or_else(|| missing("config.image"))?;
    let linux = config.linux.unwrap_or_default();
    let annotations = pairs(config.annotations);
    let context = linux.security_context;
    let options = context.as_ref().and_then(|context| context.namespace_options.clone()).unwrap_or_default();
    Ok(ContainerSpec {
        name: ContainerName {
            name: required("config.metadata.name", metadata.name)?,
            attempt: metadata.attempt,
        },
        image: required("config.image.image", image.image)?,
        user_specified_image: image.user_specified_image,
        command: without_nul("config.command", config.command)?,
        arguments: without_nul("config.args", config.args)?,
        working_directory: working_directory(config.working_dir)?,
        environment: config.envs.into_iter().map(variable).collect::<Result<_, _>>()?,
        mounts: config.mounts.into_iter().map(mount).collect::<Result<_, _>>()?,
        devices: config.devices.into_iter().map(device).collect::<Result<_, _>>()?,
        labels: pairs(config.labels),
        cdi_devices: cdi_devices(config.cdi_devices, &annotations),
        annotations,
        log_path: log_path(config.log_path)?,
        stdin: config.stdin,
        stdin_once: config.stdin_once,
        tty: config.tty,
        stop_signal: stop_signal(config.stop_signal)?,
        pid: pid_namespace(&options)?,
        security: security(context)?,
        resources: resources(linux.resources.unwrap_or_default()),
    })
}

/// The CDI device names in the field, followed by those in annotations, without duplicates.
fn cdi_devices(devices: Vec<v1::CdiDevice>, annotations: &Pairs) -> Vec<String> {
    let of_annotations = annotations
        .iter()
        .filter(|(key, _)| key.starts_with(CDI_ANNOTATION))
        .flat_map(|(_, value)| value.split(',').map(|name| name.trim().to_owned()));
    let mut names = Vec::new();
    for name in devices.into_iter().map(|device| device.name).chain(of_annotations) {
        if !name.is_empty() && !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// Converts resources without changing values.
pub(crate) fn resources(linux: v1::LinuxContainerResources) -> Resources {
    Resources {
        cpu_period_us: linux.cpu_period,
        cpu_quota_us: linux.cpu_quota,
        cpu_shares: linux.cpu_shares,
        memory_limit_bytes: linux.memory_limit_in_bytes,
        oom_score_adj: linux.oom_score_adj,
        cpuset_cpus: linux.cpuset_cpus,
        cpuset_mems: linux.cpuset_mems,
        hugepage_limits: linux
            .hugepage_limits
            .into_iter()
            .map(|limit| (limit.page_size, limit.limit))
            .collect(),
        unified: pairs(linux.unified),
        memory_swap_limit_bytes: linux.memory_swap_limit_in_bytes,
    }
}

/// Converts resources for statuses.
pub(crate) fn linux_resources(resources: &Resources) -> v1::LinuxContainerResources {
    let hugepage = |(page_size, limit): &(String, u64)| v1::HugepageLimit {
        page_size: page_size.clone(),
        limit: *limit,
    };
    v1::LinuxContainerResources {
        cpu_period: resources.cpu_period_us,
        cpu_quota: resources.cpu_quota_us,
        cpu_shares: resources.cpu_shares,
        memory_limit_in_bytes: resources.memory_limit_bytes,
        oom_score_adj: resources.oom_score_adj,
        cpuset_cpus: resources.cpuset_cpus.clone(),
        cpuset_mems: resources.cpuset_mems.clone(),
        hugepage_limits: resources.hugepage_limits.iter().map(hugepage).collect(),
        unified: super::pod_config::map(&resources.unified),
        memory_swap_limit_in_bytes: resources.memory_swap_limit_bytes,
    }
}

/// The resources in the verbose info, with the CRI's names, as in containerd.
pub(crate) fn resources_info(resources: &Resources) -> Value {
    let linux = linux_resources(resources);
    let sizes = linux.hugepage_limits.iter();
    json!({
        "linux": {
            "cpu_period": linux.cpu_period,
            "cpu_quota": linux.cpu_quota,
            "cpu_shares": linux.cpu_shares,
            "memory_limit_in_bytes": linux.memory_limit_in_bytes,
            "oom_score_adj": linux.oom_score_adj,
            "cpuset_cpus": linux.cpuset_cpus,
            "cpuset_mems": linux.cpuset_mems,
            "hugepage_limits": sizes.map(|one| json!({"page_size": one.page_size, "limit": one.limit})).collect::<Vec<_>>(),
            "unified": linux.unified,
            "memory_swap_limit_in_bytes": linux.memory_swap_limit_in_bytes,
        },
    })
}

/// Converts a mount for statuses. Statuses contain exactly the mounts of the request in their order, by which the kubelet finds
/// its termination log. `image_ref`: the ID of the image, for an image volume.
pub(crate) fn cri_mount(mount: &Mount, image_ref: Option<&str>) -> v1::Mount {
    let propagation = match mount.propagation {
        MountPropagation::Private => v1::MountPropagation::PropagationPrivate,
        MountPropagation::HostToContainer => v1::MountPropagation::PropagationHostToContainer,
        MountPropagation::Bidirectional => v1::MountPropagation::PropagationBidirectional,
    };
    v1::Mount {
        container_path: mount.container_path.clone(),
        host_path: mount.host_path.clone(),
        readonly: mount.readonly,
        selinux_relabel: mount.selinux_relabel,
        propagation: propagation.into(),
        recursive_read_only: mount.recursive_read_only,
        uid_mappings: cri_mappings(&mount.uid_mappings),
        gid_mappings: cri_mappings(&mount.gid_mappings),
        image: mount.image.as_ref().map(|volume| v1::ImageSpec {
            image: volume.image.clone(),
            user_specified_image: volume.user_specified_image.clone(),
            image_ref: image_ref.unwrap_or_default().to_owned(),
            ..Default::default()
        }),
        image_sub_path: mount.image.as_ref().map(|volume| volume.sub_path.clone()).unwrap_or_default(),
        mount_options: mount.options.clone(),
    }
}

/// Converts the name to the metadata of the request.
pub(crate) fn metadata(name: &ContainerName) -> v1::ContainerMetadata {
    v1::ContainerMetadata { name: name.name.clone(), attempt: name.attempt }
}

fn without_nul(field: &str, values: Vec<String>) -> Result<Vec<String>, Error> {
    match values.iter().any(|value| value.contains('\0')) {
        true => Err(invalid(field, "holds a NUL")),
        false => Ok(values),
    }
}

fn working_directory(path: String) -> Result<String, Error> {
    if path.contains('\0') {
        return Err(invalid("config.working_dir", "holds a NUL"));
    }
    Ok(path)
}

fn variable(variable: v1::KeyValue) -> Result<(String, Vec<u8>), Error> {
    let is_name = !variable.key.is_empty() && !variable.key.contains(['=', '\0']);
    if !is_name || variable.value.contains(&0) {
        // The value may be a secret: only the name is reported.
        return Err(invalid(
            "config.envs",
            &format!("{:?} cannot be a variable, or its value holds a NUL", variable.key),
        ));
    }
    Ok((variable.key, variable.value))
}

fn mount(mount: v1::Mount) -> Result<Mount, Error> {
    let field = |what: &str| format!("config.mounts[{}].{what}", mount.container_path);
    let is_known = |option: &String| MOUNT_OPTIONS.contains(&option.as_str());
    if let Some(unknown) = mount.mount_options.iter().find(|option| !is_known(option)) {
        return Err(invalid(&field("mount_options"), &format!("{unknown:?} is none of {MOUNT_OPTIONS:?}")));
    }
    if mount.container_path.is_empty() || mount.container_path.contains('\0') {
        return Err(invalid("config.mounts.container_path", "is empty or holds a NUL"));
    }
    let image = mount.image.as_ref().map(|image| image_volume(&mount, image)).transpose()?;
    if image.is_none() && (!mount.host_path.starts_with('/') || mount.host_path.contains('\0')) {
        return Err(invalid(&field("host_path"), &format!("{:?} is not an absolute path", mount.host_path)));
    }
    let propagation = match v1::MountPropagation::try_from(mount.propagation) {
        Ok(v1::MountPropagation::PropagationPrivate) => MountPropagation::Private,
        Ok(v1::MountPropagation::PropagationHostToContainer) => MountPropagation::HostToContainer,
        Ok(v1::MountPropagation::PropagationBidirectional) => MountPropagation::Bidirectional,
        Err(_) => return Err(invalid(&field("propagation"), &format!("{} is unknown", mount.propagation))),
    };
    if mount.recursive_read_only && (!mount.readonly || propagation != MountPropagation::Private) {
        return Err(invalid(&field("recursive_read_only"), "needs readonly and private propagation"));
    }
    Ok(Mount {
        container_path: mount.container_path,
        host_path: mount.host_path,
        readonly: mount.readonly,
        selinux_relabel: mount.selinux_relabel,
        propagation,
        recursive_read_only: mount.recursive_read_only,
        image,
        uid_mappings: id_mappings(mount.uid_mappings),
        gid_mappings: id_mappings(mount.gid_mappings),
        options: mount.mount_options,
    })
}

/// Validates an image volume (KEP-4639; CRI 2.35).
fn image_volume(mount: &v1::Mount, image: &v1::ImageSpec) -> Result<ImageVolume, Error> {
    let refused = |field: &str, why: &str| {
        let field = format!("config.mounts[{}].{field}", mount.container_path);
        Err(invalid(&field, why).context("ImageVolumeMountFailed"))
    };
    if image.image.is_empty() {
        return refused("image.image", "missing");
    }
    if !mount.host_path.is_empty() {
        return refused("host_path", "must be empty: the mount is an image");
    }
    if !mount.readonly {
        return refused("readonly", "must be set: an image cannot be written");
    }
    if mount.propagation != i32::from(v1::MountPropagation::PropagationPrivate) {
        return refused("propagation", "must be private for an image");
    }
    let sub_path = &mount.image_sub_path;
    if sub_path.starts_with('/') || sub_path.contains('\0') || sub_path.split('/').any(|part| part == "..") {
        return refused("image_sub_path", &format!("{sub_path:?} is not a path inside the image"));
    }
    Ok(ImageVolume {
        image: image.image.clone(),
        user_specified_image: image.user_specified_image.clone(),
        sub_path: sub_path.clone(),
    })
}

fn device(device: v1::Device) -> Result<Device, Error> {
    let field = |what: &str| format!("config.devices[{}].{what}", device.host_path);
    if !device.host_path.starts_with('/') {
        return Err(invalid(&field("host_path"), "is not an absolute path"));
    }
    if !device.permissions.chars().all(|permission| "rwm".contains(permission)) {
        return Err(invalid(
            &field("permissions"),
            &format!("{:?} is not a subset of rwm", device.permissions),
        ));
    }
    let container_path = match device.container_path.is_empty() {
        true => device.host_path.clone(),
        false => device.container_path,
    };
    Ok(Device { container_path, host_path: device.host_path, permissions: device.permissions })
}

fn log_path(path: String) -> Result<String, Error> {
    let escapes = path.split('/').any(|part| part == "..");
    if escapes || path.starts_with('/') || path.contains('\0') {
        return Err(invalid("config.log_path", &format!("{path:?} leaves the pod's log directory")));
    }
    Ok(path)
}

fn stop_signal(signal: i32) -> Result<i32, Error> {
    // 65 is SIGNAL_SIGRTMAX, the last one of the enum.
    if (0..=65).contains(&signal) { Ok(signal) } else { Err(invalid("config.stop_signal", "is unknown")) }
}

fn pid_namespace(options: &v1::NamespaceOption) -> Result<ContainerPid, Error> {
    let field = "config.linux.security_context.namespace_options";
    // A container always has the user namespace of its pod, but the value must be valid.
    user_namespace(&format!("{field}.userns_options"), options.userns_options.as_ref())?;
    match v1::NamespaceMode::try_from(options.pid) {
        Ok(v1::NamespaceMode::Pod) => Ok(ContainerPid::Pod),
        Ok(v1::NamespaceMode::Container) => Ok(ContainerPid::Own),
        Ok(v1::NamespaceMode::Node) => Ok(ContainerPid::Node),
        Ok(v1::NamespaceMode::Target) => {
            let target: Result<ContainerId, _> = options.target_id.parse();
            target
                .map(ContainerPid::Target)
                .map_err(|error| invalid(&format!("{field}.target_id"), &error.to_string()))
        }
        Err(_) => Err(invalid(&format!("{field}.pid"), &format!("{} is unknown", options.pid))),
    }
}

fn security(context: Option<v1::LinuxContainerSecurityContext>) -> Result<Security, Error> {
    let field = |what: &str| format!("config.linux.security_context.{what}");
    let is_absent = context.is_none();
    let context = context.unwrap_or_default();
    // Both are ignored for privileged containers (CRI 3.4).
    let asked = seccomp(&field("seccomp"), context.seccomp.as_ref(), &context.seccomp_profile_path)?;
    let (wants_default_seccomp, localhost_seccomp) = match asked {
        _ if context.privileged => (false, String::new()),
        SeccompAsked::Unconfined => (false, String::new()),
        SeccompAsked::RuntimeDefault => (true, String::new()),
        SeccompAsked::Localhost(path) => (false, path),
    };
    let apparmor = apparmor(&field("apparmor"), &context)?;
    let selinux = selinux(&field("selinux_options"), context.selinux_options.as_ref())?;
    let id = |what: &str, value: Option<v1::Int64Value>| {
        let number = |value: i64| {
            // (uid_t)-1 means "unchanged" in the kernel.
            u32::try_from(value)
                .ok()
                .filter(|id| *id != u32::MAX)
                .ok_or_else(|| invalid(&field(what), &format!("{value} is not a user or group id")))
        };
        value.map(|value| number(value.value)).transpose()
    };
    let groups_policy = match v1::SupplementalGroupsPolicy::try_from(context.supplemental_groups_policy) {
        Ok(v1::SupplementalGroupsPolicy::Merge) => GroupsPolicy::Merge,
        Ok(v1::SupplementalGroupsPolicy::Strict) => GroupsPolicy::Strict,
        Err(_) => return Err(invalid(&field("supplemental_groups_policy"), "is unknown")),
    };
    let group = |value: i64| id("supplemental_groups", Some(v1::Int64Value { value }));
    let supplemental_groups: Vec<Option<u32>> =
        context.supplemental_groups.into_iter().map(group).collect::<Result<_, _>>()?;
    let run_as_user = id("run_as_user", context.run_as_user)?;
    let run_as_group = id("run_as_group", context.run_as_group)?;
    if run_as_group.is_some() && run_as_user.is_none() && context.run_as_username.is_empty() {
        return Err(invalid(&field("run_as_group"), "needs run_as_user or run_as_username"));
    }
    let capabilities = context.capabilities.unwrap_or_default();
    let owned = |paths: &[&str]| paths.iter().map(|path| (*path).to_owned()).collect::<Vec<_>>();
    let (masked_paths, readonly_paths) = match is_absent {
        true => (owned(plan::MASKED_PATHS), owned(plan::READONLY_PATHS)),
        false => (context.masked_paths, context.readonly_paths),
    };
    Ok(Security {
        run_as_user,
        run_as_username: context.run_as_username,
        run_as_group,
        supplemental_groups: supplemental_groups.into_iter().flatten().collect(),
        groups_policy,
        add_capabilities: capabilities.add_capabilities,
        drop_capabilities: capabilities.drop_capabilities,
        ambient_capabilities: capabilities.add_ambient_capabilities,
        privileged: context.privileged,
        readonly_rootfs: context.readonly_rootfs,
        attributes: plan::Attributes { no_new_privileges: context.no_new_privs },
        wants_default_seccomp,
        masked_paths,
        readonly_paths,
        localhost_seccomp,
        apparmor,
        selinux,
    })
}

/// The AppArmor profile's name for [`Security::apparmor`]: from the field, otherwise from the deprecated string (CRI 3.7).
fn apparmor(field: &str, context: &v1::LinuxContainerSecurityContext) -> Result<String, Error> {
    use v1::security_profile::ProfileType;
    let named = |name: &str| {
        let name = name.strip_prefix("localhost/").unwrap_or(name);
        match name.is_empty() || name.contains(['\0', '\n']) {
            true => Err(invalid(field, &format!("{name:?} is no profile's name"))),
            false => Ok(name.to_owned()),
        }
    };
    if context.privileged {
        return Ok(APPARMOR_UNCONFINED.to_owned());
    }
    match (&context.apparmor, context.apparmor_profile.as_str()) {
        (Some(profile), _) => match ProfileType::try_from(profile.profile_type) {
            Ok(ProfileType::RuntimeDefault) => Ok(APPARMOR_RUNTIME_DEFAULT.to_owned()),
            Ok(ProfileType::Unconfined) => Ok(APPARMOR_UNCONFINED.to_owned()),
            Ok(ProfileType::Localhost) => named(&profile.localhost_ref),
            Err(_) => Err(invalid(field, &format!("has an unknown profile type {}", profile.profile_type))),
        },
        (None, "") => Ok(String::new()),
        (None, APPARMOR_RUNTIME_DEFAULT) => Ok(APPARMOR_RUNTIME_DEFAULT.to_owned()),
        (None, "unconfined") => Ok(APPARMOR_UNCONFINED.to_owned()),
        (None, name) if name.starts_with("localhost/") => named(name),
        (None, name) => Err(invalid(field, &format!("{name:?} is no profile"))),
    }
}

/// The requested SELinux label; `None` if all its parts are empty.
pub(crate) fn selinux(
    field: &str,
    options: Option<&v1::SeLinuxOption>,
) -> Result<Option<SelinuxLabel>, Error> {
    let Some(options) = options.filter(|options| **options != v1::SeLinuxOption::default()) else {
        return Ok(None);
    };
    let v1::SeLinuxOption { user, role, r#type: kind, level } = options.clone();
    let asked = lsm::Options { user, role, kind, level };
    asked.check().map_err(|part| invalid(&format!("{field}.{part}"), "is no part of an SELinux label"))?;
    let lsm::Options { user, role, kind, level } = asked;
    Ok(Some(SelinuxLabel { user, role, kind, level }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> v1::ContainerConfig {
        v1::ContainerConfig {
            metadata: Some(v1::ContainerMetadata { name: "nginx".into(), attempt: 0 }),
            image: Some(v1::ImageSpec { image: "nginx".into(), ..Default::default() }),
            ..Default::default()
        }
    }

    fn context(change: impl FnOnce(&mut v1::LinuxContainerSecurityContext)) -> v1::ContainerConfig {
        let mut context = v1::LinuxContainerSecurityContext::default();
        change(&mut context);
        let linux = v1::LinuxContainerConfig { security_context: Some(context), ..Default::default() };
        v1::ContainerConfig { linux: Some(linux), ..config() }
    }

    #[test]
    fn masked_paths_are_the_usual_ones_only_without_a_security_context() {
        assert!(container_spec(config()).unwrap().security.masked_paths.contains(&"/proc/kcore".to_owned()));
        assert!(container_spec(context(|_| ())).unwrap().security.masked_paths.is_empty());
    }

    #[test]
    fn errors_name_the_invalid_field() {
        let mount = |change: fn(&mut v1::Mount)| {
            let mut mount =
                v1::Mount { container_path: "/data".into(), host_path: "/srv".into(), ..Default::default() };
            change(&mut mount);
            v1::ContainerConfig { mounts: vec![mount], ..config() }
        };
        let variable = |key: &str| {
            let variable = v1::KeyValue { key: key.into(), value: b"secret".to_vec() };
            v1::ContainerConfig { envs: vec![variable], ..config() }
        };
        for (expected, config) in [
            ("config.metadata: missing", v1::ContainerConfig { metadata: None, ..config() }),
            ("config.image: missing", v1::ContainerConfig { image: None, ..config() }),
            ("config.log_path", v1::ContainerConfig { log_path: "../../etc/x".into(), ..config() }),
            ("config.envs: \"A=B\"", variable("A=B")),
            ("config.mounts[/data].host_path: \"srv\"", mount(|mount| mount.host_path = "srv".into())),
            ("recursive_read_only: needs readonly", mount(|mount| mount.recursive_read_only = true)),
            ("propagation: 9 is unknown", mount(|mount| mount.propagation = 9)),
            ("ImageVolumeMountFailed", mount(|mount| mount.image = Some(v1::ImageSpec::default()))),
            ("\"suid\" is none of", mount(|mount| mount.mount_options = vec!["suid".into()])),
            (
                "run_as_user: -1 is not",
                context(|context| context.run_as_user = Some(v1::Int64Value { value: -1 })),
            ),
            (
                "run_as_group: needs",
                context(|context| context.run_as_group = Some(v1::Int64Value { value: 5 })),
            ),
            (
                "supplemental_groups_policy: is unknown",
                context(|context| context.supplemental_groups_policy = 5),
            ),
        ] {
            let error = container_spec(config).unwrap_err().to_string();
            assert!(error.contains(expected), "expected {expected:?} in {error:?}");
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
