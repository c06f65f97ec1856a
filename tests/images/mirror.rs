//! Nodes of a site that pass images to each other: each test has a registry whose sent bytes are counted, and nodes that are real
//! daemons. `neighbours` has the nodes that misbehave.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use coracle_tests::fault::{Fault, Faulty, Line};
use coracle_tests::host::{self, wait_for, wait_until};
use coracle_tests::http;
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer, digest};
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::Registry;
use coracle_tests::request::pull;

use crate::faults::noise;
use crate::find;

/// Writes a new key to a file.
pub(super) fn make_key(path: &Path) {
    let key = Command::new("openssl").args(["rand", "-hex", "32"]).output().expect("openssl runs");
    std::fs::write(path, key.stdout).expect("a key");
}

/// An image with layers of random bytes.
pub(super) fn image(node: &Node, layers: &[usize], seed: u64) -> Image {
    let layer = |(number, bytes): (usize, &usize)| {
        let name = format!("noise-{number}");
        Layer::new(&[Entry::file(&name, &noise(*bytes, seed + number as u64))], Compression::Gzip)
    };
    layers.iter().enumerate().map(layer).fold(Image::probe(&node.probe(), "site"), Image::plus)
}

/// Number of bytes of all layers.
pub(super) fn size(image: &Image) -> u64 {
    image.layers.iter().map(|layer| layer.blob.len() as u64).sum()
}

/// Number of bytes of all layers that a registry or a neighbour has sent.
pub(super) fn sent(from: &Faulty, image: &Image) -> u64 {
    image.layers.iter().map(|layer| from.blob_bytes(&digest(&layer.blob))).sum()
}

/// Free ports for nodes.
pub(super) fn ports(count: usize) -> Vec<u16> {
    let bind = |_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let listeners: Vec<TcpListener> = (0..count).map(bind).collect();
    listeners.iter().map(|listener| listener.local_addr().expect("a bound address").port()).collect()
}

pub(super) fn local(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// A configuration that serves on a port of the loopback interface and asks these neighbours.
pub(super) fn config(port: Option<u16>, neighbours: &[SocketAddr], more: &str) -> String {
    let listen = port.map(|port| format!("listen = \"127.0.0.1:{port}\"\n")).unwrap_or_default();
    let neighbours: Vec<String> = neighbours.iter().map(SocketAddr::to_string).collect();
    format!("[mirror]\n{listen}neighbours = {neighbours:?}\n{more}\n")
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
    /// Idle time of the process, the time limit of a client that does not read, and time to spare.
    const LIMIT: Duration = Duration::from_secs(40);
    let ended = host::wait_within(LIMIT, || node.workers().is_empty().then_some(()));
    assert!(ended.is_some(), "the serving process has not ended: {}", node.log());
}

#[test]
fn a_neighbour_passes_an_image_on_and_ends_when_it_is_not_asked() {
    let site = Site::new(2, "");
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
    assert!(find(&site.nodes[1], &name).is_some());
    site.nodes.iter().for_each(wait_until_idle);
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
    assert!(sent * 10 <= size * 12, "{sent} of {size} bytes");
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
        state.ends_with('f') && parts.join(&part).metadata().is_ok_and(|about| about.len() > 1_000_000)
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
    assert!(sent * 10 <= size * 14, "{sent} of {size} bytes");
    site.nodes[killed].restart();
    pull_on(&site.nodes.iter().collect::<Vec<_>>(), &name);
    site.stop();
}

/// A daemon that is killed while its worker serves: its port is free for the next one.
#[test]
fn the_next_daemon_serves_after_a_kill() {
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
fn other_clients_of_registries_read_by_digest_only() {
    let port = ports(1)[0];
    let node = node(config(Some(port), &[], ""));
    let registry = Registry::start(node.folder());
    let image = image(&node, &[100_000], 60);
    let manifest = registry.push(&image, "site", "1");
    pull_on(&[&node], &registry.name("site", "1"));
    let get =
        |method: &str, path: &str| http::request(local(port), method, path, "", b"").expect("an answer");
    let (head, body) = get("GET", &format!("/v2/any/name/manifests/{manifest}"));
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
fn bad_clients_of_a_serving_node_end() {
    let port = ports(1)[0];
    let node = node(config(Some(port), &[], ""));
    let registry = Registry::start(node.folder());
    let image = image(&node, &[8_000_000], 70);
    registry.push(&image, "site", "1");
    pull_on(&[&node], &registry.name("site", "1"));
    let mut silent: Vec<TcpStream> =
        (0..100).map(|_| http::connect(local(port)).expect("a connection")).collect();
    // The first ones are served; the others are refused at once.
    let mut text = String::new();
    silent[99].read_to_string(&mut text).expect("an answer");
    assert!(text.starts_with("HTTP/1.1 503"), "{text}");
    let begun = Instant::now();
    let ended = silent.iter_mut().take(10).all(|client| matches!(client.read(&mut [0]), Ok(0) | Err(_)));
    assert!(ended && begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    drop(silent);
    // One that requests a blob and reads nothing of it, and one that goes away.
    let path = format!("/v2/site/blobs/{}", digest(&image.layers[1].blob));
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
    let node = node(config(Some(port), &[], ""));
    let registry = Registry::start(node.folder());
    let image = image(&node, &[2_000_000], 80);
    registry.push(&image, "site", "1");
    let line = Line::new(500_000.0);
    let proxy = Faulty::start(registry.address(), move |_, _| Fault::Over(line.clone()));
    let layer = &image.layers[1];
    let path = format!("/v2/site/blobs/{}", digest(&layer.blob));
    std::thread::scope(|scope| {
        let pulled = scope.spawn(|| node.pull_image(pull(&proxy.name("site", "1"))));
        let state = wait_for("the layer is downloaded", || {
            let (head, _) = http::request(local(port), "HEAD", &path, "", b"").ok()?;
            head.get("coracle-state").filter(|state| state.starts_with("fetching")).map(str::to_owned)
        });
        let had: u64 = state.trim_start_matches("fetching ").parse().expect("a number");
        assert!(had < layer.blob.len() as u64, "{state}");
        let (head, body) = http::request(local(port), "GET", &path, "", b"").expect("an answer");
        assert_eq!(head.second(), "200");
        assert!(body == layer.blob, "{} of {} bytes", body.len(), layer.blob.len());
        pulled.join().expect("no panic").expect("the pull");
    });
    node.stop();
}

#[test]
fn a_tag_is_resolved_by_neighbours_only_if_the_configuration_says_so() {
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
    strict.pull_image(pull(&by_digest)).expect("content with a known digest");
    strict.stop();
    let trusting = node(config(None, &[local(ports[0])], &format!("offline = \"neighbours\"\n{short}")));
    trusting.pull_image(pull(&name)).expect("the neighbour's tag");
    assert_eq!(find(&trusting, &name).expect("the image").id, image.id());
    trusting.stop();
    first.stop();
}

#[test]
fn serving_everyone_has_to_be_said() {
    let node = Node::start();
    for (config, expected) in [
        ("listen = \"0.0.0.0:5000\"", Some("would give everyone who can reach it all images")),
        ("listen = \"0.0.0.0:5000\"\nopen = true", None),
        ("listen = \"127.0.0.1:5000\"", None),
        ("listen = \"0.0.0.0:5000\"\nkey_file = \"/etc/key\"", None),
        ("listen = \"0.0.0.0:5000\"\nkey_file = \"/etc/key\"\nopen = true", Some("remove key_file or open")),
        ("listen = \"127.0.0.1:0\"", Some("listen needs a port")),
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
