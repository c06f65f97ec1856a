//! What a pod's life costs a flash disk: bytes and flushes, counted by the disk, a new ext4 on a loop device below `--root`.
//! Each flush makes a cheap SD card rewrite an erase block. The lives are spread over time, so that the commits of the file
//! system's journal every five seconds are shared by few of them or by none.

use std::time::{Duration, Instant};

use coracle_tests::fresh_disk::FreshDisk;
use coracle_tests::node::{Node, Options};
use coracle_tests::request::{DEFAULT_NETWORK, bridge_pod, host_pod};

use crate::Row;
use crate::life::{Kind, Lives};

/// Time until ext4 has written its journal after a change: its commit interval is five seconds.
const COMMITTED: Duration = Duration::from_secs(6);

/// Size of the file system.
const DISK_MIB: u64 = 512;

/// A pace of pods: how many, and one in which time.
struct Pace {
    what: &'static str,
    budget: &'static str,
    kind: Kind,
    lives: u32,
    each: Duration,
}

/// Measures all paces at the same time, because only counts are measured.
pub(crate) fn measure() -> Vec<Row> {
    let paces = [
        (
            "flash of a pod's life with 3 execs, host network, one each 2 s",
            "3 flushes, 60 KB",
            host(),
            20,
            2000,
        ),
        ("the same, 8 a minute", "3 flushes, 60 KB", host(), 8, 7500),
        (
            "flash of a pod's life with 3 execs, bridge network built in, 8 a minute",
            "4 flushes, 60 KB",
            bridge(),
            8,
            7500,
        ),
    ];
    let paces = paces.map(|(what, budget, kind, lives, each)| Pace {
        what,
        budget,
        kind,
        lives,
        each: Duration::from_millis(each),
    });
    std::thread::scope(|scope| {
        let running: Vec<_> = paces.iter().map(|pace| scope.spawn(move || one(pace))).collect();
        running.into_iter().map(|thread| thread.join().expect("a measurement")).collect()
    })
}

fn host() -> Kind {
    (host_pod, "host")
}

fn bridge() -> Kind {
    (bridge_pod, "bridge")
}

/// Starts a node with the built-in default network whose root directory is on this disk, and its state directory on a tmpfs.
pub(crate) fn node_on(disk: &FreshDisk) -> Node {
    Node::with(Options {
        config: DEFAULT_NETWORK.into(),
        has_tmpfs_state: true,
        root: Some(disk.path().join("root")),
        ..Options::default()
    })
}

fn one(pace: &Pace) -> Row {
    let home = Node::start();
    let disk = FreshDisk::new(home.folder(), DISK_MIB);
    let node = node_on(&disk);
    let image = node.import_probe();
    // The first pod creates what later ones use.
    let mut lives = Lives::default();
    lives.one(&node, &(pace.kind.0)("first"), &image);
    let bytes = disk.written();
    std::thread::sleep(COMMITTED);
    let flushes = disk.flushes();
    for number in 0..pace.lives {
        let begin = Instant::now();
        lives.one(&node, &(pace.kind.0)(&format!("life{number}")), &image);
        std::thread::sleep(pace.each.saturating_sub(begin.elapsed()));
    }
    std::thread::sleep(COMMITTED.saturating_sub(pace.each));
    let flushes = disk.flushes() - flushes;
    let bytes = disk.written() - bytes;
    node.stop();
    drop(disk);
    home.stop();
    let each = f64::from(pace.lives);
    let measured = format!("{:.1} flushes, {:.0} KB", flushes as f64 / each, bytes as f64 / each / 1e3);
    Row { what: pace.what, budget: pace.budget, measured, floor: None }
}
