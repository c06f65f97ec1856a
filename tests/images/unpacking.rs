//! Layers that are unpacked while their blobs are being downloaded: what is on disk in the middle, after the
//! download was refused, and after it was interrupted.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use coracle_tests::fault::{Fault, Faulty};
use coracle_tests::fresh_disk::FreshDisk;
use coracle_tests::host::wait_until;
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer, digest, noise};
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::Registry;
use coracle_tests::request::pull;

use crate::faults::{only, part_bytes};
use crate::{find, listed};

/// Number of bytes of the blob before the fault, enough for its first file.
const BEFORE_FAULT: u64 = 600_000;

/// An image whose layer of 1 MB begins with a small file; returns it with the digest of its blob.
fn image(node: &Node) -> (Image, String) {
    let entries = [Entry::file("first", b"unpacked early"), Entry::file("noise", &noise(1_000_000, 11))];
    let layer = Layer::new(&entries, Compression::Gzip);
    let blob = digest(&layer.blob);
    (Image::probe(&node.probe(), "early").plus(layer), blob)
}

/// Paths of the file `first` below the store's layers, and whether each is in a published layer.
fn first_files(node: &Node) -> Vec<(PathBuf, bool)> {
    let layers = std::fs::read_dir(node.root().join("layers")).expect("the store's layers");
    let names = layers.map(|entry| entry.expect("an entry").path());
    let is_published =
        |path: &PathBuf| !path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("tmp-"));
    names
        .map(|layer| (layer.join("first"), is_published(&layer)))
        .filter(|(path, _)| std::fs::read(path).is_ok_and(|bytes| bytes == b"unpacked early"))
        .collect()
}

#[test]
fn a_layer_is_unpacked_while_its_blob_is_downloaded() {
    let mut node = Node::start();
    let registry = Registry::start(node.folder());
    let (image, blob) = image(&node);
    registry.push(&image, "early", "1");
    let stall = only(&blob, |before| if before == 0 { Fault::Stall(BEFORE_FAULT) } else { Fault::None });
    let proxy = Faulty::start(registry.address(), stall);
    let name = proxy.name("early", "1");
    let client = node.another();
    std::thread::scope(|scope| {
        let name = &name;
        scope.spawn(move || client.pull_image(pull(name)).expect_err("its daemon is killed"));
        wait_until("the first file is unpacked", || !first_files(&node).is_empty());
        wait_until("the download has come to its fault", || part_bytes(&node, &blob) == BEFORE_FAULT);
        assert!(first_files(&node).iter().all(|(_, is_published)| !is_published), "{:?}", first_files(&node));
        assert!(find(&node, name).is_none());
        node.kill9();
    });
    wait_until("the worker is gone with its daemon", || node.workers().is_empty());
    node.launch();
    wait_until("the incomplete layer is removed", || first_files(&node).is_empty());
    node.pull_image(pull(&name)).expect("it gets through");
    assert_eq!(proxy.blob_bytes(&blob), image.layers[1].blob.len() as u64, "each byte once");
    assert!(matches!(first_files(&node)[..], [(_, true)]), "{:?}", first_files(&node));
    node.stop();
}

#[test]
fn a_layer_whose_blob_is_refused_is_removed() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let (image, blob) = image(&node);
    registry.push(&image, "refused", "1");
    // The last one is a connection that breaks, and a registry that then does not have the blob any more.
    for faults in [
        [Fault::Flip, Fault::Flip],
        [Fault::Longer(1), Fault::Longer(1)],
        [Fault::Cut(BEFORE_FAULT), Fault::Status(404, None)],
    ] {
        let plan = faults.clone();
        let proxy = Faulty::start(registry.address(), only(&blob, move |before| plan[before.min(1)].clone()));
        node.pull_image(pull(&proxy.name("refused", "1"))).expect_err("the blob is never right");
        assert!(listed(&node).is_empty(), "{faults:?}");
        wait_until("no layer is left of it", || node.workers().is_empty() && first_files(&node).is_empty());
    }
    node.stop();
}

/// A registry that answers a request for the rest with the whole blob, or with other bytes, makes the download
/// begin again; the layer has the bytes of the last attempt only.
#[test]
fn a_download_that_begins_again_is_unpacked_again() {
    let node = Node::start();
    let registry = Registry::start(node.folder());
    let (image, blob) = image(&node);
    registry.push(&image, "again", "1");
    let faults = [Fault::Flip, Fault::Cut(BEFORE_FAULT), Fault::Flip];
    let plan = only(&blob, move |before| faults.get(before).cloned().unwrap_or(Fault::None));
    let (liar, honest) =
        (Faulty::start(registry.address(), plan), Faulty::start(registry.address(), |_, _| Fault::None));
    let urls = [&liar, &honest].map(|mirror| format!("\"http://{}\"", mirror.address()));
    let yaml = format!("mirrors:\n  again.invalid:\n    endpoint: [{}]\n", urls.join(", "));
    std::fs::write(node.folder().join("registries.yaml"), yaml).expect("the node's registries");
    node.pull_image(pull("again.invalid/again:1")).expect("it gets through");
    assert!(matches!(first_files(&node)[..], [(_, true)]), "{:?}", first_files(&node));
    let published = first_files(&node).remove(0).0.with_file_name("noise");
    assert_eq!(std::fs::read(published).expect("the other file"), noise(1_000_000, 11));
    node.stop();
}

/// A mirror that answers each request for `blob` with `body`, whose last bytes take three seconds; other requests are
/// passed on to the registry. Ends with the test's process.
fn mirror_with_other_data(upstream: SocketAddr, blob: String, body: Vec<u8>) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let address = listener.local_addr().expect("a bound address");
    let answer = move |mut stream: TcpStream| -> std::io::Result<()> {
        let (mut head, mut byte) = (Vec::new(), [0]);
        while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte)? == 1 {
            head.push(byte[0]);
        }
        let head = String::from_utf8_lossy(&head).into_owned();
        if !(head.starts_with("GET") && head.contains(&format!("/blobs/{blob}"))) {
            let mut registry = TcpStream::connect(upstream)?;
            registry.write_all(head.replacen("\r\n", "\r\nConnection: close\r\n", 1).as_bytes())?;
            return std::io::copy(&mut registry, &mut stream).map(drop);
        }
        write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len())?;
        let (first, last) = body.split_at(body.len() - 1000);
        stream.write_all(first)?;
        for piece in last.chunks(100) {
            std::thread::sleep(Duration::from_millis(300));
            stream.write_all(piece)?;
        }
        Ok(())
    };
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let answer = answer.clone();
            // The worker closes its connections when it likes.
            std::thread::spawn(move || answer(stream));
        }
    });
    address
}

/// Checks that data of a bad mirror, which is unpacked before its digest is verified, does not fill the disk or end the pull.
#[test]
fn a_bomb_of_a_mirror_does_not_end_the_pull() {
    let home = Node::start();
    let disk = FreshDisk::new(home.folder(), 160);
    let node = Node::with(Options { root: Some(disk.path().join("root")), ..Options::default() });
    let registry = Registry::start(node.folder());
    let entries = [Entry::file("first", b"unpacked early"), Entry::file("noise", &noise(3_000_000, 11))];
    let layer = Layer::new(&entries, Compression::Gzip);
    let (blob, size) = (digest(&layer.blob), layer.blob.len());
    registry.push(&Image::probe(&node.probe(), "bombed").plus(layer), "bombed", "1");
    let mut bomb = Layer::bomb(256).blob;
    assert!(bomb.len() <= size, "{} {size}", bomb.len());
    // The length is that of the manifest.
    bomb.resize(size, 0);
    let bad = mirror_with_other_data(registry.address(), blob, bomb);
    let honest = Faulty::start(registry.address(), |_, _| Fault::None);
    let yaml = format!(
        "mirrors:\n  bombed.invalid:\n    endpoint: [\"http://{bad}\", \"http://{}\"]\n",
        honest.address()
    );
    std::fs::write(node.folder().join("registries.yaml"), yaml).expect("the node's registries");
    node.pull_image(pull("bombed.invalid/bombed:1")).expect("the second endpoint has the right blob");
    assert!(matches!(first_files(&node)[..], [(_, true)]), "{:?}", first_files(&node));
    node.stop();
    drop(disk);
    home.stop();
}
