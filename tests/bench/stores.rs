//! The first pod of a board whose images are in an additional store: from the daemon's first answer until its container runs, at the
//! first start with this store, which is verified then, and at later starts. A kubelet asks for the image before it creates a container.

use std::fs;
use std::time::{Duration, Instant};

use coracle_tests::cri::proto::ImageStatusRequest;
use coracle_tests::image::{Image, bundle, program};
use coracle_tests::node::{Node, binaries};
use coracle_tests::request::{container, host_pod, image_spec, pull};

use crate::Row;
use crate::measure::first_answer;
use crate::time::Percentiles;

const NAME: &str = "localhost/board:1";
/// Number of boards that start for the first time, and of later starts of each.
const BOARDS: usize = 20;
const STARTS: usize = 5;

/// Measures first and later starts with a store.
pub(crate) fn measure() -> Vec<Row> {
    let home = Node::start();
    let (archive, store) = (home.folder().join("board.tar"), home.folder().join("store"));
    let image = Image::probe(&program(&binaries()), "board");
    fs::write(&archive, image.oci_archive(NAME)).expect("an archive");
    assert_eq!(bundle(&store, &[archive]), (true, String::new()));
    let (mut first, mut later) = (Vec::new(), Vec::new());
    for _ in 0..BOARDS {
        let config = format!("[image]\nadditional_stores = [{store:?}]\n");
        let mut node = Node::start();
        node.kill9();
        node.rewrite_config(&config);
        first.push(after_start(&mut node));
        for _ in 0..STARTS {
            node.kill9();
            later.push(after_start(&mut node));
        }
        node.stop();
    }
    home.stop();
    let row = |what, times: &[Duration]| Row {
        what,
        budget: "60 ms",
        measured: Percentiles::of(times).to_string(),
        floor: None,
    };
    vec![
        row("first answer to a running container of an additional store, first start", &first),
        row("the same, later starts", &later),
    ]
}

/// The time from the first answer of a new daemon until its first pod runs.
fn after_start(node: &mut Node) -> Duration {
    node.spawn();
    first_answer(node, &node.socket());
    first_pod(node)
}

/// The time in which a kubelet's calls for a pod with one container are answered; it pulls an image that the node does not have yet.
fn first_pod(node: &Node) -> Duration {
    let begin = Instant::now();
    let pod = host_pod("first");
    let pod_id = node.run_pod(&pod);
    let request = ImageStatusRequest { image: Some(image_spec(NAME)), ..Default::default() };
    if node.image_status(request).expect("a status").image.is_none() {
        node.pull_image(pull(NAME)).expect("the image of the store");
    }
    node.run_container(&pod_id, &container("one", NAME, &["sleep"], &pod), &pod);
    let took = begin.elapsed();
    node.remove_pod(&pod_id);
    took
}
