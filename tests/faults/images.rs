//! Faults of the image store: `kill -9` of the daemon, its workers and the processes that parse archives, at
//! random points of pulls, imports and removals; disks without free bytes or inodes. Afterwards every image
//! is complete or absent, and no temporary data remains.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::{ImageStatusRequest, ListImagesRequest, RemoveImageRequest};
use coracle_tests::fault::{Fault, Faulty};
use coracle_tests::host::{self, wait_until};
use coracle_tests::image::{Image, probe_entries};
use coracle_tests::layer::{Compression, Entry, Layer, packed};
use coracle_tests::node::{Node, Options};
use coracle_tests::random::Random;
use coracle_tests::registry::Registry;
use coracle_tests::request::{image_spec, pull};
use coracle_tests::small_disk::SmallDisk;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Number of points.
const POINTS: u32 = 50;

/// Two images with three layers each, of which the lowest one is shared.
fn images(node: &Node) -> [Image; 2] {
    let noise = |seed: u8| {
        (0..600_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8 ^ seed).collect::<Vec<u8>>()
    };
    let base = Layer::new(&probe_entries(&node.probe()), Compression::Gzip);
    [1, 2].map(|seed| {
        let files: Vec<Entry> =
            (0..50).map(|n| Entry::file(&format!("srv/{seed}/{n}"), &noise(seed)[..4000])).collect();
        Image::of(vec![
            base.clone(),
            Layer::new(&[Entry::file("big", &noise(seed))], Compression::Gzip),
            packed(&files, Compression::Zstd),
        ])
        .with("Entrypoint", serde_json::json!(["/probe"]))
    })
}

fn remove(client: &Cri, name: &str) -> Result<(), tonic::Status> {
    client.remove_image(RemoveImageRequest { image: Some(image_spec(name)) }).map(drop)
}

fn is_there(node: &Node, name: &str) -> bool {
    let request = ImageStatusRequest { image: Some(image_spec(name)), verbose: false };
    node.image_status(request).expect("status").image.is_some()
}

fn names(node: &Node, folder: &str) -> BTreeSet<String> {
    let entries = fs::read_dir(node.root().join(folder)).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Layers and temporary directories, without the directory of mount links.
fn layers(node: &Node) -> Vec<String> {
    names(node, "layers").into_iter().filter(|name| name != "l").collect()
}

/// Verifies all listed images byte by byte; if there are none, the store must be empty.
#[track_caller]
fn assert_whole_or_absent(node: &Node, what: &str) {
    wait_until("workers have ended", || node.workers().is_empty());
    let checked = node.image_command(&["check"]);
    let said = String::from_utf8_lossy(&checked.stderr).into_owned();
    assert!(checked.status.success(), "{what}: {said}");
    let mut listed = node.list_images(ListImagesRequest::default()).expect("list").images;
    listed.retain(|image| !image.pinned);
    let garbage = || -> Vec<String> {
        let layers = layers(node).into_iter().filter(|name| name.starts_with("tmp-"));
        let parts = names(node, "images/parts").into_iter().filter(|name| name.contains('-'));
        layers.chain(parts).collect()
    };
    wait_until(&format!("{what}: nothing unfinished is left: {:?}", garbage()), || garbage().is_empty());
    let records = names(node, "images/records").len();
    assert_eq!(records, listed.len(), "{what}");
    // An image has three layers, and two share one.
    let now = layers(node).len();
    let expected = if listed.is_empty() { 0 } else { 2 * listed.len() + 1 };
    wait_until(&format!("{what}: {now} layers of {} images", listed.len()), || {
        layers(node).len() == expected
    });
    assert_eq!(names(node, "images/users").len(), listed.len(), "{what}");
}

/// Chooses the process to kill: the daemon, one of its workers, or one of their children.
fn victim(node: &Node, random: &mut Random) -> Option<i32> {
    let workers: Vec<i32> = node.workers().iter().map(|worker| worker.pid).collect();
    match random.below(3) {
        0 => None,
        1 => workers.first().copied().or(None),
        _ => {
            let children =
                host::processes("coracle-worker\0confined").into_iter().chain(host::processes("confined "));
            let is_ours = |pid: i32| {
                let parent = host::proc_value(pid, "status", "PPid").unwrap_or(0);
                workers.iter().any(|worker| *worker as u64 == parent)
            };
            children.map(|process| process.pid).find(|pid| is_ours(*pid)).or(workers.first().copied())
        }
    }
}

#[test]
fn the_store_is_consistent_after_kills_at_fifty_random_points() {
    let mut random = Random::from_environment();
    let mut node = Node::start();
    let registry = Registry::start(node.folder());
    let images = images(&node);
    let files = [0, 1].map(|number| {
        registry.push(&images[number], "points", &number.to_string());
        let file = node.folder().join(format!("{number}.tar"));
        fs::write(&file, images[number].oci_archive(&format!("localhost/points:{number}")))
            .expect("an archive");
        file
    });
    let pulled = [0, 1].map(|number| registry.name("points", &number.to_string()));
    let imported = [0, 1].map(|number| format!("localhost/points:{number}"));
    // The duration of undisturbed operations determines the points.
    let begin = Instant::now();
    node.pull_image(pull(&pulled[0])).expect("undisturbed");
    let whole = begin.elapsed().max(Duration::from_millis(20));
    remove(&node, &pulled[0]).expect("undisturbed");
    for point in 0..POINTS {
        let number = random.below(2) as usize;
        let kind = random.below(3);
        let what = format!("point {point}: {} of {number}", ["pull", "import", "removal"][kind as usize]);
        if kind == 2 {
            node.pull_image(pull(&pulled[number])).unwrap_or_else(|error| panic!("{what}: {error}"));
        }
        let client = node.another();
        let after = whole.mul_f64(random.below(1000) as f64 / if kind == 2 { 20_000.0 } else { 900.0 });
        std::thread::scope(|scope| {
            let (pulled, file, node) = (&pulled[number], &files[number], &node);
            scope.spawn(move || match kind {
                // The result is checked afterwards.
                0 => drop(client.pull_image(pull(pulled))),
                1 => drop(node.image_command(&["import", &file.display().to_string()])),
                _ => drop(remove(&client, pulled)),
            });
            // The duration is the test's input, not a wait for a condition.
            std::thread::sleep(after);
            let target = victim(node, &mut random).unwrap_or(node.pid());
            // It may have ended by itself.
            let _ = kill(Pid::from_raw(target), Signal::SIGKILL);
        });
        node.restart();
        assert_whole_or_absent(&node, &what);
        // The next attempt succeeds, whatever was left; sometimes everything is removed.
        node.pull_image(pull(&pulled[number])).unwrap_or_else(|error| panic!("{what}, again: {error}"));
        assert!(is_there(&node, &pulled[number]), "{what}");
        if random.below(2) == 0 {
            for name in pulled.iter().chain(&imported) {
                remove(&node, name).unwrap_or_else(|error| panic!("{what}: {error}"));
            }
            assert_whole_or_absent(&node, &what);
        }
    }
    node.stop();
}

/// Disks of increasing size in bytes and in inodes: each error names what is missing, and the disk is as
/// empty as before.
#[test]
fn failed_pulls_on_full_disks_leave_no_files() {
    let fixture = Node::start();
    let registry = Registry::start(fixture.folder());
    let image = &images(&fixture)[0];
    registry.push(image, "full", "1");
    let name = registry.name("full", "1");
    let archive = image.oci_archive("localhost/full:1");
    let (mut refused, mut taken) = (0, 0);
    let sizes =
        [600, 900, 1200, 1600, 2000, 2600, 3200, 4000, 8000].map(|kib| format!("size={kib}k,nr_inodes=2000"));
    let counts = [30, 40, 60, 70, 95, 110, 400].map(|inodes| format!("size=16m,nr_inodes={inodes}"));
    for limits in sizes.iter().chain(&counts) {
        let disk = SmallDisk::with(limits);
        let node = Node::with(Options { root: Some(disk.path().join("root")), ..Options::default() });
        for is_pull in [true, false] {
            let result = match is_pull {
                true => node.pull_image(pull(&name)).map(drop).map_err(|error| {
                    assert_eq!(error.code(), tonic::Code::ResourceExhausted, "{limits}: {error}");
                    error.message().to_owned()
                }),
                false => node.try_import(&archive).map(drop),
            };
            match result {
                Ok(()) => {
                    taken += 1;
                    remove(&node, if is_pull { &name } else { "localhost/full:1" }).expect("remove");
                }
                Err(text) => {
                    refused += 1;
                    assert!(
                        text.contains("o space left") && text.contains("inodes are free"),
                        "{limits}: {text}"
                    );
                }
            }
            wait_until(&format!("{limits}: the disk is as it was"), || {
                node.workers().is_empty()
                    && layers(&node).is_empty()
                    && names(&node, "images/parts").is_empty()
                    && names(&node, "images/blobs/sha256").is_empty()
                    && names(&node, "images/users").is_empty()
            });
        }
        node.stop();
    }
    assert!(refused > 8 && taken > 4, "{refused} refused, {taken} taken");
    fixture.stop();
}

/// An image that cannot fit is refused before the download, which may be expensive.
#[test]
fn an_image_that_cannot_fit_is_not_downloaded() {
    let fixture = Node::start();
    let registry = Registry::start(fixture.folder());
    let image = &images(&fixture)[0];
    registry.push(image, "full", "1");
    let proxy = Faulty::start(registry.address(), |_, _| Fault::None);
    for limits in ["size=600k,nr_inodes=2000", "size=16m,nr_inodes=32"] {
        let disk = SmallDisk::with(limits);
        let node = Node::with(Options { root: Some(disk.path().join("root")), ..Options::default() });
        let refused = node.pull_image(pull(&proxy.name("full", "1"))).expect_err("no room");
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted, "{limits}: {refused}");
        assert!(refused.message().contains("o space left"), "{limits}: {refused}");
        for layer in &image.layers {
            let digest = coracle_tests::layer::digest(&layer.blob);
            assert_eq!(proxy.blob(&digest).len(), 0, "{limits}: {refused}");
        }
        node.stop();
    }
    fixture.stop();
}
