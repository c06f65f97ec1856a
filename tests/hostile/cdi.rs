//! CDI: spec files that are no files, that change while they are read, or that ask for what no device needs. The directories
//! belong to root, but vendors' tools write them at any time.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coracle_tests::cri::proto::{CdiDevice, ContainerConfig, StartContainerRequest};
use coracle_tests::host;
use coracle_tests::node::{Node, Options};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{create, host_pod};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::{Rights, armed, got, says};

/// A fixture on a node whose spec files are in a directory of the test.
fn vendor() -> (PodFixture, PathBuf) {
    let config = "[cdi]\nspec_dirs = [\"FOLDER\"]\n";
    let folder = std::env::temp_dir().join(format!(
        "coracle-cdi-{}-{}",
        std::process::id(),
        coracle_tests::request::fresh()
    ));
    fs::create_dir_all(&folder).expect("a directory");
    let config = config.replace("FOLDER", &folder.display().to_string());
    (PodFixture::on(Node::with(Options { config, ..Options::default() }), host_pod("fixture")), folder)
}

/// Writes a spec file with one device `vendor.test/KIND=x` of these edits.
fn spec(folder: &Path, kind: &str, edits: &str) {
    let text = format!(
        "cdiVersion: 0.6.0\nkind: vendor.test/{kind}\ndevices: [{{name: x, containerEdits: {{{edits}}}}}]\n"
    );
    fs::write(folder.join(format!("{kind}.yaml")), text).expect("a file");
}

fn with_device(fixture: &PodFixture, name: &str, device: &str) -> ContainerConfig {
    let mut config = armed(fixture, name, Rights::Default, &["sleep", "forever"]);
    config.cdi_devices = vec![CdiDevice { name: device.into() }];
    config
}

/// Creates and starts a container with one device; returns its ID or the first error.
fn attempt(fixture: &PodFixture, name: &str, device: &str) -> Result<String, String> {
    let config = with_device(fixture, name, device);
    let made = fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod));
    let id = made.map_err(|error| error.message().to_owned())?.container_id;
    let started = fixture.node.start_container(StartContainerRequest { container_id: id.clone() });
    started.map(|_| id).map_err(|error| error.message().to_owned())
}

/// Each stands beside a good file, whose device is still given, within moments; one that is asked for is refused.
#[test]
fn spec_files_that_are_no_files_affect_no_other_device() {
    let (fixture, folder) = vendor();
    spec(&folder, "good", "env: [GOOD=1]");
    let fifo = folder.join("fifo.yaml");
    nix::unistd::mkfifo(&fifo, Mode::S_IRWXU).expect("a FIFO");
    let links =
        ["/proc/self/environ", "/proc/self/mem", "/proc/kmsg", "/dev/zero", "/proc/self/fd/0", "loop.yaml"];
    for (number, target) in links.into_iter().enumerate() {
        let name = if target == "loop.yaml" { target.to_owned() } else { format!("link{number}.yaml") };
        symlink(target, folder.join(name)).expect("a link");
    }
    symlink(&fifo, folder.join("of-fifo.json")).expect("a link");
    fs::create_dir(folder.join("directory.yaml")).expect("a directory");
    fs::write(folder.join("nested.yaml"), "a: ".repeat(100_000)).expect("a file");
    fs::write(folder.join("deep.json"), "[".repeat(1 << 20)).expect("a file");
    let bomb: String = (0..40)
        .map(|at| format!("a{}: &a{} [{}]\n", at + 1, at + 1, format!("*a{at}, ").repeat(9)))
        .collect();
    fs::write(folder.join("bomb.yaml"), format!("a0: &a0 x\n{bomb}")).expect("a file");
    fs::write(folder.join("latin.yaml"), b"kind: vendor.test/\xff\xfe\ncdiVersion: 0.6.0\n").expect("a file");
    for number in 0..5 {
        fs::write(folder.join(format!("x-large{number}.yaml")), vec![b'#'; 1 << 20]).expect("a file");
    }
    let begun = Instant::now();
    let id = attempt(&fixture, "good", "vendor.test/good=x").expect("the good one is given");
    assert!(says(&fixture, &id, &["see", "env"]).contains("GOOD=1"));
    for device in [
        "vendor.test/fifo=x",
        "vendor.test/..=x",
        "vendor.test/good=../x",
        "../../good=x",
        "=",
        "/=",
        "\0/x=x",
    ] {
        let refused = attempt(&fixture, "bad", device).expect_err(device);
        assert!(refused.contains("CDI device"), "{device:?}: {refused}");
    }
    assert!(begun.elapsed() < Duration::from_secs(15) * host::slowness(), "{:?}", begun.elapsed());
    fixture.node.stop();
    fs::remove_dir_all(&folder).expect("ours");
}

/// Edits that would cover the kernel's files, leave the container, or name a program by a relative path.
#[test]
fn edits_of_devices_cover_and_leave_nothing() {
    let (fixture, folder) = vendor();
    let library = folder.join("library");
    fs::create_dir(&library).expect("a directory");
    let mount = |target: &str| {
        format!("mounts: [{{hostPath: {}, containerPath: {target}, options: [bind]}}]", library.display())
    };
    let mut cases = vec![
        ("hooks: [{hookName: prestart, path: bin/true}]".to_owned(), "absolute path"),
        ("hooks: [{hookName: prestart, path: ../../bin/true}]".to_owned(), "absolute path"),
        ("hooks: [{hookName: createContainer, path: /nowhere/at/all}]".to_owned(), "/nowhere/at/all"),
        ("deviceNodes: [{path: dev/x, hostPath: /dev/zero}]".to_owned(), "absolute path"),
        ("deviceNodes: [{path: /dev/x, hostPath: /dev/zero, permissions: rwx}]".to_owned(), "permissions"),
        ("deviceNodes: [{path: /dev/x, hostPath: /etc/passwd}]".to_owned(), "/etc/passwd"),
        ("deviceNodes: [{path: /dev/x, hostPath: ../dev/zero}]".to_owned(), "../dev/zero"),
        ("deviceNodes: [{path: /, hostPath: /dev/zero}]".to_owned(), "/"),
        ("deviceNodes: [{path: /dev/x/.., hostPath: /dev/zero}]".to_owned(), "/dev"),
        ("deviceNodes: [{path: /proc/keys, hostPath: /dev/zero}]".to_owned(), ""),
        ("mounts: [{hostPath: ../etc, containerPath: /x}]".to_owned(), "absolute paths"),
        ("mounts: [{hostPath: /etc, containerPath: /x, options: [upperdir=/]}]".to_owned(), "upperdir"),
        ("mounts: [{hostPath: /etc, containerPath: /x, type: overlay}]".to_owned(), "bind mounts"),
        ("env: [NOVALUE]".to_owned(), "NAME=VALUE"),
        ("additionalGids: [-1]".to_owned(), "-1"),
        ("additionalGids: [4294967296]".to_owned(), "4294967296"),
    ];
    for target in ["/proc", "/proc/sys", "/x/../proc", "/../proc/./1", "/", "/x/.."] {
        cases.push((mount(target), if target.contains("proc") { "proc" } else { "root of the container" }));
    }
    let mut wrong = Vec::new();
    for (at, (edits, expected)) in cases.iter().enumerate() {
        spec(&folder, "bad", edits);
        match attempt(&fixture, &format!("bad{at}"), "vendor.test/bad=x") {
            Err(error) if error.contains(expected) => {}
            // A node below /proc is hidden by the kernel's own (docs/gpus.md).
            Ok(id) if expected.is_empty() => {
                let report = says(&fixture, &id, &["attack", "masks", "/proc/keys"]);
                assert!(got(&report).is_empty() && report.contains("held /proc/keys"), "{report}");
            }
            other => wrong.push(format!("{edits}: expected {expected:?}: {other:?}")),
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    fixture.node.stop();
    fs::remove_dir_all(&folder).expect("ours");
}

/// CVE-2026-24260 and its kind: the node at a device's host path is a harmless one when it is examined and another one later.
/// What the container has as node and what its device cgroup permits is one of the two, whole.
#[test]
fn a_race_for_the_node_of_a_device_gives_the_one_that_was_examined() {
    /// Nodes that `attack devices` tries: the kernel's log, and the first loop device.
    const KINDS: [(&str, SFlag, u64, u64); 2] =
        [("kmsg", SFlag::S_IFCHR, 1, 11), ("loop0", SFlag::S_IFBLK, 7, 0)];
    let (fixture, folder) = vendor();
    let [one, other] = KINDS.map(|(name, kind, major, minor)| {
        let path = folder.join(name);
        mknod(&path, kind, Mode::from_bits_truncate(0o666), makedev(major, minor)).expect("a node");
        path
    });
    spec(&folder, "raced", &format!("deviceNodes: [{{path: /dev/raced, hostPath: {}}}]", one.display()));
    let over = AtomicBool::new(false);
    let mut seen = [0; 2];
    std::thread::scope(|scope| {
        let swapper = scope.spawn(|| {
            let mut swaps = 0_u32;
            while !over.load(Ordering::Relaxed) {
                renameat_with(CWD, &one, CWD, &other, RenameFlags::EXCHANGE).expect("ours");
                swaps += 1;
            }
            swaps
        });
        let rounds = (0..60).map(|round| {
            let id = attempt(&fixture, &format!("raced{round}"), "vendor.test/raced=x")?;
            let about = says(&fixture, &id, &["stat", "/dev/raced"]);
            let report = says(&fixture, &id, &["attack", "devices", "/tmp"]);
            Ok((about, report))
        });
        let rounds: Vec<Result<(String, String), String>> = rounds.collect();
        over.store(true, Ordering::Relaxed);
        assert!(swapper.join().expect("the thread ends") > 100);
        for (round, outcome) in rounds.into_iter().enumerate() {
            let (about, report) = outcome.unwrap_or_else(|error| panic!("round {round}: {error}"));
            let which = usize::from(about.starts_with('6'));
            seen[which] += 1;
            // The errors of a device that is not there are those of its driver and not of the cgroup.
            let is_permitted = |name: &str| {
                let of = format!(" device {name} in /tmp for writing");
                let line = report.lines().find(|line| line.contains(&of)).expect("it was tried");
                !line.contains("Operation not permitted")
            };
            let permitted = KINDS.map(|(name, ..)| is_permitted(name));
            assert!(
                permitted[which] && !permitted[1 - which],
                "round {round}: {about}: {permitted:?}\n{report}"
            );
        }
    });
    assert!(seen.iter().all(|count| *count > 0), "the race was never won by one: {seen:?}");
    fixture.node.stop();
    fs::remove_dir_all(&folder).expect("ours");
}
