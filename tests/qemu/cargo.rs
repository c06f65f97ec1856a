//! Images that guests import and pull, with their expected content. They are created outside, because
//! compression is slow under emulation. On the disk: `opt/cargo/N.tar` for an import; `opt/cargo/manifests/N`
//! and `opt/cargo/blobs/DIGEST` for the registry of `tests/inside/shelf.rs`; `opt/cargo/N.txt`, the expected
//! output of `probe hash /cargo`.

use std::fmt::Write as _;

use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer, digest};
use coracle_tests::random::Random;

use crate::disk::Tree;
use crate::target::Arch;

/// Number of images, whose names are their numbers. The first half is for imports, the other for pulls.
const IMAGES: u64 = 4;
/// Number of files of an image, ten per directory.
const FILES: u64 = 30;
/// Maximum length of a file in bytes.
const FILE_BYTES_MAX: u64 = 60_000;

/// Adds the images to a disk.
pub(crate) fn add(tree: &Tree, arch: Arch) {
    let program = tree.read("opt/probe");
    for number in 0..IMAGES {
        let (entries, text) = content(number);
        let mut image = Image::probe(&program, "cargo").plus(Layer::new(&entries, Compression::Gzip));
        image.architecture = arch.debian().to_owned();
        tree.write(&format!("opt/cargo/{number}.txt"), text.as_bytes());
        if number < IMAGES / 2 {
            let name = format!("localhost/cargo:{number}");
            tree.write(&format!("opt/cargo/{number}.tar"), image.oci_archive(&name));
        } else {
            tree.write(&format!("opt/cargo/manifests/{number}"), image.manifest());
            let layers = image.layers.iter().map(|layer| layer.blob.clone());
            for blob in layers.chain([image.config_blob()]) {
                tree.write(&format!("opt/cargo/blobs/{}", digest(&blob)), &blob);
            }
        }
    }
}

/// The files of an image below `/cargo`, and the expected output of `probe hash`.
fn content(number: u64) -> (Vec<Entry>, String) {
    let mut random = Random::new(number + 1);
    let (mut entries, mut text) = (vec![Entry::directory("cargo", 0o755)], String::new());
    for file in 0..FILES {
        let folder = format!("cargo/{}", file / 10);
        if file % 10 == 0 {
            entries.push(Entry::directory(&folder, 0o755));
        }
        let length = random.below(FILE_BYTES_MAX);
        let bytes: Vec<u8> = (0..length).map(|_| random.below(256) as u8).collect();
        let path = format!("{folder}/{:02}", file % 10);
        entries.push(Entry::file(&path, &bytes));
        let _ = writeln!(text, "/{path} {length} {:016x}", fnv(&bytes));
    }
    (entries, text)
}

/// FNV-1a with 64 bits, as in the probe: sufficient against accidental changes.
fn fnv(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}
