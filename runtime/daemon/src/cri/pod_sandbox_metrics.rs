//! ListMetricDescriptors, ListPodSandboxMetrics and its stream (CRI 2.24): the metrics that the kubelet
//! serves as /metrics/cadvisor if it does not collect them itself. Names, labels and units are those of
//! cAdvisor; a value is an integer in the unit of its name. One table defines name, help, type, further
//! labels and source.

mod table;

use std::rc::Rc;

use coracle_base::error::Error;
use coracle_base::reactor::Slice;
use coracle_engine::{Container, Pod};
use coracle_sandbox::cgroup::Detail;
use coracle_sandbox::cgroup::Limits;
use smol::stream::Stream;
use tonic::Response;

use crate::daemon::Daemon;
use crate::rpc::{Items, v1};
use crate::stats::{Interface, Reading};
use table::{CONTAINER, Of, POD};

/// Names of the labels with which all metrics begin.
const LABELS: [&str; 5] = ["id", "name", "image", "container", "pod"];
/// Name of the label that follows [`LABELS`], in cAdvisor's order.
const NAMESPACE: &str = "namespace";

/// The data from which the metrics of a container are computed.
struct Facts {
    now_s: u64,
    started_s: u64,
    reading: Reading,
    detail: Detail,
    limits: Limits,
    /// Bytes and number of inodes of the writable layer.
    layer: (u64, u64),
    /// File system of the writable layer.
    disk: Disk,
    /// Number of open files, and of sockets among them, of all processes.
    open: (u64, u64),
    /// Limit of open files of the main process; 0: unknown, or no limit.
    open_files_max: u64,
}

/// Size and free space of a file system.
#[derive(Default)]
struct Disk {
    device: String,
    bytes: u64,
    inodes: u64,
    inodes_free: u64,
}

pub(crate) async fn list_metric_descriptors(
    _: Rc<Daemon>,
    _: v1::ListMetricDescriptorsRequest,
) -> Result<v1::ListMetricDescriptorsResponse, Error> {
    let keys = |more: &[&str]| {
        let all = LABELS.iter().chain([&NAMESPACE]).chain(more);
        all.map(|key| (*key).to_owned()).collect()
    };
    let of_containers = CONTAINER.iter().map(|metric| (metric.name, metric.help, metric.labels));
    let of_pods = POD.iter().map(|metric| (metric.name, metric.help, metric.labels));
    let descriptor = |(name, help, labels): (&str, &str, &[&str])| v1::MetricDescriptor {
        name: name.to_owned(),
        help: help.to_owned(),
        label_keys: keys(labels),
    };
    Ok(v1::ListMetricDescriptorsResponse {
        descriptors: of_containers.chain(of_pods).map(descriptor).collect(),
    })
}

pub(crate) async fn list_pod_sandbox_metrics(
    daemon: Rc<Daemon>,
    _: v1::ListPodSandboxMetricsRequest,
) -> Result<Response<v1::ListPodSandboxMetricsResponse>, Error> {
    let mut items = Items::new();
    each(&daemon, |item| items.push(&item)).await;
    items.respond()
}

pub(crate) async fn stream_pod_sandbox_metrics(
    daemon: Rc<Daemon>,
    _: v1::StreamPodSandboxMetricsRequest,
) -> Result<impl Stream<Item = Result<v1::StreamPodSandboxMetricsResponse, Error>>, Error> {
    let mut items = Vec::new();
    each(&daemon, |item| items.push(item)).await;
    let message = |pod_sandbox_metrics| v1::StreamPodSandboxMetricsResponse { pod_sandbox_metrics };
    Ok(super::chunks(items, message))
}

/// Calls `add` for each pod; others use the thread in between.
async fn each(daemon: &Daemon, mut add: impl FnMut(v1::PodSandboxMetrics)) {
    daemon.stats.containers(); // their layers are wanted soon
    let mut slice = Slice::new();
    for pod in daemon.pods.pods() {
        if pod.record().state.is_ready() {
            add(of_pod(daemon, &pod));
        }
        slice.share().await;
    }
}

fn of_pod(daemon: &Daemon, pod: &Pod) -> v1::PodSandboxMetrics {
    let own = daemon.stats.containers_of(pod);
    let labels = labels(pod, &pod.id, "", "", "");
    let interfaces = daemon.stats.interfaces(pod).unwrap_or_default();
    v1::PodSandboxMetrics {
        pod_sandbox_id: pod.id.to_string(),
        metrics: interfaces.iter().flat_map(|interface| of_interface(interface, &labels)).collect(),
        container_metrics: own.iter().filter_map(|container| of_container(daemon, container)).collect(),
    }
}

fn of_interface(interface: &Interface, labels: &[String]) -> Vec<v1::Metric> {
    let metric = |metric: &table::PodMetric| {
        let values = labels.iter().cloned().chain([interface.name.clone()]).collect();
        message(metric.name, v1::MetricType::Counter, values, (metric.value)(interface))
    };
    POD.iter().map(metric).collect()
}

/// The metrics of a container; `None` if it has exited since it was listed.
fn of_container(daemon: &Daemon, container: &Container) -> Option<v1::ContainerMetrics> {
    let facts = facts(daemon, container)?;
    let labels = {
        let record = container.record();
        labels(
            &container.pod,
            &container.id,
            &container.id.to_string(),
            &record.image.name,
            &record.spec.name.name,
        )
    };
    let metrics = CONTAINER.iter().flat_map(|metric| {
        let Of(values) = (metric.value)(&facts);
        let told = |(more, value): (Vec<String>, u64)| {
            let values = labels.iter().cloned().chain(more).collect();
            message(metric.name, metric.kind, values, value)
        };
        values.into_iter().map(told).collect::<Vec<_>>()
    });
    Some(v1::ContainerMetrics { container_id: container.id.to_string(), metrics: metrics.collect() })
}

fn labels(pod: &Pod, id: &impl std::fmt::Display, name: &str, image: &str, container: &str) -> Vec<String> {
    let record = pod.record();
    let path = record.cgroup(id).map(|path| path.to_string()).unwrap_or_default();
    let of_pod = &record.spec.name;
    [path.as_str(), name, image, container, &of_pod.name, &of_pod.namespace].map(str::to_owned).into()
}

fn message(name: &str, kind: v1::MetricType, label_values: Vec<String>, value: u64) -> v1::Metric {
    v1::Metric {
        name: name.to_owned(),
        timestamp: 0, // as of now
        metric_type: kind.into(),
        label_values,
        value: Some(v1::UInt64Value { value }),
    }
}

fn facts(daemon: &Daemon, container: &Container) -> Option<Facts> {
    let reading = daemon.stats.container(container)?;
    let detail = container.detail().ok()??;
    let directory = container.writable_layer();
    let layer = daemon.stats.layer(container).map(|layer| layer.usage).unwrap_or_default();
    let seconds = |ns: i64| u64::try_from(ns / 1_000_000_000).unwrap_or(0);
    let record = container.record();
    let started_ns = if record.state.is_running() { record.state.started_at_ns() } else { 0 };
    Some(Facts {
        now_s: seconds(reading.at_ns),
        started_s: seconds(started_ns),
        open: open_files(&detail.processes),
        open_files_max: open_files_max(container.pid()),
        disk: disk(&directory),
        layer: (layer.bytes, layer.inodes),
        limits: record.limits(),
        reading,
        detail,
    })
}

/// Maximum number of processes of one container that are examined, to limit the time; with more processes the numbers are too
/// low.
const PROCESSES_MAX: usize = 256;

/// The soft limit of open files of a process; 0 if the process has ended or has no limit.
fn open_files_max(pid: i32) -> u64 {
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap_or_default();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// Number of open files, and of sockets among them.
fn open_files(processes: &[i32]) -> (u64, u64) {
    let (mut files, mut sockets) = (0, 0);
    for pid in processes.iter().take(PROCESSES_MAX) {
        // Fails if the process has ended.
        for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            files += 1;
            let is_socket = std::fs::read_link(entry.path())
                .is_ok_and(|target| target.to_string_lossy().starts_with("socket:"));
            sockets += u64::from(is_socket);
        }
    }
    (files, sockets)
}

fn disk(path: &std::path::Path) -> Disk {
    use std::os::unix::fs::MetadataExt;
    let Ok(about) = nix::sys::statfs::statfs(path) else { return Disk::default() };
    let device = std::fs::metadata(path).map_or(0, |found| found.dev());
    let block = u64::try_from(about.block_size()).unwrap_or(0);
    Disk {
        device: format!("{}:{}", nix::sys::stat::major(device), nix::sys::stat::minor(device)),
        bytes: about.blocks().saturating_mul(block),
        inodes: about.files(),
        inodes_free: about.files_free(),
    }
}
