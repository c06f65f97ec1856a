//! Updates of layers in eStargz, made by the library of stargz-snapshotter: their headers are those of the release before, so that only
//! the chunks of changed files are downloaded. Each pull has the tree of a whole one, and bad tables, ranges and outlines lead to it, too.

use std::fs;
use std::io::{Read, Write};
use std::path::PathBuf;

use coracle_tests::fault::{Fault, Faulty};
use coracle_tests::layer::{Compression, Entry, Layer, digest, noise};
use coracle_tests::node::Node;
use coracle_tests::site::{config, ports};
use coracle_tests::update::release_with;
use flate2::read::MultiGzDecoder;
use serde_json::{Value, json};

use crate::mirror;
use crate::partial::{Update, killed, none, of_ranges};
use crate::partial_attacks::unusual_archives;

/// The layer of a release. A chunk has up to 4 MiB, and so all of the large file, which is that of release 1.
fn layer(node: &Node, release: u8, options: &[&str]) -> Layer {
    Layer::estargz_with(&release_with(node, release, 1), options)
}

/// An update between releases that were made with these options.
fn update(options: &[&str]) -> Update {
    let node = Node::start();
    let (old, new) = (layer(&node, 1, options), layer(&node, 2, options));
    Update::of(node, old, new)
}

/// An update to a release whose table is changed by `change`.
fn update_to(change: impl Fn(&mut Value)) -> Update {
    let node = Node::start();
    let (old, new) = (layer(&node, 1, &[]), forge(layer(&node, 2, &[]), change));
    Update::of(node, old, new)
}

#[test]
fn an_update_in_estargz_downloads_what_changed() {
    for options in [&[][..], &["chunk-size=65536"], &["lossless"]] {
        let update = update(options);
        let sent = update.run(none);
        let size = update.new.blob.len() as u64;
        assert!(sent < size / 10, "{options:?}: {sent} of {size} bytes\n{}", update.log());
        assert!(update.log().contains("bytes were on the node"), "{}", update.log());
        update.stop();
    }
}

/// A build that copies all files again gives each another time, and some another owner, too.
#[test]
fn entries_with_other_times_are_not_downloaded() {
    let node = Node::start();
    let touch = |entry: (usize, Entry)| entry.1.modified(1_710_000_000 + entry.0 as u64);
    let touched: Vec<Entry> = release_with(&node, 2, 1).into_iter().enumerate().map(touch).collect();
    let owned = touched.iter().cloned().enumerate();
    let owned = owned.map(|(number, entry)| if number % 40 == 0 { entry.owned(12, 13) } else { entry });
    for (about, entries, most) in [("times", touched.clone(), 10), ("owners", owned.collect(), 4)] {
        let update = Update::of(Node::start(), layer(&node, 1, &[]), Layer::estargz(&entries));
        let (sent, size) = (update.run(none), update.new.blob.len() as u64);
        assert!(sent < size / most, "{about}: {sent} of {size} bytes\n{}", update.log());
        update.stop();
    }
    node.stop();
}

/// The layer of a short blob is pulled whole, and nothing is asked of a registry for a first release.
#[test]
fn requests_that_save_nothing_are_not_made() {
    let node = Node::start();
    let short = |release: u8| Layer::estargz(&[Entry::file("file", &[release; 1000])]);
    for (about, old, new, why) in [
        ("short", short(1), short(2), "image pulled"),
        (
            "other files",
            layer(&node, 1, &[]),
            Layer::estargz(&[Entry::file("x", &noise(400_000, 5))]),
            "few headers",
        ),
        ("no table", short(1), layer(&node, 2, &[]), "few headers"),
    ] {
        let update = Update::of(Node::start(), old, new);
        let sent = update.run(none);
        let size = update.new.blob.len() as u64;
        assert!((size..size + 100_000).contains(&sent), "{about}: {sent} of {size}");
        assert!(update.log().contains(why), "{about}: {}", update.log());
        update.stop();
    }
    node.stop();
}

/// The library keeps an archive as it is, or writes its entries again.
#[test]
fn archives_of_any_form_are_rebuilt_in_estargz() {
    let (base, forms) = unusual_archives();
    for (what, archive) in forms {
        for options in [&["lossless"][..], &[]] {
            let new = Layer::estargz_archive(archive.clone(), options);
            let update = Update::of(Node::start(), Layer::estargz_with(&base, options), new);
            // Zeros after the end are not written again, so that the layer is the same.
            let is_other = update.new.diff_id != update.old.diff_id;
            let (sent, size) = (update.run(none), update.new.blob.len() as u64);
            let is_partial = sent < size / 10;
            assert!(
                !is_other || size < 10_000 || is_partial,
                "{what} {options:?}: {sent} of {size}\n{}",
                update.log()
            );
            update.stop();
        }
    }
}

/// The outlines of nodes that serve neighbours have other chunks, and no content that these could not read.
#[test]
fn a_node_that_serves_neighbours_downloads_what_changed_in_estargz() {
    let made = Node::start();
    let node = mirror::node(config(Some(ports(1)[0]), &[], "open = true"));
    let update = Update::of(node, layer(&made, 1, &[]), layer(&made, 2, &[]));
    let (sent, size) = (update.run(none), update.new.blob.len() as u64);
    assert!(sent < size / 10, "{sent} of {size} bytes\n{}", update.log());
    update.stop();
    made.stop();
}

/// Each layer has the headers of the one before at its place, although both have directories of the same names, written by other tools.
#[test]
fn layers_of_several_tools_have_the_headers_of_their_own() {
    let node = Node::start();
    let upper = |release: u8| {
        let mut archive = tar::Builder::new(Vec::new());
        for number in 0..300 {
            let mut header = tar::Header::new_ustar();
            header.set_mode(0o755);
            header.set_uid(7);
            header.set_gid(8);
            let content = noise(2000 + number, number as u64);
            if number == 0 {
                header.set_entry_type(tar::EntryType::Directory);
                header.set_size(0);
                archive.append_data(&mut header, "app/", &b""[..]).expect("memory takes it");
                continue;
            }
            let content = if number == 1 { vec![release; 100] } else { content };
            header.set_size(content.len() as u64);
            let name = format!("app/upper-{number}");
            archive.append_data(&mut header, name, &content[..]).expect("memory takes it");
        }
        Layer::estargz_archive(archive.into_inner().expect("memory takes it"), &[])
    };
    let lower = |release: u8| {
        let mut entries = release_with(&node, release, 1);
        entries.push(Entry::directory("app/", 0o755).owned(7, 8));
        Layer::estargz(&entries)
    };
    let update = Update::of(Node::start(), lower(1), lower(2));
    for release in [1, 2] {
        let image = coracle_tests::update::image(lower(release)).plus(upper(release));
        update.registry.push(&image, "app", &release.to_string());
    }
    let proxy = Faulty::start(update.registry.address(), none);
    update.pull(&proxy, "1");
    update.pull(&proxy, "2");
    for layer in [lower(2), upper(2)] {
        let (sent, size) = (proxy.blob_bytes(&digest(&layer.blob)), layer.blob.len() as u64);
        assert!(sent < size / 4, "{sent} of {size} bytes\n{}", update.log());
    }
    update.stop();
    node.stop();
}

/// Files that are listed with a digest may be as long as a layer, also if they are compressed to little.
#[test]
fn a_layer_that_is_compressed_to_little_is_pulled_in_part() {
    let node = Node::start();
    let layer = |release: u8| {
        let mut entries = release_with(&node, release, 1);
        entries.push(Entry::file("zeros", &vec![0; 100 << 20]));
        Layer::estargz(&entries)
    };
    let update = Update::of(Node::start(), layer(1), layer(2));
    let (sent, size) = (update.run(none), update.new.blob.len() as u64);
    assert!(size * 16 < 100 << 20 && sent < size / 10, "{sent} of {size} bytes\n{}", update.log());
    update.stop();
    node.stop();
}

/// The outline of release 2 is that of release 1 for release 3.
#[test]
fn a_release_that_was_pulled_in_part_is_the_source_of_the_next() {
    let update = update(&[]);
    let next = layer(&update.node, 3, &[]);
    update.registry.push(&coracle_tests::update::image(next.clone()), "app", "3");
    let proxy = Faulty::start(update.registry.address(), none);
    for tag in ["1", "2", "3"] {
        update.pull(&proxy, tag);
    }
    let (sent, size) = (proxy.blob_bytes(&digest(&next.blob)), next.blob.len() as u64);
    assert!(sent < size / 10, "{sent} of {size} bytes\n{}", update.log());
    update.stop();
}

#[test]
fn layers_whose_headers_are_in_no_outline_are_pulled_whole() {
    let gzip = |node: &Node| Layer::new(&release_with(node, 1, 1), Compression::Gzip);
    let small: &[&str] = &["min-chunk-size=1000000"];
    for (old, options, why) in [
        (Some(gzip as fn(&Node) -> Layer), &[][..], "no layer of its repository has headers for it"),
        (None, small, "several chunks in one gzip member"),
    ] {
        let node = Node::start();
        let new = layer(&node, 2, options);
        let update =
            Update::of(Node::start(), old.map_or_else(|| layer(&node, 1, options), |old| old(&node)), new);
        node.stop();
        let sent = update.run(none);
        assert!(sent >= update.new.blob.len() as u64, "{why}: {sent}\n{}", update.log());
        assert!(update.log().contains(why), "{why}: {}", update.log());
        update.stop();
    }
}

/// The first range is the table, those after it are chunks.
#[test]
fn ranges_with_changed_bytes_lead_to_the_whole_blob_in_estargz() {
    for skipped in 0..2 {
        for fault in
            [Fault::Flip, Fault::raw("200 OK", &[], b"x"), Fault::raw("416 Range Not Satisfiable", &[], b"")]
        {
            let update = update(&[]);
            let sent = update.run(of_ranges(skipped, fault));
            assert!(sent >= update.new.blob.len() as u64, "{skipped}: {sent}\n{}", update.log());
            assert!(update.log().contains("is pulled whole: "), "{skipped}: {}", update.log());
            update.stop();
        }
    }
}

#[test]
fn a_killed_update_in_estargz_is_continued_by_the_next_pull() {
    killed(update(&[]));
}

/// The outline of release 1 is damaged, or the headers in it are others than those of release 2, although they describe the same entries.
#[test]
fn a_damaged_outline_changes_no_layer() {
    type Damage = fn(&mut Vec<u8>);
    let damages: [(&str, Damage); 4] = [
        ("nonsense", |bytes| *bytes = b"nonsense".to_vec()),
        ("cut off", |bytes| bytes.truncate(bytes.len() / 2)),
        ("empty", Vec::clear),
        // The first header is whole; others repeat what they have in common. The sum of the bytes is the same.
        ("another format", |bytes| replace(bytes, b"ustar ", b"ustas\x1f")),
    ];
    for (what, damage) in damages {
        let update = update(&[]);
        let proxy = Faulty::start(update.registry.address(), none);
        update.pull(&proxy, "1");
        let path = outline(&update.node);
        let mut bytes = fs::read(&path).expect("an outline");
        damage(&mut bytes);
        fs::write(&path, bytes).expect("write");
        update.spoil_and_pull(&proxy, |_| ());
        let is_whole = update.log().contains("is pulled whole: ");
        assert!(is_whole || what == "cut off", "{what}: {}", update.log());
        let is_found = update.log().contains("but the image config requires");
        assert_eq!(is_found, what == "another format", "{what}: {}", update.log());
        update.stop();
    }
}

/// The outline of the only layer.
fn outline(node: &Node) -> PathBuf {
    let folder = fs::read_dir(node.root().join("images/contents")).expect("outlines");
    let [path] = &folder.map(|entry| entry.expect("an entry").path()).collect::<Vec<_>>()[..] else {
        panic!("not one outline");
    };
    path.clone()
}

fn replace(bytes: &mut [u8], from: &[u8], to: &[u8]) {
    let at = bytes.windows(from.len()).position(|window| window == from).expect("a header");
    bytes[at..at + to.len()].copy_from_slice(to);
}

/// Tables that lie, with the right digests: the tree is that of the blob, whatever they say.
#[test]
fn a_table_in_estargz_that_lies_changes_no_layer() {
    type Change = fn(&mut Value);
    let changes: [(&str, bool, Change); 12] = [
        ("nothing", false, |_| ()),
        ("another time", true, |table| {
            entry(table, "app/small-3")["modtime"] = "2001-01-01T00:00:00Z".into()
        }),
        ("another file's digest", true, |table| {
            let digest = entry(table, "app/small-100")["chunkDigest"].clone();
            entry(table, "app/small-121")["chunkDigest"] = digest;
        }),
        ("a digest and size that another file has", true, |table| {
            let (from, to) = (entry(table, "app/small-100").clone(), entry(table, "app/small-150"));
            (to["chunkDigest"], to["size"]) = (from["chunkDigest"].clone(), from["size"].clone());
        }),
        ("a range that begins in a member", true, |table| {
            let begin = entry(table, "app/release")["offset"].as_u64().expect("a number") + 1;
            entry(table, "app/release")["offset"] = begin.into();
        }),
        ("a file fewer", true, |table| {
            let list = table["entries"].as_array_mut().expect("a list");
            list.retain(|entry| entry["name"] != "app/small-3");
        }),
        ("an entry fewer", true, |table| {
            let list = table["entries"].as_array_mut().expect("a list");
            list.retain(|entry| entry["name"] != "app/link");
        }),
        ("an entry more", true, |table| {
            let list = table["entries"].as_array_mut().expect("a list");
            let at = list.iter().position(|entry| entry["name"] == "app/release").expect("an entry");
            list.insert(at, json!({ "name": "app/more", "type": "dir", "mode": 0o755 }));
        }),
        ("other names", true, |table| {
            for entry in table["entries"].as_array_mut().expect("a list") {
                entry["name"] = "../../../../etc/passwd".into();
            }
        }),
        ("a chunk of the end", true, |table| entry(table, "app/release")["offset"] = u64::MAX.into()),
        ("a chunk of zeros", true, |table| {
            entry(table, "app/small-100")["chunkDigest"] = format!("sha256:{:064}", 0).into();
        }),
        ("no entries", true, |table| table["entries"] = json!([])),
    ];
    for (what, is_whole, change) in changes {
        let update = update_to(change);
        let sent = update.run(none);
        assert_eq!(sent >= update.new.blob.len() as u64, is_whole, "{what}: {sent}\n{}", update.log());
        update.stop();
    }
}

/// The entry of a file in a table.
fn entry<'a>(table: &'a mut Value, name: &str) -> &'a mut Value {
    let list = table["entries"].as_array_mut().expect("a list");
    list.iter_mut().find(|entry| entry["name"] == name && entry["type"] == "reg").expect("an entry")
}

/// Replaces the table of a layer by a changed one, whose digest is that of the manifest.
fn forge(layer: Layer, change: impl Fn(&mut Value)) -> Layer {
    const FOOTER_BYTES: usize = 51;
    const DIGEST: &str = "containerd.io/snapshot/stargz/toc.digest";
    let Layer { mut blob, mut annotations, compression, .. } = layer;
    let footer = blob.split_off(blob.len() - FOOTER_BYTES);
    let offset = std::str::from_utf8(&footer[16..32]).expect("digits");
    let last = blob.split_off(usize::from_str_radix(offset, 16).expect("a number"));
    let mut archive = tar::Archive::new(MultiGzDecoder::new(&last[..]));
    let mut text = String::new();
    let mut first = archive.entries().expect("an archive").next().expect("an entry").expect("the table");
    first.read_to_string(&mut text).expect("text");
    let mut table = serde_json::from_str(&text).expect("JSON");
    change(&mut table);
    let text = table.to_string();
    annotations[DIGEST] = digest(text.as_bytes()).into();
    let mut archive = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_ustar();
    header.set_size(text.len() as u64);
    header.set_entry_type(tar::EntryType::Regular);
    archive.append_data(&mut header, "stargz.index.json", text.as_bytes()).expect("memory takes it");
    let mut packed = flate2::write::GzEncoder::new(blob, flate2::Compression::fast());
    packed.write_all(&archive.into_inner().expect("memory takes it")).expect("memory takes it");
    let mut blob = packed.finish().expect("memory takes it");
    blob.extend(footer);
    let mut archive = Vec::new();
    MultiGzDecoder::new(&blob[..]).read_to_end(&mut archive).expect("gzip");
    Layer { diff_id: digest(&archive), blob, compression, annotations }
}
