//! Reads the daemon's metrics as a Prometheus server does.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;

use crate::host::wait_for;
use crate::node::{Node, Options};

/// Starts a node that serves metrics; returns the node and the address of the metrics.
pub fn node_with_metrics() -> (Node, String) {
    let config = "[metrics]\naddress = \"127.0.0.1:0\"\n".to_owned();
    let node = Node::with(Options { config, ..Options::default() });
    let address = address_of(&node);
    (node, address)
}

/// The address at which the node's last daemon serves metrics, whose port it chose.
pub fn address_of(node: &Node) -> String {
    wait_for("the address is in the log", || {
        let log = node.log();
        let line = log.lines().rfind(|line| line.contains("serving metrics"))?;
        line.split("address=").nth(1).map(|address| address.trim().trim_matches('"').to_owned())
    })
}

/// Sends a request, given as its request line, and returns the whole response.
pub fn get(address: &str, request: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.write_all(format!("{request}\r\nHost: x\r\n\r\n").as_bytes()).expect("a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

/// Requests the metrics; returns the values by name with labels.
///
/// # Panics
/// If the answer is not in Prometheus' text format.
pub fn scrape(address: &str) -> BTreeMap<String, f64> {
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
