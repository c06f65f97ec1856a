//! Named histories about processes that another program has moved out of their cgroups.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::reactor;
use coracle_engine::{Container, Pods};
use coracle_sandbox::Exit;
use nix::errno::Errno;

use crate::cgroups::{Cgroups, Hierarchy, entered};
use crate::engine::{container_spec, pod_spec};
use crate::named::{Fixture, exit_code, start_one};
use crate::world::{MS, Process, Role};

/// A node whose containers run until they are killed.
pub(crate) fn fixture(seed: u64) -> Fixture {
    let fixture = Fixture::new(seed);
    fixture.clients.node.world.borrow_mut().programs = Some(BTreeMap::new());
    fixture
}

/// Moves all processes with such a role.
fn move_away(fixture: &Fixture, is_wanted: impl Fn(&Process) -> bool) {
    let mut world = fixture.clients.node.world.borrow_mut();
    let pids: Vec<i32> =
        world.processes.iter().filter(|(_, process)| is_wanted(process)).map(|(pid, _)| *pid).collect();
    assert!(!pids.is_empty(), "nothing to move");
    pids.into_iter().for_each(|pid| world.move_away(pid));
}

fn no_process_is_left(fixture: &Fixture) {
    let world = fixture.clients.node.world.borrow();
    assert!(world.processes.is_empty(), "{:?}", world.processes);
}

async fn stop_pod(fixture: &Fixture, pods: &Rc<Pods>) {
    pods.pods()[0].stop().await.expect("it is stopped");
    no_process_is_left(fixture);
    fixture.remove_all(pods).await;
}

/// Fails without the second way to kill: StopContainer ends with DeadlineExceeded, and the process runs on after
/// RemovePodSandbox.
#[test]
fn a_container_that_was_moved_is_stopped() {
    let fixture = fixture(31);
    fixture.daemon(async |pods| {
        start_one(pods).await.expect("a container is started");
        move_away(&fixture, Process::is_of_container);
        let container = Rc::clone(&pods.containers()[0]);
        container.stop(Duration::from_secs(1)).await.expect("it is stopped");
        assert!(exit_code(&container).is_some());
        fixture.require(pods);
        stop_pod(&fixture, pods).await;
    });
}

/// Starts a container that shares the pod's PID namespace, so that its child process outlives its main process.
async fn start_with_child(fixture: &Fixture, pods: &Rc<Pods>) -> Rc<Container> {
    let id = pods.run(pod_spec(1)).await.expect("a pod");
    let pod = pods.pod(&id.to_string()).expect("it is listed");
    let id = pod.create_container(container_spec(1)).await.expect("a container");
    let container = pods.container(&id.to_string()).expect("it is listed");
    container.start().await.expect("it is started");
    let mut world = fixture.clients.node.world.borrow_mut();
    let pid = container.pid();
    let cgroups = world.processes[&pid].cgroups.clone();
    world.clone_process(Role::Child(id), &cgroups, pid);
    container
}

/// Seed 508794: the daemon and the monitor end when the main process has ended, and the child runs on after RemovePodSandbox.
#[test]
fn a_child_process_that_was_moved_ends_although_its_container_has_exited() {
    for calls in 0..12 {
        let fixture = fixture(35);
        let killed = fixture.daemon_that_may_be_killed(async |pods| {
            let container = start_with_child(&fixture, pods).await;
            move_away(&fixture, |process| matches!(process.role, Role::Child(_)));
            fixture.kill_daemon_after(calls);
            fixture.kill(Role::Main(container.id), Exit::Code(0));
            reactor::sleep(Duration::from_secs(1)).await;
        });
        assert!(killed.is_none(), "{calls}");
        fixture.kill(Role::Monitor, Exit::Signal(9));
        fixture.daemon(async |pods| stop_pod(&fixture, pods).await);
    }
}

#[test]
fn a_child_process_that_was_moved_ends_with_its_container() {
    let fixture = fixture(32);
    fixture.daemon(async |pods| {
        let container = start_with_child(&fixture, pods).await;
        move_away(&fixture, Process::is_of_container);
        container.stop(Duration::ZERO).await.expect("it is stopped");
        assert!(!fixture.clients.node.world.borrow().processes.values().any(Process::is_of_container));
        stop_pod(&fixture, pods).await;
    });
}

/// Fails if the first try forgets the link: the second one reports success beside the living monitor.
#[test]
fn a_monitor_that_was_moved_ends_with_its_pod_also_after_an_error() {
    let fixture = fixture(33);
    fixture.daemon(async |pods| {
        start_one(pods).await.expect("a container is started");
        move_away(&fixture, |process| process.role == Role::Monitor);
        pods.containers()[0].stop(Duration::ZERO).await.expect("it is stopped");
        fixture.refuse("kill process", "", Errno::EMFILE, 1);
        let error = pods.pods()[0].stop().await.expect_err("it is not killed");
        assert!(error.to_string().contains("kill process"), "{error}");
        stop_pod(&fixture, pods).await;
    });
}

/// Neither the monitor nor a cgroup leads to the container any more.
#[test]
fn a_container_that_was_moved_ends_with_its_monitor() {
    for is_daemon_down in [false, true] {
        let fixture = fixture(34);
        let kill = || {
            move_away(&fixture, Process::is_of_container);
            fixture.kill(Role::Monitor, Exit::Signal(9));
        };
        fixture.daemon(async |pods| {
            start_one(pods).await.expect("a container is started");
            if !is_daemon_down {
                kill();
                reactor::sleep(Duration::from_secs(40)).await;
                no_process_is_left(&fixture);
            }
        });
        if is_daemon_down {
            kill();
            fixture.wait(5_000_000_000);
        }
        fixture.daemon(async |pods| {
            reactor::sleep(Duration::from_secs(40)).await;
            no_process_is_left(&fixture);
            stop_pod(&fixture, pods).await;
        });
    }
}

/// Fails if the end of a start that failed counts as the end of its process, or if a monitor that has just ended is still
/// asked for its children.
#[test]
fn a_process_that_was_moved_before_its_program_ran_ends_with_its_monitor() {
    let fixture = fixture(35);
    fixture.clients.node.world.borrow_mut().exec_delay_ns = Some(10 * MS);
    fixture.daemon(async |pods| {
        let started = reactor::spawn({
            let pods = Rc::clone(pods);
            async move { start_one(&pods).await }
        });
        let is_cloned =
            || fixture.clients.node.world.borrow().processes.values().any(Process::is_of_container);
        while !is_cloned() {
            reactor::sleep(Duration::from_micros(100)).await;
        }
        move_away(&fixture, Process::is_of_container);
        fixture.kill(Role::Monitor, Exit::Signal(9));
        started.await.expect_err("its monitor has ended");
        reactor::sleep(Duration::from_secs(40)).await;
        no_process_is_left(&fixture);
        stop_pod(&fixture, pods).await;
    });
}

/// Fails if the next daemon takes a signal that is refused for a PID file that cannot be read: it removes the pod, and the
/// monitor runs on.
#[test]
fn a_monitor_that_was_moved_and_cannot_be_killed_keeps_an_interrupted_pod() {
    let mut calls = 0;
    loop {
        let fixture = fixture(36);
        fixture.kill_daemon_after(calls);
        let survived = fixture.daemon_that_may_be_killed(async |pods| pods.run(pod_spec(0)).await);
        let is_monitor = |process: &Process| process.role == Role::Monitor;
        if fixture.clients.node.world.borrow().processes.values().any(is_monitor) {
            move_away(&fixture, is_monitor);
        }
        fixture.refuse("kill process", "", Errno::EPERM, 1);
        fixture.daemon(async |pods| {
            reactor::sleep(Duration::from_secs(40)).await;
            fixture.require(pods);
            fixture.clients.node.world.borrow_mut().refusals.clear();
            fixture.remove_all(pods).await;
            no_process_is_left(&fixture);
        });
        if survived.is_some() {
            break;
        }
        calls += 1;
    }
    assert!(calls > 10);
}

/// Fails if a container counts as ended although its process was found and could not be killed: nothing looks for it after the
/// container's removal.
#[test]
fn a_container_that_was_moved_and_cannot_be_killed_at_first_ends_with_its_monitor() {
    let fixture = fixture(37);
    fixture.daemon(async |pods| {
        start_one(pods).await.expect("a container is started");
        move_away(&fixture, Process::is_of_container);
        fixture.refuse("kill process", "", Errno::ENOMEM, 3);
        fixture.kill(Role::Monitor, Exit::Signal(9));
        let removed = pods.containers()[0].remove().await;
        reactor::sleep(Duration::from_secs(40)).await;
        assert_eq!(fixture.refusals_left(), 0, "{removed:?}");
        no_process_is_left(&fixture);
        fixture.require(pods);
        stop_pod(&fixture, pods).await;
    });
}

async fn start_in(pods: &Rc<Pods>, number: u32) -> Rc<Container> {
    let id = pods.run(pod_spec(number)).await.expect("a pod");
    let pod = pods.pod(&id.to_string()).expect("it is listed");
    let id = pod.create_container(container_spec(number)).await.expect("a container");
    let container = pods.container(&id.to_string()).expect("it is listed");
    container.start().await.expect("it is started");
    container
}

/// Seed 12153: the ID in the name of a monitor's cgroup was taken for that of a container without a record, and the kill of this
/// cgroup ended another pod.
#[test]
fn a_process_that_was_moved_to_the_cgroup_of_another_pod_does_not_end_it() {
    for (is_daemon_down, has_other_root) in [(false, false), (true, false), (false, true), (true, true)] {
        let fixture = fixture(38);
        let mut other = None;
        fixture.daemon(async |pods| {
            let moved = start_in(pods, 1).await;
            let kept = start_in(pods, 2).await;
            let monitor = kept.pod.pid();
            {
                let mut world = fixture.clients.node.world.borrow_mut();
                let cgroup = world.processes[&monitor].cgroup(Hierarchy::Tracking).to_owned();
                let pid = world.clone_process(Role::Child(moved.id), &entered(&cgroup), moved.pid());
                world.processes.get_mut(&pid).expect("it runs").has_other_root = has_other_root;
            }
            if !is_daemon_down {
                moved.pod.stop().await.expect("it is stopped");
                assert!(kept.record().state.is_running() && kept.pod.record().state.is_ready());
            }
            other = Some((moved.pod.id, kept.pod.id));
        });
        let (moved, kept) = other.expect("two pods");
        fixture.daemon(async |pods| {
            pods.pod(&moved.to_string()).expect("it is listed").stop().await.expect("it is stopped");
            let kept = pods.pod(&kept.to_string()).expect("it is listed");
            assert!(kept.record().state.is_ready(), "{is_daemon_down}");
            assert!(pods.containers().iter().any(|container| container.record().state.is_running()));
            fixture.require(pods);
            fixture.remove_all(pods).await;
            no_process_is_left(&fixture);
        });
    }
}

/// Fails if only the hierarchy in which processes are tracked is searched: the removal ends with EBUSY as long as the other
/// container runs.
#[test]
fn a_container_is_removed_although_a_process_of_another_is_in_its_cgroup_of_v1() {
    let fixture = fixture(39);
    fixture.clients.node.world.borrow_mut().cgroups = Cgroups::new(true);
    fixture.daemon(async |pods| {
        let moved = start_in(pods, 1).await;
        let removed = start_in(pods, 2).await;
        {
            let mut world = fixture.clients.node.world.borrow_mut();
            let cgroup = world.processes[&removed.pid()].cgroup(Hierarchy::Legacy).to_owned();
            world.move_to(moved.pid(), Hierarchy::Legacy, &cgroup);
        }
        removed.stop(Duration::ZERO).await.expect("it is stopped");
        removed.remove().await.expect("it is removed");
        drop((moved, removed));
        reactor::sleep(Duration::from_secs(1)).await;
        fixture.require(pods);
        fixture.remove_all(pods).await;
        no_process_is_left(&fixture);
    });
}

/// Seed 50795: the monitor ran on until its pod was stopped. Seed 723619: so did one in whose cgroup of the other hierarchy was a
/// process of another pod.
#[test]
fn a_monitor_whose_files_are_lost_is_found_in_one_of_two_hierarchies() {
    for has_another in [false, true] {
        let fixture = fixture(40);
        fixture.clients.node.world.borrow_mut().cgroups = Cgroups::new(true);
        let mut lost = None;
        fixture.daemon(async |pods| {
            let container = start_in(pods, 1).await;
            let pod = pods.run(pod_spec(2)).await.expect("a pod");
            let monitor = pods.pod(&pod.to_string()).expect("it is listed").pid();
            let mut world = fixture.clients.node.world.borrow_mut();
            if has_another {
                let cgroup = world.processes[&monitor].cgroup(Hierarchy::Tracking).to_owned();
                world.clone_process(Role::Child(container.id), &entered(&cgroup), container.pod.pid());
            }
            world.move_to(monitor, Hierarchy::Tracking, "/");
            lost = Some((monitor, world.monitors[&monitor].directory.clone()));
        });
        let (monitor, directory) = lost.expect("a pod");
        for file in ["monitor.pid", "monitor.sock"] {
            let removed =
                fixture.clients.node.world.borrow_mut().disk.remove_file(&format!("{directory}/{file}"));
            removed.expect(file);
        }
        fixture.daemon(async |pods| {
            reactor::sleep(Duration::from_secs(40)).await;
            assert!(!fixture.clients.node.world.borrow().processes.contains_key(&monitor), "{has_another}");
            fixture.remove_all(pods).await;
            no_process_is_left(&fixture);
        });
    }
}
