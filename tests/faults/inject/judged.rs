//! `kill -9`, power cuts and errors in pulls that a policy and a program judge, and while an additional store is taken: what is listed was
//! judged and is whole, its signatures are stored with it, the next attempt succeeds, and nothing is left.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coracle_tests::cri::proto::{ImageStatusRequest, RemoveImageRequest};
use coracle_tests::fresh_disk::FreshDisk;
use coracle_tests::host::{self, wait_until, write_program};
use coracle_tests::image::{Image, bundle};
use coracle_tests::layer::{Compression, Entry, Layer, noise};
use coracle_tests::node::{Node, Options};
use coracle_tests::random::Random;
use coracle_tests::registry::Registry;
use coracle_tests::request::{image_spec, pull};
use coracle_tests::signing::{Pair, policy};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

#[cfg(target_arch = "x86_64")]
use super::Fixture;
#[cfg(target_arch = "x86_64")]
use super::errors::{Point, Tried, checked, is_of_connection, names_the_error, none, points, try_all};
use super::is_whole;
#[cfg(target_arch = "x86_64")]
use super::operations::is_the_same;
#[cfg(target_arch = "x86_64")]
use super::trace::{Fault, Tracer, Whose};

/// Number of kills, and of power cuts, with `make inject`.
const KILLS: u64 = 50;
const CUTS: u64 = 30;
/// How many of them are tried where not all are.
const SAMPLE: u64 = 8;
/// Size of a disk whose power is cut in MiB.
const DISK_MIB: u64 = 128;
/// The images of the two stores; they have a layer in common.
const SHIPPED: [&str; 2] = ["localhost/shipped:1", "localhost/shipped:2"];

/// A registry with a signed image, and two additional stores of which one is in the place that is configured.
struct Site {
    home: Node,
    registry: Registry,
    config: String,
    place: PathBuf,
}

impl Site {
    fn new() -> Site {
        let home = Node::start();
        let folder = home.folder();
        let registry = Registry::start(folder);
        let pair = Pair::new(folder, "key");
        let signed = registry.push(&image(&home, "signed"), "app", "1");
        pair.sign(&registry, "app", &signed);
        let rule =
            json!({ registry.address().to_string(): [{ "type": "cosign", "keyPath": pair.public() }] });
        let text =
            json!({ "default": [{ "type": "insecureAcceptAnything" }], "transports": { "docker": rule } });
        let programs = folder.join("verifiers");
        fs::create_dir(&programs).expect("a directory");
        // It ends only with its pull while the gate is closed.
        let wait = format!("#!/bin/sh\nwhile [ -e {:?} ]; do sleep 0.02; done\n", folder.join("closed"));
        write_program(&programs.join("one"), &wait);
        let place = folder.join("place");
        let config = format!(
            "{}verifiers = {programs:?}\nverifier_timeout = \"5m\"\n[image]\nadditional_stores = [{place:?}]\n",
            policy(folder, &text)
        );
        for (number, name) in SHIPPED.iter().enumerate() {
            let archive = folder.join("shipped.tar");
            fs::write(&archive, image(&home, name).oci_archive(name)).expect("an archive");
            let store = folder.join(format!("store-{number}"));
            assert_eq!(bundle(&store, &[archive]), (true, String::new()));
        }
        fs::rename(folder.join("store-0"), &place).expect("a store");
        Site { home, registry, config, place }
    }

    fn node(&self, root: Option<PathBuf>) -> Node {
        let node = Node::with(Options { config: self.config.clone(), root, ..Options::default() });
        wait_until("the store is taken", || is_there(&node, SHIPPED[0]));
        node
    }

    /// Whether the program waits without an end.
    fn close(&self, is_closed: bool) {
        let gate = self.home.folder().join("closed");
        let _ = if is_closed { fs::write(gate, "") } else { fs::remove_file(gate) };
    }

    /// The processes of this site's program.
    fn programs(&self) -> Vec<host::Process> {
        host::processes(&self.home.folder().join("verifiers/one").to_string_lossy())
    }

    fn name(&self) -> String {
        self.registry.name("app", "1")
    }

    /// The number of the store in its place.
    fn current(&self) -> usize {
        usize::from(self.home.folder().join("store-0").exists())
    }

    /// Puts the other store into the place, and lets the node look.
    fn swap(&self, node: &Node) {
        let store = |number: usize| self.home.folder().join(format!("store-{number}"));
        let other = 1 - self.current();
        fs::rename(&self.place, store(1 - other)).expect("the store before");
        fs::rename(store(other), &self.place).expect("the next store");
        // The place may be another directory than the one that is watched.
        let import = node.folder().join("import");
        fs::create_dir_all(&import).expect("the import directory");
        fs::write(import.join(".look"), "").expect("a file");
    }

    /// The store in its place is the one whose image the node has, and all images are whole.
    fn is_taken(&self, node: &Node, what: &str) {
        let (current, mut seen) = (self.current(), [false; 2]);
        let is_so = || {
            seen = SHIPPED.map(|name| is_there(node, name));
            (seen[current] && !seen[1 - current]).then_some(())
        };
        assert!(
            host::wait_within(host::patience(), is_so).is_some(),
            "{what}: {seen:?} of {current}\n{}",
            node.log()
        );
        self.is_clean(node, what);
    }

    /// All images are whole and accepted by their stored signatures, and nothing unfinished is left.
    fn is_clean(&self, node: &Node, what: &str) {
        wait_until("workers have ended", || node.workers().is_empty());
        for words in [&["check"][..], &["check", "--policy"]] {
            let checked = node.image_command(words);
            assert!(checked.status.success(), "{what}: {words:?}: {checked:?}\n{}", node.log());
        }
        wait_for_none(node, what, || unfinished(node));
    }

    /// The image of the registry is pulled, and its signatures are stored.
    fn pulls(&self, node: &Node, what: &str) {
        let pulled = node.pull_image(pull(&self.name()));
        pulled.unwrap_or_else(|error| panic!("{what}, again: {error}\n{}", node.log()));
        assert_eq!(names(node, "images/signatures").len(), 1, "{what}");
    }

    fn remove(&self, node: &Node) {
        let image = Some(image_spec(&self.name()));
        node.remove_image(RemoveImageRequest { image }).expect("it is removed");
        wait_until("its signatures are removed", || names(node, "images/signatures").is_empty());
    }
}

/// An image with a layer that all have, and one that takes a while.
fn image(node: &Node, marker: &str) -> Image {
    let seed: u64 = marker.bytes().map(u64::from).sum();
    let files: Vec<Entry> =
        (0..40).map(|number| Entry::file(&format!("file-{number}"), &noise(20_000, seed + number))).collect();
    Image::probe(&node.probe(), "common").plus(Layer::new(&files, Compression::Gzip))
}

fn is_there(node: &Node, name: &str) -> bool {
    let request = ImageStatusRequest { image: Some(image_spec(name)), verbose: false };
    node.image_status(request).expect("status").image.is_some()
}

fn names(node: &Node, folder: &str) -> BTreeSet<String> {
    let entries = fs::read_dir(node.root().join(folder)).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Waits until a list of what must end is empty; otherwise the failure shows the rest.
fn wait_for_none<T: Debug, L: IntoIterator<Item = T>>(node: &Node, what: &str, list: impl Fn() -> L) {
    let mut left = Vec::new();
    let is_none = || {
        left = list().into_iter().collect();
        left.is_empty().then_some(())
    };
    assert!(host::wait_within(host::patience(), is_none).is_some(), "{what}: {left:?}\n{}", node.log());
}

/// Temporary files and directories of workers.
fn unfinished(node: &Node) -> BTreeSet<String> {
    let layers = names(node, "layers").into_iter().filter(|name| name.starts_with("tmp-"));
    let parts = names(node, "images/parts").into_iter().filter(|name| name.contains('-'));
    let signatures = names(node, "images/signatures").into_iter().filter(|name| name.len() != 64);
    layers.chain(parts).chain(signatures).collect()
}

/// Begins a pull, or puts the other store into its place, and does `act` at a random moment, or without one while the program of the pull
/// runs; returns whether the pull had succeeded before.
fn interrupted(
    site: &Site,
    node: &mut Node,
    is_pull: bool,
    after: Option<Duration>,
    act: impl FnOnce(&mut Node),
) -> bool {
    let (client, request) = (node.another(), pull(&site.name()));
    site.close(after.is_none());
    let pulling = is_pull.then(|| std::thread::spawn(move || client.pull_image(request).is_ok()));
    if !is_pull {
        site.swap(node);
    }
    match after {
        // The duration is the test's input, not a wait for a condition.
        Some(after) => std::thread::sleep(after),
        None => wait_until("the program runs", || !site.programs().is_empty()),
    }
    let had_ended = pulling.as_ref().is_some_and(std::thread::JoinHandle::is_finished);
    act(node);
    pulling.is_some_and(|pulling| pulling.join().expect("no panic")) && had_ended
}

/// Durations of a pull and of the taking of a store without a fault.
fn undisturbed(site: &Site, node: &Node) -> [Duration; 2] {
    let begun = Instant::now();
    site.pulls(node, "undisturbed");
    let pulled = begun.elapsed();
    site.remove(node);
    let begun = Instant::now();
    site.swap(node);
    site.is_taken(node, "undisturbed");
    [pulled, begun.elapsed()]
}

fn moment(whole: Duration, random: &mut Random) -> Duration {
    whole.mul_f64(random.below(1000) as f64 / 950.0)
}

fn count(whole: u64) -> u64 {
    if is_whole() { whole } else { SAMPLE }
}

/// An image that was answered is there, the daemon reads the store again, and the next pull succeeds.
fn is_well(site: &Site, node: &Node, has: bool, what: &str) {
    // Longer than a wait a program that is left would run.
    wait_for_none(node, what, || site.programs());
    site.close(false);
    assert!(is_there(node, &site.name()) || !has, "{what}: an image that was answered is lost");
    site.is_taken(node, what);
    site.pulls(node, what);
    site.is_clean(node, what);
    site.remove(node);
}

#[test]
fn kills_in_pulls_with_a_policy_and_while_a_store_is_taken() {
    let mut random = Random::from_environment();
    let site = Site::new();
    let mut node = site.node(None);
    let whole = undisturbed(&site, &node);
    for round in 0..count(KILLS) {
        let (is_pull, while_asked) = (round % 2 == 0, round % 4 == 0);
        // Not every child's end ends a pull.
        let kind = random.below(if while_asked { 2 } else { 3 });
        let what = format!("kill {round} of {kind}, pull: {is_pull}, while asked: {while_asked}");
        let after = moment(whole[usize::from(!is_pull)], &mut random);
        let after = Some(after).filter(|_| !while_asked);
        let of_child = random.below(4) as usize;
        let has = interrupted(&site, &mut node, is_pull, after, |node| {
            let worker = node.workers().first().map(|worker| worker.pid).filter(|_| kind > 0);
            let child =
                worker.filter(|_| kind > 1).and_then(|worker| host::children(worker).get(of_child).copied());
            // It may have ended by itself.
            let _ = kill(Pid::from_raw(child.or(worker).unwrap_or(node.pid())), Signal::SIGKILL);
        });
        // What a failed import has refused is tried again by the next daemon.
        node.restart();
        is_well(&site, &node, has, &what);
    }
    node.stop();
    site.home.stop();
}

#[test]
fn power_cuts_in_pulls_with_a_policy_and_while_a_store_is_taken() {
    let mut random = Random::from_environment();
    let site = Site::new();
    let mut disk = FreshDisk::with_slow_flush(site.home.folder(), DISK_MIB, Duration::ZERO);
    let mut node = site.node(Some(Path::new(disk.path()).join("root")));
    let whole = undisturbed(&site, &node);
    for round in 0..count(CUTS) {
        let is_pull = round % 2 == 0;
        // Keeps nothing of the cache, half of it, or all of it.
        let percent = 50 * random.below(3);
        let what = format!("cut {round}, pull: {is_pull}, {percent} %");
        let after = Some(moment(whole[usize::from(!is_pull)], &mut random)).filter(|_| round % 4 > 0);
        let has = interrupted(&site, &mut node, is_pull, after, |node| {
            disk.cut();
            node.kill9();
        });
        disk.restore(&mut random, percent);
        node.launch();
        assert!(!node.log().contains("quarantine"), "{what}: {}", node.log());
        is_well(&site, &node, has, &what);
    }
    node.stop();
    drop(disk);
    site.home.stop();
}

/// A confined process that cannot execute its program has no way to say why, and musl reports each error of a thread's clone as EAGAIN.
#[cfg(target_arch = "x86_64")]
fn is_silent(text: &str) -> bool {
    ["process ended: exit code 127", "start a thread that", "the process that parses it ended"]
        .iter()
        .any(|words| text.contains(words))
}

/// Pulls the signed image with an error in the daemon, or in its worker and the processes of that.
#[cfg(target_arch = "x86_64")]
fn try_pull(site: &Site, whose: Whose, fixture: &mut Fixture, (call, error): Point) -> Tried {
    let (client, log_before) = (fixture.node.another(), fixture.node.log().len());
    let tracer = Tracer::attach(fixture.node.pid(), whose, call, Fault::Error(error));
    let pulled = client.pull_image(pull(&site.name()));
    let seen = tracer.stop();
    let refused = checked(fixture, &seen, |fixture| {
        let node = &fixture.node;
        let refused = pulled.err().map(|error| {
            let text = error.message().to_owned();
            // The fetcher and the process of the verifiers write to the log why they end.
            let log = node.log()[log_before..].to_owned();
            let is_logged = text.contains("process") && (names_the_error(&seen, &log) || is_silent(&log));
            let is_named = is_of_connection(&error) || is_silent(&text) || is_logged;
            assert!(is_named || names_the_error(&seen, &text), "without its cause: {text}");
            text
        });
        is_the_same(fixture, "the bystander", &fixture.bystander, fixture.bystander_pid);
        site.pulls(node, "after the error");
        site.is_clean(node, "after the error");
        site.remove(node);
        fixture.check("after the pull");
        refused
    });
    Tried { seen, refused }
}

/// Puts the other store into its place with an error in the daemon, or in its worker.
#[cfg(target_arch = "x86_64")]
fn try_store(site: &Site, whose: Whose, fixture: &mut Fixture, (call, error): Point) -> Tried {
    let log_before = fixture.node.log().len();
    let tracer = Tracer::attach(fixture.node.pid(), whose, call, Fault::Error(error));
    site.swap(&fixture.node);
    let said = || {
        let log = fixture.node.log()[log_before..].to_owned();
        (log.contains("image imported") || log.contains("images not imported")).then_some(log)
    };
    let said = host::wait_within(Duration::from_secs(10), said);
    let seen = tracer.stop();
    let refused = checked(fixture, &seen, |fixture| {
        is_the_same(fixture, "the bystander", &fixture.bystander, fixture.bystander_pid);
        let refused = said.filter(|log| log.contains("images not imported"));
        if let Some(log) = &refused {
            assert!(is_silent(log) || names_the_error(&seen, log), "without its cause: {log}");
        }
        // The next daemon reads it at once; this one after ten seconds or minutes.
        fixture.node.restart();
        site.is_taken(&fixture.node, "after the error");
        fixture.check("after the store");
        refused
    });
    Tried { seen, refused }
}

#[cfg(target_arch = "x86_64")]
fn try_both(name: &str, one: fn(&Site, Whose, &mut Fixture, Point) -> Tried) {
    let site = Site::new();
    let set = || {
        if site.current() == 1 {
            site.swap(&site.home);
        }
        Fixture::with(site.node(None), coracle_tests::request::host_pod)
    };
    let mut failures = Vec::new();
    for (program, whose) in [("Daemon", Whose::Own), ("Started", Whose::Children)] {
        let one = |fixture: &mut Fixture, point| one(&site, whose, fixture, point);
        failures.extend(try_all(&format!("{program}: {name}"), &set, &points, &one));
    }
    none(&failures);
    site.home.stop();
}

#[cfg(target_arch = "x86_64")]
#[test]
fn one_error_in_a_pull_with_a_policy() {
    try_both("PullJudged", try_pull);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn one_error_while_a_store_is_taken() {
    try_both("TakeStore", try_store);
}
