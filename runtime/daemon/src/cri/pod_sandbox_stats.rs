//! PodSandboxStats, ListPodSandboxStats and its stream (CRI 2.23). Lists contain READY sandboxes; the values
//! are those of the cgroup that the kubelet created for the pod.

use std::rc::Rc;

use coracle_base::error::{Error, Kind};
use coracle_engine::{Container, Pod};
use smol::stream::Stream;

use super::container_stats::{cpu, io, item as container_item, memory, number};
use super::{filter, pod_config};
use crate::daemon::Daemon;
use crate::rpc::v1;
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
    let containers = daemon.stats.containers();
    Ok(v1::PodSandboxStatsResponse { stats: Some(item(&daemon.stats, &pod, &containers)) })
}

pub(crate) async fn list_pod_sandbox_stats(
    daemon: Rc<Daemon>,
    request: v1::ListPodSandboxStatsRequest,
) -> Result<v1::ListPodSandboxStatsResponse, Error> {
    Ok(v1::ListPodSandboxStatsResponse { stats: matching(&daemon, request.filter) })
}

pub(crate) async fn stream_pod_sandbox_stats(
    daemon: Rc<Daemon>,
    request: v1::StreamPodSandboxStatsRequest,
) -> Result<impl Stream<Item = Result<v1::StreamPodSandboxStatsResponse, Error>>, Error> {
    let items = matching(&daemon, request.filter);
    let message = |pod_sandbox_stats| v1::StreamPodSandboxStatsResponse { pod_sandbox_stats };
    Ok(super::chunks(items, message))
}

fn matching(daemon: &Daemon, wanted: Option<v1::PodSandboxStatsFilter>) -> Vec<v1::PodSandboxStats> {
    let wanted = wanted.unwrap_or_default();
    let containers = daemon.stats.containers();
    let pods = daemon.pods.pods();
    let matching = pods.iter().filter(|pod| {
        let record = pod.record();
        record.state.is_ready()
            && filter::matches_id(&pod.id, &wanted.id)
            && filter::matches_labels(&record.spec.labels, &wanted.label_selector)
    });
    matching.map(|pod| item(&daemon.stats, pod, &containers)).collect()
}

fn item(stats: &Stats, pod: &Pod, containers: &[Rc<Container>]) -> v1::PodSandboxStats {
    let record = pod.record();
    let reading = stats.pod(pod);
    let own = containers.iter().filter(|container| container.pod.id == pod.id);
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
            containers: own.filter_map(|container| container_item(stats, container)).collect(),
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
