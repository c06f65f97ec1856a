//! `coracle image take-over`: the store of a containerd 2.3.4 ([`coracle_tests::containerd`]), whole, incomplete,
//! damaged and in use; a daemon that is killed in the middle; a full disk.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Output;
use std::sync::atomic::{AtomicBool, Ordering};

use coracle_tests::containerd::Containerd;
use coracle_tests::cri::proto::ListImagesRequest;
use coracle_tests::fresh_disk::FreshDisk;
use coracle_tests::host::wait_until;
use coracle_tests::image::{Image, probe_entries};
use coracle_tests::layer::{Compression, Entry, Layer, digest, packed};
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::Registry;
use coracle_tests::request::pull;
use nix::sys::stat::Mode;

use crate::{find, listed};

fn take_over(node: &Node, from: &Path, more: &[&str]) -> Output {
    let from = from.to_str().expect("UTF-8");
    node.image_command(&[&["take-over", "--from", from], more].concat())
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.as_slice(), &output.stderr].concat()).into_owned()
}

#[track_caller]
fn succeeds(node: &Node, from: &Path, more: &[&str]) -> String {
    let output = take_over(node, from, more);
    assert!(output.status.success(), "{}", said(&output));
    said(&output)
}

/// An image of the probe's program with a layer that no other image has.
fn image(node: &Node, text: &str) -> Image {
    Image::probe(&node.probe(), text)
        .repacked(&probe_entries(&node.probe()), Compression::Gzip)
        .plus(packed(&[Entry::file("etc/mark", text.as_bytes())], Compression::Zstd))
}

/// Names of the directories and files below a directory of the store.
fn names(path: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(path).expect("a directory of the store").flatten();
    entries.map(|entry| entry.file_name().into_string().expect("UTF-8")).collect()
}

/// Fails if temporary data of workers remains; a worker may still be removing it.
#[track_caller]
fn no_rests(node: &Node) {
    wait_until("temporary data is removed", || {
        let layers = names(&node.root().join("layers"));
        !layers.iter().any(|name| name.starts_with("tmp-"))
            && names(&node.root().join("images/parts")).is_empty()
    });
}

/// Compares images from containerd's store, while it runs, with the same images from an archive and a registry.
#[test]
#[ignore = "needs containerd: make test-all PARTS=packaging"]
fn images_are_the_same_as_those_of_archives_and_pulls() {
    let (node, other) = (Node::start(), Node::start());
    let mut containerd = Containerd::start(node.folder());
    let registry = Registry::start(node.folder());
    let archived = image(&node, "archived");
    let archive = archived.oci_archive("localhost/archived:1");
    containerd.import(&archive);
    containerd.ctr(&["images", "label", "localhost/archived:1", "io.cri-containerd.pinned=pinned"]);
    let foreign = Image { architecture: "s390x".into(), ..image(&node, "foreign") };
    registry.push_index(&[foreign, image(&node, "pulled")], "pulled", "1");
    let pulled = registry.name("pulled", "1");
    containerd.cri().pull_image(pull(&pulled)).expect("containerd pulls");

    let before = names(&containerd.root());
    let shown = succeeds(&node, &containerd.root(), &["--dry-run"]);
    let would =
        |name: &str| shown.lines().any(|line| line.starts_with("would import ") && line.contains(name));
    assert!(would("localhost/archived:1") && would(&pulled) && shown.lines().count() == 2, "{shown}");
    assert!(listed(&node).is_empty());
    no_rests(&node);

    // containerd writes its metadata meanwhile.
    let is_over = AtomicBool::new(false);
    let text = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut count = 0;
            while !is_over.load(Ordering::Relaxed) {
                count += 1;
                containerd.ctr(&["images", "label", "localhost/archived:1", &format!("count={count}")]);
            }
            assert!(count > 1, "it wrote in between");
        });
        let text = succeeds(&node, &containerd.root(), &[]);
        is_over.store(true, Ordering::Relaxed);
        text
    });
    assert_eq!(text.lines().filter(|line| line.starts_with("imported ")).count(), 2, "{text}");
    assert_eq!(names(&containerd.root()), before);

    other.try_import(&archive).expect("the archive");
    other.pull_image(pull(&pulled)).expect("the registry");
    for name in ["localhost/archived:1", &pulled] {
        let (mut ours, theirs) =
            (find(&node, name).expect("taken over"), find(&other, name).expect("imported"));
        assert_eq!(ours.pinned, name.contains("archived"), "{ours:?}");
        ours.pinned = theirs.pinned;
        assert_eq!(ours, theirs);
        assert!(!ours.repo_digests.is_empty(), "{ours:?}");
    }
    for directory in ["layers", "images/blobs/sha256", "images/users"] {
        assert_eq!(names(&node.root().join(directory)), names(&other.root().join(directory)), "{directory}");
    }
    let check = node.image_command(&["check"]);
    assert!(check.status.success() && said(&check).matches("whole ").count() == 2, "{}", said(&check));

    // The store is no longer needed, and a container runs.
    containerd.terminate();
    let again = succeeds(&node, &containerd.root(), &[]);
    assert_eq!(again.lines().filter(|line| line.starts_with("present ")).count(), 2, "{again}");
    assert_eq!(node.log().matches("image imported from containerd").count(), 2, "no second import");
    drop(containerd);
    assert_eq!(node.once("localhost/archived:1", &["true"], |_| ()).1.exit_code, 0);
    no_rests(&node);
    node.stop();
    other.stop();
}

/// A name that an image of coracle has stays there, also when an older image of containerd has it.
#[test]
#[ignore = "needs containerd: make test-all PARTS=packaging"]
fn newer_images_keep_their_names_and_lost_names_come_back() {
    let node = Node::start();
    let mut containerd = Containerd::start(node.folder());
    let (old, new) = (image(&node, "old"), image(&node, "new"));
    containerd.import(&old.oci_archive("localhost/app:1"));
    containerd.ctr(&["images", "tag", "localhost/app:1", "localhost/app:old"]);
    containerd.terminate();
    node.try_import(&new.oci_archive("localhost/app:1")).expect("the newer image");
    succeeds(&node, &containerd.root(), &[]);
    assert_eq!(find(&node, "localhost/app:1").expect("the newer one").id, new.id());
    assert_eq!(find(&node, "localhost/app:old").expect("the older one").id, old.id());
    assert!(succeeds(&node, &containerd.root(), &[]).starts_with("present "));
    assert!(node.image_command(&["remove", "localhost/app:old"]).status.success());
    assert!(succeeds(&node, &containerd.root(), &[]).starts_with("imported "));
    assert_eq!(find(&node, "localhost/app:old").expect("it is back").id, old.id());
    node.stop();
}

#[test]
#[ignore = "needs containerd: make test-all PARTS=packaging"]
fn incomplete_and_damaged_images_are_named_and_the_others_are_taken() {
    let node = Node::start();
    let mut containerd = Containerd::start(node.folder());
    let kinds = ["whole", "no-layer", "no-config", "no-manifest", "short", "changed", "fifo", "link"];
    for kind in kinds {
        containerd.import(&image(&node, kind).oci_archive(&format!("localhost/{kind}:1")));
    }
    let foreign = Image { architecture: "s390x".into(), ..image(&node, "foreign") };
    let archive = node.folder().join("foreign.tar");
    fs::write(&archive, foreign.oci_archive("localhost/foreign:1")).expect("the archive");
    let archive = archive.to_str().expect("UTF-8");
    containerd.ctr(&["images", "import", "--no-unpack", "--all-platforms", archive]);
    containerd.terminate();
    let layer = |kind: &str| containerd.blob(&digest(&image(&node, kind).layers[1].blob));
    fs::remove_file(layer("no-layer")).expect("a layer");
    fs::remove_file(containerd.blob(&image(&node, "no-config").id())).expect("a config");
    fs::remove_file(containerd.blob(&digest(&image(&node, "no-manifest").manifest()))).expect("a manifest");
    let short = fs::read(layer("short")).expect("a layer");
    for (kind, content) in
        [("short", short[1..].to_vec()), ("changed", fs::read(layer("changed")).expect("it"))]
    {
        let mut content = content;
        *content.last_mut().expect("bytes") ^= 1;
        fs::remove_file(layer(kind)).expect("a layer");
        fs::write(layer(kind), content).expect("another one");
    }
    fs::remove_file(layer("fifo")).expect("a layer");
    nix::unistd::mkfifo(&layer("fifo"), Mode::from_bits_truncate(0o600)).expect("a FIFO");
    fs::remove_file(layer("link")).expect("a layer");
    std::os::unix::fs::symlink(layer("whole"), layer("link")).expect("a link");

    let output = take_over(&node, &containerd.root(), &[]);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    for (kind, expected) in [
        ("no-layer", "is missing in containerd's content store: containerd removes unpacked layers"),
        ("no-config", "config sha256:"),
        ("no-manifest", "manifest sha256:"),
        ("short", "bytes, not "),
        ("changed", "its content has digest"),
        ("fifo", "not a regular file"),
        ("link", ""),
    ] {
        let line = text.lines().find(|line| line.contains(&format!("image localhost/{kind}:1: ")));
        assert!(line.is_some_and(|line| line.contains(expected)), "{kind}: {expected}: {text}");
        assert!(find(&node, &format!("localhost/{kind}:1")).is_none());
    }
    assert!(
        text.contains("localhost/whole:1")
            && text.contains("localhost/foreign:1")
            && listed(&node).len() == 2,
        "{text}"
    );
    no_rests(&node);
    let shown = said(&take_over(&node, &containerd.root(), &["-n", "-o", "json"]));
    assert!(shown.contains("\"known\":true") && shown.contains("localhost/no-layer:1"), "{shown}");
    node.stop();
}

#[test]
#[ignore = "needs containerd: make test-all PARTS=packaging"]
fn a_directory_that_is_not_a_containerd_store_is_refused() {
    let node = Node::start();
    let mut containerd = Containerd::start(node.folder());
    containerd.import(&image(&node, "app").oci_archive("localhost/app:1"));
    containerd.terminate();
    let refused = |from: &Path, more: &[&str], expected: &str| {
        let output = take_over(&node, from, more);
        let text = said(&output);
        assert!(output.status.code() == Some(1) && text.contains(expected), "{expected}: {text}");
    };
    refused(&containerd.root(), &["--namespace", "moby"], "no namespace \"moby\"; there is: k8s.io");
    refused(node.folder(), &[], "this is not the root directory of a containerd");
    let metadata = containerd.root().join("io.containerd.metadata.v1.bolt/meta.db");
    let whole = fs::read(&metadata).expect("the metadata");
    for (bytes, expected) in [
        (whole[..whole.len().min(4096)].to_vec(), "truncated"),
        (Vec::new(), "no valid meta page"),
        (vec![0xff; 1 << 20], "not a file of bbolt"),
    ] {
        fs::write(&metadata, bytes).expect("another file");
        refused(&containerd.root(), &[], expected);
    }
    // Any byte of a real file.
    let mut refusals = 0;
    for at in (0..whole.len().min(64 << 10)).step_by(4099) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0xff;
        fs::write(&metadata, bytes).expect("a damaged file");
        refusals += usize::from(!take_over(&node, &containerd.root(), &["-n"]).status.success());
    }
    assert!(refusals < 17, "most bytes of the file are not those of images");
    fs::remove_file(&metadata).expect("the metadata");
    nix::unistd::mkfifo(&metadata, Mode::from_bits_truncate(0o600)).expect("a FIFO");
    refused(&containerd.root(), &[], "not a regular file");
    assert!(listed(&node).is_empty());
    no_rests(&node);
    let output = node.image_command(&["take-over", "more"]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    node.stop();
}

/// A store on another file system, and a daemon that is killed while it imports: afterwards each image is whole or absent.
#[test]
#[ignore = "needs containerd: make test-all PARTS=packaging"]
fn a_killed_daemon_leaves_whole_images_only() {
    let mut node = Node::start();
    let disk = FreshDisk::new(node.folder(), 256);
    let mut containerd = Containerd::start(disk.path());
    // Long enough to be killed in the middle.
    let noise: Vec<u8> = (0..24_u32 << 20).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    for index in 0..3 {
        let large =
            Layer::new(&[Entry::file("large", &noise), Entry::file("n", &[index])], Compression::Gzip);
        containerd
            .import(&image(&node, "large").plus(large).oci_archive(&format!("localhost/large:{index}")));
    }
    containerd.terminate();
    let from = containerd.root();
    let mut seen = BTreeSet::new();
    for pause_ms in [50, 400, 900, 1600] {
        std::thread::scope(|scope| {
            let client = scope.spawn(|| take_over_without_end(&node, &from));
            std::thread::sleep(std::time::Duration::from_millis(pause_ms));
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(node.pid()), nix::sys::signal::Signal::SIGKILL)
                .expect("the daemon is ours");
            client.join().expect("the client ends");
        });
        node.restart();
        let images = listed(&node);
        seen.insert(images.len());
        let check = node.image_command(&["check"]);
        assert!(check.status.success(), "{} ms: {}", pause_ms, said(&check));
    }
    assert!(seen.len() > 1 || !seen.contains(&3), "none was killed in the middle: {seen:?}");
    succeeds(&node, &from, &[]);
    assert_eq!(listed(&node).len(), 3);
    no_rests(&node);
    // Blobs on another file system are copied, so the images do not need it.
    drop(containerd);
    let check = node.image_command(&["check"]);
    assert!(check.status.success() && said(&check).matches("whole ").count() == 3, "{}", said(&check));
    drop(disk);
    node.stop();
}

/// Runs the command against a daemon that is killed meanwhile.
fn take_over_without_end(node: &Node, from: &Path) {
    take_over(node, from, &[]);
}

#[test]
#[ignore = "needs containerd: make test-all PARTS=packaging"]
fn a_full_disk_ends_the_take_over_with_whole_images_only() {
    let home = Node::start();
    let disk = FreshDisk::new(home.folder(), 160);
    let options = Options { root: Some(disk.path().join("root")), ..Options::default() };
    let node = Node::with(options);
    let mut containerd = Containerd::start(home.folder());
    // It cannot be compressed, so unpacked and packed it needs more than is free.
    let mut state = 1_u64;
    let noise: Vec<u8> = (0..40 << 20)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        })
        .collect();
    for index in 0..3 {
        let large =
            Layer::new(&[Entry::file("large", &noise), Entry::file("n", &[index])], Compression::Plain);
        containerd.import(&image(&node, "full").plus(large).oci_archive(&format!("localhost/full:{index}")));
    }
    containerd.terminate();
    let output = take_over(&node, &containerd.root(), &[]);
    let text = said(&output);
    assert!(
        output.status.code() == Some(1) && text.contains("reserve") || text.contains("no space"),
        "{text}"
    );
    assert!(listed(&node).len() < 3, "{text}");
    no_rests(&node);
    // A check needs space, too.
    let check = said(&node.image_command(&["check"]));
    assert!(!check.contains("is damaged"), "{check}");
    let images = node.list_images(ListImagesRequest::default()).expect("the daemon serves").images;
    assert_eq!(images.len(), listed(&node).len() + 1);
    node.stop();
    drop(disk);
    home.stop();
}
