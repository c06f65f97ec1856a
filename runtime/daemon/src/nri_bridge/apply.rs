//! Applies a merged NRI adjustment to a container before any of its objects is created. An unsupported adjustment fails the
//! creation; none is ignored silently (NRI 4.3, 4.4).

use std::path::{Path, PathBuf};

use coracle_base::error::{Error, Kind};
use coracle_engine::spec::{ContainerPid, PodPid};
use coracle_engine::{Node, Pod, Resolved, compile_filter};
use coracle_nri::api;
use coracle_sandbox::cgroup::{self, CgroupPath, DeviceAccess, DeviceRule};
use coracle_sandbox::{Propagation, plan, probe, seccomp};
use prost::Message;

use super::limits;

/// Mount point of resctrl, the kernel's cache and memory bandwidth allocation.
const RESCTRL: &str = "/sys/fs/resctrl";

/// Names of the resource limits of getrlimit(2) by number, equal on all supported architectures
/// (include/uapi/asm-generic/resource.h).
const RLIMITS: [&str; 16] = [
    "RLIMIT_CPU",
    "RLIMIT_FSIZE",
    "RLIMIT_DATA",
    "RLIMIT_STACK",
    "RLIMIT_CORE",
    "RLIMIT_RSS",
    "RLIMIT_NPROC",
    "RLIMIT_NOFILE",
    "RLIMIT_MEMLOCK",
    "RLIMIT_AS",
    "RLIMIT_LOCKS",
    "RLIMIT_SIGPENDING",
    "RLIMIT_MSGQUEUE",
    "RLIMIT_NICE",
    "RLIMIT_RTPRIO",
    "RLIMIT_RTTIME",
];

/// Applies the adjustment, and records the parts that later events and execs need.
pub(super) async fn adjustment(
    pod: &Pod,
    asked: &api::ContainerAdjustment,
    resolved: &mut Resolved,
) -> Result<(), Error> {
    if coracle_nri::is_empty(asked) {
        return Ok(());
    }
    if !asked.cdi_devices.is_empty() {
        // CDI devices first, so that explicit devices and mounts have precedence.
        let names = asked.cdi_devices.iter().map(|device| device.name.clone()).collect();
        pod.add_devices(names, resolved).await?;
    }
    arguments(asked, resolved);
    if let Some(asked) = &asked.hooks {
        resolved.record.adjusted.hooks.extend(hooks(asked));
    }
    for limit in &asked.rlimits {
        rlimit(limit, resolved)?;
    }
    for mount in &asked.mounts {
        self::mount(pod.node(), mount, resolved).await?;
    }
    if let Some(asked) = &asked.linux {
        linux(pod, asked, resolved)?;
    }
    keep(asked, resolved);
    Ok(())
}

/// Records the adjustment for later events, without limits, which are recorded separately because updates change them.
fn keep(asked: &api::ContainerAdjustment, resolved: &mut Resolved) {
    let mut kept = asked.clone();
    if let Some(linux) = &mut kept.linux {
        linux.resources = None;
    }
    resolved.record.adjusted.adjustment = kept.encode_to_vec();
}

fn refused<T>(text: String) -> Result<T, Error> {
    Err(Error::new(Kind::InvalidArgument, text))
}

fn arguments(asked: &api::ContainerAdjustment, resolved: &mut Resolved) {
    let process = &mut resolved.record.process;
    if !asked.args.is_empty() {
        process.arguments.clone_from(&asked.args);
    }
    let is_of = |variable: &[u8], name: &str| {
        variable.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.starts_with(b"="))
    };
    for name in asked.env.iter().filter_map(|variable| variable.key.strip_prefix('-')) {
        process.environment.retain(|variable| !is_of(variable, name));
    }
    for variable in asked.env.iter().filter(|variable| !variable.key.starts_with('-')) {
        let text = format!("{}={}", variable.key, variable.value).into_bytes();
        match process.environment.iter_mut().find(|known| is_of(known, &variable.key)) {
            Some(known) => *known = text,
            None => process.environment.push(text),
        }
    }
}

fn hooks(asked: &api::Hooks) -> coracle_job::Hooks {
    let all = |hooks: &[api::Hook]| {
        let hook = |hook: &api::Hook| coracle_job::Hook {
            path: hook.path.clone(),
            arguments: hook.args.clone(),
            environment: hook.env.clone(),
            timeout_s: hook.timeout.map_or(0, |timeout| u32::try_from(timeout.value).unwrap_or(u32::MAX)),
        };
        hooks.iter().map(hook).collect()
    };
    coracle_job::Hooks {
        prestart: all(&asked.prestart),
        create_runtime: all(&asked.create_runtime),
        create_container: all(&asked.create_container),
        start_container: all(&asked.start_container),
        poststart: all(&asked.poststart),
        poststop: all(&asked.poststop),
    }
}

fn rlimit(asked: &api::PosixRlimit, resolved: &mut Resolved) -> Result<(), Error> {
    let Some(resource) = RLIMITS.iter().position(|name| *name == asked.r#type) else {
        return refused(format!("rlimit {:?} is unknown", asked.r#type));
    };
    let resource = resource as u32;
    let limit = plan::Limit { resource, soft: asked.soft, hard: asked.hard };
    resolved.record.adjusted.rlimits.push(limit);
    Ok(())
}

async fn mount(node: &Node, asked: &api::Mount, resolved: &mut Resolved) -> Result<(), Error> {
    let plan = &mut resolved.plan;
    let is_removal = asked.destination.starts_with('-');
    let target = clean(asked.destination.strip_prefix('-').unwrap_or(&asked.destination));
    plan.mounts.retain(|mount| clean(&mount.target) != target);
    if is_removal {
        plan.without_mounts.push(target);
        return Ok(());
    }
    plan.without_mounts.retain(|other| *other != target);
    if matches!(asked.r#type.as_str(), "cgroup" | "cgroup2") && target == "/sys/fs/cgroup" {
        plan.is_cgroup_mount_writable = !asked.options.iter().any(|option| option == "ro");
        return Ok(());
    }
    let mut planned = plan::Mount {
        source: plan::Source::Host(PathBuf::from(&asked.source)),
        target,
        read_only: false,
        recursive_read_only: false,
        propagation: Propagation::Private,
        no_exec: false,
        no_suid: false,
        no_dev: false,
        maps_owners: false,
    };
    let mut is_bind = matches!(asked.r#type.as_str(), "" | "bind" | "none");
    let mut options = Vec::new();
    for option in &asked.options {
        match option.as_str() {
            "bind" | "rbind" => is_bind = true,
            "ro" => planned.read_only = true,
            "rro" => (planned.read_only, planned.recursive_read_only) = (true, true),
            "nosuid" => planned.no_suid = true,
            "nodev" => planned.no_dev = true,
            "noexec" => planned.no_exec = true,
            "private" | "rprivate" => planned.propagation = Propagation::Private,
            "slave" | "rslave" => planned.propagation = Propagation::Slave,
            "shared" | "rshared" => planned.propagation = Propagation::Shared,
            // Options that are the default.
            "rw" | "suid" | "dev" | "exec" | "relatime" | "strictatime" | "noatime" | "relabel" => {}
            other => options.push(other.to_owned()),
        }
    }
    planned.source = match is_bind {
        true if options.is_empty() => node.bind_source(&asked.source, planned.propagation).await?,
        true => return refused(format!("mount {}: options {options:?} of a bind mount", asked.destination)),
        false => plan::Source::Fresh { kind: fresh(&asked.r#type, &asked.destination)?, options },
    };
    plan.mounts.push(planned);
    Ok(())
}

fn fresh(kind: &str, destination: &str) -> Result<plan::FreshKind, Error> {
    Ok(match kind {
        "tmpfs" => plan::FreshKind::Tmpfs,
        "proc" => plan::FreshKind::Proc,
        "sysfs" => plan::FreshKind::Sysfs,
        "mqueue" => plan::FreshKind::Mqueue,
        "devpts" => plan::FreshKind::Devpts,
        other => return refused(format!("mount {destination}: type {other:?} is not mounted for plugins")),
    })
}

/// Parses a cgroup path, or with the systemd driver `SLICE:PREFIX:NAME` (OCI runtime specification, "Cgroups Path", as in
/// runc).
fn cgroup_path(text: &str, is_scope: bool) -> Result<CgroupPath, Error> {
    let mut parts = text.splitn(3, ':');
    match (is_scope, parts.next(), parts.next(), parts.next()) {
        (false, ..) => Ok(CgroupPath::parse(text)?),
        (true, Some(slice), Some(prefix), Some(name)) => {
            Ok(cgroup::slice(slice)?.join(&format!("{prefix}-{name}.scope"))?)
        }
        (true, ..) => {
            let why =
                format!("cgroups path {text:?}: is not SLICE:PREFIX:NAME (the cgroup driver is systemd)");
            Err(Error::new(Kind::InvalidArgument, why))
        }
    }
}

/// Removes double and trailing slashes.
fn clean(path: &str) -> String {
    let parts: Vec<&str> = path.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
    format!("/{}", parts.join("/"))
}

fn linux(pod: &Pod, asked: &api::LinuxContainerAdjustment, resolved: &mut Resolved) -> Result<(), Error> {
    for device in &asked.devices {
        self::device(device, resolved)?;
    }
    if let Some(resources) = &asked.resources {
        self::resources(resources, resolved)?;
    }
    if !asked.cgroups_path.is_empty() {
        let path = cgroup_path(&asked.cgroups_path, pod.record().has_scopes)?;
        pod.require_unused_cgroup(resolved.record.id, &path)?;
        let has_namespace = resolved.plan.has_cgroup_namespace;
        resolved.plan.cgroup_mount = pod.node().cgroups.view(&path, has_namespace);
        resolved.record.adjusted.cgroup = path.to_string();
    }
    if let Some(score) = asked.oom_score_adj {
        resolved.record.process.oom_score_adj = i32::try_from(score.value).unwrap_or(0); // checked to be small
    }
    if let Some(policy) = &asked.seccomp_policy {
        resolved.confinement.seccomp = Some(filter(policy, resolved)?);
    }
    for namespace in &asked.namespaces {
        self::namespace(pod, namespace, resolved)?;
    }
    let set = asked.sysctl.iter().filter(|(key, _)| !key.starts_with('-'));
    resolved.plan.sysctls.extend(set.map(|(key, value)| (key.clone(), value.clone())));
    net_devices(pod, asked, resolved)?;
    scheduling(asked, resolved)?;
    match &asked.rdt {
        Some(rdt) => self::rdt(rdt, resolved),
        None => Ok(()),
    }
}

fn device(asked: &api::LinuxDevice, resolved: &mut Resolved) -> Result<(), Error> {
    let plan = &mut resolved.plan;
    let path = clean(asked.path.strip_prefix('-').unwrap_or(&asked.path));
    let known = plan.devices.iter().position(|device| device.path == path);
    let removed = known.map(|at| plan.devices.remove(at));
    if asked.path.starts_with('-') {
        let rules = match &mut resolved.devices {
            DeviceAccess::Only(rules) => rules,
            DeviceAccess::All => return Ok(()),
        };
        if let Some(removed) = removed {
            let is_its = |rule: &DeviceRule| {
                rule.kind == removed.kind
                    && rule.major == Some(removed.major)
                    && rule.minor == Some(removed.minor)
            };
            rules.retain(|rule| !is_its(rule));
        }
        return Ok(());
    }
    let kind = match asked.r#type.as_str() {
        "c" | "u" => plan::DeviceKind::Character,
        "b" => plan::DeviceKind::Block,
        other => return refused(format!("device {path}: no node of type {other:?} is made for plugins")),
    };
    let number = |value: i64| u32::try_from(value).unwrap_or(u32::MAX); // checked to be small
    let node = plan::DeviceNode {
        path,
        kind,
        major: number(asked.major),
        minor: number(asked.minor),
        mode: asked.file_mode.map_or(0o666, |mode| mode.value & 0o7777),
        owner: (asked.uid.map_or(0, |uid| uid.value), asked.gid.map_or(0, |gid| gid.value)),
    };
    if let DeviceAccess::Only(rules) = &mut resolved.devices {
        let access = if kind == plan::DeviceKind::Block { "rwm" } else { "rw" };
        let (major, minor) = (Some(node.major), Some(node.minor));
        rules.push(DeviceRule { kind, major, minor, access: access.to_owned() });
    }
    // The first of several devices with the same path is used.
    plan.devices.insert(0, node);
    Ok(())
}

fn resources(asked: &api::LinuxResources, resolved: &mut Resolved) -> Result<(), Error> {
    let mut wanted = resolved.record.limits();
    limits::lay_over(&mut wanted, asked)?;
    resolved.record.limits = Some(wanted);
    for rule in &asked.devices {
        let kinds = match rule.r#type.as_str() {
            "c" => &[plan::DeviceKind::Character][..],
            "b" => &[plan::DeviceKind::Block],
            _ => &[plan::DeviceKind::Character, plan::DeviceKind::Block],
        };
        if !rule.allow {
            return refused(format!("device rule {:?}: only what is allowed can be said", rule.r#type));
        }
        let number =
            |number: Option<api::OptionalInt64>| number.and_then(|number| u32::try_from(number.value).ok());
        if let DeviceAccess::Only(rules) = &mut resolved.devices {
            let access = if rule.access.is_empty() { "rwm" } else { &rule.access };
            rules.extend(kinds.iter().map(|kind| DeviceRule {
                kind: *kind,
                major: number(rule.major),
                minor: number(rule.minor),
                access: access.to_owned(),
            }));
        }
    }
    Ok(())
}

/// Compiles the seccomp policy of an adjustment. It is converted through JSON, whose parser validates all fields.
fn filter(asked: &api::LinuxSeccomp, resolved: &Resolved) -> Result<plan::Seccomp, Error> {
    let argument = |argument: &api::LinuxSeccompArg| {
        serde_json::json!({
            "index": argument.index, "value": argument.value, "valueTwo": argument.value_two, "op": argument.op,
        })
    };
    let call = |call: &api::LinuxSyscall| {
        serde_json::json!({
            "names": call.names, "action": call.action, "errnoRet": call.errno_ret.map(|errno| errno.value),
            "args": call.args.iter().map(argument).collect::<Vec<_>>(),
        })
    };
    let profile = serde_json::json!({
        "defaultAction": asked.default_action,
        "defaultErrnoRet": asked.default_errno.map(|errno| errno.value),
        "architectures": asked.architectures,
        "flags": asked.flags,
        "listenerPath": asked.listener_path,
        "syscalls": asked.syscalls.iter().map(call).collect::<Vec<_>>(),
    });
    let bounding = resolved.record.process.capabilities.bounding;
    let profile = seccomp::parse(profile.to_string().as_bytes(), bounding, &probe::release()?)?;
    compile_filter("adjusted by an NRI plugin", &profile)
}

fn namespace(pod: &Pod, asked: &api::LinuxNamespace, resolved: &mut Resolved) -> Result<(), Error> {
    let kind = asked.r#type.trim_start_matches('-');
    let is_removal = asked.r#type.starts_with('-');
    let plan = &mut resolved.plan;
    let mut instead = |kind: plan::NamespaceKind, file: &str| {
        // A shared namespace is given by this process, because that of PID 1 may not be accessible in a
        // nested daemon.
        let own = || format!("/proc/{}/ns/{file}", std::process::id());
        let path = if is_removal { own() } else { asked.path.clone() };
        plan.namespaces.push((kind, PathBuf::from(path)));
        Ok(())
    };
    match kind {
        "network" => instead(plan::NamespaceKind::Network, "net"),
        "ipc" => instead(plan::NamespaceKind::Ipc, "ipc"),
        "uts" => instead(plan::NamespaceKind::Uts, "uts"),
        "cgroup" if asked.path.is_empty() => {
            plan.has_cgroup_namespace = !is_removal;
            Ok(())
        }
        "pid" if asked.path.is_empty() && !is_removal => {
            resolved.record.adjusted.pid = Some(ContainerPid::Own);
            Ok(())
        }
        "pid" if is_removal && pod.record().spec.namespaces.pid != PodPid::Pod => {
            resolved.record.adjusted.pid = Some(ContainerPid::Node);
            Ok(())
        }
        _ => refused(format!(
            "namespace {:?} {:?}: cannot be given to a container here",
            asked.r#type, asked.path
        )),
    }
}

fn net_devices(
    pod: &Pod,
    asked: &api::LinuxContainerAdjustment,
    resolved: &mut Resolved,
) -> Result<(), Error> {
    let set = asked.net_devices.iter().filter(|(host, _)| !host.starts_with('-'));
    for (host, device) in set {
        if !pod.has_network() {
            return refused(format!("network interface {host}: the pod has the node's network"));
        }
        let name = if device.name.is_empty() { host.clone() } else { device.name.clone() };
        resolved.net_devices.push((host.clone(), name));
    }
    Ok(())
}

fn scheduling(asked: &api::LinuxContainerAdjustment, resolved: &mut Resolved) -> Result<(), Error> {
    let planned = &mut resolved.plan.scheduling;
    if let Some(io) = &asked.io_priority {
        let class = u32::try_from(io.class).unwrap_or(0);
        planned.io = (class != 0).then(|| (class, u32::try_from(io.priority).unwrap_or(0)));
    }
    if let Some(scheduler) = &asked.scheduler {
        planned.cpu = cpu(scheduler)?;
    }
    if let Some(policy) = &asked.memory_policy {
        planned.memory = Some(memory_policy(policy)?);
    }
    Ok(())
}

fn cpu(asked: &api::LinuxScheduler) -> Result<Option<plan::CpuScheduling>, Error> {
    use api::LinuxSchedulerPolicy as Policy;
    // The kernel's numbers (include/uapi/linux/sched.h) differ from NRI's.
    let policy = match asked.policy() {
        Policy::SchedNone => return Ok(None),
        Policy::SchedOther => 0,
        Policy::SchedFifo => 1,
        Policy::SchedRr => 2,
        Policy::SchedBatch => 3,
        Policy::SchedIso => return refused("scheduler: Linux has no SCHED_ISO".to_owned()),
        Policy::SchedIdle => 5,
        Policy::SchedDeadline => 6,
    };
    // NRI's flags are indices of the kernel's bits.
    let flags = asked.flags.iter().fold(0, |flags, flag| flags | 1 << flag);
    Ok(Some(plan::CpuScheduling {
        policy,
        flags,
        nice: asked.nice,
        priority: u32::try_from(asked.priority).unwrap_or(0),
        times: [asked.runtime, asked.deadline, asked.period],
    }))
}

fn memory_policy(asked: &api::LinuxMemoryPolicy) -> Result<(u32, [u64; 2]), Error> {
    // MPOL_F_STATIC_NODES, MPOL_F_RELATIVE_NODES, MPOL_F_NUMA_BALANCING (include/uapi/linux/mempolicy.h).
    const FLAGS: [u32; 3] = [1 << 15, 1 << 14, 1 << 13];
    let mode = u32::try_from(asked.mode).unwrap_or(0);
    let flags = asked.flags.iter().filter_map(|flag| FLAGS.get(usize::try_from(*flag).ok()?));
    let mode = flags.fold(mode, |mode, flag| mode | flag);
    let mut nodes = 0u128;
    for part in asked.nodes.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        match (first.parse::<u32>(), last.parse::<u32>()) {
            (Ok(first), Ok(last)) if first <= last && last < 128 => {
                nodes |= (first..=last).fold(0, |set, node| set | 1 << node);
            }
            _ => return refused(format!("memory policy: nodes {:?}", asked.nodes)),
        }
    }
    Ok((mode, [nodes as u64, (nodes >> 64) as u64]))
}

fn rdt(asked: &api::LinuxRdt, resolved: &mut Resolved) -> Result<(), Error> {
    let Some(class) = asked.clos_id.as_ref().filter(|class| !class.value.is_empty()) else {
        let has_wishes = asked.schemata.is_some() || asked.enable_monitoring.is_some_and(|wish| wish.value);
        return match has_wishes {
            true => refused("RDT: schemata and monitoring need a class of service".to_owned()),
            false => Ok(()),
        };
    };
    let name = &class.value;
    if name.contains('/') || name.starts_with('.') {
        return refused(format!("RDT class {name:?} is not a name"));
    }
    let directory = Path::new(RESCTRL).join(name);
    if !directory.join("tasks").exists() {
        return refused(format!("RDT class {name:?}: {} is not there", directory.display()));
    }
    for line in asked.schemata.iter().flat_map(|schemata| &schemata.value) {
        let path = directory.join("schemata");
        std::fs::write(&path, format!("{line}\n"))
            .map_err(|error| Error::from(error).context(format!("write {}", path.display())))?;
    }
    // Writing 0 adds the writing task.
    resolved.joins.push(directory.join("tasks"));
    Ok(())
}
