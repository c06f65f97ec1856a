//! Pull of the benchmark image: 6 layers, some 19 000 files, 421 MB, compressed to about 110 MB by gzip, from
//! Debian's registry on the loopback interface onto a new file system for each pull. Measures duration, CPU
//! time of the daemon and its workers, their total memory, and the bytes written to the disk including
//! journal and inodes.

use std::io::Write as _;
use std::time::{Duration, Instant};

use coracle_tests::fault::{Fault, Faulty, Line};
use coracle_tests::fresh_disk::FreshDisk;
use coracle_tests::host;
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::Registry;
use coracle_tests::request::pull;

use crate::Row;

/// Shape of an image: number of layers, number and size of the small and of the large files per layer.
pub(crate) struct Shape {
    /// Number of layers.
    pub(crate) layers: usize,
    /// Number and size in bytes of the small files of a layer.
    pub(crate) small: (usize, usize),
    /// Number and size in bytes of the large files of a layer.
    pub(crate) big: (usize, usize),
}

impl Shape {
    /// Total size of the image's files in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.layers * (self.small.0 * self.small.1 + self.big.0 * self.big.1)
    }
}

/// 421 MB.
const BIG: Shape = Shape { layers: 6, small: (3000, 8_000), big: (170, 271_000) };
/// An image with the bytes of [`BIG`] in one layer.
const ONE: Shape = Shape { layers: 1, small: (18_000, 8_000), big: (1020, 271_000) };
/// Rate in bytes per second of the slow line.
const SLOW: f64 = 16e6;
/// Number of pulls.
const RUNS: usize = 3;
/// Interval of the memory measurement.
const LOOK: Duration = Duration::from_millis(10);
/// Size of the file system, sufficient for all files.
const DISK_MIB: u64 = 3072;

/// Results of one pull.
struct Taken {
    wall: Duration,
    cpu: Duration,
    peak_kib: u64,
    written: u64,
}

/// Measures pulls without and with `keep_blobs`.
pub(crate) fn measure() -> Vec<Row> {
    let home = Node::start();
    let registry = Registry::start(home.folder());
    let packed = push(&registry, "big", 0, &BIG);
    let name = registry.name("big", "1");
    let rows = [("pull + unpack, loopback", false), ("the same, compressed layers kept", true)];
    let rows = rows.map(|(what, keep_blobs)| {
        let taken: Vec<Taken> = (0..RUNS).map(|_| one(&home, &name, keep_blobs)).collect();
        let seconds = |time: fn(&Taken) -> Duration| {
            let times: Vec<String> =
                taken.iter().map(|taken| format!("{:.2}", time(taken).as_secs_f64())).collect();
            times.join(" ")
        };
        let unpacked = BIG.bytes();
        let times = |taken: &Taken| format!("{:.2}", taken.written as f64 / unpacked as f64);
        let written: Vec<String> = taken.iter().map(times).collect();
        let measured = format!(
            "wall {} s, CPU {} s, peak {:.1} MB, written {} x of {:.0} MB, {:.0} MB packed",
            seconds(|taken| taken.wall),
            seconds(|taken| taken.cpu),
            taken.iter().map(|taken| taken.peak_kib).max().unwrap_or(0) as f64 / 1024.0,
            written.join(" "),
            unpacked as f64 / 1e6,
            packed as f64 / 1e6,
        );
        Row { what, budget: "3 s, CPU 3 s, 16 MB, 1.1 x", measured, floor: None }
    });
    let mut rows = Vec::from(rows);
    push(&registry, "one", 0, &ONE);
    for (what, image) in [("pull over a line of 16 MB/s, six layers", "big"), ("the same, one layer", "one")]
    {
        rows.push(slow(&home, &registry, what, image));
    }
    drop(registry);
    home.stop();
    rows
}

/// Measures a pull over a slow line, relative to the time that the line needs for the image's bytes.
fn slow(home: &Node, registry: &Registry, what: &'static str, image: &str) -> Row {
    let line = Line::new(SLOW);
    let proxy = Faulty::start(registry.address(), move |_, _| Fault::Over(line.clone()));
    let taken = one(home, &proxy.name(image, "1"), false);
    let bytes: u64 = proxy.served().iter().map(|served| served.bytes).sum();
    let (wall, least) = (taken.wall.as_secs_f64(), bytes as f64 / SLOW);
    let measured = format!(
        "{wall:.2} s, {:.3} x the line's {least:.2} s; peak {:.1} MB",
        wall / least,
        taken.peak_kib as f64 / 1024.0
    );
    Row { what, budget: "1.03 x", measured, floor: None }
}

fn one(home: &Node, name: &str, keep_blobs: bool) -> Taken {
    let disk = FreshDisk::new(home.folder(), DISK_MIB);
    let config = format!("[image]\nkeep_blobs = {keep_blobs}\n");
    let node = Node::with(Options { config, root: Some(disk.path().join("root")), ..Options::default() });
    let client = node.another();
    let (cpu, written) = (host::cpu_time(node.pid()), disk.written());
    let mut peak_kib = 0;
    let begin = Instant::now();
    let wall = std::thread::scope(|scope| {
        let call = scope.spawn(move || {
            client.pull_image(pull(name)).expect("pull");
            begin.elapsed()
        });
        while !call.is_finished() {
            peak_kib = peak_kib.max(pss_kib_below(node.pid()));
            std::thread::sleep(LOOK);
        }
        call.join().expect("a client thread")
    });
    host::wait_until("its worker is gone", || node.workers().is_empty());
    let (cpu, written) = (host::cpu_time(node.pid()) - cpu, disk.written() - written);
    node.stop();
    Taken { wall, cpu, peak_kib, written }
}

/// PSS in KiB of a process and its descendants.
fn pss_kib_below(pid: i32) -> u64 {
    host::pss_kib(pid) + host::children(pid).into_iter().map(pss_kib_below).sum::<u64>()
}

/// Creates and pushes an image of this shape as `name:1`; returns its compressed size. Another seed produces
/// other contents.
pub(crate) fn push(registry: &Registry, name: &str, seed: usize, shape: &Shape) -> usize {
    let words = words();
    let mut image = Image::of(Vec::new());
    let mut packed = 0;
    for layer in 0..shape.layers {
        let sizes = [vec![shape.small.1; shape.small.0], vec![shape.big.1; shape.big.0]].concat();
        let file = |(number, bytes): (usize, usize)| {
            let path = format!("usr/share/l{layer}/d{}/f{number}", number % 50);
            Entry::file(&path, &text(&words, (seed + layer) * 10_000 + number, bytes))
        };
        let entries: Vec<Entry> = sizes.into_iter().enumerate().map(file).collect();
        let plain = Layer::new(&entries, Compression::Plain);
        let layer = Layer { blob: gzip(&plain.blob), compression: Compression::Gzip, ..plain };
        packed += layer.blob.len();
        image = image.plus(layer);
    }
    registry.push(&image, name, "1");
    packed
}

/// Compresses at the level of common image build tools.
pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    packed.write_all(bytes).expect("memory takes it");
    packed.finish().expect("memory takes it")
}

/// A vocabulary of words with sixteen letters, whose texts compress like programs and documents.
fn words() -> Vec<[u8; 16]> {
    let mut next = generator(1);
    (0..1350).map(|_| std::array::from_fn(|_| b'a' + (next() % 26) as u8)).collect()
}

/// A text of this length in bytes; equal seeds give equal texts.
pub(crate) fn text(words: &[[u8; 16]], seed: usize, bytes: usize) -> Vec<u8> {
    let mut next = generator(seed as u64);
    let mut text: Vec<u8> = (0..=bytes / 16).flat_map(|_| words[next() as usize % words.len()]).collect();
    text.truncate(bytes);
    text
}

/// A generator of pseudo-random numbers; equal seeds give equal numbers.
pub(crate) fn generator(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed ^ 0x9e37_79b9_7f4a_7c15;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    }
}
