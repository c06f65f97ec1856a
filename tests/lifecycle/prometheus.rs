//! The daemon's own metrics, as a Prometheus server reads them.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;

use coracle_tests::cri::proto::{PodSandboxStatusRequest, VersionRequest};
use coracle_tests::host::wait_for;
use coracle_tests::node::{Node, Options};
use coracle_tests::request::host_pod;
use coracle_tests::stage::Stage;

fn node() -> (Node, String) {
    let config = "[metrics]\naddress = \"127.0.0.1:0\"\n".to_owned();
    let node = Node::with(Options { config, ..Options::default() });
    let address = wait_for("the address is in the log", || {
        let log = node.log();
        let line = log.lines().find(|line| line.contains("msg=metrics"))?;
        line.split("address=").nth(1).map(|address| address.trim().trim_matches('"').to_owned())
    });
    (node, address)
}

fn get(address: &str, request: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.write_all(format!("{request}\r\nHost: x\r\n\r\n").as_bytes()).expect("a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

/// Values by name with labels; checks the format on the way.
fn scrape(address: &str) -> BTreeMap<String, f64> {
    let answer = get(address, "GET /metrics HTTP/1.1");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
    let (mut families, mut values) = (BTreeSet::new(), BTreeMap::new());
    for line in body.lines() {
        if let Some(family) = line.strip_prefix("# TYPE ") {
            let (name, kind) = family.split_once(' ').expect("a kind");
            assert!(matches!(kind, "counter" | "gauge" | "histogram"), "{line}");
            assert!(families.insert(name.to_owned()), "{name} comes twice");
        } else if !line.starts_with('#') {
            let (name, value) = line.rsplit_once(' ').expect("a value");
            let plain = name.split('{').next().expect("a name");
            let of_histogram =
                ["_bucket", "_sum", "_count"].into_iter().find_map(|end| plain.strip_suffix(end));
            let is_known =
                families.contains(plain) || of_histogram.is_some_and(|name| families.contains(name));
            assert!(is_known, "{plain} has no family");
            assert!(
                values.insert(name.to_owned(), value.parse().expect("a number")).is_none(),
                "{name} comes twice"
            );
        }
    }
    values
}

#[test]
fn a_scrape_shows_what_was_done() {
    let (node, address) = node();
    let stage = Stage::on(node, host_pod("stage"));
    let id = stage.run(&stage.config("c1", &["sleep", "forever"]));
    let before = scrape(&address);
    for _ in 0..3 {
        stage.node.version(VersionRequest::default()).expect("version");
    }
    let unknown = PodSandboxStatusRequest { pod_sandbox_id: "f".repeat(64), verbose: false };
    stage.node.pod_sandbox_status(unknown).expect_err("it is unknown");
    let after = scrape(&address);
    let of = |name: &str| after.get(name).copied().unwrap_or_else(|| panic!("{name}: {after:#?}"));
    let version = "coracle_rpc_total{method=\"version\",code=\"OK\"}";
    assert_eq!(of(version) - before[version], 3.0);
    assert_eq!(of("coracle_rpc_total{method=\"pod_sandbox_status\",code=\"NOT_FOUND\"}"), 1.0);
    assert_eq!(of("coracle_rpc_seconds_bucket{method=\"version\",le=\"+Inf\"}"), of(version));
    assert_eq!(of("coracle_pods{state=\"ready\"}"), 1.0);
    assert_eq!(of("coracle_containers{state=\"running\"}"), 1.0);
    assert_eq!(of("coracle_worker_runs_total{job=\"import\",outcome=\"ok\"}"), 1.0);
    assert!(of("coracle_memory_pss_bytes") > 500_000.0 && of("process_open_fds") > 5.0);
    assert!(of("process_start_time_seconds") > 1.5e9);
    stage.node.remove_pod(&stage.pod_id);
    assert_eq!(scrape(&address)["coracle_pods{state=\"ready\"}"], 0.0);
    drop(id);
    assert!(get(&address, "GET / HTTP/1.1").starts_with("HTTP/1.1 404"));
    assert!(get(&address, "POST /metrics HTTP/1.1").starts_with("HTTP/1.1 405"));
    stage.node.stop();
}
