//! Converts `PodSandboxConfig` to [`PodSpec`] and back; no other module accesses the pod's CRI fields.
//!
//! Refused with the name of the field: values that are missing, out of range, or would be ignored although
//! they change the privileges of the pod (SKEW-2, SKEW-7). Rules: CRI 2.5, CRI 2.36, CRI 3.1, CRI 3.12, CRI
//! 4.1.

use coracle_base::error::{Error, Kind};
use coracle_engine::spec::{
    Dns, IdMapping, Pairs, PodName, PodNamespaces, PodPid, PodSpec, Sharing, UserNamespace,
};
use coracle_job::PortMapping;
use coracle_sandbox::collect::ordered;

use crate::rpc::v1;

/// Validates and converts `config`.
pub(crate) fn pod_spec(config: v1::PodSandboxConfig, runtime_handler: String) -> Result<PodSpec, Error> {
    let metadata = config.metadata.ok_or_else(|| missing("config.metadata"))?;
    let name = PodName {
        name: required("config.metadata.name", metadata.name)?,
        namespace: required("config.metadata.namespace", metadata.namespace)?,
        uid: required("config.metadata.uid", metadata.uid)?,
        attempt: metadata.attempt,
    };
    let linux = config.linux.unwrap_or_default();
    let security = linux.security_context.unwrap_or_default();
    if security.run_as_group.is_some() && security.run_as_user.is_none() {
        return Err(invalid("config.linux.security_context.run_as_group", "needs run_as_user"));
    }
    // The monitor is the runtime's own code and is not confined by this profile, but an invalid value is an
    // error.
    seccomp(
        "config.linux.security_context.seccomp",
        security.seccomp.as_ref(),
        &security.seccomp_profile_path,
    )?;
    let selinux = super::container_config::selinux(
        "config.linux.security_context.selinux_options",
        security.selinux_options.as_ref(),
    )?;
    let options = security.namespace_options.unwrap_or_default();
    let namespaces = namespaces(&options)?;
    let hostname = hostname(config.hostname)?;
    if namespaces.network == Sharing::Node
        && !hostname.is_empty()
        && hostname != coracle_engine::node_hostname()
    {
        let why = "a pod on the node's network has the node's host name";
        return Err(invalid("config.hostname", &format!("{hostname:?}: {why}")));
    }
    let log_directory = config.log_directory;
    if !log_directory.is_empty() && !log_directory.starts_with('/') {
        return Err(invalid("config.log_directory", "is not an absolute path"));
    }
    Ok(PodSpec {
        name,
        hostname,
        log_directory,
        dns: config.dns_config.map(dns).transpose()?,
        ports: config.port_mappings.into_iter().map(port).collect::<Result<_, _>>()?,
        labels: pairs(config.labels),
        annotations: pairs(config.annotations),
        runtime_handler,
        cgroup_parent: linux.cgroup_parent,
        namespaces,
        privileged: security.privileged,
        sysctls: pairs(linux.sysctls),
        user_namespace: user_namespace(
            "config.linux.security_context.namespace_options.userns_options",
            options.userns_options.as_ref(),
        )?,
        overhead: linux.overhead.map(super::container_config::resources),
        resources: linux.resources.map(super::container_config::resources),
        selinux,
    })
}

/// The requested namespace options, for PodSandboxStatus.
pub(crate) fn namespace_options(spec: &PodSpec) -> v1::NamespaceOption {
    let namespaces = spec.namespaces;
    let sharing = |sharing| match sharing {
        Sharing::Pod => v1::NamespaceMode::Pod,
        Sharing::Node => v1::NamespaceMode::Node,
    };
    let pid = match namespaces.pid {
        PodPid::Pod => v1::NamespaceMode::Pod,
        PodPid::Container => v1::NamespaceMode::Container,
        PodPid::Node => v1::NamespaceMode::Node,
    };
    v1::NamespaceOption {
        network: sharing(namespaces.network).into(),
        ipc: sharing(namespaces.ipc).into(),
        pid: pid.into(),
        userns_options: spec.user_namespace.as_ref().map(|namespace| v1::UserNamespace {
            mode: v1::NamespaceMode::Pod.into(),
            uids: cri_mappings(&namespace.uids),
            gids: cri_mappings(&namespace.gids),
        }),
        ..Default::default()
    }
}

/// Converts ID mappings from the CRI.
pub(crate) fn id_mappings(mappings: Vec<v1::IdMapping>) -> Vec<IdMapping> {
    let kept = |one: v1::IdMapping| IdMapping {
        container_id: one.container_id,
        host_id: one.host_id,
        length: one.length,
    };
    mappings.into_iter().map(kept).collect()
}

/// Converts ID mappings to the CRI.
pub(crate) fn cri_mappings(mappings: &[IdMapping]) -> Vec<v1::IdMapping> {
    let given = |one: &IdMapping| v1::IdMapping {
        container_id: one.container_id,
        host_id: one.host_id,
        length: one.length,
    };
    mappings.iter().map(given).collect()
}

/// Converts the name to the metadata of the request.
pub(crate) fn metadata(name: &PodName) -> v1::PodSandboxMetadata {
    v1::PodSandboxMetadata {
        name: name.name.clone(),
        uid: name.uid.clone(),
        namespace: name.namespace.clone(),
        attempt: name.attempt,
    }
}

/// Converts a CRI map into sorted pairs, so that equal requests become equal specs.
pub(crate) fn pairs(map: std::collections::HashMap<String, String>) -> Pairs {
    ordered::<_, std::collections::BTreeMap<_, _>>(map).into_iter().collect()
}

/// Converts pairs into a CRI map.
pub(crate) fn map(pairs: &Pairs) -> std::collections::HashMap<String, String> {
    pairs.iter().cloned().collect()
}

/// The requested seccomp profile (CRI 3.4).
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SeccompAsked {
    /// No profile: none was requested, or `Unconfined`.
    Unconfined,
    /// The runtime's default profile.
    RuntimeDefault,
    /// Path of a profile on the node.
    Localhost(String),
}

/// Parses the field with the profile, or if it is absent the deprecated path (`localhost/PATH`, `runtime/default`).
pub(crate) fn seccomp(
    field: &str,
    profile: Option<&v1::SecurityProfile>,
    deprecated_path: &str,
) -> Result<SeccompAsked, Error> {
    use v1::security_profile::ProfileType;
    let localhost = |path: &str| match path.starts_with('/') && !path.contains('\0') {
        true => Ok(SeccompAsked::Localhost(path.to_owned())),
        false => Err(invalid(field, &format!("{path:?} is not an absolute path"))),
    };
    match (profile, deprecated_path) {
        (Some(profile), _) => match ProfileType::try_from(profile.profile_type) {
            Ok(ProfileType::RuntimeDefault) => Ok(SeccompAsked::RuntimeDefault),
            Ok(ProfileType::Unconfined) => Ok(SeccompAsked::Unconfined),
            Ok(ProfileType::Localhost) => localhost(&profile.localhost_ref),
            Err(_) => Err(invalid(field, &format!("has an unknown profile type {}", profile.profile_type))),
        },
        (None, "runtime/default" | "docker/default") => Ok(SeccompAsked::RuntimeDefault),
        (None, "" | "unconfined") => Ok(SeccompAsked::Unconfined),
        (None, path) => match path.strip_prefix("localhost/") {
            Some(path) => localhost(path),
            None => Err(invalid(field, &format!("{path:?} is no profile"))),
        },
    }
}

/// The error for a missing or empty `field`.
pub(crate) fn missing(field: &str) -> Error {
    Error::new(Kind::InvalidArgument, format!("{field}: missing"))
}

/// The error for an invalid value of `field`.
pub(crate) fn invalid(field: &str, why: &str) -> Error {
    Error::new(Kind::InvalidArgument, format!("{field}: {why}"))
}

/// Returns the value of `field`, or an error if it is empty.
pub(crate) fn required(field: &str, value: String) -> Result<String, Error> {
    if value.is_empty() { Err(missing(field)) } else { Ok(value) }
}

fn hostname(name: String) -> Result<String, Error> {
    // sethostname(2): at most 64 bytes. A newline would be written to /etc/hostname.
    if name.len() > 64 || name.bytes().any(|byte| byte.is_ascii_control()) {
        return Err(invalid("config.hostname", "is longer than 64 bytes or holds control characters"));
    }
    Ok(name)
}

fn dns(config: v1::DnsConfig) -> Result<Dns, Error> {
    for (field, values) in
        [("servers", &config.servers), ("searches", &config.searches), ("options", &config.options)]
    {
        if values.iter().any(|value| value.bytes().any(|byte| byte.is_ascii_control())) {
            return Err(invalid(&format!("config.dns_config.{field}"), "holds control characters"));
        }
    }
    Ok(Dns { servers: config.servers, searches: config.searches, options: config.options })
}

fn port(mapping: v1::PortMapping) -> Result<PortMapping, Error> {
    let protocol = match v1::Protocol::try_from(mapping.protocol) {
        Ok(v1::Protocol::Tcp) => "tcp",
        Ok(v1::Protocol::Udp) => "udp",
        Ok(v1::Protocol::Sctp) => "sctp",
        Err(_) => return Err(invalid("config.port_mappings.protocol", "is unknown")),
    };
    let number = |field: &str, value: i32| {
        u16::try_from(value)
            .map_err(|_| invalid(&format!("config.port_mappings.{field}"), &format!("{value} is not a port")))
    };
    Ok(PortMapping {
        protocol: protocol.to_owned(),
        container_port: number("container_port", mapping.container_port)?,
        host_port: number("host_port", mapping.host_port)?,
        host_ip: mapping.host_ip,
    })
}

fn namespaces(options: &v1::NamespaceOption) -> Result<PodNamespaces, Error> {
    let field = |name: &str| format!("config.linux.security_context.namespace_options.{name}");
    let sharing = |name: &str, mode: i32| match v1::NamespaceMode::try_from(mode) {
        Ok(v1::NamespaceMode::Pod) => Ok(Sharing::Pod),
        Ok(v1::NamespaceMode::Node) => Ok(Sharing::Node),
        Ok(_) | Err(_) => Err(invalid(&field(name), "is neither POD nor NODE")),
    };
    let pid = match v1::NamespaceMode::try_from(options.pid) {
        Ok(v1::NamespaceMode::Pod) => PodPid::Pod,
        Ok(v1::NamespaceMode::Container) => PodPid::Container,
        Ok(v1::NamespaceMode::Node) => PodPid::Node,
        Ok(v1::NamespaceMode::Target) | Err(_) => {
            return Err(invalid(&field("pid"), "is not POD, CONTAINER or NODE"));
        }
    };
    Ok(PodNamespaces {
        network: sharing("network", options.network)?,
        ipc: sharing("ipc", options.ipc)?,
        pid,
    })
}

/// The requested user namespace; `None`: the pod uses the node's (CRI 3.2).
pub(crate) fn user_namespace(
    field: &str,
    options: Option<&v1::UserNamespace>,
) -> Result<Option<UserNamespace>, Error> {
    let Some(options) = options else { return Ok(None) };
    match v1::NamespaceMode::try_from(options.mode) {
        Ok(v1::NamespaceMode::Node) if options.uids.is_empty() && options.gids.is_empty() => Ok(None),
        Ok(v1::NamespaceMode::Node) => Err(invalid(field, "has mappings although the mode is NODE")),
        Ok(v1::NamespaceMode::Pod) => {
            mappings(&format!("{field}.uids"), &options.uids)?;
            mappings(&format!("{field}.gids"), &options.gids)?;
            Ok(Some(UserNamespace {
                uids: id_mappings(options.uids.clone()),
                gids: id_mappings(options.gids.clone()),
            }))
        }
        Ok(_) | Err(_) => Err(invalid(field, "has a mode that is neither POD nor NODE")),
    }
}

fn mappings(field: &str, mappings: &[v1::IdMapping]) -> Result<(), Error> {
    let [one] = mappings else {
        return Err(invalid(field, &format!("must be one mapping, not {}", mappings.len())));
    };
    if one.container_id != 0 {
        return Err(invalid(field, "does not map 0: a container without root cannot be set up"));
    }
    // u32::MAX is not a valid ID (chown(2) takes it as "unchanged").
    if one.length == 0 || one.host_id.checked_add(one.length).is_none() {
        return Err(invalid(field, &format!("{} ids from {} are no range", one.length, one.host_id)));
    }
    if one.host_id == 0 {
        return Err(invalid(field, "maps the container's root to the node's"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> v1::PodSandboxConfig {
        v1::PodSandboxConfig {
            metadata: Some(v1::PodSandboxMetadata {
                name: "web".into(),
                uid: "u".into(),
                namespace: "default".into(),
                attempt: 1,
            }),
            ..Default::default()
        }
    }

    fn with(change: impl FnOnce(&mut v1::PodSandboxConfig)) -> Result<PodSpec, Error> {
        let mut config = config();
        change(&mut config);
        pod_spec(config, String::new())
    }

    #[test]
    fn an_absent_security_context_means_pod_everywhere() {
        let spec = with(|_| ()).unwrap();
        let expected = PodNamespaces { network: Sharing::Pod, ipc: Sharing::Pod, pid: PodPid::Pod };
        assert_eq!(spec.namespaces, expected);
        assert_eq!(spec.dns, None);
    }

    #[test]
    fn errors_name_the_invalid_field() {
        type Change = fn(&mut v1::PodSandboxConfig);
        let cases: [(&str, Change); 9] = [
            ("config.metadata: missing", |config| config.metadata = None),
            ("config.metadata.uid: missing", |config| {
                config.metadata.as_mut().unwrap().uid.clear();
            }),
            ("config.log_directory: is not an absolute path", |config| config.log_directory = "logs".into()),
            ("config.hostname: is longer", |config| config.hostname = "x".repeat(65)),
            ("config.hostname: \"not-the-nodes\": a pod on the node's network", |config| {
                config.hostname = "not-the-nodes".into();
                options(config, |options| options.network = v1::NamespaceMode::Node.into());
            }),
            ("config.dns_config.servers: holds control", |config| {
                let servers = vec!["1.1.1.1\nnameserver 6.6.6.6".to_owned()];
                config.dns_config = Some(v1::DnsConfig { servers, ..Default::default() });
            }),
            ("config.port_mappings.host_port: 65536 is not a port", |config| {
                config.port_mappings.push(v1::PortMapping { host_port: 65536, ..Default::default() });
            }),
            ("namespace_options.pid: is not POD", |config| {
                options(config, |options| options.pid = v1::NamespaceMode::Target.into());
            }),
            ("namespace_options.network: is neither POD nor NODE", |config| {
                options(config, |options| options.network = 77);
            }),
        ];
        for (expected, change) in cases {
            let error = with(change).unwrap_err().to_string();
            assert!(error.contains(expected), "expected {expected:?} in {error:?}");
        }
    }

    fn options(config: &mut v1::PodSandboxConfig, change: impl FnOnce(&mut v1::NamespaceOption)) {
        let linux = config.linux.get_or_insert_default();
        let security = linux.security_context.get_or_insert_default();
        change(security.namespace_options.get_or_insert_default());
    }
}
