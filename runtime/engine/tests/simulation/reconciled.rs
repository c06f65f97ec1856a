//! Histories in which the kernel, the monitor and the record of a container contradict each other at the start
//! of a daemon, or one of them does not answer: a process that runs is listed or ended.

use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::Kind;
use coracle_base::reactor;
use coracle_engine::{Pod, Pods};
use coracle_sandbox::{ContainerId, Exit};
use nix::errno::Errno;

use crate::engine::{container_spec, pod_spec};
use crate::moved::fixture;
use crate::named::{Fixture, exit_code, start_one};
use crate::world::{ROOT, Role, S, STATE};

/// Time after which the daemon does not wait for a frozen monitor any more, and before the monitor continues.
const WHILE_FROZEN: Duration = Duration::from_secs(10);
const FROZEN_NS: u64 = 20 * S;

impl Fixture {
    fn runs(&self, role: Role) -> bool {
        let world = self.clients.node.world.borrow();
        world.processes.values().any(|process| process.role == role && !process.is_dying)
    }

    /// Runs a daemon that starts a container in a pod whose containers share a PID namespace; returns the IDs.
    fn start_in_shared_namespace(&self) -> (String, ContainerId) {
        self.daemon(async |pods| {
            let pod = pods.run(pod_spec(1)).await.expect("a pod").to_string();
            let listed = pods.pod(&pod).expect("it is listed");
            let id = listed.create_container(container_spec(1)).await.expect("a container");
            let container = pods.container(&id.to_string()).expect("it is listed");
            container.start().await.expect("it is started");
            (pod, id)
        })
    }

    /// Creates a pod with a container, and requests the container's start; returns when its process was cloned.
    async fn begin_start(&self, pods: &Rc<Pods>) -> (Rc<Pod>, ContainerId) {
        let pod = pods.run(pod_spec(0)).await.expect("a pod");
        let pod = pods.pod(&pod.to_string()).expect("it is listed");
        let id = pod.create_container(container_spec(0)).await.expect("a container");
        let container = pods.container(&id.to_string()).expect("it is listed");
        reactor::spawn(async move { container.start().await }).detach();
        while !self.runs(Role::Main(id)) {
            reactor::sleep(Duration::from_micros(50)).await;
        }
        (pod, id)
    }

    /// Lets errors end and the state of all pods become known, then checks all rules and removes everything.
    pub(crate) async fn settle(&self, pods: &Rc<Pods>) {
        reactor::sleep(Duration::from_secs(60)).await;
        assert_eq!(self.refusals_left(), 0);
        self.require(pods);
        self.remove_all(pods).await;
    }
}

/// Earlier builds waited for the monitor's answer before they ended the container.
#[test]
fn a_container_without_a_record_is_ended_while_its_monitor_does_not_answer() {
    let fixture = fixture(30);
    let pod = fixture.daemon(async |pods| start_one(pods).await.expect("a container is started"));
    let id = fixture.daemon(async |pods| pods.containers()[0].id);
    let directory = format!("{ROOT}/pods/{pod}/containers/{id}");
    fixture.clients.node.world.borrow_mut().disk.remove_dir_all(&directory).expect("its directory");
    fixture.freeze_monitors(FROZEN_NS);
    fixture.daemon(async |pods| {
        reactor::sleep(WHILE_FROZEN).await;
        assert!(pods.unknown().is_some(), "the monitor does not answer yet");
        assert!(!fixture.runs(Role::Main(id)), "it runs and is not listed");
        fixture.settle(pods).await;
    });
}

/// The record of the other container may be that of the container without one.
#[test]
fn a_container_without_a_record_runs_while_a_record_of_its_pod_cannot_be_read() {
    let fixture = fixture(31);
    let (pod, lost) = fixture.start_in_shared_namespace();
    let unread = fixture.daemon(async |pods| {
        let pod = pods.pod(&pod).expect("it is listed");
        let id = pod.create_container(container_spec(2)).await.expect("a container");
        let container = pods.container(&id.to_string()).expect("it is listed");
        container.start().await.expect("it is started");
        id
    });
    let directory = format!("{ROOT}/pods/{pod}/containers/{lost}");
    fixture.clients.node.world.borrow_mut().disk.remove_dir_all(&directory).expect("its directory");
    fixture.freeze_monitors(FROZEN_NS);
    fixture.refuse("read", &format!("containers/{unread}"), Errno::EIO, 4);
    fixture.daemon(async |pods| {
        reactor::sleep(WHILE_FROZEN).await;
        assert!(pods.containers().is_empty());
        assert!(fixture.runs(Role::Main(lost)) && fixture.runs(Role::Main(unread)), "one is ended");
        reactor::sleep(Duration::from_secs(60)).await;
        assert!(!fixture.runs(Role::Main(lost)) && fixture.runs(Role::Main(unread)));
        assert_eq!(pods.containers()[0].id, unread);
        fixture.settle(pods).await;
    });
}

/// The daemon that records the exit cannot kill the child process, and so cannot the next one if `next_fails`.
fn child_of_an_exited_container(next_fails: bool) {
    let fixture = fixture(32);
    let (_, id) = fixture.start_in_shared_namespace();
    fixture.refuse("kill cgroup", &id.to_string(), Errno::EMFILE, 1 + u32::from(next_fails));
    fixture.daemon(async |pods| {
        fixture.end_main_process_before_its_child(id);
        reactor::sleep(Duration::from_secs(1)).await;
        assert_eq!(exit_code(&pods.containers()[0]), Some(0));
    });
    assert!(fixture.runs(Role::Child(id)), "the kill failed");
    fixture.freeze_monitors(FROZEN_NS);
    fixture.daemon(async |pods| {
        reactor::sleep(WHILE_FROZEN).await;
        assert!(pods.unknown().is_some(), "the monitor does not answer yet");
        assert!(!fixture.runs(Role::Child(id)), "it runs in a container that is listed as exited");
        assert_eq!(exit_code(&pods.containers()[0]), Some(0));
        fixture.settle(pods).await;
    });
}

/// Earlier builds waited for the monitor's answer before they ended the child process.
#[test]
fn a_child_of_an_exited_container_is_ended_while_the_monitor_does_not_answer() {
    child_of_an_exited_container(false);
}

#[test]
fn a_child_that_cannot_be_killed_at_first_is_killed_at_the_next_attempt() {
    child_of_an_exited_container(true);
}

/// In earlier builds the child process of such a container continued to run.
#[test]
fn a_container_that_its_monitor_does_not_know_leaves_no_child_process() {
    let fixture = fixture(33);
    let (pod, id) = fixture.start_in_shared_namespace();
    fixture.end_main_process_before_its_child(id);
    fixture.wait(S);
    {
        let mut world = fixture.clients.node.world.borrow_mut();
        world.monitors.values_mut().for_each(|monitor| monitor.forget(id));
        world.disk.remove_file(&format!("{STATE}/pods/{pod}/exits/{id}")).expect("its exit record");
    }
    assert!(fixture.runs(Role::Child(id)));
    fixture.daemon(async |pods| {
        assert_eq!(exit_code(&pods.containers()[0]), Some(255));
        reactor::sleep(Duration::from_secs(1)).await;
        assert!(!fixture.runs(Role::Child(id)), "it runs in a container that is listed as exited");
        fixture.settle(pods).await;
    });
}

/// The boot ID changes while processes continue to run, for example after the restore of a checkpoint. Earlier
/// builds listed the container as exited, and its process continued to run.
#[test]
fn a_process_of_a_container_that_is_recorded_in_an_earlier_boot_is_ended() {
    let fixture = fixture(34);
    let (_, id) = fixture.start_in_shared_namespace();
    fixture.clients.node.world.borrow_mut().boot += 1;
    assert!(fixture.runs(Role::Main(id)));
    fixture.daemon(async |pods| {
        assert_eq!(exit_code(&pods.containers()[0]), Some(255));
        reactor::sleep(Duration::from_secs(1)).await;
        assert!(!fixture.runs(Role::Main(id)), "it runs in a container that is listed as exited");
        fixture.remove_all(pods).await;
    });
}

/// A container that has ended with its boot is not confused with a running one.
#[test]
fn a_container_whose_process_runs_is_not_ended_by_the_reboot_of_another() {
    let fixture = fixture(35);
    let (_, ended) = fixture.start_in_shared_namespace();
    fixture.clients.node.world.borrow_mut().lose_power();
    fixture.daemon(async |pods| {
        start_one(pods).await.expect("a container is started");
    });
    let id = fixture.daemon(async |pods| {
        pods.containers().iter().map(|container| container.id).find(|id| *id != ended).expect("it is listed")
    });
    fixture.daemon(async |pods| {
        let container = pods.container(&id.to_string()).expect("it is listed");
        assert!(fixture.runs(Role::Main(id)) && container.record().state.is_running());
        fixture.kill(Role::Main(id), Exit::Code(4));
        reactor::sleep(Duration::from_secs(1)).await;
        assert_eq!(exit_code(&container), Some(4));
        fixture.remove_all(pods).await;
    });
}

/// The start that the earlier daemon requested may still result in a running process, so a stop together with a
/// start that is refused must not report success (found by the seed 45809205).
#[test]
fn a_stop_beside_a_refused_start_does_not_report_a_container_as_stopped() {
    let fixture = fixture(37);
    fixture.clients.node.world.borrow_mut().exec_delay_ns = Some(4 * S);
    let id = fixture.daemon(async |pods| fixture.begin_start(pods).await.1);
    fixture.daemon(async |pods| {
        let container = pods.container(&id.to_string()).expect("it is listed");
        let started = Rc::clone(&container);
        let start = reactor::spawn(async move { started.start().await });
        reactor::yield_now().await;
        let stop = container.stop(Duration::ZERO).await;
        let (start, stop) = (start.await.expect_err("it is refused"), stop.expect_err("it may run"));
        assert_eq!((start.kind(), stop.kind()), (Kind::Unavailable, Kind::Unavailable));
        reactor::sleep(Duration::from_secs(20)).await;
        assert!(fixture.runs(Role::Main(id)) && container.record().state.is_running());
        container.stop(Duration::ZERO).await.expect("it is stopped");
        fixture.settle(pods).await;
    });
}

/// The daemon is killed, at each call of StopPodSandbox in turn, while the process of a container has not called
/// exec yet; the pod's monitor is killed while the next daemon asks it about the start. The process then continued
/// to run, because the end of the monitor of a pod that is not ready ended nothing (found by the seed 20143696).
#[test]
fn a_start_in_a_pod_being_stopped_is_ended_with_the_monitor() {
    let mut not_ready_with_process = 0;
    for calls in 0.. {
        let fixture = fixture(36);
        fixture.clients.node.world.borrow_mut().exec_delay_ns = Some(FROZEN_NS);
        let stopped = fixture.daemon_that_may_be_killed(async |pods| {
            let (pod, _) = fixture.begin_start(pods).await;
            fixture.kill_daemon_after(calls);
            pod.stop().await
        });
        if let Some(stopped) = stopped {
            stopped.expect("it is stopped");
            break;
        }
        fixture.daemon(async |pods| {
            let id = pods.containers()[0].id;
            if fixture.runs(Role::Main(id)) {
                not_ready_with_process += u32::from(!pods.pods()[0].record().state.is_ready());
                fixture.kill(Role::Monitor, Exit::Signal(9));
                reactor::sleep(Duration::from_secs(1)).await;
                assert!(
                    !fixture.runs(Role::Main(id)),
                    "killed after {calls} calls: it runs and is not listed"
                );
                fixture.require(pods);
            }
            fixture.remove_all(pods).await;
        });
    }
    assert!(not_ready_with_process > 0);
}

/// No pod's state is unknown any more before the first retry, and that of another one then is. Two loops of retries would make
/// twice the attempts.
#[test]
fn retries_run_in_one_loop() {
    let fixture = fixture(40);
    let (first_pod, first) = fixture.start_in_shared_namespace();
    fixture.daemon(async |pods| {
        let pod = pods.run(pod_spec(3)).await.expect("a pod");
        let pod = pods.pod(&pod.to_string()).expect("it is listed");
        let second = pod.create_container(container_spec(3)).await.expect("a container");
        let container = pods.container(&second.to_string()).expect("it is listed");
        container.start().await.expect("it is started");
        fixture.refuse("kill cgroup", &first.to_string(), Errno::EMFILE, 1);
        fixture.end_main_process_before_its_child(first);
        reactor::sleep(Duration::from_millis(100)).await;
        assert!(pods.unknown().is_some(), "the first kill has failed");
        pods.pod(&first_pod).expect("it is listed").remove().await.expect("the second kill has not");
        assert!(pods.unknown().is_none());
        fixture.refuse("kill cgroup", &second.to_string(), Errno::EMFILE, u32::MAX);
        fixture.end_main_process_before_its_child(second);
        reactor::sleep(Duration::from_millis(100)).await;
        assert!(pods.unknown().is_some());
        let before = fixture.refusals_left();
        reactor::sleep(Duration::from_secs(62)).await;
        // After 1, 3, 7, 15, 30, 45 and 60 seconds.
        assert_eq!(before - fixture.refusals_left(), 7);
        fixture.clients.node.world.borrow_mut().refusals.clear();
        fixture.settle(pods).await;
        assert!(!fixture.runs(Role::Child(second)));
    });
}

/// The start cannot be recorded, and its process cannot be killed at the first two attempts; there was no third one
/// (found by the seed 80604222).
#[test]
fn a_container_whose_start_failed_is_killed_at_a_later_attempt() {
    let fixture = fixture(38);
    fixture.daemon(async |pods| {
        let pod = pods.run(pod_spec(0)).await.expect("a pod");
        let pod = pods.pod(&pod.to_string()).expect("it is listed");
        let id = pod.create_container(container_spec(0)).await.expect("a container");
        fixture.refuse("rename", &format!("containers/{id}/.new-record"), Errno::EROFS, 1);
        fixture.refuse("kill cgroup", &id.to_string(), Errno::EMFILE, 2);
        let container = pods.container(&id.to_string()).expect("it is listed");
        container.start().await.expect_err("it cannot be recorded");
        assert!(container.record().state.is_over() && fixture.runs(Role::Main(id)), "the kills failed");
        fixture.settle(pods).await;
        assert!(!fixture.runs(Role::Main(id)));
    });
}

/// StopPodSandbox cannot kill a container whose monitor is frozen, kills the monitor, and cannot read its socket at
/// that moment, so that nothing reports its end (found by the seed 200201232).
#[test]
fn a_container_that_a_teardown_cannot_kill_is_ended_after_its_monitor() {
    let fixture = fixture(39);
    let (pod, id) = fixture.start_in_shared_namespace();
    fixture.daemon(async |pods| {
        fixture.freeze_monitors(FROZEN_NS);
        fixture.refuse("kill cgroup", &id.to_string(), Errno::ENOMEM, u32::MAX);
        fixture.refuse("receive frame", "", Errno::ENOMEM, 1);
        let listed = pods.pod(&pod).expect("it is listed");
        listed.stop().await.expect_err("a container cannot be killed");
        assert!(pods.containers()[0].record().state.is_running() && pods.unknown().is_some());
        fixture.clients.node.world.borrow_mut().refusals.clear();
        fixture.settle(pods).await;
        assert!(!fixture.runs(Role::Main(id)));
    });
}
