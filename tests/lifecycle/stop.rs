//! The end of a container: its stop signal, its grace period, SIGKILL, and its child processes.

use std::time::{Duration, Instant};

use coracle_tests::cri::proto::{NamespaceMode, Signal, StopContainerRequest};
use coracle_tests::host;
use coracle_tests::request::{exec, host_pod};

use coracle_tests::pod_fixture::PodFixture;

/// Runs a container that waits for signals, and waits until it does.
fn trapping(fixture: &PodFixture, signal: Signal) -> String {
    let mut config = fixture.config("trap", &["trap", "9"]);
    config.stop_signal = signal.into();
    let id = fixture.run(&config);
    host::wait_until("it traps", || fixture.node.output(&id).contains("trapping"));
    id
}

#[test]
fn the_stop_signal_is_the_requests_else_the_images_else_term() {
    for (asked, got) in [(Signal::RuntimeDefault, "SIGTERM"), (Signal::Sigusr1, "SIGUSR1")] {
        let fixture = PodFixture::start();
        let id = trapping(&fixture, asked);
        fixture
            .node
            .stop_container(StopContainerRequest { container_id: id.clone(), timeout: 20 })
            .expect("stop");
        assert_eq!(fixture.node.container(&id).exit_code, 9);
        assert!(fixture.node.output(&id).contains(&format!("got {got}")), "{}", fixture.node.output(&id));
        fixture.node.stop();
    }
    let fixture = PodFixture::start();
    let image = coracle_tests::image::Image::probe(&fixture.node.probe(), "stop")
        .with("StopSignal", serde_json::json!("SIGQUIT"));
    fixture.node.try_import(&image.oci_archive("localhost/stop:1")).expect("import");
    let config = coracle_tests::request::container("trap", "localhost/stop:1", &["trap", "9"], &fixture.pod);
    let id = fixture.run(&config);
    host::wait_until("it traps", || fixture.node.output(&id).contains("trapping"));
    assert_eq!(fixture.node.container(&id).stop_signal(), Signal::Sigquit);
    fixture
        .node
        .stop_container(StopContainerRequest { container_id: id.clone(), timeout: 20 })
        .expect("stop");
    assert!(fixture.node.output(&id).contains("got SIGQUIT"), "{}", fixture.node.output(&id));
    fixture.node.stop();
}

#[test]
fn a_container_that_ignores_its_signal_is_killed_after_the_grace_period() {
    let fixture = PodFixture::start();
    let id = fixture.run(&fixture.config("deaf", &["stubborn"]));
    host::wait_until("it is deaf", || fixture.node.output(&id).contains("stubborn"));
    let begin = Instant::now();
    fixture.node.stop_container(StopContainerRequest { container_id: id.clone(), timeout: 1 }).expect("stop");
    let took = begin.elapsed();
    assert!(took >= Duration::from_secs(1) && took < Duration::from_secs(4), "{took:?}");
    assert_eq!(fixture.node.container(&id).exit_code, 137);
    fixture.node.stop();
}

#[test]
fn no_grace_kills_at_once_and_a_second_stop_shortens_the_first() {
    let fixture = PodFixture::start();
    let id = fixture.run(&fixture.config("deaf", &["stubborn"]));
    let patient = fixture.node.another();
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let first = scope
            .spawn(|| patient.stop_container(StopContainerRequest { container_id: id.clone(), timeout: 50 }));
        fixture
            .node
            .stop_container(StopContainerRequest { container_id: id.clone(), timeout: 0 })
            .expect("stop");
        first.join().expect("a client thread").expect("the first stop ends too");
    });
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    fixture
        .node
        .stop_container(StopContainerRequest { container_id: id, timeout: 10 })
        .expect("stopped is stopped");
    fixture.node.stop();
}

#[test]
fn child_processes_in_the_nodes_pid_namespace_are_killed() {
    let mut pod = host_pod("nodepid");
    let linux = pod.linux.as_mut().and_then(|linux| linux.security_context.as_mut());
    linux.and_then(|context| context.namespace_options.as_mut()).expect("set").pid =
        NamespaceMode::Node.into();
    let fixture = PodFixture::with(pod);
    let seconds = format!("{}", 300_000 + std::process::id());
    let id = fixture.run(&fixture.config("tree", &["tree", &seconds]));
    let alive = || {
        host::processes(&format!("tree {seconds}"))
            .iter()
            .filter(|process| host::is_alive(process.pid))
            .count()
    };
    host::wait_until("three generations", || alive() == 3);
    fixture.node.stop_container(StopContainerRequest { container_id: id, timeout: 0 }).expect("stop");
    // The answer refers to the container's process; the other processes were killed with it, but may take a
    // moment to end.
    host::wait_until("none is left", || alive() == 0);
    fixture.node.stop();
}

#[test]
fn an_orphan_that_holds_the_output_does_not_hide_the_exit() {
    let fixture = PodFixture::start();
    let id = fixture.run(&fixture.config("orphan", &["orphan", "600"]));
    assert_eq!(fixture.node.exited(&id).exit_code, 0);
    fixture.node.stop();
}

#[test]
fn an_exec_ends_with_its_container() {
    let fixture = PodFixture::start();
    let id = fixture.run(&fixture.config("one", &["sleep", "forever"]));
    let other = fixture.node.another();
    std::thread::scope(|scope| {
        let exec = scope.spawn(|| other.exec_sync(exec(&id, &["sleep", "600"], 0)));
        let pid = fixture.node.container_pid(&id);
        let namespace = host::namespace(pid, "pid");
        host::wait_until("the exec runs", || {
            host::processes("sleep 600")
                .iter()
                .any(|process| host::namespace(process.pid, "pid") == namespace)
        });
        fixture
            .node
            .stop_container(StopContainerRequest { container_id: id.clone(), timeout: 0 })
            .expect("stop");
        if let Ok(answer) = exec.join().expect("a client thread") {
            assert_eq!(answer.exit_code, 137);
        }
    });
    fixture.node.stop();
}

/// Regression: with cgroup v1 a frozen process ends only after it is thawed, so the container could not be stopped nor removed.
#[test]
fn a_container_that_another_program_has_frozen_is_stopped() {
    let fixture = PodFixture::start();
    let id = fixture.run(&fixture.config("frozen", &["sleep", "forever"]));
    let pid = fixture.node.container_pid(&id);
    // The freezer of cgroup v1, else the one that every cgroup of v2 has.
    let cgroups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("it runs");
    let path = |hierarchy: &str| {
        let line = cgroups.lines().find(|line| line.split(':').nth(1) == Some(hierarchy))?;
        line.splitn(3, ':').nth(2)
    };
    let v1 = path("freezer").and_then(|path| Some((host::cgroup_file(path, "freezer.state")?, "FROZEN")));
    let v2 = || path("").and_then(|path| Some((host::cgroup_file(path, "cgroup.freeze")?, "1")));
    let (file, frozen) = v1.or_else(v2).expect("a freezer");
    std::fs::write(&file, frozen).expect("root");
    let is_frozen = || std::fs::read_to_string(&file).is_ok_and(|state| state.trim() == frozen);
    host::wait_until("it is frozen", is_frozen);
    fixture.node.stop_container(StopContainerRequest { container_id: id.clone(), timeout: 1 }).expect("stop");
    assert_eq!(fixture.node.container(&id).exit_code, 137);
    fixture.node.remove_pod(&fixture.pod_id);
    fixture.node.stop();
}
