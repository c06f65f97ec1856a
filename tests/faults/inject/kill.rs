//! `kill -9` of the daemon at system calls of each operation, then a new daemon and the client's retry: the retry succeeds, what is
//! listed is so, the bystander is not disturbed, and nothing is left once the pod is gone.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::{
    ContainerState, ListPodSandboxRequest, RemoveContainerRequest, RemovePodSandboxRequest,
    StartContainerRequest, StopContainerRequest, StopPodSandboxRequest,
};
use coracle_tests::host;
use coracle_tests::request::{create, run};

use super::trace::{Fault, NO_CALL, Tracer, Whose};
use super::{Fixture, is_whole, retry};

/// How many system calls of an operation are tried where not all are.
const SAMPLE: usize = 6;

/// Grace of a stop whose container ends at its signal: much longer than such an end takes.
const GRACE: i64 = 25;
const SOON: Duration = Duration::from_secs(15);

/// The numbers of the system calls, out of `calls`, that are tried: every one, or some from the first to the last.
fn points(calls: usize) -> Vec<usize> {
    match is_whole() {
        true => (1..=calls).collect(),
        false => (0..SAMPLE).map(|index| 1 + index * calls / SAMPLE + index % 3).collect(),
    }
}

fn killer(fixture: &Fixture, point: usize) -> Tracer {
    Tracer::attach(fixture.node.pid(), Whose::Own, point, Fault::Kill)
}

impl Fixture {
    /// Kills the daemon at a system call of what `call` asks of it, and starts another; how many there were until then.
    pub(super) fn kill_in(&mut self, point: usize, call: impl FnOnce(Cri) + Send) -> usize {
        let client = self.node.another();
        let killer = killer(self, point);
        std::thread::scope(|scope| {
            let call = scope.spawn(move || call(client));
            host::wait_until("the call ends or the daemon is dead", || {
                call.is_finished() || killer.is_over()
            });
            self.node.kill9();
        });
        let calls = killer.stop().calls;
        self.node.launch();
        calls
    }

    /// Tries an operation at each point. `around` prepares it, has the daemon killed by [`Fixture::kill_in`], retries, and says how
    /// many system calls there were.
    fn try_points(&mut self, what: &str, mut around: impl FnMut(&mut Fixture, usize) -> usize) {
        let calls = around(self, NO_CALL);
        self.check(what);
        let points = points(calls);
        for point in &points {
            around(self, *point);
            self.check(&format!("{what} {point}"));
        }
        println!("inject: {what}: {} of {calls} system calls, 0 failures", points.len());
    }
}

fn now_ns() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_nanos() as i64
}

/// Tries an operation on both networks.
fn on_both_networks(operation: fn(&mut Fixture)) {
    for set in [Fixture::on_host, Fixture::on_bridge] {
        let mut fixture = set();
        operation(&mut fixture);
        fixture.node.stop();
    }
}

/// A pod is created once by the retry of a RunPodSandbox that was killed.
#[test]
fn kill_9_in_run_pod_sandbox() {
    on_both_networks(|fixture| {
        fixture.try_points("RunPodSandbox", |fixture, point| {
            let pod = fixture.fresh_pod();
            let asked = run(&pod);
            let calls = fixture.kill_in(point, |client| drop(client.run_pod_sandbox(asked)));
            fixture.is_made_again(&pod, &point.to_string());
            calls
        });
    });
}

/// A container that is half made is not listed; the retry makes it, and it starts. Where its record alone told that it was made,
/// half of the points left one that was listed as created and could not be started.
#[test]
fn kill_9_in_create_container() {
    on_both_networks(|fixture| {
        fixture.try_points("CreateContainer", |fixture, point| {
            let pod = fixture.fresh_pod();
            let pod_id = fixture.node.run_pod(&pod);
            let config = fixture.config(&pod, &["sleep", "forever"]);
            let asked = create(&pod_id, &config, &pod);
            let again = asked.clone();
            let calls = fixture.kill_in(point, |client| drop(client.create_container(asked)));
            let listed = fixture.containers(&pod_id);
            let id = retry(point, || fixture.node.create_container(again.clone())).container_id;
            for (other, state) in &listed {
                assert_eq!((other, *state), (&id, ContainerState::ContainerCreated), "{point}: made twice");
            }
            let start = StartContainerRequest { container_id: id.clone() };
            retry(format!("{point}: start"), || fixture.node.start_container(start.clone()));
            assert_eq!(fixture.containers(&pod_id), [(id, ContainerState::ContainerRunning)], "{point}");
            fixture.node.remove_pod(&pod_id);
            calls
        });
    });
}

/// A container that runs is listed as running, with its process and the time of its start. Where only the daemon's own note told the
/// process, a third of the points left pid 0 and the time of the restart.
#[test]
fn kill_9_in_start_container() {
    on_both_networks(|fixture| {
        fixture.try_points("StartContainer", |fixture, point| {
            let pod = fixture.fresh_pod();
            let pod_id = fixture.node.run_pod(&pod);
            let id = fixture.node.create(&pod_id, &fixture.config(&pod, &["sleep", "forever"]), &pod);
            let start = StartContainerRequest { container_id: id.clone() };
            let (asked, begun) = (start.clone(), now_ns());
            let calls = fixture.kill_in(point, |client| drop(client.start_container(asked)));
            let ended = now_ns();
            let found = fixture.node.container(&id);
            if found.state() == ContainerState::ContainerCreated {
                retry(point, || fixture.node.start_container(start.clone()));
            } else {
                // The time of a process has hundredths of a second.
                assert!(
                    found.started_at > begun - 20_000_000 && found.started_at < ended,
                    "{point}: {found:?}"
                );
                assert!(found.started_at >= found.created_at, "{point}: {found:?}");
            }
            assert_eq!(fixture.node.container(&id).state(), ContainerState::ContainerRunning, "{point}");
            let pid = fixture.node.container_pid(&id);
            let path = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
            assert!(path.contains(&id), "{point}: pid {pid} is in {path}\n{}", fixture.node.log());
            fixture.node.remove_pod(&pod_id);
            calls
        });
    });
}

/// The container ends at its stop signal, and not at the end of its grace: a signal that may not have been sent is sent again.
#[test]
fn kill_9_in_stop_container() {
    on_both_networks(|fixture| {
        fixture.try_points("StopContainer", |fixture, point| {
            let pod = fixture.fresh_pod();
            let pod_id = fixture.node.run_pod(&pod);
            let id = fixture.node.run_container(&pod_id, &fixture.config(&pod, &["trap", "23"]), &pod);
            host::wait_until("it waits for its signal", || fixture.node.output(&id).contains("trapping"));
            let stop = StopContainerRequest { container_id: id.clone(), timeout: GRACE };
            let (asked, begun) = (stop.clone(), SystemTime::now());
            let calls = fixture.kill_in(point, |client| drop(client.stop_container(asked)));
            retry(point, || fixture.node.stop_container(stop.clone()));
            let (status, took) =
                (fixture.node.container(&id), begun.elapsed().expect("no step of the clock"));
            assert_eq!(status.exit_code, 23, "{point}: its signal did not come: {status:?}");
            assert!(took < SOON, "{point}: it ended after {took:?}");
            fixture.node.remove_pod(&pod_id);
            calls
        });
    });
}

/// A container is removed by the retry of a RemoveContainer that was killed.
#[test]
fn kill_9_in_remove_container() {
    on_both_networks(|fixture| {
        fixture.try_points("RemoveContainer", |fixture, point| {
            let pod = fixture.fresh_pod();
            let pod_id = fixture.node.run_pod(&pod);
            let id = fixture.node.run_container(&pod_id, &fixture.config(&pod, &["sleep", "forever"]), &pod);
            let remove = RemoveContainerRequest { container_id: id };
            let asked = remove.clone();
            let calls = fixture.kill_in(point, |client| drop(client.remove_container(asked)));
            retry(point, || fixture.node.remove_container(remove.clone()));
            assert_eq!(fixture.containers(&pod_id), [], "{point}");
            fixture.node.remove_pod(&pod_id);
            calls
        });
    });
}

/// A pod can be removed after a StopPodSandbox that was killed.
#[test]
fn kill_9_in_stop_pod_sandbox() {
    on_both_networks(|fixture| {
        fixture.try_points("StopPodSandbox", |fixture, point| {
            let pod = fixture.fresh_pod();
            let pod_id = fixture.node.run_pod(&pod);
            fixture.node.run_container(&pod_id, &fixture.config(&pod, &["sleep", "forever"]), &pod);
            let stop = StopPodSandboxRequest { pod_sandbox_id: pod_id.clone() };
            let asked = stop.clone();
            let calls = fixture.kill_in(point, |client| drop(client.stop_pod_sandbox(asked)));
            retry(point, || fixture.node.stop_pod_sandbox(stop.clone()));
            fixture.node.remove_pod(&pod_id);
            calls
        });
    });
}

/// A pod is removed by the retry of a RemovePodSandbox that was killed.
#[test]
fn kill_9_in_remove_pod_sandbox() {
    on_both_networks(|fixture| {
        fixture.try_points("RemovePodSandbox", |fixture, point| {
            let pod = fixture.fresh_pod();
            let pod_id = fixture.node.run_pod(&pod);
            fixture.node.run_container(&pod_id, &fixture.config(&pod, &["sleep", "forever"]), &pod);
            let remove = RemovePodSandboxRequest { pod_sandbox_id: pod_id };
            let asked = remove.clone();
            let calls = fixture.kill_in(point, |client| drop(client.remove_pod_sandbox(asked)));
            retry(point, || fixture.node.remove_pod_sandbox(remove.clone()));
            calls
        });
    });
}

/// A daemon that is killed while it starts, and has to undo a pod that was being made. Where the notes of the pod went before its
/// record, which ran ahead of them, a pod was left that no client knew and that held the name.
#[test]
fn kill_9_in_a_start_that_undoes_a_pod() {
    on_both_networks(start_after_half_a_pod);
}

fn start_after_half_a_pod(fixture: &mut Fixture) {
    // Near the end of the operation, so that there is something of each step.
    let measured = fixture.fresh_pod();
    let asked = run(&measured);
    let calls = fixture.kill_in(NO_CALL, |client| drop(client.run_pod_sandbox(asked)));
    fixture.is_made_again(&measured, "the measured one");
    let late = calls * 8 / 10;
    fixture.try_points("a start of the daemon", |fixture, point| {
        let pod = fixture.fresh_pod();
        let asked = run(&pod);
        let client = fixture.node.another();
        let following = killer(fixture, late);
        std::thread::scope(|threads| {
            let call = threads.spawn(move || drop(client.run_pod_sandbox(asked)));
            host::wait_until("the daemon is dead", || call.is_finished() || following.is_over());
            fixture.node.kill9();
        });
        following.stop();
        fixture.node.spawn();
        let killer = killer(fixture, point);
        if point == NO_CALL {
            host::wait_until("it serves", || fixture.node.version(Default::default()).is_ok());
            // What it undoes in the background is part of its start.
            fixture.node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list");
            std::thread::sleep(Duration::from_millis(300));
        } else {
            host::wait_within(Duration::from_secs(3), || killer.is_over().then_some(()));
        }
        fixture.node.kill9();
        let calls = killer.stop().calls;
        fixture.node.launch();
        fixture.is_made_again(&pod, &point.to_string());
        calls
    });
}
