//! Damage of unpacked layers: found by `image check` and by the check in the background, also behind the page cache, and repaired from
//! kept blobs, registries and neighbours, also under running containers.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use coracle_tests::cri::proto::StatusRequest;
use coracle_tests::fault::{Fault, Faulty};
use coracle_tests::fresh_disk::FreshDisk;
use coracle_tests::host::wait_until;
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer, digest, noise};
use coracle_tests::node::{Node, Options};
use coracle_tests::prometheus::{address_of, scrape};
use coracle_tests::registry::Registry;
use coracle_tests::request::{container, exec, host_pod, pull};
use coracle_tests::site::{config, local, ports};
use coracle_tests::small_disk::SmallDisk;
use coracle_tests::update::{self, release};
use rustix::fs::{Advice, fadvise};

use crate::mirror;

/// Text of the file that is damaged.
const RIGHT: &[u8] = b"this line is right on the disk and in the cache\n";
const WRONG: &[u8] = b"this line is WRONG on the disk and in the cache\n";

fn checked_image(node: &Node) -> Image {
    let files = [
        Entry::directory("srv", 0o755),
        Entry::file("srv/text", RIGHT),
        Entry::file("srv/noise", &noise(400_000, 5)),
    ];
    Image::probe(&node.probe(), "checked").plus(Layer::new(&files, Compression::Gzip))
}

/// A node with these lines in the section `[image]`.
fn node_with(image: &str) -> Node {
    Node::with(Options { config: format!("[image]\n{image}\n"), ..Options::default() })
}

/// The only file of this name in the unpacked layers.
fn unpacked(node: &Node, name: &str) -> PathBuf {
    let layers = fs::read_dir(node.root().join("layers")).expect("layers").flatten();
    let names =
        layers.map(|layer| layer.path()).filter(|path| path.file_name().is_some_and(|name| name.len() == 64));
    names.map(|layer| layer.join(name)).find(|path| path.exists()).expect("a layer has it")
}

/// Changes a file on the disk with the times that it had, and drops its pages.
fn damage(path: &Path, content: &[u8]) {
    let before = path.metadata().expect("it is there");
    fs::write(path, content).expect("ours to break");
    let file = fs::File::options().write(true).open(path).expect("it opens");
    file.set_modified(before.modified().expect("a time")).expect("its time");
    file.sync_all().expect("sync");
    fadvise(&file, 0, None, Advice::DontNeed).expect("drop its pages");
    let after = path.metadata().expect("it is there");
    assert_eq!((before.len(), before.mtime_nsec()), (after.len(), after.mtime_nsec()));
}

fn is_right(node: &Node) -> bool {
    fs::read(unpacked(node, "srv/text")).is_ok_and(|text| text == RIGHT)
}

pub(crate) fn check(node: &Node, words: &[&str]) -> (bool, String) {
    let output = node.image_command(&[&["check"], words].concat());
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

/// The condition StoreHealthy: whether it is true, reason and message.
pub(crate) fn healthy(node: &Node) -> (bool, String) {
    let status = node.status(StatusRequest::default()).expect("status").status.expect("a status");
    let condition = status.conditions.into_iter().find(|condition| condition.r#type == "StoreHealthy");
    let condition = condition.expect("the condition");
    (condition.status, format!("{} {}", condition.reason, condition.message))
}

/// Names in a directory of the store, without the directory of links.
fn names(node: &Node, below: &str) -> Vec<String> {
    let entries = fs::read_dir(node.root().join(below)).expect("a directory").flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.retain(|name| name != "l");
    names.sort();
    names
}

/// Content that was damaged on the disk was right in the page cache, with which it was compared.
#[test]
fn damage_behind_the_page_cache_is_found_and_repaired() {
    let folder = coracle_tests::node::base();
    fs::create_dir_all(&folder).expect("a folder");
    let disk = FreshDisk::new(&folder, 256);
    let node = Node::with(Options { root: Some(disk.path().join("root")), ..Options::default() });
    let name = "localhost/checked:1";
    node.try_import(&checked_image(&node).oci_archive(name)).expect("import");
    assert_eq!(check(&node, &[]), (true, format!("whole {name}\n")));
    assert!(is_right(&node), "it is in the page cache");
    nix::unistd::syncfs(fs::File::open(disk.path()).expect("its root")).expect("sync");
    disk.change(RIGHT, WRONG);
    assert!(is_right(&node), "the cache hides the damage");
    let (is_well, text) = check(&node, &[]);
    assert!(!is_well && text.contains("/srv/text: has other content"), "{text}");
    assert!(is_right(&node), "the cache hides the damage");
    let (is_well, text) = check(&node, &["--repair"]);
    assert!(is_well && text.starts_with(&format!("repaired {name}")), "{text}");
    assert_eq!(check(&node, &[]), (true, format!("whole {name}\n")));
    let file = fs::File::open(unpacked(&node, "srv/text")).expect("it opens");
    fadvise(&file, 0, None, Advice::DontNeed).expect("drop its pages");
    assert!(is_right(&node));
    node.stop();
}

/// The whole store is checked in the background; damage is reported, repaired of the kept blob, and counted.
#[test]
fn the_background_check_repairs_from_kept_blobs() {
    let config = "[image]\ncheck_interval = \"2s\"\n[metrics]\naddress = \"127.0.0.1:0\"\n".to_owned();
    let node = Node::with(Options { config, ..Options::default() });
    let name = "localhost/checked:1";
    node.try_import(&checked_image(&node).oci_archive(name)).expect("import");
    damage(&unpacked(&node, "srv/text"), WRONG);
    wait_until("it is repaired", || is_right(&node));
    wait_until("it is healthy", || healthy(&node).0);
    let log = node.log();
    for text in ["layer is damaged", "/srv/text: has other content", "repaired=true", name] {
        assert!(log.contains(text), "{text}: {log}");
    }
    let read = || scrape(&address_of(&node))["coracle_store_checked_bytes_total"];
    wait_until("all layers are checked", || read() > 400_000.0);
    let values = scrape(&address_of(&node));
    assert_eq!(values["coracle_store_damaged_layers"], 0.0);
    assert!(values["coracle_store_repairs_total{outcome=\"ok\"}"] >= 1.0, "{values:#?}");
    wait_until("the old layer is removed", || names(&node, "layers").len() == 2);
    assert_eq!((names(&node, "layers").len(), names(&node, "images/damage").len()), (2, 0));
    assert_eq!(check(&node, &[]), (true, format!("whole {name}\n")));
    // Off again: no worker is left that checks.
    node.rewrite_config("");
    mirror::reload(&node);
    damage(&unpacked(&node, "srv/text"), WRONG);
    std::thread::sleep(Duration::from_secs(5));
    assert!(!is_right(&node) && healthy(&node).0);
    node.stop();
}

/// A repair from a registry changes no tags, downloads no intact layer, and leaves running containers what they have. The old layer is
/// removed with the last container that was there, also by a daemon that was started later.
#[test]
fn a_layer_in_use_is_repaired_from_the_registry() {
    let mut node = node_with("keep_blobs = false");
    let registry = Registry::start(node.folder());
    let image = checked_image(&node);
    registry.push(&image, "checked", "1");
    let proxy = Faulty::start(registry.address(), |_, _| Fault::None);
    let name = proxy.name("checked", "1");
    node.pull_image(pull(&name)).expect("pull");
    let tagged = crate::find(&node, &name).expect("it is there");
    assert_eq!(check(&node, &[]), (true, format!("whole {name}\n")));
    let lists = names(&node, "images/lists");
    let pod = host_pod("user");
    let pod_id = node.run_pod(&pod);
    let old = node.run_container(&pod_id, &container("old", &name, &["sleep", "forever"], &pod), &pod);
    damage(&unpacked(&node, "srv/text"), WRONG);
    // The tag moves to another image meanwhile.
    registry.push(&image.clone().with("Cmd", serde_json::json!(["other"])), "checked", "1");
    let before = proxy.blob_bytes(&digest(&image.layers[0].blob));
    let (is_well, text) = check(&node, &["--repair"]);
    assert!(is_well && text.starts_with(&format!("repaired {name}")), "{text}");
    assert_eq!(proxy.blob_bytes(&digest(&image.layers[0].blob)), before, "an intact layer is not downloaded");
    assert_eq!(crate::find(&node, &name), Some(tagged), "names are those from before");
    assert_eq!(names(&node, "images/lists"), lists, "a repaired layer has a list");
    assert_eq!(check(&node, &[]), (true, format!("whole {name}\n")));
    let new = node.run_container(&pod_id, &container("new", &name, &["sleep", "forever"], &pod), &pod);
    let text =
        |id: &str| fs::read(format!("/proc/{}/root/srv/text", node.container_pid(id))).expect("it reads");
    assert_eq!((text(&old), text(&new)), (WRONG.to_vec(), RIGHT.to_vec()));
    assert!(node.exec_sync(exec(&old, &["true"], 5)).is_ok(), "the old container runs as before");
    let replaced = |node: &Node| names(node, "replaced").len();
    assert_eq!(replaced(&node), 1);
    // A second repair is not blocked by it.
    damage(&unpacked(&node, "srv/text"), WRONG);
    assert!(check(&node, &["--repair"]).0);
    assert_eq!(replaced(&node), 2);
    node.kill9();
    node.launch();
    assert_eq!(replaced(&node), 2, "the containers run");
    node.remove_container(coracle_tests::cri::proto::RemoveContainerRequest { container_id: old })
        .expect("remove");
    wait_until("the first one is removed", || replaced(&node) == 1);
    node.remove_pod(&pod_id);
    wait_until("all are removed", || names(&node, "layers").len() == 2 && replaced(&node) == 0);
    node.stop();
}

/// Damage stays known after a restart, until it is repaired. A registry that is away is asked again.
#[test]
fn damage_stays_known_while_the_registry_is_away() {
    let mut node = node_with("keep_blobs = false\ncheck_interval = \"2s\"");
    let registry = Registry::start(node.folder());
    registry.push(&checked_image(&node), "checked", "1");
    let is_away = Arc::new(AtomicBool::new(false));
    let state = Arc::clone(&is_away);
    let proxy = Faulty::start(registry.address(), move |_, _| match state.load(Ordering::Relaxed) {
        true => Fault::Status(404, None),
        false => Fault::None,
    });
    let name = proxy.name("checked", "1");
    node.pull_image(pull(&name)).expect("pull");
    is_away.store(true, Ordering::Relaxed);
    damage(&unpacked(&node, "srv/text"), WRONG);
    wait_until("it is found", || !healthy(&node).0);
    let (_, text) = healthy(&node);
    for part in ["DamagedLayers", "/srv/text: has other content", &name, "coracle image check --repair"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    wait_until("a repair is tried", || node.log().contains("damaged layers cannot be pulled"));
    node.rewrite_config("[image]\nkeep_blobs = false\n");
    node.kill9();
    node.launch();
    let (is_healthy, again) = healthy(&node);
    assert!(!is_healthy && again.contains("/srv/text: has other content"), "{again}");
    is_away.store(false, Ordering::Relaxed);
    node.rewrite_config("[image]\nkeep_blobs = false\ncheck_interval = \"2s\"\n");
    node.kill9();
    node.launch();
    wait_until("it is repaired", || is_right(&node) && healthy(&node).0);
    node.stop();
}

#[test]
fn a_layer_is_repaired_from_a_neighbour() {
    let port = ports(1)[0];
    let honest = mirror::node(config(Some(port), &[], "open = true"));
    let registry = Registry::start(honest.folder());
    let image = checked_image(&honest);
    registry.push(&image, "checked", "1");
    let more = "offline = \"neighbours\"\n[image]\nkeep_blobs = false\n[registry]\nrate_window = \"2s\"\n";
    let node = mirror::node(config(None, &[local(port)], more));
    let proxy = Faulty::start(registry.address(), |_, _| Fault::None);
    let name = proxy.name("checked", "1");
    for node in [&honest, &node] {
        node.pull_image(pull(&name)).expect("pull");
    }
    drop((proxy, registry));
    damage(&unpacked(&node, "srv/text"), WRONG);
    let (is_well, text) = check(&node, &["--repair"]);
    assert!(is_well && text.starts_with(&format!("repaired {name}")), "{text}");
    assert!(is_right(&node));
    node.stop();
    honest.stop();
}

/// The intact files of a layer with a table of contents are not downloaded.
#[test]
fn a_repair_downloads_what_is_damaged() {
    let node = node_with("keep_blobs = false");
    let registry = Registry::start(node.folder());
    let layer = Layer::chunked(&release(&node, 1));
    registry.push(&update::image(layer.clone()), "app", "1");
    let proxy = Faulty::start(registry.address(), |_, _| Fault::None);
    let name = proxy.name("app", "1");
    node.pull_image(pull(&name)).expect("pull");
    let whole = proxy.blob_bytes(&digest(&layer.blob));
    let file = unpacked(&node, "app/small-7");
    let right = fs::read(&file).expect("it reads");
    damage(&file, &vec![7; right.len()]);
    let (is_well, text) = check(&node, &["--repair"]);
    assert!(is_well && text.contains("/app/small-7: has other content"), "{text}");
    assert_eq!(fs::read(unpacked(&node, "app/small-7")).expect("it reads"), right);
    let again = proxy.blob_bytes(&digest(&layer.blob)) - whole;
    assert!(again * 10 < whole, "{again} of {whole} bytes");
    assert_eq!(check(&node, &[]), (true, format!("whole {name}\n")));
    node.stop();
}

/// A list that could not be read was taken for none, and the layer for readable. A damaged blob does not
/// prevent the repair, either.
#[test]
fn a_damaged_list_and_a_damaged_blob_are_replaced() {
    let node = node_with("check_interval = \"3s\"");
    let registry = Registry::start(node.folder());
    let image = checked_image(&node);
    registry.push(&image, "checked", "1");
    let name = registry.name("checked", "1");
    node.pull_image(pull(&name)).expect("pull");
    let text = unpacked(&node, "srv/text");
    let layer = text.ancestors().nth(2).and_then(Path::file_name).expect("its layer").to_owned();
    let list = node.root().join("images/lists").join(layer);
    let right = fs::read(&list).expect("it reads");
    let mut wrong = right.clone();
    wrong[right.len() / 2] ^= 1;
    let blob = node.root().join("images/blobs").join(digest(&image.layers[1].blob).replace(':', "/"));
    let whole = fs::read(&blob).expect("it is kept");
    fs::write(&blob, [&whole[..1000], &[whole[1000] ^ 1], &whole[1001..]].concat()).expect("ours to break");
    fs::write(&list, &wrong).expect("ours to break");
    wait_until("it is repaired", || fs::read(&list).is_ok_and(|list| list != wrong) && healthy(&node).0);
    assert!(node.log().contains("its list of files is damaged"));
    assert_eq!(fs::read(&blob).expect("it is kept"), whole);
    assert_eq!(check(&node, &[]), (true, format!("whole {name}\n")));
    node.stop();
}

/// A file system that became read-only, as after an error of the disk; it has no O_DIRECT on older kernels.
#[test]
fn a_read_only_store_is_checked_and_reported() {
    let disk = SmallDisk::new(64);
    let config = "[image]\ncheck_interval = \"2s\"\n".to_owned();
    let node = Node::with(Options { root: Some(disk.path().join("root")), config, ..Options::default() });
    node.try_import(&checked_image(&node).oci_archive("localhost/checked:1")).expect("import");
    let text = unpacked(&node, "srv/text");
    let time = text.metadata().and_then(|about| about.modified()).expect("a time");
    fs::write(&text, WRONG).expect("ours to break");
    fs::File::open(&text).and_then(|file| file.set_modified(time)).expect("its time");
    disk.read_only(true);
    wait_until("it is reported", || healthy(&node).1.contains("/srv/text: has other content"));
    std::thread::sleep(Duration::from_secs(3));
    let checks = node.log().matches("layers are not checked").count();
    assert!(checks == 0 && node.has_daemon(), "{}", node.log());
    disk.read_only(false);
    assert!(check(&node, &["--repair"]).0);
    assert!(is_right(&node) && healthy(&node).0);
    node.stop();
}
