//! Answers of registries that the RFCs of HTTP allow and that clients must understand: challenges in several fields,
//! relative redirects, redirected token services, encoded bodies, refused and short ranges, URLs of descriptors.

use std::io::Write;
use std::sync::Arc;

use coracle_tests::fault::{Fault, Faulty, Served};
use coracle_tests::http::Head;
use coracle_tests::image::{INDEX, Image, MANIFEST};
use coracle_tests::layer::{Compression, Entry, Layer, digest, noise};
use coracle_tests::node::Node;
use coracle_tests::registry::Registry;
use coracle_tests::request::pull;
use serde_json::json;

use crate::faults::{big, part_bytes, remove};

/// All documents and blobs of an image, as their paths at a registry end.
fn content(image: &Image, tag: &str) -> Arc<Vec<(String, Vec<u8>)>> {
    let mut content = vec![
        (format!("/manifests/{tag}"), image.manifest()),
        (format!("/blobs/{}", image.id()), image.config_blob()),
    ];
    content.extend(
        image.layers.iter().map(|layer| (format!("/blobs/{}", digest(&layer.blob)), layer.blob.clone())),
    );
    Arc::new(content)
}

fn find<'a>(content: &'a [(String, Vec<u8>)], head: &Head) -> Option<&'a [u8]> {
    let path = head.second().split('?').next().unwrap_or_default();
    content.iter().find(|(end, _)| path.ends_with(end)).map(|(_, bytes)| bytes.as_slice())
}

/// RFC 9110: 11.6.1 (several fields are one list), 10.2.2 (Location is a URI reference), 15.4 (redirects).
#[test]
fn challenges_and_redirects_of_all_forms_are_followed() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let image = Image::probe(&node.probe(), "forms");
    registry.push(&image, "x", "1");
    let all = content(&image, "1");
    let front = Faulty::start(registry.address(), move |head, _| {
        let path = head.second();
        let host = head.get("host").unwrap_or_default();
        if path.starts_with("/token?") {
            let moved = format!("Location: ../other/./service?{}", path.split_once('?').expect("a query").1);
            return Fault::raw("307 Temporary Redirect", &[&moved], b"");
        }
        if path.starts_with("/other/service?") {
            let is_asked = path.contains("scope=repository") && path.contains("service=s");
            let answer = if is_asked { &br#"{"token":"","access_token":"tok"}"#[..] } else { b"{}" };
            return Fault::raw("200 OK", &[], answer);
        }
        if path.starts_with("/store/") {
            return find(&all, head).map_or(Fault::Status(404, None), |blob| Fault::raw("200 OK", &[], blob));
        }
        if head.get("authorization") != Some("Bearer tok") {
            let bearer = format!("WWW-Authenticate: Bearer realm=\"http://{host}/token\",service=\"s\"");
            let fields =
                ["WWW-Authenticate: Negotiate YII==", "WWW-Authenticate: Basic realm=\"caf\u{e9}\"", &bearer];
            return Fault::raw("401 Unauthorized", &fields, b"{}");
        }
        match path.split_once("/blobs/") {
            // A path that is relative to that of the request, with bytes that a URL cannot have.
            Some((_, digest)) => Fault::Redirect(format!("../../../store/blobs/{digest}?sig=a|b \u{e9}")),
            None => Fault::None,
        }
    });
    let name = front.name("x", "1");
    node.pull_image(pull(&name)).unwrap_or_else(|error| panic!("{error}: {:#?}", front.served()));
    let stored = |served: &Served| served.head.second().starts_with("/store/blobs/sha256:");
    assert!(front.served().iter().filter(|served| stored(served)).count() >= 2);
    assert!(front.served().iter().all(|served| served.head.get("accept-encoding") == Some("identity")));
    node.stop();
}

/// A location without a scheme names another host; credentials stay here.
#[test]
fn a_location_may_have_a_host_without_a_scheme() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let image = Image::probe(&node.probe(), "host");
    registry.push(&image, "x", "1");
    let store = Faulty::start(registry.address(), |_, _| Fault::None);
    let to = store.address();
    let front = Faulty::start(registry.address(), move |head, _| match head.second().contains("/blobs/") {
        true => Fault::Redirect(format!("//{to}{}", head.second())),
        false => Fault::None,
    });
    node.pull_image(pull(&front.name("x", "1"))).expect("pull");
    assert_eq!(store.served().len(), 2, "the configuration and a layer");
    let odd = Faulty::start(registry.address(), |_, _| {
        Fault::raw("302 Found", &["Location: http:x?sig=secret"], b"")
    });
    let refused = node.pull_image(pull(&odd.name("x", "1"))).expect_err("no URL");
    assert!(refused.message().contains("a redirect to \"http:x\", which is no URL"), "{refused}");
    node.stop();
}

/// Go's client ends after ten requests (net/http, `defaultCheckRedirect`), and containerd with it; five redirects were the most.
#[test]
fn nine_redirects_in_a_row_are_followed() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "chain"), "x", "1");
    let front = Faulty::start(registry.address(), |head, _| {
        let (path, step) = head.second().split_once("?step=").unwrap_or((head.second(), "0"));
        match step.parse::<u32>().expect("a number") {
            step @ ..9 if path.contains("/blobs/") => Fault::Redirect(format!("{path}?step={}", step + 1)),
            _ => Fault::None,
        }
    });
    node.pull_image(pull(&front.name("x", "1"))).expect("pull");
    node.stop();
}

/// RFC 9110, section 12.5.3: identity is asked for; what is encoded all the same is decoded, as by containerd.
#[test]
fn encoded_bodies_are_decoded() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let image = Image::probe(&node.probe(), "encoded");
    registry.push(&image, "x", "1");
    let gzip = |bytes: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).expect("memory");
        encoder.finish().expect("memory")
    };
    let zlib = |bytes: &[u8]| {
        let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).expect("memory");
        encoder.finish().expect("memory")
    };
    type Encode = Box<dyn Fn(&[u8]) -> Vec<u8> + Send + Sync>;
    let codings: [(&str, Encode); 4] = [
        ("gzip", Box::new(gzip)),
        ("deflate", Box::new(zlib)),
        ("zstd", Box::new(|bytes| zstd::encode_all(bytes, 1).expect("memory"))),
        // A label of a store on what is not encoded any further.
        ("x-gzip", Box::new(<[u8]>::to_vec)),
    ];
    for (coding, encode) in codings {
        let all = content(&image, "1");
        let is_label = coding == "x-gzip";
        let front = Faulty::start(registry.address(), move |head, _| match find(&all, head) {
            Some(_) if is_label && head.second().contains("/manifests/") => Fault::None,
            Some(bytes) => {
                let label = format!("Content-Encoding: {coding}");
                let kind = format!("Content-Type: {MANIFEST}");
                Fault::raw("200 OK", &[&label, &kind], &encode(bytes))
            }
            None => Fault::None,
        });
        let name = front.name("x", "1");
        node.pull_image(pull(&name)).unwrap_or_else(|error| panic!("{coding}: {error}"));
        remove(&node, &name);
    }
    let odd =
        Faulty::start(registry.address(), |_, _| Fault::raw("200 OK", &["Content-Encoding: br"], b"{}"));
    let refused = node.pull_image(pull(&odd.name("x", "1"))).expect_err("brotli");
    assert!(refused.message().contains("Content-Encoding \"br\" is not supported"), "{refused}");
    node.stop();
}

/// The offset of a Range request.
fn offset(head: &Head) -> Option<usize> {
    head.get("range")?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
}

/// A range saves bytes where it works; what a registry answers to it must not keep an image from being pulled
/// (kubernetes/registry.k8s.io 333: 400 after an interrupted download).
#[test]
fn a_refused_range_is_followed_by_a_request_of_the_whole_blob() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let (image, big, size) = big(&node, 400_000, 21);
    registry.push(&image, "x", "1");
    let multipart =
        || Fault::raw("206 Partial Content", &["Content-Type: multipart/byteranges; boundary=b"], b"--b--");
    let elsewhere = || Fault::raw("206 Partial Content", &["Content-Range: bytes 0-9/400000"], &[0; 10]);
    let status = |status| move || Fault::Status(status, None);
    type Answer = Box<dyn Fn() -> Fault + Send + Sync>;
    let answers: [(&str, Answer); 8] = [
        ("400", Box::new(status(400))),
        ("403", Box::new(status(403))),
        ("404", Box::new(status(404))),
        ("405", Box::new(status(405))),
        ("416", Box::new(status(416))),
        ("501", Box::new(status(501))),
        ("multipart", Box::new(multipart)),
        ("another range", Box::new(elsewhere)),
    ];
    for (about, answer) in answers {
        let path = format!("/blobs/{big}");
        let front = Faulty::start(registry.address(), move |head, before| {
            match (head.second().contains(&path), offset(head)) {
                (true, Some(_)) => answer(),
                (true, None) if before == 0 => Fault::Cut(100_000),
                _ => Fault::None,
            }
        });
        let name = front.name("x", "1");
        node.pull_image(pull(&name)).unwrap_or_else(|error| panic!("{about}: {error}"));
        assert_eq!(front.blob_bytes(&big) - part_bytes_of(&front, &big), size + 100_000, "{about}");
        remove(&node, &name);
    }
    // While nothing is answered to a request without a range, the part stays.
    let path = format!("/blobs/{big}");
    let front = Faulty::start(registry.address(), move |head, before| {
        match (head.second().contains(&path), before) {
            (true, 0) if offset(head).is_none() => Fault::Cut(100_000),
            (true, _) => Fault::Status(403, None),
            _ => Fault::None,
        }
    });
    node.pull_image(pull(&front.name("x", "1"))).expect_err("denied");
    assert_eq!(part_bytes(&node, &big), 100_000);
    node.stop();
}

/// Number of bytes that were sent for ranges.
fn part_bytes_of(front: &Faulty, digest: &str) -> u64 {
    front
        .blob(digest)
        .iter()
        .filter(|served| served.head.get("range").is_some())
        .map(|served| served.bytes)
        .sum()
}

/// RFC 9110, section 15.3.7: a server may send less than was asked for.
#[test]
fn the_parts_of_a_short_range_are_put_together() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let (image, big, size) = big(&node, 400_000, 22);
    registry.push(&image, "x", "1");
    let all = content(&image, "1");
    let path = format!("/blobs/{big}");
    let front = Faulty::start(registry.address(), move |head, _| {
        match (find(&all, head).filter(|_| head.second().contains(&path)), offset(head)) {
            (Some(blob), Some(offset)) => {
                let end = blob.len().min(offset + 120_000);
                let range = format!("Content-Range: bytes {offset}-{}/{}", end - 1, blob.len());
                Fault::raw("206 Partial Content", &[&range], &blob[offset..end])
            }
            (Some(_), None) => Fault::Cut(100_000),
            (None, _) => Fault::None,
        }
    });
    node.pull_image(pull(&front.name("x", "1"))).expect("pull");
    let ranges: Vec<_> = front.blob(&big).iter().map(|served| offset(&served.head)).collect();
    assert_eq!(ranges, [None, Some(100_000), Some(220_000), Some(340_000)], "{size} bytes");
    node.stop();
}

/// Layers that must not be distributed are layers, and may be elsewhere (OCI image specification 1.1).
#[test]
fn a_layer_may_be_at_a_url_of_its_descriptor() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let layer = Layer::new(&[Entry::file("foreign", &noise(50_000, 23))], Compression::Gzip);
    let image = Image::probe(&node.probe(), "urls").plus(layer.clone());
    registry.push(&image, "x", "whole");
    let store = Faulty::start(registry.address(), {
        let blob = layer.blob.clone();
        move |head, _| match head.second() == "/files/layer?sig=secret" {
            true => Fault::raw("200 OK", &[], &blob),
            false => Fault::Status(404, None),
        }
    });
    let mut manifest: serde_json::Value = serde_json::from_slice(&image.manifest()).expect("JSON");
    let last = manifest["layers"].as_array_mut().and_then(|layers| layers.last_mut()).expect("a layer");
    last["mediaType"] = json!("application/vnd.oci.image.layer.nondistributable.v1.tar+gzip");
    let url = format!("http://{}/files/layer?sig=secret", store.address());
    last["urls"] = json!(["ftp://nowhere.invalid/x", format!("http://{}/absent", store.address()), url]);
    let manifest = manifest.to_string();
    let path = format!("/blobs/{}", digest(&layer.blob));
    let front = Faulty::start(registry.address(), move |head, _| {
        if head.second().contains("/manifests/") {
            return Fault::raw("200 OK", &[&format!("Content-Type: {MANIFEST}")], manifest.as_bytes());
        }
        if head.second().contains(&path) { Fault::Status(404, None) } else { Fault::None }
    });
    let name = front.name("x", "1");
    node.pull_image(pull(&name)).expect("pull");
    assert!(node.once(&name, &["stat", "/foreign"], |_| ()).0.contains("644"));
    assert!(store.served().iter().all(|served| served.head.get("authorization").is_none()));
    assert!(!node.log().contains("secret"));
    node.stop();
}

/// Checks digest, kind and size of documents as containerd does, which takes those of a tag from the header of the answer.
#[test]
fn a_document_that_is_not_as_stated_is_refused() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let image = Image::probe(&node.probe(), "stated");
    registry.push(&image, "x", "1");
    let (manifest, config) = (image.manifest(), image.id());
    let mut wrong_size: serde_json::Value = serde_json::from_slice(&manifest).expect("JSON");
    wrong_size["config"]["size"] = json!(5);
    let mut no_size = wrong_size.clone();
    no_size["config"]["size"] = json!(0);
    let mut no_layer: serde_json::Value = serde_json::from_slice(&manifest).expect("JSON");
    no_layer["layers"][0] = json!(null);
    let (right, zero) = (digest(&manifest), format!("sha256:{}", "0".repeat(64)));
    for (body, digest, kind, words) in [
        (manifest.clone(), right.as_str(), MANIFEST, ""),
        (manifest.clone(), "nonsense", "text/plain; charset=utf-8", ""),
        (manifest.clone(), &zero, MANIFEST, "its content has digest"),
        (manifest.clone(), &right, INDEX, "but it is an image"),
        (wrong_size.to_string().into_bytes(), "", MANIFEST, "but its descriptor says 5"),
        (no_size.to_string().into_bytes(), "", MANIFEST, "but its descriptor says 0"),
        (no_layer.to_string().into_bytes(), "", MANIFEST, "\"\" is not a sha256 digest"),
    ] {
        let fields = [format!("Docker-Content-Digest: {digest}"), format!("Content-Type: {kind}")];
        let front =
            Faulty::start(registry.address(), move |head, _| match head.second().contains("/manifests/") {
                true => Fault::raw("200 OK", &[&fields[0], &fields[1]], &body),
                false => Fault::None,
            });
        let name = front.name("x", "1");
        match (node.pull_image(pull(&name)), words) {
            (Ok(answer), "") => {
                assert_eq!(answer.image_ref, config);
                remove(&node, &name);
            }
            (Err(refused), words) if !words.is_empty() && refused.message().contains(words) => {}
            (got, _) => panic!("{kind} {words:?}: {got:?}"),
        }
    }
    node.stop();
}
