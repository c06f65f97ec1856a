//! Requested limits, and the part of applying them that needs no I/O: the values for the files, their order, and the
//! consequence of a missing file. Rules: CRI 3.14; the weight formula of runc 1.3.2 and crun 1.23.

use serde::{Deserialize, Serialize};

use super::Version;
use super::controllers;
use super::devices;
use crate::Error;
use crate::plan::{DeviceKind, DeviceNode};

/// The resources of a container as the CRI requests them (`LinuxContainerResources`). Zero and empty values are not
/// specified: they mean no change. The encoding in postcard is part of the records of pods and containers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// CPU period in microseconds; 0 with a quota means 100 000.
    pub cpu_period_us: i64,
    /// CPU time per period, in microseconds; negative: no limit.
    pub cpu_quota_us: i64,
    /// CPU shares on the v1 scale, from 2 to 262144.
    pub cpu_shares: i64,
    /// Memory limit in bytes; negative: no limit.
    pub memory_limit_bytes: i64,
    /// OOM score adjustment of the container's processes, from -1000 to 1000. It is not a limit of the cgroup.
    pub oom_score_adj: i64,
    /// CPUs of the cpuset, for example `0-3,7`.
    pub cpuset_cpus: String,
    /// Memory nodes of the cpuset, for example `0-1`.
    pub cpuset_mems: String,
    /// Limits of huge pages: page size in the kernel's notation (`2MB`, `1GB`), limit in bytes; 0 means that no page of
    /// this size may be used.
    pub hugepage_limits: Vec<(String, u64)>,
    /// Names of v2 files and their values, which are written last and unchanged.
    pub unified: Vec<(String, String)>,
    /// Memory and swap together, in bytes. 0 with a memory limit: no swap; negative: no limit.
    pub memory_swap_limit_bytes: i64,
}

/// The limits of a container's cgroup: those of the CRI, and those that only NRI plugins request. `None` means no
/// change. The encoding in postcard is part of the records of containers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Limits that the CRI supports.
    pub resources: Resources,
    /// Maximum number of processes and threads; 0: no change; negative: no limit.
    pub pids_max: i64,
    /// Memory protected from reclaim (`memory.low`), or the soft limit of v1, in bytes; negative: none; `None`: no
    /// change.
    pub memory_reservation_bytes: Option<i64>,
    /// Limit of kernel memory in bytes, v1 only (removed in Linux 6); `None`: no change.
    pub kernel_memory_bytes: Option<i64>,
    /// Limit of TCP buffers in bytes, v1 only; `None`: no change.
    pub kernel_tcp_bytes: Option<i64>,
    /// Swappiness, 0 to 100, v1 only; `None`: no change.
    pub swappiness: Option<u64>,
    /// Whether processes are suspended instead of killed when memory is exhausted, v1 only; `None`: no change.
    pub disable_oom_killer: Option<bool>,
    /// Realtime CPU time per period in microseconds, v1 only; `None`: no change.
    pub realtime_runtime_us: Option<i64>,
    /// Realtime period in microseconds, v1 only; `None`: no change.
    pub realtime_period_us: Option<u64>,
}

impl From<Resources> for Limits {
    fn from(resources: Resources) -> Self {
        Self { resources, ..Self::default() }
    }
}

impl Resources {
    /// The limit of memory and swap together that applies, in bytes; 0: none. With a limit of memory alone that is the
    /// limit, so that the container has no swap, as in containerd.
    pub fn memory_and_swap_limit_bytes(&self) -> i64 {
        match (self.memory_limit_bytes, self.memory_swap_limit_bytes) {
            (0, _) => 0,
            (memory, 0) => memory,
            (_, both) => both,
        }
    }

    /// These resources updated by a later request, in which zero and empty mean "unchanged". The OOM score adjustment
    /// belongs to the processes and does not change. With a limit of memory alone the one of swap follows, as in containerd
    /// (`WithResources` in internal/cri/opts): the old one may be less than the memory.
    #[must_use]
    pub fn updated(&self, asked: &Self) -> Self {
        let number = |old: i64, new: i64| if new == 0 { old } else { new };
        let text = |old: &String, new: &String| if new.is_empty() { old.clone() } else { new.clone() };
        Self {
            cpu_period_us: number(self.cpu_period_us, asked.cpu_period_us),
            cpu_quota_us: number(self.cpu_quota_us, asked.cpu_quota_us),
            cpu_shares: number(self.cpu_shares, asked.cpu_shares),
            memory_limit_bytes: number(self.memory_limit_bytes, asked.memory_limit_bytes),
            oom_score_adj: self.oom_score_adj,
            cpuset_cpus: text(&self.cpuset_cpus, &asked.cpuset_cpus),
            cpuset_mems: text(&self.cpuset_mems, &asked.cpuset_mems),
            hugepage_limits: replaced(&self.hugepage_limits, &asked.hugepage_limits),
            unified: replaced(&self.unified, &asked.unified),
            memory_swap_limit_bytes: match asked.memory_limit_bytes {
                0 => number(self.memory_swap_limit_bytes, asked.memory_swap_limit_bytes),
                _ => asked.memory_swap_limit_bytes,
            },
        }
    }
}

/// The pairs of both lists; of a name in both, the pair in `new`.
fn replaced<T: Clone>(old: &[(String, T)], new: &[(String, T)]) -> Vec<(String, T)> {
    let mut pairs = old.to_vec();
    for pair in new {
        pairs.retain(|(name, _)| *name != pair.0);
        pairs.push(pair.clone());
    }
    pairs
}

/// Devices that the container may open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceAccess {
    /// All devices, for privileged containers.
    All,
    /// The default devices, terminals, mknod of any device, and the devices of these rules.
    Only(Vec<DeviceRule>),
}

/// A rule that permits access to devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceRule {
    /// Kind of the device.
    pub kind: DeviceKind,
    /// Major number; `None`: any.
    pub major: Option<u32>,
    /// Minor number; `None`: any.
    pub minor: Option<u32>,
    /// Permitted access: a subset of `rwm`.
    pub access: String,
}

/// Current values of the cgroup on which the order of writes and the checks depend.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Now {
    /// Memory usage in bytes; `None` if it is unknown.
    pub(super) memory_usage: Option<u64>,
    /// Value of `memory.memsw.limit_in_bytes` on v1; `None` if swap is not accounted.
    pub(super) memory_swap_limit: Option<u64>,
}

/// A write of one value to one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Write {
    /// The controller, which selects the hierarchy on v1; not used on v2.
    pub(super) controller: &'static str,
    pub(super) file: String,
    pub(super) value: String,
    pub(super) when_missing: WhenMissing,
}

/// Consequence of a missing file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum WhenMissing {
    /// No consequence: the limit has the same effect without the file.
    Pass,
    /// A warning: the limit is not applied, and the operation continues, because a pod without this limit is better
    /// than no pod.
    Warn,
    /// A warning if the cgroup lacks the controller, an error if it has the controller without this file.
    WarnWithoutController,
    /// An error: the request cannot be satisfied.
    Refuse,
}

/// Minimum memory limit of a container in bytes; less than the kernel charges for the first process (CRI 3.14).
const MEMORY_BYTES_MIN: i64 = 512 << 10;

/// The scheduler's default CPU period in microseconds.
const CPU_PERIOD_US: i64 = 100_000;

/// Maximum length in bytes of a value in `unified`: some files accept several lines, and the kernel reads at most one
/// page.
const UNIFIED_BYTES_MAX: usize = 4095;

/// The writes that apply `limits`, in the order in which they must be made.
pub(super) fn writes(limits: &Limits, version: Version, now: Now) -> Result<Vec<Write>, Error> {
    let resources = &limits.resources;
    let mut writes = Vec::new();
    cpu(resources, version, &mut writes);
    cpuset("cpuset.cpus", &resources.cpuset_cpus, &mut writes)?;
    cpuset("cpuset.mems", &resources.cpuset_mems, &mut writes)?;
    memory(resources, version, now, &mut writes)?;
    hugepages(resources, version, &mut writes)?;
    rare(limits, version, &mut writes);
    if limits.pids_max != 0 {
        writes.push(Write::new("pids", "pids.max", or_max(limits.pids_max, "max"), WhenMissing::Warn));
    }
    if version == Version::V2 {
        unified(resources, &mut writes)?;
    }
    Ok(writes)
}

impl Write {
    fn new(
        controller: &'static str,
        file: impl Into<String>,
        value: impl ToString,
        when_missing: WhenMissing,
    ) -> Self {
        Self { controller, file: file.into(), value: value.to_string(), when_missing }
    }
}

fn or_max(value: i64, max: &str) -> String {
    if value < 0 { max.to_string() } else { value.to_string() }
}

fn cpu(resources: &Resources, version: Version, writes: &mut Vec<Write>) {
    let (quota, period) = (resources.cpu_quota_us, resources.cpu_period_us.max(0));
    let mut push = |file: &str, value: String| writes.push(Write::new("cpu", file, value, WhenMissing::Warn));
    match version {
        Version::V1 => {
            if resources.cpu_shares > 0 {
                push("cpu.shares", resources.cpu_shares.to_string());
            }
            if period > 0 {
                push("cpu.cfs_period_us", period.to_string());
            }
            if quota != 0 {
                push("cpu.cfs_quota_us", quota.max(-1).to_string());
            }
        }
        Version::V2 => {
            if resources.cpu_shares > 0 {
                push("cpu.weight", weight(resources.cpu_shares).to_string());
            }
            if quota != 0 || period > 0 {
                let quota = if quota > 0 { quota.to_string() } else { "max".into() };
                let period = if period > 0 { period } else { CPU_PERIOD_US };
                push("cpu.max", format!("{quota} {period}"));
            }
        }
    }
}

/// Converts v1 shares to a v2 weight: ceil(10^((l² + 125 l)/612 − 7/34)) with l = log2(shares). This maps the default
/// to the default (1024 → 100) and the limits to the limits (2 → 1, 262144 → 10000).
fn weight(shares: i64) -> u64 {
    let shares = shares.clamp(2, 262_144);
    let log = (shares as f64).log2();
    // 7/34 is 126/612: with one denominator the exponents of the three fixed points are exact, and subtracting a small
    // value prevents a rounding error of `powf` from raising a whole number to the next.
    let exponent = (log * log + 125.0 * log - 126.0) / 612.0;
    ((10f64.powf(exponent) - 1e-9).ceil() as u64).clamp(1, 10_000)
}

fn cpuset(file: &str, list: &str, writes: &mut Vec<Write>) -> Result<(), Error> {
    let list = list.trim();
    if !list.bytes().all(|byte| byte.is_ascii_digit() || matches!(byte, b'-' | b',' | b' ')) {
        return Err(Error::invalid(file, format!("{list:?} is not a list like 0-3,7")));
    }
    if !list.is_empty() {
        writes.push(Write::new("cpuset", file, list, WhenMissing::Warn));
    }
    Ok(())
}

fn memory(resources: &Resources, version: Version, now: Now, writes: &mut Vec<Write>) -> Result<(), Error> {
    let (memory, both) = (resources.memory_limit_bytes, resources.memory_swap_limit_bytes);
    check_memory(memory, both, now)?;
    if memory == 0 {
        return Ok(());
    }
    // If swap is not accounted, that only matters to a container that was promised some.
    let without_swap = if both > memory { WhenMissing::Warn } else { WhenMissing::Pass };
    let both = resources.memory_and_swap_limit_bytes();
    let (limit, swap) = match version {
        Version::V1 => (
            Write::new("memory", "memory.limit_in_bytes", memory.max(-1), WhenMissing::Warn),
            Write::new("memory", "memory.memsw.limit_in_bytes", both.max(-1), without_swap),
        ),
        Version::V2 => {
            let swap = if both < 0 { "max".into() } else { both.saturating_sub(memory.max(0)).to_string() };
            (
                Write::new("memory", "memory.max", or_max(memory, "max"), WhenMissing::Warn),
                Write::new("memory", "memory.swap.max", swap, without_swap),
            )
        }
    };
    // v1 requires the limit of memory and swap to be at least that of memory at all times, so the order of the writes
    // depends on whether limits are raised or lowered. On v2 the two are independent.
    let is_raised = both < 0 || now.memory_swap_limit.is_some_and(|limit| both.unsigned_abs() > limit);
    writes.extend(if is_raised { [swap, limit] } else { [limit, swap] });
    Ok(())
}

fn check_memory(memory: i64, both: i64, now: Now) -> Result<(), Error> {
    if (1..MEMORY_BYTES_MIN).contains(&memory) {
        let why = format!("{memory} bytes are not enough to start, the least is {MEMORY_BYTES_MIN}");
        return Err(Error::invalid("memory limit", why));
    }
    if both > 0 && memory <= 0 {
        return Err(Error::invalid("swap limit", "is set without a memory limit"));
    }
    if both > 0 && both < memory {
        let why = format!("{both} bytes of memory and swap are less than {memory} of memory");
        return Err(Error::invalid("swap limit", why));
    }
    // The kernel would reclaim memory and then kill processes to reach the limit.
    if let Some(usage) = now.memory_usage.filter(|usage| memory > 0 && memory.unsigned_abs() < *usage) {
        let why = format!("{memory} bytes are less than the {usage} in use");
        return Err(Error::invalid("memory limit", why));
    }
    Ok(())
}

fn hugepages(resources: &Resources, version: Version, writes: &mut Vec<Write>) -> Result<(), Error> {
    for (page_size, limit_bytes) in &resources.hugepage_limits {
        let digits = page_size.trim_end_matches(|character: char| character.is_ascii_uppercase());
        let is_size = !digits.is_empty()
            && digits.bytes().all(|byte| byte.is_ascii_digit())
            && matches!(&page_size[digits.len()..], "KB" | "MB" | "GB");
        if !is_size {
            return Err(Error::invalid(
                "hugepage_limits",
                format!("{page_size:?} is not a page size like 2MB"),
            ));
        }
        let suffix = match version {
            Version::V1 => "limit_in_bytes",
            Version::V2 => "max",
        };
        // The kubelet sends 0 for every size, regardless of whether there is a controller. The kernel counts huge pages
        // also without it, and a pod that asks for some must start (containerd: tolerate_missing_hugetlb_controller).
        let when_missing =
            if *limit_bytes > 0 { WhenMissing::WarnWithoutController } else { WhenMissing::Pass };
        let file = format!("hugetlb.{page_size}.{suffix}");
        let reserved = format!("hugetlb.{page_size}.rsvd.{suffix}");
        writes.push(Write::new("hugetlb", file, limit_bytes, when_missing));
        writes.push(Write::new("hugetlb", reserved, limit_bytes, WhenMissing::Pass));
    }
    Ok(())
}

/// Adds the writes for limits that only NRI plugins request. Most of them exist only on v1; on v2 they give a warning.
fn rare(limits: &Limits, version: Version, writes: &mut Vec<Write>) {
    let mut push = |controller, file: &str, value: Option<String>| {
        if let Some(value) = value {
            writes.push(Write::new(controller, file, value, WhenMissing::Warn));
        }
    };
    match version {
        Version::V1 => {
            let soft = limits.memory_reservation_bytes.map(|bytes| bytes.max(-1).to_string());
            push("memory", "memory.soft_limit_in_bytes", soft);
        }
        Version::V2 => {
            let low = limits.memory_reservation_bytes.map(|bytes| bytes.max(0).to_string());
            push("memory", "memory.low", low);
        }
    }
    let text = |number: Option<i64>| number.map(|number| number.to_string());
    push("memory", "memory.kmem.limit_in_bytes", text(limits.kernel_memory_bytes));
    push("memory", "memory.kmem.tcp.limit_in_bytes", text(limits.kernel_tcp_bytes));
    push("memory", "memory.swappiness", limits.swappiness.map(|value| value.to_string()));
    push("memory", "memory.oom_control", limits.disable_oom_killer.map(|off| u8::from(off).to_string()));
    push("cpu", "cpu.rt_period_us", limits.realtime_period_us.map(|us| us.to_string()));
    push("cpu", "cpu.rt_runtime_us", text(limits.realtime_runtime_us));
}

fn unified(resources: &Resources, writes: &mut Vec<Write>) -> Result<(), Error> {
    for (key, value) in &resources.unified {
        let field = || format!("unified key {key:?}");
        let is_plain = key.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_'));
        let controller = key.split_once('.').map(|(controller, _)| controller);
        // Files `cgroup.…` are of no controller: they move, freeze or kill processes.
        let known = controller.and_then(|name| controllers::of_v2().find(|known| *known == name));
        let Some(controller) = known.filter(|_| is_plain) else {
            return Err(Error::invalid(field(), "is not a file of a controller"));
        };
        if value.len() > UNIFIED_BYTES_MAX || value.contains('\0') {
            return Err(Error::invalid(field(), "has a value the kernel cannot take"));
        }
        writes.push(Write::new(controller, key.as_str(), value, WhenMissing::Refuse));
    }
    Ok(())
}

/// The writes that restrict devices on v1, in a new cgroup, in which all devices are permitted.
pub(super) fn device_writes(access: &DeviceAccess, nodes: &[DeviceNode]) -> Result<Vec<Write>, Error> {
    let rule = |file: &str, rule: String| Write::new("devices", file, rule, WhenMissing::Warn);
    match access {
        DeviceAccess::All => Ok(vec![rule("devices.allow", "a".into())]),
        DeviceAccess::Only(rules) => {
            let allowed = devices::all(rules, nodes)?;
            let allowed = allowed.iter().map(|one| rule("devices.allow", devices::line(one)));
            Ok([rule("devices.deny", "a".into())].into_iter().chain(allowed).collect())
        }
    }
}

#[cfg(test)]
#[path = "resources_tests.rs"]
mod tests;
