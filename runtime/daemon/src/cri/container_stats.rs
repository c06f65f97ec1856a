//! ContainerStats, ListContainerStats and its stream (CRI 2.22). Lists contain running containers; a container that exits
//! during the call is omitted.

use std::rc::Rc;

use coracle_base::error::{Error, Kind};
use coracle_base::reactor::Slice;
use coracle_engine::Container;
use coracle_sandbox::cgroup::{Pressure, Stall};
use smol::stream::Stream;
use tonic::Response;

use super::{container_config, filter, pod_config};
use crate::daemon::Daemon;
use crate::rpc::{Items, v1};
use crate::stats::{Reading, Stats};

pub(crate) async fn container_stats(
    daemon: Rc<Daemon>,
    request: v1::ContainerStatsRequest,
) -> Result<v1::ContainerStatsResponse, Error> {
    let container = daemon.pods.container(&request.container_id)?;
    daemon.stats.containers(); // its layer is wanted soon
    let stats = item(&daemon.stats, &container).ok_or_else(|| {
        let text = format!("container {:.13}: it is not running, so there is nothing to read", container.id);
        Error::new(Kind::FailedPrecondition, text)
    })?;
    Ok(v1::ContainerStatsResponse { stats: Some(stats) })
}

pub(crate) async fn list_container_stats(
    daemon: Rc<Daemon>,
    request: v1::ListContainerStatsRequest,
) -> Result<Response<v1::ListContainerStatsResponse>, Error> {
    let mut items = Items::new();
    each(&daemon, request.filter, |item| items.push(&item)).await;
    items.respond()
}

pub(crate) async fn stream_container_stats(
    daemon: Rc<Daemon>,
    request: v1::StreamContainerStatsRequest,
) -> Result<impl Stream<Item = Result<v1::StreamContainerStatsResponse, Error>>, Error> {
    let mut items = Vec::new();
    each(&daemon, request.filter, |item| items.push(item)).await;
    Ok(super::chunks(items, |container_stats| v1::StreamContainerStatsResponse { container_stats }))
}

/// Calls `add` for each container that matches; others use the thread in between.
async fn each(
    daemon: &Daemon,
    wanted: Option<v1::ContainerStatsFilter>,
    mut add: impl FnMut(v1::ContainerStats),
) {
    let wanted = wanted.unwrap_or_default();
    daemon.stats.containers(); // their layers are wanted soon
    let mut slice = Slice::new();
    for container in daemon.pods.containers_by_id(&wanted.id, &wanted.pod_sandbox_id) {
        let is_wanted = {
            let record = container.record();
            record.state.is_running() && filter::matches_labels(&record.spec.labels, &wanted.label_selector)
        };
        if is_wanted && let Some(item) = item(&daemon.stats, &container) {
            add(item);
        }
        slice.share().await;
    }
}

/// Statistics of one container, also used in those of its pod; `None` if its cgroup does not exist.
pub(super) fn item(stats: &Stats, container: &Container) -> Option<v1::ContainerStats> {
    let reading = stats.container(container)?;
    let record = container.record();
    Some(v1::ContainerStats {
        attributes: Some(v1::ContainerAttributes {
            id: container.id.to_string(),
            metadata: Some(container_config::metadata(&record.spec.name)),
            labels: pod_config::map(&record.spec.labels),
            annotations: pod_config::map(&record.spec.annotations),
        }),
        cpu: cpu(&reading),
        memory: memory(&reading),
        writable_layer: stats.layer(container).map(|layer| v1::FilesystemUsage {
            timestamp: layer.at_ns,
            fs_id: Some(v1::FilesystemIdentifier {
                mountpoint: layer.directory.to_string_lossy().into_owned(),
            }),
            used_bytes: number(layer.usage.bytes),
            inodes_used: number(layer.usage.inodes),
        }),
        swap: swap(&reading),
        io: io(&reading),
    })
}

/// CPU usage of a container or a pod.
pub(super) fn cpu(reading: &Reading) -> Option<v1::CpuUsage> {
    reading.usage.cpu_ns.map(|cpu_ns| v1::CpuUsage {
        timestamp: reading.at_ns,
        usage_core_nano_seconds: number(cpu_ns),
        usage_nano_cores: reading.nanocores.and_then(number),
        psi: reading.pressure[0].map(psi),
    })
}

/// Memory usage of a container or a pod.
pub(super) fn memory(reading: &Reading) -> Option<v1::MemoryUsage> {
    reading.usage.memory.map(|memory| v1::MemoryUsage {
        timestamp: reading.at_ns,
        working_set_bytes: number(memory.working_set_bytes),
        available_bytes: memory
            .limit_bytes
            .and_then(|limit| number(limit.saturating_sub(memory.working_set_bytes))),
        usage_bytes: number(memory.usage_bytes),
        rss_bytes: number(memory.rss_bytes),
        page_faults: number(memory.page_faults),
        major_page_faults: number(memory.major_page_faults),
        psi: reading.pressure[1].map(psi),
    })
}

/// Pressure stall information about I/O of a container or a pod.
pub(super) fn io(reading: &Reading) -> Option<v1::IoUsage> {
    reading.pressure[2].map(|pressure| v1::IoUsage { timestamp: reading.at_ns, psi: Some(psi(pressure)) })
}

fn psi(pressure: Pressure) -> v1::PsiStats {
    let data = |stall: Stall| v1::PsiData {
        total: stall.total_us.saturating_mul(1000),
        avg10: stall.averages[0],
        avg60: stall.averages[1],
        avg300: stall.averages[2],
    };
    v1::PsiStats { full: Some(data(pressure.full)), some: Some(data(pressure.some)) }
}

fn swap(reading: &Reading) -> Option<v1::SwapUsage> {
    reading.usage.swap.map(|swap| v1::SwapUsage {
        timestamp: reading.at_ns,
        swap_available_bytes: swap
            .limit_bytes
            .and_then(|limit| number(limit.saturating_sub(swap.usage_bytes))),
        swap_usage_bytes: number(swap.usage_bytes),
    })
}

/// Wraps a number into the CRI's optional type.
pub(super) fn number(value: u64) -> Option<v1::UInt64Value> {
    Some(v1::UInt64Value { value })
}
