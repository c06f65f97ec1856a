//! The table of all metrics: name, help and source. Values that this kernel does not provide are zero, as in
//! cAdvisor, because dashboards require the names.

use coracle_sandbox::cgroup::{DeviceIo, Hugepages, MemoryUsage, Pressure};

use super::Facts;
use crate::rpc::v1::MetricType::{self, Counter, Gauge};
use crate::stats::Interface;

/// Values of a metric, each with the values of its further labels.
pub(super) struct Of(pub(super) Vec<(Vec<String>, u64)>);

/// A metric of a container.
pub(super) struct Metric {
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    pub(super) kind: MetricType,
    pub(super) labels: &'static [&'static str],
    pub(super) value: fn(&Facts) -> Of,
}

/// A metric of a pod's network interface.
pub(super) struct PodMetric {
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    pub(super) labels: &'static [&'static str],
    pub(super) value: fn(&Interface) -> u64,
}

const fn metric(
    name: &'static str,
    help: &'static str,
    kind: MetricType,
    labels: &'static [&'static str],
    value: fn(&Facts) -> Of,
) -> Metric {
    Metric { name, help, kind, labels, value }
}

const fn of_pod(name: &'static str, help: &'static str, value: fn(&Interface) -> u64) -> PodMetric {
    PodMetric { name, help, labels: &["interface"], value }
}

/// One value without further labels.
fn one(value: u64) -> Of {
    Of(vec![(Vec::new(), value)])
}

/// One value with one further label.
fn with(label: &str, value: u64) -> Of {
    Of(vec![(vec![label.to_owned()], value)])
}

/// One value, 0 if the kernel does not provide it.
fn maybe(value: Option<u64>) -> Of {
    one(value.unwrap_or(0))
}

/// Converts microseconds to seconds.
fn seconds(us: Option<u64>) -> Of {
    one(us.unwrap_or(0) / 1_000_000)
}

fn memory(facts: &Facts, value: fn(&MemoryUsage) -> u64) -> Of {
    maybe(facts.reading.usage.memory.as_ref().map(value))
}

/// One value for each size of huge pages.
fn hugepages(facts: &Facts, value: fn(&Hugepages) -> u64) -> Of {
    Of(facts.detail.hugepages.iter().map(|pages| (vec![pages.page_size.clone()], value(pages))).collect())
}

/// A limit as a metric's value: 0 means no limit.
fn limit(value: i64) -> Of {
    maybe(u64::try_from(value).ok())
}

fn by_device(facts: &Facts, value: fn(&DeviceIo) -> u64) -> Of {
    Of(facts.detail.io.iter().map(|io| (vec![io.device.clone()], value(io))).collect())
}

/// Stall time in seconds; no value if the kernel does not provide it.
fn waited(facts: &Facts, resource: usize, value: fn(&Pressure) -> u64) -> Of {
    Of(facts.reading.pressure[resource].iter().map(|one| (Vec::new(), value(one) / 1_000_000)).collect())
}

fn some(pressure: &Pressure) -> u64 {
    pressure.some.total_us
}

fn full(pressure: &Pressure) -> u64 {
    pressure.full.total_us
}

/// Bytes read and written, for each device.
fn blkio(facts: &Facts) -> Of {
    let of_device = |io: &DeviceIo| {
        let (major, minor) = io.device.split_once(':').unwrap_or_default();
        let labels =
            |operation: &str| [io.device.as_str(), major, minor, operation].map(str::to_owned).into();
        [(labels("Read"), io.bytes.0), (labels("Write"), io.bytes.1)]
    };
    Of(facts.detail.io.iter().flat_map(of_device).collect())
}

fn faults(facts: &Facts) -> Of {
    let (all, major) = facts.detail.faults.unwrap_or_default();
    let labels = |kind: &str| [kind, "hierarchy"].map(str::to_owned).into();
    Of(vec![(labels("pgfault"), all), (labels("pgmajfault"), major)])
}

/// The metrics of containers.
pub(super) static CONTAINER: [Metric; 48] = [
    metric(
        "container_blkio_device_usage_total",
        "Bytes read from and written to block devices",
        Counter,
        &["device", "major", "minor", "operation"],
        blkio,
    ),
    metric(
        "container_cpu_cfs_periods_total",
        "Periods of the CPU quota that have passed",
        Counter,
        &[],
        |facts| maybe(facts.detail.periods),
    ),
    metric(
        "container_cpu_cfs_throttled_periods_total",
        "Periods of the CPU quota in which it was held back",
        Counter,
        &[],
        |facts| maybe(facts.detail.throttled_periods),
    ),
    metric(
        "container_cpu_cfs_throttled_seconds_total",
        "Time for which it was held back",
        Counter,
        &[],
        |facts| seconds(facts.detail.throttled_us),
    ),
    metric("container_cpu_system_seconds_total", "CPU time in the kernel", Counter, &[], |facts| {
        seconds(facts.detail.system_us)
    }),
    metric("container_cpu_usage_seconds_total", "CPU time", Counter, &["cpu"], |facts| {
        with("total", facts.reading.usage.cpu_ns.unwrap_or(0) / 1_000_000_000)
    }),
    metric("container_cpu_user_seconds_total", "CPU time in user mode", Counter, &[], |facts| {
        seconds(facts.detail.user_us)
    }),
    metric("container_file_descriptors", "Open files of its processes", Gauge, &[], |facts| {
        one(facts.open.0)
    }),
    metric(
        "container_fs_inodes_free",
        "Inodes that are free on the file system of its writable layer",
        Gauge,
        &["device"],
        |facts| with(&facts.disk.device, facts.disk.inodes_free),
    ),
    metric(
        "container_fs_inodes_total",
        "Inodes of the file system of its writable layer",
        Gauge,
        &["device"],
        |facts| with(&facts.disk.device, facts.disk.inodes),
    ),
    metric(
        "container_fs_limit_bytes",
        "Size of the file system of its writable layer",
        Gauge,
        &["device"],
        |facts| with(&facts.disk.device, facts.disk.bytes),
    ),
    metric("container_fs_reads_bytes_total", "Bytes read", Counter, &["device"], |facts| {
        by_device(facts, |io| io.bytes.0)
    }),
    metric("container_fs_reads_total", "Reads", Counter, &["device"], |facts| {
        by_device(facts, |io| io.operations.0)
    }),
    metric("container_fs_usage_bytes", "Bytes of its writable layer", Gauge, &["device"], |facts| {
        with(&facts.disk.device, facts.layer.0)
    }),
    metric("container_fs_writes_bytes_total", "Bytes written", Counter, &["device"], |facts| {
        by_device(facts, |io| io.bytes.1)
    }),
    metric("container_fs_writes_total", "Writes", Counter, &["device"], |facts| {
        by_device(facts, |io| io.operations.1)
    }),
    metric("container_hugetlb_max_usage_bytes", "Most huge pages ever used", Gauge, &["pagesize"], |facts| {
        hugepages(facts, |pages| pages.peak_bytes)
    }),
    metric("container_hugetlb_usage_bytes", "Huge pages in use", Gauge, &["pagesize"], |facts| {
        hugepages(facts, |pages| pages.bytes)
    }),
    metric("container_last_seen", "When it was looked at last", Gauge, &[], |facts| one(facts.now_s)),
    metric("container_memory_cache", "Bytes of page cache", Gauge, &[], |facts| {
        maybe(facts.detail.cache_bytes)
    }),
    metric("container_memory_failcnt", "How often the memory limit was met", Counter, &[], |facts| {
        maybe(facts.detail.failures)
    }),
    metric("container_memory_failures_total", "Page faults", Counter, &["failure_type", "scope"], faults),
    metric("container_memory_kernel_usage", "Bytes of the kernel's own memory", Gauge, &[], |facts| {
        maybe(facts.detail.kernel_bytes)
    }),
    metric("container_memory_mapped_file", "Bytes of mapped files", Gauge, &[], |facts| {
        maybe(facts.detail.mapped_bytes)
    }),
    metric("container_memory_max_usage_bytes", "Most memory ever used", Gauge, &[], |facts| {
        maybe(facts.detail.peak_bytes)
    }),
    metric("container_memory_rss", "Bytes of anonymous memory", Gauge, &[], |facts| {
        memory(facts, |memory| memory.rss_bytes)
    }),
    metric("container_memory_swap", "Bytes of swap", Gauge, &[], |facts| {
        maybe(facts.reading.usage.swap.map(|swap| swap.usage_bytes))
    }),
    metric("container_memory_usage_bytes", "Bytes of memory, caches included", Gauge, &[], |facts| {
        memory(facts, |memory| memory.usage_bytes)
    }),
    metric(
        "container_memory_working_set_bytes",
        "Bytes of memory that cannot be given back at once",
        Gauge,
        &[],
        |facts| memory(facts, |memory| memory.working_set_bytes),
    ),
    metric("container_oom_events_total", "How often the OOM killer struck", Counter, &[], |facts| {
        maybe(facts.detail.oom_kills)
    }),
    metric(
        "container_pressure_cpu_stalled_seconds_total",
        "Time in which all waited for the CPU",
        Counter,
        &[],
        |facts| waited(facts, 0, full),
    ),
    metric(
        "container_pressure_cpu_waiting_seconds_total",
        "Time in which some waited for the CPU",
        Counter,
        &[],
        |facts| waited(facts, 0, some),
    ),
    metric(
        "container_pressure_io_stalled_seconds_total",
        "Time in which all waited for I/O",
        Counter,
        &[],
        |facts| waited(facts, 2, full),
    ),
    metric(
        "container_pressure_io_waiting_seconds_total",
        "Time in which some waited for I/O",
        Counter,
        &[],
        |facts| waited(facts, 2, some),
    ),
    metric(
        "container_pressure_memory_stalled_seconds_total",
        "Time in which all waited for memory",
        Counter,
        &[],
        |facts| waited(facts, 1, full),
    ),
    metric(
        "container_pressure_memory_waiting_seconds_total",
        "Time in which some waited for memory",
        Counter,
        &[],
        |facts| waited(facts, 1, some),
    ),
    metric("container_processes", "Its processes", Gauge, &[], |facts| {
        one(facts.detail.processes.len() as u64)
    }),
    metric("container_sockets", "Open sockets of its processes", Gauge, &[], |facts| one(facts.open.1)),
    metric("container_spec_cpu_period", "Period of the CPU quota, microseconds", Gauge, &[], |facts| {
        limit(facts.limits.resources.cpu_period_us)
    }),
    metric("container_spec_cpu_quota", "CPU quota, microseconds a period; 0: none", Gauge, &[], |facts| {
        limit(facts.limits.resources.cpu_quota_us)
    }),
    metric("container_spec_cpu_shares", "CPU shares", Gauge, &[], |facts| {
        limit(facts.limits.resources.cpu_shares)
    }),
    metric("container_spec_memory_limit_bytes", "Memory limit; 0: none", Gauge, &[], |facts| {
        limit(facts.limits.resources.memory_limit_bytes)
    }),
    metric(
        "container_spec_memory_reservation_limit_bytes",
        "Memory that is reclaimed last",
        Gauge,
        &[],
        |facts| limit(facts.limits.memory_reservation_bytes.unwrap_or(0)),
    ),
    metric(
        "container_spec_memory_swap_limit_bytes",
        "Limit of memory and swap together; 0: none",
        Gauge,
        &[],
        |facts| limit(facts.limits.resources.memory_and_swap_limit_bytes()),
    ),
    metric("container_start_time_seconds", "When it was started", Gauge, &[], |facts| one(facts.started_s)),
    metric("container_threads", "Its threads", Gauge, &[], |facts| maybe(facts.reading.usage.tasks)),
    metric("container_ulimits_soft", "Soft limit of its main process", Gauge, &["ulimit"], |facts| {
        with("max_open_files", facts.open_files_max)
    }),
    metric("container_threads_max", "Most threads it may have; 0: any number", Gauge, &[], |facts| {
        maybe(facts.detail.tasks_max)
    }),
];

/// The metrics of pods.
pub(super) static POD: [PodMetric; 8] = [
    of_pod("container_network_receive_bytes_total", "Bytes received", |interface| interface.received_bytes),
    of_pod("container_network_receive_errors_total", "Errors while receiving", |interface| {
        interface.received_errors
    }),
    of_pod(
        "container_network_receive_packets_dropped_total",
        "Packets dropped while receiving",
        |interface| interface.received_dropped,
    ),
    of_pod("container_network_receive_packets_total", "Packets received", |interface| {
        interface.received_packets
    }),
    of_pod("container_network_transmit_bytes_total", "Bytes sent", |interface| interface.sent_bytes),
    of_pod("container_network_transmit_errors_total", "Errors while sending", |interface| {
        interface.sent_errors
    }),
    of_pod(
        "container_network_transmit_packets_dropped_total",
        "Packets dropped while sending",
        |interface| interface.sent_dropped,
    ),
    of_pod("container_network_transmit_packets_total", "Packets sent", |interface| interface.sent_packets),
];
