//! The store: what it says it uses, what it keeps, and how it is checked and mended.

use std::fs;
use std::path::Path;

use coracle_tests::cri::proto::{ImageFsInfoRequest, RemoveImageRequest};
use coracle_tests::host::wait_until;
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::node::Node;
use coracle_tests::registry::Registry;
use coracle_tests::request::{image_spec, pull};

/// What lies below a directory, counted here and not by the program under test; what goes meanwhile counts nothing.
fn counted(path: &Path) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    let Ok(about) = fs::symlink_metadata(path) else { return (0, 0) };
    let below = fs::read_dir(path).into_iter().flatten().flatten().map(|entry| counted(&entry.path()));
    below.fold((about.blocks() * 512, 1), |sum, one| (sum.0 + one.0, sum.1 + one.1))
}

/// Bytes and inodes are those of the disk, layers that images share counted once; a pull and a removal show soon.
#[test]
fn image_fs_info_is_true_to_the_byte() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let base = Image::probe(&node.probe(), "shared");
    let top = |text: &str| Layer::new(&[Entry::file("top", text.as_bytes())], Compression::Gzip);
    registry.push(&base.clone().plus(top("one")), "one", "1");
    registry.push(&base.plus(top("two")), "two", "1");
    let told = || {
        let info = node.image_fs_info(ImageFsInfoRequest {}).expect("info").image_filesystems.remove(0);
        assert!(info.timestamp > 0 && Path::new(&info.fs_id.expect("an id").mountpoint).is_dir());
        (info.used_bytes.expect("bytes").value, info.inodes_used.expect("inodes").value)
    };
    let there = || {
        let parts = ["images", "layers"].map(|name| counted(&node.root().join(name)));
        (parts[0].0 + parts[1].0, parts[0].1 + parts[1].1)
    };
    let agrees = |what: &str| {
        wait_until(what, || told() == there());
        told()
    };
    let empty = agrees("an empty store");
    node.pull_image(pull(&registry.name("one", "1"))).expect("pull");
    let one = agrees("one image");
    node.pull_image(pull(&registry.name("two", "1"))).expect("pull");
    let two = agrees("two images");
    assert!(
        one.0 > empty.0 + 100_000 && two.0 < one.0 + 100_000,
        "{empty:?} {one:?} {two:?}: the base is shared"
    );
    for name in ["one", "two"] {
        node.remove_image(RemoveImageRequest { image: Some(image_spec(&registry.name(name, "1"))) })
            .expect("remove");
    }
    let gone = agrees("nothing");
    assert!(gone.1 <= empty.1, "{empty:?} {gone:?}");
    node.stop();
}
