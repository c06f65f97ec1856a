//! Updates between releases whose tables have chunks of different average lengths: those of coracle-convert are short, those of
//! containers/storage and of layers without a table are not. What a file of the same path has is found although few chunks are equal.

use coracle_tests::converted::{Folder, run};
use coracle_tests::fault::{Fault, Faulty};
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer, digest, noise};
use coracle_tests::node::Node;
use coracle_tests::registry::Registry;
use coracle_tests::request::pull;
use coracle_tests::site::{config, ports};
use coracle_tests::update::{directory, image, release, tree, tree_of_whole};

use crate::convert::downloaded;
use crate::mirror;

/// How a layer was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Made {
    Gzip,
    ByContainersStorage,
    ByConvert,
}

impl Made {
    fn layer(self, entries: &[Entry]) -> Layer {
        match self {
            Self::Gzip => Layer::new(entries, Compression::Gzip),
            Self::ByContainersStorage => Layer::chunked(entries),
            Self::ByConvert => converted(&image(Layer::new(entries, Compression::Plain))),
        }
    }
}

/// The only layer of an image with the table of coracle-convert.
fn converted(image: &Image) -> Layer {
    Folder::new("lengths").convert(&image.oci_archive("localhost/app:1")).image(image).layers[0].clone()
}

/// Pulls a release and the next one, each from a repository; returns how many bytes of the second layer were sent, of how many.
fn update(node: &Node, registry: &Registry, layers: [&Layer; 2], repositories: [&str; 2]) -> (u64, u64) {
    let proxy = Faulty::start(registry.address(), |_, _| Fault::None);
    for ((layer, repository), tag) in layers.iter().zip(repositories).zip(["1", "2"]) {
        registry.push(&image((*layer).clone()), repository, tag);
        node.pull_image(pull(&proxy.name(repository, tag))).expect("pull");
    }
    let whole = tree_of_whole(&registry.name(repositories[1], "2"), layers[1]);
    assert_eq!(tree(&directory(node, layers[1])), whole);
    (proxy.blob_bytes(&digest(&layers[1].blob)), layers[1].blob.len() as u64)
}

/// The bytes that `diff` says will be downloaded.
fn said(layers: [&Layer; 2]) -> u64 {
    let folder = Folder::new("said");
    let paths = [("old", layers[0]), ("new", layers[1])].map(|(name, layer)| {
        folder.write(name, &image(layer.clone()).oci_archive("localhost/app:1")).display().to_string()
    });
    let output = run(&["diff", &paths[0], &paths[1]]);
    downloaded(&String::from_utf8_lossy(&output.stdout))
}

#[test]
fn an_update_to_chunks_of_another_length_downloads_what_changed() {
    let made = Node::start();
    let entries = [1, 2].map(|number| release(&made, number));
    for [old, new] in [
        [Made::Gzip, Made::ByConvert],
        [Made::ByContainersStorage, Made::ByConvert],
        [Made::ByConvert, Made::ByContainersStorage],
        [Made::ByConvert, Made::ByConvert],
    ] {
        let (node, registry) = (Node::start(), Registry::start(made.folder()));
        let layers = [old.layer(&entries[0]), new.layer(&entries[1])];
        let layers = [&layers[0], &layers[1]];
        let (sent, size) = update(&node, &registry, layers, ["app", "app"]);
        assert!(sent < size / 10, "{old:?} to {new:?}: {sent} of {size} bytes\n{}", node.log());
        assert_eq!(sent, said(layers), "{old:?} to {new:?}");
        assert!(!node.log().contains("index of layer"), "{}", node.log());
        node.stop();
    }
    made.stop();
}

/// Nodes that serve neighbours keep outlines, which have the chunks of the table, too: nothing else is found of another repository.
#[test]
fn the_chunks_of_an_outline_are_those_of_the_table() {
    let made = Node::start();
    let node = mirror::node(config(Some(ports(1)[0]), &[], "open = true"));
    let registry = Registry::start(made.folder());
    let layers = [1, 2].map(|number| Made::ByConvert.layer(&release(&made, number)));
    let (sent, size) = update(&node, &registry, [&layers[0], &layers[1]], ["app", "another"]);
    assert!(sent < size / 10, "{sent} of {size} bytes\n{}", node.log());
    node.stop();
    made.stop();
}

/// Less is downloaded of a long file in which little changed than with the chunks of containers/storage.
#[test]
fn short_chunks_download_less_of_a_long_file() {
    // Without programs, whose chunks depend on the profile that they are built with.
    let entries = [1, 2].map(|release| {
        let mut content = noise(3_000_000, 77);
        for place in content.chunks_mut(300_000) {
            place[150_000..150_100].fill(release);
        }
        vec![Entry::file("large", &content)]
    });
    let sent = [Made::ByContainersStorage, Made::ByConvert].map(|made| {
        let layers = [made.layer(&entries[0]), made.layer(&entries[1])];
        said([&layers[0], &layers[1]])
    });
    assert!(sent[1] < sent[0], "{sent:?}");
}
