//! Updates of images in the format zstd:chunked, of which 2 % of the bytes changed, over lines of edge nodes: the bytes that are
//! downloaded, and the time in relation to that which the line needs for the same image in gzip, which is what a pull without
//! partial layers downloads at least.

use std::time::{Duration, Instant};

use coracle_tests::fault::{Fault, Faulty, Line};
use coracle_tests::fresh_disk::FreshDisk;
use coracle_tests::host;
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer, digest};
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::Registry;
use coracle_tests::request::pull;

use crate::Row;
use crate::pulls::{generator, gzip, text};

/// Files of an image: number and size in bytes of the small and of the large ones.
struct Shape {
    what: &'static str,
    small: (usize, usize),
    large: (usize, usize),
}

/// Images of 300 MB, which compress to some 80 MB.
const SHAPES: [Shape; 3] = [
    Shape { what: "a root of Debian with an application", small: (9000, 20_000), large: (60, 2_000_000) },
    Shape { what: "an application in Python", small: (20_000, 9_000), large: (20, 6_000_000) },
    Shape { what: "one program", small: (3, 1_000), large: (1, 300_000_000) },
];

/// Lines with their rates in bytes per second.
const LINES: [(&str, f64); 3] = [("loopback", 1e9), ("10 Mbit/s", 1.25e6), ("1 Mbit/s", 0.125e6)];

/// One of so many small files is changed, and in each large one as many regions of this size in bytes that this is 2 %.
const CHANGED_EVERY: usize = 50;
const REGION_BYTES: usize = 100_000;

/// Time limit of an update.
const LIMIT: Duration = Duration::from_secs(1800);
/// Size of the file system in MiB.
const DISK_MIB: u64 = 3072;

/// Measures an update of each image over each line.
pub(crate) fn measure() -> Vec<Row> {
    let home = Node::start();
    let registry = Registry::start(home.folder());
    let mut rows = Vec::new();
    for shape in SHAPES {
        let [old, new] = [1, 2].map(|release| entries(&shape, release));
        let plain = Layer::new(&new, Compression::Plain).blob;
        let gzip = gzip(&plain).len() as f64;
        drop(plain);
        let [old, new] = [Layer::chunked(&old), Layer::chunked(&new)];
        let (blob, bytes) = (digest(&new.blob), new.blob.len() as f64);
        for (layer, tag) in [(old, "1"), (new, "2")] {
            registry.push(&Image::of(vec![layer]), "update", tag);
        }
        for (line, rate) in LINES {
            let (wall, sent) = one(&home, &registry, &blob, rate);
            let whole = gzip / rate;
            let measured = format!(
                "{:.2} MB, {:.1} % of {:.0} MB; {wall:.2} s, the line needs {whole:.1} s for {:.0} MB of gzip: {:.0} x",
                sent / 1e6,
                sent / bytes * 100.0,
                bytes / 1e6,
                gzip / 1e6,
                whole / wall
            );
            println!("{} over {line}: {measured}", shape.what);
            rows.push((shape.what, line, measured));
        }
    }
    drop(registry);
    home.stop();
    let row = |(what, line, measured): (&str, &str, String)| {
        let what: &'static str = Box::leak(format!("update of {what}, {line}").into_boxed_str());
        Row { what, budget: "5 % of the bytes", measured, floor: None }
    };
    rows.into_iter().map(row).collect()
}

/// Pulls release 1 and then measures the pull of release 2: its time in seconds, and the bytes of its layer that were sent.
fn one(home: &Node, registry: &Registry, blob: &str, rate: f64) -> (f64, f64) {
    let disk = FreshDisk::new(home.folder(), DISK_MIB);
    let config = "[image]\nkeep_blobs = false\n".to_owned();
    let node = Node::with(Options { config, root: Some(disk.path().join("root")), ..Options::default() });
    let line = Line::new(rate);
    let update = blob.to_owned();
    let proxy = Faulty::start(registry.address(), move |head, _| match head.second().contains(&update) {
        true => Fault::Over(line.clone()),
        false => Fault::None,
    });
    node.pull_image(pull(&proxy.name("update", "1"))).expect("pull");
    host::wait_until("its worker is gone", || node.workers().is_empty());
    let begin = Instant::now();
    node.pull_image_within(pull(&proxy.name("update", "2")), LIMIT).expect("pull");
    let wall = begin.elapsed().as_secs_f64();
    node.stop();
    (wall, proxy.blob_bytes(blob) as f64)
}

fn entries(shape: &Shape, release: usize) -> Vec<Entry> {
    let words = words();
    let mut entries = Vec::new();
    for number in 0..shape.small.0 {
        let seed = if number % CHANGED_EVERY == 7 { number + release * 1_000_000 } else { number };
        let content = text(&words, seed, shape.small.1);
        entries.push(Entry::file(&format!("usr/share/d{}/f{number}", number % 50), &content));
    }
    for number in 0..shape.large.0 {
        let mut content = text(&words, 500_000 + number, shape.large.1);
        let regions = (content.len() / CHANGED_EVERY).div_ceil(REGION_BYTES);
        for region in 0..regions {
            let begin = content.len() / regions * region;
            let bytes = (content.len() / CHANGED_EVERY / regions).min(content.len() - begin);
            let changed = text(&words, 900_000 + number * 1000 + region + release * 100_000_000, bytes);
            content[begin..][..bytes].copy_from_slice(&changed);
        }
        entries.push(Entry::file(&format!("usr/lib/large{number}"), &content));
    }
    entries
}

/// A vocabulary of sixteen bytes with any values, whose texts compress like programs and are divided into chunks like them: a file
/// of letters only has few places at which its checksum ends a chunk.
fn words() -> Vec<[u8; 16]> {
    let mut next = generator(1);
    (0..1350).map(|_| std::array::from_fn(|_| next() as u8)).collect()
}
