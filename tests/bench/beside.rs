//! The effect of image pulls on the start of pods, and of many pulls on the daemon's memory.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::RemoveImageRequest;
use coracle_tests::host;
use coracle_tests::node::Node;
use coracle_tests::registry::Registry;
use coracle_tests::request::{host_pod, image_spec, pull as pull_of};

use crate::Row;
use crate::life::{Lives, RUNS};
use crate::measure::{self, Memory, settled};
use crate::pulls::{self, Shape};
use crate::time::Percentiles;

/// 135 MB in the registry, 494 MB unpacked.
pub(crate) const MIDDLING: Shape = Shape { layers: 3, small: (3000, 8_000), big: (519, 271_000) };
/// Number of images of the memory measurement.
const STORM: usize = 20;
const SMALL: Shape = Shape { layers: 2, small: (50, 8_000), big: (4, 271_000) };
/// Minimum number of pod starts for a meaningful p99, and maximum number of pulls during which they are made.
const STARTS: usize = 100;
const PULLS_MAX: usize = 20;

/// Measures pod starts during a pull.
pub(crate) fn pull() -> Vec<Row> {
    let node = measure::node("");
    let image = node.import_probe();
    let registry = Registry::start(node.folder());
    let packed = pulls::push(&registry, "middling", 1, &MIDDLING);
    let mut quiet = Lives::default();
    (0..RUNS).for_each(|run| quiet.one(&node, &host_pod(&format!("quiet{run}")), &image));
    let mut up = Vec::new();
    for _ in 0..PULLS_MAX {
        up.extend(starts_beside(&node, &image, &registry.name("middling", "1")));
        if up.len() >= STARTS {
            break;
        }
    }
    drop(registry);
    node.stop();
    let (quiet, beside) = (Percentiles::of(&quiet.up), Percentiles::of(&up));
    let measured = format!(
        "{beside} of {} pods, {quiet} without; p99 is {:.1} x the p50 beside, {:.1} x the p50 without ({:.0} MB packed)",
        up.len(),
        beside.p99 / beside.p50,
        beside.p99 / quiet.p50,
        packed as f64 / 1e6
    );
    vec![Row {
        what: "pod up while an image is pulled, p50 / p99",
        budget: "p99 ≤ 3 x p50",
        measured,
        floor: None,
    }]
}

/// Pulls the image once and removes it; returns the start times of the pods that were started and stopped
/// during the pull.
fn starts_beside(node: &Node, image: &str, name: &str) -> Vec<Duration> {
    let is_over = AtomicBool::new(false);
    let client = node.another();
    let times = std::thread::scope(|scope| {
        let call = scope.spawn(|| {
            let client = client;
            client.pull_image(pull_of(name)).expect("pull");
            is_over.store(true, Ordering::Relaxed);
        });
        host::wait_until("a worker pulls", || !node.workers().is_empty() || call.is_finished());
        let mut lives = Lives::default();
        let mut times = Vec::new();
        while !is_over.load(Ordering::Relaxed) {
            lives.one(node, &host_pod(&format!("beside{}", lives.up.len())), image);
            if !is_over.load(Ordering::Relaxed) {
                times.extend(lives.up.last());
            }
        }
        call.join().expect("a client");
        times
    });
    node.remove_image(RemoveImageRequest { image: Some(image_spec(name)) }).expect("remove");
    files_are_gone(node);
    times
}

/// Measures the growth of the daemon's memory by many pulls.
pub(crate) fn storm() -> Vec<Row> {
    let node = measure::node("");
    let registry = Registry::start(node.folder());
    for image in 0..STORM {
        pulls::push(&registry, &format!("small{image}"), 1000 * image, &SMALL);
    }
    // A first pull, so that one-time allocations do not count as growth.
    pull_and_remove(&node, &registry.name("small0", "1"));
    let before = settled(&node);
    let first = one_storm(&node, &registry);
    let second = one_storm(&node, &registry);
    drop(registry);
    node.stop();
    // Growth by the first round may be partly used allocator groups; a leak would also grow in the second
    // round.
    let measured = format!("{}; by another: {}", first.since(&before), second.since(&first));
    vec![Row {
        what: "growth by 20 images pulled and removed, 4 at once",
        budget: "0",
        measured,
        floor: None,
    }]
}

/// Pulls and removes all images; returns the daemon's memory afterwards.
fn one_storm(node: &Node, registry: &Registry) -> Memory {
    const CLIENTS: usize = 4;
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            let client = node.another();
            scope.spawn(move || {
                for image in (number..STORM).step_by(CLIENTS) {
                    pull_and_remove(&client, &registry.name(&format!("small{image}"), "1"));
                }
            });
        }
    });
    files_are_gone(node);
    settled(node)
}

fn pull_and_remove(cri: &Cri, name: &str) {
    cri.pull_image(pull_of(name)).expect("pull");
    cri.remove_image(RemoveImageRequest { image: Some(image_spec(name)) }).expect("remove");
}

/// Waits until workers have removed the images' files: thousands of files on a disk that may be busy.
fn files_are_gone(node: &Node) {
    let gone = host::wait_within(Duration::from_secs(300), || node.workers().is_empty().then_some(()));
    gone.expect("files of removed images go within five minutes");
}
