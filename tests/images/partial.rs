//! Pulls of what changed: layers in the format zstd:chunked, made by the library of containers/storage, of which the node has most
//! in other layers. Each pull has the tree of a whole one, and bad tables, ranges and files lead to it, too.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use coracle_tests::fault::{Fault, Faulty, Line, Served};
use coracle_tests::layer::{Compression, Entry, Layer, digest, noise};
use coracle_tests::node::Node;
use coracle_tests::registry::Registry;
use coracle_tests::request::pull;
use coracle_tests::update::{directory, image, release, tree};
use serde_json::json;

/// A node that pulled release 1, and its registry with release 2.
pub(super) struct Update {
    pub(super) node: Node,
    pub(super) registry: Registry,
    pub(super) old: Layer,
    pub(super) new: Layer,
}

impl Update {
    pub(super) fn new(old: impl Fn(&[Entry]) -> Layer) -> Update {
        Update::to(old, |new| new)
    }

    /// An update to a release whose layer is changed by `forge`.
    pub(super) fn to(old: impl Fn(&[Entry]) -> Layer, forge: impl Fn(Layer) -> Layer) -> Update {
        let node = Node::start();
        let (old, new) = (old(&release(&node, 1)), forge(Layer::chunked(&release(&node, 2))));
        Update::of(node, old, new)
    }

    /// An update of an image of one layer.
    pub(super) fn of(node: Node, old: Layer, new: Layer) -> Update {
        let registry = Registry::start(node.folder());
        registry.push(&image(old.clone()), "app", "1");
        registry.push(&image(new.clone()), "app", "2");
        Update { node, registry, old, new }
    }

    /// Pulls release 1, through the address at which release 2 is pulled: the repository is the same.
    pub(super) fn pull(&self, proxy: &Faulty, tag: &str) {
        self.node.pull_image(pull(&proxy.name("app", tag))).expect("pull");
    }

    /// Pulls release 2 after release 1 through a proxy with these faults for the new blob; returns the number of its bytes that
    /// were sent.
    pub(super) fn run(
        &self,
        plan: impl Fn(&coracle_tests::http::Head, usize) -> Fault + Send + Sync + 'static,
    ) -> u64 {
        let blob = digest(&self.new.blob);
        let path = format!("/blobs/{blob}");
        let proxy = Faulty::start(self.registry.address(), move |head, before| {
            if head.second().contains(&path) { plan(head, before) } else { Fault::None }
        });
        self.pull(&proxy, "1");
        self.spoil_and_pull(&proxy, |_| ());
        proxy.blob_bytes(&blob)
    }

    pub(super) fn spoil_and_pull(&self, proxy: &Faulty, spoil: impl FnOnce(&Path)) {
        spoil(&directory(&self.node, &self.old));
        self.pull(proxy, "2");
        self.check();
    }

    /// Compares the layer with one that was pulled whole.
    pub(super) fn check(&self) {
        let whole = Node::start();
        whole.pull_image(pull(&self.registry.name("app", "2"))).expect("a whole pull");
        let expected = tree(&directory(&whole, &self.new));
        assert_eq!(tree(&directory(&self.node, &self.new)), expected);
        let parts = fs::read_dir(self.node.root().join("images/parts")).expect("parts").count();
        assert_eq!(parts, 0, "no part is left");
        whole.stop();
    }

    pub(super) fn log(&self) -> String {
        self.node.log()
    }

    pub(super) fn stop(self) {
        self.node.stop();
    }
}

/// This fault for each range but the first `skipped` ones.
pub(super) fn of_ranges(
    skipped: usize,
    fault: Fault,
) -> impl Fn(&coracle_tests::http::Head, usize) -> Fault + Send + Sync + 'static {
    let seen = AtomicUsize::new(0);
    move |head, _| match head.get("range") {
        Some(_) if seen.fetch_add(1, Ordering::Relaxed) >= skipped => fault.clone(),
        _ => Fault::None,
    }
}

pub(super) fn none(_: &coracle_tests::http::Head, _: usize) -> Fault {
    Fault::None
}

#[test]
fn an_update_downloads_what_changed() {
    let update = Update::new(Layer::chunked);
    let sent = update.run(none);
    let size = update.new.blob.len() as u64;
    assert!(sent < size / 20, "{sent} of {size} bytes\n{}", update.log());
    assert!(update.log().contains("bytes were on the node"), "{}", update.log());
    let name = format!("{}/app:2", update.registry.address());
    // The image works under another name, too, for which nothing is downloaded.
    update.node.pull_image(pull(&name)).expect("pull");
    assert_eq!(update.node.once(&name, &["cat", "/app/release"], |_| ()).0, "release 2\n");
    update.stop();
}

#[test]
fn a_layer_without_a_table_is_a_source_at_its_first_use() {
    let update = Update::new(|entries| Layer::new(entries, Compression::Gzip));
    let sent = update.run(none);
    let size = update.new.blob.len() as u64;
    assert!(sent < size / 10, "{sent} of {size} bytes\n{}", update.log());
    update.stop();
}

#[test]
fn a_registry_without_ranges_sends_the_whole_blob() {
    let update = Update::new(Layer::chunked);
    let (blob, size) = (update.new.blob.clone(), update.new.blob.len() as u64);
    let sent = update.run(move |head, _| match head.get("range") {
        Some(_) => Fault::raw("200 OK", &[], &blob),
        None => Fault::None,
    });
    assert!(sent >= size, "{sent} of {size}");
    assert!(update.log().contains("is pulled whole: "), "{}", update.log());
    update.stop();
}

#[test]
fn wrong_answers_to_ranges_lead_to_the_whole_blob() {
    for status in ["206 Partial Content", "416 Range Not Satisfiable", "400 Bad Request"] {
        for (header, length) in [
            ("Content-Range: bytes 0-99/1000", 100),
            ("Content-Type: multipart/byteranges; boundary=x", 100),
            ("X: y", 100),
            ("X: y", 10_000_000),
        ] {
            let update = Update::new(Layer::chunked);
            let sent = update.run(move |head, _| match head.get("range") {
                Some(_) => Fault::raw(status, &[header], &vec![b'x'; length]),
                None => Fault::None,
            });
            assert_eq!(sent, update.new.blob.len() as u64, "{status} {header}\n{}", update.log());
            assert!(update.log().contains("is pulled whole: "), "{status} {header}: {}", update.log());
            update.stop();
        }
    }
}

#[test]
fn chunks_with_changed_bytes_lead_to_the_whole_blob() {
    for skipped in [0, 1] {
        let update = Update::new(Layer::chunked);
        // The first range is the table, those after it are chunks.
        let sent = update.run(of_ranges(skipped, Fault::Flip));
        assert!(sent >= update.new.blob.len() as u64, "{sent}\n{}", update.log());
        assert!(update.log().contains("is pulled whole: "), "{}", update.log());
        update.stop();
    }
}

#[test]
fn interrupted_ranges_are_resumed() {
    let update = Update::new(Layer::chunked);
    let sent = update.run(|_, before| if before == 0 { Fault::Cut(30_000) } else { Fault::None });
    let size = update.new.blob.len() as u64;
    assert!(sent < size / 10, "{sent} of {size} bytes\n{}", update.log());
    update.stop();
}

/// A file of a layer with other content: damaged on disk, or changed by another process.
#[test]
fn a_damaged_source_is_downloaded_instead() {
    type Spoil = fn(&Path);
    let spoils: [(&str, Spoil); 5] = [
        ("other bytes", |layer| {
            let file = fs::File::options().write(true).open(layer.join("app/large")).expect("open");
            file.write_all_at(b"damaged", 100_000).expect("write");
        }),
        ("shorter", |layer| {
            let file = fs::File::options().write(true).open(layer.join("app/large")).expect("open");
            file.set_len(10).expect("truncate");
        }),
        ("gone", |layer| fs::remove_file(layer.join("app/small-150")).expect("remove")),
        ("a FIFO", |layer| {
            fs::remove_file(layer.join("app/small-150")).expect("remove");
            nix::unistd::mkfifo(
                &layer.join("app/small-150"),
                nix::sys::stat::Mode::from_bits_truncate(0o644),
            )
            .expect("mkfifo");
        }),
        ("a link to the node", |layer| {
            fs::remove_file(layer.join("app/small-150")).expect("remove");
            std::os::unix::fs::symlink("/etc/passwd", layer.join("app/small-150")).expect("link");
        }),
    ];
    for (what, spoil) in spoils {
        let update = Update::new(Layer::chunked);
        let proxy = Faulty::start(update.registry.address(), none);
        update.pull(&proxy, "1");
        update.spoil_and_pull(&proxy, spoil);
        let (sent, size) = (proxy.blob_bytes(&digest(&update.new.blob)), update.new.blob.len() as u64);
        let is_large = matches!(what, "other bytes" | "shorter");
        assert!(
            sent < size / 10 || is_large && sent < size + 500_000,
            "{what}: {sent} of {size}\n{}",
            update.log()
        );
        assert!(update.log().contains("is not what it was"), "{what}: {}", update.log());
        update.stop();
    }
}

/// Number of ranges of an update of [`scattered`].
const SCATTERED: usize = 40;

/// An update of many files far from each other, through a registry that answers each range after 100 ms, and with status 429 if more than
/// `served_max` are asked for at once. Returns the update, the requests for the blob and the number of those that were open at once.
fn scattered(served_max: usize, retry_after: Option<u32>) -> (Update, Vec<Served>, usize) {
    let entries = |release: u64| {
        let files = (0..SCATTERED as u64).flat_map(|number| {
            let (changed, kept) = (noise(5000, release * 1000 + number), noise(50_000, number));
            [(format!("app/a{number}"), changed), (format!("app/b{number}"), kept)]
        });
        let files = files.map(|(name, content)| Entry::file(&name, &content));
        [Entry::directory("app", 0o755)].into_iter().chain(files).collect::<Vec<_>>()
    };
    let [old, new] = [1, 2].map(|release| Layer::chunked(&entries(release)));
    let update = Update::of(Node::start(), old, new);
    let blob = digest(&update.new.blob);
    let (path, open, peak) = (format!("/blobs/{blob}"), AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
    let most = peak.clone();
    let proxy = Faulty::start(update.registry.address(), move |head, _| {
        if !head.second().contains(&path) {
            return Fault::None;
        }
        let count = open.fetch_add(1, Ordering::Relaxed) + 1;
        most.fetch_max(count, Ordering::Relaxed);
        // The duration is the test's input, not a wait for a condition.
        std::thread::sleep(Duration::from_millis(100));
        open.fetch_sub(1, Ordering::Relaxed);
        if count > served_max { Fault::Status(429, retry_after) } else { Fault::None }
    });
    update.pull(&proxy, "1");
    update.spoil_and_pull(&proxy, |_| ());
    (update, proxy.blob(&blob), peak.load(Ordering::Relaxed))
}

/// Each answer takes a round trip, so one range after the other would take many.
#[test]
fn several_ranges_are_requested_at_once() {
    let (update, served, peak) = scattered(usize::MAX, None);
    assert_eq!(served.len(), 1 + SCATTERED, "the table, and each range once: {served:?}");
    let sent: u64 = served.iter().map(|served| served.bytes).sum();
    let size = update.new.blob.len() as u64;
    assert!(sent < size / 5, "{sent} of {size} bytes");
    assert!((3..=6).contains(&peak), "{peak} at once");
    update.stop();
}

#[test]
fn a_registry_that_refuses_several_ranges_at_once_is_asked_for_one_after_the_other() {
    for retry_after in [None, Some(1)] {
        let (update, served, peak) = scattered(1, retry_after);
        let refused = served.iter().filter(|served| served.status == "429").count();
        // Those that were requested at once with a refused one are requested again.
        assert!(served.len() - refused <= 1 + SCATTERED + 5, "{served:?}");
        assert!(peak > 1 && refused < 10, "{refused} refused, {peak} at once");
        assert!(!update.log().contains("is pulled whole"), "{}", update.log());
        update.stop();
    }
}

#[test]
fn a_damaged_index_is_removed_and_files_are_found_by_their_paths() {
    let update = Update::new(Layer::chunked);
    let proxy = Faulty::start(update.registry.address(), none);
    update.pull(&proxy, "1");
    let folder = update.node.root().join("images/contents");
    let index = fs::read_dir(&folder).expect("indexes").next().expect("one").expect("an entry").path();
    fs::write(&index, b"nonsense of any kind").expect("write");
    update.spoil_and_pull(&proxy, |_| ());
    let (sent, size) = (proxy.blob_bytes(&digest(&update.new.blob)), update.new.blob.len() as u64);
    assert!(sent < size / 10, "{sent} of {size}: files are found by their paths");
    // That of release 1 is not made again, and that of release 2 goes with the image.
    let names = || fs::read_dir(&folder).expect("indexes").count();
    assert_eq!(names(), 1, "that of release 2");
    for tag in ["1", "2"] {
        let image = Some(coracle_tests::request::image_spec(&proxy.name("app", tag)));
        let remove = coracle_tests::cri::proto::RemoveImageRequest { image };
        update.node.remove_image(remove).expect("remove");
    }
    coracle_tests::host::wait_until("the index is removed", || names() == 0);
    update.stop();
}

const TABLE: &str = "io.github.containers.zstd-chunked.manifest-position";
const CHECKSUM: &str = "io.github.containers.zstd-chunked.manifest-checksum";
const SPLIT: &str = "io.github.containers.zstd-chunked.tarsplit-position";

/// Replaces the table and the tar-split data of a layer by changed ones, whose digests are those of the table and the manifest. The
/// archive in the blob is not changed.
fn forge(mut layer: Layer, change: impl Fn(&mut serde_json::Value, &mut String)) -> Layer {
    let part = |name: &str| {
        let text = layer.annotations[name].as_str().expect("an annotation");
        let numbers: Vec<usize> = text.split(':').map(|number| number.parse().expect("a number")).collect();
        let bytes = &layer.blob[numbers[0]..][..numbers[1]];
        String::from_utf8(zstd::decode_all(bytes).expect("zstd")).expect("text")
    };
    let (mut table, mut split) = (serde_json::from_str(&part(TABLE)).expect("JSON"), part(SPLIT));
    change(&mut table, &mut split);
    let split = zstd::encode_all(split.as_bytes(), 1).expect("memory takes it");
    table["tarSplitDigest"] = digest(&split).into();
    let text = table.to_string();
    let table = zstd::encode_all(text.as_bytes(), 1).expect("memory takes it");
    layer.annotations[CHECKSUM] = digest(&table).into();
    for (name, part, end) in
        [(TABLE, table, format!("{}:1", text.len())), (SPLIT, split, "1000000".to_owned())]
    {
        layer.blob.extend([0x50, 0x2a, 0x4d, 0x18]);
        layer.blob.extend((part.len() as u32).to_le_bytes());
        layer.annotations[name] = format!("{}:{}:{end}", layer.blob.len(), part.len()).into();
        layer.blob.extend(part);
    }
    layer
}

/// The entry of a file in a table; the file is one chunk.
fn entry<'a>(table: &'a mut serde_json::Value, name: &str) -> &'a mut serde_json::Value {
    let list = table["entries"].as_array_mut().expect("a list");
    let entry =
        list.iter_mut().find(|entry| entry["name"] == name && entry["type"] == "reg").expect("an entry");
    assert!(entry["chunkDigest"].is_null(), "{entry}");
    entry
}

/// Tables that lie, with the right digests: the tree is that of the blob, whatever they say.
#[test]
fn a_table_that_lies_changes_no_layer() {
    type Change = fn(&mut serde_json::Value, &mut String);
    let changes: [(&str, Change); 9] = [
        ("nothing", |_, _| ()),
        ("another file's digest", |table, _| {
            let digest = entry(table, "app/small-100")["digest"].clone();
            entry(table, "app/small-121")["digest"] = digest;
        }),
        ("a digest and size that another file has", |table, _| {
            let (from, to) = (entry(table, "app/small-100").clone(), entry(table, "app/small-150"));
            (to["digest"], to["size"]) = (from["digest"].clone(), from["size"].clone());
        }),
        ("a range that begins in a frame", |table, _| {
            let begin = entry(table, "app/release")["offset"].as_u64().expect("a number") + 1;
            entry(table, "app/release")["offset"] = begin.into();
        }),
        ("a file fewer", |table, _| {
            let list = table["entries"].as_array_mut().expect("a list");
            list.retain(|entry| entry["name"] != "app/small-3");
        }),
        ("other names", |table, _| {
            for entry in table["entries"].as_array_mut().expect("a list") {
                entry["name"] = "../../../../etc/passwd".into();
            }
        }),
        ("no entries", |table, _| table["entries"] = json!([])),
        ("an archive with another header", |_, split| {
            *split = split.replacen("\"payload\":\"", "\"payload\":\"AAAA", 1);
        }),
        ("an archive that ends early", |_, split| {
            let lines: Vec<&str> = split.lines().collect();
            *split = lines[..lines.len() / 2].join("\n");
        }),
    ];
    for (what, change) in changes {
        let update = Update::to(Layer::chunked, |layer| forge(layer, change));
        let sent = update.run(none);
        let is_whole = sent >= update.new.blob.len() as u64;
        let is_harmless = matches!(what, "nothing" | "other names");
        assert!(is_whole != is_harmless, "{what}: {sent}\n{}", update.log());
        update.stop();
    }
}

/// kill -9 of the daemon, which ends its workers, at moments all over an update: the next daemon has the image whole or not at all,
/// and the next pull continues.
#[test]
fn a_killed_update_is_continued_by_the_next_pull() {
    killed(Update::new(Layer::chunked));
}

/// Kills the daemon during this update.
pub(super) fn killed(mut update: Update) {
    const KILLS: u64 = 20;
    let blob = digest(&update.new.blob);
    let line = Line::new(1e6);
    let path = format!("/blobs/{blob}");
    let proxy = Faulty::start(update.registry.address(), move |head, _| {
        if head.second().contains(&path) { Fault::Over(line.clone()) } else { Fault::None }
    });
    update.pull(&proxy, "1");
    let name = proxy.name("app", "2");
    for kill in 0..KILLS {
        let client = update.node.another();
        let request = pull(&name);
        let pulling = std::thread::spawn(move || client.pull_image(request));
        // An update takes some 150 ms.
        std::thread::sleep(Duration::from_millis(10 * kill));
        update.node.kill9();
        let pulled = pulling.join().expect("a client thread");
        update.node.launch();
        let is_there = crate::find(&update.node, &name).is_some();
        assert!(is_there || pulled.is_err(), "{kill}: an image that was answered is lost");
        if is_there {
            update.check();
            crate::faults::remove(&update.node, &name);
        }
    }
    update.pull(&proxy, "2");
    update.check();
    update.stop();
}

/// Replaces the tar-split data of a layer by data with a first line of no effect, so that it has this length; `gap` are bytes between
/// it and the table, which are downloaded, too.
fn padded(layer: Layer, split_bytes: usize, gap: impl Fn(&Layer) -> usize) -> Layer {
    let pad = |_: &mut serde_json::Value, split: &mut String| {
        const LINE_BYTES_MAX: usize = 1 << 20;
        let around = "{\"type\":1,\"name\":\"\"}\n".len();
        let mut left = split_bytes.saturating_sub(split.len());
        let mut lines = String::new();
        while left >= 2 * around {
            // The rest after it has room for another line, or is nothing.
            let most = if left <= LINE_BYTES_MAX { left } else { LINE_BYTES_MAX.min(left - 2 * around) };
            lines += &format!("{{\"type\":1,\"name\":\"{}\"}}\n", "x".repeat(most - around));
            left -= most;
        }
        assert!(split_bytes == 0 || left == 0, "{left}");
        split.insert_str(0, &lines);
    };
    let mut layer = forge(layer, pad);
    let numbers = |layer: &Layer, name: &str| -> Vec<usize> {
        let text = layer.annotations[name].as_str().expect("an annotation");
        text.split(':').map(|number| number.parse().expect("a number")).collect()
    };
    let (split, gap) = (numbers(&layer, SPLIT), gap(&layer));
    let at = split[0] - SKIPPABLE_BYTES;
    // A skippable frame of zstd.
    let frame =
        [&[0x50, 0x2a, 0x4d, 0x18][..], &(gap.saturating_sub(SKIPPABLE_BYTES) as u32).to_le_bytes()].concat();
    if gap > 0 {
        layer.blob.splice(at..at, [frame, noise(gap - SKIPPABLE_BYTES, 1)].concat());
    }
    let uncompressed = if split_bytes > 0 { split_bytes } else { split[2] };
    layer.annotations[SPLIT] = format!("{}:{}:{uncompressed}", split[0] + gap, split[1]).into();
    layer
}

/// Length in bytes of the head of a skippable frame.
const SKIPPABLE_BYTES: usize = 8;

/// A table and its tar-split data have 4 MiB at most, and 64 MiB uncompressed.
#[test]
#[ignore = "takes a minute: make test-all PARTS=slow"]
fn a_table_of_the_greatest_length_is_used() {
    const STORED_MAX: usize = 4 << 20;
    const UNCOMPRESSED_MAX: usize = 64 << 20;
    let stored = |layer: &Layer| {
        let numbers = |name: &str| -> Vec<usize> {
            let text = layer.annotations[name].as_str().expect("an annotation");
            text.split(':').map(|number| number.parse().expect("a number")).collect()
        };
        let split = numbers(SPLIT);
        split[0] + split[1] - numbers(TABLE)[0]
    };
    let entries = |node: &Node, number| {
        let mut entries = release(node, number);
        // The rest is longer than the table.
        entries.push(Entry::file("app/more", &noise(12_000_000, 9)));
        entries
    };
    for (about, uncompressed, length, is_used) in [
        ("the longest table", 0, STORED_MAX, true),
        ("one byte more", 0, STORED_MAX + 1, false),
        ("the longest tar-split data", UNCOMPRESSED_MAX, 0, true),
        ("one byte more of it", UNCOMPRESSED_MAX + 1, 0, false),
    ] {
        let node = Node::start();
        let [old, new] = [1, 2].map(|number| Layer::chunked(&entries(&node, number)));
        let new = padded(new, uncompressed, |layer| length.saturating_sub(stored(layer)));
        assert!(length == 0 || stored(&new) == length, "{about}");
        let update = Update::of(node, old, new);
        let (sent, size) = (update.run(none), update.new.blob.len() as u64);
        assert_eq!(sent < size / 2, is_used, "{about}: {sent} of {size}\n{}", update.log());
        let why =
            if uncompressed > 0 { "tar-split data of 67108865 bytes" } else { "contents of 4194305 bytes" };
        assert_eq!(update.log().contains(why), !is_used, "{about}\n{}", update.log());
        update.stop();
    }
}

/// The layer that most chunks come from is removed with its image while they are read.
#[test]
#[ignore = "takes a minute: make test-all PARTS=slow"]
fn a_source_that_is_removed_during_a_pull_is_replaced() {
    for after in [0, 50, 100, 200, 400] {
        let update = Update::new(Layer::chunked);
        let (line, path) = (Line::new(4e5), format!("/blobs/{}", digest(&update.new.blob)));
        let proxy = Faulty::start(update.registry.address(), move |head, _| {
            if head.second().contains(&path) { Fault::Over(line.clone()) } else { Fault::None }
        });
        update.pull(&proxy, "1");
        let (client, name) = (update.node.another(), proxy.name("app", "1"));
        std::thread::scope(|scope| {
            scope.spawn(|| update.pull(&proxy, "2"));
            // The duration is the test's input, not a wait for a condition.
            std::thread::sleep(Duration::from_millis(after));
            let image = Some(coracle_tests::request::image_spec(&name));
            client
                .remove_image(coracle_tests::cri::proto::RemoveImageRequest { image })
                .unwrap_or_else(|error| panic!("{after}: {error}"));
        });
        update.check();
        let checked = update.node.image_command(&["check"]);
        assert!(checked.status.success(), "{after}: {}", String::from_utf8_lossy(&checked.stderr));
        update.stop();
    }
}
