//! One error at system calls outside of a pod's life: a start of the daemon with running pods, and the import and removal of an image.

use std::time::Duration;

use coracle_tests::cri::proto::{
    ContainerState, ContainerStatusRequest, ImageSpec, ListImagesRequest, RemoveImageRequest, VersionRequest,
};
use coracle_tests::host;
use coracle_tests::image::Image;

use super::errors::{
    Point, Tried, checked, is_of_connection, names_the_error, none, points, points_of, points_of_quota,
    try_all,
};
use super::operations::is_the_same;
use super::trace::{Fault, Seen, Tracer, Whose};
use super::{Fixture, retry};

/// A daemon that has not answered after this time does not start.
const START_MAX: Duration = Duration::from_secs(10);
/// Retries of a daemon that could not read something come after 1, 2, 4 and 8 seconds.
const RECOVERY_MAX: Duration = Duration::from_secs(20);
const IMPORTED: &str = "localhost/imported:1";

/// A node with two running pods, which are all that is on the machine.
fn with_another_pod(mut fixture: Fixture) -> Fixture {
    let pod = fixture.fresh_pod();
    let pod_id = fixture.node.run_pod(&pod);
    fixture.node.run_container(&pod_id, &fixture.config(&pod, &["sleep", "forever"]), &pod);
    fixture.usual = fixture.node.rests();
    fixture.usual.sort();
    fixture
}

fn on_host() -> Fixture {
    with_another_pod(Fixture::on_host())
}

fn on_bridge() -> Fixture {
    with_another_pod(Fixture::on_bridge())
}

/// Starts a daemon with an error at one call. It serves, or it ends and says why; the next one then serves. No container is
/// disturbed, and none is lost, and the daemon still ends at SIGTERM.
fn try_start(fixture: &mut Fixture, (call, error): Point) -> Tried {
    let pids = running(fixture);
    fixture.node.kill9();
    let gate = fixture.node.folder().join("gate");
    if !gate.exists() {
        nix::unistd::mkfifo(&gate, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
    }
    let script = format!("read line < {}; exec \"$@\"", gate.display());
    fixture.node.wrap(["sh", "-c", &script, "sh"].map(str::to_owned).into());
    fixture.node.spawn();
    fixture.node.wrap(Vec::new());
    let pid = fixture.node.pid();
    let tracer = Tracer::attach(pid, Whose::OwnAfterExec, call, Fault::Error(error));
    let log_before = fixture.node.log().len();
    std::fs::write(&gate, "go\n").expect("the shell reads");
    let is_answered = || match fixture.node.version(VersionRequest::default()) {
        Ok(_) => Some(true),
        Err(_) if host::is_alive(pid) => None,
        Err(_) => Some(false),
    };
    let serves = host::wait_within(START_MAX, is_answered);
    let seen = tracer.stop();
    let refused = checked(fixture, &seen, |fixture| {
        let mut refused = None;
        // The failed call may have been one of the connection, which the client notices now.
        let _ = fixture.node.version(VersionRequest::default());
        if !serves.expect("the daemon serves or ends") {
            let text = fixture.node.log()[log_before..].to_owned();
            // A daemon that cannot find out where its program is looks for the others in the usual place.
            let is_elsewhere = text.contains("read /usr/bin/coracle-pod");
            assert!(is_elsewhere || names_the_error(&seen, &text), "it ended without the cause: {text}");
            refused = Some(text);
            fixture.node.kill9();
            fixture.node.launch();
        }
        let now = || (running(fixture) == pids).then_some(());
        let is_so = host::wait_within(RECOVERY_MAX, now).is_some();
        assert!(is_so, "{:?} instead of {pids:?}", running(fixture));
        for (id, container_pid) in &pids {
            let is_whole = || fixture.node.exec_sync(coracle_tests::request::exec(id, &["true"], 20)).is_ok();
            host::wait_within(RECOVERY_MAX, || is_whole().then_some(()));
            is_the_same(fixture, "a container that ran", id, *container_pid);
        }
        let has_image = || has_image(fixture, &fixture.image).then_some(());
        assert!(host::wait_within(RECOVERY_MAX, has_image).is_some(), "the image is lost");
        let quarantine = std::fs::read_dir(fixture.node.root().join("quarantine"));
        assert_eq!(quarantine.map_or(0, Iterator::count), 0, "nothing was damaged");
        fixture.check("after the start");
        // The error may have been at something that is needed later only: the signals of this daemon.
        fixture.node.terminate();
        fixture.node.launch();
        refused
    });
    Tried { seen, refused }
}

/// The ids and pids of the containers that are listed as running.
fn running(fixture: &Fixture) -> Vec<(String, i32)> {
    let listed = fixture.node.list_containers(Default::default()).expect("list").containers;
    let is_running = |state: ContainerState| state == ContainerState::ContainerRunning;
    let running = listed.into_iter().filter(|container| is_running(container.state()));
    let mut found: Vec<_> = running
        .filter_map(|container| {
            let request = ContainerStatusRequest { container_id: container.id.clone(), verbose: true };
            let info = fixture.node.container_status(request).ok()?.info;
            let info: serde_json::Value = serde_json::from_str(info.get("info")?).ok()?;
            Some((container.id, info["pid"].as_i64()? as i32))
        })
        .collect();
    found.sort();
    found
}

fn has_image(fixture: &Fixture, name: &str) -> bool {
    let images = fixture.node.list_images(ListImagesRequest::default()).expect("list").images;
    images.iter().any(|image| image.repo_tags.iter().any(|tag| tag == name))
}

/// Imports an image with an error in a worker. What failed can be repeated.
fn try_import(fixture: &mut Fixture, (call, error): Point) -> Tried {
    let image = Image::probe(&fixture.node.probe(), "imported");
    let archive = image.oci_archive(IMPORTED);
    let tracer = Tracer::attach(fixture.node.pid(), Whose::Children, call, Fault::Error(error));
    let imported = fixture.node.try_import(&archive);
    let seen = tracer.stop();
    let refused = checked(fixture, &seen, |fixture| {
        let refused = imported.err();
        if let Some(text) = &refused {
            // A confined process that cannot execute its program has no way to say why.
            let is_confined = text.contains("the process that parses it ended");
            // musl reports each error of a thread's clone as EAGAIN.
            let is_thread =
                text.contains("start a thread that decompresses: no memory is left, or a limit of");
            assert!(is_confined || is_thread || names_the_error(&seen, text), "without its cause: {text}");
            fixture.node.try_import(&archive).unwrap_or_else(|error| panic!("the retry: {error}"));
        }
        is_the_same(fixture, "the bystander", &fixture.bystander, fixture.bystander_pid);
        fixture.node.remove_image(removal()).expect("it is removed");
        assert!(has_image(fixture, &fixture.image) && !has_image(fixture, IMPORTED), "one image was removed");
        fixture.check("after the removal");
        refused
    });
    Tried { seen, refused }
}

fn removal() -> RemoveImageRequest {
    RemoveImageRequest { image: Some(ImageSpec { image: IMPORTED.into(), ..ImageSpec::default() }) }
}

/// The names of all parts of images in the store.
fn stored(fixture: &Fixture) -> Vec<String> {
    let names = |directory: &str| {
        let entries = std::fs::read_dir(fixture.node.root().join(directory)).into_iter().flatten();
        let names = entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned());
        names.map(|name| format!("{directory}/{name}")).collect::<Vec<_>>()
    };
    let mut all = ["layers", "images/blobs/sha256", "images/contents", "images/users", "images/records"]
        .map(names)
        .concat();
    all.sort();
    all
}

/// Removes an image with an error in the daemon. What failed can be repeated, and what an error left of the image's parts goes with the
/// next image.
fn try_removal(fixture: &mut Fixture, (call, error): Point) -> Tried {
    let archive = Image::probe(&fixture.node.probe(), "imported").oci_archive(IMPORTED);
    let before = stored(fixture);
    fixture.node.try_import(&archive).expect("an import without an error");
    let client = fixture.node.another();
    client.version(VersionRequest::default()).expect("a connection");
    let tracer = Tracer::attach(fixture.node.pid(), Whose::Own, call, Fault::Error(error));
    let removed = client.remove_image(removal());
    let seen = tracer.stop();
    let refused = checked(fixture, &seen, |fixture| {
        let refused = removed.err().map(|error| {
            let text = error.message().to_owned();
            assert!(is_of_connection(&error) || names_the_error(&seen, &text), "without its cause: {error}");
            text
        });
        assert!(host::is_alive(fixture.node.pid()), "the daemon ended");
        is_the_same(fixture, "the bystander", &fixture.bystander, fixture.bystander_pid);
        if refused.is_some() {
            retry("RemoveImage", || fixture.node.remove_image(removal()));
        }
        assert!(has_image(fixture, &fixture.image) && !has_image(fixture, IMPORTED), "one image was removed");
        fixture.node.try_import(&archive).unwrap_or_else(|error| panic!("the next import: {error}"));
        fixture.node.remove_image(removal()).expect("it is removed");
        let is_clean = host::wait_within(RECOVERY_MAX, || (stored(fixture) == before).then_some(()));
        assert!(is_clean.is_some(), "{:#?} instead of {before:#?}", stored(fixture));
        fixture.check("after the removal");
        refused
    });
    Tried { seen, refused }
}

#[test]
fn one_error_in_the_daemon_that_removes_an_image() {
    none(&try_all("Daemon: removal of an image", &Fixture::on_host, &points, &try_removal));
}

#[test]
fn one_error_in_a_start_of_the_daemon() {
    let sets: [fn() -> Fixture; 2] = [on_host, on_bridge];
    let failures = sets.map(|set| try_all("Daemon: start with running pods", &set, &points, &try_start));
    none(&failures.concat());
}

/// Regression: a monitor whose `/proc/PID/stat` could not be read was treated as ended, and its containers were killed.
#[test]
fn a_monitor_that_cannot_be_looked_up_is_not_treated_as_ended() {
    let is_of_proc = |call: &str| call.starts_with("open(/proc/") && call.contains("/stat");
    let choose = |seen: &Seen| points_of(seen, is_of_proc);
    let failures = try_all("Daemon: start, /proc/PID/stat", &on_host, &choose, &try_start);
    none(&failures);
}

#[test]
fn one_error_in_a_worker_that_imports() {
    none(&try_all("Started: import of an image", &Fixture::on_host, &points, &try_import));
}

#[test]
fn a_quota_that_is_used_up_by_an_import_or_at_a_start_is_named() {
    let imports = try_all("Started: import, quota", &Fixture::on_host, &points_of_quota, &try_import);
    let starts = try_all("Daemon: start, quota", &on_host, &points_of_quota, &try_start);
    none(&[imports, starts].concat());
}
