//! `kill -9` and power cuts in pulls of what changed: of layers with a table of contents, and of layers that a neighbour has unpacked.
//! Whatever ended the pull, or the neighbour that serves it, the store is complete, what it has was verified, and the next pull
//! succeeds and leaves nothing.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coracle_tests::cri::proto::{ImageStatusRequest, RemoveImageRequest};
use coracle_tests::fault::{Fault, Faulty, Line};
use coracle_tests::fresh_disk::FreshDisk;
use coracle_tests::host::{self, wait_until};
use coracle_tests::http;
use coracle_tests::layer::{Compression, Entry, Layer, digest, noise};
use coracle_tests::node::{Node, Options};
use coracle_tests::random::Random;
use coracle_tests::registry::Registry;
use coracle_tests::request::{image_spec, pull};
use coracle_tests::site::{config, local, ports};
use coracle_tests::update::{Tree, directory, image, release, tree, tree_of_whole};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::is_whole;

/// Number of kills, and of power cuts, with `make inject`.
const KILLS: u64 = 75;
const CUTS: u64 = 45;
/// How many of them are tried where not all are.
const SAMPLE: u64 = 9;
/// Number of images, and the number of that which comes from the neighbour.
const IMAGES: u64 = 3;
const PLAIN: usize = 1;
/// Size of a disk whose power is cut in MiB.
const DISK_MIB: u64 = 192;

/// The image of an update, in two releases.
struct Update {
    repository: &'static str,
    new: Layer,
    expected: Tree,
    /// The line that the log has of a pull in part.
    logged: &'static str,
    /// Duration of a pull without a fault.
    whole: Duration,
}

/// Two nodes with the first release of each image. The first one serves the other, and has the second release of one of them
/// unpacked.
struct Site {
    first: Node,
    port: u16,
    node: Node,
    proxy: Faulty,
    updates: [Update; IMAGES as usize],
    _registry: Registry,
}

impl Site {
    /// `roots`: the root directories of the nodes, or those that they have usually.
    fn new(roots: [Option<PathBuf>; 2]) -> Site {
        let [port, other] = [(); 2].map(|()| ports(1)[0]);
        let start = |root, own, neighbour, more: &str| {
            let more = format!("open = true\n{more}");
            let config = config(Some(own), &[local(neighbour)], &more);
            Node::with(Options { config, root, ..Options::default() })
        };
        let [of_first, of_node] = roots;
        // So slowly that a pull can be interrupted.
        let first = start(of_first, port, other, "rate_max = 3000000\n[image]\nkeep_blobs = false\n");
        let node = start(of_node, other, port, "");
        let registry = Registry::start(first.folder());
        let entries = |number: u8| {
            let mut entries = release(&node, number);
            entries.push(Entry::file("app/changed", &noise(700_000, u64::from(number))));
            entries
        };
        let [old, new] = [1, 2].map(|number| Layer::chunked(&entries(number)));
        let [plain, plain_new] = [3, 4].map(|number| Layer::new(&entries(number), Compression::Gzip));
        let [listed, listed_new] = [5, 6].map(|number| Layer::estargz(&entries(number)));
        let all = [("chunked", &old, &new), ("plain", &plain, &plain_new), ("estargz", &listed, &listed_new)];
        for (repository, old, new) in all {
            registry.push(&image(old.clone()), repository, "1");
            registry.push(&image(new.clone()), repository, "2");
        }
        let (line, paths) =
            (Line::new(4e6), [&new, &listed_new].map(|layer| format!("/blobs/{}", digest(&layer.blob))));
        let proxy = Faulty::start(registry.address(), move |head, _| {
            let is_slow = paths.iter().any(|path| head.second().contains(path));
            if is_slow { Fault::Over(line.clone()) } else { Fault::None }
        });
        let update = |(repository, _, new): (&'static str, &Layer, &Layer)| Update {
            repository,
            new: new.clone(),
            expected: tree_of_whole(&proxy.name(repository, "2"), new),
            logged: if repository == "plain" { "which has it unpacked" } else { "bytes were on the node" },
            whole: Duration::ZERO,
        };
        let updates = all.map(update);
        let mut site = Site { first, port, node, proxy, updates, _registry: registry };
        for name in [site.name(0, "1"), site.name(PLAIN, "1"), site.name(PLAIN, "2")] {
            site.first.pull_image(pull(&name)).expect("the first node");
        }
        for which in 0..site.updates.len() {
            site.node.pull_image(pull(&site.name(which, "1"))).expect("the first release");
            let begun = Instant::now();
            site.pulls_again("undisturbed", which);
            site.updates[which].whole = begun.elapsed();
            site.remove(which);
        }
        site
    }

    fn name(&self, which: usize, tag: &str) -> String {
        self.proxy.name(self.updates[which].repository, tag)
    }

    /// Begins a pull of a second release, and does `act` at a random moment; returns whether the pull had succeeded before.
    fn interrupted(&mut self, which: usize, random: &mut Random, act: impl FnOnce(&mut Site)) -> bool {
        let (client, request) = (self.node.another(), pull(&self.name(which, "2")));
        let after = self.updates[which].whole.mul_f64(random.below(1000) as f64 / 950.0);
        let pulling = std::thread::spawn(move || client.pull_image(request).is_ok());
        // The duration is the test's input, not a wait for a condition.
        std::thread::sleep(after);
        let had_ended = pulling.is_finished();
        act(self);
        pulling.join().expect("no panic") && had_ended
    }

    /// Checks that the store of the node is complete and verified; `has`: the second release is in it.
    fn is_whole(&self, what: &str, which: usize, has: bool) {
        let node = &self.node;
        wait_until("pulls have ended", || is_idle(node));
        let has_old = |which| is_there(node, &self.name(which, "1"));
        assert!((0..self.updates.len()).all(has_old), "{what}: it is lost");
        let has_it = is_there(node, &self.name(which, "2"));
        assert!(has_it || !has, "{what}: an image that was answered is lost");
        if has_it {
            self.is_verified(what, which);
        }
        for node in [node, &self.first] {
            let checked = node.image_command(&["check"]);
            assert!(checked.status.success(), "{what}: {}", String::from_utf8_lossy(&checked.stderr));
            let mut left = Vec::new();
            let is_clean = || {
                left = unfinished(node);
                left.is_empty().then_some(())
            };
            assert!(
                host::wait_within(host::patience(), is_clean).is_some(),
                "{what}: {left:?}\n{}",
                node.log()
            );
        }
    }

    fn is_verified(&self, what: &str, which: usize) {
        let Update { new, expected, .. } = &self.updates[which];
        assert!(tree(&directory(&self.node, new)) == *expected, "{what}: another tree\n{}", self.node.log());
    }

    /// The next pull succeeds, and leaves nothing.
    fn pulls_again(&self, what: &str, which: usize) {
        let (node, name) = (&self.node, self.name(which, "2"));
        let pulled = node.pull_image(pull(&name));
        pulled.unwrap_or_else(|error| panic!("{what}, again: {error}\n{}", node.log()));
        self.is_verified(what, which);
        wait_until("pulls have ended", || is_idle(node));
        assert_eq!(names(node, "images/parts"), BTreeSet::new(), "{what}\n{}", node.log());
    }

    fn remove(&self, which: usize) {
        let image = Some(image_spec(&self.name(which, "2")));
        self.node.remove_image(RemoveImageRequest { image }).expect("it is removed");
        let layer = directory_name(&self.updates[which].new);
        wait_until("its layer is removed", || {
            names(&self.node, "layers").iter().all(|name| !layer.starts_with(name))
        });
    }

    /// Checks that updates were pulled in part, and are after all faults, and ends the nodes. The death of a process that unpacks leads to
    /// a whole pull, so that there may be few others in a sample.
    fn stop(self) {
        for (update, which) in self.updates.iter().zip(0..) {
            for _ in 0..3 {
                self.pulls_again("after all faults", which);
                self.remove(which);
            }
            let count = self.node.log().matches(update.logged).count();
            println!("{}: {count} pulls in part", update.repository);
            assert!(count > 3, "{}", self.node.log());
        }
        [self.node, self.first].into_iter().for_each(Node::stop);
    }
}

/// The digits that begin with the name of a layer's directory.
fn directory_name(layer: &Layer) -> &str {
    layer.diff_id.trim_start_matches("sha256:")
}

fn is_there(node: &Node, name: &str) -> bool {
    let request = ImageStatusRequest { image: Some(image_spec(name)), verbose: false };
    node.image_status(request).expect("status").image.is_some()
}

/// Whether only neighbours are served.
fn is_idle(node: &Node) -> bool {
    node.workers().iter().all(|worker| worker.command.contains(" mirror"))
}

fn names(node: &Node, folder: &str) -> BTreeSet<String> {
    let entries = fs::read_dir(node.root().join(folder)).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Temporary files and directories of workers. A removal whose worker was killed (`tmp-trash`) is repeated by the next sweep, which the log
/// says.
fn unfinished(node: &Node) -> Vec<String> {
    let with =
        |folder, part: &'static str| names(node, folder).into_iter().filter(move |name| name.contains(part));
    let layers = with("layers", "tmp-").filter(|name| !name.starts_with("tmp-trash"));
    layers.chain(with("images/parts", "-")).chain(with("images/contents", "tmp-")).collect()
}

fn count(whole: u64) -> u64 {
    if is_whole() { whole } else { SAMPLE }
}

/// A process of a kind that a pull needs, or the daemon if there is none.
fn victim(site: &Site, kind: u64, random: &mut Random) -> i32 {
    let of = |node: &Node, is_mirror: bool| {
        let workers = node.workers().into_iter();
        let workers: Vec<i32> = workers
            .filter(|worker| worker.command.contains(" mirror") == is_mirror)
            .map(|worker| worker.pid)
            .collect();
        workers.first().copied()
    };
    let child = |worker: i32, random: &mut Random| {
        let children = host::children(worker);
        children.get(random.below(children.len() as u64) as usize).copied()
    };
    let found = match kind {
        0 => None,
        1 => of(&site.node, false),
        2 => of(&site.node, false).and_then(|worker| child(worker, random)),
        3 => of(&site.first, true),
        4 => of(&site.first, true).and_then(|worker| child(worker, random)),
        _ => Some(site.first.pid()),
    };
    found.unwrap_or(site.node.pid())
}

#[test]
fn kills_of_partial_pulls_and_of_those_who_serve_them() {
    let mut random = Random::from_environment();
    let mut site = Site::new([None, None]);
    for round in 0..count(KILLS) {
        let which = (round % IMAGES) as usize;
        let kind = random.below(if which == PLAIN { 6 } else { 3 });
        let what = format!("kill {round} of {kind}, {}", site.updates[which].repository);
        let mut killed = 0;
        let mut of_victim = random.clone();
        let has = site.interrupted(which, &mut random, |site| {
            killed = victim(site, kind, &mut of_victim);
            // It may have ended by itself.
            let _ = kill(Pid::from_raw(killed), Signal::SIGKILL);
        });
        for node in [&mut site.node, &mut site.first] {
            if node.pid() == killed {
                node.restart();
            }
        }
        site.is_whole(&what, which, has);
        site.pulls_again(&what, which);
        host::wait_for("the neighbour serves again", || {
            http::request(local(site.port), "GET", "/v2/", "", b"").ok()
        });
        site.remove(which);
    }
    site.stop();
}

/// The disk of these tests loses what a power cut loses.
#[test]
fn only_what_was_flushed_is_certain_after_a_power_cut() {
    let home = Node::start();
    for percent in [0, 100] {
        let mut disk = FreshDisk::with_slow_flush(home.folder(), 64, Duration::ZERO);
        let write = |name: &str| {
            let path = disk.path().join(name);
            fs::write(&path, noise(20_000, 1)).expect("a file");
            fs::File::open(path).expect("a file")
        };
        write("flushed").sync_all().expect("it syncs");
        drop(write("written"));
        disk.cut();
        write("late").sync_all().expect("the disk has no power");
        disk.restore(&mut Random::new(1), percent);
        let has = |name: &str| fs::read(disk.path().join(name)).is_ok_and(|found| found == noise(20_000, 1));
        assert_eq!(["flushed", "written", "late"].map(has), [true, false, false], "{percent}");
    }
    home.stop();
}

/// The power of the node that pulls is cut, or of the one that serves it.
#[test]
fn power_cuts_in_partial_pulls_and_while_they_are_served() {
    let mut random = Random::from_environment();
    let home = Node::start();
    let disk = |_| FreshDisk::with_slow_flush(home.folder(), DISK_MIB, Duration::ZERO);
    let mut disks = [0, 1].map(disk);
    let root = |disk: &FreshDisk| Some(Path::new(disk.path()).join("root"));
    let mut site = Site::new([root(&disks[0]), root(&disks[1])]);
    for round in 0..count(CUTS) {
        let which = (round % IMAGES) as usize;
        let is_first = which == PLAIN && random.below(2) == 0;
        // Keeps nothing of the cache, half of it, or all of it.
        let percent = 50 * random.below(3);
        let what = format!("cut {round}, {}, first: {is_first}", site.updates[which].repository);
        let disk = &mut disks[usize::from(!is_first)];
        let has = site.interrupted(which, &mut random, |site| {
            disk.cut();
            if is_first { site.first.kill9() } else { site.node.kill9() }
        });
        disk.restore(&mut random, percent);
        let node = if is_first { &mut site.first } else { &mut site.node };
        node.launch();
        let log = node.log();
        assert!(!log.contains("quarantine"), "{what}: {log}");
        if is_first {
            assert!(is_there(&site.first, &site.name(PLAIN, "2")), "{what}: an image is lost");
            let Update { new, expected, .. } = &site.updates[PLAIN];
            assert!(tree(&directory(&site.first, new)) == *expected, "{what}: another tree");
        }
        site.is_whole(&what, which, has);
        site.pulls_again(&what, which);
        site.remove(which);
    }
    site.stop();
    drop(disks);
    home.stop();
}
