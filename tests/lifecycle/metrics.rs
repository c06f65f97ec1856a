//! Metrics with cAdvisor's names, for workloads of known size, and pressure stall information if the kernel
//! provides it.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use coracle_tests::cri::proto::{
    ContainerStatsRequest, LinuxContainerResources, ListMetricDescriptorsRequest,
    ListPodSandboxMetricsRequest, Metric, StatusRequest, StreamPodSandboxMetricsRequest,
};
use coracle_tests::host::{self, wait_until};
use coracle_tests::node::{Node, Options};
use coracle_tests::pod_fixture::PodFixture;

/// The metrics for which critest requires values, except those of a pod's network.
const NAMES: &str = "cpu_cfs_periods_total cpu_cfs_throttled_periods_total cpu_cfs_throttled_seconds_total \
    cpu_system_seconds_total cpu_usage_seconds_total cpu_user_seconds_total file_descriptors fs_inodes_free \
    fs_inodes_total fs_limit_bytes fs_usage_bytes last_seen memory_cache memory_failcnt memory_failures_total \
    memory_kernel_usage memory_mapped_file memory_max_usage_bytes memory_rss memory_swap memory_usage_bytes \
    memory_working_set_bytes oom_events_total processes sockets spec_cpu_period spec_cpu_shares \
    spec_memory_limit_bytes spec_memory_swap_limit_bytes start_time_seconds threads threads_max";

/// The values of one container by metric and by the labels after the first six.
fn metrics(fixture: &PodFixture, container: &str) -> BTreeMap<(String, String), u64> {
    let request = ListPodSandboxMetricsRequest {};
    let pods = fixture.node.list_pod_sandbox_metrics(request).expect("metrics").pod_metrics;
    let of_container =
        pods.iter().flat_map(|pod| &pod.container_metrics).find(|one| one.container_id == container);
    let named = |metric: &Metric| {
        let value = metric.value.as_ref().expect("a value").value;
        ((metric.name.trim_start_matches("container_").to_owned(), metric.label_values[6..].join(" ")), value)
    };
    of_container.expect("its metrics").metrics.iter().map(named).collect()
}

#[test]
fn every_metric_is_described_and_has_the_labels_it_says() {
    let fixture = PodFixture::start();
    let id = fixture.run(&fixture.config("c1", &["sleep", "forever"]));
    let descriptors = fixture
        .node
        .list_metric_descriptors(ListMetricDescriptorsRequest {})
        .expect("descriptors")
        .descriptors;
    let keys: BTreeMap<_, _> =
        descriptors.iter().map(|one| (one.name.clone(), one.label_keys.clone())).collect();
    assert_eq!(keys.len(), descriptors.len(), "a name comes twice");
    assert!(descriptors.iter().all(|one| !one.help.is_empty() && !one.label_keys.is_empty()));
    let pods =
        fixture.node.list_pod_sandbox_metrics(ListPodSandboxMetricsRequest {}).expect("metrics").pod_metrics;
    assert_eq!(pods.len(), 1);
    for metric in pods[0].metrics.iter().chain(&pods[0].container_metrics[0].metrics) {
        let keys = keys.get(&metric.name).unwrap_or_else(|| panic!("{} has no descriptor", metric.name));
        assert_eq!(metric.label_values.len(), keys.len(), "{}", metric.name);
        assert_eq!(metric.timestamp, 0);
        let label = |key: &str| {
            metric.label_values[keys.iter().position(|one| one == key).expect("a label")].as_str()
        };
        assert_eq!((label("pod"), label("namespace"), label("container")), ("fixture", "default", "c1"));
        assert!(label("id").ends_with(&id) && label("name") == id && !label("image").is_empty());
    }
    let told = metrics(&fixture, &id);
    for name in NAMES.split_whitespace() {
        assert!(told.keys().any(|(known, _)| known == name), "{name} has no value");
    }
    let streamed =
        fixture.node.stream_pod_sandbox_metrics(StreamPodSandboxMetricsRequest {}).expect("a stream");
    let count: usize = streamed.iter().map(|part| part.pod_sandbox_metrics.len()).sum();
    assert_eq!(count, 1);
    fixture.node.stop();
}

#[test]
fn metrics_match_usage_and_limits() {
    let fixture = PodFixture::start();
    let mut config = fixture.config("spin", &["spin", "2500"]);
    config.linux.as_mut().expect("set").resources = Some(LinuxContainerResources {
        cpu_period: 100_000,
        cpu_quota: 200_000,
        cpu_shares: 512,
        memory_limit_in_bytes: 64 << 20,
        ..Default::default()
    });
    let spins = fixture.run(&config);
    wait_until("the work is done", || fixture.node.output(&spins).contains("spun"));
    let told = metrics(&fixture, &spins);
    let of = |name: &str, labels: &str| told[&(name.to_owned(), labels.to_owned())];
    assert_eq!(of("cpu_usage_seconds_total", "total"), 2);
    assert!((1..=3).contains(&(of("cpu_user_seconds_total", "") + of("cpu_system_seconds_total", ""))));
    assert_eq!(
        (of("spec_cpu_period", ""), of("spec_cpu_quota", ""), of("spec_cpu_shares", "")),
        (100_000, 200_000, 512)
    );
    assert_eq!(of("spec_memory_limit_bytes", ""), 64 << 20);
    assert_eq!(of("spec_memory_swap_limit_bytes", ""), 64 << 20, "a limit of memory alone permits no swap");
    assert_eq!((of("processes", ""), of("threads", "")), (1, 1));
    assert!(of("cpu_cfs_periods_total", "") > 10);
    let age = of("last_seen", "") - of("start_time_seconds", "");
    assert!((2..60).contains(&age), "{age}");
    let filler = fixture.run(&fixture.config("burn", &["burn", "20"]));
    wait_until("memory is filled", || {
        metrics(&fixture, &filler)[&("memory_rss".to_owned(), String::new())] > 20 << 20
    });
    let told = metrics(&fixture, &filler);
    let peak = told[&("memory_max_usage_bytes".to_owned(), String::new())];
    // The kernel provides it on v2 since 5.19.
    assert!(peak == 0 || peak > 20 << 20, "{peak}");
    let listens = fixture.run(&fixture.config("serve", &["serve", "0"]));
    wait_until("it listens", || metrics(&fixture, &listens)[&("sockets".to_owned(), String::new())] == 1);
    fixture.node.stop();
}

#[test]
fn pressure_is_reported_if_the_kernel_provides_it() {
    let fixture = PodFixture::start();
    let id = fixture.run(&fixture.config("c1", &["sleep", "forever"]));
    let request = ContainerStatsRequest { container_id: id.clone() };
    let stats = fixture.node.container_stats(request).expect("stats").stats.expect("stats");
    let file = host::cgroup_file(&format!("{}/{id}", fixture.node.cgroup_parent()), "memory.pressure");
    let is_v2 = host::cgroup_file(&fixture.node.cgroup_parent(), "cgroup.controllers")
        .is_some_and(|file| fs::read_to_string(file).expect("controllers").contains("memory"));
    let told = stats.memory.expect("memory").psi.is_some();
    assert_eq!(told, is_v2 && file.is_some());
    assert_eq!((stats.cpu.expect("CPU").psi.is_some(), stats.io.is_some()), (told, told));
    fixture.node.stop();
}

/// The socket at which a kubelet's cAdvisor looks for containerd is not taken from a process that answers there, and Status
/// says what is missing then. A daemon that stops leaves none behind.
#[test]
fn a_socket_of_another_containerd_is_left_alone_and_status_says_so() {
    let folder = PathBuf::from(format!("/run/coracle-test-taken-{}", std::process::id()));
    let socket = folder.join("containerd.sock");
    fs::create_dir(&folder).expect("a folder");
    let other = UnixListener::bind(&socket).expect("another containerd");
    let config = format!("[metrics]\ncontainerd_socket = \"{}\"\n", socket.display());
    let mut node = Node::with(Options { config, ..Options::default() });
    let condition = |node: &Node| {
        let status = node.status(StatusRequest::default()).expect("status").status.expect("a status");
        status
            .conditions
            .into_iter()
            .find(|condition| condition.r#type == "CadvisorServed")
            .expect("a condition")
    };
    let missing = condition(&node);
    assert!(!missing.status && missing.message.contains(&socket.display().to_string()), "{missing:?}");
    assert!(missing.message.contains("network statistics of pods"), "{missing:?}");
    UnixStream::connect(&socket).expect("it is the other one's");
    other.accept().expect("still");
    drop(other);
    fs::remove_file(&socket).expect("ours");
    node.restart();
    assert!(condition(&node).status);
    UnixStream::connect(&socket).expect("coracle answers");
    node.terminate();
    assert!(!socket.exists(), "a stopped daemon leaves no socket");
    node.launch();
    assert!(condition(&node).status);
    node.stop();
    fs::remove_dir_all(folder).expect("ours");
    // Without the setting the daemon of a test, whose state is elsewhere, does not claim the node's socket.
    let node = Node::start();
    let status = node.status(StatusRequest::default()).expect("status").status.expect("a status");
    assert!(!status.conditions.iter().any(|condition| condition.r#type == "CadvisorServed"));
    node.stop();
}
