//! `make bench-long`: creates and removes ten thousand pods, one after the other, and fails if the daemon or
//! the kernel then uses more than at the start. The environment variable `CYCLES` sets another number.

use std::fs;
use std::path::Path;
use std::time::Instant;

use coracle_tests::cri::proto::VersionRequest;
use coracle_tests::host;
use coracle_tests::node::Node;
use coracle_tests::request::bridge_pod;

use crate::life::{self, Lives};
use crate::measure::settled;
use crate::time::Percentiles;

/// Default number of pods.
const CYCLES: usize = 10_000;
/// Number of pods before the first measurement, which contain all one-time allocations.
const FIRST: usize = 200;
/// Number of pods per line of the report.
const REPORT: usize = 1000;
/// Tolerance for allocator pages; a leak of two bytes per pod would exceed it.
const ANONYMOUS_KIB_MAX: i64 = 16;
/// Tolerance including pages of the program's file, which depend on the last call.
const PSS_KIB_MAX: i64 = 256;

/// Counted objects by name; no count may change.
type Counts = Vec<(&'static str, usize)>;

/// Runs the pods; panics if anything has grown.
pub(crate) fn run() {
    let cycles =
        std::env::var("CYCLES").ok().map_or(CYCLES, |text| text.parse().expect("CYCLES is a number"));
    let node = life::bridged();
    let image = node.import_probe();
    pods(&node, &image, FIRST);
    let before = (settled(&node), counts(&node));
    println!("start: PSS {} KiB, anonymous {} KiB, {:?}", before.0.pss, before.0.anonymous, before.1);
    let (mut left, begin) = (cycles, Instant::now());
    while left > 0 {
        let lives = pods(&node, &image, left.min(REPORT));
        left -= lives.up.len();
        println!(
            "{} pods in {:.0} s: up {}, down {}, PSS {} KiB, anonymous {} KiB, descriptors {}",
            cycles - left,
            begin.elapsed().as_secs_f64(),
            Percentiles::of(&lives.up),
            Percentiles::of(&lives.down),
            host::pss_kib(node.pid()),
            host::anonymous_kib(node.pid()),
            entries(&format!("/proc/{}/fd", node.pid())),
        );
    }
    let after = (settled(&node), counts(&node));
    println!("end:   PSS {} KiB, anonymous {} KiB, {:?}", after.0.pss, after.0.anonymous, after.1);
    let (pss, anonymous) = (after.0.pss - before.0.pss, after.0.anonymous - before.0.anonymous);
    node.stop();
    assert_eq!(before.1, after.1, "what {cycles} pods have left");
    assert!(
        anonymous <= ANONYMOUS_KIB_MAX,
        "the daemon wrote {anonymous} KiB more than before {cycles} pods"
    );
    assert!(pss <= PSS_KIB_MAX, "the daemon holds {pss} KiB more than before {cycles} pods");
    println!("{cycles} pods left nothing: PSS {pss:+} KiB, anonymous {anonymous:+} KiB");
}

fn pods(node: &Node, image: &str, count: usize) -> Lives {
    let mut lives = Lives::default();
    (0..count).for_each(|number| lives.one(node, &bridge_pod(&format!("long{number}")), image));
    lives
}

/// Counts this node's objects in the kernel and on the disk, after waiting for asynchronous removals.
fn counts(node: &Node) -> Counts {
    host::wait_until("children and links are gone", || {
        node.workers().is_empty() && host::links(&node.bridge()).iter().all(|link| *link == node.bridge())
    });
    node.version(VersionRequest::default()).expect("version");
    let folder = format!("{}/", node.folder().display());
    let daemon = node.pid();
    vec![
        ("descriptors", entries(&format!("/proc/{daemon}/fd"))),
        ("children", words(&format!("/proc/{daemon}/task/{daemon}/children"))),
        ("cgroups", host::cgroups_below(&node.cgroup_parent()).len()),
        ("mounts", host::mounts(&folder).len()),
        ("namespaces", node.namespaces().len()),
        ("monitors", node.monitors().len()),
        ("processes", host::processes(&folder).len()),
        ("leases", node.leases().len()),
        ("files of networks", files(&node.root().join("networks"))),
        ("files of the root", files(node.root())),
        ("files of the state", files(&node.state())),
    ]
}

fn entries(folder: &str) -> usize {
    fs::read_dir(folder).map_or(0, Iterator::count)
}

fn words(file: &str) -> usize {
    fs::read_to_string(file).unwrap_or_default().split_whitespace().count()
}

/// Number of files and directories below a directory.
fn files(folder: &Path) -> usize {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    let below = |entry: fs::DirEntry| match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
        true => 1 + files(&entry.path()),
        false => 1,
    };
    entries.flatten().map(below).sum()
}
