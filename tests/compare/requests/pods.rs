//! Changes of a RunPodSandbox request.

use coracle_tests::cri::proto::{
    DnsConfig, Int64Value, LinuxPodSandboxConfig, LinuxSandboxSecurityContext, NamespaceMode,
    NamespaceOption, PodSandboxConfig, PodSandboxMetadata, PortMapping, RunPodSandboxRequest,
    SecurityProfile,
};
use coracle_tests::request::{bridge_pod, host_pod, namespaces, user_namespace};

use super::Row;

/// Subject of the changes.
pub(super) type Draft = RunPodSandboxRequest;

/// A kind of pod: with the host's network, or with its own.
pub(super) type Kind = fn(&str) -> PodSandboxConfig;

/// All rows, each with the kind of pod that it changes.
pub(super) fn rows() -> impl Iterator<Item = (Kind, Row<Draft>)> {
    let with = |kind: Kind| move |row: &Row<Draft>| (kind, *row);
    HOST.iter().map(with(host_pod)).chain(BRIDGE.iter().map(with(bridge_pod)))
}

const HOST: &[Row<Draft>] = &[
    ("unchanged", |_| ()),
    ("config missing", |d| d.config = None),
    ("handler unknown", |d| d.runtime_handler = "unknown".into()),
    ("handler runc", |d| d.runtime_handler = "runc".into()),
    ("metadata missing", |d| config(d).metadata = None),
    ("metadata.name empty", |d| metadata(d).name.clear()),
    ("metadata.namespace empty", |d| metadata(d).namespace.clear()),
    ("metadata.uid empty", |d| metadata(d).uid.clear()),
    ("metadata.name very long", |d| metadata(d).name = "n".repeat(5000)),
    ("metadata.name with a slash", |d| metadata(d).name = "a/../b".into()),
    ("metadata.name with NUL", |d| metadata(d).name = "a\0b".into()),
    ("metadata.uid with ..", |d| metadata(d).uid = "../../x".into()),
    ("metadata.attempt of the maximum", |d| metadata(d).attempt = u32::MAX),
    ("log_directory empty", |d| config(d).log_directory.clear()),
    ("log_directory relative", |d| config(d).log_directory = "logs".into()),
    ("log_directory missing", |d| config(d).log_directory = "/PLACES/new/logs".into()),
    ("hostname with the host's network", |d| config(d).hostname = "name".into()),
    ("dns_config missing", |d| config(d).dns_config = None),
    ("dns_config empty", |d| config(d).dns_config = Some(DnsConfig::default())),
    ("dns servers nonsense", |d| dns(d).servers = vec!["nonsense".into()]),
    ("dns servers many", |d| dns(d).servers = (0..10).map(|i| format!("192.0.2.{i}")).collect()),
    ("dns servers with a line break", |d| dns(d).servers = vec!["192.0.2.1\noptions x".into()]),
    ("dns searches many", |d| dns(d).searches = (0..40).map(|i| format!("s{i}.example")).collect()),
    ("dns searches empty word", |d| dns(d).searches = vec![String::new()]),
    ("dns searches very long", |d| dns(d).searches = vec!["s".repeat(3000)]),
    ("dns options odd", |d| dns(d).options = vec!["ndots:99".into(), "nonsense".into(), String::new()]),
    ("dns options alone", |d| {
        config(d).dns_config = Some(DnsConfig { options: vec!["ndots:5".into()], ..Default::default() });
    }),
    ("labels none", |d| config(d).labels.clear()),
    ("labels odd", |d| {
        config(d).labels.insert("ключ \n".into(), "\u{7f}".into());
    }),
    ("labels with NUL", |d| {
        config(d).labels.insert("a\0".into(), "b\0".into());
    }),
    ("labels very long", |d| {
        config(d).labels.insert("key".into(), "v".repeat(10_000));
    }),
    ("annotations very long", |d| {
        config(d).annotations.insert("key".into(), "v".repeat(300_000));
    }),
    ("annotations empty key", |d| {
        config(d).annotations.insert(String::new(), "v".into());
    }),
    ("linux missing", |d| config(d).linux = None),
    ("security_context missing", |d| linux(d).security_context = None),
    ("namespaces missing", |d| context(d).namespace_options = None),
    ("namespaces network unknown", |d| options(d).network = 9),
    ("namespaces network container", |d| options(d).network = NamespaceMode::Container.into()),
    ("namespaces network target", |d| options(d).network = NamespaceMode::Target.into()),
    ("namespaces pid pod", |d| options(d).pid = NamespaceMode::Pod.into()),
    ("namespaces pid node", |d| options(d).pid = NamespaceMode::Node.into()),
    ("namespaces pid target", |d| options(d).pid = NamespaceMode::Target.into()),
    ("namespaces pid unknown", |d| options(d).pid = 9),
    ("namespaces ipc node", |d| options(d).ipc = NamespaceMode::Node.into()),
    ("namespaces ipc container", |d| options(d).ipc = NamespaceMode::Container.into()),
    ("namespaces ipc unknown", |d| options(d).ipc = 9),
    ("namespaces user with the host's network", |d| {
        options(d).userns_options = Some(user_namespace(1_000_000));
    }),
    ("run_as_user", |d| context(d).run_as_user = Some(Int64Value { value: 1000 })),
    ("run_as_user negative", |d| context(d).run_as_user = Some(Int64Value { value: -1 })),
    ("run_as_group alone", |d| context(d).run_as_group = Some(Int64Value { value: 1000 })),
    ("supplemental_groups negative", |d| context(d).supplemental_groups = vec![-1]),
    ("readonly_rootfs", |d| context(d).readonly_rootfs = true),
    ("privileged", |d| context(d).privileged = true),
    ("seccomp unknown type", |d| context(d).seccomp = profile(9, "")),
    ("seccomp localhost missing", |d| context(d).seccomp = profile(2, "/no/such/profile.json")),
    ("seccomp localhost of no JSON", |d| context(d).seccomp = profile(2, "/etc/hostname")),
    ("apparmor localhost missing", |d| context(d).apparmor = profile(2, "no-such-profile")),
    ("seccomp_profile_path nonsense", |d| context(d).seccomp_profile_path = "nonsense".into()),
    ("cgroup_parent relative", |d| linux(d).cgroup_parent = "compare-odd/relative".into()),
    ("cgroup_parent absolute", |d| linux(d).cgroup_parent = "/compare-odd/absolute".into()),
    ("cgroup_parent with ..", |d| linux(d).cgroup_parent = "/compare-odd/../compare-odd".into()),
    ("cgroup_parent with slash at the end", |d| linux(d).cgroup_parent = "/compare-odd/".into()),
    ("cgroup_parent with NUL", |d| linux(d).cgroup_parent = "/compare\0odd".into()),
    ("sysctls net in the host's network", |d| sysctl(d, "net.ipv4.ip_default_ttl", "64")),
    ("sysctls of the node", |d| sysctl(d, "vm.overcommit_ratio", "50")),
    ("sysctls unknown", |d| sysctl(d, "nonsense.key", "1")),
    ("sysctls empty key", |d| sysctl(d, "", "1")),
    ("sysctls with ..", |d| sysctl(d, "kernel/../vm/overcommit_ratio", "50")),
    ("sysctls kernel.msgmax", |d| sysctl(d, "kernel.msgmax", "8193")),
    ("sysctls with slashes", |d| sysctl(d, "kernel/msgmax", "8193")),
    ("sysctls kernel.msgmax in the host's IPC", |d| {
        sysctl(d, "kernel.msgmax", "8192");
        options(d).ipc = NamespaceMode::Node.into();
    }),
    ("sysctls bad value", |d| sysctl(d, "kernel.msgmax", "many")),
    ("sysctls empty value", |d| sysctl(d, "kernel.msgmax", "")),
    ("sysctls fs.mqueue", |d| sysctl(d, "fs.mqueue.msg_max", "20")),
    ("sysctls kernel.domainname", |d| sysctl(d, "kernel.domainname", "example")),
    ("sysctls kernel.hostname", |d| sysctl(d, "kernel.hostname", "other")),
    ("resources negative memory", |d| linux(d).resources.get_or_insert_default().memory_limit_in_bytes = -5),
    ("overhead", |d| linux(d).overhead.get_or_insert_default().cpu_shares = 100),
];

const BRIDGE: &[Row<Draft>] = &[
    ("own network", |_| ()),
    ("sysctls kernel.domainname in the own network", |d| sysctl(d, "kernel.domainname", "example")),
    ("hostname empty", |d| config(d).hostname.clear()),
    ("hostname of 64 characters", |d| config(d).hostname = "h".repeat(64)),
    ("hostname too long", |d| config(d).hostname = "h".repeat(65)),
    ("hostname with a slash", |d| config(d).hostname = "a/b".into()),
    ("hostname with a line break", |d| config(d).hostname = "a\nb".into()),
    ("hostname with NUL", |d| config(d).hostname = "a\0b".into()),
    ("hostname with blanks", |d| config(d).hostname = "a b".into()),
    ("hostname with dots", |d| config(d).hostname = "a.b.c".into()),
    ("hostname upper case", |d| config(d).hostname = "UPPER".into()),
    ("sysctls net", |d| sysctl(d, "net.ipv4.ip_default_ttl", "63")),
    ("sysctls net with slashes", |d| sysctl(d, "net/ipv4/ip_default_ttl", "63")),
    ("sysctls net unknown", |d| sysctl(d, "net.ipv4.nonsense", "1")),
    ("sysctls net bad value", |d| sysctl(d, "net.ipv4.ip_default_ttl", "many")),
    ("port without host port", |d| port(d, 0, 80, 0, "")),
    ("port negative", |d| port(d, 0, -1, 0, "")),
    ("port container port zero", |d| port(d, 0, 0, 0, "")),
    ("port too big", |d| port(d, 0, 70_000, 0, "")),
    ("port host port negative", |d| port(d, 0, 80, -1, "")),
    ("port host port too big", |d| port(d, 0, 80, 70_000, "")),
    ("port protocol unknown", |d| port(d, 9, 80, 0, "")),
    ("port host_ip nonsense without host port", |d| port(d, 0, 80, 0, "nonsense")),
    ("namespaces pid pod in the own network", |d| options(d).pid = NamespaceMode::Pod.into()),
    ("namespaces user", |d| options(d).userns_options = Some(user_namespace(1_000_000))),
    ("namespaces user mode node", |d| {
        options(d).userns_options.get_or_insert_default().mode = NamespaceMode::Node.into();
    }),
    ("namespaces user mode unknown", |d| options(d).userns_options.get_or_insert_default().mode = 9),
    ("namespaces user mode container", |d| {
        options(d).userns_options.get_or_insert(user_namespace(1_000_000)).mode =
            NamespaceMode::Container.into();
    }),
    ("namespaces user without mappings", |d| {
        options(d).userns_options.get_or_insert_default().mode = NamespaceMode::Pod.into();
    }),
    ("namespaces user without gids", |d| {
        options(d).userns_options.get_or_insert(user_namespace(1_000_000)).gids.clear();
    }),
    ("namespaces user with other gids", |d| {
        options(d)
            .userns_options
            .get_or_insert(user_namespace(1_000_000))
            .gids
            .iter_mut()
            .for_each(|one| one.host_id += 1);
    }),
    ("namespaces user mapping of no length", |d| {
        let namespace = options(d).userns_options.get_or_insert(user_namespace(1_000_000));
        namespace.uids.iter_mut().for_each(|one| one.length = 0);
        namespace.gids.iter_mut().for_each(|one| one.length = 0);
    }),
    ("namespaces user two mappings", |d| {
        let namespace = options(d).userns_options.get_or_insert(user_namespace(1_000_000));
        namespace.uids.extend(namespace.uids.first().copied());
        namespace.gids.extend(namespace.gids.first().copied());
    }),
    ("namespaces user mapping without root", |d| {
        let namespace = options(d).userns_options.get_or_insert(user_namespace(1_000_000));
        namespace.uids.iter_mut().for_each(|one| one.container_id = 1);
        namespace.gids.iter_mut().for_each(|one| one.container_id = 1);
    }),
    ("namespaces user mapping too far", |d| {
        options(d).userns_options = Some(user_namespace(u32::MAX - 10));
    }),
];

fn config(draft: &mut Draft) -> &mut PodSandboxConfig {
    draft.config.get_or_insert_default()
}

fn metadata(draft: &mut Draft) -> &mut PodSandboxMetadata {
    config(draft).metadata.get_or_insert_with(|| PodSandboxMetadata {
        name: "odd".into(),
        uid: "uid-odd".into(),
        namespace: "default".into(),
        attempt: 0,
    })
}

fn dns(draft: &mut Draft) -> &mut DnsConfig {
    config(draft).dns_config.get_or_insert_default()
}

fn linux(draft: &mut Draft) -> &mut LinuxPodSandboxConfig {
    config(draft).linux.get_or_insert_default()
}

fn context(draft: &mut Draft) -> &mut LinuxSandboxSecurityContext {
    linux(draft).security_context.get_or_insert_default()
}

fn options(draft: &mut Draft) -> &mut NamespaceOption {
    context(draft).namespace_options.get_or_insert_with(|| namespaces(NamespaceMode::Node))
}

fn sysctl(draft: &mut Draft, name: &str, value: &str) {
    linux(draft).sysctls.insert(name.into(), value.into());
}

#[expect(clippy::unnecessary_wraps, reason = "a field of a message")]
fn profile(kind: i32, reference: &str) -> Option<SecurityProfile> {
    Some(SecurityProfile { profile_type: kind, localhost_ref: reference.into() })
}

fn port(draft: &mut Draft, protocol: i32, inside: i32, outside: i32, address: &str) {
    config(draft).port_mappings.push(PortMapping {
        protocol,
        container_port: inside,
        host_port: outside,
        host_ip: address.into(),
    });
}
