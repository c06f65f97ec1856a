//! Programs that real clusters run on each node or beside their workloads, built from their Go modules and run on this
//! cluster as their documentation says. What they report shows that they found what they need.

use std::fs;

use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::prometheus;

use crate::cluster::{Cluster, target};

/// Runs all of them; panics if one does not report what it should.
pub(crate) fn run() {
    let mut cluster = Cluster::start(&[]);
    node_exporter(&mut cluster);
    metrics_server(&mut cluster);
    cluster.must(&["-n", "kube-system", "delete", "daemonset/node-exporter", "deployment/metrics-server"]);
    cluster.stop();
}

/// Imports an image with one program, which `tests/tools/install cluster-addons` has built, as `localhost/NAME:1`.
fn import(cluster: &Cluster, name: &str) {
    let path = target().join("tools/addons").join(name);
    let program = fs::read(&path).unwrap_or_else(|error| {
        panic!("{}: {error}: `tests/tools/install cluster-addons` builds it", path.display())
    });
    let entries = [Entry::directory("tmp", 0o1777), Entry::program(name, &program)];
    let image = Image::of(vec![Layer::new(&entries, Compression::Gzip)])
        .with("Entrypoint", serde_json::json!([format!("/{name}")]));
    let archive = image.oci_archive(&format!("localhost/{name}:1"));
    cluster.node.try_import(&archive).unwrap_or_else(|error| panic!("import of {name}: {error}"));
}

/// node_exporter has the node's root directory, network and processes: it reports the node's file system, link and name.
fn node_exporter(cluster: &mut Cluster) {
    import(cluster, "node_exporter");
    cluster.apply(include_str!("manifests/node-exporter.yaml"));
    cluster.must(&["-n", "kube-system", "rollout", "status", "daemonset/node-exporter", "--timeout=120s"]);
    // HTTP/1.0, so that the server ends the connection.
    let answer = prometheus::get("10.88.0.1:9100", "GET /metrics HTTP/1.0");
    let wanted = [
        ("node_filesystem_size_bytes{", "mountpoint=\"/\""),
        ("node_network_up{", "device=\"node0\""),
        ("node_uname_info{", "nodename=\"node\""),
        ("node_memory_MemTotal_bytes", ""),
        ("node_cpu_seconds_total{", "mode=\"idle\""),
    ];
    for (metric, label) in wanted {
        let line = answer.lines().find(|line| line.starts_with(metric) && line.contains(label));
        println!("  {}", line.unwrap_or_else(|| panic!("no {metric} with {label}:\n{answer}")));
    }
    let failed: Vec<&str> = answer
        .lines()
        .filter(|line| line.starts_with("node_scrape_collector_success") && line.ends_with(" 0"))
        .collect();
    println!("  collectors without data: {failed:?}");
    cluster.say("node_exporter reports the node");
}

/// metrics-server reads the kubelet's metrics: `kubectl top` shows the node and each pod.
fn metrics_server(cluster: &mut Cluster) {
    import(cluster, "metrics-server");
    cluster.apply(include_str!("manifests/metrics-server.yaml"));
    cluster.must(&["-n", "kube-system", "rollout", "status", "deployment/metrics-server", "--timeout=180s"]);
    let node = cluster.wait("kubectl top shows the node", |cluster| {
        let output = cluster.kubectl(&["top", "node", "--no-headers"]);
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    });
    assert!(node.starts_with("node "), "{node}");
    let pods = cluster.wait("kubectl top shows all pods", |cluster| {
        let output = cluster.kubectl(&["top", "pods", "--no-headers", "-n", "kube-system", "--containers"]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        ["coredns", "metrics-server", "node-exporter"].iter().all(|name| text.contains(name)).then_some(text)
    });
    print!("{node}{pods}");
    let is_used = |line: &str| line.split_whitespace().last().is_some_and(|memory| memory != "0Mi");
    assert!(pods.lines().all(is_used), "a container without memory");
    cluster.say("metrics-server reports the node and its pods");
}
