//! `kill -9` of the daemon, and errors, at system calls of the repair of a layer that a container uses: the next repair succeeds, the
//! container is not disturbed, and nothing is left when it is removed.

use std::fs;
use std::path::PathBuf;

use coracle_tests::cri::proto::ListPodSandboxRequest;
use coracle_tests::host::{patience, wait_until, wait_within};
use coracle_tests::request::exec;

#[cfg(target_arch = "x86_64")]
use super::errors::{Point, Tried, checked, names_the_error, none, points_of, try_all};
use super::trace::NO_CALL;
#[cfg(target_arch = "x86_64")]
use super::trace::{Fault, Seen, Tracer, Whose};
use super::{Fixture, is_whole};

/// Number of the last calls of a repair, among which are those that exchange the layers.
const LAST: usize = 80;

/// Names in the directory of layers that begin so.
fn names(fixture: &Fixture, start: &str) -> Vec<String> {
    let layers = fs::read_dir(fixture.node.root().join("layers")).expect("layers").flatten();
    let names = layers.map(|layer| layer.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(start)).collect()
}

/// A file of the only layer.
fn marker(fixture: &Fixture) -> PathBuf {
    let layer = names(fixture, "").into_iter().find(|name| name.len() == 64).expect("a layer");
    fixture.node.root().join("layers").join(layer).join("etc/marker")
}

/// A repair succeeds, and the container that uses the layer runs.
#[track_caller]
fn assert_repaired(fixture: &Fixture, what: &str) {
    let checked = fixture.node.image_command(&["check", "--repair"]);
    let text = String::from_utf8_lossy(&checked.stderr);
    assert!(checked.status.success(), "{what}: {text}");
    assert_ne!(fs::read(marker(fixture)).expect("it reads"), b"damaged", "{what}");
    let is_run = || fixture.node.exec_sync(exec(&fixture.bystander, &["true"], 20)).ok();
    assert!(wait_within(patience(), is_run).is_some(), "{what}: the container does not run");
    let damage = fs::read_dir(fixture.node.root().join("images/damage")).expect("damage").count();
    assert_eq!(damage, 0, "{what}");
}

/// Removes all pods; replaced layers go with them.
fn finish(fixture: Fixture) {
    for pod in fixture.node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list").items {
        fixture.node.remove_pod(&pod.id);
    }
    let replaced = fixture.node.root().join("replaced");
    wait_until("replaced layers are removed", || fs::read_dir(&replaced).expect("it is read").count() == 0);
    fixture.node.stop();
}

/// The directory of the old layer once had two meanings, so that a kill blocked all later repairs.
#[test]
fn a_kill_within_a_repair_blocks_no_other() {
    let mut fixture = Fixture::on_host();
    let mut kill = |point: usize| {
        fs::write(marker(&fixture), b"damaged").expect("ours to break");
        let mut command = fixture.node.command(&["image", "check", "--repair"]);
        let calls = fixture.kill_in(point, move |_| drop(command.output()));
        assert_repaired(&fixture, &format!("call {point}"));
        wait_until("nothing else is left", || names(&fixture, "tmp-").is_empty());
        calls
    };
    let calls = kill(NO_CALL);
    let step = if is_whole() { 1 } else { 6 };
    let first = if is_whole() { 1 } else { calls.saturating_sub(LAST).max(1) };
    let points: Vec<usize> = (first..=calls).step_by(step).collect();
    for point in &points {
        kill(*point);
    }
    println!("inject: repair: {} of {calls} system calls, 0 failures", points.len());
    finish(fixture);
}

#[cfg(target_arch = "x86_64")]
fn try_repair(fixture: &mut Fixture, (call, error): Point) -> Tried {
    fs::write(marker(fixture), b"damaged").expect("ours to break");
    let tracer = Tracer::attach(fixture.node.pid(), Whose::Own, call, Fault::Error(error));
    let output = fixture.node.image_command(&["check", "--repair"]);
    let seen = tracer.stop();
    let refused = checked(fixture, &seen, |fixture| {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let refused = (!output.status.success()).then_some(text);
        if let Some(text) = &refused {
            assert!(names_the_error(&seen, text), "without its cause: {text}");
        }
        assert_repaired(fixture, "after the error");
        refused
    });
    Tried { seen, refused }
}

/// Errors of renames, as that of a file system that cannot exchange directories, leave the damaged layer where it is.
#[cfg(target_arch = "x86_64")]
#[test]
fn layers_that_cannot_be_exchanged_stay() {
    let is_of_layers = |call: &str| call.starts_with("rename") || call.starts_with("mkdir");
    let choose = |seen: &Seen| points_of(seen, is_of_layers);
    none(&try_all("Daemon: exchange of a layer", &Fixture::on_host, &choose, &try_repair));
}
