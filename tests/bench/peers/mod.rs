//! `make bench-peers`: the same measurements of coracle and of another runtime (Debian's containerd with runc and CNI plugins, containerd 2
//! or CRI-O), alternating on one machine in one run. Both get the same requests from the same client
//! over their sockets, the same images and network configuration, and each has a cgroup in which all its
//! processes are counted.

mod side;
mod streaming;

use std::fs;
use std::time::{Duration, Instant};

use coracle_tests::cri::proto::{
    ListContainersRequest, ListPodSandboxRequest, PodSandboxConfig, RemoveImageRequest,
};
use coracle_tests::image::Image;
use coracle_tests::node;
use coracle_tests::peer::Peer;
use coracle_tests::request::{bridge_pod, container, host_pod, image_spec, pull};

use self::side::Sides;
use crate::beside::MIDDLING;
use crate::crowds::{BURST, burst};
use crate::life::{Lives, RUNS};
use crate::logs;
use crate::measure::{AT_REST, ask, first_answer, list_stats};
use crate::pictures::{self, Source};
use crate::pulls;
use crate::time::{Percentiles, median};

/// Number of rounds of measurements that take seconds, and of starts of the daemons.
const ROUNDS: usize = 3;
const STARTS: usize = 10;

/// The image of both runtimes' containers.
const IMAGE: &str = "localhost/probe:1";

/// A part of the table: its name and its measurement, which prints the rows.
type Part = (&'static str, fn(&mut Sides));

/// The parts of the table; each can be run by its name.
const PARTS: [Part; 9] = [
    ("idle", idle),
    ("start", starts),
    ("host", |sides| lives(sides, "host network", host_pod)),
    ("bridge", |sides| lives(sides, "bridge network", bridge_pod)),
    ("burst", bursts),
    ("crowd", crowd),
    ("logs", logs),
    ("pull", pulls),
    ("streaming", |sides| streaming::measure(sides, IMAGE)),
];

/// Prints the rows of these parts, or of all.
pub(crate) fn run(wanted: &[&str]) {
    let known = PARTS.map(|(name, _)| name);
    for name in wanted {
        assert!(known.contains(name), "{name}: parts of this table: {}", known.join(" "));
    }
    let mut sides = Sides::start();
    sides.import(&Image::probe(&coracle_tests::image::program(&node::binaries()), "usual"), IMAGE);
    println!("| what | coracle | {} | ratio |\n|---|---|---|---|", Peer::version());
    for (_, part) in PARTS.iter().filter(|(name, _)| wanted.is_empty() || wanted.contains(name)) {
        part(&mut sides);
    }
    sides.stop();
    if Peer::is_drawn() {
        pictures::draw();
    }
}

/// Prints a row; less is better.
fn row(what: &str, unit: &str, values: [f64; 2]) {
    let [ours, theirs] = values;
    let row = format!("| {what} | {ours:.2} {unit} | {theirs:.2} {unit} | {:.1} x |", theirs / ours);
    print(&row);
}

/// Prints a row, and keeps it for the plots if they show this runtime.
fn print(row: &str) {
    if Peer::is_drawn() {
        pictures::print(Source::Peers, row);
    } else {
        println!("{row}");
    }
}

/// Prints a row of times; the ratio is that of the medians.
fn times(what: &str, [ours, theirs]: [Vec<Duration>; 2]) {
    let (ours, theirs) = (Percentiles::of(&ours), Percentiles::of(&theirs));
    let row = format!("| {what}, p50 / p99 | {ours} | {theirs} | {:.1} x |", theirs.p50 / ours.p50);
    print(&row);
}

/// Measures the memory of the daemons without pods, some time after requests.
fn idle(sides: &mut Sides) {
    sides.each(|side| ask(side.cri));
    std::thread::sleep(AT_REST);
    let mb = sides.each(|side| side.memory_kib() as f64 / 1024.0);
    row("daemon idle, PSS after 1000 requests", "MB", mb);
}

/// Measures the time from the start of a daemon's process to its first answer, without pods.
fn starts(sides: &mut Sides) {
    let mut all = [Vec::new(), Vec::new()];
    for _ in 0..STARTS {
        let begin = sides.spawn_ours();
        first_answer(sides.ours(), &sides.ours().socket());
        all[0].push(begin.elapsed());
        let begin = sides.spawn_theirs();
        first_answer(sides.theirs(), &sides.theirs().socket());
        all[1].push(begin.elapsed());
        sides.adopt();
    }
    times("start to first answer after kill -9, no pods", all);
}

/// Measures one pod at a time.
fn lives(sides: &mut Sides, network: &str, make: fn(&str) -> PodSandboxConfig) {
    let mut all = [Lives::default(), Lives::default()];
    let before = sides.each(|side| side.cpu());
    for run in 0..RUNS {
        for (lives, side) in all.iter_mut().zip(sides.both()) {
            lives.one(side.cri, &side.placed(make(&format!("peer{run}"))), IMAGE);
        }
    }
    let after = sides.each(|side| side.cpu());
    let cpu = [0, 1].map(|index| (after[index] - before[index]).as_secs_f64() * 1000.0 / RUNS as f64);
    let [ours, theirs] = all;
    times(&format!("pod up, {network}"), [ours.up, theirs.up]);
    times(&format!("pod down, {network}"), [ours.down, theirs.down]);
    times(&format!("ExecSync(true), {network}"), [ours.execs, theirs.execs]);
    row(&format!("CPU of one pod's life with 3 execs, {network}"), "ms", cpu);
}

/// Measures many pods that several clients start.
fn bursts(sides: &mut Sides) {
    let mut all = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (times, side) in all.iter_mut().zip(sides.both()) {
            let (took, ids) = burst(side.cri, IMAGE, BURST, &|name| side.placed(bridge_pod(name)));
            times.push(took.as_secs_f64());
            ids.iter().for_each(|id| side.cri.remove_pod(id));
        }
    }
    row("50 pods up by 8 clients, bridge network", "s", all.map(median));
}

/// Measures the resource usage of many idle pods.
fn crowd(sides: &mut Sides) {
    // After the pause, memory of earlier work no longer counts as the pods'.
    std::thread::sleep(AT_REST);
    let before = sides.each(|side| side.memory_kib());
    let ids = sides.each(|side| burst(side.cri, IMAGE, BURST, &|name| side.placed(bridge_pod(name))).1);
    std::thread::sleep(AT_REST);
    let after = sides.each(|side| side.memory_kib());
    row(
        "everything with 50 pods, containers' own processes left out, PSS",
        "MB",
        after.map(|kib| kib as f64 / 1024.0),
    );
    let each = [0, 1].map(|index| after[index].saturating_sub(before[index]) as f64 / BURST as f64);
    row("one pod of them, PSS", "KiB", each);
    let mut stats = [Vec::new(), Vec::new()];
    for _ in 0..RUNS {
        for (times, side) in stats.iter_mut().zip(sides.both()) {
            times.push(list_stats(side.cri));
        }
    }
    times("ListContainerStats of 50", stats);
    let mut lists = [[Vec::new(), Vec::new()], [Vec::new(), Vec::new()]];
    for _ in 0..RUNS {
        for (index, side) in sides.both().into_iter().enumerate() {
            let begin = Instant::now();
            side.cri.list_pod_sandbox(ListPodSandboxRequest::default()).expect("pods");
            lists[0][index].push(begin.elapsed());
            let begin = Instant::now();
            side.cri.list_containers(ListContainersRequest::default()).expect("containers");
            lists[1][index].push(begin.elapsed());
        }
    }
    let [pods, containers] = lists;
    times("ListPodSandbox of 50", pods);
    times("ListContainers of 50", containers);
    for (side, ids) in sides.both().into_iter().zip(ids) {
        ids.iter().for_each(|id| side.cri.remove_pod(id));
    }
}

/// Measures a container that logs as fast as its log is written. Its CPU time counts as well, because conmon and a shim read from
/// its pipe in the same cgroup.
fn logs(sides: &mut Sides) {
    let (mut wall, mut cpu) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for round in 0..ROUNDS {
        for (index, side) in sides.both().into_iter().enumerate() {
            let pod = side.placed(host_pod(&format!("chatter{round}")));
            let pod_id = side.cri.run_pod(&pod);
            let config = container("chatter", IMAGE, &["chatter", &logs::MEBIBYTES.to_string()], &pod);
            let (before, begin) = (side.cpu(), Instant::now());
            let id = side.cri.run_container(&pod_id, &config, &pod);
            let status = side.cri.exited(&id);
            wall[index].push(begin.elapsed().as_secs_f64());
            cpu[index].push((side.cpu() - before).as_secs_f64());
            assert_eq!(status.exit_code, 0, "{status:?}");
            side.cri.remove_pod(&pod_id);
            fs::remove_dir_all(side.logs()).expect("the logs are ours");
        }
    }
    row("200 MiB of log in lines of 100 bytes", "s", wall.map(median));
    row("CPU of that, with the container's", "s", cpu.map(median));
}

/// Measures pull and removal of one image.
fn pulls(sides: &mut Sides) {
    let packed = pulls::push(&sides.registry, "middling", 1, &MIDDLING);
    let name = sides.registry.name("middling", "1");
    let (mut wall, mut cpu) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for _ in 0..ROUNDS {
        for (index, side) in sides.both().into_iter().enumerate() {
            let (before, begin) = (side.cpu(), Instant::now());
            side.cri.pull_image(pull(&name)).expect("pull");
            wall[index].push(begin.elapsed().as_secs_f64());
            cpu[index].push((side.cpu() - before).as_secs_f64());
            side.cri.remove_image(RemoveImageRequest { image: Some(image_spec(&name)) }).expect("remove");
        }
    }
    let what = format!(
        "pull and unpack {:.0} MB packed, {:.0} MB unpacked",
        packed as f64 / 1e6,
        MIDDLING.bytes() as f64 / 1e6
    );
    row(&what, "s", wall.map(median));
    row("CPU of that", "s", cpu.map(median));
}
