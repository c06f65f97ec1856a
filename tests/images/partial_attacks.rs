//! Attacks on pulls of what changed: registries that refuse ranges, layers and indexes that something else has changed, archives of
//! unusual form, and several pulls at once.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use coracle_tests::fault::{Fault, Faulty};
use coracle_tests::host::{proc_value, wait_until};
use coracle_tests::image::{Image, probe_entries};
use coracle_tests::layer::{Compression, Entry, Layer, digest, noise};
use coracle_tests::node::Node;
use coracle_tests::prometheus::{node_with_metrics, scrape};
use coracle_tests::request::pull;
use coracle_tests::update::{directory, image, release};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use crate::find;
use crate::partial::{Update, none, of_ranges};

fn indexes(node: &Node) -> Vec<std::path::PathBuf> {
    let all = fs::read_dir(node.root().join("images/contents")).expect("indexes");
    all.map(|entry| entry.expect("an entry").path()).collect()
}

/// The number after the last ` NAME=` in the log.
fn logged(log: &str, name: &str) -> u64 {
    let (_, rest) = log.rsplit_once(&format!(" {name}=")).unwrap_or_else(|| panic!("{name} in {log}"));
    rest.split(|byte: char| !byte.is_ascii_digit()).next().expect("a number").parse().expect("a number")
}

/// Layers are read for an index only if a layer with a table is pulled: any other update would wait for it.
#[test]
fn an_update_without_a_table_reads_no_layer() {
    let gzip = |entries: &[Entry]| Layer::new(entries, Compression::Gzip);
    let node = Node::start();
    let (old, new) = (gzip(&release(&node, 1)), gzip(&release(&node, 2)));
    let update = Update::of(node, old, new);
    update.run(none);
    assert_eq!(indexes(&update.node).len(), 0, "{}", update.log());
    update.stop();
}

/// A registry or a blob store may refuse each request with a range, whatever the status: the image must not be out of reach for ever.
#[test]
fn refused_ranges_lead_to_the_whole_blob() {
    for (status, before) in [(403, 0), (503, 0), (503, 1), (500, 1)] {
        let update = Update::new(Layer::chunked);
        let sent = update.run(of_ranges(before, Fault::Status(status, None)));
        assert!(sent >= update.new.blob.len() as u64, "{status} {before}: {sent}\n{}", update.log());
        assert!(update.log().contains("is pulled whole: "), "{}", update.log());
        update.stop();
    }
}

/// A registry that restarts answers all requests with an error for a time, and then ranges, too.
#[test]
fn a_registry_that_restarts_is_not_asked_for_the_whole_blob() {
    let update = Update::new(Layer::chunked);
    let (new, blob) = (update.new.clone(), digest(&update.new.blob));
    let path = format!("/blobs/{blob}");
    let proxy = Faulty::start(update.registry.address(), move |head, before| {
        // As many attempts as a pull makes at one range.
        match head.second().contains(&path) && (1..6).contains(&before) {
            true => Fault::Status(503, None),
            false => Fault::None,
        }
    });
    update.pull(&proxy, "1");
    update.pull(&proxy, "2");
    update.check();
    let (sent, size) = (proxy.blob_bytes(&blob), new.blob.len() as u64);
    assert!(sent < size / 10, "{sent} of {size} bytes\n{}", update.log());
    assert!(!update.log().contains("is pulled whole: "), "{}", update.log());
    update.stop();
}

/// The part of a whole blob is no reason to download all of its rest, if what changed is less.
#[test]
fn a_blob_that_was_begun_is_left_for_what_changed() {
    let update = Update::new(Layer::chunked);
    let (blob, size) = (digest(&update.new.blob), update.new.blob.len() as u64);
    let is_first = Arc::new(AtomicBool::new(true));
    let (path, flag) = (format!("/blobs/{blob}"), is_first.clone());
    let proxy = Faulty::start(update.registry.address(), move |head, _| {
        match (head.second().contains(&path) && flag.load(Ordering::Relaxed), head.get("range")) {
            (false, _) => Fault::None,
            (true, None) => Fault::Cut(100_000),
            (true, Some(_)) => Fault::Status(403, None),
        }
    });
    update.pull(&proxy, "1");
    update.node.pull_image(pull(&proxy.name("app", "2"))).expect_err("it sends no ranges, and not all");
    is_first.store(false, Ordering::Relaxed);
    let before = proxy.blob_bytes(&blob);
    assert!(before >= 100_000, "a part of the whole blob");
    update.pull(&proxy, "2");
    update.check();
    let sent = proxy.blob_bytes(&blob) - before;
    assert!(sent < size / 10, "{sent} of {size} bytes\n{}", update.log());
    update.stop();
}

/// Begins the update at a registry that is down after some 30 000 bytes of ranges, until the flag is false.
fn interrupted(update: &Update) -> (Faulty, Arc<AtomicBool>) {
    let is_down = Arc::new(AtomicBool::new(true));
    let (path, flag) = (format!("/blobs/{}", digest(&update.new.blob)), is_down.clone());
    let proxy = Faulty::start(update.registry.address(), move |head, before| {
        match (head.second().contains(&path) && flag.load(Ordering::Relaxed), before) {
            (false, _) | (true, 0) => Fault::None,
            (true, 1) => Fault::Cut(30_000),
            (true, _) => Fault::Status(503, None),
        }
    });
    update.pull(&proxy, "1");
    update.node.pull_image(pull(&proxy.name("app", "2"))).expect_err("it is down");
    (proxy, is_down)
}

/// Ranges that were downloaded before a registry fails are there for the next pull.
#[test]
fn ranges_are_kept_while_a_registry_fails() {
    let update = Update::new(Layer::chunked);
    let blob = digest(&update.new.blob);
    let (proxy, is_down) = interrupted(&update);
    let before = proxy.blob_bytes(&blob);
    is_down.store(false, Ordering::Relaxed);
    update.spoil_and_pull(&proxy, |_| ());
    let (sent, size) = (proxy.blob_bytes(&blob), update.new.blob.len() as u64);
    assert!(before > 30_000 && sent < size / 10, "{before}, {sent} of {size}\n{}", update.log());
    update.stop();
}

/// A power cut may leave other bytes, or more of them, in the part that the next pull continues.
#[test]
fn a_damaged_part_is_downloaded_again() {
    for length in [20_000, 10_000_000] {
        let update = Update::new(Layer::chunked);
        let blob = digest(&update.new.blob);
        let (proxy, is_down) = interrupted(&update);
        let parts = fs::read_dir(update.node.root().join("images/parts")).expect("parts");
        let parts = parts.map(|entry| entry.expect("an entry").path());
        let part = parts.filter(|path| path.file_name().is_some_and(|name| name.as_bytes().contains(&b'.')));
        fs::write(part.last().expect("a part"), noise(length, 5)).expect("write");
        is_down.store(false, Ordering::Relaxed);
        update.spoil_and_pull(&proxy, |_| ());
        let (sent, size) = (proxy.blob_bytes(&blob), update.new.blob.len() as u64);
        assert!(sent < size / 10, "{length}: {sent} of {size}\n{}", update.log());
        update.stop();
    }
}

/// The log says why a layer with a long table is pulled whole.
#[test]
fn a_table_that_is_too_long_is_not_requested() {
    let update = Update::to(Layer::chunked, |mut layer| {
        let name = "io.github.containers.zstd-chunked.tarsplit-position";
        let text = layer.annotations[name].as_str().expect("an annotation");
        let (position, _) = text.rsplit_once(':').expect("three numbers");
        layer.annotations[name] = format!("{position}:100000000").into();
        layer
    });
    let sent = update.run(none);
    assert_eq!(sent, update.new.blob.len() as u64);
    let why = "is pulled whole: tar-split data of 100000000 bytes, at most 67108864 are read";
    assert!(update.log().contains(why), "{}", update.log());
    update.stop();
}

#[test]
fn ranges_follow_redirects() {
    let update = Update::new(Layer::chunked);
    let sent = update.run(|head, _| match head.second().contains("?x") {
        false => Fault::Redirect(format!("{}?x", head.second())),
        true => Fault::None,
    });
    assert!(sent < update.new.blob.len() as u64 / 10, "{sent}\n{}", update.log());
    update.stop();
}

/// The bytes that an update reports, to all who ask: none is both downloaded and reused.
#[test]
fn bytes_fetched_and_reused_add_up_to_the_layer() {
    let (node, metrics) = node_with_metrics();
    let [old, new] = [1, 2].map(|number| Layer::chunked(&release(&node, number)));
    let update = Update::of(node, old, new);
    let proxy = Faulty::start(update.registry.address(), none);
    let first = update.node.tool(&["image", "pull", &proxy.name("app", "1")]);
    let first = String::from_utf8_lossy(&first.stdout);
    assert!(first.contains(": 0B were on the node, 0B from neighbours, "), "{first}");
    let name = proxy.name("app", "2");
    let pulled = update.node.tool(&["image", "pull", &name]);
    let (sent, size) = (proxy.blob_bytes(&digest(&update.new.blob)), update.new.blob.len() as u64);
    let log = update.log();
    assert_eq!(logged(&log, "fetched"), sent, "{log}");
    assert_eq!(logged(&log, "reused") + sent, size, "{log}");
    let megabytes = |bytes: u64| format!("{:.1}MB", bytes as f64 / 1e6);
    let text = String::from_utf8_lossy(&pulled.stdout);
    let moved =
        format!("  {}: {} were on the node, 0B from neighbours, ", megabytes(size), megabytes(size - sent));
    assert!(text.contains(&moved) && text.contains(" from the registry"), "{text}, not {moved}");
    // Nothing was moved for an image that is there.
    let again = update.node.tool(&["image", "pull", &find(&update.node, &name).expect("it").repo_digests[0]]);
    assert!(!String::from_utf8_lossy(&again.stdout).contains("were on the node"));
    let why = update.node.tool(&["why", &name]);
    let why = String::from_utf8_lossy(&why.stdout).into_owned();
    for (field, value) in [("fetched", sent), ("neighbours", 0), ("reused", size - sent)] {
        assert!(why.contains(&format!("{field}={value}")), "{field} in {why}");
    }
    assert_eq!(scrape(&metrics)["coracle_image_reused_bytes_total"], (size - sent) as f64);
    update.stop();
}

/// A chunk of the registry is wrong that a layer of the node has, too: that layer is not to blame.
#[test]
fn a_wrong_chunk_of_the_registry_is_not_blamed_on_a_local_layer() {
    let node = Node::start();
    let release = |number: u64| {
        let mut entries = probe_entries(&node.probe());
        entries.push(Entry::file("large", &noise(1_000_000, 1)));
        // The range has all three.
        for (name, seed) in [("a", number + 10), ("b", 3), ("c", number + 20)] {
            entries.push(Entry::file(name, &noise(5_000, seed)));
        }
        Layer::chunked(&entries)
    };
    let (old, new) = (release(1), release(2));
    let update = Update::of(node, old, new);
    let seen = std::sync::atomic::AtomicUsize::new(0);
    update.run(move |head, _| match head.get("range") {
        Some(_) if seen.fetch_add(1, Ordering::Relaxed) == 1 => Fault::Flip,
        _ => Fault::None,
    });
    assert!(!update.log().contains("is not what it was"), "{}", update.log());
    update.stop();
}

/// All files of a layer are gone, as if it was removed during the pull: the other layers are still used.
#[test]
fn a_removed_source_does_not_end_a_partial_pull() {
    let update = Update::new(Layer::chunked);
    let node = &update.node;
    let (first, second): (Vec<Entry>, Vec<Entry>) = {
        let mut all = release(node, 1);
        let rest = all.split_off(all.len() - 100);
        (all, rest)
    };
    let (first, second) = (Layer::chunked(&first), Layer::chunked(&second));
    update.registry.push(&image(first).plus(second.clone()), "app", "1");
    let proxy = Faulty::start(update.registry.address(), none);
    update.pull(&proxy, "1");
    let layers = fs::read_dir(node.root().join("layers")).expect("layers");
    let layers = layers.map(|entry| entry.expect("an entry").path());
    let is_second = |path: &std::path::PathBuf| path.join("app/small-199").exists();
    fs::remove_dir_all(layers.filter(is_second).last().expect("it").join("app")).expect("remove");
    update.pull(&proxy, "2");
    update.check();
    let (sent, size) = (proxy.blob_bytes(&digest(&update.new.blob)), update.new.blob.len() as u64);
    assert!(sent < size * 3 / 4, "{sent} of {size}\n{}", update.log());
    update.stop();
}

/// To open a FIFO wakes its writer, and to open a device starts it: what is no regular file is not opened.
#[test]
fn only_regular_files_are_opened_as_sources() {
    let update = Update::new(Layer::chunked);
    let proxy = Faulty::start(update.registry.address(), none);
    update.pull(&proxy, "1");
    let fifo = directory(&update.node, &update.old).join("app/small-150");
    fs::remove_file(&fifo).expect("remove");
    mkfifo(&fifo, Mode::from_bits_truncate(0o644)).expect("mkfifo");
    let path = fifo.clone();
    let writer = std::thread::spawn(move || drop(File::options().write(true).open(path).expect("open")));
    update.spoil_and_pull(&proxy, |_| ());
    assert!(!writer.is_finished(), "the FIFO was opened");
    drop(File::open(&fifo).expect("open"));
    writer.join().expect("no panic");
    update.stop();
}

/// Anything may be in the place of an index after a crash: the pull neither waits for it nor fails.
#[test]
fn other_files_in_place_of_an_index_fail_no_pull() {
    type Put = fn(&std::path::Path);
    let puts: [(&str, Put); 4] = [
        ("a FIFO", |path| mkfifo(path, Mode::from_bits_truncate(0o600)).expect("mkfifo")),
        ("a directory", |path| fs::create_dir_all(path.join("below")).expect("create")),
        ("a link", |path| std::os::unix::fs::symlink("/dev/zero", path).expect("link")),
        ("a huge file", |path| {
            let mut file = File::create(path).expect("create");
            file.write_all(b"coridx\x00\x01").expect("write");
            file.set_len(1 << 40).expect("a sparse file");
        }),
    ];
    for (what, put) in puts {
        let update = Update::new(Layer::chunked);
        let proxy = Faulty::start(update.registry.address(), none);
        update.pull(&proxy, "1");
        let index = indexes(&update.node).remove(0);
        fs::remove_file(&index).expect("remove");
        put(&index);
        // Layers have the first digits of their diff ID as name.
        let length = index.file_name().expect("a name").len();
        put(&index.with_file_name(&update.new.diff_id["sha256:".len()..][..length]));
        update.spoil_and_pull(&proxy, |_| ());
        assert!(!index.exists(), "{what}: it is removed");
        let all = indexes(&update.node);
        assert!(all.len() == 1 && all[0].is_file(), "{what}: {all:?}\n{}", update.log());
        update.stop();
    }
}

/// A second pull of a layer waits for the first, which has unpacked it but not published, because its image has another layer.
#[test]
fn a_layer_is_downloaded_once_for_two_images() {
    let update = Update::new(Layer::chunked);
    let slow = Layer::new(&[Entry::file("slow", &noise(2_000_000, 9))], Compression::Plain);
    update.registry.push(&image(update.new.clone()).plus(slow.clone()), "app", "two");
    let (blob, path) = (digest(&update.new.blob), format!("/blobs/{}", digest(&slow.blob)));
    let proxy = Faulty::start(update.registry.address(), move |head, _| {
        if head.second().contains(&path) { Fault::Drip(50_000) } else { Fault::None }
    });
    update.pull(&proxy, "1");
    let (client, request) = (update.node.another(), pull(&proxy.name("app", "two")));
    let pulling = std::thread::spawn(move || client.pull_image(request).map(drop));
    wait_until("the layer is unpacked", || update.log().contains("bytes were on the node"));
    update.pull(&proxy, "2");
    pulling.join().expect("no panic").expect("pull");
    let (sent, size) = (proxy.blob(&blob).len(), update.new.blob.len() as u64);
    assert!(proxy.blob_bytes(&blob) < size / 10, "{}", update.log());
    let log = update.log();
    assert_eq!(log.matches("bytes were on the node").count(), 1, "{sent} requests\n{log}");
    update.check();
    let kept = update.node.root().join("images/blobs/sha256").join(&blob["sha256:".len()..]);
    assert!(!kept.exists(), "an empty part is no blob");
    update.stop();
}

/// Archives of unusual form, with what is unusual about them, and the entries that they have in common.
pub(super) fn unusual_archives() -> (Vec<Entry>, Vec<(&'static str, Vec<u8>)>) {
    let node = Node::start();
    let base = release(&node, 1);
    node.stop();
    let plain = |more: Vec<Entry>| Layer::new(&[base.clone(), more].concat(), Compression::Plain).blob;
    // Without the zeros at the end of an archive.
    let headless = |more: Vec<u8>| [&plain(vec![])[..plain(vec![]).len() - 1024], &more].concat();
    let mut long = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(4);
    header.set_mode(0o644);
    let name = "d/".repeat(120) + "name";
    long.append_pax_extensions([("comment", &[b'x'; 300_000][..])]).expect("memory takes it");
    long.append_data(&mut header, &name, &b"long"[..]).expect("memory takes it");
    header.set_entry_type(tar::EntryType::Link);
    header.set_size(0);
    long.append_link(&mut header, "e/".repeat(120), &name).expect("memory takes it");
    let forms = vec![
        ("nothing to download", plain(vec![Entry::directory("new", 0o700)])),
        ("attributes", plain(vec![Entry::file("a\u{fc}", b"y").xattr("user.note", &[b'x'; 3000])])),
        ("long names", headless(long.into_inner().expect("memory takes it"))),
        ("zeros after the end", [plain(vec![]), vec![0; 3 << 20]].concat()),
        ("only directories", Layer::new(&[Entry::directory("d", 0o755)], Compression::Plain).blob),
        ("empty", Layer::new(&[], Compression::Plain).blob),
    ];
    (base, forms)
}

/// Archives of unusual form are rebuilt as they were. containers/storage makes no layers of archives with sparse files or a name
/// twice.
#[test]
fn archives_of_any_form_are_rebuilt() {
    let (base, forms) = unusual_archives();
    for (what, archive) in forms {
        let node = Node::start();
        let update = Update::of(node, Layer::chunked(&base), Layer::chunked_archive(archive));
        let (sent, size) = (update.run(none), update.new.blob.len() as u64);
        assert!(size < 10_000 || sent < size / 10, "{what}: {sent} of {size}\n{}", update.log());
        update.stop();
    }
}

/// Two layers of an image that have the same blob; and what an image with a layer that was pulled in part says to a check and an export.
#[test]
fn an_image_without_a_blob_can_be_checked_and_not_exported() {
    let update = Update::new(Layer::chunked);
    let proxy = Faulty::start(update.registry.address(), none);
    update.pull(&proxy, "1");
    update.spoil_and_pull(&proxy, |_| ());
    let name = proxy.name("app", "2");
    let text = |words: &[&str]| {
        let output = update.node.image_command(words);
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(text).expect("text"))
    };
    let (is_good, said) = text(&["check", "--repair"]);
    let mut lines: Vec<&str> = said.lines().collect();
    lines.sort_unstable();
    let whole = ["1", "2"].map(|tag| format!("whole {}", proxy.name("app", tag)));
    assert!(is_good && lines == whole, "{said}");
    let (is_good, said) = text(&["export", &name, "-o", "/dev/null"]);
    assert!(!is_good && said.contains("partial_pulls"), "{said}");
    let twice: Image = image(update.new.clone()).plus(update.new.clone());
    update.registry.push(&twice, "other", "twice");
    update.node.pull_image(pull(&proxy.name("other", "twice"))).expect("pull");
    update.stop();
}

/// Three tables of 30 000 files, of which two do not fit into the memory at once, are read, compared and rebuilt. Memory of files, such
/// as the program, is not counted.
#[test]
#[ignore = "takes a minute: make test-all PARTS=slow"]
fn the_memory_of_a_worker_is_bounded() {
    memory_is_bounded(Layer::chunked);
}

/// Layers in eStargz need the headers of an earlier release, too.
#[test]
#[ignore = "takes a minute: make test-all PARTS=slow"]
fn the_memory_of_a_worker_is_bounded_with_headers_of_outlines() {
    memory_is_bounded(Layer::estargz);
}

fn memory_is_bounded(make: fn(&[Entry]) -> Layer) {
    const KIB_MAX: u64 = 16 << 10;
    let node = Node::start();
    let files = |release: u8, layer: u64| {
        let mut entries = vec![Entry::file(&format!("release-{layer}"), &[release; 1000])];
        for number in layer * 30_000..(layer + 1) * 30_000 {
            let folder = format!("package-{}", number / 100);
            if number % 100 == 0 {
                entries.push(Entry::directory(&folder, 0o755));
            }
            entries.push(Entry::file(&format!("{folder}/a-file-of-python-{number}.py"), &noise(150, number)));
        }
        make(&entries)
    };
    let [old, new] = [1, 2].map(|release| (0..3).map(|layer| files(release, layer)).collect::<Vec<_>>());
    let update = Update::of(node, old[0].clone(), new[0].clone());
    for (layers, tag) in [(old, "1"), (new, "2")] {
        update.registry.push(&layers.into_iter().fold(Image::of(Vec::new()), Image::plus), "app", tag);
    }
    let proxy = Faulty::start(update.registry.address(), none);
    update.pull(&proxy, "1");
    let peak_kib = std::thread::scope(|scope| {
        let pulling = scope.spawn(|| update.pull(&proxy, "2"));
        let mut peak = 0;
        while !pulling.is_finished() {
            let workers = update.node.workers().into_iter();
            let kib = workers.filter_map(|worker| proc_value(worker.pid, "status", "RssAnon")).max();
            peak = peak.max(kib.unwrap_or(0));
            std::thread::sleep(Duration::from_millis(5));
        }
        pulling.join().expect("no panic");
        peak
    });
    let log = update.log();
    let reused = log.lines().filter_map(|line| {
        let (numbers, _) = line.split_once(" bytes were on the node")?;
        let (before, size) = numbers.rsplit_once(" of ")?;
        Some((before.rsplit(' ').next()?.parse::<u64>().ok()?, size.parse::<u64>().ok()?))
    });
    let reused: Vec<(u64, u64)> = reused.collect();
    assert!(reused.len() == 3 && reused.iter().all(|(bytes, size)| bytes * 2 > *size), "{reused:?}\n{log}");
    assert!((1 << 10..KIB_MAX).contains(&peak_kib), "{peak_kib} KiB");
    update.stop();
}
