//! An image of the size that design.md's table has: 6 layers, some 19 000 files, 421 MB that gzip packs to about 110, from
//! Debian's registry on loopback. Wall time, CPU of the daemon and its workers, their memory together, bytes they wrote.

use std::time::{Duration, Instant};

use coracle_tests::cri::proto::RemoveImageRequest;
use coracle_tests::host;
use coracle_tests::image::{Image, probe_entries};
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::Registry;
use coracle_tests::request::{image_spec, pull};

use crate::Row;

/// What is in an image: layers, small files of each and their size, and the same of big ones.
pub(crate) struct Shape {
    /// Layers.
    pub(crate) layers: usize,
    /// Small files of a layer, and their size.
    pub(crate) small: (usize, usize),
    /// Big ones.
    pub(crate) big: (usize, usize),
}

impl Shape {
    /// Bytes of all its files.
    pub(crate) fn bytes(&self) -> usize {
        self.layers * (self.small.0 * self.small.1 + self.big.0 * self.big.1)
    }
}

/// 421 MB.
const BIG: Shape = Shape { layers: 6, small: (3000, 8_000), big: (170, 271_000) };
/// Pulls of it.
const RUNS: usize = 3;
/// From one look at the workers to the next.
const LOOK: Duration = Duration::from_millis(10);

/// What one pull took.
struct Taken {
    wall: Duration,
    cpu: Duration,
    peak_kib: u64,
    written: u64,
}

/// The row, without compressed layers beside the unpacked ones, and with them.
pub(crate) fn measure() -> Vec<Row> {
    let mut rows = Vec::new();
    for (what, keep_blobs) in [("pull + unpack, loopback", false), ("the same, compressed layers kept", true)]
    {
        let config = format!("[image]\nkeep_blobs = {keep_blobs}\n");
        let node = Node::with(Options { config, ..Options::default() });
        let registry = Registry::start(node.folder());
        let packed = push(&registry, &node, "big", 0, &BIG);
        let name = registry.name("big", "1");
        let taken: Vec<Taken> = (0..RUNS).map(|_| one(&node, &name)).collect();
        let seconds = |time: fn(&Taken) -> Duration| {
            let times: Vec<String> =
                taken.iter().map(|taken| format!("{:.2}", time(taken).as_secs_f64())).collect();
            times.join(" ")
        };
        let unpacked = BIG.bytes();
        let measured = format!(
            "wall {} s, CPU {} s, peak {:.1} MB, written {:.2} x of {:.0} MB, {:.0} MB packed",
            seconds(|taken| taken.wall),
            seconds(|taken| taken.cpu),
            taken.iter().map(|taken| taken.peak_kib).max().unwrap_or(0) as f64 / 1024.0,
            taken.iter().map(|taken| taken.written).max().unwrap_or(0) as f64 / unpacked as f64,
            unpacked as f64 / 1e6,
            packed as f64 / 1e6,
        );
        rows.push(Row { what, budget: "3 s, CPU 3 s, 16 MB, 1.1 x", measured });
        node.stop();
    }
    rows
}

fn one(node: &Node, name: &str) -> Taken {
    let client = node.another();
    let before = host::cpu_time(node.pid());
    let (mut peak_kib, mut written) = (0, 0);
    let begin = Instant::now();
    let wall = std::thread::scope(|scope| {
        let call = scope.spawn(move || {
            client.pull_image(pull(name)).expect("pull");
            begin.elapsed()
        });
        while !call.is_finished() {
            let workers = node.workers();
            let now: u64 = workers.iter().map(|worker| host::pss_kib(worker.pid)).sum();
            peak_kib = peak_kib.max(now + host::pss_kib(node.pid()));
            // Of the last look: a worker syncs at its end, and writes nothing then that it had not written before.
            written = written.max(workers.iter().map(|worker| bytes_written(worker.pid)).sum());
            std::thread::sleep(LOOK);
        }
        call.join().expect("a client thread")
    });
    let cpu = host::cpu_time(node.pid()) - before;
    let remove = RemoveImageRequest { image: Some(image_spec(name)) };
    node.remove_image(remove).expect("remove");
    files_are_gone(node);
    Taken { wall, cpu, peak_kib, written }
}

/// Waits until workers have removed what images had: thousands of files on a disk that may be busy.
pub(crate) fn files_are_gone(node: &Node) {
    let gone = host::wait_within(Duration::from_secs(300), || node.workers().is_empty().then_some(()));
    gone.expect("files of removed images go within five minutes");
}

/// What a process caused to be written, less what was removed before it came to that.
fn bytes_written(pid: i32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|value| value.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    value("write_bytes:").saturating_sub(value("cancelled_write_bytes:"))
}

/// Makes and pushes an image of this shape as `name:1`; gives its compressed size. Another seed, other contents.
pub(crate) fn push(registry: &Registry, node: &Node, name: &str, seed: usize, shape: &Shape) -> usize {
    let words = words();
    let mut image = Image::of(vec![Layer::new(&probe_entries(&node.probe()), Compression::Gzip)]);
    image.layers.clear();
    let mut packed = 0;
    for layer in 0..shape.layers {
        let sizes = [vec![shape.small.1; shape.small.0], vec![shape.big.1; shape.big.0]].concat();
        let file = |(number, bytes): (usize, usize)| {
            let path = format!("usr/share/l{layer}/d{}/f{number}", number % 50);
            Entry::file(&path, &text(&words, (seed + layer) * 10_000 + number, bytes))
        };
        let entries: Vec<Entry> = sizes.into_iter().enumerate().map(file).collect();
        let layer = Layer::new(&entries, Compression::Gzip);
        packed += layer.blob.len();
        image = image.plus(layer);
    }
    registry.push(&image, name, "1");
    packed
}

/// A vocabulary of sixteen letters a word: text of it packs as programs and documents do.
fn words() -> Vec<[u8; 16]> {
    let mut next = generator(1);
    (0..1024).map(|_| std::array::from_fn(|_| b'a' + (next() % 26) as u8)).collect()
}

fn text(words: &[[u8; 16]], seed: usize, bytes: usize) -> Vec<u8> {
    let mut next = generator(seed as u64);
    let mut text: Vec<u8> = (0..=bytes / 16).flat_map(|_| words[next() as usize % words.len()]).collect();
    text.truncate(bytes);
    text
}

/// The same numbers for the same seed.
fn generator(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed ^ 0x9e37_79b9_7f4a_7c15;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    }
}
