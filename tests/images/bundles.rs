//! Import directories: their images are imported soon, pinned while the file exists, and cost nothing while
//! it does not change (AIR-1 to AIR-7, PIN-9).

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use coracle_tests::cri::proto::RemoveImageRequest;
use coracle_tests::host::wait_until;
use coracle_tests::image::{Image, probe_entries};
use coracle_tests::layer::{Compression, pack};
use coracle_tests::node::Node;
use coracle_tests::registry::Registry;
use coracle_tests::request::{image_spec, pull};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::Pid;

use crate::find;

fn directory(node: &Node) -> PathBuf {
    let path = node.folder().join("import");
    fs::create_dir_all(&path).expect("the import directory");
    path
}

fn is_pinned(node: &Node, name: &str) -> bool {
    find(node, name).is_some_and(|image| image.pinned)
}

fn plain(node: &Node, marker: &str) -> Image {
    Image::probe(&node.probe(), marker).repacked(&probe_entries(&node.probe()), Compression::Plain)
}

fn count(node: &Node, words: &str) -> usize {
    node.log().matches(words).count()
}

#[test]
fn air_1_to_6_files_are_imported_once_and_pinned() {
    let mut node = Node::start();
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "listed"), "listed", "1");
    let listed = registry.name("listed", "1");
    node.terminate();
    let place = directory(&node);
    let docker = plain(&node, "docker").with("Cmd", serde_json::json!(["docker"]));
    fs::write(place.join("1.tar"), docker.docker_archive(&["short:1", "localhost/docker:1"])).expect("1");
    let oci = Image::probe(&node.probe(), "oci");
    let archive = oci.oci_archive("localhost/oci:1");
    fs::write(place.join("2.TAR.GZ"), pack(&archive, Compression::Gzip)).expect("2");
    let other = Image::probe(&node.probe(), "zstd").oci_archive("localhost/zstd:1");
    fs::write(place.join("3.tar.zst"), pack(&other, Compression::Zstd)).expect("3");
    fs::write(
        place.join("4.txt"),
        format!("\u{feff}# what we need\n\n{listed}  # from the registry\nlocalhost/oci:1# imported\n"),
    )
    .expect("4");
    fs::write(place.join("0-bad.tar"), &archive[..archive.len() / 2]).expect("half a bundle");
    fs::write(place.join("0-other.tar.lz4"), b"what we do not read").expect("another packing");
    let unnamed = place.join(OsStr::from_bytes(b"caf\xe9.tar"));
    fs::write(unnamed, &archive).expect("a name in Latin-1");
    fs::write(place.join("README"), b"no bundle").expect("not ours");
    fs::write(place.join(".hidden.tar"), b"no bundle").expect("not ours");
    node.launch();
    let names =
        ["docker.io/library/short:1", "localhost/docker:1", "localhost/oci:1", "localhost/zstd:1", &listed];
    for name in names {
        wait_until(&format!("{name} is imported and pinned"), || is_pinned(&node, name));
    }
    wait_until("all bad ones are named", || count(&node, "images not imported") == 3);
    assert!(node.log().contains("the name is not UTF-8"));
    assert!(node.log().contains("0-bad.tar") && node.log().contains("0-other.tar.lz4"));
    assert!(!node.log().contains("hidden") && !node.log().contains("README"));
    assert_eq!(node.once("short:1", &["true"], |_| ()).1.exit_code, 0);

    // Without a change nothing is imported, and not a byte is written.
    let imported = count(&node, "images imported");
    let record = node.root().join("images/bundles");
    let written = || fs::metadata(&record).and_then(|about| about.modified()).expect("the record");
    let before = written();
    node.restart();
    assert!(names.iter().all(|name| is_pinned(&node, name)), "from the first answer on");
    wait_until("the bad one was tried again", || count(&node, "images not imported") == 6);
    assert_eq!((count(&node, "images imported"), written()), (imported, before));

    // Removed images are imported again at the next start.
    node.remove_image(RemoveImageRequest { image: Some(image_spec("localhost/zstd:1")) }).expect("removed");
    assert!(find(&node, "localhost/zstd:1").is_none());
    node.restart();
    wait_until("it is back", || is_pinned(&node, "localhost/zstd:1"));
    assert_eq!(count(&node, "images imported"), imported + 1);
    node.stop();
}

/// A kubelet that starts with the node asks for images before they are imported, and the node may have no registry.
#[test]
fn a_pull_at_the_start_waits_for_the_archives_that_are_there() {
    let mut node = Node::start();
    node.terminate();
    let place = directory(&node);
    // No registry answers at this address.
    let (name, absent) = ("127.0.0.1:1/app:1", "127.0.0.1:1/absent:1");
    let app = plain(&node, "app");
    fs::write(place.join("app.tar"), app.docker_archive(&[name])).expect("an archive");
    node.launch();
    assert_eq!(node.pull_image(pull(name)).expect("from the archive").image_ref, app.id());
    let error = node.pull_image(pull(absent)).expect_err("it is nowhere");
    assert!(error.message().contains("RegistryUnavailable"), "{error}");
    assert_eq!(count(&node, "a pull waits"), 1, "the archive is imported");
    // A tag that is in the store is resolved by its registry, as always.
    node.pull_image(pull(name)).expect_err("no registry");

    // What cannot be imported is not waited for any longer than it takes to find out.
    node.remove_image(RemoveImageRequest { image: Some(image_spec(name)) }).expect("removed");
    node.terminate();
    let half = app.docker_archive(&[name]);
    fs::write(place.join("app.tar"), &half[..half.len() / 2]).expect("half an archive");
    nix::unistd::mkfifo(&place.join("fifo.tar"), Mode::S_IRWXU).expect("a FIFO");
    fs::create_dir(place.join("directory.tar")).expect("a directory");
    node.launch();
    let error = node.pull_image(pull(name)).expect_err("only a half");
    assert!(error.message().contains("RegistryUnavailable"), "{error}");
    assert_eq!(count(&node, "images not imported"), 1);

    // A client that leaves while it waits, and a daemon that ends: neither prevents the import.
    node.terminate();
    fs::write(place.join("app.tar"), app.docker_archive(&[name])).expect("an archive");
    node.launch();
    node.pull_image_within(pull(name), Duration::from_millis(300)).expect_err("it left");
    node.terminate();
    node.launch();
    assert_eq!(node.pull_image(pull(name)).expect("from the archive").image_ref, app.id());
    node.stop();
}

#[test]
fn air_7_new_changed_and_removed_files_are_detected() {
    let mut node = Node::start();
    let place = directory(&node);
    let bundle = place.join("app.tar");
    let (old, new) = (plain(&node, "old"), plain(&node, "new").with("Cmd", serde_json::json!(["new"])));
    let name = "localhost/app:1";
    fs::write(&bundle, old.docker_archive(&[name])).expect("a bundle");
    wait_until("it is there", || is_pinned(&node, name));
    assert_eq!(find(&node, name).expect("there").id, old.id());
    fs::write(place.join("app.tar.new"), new.docker_archive(&[name])).expect("another");
    fs::rename(place.join("app.tar.new"), &bundle).expect("in its place");
    wait_until("the new one is there", || find(&node, name).is_some_and(|image| image.id == new.id()));
    wait_until("its pin moved", || is_pinned(&node, name) && !is_pinned(&node, &old.id()));
    // A pulled image with similar names is not pinned, and the removal of a file removes its pin but not the
    // image.
    fs::remove_file(&bundle).expect("ours");
    wait_until("it is pinned no more", || !is_pinned(&node, name));
    assert_eq!(find(&node, name).expect("it stays").id, new.id());
    node.restart();
    assert!(!is_pinned(&node, name));
    // Two directories from the configuration, after SIGHUP.
    let (one, two) = (node.folder().join("one"), node.folder().join("two"));
    for (path, name) in [(&one, "localhost/one:1"), (&two, "localhost/two:1")] {
        fs::create_dir_all(path).expect("a directory");
        fs::write(path.join("x.tar"), old.docker_archive(&[name])).expect("a bundle");
    }
    let text = fs::read_to_string(node.folder().join("config.toml")).expect("the configuration");
    let both = format!("import_dir = [{one:?}, {two:?}]");
    let text: Vec<String> = text
        .lines()
        .map(|line| if line.starts_with("import_dir") { both.clone() } else { line.to_owned() })
        .collect();
    fs::write(node.folder().join("config.toml"), text.join("\n")).expect("ours");
    kill(Pid::from_raw(node.pid()), Signal::SIGHUP).expect("the daemon is ours");
    for name in ["localhost/one:1", "localhost/two:1"] {
        wait_until("both are followed", || is_pinned(&node, name));
    }
    node.stop();
}

/// Daemons only read the directory: each has its own images and pins of the same files.
#[test]
fn two_daemons_share_an_import_directory() {
    let (mut first, second) = (Node::start(), Node::start());
    let place = directory(&first);
    let config = second.folder().join("config.toml");
    let text = fs::read_to_string(&config).expect("the configuration");
    let own = second.folder().join("import").display().to_string();
    assert!(text.contains(&own), "{text}");
    fs::write(&config, text.replace(&own, &place.display().to_string())).expect("ours");
    kill(Pid::from_raw(second.pid()), Signal::SIGHUP).expect("the daemon is ours");
    let (bundle, name) = (place.join("shared.tar"), "localhost/shared:1");
    let bytes = plain(&first, "shared").docker_archive(&[name]);
    fs::write(&bundle, &bytes).expect("a bundle");
    for node in [&first, &second] {
        wait_until("it is imported and pinned", || is_pinned(node, name));
    }
    first.remove_image(RemoveImageRequest { image: Some(image_spec(name)) }).expect("removed");
    first.restart();
    wait_until("it is imported again", || is_pinned(&first, name));
    assert!(is_pinned(&second, name));
    assert_eq!(fs::read(&bundle).expect("it stays"), bytes);
    fs::remove_file(&bundle).expect("ours");
    for node in [&first, &second] {
        wait_until("it is pinned no more", || !is_pinned(node, name));
        assert!(find(node, name).is_some(), "the image stays");
    }
    second.stop();
    first.stop();
}

#[test]
fn a_file_is_imported_after_it_is_completely_written() {
    let node = Node::start();
    let place = directory(&node);
    let bytes = plain(&node, "slow").docker_archive(&["localhost/slow:1"]);
    let (first, second) = bytes.split_at(bytes.len() / 2);
    let mut file = fs::File::create(place.join("slow.tar")).expect("a bundle");
    let begun = Instant::now();
    std::io::Write::write_all(&mut file, first).expect("half of it");
    // However long its writer pauses: at worst it is refused once.
    wait_until("it was looked at", || count(&node, "images not imported") == 1);
    assert!(begun.elapsed().as_secs() >= 2, "not before it looks settled");
    assert!(find(&node, "localhost/slow:1").is_none());
    std::io::Write::write_all(&mut file, second).expect("the rest");
    drop(file);
    wait_until("it is whole and imported", || is_pinned(&node, "localhost/slow:1"));
    node.stop();
}

#[test]
fn an_invalid_image_of_an_archive_does_not_affect_the_others() {
    let node = Node::start();
    let mut liar = plain(&node, "liar").with("Cmd", serde_json::json!(["liar"]));
    liar.layers[0].diff_id = format!("sha256:{}", "0".repeat(64));
    let both = coracle_tests::image::docker_archive_of(&[
        (&liar, &["localhost/liar:1"]),
        (&plain(&node, "fine"), &["localhost/fine:1"]),
    ]);
    fs::write(directory(&node).join("both.tar"), both).expect("a bundle");
    wait_until("the good one is there", || is_pinned(&node, "localhost/fine:1"));
    wait_until("the other is named", || count(&node, "images not imported") == 1);
    assert!(find(&node, "localhost/liar:1").is_none());
    // The same for a list: the line that is no reference is named.
    let listed = "localhost/Not//Valid:1  # wrong\nlocalhost/fine:1  # there\n";
    fs::write(directory(&node).join("list.txt"), listed).expect("a list");
    wait_until("the line is named", || node.log().contains("localhost/Not//Valid:1"));
    fs::remove_file(directory(&node).join("both.tar")).expect("ours");
    wait_until("the archive is forgotten", || count(&node, "archive or list was removed") == 1);
    assert!(is_pinned(&node, "localhost/fine:1"), "the list still pins it");
    node.stop();
}
