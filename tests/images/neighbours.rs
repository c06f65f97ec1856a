//! Neighbours that misbehave: they lie, stall, send other data, or end. Each pull has the right image, and its bytes come from the
//! registry as far as no neighbour has sent them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coracle_tests::fault::{Fault, Faulty, Hole};
use coracle_tests::http::Head;
use coracle_tests::image::Image;
use coracle_tests::layer::digest;
use coracle_tests::node::Node;
use coracle_tests::registry::Registry;
use coracle_tests::request::pull;
use coracle_tests::site::{config, image, local, ports, size};

use crate::find;
use crate::mirror::{logged, node, pull_on, sent};

/// Pulls an image that a neighbour has, through a proxy of the neighbour with these faults in its answers to GET; returns the bytes
/// of the large layer that came from the neighbour, and the duration.
fn pull_past(
    seed: u64,
    plan: impl Fn(&Head, usize, &[u8]) -> Fault + Send + Sync + 'static,
) -> (u64, Duration) {
    let port = ports(1)[0];
    let honest = node(config(Some(port), &[], "open = true"));
    let registry = Registry::start(honest.folder());
    let image = image(&honest, &[1_000_000], seed);
    registry.push(&image, "site", "1");
    let proxy = Faulty::start(registry.address(), |_, _| Fault::None);
    let name = proxy.name("site", "1");
    pull_on(&[&honest], &name);
    let before = sent(&proxy, &image);
    assert_eq!(before, size(&image));
    let (large, other) = (image.layers[1].blob.clone(), image.layers[0].blob.clone());
    let path = format!("/blobs/{}", digest(&large));
    let liar = Faulty::start(local(port), move |head, before| {
        match head.first.starts_with("GET") && head.second().contains(&path) {
            true => plan(head, before, &other),
            false => Fault::None,
        }
    });
    let node = node(config(None, &[liar.address()], "[registry]\nrate_window = \"2s\"\n"));
    let begun = Instant::now();
    pull_on(&[&node], &name);
    let took = begun.elapsed();
    assert!(find(&node, &name).is_some_and(|found| found.id == image.id()));
    assert!(!liar.blob(&digest(&large)).is_empty(), "the neighbour was asked");
    let of_large = logged(&node, "neighbours").saturating_sub(image.layers[0].blob.len() as u64);
    let fetched = sent(&proxy, &image) - before;
    // Bytes that were wrong are among those of the neighbour.
    let is_wrong = node.log().contains("its content has digest");
    let needed = (large.len() as u64).saturating_sub(if is_wrong { 0 } else { of_large });
    assert!(fetched >= needed, "{fetched} and {of_large}");
    node.stop();
    honest.stop();
    (of_large, took)
}

#[test]
fn changed_bytes_are_found_and_downloaded_from_the_registry() {
    let (of_neighbour, took) = pull_past(1, |_, _, _| Fault::Flip);
    assert!(of_neighbour > 0, "the wrong bytes came from the neighbour");
    assert!(took < Duration::from_secs(30), "{took:?}");
}

#[test]
fn another_blob_is_refused() {
    let (_, took) = pull_past(2, |_, _, other| Fault::raw("200 OK", &[], other));
    assert!(took < Duration::from_secs(30), "{took:?}");
}

#[test]
fn another_range_is_refused() {
    let other_range = |_: &Head, _, other: &[u8]| {
        Fault::raw("206 Partial Content", &["Content-Range: bytes 7-99/100000"], &other[..93])
    };
    let (of_neighbour, took) = pull_past(3, other_range);
    assert_eq!(of_neighbour, 0);
    assert!(took < Duration::from_secs(30), "{took:?}");
}

#[test]
fn a_body_that_is_too_long_is_refused() {
    let (_, took) = pull_past(4, |_, _, _| Fault::Longer(1000));
    assert!(took < Duration::from_secs(30), "{took:?}");
}

/// The bytes before the end are kept: the next answer has the rest.
#[test]
fn an_early_end_is_resumed_at_the_neighbour() {
    let (of_neighbour, took) =
        pull_past(5, |_, before, _| if before < 2 { Fault::Cut(300_000) } else { Fault::None });
    assert!(of_neighbour >= 1_000_000, "{of_neighbour}");
    assert!(took < Duration::from_secs(30), "{took:?}");
}

#[test]
fn a_neighbour_that_sends_single_bytes_is_abandoned() {
    let (of_neighbour, took) = pull_past(6, |_, _, _| Fault::Cut(1));
    assert!(of_neighbour <= 10, "{of_neighbour}");
    assert!(took < Duration::from_secs(60), "{took:?}");
}

#[test]
fn a_neighbour_that_stalls_is_abandoned() {
    let (of_neighbour, took) =
        pull_past(7, |_, before, _| Fault::Stall(if before == 0 { 200_000 } else { 0 }));
    assert!((200_000..1_000_000).contains(&of_neighbour), "{of_neighbour}");
    assert!(took < Duration::from_secs(90), "{took:?}");
}

/// An answer that is encoded, or has no length, could continue for ever without a byte of the blob.
#[test]
fn encoded_answers_and_those_without_a_length_are_refused() {
    let raw = |fields: &str, body: &[u8]| {
        let head = format!("HTTP/1.1 200 OK\r\n{fields}Connection: close\r\n\r\n");
        Fault::Raw([head.as_bytes(), body].concat())
    };
    let gzip = b"\x1f\x8b\x08\0\0\0\0\0\0\x03\0\0\0\xff\xff\0\0\0";
    for (seed, fault) in [
        (20, raw("Content-Encoding: gzip\r\nContent-Length: 18\r\n", gzip)),
        (21, raw("Transfer-Encoding: chunked\r\n", b"3\r\nabc\r\n0\r\nX: y\r\nX: y\r\n")),
        (22, raw("", b"abc")),
    ] {
        let (of_neighbour, took) = pull_past(seed, move |_, _, _| fault.clone());
        assert_eq!(of_neighbour, 0, "{seed}");
        assert!(took < Duration::from_secs(30), "{seed}: {took:?}");
    }
}

/// 1000 bytes in a second, for ever.
#[test]
fn a_neighbour_that_is_too_slow_is_abandoned() {
    let (of_neighbour, took) = pull_past(8, |_, _, _| Fault::Drip(100));
    assert!(of_neighbour < 100_000, "{of_neighbour}");
    assert!(took < Duration::from_secs(60), "{took:?}");
}

/// More than a slow uplink has for one layer, but less than the registry.
#[test]
fn a_neighbour_that_is_slower_than_a_registry_is_left_for_it() {
    let (of_neighbour, took) = pull_past(19, |_, _, _| Fault::Drip(600));
    assert!(of_neighbour < 100_000, "{of_neighbour}");
    assert!(took < Duration::from_secs(60), "{took:?}");
}

#[test]
fn errors_and_redirects_of_a_neighbour_lead_to_the_registry() {
    for (seed, fault) in [
        (9, Fault::Status(500, None)),
        (10, Fault::Status(429, Some(3600))),
        (11, Fault::Redirect("http://127.0.0.1:1/x".to_owned())),
        (12, Fault::Challenge),
        (13, Fault::Raw(b"nonsense\r\n\r\n".to_vec())),
    ] {
        let (of_neighbour, took) = pull_past(seed, move |_, _, _| fault.clone());
        assert_eq!(of_neighbour, 0, "{seed}");
        assert!(took < Duration::from_secs(30), "{seed}: {took:?}");
    }
}

/// Addresses at which no one answers cost a second in all, not one for each layer.
#[test]
fn neighbours_that_are_gone_cost_little_time() {
    let (hole, closed) = (Hole::dig(), local(ports(1)[0]));
    let node = node(config(None, &[hole.address(), closed], "[registry]\nconnections = 1\n"));
    let registry = Registry::start(node.folder());
    // With a second for each, in two rounds, these would be a minute.
    let image = image(&node, &[1000; 30], 14);
    registry.push(&image, "site", "1");
    let begun = Instant::now();
    pull_on(&[&node], &registry.name("site", "1"));
    assert!(begun.elapsed() < Duration::from_secs(45), "{:?}", begun.elapsed());
    assert_eq!(logged(&node, "neighbours"), 0);
    node.stop();
}

/// A site with a node that has an image, a proxy of it that changes bytes while `lies`, and a proxy of the registry.
struct Liars {
    honest: Node,
    image: Image,
    liar: Faulty,
    lies: Arc<AtomicBool>,
    proxy: Faulty,
    _registry: Registry,
}

impl Liars {
    fn new(
        layers: &[usize],
        seed: u64,
        plan: impl Fn(&Head, usize) -> Fault + Send + Sync + 'static,
    ) -> Liars {
        let port = ports(1)[0];
        let honest = node(config(Some(port), &[], "open = true"));
        let registry = Registry::start(honest.folder());
        let image = image(&honest, layers, seed);
        registry.push(&image, "site", "1");
        let lies = Arc::new(AtomicBool::new(true));
        let of_liar = lies.clone();
        let liar = Faulty::start(local(port), move |head, _| match of_liar.load(Ordering::Relaxed) {
            false => Fault::Status(404, None),
            true if head.first.starts_with("GET") => Fault::Flip,
            true => Fault::None,
        });
        pull_on(&[&honest], &registry.name("site", "1"));
        let proxy = Faulty::start(registry.address(), plan);
        Liars { honest, image, liar, lies, proxy, _registry: registry }
    }
}

#[test]
fn wrong_bytes_of_a_neighbour_discard_none_of_the_registry() {
    /// Number of bytes of the registry that are there before the neighbour lies.
    const FIRST: u64 = 600_000;
    let is_down = Arc::new(AtomicBool::new(true));
    let down = is_down.clone();
    let site = Liars::new(&[1_000_000], 15, move |head, before| {
        match down.load(Ordering::Relaxed) && head.second().contains("/blobs/") {
            true if before == 0 => Fault::Cut(FIRST),
            true => Fault::Status(404, None),
            false => Fault::None,
        }
    });
    site.lies.store(false, Ordering::Relaxed);
    let node = node(config(None, &[site.liar.address()], "[registry]\nconnections = 1\n"));
    let name = site.proxy.name("site", "1");
    // The config and the layer of the probe are shorter.
    node.pull_image(pull(&name)).expect_err("the registry has only a part of the layer");
    let large = digest(&site.image.layers[1].blob);
    assert_eq!(site.proxy.blob_bytes(&large), FIRST);
    site.lies.store(true, Ordering::Relaxed);
    is_down.store(false, Ordering::Relaxed);
    pull_on(&[&node], &name);
    assert!(!site.liar.blob(&large).is_empty(), "the neighbour was asked");
    assert_eq!(site.proxy.blob_bytes(&large), site.image.layers[1].blob.len() as u64);
    node.stop();
    site.honest.stop();
}

#[test]
fn a_neighbour_that_lies_is_not_asked_for_other_layers() {
    let site = Liars::new(&[200_000, 200_000, 200_000], 16, |_, _| Fault::None);
    let node = node(config(None, &[site.liar.address()], "[registry]\nconnections = 1\n"));
    pull_on(&[&node], &site.proxy.name("site", "1"));
    let asked = site.liar.served().iter().filter(|served| served.head.first.starts_with("GET")).count();
    assert_eq!(asked, 1, "{:?}", site.liar.served());
    node.stop();
    site.honest.stop();
}
