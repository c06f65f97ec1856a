//! PodSandboxStats, ListPodSandboxStats and its stream (CRI 2.23). Lists contain READY sandboxes; the values
//! are those of the cgroup that the kubelet created for the pod.

use std::rc::Rc;

use coracle_base::error::{Error, Kind};
use coracle_base::reactor::Slice;
use coracle_engine::Pod;
use smol::stream::Stream;
use tonic::Response;

use super::container_stats::{cpu, io, item as container_item, memory, number};
use super::{filter, pod_config};
use crate::daemon::Daemon;
use crate::rpc::{Items, v1};
use crate::stats::{Interface, Stats};

/// Name of the pod's CNI interface (CNI_IFNAME, equal in all runtimes).
const DEFAULT_INTERFACE: &str = "eth0";

pub(crate) async fn pod_sandbox_stats(
    daemon: Rc<Daemon>,
    request: v1::PodSandboxStatsRequest,
) -> Result<v1::PodSandboxStatsResponse, Error> {
    let pod = daemon.pods.pod(&request.pod_sandbox_id)?;
    if !pod.record().state.is_ready() {
        let text = format!("pod sandbox {:.13} is {}", pod.id, pod.record().state.name());
        return Err(Error::new(Kind::FailedPrecondition, text));
    }
    daemon.stats.containers(); // their layers are wanted soon
    Ok(v1::PodSandboxStatsResponse { stats: Some(item(&daemon.stats, &pod)) })
}

pub(crate) async fn list_pod_sandbox_stats(
    daemon: Rc<Daemon>,
    request: v1::ListPodSandboxStatsRequest,
) -> Result<Response<v1::ListPodSandboxStatsResponse>, Error> {
    let mut items = Items::new();
    each(&daemon, request.filter, |item| items.push(&item)).await;
    items.respond()
}

pub(crate) async fn stream_pod_sandbox_stats(
    daemon: Rc<Daemon>,
    request: v1::StreamPodSandboxStatsRequest,
) -> Result<impl Stream<Item = Result<v1::StreamPodSandboxStatsResponse, Error>>, Error> {
    let mut items = Vec::new();
    each(&daemon, request.filter, |item| items.push(item)).await;
    let message = |pod_sandbox_stats| v1::StreamPodSandboxStatsResponse { pod_sandbox_stats };
    Ok(super::chunks(items, message))
}

/// Calls `add` for each pod that matches; others use the thread in between.
async fn each(
    daemon: &Daemon,
    wanted: Option<v1::PodSandboxStatsFilter>,
    mut add: impl FnMut(v1::PodSandboxStats),
) {
    let wanted = wanted.unwrap_or_default();
    daemon.stats.containers(); // their layers are wanted soon
    let mut slice = Slice::new();
    for pod in daemon.pods.pods_by_id(&wanted.id) {
        let is_wanted = {
            let record = pod.record();
            record.state.is_ready() && filter::matches_labels(&record.spec.labels, &wanted.label_selector)
        };
        if is_wanted {
            add(item(&daemon.stats, &pod));
        }
        slice.share().await;
    }
}

fn item(stats: &Stats, pod: &Pod) -> v1::PodSandboxStats {
    let record = pod.record();
    let reading = stats.pod(pod);
    let own = stats.containers_of(pod);
    let at_ns = reading.as_ref().map_or(1, |reading| reading.at_ns);
    v1::PodSandboxStats {
        attributes: Some(v1::PodSandboxAttributes {
            id: pod.id.to_string(),
            metadata: Some(pod_config::metadata(&record.spec.name)),
            labels: pod_config::map(&record.spec.labels),
            annotations: pod_config::map(&record.spec.annotations),
        }),
        linux: Some(v1::LinuxPodSandboxStats {
            cpu: reading.as_ref().and_then(cpu),
            memory: reading.as_ref().and_then(memory),
            network: stats.interfaces(pod).map(|interfaces| network(at_ns, interfaces)),
            process: reading
                .as_ref()
                .and_then(|reading| reading.usage.tasks)
                .map(|tasks| v1::ProcessUsage { timestamp: at_ns, process_count: number(tasks) }),
            containers: own.iter().filter_map(|container| container_item(stats, container)).collect(),
            io: reading.as_ref().and_then(io),
        }),
    }
}

fn network(timestamp: i64, interfaces: Vec<Interface>) -> v1::NetworkUsage {
    let (default, others): (Vec<_>, Vec<_>) =
        interfaces.into_iter().map(interface).partition(|interface| interface.name == DEFAULT_INTERFACE);
    v1::NetworkUsage { timestamp, default_interface: default.into_iter().next(), interfaces: others }
}

fn interface(interface: Interface) -> v1::NetworkInterfaceUsage {
    v1::NetworkInterfaceUsage {
        name: interface.name,
        rx_bytes: number(interface.received_bytes),
        rx_errors: number(interface.received_errors),
        tx_bytes: number(interface.sent_bytes),
        tx_errors: number(interface.sent_errors),
    }
}
