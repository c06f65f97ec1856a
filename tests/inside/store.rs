//! A node whose root is on the disk and whose state is not, as on any machine, and the images that the
//! harness prepared with their expected content.

use std::fs;
use std::path::{Path, PathBuf};

use coracle_tests::cri::proto::{ListImagesRequest, RemoveImageRequest};
use coracle_tests::layer::digest;
use coracle_tests::node::{Node, Options};
use coracle_tests::request::{image_spec, pull};

use crate::shelf;

/// Number of images that the harness creates; the first half is for imports, the other half for pulls.
pub(crate) const IMAGES: u64 = 4;

/// Default directory of images.
pub(crate) const ROOT: &str = "/var/lib/coracle";

/// Starts the node of this boot.
pub(crate) fn start() -> Node {
    let options = Options {
        root: Some(PathBuf::from(ROOT)),
        state: Some(PathBuf::from("/run/coracle-node")),
        ..Options::default()
    };
    Node::with(options)
}

/// Name of the image with this number.
pub(crate) fn name(number: u64) -> String {
    if number < IMAGES / 2 {
        format!("localhost/cargo:{number}")
    } else {
        format!("{}/cargo:{number}", shelf::ADDRESS)
    }
}

/// Imports or pulls the image with this number.
#[track_caller]
pub(crate) fn fetch(node: &Node, number: u64) {
    if number < IMAGES / 2 {
        let done = node.image_command(&["import", &format!("/opt/cargo/{number}.tar")]);
        assert!(done.status.success(), "import {number}: {}", String::from_utf8_lossy(&done.stderr));
    } else {
        node.pull_image(pull(&name(number))).unwrap_or_else(|error| panic!("pull {number}: {error}"));
    }
}

/// Removes the image with this number.
#[track_caller]
pub(crate) fn remove(node: &Node, number: u64) {
    let request = RemoveImageRequest { image: Some(image_spec(&name(number))) };
    node.remove_image(request).unwrap_or_else(|error| panic!("remove {number}: {error}"));
}

/// Numbers of the images that the daemon lists.
#[track_caller]
pub(crate) fn present(node: &Node) -> Vec<u64> {
    let images = node.list_images(ListImagesRequest::default()).expect("list").images;
    let tags: Vec<String> = images.into_iter().flat_map(|image| image.repo_tags).collect();
    (0..IMAGES).filter(|number| tags.contains(&name(*number))).collect()
}

/// Verifies that a container sees all files of the image with their content.
#[track_caller]
pub(crate) fn verify(node: &Node, number: u64) {
    let (found, status) = node.once(&name(number), &["hash", "/cargo"], |_| {});
    let packed = fs::read_to_string(format!("/opt/cargo/{number}.txt")).expect("what it must hold");
    assert_eq!((found.as_str(), status.exit_code), (packed.as_str(), 0), "image {number}");
}

/// Files in the store without any image.
pub(crate) fn leftovers() -> Vec<PathBuf> {
    let folders = ["images/blobs/sha256", "images/parts", "images/records", "images/users", "layers"];
    let entries = folders.iter().filter_map(|name| fs::read_dir(Path::new(ROOT).join(name)).ok());
    // The directory of mount links is created with the store and stays.
    let links = Path::new(ROOT).join("layers/l");
    entries.flatten().flatten().map(|entry| entry.path()).filter(|path| *path != links).collect()
}

/// Verifies the digests of all blobs in the store.
#[track_caller]
pub(crate) fn verify_blobs() {
    let entries = fs::read_dir(Path::new(ROOT).join("images/blobs/sha256"));
    for entry in entries.into_iter().flatten().flatten() {
        let name = format!("sha256:{}", entry.file_name().display());
        assert_eq!(digest(&fs::read(entry.path()).expect("a blob")), name);
    }
}
