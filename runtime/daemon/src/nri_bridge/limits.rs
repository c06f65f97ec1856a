//! Converts between NRI's LinuxResources and the engine's limits.

use coracle_base::error::{Error, Kind};
use coracle_nri::api;
use coracle_sandbox::cgroup::{Limits, Resources};
use coracle_sandbox::collect::ordered;

/// Converts CRI resources; unspecified values are absent in the result.
pub(super) fn of_resources(resources: &Resources) -> api::LinuxResources {
    let signed = |value: i64| (value != 0).then_some(api::OptionalInt64 { value });
    let unsigned = |value: i64| u64::try_from(value).ok().filter(|value| *value > 0);
    let memory = api::LinuxMemory {
        limit: signed(resources.memory_limit_bytes),
        swap: signed(resources.memory_swap_limit_bytes),
        ..api::LinuxMemory::default()
    };
    let cpu = api::LinuxCpu {
        shares: unsigned(resources.cpu_shares).map(|value| api::OptionalUInt64 { value }),
        quota: signed(resources.cpu_quota_us),
        period: unsigned(resources.cpu_period_us).map(|value| api::OptionalUInt64 { value }),
        cpus: resources.cpuset_cpus.clone(),
        mems: resources.cpuset_mems.clone(),
        ..api::LinuxCpu::default()
    };
    let hugepage = |(page_size, limit): &(String, u64)| api::HugepageLimit {
        page_size: page_size.clone(),
        limit: *limit,
    };
    api::LinuxResources {
        memory: Some(memory),
        cpu: Some(cpu),
        hugepage_limits: resources.hugepage_limits.iter().map(hugepage).collect(),
        unified: ordered(resources.unified.iter().cloned()),
        ..api::LinuxResources::default()
    }
}

/// Converts the effective limits of a container.
pub(super) fn of_limits(limits: &Limits) -> api::LinuxResources {
    let mut converted = of_resources(&limits.resources);
    if let Some(memory) = &mut converted.memory {
        let signed = |value: Option<i64>| value.map(|value| api::OptionalInt64 { value });
        memory.reservation = signed(limits.memory_reservation_bytes);
        memory.kernel = signed(limits.kernel_memory_bytes);
        memory.kernel_tcp = signed(limits.kernel_tcp_bytes);
        memory.swappiness = limits.swappiness.map(|value| api::OptionalUInt64 { value });
        memory.disable_oom_killer = limits.disable_oom_killer.map(|value| api::OptionalBool { value });
        if memory.swap.is_none() {
            // Without a swap limit both have the same limit.
            memory.swap = memory.limit;
        }
    }
    if let Some(cpu) = &mut converted.cpu {
        cpu.realtime_runtime = limits.realtime_runtime_us.map(|value| api::OptionalInt64 { value });
        cpu.realtime_period = limits.realtime_period_us.map(|value| api::OptionalUInt64 { value });
    }
    converted.pids = (limits.pids_max != 0).then_some(api::LinuxPids { limit: limits.pids_max });
    converted
}

/// Replaces limits by those that are present in a plugin's resources.
pub(super) fn lay_over(limits: &mut Limits, asked: &api::LinuxResources) -> Result<(), Error> {
    let refused = |text: String| Err(Error::new(Kind::InvalidArgument, text));
    if let Some(class) = asked.blockio_class.as_ref().filter(|class| !class.value.is_empty()) {
        return refused(format!("block I/O class {:?}: no classes are configured", class.value));
    }
    if let Some(class) = asked.rdt_class.as_ref().filter(|class| !class.value.is_empty()) {
        return refused(format!("RDT class {:?}: this node has no resctrl file system", class.value));
    }
    if let Some(asked) = asked.memory {
        memory(limits, &asked);
    }
    if let Some(asked) = &asked.cpu {
        cpu(limits, asked);
    }
    let known = &mut limits.resources;
    for limit in &asked.hugepage_limits {
        known.hugepage_limits.retain(|(size, _)| *size != limit.page_size);
        known.hugepage_limits.push((limit.page_size.clone(), limit.limit));
    }
    for (key, value) in &asked.unified {
        known.unified.retain(|(other, _)| other != key);
        known.unified.push((key.clone(), value.clone()));
    }
    if let Some(pids) = asked.pids {
        limits.pids_max = if pids.limit == 0 { -1 } else { pids.limit };
    }
    Ok(())
}

fn memory(limits: &mut Limits, asked: &api::LinuxMemory) {
    let known = &mut limits.resources;
    if let Some(limit) = asked.limit {
        known.memory_limit_bytes = limit.value;
        // The limit of memory and swap cannot be below the new memory limit; 0 means equal to memory.
        let swap = &mut known.memory_swap_limit_bytes;
        if *swap > 0 && (limit.value <= 0 || *swap < limit.value) {
            *swap = 0;
        }
    }
    if let Some(swap) = asked.swap {
        known.memory_swap_limit_bytes = swap.value;
    }
    let signed =
        |asked: Option<api::OptionalInt64>, known: Option<i64>| asked.map(|asked| asked.value).or(known);
    limits.memory_reservation_bytes = signed(asked.reservation, limits.memory_reservation_bytes);
    limits.kernel_memory_bytes = signed(asked.kernel, limits.kernel_memory_bytes);
    limits.kernel_tcp_bytes = signed(asked.kernel_tcp, limits.kernel_tcp_bytes);
    limits.swappiness = asked.swappiness.map(|asked| asked.value).or(limits.swappiness);
    limits.disable_oom_killer =
        asked.disable_oom_killer.map(|asked| asked.value).or(limits.disable_oom_killer);
}

fn cpu(limits: &mut Limits, asked: &api::LinuxCpu) {
    let known = &mut limits.resources;
    let number = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    if let Some(shares) = asked.shares {
        known.cpu_shares = number(shares.value);
    }
    if let Some(quota) = asked.quota {
        known.cpu_quota_us = quota.value;
    }
    if let Some(period) = asked.period {
        known.cpu_period_us = number(period.value);
    }
    if !asked.cpus.is_empty() {
        known.cpuset_cpus.clone_from(&asked.cpus);
    }
    if !asked.mems.is_empty() {
        known.cpuset_mems.clone_from(&asked.mems);
    }
    limits.realtime_runtime_us =
        asked.realtime_runtime.map(|asked| asked.value).or(limits.realtime_runtime_us);
    limits.realtime_period_us = asked.realtime_period.map(|asked| asked.value).or(limits.realtime_period_us);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(value: i64) -> Option<api::OptionalInt64> {
        Some(api::OptionalInt64 { value })
    }

    fn with_memory(memory: api::LinuxMemory) -> api::LinuxResources {
        api::LinuxResources { memory: Some(memory), ..api::LinuxResources::default() }
    }

    #[test]
    fn an_update_changes_only_the_limits_that_it_contains() {
        let mut limits = Limits::default();
        limits.resources.cpu_shares = 5;
        limits.resources.unified = vec![("a".into(), "1".into())];
        let asked = api::LinuxResources {
            cpu: Some(api::LinuxCpu { quota: limit(7), ..api::LinuxCpu::default() }),
            pids: Some(api::LinuxPids { limit: 9 }),
            unified: [("a".to_owned(), "2".to_owned())].into(),
            ..with_memory(api::LinuxMemory { reservation: limit(3), ..api::LinuxMemory::default() })
        };
        lay_over(&mut limits, &asked).unwrap();
        let known = &limits.resources;
        assert_eq!((known.cpu_shares, known.cpu_quota_us, limits.pids_max), (5, 7, 9));
        assert_eq!(
            (&known.unified[..], limits.memory_reservation_bytes),
            (&[("a".into(), "2".into())][..], Some(3))
        );
        let converted = of_limits(&limits);
        assert_eq!(converted.cpu.unwrap().shares.unwrap().value, 5);
        assert_eq!((converted.pids.unwrap().limit, converted.memory.unwrap().reservation), (9, limit(3)));
    }

    #[test]
    fn swap_is_never_less_than_memory() {
        let mut limits = Limits::default();
        (limits.resources.memory_limit_bytes, limits.resources.memory_swap_limit_bytes) = (10, 12);
        let grow =
            |value| with_memory(api::LinuxMemory { limit: limit(value), ..api::LinuxMemory::default() });
        lay_over(&mut limits, &grow(11)).unwrap();
        assert_eq!(limits.resources.memory_swap_limit_bytes, 12);
        lay_over(&mut limits, &grow(20)).unwrap();
        assert_eq!(limits.resources.memory_swap_limit_bytes, 0);
        assert_eq!(of_limits(&limits).memory.unwrap().swap, limit(20));
    }

    #[test]
    fn classes_that_are_not_configured_are_refused() {
        let class = |name: &str| Some(api::OptionalString { value: name.into() });
        let blockio = api::LinuxResources { blockio_class: class("slow"), ..Default::default() };
        let error = lay_over(&mut Limits::default(), &blockio).unwrap_err();
        assert!(error.to_string().contains("slow"), "{error}");
        let cleared =
            api::LinuxResources { blockio_class: class(""), rdt_class: class(""), ..Default::default() };
        lay_over(&mut Limits::default(), &cleared).unwrap();
    }
}
