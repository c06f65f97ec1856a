//! Validates the form of adjustments and updates: ranges of numbers, syntax of lists, absolute paths. Whether the
//! kernel and the node support the values is checked by the caller, which applies them.

use crate::api;

/// Maximum length in bytes of a network interface's name, with its NUL (IFNAMSIZ).
const INTERFACE_BYTES: usize = 16;

/// Number of bits of a device's major and minor number (include/linux/kdev_t.h).
const MAJOR_BITS: u32 = 12;
const MINOR_BITS: u32 = 20;

const NAMESPACES: [&str; 8] = ["pid", "network", "mount", "ipc", "uts", "user", "cgroup", "time"];

/// Names of the resource limits of getrlimit(2).
const RLIMITS: [&str; 16] = [
    "RLIMIT_AS",
    "RLIMIT_CORE",
    "RLIMIT_CPU",
    "RLIMIT_DATA",
    "RLIMIT_FSIZE",
    "RLIMIT_LOCKS",
    "RLIMIT_MEMLOCK",
    "RLIMIT_MSGQUEUE",
    "RLIMIT_NICE",
    "RLIMIT_NOFILE",
    "RLIMIT_NPROC",
    "RLIMIT_RSS",
    "RLIMIT_RTPRIO",
    "RLIMIT_RTTIME",
    "RLIMIT_SIGPENDING",
    "RLIMIT_STACK",
];

pub(super) fn adjustment(asked: &api::ContainerAdjustment) -> Result<(), String> {
    for key in asked.annotations.keys() {
        refuse_if(key.trim_start_matches('-').is_empty(), || "an annotation without a name".to_owned())?;
    }
    for mount in &asked.mounts {
        absolute("mount", name(&mount.destination))?;
    }
    for variable in &asked.env {
        let key = name(&variable.key);
        let is_bad = key.is_empty() || key.contains(['=', '\0']) || variable.value.contains('\0');
        refuse_if(is_bad, || format!("environment variable {key:?}: not a name"))?;
    }
    refuse_if(asked.args.iter().any(|text| text.contains('\0')), || "an argument holds a NUL".to_owned())?;
    if let Some(asked) = &asked.hooks {
        hooks(asked)?;
    }
    for limit in &asked.rlimits {
        refuse_if(!RLIMITS.contains(&limit.r#type.as_str()), || {
            format!("rlimit {:?}: unknown", limit.r#type)
        })?;
        refuse_if(limit.soft > limit.hard, || {
            format!("{}: soft {} is above hard {}", limit.r#type, limit.soft, limit.hard)
        })?;
    }
    for device in &asked.cdi_devices {
        let is_qualified = device.name.split_once('=').is_some_and(|(kind, name)| {
            !name.is_empty()
                && kind.split_once('/').is_some_and(|(vendor, class)| !vendor.is_empty() && !class.is_empty())
        });
        refuse_if(!is_qualified, || format!("CDI device {:?}: not vendor/class=name", device.name))?;
    }
    asked.linux.as_ref().map_or(Ok(()), linux)
}

fn linux(asked: &api::LinuxContainerAdjustment) -> Result<(), String> {
    for device in &asked.devices {
        let path = name(&device.path);
        absolute("device", path)?;
        let is_removal = device.path.starts_with('-');
        let is_known = matches!(device.r#type.as_str(), "c" | "b" | "u" | "p");
        refuse_if(!is_removal && !is_known, || format!("device {path}: type {:?}", device.r#type))?;
        let are_numbers =
            (0..1 << MAJOR_BITS).contains(&device.major) && (0..1 << MINOR_BITS).contains(&device.minor);
        refuse_if(!are_numbers, || {
            format!("device {path}: {}:{} is not a device", device.major, device.minor)
        })?;
        let mode = device.file_mode.map_or(0, |mode| mode.value);
        // With or without the bits of the file type.
        refuse_if(mode & !0o177_777 != 0, || format!("device {path}: mode {mode:o}"))?;
    }
    if let Some(asked) = &asked.resources {
        resources(asked)?;
    }
    let score = asked.oom_score_adj.map_or(0, |score| score.value);
    refuse_if(!(-1000..=1000).contains(&score), || format!("oom_score_adj {score}"))?;
    if let Some(asked) = &asked.io_priority {
        refuse_if(!(0..8).contains(&asked.priority), || format!("I/O priority {}", asked.priority))?;
        refuse_if(api::IoPrioClass::try_from(asked.class).is_err(), || format!("I/O class {}", asked.class))?;
    }
    for namespace in &asked.namespaces {
        let kind = name(&namespace.r#type);
        refuse_if(!NAMESPACES.contains(&kind), || format!("namespace {kind:?}: unknown"))?;
        refuse_if(!namespace.path.is_empty() && !namespace.path.starts_with('/'), || {
            format!("namespace {kind}: path {:?} is not absolute", namespace.path)
        })?;
    }
    for key in asked.sysctl.keys() {
        refuse_if(name(key).is_empty(), || "a sysctl without a name".to_owned())?;
    }
    for (host, device) in &asked.net_devices {
        interface(name(host))?;
        if !host.starts_with('-') && !device.name.is_empty() {
            interface(&device.name)?;
        }
    }
    if let Some(asked) = &asked.scheduler {
        scheduler(asked)?;
    }
    if let Some(asked) = &asked.memory_policy {
        refuse_if(api::MpolMode::try_from(asked.mode).is_err(), || format!("memory policy {}", asked.mode))?;
        refuse_if(asked.flags.iter().any(|flag| api::MpolFlag::try_from(*flag).is_err()), || {
            format!("memory policy flags {:?}", asked.flags)
        })?;
        numbers("memory policy nodes", &asked.nodes)?;
    }
    Ok(())
}

fn scheduler(asked: &api::LinuxScheduler) -> Result<(), String> {
    refuse_if(api::LinuxSchedulerPolicy::try_from(asked.policy).is_err(), || {
        format!("scheduler policy {}", asked.policy)
    })?;
    refuse_if(!(-20..=19).contains(&asked.nice), || format!("scheduler: nice {}", asked.nice))?;
    refuse_if(!(0..100).contains(&asked.priority), || format!("scheduler: priority {}", asked.priority))?;
    refuse_if(asked.flags.iter().any(|flag| api::LinuxSchedulerFlag::try_from(*flag).is_err()), || {
        format!("scheduler: flags {:?}", asked.flags)
    })
}

fn hooks(asked: &api::Hooks) -> Result<(), String> {
    let stages = [
        &asked.prestart,
        &asked.create_runtime,
        &asked.create_container,
        &asked.start_container,
        &asked.poststart,
        &asked.poststop,
    ];
    for hook in stages.into_iter().flatten() {
        absolute("hook", &hook.path)?;
        let timeout = hook.timeout.map_or(1, |timeout| timeout.value);
        refuse_if(timeout < 1, || format!("hook {}: a timeout of {timeout} s", hook.path))?;
    }
    Ok(())
}

/// Validates the resources of an adjustment or an update.
pub(super) fn resources(asked: &api::LinuxResources) -> Result<(), String> {
    if let Some(cpu) = &asked.cpu {
        numbers("cpus", &cpu.cpus)?;
        numbers("mems", &cpu.mems)?;
    }
    let swappiness = asked.memory.and_then(|memory| memory.swappiness).map_or(0, |value| value.value);
    refuse_if(swappiness > 200, || format!("swappiness {swappiness}"))?;
    let pids = asked.pids.map_or(0, |pids| pids.limit);
    refuse_if(pids < -1, || format!("pids limit {pids}"))?;
    for rule in &asked.devices {
        let is_kind = matches!(rule.r#type.as_str(), "" | "a" | "b" | "c");
        let is_access = rule.access.chars().all(|letter| "rwm".contains(letter));
        refuse_if(!is_kind || !is_access, || format!("device rule {:?} {:?}", rule.r#type, rule.access))?;
        // None and -1 mean all devices (the wildcard of the device cgroup): a number that is out of range must not.
        let is_number = |number: Option<api::OptionalInt64>, bits: u32| {
            number.is_none_or(|number| (-1..1 << bits).contains(&number.value))
        };
        refuse_if(!is_number(rule.major, MAJOR_BITS) || !is_number(rule.minor, MINOR_BITS), || {
            let text = |number: Option<api::OptionalInt64>| number.map_or(-1, |number| number.value);
            format!("device rule: {}:{} is not a device", text(rule.major), text(rule.minor))
        })?;
    }
    Ok(())
}

/// Validates a list in the kernel's notation, `0-3,7`. An empty text is valid.
fn numbers(what: &str, text: &str) -> Result<(), String> {
    let is_number = |text: &str| text.parse::<u32>().is_ok();
    let is_part = |part: &str| match part.trim().split_once('-') {
        Some((from, to)) => is_number(from) && is_number(to),
        None => is_number(part.trim()),
    };
    refuse_if(!text.is_empty() && !text.split(',').all(is_part), || {
        format!("{what}: {text:?} is not a list like 0-3,7")
    })
}

fn interface(name: &str) -> Result<(), String> {
    let is_name = !name.is_empty()
        && name.len() < INTERFACE_BYTES
        && !matches!(name, "." | "..")
        && !name
            .contains(|character: char| character == '/' || character == ':' || character.is_whitespace());
    refuse_if(!is_name, || format!("network interface {name:?}: not a name"))
}

fn absolute(what: &str, path: &str) -> Result<(), String> {
    refuse_if(!path.starts_with('/') || path.contains('\0'), || {
        format!("{what} {path:?}: not an absolute path")
    })
}

/// The name in a text, without the prefix that marks a removal.
fn name(text: &str) -> &str {
    text.strip_prefix('-').unwrap_or(text)
}

fn refuse_if(is_bad: bool, why: impl FnOnce() -> String) -> Result<(), String> {
    if is_bad { Err(why()) } else { Ok(()) }
}
