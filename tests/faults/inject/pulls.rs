//! One error at system calls of pulls of what changed, and of the process that serves neighbours: a pull fails with a text that names
//! the cause, or succeeds; whatever fails in a neighbour, the pull succeeds; the layer is the right one; and nothing is left.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;

use coracle_tests::cri::proto::{ImageStatusRequest, RemoveImageRequest};
use coracle_tests::host::{self, wait_until};
use coracle_tests::http;
use coracle_tests::image::probe_entries;
use coracle_tests::layer::{Compression, Entry, Layer, noise};
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::Registry;
use coracle_tests::request::{image_spec, pull};
use coracle_tests::site::{config, local, ports};
use coracle_tests::update::{Tree, directory, image, tree, tree_of_whole};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::Fixture;
use super::errors::{Point, Tried, checked, names_the_error, none, sample, try_all};
use super::operations::is_the_same;
use super::trace::{Fault, Seen, Tracer, Whose};

/// Number of equal calls of which each error is tried: a pull makes the same calls for each file and each chunk.
const EQUAL_MAX: usize = 2;

/// Every error of calls that differ in their name or their file, or some of them.
fn distinct(seen: &Seen) -> Vec<Point> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let mut points = Vec::new();
    for (call, (text, errors)) in seen.errors.iter().enumerate() {
        let kind: String =
            text.chars().map(|letter| if letter.is_ascii_hexdigit() { '#' } else { letter }).collect();
        let count = counts.entry(kind).or_default();
        *count += 1;
        if *count <= EQUAL_MAX {
            points.extend((0..*errors).map(|error| (call + 1, error)));
        }
    }
    sample(points)
}

/// An image in two releases, in a registry, and a node that has both.
struct Update {
    home: Node,
    registry: Registry,
    port: u16,
    new: Layer,
    expected: Tree,
}

impl Update {
    fn new(make: fn(&[Entry]) -> Layer) -> Update {
        let port = ports(1)[0];
        let config = config(Some(port), &[], "open = true\n[image]\nkeep_blobs = false\n");
        let home = Node::with(Options { config, ..Options::default() });
        let registry = Registry::start(home.folder());
        let [old, new] = [1, 2].map(|release| make(&entries(&home, release)));
        registry.push(&image(old), "app", "1");
        registry.push(&image(new.clone()), "app", "2");
        let expected = tree_of_whole(&registry.name("app", "2"), &new);
        Update { home, registry, port, new, expected }
    }

    fn name(&self, tag: &str) -> String {
        self.registry.name("app", tag)
    }

    /// Pulls the first release, unless the node has it, and removes the second one.
    fn prepare(&self, node: &Node) {
        node.pull_image(pull(&self.name("1"))).expect("the first release");
        remove(node, &self.name("2"));
        let layer = self.new.diff_id.trim_start_matches("sha256:");
        let names = || fs::read_dir(node.root().join("layers")).expect("layers").flatten();
        wait_until("the layer is removed", || {
            names().all(|entry| !layer.starts_with(&*entry.file_name().to_string_lossy()))
        });
    }

    /// The node has the second release, and nothing else is left of its pull; if a part could not be removed, the removal of an image
    /// removes it.
    fn check(&self, node: &Node, seen: &Seen) {
        assert!(tree(&directory(node, &self.new)) == self.expected, "another tree");
        let checked = node.image_command(&["check"]);
        assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
        if seen.failed.as_ref().is_some_and(|(call, _)| call.contains("images/parts")) {
            remove(node, &self.name("2"));
        }
        let left = || fs::read_dir(node.root().join("images/parts")).expect("parts").count();
        assert!(
            host::wait_within(host::patience(), || (left() == 0).then_some(())).is_some(),
            "a part is left"
        );
    }

    fn stop(self) {
        self.home.stop();
    }
}

fn entries(node: &Node, release: u8) -> Vec<Entry> {
    let mut large = noise(300_000, 1);
    large[150_000..150_100].fill(release);
    let mut entries = probe_entries(&node.probe());
    entries.extend([
        Entry::directory("app", 0o755),
        Entry::file("app/large", &large).xattr("user.note", b"kept"),
        Entry::file("app/release", &[release; 2000]),
        Entry::symlink("app/link", "large"),
    ]);
    entries.extend((0..4).map(|number| Entry::file(&format!("app/{number}"), &noise(3000, number))));
    entries
}

fn remove(node: &Node, name: &str) {
    let request = ImageStatusRequest { image: Some(image_spec(name)), verbose: false };
    if node.image_status(request).expect("status").image.is_some() {
        node.remove_image(RemoveImageRequest { image: Some(image_spec(name)) }).expect("it is removed");
    }
}

/// A node that asks these neighbours.
fn fixture(neighbours: &[SocketAddr]) -> Fixture {
    let config = config(None, neighbours, "");
    Fixture::with(Node::with(Options { config, ..Options::default() }), coracle_tests::request::host_pod)
}

/// Pulls the second release with an error in the daemon, or in its worker and the processes of that.
fn try_pull(update: &Update, whose: Whose, fixture: &mut Fixture, (call, error): Point) -> Tried {
    update.prepare(&fixture.node);
    let (client, log_before) = (fixture.node.another(), fixture.node.log().len());
    let tracer = Tracer::attach(fixture.node.pid(), whose, call, Fault::Error(error));
    let pulled = client.pull_image(pull(&update.name("2")));
    let seen = tracer.stop();
    let refused = checked(fixture, &seen, |fixture| {
        let refused = pulled.err().map(|error| {
            let is_connection = std::error::Error::source(&error).is_some();
            let text = error.message().to_owned();
            // A process that cannot execute its program has no way to say why, and musl reports each error of a thread's clone as
            // EAGAIN.
            let is_exec = text.contains("process ended: exit code 127");
            let is_thread = |text: &str| text.contains("start a thread that");
            // The fetcher writes to the log why it ends.
            let log = fixture.node.log()[log_before..].to_owned();
            let is_logged = text.contains("the fetcher process ended")
                && (names_the_error(&seen, &log) || is_thread(&log));
            let is_named =
                is_connection || is_exec || is_thread(&text) || is_logged || names_the_error(&seen, &text);
            assert!(is_named, "without its cause: {text}");
            let again = fixture.node.another().pull_image(pull(&update.name("2")));
            again.unwrap_or_else(|error| panic!("the retry: {error}"));
            text
        });
        is_the_same(fixture, "the bystander", &fixture.bystander, fixture.bystander_pid);
        update.check(&fixture.node, &seen);
        fixture.check("after the pull");
        refused
    });
    Tried { seen, refused }
}

/// Serves a node that pulls the second release, with an error in the process that serves or in its parent.
fn try_serve(
    update: &Update,
    port: u16,
    client: &Node,
    fixture: &mut Fixture,
    (call, error): Point,
) -> Tried {
    let node = &fixture.node;
    for tag in ["1", "2"] {
        node.pull_image(pull(&update.name(tag))).expect("both releases");
    }
    update.prepare(client);
    // A process that serves ends with a reload, and one that failed is replaced at once.
    end_serving(node);
    let tracer = Tracer::attach(node.pid(), Whose::Children, call, Fault::Error(error));
    let pulled = client.pull_image(pull(&update.name("2")));
    let seen = tracer.stop();
    let refused = checked(fixture, &seen, |fixture| {
        pulled.unwrap_or_else(|error| panic!("a neighbour ends a pull: {error}\n{}", client.log()));
        update.check(client, &seen);
        is_the_same(fixture, "the bystander", &fixture.bystander, fixture.bystander_pid);
        end_serving(&fixture.node);
        let answer = || http::request(local(port), "GET", "/v2/", "", b"").ok();
        let answer = host::wait_within(host::patience(), answer).expect("the next process serves");
        assert_eq!(answer.0.second(), "200");
        end_serving(&fixture.node);
        fixture.check("after the pull");
        None
    });
    Tried { seen, refused }
}

fn end_serving(node: &Node) {
    kill(Pid::from_raw(node.pid()), Signal::SIGHUP).expect("it is ours to signal");
    wait_until("the process that serves has ended", || node.workers().is_empty());
}

#[test]
fn one_error_in_a_partial_pull() {
    let update = Update::new(Layer::chunked);
    let mut failures = Vec::new();
    for (name, whose) in [("Daemon", Whose::Own), ("Started", Whose::Children)] {
        let one = |fixture: &mut Fixture, point| try_pull(&update, whose, fixture, point);
        failures.extend(try_all(&format!("{name}: PullPartial"), &|| fixture(&[]), &distinct, &one));
    }
    update.stop();
    none(&failures);
}

/// The headers that its table lacks are in a file without a name.
#[test]
fn one_error_in_a_partial_pull_of_estargz() {
    let update = Update::new(Layer::estargz);
    let one = |fixture: &mut Fixture, point| try_pull(&update, Whose::Children, fixture, point);
    let failures = try_all("Started: PullStargz", &|| fixture(&[]), &distinct, &one);
    update.stop();
    none(&failures);
}

#[test]
fn one_error_in_a_pull_from_a_neighbour() {
    let update = Update::new(|entries| Layer::new(entries, Compression::Gzip));
    for tag in ["1", "2"] {
        update.home.pull_image(pull(&update.name(tag))).expect("both releases");
    }
    let neighbours = [local(update.port)];
    let one = |fixture: &mut Fixture, point| try_pull(&update, Whose::Children, fixture, point);
    let failures = try_all("Started: PullFromNeighbour", &|| fixture(&neighbours), &distinct, &one);
    update.stop();
    none(&failures);
}

#[test]
fn one_error_in_the_process_that_serves_neighbours() {
    let update = Update::new(|entries| Layer::new(entries, Compression::Gzip));
    let port = ports(1)[0];
    let client = Node::with(Options { config: config(None, &[local(port)], ""), ..Options::default() });
    let serving = || {
        let config = config(Some(port), &[], "open = true\n[image]\nkeep_blobs = false\n");
        Fixture::with(Node::with(Options { config, ..Options::default() }), coracle_tests::request::host_pod)
    };
    let one = |fixture: &mut Fixture, point| try_serve(&update, port, &client, fixture, point);
    let failures = try_all("Started: ServeNeighbour", &serving, &distinct, &one);
    client.stop();
    update.stop();
    none(&failures);
}
