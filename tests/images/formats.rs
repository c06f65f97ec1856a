//! Manifests and layers in the formats of various tools: Docker's and OCI's, with and without lazy pulling.
//! All are unpacked to the same files.

use coracle_tests::cri::proto::ImageStatusRequest;
use coracle_tests::fault::{Fault, Faulty};
use coracle_tests::image::{ARCHITECTURE, Image, probe_entries};
use coracle_tests::layer::{Compression, Entry, Layer, digest, pack, packed};
use coracle_tests::node::Node;
use coracle_tests::registry::Registry;
use coracle_tests::request::{image_spec, pull};
use serde_json::json;

/// The media types of Docker's schema 2, in the order of [`OCI`].
const DOCKER: [&str; 3] = [
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.container.image.v1+json",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
];
const OCI: [&str; 3] = [
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.oci.image.layer.v1.tar+gzip",
];
const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";

#[test]
fn manifests_and_manifest_lists_of_docker_are_pulled() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let image = Image::probe(&node.probe(), "docker");
    registry.push(&image, "docker", "oci");
    let mut manifest = String::from_utf8(image.manifest()).expect("JSON");
    for (oci, docker) in OCI.iter().zip(DOCKER) {
        manifest = manifest.replace(oci, docker);
    }
    let own = registry.push_manifest("docker", "1", DOCKER[0], manifest.as_bytes());
    let foreign = json!({
        "mediaType": DOCKER[0], "digest": digest(b"nowhere"), "size": 7,
        "platform": { "os": "windows", "architecture": ARCHITECTURE, "os.version": "10.0" },
    });
    let list = json!({
        "schemaVersion": 2, "mediaType": DOCKER_LIST,
        "manifests": [foreign, {
            "mediaType": DOCKER[0], "digest": own, "size": manifest.len(),
            "platform": { "os": "linux", "architecture": ARCHITECTURE },
        }],
    });
    // A registry checks that all images of a list exist; it does not check blobs.
    let list = list.to_string();
    registry.push_blob("docker", list.as_bytes());
    let front = Faulty::start(registry.address(), {
        let place = format!("/v2/docker/blobs/{}", digest(list.as_bytes()));
        move |head, _| match head.second().ends_with("/manifests/list") {
            true => Fault::Redirect(place.clone()),
            false => Fault::None,
        }
    });
    for name in [registry.name("docker", "1"), front.name("docker", "list")] {
        let answer = node.pull_image(pull(&name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(answer.image_ref, image.id(), "{name}");
        assert!(node.once(&name, &["see", "ids"], |_| ()).0.contains("ids Uid 0"), "{name}");
    }
    node.stop();
}

#[test]
fn schema_1_is_refused_with_an_error() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let old =
        json!({ "schemaVersion": 1, "name": "old", "tag": "1", "fsLayers": [], "history": [] }).to_string();
    registry.push_blob("old", old.as_bytes());
    let place = format!("/v2/old/blobs/{}", digest(old.as_bytes()));
    let front = Faulty::start(registry.address(), move |head, _| {
        if head.second().contains("/manifests/") { Fault::Redirect(place.clone()) } else { Fault::None }
    });
    let refused = node.pull_image(pull(&front.name("old", "1"))).expect_err("schema 1");
    assert!(refused.message().contains("Docker schema 1 is not supported"), "{refused}");
    node.stop();
}

#[test]
fn layers_for_lazy_pulling_are_unpacked_normally() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let mut entries = probe_entries(&node.probe());
    entries.push(Entry::file("marker", b"lazy\n"));
    // zstd:chunked without annotations: frames, and skippable frames (RFC 8878, section 3.1.2) before, between and after them.
    let mut chunked = packed(&entries, Compression::Zstd);
    let tar = Layer::new(&entries, Compression::Plain).blob;
    let skippable = |data: &[u8]| {
        let mut frame = vec![0x50, 0x2a, 0x4d, 0x18];
        frame.extend((data.len() as u32).to_le_bytes());
        frame.extend(data);
        frame
    };
    let pieces = tar.chunks(tar.len() / 3 + 1);
    chunked.blob = pieces
        .flat_map(|piece| [pack(piece, Compression::Zstd), skippable(b"a table of contents")].concat())
        .collect();
    for (tag, layer) in [("estargz", Layer::estargz(&entries)), ("chunked", chunked)] {
        let image = Image::of(vec![layer]).with("Entrypoint", json!(["/probe"]));
        registry.push(&image, "lazy", tag);
        let name = registry.name("lazy", tag);
        node.pull_image(pull(&name)).unwrap_or_else(|error| panic!("{tag}: {error}"));
        assert_eq!(node.once(&name, &["cat", "/marker"], |_| ()).0, "lazy\n", "{tag}");
    }
    node.stop();
}

#[test]
fn the_image_configuration_is_preserved() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let image = Image::probe(&node.probe(), "config")
        .with("User", json!("1000:2000"))
        .with("WorkingDir", json!("/tmp"))
        .with("StopSignal", json!("SIGUSR1"))
        .with("Volumes", json!({ "/data": {} }))
        .with("Labels", json!({ "boat": "coracle" }));
    registry.push(&image, "config", "1");
    let name = registry.name("config", "1");
    node.pull_image(pull(&name)).expect("pull");
    let request = ImageStatusRequest { image: Some(image_spec(&name)), verbose: true };
    let status = node.image_status(request).expect("status");
    assert_eq!(status.image.and_then(|image| image.uid).map(|uid| uid.value), Some(1000));
    let info: serde_json::Value = serde_json::from_str(&status.info["info"]).expect("JSON");
    let config = &info["imageSpec"]["config"];
    assert_eq!(config["Labels"]["boat"], "coracle");
    assert_eq!(config["StopSignal"], "SIGUSR1");
    assert_eq!(config["Volumes"], json!({ "/data": {} }));
    assert_eq!(config["Env"][0], "FROM_IMAGE=yes");
    let (text, _) = node.once(&name, &["see", "ids"], |_| ());
    assert!(text.contains("ids Uid 1000 ") && text.contains("ids Gid 2000 "), "{text}");
    node.stop();
}

/// Layers of Bazel and ko have entries for files only.
#[test]
fn a_layer_without_directory_entries_keeps_their_attributes() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let files = [Entry::file("home/alice/boat", b"small"), Entry::file("srv/www/index", b"new")];
    let image = Image::probe(&node.probe(), "bare").plus(Layer::new(&files, Compression::Gzip));
    registry.push(&image, "bare", "1");
    let name = registry.name("bare", "1");
    node.pull_image(pull(&name)).expect("pull");
    for (path, expected) in [("/home/alice", "750 1000 1000"), ("/srv/www", "755 0 0")] {
        let (text, _) = node.once(&name, &["stat", path], |_| ());
        assert!(text.contains(expected), "{path}: {text}");
    }
    let checked = node.image_command(&["check"]);
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    node.stop();
}
