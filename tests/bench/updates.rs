//! Updates of images in the format zstd:chunked, of which 2 % of the bytes changed, over lines of edge nodes: the bytes that are
//! downloaded, and the time in relation to that which the line needs for the same image in gzip, which is what a pull without
//! partial layers downloads at least. And the nodes of a site that want an image at the same moment: the bytes that their uplink carries,
//! and the time in relation to that of one node.

use std::time::{Duration, Instant};

use coracle_tests::fault::{Fault, Faulty, Line};
use coracle_tests::fresh_disk::FreshDisk;
use coracle_tests::host;
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer, digest};
use coracle_tests::node::{Node, Options};
use coracle_tests::random::Random;
use coracle_tests::registry::Registry;
use coracle_tests::request::pull;
use coracle_tests::site::Site;

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

/// Number of nodes of a site, the rate of their uplink, and the layers of their image in bytes.
const NODES: usize = 10;
const UPLINK_KBIT: u32 = 20_000;
const LAYERS: [usize; 8] =
    [15_000_000, 12_000_000, 10_000_000, 8_000_000, 6_000_000, 4_000_000, 3_000_000, 2_000_000];

/// Measures an update of each image over each line, and pulls of the nodes of a site.
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
    rows.into_iter().map(row).chain(site()).collect()
}

/// Pulls an image on one node of a site, on all at once, and on all of which three are killed at random moments.
fn site() -> Vec<Row> {
    let (mut random, mut site) = (Random::from_environment(), Site::start(NODES, UPLINK_KBIT));
    let all: Vec<usize> = (0..NODES).collect();
    let pull = |site: &Site, seed, nodes: &[usize], kills: &[(usize, Duration)]| {
        let ((name, size), before) = (site.push(&LAYERS, seed), site.carried());
        let took = site.pull(&name, nodes, kills).as_secs_f64();
        (took, (site.carried() - before) as f64 / size as f64)
    };
    let (alone, _) = pull(&site, 1, &all[..1], &[]);
    let ten = pull(&site, 2, &all, &[]);
    let kills =
        [1, 4, 7].map(|node| (node, Duration::from_secs_f64(alone * random.below(1000) as f64 / 1000.0)));
    let seven = pull(&site, 3, &all, &kills);
    kills.iter().for_each(|(node, _)| site.nodes[*node].restart());
    site.stop();
    let row = |what, (took, share): (f64, f64)| Row {
        what,
        budget: "1.2 x the image, 1.3 x the time",
        measured: format!(
            "{share:.2} x {} MB, {:.2} x {alone:.1} s",
            LAYERS.iter().sum::<usize>() / 1_000_000,
            took / alone
        ),
        floor: None,
    };
    vec![row("ten nodes of a site at once, 20 Mbit/s", ten), row("the same, three of them killed", seven)]
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
