//! Statistics of workloads of known size.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use coracle_tests::cri::proto::{
    ContainerStats, ContainerStatsFilter, ContainerStatsRequest, ListContainerStatsRequest,
    ListPodSandboxStatsRequest, PodSandboxStatsFilter, PodSandboxStatsRequest, PodSandboxStatusRequest,
    StopPodSandboxRequest, UInt64Value,
};
use coracle_tests::host::{patience, wait_for, wait_until, wait_within};
use coracle_tests::node::{Node, Options};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request;
use coracle_tests::small_disk::SmallDisk;

const MIB: u64 = 1 << 20;

fn stats(fixture: &PodFixture, container: &str) -> ContainerStats {
    let request = ContainerStatsRequest { container_id: container.into() };
    fixture
        .node
        .container_stats(request)
        .unwrap_or_else(|error| panic!("stats: {error}"))
        .stats
        .expect("stats")
}

#[track_caller]
fn value(value: Option<UInt64Value>) -> u64 {
    value.expect("this kernel counts it").value
}

/// Starts a container with this work and waits until it reports completion.
fn busy(fixture: &PodFixture, words: &[&str], said: &str) -> String {
    let container = fixture.run(&fixture.config(words[0], words));
    wait_until("the work is done", || fixture.node.output(&container).contains(said));
    container
}

#[test]
fn cpu_time_matches_usage_and_a_rate_needs_two_readings() {
    let fixture = PodFixture::start();
    let container = busy(&fixture, &["spin", "1000"], "spun");
    let first = stats(&fixture, &container).cpu.expect("CPU");
    let burnt = value(first.usage_core_nano_seconds);
    assert!((990_000_000..1_300_000_000).contains(&burnt), "{burnt}");
    assert_eq!(first.usage_nano_cores, None);
    assert!(first.timestamp > 1_500_000_000_000_000_000);
    let rate = wait_for("a second reading a second later", || {
        stats(&fixture, &container).cpu.expect("CPU").usage_nano_cores
    });
    assert!(rate.value < 100_000_000, "it sleeps: {rate:?}");
    fixture.node.stop();
}

#[test]
fn memory_and_writable_layer_match_usage() {
    let fixture = PodFixture::start();
    let writer = busy(&fixture, &["fill", "/tmp/file", "5"], "filled");
    let layer = wait_for("the layer is walked", || {
        // None until then: an empty one would be taken for the truth.
        let layer = stats(&fixture, &writer).writable_layer?;
        assert!(value(layer.used_bytes) > 0 && value(layer.inodes_used) > 0, "{layer:?}");
        Some(layer)
    });
    let used = value(layer.used_bytes);
    assert!((5 * MIB..6 * MIB).contains(&used), "{used}");
    let inodes = value(layer.inodes_used);
    assert!((3..50).contains(&inodes), "the file, its directory, and the places of mounts: {inodes}");
    let place = layer.fs_id.expect("a place").mountpoint;
    assert!(std::path::Path::new(&place).is_dir(), "{place}: the kubelet runs statfs on it");

    let burner = busy(&fixture, &["burn", "20"], "burnt 20");
    let memory = stats(&fixture, &burner).memory.expect("memory");
    let rss = value(memory.rss_bytes);
    assert!((20 * MIB..24 * MIB).contains(&rss), "{rss}");
    assert!(value(memory.usage_bytes) >= rss && value(memory.working_set_bytes) >= 20 * MIB);
    assert!(value(memory.page_faults) > 0 && memory.available_bytes.is_none(), "no limit was asked for");
    fixture.node.stop();
}

/// On a file system of its own, where only this node writes. Measurements of a layer that does not change are 9, then 18, then
/// 36 s apart.
#[test]
#[ignore = "a minute of waiting: make test-all PARTS=slow"]
fn layers_are_measured_less_often_until_a_container_writes() {
    let disk = SmallDisk::new(64);
    let options = Options { root: Some(disk.path().join("root")), ..Options::default() };
    let fixture = PodFixture::on(Node::with(options), request::host_pod("quiet"));
    let container = fixture.run(&fixture.config("quiet", &["sleep", "forever"]));
    let layer = || stats(&fixture, &container).writable_layer;
    // The first measurement after the one at `before`, in nanoseconds since 1970.
    let next = |before: i64| {
        let found = wait_within(3 * patience(), || layer().filter(|layer| layer.timestamp > before));
        found.expect("a measurement")
    };
    let first = next(0);
    let second = next(first.timestamp);
    let third = next(second.timestamp);
    let pause = Duration::from_nanos((third.timestamp - second.timestamp).unsigned_abs());
    assert!(pause >= Duration::from_secs(17), "nothing has changed: {pause:?}");
    assert_eq!((&third.used_bytes, &third.inodes_used), (&second.used_bytes, &second.inodes_used));

    let file = format!("/proc/{}/root/tmp/file", fixture.node.container_pid(&container));
    std::fs::write(file, vec![1; 4 * MIB as usize]).expect("a file in the container");
    let fourth = next(third.timestamp);
    let pause = Duration::from_nanos((fourth.timestamp - third.timestamp).unsigned_abs());
    assert!(pause < Duration::from_secs(33), "4 MiB were written: {pause:?}");
    let grown = value(fourth.used_bytes) - value(third.used_bytes);
    assert!((4 * MIB..5 * MIB).contains(&grown), "{grown}");
    fixture.node.stop();
}

#[test]
fn lists_contain_running_containers_that_match_the_filter() {
    let fixture = PodFixture::start();
    let running = fixture.run(&fixture.config("runs", &["sleep", "forever"]));
    let ended = fixture.run(&fixture.config("ended", &["true"]));
    fixture.node.exited(&ended);
    let list = |filter: ContainerStatsFilter| {
        let request = ListContainerStatsRequest { filter: Some(filter) };
        let stats = fixture.node.list_container_stats(request).expect("a list").stats;
        stats.into_iter().map(|stats| stats.attributes.expect("attributes").id).collect::<Vec<_>>()
    };
    assert_eq!(list(ContainerStatsFilter::default()), std::slice::from_ref(&running));
    let by_id = |id: &str| ContainerStatsFilter { id: id.into(), ..Default::default() };
    assert_eq!(list(by_id(&running[..13])), std::slice::from_ref(&running));
    assert!(list(by_id(&ended)).is_empty());
    let label = |value: &str| ContainerStatsFilter {
        label_selector: [("io.kubernetes.container.name".into(), value.into())].into(),
        ..Default::default()
    };
    assert_eq!((list(label("runs")).len(), list(label("other")).len()), (1, 0));
    let ask = |container_id: &str| {
        fixture
            .node
            .container_stats(ContainerStatsRequest { container_id: container_id.into() })
            .unwrap_err()
            .code()
    };
    assert_eq!((ask("feed") as i32, ask(&ended) as i32), (5, 9));
    fixture.node.stop();
}

#[test]
fn a_pod_has_its_cgroup_its_interfaces_and_its_containers() {
    let fixture = PodFixture::on(Node::with_bridge(), request::bridge_pod("stats"));
    let container = fixture.run(&fixture.config("runs", &["sleep", "forever"]));
    let request = PodSandboxStatsRequest { pod_sandbox_id: fixture.pod_id.clone() };
    let stats = fixture.node.pod_sandbox_stats(request).expect("stats").stats.expect("stats");
    let linux = stats.linux.expect("Linux");
    assert_eq!(linux.containers.len(), 1);
    assert_eq!(linux.containers[0].attributes.as_ref().expect("attributes").id, container);
    assert!(value(linux.cpu.expect("CPU").usage_core_nano_seconds) > 0);
    assert!(value(linux.process.expect("processes").process_count) >= 1);
    let network = linux.network.expect("a network of its own");
    assert_eq!(network.default_interface.expect("an interface").name, "eth0");
    let list = |id: &str| {
        let filter = PodSandboxStatsFilter { id: id.into(), ..Default::default() };
        let request = ListPodSandboxStatsRequest { filter: Some(filter) };
        fixture.node.list_pod_sandbox_stats(request).expect("a list").stats.len()
    };
    assert_eq!((list(""), list(&fixture.pod_id), list("feed")), (1, 1, 0));
    fixture
        .node
        .stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: fixture.pod_id.clone() })
        .expect("stopped");
    assert_eq!(list(""), 0, "it is not ready any more");
    fixture.node.stop();
}

#[test]
fn network_traffic_of_a_pod_is_counted() {
    let fixture = PodFixture::on(Node::with_bridge(), request::bridge_pod("sends"));
    fixture.run(&fixture.config("echo", &["echo", "0.0.0.0:7007"]));
    let request = PodSandboxStatusRequest { pod_sandbox_id: fixture.pod_id.clone(), verbose: false };
    let status = fixture.node.pod_sandbox_status(request).expect("status").status.expect("a status");
    let address = format!("{}:7007", status.network.expect("a network").ip);
    let mut client = wait_for("it listens", || TcpStream::connect(&address).ok());
    let mut piece = [0; 16 << 10];
    for _ in 0..MIB as usize / piece.len() {
        client.write_all(&piece).expect("sent");
        client.read_exact(&mut piece).expect("received");
    }
    let request = PodSandboxStatsRequest { pod_sandbox_id: fixture.pod_id.clone() };
    let stats = fixture.node.pod_sandbox_stats(request).expect("stats").stats.expect("stats");
    let network = stats.linux.expect("Linux").network.expect("a network of its own");
    let interface = network.default_interface.expect("an interface");
    for (what, bytes) in [("sent", interface.tx_bytes), ("received", interface.rx_bytes)] {
        let bytes = value(bytes);
        assert!((MIB..MIB + MIB / 4).contains(&bytes), "{what}: {bytes}");
    }
    // The connection is still open: the kernel keeps the pod's namespace and link for a minute.
    fixture.node.remove_pod(&fixture.pod_id);
    wait_until("nothing of it is left", || fixture.node.rests().is_empty());
    fixture.node.stop();
}

/// Streams return the same as lists, in messages with at most 64 items.
#[test]
fn streams_return_the_same_as_lists() {
    let fixture = PodFixture::start();
    assert!(fixture.node.stream_containers(Default::default()).expect("a stream").is_empty());
    let running = fixture.run(&fixture.config("runs", &["sleep", "forever"]));
    for number in 0..63 {
        fixture.create(&fixture.config(&format!("created{number}"), &["true"]));
    }
    let last = fixture.node.create_container(request::create(
        &fixture.pod_id,
        &fixture.config("one more", &["true"]),
        &fixture.pod,
    ));
    last.expect("the table of containers that run is what has an end");
    let containers = fixture.node.stream_containers(Default::default()).expect("a stream");
    let counts: Vec<usize> = containers.iter().map(|message| message.containers.len()).collect();
    assert_eq!(counts, [64, 1]);
    let pods = fixture.node.stream_pod_sandboxes(Default::default()).expect("a stream");
    assert_eq!((pods.len(), pods[0].pod_sandboxes[0].id.as_str()), (1, fixture.pod_id.as_str()));
    let images = fixture.node.stream_images(Default::default()).expect("a stream");
    assert_eq!(images[0].images.len(), 2, "the probe's and the built-in one");
    let stats = fixture.node.stream_container_stats(Default::default()).expect("a stream");
    assert_eq!(stats[0].container_stats[0].attributes.as_ref().expect("attributes").id, running);
    let stats = fixture.node.stream_pod_sandbox_stats(Default::default()).expect("a stream");
    assert_eq!(stats[0].pod_sandbox_stats.len(), 1);
    fixture.node.stop();
}
