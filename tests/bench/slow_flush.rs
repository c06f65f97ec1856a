//! A pod's life on a disk whose flush takes 20 ms, as that of a cheap SD card does: a new ext4 with a journal below `--root`, on
//! a device whose flush is delayed. The state directory is on a tmpfs. Starts of pods are measured twice: without a removal before,
//! and after one that ext4 has not written yet, which a new record has to wait for (docs/notes/017-flushes.md).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use coracle_tests::fresh_disk::FreshDisk;
use coracle_tests::node::Node;
use coracle_tests::request::{bridge_pod, host_pod};

use crate::life::{Kind, Lives};
use crate::time::Percentiles;
use crate::{Row, flash};

/// Time of one flush.
const FLUSH: Duration = Duration::from_millis(20);
/// Size of the file system in MiB.
const DISK_MIB: u64 = 256;
/// Number of pods of a series.
const PODS: u32 = 40;
/// Time between the starts of two pods: longer than the delay after which the daemon creates spare files.
const EACH: Duration = Duration::from_millis(1500);
/// Size of a block of ext4 in bytes.
const BLOCK_BYTES: usize = 4096;

/// Names of the rows of one kind of pod: start without a removal before, start after a removal, end.
type Names = [&'static str; 3];

const HOST: Names = [
    "flush of 20 ms: pod up, host network, p50 / p99",
    "the same, a second after a pod was removed",
    "flush of 20 ms: pod down, host network, p50 / p99",
];
const BRIDGE: Names = [
    "flush of 20 ms: pod up, bridge network built in, p50 / p99",
    "the same on the bridge, a second after a pod was removed",
    "flush of 20 ms: pod down, bridge network built in, p50 / p99",
];

/// Measures pods with the host's network and pods on the built-in bridge, each on a disk of its own, by turns.
pub(crate) fn measure() -> Vec<Row> {
    let begin = Instant::now();
    let host: Kind = (host_pod, "host");
    let bridge: Kind = (bridge_pod, "bridge");
    std::thread::scope(|scope| {
        let running = [
            scope.spawn(move || series(host, HOST, begin)),
            scope.spawn(move || series(bridge, BRIDGE, begin + EACH / 2)),
        ];
        running.into_iter().flat_map(|thread| thread.join().expect("a measurement")).collect()
    })
}

/// Waits until a multiple of [`EACH`] after `begin`.
fn wait_for_turn(begin: Instant) {
    let since = begin.elapsed().as_nanos() % EACH.as_nanos();
    std::thread::sleep(EACH.saturating_sub(Duration::from_nanos(u64::try_from(since).unwrap_or(0))));
}

/// Measures pods of one kind, which start at multiples of [`EACH`] after `begin`.
fn series((make, _): Kind, names: Names, begin: Instant) -> [Row; 3] {
    let home = Node::start();
    let disk = FreshDisk::with_slow_flush(home.folder(), DISK_MIB, FLUSH);
    check(&disk);
    let node = flash::node_on(&disk);
    let image = node.import_probe();
    // The first pod creates what later ones use, and the one after it syncs its removal.
    let mut first = Lives::default();
    first.one(&node, &make("first"), &image);
    let mut present = vec![first.up(&node, &make("second"), &image)];
    let (mut kept, mut lives, mut flushes) = (Lives::default(), Lives::default(), [0; 3]);
    for turn in 0..PODS {
        wait_for_turn(begin);
        let before = disk.flushes();
        present.push(kept.up(&node, &make(&format!("kept{turn}")), &image));
        flushes[0] += disk.flushes() - before;
    }
    for (pod_id, container_id) in present {
        first.down(&node, pod_id, container_id);
    }
    for turn in 0..PODS {
        wait_for_turn(begin);
        let before = disk.flushes();
        let (pod_id, container_id) = lives.up(&node, &make(&format!("life{turn}")), &image);
        let up = disk.flushes();
        lives.execs(&node, &container_id);
        let used = disk.flushes();
        lives.down(&node, pod_id, container_id);
        flushes[1] += up - before;
        flushes[2] += disk.flushes() - used;
    }
    node.stop();
    drop(disk);
    home.stop();
    let row = |index: usize, budget, times: &[Duration]| {
        let each = flushes[index] as f64 / f64::from(PODS);
        let measured = format!("{}, {each:.1} flushes", Percentiles::of(times));
        Row { what: names[index], budget, measured, floor: None }
    };
    let budget = if names == HOST { "60 ms" } else { "" };
    [row(0, budget, &kept.up), row(1, budget, &lives.up), row(2, "", &lives.down)]
}

/// Checks that a sync of data whose block is on the disk already is a flush, and takes the time of its flushes.
fn check(disk: &FreshDisk) {
    let file = File::create(disk.path().join("check")).expect("a file");
    let write = |byte: u8| file.write_all_at(&[byte; BLOCK_BYTES], 0).expect("a block");
    write(0);
    file.sync_all().expect("its block is on the disk");
    write(1);
    let (before, begin) = (disk.flushes(), Instant::now());
    file.sync_data().expect("the data are on the disk");
    let (took, flushes) = (begin.elapsed(), disk.flushes() - before);
    assert!(flushes >= 1, "fdatasync flushed nothing");
    assert!(took >= FLUSH * u32::try_from(flushes).unwrap_or(1), "{flushes} flushes took {took:?}");
}
