//! Updates of images of 300 MB of which 2 % of the bytes changed, over lines of edge nodes (tc-tbf(8) in a network namespace): the bytes
//! on the wire and the time of coracle, of a pull of the same image in gzip by containerd, and of podman's partial pull. And the nodes of a
//! site that want an image at the same moment: the bytes that their uplink carries, and the time in relation to that of one node.
//!
//! The files are those of Debian's packages, in one layer, as a root is that was built again. Of each fifty bytes one changes: whole files
//! of up to 100 kB, and regions of this length in the middle of longer ones. coracle-convert makes the layers with a table.

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use coracle_tests::converted::Folder;
use coracle_tests::fault::{Fault, Faulty};
use coracle_tests::fresh_disk::FreshDisk;
use coracle_tests::host;
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::node::{Node, Options};
use coracle_tests::peer::Peer;
use coracle_tests::podman::Podman;
use coracle_tests::random::Random;
use coracle_tests::registry::Registry;
use coracle_tests::request::pull;
use coracle_tests::site::{Site, Uplink};

use crate::Row;
use crate::pulls::gzip;

/// Images: their names, and the packages of them that tests/tools/install unpacks.
const IMAGES: [(&str, &str); 3] = [
    ("a root of Debian with Java", "update-debian"),
    ("an application in Python", "update-python"),
    ("programs of Go", "update-go"),
];
/// Maximum number of bytes of an image's files.
const IMAGE_BYTES: u64 = 300_000_000;

/// One of so many bytes is changed, in regions of at most this many bytes.
const CHANGED_EVERY: u64 = 50;
const REGION_BYTES: usize = 100_000;

/// Lines with their rates in kbit/s.
const LINES: [(&str, Option<u32>); 3] =
    [("loopback", None), ("10 Mbit/s", Some(10_000)), ("1 Mbit/s", Some(1_000))];
/// Time of a request beside the rate of a line: a connection and an answer, each a round trip of LTE of 50 ms. The proxy waits so long,
/// because not each kernel has tc-netem(8).
const LATE: Duration = Duration::from_millis(100);

/// Time limit of a pull.
const LIMIT: Duration = Duration::from_secs(1800);
/// Rate in kbit/s from which on whole pulls are run to their end, and the time for which slower ones are measured.
const WHOLE_KBIT: u32 = 10_000;
const SAMPLE: Duration = Duration::from_secs(40);
/// Size of the file system in MiB.
const DISK_MIB: u64 = 3072;
/// The repository of the images.
const REPOSITORY: &str = "update";

/// Number of nodes of a site, the rate of their uplink, and the layers of their image in bytes.
const NODES: usize = 10;
const UPLINK_KBIT: u32 = 20_000;
const LAYERS: [usize; 8] =
    [15_000_000, 12_000_000, 10_000_000, 8_000_000, 6_000_000, 4_000_000, 3_000_000, 2_000_000];

/// A pull over a line.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    /// Seconds until the image was unpacked.
    wall: f64,
    /// Bytes that the line carried, with the headers of all layers.
    wire: f64,
    /// CPU seconds.
    cpu: f64,
    /// Bytes that were written to the disk.
    written: f64,
    /// Whether the wall time is computed from the first [`SAMPLE`].
    is_computed: bool,
}

/// The line, the registry behind it, and an image there in both formats, as release 1 and 2 and as `gzip`.
struct Lab<'a> {
    home: &'a Node,
    uplink: Uplink,
    proxy: Faulty,
    kbit: Arc<AtomicU32>,
}

/// Measures an update of each image over each line, and pulls of the nodes of a site.
pub(crate) fn measure() -> Vec<Row> {
    let home = Node::start();
    let mut rows = Vec::new();
    for (what, folder) in IMAGES {
        let registry = Registry::start(home.folder());
        let lab = Lab::new(&home, &registry);
        let (bytes, blob) = push(&registry, folder);
        for (line, kbit) in LINES {
            let ours = lab.coracle(kbit);
            let containerd = lab.containerd(kbit, blob.1);
            let podman = lab.podman(kbit);
            let row = row(what, line, bytes, blob.0, [&ours, &containerd, &podman]);
            println!("{}: {}", row.what, row.measured);
            rows.push(row);
        }
    }
    home.stop();
    rows.into_iter().chain(site()).collect()
}

fn row(what: &str, line: &str, files: u64, blob: f64, [ours, containerd, podman]: [&Taken; 3]) -> Row {
    let of = |taken: &Taken| {
        let computed = if taken.is_computed { ", computed" } else { "" };
        let work = match taken.cpu {
            0.0 => String::new(),
            cpu => format!(", CPU {cpu:.1} s, written {:.0} MB", taken.written / 1e6),
        };
        format!("{:.1} MB in {:.1} s{computed}{work}", taken.wire / 1e6, taken.wall)
    };
    let measured = format!(
        "{:.1} % of {:.0} MB: {}; containerd {}: {:.0} x; podman {}: {:.1} x",
        ours.wire / blob * 100.0,
        blob / 1e6,
        of(ours),
        of(containerd),
        containerd.wall / ours.wall,
        of(podman),
        podman.wall / ours.wall
    );
    let what = format!("update of {what} ({} MB), {line}", files / 1_000_000);
    Row {
        what: Box::leak(what.into_boxed_str()),
        budget: "5 % of the bytes, 10 x on a line",
        measured,
        floor: None,
    }
}

/// Adds both releases of an image; returns the bytes of its files, and of its blob with a table and in gzip.
fn push(registry: &Registry, folder: &str) -> (u64, (f64, f64)) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tools/guest").join(folder);
    let mut old = Release { left: IMAGE_BYTES, ..Release::default() };
    old.read(&root, "");
    let mut new = Release { left: IMAGE_BYTES, is_new: true, ..Release::default() };
    new.read(&root, "");
    println!("{folder}: {} of {} bytes change", new.changed, new.seen);
    let image = |release: &Release| Image::of(vec![Layer::new(&release.entries, Compression::Plain)]);
    let (old_image, image) = (image(&old), image(&new));
    let plain = image.layers[0].clone();
    let zipped = Layer { blob: gzip(&plain.blob), compression: Compression::Gzip, ..plain };
    let size = zipped.blob.len() as f64;
    registry.push(&Image::of(vec![zipped]), REPOSITORY, "gzip");
    registry.push(&chunked(&old_image), REPOSITORY, "1");
    let image = chunked(&image);
    let blob = image.layers[0].blob.len() as f64;
    registry.push(&image, REPOSITORY, "2");
    (IMAGE_BYTES - old.left, (blob, size))
}

/// The image with a table for its layer.
fn chunked(image: &Image) -> Image {
    Folder::new(REPOSITORY).convert(&image.oci_archive(REPOSITORY)).image(image)
}

/// The files of a release.
#[derive(Default)]
struct Release {
    /// Number of bytes for which there is room.
    left: u64,
    is_new: bool,
    entries: Vec<Entry>,
    /// Number of bytes so far, and of those that changed.
    seen: u64,
    changed: u64,
}

impl Release {
    /// Adds what a directory has, in the order of names.
    fn read(&mut self, root: &Path, below: &str) {
        let found = fs::read_dir(root.join(below))
            .unwrap_or_else(|error| panic!("{}: {error}; tests/tools/install bench-update", root.display()));
        let mut names: Vec<String> =
            found.filter_map(|entry| entry.expect("an entry").file_name().into_string().ok()).collect();
        names.sort();
        for name in names {
            let path = if below.is_empty() { name } else { format!("{below}/{name}") };
            let place = root.join(&path);
            let about = place.symlink_metadata().expect("metadata");
            let mode = about.permissions().mode() & 0o7777;
            if about.is_symlink() {
                let target = fs::read_link(&place).expect("a link");
                self.entries.push(Entry::symlink(&path, &target.to_string_lossy()));
            } else if about.is_dir() {
                self.entries.push(Entry::directory(&path, mode));
                self.read(root, &path);
            } else if about.is_file() && about.len() <= self.left {
                self.left -= about.len();
                let content = self.content(fs::read(&place).expect("a file"));
                self.entries.push(Entry::file(&path, &content).mode(mode));
            }
        }
    }

    /// Changes the middle of each part of a file's content, if too few bytes were changed so far.
    fn content(&mut self, mut content: Vec<u8>) -> Vec<u8> {
        for part in content.chunks_mut(REGION_BYTES * CHANGED_EVERY as usize) {
            self.seen += part.len() as u64;
            if self.changed * CHANGED_EVERY < self.seen {
                let bytes = part.len().min(REGION_BYTES);
                let begin = (part.len() - bytes) / 2;
                self.change(&mut part[begin..][..bytes]);
            }
        }
        content
    }

    /// The bytes differ, and they compress as before.
    fn change(&mut self, bytes: &mut [u8]) {
        self.changed += bytes.len() as u64;
        if self.is_new {
            bytes.iter_mut().for_each(|byte| *byte = byte.wrapping_mul(3).wrapping_add(1));
        }
    }
}

impl<'a> Lab<'a> {
    fn new(home: &'a Node, registry: &Registry) -> Lab<'a> {
        let (uplink, kbit) = (Uplink::start(), Arc::new(AtomicU32::new(0)));
        let rate = kbit.clone();
        let plan = move |_: &_, _| match rate.load(Ordering::Relaxed) {
            0 => Fault::None,
            _ => Fault::Late(LATE),
        };
        let proxy = Faulty::start_at(uplink.host(), registry.address(), plan);
        Lab { home, uplink, proxy, kbit }
    }

    fn limit(&self, kbit: Option<u32>) {
        self.uplink.limit(kbit);
        self.kbit.store(kbit.unwrap_or(0), Ordering::Relaxed);
    }

    /// Measures a pull over a line; `cpu` are the CPU seconds so far.
    fn taken(&self, disk: &FreshDisk, kbit: Option<u32>, cpu: &dyn Fn() -> f64, pull: &dyn Fn()) -> Taken {
        self.limit(kbit);
        let (before, written, begun) = (cpu(), disk.written(), Instant::now());
        pull();
        let wall = begun.elapsed().as_secs_f64();
        let wire = self.uplink.carried() as f64;
        let (cpu, written) = (cpu() - before, (disk.written() - written) as f64);
        self.limit(None);
        Taken { wall, wire, cpu, written, is_computed: false }
    }

    /// Pulls release 1 and then measures the pull of release 2.
    fn coracle(&self, kbit: Option<u32>) -> Taken {
        self.limit(None);
        let disk = FreshDisk::new(self.home.folder(), DISK_MIB);
        let config = "[image]\nkeep_blobs = false\n".to_owned();
        let root = Some(disk.path().join("root"));
        let node = self.uplink.enter(|| Node::with(Options { config, root, ..Options::default() }));
        let address = self.proxy.address();
        let text = format!("mirrors:\n  \"{address}\":\n    endpoint: [\"http://{address}\"]\n");
        fs::write(node.folder().join("registries.yaml"), text).expect("a configuration");
        node.pull_image_within(pull(&self.proxy.name(REPOSITORY, "1")), LIMIT).expect("pull");
        host::wait_until("its worker is gone", || node.workers().is_empty());
        let cpu = || {
            host::wait_until("its worker is gone", || node.workers().is_empty());
            host::cpu_time(node.pid()).as_secs_f64()
        };
        let name = self.proxy.name(REPOSITORY, "2");
        let taken = self.taken(&disk, kbit, &cpu, &|| {
            node.pull_image_within(pull(&name), LIMIT).expect("pull");
        });
        node.stop();
        taken
    }

    /// Pulls the image of `size` bytes in gzip; over a slow line its begin, of which the time of the rest is computed.
    fn containerd(&self, kbit: Option<u32>, size: f64) -> Taken {
        self.limit(None);
        let disk = FreshDisk::new(self.home.folder(), DISK_MIB);
        let address = self.proxy.address();
        let folder = disk.path().join("peer");
        let hosts = folder.join(format!("certs.d/{address}"));
        fs::create_dir_all(&hosts).expect("a folder");
        fs::write(hosts.join("hosts.toml"), format!("server = \"http://{address}\"\n"))
            .expect("a configuration");
        let conflist = r#"{"cniVersion":"1.0.0","name":"none","plugins":[{"type":"loopback"}]}"#;
        let peer = self.uplink.enter(|| Peer::start(&folder, "none", conflist, None));
        let is_whole = kbit.is_none_or(|kbit| kbit >= WHOLE_KBIT);
        let name = self.proxy.name(REPOSITORY, "gzip");
        let cpu = || host::cpu_time(peer.pid()).as_secs_f64();
        let mut taken = self.taken(&disk, kbit, &cpu, &|| {
            let pulled = peer.pull_image_within(pull(&name), if is_whole { LIMIT } else { SAMPLE });
            assert_eq!(pulled.is_ok(), is_whole, "containerd: {pulled:?}");
        });
        peer.stop();
        if !is_whole {
            taken = Taken {
                wall: size * taken.wall / taken.wire,
                wire: size,
                is_computed: true,
                ..Taken::default()
            };
        }
        taken
    }

    /// Pulls release 1 and then measures podman's pull of release 2.
    fn podman(&self, kbit: Option<u32>) -> Taken {
        self.limit(None);
        let disk = FreshDisk::new(self.home.folder(), DISK_MIB);
        let podman = Podman::new(disk.path());
        let run = |tag: &str| {
            let name = self.proxy.name(REPOSITORY, tag);
            self.uplink.enter(|| podman.pull(&name, LIMIT))
        };
        run("1");
        let spent = Cell::new(0.0);
        let cpu = || spent.get();
        self.taken(&disk, kbit, &cpu, &|| spent.set(run("2")))
    }
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
