//! Names of layers, and limits of their disk usage: findings 17 and 20 of docs/results/0.1.0.md.

use std::collections::BTreeSet;
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use coracle_tests::fresh_disk::FreshDisk;
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::node::{Node, Options};
use coracle_tests::request;
use nix::sys::statvfs::statvfs;

use crate::listed;

/// Names below `layers/`, without the links.
fn layers(node: &Node) -> BTreeSet<String> {
    let entries = fs::read_dir(node.root().join("layers")).expect("the layers").flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name != "l" && !name.starts_with("tmp-")).collect()
}

/// All 256 bits of the chain ID, and mounts through short links. Regression: a name was the first 128 bits.
#[test]
fn layers_are_named_by_their_complete_chain_ids() {
    let node = Node::start();
    let image = Image::probe(&node.probe(), "whole")
        .plus(Layer::new(&[Entry::file("top", b"the top layer")], Compression::Gzip));
    node.try_import(&image.oci_archive("localhost/whole:1")).expect("import");
    let names = layers(&node);
    let lowest = image.layers[0].diff_id.trim_start_matches("sha256:").to_owned();
    assert!(names.contains(&lowest), "the lowest layer's chain ID is its diff ID: {names:?}");
    assert!(names.len() == 2 && names.iter().all(|name| name.len() == 64), "{names:?}");
    let (text, status) = node.once("localhost/whole:1", &["cat", "/top"], |_| ());
    assert_eq!((text.contains("the top layer"), status.exit_code), (true, 0), "{text}");
    for name in names {
        let link = node.root().join("layers/l").join(&name[..24]);
        assert_eq!(fs::read_link(link).expect("a link"), std::path::Path::new(&format!("../{name}")));
    }
    node.stop();
}

/// A link that leads to another layer, because the short names of two layers are equal. The container does
/// not use the wrong layer. A link to a removed layer is created again.
#[test]
fn a_mount_never_uses_another_layer() {
    let node = Node::start();
    for name in ["one", "two"] {
        let image = Image::probe(&node.probe(), name);
        node.try_import(&image.oci_archive(&format!("localhost/{name}:1"))).expect("import");
    }
    let names: Vec<String> = layers(&node).into_iter().collect();
    assert_eq!(names.len(), 2, "{names:?}");
    let links = node.root().join("layers/l");
    for (name, other) in [(&names[0], &names[1]), (&names[1], &names[0])] {
        std::os::unix::fs::symlink(format!("../{other}"), links.join(&name[..24])).expect("a link");
    }
    let pod = request::host_pod("wrong");
    let pod_id = node.run_pod(&pod);
    let config = request::container("one", "localhost/one:1", &["true"], &pod);
    let refused = node.create_container(request::create(&pod_id, &config, &pod)).expect_err("another layer");
    assert!(refused.message().contains("its short name is in use for"), "{refused}");
    node.remove_pod(&pod_id);
    for name in names {
        let link = links.join(&name[..24]);
        fs::remove_file(&link).expect("ours");
        std::os::unix::fs::symlink(format!("../{}", "0".repeat(64)), &link).expect("a link");
    }
    let (_, status) = node.once("localhost/one:1", &["true"], |_| ());
    assert_eq!(status.exit_code, 0);
    node.stop();
}

/// A gzip bomb of 256 MiB on a disk of 160 MiB. Regression: it filled the disk completely.
#[test]
fn a_decompression_bomb_leaves_the_reserve_of_the_disk() {
    let home = Node::start();
    let disk = FreshDisk::new(home.folder(), 160);
    let node = Node::with(Options { root: Some(disk.path().join("root")), ..Options::default() });
    let bomb = Layer::bomb(256);
    let diff_id = bomb.diff_id.clone();
    let archive = Image::of(vec![bomb]).oci_archive("localhost/bomb:1");
    let free = || {
        let room = statvfs(disk.path()).expect("a file system");
        (room.blocks_available() * room.fragment_size(), room.blocks() * room.fragment_size())
    };
    let (least, is_over) = (AtomicU64::new(u64::MAX), AtomicBool::new(false));
    let refused = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                least.fetch_min(free().0, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        let refused = node.try_import(&archive);
        is_over.store(true, Ordering::Relaxed);
        refused
    });
    let error = refused.expect_err("more than the disk has");
    let reserve = free().1 / 10;
    // Up to 4 MiB may be written between two checks, and as much is in pipes and buffers.
    let least = least.into_inner();
    assert!(least + (8 << 20) >= reserve, "{least} bytes were left of a reserve of {reserve}");
    for words in [diff_id.as_str(), "are reserved", "are free", &(16_u64 << 30).to_string()] {
        assert!(error.contains(words), "{words}: {error}");
    }
    assert!(listed(&node).is_empty());
    coracle_tests::host::wait_until("what was unpacked is gone", || free().0 > 2 * reserve);
    node.import_probe();
    node.stop();
    drop(disk);
    home.stop();
}

/// Regression: the limit was 64 GiB and could not be configured.
#[test]
fn the_size_of_layers_is_limited_by_the_configuration() {
    let node = Node::with(Options { config: "[image]\nlayer_mib_max = 16\n".into(), ..Options::default() });
    let bomb = |mebibytes| Image::of(vec![Layer::bomb(mebibytes)]).oci_archive("localhost/bomb:1");
    let error = node.try_import(&bomb(17)).expect_err("more than the bound");
    assert!(error.contains("the limit") && error.contains("layer "), "{error}");
    let two = Image::of(vec![Layer::new(&[Entry::file("a", &vec![7; 9 << 20])], Compression::Gzip); 1])
        .plus(Layer::new(&[Entry::file("b", &vec![8; 9 << 20])], Compression::Gzip));
    node.try_import(&two.oci_archive("localhost/two:1")).expect("each layer is within it");
    assert_eq!(listed(&node).len(), 1);
    node.stop();
}
