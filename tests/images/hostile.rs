//! Malicious images: wrong digests, sizes and paths. Each causes a specific error, the image is then absent,
//! and nothing outside of the layer's directory was changed.

use std::path::Path;

use coracle_tests::image::{Image, probe_entries};
use coracle_tests::layer::{Compression, Entry, Layer, packed};
use coracle_tests::node::Node;
use coracle_tests::registry::{Demand, Lie, Proxy, Registry};
use coracle_tests::request::pull;

use crate::{find, listed};

#[test]
fn blobs_with_a_wrong_digest_are_refused() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "honest"), "honest", "1");
    for lie in [Lie::Flip, Lie::Cut] {
        let proxy = Proxy::start(registry.address(), Demand::Nothing, lie);
        let name = proxy.name("honest", "1");
        let refused = node.pull_image(pull(&name)).expect_err("a lie");
        assert!(!refused.message().is_empty());
        if lie == Lie::Flip {
            assert!(refused.message().contains("sha256"), "names the digest: {refused}");
        }
        assert!(find(&node, &name).is_none() && listed(&node).is_empty(), "{lie:?}");
    }
    node.pull_image(pull(&registry.name("honest", "1"))).expect("the truth still works");
    node.stop();
}

#[test]
fn a_layer_with_a_wrong_diff_id_is_refused() {
    let node = Node::start();
    let mut image = Image::probe(&node.probe(), "inside");
    image.layers[0].diff_id = format!("sha256:{}", "0".repeat(64));
    node.try_import(&image.oci_archive("localhost/liar:1")).expect_err("a lie");
    assert!(listed(&node).is_empty());
    node.stop();
}

#[test]
fn truncated_layers_are_refused() {
    let node = Node::start();
    for packing in [Compression::Plain, Compression::Gzip, Compression::Zstd] {
        let whole = packed(&probe_entries(&node.probe()), packing);
        for bytes in [0, 10, whole.blob.len() / 2, whole.blob.len() - 600] {
            let image = Image::of(vec![whole.clone().truncated(bytes)]);
            node.try_import(&image.oci_archive("localhost/short:1")).expect_err("half a layer");
            assert!(listed(&node).is_empty(), "{packing:?} {bytes}");
        }
    }
    node.stop();
}

#[test]
fn paths_cannot_leave_the_layer() {
    let node = Node::start();
    let outside = format!("{}/escaped", node.folder().display());
    let up = format!("{}{outside}", "../".repeat(12).trim_end_matches('/'));
    let folder = node.folder().display().to_string();
    let cases: Vec<(&str, Vec<Entry>)> = vec![
        ("dots", vec![Entry::file(&up, b"x")]),
        ("inner dots", vec![Entry::directory("a", 0o755), Entry::file(&format!("a/{up}"), b"x")]),
        ("absolute", vec![Entry::file(&outside, b"x")]),
        ("symlink", vec![Entry::symlink("way", &folder), Entry::file("way/escaped", b"x")]),
        (
            "symlink up",
            vec![
                Entry::symlink("way", &format!("{}{folder}", "../".repeat(20).trim_end_matches('/'))),
                Entry::file("way/escaped", b"x"),
            ],
        ),
        ("hard link", vec![Entry::hard_link("passwd", "/etc/shadow")]),
        ("hard link up", vec![Entry::hard_link("passwd", "../../../../../../../../../../etc/shadow")]),
        ("whiteout up", vec![Entry::file(".wh...", b""), Entry::file("a/.wh...", b"")]),
    ];
    for (what, entries) in cases {
        let mut all = probe_entries(&node.probe());
        all.extend(entries);
        let image = Image::of(vec![Layer::new(&all, Compression::Gzip)])
            .with("Entrypoint", serde_json::json!(["/probe"]));
        let name = "localhost/escape:1";
        // Refusing it is correct, and so is keeping it within the layer, as chroot would.
        if node.try_import(&image.oci_archive(name)).is_ok() {
            let (text, _) = node.once(name, &["cat", "/passwd"], |_| ());
            assert!(!text.contains("root:"), "{what}: the host's shadow file is in the image");
            node.remove_image(coracle_tests::cri::proto::RemoveImageRequest {
                image: Some(coracle_tests::request::image_spec(name)),
            })
            .expect("remove");
        }
        assert!(!Path::new(&outside).exists(), "{what}: {outside} was written");
        assert!(node.root().exists() && node.socket().exists(), "{what}");
    }
    node.stop();
}

#[test]
fn a_device_node_gives_no_device() {
    let node = Node::start();
    let mut entries = probe_entries(&node.probe());
    entries.push(Entry::block_device("disk", 8, 0));
    let image = Image::of(vec![Layer::new(&entries, Compression::Gzip)])
        .with("Entrypoint", serde_json::json!(["/probe"]));
    if node.try_import(&image.oci_archive("localhost/device:1")).is_ok() {
        let (_, status) = node.once("localhost/device:1", &["cat", "/disk"], |_| ());
        assert_ne!(status.exit_code, 0, "a container reads a disk it was not given");
    }
    node.stop();
}

#[test]
fn decompression_bombs_stop_at_a_limit() {
    let node = Node::start();
    let sparse = Entry::file("sparse", b"").claiming(1 << 42);
    let huge = Image::of(vec![Layer::new(&[sparse], Compression::Gzip)]);
    node.try_import(&huge.oci_archive("localhost/huge:1")).expect_err("four tebibytes");
    assert!(listed(&node).is_empty());
    // The daemon's memory must not change: the bomb is unpacked by a worker with limits.
    let before = coracle_tests::host::anonymous_kib(node.pid());
    let bomb = Image::of(vec![Layer::bomb(256)]);
    let imported = node.try_import(&bomb.oci_archive("localhost/bomb:1"));
    if imported.is_ok() {
        assert_eq!(listed(&node).len(), 1, "within the limit, and then whole");
    }
    let after = coracle_tests::host::anonymous_kib(node.pid());
    assert!(after < before + 512, "the daemon grew from {before} to {after} KiB");
    node.stop();
}
