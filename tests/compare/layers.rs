//! Layers: images of hand-made tar archives and of those that programs write, and the tree that a container would see, entry by
//! entry. After the table come random archives; one that differs is reduced to the fewest entries that still differ.
//!
//! `CORACLE_CASE=N` repeats the random case with this seed alone, and writes its archives into the directory of the tests.

mod random;
mod table;
mod writers;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::{ImageSpec, RemoveImageRequest};
use coracle_tests::image::{ARCHITECTURE, MANIFEST, descriptor};
use coracle_tests::layer::digest;
use coracle_tests::node::base;
use coracle_tests::random::Random;
use coracle_tests::request::{fresh, pull};
use serde_json::{Value, json};

use crate::Run;
use crate::archive::{Archive, Format, Member};
use crate::pair::Both;
use crate::server::Server;
use crate::snapshots::Snapshots;
use crate::tree::{self, Tree};

/// Result of one side: its tree, or its error.
type Seen = Result<Tree, String>;

/// A fact on which the sides differ: its name, our value, and theirs.
type Difference = (&'static str, String, String);

/// Parts that the cases need of the registry and of containerd.
struct Bench {
    server: Server,
    snapshots: Snapshots,
}

pub(crate) fn run(run: &mut Run<'_>) {
    let snapshots = Snapshots::new(&run.pair.theirs().socket());
    let bench = Bench { server: Server::start(), snapshots };
    if let Ok(seed) = std::env::var("CORACLE_CASE") {
        let seed = seed.parse().expect("CORACLE_CASE is a number");
        return random_case(run, &bench, seed, true);
    }
    for (name, layers) in table::cases().into_iter().chain(writers::cases()) {
        run.begin_case();
        let seen = see(run, &bench, &layers);
        for (fact, ours, theirs) in differences(&seen) {
            run.compare(&format!("{name}: {fact}"), &ours, &theirs, &input(&layers, &seen));
        }
    }
    run.end_table();
    while run.goes_on() {
        let seed = run.random.below(1 << 48);
        random_case(run, &bench, seed, false);
    }
}

fn random_case(run: &mut Run<'_>, bench: &Bench, seed: u64, is_kept: bool) {
    run.begin_case();
    let layers = random::layers(&mut Random::new(seed));
    if is_kept {
        for (number, layer) in layers.iter().enumerate() {
            fs::write(base().join(format!("case-{seed}-{number}.tar")), layer.tar()).expect("a file");
        }
    }
    let seen = see(run, bench, &layers);
    let mut found = differences(&seen);
    // A reduced case may have lost another difference: that is shown by itself.
    while let Some((fact, ..)) = found.first().cloned() {
        let (small, seen) = reduce(run, bench, layers.clone(), fact);
        let what = features(&small);
        let text = format!("CORACLE_CASE={seed}, reduced: {}", input(&small, &seen));
        for (fact, ours, theirs) in differences(&seen) {
            run.compare(&format!("random, {what}: {fact}"), &ours, &theirs, &text);
            found.retain(|(other, ..)| *other != fact);
        }
        found.retain(|(other, ..)| *other != fact);
    }
}

/// Removes layers and entries as long as the sides still differ on `fact`.
fn reduce(run: &Run<'_>, bench: &Bench, mut layers: Vec<Archive>, fact: &str) -> (Vec<Archive>, Both<Seen>) {
    let differs = |layers: &[Archive]| {
        let seen = see(run, bench, layers);
        differences(&seen).iter().any(|(other, ..)| *other == fact).then_some(seen)
    };
    let mut last = None;
    let mut keep = |layers: &mut Vec<Archive>, smaller: Vec<Archive>| {
        let Some(seen) = differs(&smaller) else { return false };
        last = Some(seen);
        *layers = smaller;
        true
    };
    for index in (0..layers.len()).rev() {
        if layers.len() > 1 {
            let mut smaller = layers.clone();
            smaller.remove(index);
            keep(&mut layers, smaller);
        }
    }
    for layer in 0..layers.len() {
        for member in (0..layers[layer].members.len()).rev() {
            let mut smaller = layers.clone();
            smaller[layer].members.remove(member);
            if keep(&mut layers, smaller) {
                continue;
            }
            for simpler in simpler(&layers[layer].members[member]) {
                let mut smaller = layers.clone();
                smaller[layer].members[member] = simpler;
                keep(&mut layers, smaller);
            }
        }
        let mut smaller = layers.clone();
        smaller[layer] = Archive::of(layers[layer].members.clone());
        keep(&mut layers, smaller);
    }
    let seen = last.unwrap_or_else(|| see(run, bench, &layers));
    (layers, seen)
}

/// The entry with less in it.
fn simpler(member: &Member) -> Vec<Member> {
    let plain = Member::new(member.kind, &member.name);
    let mut list = vec![
        Member { link: member.link.clone(), data: member.data.clone(), ..plain.clone() },
        Member { global: Vec::new(), ..member.clone() },
        Member { mode: plain.mode, ..member.clone() },
        Member { mtime: plain.mtime, uid: 0, gid: 0, ..member.clone() },
    ];
    for index in 0..member.records.len() {
        let mut less = member.clone();
        less.records.remove(index);
        list.push(less);
    }
    list
}

/// Pulls an image of these layers on both sides at once, reads what was unpacked, and removes it.
fn see(run: &Run<'_>, bench: &Bench, layers: &[Archive]) -> Both<Seen> {
    let tag = fresh().to_string();
    let diff_ids = serve(&bench.server, &tag, layers);
    let name = bench.server.name("layers", &tag);
    let chains = chains(&diff_ids);
    let both = run.pair.both();
    let (folder, root) = (run.pair.ours().folder(), run.pair.ours().root().join("layers"));
    let seen = std::thread::scope(|scope| {
        let ours = scope.spawn(|| {
            let directory = |chain: &String| root.join(chain.trim_start_matches("sha256:"));
            let layers = || Ok(chains.iter().rev().map(directory).collect());
            see_of(both.ours, &name, layers, &folder.join("ours"))
        });
        let theirs = {
            let layers = || {
                let top = chains.last().expect("a layer");
                bench.snapshots.directories(top).map_err(|status| status.message().to_owned())
            };
            see_of(both.theirs, &name, layers, &folder.join("theirs"))
        };
        Both { ours: ours.join().expect("no panic"), theirs }
    });
    bench.server.clear();
    seen
}

fn see_of(cri: &Cri, name: &str, layers: impl Fn() -> Result<Vec<PathBuf>, String>, folder: &Path) -> Seen {
    let pulled = cri.pull_image(pull(name)).map_err(|status| status.message().to_owned());
    let seen = pulled.and_then(|_| layers()).map(|layers| tree::read(&layers, folder));
    let image = Some(ImageSpec { image: name.into(), ..ImageSpec::default() });
    // An image that was refused is not there.
    let _ = cri.remove_image(RemoveImageRequest { image });
    seen
}

/// Gives the registry an image of these layers; returns the digests of the archives.
fn serve(server: &Server, tag: &str, layers: &[Archive]) -> Vec<String> {
    const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
    const REPOSITORY: &str = "layers";
    let mut descriptors = Vec::new();
    let mut diff_ids = Vec::new();
    for layer in layers {
        let tar = layer.tar();
        let blob = layer.packing.pack(&tar);
        descriptors.push(descriptor(layer.packing.media_type(), &blob));
        diff_ids.push(digest(&tar));
        server.add_blob(REPOSITORY, &blob);
    }
    let config = json!({
        "architecture": ARCHITECTURE, "os": "linux", "config": {},
        "rootfs": { "type": "layers", "diff_ids": diff_ids },
    })
    .to_string();
    server.add_blob(REPOSITORY, config.as_bytes());
    let manifest: Value = json!({
        "schemaVersion": 2, "mediaType": MANIFEST,
        "config": descriptor(CONFIG, config.as_bytes()), "layers": descriptors,
    });
    server.add_manifest(REPOSITORY, tag, MANIFEST, manifest.to_string().as_bytes());
    diff_ids
}

/// The chain IDs of layers (OCI image specification, config.md, "Layer ChainID").
fn chains(diff_ids: &[String]) -> Vec<String> {
    let mut chains: Vec<String> = Vec::new();
    for diff_id in diff_ids {
        let chain = match chains.last() {
            Some(parent) => digest(format!("{parent} {diff_id}").as_bytes()),
            None => diff_id.clone(),
        };
        chains.push(chain);
    }
    chains
}

fn differences(seen: &Both<Seen>) -> Vec<Difference> {
    let (ours, theirs) = match (&seen.ours, &seen.theirs) {
        (Ok(ours), Ok(theirs)) => (ours, theirs),
        (ours, theirs) => {
            let said = |seen: &Seen| if seen.is_ok() { "accepted" } else { "refused" }.to_owned();
            let (ours, theirs) = (said(ours), said(theirs));
            return if ours == theirs { Vec::new() } else { vec![("pulled", ours, theirs)] };
        }
    };
    let mut found = Vec::new();
    let paths: BTreeSet<&String> = ours.keys().chain(theirs.keys()).collect();
    for path in paths {
        let (ours, theirs) = match (ours.get(path), theirs.get(path)) {
            (Some(ours), Some(theirs)) => (ours, theirs),
            (ours, _) => {
                let said = |is_there: bool| format!("{path}: {}", if is_there { "there" } else { "missing" });
                found.push(("entry", said(ours.is_some()), said(ours.is_none())));
                continue;
            }
        };
        let facts: BTreeSet<&&str> = ours.keys().chain(theirs.keys()).collect();
        for fact in facts {
            let value = |entry: &tree::Entry| entry.get(*fact).cloned().unwrap_or_default();
            let (ours, theirs) = (value(ours), value(theirs));
            if ours != theirs {
                found.push((*fact, format!("{path}: {ours}"), format!("{path}: {theirs}")));
            }
        }
    }
    found
}

/// Describes a case so that it can be made by hand, and the errors.
fn input(layers: &[Archive], seen: &Both<Seen>) -> String {
    let mut text = layers.iter().map(Archive::to_string).collect::<Vec<_>>().join(" + ");
    for (side, seen) in [("coracle", &seen.ours), ("containerd", &seen.theirs)] {
        if let Err(error) = seen {
            text.push_str(&format!("\n    {side} says: {error}"));
        }
    }
    text
}

/// The kinds of entries in a case, as words that do not depend on the random values.
fn features(layers: &[Archive]) -> String {
    let mut words = BTreeSet::new();
    let (mut files, mut below): (Vec<Vec<u8>>, bool) = (Vec::new(), false);
    for member in layers.iter().flat_map(|layer| &layer.members) {
        let path = path_of(member);
        let is_below =
            |file: &Vec<u8>| path.strip_prefix(&file[..]).is_some_and(|rest| rest.starts_with(b"/"));
        below |= files.iter().any(is_below);
        if matches!(member.kind, 0 | b'0' | b'1' | b'6') {
            files.push(path);
        }
    }
    if below {
        words.insert("tolerated, below a file".to_owned());
    }
    for layer in layers {
        let paths: Vec<_> = layer.members.iter().map(|member| (member.kind, path_of(member))).collect();
        let is_below_link = |path: &[u8]| {
            let links = paths.iter().filter(|(kind, _)| *kind == b'2');
            links
                .map(|(_, link)| link)
                .any(|link| path.strip_prefix(&link[..]).is_some_and(|rest| rest.starts_with(b"/")))
        };
        // The generator leaves out whiteouts of names that the layer has, but cannot see what a symbolic link makes.
        let has_whiteout = layer.members.iter().any(|member| features_of(member)[0] == "whiteout");
        if has_whiteout && paths.iter().any(|(_, path)| is_below_link(path)) {
            words.insert("whiteout of an own name by a symlink".to_owned());
        }
        let bare = Archive::of(Vec::new());
        if layer.packing != bare.packing {
            words.insert(format!("{:?}", layer.packing));
        }
        if layer.end != bare.end {
            words.insert(format!("end {:?}", layer.end));
        }
        for member in &layer.members {
            words.extend(features_of(member));
        }
    }
    words.into_iter().collect::<Vec<_>>().join(", ")
}

/// The path that an entry has by all its names, without `.`, `..` and empty components.
fn path_of(member: &Member) -> Vec<u8> {
    let by_pax = member.records.iter().rev().find(|(key, value)| key == "path" && !value.is_empty());
    let name = by_pax.map(|(_, value)| value).or(member.long_name.as_ref()).unwrap_or(&member.name);
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in name.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join(&b'/')
}

fn features_of(member: &Member) -> Vec<String> {
    let base = member.name.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    let kind = match member.kind {
        _ if base == b".wh..wh..opq" => "opaque",
        _ if base.starts_with(b".wh.") => "whiteout",
        b'0' | 0 => "file",
        b'1' => "hard link",
        b'2' => "symlink",
        b'3' => "character device",
        b'4' => "block device",
        b'5' => "directory",
        b'6' => "FIFO",
        b'7' | b'D' | b'V' => "GNU type",
        _ => "odd type",
    };
    let mut words = vec![kind.to_owned()];
    words.extend(member.records.iter().map(|(key, _)| format!("PAX {key}")));
    words.extend(member.global.iter().map(|(key, _)| format!("global {key}")));
    if member.has_base256 {
        words.push("base 256".to_owned());
    }
    if member.format == Format::V7 {
        words.push("v7".to_owned());
    }
    if member.size.is_some() {
        words.push("size".to_owned());
    }
    if member.name.split(|byte| *byte == b'/').any(|part| part == b"..") {
        words.push("dots".to_owned());
    }
    if member.mtime < 0 || member.mtime > i64::from(u32::MAX) {
        words.push("far time".to_owned());
    }
    if member.mode > 0o7777 {
        words.push("high mode".to_owned());
    }
    words
}
