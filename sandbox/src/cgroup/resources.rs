//! Requested limits, and the part of applying them that needs no I/O: the values for the files, their order, and the
//! consequence of a missing file. Rules: CRI 3.14; the weight formula of runc 1.3.2 and crun 1.23.

use super::Version;
use super::controllers;
use super::devices;
use crate::Error;
use crate::plan::DeviceKind;

/// Limits of a cgroup. Zero and empty values mean no change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// CPU shares on the v1 scale, from 2 to 262144.
    pub cpu_shares: i64,
    /// CPU time per period, in microseconds; negative: no limit.
    pub cpu_quota_us: i64,
    /// CPU period in microseconds; 0 with a quota means 100 000.
    pub cpu_period_us: i64,
    /// Memory limit in bytes; negative: no limit.
    pub memory_bytes: i64,
    /// Memory and swap together, in bytes. 0 with a memory limit: no swap; negative: no limit.
    pub memory_swap_bytes: i64,
    /// CPUs of the cpuset, for example `0-3,7`.
    pub cpuset_cpus: String,
    /// Memory nodes of the cpuset, for example `0-1`.
    pub cpuset_mems: String,
    /// Limits of huge pages, by page size.
    pub hugepages: Vec<HugepageLimit>,
    /// Names of v2 files and their values, which are written last and unchanged.
    pub unified: Vec<(String, String)>,
    /// Maximum number of processes and threads; negative: no limit.
    pub pids_max: i64,
    /// Devices that the container may open; only for a new cgroup.
    pub devices: DeviceAccess,
    /// Limits that only NRI plugins request.
    pub rare: RareLimits,
}

/// Limits without a field in Kubernetes. `None` means no change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RareLimits {
    /// Memory protected from reclaim, in bytes; negative: no protection; `None`: no change.
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

/// A limit on one size of huge pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HugepageLimit {
    /// Page size in the kernel's notation: `2MB`, `1GB`.
    pub page_size: String,
    /// Limit in bytes; 0 means that no page of this size may be used.
    pub limit_bytes: u64,
}

/// Devices that the container may open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceAccess {
    /// The rules are not changed.
    #[default]
    Unchanged,
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

/// The writes that apply `resources`, in the order in which they must be made.
pub(super) fn writes(resources: &Resources, version: Version, now: Now) -> Result<Vec<Write>, Error> {
    let mut writes = Vec::new();
    if version == Version::V1 {
        device_lines(&resources.devices, &mut writes)?;
    }
    cpu(resources, version, &mut writes);
    cpuset("cpuset.cpus", &resources.cpuset_cpus, &mut writes)?;
    cpuset("cpuset.mems", &resources.cpuset_mems, &mut writes)?;
    memory(resources, version, now, &mut writes)?;
    hugepages(resources, version, &mut writes)?;
    rare(&resources.rare, version, &mut writes);
    if resources.pids_max != 0 {
        writes.push(Write::new("pids", "pids.max", or_max(resources.pids_max, "max"), WhenMissing::Warn));
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
    let (memory, both) = (resources.memory_bytes, resources.memory_swap_bytes);
    check_memory(memory, both, now)?;
    if memory == 0 {
        return Ok(());
    }
    // If swap is not accounted, that only matters to a container that was promised some.
    let without_swap = if both > memory { WhenMissing::Warn } else { WhenMissing::Pass };
    // With a memory limit 0 means no swap, without one it means no limit, as in containerd.
    let both = if both == 0 { memory } else { both };
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
    for HugepageLimit { page_size, limit_bytes } in &resources.hugepages {
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
        // The kubelet sends 0 for every size, regardless of whether there is a controller.
        let when_missing = if *limit_bytes > 0 { WhenMissing::Refuse } else { WhenMissing::Pass };
        let file = format!("hugetlb.{page_size}.{suffix}");
        let reserved = format!("hugetlb.{page_size}.rsvd.{suffix}");
        writes.push(Write::new("hugetlb", file, limit_bytes, when_missing));
        writes.push(Write::new("hugetlb", reserved, limit_bytes, WhenMissing::Pass));
    }
    Ok(())
}

/// Adds the writes for `rare`. Most of these limits exist only on v1; on v2 they give a warning.
fn rare(rare: &RareLimits, version: Version, writes: &mut Vec<Write>) {
    let mut push = |controller, file: &str, value: Option<String>| {
        if let Some(value) = value {
            writes.push(Write::new(controller, file, value, WhenMissing::Warn));
        }
    };
    match version {
        Version::V1 => {
            let soft = rare.memory_reservation_bytes.map(|bytes| bytes.max(-1).to_string());
            push("memory", "memory.soft_limit_in_bytes", soft);
        }
        Version::V2 => {
            let low = rare.memory_reservation_bytes.map(|bytes| bytes.max(0).to_string());
            push("memory", "memory.low", low);
        }
    }
    let text = |number: Option<i64>| number.map(|number| number.to_string());
    push("memory", "memory.kmem.limit_in_bytes", text(rare.kernel_memory_bytes));
    push("memory", "memory.kmem.tcp.limit_in_bytes", text(rare.kernel_tcp_bytes));
    push("memory", "memory.swappiness", rare.swappiness.map(|value| value.to_string()));
    push("memory", "memory.oom_control", rare.disable_oom_killer.map(|off| u8::from(off).to_string()));
    push("cpu", "cpu.rt_period_us", rare.realtime_period_us.map(|us| us.to_string()));
    push("cpu", "cpu.rt_runtime_us", text(rare.realtime_runtime_us));
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

fn device_lines(access: &DeviceAccess, writes: &mut Vec<Write>) -> Result<(), Error> {
    let mut push =
        |file: &str, rule: String| writes.push(Write::new("devices", file, rule, WhenMissing::Warn));
    let rules = match access {
        DeviceAccess::Unchanged => return Ok(()),
        DeviceAccess::All => {
            push("devices.allow", "a".into());
            return Ok(());
        }
        DeviceAccess::Only(rules) => rules,
    };
    push("devices.deny", "a".into());
    for rule in devices::all(rules)? {
        push("devices.allow", devices::line(&rule));
    }
    Ok(())
}

#[cfg(test)]
#[path = "resources_tests.rs"]
mod tests;
