//! A site as it is in the field ([`coracle_tests::site`]): what its uplink carries, and for how long, if all nodes want an image at
//! the same moment. `make bench PARTS=update` measures the time.

use std::time::Duration;

use coracle_tests::host::wait_within;
use coracle_tests::image::Image;
use coracle_tests::layer::{Entry, Layer, noise};
use coracle_tests::random::Random;
use coracle_tests::request::pull;
use coracle_tests::site::Site;

/// Number of nodes.
const NODES: usize = 10;
/// Rate of the uplink.
const UPLINK_KBIT: u32 = 12_000;
/// Layers of an image in bytes.
const LAYERS: [usize; 8] = [2_500_000, 2_500_000, 2_000_000, 1_500_000, 1_000_000, 800_000, 200_000, 1000];
/// Time by which nodes of a machine that is busy with other tests may be later.
const BUSY: Duration = Duration::from_secs(30);

/// The daemons of three nodes are killed in the second pull.
#[test]
fn ten_nodes_of_a_site_share_one_uplink() {
    let mut random = Random::from_environment();
    let mut site = Site::start(NODES, UPLINK_KBIT);
    let pull_on = |site: &Site, about: &str, seed, nodes: &[usize], kills: &[(usize, Duration)]| {
        let ((name, size), before, requests) =
            (site.push(&LAYERS, seed), site.carried(), site.requests().len());
        let took = site.pull(&name, nodes, kills);
        let share = (site.carried() - before) as f64 / size as f64;
        println!("{about}: {took:.2?}, the uplink carried {share:.3} x the image");
        // With the headers of all layers of the network.
        assert!(share <= 1.2, "{about}: {share} x the image:\n{}", site.requests()[requests..].join("\n"));
        (took, name, size)
    };
    let all: Vec<usize> = (0..NODES).collect();
    let (alone, ..) = pull_on(&site, "one node", 1, &all[..1], &[]);
    let (ten, ..) = pull_on(&site, "ten nodes", 2, &all, &[]);
    let mut victims = all.clone();
    random.shuffle(&mut victims);
    let kills: Vec<_> =
        victims[..3].iter().map(|node| (*node, alone.mul_f64(random.below(1000) as f64 / 1000.0))).collect();
    let (seven, name, size) = pull_on(&site, &format!("{kills:?} killed"), 3, &all, &kills);
    for (about, took) in [("ten nodes", ten), ("seven nodes", seven)] {
        // One after the other they would need ten times as long.
        assert!(took < alone * 2 + BUSY, "{about}: {took:?}, and one node alone {alone:?}");
    }
    // Those that were killed have it when they are back, and not from the registry.
    let before = site.carried();
    for (number, _) in kills {
        let node = &mut site.nodes[number];
        node.restart();
        node.pull_image(pull(&name)).unwrap_or_else(|error| panic!("node {number}: {error}"));
        let parts = node.root().join("images/parts");
        let is_empty = || std::fs::read_dir(&parts).is_ok_and(|mut left| left.next().is_none()).then_some(());
        assert!(wait_within(Duration::from_secs(20), is_empty).is_some(), "node {number}: parts are left");
        let checked = node.image_command(&["check"]);
        assert!(checked.status.success(), "node {number}: {}", String::from_utf8_lossy(&checked.stderr));
    }
    let after = (site.carried() - before) as f64 / size as f64;
    assert!(after < 0.1, "the uplink carried {after} x the image again");
    site.stop();
}

/// A layer with a table of contents can be pulled in part by each node: one node of the site does, and the others take it from there.
#[test]
fn nodes_of_a_site_download_what_changed_once() {
    const NODES: usize = 5;
    let mut site = Site::start(NODES, UPLINK_KBIT);
    let all: Vec<usize> = (0..NODES).collect();
    let probe = Image::probe(&site.nodes[0].probe(), "site");
    // Each file is in a chunk of its own: of the files, the first `new` ones are those of this release only.
    let release = |number: u64, new: u64| {
        let layer = |layer: u64| {
            let file = |file: u64| {
                let first = if file < new { number } else { 1 };
                let seed = first * 1000 + layer * 100 + file;
                Entry::file(&format!("layer-{layer}-{file}"), &noise(100_000, seed))
            };
            Layer::chunked(&(0..20).map(file).collect::<Vec<_>>())
        };
        (0..3).map(layer).fold(probe.clone(), Image::plus)
    };
    for (number, new, most) in [(1, 20, 1.2), (2, 3, 0.25), (3, 17, 1.05)] {
        let (name, size) = site.push_image(&release(number, new), &number.to_string());
        let (before, requests) = (site.carried(), site.requests().len());
        let took = site.pull(&name, &all, &[]);
        let share = (site.carried() - before) as f64 / size as f64;
        println!("{new} of 20 files are new: {took:.2?}, the uplink carried {share:.3} x the image");
        assert!(share <= most, "{share} x the image:\n{}", site.requests()[requests..].join("\n"));
    }
    let in_part = site.nodes.iter().filter(|node| node.log().contains("bytes were on the node")).count();
    assert!(in_part > 0, "no node has pulled in part");
    // A node that dies is not waited for, whatever it has announced.
    let (name, _) = site.push_image(&release(4, 17), "4");
    let kills = [0, 1, 2].map(|node| (node, Duration::from_millis(1000 + 500 * node as u64)));
    let took = site.pull(&name, &all, &kills);
    println!("three nodes killed: {took:.2?}");
    assert!(took < Duration::from_secs(45), "{took:?}");
    for (number, _) in kills {
        let node = &mut site.nodes[number];
        node.restart();
        node.pull_image(pull(&name)).unwrap_or_else(|error| panic!("node {number}: {error}"));
    }
    site.stop();
}
