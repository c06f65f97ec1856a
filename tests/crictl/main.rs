//! The README's walk-through with unmodified crictl, on the host's network and on a CNI bridge.
#![forbid(unsafe_code)]

mod clients;
mod prometheus;

use std::fs;
use std::process::Command;

use coracle_tests::host;
use coracle_tests::image::Image;
use coracle_tests::node::Node;
use coracle_tests::registry::Registry;
use serde_json::{Value, json};

/// Runs crictl against a node; panics with its output if it fails.
#[track_caller]
fn crictl(node: &Node, words: &[&str]) -> String {
    let endpoint = format!("unix://{}", node.socket().display());
    let output = Command::new("crictl")
        .args(["--config", "/dev/null", "--timeout", "30s"])
        .args(["--runtime-endpoint", &endpoint, "--image-endpoint", &endpoint])
        .args(words)
        .output()
        .unwrap_or_else(|error| panic!("crictl: {error}; tests/tools/install builds it"));
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    assert!(output.status.success(), "crictl {words:?}: {}{text}", String::from_utf8_lossy(&output.stderr));
    text
}

#[track_caller]
fn json_of(node: &Node, words: &[&str]) -> Value {
    serde_json::from_str(&crictl(node, words)).expect("crictl prints JSON")
}

fn file(node: &Node, name: &str, value: &Value) -> String {
    let path = node.folder().join(name);
    fs::write(&path, value.to_string()).expect("a file");
    path.display().to_string()
}

/// NamespaceMode: 2 is the node's network, 0 the pod's own.
fn walk_through(node: Node, network: u32) {
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "walk"), "probe", "1");
    let name = registry.name("probe", "1");
    assert!(crictl(&node, &["version"]).contains("coracle"));
    assert_eq!(json_of(&node, &["info"])["status"]["conditions"][0]["type"], "RuntimeReady");
    assert!(crictl(&node, &["pull", &name]).contains("Image is up to date"));
    assert!(crictl(&node, &["images"]).contains("probe"));

    let pod = json!({
        "metadata": { "name": "walk", "namespace": "default", "uid": "walk-1", "attempt": 0 },
        "log_directory": node.log_directory("walk"),
        "linux": { "security_context": { "namespace_options": { "network": network } } },
    });
    let container = json!({
        "metadata": { "name": "ticks" }, "image": { "image": name }, "args": ["ticks", "100"],
        "log_path": "ticks.log",
        "linux": { "security_context": { "namespace_options": { "network": network, "pid": 1 } } },
    });
    let (pod, container) = (file(&node, "pod.json", &pod), file(&node, "container.json", &container));
    let pod_id = crictl(&node, &["runp", &pod]);
    assert!(crictl(&node, &["pods"]).contains(&pod_id[..13]));
    let status = json_of(&node, &["inspectp", &pod_id[..13]]);
    assert_eq!(status["status"]["state"], "SANDBOX_READY");
    let address = status["status"]["network"]["ip"].as_str().unwrap_or_default().to_owned();
    assert_eq!(address.starts_with(&node.subnet()), network == 0, "{address}");

    let id = crictl(&node, &["create", &pod_id, &container, &pod]);
    crictl(&node, &["start", &id]);
    assert!(crictl(&node, &["ps"]).contains("ticks"));
    let status = json_of(&node, &["inspect", &id]);
    assert_eq!(status["status"]["state"], "CONTAINER_RUNNING");
    assert!(host::is_alive(status["info"]["pid"].as_i64().expect("a pid") as i32));
    host::wait_until("a line of log", || crictl(&node, &["logs", &id]).contains("tick 0"));
    assert_eq!(crictl(&node, &["exec", "-s", &id, "/probe", "print", "hello"]), "hello");

    crictl(&node, &["stop", &id]);
    assert!(!crictl(&node, &["ps"]).contains("ticks"));
    assert!(crictl(&node, &["ps", "-a"]).contains("Exited"));
    crictl(&node, &["rm", &id]);
    crictl(&node, &["stopp", &pod_id]);
    crictl(&node, &["rmp", &pod_id]);
    crictl(&node, &["rmi", &name]);
    assert!(!crictl(&node, &["images"]).contains("127.0.0.1"));
    node.stop();
}

#[test]
fn on_the_hosts_network() {
    walk_through(Node::start(), 2);
}

#[test]
fn on_a_cni_bridge() {
    walk_through(Node::with_bridge(), 0);
}

#[test]
fn crictl_reports_unknown_ids_as_not_found() {
    let node = Node::start();
    let endpoint = format!("unix://{}", node.socket().display());
    for command in ["inspect", "inspectp"] {
        let output = Command::new("crictl")
            .args(["--config", "/dev/null", "--runtime-endpoint", &endpoint, command, "0123456789abc"])
            .output()
            .expect("crictl");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains("NotFound"), "{command}: {text}");
    }
    node.stop();
}

/// The words of a table's lines without the age, which may have changed between both.
fn cells(table: &str) -> Vec<Vec<String>> {
    let lines = table.lines().map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()));
    let is_age = |cell: &&str| cell.ends_with(" ago");
    lines.map(|line| line.filter(|cell| !is_age(cell)).map(str::to_owned).collect()).collect()
}

/// Scripts and eyes that know crictl find the same in the lists of `coracle`.
#[test]
fn lists_of_coracle_have_the_format_of_crictl() {
    let fixture = coracle_tests::pod_fixture::PodFixture::start();
    let node = &fixture.node;
    let metadata = fixture.pod.metadata.clone().expect("a name");
    // crictl reads the pod's name from the labels that a kubelet sets.
    let run = |name: &str, words: &[&str]| {
        let mut config = fixture.config(name, words);
        config.labels.insert("io.kubernetes.pod.name".to_owned(), metadata.name.clone());
        config.labels.insert("io.kubernetes.pod.namespace".to_owned(), metadata.namespace.clone());
        fixture.run(&config)
    };
    let running = run("runs", &["sleep", "forever"]);
    let ended = run("ends", &["exit", "3"]);
    node.exited(&ended);
    let own = |words: &[&str]| {
        let output = node.tool(words);
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    for words in [
        &["pods"][..],
        &["pods", "--no-trunc"],
        &["ps"],
        &["ps", "-a"],
        &["ps", "-a", "--no-trunc"],
        &["ps", "--state", "exited"],
        &["ps", "--latest"],
        &["images"],
        &["images", "--no-trunc"],
    ] {
        assert_eq!(cells(&own(words)), cells(&crictl(node, words)), "{words:?}");
    }
    for words in [&["pods", "-q"][..], &["ps", "-aq"], &["ps", "-q", "--name", "^runs$"]] {
        assert_eq!(own(words).trim(), crictl(node, words), "{words:?}");
    }
    for words in [&["pods", "-o", "json"][..], &["ps", "-a", "-o", "json"]] {
        let ours: Value = serde_json::from_str(&own(words)).expect("JSON");
        assert_eq!(ours, json_of(node, words), "{words:?}");
    }
    let by_id = |value: &Value| {
        let mut images = value["images"].as_array().expect("images").clone();
        images.sort_by_key(|image| image["id"].to_string());
        images
    };
    let ours: Value = serde_json::from_str(&own(&["images", "-o", "json"])).expect("JSON");
    assert_eq!(by_id(&ours), by_id(&json_of(node, &["images", "-o", "json"])));
    let head = |table: String| cells(table.lines().next().expect("a heading"));
    // It clears a terminal first, also where there is none.
    let theirs = crictl(node, &["stats"]).trim_start_matches("\u{1b}[2J\u{1b}[H").to_owned();
    assert_eq!(head(own(&["stats", "--seconds", "0"])), head(theirs));
    let ours: Value = serde_json::from_str(&own(&["stats", "-o", "json", "--seconds", "0"])).expect("JSON");
    let theirs = json_of(node, &["stats", "-o", "json"]);
    let (ours, theirs) = (&ours["stats"][0], &theirs["stats"][0]);
    assert_eq!(ours["attributes"], theirs["attributes"]);
    assert_eq!(ours["attributes"]["id"], running.as_str());
    for member in ["cpu", "memory"] {
        let names =
            |value: &Value| value[member].as_object().expect("an object").keys().cloned().collect::<Vec<_>>();
        // The rate needs two readings a second apart.
        let names = |value| names(value).into_iter().filter(|name| name != "psi" && name != "usageNanoCores");
        assert!(names(ours).eq(names(theirs)), "{member}: {ours} {theirs}");
    }
    fixture.node.stop();
}
