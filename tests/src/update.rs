//! The releases of an image in tests of updates, and the trees of their layers.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use serde_json::json;

use crate::image::{Image, probe_entries};
use crate::layer::{Entry, Layer, digest, noise};
use crate::node::Node;
use crate::request::pull;

/// The files of a release: many small ones, a large one with zeros in it, links and attributes. They differ by `release` in one small
/// file and in the middle of the large one.
pub fn release(node: &Node, release: u8) -> Vec<Entry> {
    release_with(node, release, release)
}

/// [`release`] with the large file of another one.
pub fn release_with(node: &Node, release: u8, large_of: u8) -> Vec<Entry> {
    static LARGE: LazyLock<Vec<u8>> = LazyLock::new(|| noise(3_000_000, 77));
    let mut large = LARGE.clone();
    large[1_000_000..1_200_000].fill(0);
    large[2_000_000..2_000_100].fill(large_of);
    let mut entries = probe_entries(&node.probe());
    entries.extend([
        Entry::directory("app", 0o755).owned(7, 8),
        Entry::file("app/large", &large).mode(0o4755).owned(1000, 1000).xattr("user.note", b"kept"),
        Entry::hard_link("app/twin", "app/large"),
        Entry::symlink("app/link", "large"),
        Entry::file("app/empty", b""),
        Entry::file("app/release", format!("release {release}\n").as_bytes()),
        Entry::file(&format!("app/new-{release}"), &noise(50_000, u64::from(release))),
    ]);
    for number in 0..200 {
        let content = noise(100 + number * 50, number as u64 + 1000);
        entries.push(Entry::file(&format!("app/small-{number}"), &content));
    }
    entries
}

/// An image of this layer.
pub fn image(layer: Layer) -> Image {
    Image::of(vec![layer]).with("Entrypoint", json!(["/probe"]))
}

/// Later than the times of all entries of layers here, and earlier than today (2025-01-01).
const UNPACKED: i64 = 1_735_689_600;

/// The entries of a tree.
pub type Tree = BTreeMap<PathBuf, String>;

/// All entries of a tree with what a container sees of them.
pub fn tree(root: &Path) -> Tree {
    let mut found = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a directory").map(|entry| entry.expect("an entry").path())
        {
            let about = entry.symlink_metadata().expect("metadata");
            let content = match about.file_type() {
                kind if kind.is_file() => digest(&fs::read(&entry).expect("a file")),
                kind if kind.is_symlink() => format!("{:?}", fs::read_link(&entry).expect("a link")),
                _ => String::new(),
            };
            // A directory without an entry of its own has the time of unpacking.
            let time = (about.mtime() < UNPACKED).then_some(about.mtime());
            let mut value = [0; 16];
            let xattr = rustix::fs::lgetxattr(&entry, "user.note", &mut value).unwrap_or(0);
            // That of a directory depends on the file system.
            let size = if about.is_dir() { 0 } else { about.size() };
            let text = format!(
                "{:o} {}:{} {size} {time:?} {} {:?} {content}",
                about.mode(),
                about.uid(),
                about.gid(),
                about.nlink(),
                &value[..xattr]
            );
            if about.is_dir() {
                folders.push(entry.clone());
            }
            found.insert(entry.strip_prefix(root).expect("below the root").to_owned(), text);
        }
    }
    found
}

/// Directory of the only layer with this diff ID.
pub fn directory(node: &Node, layer: &Layer) -> PathBuf {
    let hex = layer.diff_id.trim_start_matches("sha256:");
    let all = fs::read_dir(node.root().join("layers")).expect("layers");
    let mut names = all.map(|entry| entry.expect("an entry").path());
    let is_it =
        |path: &PathBuf| path.file_name().is_some_and(|name| hex.starts_with(&*name.to_string_lossy()));
    names.find(is_it).unwrap_or_else(|| panic!("no layer {hex}"))
}

/// The tree of a layer that was pulled whole, on a node of its own.
pub fn tree_of_whole(name: &str, layer: &Layer) -> Tree {
    let node = Node::start();
    node.pull_image(pull(name)).expect("a whole pull");
    let expected = tree(&directory(&node, layer));
    node.stop();
    expected
}
