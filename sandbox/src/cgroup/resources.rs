//! Limits as they are asked for, and the pure half of applying them: which value goes into which file, in which
//! order, and what it means when the file is not there.
//! Rules: CRI 3.14; the weight formula of runc 1.3.2 and crun 1.23.

use super::Version;
use super::devices;
use crate::Error;
use crate::plan::DeviceKind;

/// What a cgroup may use. Zero and empty: leave as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// 2..=262144, the v1 scale.
    pub cpu_shares: i64,
    /// Microseconds of CPU per period; negative: no limit.
    pub cpu_quota_us: i64,
    /// Microseconds; 0 with a quota: 100 000.
    pub cpu_period_us: i64,
    /// Negative: no limit.
    pub memory_bytes: i64,
    /// Memory and swap together. 0 with a memory limit: no swap; negative: no limit.
    pub memory_swap_bytes: i64,
    /// As `0-3,7`.
    pub cpuset_cpus: String,
    /// As `0-1`.
    pub cpuset_mems: String,
    /// Huge pages by size.
    pub hugepages: Vec<HugepageLimit>,
    /// v2 files and their values, written last and as they are.
    pub unified: Vec<(String, String)>,
    /// Most processes and threads; negative: no limit.
    pub pids_max: i64,
    /// Which devices may be opened: for a new cgroup.
    pub devices: DeviceAccess,
    /// What only plugins ask for.
    pub rare: RareLimits,
}

/// Limits that Kubernetes has no fields for. `None`: leave as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RareLimits {
    /// Memory that is reclaimed last, bytes; negative: none.
    pub memory_reservation_bytes: Option<i64>,
    /// v1: kernel memory, bytes (gone in Linux 6).
    pub kernel_memory_bytes: Option<i64>,
    /// v1: TCP buffers, bytes.
    pub kernel_tcp_bytes: Option<i64>,
    /// v1: 0 to 100.
    pub swappiness: Option<u64>,
    /// v1: processes wait instead of being killed.
    pub disable_oom_killer: Option<bool>,
    /// v1: microseconds of realtime per period.
    pub realtime_runtime_us: Option<i64>,
    /// v1: microseconds.
    pub realtime_period_us: Option<u64>,
}

/// A limit on one size of huge pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HugepageLimit {
    /// As the kernel names it: `2MB`, `1GB`.
    pub page_size: String,
    /// 0 is a limit, too: none may be used.
    pub limit_bytes: u64,
}

/// Which devices may be opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceAccess {
    /// Leave as it is.
    #[default]
    Unchanged,
    /// All: privileged.
    All,
    /// The default nodes, terminals, mknod of anything, and these.
    Only(Vec<DeviceRule>),
}

/// A device that may be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceRule {
    /// Kind.
    pub kind: DeviceKind,
    /// `None`: any.
    pub major: Option<u32>,
    /// `None`: any.
    pub minor: Option<u32>,
    /// Some of `rwm`.
    pub access: String,
}

/// What the cgroup has now, as far as the order and the checks depend on it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Now {
    /// Bytes of memory in use.
    pub(super) memory_usage: Option<u64>,
    /// v1: `memory.memsw.limit_in_bytes`; `None` where swap is not accounted.
    pub(super) memory_swap_limit: Option<u64>,
}

/// One value for one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Write {
    /// Which v1 hierarchy; on v2 all are one.
    pub(super) controller: &'static str,
    pub(super) file: String,
    pub(super) value: String,
    pub(super) when_missing: WhenMissing,
}

/// What a missing file means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum WhenMissing {
    /// Nothing: the limit would be the same without it.
    Pass,
    /// The limit does not hold: said, and gone on (a pod is worth more than its limit).
    Warn,
    /// The request cannot be met.
    Refuse,
}

/// Least memory a container is started with: less than what the kernel charges for its init (CRI 3.14).
const MEMORY_BYTES_MIN: i64 = 512 << 10;

/// The scheduler's own period where none is given.
const CPU_PERIOD_US: i64 = 100_000;

/// v2 controllers whose files `unified` may name. `cgroup.…` would move, freeze or kill.
const UNIFIED_CONTROLLERS: [&str; 9] =
    ["cpu", "cpuset", "dmem", "hugetlb", "io", "memory", "misc", "pids", "rdma"];

/// Longest value in `unified`: some files take several lines, a page is what the kernel reads at most.
const UNIFIED_BYTES_MAX: usize = 4095;

/// The writes that apply `resources`, in order.
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

/// v1 shares as a v2 weight: ceil(10^((l² + 125 l)/612 − 7/34)) with l = log2(shares), so that the defaults meet
/// (1024 → 100) and the ends, too (2 → 1, 262144 → 10000).
fn weight(shares: i64) -> u64 {
    let shares = shares.clamp(2, 262_144);
    let log = (shares as f64).log2();
    // 7/34 is 126/612: over one denominator the exponents of the three fixed points come out whole, and the small
    // step back keeps the last digit of `powf` from lifting a whole number to the next.
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
    // Not accounted swap matters only to one who was promised some.
    let without_swap = if both > memory { WhenMissing::Warn } else { WhenMissing::Pass };
    // 0 means no swap with a limit, and no limit without one, as containerd has it.
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
    // v1 keeps memory and swap together at least as large as memory at every moment, so whichever makes room goes
    // first. On v2 the two are independent.
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
    // The kernel would reclaim and then kill to get there.
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
        // The kubelet sends 0 for every size, whether there is a controller or not.
        let when_missing = if *limit_bytes > 0 { WhenMissing::Refuse } else { WhenMissing::Pass };
        let file = format!("hugetlb.{page_size}.{suffix}");
        let reserved = format!("hugetlb.{page_size}.rsvd.{suffix}");
        writes.push(Write::new("hugetlb", file, limit_bytes, when_missing));
        writes.push(Write::new("hugetlb", reserved, limit_bytes, WhenMissing::Pass));
    }
    Ok(())
}

/// Most are of v1 alone: there they are said to be left out on v2.
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
        let known = controller.and_then(|name| UNIFIED_CONTROLLERS.into_iter().find(|known| *known == name));
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
