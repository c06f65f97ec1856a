//! Unreliable networks: interrupted, slow, silent and refused connections. Each pull succeeds in the end
//! without downloading a byte twice, or fails with a specific error.

use std::time::{Duration, Instant};

use coracle_tests::fault::{Fault, Faulty, Hole};
use coracle_tests::host::{self, wait_until, wait_within};
use coracle_tests::http::Head;
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer, noise};
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::Registry;
use coracle_tests::request::pull;

use crate::{find, listed};

/// The probe's image with an additional layer of random bytes, whose blob is affected by the faults.
pub(crate) fn big(node: &Node, bytes: usize, seed: u64) -> (Image, String, u64) {
    let layer = Layer::new(&[Entry::file("noise", &noise(bytes, seed))], Compression::Gzip);
    let (digest, size) = (coracle_tests::layer::digest(&layer.blob), layer.blob.len() as u64);
    (Image::probe(&node.probe(), "big").plus(layer), digest, size)
}

/// A plan that affects one blob only.
pub(crate) fn only(
    digest: &str,
    plan: impl Fn(usize) -> Fault + Send + Sync + 'static,
) -> impl Fn(&Head, usize) -> Fault + Send + Sync + 'static {
    let path = format!("/blobs/{digest}");
    move |head, before| if head.second().contains(&path) { plan(before) } else { Fault::None }
}

fn ranges(faulty: &Faulty, digest: &str) -> Vec<String> {
    let range = |served: &coracle_tests::fault::Served| served.head.get("range").unwrap_or("-").to_owned();
    faulty.blob(digest).iter().map(range).collect()
}

#[test]
fn interrupted_downloads_resume_without_repeated_bytes() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let (image, digest, size) = big(&node, 1_000_000, 1);
    registry.push(&image, "cut", "1");
    // An interruption after few bytes causes a delay; the others are resumed at once.
    let cuts = [Fault::Cut(300_000), Fault::Cut(10), Fault::Cut(0), Fault::Cut(200_000)];
    let proxy = Faulty::start(
        registry.address(),
        only(&digest, move |before| cuts.get(before).cloned().unwrap_or(Fault::None)),
    );
    node.pull_image(pull(&proxy.name("cut", "1"))).expect("it gets through");
    assert_eq!(
        ranges(&proxy, &digest),
        ["-", "bytes=300000-", "bytes=300010-", "bytes=300010-", "bytes=500010-"]
    );
    assert_eq!(proxy.blob_bytes(&digest), size, "each byte once");
    assert_eq!(listed(&node).len(), 1);
    node.stop();
}

#[test]
fn temporary_failures_are_retried_after_a_delay() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let (image, digest, size) = big(&node, 100_000, 2);
    registry.push(&image, "busy", "1");
    let faults = [Fault::Status(429, Some(2)), Fault::Status(500, None), Fault::Status(503, None)];
    let proxy = Faulty::start(
        registry.address(),
        only(&digest, move |before| faults.get(before).cloned().unwrap_or(Fault::None)),
    );
    let begun = Instant::now();
    node.pull_image(pull(&proxy.name("busy", "1"))).expect("it gets through");
    assert!(begun.elapsed() >= Duration::from_secs(2), "the registry asked for two seconds");
    assert_eq!((proxy.blob(&digest).len(), proxy.blob_bytes(&digest)), (4, size));

    // A delay that is too long, and one that never ends.
    let proxy = Faulty::start(registry.address(), |_, _| Fault::Status(429, Some(3600)));
    let refused = node.pull_image(pull(&proxy.name("busy", "1"))).expect_err("an hour");
    assert!(refused.message().contains("toomanyrequests") && refused.message().contains("3600"), "{refused}");
    assert_eq!(proxy.served().len(), 1);
    let proxy = Faulty::start(registry.address(), |_, _| Fault::Status(500, None));
    let refused = node.pull_image(pull(&proxy.name("busy", "1"))).expect_err("never");
    assert!(refused.message().starts_with("RegistryUnavailable"), "{refused}");
    assert_eq!(proxy.served().len(), 5, "tries are bounded");
    node.stop();
}

#[test]
fn the_next_mirror_resumes_where_the_first_one_stopped() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let (image, digest, size) = big(&node, 1_000_000, 3);
    registry.push(&image, "mirrored", "1");
    let first = Faulty::start(
        registry.address(),
        only(&digest, |before| if before == 0 { Fault::Cut(400_000) } else { Fault::Status(500, None) }),
    );
    let second = Faulty::start(registry.address(), |_, _| Fault::None);
    write_mirrors(&node, "edge.invalid", &[&first, &second]);
    node.pull_image(pull("edge.invalid/mirrored:1")).expect("it gets through");
    assert_eq!(ranges(&second, &digest), ["bytes=400000-"]);
    assert_eq!(first.blob_bytes(&digest) + second.blob_bytes(&digest), size, "each byte once");
    node.stop();
}

#[test]
fn data_of_a_malicious_mirror_is_discarded() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let (image, digest, size) = big(&node, 200_000, 4);
    registry.push(&image, "lies", "1");
    for lie in [Fault::Flip, Fault::Longer(10)] {
        let liar = Faulty::start(registry.address(), {
            let lie = lie.clone();
            only(&digest, move |_| lie.clone())
        });
        let honest = Faulty::start(registry.address(), |_, _| Fault::None);
        write_mirrors(&node, "lies.invalid", &[&liar]);
        let refused = node.pull_image(pull("lies.invalid/lies:1")).expect_err("a lie");
        assert!(refused.message().contains(&digest), "{lie:?}: {refused}");
        assert!(listed(&node).is_empty(), "{lie:?}");
        write_mirrors(&node, "lies.invalid", &[&liar, &honest]);
        node.pull_image(pull("lies.invalid/lies:1")).unwrap_or_else(|error| panic!("{lie:?}: {error}"));
        assert_eq!(honest.blob_bytes(&digest), size, "{lie:?}: none of the lie is kept");
        remove(&node, "lies.invalid/lies:1");
    }
    node.stop();
}

/// An image in the registry, the digest and size of its big layer, and a proxy that blocks after 600 000
/// bytes of the first download.
fn stalls_once(node: &Node, registry: &Registry, name: &str) -> (Image, String, u64, Faulty) {
    let (image, digest, size) = big(node, 1_000_000, 5);
    registry.push(&image, name, "1");
    let stall = only(&digest, |before| if before == 0 { Fault::Stall(600_000) } else { Fault::None });
    let proxy = Faulty::start(registry.address(), stall);
    (image, digest, size, proxy)
}

#[test]
fn a_pull_runs_with_background_priority() {
    let mut node = Node::start();
    let registry = Registry::start(node.folder());
    let (_, digest, _, proxy) = stalls_once(&node, &registry, "behind");
    let client = node.another();
    std::thread::scope(|scope| {
        let name = proxy.name("behind", "1");
        scope.spawn(move || client.pull_image(pull(&name)).expect_err("its daemon is killed"));
        wait_until("the part is there", || part_bytes(&node, &digest) == 600_000);
        let worker = node.workers().first().expect("it pulls").pid;
        let scheduling = host::scheduling(worker);
        // SCHED_BATCH, nice 10, and the longest slice, so that any process that wakes up preempts it.
        assert!(scheduling.contains("policy 3\nprio 130\n"), "{scheduling}");
        assert!(!scheduling.contains("slice") || scheduling.contains("se.slice 100000000\n"), "{scheduling}");
        let all = host::processors(node.pid());
        assert_eq!(host::processors(worker), if all > 1 { all - 1 } else { all });
        node.kill9();
    });
    wait_until("the worker is gone with its daemon", || node.workers().is_empty());
    node.launch();
    node.stop();
}

#[test]
fn a_part_survives_the_daemon_and_its_worker() {
    let mut node = Node::start();
    let registry = Registry::start(node.folder());
    let (image, digest, size, proxy) = stalls_once(&node, &registry, "crash");
    let name = proxy.name("crash", "1");
    let client = node.another();
    std::thread::scope(|scope| {
        let name = &name;
        scope.spawn(move || client.pull_image(pull(name)).expect_err("its daemon is killed"));
        wait_until("the part is there", || part_bytes(&node, &digest) == 600_000);
        node.kill9();
    });
    wait_until("the worker is gone with its daemon", || node.workers().is_empty());
    node.launch();
    node.pull_image(pull(&name)).expect("it gets through");
    assert_eq!(ranges(&proxy, &digest), ["-", "bytes=600000-"]);
    assert_eq!(proxy.blob_bytes(&digest), size, "each byte once");
    // Also the parts of the layer that was complete.
    let small = &image.layers[0].blob;
    assert_eq!(proxy.blob_bytes(&coracle_tests::layer::digest(small)), small.len() as u64);
    let parts = std::fs::read_dir(node.root().join("images/parts")).expect("it lists").count();
    assert_eq!(parts, 0, "no part is of any more use");
    node.stop();
}

#[test]
fn a_damaged_part_is_downloaded_again() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let (image, digest, size) = big(&node, 500_000, 6);
    registry.push(&image, "damaged", "1");
    let proxy = Faulty::start(registry.address(), |_, _| Fault::None);
    std::fs::write(part(&node, &digest), vec![0; 100_000]).expect("the folder is there");
    node.pull_image(pull(&proxy.name("damaged", "1"))).expect("it gets through");
    assert_eq!(ranges(&proxy, &digest), ["bytes=100000-", "-"]);
    assert_eq!(proxy.blob_bytes(&digest), 2 * size - 100_000);
    node.stop();
}

#[test]
fn a_cancelled_pull_reports_progress_and_keeps_its_part() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let (image, digest, size) = big(&node, 1_000_000, 7);
    registry.push(&image, "cancelled", "1");
    let proxy = Faulty::start(
        registry.address(),
        only(&digest, |before| if before == 0 { Fault::Stall(700_000) } else { Fault::None }),
    );
    let name = proxy.name("cancelled", "1");
    let late = node.pull_image_within(pull(&name), Duration::from_secs(2));
    late.expect_err("it stalls");
    let shown = || String::from_utf8_lossy(&node.image_command(&["list", "--pulling"]).stdout).into_owned();
    wait_until("it is shown", || {
        let shown = shown();
        shown.starts_with(&format!("{name} ")) && shown.contains("MB, 1 of 2 layers, ")
    });
    wait_within(Duration::from_secs(60), || node.workers().is_empty().then_some(())).expect("it is aborted");
    assert_eq!(shown(), "");
    node.pull_image(pull(&name)).expect("it gets through");
    assert_eq!(ranges(&proxy, &digest), ["-", "bytes=700000-"]);
    assert_eq!(proxy.blob_bytes(&digest), size, "each byte once");
    assert!(node.log().contains("image pulled"), "the report is in the log");
    node.stop();
}

#[test]
fn a_transfer_below_the_minimum_rate_is_aborted_and_resumed() {
    let config = "[registry]\nrate_min = 100000\nrate_window = \"1s\"\n".to_owned();
    let node = Node::with(Options { config, ..Options::default() });
    let registry = Registry::start(node.folder());
    let (image, digest, size) = big(&node, 300_000, 8);
    registry.push(&image, "drip", "1");
    let proxy = Faulty::start(
        registry.address(),
        only(&digest, |before| if before == 0 { Fault::Drip(1000) } else { Fault::None }),
    );
    node.pull_image(pull(&proxy.name("drip", "1"))).expect("it gets through");
    let served = proxy.blob(&digest);
    assert_eq!(served.len(), 2, "{served:?}");
    // Data that was in transit when the client disconnected was sent but not read.
    assert!(served[0].bytes < 30_000 && proxy.blob_bytes(&digest) <= size + 5_000, "{served:?}");
    // A slow transfer is accepted, one below the minimum rate is not.
    let proxy = Faulty::start(registry.address(), only(&digest, |_| Fault::Drip(1000)));
    remove(&node, &find(&node, &listed(&node)[0].id).expect("it is there").id);
    let refused = node.pull_image(pull(&proxy.name("drip", "1"))).expect_err("for ever");
    assert!(refused.message().contains("too slow"), "{refused}");
    node.stop();
}

#[test]
fn each_step_of_a_connection_has_its_own_limit() {
    let config =
        "[registry]\nconnect_timeout = \"300ms\"\ntls_timeout = \"400ms\"\nfirst_byte_timeout = \"500ms\"\n";
    let node = Node::with(Options { config: config.into(), ..Options::default() });
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "limits"), "limits", "1");
    let hole = Hole::dig();
    // The kernel completes the connections, but no process accepts them.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let silent = listener.local_addr().expect("a bound address");
    for (url, words) in [
        (format!("http://{}", hole.address()), "no connection within 300ms"),
        (format!("https://{silent}"), "no TLS within 400ms"),
        (format!("http://{silent}"), "no answer in time"),
    ] {
        let yaml = format!("mirrors: {{limits.invalid: {{endpoint: [\"{url}\"]}}}}\n");
        std::fs::write(node.folder().join("registries.yaml"), yaml).expect("the node's registries");
        let refused = node.pull_image(pull("limits.invalid/limits:1")).expect_err("nobody answers");
        assert!(refused.message().contains(words), "{url}: {refused}");
        let yaml = format!(
            "mirrors: {{limits.invalid: {{endpoint: [\"{url}\", \"http://{}\"]}}}}\n",
            registry.address()
        );
        std::fs::write(node.folder().join("registries.yaml"), yaml).expect("the node's registries");
        node.pull_image(pull("limits.invalid/limits:1")).unwrap_or_else(|error| panic!("{url}: {error}"));
        remove(&node, "limits.invalid/limits:1");
    }
    node.stop();
}

#[test]
fn layers_are_downloaded_concurrently_up_to_the_configured_number() {
    let config = "[registry]\nconnections = 2\n".to_owned();
    let node = Node::with(Options { config, ..Options::default() });
    let registry = Registry::start(node.folder());
    let mut image = Image::probe(&node.probe(), "many");
    for seed in 0..5 {
        image = image.plus(Layer::new(&[Entry::file("noise", &noise(200_000, seed))], Compression::Gzip));
    }
    registry.push(&image, "many", "1");
    // Half a second for each of the five, so that they overlap.
    let proxy = Faulty::start(registry.address(), |head, _| match head.second().contains("/blobs/") {
        true => Fault::Drip(40_000),
        false => Fault::None,
    });
    node.pull_image(pull(&proxy.name("many", "1"))).expect("it gets through");
    assert_eq!(proxy.peak(), 2);
    node.stop();
}

fn write_mirrors(node: &Node, registry: &str, mirrors: &[&Faulty]) {
    let urls: Vec<String> = mirrors.iter().map(|mirror| format!("\"http://{}\"", mirror.address())).collect();
    let yaml = format!("mirrors:\n  {registry}:\n    endpoint: [{}]\n", urls.join(", "));
    std::fs::write(node.folder().join("registries.yaml"), yaml).expect("the node's registries");
}

fn part(node: &Node, digest: &str) -> std::path::PathBuf {
    node.root().join("images/parts").join(digest.trim_start_matches("sha256:"))
}

pub(crate) fn part_bytes(node: &Node, digest: &str) -> u64 {
    part(node, digest).metadata().map_or(0, |metadata| metadata.len())
}

pub(crate) fn remove(node: &Node, name: &str) {
    let image = Some(coracle_tests::request::image_spec(name));
    node.remove_image(coracle_tests::cri::proto::RemoveImageRequest { image }).expect("removed");
    assert!(find(node, name).is_none());
    wait_until("its layers are gone", || node.workers().is_empty());
}
