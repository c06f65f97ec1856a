//! Cost of NRI plugins: CRI calls with and without them, and the memory of their connections. The plugins
//! answer immediately from a thread of this process.

use std::time::{Duration, Instant};

use coracle_tests::cri::proto::RemoveContainerRequest;
use coracle_tests::host;
use coracle_tests::node::Node;
use coracle_tests::nri::{Answer, EVENTS, Plugin, api};
use coracle_tests::request::{container, host_pod};

use crate::time::Percentiles;
use crate::{Row, measure};

/// Number of runs of each measurement.
const RUNS: usize = 100;

/// Runs all measurements.
pub(crate) fn measure() -> Vec<Row> {
    let mut rows = Vec::new();
    let node = measure::node("");
    let image = node.import_probe();
    let without = (pods(&node), creations(&node, &image));
    let empty = host::anonymous_kib(node.pid());
    let mut plugins = vec![quick(&node, "00")];
    let with_one = pods(&node);
    let own = round_trip(&plugins[0]);
    plugins.extend((1..10).map(|index| quick(&node, &format!("{index:02}"))));
    let with_ten = creations(&node, &image);
    let kib = host::anonymous_kib(node.pid()).saturating_sub(empty) as f64 / plugins.len() as f64;
    let measured = format!(
        "{:+.2} ms ({} without, {} with, an empty round trip takes {:.2} ms)",
        difference(&without.0, &with_one),
        Percentiles::of(&without.0),
        Percentiles::of(&with_one),
        own.as_secs_f64() * 1000.0
    );
    rows.push(Row {
        what: "RunPodSandbox with one NRI plugin, p50",
        budget: "+0.3 ms",
        measured,
        floor: None,
    });
    let measured = format!(
        "{:+.2} ms ({} without, {} with)",
        difference(&without.1, &with_ten),
        Percentiles::of(&without.1),
        Percentiles::of(&with_ten)
    );
    rows.push(Row {
        what: "CreateContainer with ten NRI plugins, p50",
        budget: "+2 ms",
        measured,
        floor: None,
    });
    rows.push(Row {
        what: "an idle NRI plugin, in the daemon",
        budget: "32 KiB",
        measured: format!("{kib:.1} KiB"),
        floor: None,
    });
    drop(plugins);
    node.stop();
    rows
}

/// A plugin that subscribes to the measured events and adjusts one annotation.
fn quick(node: &Node, index: &str) -> Plugin {
    let annotation = index.to_owned();
    let handler: coracle_tests::nri::Handler = Box::new(move |_, heard| match heard.method.as_str() {
        "CreateContainer" => Answer::adjust(api::ContainerAdjustment {
            annotations: [(annotation.clone(), "1".to_owned())].into(),
            ..Default::default()
        }),
        _ => Answer::empty(),
    });
    // RunPodSandbox and CreateContainer, as in other projects' measurements with trivial plugins.
    const ONLY: i32 = EVENTS & 0x0009;
    Plugin::join(node, index, "quick", ONLY, handler)
}

/// Measures a round trip between the daemon and a plugin: a call in the other direction without effect.
fn round_trip(plugin: &Plugin) -> Duration {
    let begun = Instant::now();
    for _ in 0..RUNS {
        plugin.caller().update(Vec::new()).expect("an answer");
    }
    begun.elapsed() / RUNS as u32
}

/// Measures repeated RunPodSandbox calls.
fn pods(node: &Node) -> Vec<Duration> {
    let one = |run: usize| {
        let pod = host_pod(&format!("plugged{run}"));
        let begun = Instant::now();
        let id = node.run_pod(&pod);
        let took = begun.elapsed();
        node.remove_pod(&id);
        took
    };
    (0..RUNS).map(one).collect()
}

/// Measures repeated CreateContainer calls.
fn creations(node: &Node, image: &str) -> Vec<Duration> {
    let pod = host_pod("plugged");
    let pod_id = node.run_pod(&pod);
    let config = container("one", image, &["true"], &pod);
    let one = |_| {
        let begun = Instant::now();
        let container_id = node.create(&pod_id, &config, &pod);
        let took = begun.elapsed();
        node.remove_container(RemoveContainerRequest { container_id }).expect("remove");
        took
    };
    let took = (0..RUNS).map(one).collect();
    node.remove_pod(&pod_id);
    took
}

/// Difference of the medians in milliseconds.
fn difference(before: &[Duration], after: &[Duration]) -> f64 {
    Percentiles::of(after).p50 - Percentiles::of(before).p50
}
