//! Detailed counters of a cgroup, for cAdvisor-style metrics. They are separate from `gauge`, which is read every ten
//! seconds for every container. Rules: CRI 2.22 and CRI 2.24; Documentation/admin-guide/cgroup-v2.rst;
//! Documentation/accounting/psi.rst.

use super::files::{names_gone, read};
use super::gauge::lines;
use super::{CgroupPath, Cgroups, Version};
use crate::Error;

/// Counters of one cgroup including its descendants; `None`: not counted by this kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Detail {
    /// CPU time in user mode in microseconds; `None`: not counted.
    pub user_us: Option<u64>,
    /// CPU time in the kernel in microseconds; `None`: not counted.
    pub system_us: Option<u64>,
    /// Number of elapsed quota periods; `None`: not counted.
    pub periods: Option<u64>,
    /// Number of periods in which the cgroup was throttled; `None`: not counted.
    pub throttled_periods: Option<u64>,
    /// Throttled time in microseconds; `None`: not counted.
    pub throttled_us: Option<u64>,
    /// Page cache in bytes; `None`: not counted.
    pub cache_bytes: Option<u64>,
    /// Mapped files in bytes; `None`: not counted.
    pub mapped_bytes: Option<u64>,
    /// Kernel memory in bytes; `None`: not counted.
    pub kernel_bytes: Option<u64>,
    /// Peak memory usage in bytes; `None`: not counted.
    pub peak_bytes: Option<u64>,
    /// Number of times that the memory limit was reached; `None`: not counted.
    pub failures: Option<u64>,
    /// Number of page faults, and of major page faults; `None`: not counted.
    pub faults: Option<(u64, u64)>,
    /// Number of OOM kills; `None`: not counted.
    pub oom_kills: Option<u64>,
    /// Limit of processes and threads; `None`: no limit, or no controller.
    pub tasks_max: Option<u64>,
    /// I/O by block device.
    pub io: Vec<DeviceIo>,
    /// Usage of huge pages by page size; empty without the controller.
    pub hugepages: Vec<Hugepages>,
    /// PIDs in the node's PID namespace.
    pub processes: Vec<i32>,
}

/// Huge pages of one size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hugepages {
    /// Page size in the kernel's notation: `2MB`, `1GB`.
    pub page_size: String,
    /// Usage in bytes.
    pub bytes: u64,
    /// Peak usage in bytes; 0 on v2, which does not count it.
    pub peak_bytes: u64,
}

/// I/O on one block device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceIo {
    /// Device number, `MAJOR:MINOR`.
    pub device: String,
    /// Bytes read and written.
    pub bytes: (u64, u64),
    /// Number of reads and writes.
    pub operations: (u64, u64),
}

/// Pressure stall information of a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pressure {
    /// Time in which at least one process waited.
    pub some: Stall,
    /// Time in which all processes waited.
    pub full: Stall,
}

/// Averages over the last 10, 60 and 300 seconds, and the total, of the time that processes waited.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stall {
    /// Shares of time in percent: over 10, 60 and 300 seconds.
    pub averages: [f64; 3],
    /// Total time in microseconds.
    pub total_us: u64,
}

/// Clock ticks per second in cpuacct.stat (USER_HZ, equal on all machines).
const USER_HZ: u64 = 100;

impl Cgroups {
    /// Reads the counters; `None` if the cgroup does not exist.
    ///
    /// # Errors
    /// [`Error::Kernel`] if a file exists and cannot be read.
    pub fn detail(&self, path: &CgroupPath) -> Result<Option<Detail>, Error> {
        let directory = self.tracking_directory(path);
        if !directory.is_dir() {
            return Ok(None);
        }
        let reader = Reader { cgroups: self, path };
        let mut detail = match self.version() {
            Version::V1 => v1(&reader)?,
            Version::V2 => v2(&reader)?,
        };
        detail.hugepages = reader.hugepages();
        let processes = std::fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
        detail.processes = processes.lines().filter_map(|line| line.parse().ok()).collect();
        Ok(Some(detail))
    }
}

/// Reads the files of one cgroup.
struct Reader<'a> {
    cgroups: &'a Cgroups,
    path: &'a CgroupPath,
}

impl Reader<'_> {
    /// Reads a file with one number; `None` if it is missing or contains `max`.
    fn number(&self, controller: &str, file: &str) -> Result<Option<u64>, Error> {
        Ok(self.text(controller, file)?.and_then(|text| text.trim().parse().ok()))
    }

    /// Reads the usage for each page size that has a file: `hugetlb.SIZE.usage_in_bytes`, `hugetlb.SIZE.current`.
    fn hugepages(&self) -> Vec<Hugepages> {
        let ending = match self.cgroups.version() {
            Version::V1 => ".usage_in_bytes",
            Version::V2 => ".current",
        };
        let directory = self.cgroups.limit_directory(self.path, "hugetlb");
        let entries = directory.and_then(|directory| std::fs::read_dir(directory).ok());
        let names =
            entries.into_iter().flatten().flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let size = |name: String| {
            let size = name.strip_prefix("hugetlb.")?.strip_suffix(ending)?;
            (!size.contains('.')).then(|| size.to_owned())
        };
        let of = |page_size: String| {
            let number =
                |ending: &str| self.number("hugetlb", &format!("hugetlb.{page_size}{ending}")).ok().flatten();
            let (bytes, peak_bytes) = (number(ending), number(".max_usage_in_bytes"));
            Hugepages { page_size, bytes: bytes.unwrap_or(0), peak_bytes: peak_bytes.unwrap_or(0) }
        };
        names.filter_map(size).map(of).collect()
    }

    fn text(&self, controller: &str, file: &str) -> Result<Option<String>, Error> {
        let directory = self.cgroups.limit_directory(self.path, controller);
        let Some(directory) = directory else { return Ok(None) };
        match read(&directory.join(file)) {
            Ok(text) => Ok(Some(text)),
            Err(error) if names_gone(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn v1(reader: &Reader<'_>) -> Result<Detail, Error> {
    let cpu = reader.text("cpu", "cpu.stat")?.unwrap_or_default();
    let accounted = reader.text("cpuacct", "cpuacct.stat")?.unwrap_or_default();
    let memory = reader.text("memory", "memory.stat")?.unwrap_or_default();
    let oom = reader.text("memory", "memory.oom_control")?.unwrap_or_default();
    let ticks = lines(&accounted, &["user", "system"]);
    let [user_us, system_us] = ticks.map(|ticks| Some(ticks?.saturating_mul(1_000_000 / USER_HZ)));
    let [periods, throttled_periods, throttled_ns] =
        lines(&cpu, &["nr_periods", "nr_throttled", "throttled_time"]);
    let [cache_bytes, mapped_bytes, faults, major_faults] =
        lines(&memory, &["total_cache", "total_mapped_file", "total_pgfault", "total_pgmajfault"]);
    let bytes = reader.text("blkio", "blkio.throttle.io_service_bytes_recursive")?.unwrap_or_default();
    let operations = reader.text("blkio", "blkio.throttle.io_serviced_recursive")?.unwrap_or_default();
    Ok(Detail {
        user_us,
        system_us,
        periods,
        throttled_periods,
        throttled_us: throttled_ns.map(|ns| ns / 1000),
        cache_bytes,
        mapped_bytes,
        kernel_bytes: reader.number("memory", "memory.kmem.usage_in_bytes")?,
        peak_bytes: reader.number("memory", "memory.max_usage_in_bytes")?,
        failures: reader.number("memory", "memory.failcnt")?,
        faults: faults.zip(major_faults),
        oom_kills: lines(&oom, &["oom_kill"])[0],
        tasks_max: reader.number("pids", "pids.max")?,
        io: v1_io(&bytes, &operations),
        hugepages: Vec::new(),
        processes: Vec::new(),
    })
}

fn v2(reader: &Reader<'_>) -> Result<Detail, Error> {
    let cpu = reader.text("cpu", "cpu.stat")?.unwrap_or_default();
    let memory = reader.text("memory", "memory.stat")?.unwrap_or_default();
    let events = reader.text("memory", "memory.events")?.unwrap_or_default();
    let io = reader.text("io", "io.stat")?.unwrap_or_default();
    let [user_us, system_us, periods, throttled_periods, throttled_us] =
        lines(&cpu, &["user_usec", "system_usec", "nr_periods", "nr_throttled", "throttled_usec"]);
    let [cache_bytes, mapped_bytes, kernel, slab, faults, major_faults] =
        lines(&memory, &["file", "file_mapped", "kernel", "slab", "pgfault", "pgmajfault"]);
    let [failures, oom_kills] = lines(&events, &["max", "oom_kill"]);
    Ok(Detail {
        user_us,
        system_us,
        periods,
        throttled_periods,
        throttled_us,
        cache_bytes,
        mapped_bytes,
        // A single number since Linux 5.18; only parts before.
        kernel_bytes: kernel.or(slab),
        peak_bytes: reader.number("memory", "memory.peak")?,
        failures,
        faults: faults.zip(major_faults),
        oom_kills,
        tasks_max: reader.number("pids", "pids.max")?,
        io: io.lines().filter_map(v2_io).collect(),
        hugepages: Vec::new(),
        processes: Vec::new(),
    })
}

/// Parses a line of io.stat: `8:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=0 dios=0`.
fn v2_io(line: &str) -> Option<DeviceIo> {
    let (device, rest) = line.split_once(' ')?;
    let of = |key: &str| {
        rest.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix('=')?.parse().ok()).unwrap_or(0)
    };
    Some(DeviceIo {
        device: device.to_owned(),
        bytes: (of("rbytes"), of("wbytes")),
        operations: (of("rios"), of("wios")),
    })
}

/// Parses the two v1 files with bytes and with operations per device, with lines such as `8:0 Read 1`.
fn v1_io(bytes: &str, operations: &str) -> Vec<DeviceIo> {
    let of = |text: &str, device: &str, key: &str| {
        text.lines()
            .find_map(|line| {
                line.strip_prefix(device)?.strip_prefix(' ')?.strip_prefix(key)?.trim().parse().ok()
            })
            .unwrap_or(0)
    };
    let mut devices: Vec<&str> = bytes
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter(|(device, _)| device.contains(':'))
        .map(|(device, _)| device)
        .collect();
    devices.dedup();
    let io = |device: &str| DeviceIo {
        device: device.to_owned(),
        bytes: (of(bytes, device, "Read"), of(bytes, device, "Write")),
        operations: (of(operations, device, "Read"), of(operations, device, "Write")),
    };
    devices.into_iter().map(io).collect()
}

/// Parses `some avg10=0.00 avg60=0.00 avg300=0.00 total=0` and the line `full`, which the root cgroup's file for the
/// CPU does not have.
pub(super) fn parse_pressure(text: &str) -> Option<Pressure> {
    let stall = |kind: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(kind)?.strip_prefix(' '))?;
        let of = |key: &str| line.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
        let average = |key: &str| of(key)?.parse().ok();
        Some(Stall {
            averages: [average("avg10")?, average("avg60")?, average("avg300")?],
            total_us: of("total")?.parse().ok()?,
        })
    };
    Some(Pressure { some: stall("some")?, full: stall("full").unwrap_or_default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn io_statistics_of_both_cgroup_versions_are_parsed() {
        let line = "259:0 rbytes=10 wbytes=20 rios=1 wios=2 dbytes=0 dios=0";
        let expected = DeviceIo { device: "259:0".into(), bytes: (10, 20), operations: (1, 2) };
        assert_eq!(v2_io(line), Some(expected.clone()));
        let bytes = "259:0 Read 10\n259:0 Write 20\n259:0 Sync 30\n259:0 Total 30\nTotal 30\n";
        let operations = "259:0 Read 1\n259:0 Write 2\nTotal 3\n";
        assert_eq!(v1_io(bytes, operations), [expected]);
        assert_eq!(v1_io("Total 0\n", ""), []);
    }

    #[test]
    fn pressure_is_parsed_and_incomplete_lines_are_ignored() {
        let text = "some avg10=1.50 avg60=0.25 avg300=0.00 total=1234\nfull avg10=0.50 avg60=0.00 avg300=0.00 total=99\n";
        let pressure = parse_pressure(text).unwrap();
        assert_eq!(pressure.some, Stall { averages: [1.5, 0.25, 0.0], total_us: 1234 });
        assert_eq!(pressure.full.total_us, 99);
        assert_eq!(parse_pressure("some avg10=1.50 avg60=0.25 total=1\n"), None);
        assert_eq!(parse_pressure(text.lines().next().unwrap()).unwrap().full, Stall::default());
    }
}
