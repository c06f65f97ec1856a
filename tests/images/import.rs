//! `coracle image import`: archives of docker save and OCI tools, compressed or not; the resulting list; and
//! the built-in sandbox image.

use coracle_tests::cri::proto::{ListImagesRequest, RemoveImageRequest};
use coracle_tests::image::{Image, probe_entries};
use coracle_tests::layer::{Compression, pack};
use coracle_tests::node::Node;
use coracle_tests::request::image_spec;

use crate::{find, listed};

#[test]
fn both_archive_formats_are_imported_plain_and_compressed() {
    let node = Node::start();
    let plain =
        Image::probe(&node.probe(), "unused").repacked(&probe_entries(&node.probe()), Compression::Plain);
    for (index, packing) in [Compression::Plain, Compression::Gzip, Compression::Zstd].into_iter().enumerate()
    {
        let oci = format!("localhost/oci:{index}");
        let docker = [format!("localhost/docker:{index}"), format!("localhost/also:{index}")];
        let names = docker.each_ref().map(String::as_str);
        for archive in [plain.oci_archive(&oci), plain.docker_archive(&names)] {
            node.try_import(&pack(&archive, packing)).unwrap_or_else(|error| panic!("{packing:?}: {error}"));
        }
        for name in names.into_iter().chain([oci.as_str()]) {
            assert_eq!(find(&node, name).unwrap_or_else(|| panic!("{name} is there")).id, plain.id());
        }
    }
    assert_eq!(listed(&node).len(), 1, "one image, nine names");
    assert_eq!(node.once("localhost/also:1", &["true"], |_| ()).1.exit_code, 0);
    let list = node.image_command(&["list"]);
    assert!(String::from_utf8_lossy(&list.stdout).contains("localhost/docker:2"));
    node.stop();
}

#[test]
fn an_imported_image_survives_a_restart_and_invalid_archives_are_refused() {
    let mut node = Node::start();
    let name = node.import_probe();
    let before = listed(&node);
    node.restart();
    assert_eq!(listed(&node), before);
    for rubbish in [&b""[..], b"rubbish", &[0; 10_240]] {
        let error = node.try_import(rubbish).expect_err("no archive");
        assert_eq!(error.matches(".tar: ").count(), 1, "the file is named once: {error}");
    }
    assert!(find(&node, &name).is_some());
    node.stop();
}

#[test]
fn the_sandbox_image_is_pinned_and_stays() {
    let node = Node::start();
    let images = node.list_images(ListImagesRequest::default()).expect("list").images;
    let pinned: Vec<_> = images.into_iter().filter(|image| image.pinned).collect();
    assert_eq!(pinned.len(), 1, "{pinned:?}");
    assert!(pinned[0].size > 0 && pinned[0].id.starts_with("sha256:"));
    let request = RemoveImageRequest { image: Some(image_spec(&pinned[0].id)) };
    // Refused or without effect: it still exists afterwards.
    let _ = node.remove_image(request);
    assert!(find(&node, &pinned[0].id).is_some());
    node.stop();
}
