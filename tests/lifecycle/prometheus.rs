//! The daemon's metrics as a Prometheus server reads them.

use std::io::Write;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::process::Command;

use coracle_tests::cri::proto::{PodSandboxStatusRequest, VersionRequest};
use coracle_tests::node::binaries;
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::prometheus::{get, node_with_metrics, scrape};
use coracle_tests::request::host_pod;

#[test]
fn a_scrape_shows_what_was_done() {
    let (node, address) = node_with_metrics();
    let fixture = PodFixture::on(node, host_pod("fixture"));
    let id = fixture.run(&fixture.config("c1", &["sleep", "forever"]));
    let before = scrape(&address);
    for _ in 0..3 {
        fixture.node.version(VersionRequest::default()).expect("version");
    }
    let unknown = PodSandboxStatusRequest { pod_sandbox_id: "f".repeat(64), verbose: false };
    fixture.node.pod_sandbox_status(unknown).expect_err("it is unknown");
    let after = scrape(&address);
    let of = |name: &str| after.get(name).copied().unwrap_or_else(|| panic!("{name}: {after:#?}"));
    let version = "coracle_rpc_requests_total{method=\"version\",code=\"OK\"}";
    assert_eq!(of(version) - before[version], 3.0);
    assert_eq!(of("coracle_rpc_requests_total{method=\"pod_sandbox_status\",code=\"NOT_FOUND\"}"), 1.0);
    assert_eq!(of("coracle_rpc_duration_seconds_bucket{method=\"version\",le=\"+Inf\"}"), of(version));
    assert_eq!(of("coracle_pods{state=\"ready\"}"), 1.0);
    assert_eq!(of("coracle_containers{state=\"running\"}"), 1.0);
    assert_eq!(of("coracle_worker_runs_total{job=\"import\",outcome=\"ok\"}"), 1.0);
    assert!(of("coracle_store_bytes") > 0.0 && of("coracle_store_free_bytes") > 0.0);
    assert_eq!(of("coracle_oom_kills_total"), 0.0);
    assert!(of("coracle_memory_pss_bytes") > 500_000.0 && of("process_open_fds") > 5.0);
    assert!(of("process_start_time_seconds") > 1.5e9);
    fixture.node.remove_pod(&fixture.pod_id);
    assert_eq!(scrape(&address)["coracle_pods{state=\"ready\"}"], 0.0);
    drop(id);
    assert!(get(&address, "GET / HTTP/1.1").starts_with("HTTP/1.1 404"));
    assert!(get(&address, "POST /metrics HTTP/1.1").starts_with("HTTP/1.1 405"));
    fixture.node.stop();
}

/// Finding S5: each scrape got no byte while eight clients sent half of a request head, or did not read their answers. The
/// control socket refused requests while sixteen clients sent none, or read no answer.
#[test]
fn clients_that_send_or_read_nothing_keep_no_other_away() {
    let (node, address) = node_with_metrics();
    let silent: Vec<_> = (0..200).map(|_| send(&address, b"GET /met")).collect();
    assert!(scrape(&address).len() > 20);
    let unread: Vec<_> = (0..40).map(|_| send(&address, b"GET /metrics HTTP/1.1\r\n\r\n")).collect();
    assert!(scrape(&address).len() > 20);
    drop((silent, unread));
    let control = node.state().join("control.sock");
    let silent: Vec<_> = (0..100).map(|_| UnixStream::connect(&control).expect("it listens")).collect();
    let pods =
        || Command::new(binaries().join("coracle")).arg("pods").args(node.flags()).status().expect("it runs");
    assert!(pods().success());
    // Answers that are longer than the buffer of a socket.
    let request = format!("{{\"pin\":{{\"names\":[{}]}}}}\n", vec!["\"app\""; 600].join(","));
    let unread: Vec<_> = (0..40)
        .map(|_| {
            let mut stream = UnixStream::connect(&control).expect("it listens");
            stream.write_all(request.as_bytes()).expect("it is sent");
            stream
        })
        .collect();
    assert!(pods().success());
    drop((silent, unread));
    node.stop();
}

/// A client that has sent these bytes and reads nothing.
fn send(address: &str, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.write_all(bytes).expect("it is sent");
    stream
}

/// The rules of docs/alerts.yml ask for metrics that are served.
#[test]
fn alert_rules_name_metrics_that_are_served() {
    let (node, address) = node_with_metrics();
    node.version(VersionRequest::default()).expect("version");
    let answer = get(&address, "GET /metrics HTTP/1.1");
    let rules = include_str!("../../docs/alerts.yml");
    let words = rules.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    let mut metrics: Vec<_> =
        words.filter(|word| word.starts_with("coracle_") || word.starts_with("process_")).collect();
    metrics.sort_unstable();
    metrics.dedup();
    assert!(metrics.len() > 5, "{metrics:?}");
    for metric in metrics {
        let plain = metric.trim_end_matches("_bucket");
        assert!(answer.contains(&format!("# TYPE {plain} ")), "{metric}");
    }
    node.stop();
}
