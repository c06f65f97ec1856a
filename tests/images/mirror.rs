//! Nodes of a site that pass images to each other: each test has a registry whose sent bytes are counted, and nodes that are real
//! daemons. `neighbours` has the nodes that misbehave.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use coracle_tests::fault::{Fault, Faulty, Line};
use coracle_tests::host::{self, wait_for, wait_until};
use coracle_tests::http;
use coracle_tests::image::Image;
use coracle_tests::layer::digest;
use coracle_tests::node::{Node, Options};
use coracle_tests::prometheus::{address_of, scrape};
use coracle_tests::registry::Registry;
use coracle_tests::request::pull;
use coracle_tests::site::{config, image, local, make_key, ports, size};

use crate::find;

/// Number of bytes of all layers that a registry or a neighbour has sent.
pub(super) fn sent(from: &Faulty, image: &Image) -> u64 {
    image.layers.iter().map(|layer| from.blob_bytes(&digest(&layer.blob))).sum()
}

/// Sends the daemon the signal for a reload, and waits until it has been handled.
pub(super) fn reload(node: &Node) {
    let handled = |node: &Node| {
        let log = node.log();
        log.matches("reload: configuration applied").count() + log.matches("reload failed").count()
    };
    let before = handled(node);
    let daemon = nix::unistd::Pid::from_raw(node.pid());
    nix::sys::signal::kill(daemon, nix::sys::signal::Signal::SIGHUP).expect("it is ours to signal");
    wait_until("the reload is handled", || handled(node) > before);
}

pub(super) fn node(config: String) -> Node {
    Node::with(Options { config, ..Options::default() })
}

/// Nodes that serve each other on the loopback interface, with one key, and the directory with it.
struct Site {
    nodes: Vec<Node>,
    ports: Vec<u16>,
    key: std::path::PathBuf,
}

impl Site {
    fn new(count: usize, more: &str) -> Site {
        let ports = ports(count);
        let key = std::env::temp_dir().join(format!("coracle-site-{}-{}", std::process::id(), ports[0]));
        make_key(&key);
        let all: Vec<SocketAddr> = ports.iter().copied().map(local).collect();
        let more = format!("key_file = \"{}\"\n{more}", key.display());
        let nodes = ports.iter().map(|port| node(config(Some(*port), &all, &more))).collect();
        Site { nodes, ports, key }
    }

    fn stop(self) {
        self.nodes.into_iter().for_each(Node::stop);
        std::fs::remove_file(self.key).expect("the key is ours");
    }
}

/// Pulls `name` on these nodes at once.
pub(super) fn pull_on(nodes: &[&Node], name: &str) {
    std::thread::scope(|scope| {
        for node in nodes {
            scope.spawn(move || {
                node.pull_image(pull(name)).unwrap_or_else(|error| panic!("pull: {error}\n{}", node.log()))
            });
        }
    });
}

/// The last value of a field in the log.
pub(super) fn logged(node: &Node, field: &str) -> u64 {
    let log = node.log();
    let line =
        log.lines().rfind(|line| line.contains("image pulled")).unwrap_or_else(|| panic!("no pull: {log}"));
    let value = line.split(' ').find_map(|word| word.strip_prefix(&format!("{field}=")));
    value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {field}: {line}"))
}

pub(super) fn wait_until_idle(node: &Node) {
    /// Idle time of the process, the time limit of several writes to a client that does not read, and time to spare.
    const LIMIT: Duration = Duration::from_secs(70);
    let ended = host::wait_within(LIMIT, || node.workers().is_empty().then_some(()));
    assert!(ended.is_some(), "the serving process has not ended: {}", node.log());
}

#[test]
fn a_neighbour_serves_an_image_and_its_process_ends_when_idle() {
    let site = Site::new(2, "[metrics]\naddress = \"127.0.0.1:0\"\n");
    let registry = Registry::start(site.nodes[0].folder());
    let image = image(&site.nodes[0], &[3_000_000, 200_000, 10], 1);
    registry.push(&image, "site", "1");
    let proxy = Faulty::start(registry.address(), |_, _| Fault::None);
    let name = proxy.name("site", "1");
    pull_on(&[&site.nodes[0]], &name);
    assert_eq!(sent(&proxy, &image), size(&image), "one node downloads all");
    assert_eq!(logged(&site.nodes[0], "neighbours"), 0);
    pull_on(&[&site.nodes[1]], &name);
    assert_eq!(sent(&proxy, &image), size(&image), "the second node downloads nothing of it");
    assert_eq!(logged(&site.nodes[1], "neighbours"), size(&image));
    assert_eq!(logged(&site.nodes[1], "fetched"), 0);
    let counted = |node| scrape(&address_of(node));
    let of_neighbours = |node| counted(node)["coracle_image_neighbour_bytes_total"];
    assert_eq!(site.nodes.iter().map(of_neighbours).collect::<Vec<_>>(), [0.0, size(&image) as f64]);
    assert!(find(&site.nodes[1], &name).is_some());
    site.nodes.iter().for_each(wait_until_idle);
    let served = counted(&site.nodes[0])["coracle_worker_runs_total{job=\"mirror\",outcome=\"ok\"}"];
    assert!(served >= 1.0, "{served}");
    site.stop();
}

#[test]
fn nodes_that_pull_at_once_download_an_image_once() {
    let site = Site::new(4, "");
    let registry = Registry::start(site.nodes[0].folder());
    let image = image(&site.nodes[0], &[2_000_000, 1_500_000, 1_000_000, 1_000_000, 500_000], 10);
    registry.push(&image, "site", "1");
    let line = Line::new(1_500_000.0);
    let proxy = Faulty::start(registry.address(), move |_, _| Fault::Over(line.clone()));
    pull_on(&site.nodes.iter().collect::<Vec<_>>(), &proxy.name("site", "1"));
    let (sent, size) = (sent(&proxy, &image), size(&image));
    // On a busy machine a node may wait for another one without success.
    assert!(sent < 2 * size, "{sent} of {size} bytes");
    let of_neighbours: u64 = site.nodes.iter().map(|node| logged(node, "neighbours")).sum();
    assert!(of_neighbours >= 2 * size, "{of_neighbours} of {size} bytes");
    site.stop();
}

/// The node that downloads the layer is killed with its workers: another one downloads what is missing.
#[test]
fn a_node_that_is_killed_while_it_downloads_is_replaced() {
    let mut site = Site::new(3, "");
    let registry = Registry::start(site.nodes[0].folder());
    let image = image(&site.nodes[0], &[4_000_000], 20);
    registry.push(&image, "site", "1");
    let line = Line::new(800_000.0);
    let proxy = Faulty::start(registry.address(), move |_, _| Fault::Over(line.clone()));
    let name = proxy.name("site", "1");
    let part = digest(&image.layers[1].blob).replace("sha256:", "");
    let is_fetching = |node: &Node| {
        let parts = node.root().join("images/parts");
        let state = std::fs::read_to_string(parts.join(format!("{part}-state"))).unwrap_or_default();
        state.chars().nth(21) == Some('f')
            && parts.join(&part).metadata().is_ok_and(|about| about.len() > 1_000_000)
    };
    let killed = std::thread::scope(|scope| {
        let pulls: Vec<_> =
            site.nodes.iter().map(|node| scope.spawn(|| node.pull_image(pull(&name)).is_ok())).collect();
        let first = wait_for("a node has a part of the layer", || site.nodes.iter().position(is_fetching));
        let daemon = nix::unistd::Pid::from_raw(site.nodes[first].pid());
        nix::sys::signal::kill(daemon, nix::sys::signal::Signal::SIGKILL).expect("it is ours to kill");
        for (index, pull) in pulls.into_iter().enumerate() {
            assert_eq!(pull.join().expect("no panic"), index != first, "node {index}");
        }
        first
    });
    let (sent, size) = (sent(&proxy, &image), size(&image));
    // Without neighbours each of the two that remain would have downloaded all.
    assert!(sent < 2 * size, "{sent} of {size} bytes");
    site.nodes[killed].restart();
    pull_on(&site.nodes.iter().collect::<Vec<_>>(), &name);
    site.stop();
}

/// A daemon that is killed while its worker serves: its port is free for the next one.
#[test]
fn the_next_daemon_serves_neighbours_after_a_kill() {
    let mut site = Site::new(2, "rate_max = 500000\n");
    let registry = Registry::start(site.nodes[0].folder());
    let image = image(&site.nodes[0], &[3_000_000], 30);
    registry.push(&image, "site", "1");
    let proxy = Faulty::start(registry.address(), |_, _| Fault::None);
    let name = proxy.name("site", "1");
    pull_on(&[&site.nodes[0]], &name);
    let (first, second) = site.nodes.split_at_mut(1);
    std::thread::scope(|scope| {
        let pulled = scope.spawn(|| second[0].pull_image(pull(&name)));
        wait_until("the neighbour serves", || !first[0].workers().is_empty());
        std::thread::sleep(Duration::from_millis(500));
        first[0].restart();
        pulled.join().expect("no panic").expect("the registry or the next daemon has the rest");
    });
    let answer = wait_for("the next daemon serves", || {
        http::request(local(site.ports[0]), "GET", "/v2/", "", b"").ok()
    });
    assert_eq!(answer.0.second(), "401", "{:?}", answer.0);
    site.stop();
}

#[test]
fn a_neighbour_sends_no_faster_than_its_rate() {
    let site = Site::new(2, "rate_max = 400000\n");
    let registry = Registry::start(site.nodes[0].folder());
    let image = image(&site.nodes[0], &[1_600_000], 40);
    registry.push(&image, "site", "1");
    let proxy = Faulty::start(registry.address(), |_, _| Fault::None);
    let name = proxy.name("site", "1");
    pull_on(&[&site.nodes[0]], &name);
    let begun = Instant::now();
    pull_on(&[&site.nodes[1]], &name);
    assert_eq!(logged(&site.nodes[1], "fetched"), 0);
    assert!(begun.elapsed() >= Duration::from_secs(3), "{:?}", begun.elapsed());
    site.stop();
}

#[test]
fn without_the_key_nothing_is_served() {
    let site = Site::new(1, "");
    let registry = Registry::start(site.nodes[0].folder());
    let image = image(&site.nodes[0], &[100_000], 50);
    let manifest = registry.push(&image, "site", "1");
    let proxy = Faulty::start(registry.address(), |_, _| Fault::None);
    let name = proxy.name("site", "1");
    pull_on(&[&site.nodes[0]], &name);
    let address = local(site.ports[0]);
    let blob = digest(&image.layers[1].blob);
    for path in
        ["/v2/", &format!("/v2/site/blobs/{blob}"), &format!("/v2/site/manifests/{manifest}"), "/", "/v2/x"]
    {
        for method in ["GET", "HEAD"] {
            let (head, body) = http::request(address, method, path, "", b"").expect("an answer");
            assert_eq!(head.second(), "401", "{method} {path}");
            assert!(body.len() < 100, "{method} {path}: {}", body.len());
        }
    }
    // A connection does not stay open for requests without a proof.
    let mut client = http::connect(address).expect("a connection");
    let request = format!("GET /v2/site/blobs/{blob} HTTP/1.1\r\nHost: x\r\n\r\n");
    client.write_all(request.repeat(3).as_bytes()).expect("requests");
    let mut answers = Vec::new();
    // The kernel may reset it, because of the third request.
    let _ = client.read_to_end(&mut answers);
    assert_eq!(String::from_utf8_lossy(&answers).matches("HTTP/1.1 401").count(), 2);
    // A node with another key gets everything from the registry.
    let key = site.nodes[0].folder().join("other-key");
    make_key(&key);
    let more = format!("key_file = \"{}\"\n", key.display());
    let other = node(config(None, &[address], &more));
    pull_on(&[&other], &name);
    assert_eq!((logged(&other, "neighbours"), logged(&other, "fetched") >= size(&image)), (0, true));
    assert!(other.log().contains("unauthorized"), "{}", other.log());
    other.stop();
    // Nor does one without a key, or whose key cannot be read.
    for more in ["", "key_file = \"/nonexistent/key\"\n"] {
        let other = node(config(None, &[address], more));
        pull_on(&[&other], &name);
        assert_eq!(logged(&other, "neighbours"), 0, "{more}");
        other.stop();
    }
    site.stop();
}

#[test]
fn clients_without_neighbour_headers_get_content_by_digest_only() {
    let port = ports(1)[0];
    let node = node(config(Some(port), &[], "open = true"));
    let registry = Registry::start(node.folder());
    let image = image(&node, &[100_000], 60);
    let manifest = registry.push(&image, "site", "1");
    let ns = registry.address();
    pull_on(&[&node], &registry.name("site", "1"));
    let get =
        |method: &str, path: &str| http::request(local(port), method, path, "", b"").expect("an answer");
    let (head, body) = get("GET", &format!("/v2/site/manifests/{manifest}?ns={ns}"));
    assert_eq!((head.second(), head.get("content-type")), ("200", Some(coracle_tests::image::MANIFEST)));
    assert_eq!(digest(&body), manifest);
    for layer in &image.layers {
        let path = format!("/v2/site/blobs/{}", digest(&layer.blob));
        assert_eq!(get("HEAD", &path).0.length(), layer.blob.len() as u64);
        assert!(get("GET", &path).1 == layer.blob, "{path}");
    }
    assert_eq!(get("GET", &format!("/v2/site/blobs/{}", image.id())).1, image.config_blob());
    for (method, path, status) in [
        ("GET", "/v2/", "200"),
        ("GET", "/v2/site/manifests/1?ns=localhost", "404"),
        ("GET", &format!("/v2/site/manifests/1?ns={ns}"), "404"),
        // A manifest of one repository is none of another, or of another registry.
        ("GET", &format!("/v2/site/manifests/{manifest}"), "404"),
        ("GET", &format!("/v2/other/manifests/{manifest}?ns={ns}"), "404"),
        ("GET", &format!("/v2/site/manifests/{manifest}?ns=localhost"), "404"),
        ("GET", "/v2/_catalog", "404"),
        ("GET", "/v2/site/tags/list", "404"),
        ("GET", "/v2/site/blobs/sha256:../../../../etc/passwd", "404"),
        ("GET", &format!("/v2/site/blobs/{}", digest(b"absent")), "404"),
        ("POST", "/v2/site/blobs/uploads/", "405"),
        ("DELETE", &format!("/v2/site/manifests/{manifest}"), "405"),
    ] {
        assert_eq!(get(method, path).0.second(), status, "{method} {path}");
    }
    wait_until_idle(&node);
    node.stop();
}

/// Clients that say nothing, do not read, or go away are ended, and there are not too many at once.
#[test]
fn a_serving_node_disconnects_clients_that_stall() {
    let port = ports(1)[0];
    let node = node(config(Some(port), &[], "open = true"));
    let registry = Registry::start(node.folder());
    let image = image(&node, &[8_000_000], 70);
    registry.push(&image, "site", "1");
    pull_on(&[&node], &registry.name("site", "1"));
    let path = format!("/v2/site/blobs/{}", digest(&image.layers[1].blob));
    let mut silent: Vec<TcpStream> =
        (0..100).map(|_| http::connect(local(port)).expect("a connection")).collect();
    // The oldest are closed for new ones, so that those who ask are served.
    let begun = Instant::now();
    let (head, body) = http::request(local(port), "GET", &path, "", b"").expect("an answer");
    assert_eq!((head.second(), body.len()), ("200", image.layers[1].blob.len()));
    let ended = silent.iter_mut().all(|client| matches!(client.read(&mut [0]), Ok(0) | Err(_)));
    assert!(ended && begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    drop(silent);
    // One that requests a blob and reads nothing of it, and one that goes away.
    let mut idle = http::connect(local(port)).expect("a connection");
    let mut gone = http::connect(local(port)).expect("a connection");
    for client in [&mut idle, &mut gone] {
        write!(client, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").expect("a request");
    }
    drop(gone);
    let (head, body) = http::request(local(port), "GET", &path, "", b"").expect("others are served");
    assert_eq!(head.second(), "200");
    assert_eq!(body.len(), image.layers[1].blob.len());
    wait_until_idle(&node);
    drop(idle);
    node.stop();
}

/// The worker of a pull announces a layer that it downloads; a neighbour reads it as it grows.
#[test]
fn a_layer_is_served_while_it_is_downloaded() {
    let port = ports(1)[0];
    let node = node(config(Some(port), &[], "open = true"));
    let registry = Registry::start(node.folder());
    let image = image(&node, &[2_000_000], 80);
    registry.push(&image, "site", "1");
    let line = Line::new(500_000.0);
    let proxy = Faulty::start(registry.address(), move |_, _| Fault::Over(line.clone()));
    let layer = &image.layers[1];
    let path = format!("/v2/site/blobs/{}?ns={}", digest(&layer.blob), proxy.address());
    let elsewhere = path.replace("ns=", "ns=other.");
    std::thread::scope(|scope| {
        let pulled = scope.spawn(|| node.pull_image(pull(&proxy.name("site", "1"))));
        let state = wait_for("the layer is downloaded", || {
            let (head, _) = http::request(local(port), "HEAD", &path, "", b"").ok()?;
            head.get("coracle-state").filter(|state| state.starts_with("fetching")).map(str::to_owned)
        });
        let had = state.split(' ').nth(1).and_then(|bytes| bytes.parse().ok()).unwrap_or(u64::MAX);
        assert!(had < layer.blob.len() as u64, "{state}");
        let (head, _) = http::request(local(port), "HEAD", &elsewhere, "", b"").expect("an answer");
        assert_eq!(head.second(), "404", "who can name a registry could be slow on purpose");
        let (head, body) = http::request(local(port), "GET", &path, "", b"").expect("an answer");
        assert_eq!(head.second(), "200");
        assert!(body == layer.blob, "{} of {} bytes", body.len(), layer.blob.len());
        pulled.join().expect("no panic").expect("the pull");
    });
    node.stop();
}

#[test]
fn documents_are_those_of_neighbours_only_if_the_configuration_says_so() {
    let ports = ports(2);
    let key = "open = true\noffline = \"neighbours\"\n";
    let first = node(config(Some(ports[0]), &[], key));
    let registry = Registry::start(first.folder());
    let image = image(&first, &[300_000], 90);
    let digest = registry.push(&image, "site", "1");
    let name = registry.name("site", "1");
    pull_on(&[&first], &name);
    let by_digest = format!("{}@{digest}", name.trim_end_matches(":1"));
    drop(registry);
    let short = "[registry]\nconnect_timeout = \"500ms\"\n";
    let strict = node(config(None, &[local(ports[0])], short));
    let refused = strict.pull_image(pull(&name)).expect_err("the registry is asked for a tag");
    assert!(refused.message().contains("RegistryUnavailable"), "{refused}");
    // Also not by digest: the registry would have asked for credentials.
    strict.pull_image(pull(&by_digest)).expect_err("the registry is asked for a manifest");
    strict.stop();
    let trusting = node(config(None, &[local(ports[0])], &format!("offline = \"neighbours\"\n{short}")));
    let elsewhere = by_digest.replace("/site@", "/other@");
    trusting.pull_image(pull(&elsewhere)).expect_err("no neighbour has it under this name");
    trusting.pull_image(pull(&by_digest)).expect("the neighbour's manifest");
    trusting.pull_image(pull(&name)).expect("the neighbour's tag");
    assert_eq!(find(&trusting, &name).expect("the image").id, image.id());
    trusting.stop();
    // With a key, only a node that has it vouches for a tag; a digest needs no one's word.
    let key = first.folder().join("key");
    make_key(&key);
    let with_key = format!("key_file = \"{}\"\noffline = \"neighbours\"\n", key.display());
    let keyed = node(config(None, &[local(ports[0])], &format!("{with_key}{short}")));
    keyed.pull_image(pull(&by_digest)).expect("the neighbour's manifest");
    keyed.pull_image(pull(&name)).expect_err("the neighbour has not the key");
    assert!(keyed.log().contains("RegistryUnavailable"), "{}", keyed.log());
    let second = node(config(
        Some(ports[1]),
        &[local(ports[0])],
        &format!("offline = \"neighbours\"\nopen = true\n{short}"),
    ));
    second.pull_image(pull(&name)).expect("the neighbour's tag");
    second.rewrite_config(&config(Some(ports[1]), &[], &with_key));
    let mut second = second;
    second.restart();
    keyed.rewrite_config(&config(None, &[local(ports[1])], &format!("{with_key}{short}")));
    reload(&keyed);
    keyed.pull_image(pull(&name)).expect("the tag of a neighbour that has the key");
    [keyed, second, first].into_iter().for_each(Node::stop);
}

/// The socket is that of the start until a restart, so it does not lose its key.
#[test]
fn a_reload_never_removes_the_key_of_a_listening_socket() {
    let site = Site::new(1, "");
    let node = &site.nodes[0];
    let status = || {
        http::request(local(site.ports[0]), "GET", "/v2/", "", b"").expect("an answer").0.second().to_owned()
    };
    assert_eq!(status(), "401");
    for section in ["", "[mirror]\nopen = true\n"] {
        node.rewrite_config(section);
        reload(node);
        assert!(node.log().contains("reload failed"), "{section}: {}", node.log());
        assert_eq!(status(), "401", "{section}");
        wait_until_idle(node);
        assert_eq!(status(), "401", "{section}: another process");
    }
    site.stop();
}

#[test]
fn a_new_key_counts_after_a_reload() {
    let site = Site::new(2, "");
    let [first, second] = &site.nodes[..] else { panic!("two nodes") };
    let registry = Registry::start(first.folder());
    let image = image(first, &[200_000], 110);
    registry.push(&image, "site", "1");
    let name = registry.name("site", "1");
    pull_on(&[first], &name);
    let answer = || http::request(local(site.ports[0]), "GET", "/v2/", "", b"");
    answer().expect("an answer, so a process serves with the first key");
    make_key(&site.key);
    reload(first);
    pull_on(&[second], &name);
    assert_eq!(logged(second, "neighbours"), size(&image));
    // Without a key the clients get no answer, and do not wait for one.
    std::fs::write(&site.key, "short").expect("a file");
    reload(first);
    wait_until("clients are disconnected", || answer().is_err());
    for _ in 0..3 {
        answer().expect_err("the worker could not start");
    }
    assert_eq!(first.log().matches("cannot serve images to other nodes").count(), 1, "{}", first.log());
    make_key(&site.key);
    reload(first);
    wait_until("the next process serves", || answer().is_ok());
    site.stop();
}

/// The process that reads requests sees blobs and parts only: copies of registries.yaml with credentials are beside them.
#[test]
fn the_serving_process_sees_only_blobs_parts_and_layers() {
    let site = Site::new(1, "");
    let node = &site.nodes[0];
    std::fs::write(node.root().join("images/secret"), "x").expect("a file");
    http::request(local(site.ports[0]), "GET", "/v2/", "", b"").expect("an answer");
    let parent = node.workers().first().expect("a serving process").pid;
    let mut children = host::processes("coracle-worker");
    children.retain(|process| host::proc_value(process.pid, "status", "PPid") == Some(parent as u64));
    let child = children.first().expect("a confined process").pid;
    let root = std::fs::read_dir(format!("/proc/{child}/root/")).expect("its root directory");
    let mut names: Vec<String> =
        root.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    assert_eq!(names, ["images", "layers"]);
    let images = std::fs::read_dir(format!("/proc/{child}/root/images")).expect("its directories");
    let mut names: Vec<_> = images.map(|entry| entry.expect("an entry").file_name()).collect();
    names.sort();
    assert_eq!(names, ["blobs", "contents", "parts"]);
    let blobs = format!("/proc/{child}/root/images/blobs/x");
    let error = std::fs::write(blobs, "x").expect_err("it is read-only");
    assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    site.stop();
}

/// The list of the site has this node at an address that the node does not know.
#[test]
fn a_node_does_not_wait_for_itself_at_another_address() {
    let port = ports(1)[0];
    let other = Faulty::start(local(port), |_, _| Fault::None);
    let more = "open = true\n[registry]\nconnections = 1\n";
    let node = node(config(Some(port), &[other.address()], more));
    let registry = Registry::start(node.folder());
    let image = image(&node, &[1000, 1000, 1000], 120);
    registry.push(&image, "site", "1");
    pull_on(&[&node], &registry.name("site", "1"));
    let waits = other.served().iter().filter(|served| served.status == "202").count();
    assert!(waits <= 1, "{:?}", other.served());
    node.stop();
}

#[test]
fn serving_without_a_key_must_be_configured() {
    let node = Node::start();
    let (key, short) = (node.folder().join("key"), node.folder().join("short"));
    make_key(&key);
    std::fs::write(&short, "secret").expect("a file");
    let with_key = |key: &Path| format!("listen = \"0.0.0.0:5000\"\nkey_file = \"{}\"", key.display());
    for (config, expected) in [
        (&*with_key(&key), None),
        (&with_key(&short), Some("but a key has 32 to 4096 bytes")),
        (&with_key(Path::new("/nonexistent")), Some("/nonexistent: ")),
        (&format!("{}\nopen = true", with_key(&key)), Some("remove key_file or open")),
        ("listen = \"0.0.0.0:5000\"", Some("would give everyone who can reach it all images")),
        ("listen = \"0.0.0.0:5000\"\nopen = true", None),
        ("listen = \"127.0.0.1:5000\"", Some("would give everyone who can reach it all images")),
        ("listen = \"127.0.0.1:0\"\nopen = true", Some("listen needs a port")),
        ("neighbours = [\"10.0.0.1\"]", Some("ADDRESS:PORT or dns:NAME:PORT")),
        ("neighbours = [\"dns:nodes.example:5000\", \"[fd00::1]:5000\"]", None),
    ] {
        node.rewrite_config(&format!("[mirror]\n{config}\n"));
        let output = node.tool(&["config", "check"]);
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        assert_eq!(output.status.success(), expected.is_none(), "{config}: {text}");
        assert!(text.contains(expected.unwrap_or_default()), "{config}: {text}");
    }
    node.rewrite_config("");
    node.stop();
}
