//! `coracle-convert`: layers get a table of contents as containers/storage writes it, images keep their IDs, and what an update
//! downloads is what was said before.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_tests::containerd::Containerd;
use coracle_tests::converted::{Folder, run};
use coracle_tests::fault::{Fault, Faulty};
use coracle_tests::image::{INDEX, Image, MANIFEST, descriptor};
use coracle_tests::layer::{Compression, Entry, Layer, digest, noise, pack};
use coracle_tests::node::Node;
use coracle_tests::podman::Podman;
use coracle_tests::registry::Registry;
use coracle_tests::request::pull;
use serde_json::{Value, json};

use coracle_tests::update::{Tree, directory, image, release, tree};

/// The numbers of an annotation: offset, stored length and length of the table ("manifest") or of the tar-split data ("tarsplit").
fn position(layer: &Layer, key: &str) -> Vec<usize> {
    let key = format!("io.github.containers.zstd-chunked.{key}-position");
    let text = layer.annotations[&key].as_str().unwrap_or_else(|| panic!("{key}: {}", layer.annotations));
    text.split(':').map(|number| number.parse().expect("a number")).collect()
}

/// The rows of a layer's table without the places in the blob, and its tar-split data. Empty fields are absent in both.
fn contents(layer: &Layer) -> (Vec<Value>, Vec<Value>) {
    let part = |key: &str| {
        let numbers = position(layer, key);
        let bytes = zstd::decode_all(&layer.blob[numbers[0]..numbers[0] + numbers[1]]).expect("zstd");
        assert_eq!(bytes.len(), numbers[2], "{key}");
        bytes
    };
    let mut table: Value = serde_json::from_slice(&part("manifest")).expect("JSON");
    let mut rows = table["entries"].as_array_mut().expect("rows").clone();
    for row in rows.iter_mut().filter_map(Value::as_object_mut) {
        row.remove("offset");
        row.remove("endOffset");
    }
    let split = part("tarsplit");
    let split =
        serde_json::Deserializer::from_slice(&split).into_iter().map(|line| line.expect("JSON")).collect();
    (rows, split)
}

/// Removes what a table says of the chunks of long files; returns the places in each file where a chunk ends.
fn without_chunks(rows: &mut Vec<Value>) -> BTreeMap<String, BTreeSet<u64>> {
    let mut ends: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
    rows.retain_mut(|row| {
        let number = |key: &str| row[key].as_u64().unwrap_or(0);
        let name = row["name"].as_str().expect("a name").to_owned();
        if row["type"] == "reg" && number("size") >= 256 << 10 {
            ends.insert(name.clone(), BTreeSet::new());
        }
        let Some(ends) = ends.get_mut(&name) else { return true };
        ends.insert(number("chunkOffset") + number("chunkSize"));
        for key in ["chunkSize", "chunkDigest"] {
            row.as_object_mut().expect("a row").remove(key);
        }
        row["type"] == "reg"
    });
    ends
}

/// Tar-split data whose segments that follow each other are one: their number at the end of an archive depends on the reader.
fn joined(split: &[Value]) -> Vec<(Value, Vec<u8>)> {
    let mut parts: Vec<(Value, Vec<u8>)> = Vec::new();
    for line in split {
        let bytes = data_encoding::BASE64
            .decode(line["payload"].as_str().unwrap_or_default().as_bytes())
            .expect("base64");
        let about = json!([line["type"], line["name"], line["size"]]);
        match parts.last_mut() {
            Some((last, all)) if *last == about && line["type"] == 2 => all.extend(bytes),
            _ => parts.push((about, bytes)),
        }
    }
    parts
}

/// A PAX header with these records, and the entry that it extends.
fn with_pax(archive: &mut Vec<u8>, records: &[(&str, &str)], entry: &Entry) {
    let mut builder = tar::Builder::new(Vec::new());
    builder
        .append_pax_extensions(records.iter().map(|(key, value)| (*key, value.as_bytes())))
        .expect("memory takes it");
    let bytes = builder.into_inner().expect("memory takes it");
    archive.extend(&bytes[..bytes.len() - 1024]);
    entry.append(archive);
}

/// An archive with what headers can say.
fn all_kinds(node: &Node) -> Vec<u8> {
    let mut archive = Layer::new(&release(node, 1), Compression::Plain).blob;
    archive.truncate(archive.len() - 1024);
    for entry in [
        Entry::directory("dev", 0o755),
        Entry::block_device("dev/sda", 8, 1),
        Entry::file("empty", b""),
        Entry::file("zeros", &[0; 70_000]),
        Entry::file("one-block", &[7; 512]),
        Entry::file("with-type", b"old writers store the type").mode(0o100_644),
        Entry::whiteout("app", "gone"),
        Entry::file("caf\u{e9}/<&>\"\\.txt", b"a name to be escaped"),
        Entry::file("number", b"of an owner").owned(4_000_000, 4_000_001),
    ] {
        entry.append(&mut archive);
    }
    let times = [("mtime", "1700000000.123456789"), ("atime", "1600000000.5"), ("ctime", "1650000000")];
    with_pax(&mut archive, &times, &Entry::file("times", b"three"));
    let long = "long/".repeat(60);
    with_pax(
        &mut archive,
        &[("path", &format!("{long}name")), ("SCHILY.xattr.user.a", "b=c")],
        &Entry::file("x", b"long"),
    );
    archive.resize(archive.len() + 20 * 512, 0);
    archive
}

/// Both tables say the same of each entry, but for the chunks of long files, whose ends include those of the other table. Both sets of
/// tar-split data say the same of each byte; ours is stored in fewer bytes.
#[test]
fn tables_are_those_of_containers_storage() {
    let (node, folder) = (Node::start(), Folder::new("tables"));
    let archive = all_kinds(&node);
    let reference = Layer::chunked_archive(archive.clone());
    let old = Layer {
        blob: archive.clone(),
        diff_id: digest(&archive),
        compression: Compression::Plain,
        annotations: Value::Null,
    };
    let old = image(old);
    let converted = folder.convert(&old.oci_archive("localhost/kinds:1")).image(&old);
    let made = &converted.layers[0];
    assert_eq!(zstd::decode_all(&made.blob[..]).expect("zstd"), archive, "other tools unpack it");
    let ((mut rows, split), (mut their_rows, their_split)) = (contents(made), contents(&reference));
    let (long, their_long) = (without_chunks(&mut rows), without_chunks(&mut their_rows));
    assert!(long.len() > 1 && long.keys().eq(their_long.keys()), "{long:?} {their_long:?}");
    for (ends, their_ends) in long.values().zip(their_long.values()) {
        let are_shorter = ends.len() > their_ends.len() * 5 / 4;
        assert!(are_shorter && ends.is_superset(their_ends), "{ends:?} {their_ends:?}");
    }
    assert_eq!(rows.len(), their_rows.len());
    for (ours, theirs) in rows.iter().zip(&their_rows) {
        let mut ours = ours.clone();
        // Go writes an empty list of attributes, and null times.
        if theirs.get("xattrs").is_some_and(|xattrs| xattrs == &json!({})) {
            ours["xattrs"] = json!({});
        }
        assert_eq!(&ours, theirs);
    }
    assert_eq!(joined(&split), joined(&their_split));
    let ends = |layer: &Layer| layer.blob[layer.blob.len() - 8..].to_vec();
    assert_eq!(ends(made), ends(&reference), "the footer");
    let stored = |layer: &Layer| ["manifest", "tarsplit"].map(|key| position(layer, key)[1]);
    let (ours, theirs) = (stored(made), stored(&reference));
    assert!(ours[1] < theirs[1], "{ours:?} {theirs:?}");
    node.stop();
}

/// The bytes that the text of `diff` says will be downloaded.
pub(super) fn downloaded(said: &str) -> u64 {
    let total = said.lines().find(|line| line.starts_with("all ")).unwrap_or_else(|| panic!("{said}"));
    total.split_whitespace().filter_map(|word| word.parse().ok()).nth(1).expect("a number")
}

/// Two releases of one image that were built with gzip: converted, pushed, pulled one after the other. The node downloads as many
/// bytes as `diff` said.
#[test]
fn an_update_of_converted_images_downloads_what_was_said() {
    let (node, folder) = (Node::start(), Folder::new("update"));
    // Archives of docker save have plain layers.
    let images = [(1, Compression::Plain), (2, Compression::Gzip)].map(|(number, compression)| {
        let base = Layer::new(&[Entry::file("base", b"unchanged")], compression);
        let top = Layer::new(&release(&node, number), compression);
        Image::of(vec![base, top]).with("Entrypoint", json!(["/probe"]))
    });
    let registry = Registry::start(node.folder());
    let mut paths = Vec::new();
    let mut layers = Vec::new();
    for (image, tag) in images.iter().zip(["1", "2"]) {
        let archive = match tag {
            "1" => image.docker_archive(&["localhost/app:1"]),
            _ => pack(&image.oci_archive("localhost/app:2"), Compression::Gzip),
        };
        let converted = folder.convert(&archive);
        assert_eq!(converted.archive, folder.convert(&archive).archive, "the same bytes each time");
        let name = &converted.images()[0]["annotations"]["io.containerd.image.name"];
        assert_eq!(name, &format!("localhost/app:{tag}"));
        let pushed = converted.image(image);
        registry.push(&pushed, "app", tag);
        layers.push(pushed.layers[1].clone());
        paths.push(folder.write(tag, &converted.archive).display().to_string());
    }
    let proxy = Faulty::start(registry.address(), |_, _| Fault::None);
    node.pull_image(pull(&proxy.name("app", "1"))).expect("pull");
    let before = proxy.blob_bytes(&digest(&layers[1].blob));
    node.pull_image(pull(&proxy.name("app", "2"))).expect("pull");
    let moved = proxy.blob_bytes(&digest(&layers[1].blob)) - before;
    let output = run(&["diff", &paths[0], &paths[1]]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let size: usize = layers[1].blob.len();
    assert_eq!(downloaded(&said), moved, "{said}\n{}", node.log());
    assert!(moved < size as u64 / 10, "{moved} of {size}\n{said}");
    assert!(
        said.contains("the node has it") && said.contains("app/new-2") && said.contains("app/large"),
        "{said}"
    );
    assert!(!said.contains("app/small-1"), "{said}");
    assert_eq!(node.once(&proxy.name("app", "2"), &["cat", "/app/release"], |_| ()).0, "release 2\n");
    node.stop();
}

/// A layer above a changed one has another name on a node, which downloads it again if it has no table.
#[test]
fn a_layer_above_a_changed_one_is_counted() {
    let folder = Folder::new("above");
    let layer = |text: &str| Layer::new(&[Entry::file("file", text.as_bytes())], Compression::Gzip);
    let top = layer(&"top".repeat(1000));
    let all = |text: &str| Image::of(vec![layer(text), top.clone()]).oci_archive("localhost/above:1");
    let paths = ["old", "new"].map(|text| folder.write(text, &all(text)).display().to_string());
    let said = String::from_utf8(run(&["diff", &paths[0], &paths[1]]).stdout).expect("UTF-8");
    assert!(said.contains("100.0 %") && !said.contains("the node has it"), "{said}");
    let said = String::from_utf8(run(&["diff", &paths[0], &paths[0]]).stdout).expect("UTF-8");
    assert_eq!(said.matches("the node has it").count(), 2, "{said}");
}

/// Layers that a table cannot describe are compressed without one, and the reason is printed.
#[test]
fn a_layer_that_no_table_can_describe_has_none() {
    let folder = Folder::new("without");
    let plain = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut archive = Vec::new();
        Entry::file("first", b"content").append(&mut archive);
        change(&mut archive);
        archive.resize(archive.len() + 1024, 0);
        archive
    };
    let global = plain(&|archive| {
        let mut extended = Vec::new();
        with_pax(&mut extended, &[("comment", "of all")], &Entry::file("next", b"x"));
        extended[156] = b'g';
        let sum: u32 = extended[..512]
            .iter()
            .enumerate()
            .map(|(at, byte)| if (148..156).contains(&at) { 32 } else { u32::from(*byte) })
            .sum();
        extended[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        archive.extend(extended);
    });
    let sparse = plain(&|archive| {
        let records = [
            ("GNU.sparse.major", "0"),
            ("GNU.sparse.minor", "1"),
            ("GNU.sparse.size", "4096"),
            ("GNU.sparse.numblocks", "1"),
            ("GNU.sparse.map", "0,4"),
        ];
        with_pax(archive, &records, &Entry::file("sparse", b"data"));
    });
    for (name, archive, why) in [
        (
            "twice",
            plain(&|archive| Entry::file("first", b"later").append(archive)),
            "first: it is there twice",
        ),
        ("global", global, "next: a global header before it"),
        ("sparse", sparse, "sparse: a sparse file"),
    ] {
        let layer = Layer {
            blob: archive.clone(),
            diff_id: digest(&archive),
            compression: Compression::Plain,
            annotations: Value::Null,
        };
        let image = Image::of(vec![layer]);
        let converted = folder.convert(&image.oci_archive("localhost/odd:1"));
        assert!(converted.said.contains(&format!(": {why}")), "{name}: {}", converted.said);
        let new = converted.image(&image);
        assert!(new.layers[0].annotations.is_null(), "{name}");
        assert_eq!(zstd::decode_all(&new.layers[0].blob[..]).expect("zstd"), archive, "{name}");
    }
}

/// Nodes read tables of 65 536 chunks. A layer that would have more with short ones in its long files has long ones, and a table.
#[test]
fn a_table_with_too_many_short_chunks_has_long_ones() {
    let folder = Folder::new("many");
    // 2048 short chunks or 1024 long ones, and 64 000 of a byte or a kibibyte of zeros.
    let entries = [
        Entry::file("long", &noise(64 << 20, 5)),
        Entry::file("many", &[&[1][..], &[0; 1024]].concat().repeat(32_000)),
    ];
    let image = Image::of(vec![Layer::new(&entries, Compression::Plain)]);
    let made = folder.convert(&image.oci_archive("localhost/many:1")).image(&image).layers[0].clone();
    let rows = contents(&made).0;
    let chunks = rows.iter().filter(|row| row["name"] == "long").count();
    assert!((800..1300).contains(&chunks), "{chunks} chunks of the long file");
    assert!(rows.len() > 64_500 && rows.len() <= 65_536, "{} rows", rows.len());
}

/// An index of two platforms with an attestation, as buildkit writes it.
#[test]
fn each_platform_of_an_index_is_converted_and_attestations_follow() {
    let folder = Folder::new("index");
    let layer = |text: &str| Layer::new(&[Entry::file("file", text.as_bytes())], Compression::Gzip);
    let images: Vec<Image> = ["amd64", "arm64"]
        .iter()
        .map(|architecture| Image {
            architecture: (*architecture).into(),
            ..Image::of(vec![layer(architecture), layer("shared")])
        })
        .collect();
    let mut members: Vec<Value> = images
        .iter()
        .map(|image| {
            let mut member = descriptor(MANIFEST, &image.manifest());
            member["platform"] = json!({ "os": "linux", "architecture": image.architecture });
            member
        })
        .collect();
    let statement = b"{\"_type\":\"https://in-toto.io/Statement/v0.1\"}";
    let attestation = json!({ "schemaVersion": 2, "mediaType": MANIFEST, "config": descriptor("application/vnd.oci.empty.v1+json", b"{}"),
        "layers": [descriptor("application/vnd.in-toto+json", statement)] })
    .to_string();
    let mut about = descriptor(MANIFEST, attestation.as_bytes());
    about["annotations"] = json!({ "vnd.docker.reference.digest": members[0]["digest"], "vnd.docker.reference.type": "attestation-manifest" });
    members.push(about);
    // The blobs of another platform are not in the archive.
    let absent = descriptor(MANIFEST, b"absent");
    members.push(absent.clone());
    let inner = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": members }).to_string();
    let outer = json!({ "schemaVersion": 2, "manifests": [descriptor(INDEX, inner.as_bytes())] }).to_string();
    let mut blobs = vec![inner.into_bytes(), attestation.into_bytes(), statement.to_vec(), b"{}".to_vec()];
    for image in &images {
        blobs.extend([image.manifest(), image.config_blob()]);
        blobs.extend(image.layers.iter().map(|layer| layer.blob.clone()));
    }
    let mut entries = vec![Entry::file("index.json", outer.as_bytes())];
    entries.extend(
        blobs.iter().map(|blob| Entry::file(&format!("blobs/{}", digest(blob).replace(':', "/")), blob)),
    );
    let converted = folder.convert(&Layer::new(&entries, Compression::Plain).blob);
    let index = converted.document(&converted.images()[0]);
    let new = index["manifests"].as_array().expect("members");
    assert_eq!((new.len(), &new[3]), (4, &absent));
    for (member, image) in new.iter().zip(&images) {
        let manifest = converted.document(member);
        assert_eq!(member["platform"]["architecture"], image.architecture);
        assert_eq!(manifest["config"]["digest"], image.id());
        assert!(
            manifest["layers"]
                .as_array()
                .expect("layers")
                .iter()
                .all(|layer| !layer["annotations"].is_null())
        );
    }
    assert_eq!(new[2]["digest"], digest(&blobs[1]), "the attestation itself is not changed");
    assert_eq!(new[2]["annotations"]["vnd.docker.reference.digest"], new[0]["digest"]);
    assert_eq!(converted.said.lines().count(), 3, "the shared layer once: {}", converted.said);
    let again = folder.convert(&converted.archive);
    assert!(
        again.said.lines().all(|line| line.contains("it has a table already") || line.contains("no layer")),
        "{}",
        again.said
    );
    let path = folder.write("both.tar", &converted.archive).display().to_string();
    let one = run(&["diff", &path, &path, "--platform", "linux/arm64"]);
    assert!(String::from_utf8_lossy(&one.stdout).contains("0.0 %"), "{one:?}");
    let both = run(&["diff", &path, &path]);
    assert!(String::from_utf8_lossy(&both.stderr).contains("name one platform by --platform"), "{both:?}");
}

/// Each is refused with its reason, and nothing is left.
#[test]
fn bad_archives_are_refused_with_their_reason() {
    let folder = Folder::new("bad");
    let good = Image::of(vec![Layer::new(&[Entry::file("file", &[1; 5000])], Compression::Gzip)]);
    let archive = good.oci_archive("localhost/good:1");
    let find = |needle: &[u8]| {
        archive.windows(needle.len()).position(|window| window == needle).expect("it is there")
    };
    let flipped = |at: usize| {
        let mut bytes = archive.clone();
        bytes[at] ^= 0x20;
        bytes
    };
    let layout =
        |index: &str| Layer::new(&[Entry::file("index.json", index.as_bytes())], Compression::Plain).blob;
    let dangling = json!({ "manifests": [descriptor(MANIFEST, b"elsewhere")] }).to_string();
    let of_other =
        Image { layers: vec![Layer { diff_id: digest(b"other"), ..good.layers[0].clone() }], ..good.clone() };
    for (name, bytes, why) in [
        ("empty", Vec::new(), "it contains neither index.json nor manifest.json"),
        ("no archive", vec![7; 2000], "in.tar: read: "),
        ("truncated", archive[..archive.len() - 3000].to_vec(), "in.tar: read: "),
        ("a manifest of another digest", flipped(find(b"\"layers\"") + 1), "has the digest"),
        ("another diff ID", of_other.oci_archive("localhost/other:1"), "has the diff ID"),
        ("only an index", layout("{\"manifests\":[]}"), "it has no image"),
        ("a manifest that is missing", layout(&dangling), "it is missing"),
        ("a damaged layer", flipped(find(&good.layers[0].blob) + 30), "layer sha256:"),
    ] {
        let (from, to) = (folder.write("in.tar", &bytes), folder.path().join("out.tar"));
        let output = run(&["convert", &from.display().to_string(), &to.display().to_string()]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{name}: {said}");
        assert!(said.contains(why), "{name}: {said}");
        assert!(!Path::new(&to).exists(), "{name}");
    }
    // An existing object that is no file stays.
    let (from, fifo) = (folder.write("in.tar", &archive), folder.path().join("fifo"));
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
    for (from, to) in [(&from, &fifo), (&fifo, &from)] {
        let output = run(&["convert", &from.display().to_string(), &to.display().to_string()]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(fs::symlink_metadata(&fifo).is_ok_and(|about| !about.is_file()));
    }
    for words in [
        &["convert", "a"][..],
        &[],
        &["convert", "a", "b", "--level", "99"],
        &["diff", "a", "b", "--platform", "linux"],
    ] {
        assert_eq!(run(words).status.code(), Some(2), "{words:?}");
    }
}

/// The entries without the times of directories and links, which podman does not set in a layer that it makes by its table.
fn untimed(mut tree: Tree) -> Tree {
    for text in tree.values_mut().filter(|text| text.starts_with('4') || text.starts_with("120")) {
        let words: Vec<&str> = text.split(' ').collect();
        *text = [&words[..3], &words[4..]].concat().join(" ");
    }
    tree
}

/// containerd and podman unpack a converted image to the tree that coracle makes of it, podman by its table, and skopeo decompresses its
/// layer.
#[test]
#[ignore = "needs containerd, podman and skopeo: make test-all PARTS=packaging"]
fn other_runtimes_pull_converted_images() {
    let (node, folder) = (Node::start(), Folder::new("others"));
    let original = image(Layer::new(&release(&node, 1), Compression::Gzip));
    let converted = folder.convert(&original.oci_archive("localhost/app:1")).image(&original);
    assert!(!converted.layers[0].annotations.is_null(), "a layer with a table");
    let registry = Registry::start(node.folder());
    registry.push(&converted, "app", "1");
    let name = registry.name("app", "1");
    node.pull_image(pull(&name)).expect("pull");
    let expected = tree(&directory(&node, &converted.layers[0]));
    // The directory in the store of a layer, which has others beside it.
    let unpacked = |layers: PathBuf, tree: &str| {
        let all =
            fs::read_dir(&layers).expect("layers").map(|entry| entry.expect("an entry").path().join(tree));
        let mut ours = all.filter(|root| root.join("app/release").exists());
        ours.next().unwrap_or_else(|| panic!("no layer in {}", layers.display()))
    };
    let mut containerd = Containerd::start(node.folder());
    containerd.cri().pull_image(pull(&name)).expect("containerd pulls");
    let snapshots = containerd.root().join("io.containerd.snapshotter.v1.overlayfs/snapshots");
    assert_eq!(tree(&unpacked(snapshots, "fs")), expected, "containerd");
    containerd.terminate();
    drop(containerd);
    let podman = Podman::new(&node.folder().join("podman"));
    podman.pull(&name, Duration::from_secs(60));
    assert_eq!(untimed(tree(&unpacked(podman.layers(), "diff"))), untimed(expected), "podman");
    let diff_id = &original.layers[0].diff_id;
    assert!(podman.has_used_table(diff_id));
    let layer = fs::read(podman.copy(&name).join(diff_id.trim_start_matches("sha256:")));
    assert_eq!(digest(&layer.expect("the layer that skopeo copied")), *diff_id);
    drop(registry);
    node.stop();
}
