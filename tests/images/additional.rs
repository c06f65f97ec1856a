//! Additional stores: images that are shipped unpacked on a file system that is only read.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use coracle_tests::cri::proto::RemoveImageRequest;
use coracle_tests::host::wait_until;
use coracle_tests::image::{Image, bundle, program};
use coracle_tests::layer::{Compression, Entry, Layer, packed};
use coracle_tests::node::{Node, Options, binaries};
use coracle_tests::registry::{Demand, Lie, Proxy, Registry};
use coracle_tests::request::{bridge_pod, container, create, exec, host_pod, image_spec, mapped, pull};
use coracle_tests::small_disk::SmallDisk;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::find;
use crate::layer_checks::{check, healthy};

const NAMES: [&str; 2] = ["localhost/board:1", "localhost/other:1"];

/// Two images with one common layer, as archives in `folder`.
fn archives(folder: &Path) -> [PathBuf; 2] {
    ["board", "other"].map(|marker| {
        let path = folder.join(format!("{marker}.tar"));
        fs::write(&path, image(marker).oci_archive(&format!("localhost/{marker}:1"))).expect("an archive");
        path
    })
}

fn image(marker: &str) -> Image {
    let own = packed(&[Entry::file("own", marker.as_bytes())], Compression::Zstd);
    Image::probe(&program(&binaries()), "common").plus(own)
}

/// A read-only file system with a store of both images.
fn shipped() -> (SmallDisk, PathBuf) {
    let disk = SmallDisk::new(64);
    let archives = archives(disk.path());
    let store = disk.path().join("store");
    assert_eq!(bundle(&store, &archives), (true, String::new()));
    for archive in archives {
        fs::remove_file(archive).expect("an archive");
    }
    disk.read_only(true);
    (disk, store)
}

fn config_of(store: &Path) -> String {
    format!("[image]\nadditional_stores = [{store:?}]\n")
}

fn node_with(store: &Path) -> Node {
    Node::with(Options { config: config_of(store), ..Options::default() })
}

fn has_both(node: &Node) -> bool {
    NAMES.iter().all(|name| find(node, name).is_some_and(|image| image.pinned))
}

/// Entries of a node's directory of layers that are no links, without that of short names.
fn own_layers(node: &Node) -> Vec<PathBuf> {
    let all = fs::read_dir(node.root().join("layers")).expect("the layers").flatten();
    all.map(|entry| entry.path()).filter(|path| !path.is_symlink() && !path.ends_with("l")).collect()
}

fn links(node: &Node) -> usize {
    let all = fs::read_dir(node.root().join("layers")).expect("the layers").flatten();
    all.filter(|entry| entry.path().is_symlink()).count()
}

/// Names, attributes and contents of all files of a tree.
fn listed(tree: &Path) -> Vec<String> {
    fn add(tree: &Path, path: &Path, all: &mut Vec<String>) {
        let about = path.symlink_metadata().expect("a file");
        let content = if about.is_file() { fs::read(path).expect("a file") } else { Vec::new() };
        all.push(format!(
            "{} {:o} {}:{} {}.{} {content:?}",
            path.strip_prefix(tree).expect("below the tree").display(),
            about.mode(),
            about.uid(),
            about.gid(),
            about.mtime(),
            about.mtime_nsec(),
        ));
        if about.is_dir() {
            let mut entries: Vec<PathBuf> =
                fs::read_dir(path).expect("a directory").flatten().map(|entry| entry.path()).collect();
            entries.sort();
            entries.iter().for_each(|path| add(tree, path, all));
        }
    }
    let mut all = Vec::new();
    add(tree, tree, &mut all);
    all
}

/// Content of a file in a container of the image, with a space instead of the end of the line.
fn content(node: &Node, image: &str, path: &str) -> String {
    let (text, status) = node.once(image, &["cat", path], |_| ());
    assert_eq!(status.exit_code, 0, "{path}: {text}");
    text.replace('\n', " ")
}

#[test]
fn images_of_an_additional_store_are_pinned_and_used_in_place() {
    let (disk, store) = shipped();
    disk.read_only(false);
    let before = listed(&store);
    let mut node = node_with(&store);
    wait_until("both images are there", || has_both(&node));
    assert_eq!(own_layers(&node), [] as [PathBuf; 0], "nothing is unpacked");
    assert_eq!(links(&node), 3, "of two images with a common layer");
    assert_eq!(content(&node, NAMES[0], "/etc/marker") + &content(&node, NAMES[0], "/own"), "common board ");
    let named = |user: &str| node.once(NAMES[1], &["true"], |config| set_user(config, user)).1.exit_code;
    assert_eq!(named("alice"), 0, "names of users are those of the image");
    let checked = node.image_command(&["check"]);
    assert!(checked.status.success(), "{checked:?}");

    // An unchanged store is not verified again.
    node.restart();
    assert!(has_both(&node), "from the first answer on");
    node.once(NAMES[0], &["true"], |_| ());
    assert_eq!(node.log().matches("image imported").count(), 2, "{}", node.log());

    node.remove_image(RemoveImageRequest { image: Some(image_spec(NAMES[0])) }).expect("removed");
    wait_until("its links are removed", || links(&node) == 2);
    assert_eq!(listed(&store), before, "the store is only read");
    node.stop();
}

fn set_user(config: &mut coracle_tests::cri::proto::ContainerConfig, user: &str) {
    let security = config.linux.get_or_insert_default().security_context.get_or_insert_default();
    security.run_as_username = user.into();
}

#[test]
fn the_same_archives_give_the_same_store() {
    let disk = SmallDisk::new(64);
    let archives = archives(disk.path());
    let stores = ["one", "two"].map(|name| disk.path().join(name));
    for store in &stores {
        assert_eq!(bundle(store, &archives), (true, String::new()));
        // Times of the second are not those of the first by chance.
        std::thread::sleep(Duration::from_millis(1100));
    }
    let [one, two] = stores.map(|store| listed(&store));
    for (one, two) in one.iter().zip(&two) {
        assert_eq!(one, two);
    }
    assert_eq!(one.len(), two.len());
}

#[test]
fn an_incomplete_store_is_not_left() {
    let disk = SmallDisk::new(64);
    let [right, other] = archives(disk.path());
    let bytes = fs::read(&other).expect("an archive");
    fs::write(&other, &bytes[..bytes.len() / 2]).expect("half an archive");
    let store = disk.path().join("store");
    let (is_made, text) = bundle(&store, &[right.clone(), other.clone()]);
    assert!(!is_made && text.contains("other.tar"), "{text}");
    assert!(!store.exists(), "nothing is left");
    fs::create_dir(&store).expect("a directory");
    let (is_made, text) = bundle(&store, &[right]);
    assert!(!is_made && text.contains("exists"), "{text}");
    assert!(store.exists(), "an existing directory is not touched");
    let (is_made, text) = bundle(&disk.path().join("absent/store"), &[other]);
    assert!(!is_made && text.contains("absent/store"), "{text}");
}

#[test]
fn a_damaged_image_of_a_store_is_named_and_the_others_are_used() {
    let (disk, store) = shipped();
    let other = image("other");
    let config = store.join("images/blobs/sha256").join(other.id().trim_start_matches("sha256:"));
    let own = layer_with(&store, "other");
    let change = |path: &Path| {
        let mut bytes = fs::read(path).expect("a file");
        bytes[0] ^= 1;
        fs::write(path, bytes).expect("damage");
    };
    let damages: [(&str, &dyn Fn()); 4] = [
        ("a byte of a config", &|| change(&config)),
        ("a byte of a layer", &|| change(&own.join("own"))),
        ("a mode in a layer", &|| set_mode(&own.join("own"), 0o4755)),
        ("a file more in a layer", &|| fs::write(own.join("more"), b"").expect("a file")),
    ];
    let kept = disk.path().join("kept");
    for (what, damage) in damages {
        disk.read_only(false);
        copy(&store, &kept);
        damage();
        disk.read_only(true);
        let node = node_with(&store);
        wait_until("the right one is there", || find(&node, NAMES[0]).is_some_and(|image| image.pinned));
        wait_until("the other one is named", || node.log().contains("is damaged"));
        assert!(
            node.log().contains(&other.id()) && find(&node, NAMES[1]).is_none(),
            "{what}: {}",
            node.log()
        );
        assert_eq!(links(&node), 2, "{what}");
        node.stop();
        disk.read_only(false);
        fs::remove_dir_all(&store).expect("the store");
        fs::rename(&kept, &store).expect("the right store");
    }
}

/// The layer in which the file `own` has this content.
fn layer_with(store: &Path, own: &str) -> PathBuf {
    let all = fs::read_dir(store.join("layers")).expect("the layers").flatten();
    let has = |path: &PathBuf| fs::read(path.join("own")).is_ok_and(|content| content == own.as_bytes());
    all.map(|entry| entry.path()).find(has).expect("a layer")
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("a mode");
}

fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").args([from, to]).status().expect("cp runs");
    assert!(copied.success());
}

#[test]
fn an_index_of_other_images_links_nothing() {
    let (disk, store) = shipped();
    disk.read_only(false);
    let (elsewhere, archive) = (disk.path().join("elsewhere"), disk.path().join("elsewhere.tar"));
    fs::write(&archive, image("elsewhere").oci_archive("localhost/elsewhere:1")).expect("an archive");
    assert_eq!(bundle(&elsewhere, &[archive]), (true, String::new()));
    fs::copy(elsewhere.join("images/index"), store.join("images/index")).expect("another index");
    let node = node_with(&store);
    wait_until("it is refused", || refused(&node));
    assert_eq!(links(&node), 0, "{}", node.log());
    node.stop();
}

fn refused(node: &Node) -> bool {
    node.log().contains("not imported")
}

#[test]
fn an_index_that_is_damaged_or_none_is_refused() {
    let (disk, store) = shipped();
    disk.read_only(false);
    let index = store.join("images/index");
    let bytes = fs::read(&index).expect("the index");
    for damaged in [&bytes[..bytes.len() - 1], b"no index at all"] {
        fs::write(&index, damaged).expect("damage");
        let node = node_with(&store);
        wait_until("it is refused", || refused(&node));
        assert!(node.log().contains(index.to_str().expect("a name")), "{}", node.log());
        node.stop();
    }
}

#[test]
fn a_store_that_is_mounted_later_is_used_and_one_that_is_absent_takes_nothing_away() {
    let (disk, store) = shipped();
    let place = disk.path().parent().expect("a directory").join(format!("mount-{}", std::process::id()));
    fs::create_dir(&place).expect("a mount point");
    let mounted = || {
        mount(Some(&store), &place, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("a mount");
    };
    let unmounted = || umount2(&place, MntFlags::MNT_DETACH).expect("it is mounted");
    let mut node = node_with(&place);
    wait_until("the log says it", || node.log().contains("an additional store is missing"));
    mounted();
    wait_until("both images are there", || has_both(&node));
    assert_eq!(node.once(NAMES[0], &["true"], |_| ()).1.exit_code, 0);

    node.terminate();
    unmounted();
    node.launch();
    assert!(has_both(&node), "they wait for the store");
    let pod = host_pod("waiting");
    let id = node.run_pod(&pod);
    let config = container("one", NAMES[1], &["true"], &pod);
    let error = node.create_container(create(&id, &config, &pod)).expect_err("its layers are not there");
    assert!(error.message().contains("its additional store is not there"), "{error}");
    let registry = Registry::start(node.folder());
    registry.push(&image("board"), "board", "1");
    let name = registry.name("board", "1");
    node.pull_image(pull(&name)).expect("a pull of the same layers");
    assert_eq!(content(&node, &name, "/own"), "board ");
    mounted();
    assert_eq!(content(&node, NAMES[0], "/own") + &content(&node, NAMES[1], "/own"), "board other ");
    node.stop();
    unmounted();
    fs::remove_dir(&place).expect("the mount point");
}

/// Damage of a store is found and named, and removes no more than the image's record. A store that is not there is not damaged.
#[test]
fn damage_of_a_store_is_reported_and_the_store_is_only_read() {
    let (disk, store) = shipped();
    let place = disk.path().parent().expect("a directory").join(format!("place-{}", std::process::id()));
    fs::create_dir(&place).expect("a mount point");
    let mounted =
        || mount(Some(&store), &place, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("a mount");
    let unmounted = || umount2(&place, MntFlags::MNT_DETACH).expect("it is mounted");
    mounted();
    let config = format!("{}check_interval = \"2s\"\n", config_of(&place));
    let node = Node::with(Options { config, ..Options::default() });
    wait_until("both images are there", || has_both(&node));
    assert!(check(&node, &[]).1.lines().all(|line| line.starts_with("whole ")));
    unmounted();
    let (is_well, text) = check(&node, &["--repair"]);
    assert!(!is_well && text.contains("not checked") && text.contains("is not there"), "{text}");
    assert!(has_both(&node), "nothing is removed");
    std::thread::sleep(Duration::from_secs(4));
    assert!(healthy(&node).0 && !node.log().contains("damaged"), "{}", node.log());
    disk.read_only(false);
    let own = layer_with(&store, "other").join("own");
    fs::write(&own, b"OTHER").expect("damage");
    let damaged = listed(&store);
    disk.read_only(true);
    mounted();
    wait_until("it is found", || !healthy(&node).0);
    let (_, text) = healthy(&node);
    for part in [NAMES[1], "not the tree that was bundled", "is only read"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let (is_well, text) = check(&node, &["--repair"]);
    assert!(!is_well && text.contains("pull or import it again"), "{text}");
    assert!(find(&node, NAMES[0]).is_some() && find(&node, NAMES[1]).is_none());
    node.try_import(&image("other").oci_archive(NAMES[1])).expect("the node's own copy");
    assert_eq!(content(&node, NAMES[1], "/own"), "other ");
    wait_until("it is healthy", || healthy(&node).0);
    assert_eq!(listed(&store), damaged, "the store is only read");
    node.stop();
    unmounted();
    fs::remove_dir(&place).expect("the mount point");
}

#[test]
fn images_of_a_store_that_is_replaced_or_configured_no_more_end_with_it() {
    let (disk, store) = shipped();
    disk.read_only(false);
    let mut node = node_with(&store);
    wait_until("both images are there", || has_both(&node));
    node.terminate();
    let archive = disk.path().join("new.tar");
    fs::write(&archive, image("new").oci_archive(NAMES[0])).expect("an archive");
    let new = disk.path().join("new");
    assert_eq!(bundle(&new, &[archive]), (true, String::new()));
    fs::rename(&store, disk.path().join("old")).expect("the system's image before");
    fs::rename(&new, &store).expect("the system's image now");
    node.launch();
    wait_until("the new image is there", || {
        find(&node, NAMES[0]).is_some_and(|found| found.id == image("new").id())
    });
    assert!(find(&node, NAMES[1]).is_none() && links(&node) == 2, "{}", node.log());
    assert_eq!(content(&node, NAMES[0], "/own"), "new ");

    // Its directory stays.
    node.terminate();
    node.rewrite_config("");
    node.launch();
    wait_until("nothing of it is left", || find(&node, NAMES[0]).is_none() && links(&node) == 0);
    assert!(!node.log().contains("quarantine"), "{}", node.log());
    node.stop();
}

/// The system's image is updated, and the new one has a damaged layer that a container uses.
#[test]
fn an_updated_store_is_verified_before_it_is_used() {
    let (disk, store) = shipped();
    disk.read_only(false);
    let mut node = node_with(&store);
    wait_until("both images are there", || has_both(&node));
    // One that shares a layer, and one with the layer that will be damaged.
    node.try_import(&image("mine").oci_archive("localhost/mine:1")).expect("imported");
    let more = Layer::new(&[Entry::file("more", b"more")], Compression::Gzip);
    node.try_import(&image("other").plus(more).oci_archive("localhost/more:1")).expect("imported");
    let pod = host_pod("user");
    let pod_id = node.run_pod(&pod);
    let old = node.run_container(&pod_id, &container("old", NAMES[1], &["sleep", "forever"], &pod), &pod);
    let (new, third) = (disk.path().join("new"), disk.path().join("third.tar"));
    fs::write(&third, image("third").oci_archive("localhost/third:1")).expect("an archive");
    let archives = archives(disk.path());
    assert_eq!(bundle(&new, &[&archives[..], &[third]].concat()), (true, String::new()));
    fs::write(layer_with(&new, "other").join("own"), b"OTHER").expect("damage");
    let index = new.join("images/index");
    let right = fs::read(&index).expect("the index");
    fs::write(&index, [&right[..right.len() - 1], b"?"].concat()).expect("an index that cannot be read");

    node.terminate();
    fs::rename(&store, disk.path().join("old")).expect("the system's image before");
    fs::rename(&new, &store).expect("the system's image now");
    node.launch();
    let refusal = |name: &str| {
        let config = container("refused", name, &["true"], &pod);
        let error = node.create_container(create(&pod_id, &config, &pod)).expect_err("it is not verified");
        error.message().to_owned()
    };
    for name in [NAMES[0], NAMES[1], "localhost/mine:1"] {
        let text = refusal(name);
        assert!(text.contains("its additional store is not verified since it changed"), "{name}: {text}");
    }
    assert!(has_both(&node), "they wait for it");

    node.terminate();
    fs::write(store.join("images/index"), &right).expect("the right index");
    node.launch();
    wait_until("the new image is there", || find(&node, "localhost/third:1").is_some());
    wait_until("the damaged one is not", || find(&node, NAMES[1]).is_none());
    assert!(find(&node, "localhost/more:1").is_none(), "it has the same layer");
    assert_eq!(content(&node, NAMES[0], "/own") + &content(&node, "localhost/mine:1", "/own"), "board mine ");
    assert_eq!(links(&node), 3, "{}", node.log());
    assert!(node.exec_sync(exec(&old, &["true"], 5)).is_ok(), "the container runs");
    node.try_import(&image("other").oci_archive(NAMES[1])).expect("the node's own copy");
    assert_eq!(content(&node, NAMES[1], "/own"), "other ");
    node.stop();
}

/// A store with an image that is refused is read again at each start. What it has brought before takes no name from newer images.
#[test]
fn a_name_of_a_store_stays_with_a_newer_image() {
    let (disk, store) = shipped();
    disk.read_only(false);
    fs::write(layer_with(&store, "other").join("own"), b"OTHER").expect("damage");
    let mut node = node_with(&store);
    let refusals = |node: &Node| node.log().matches("images not imported").count();
    wait_until("the damaged one is refused", || refusals(&node) == 1);
    node.try_import(&image("newer").oci_archive(NAMES[0])).expect("imported");
    let newer = find(&node, NAMES[0]).expect("it is there").id;
    assert_eq!(newer, image("newer").id());
    node.restart();
    wait_until("it is read again", || refusals(&node) == 2);
    assert_eq!(find(&node, NAMES[0]).expect("it is there").id, newer);
    assert!(find(&node, &image("board").id()).is_some_and(|found| found.pinned), "that of the store");
    node.stop();
}

#[test]
fn an_image_of_a_store_is_refused_in_a_user_namespace() {
    let (_disk, store) = shipped();
    let node = Node::with(Options { config: config_of(&store), bridge: true, ..Options::default() });
    wait_until("both images are there", || has_both(&node));
    let pod = mapped(bridge_pod("mapped"), 1_000_000);
    let id = node.run_pod(&pod);
    let config = container("one", NAMES[0], &["true"], &pod);
    let error = node.create_container(create(&id, &config, &pod)).expect_err("owners are not mapped");
    assert!(error.message().contains("user namespace"), "{error}");
    node.stop();
}

#[test]
fn a_layer_of_an_additional_store_is_neither_pulled_nor_unpacked_again() {
    let (_disk, store) = shipped();
    let node = node_with(&store);
    wait_until("both images are there", || has_both(&node));
    let registry = Registry::start(node.folder());
    let new = Layer::new(&[Entry::file("new", b"new")], Compression::Gzip);
    let update = Image::probe(&node.probe(), "common").plus(new);
    registry.push(&update, "board", "2");
    let proxy = Proxy::start(registry.address(), Demand::Nothing, Lie::None);
    let name = proxy.name("board", "2");
    node.pull_image(pull(&name)).expect("the update");
    let digest = |layer: &Layer| coracle_tests::layer::digest(&layer.blob);
    let requested = |layer: &Layer| proxy.seen().iter().any(|line| line.contains(&digest(layer)));
    assert!(requested(&update.layers[1]) && !requested(&update.layers[0]), "{:?}", proxy.seen());
    assert_eq!((own_layers(&node).len(), links(&node)), (1, 3));
    assert_eq!(content(&node, &name, "/new") + &content(&node, &name, "/etc/marker"), "new common ");

    // An archive with the same layer.
    node.try_import(&image("board").oci_archive("localhost/imported:1")).expect("imported");
    assert_eq!((own_layers(&node).len(), links(&node)), (1, 3));
    node.stop();
}

#[test]
fn a_daemon_that_is_killed_while_it_links_an_additional_store_leaves_no_incomplete_image() {
    let (_disk, store) = shipped();
    let mut node = node_with(&store);
    for milliseconds in [0, 1, 2, 4, 8, 12, 16, 24, 32, 64] {
        node.kill9();
        fs::remove_dir_all(node.root().join("images")).expect("the images");
        fs::remove_dir_all(node.root().join("layers")).expect("the layers");
        node.spawn();
        std::thread::sleep(Duration::from_millis(milliseconds));
        node.kill9();
        node.launch();
        wait_until("both images are there", || has_both(&node));
        assert_eq!(node.once(NAMES[0], &["true"], |_| ()).1.exit_code, 0, "{milliseconds} ms");
        wait_until("nothing is left", || own_layers(&node).is_empty() && links(&node) == 3);
    }
    node.stop();
}

/// The file systems that the page names, with attributes of files and directories that they have to keep.
#[test]
fn a_store_is_used_from_squashfs_and_erofs() {
    let disk = SmallDisk::new(128);
    let place = |name: &str| disk.path().join(name);
    let lower = Layer::new(&[Entry::file("srv/old", b"old")], Compression::Gzip);
    let upper = [
        Entry::file("srv/.wh..wh..opq", b""),
        Entry::file("srv/new", b"new").owned(7, 8).mode(0o4755).xattr("user.note", b"kept"),
    ];
    let shipped = Image::probe(&program(&binaries()), "read-only")
        .plus(lower)
        .plus(Layer::new(&upper, Compression::Gzip));
    let (archive, store, mounted) = (place("archive.tar"), place("store"), place("mounted"));
    fs::write(&archive, shipped.oci_archive(NAMES[0])).expect("an archive");
    assert_eq!(bundle(&store, std::slice::from_ref(&archive)), (true, String::new()));
    fs::create_dir(&mounted).expect("a mount point");
    let run = |program: &str, words: &[&Path]| {
        let output = Command::new(program).args(words).output();
        let output =
            output.unwrap_or_else(|error| panic!("{program}: {error}: tests/tools/install packages"));
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for (kind, program) in [("squashfs", "mksquashfs"), ("erofs", "mkfs.erofs")] {
        let file = place(kind);
        let words = if kind == "squashfs" { [&*store, &*file] } else { [&*file, &*store] };
        assert!(run(program, &words).0, "{program}");
        let words = ["-t", kind, "-o", "loop,ro"].map(Path::new);
        let (is_mounted, text) = run("mount", &[&words[..], &[&file, &mounted]].concat());
        if text.contains("unknown filesystem type") {
            println!("skipped: this kernel has no {kind}");
            continue;
        }
        assert!(is_mounted, "{kind}: {text}");
        let mut node = node_with(&mounted);
        wait_until("the image is there", || find(&node, NAMES[0]).is_some_and(|image| image.pinned));
        assert_eq!(own_layers(&node), [] as [PathBuf; 0], "{kind}: nothing is unpacked");
        assert_eq!(content(&node, NAMES[0], "/srv/new"), "new ", "{kind}");
        let hidden = node.once(NAMES[0], &["cat", "/srv/old"], |_| ()).1.exit_code;
        assert_ne!(hidden, 0, "{kind}: the attribute of an opaque directory is kept");
        let checked = node.image_command(&["check"]);
        assert!(checked.status.success(), "{kind}: {checked:?}");
        node.restart();
        assert!(find(&node, NAMES[0]).is_some(), "{kind}: from the first answer on");
        node.stop();
        umount2(&mounted, MntFlags::empty()).expect("it is not in use");
    }
}

#[test]
fn an_image_of_a_store_is_judged_by_the_policy() {
    let (disk, store) = shipped();
    disk.read_only(false);
    let policy = disk.path().join("policy.json");
    let text = r#"{"default":[{"type":"insecureAcceptAnything"}],"transports":{"docker":{"localhost/other":[{"type":"reject"}]}}}"#;
    fs::write(&policy, text).expect("a policy");
    let config = format!("{}[image.policy]\nfile = {policy:?}\n", config_of(&store));
    let node = Node::with(Options { config, ..Options::default() });
    wait_until("the accepted one is there", || find(&node, NAMES[0]).is_some_and(|image| image.pinned));
    wait_until("the other one is refused", || node.log().contains("images not imported"));
    assert!(
        find(&node, NAMES[1]).is_none() && node.log().contains("every image is refused"),
        "{}",
        node.log()
    );
    node.stop();
}
