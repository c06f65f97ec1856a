//! Applies an adjustment to a container's message. The resulting message is sent to later plugins, and in events of the
//! container after its creation. In each field, removals are applied first, then values in the order of names.

use std::collections::BTreeMap;

use crate::api;

/// Whether the adjustment changes nothing.
pub fn is_empty(adjustment: &api::ContainerAdjustment) -> bool {
    *adjustment == api::ContainerAdjustment::default()
}

/// Applies an adjustment to a container's message. CDI devices and the memory policy are not applied, because the
/// message does not contain them.
pub fn apply_to(container: &mut api::Container, adjustment: &api::ContainerAdjustment) {
    map(&mut container.annotations, &adjustment.annotations);
    list(&mut container.mounts, &adjustment.mounts, |mount| &mount.destination);
    if !adjustment.mounts.is_empty() {
        // Parents come before submounts, others stay in their order.
        fn key(mount: &api::Mount) -> (usize, &str) {
            let path = mount.destination.trim_end_matches('/');
            (path.matches('/').count(), &mount.destination)
        }
        let mut sorted: Vec<api::Mount> = Vec::with_capacity(container.mounts.len());
        for mount in std::mem::take(&mut container.mounts) {
            let at = sorted.partition_point(|before| key(before) <= key(&mount));
            sorted.insert(at, mount);
        }
        container.mounts = sorted;
    }
    environment(&mut container.env, &adjustment.env);
    if !adjustment.args.is_empty() {
        container.args.clone_from(&adjustment.args);
    }
    if let Some(added) = &adjustment.hooks {
        let hooks = container.hooks.get_or_insert_default();
        hooks.prestart.extend(added.prestart.iter().cloned());
        hooks.create_runtime.extend(added.create_runtime.iter().cloned());
        hooks.create_container.extend(added.create_container.iter().cloned());
        hooks.start_container.extend(added.start_container.iter().cloned());
        hooks.poststart.extend(added.poststart.iter().cloned());
        hooks.poststop.extend(added.poststop.iter().cloned());
    }
    list(&mut container.rlimits, &adjustment.rlimits, |limit| &limit.r#type);
    if let Some(asked) = &adjustment.linux {
        linux(container.linux.get_or_insert_default(), asked);
    }
}

fn linux(linux: &mut api::LinuxContainer, asked: &api::LinuxContainerAdjustment) {
    list(&mut linux.devices, &asked.devices, |device| &device.path);
    if let Some(asked) = &asked.resources {
        overlay(linux.resources.get_or_insert_default(), asked);
    }
    if !asked.cgroups_path.is_empty() {
        linux.cgroups_path.clone_from(&asked.cgroups_path);
    }
    if asked.oom_score_adj.is_some() {
        linux.oom_score_adj = asked.oom_score_adj;
    }
    if let Some(asked) = asked.io_priority {
        linux.io_priority = (asked.class() != api::IoPrioClass::IoprioClassNone).then_some(asked);
    }
    if asked.seccomp_policy.is_some() {
        linux.seccomp_policy.clone_from(&asked.seccomp_policy);
    }
    list(&mut linux.namespaces, &asked.namespaces, |namespace| &namespace.r#type);
    map(&mut linux.sysctl, &asked.sysctl);
    map(&mut linux.net_devices, &asked.net_devices);
    if let Some(asked) = &asked.scheduler {
        linux.scheduler = (asked.policy() != api::LinuxSchedulerPolicy::SchedNone).then(|| asked.clone());
    }
    if let Some(asked) = &asked.rdt {
        let nothing = api::LinuxRdt { remove: true, ..api::LinuxRdt::default() };
        linux.rdt = (*asked != nothing).then(|| api::LinuxRdt { remove: false, ..asked.clone() });
    }
}

/// Replaces the resources by those that are present in `asked`. A memory limit without a swap limit sets both.
pub fn overlay(resources: &mut api::LinuxResources, asked: &api::LinuxResources) {
    merge(resources, asked);
    if let (Some(memory), Some(asked)) = (&mut resources.memory, asked.memory)
        && asked.limit.is_some()
        && asked.swap.is_none()
    {
        memory.swap = asked.limit;
    }
}

/// Replaces the resources by those that are present in `asked`; a memory limit does not set the swap limit.
pub(super) fn merge(resources: &mut api::LinuxResources, asked: &api::LinuxResources) {
    if let Some(asked) = asked.memory {
        let memory = resources.memory.get_or_insert_default();
        memory.limit = asked.limit.or(memory.limit);
        memory.reservation = asked.reservation.or(memory.reservation);
        memory.swap = asked.swap.or(memory.swap);
        memory.kernel = asked.kernel.or(memory.kernel);
        memory.kernel_tcp = asked.kernel_tcp.or(memory.kernel_tcp);
        memory.swappiness = asked.swappiness.or(memory.swappiness);
        memory.disable_oom_killer = asked.disable_oom_killer.or(memory.disable_oom_killer);
        memory.use_hierarchy = asked.use_hierarchy.or(memory.use_hierarchy);
    }
    if let Some(asked) = &asked.cpu {
        let cpu = resources.cpu.get_or_insert_default();
        cpu.shares = asked.shares.or(cpu.shares);
        cpu.quota = asked.quota.or(cpu.quota);
        cpu.period = asked.period.or(cpu.period);
        cpu.realtime_runtime = asked.realtime_runtime.or(cpu.realtime_runtime);
        cpu.realtime_period = asked.realtime_period.or(cpu.realtime_period);
        for (known, asked) in [(&mut cpu.cpus, &asked.cpus), (&mut cpu.mems, &asked.mems)] {
            if !asked.is_empty() {
                known.clone_from(asked);
            }
        }
    }
    list(&mut resources.hugepage_limits, &asked.hugepage_limits, |limit| &limit.page_size);
    resources.unified.extend(asked.unified.iter().map(|(key, value)| (key.clone(), value.clone())));
    resources.devices.extend(asked.devices.iter().cloned());
    resources.pids = asked.pids.or(resources.pids);
    if asked.blockio_class.is_some() {
        resources.blockio_class.clone_from(&asked.blockio_class);
    }
    if asked.rdt_class.is_some() {
        resources.rdt_class.clone_from(&asked.rdt_class);
    }
}

fn map<V: Clone>(known: &mut BTreeMap<String, V>, asked: &BTreeMap<String, V>) {
    for key in asked.keys().filter_map(|key| key.strip_prefix('-')) {
        known.remove(key);
    }
    for (key, value) in asked.iter().filter(|(key, _)| !key.starts_with('-')) {
        known.insert(key.clone(), value.clone());
    }
}

fn list<T: Clone>(known: &mut Vec<T>, asked: &[T], key: impl Fn(&T) -> &String) {
    for name in asked.iter().filter_map(|entry| key(entry).strip_prefix('-')) {
        known.retain(|entry| key(entry) != name);
    }
    for entry in asked.iter().filter(|entry| !key(entry).starts_with('-')) {
        match known.iter_mut().find(|other| key(other) == key(entry)) {
            Some(other) => *other = entry.clone(),
            None => known.push(entry.clone()),
        }
    }
}

fn environment(known: &mut Vec<String>, asked: &[api::KeyValue]) {
    let is_of = |text: &str, name: &str| text.split_once('=').is_some_and(|(known, _)| known == name);
    for name in asked.iter().filter_map(|variable| variable.key.strip_prefix('-')) {
        known.retain(|text| !is_of(text, name));
    }
    for variable in asked.iter().filter(|variable| !variable.key.starts_with('-')) {
        let text = format!("{}={}", variable.key, variable.value);
        match known.iter_mut().find(|text| is_of(text, &variable.key)) {
            Some(known) => *known = text,
            None => known.push(text),
        }
    }
}
