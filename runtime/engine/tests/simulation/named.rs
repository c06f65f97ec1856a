//! Histories with fixed calls: each has one error, or one kill of the daemon, at a certain point.

use std::cell::{OnceCell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::{Error, Kind};
use coracle_base::reactor;
use coracle_engine::state::Container as State;
use coracle_engine::{Container, Pods};
use coracle_images::Images;
use coracle_sandbox::{ContainerId, Exit, disk, simulation};
use nix::errno::Errno;

use crate::check::{check, check_empty};
use crate::clients::{Clients, Told};
use crate::engine::{Ground, container_spec, pod_spec};
use crate::node::Node;
use crate::world::{Killed, MS, Process, Refusal, Role, S, World};

/// A node without random errors.
pub(crate) struct Fixture {
    ground: Ground,
    images: OnceCell<Rc<Images>>,
    pub(crate) clients: Clients,
}

impl Fixture {
    pub(crate) fn new(seed: u64) -> Self {
        let ground = Ground::new();
        let node = Rc::new(Node::new(World::new(seed, false)));
        simulation::install(Some(Rc::clone(&node) as Rc<dyn simulation::SimulatedNode>));
        Self {
            images: OnceCell::new(),
            ground,
            clients: Clients { node, told: Rc::new(RefCell::new(Told::default())) },
        }
    }

    /// Runs a daemon until `life` has ended, then kills the daemon.
    pub(crate) fn daemon<T>(&self, life: impl AsyncFnOnce(&Rc<Pods>) -> T) -> T {
        self.daemon_that_may_be_killed(life).expect("the daemon is killed at the end of its life")
    }

    /// Starts a daemon, which is killed when `life` is over, or at the call of [`Fixture::kill_daemon_after`]: `None`.
    pub(crate) fn daemon_that_may_be_killed<T>(&self, life: impl AsyncFnOnce(&Rc<Pods>) -> T) -> Option<T> {
        let node = &self.clients.node;
        let ended = catch_unwind(AssertUnwindSafe(|| {
            reactor::run(async {
                let pods = self.ground.engine(node, &self.images);
                pods.recover().await.expect("the daemon starts");
                let result = life(&pods).await;
                node.world.borrow_mut().is_daemon_dead = true;
                result
            })
        }));
        let mut world = node.world.borrow_mut();
        world.is_daemon_dead = false;
        world.faults.killed_at = None;
        world.daemon_ends();
        assert_eq!(world.violation, None);
        match ended {
            Ok(result) => Some(result),
            Err(payload) if payload.is::<Killed>() => None,
            Err(payload) => resume_unwind(payload),
        }
    }

    /// The daemon is killed after this number of further calls of the node.
    pub(crate) fn kill_daemon_after(&self, calls: u64) {
        let mut world = self.clients.node.world.borrow_mut();
        world.faults.killed_at = Some(world.calls + 1 + calls);
    }

    /// Lets the next `count` calls with this name on a target that contains `target` fail.
    pub(crate) fn refuse(&self, name: &'static str, target: &str, errno: Errno, count: u32) {
        let refusal = Refusal { name, target: target.to_owned(), errno, count };
        self.clients.node.world.borrow_mut().refusals.push(refusal);
    }

    /// How many of the calls that were to fail have not been made.
    pub(crate) fn refusals_left(&self) -> u32 {
        self.clients.node.world.borrow().refusals.iter().map(|refusal| refusal.count).sum()
    }

    pub(crate) fn require(&self, pods: &Rc<Pods>) {
        assert_eq!(check(&self.clients, pods), Vec::<String>::new());
    }

    /// Removes all pods and checks that the node is empty.
    pub(crate) async fn remove_all(&self, pods: &Rc<Pods>) {
        for pod in pods.pods() {
            pod.remove().await.expect("the pod is removed");
        }
        reactor::sleep(Duration::from_secs(40)).await;
        assert_eq!(check_empty(&self.clients, pods), Vec::<String>::new());
    }

    pub(crate) fn freeze_monitors(&self, for_ns: u64) {
        let mut world = self.clients.node.world.borrow_mut();
        let until_ns = world.now_ns + for_ns;
        world.monitors.values_mut().for_each(|monitor| monitor.frozen_until_ns = until_ns);
    }

    /// Lets time pass without a daemon.
    pub(crate) fn wait(&self, for_ns: u64) {
        let mut world = self.clients.node.world.borrow_mut();
        let until_ns = world.now_ns + for_ns;
        world.pass(until_ns);
    }

    pub(crate) fn kill_monitor(&self) {
        self.kill(Role::Monitor, Exit::Signal(9));
    }

    /// The main process starts another process and ends, and nothing was reported yet.
    pub(crate) fn end_main_process_before_its_child(&self, container: ContainerId) {
        let mut world = self.clients.node.world.borrow_mut();
        let main = world.processes.iter().find(|(_, process)| process.role == Role::Main(container));
        let (main, cgroups) = main.map(|(pid, main)| (*pid, main.cgroups.clone())).expect("it runs");
        world.clone_process(Role::Child(container), &cgroups, main);
        world.kill(main, Exit::Code(0));
        while world.processes.contains_key(&main) {
            let next_ns = world.now_ns + 10_000;
            world.pass(next_ns);
        }
    }

    pub(crate) fn kill(&self, role: Role, exit: Exit) {
        let mut world = self.clients.node.world.borrow_mut();
        let found = world.processes.iter().find(|(_, process)| process.role == role);
        let pid = *found.expect("it runs").0;
        world.kill(pid, exit);
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        simulation::install(None);
    }
}

/// Creates a pod with a container and starts the container; returns the container's ID.
pub(crate) async fn start_one(pods: &Rc<Pods>) -> Result<String, Error> {
    let id = pods.run(pod_spec(0)).await?;
    let pod = pods.pod(&id.to_string())?;
    let container = pod.create_container(container_spec(0)).await?;
    pods.container(&container.to_string())?.start().await?;
    Ok(id.to_string())
}

/// A daemon that is killed during RunPodSandbox, when the network namespace of the pod exists.
fn run_that_is_cut_off(fixture: &Fixture) {
    fixture.daemon(async |pods| {
        let (pods, spec) = (Rc::clone(pods), pod_spec(0));
        let run = reactor::spawn(async move { pods.run(spec).await });
        while fixture.clients.node.world.borrow().namespaces.is_empty() {
            reactor::sleep(Duration::from_micros(50)).await;
        }
        drop(run);
    });
}

/// Daemons that are killed at each call of StopPodSandbox in turn; `next` is the life of the next one, which lists the container as
/// running. Between the note that the pod is not ready and the note of the container's stop, no record tells the next daemon that the
/// container has to be ended.
fn stops_that_are_cut_off(seed: u64, next: impl AsyncFn(&Fixture, &Rc<Pods>, &Rc<Container>)) {
    let mut not_ready_with_running = 0;
    for calls in 0.. {
        let fixture = Fixture::new(seed);
        let stopped = fixture.daemon_that_may_be_killed(async |pods| {
            let id = start_one(pods).await.expect("a container is started");
            fixture.kill_daemon_after(calls);
            pods.pod(&id).expect("it is listed").stop().await
        });
        if let Some(stopped) = stopped {
            stopped.expect("it is stopped");
            break;
        }
        fixture.daemon(async |pods| {
            let container = Rc::clone(&pods.containers()[0]);
            if exit_code(&container).is_none() {
                not_ready_with_running += u32::from(!container.pod.record().state.is_ready());
                next(&fixture, pods, &container).await;
                assert!(exit_code(&container).is_some(), "killed after {calls} calls");
            }
            fixture.remove_all(pods).await;
        });
    }
    assert!(not_ready_with_running > 0);
}

#[test]
fn a_pod_goes_up_and_down_and_leaves_nothing() {
    let fixture = Fixture::new(1);
    fixture.daemon(async |pods| {
        start_one(pods).await.expect("a container is started");
        reactor::sleep(Duration::from_secs(1)).await;
        fixture.require(pods);
        fixture.remove_all(pods).await;
    });
}

#[test]
fn a_teardown_step_that_fails_is_retried_and_the_pod_stays_listed() {
    let fixture = Fixture::new(2);
    fixture.daemon(async |pods| {
        let id = start_one(pods).await.expect("a container is started");
        fixture.refuse("unmount network namespace", "", Errno::ENOMEM, 1);
        let error = pods.pod(&id).expect("it is listed").remove().await.expect_err("a step fails");
        assert!(error.to_string().contains("unmount network namespace"), "{error}");
        assert!(!pods.pod(&id).expect("it stays listed").record().state.is_ready());
        // The other steps were undone, those after the failed one, too.
        assert!(fixture.clients.node.world.borrow().processes.is_empty());
        fixture.remove_all(pods).await;
    });
}

#[test]
fn a_daemon_that_is_killed_between_two_steps_leaves_what_the_next_one_undoes() {
    let fixture = Fixture::new(3);
    run_that_is_cut_off(&fixture);
    fixture.daemon(async |pods| {
        reactor::sleep(Duration::from_secs(40)).await;
        assert!(pods.every_pod().is_empty());
        fixture.require(pods);
        fixture.remove_all(pods).await;
    });
}

#[test]
fn a_pod_that_the_next_daemon_cannot_undo_is_listed_and_can_be_removed() {
    let fixture = Fixture::new(16);
    run_that_is_cut_off(&fixture);
    fixture.refuse("unmount network namespace", "", Errno::ENOMEM, 1);
    fixture.daemon(async |pods| {
        reactor::sleep(Duration::from_secs(40)).await;
        assert_eq!(pods.pods().len(), 1);
        fixture.remove_all(pods).await;
        pods.run(pod_spec(0)).await.expect("the name is free");
        fixture.remove_all(pods).await;
    });
}

#[test]
fn a_pod_whose_monitor_dies_during_its_set_up_is_not_made() {
    let fixture = Fixture::new(4);
    fixture.daemon(async |pods| {
        let task = Rc::clone(pods);
        let run = reactor::spawn(async move { task.run(pod_spec(0)).await });
        while fixture.clients.node.world.borrow().namespaces.is_empty() {
            reactor::sleep(Duration::from_micros(50)).await;
        }
        fixture.kill_monitor();
        let error = run.await.expect_err("the monitor has ended");
        assert!(error.to_string().contains("the pod's monitor is gone"), "{error}");
        assert!(pods.pods().is_empty());
        fixture.remove_all(pods).await;
    });
}

#[test]
fn containers_of_a_dead_monitor_are_ended_after_an_error() {
    let fixture = Fixture::new(5);
    fixture.daemon(async |pods| {
        start_one(pods).await.expect("a container is started");
        fixture.refuse("kill cgroup", "", Errno::EMFILE, 3);
        fixture.kill_monitor();
        reactor::sleep(Duration::from_secs(40)).await;
        fixture.require(pods);
        assert!(pods.containers().iter().all(|container| container.record().state.is_over()));
        fixture.remove_all(pods).await;
    });
}

#[test]
fn a_pod_whose_record_cannot_be_read_now_is_not_reported_as_removed() {
    let fixture = Fixture::new(6);
    let id = fixture.daemon(async |pods| start_one(pods).await.expect("a container is started"));
    fixture.refuse("read", "/record", Errno::EIO, 2);
    fixture.daemon(async |pods| {
        assert_eq!(pods.pod(&id).err().map(|error| error.kind()), Some(Kind::Unavailable));
        assert_eq!(pods.pod("ffff").err().map(|error| error.kind()), Some(Kind::NotFound));
        let again = pods.run(pod_spec(0)).await.expect_err("the name may be held");
        assert_eq!(again.kind(), Kind::Unavailable, "{again}");
        reactor::sleep(Duration::from_secs(40)).await;
        assert!(pods.pod(&id).expect("it was read").record().state.is_ready());
        fixture.require(pods);
        fixture.remove_all(pods).await;
    });
}

#[test]
fn a_reboot_is_seen_although_notes_cannot_be_written() {
    let fixture = Fixture::new(7);
    let id = fixture.daemon(async |pods| start_one(pods).await.expect("a container is started"));
    fixture.clients.node.world.borrow_mut().lose_power();
    fixture.refuse("create", "/.new-record", Errno::ENOSPC, 4);
    fixture.daemon(async |pods| {
        assert!(!pods.pod(&id).expect("it is listed").record().state.is_ready());
        assert_eq!(exit_code(&pods.containers()[0]), Some(255));
        fixture.clients.node.world.borrow_mut().refusals.clear();
        fixture.remove_all(pods).await;
    });
}

#[test]
fn the_end_of_a_monitor_is_seen_although_it_cannot_be_noted() {
    let fixture = Fixture::new(18);
    fixture.daemon(async |pods| {
        let id = start_one(pods).await.expect("a container is started");
        fixture.refuse("create", &format!("{id}/.new-record"), Errno::ENOSPC, 1);
        fixture.kill_monitor();
        reactor::sleep(Duration::from_secs(40)).await;
        assert!(!pods.pod(&id).expect("it is listed").record().state.is_ready());
        fixture.require(pods);
        fixture.remove_all(pods).await;
    });
    assert_eq!(fixture.refusals_left(), 0);
}

/// In the second case, the note that the creation has failed cannot be written, either.
#[test]
fn a_pod_that_is_neither_made_nor_removed_is_listed_and_can_be_removed() {
    for notes in 0..2 {
        let fixture = Fixture::new(8);
        fixture.daemon(async |pods| {
            // The record that is committed in advance, and the removal of the pod's directory.
            fixture.refuse("rename", "/sim/root/pods", Errno::EIO, 2);
            let runner = Rc::clone(pods);
            let run = reactor::spawn(async move { runner.run(pod_spec(0)).await });
            while fixture.refusals_left() == 2 {
                reactor::sleep(Duration::from_micros(50)).await;
            }
            fixture.refuse("create", "/sim/state/", Errno::ENOSPC, notes);
            run.await.expect_err("its record cannot be written");
            assert_eq!(fixture.refusals_left(), 0);
            let listed = pods.pods();
            assert_eq!(listed.len(), 1);
            listed[0].remove().await.expect("it can be removed");
            pods.run(pod_spec(0)).await.expect("the name is free");
            fixture.remove_all(pods).await;
        });
    }
}

/// The daemon has one thread, therefore a loop that never waits would block it permanently.
#[test]
fn a_stop_while_a_failed_start_is_cleaned_up_waits_for_it() {
    for seed in 0..20 {
        let fixture = Fixture::new(seed);
        fixture.daemon(async |pods| {
            let id = pods.run(pod_spec(0)).await.expect("a pod");
            let pod = pods.pod(&id.to_string()).expect("it is listed");
            let id = pod.create_container(container_spec(0)).await.expect("a container");
            let container = pods.container(&id.to_string()).expect("it is listed");
            // Neither in a spare file nor as a new one.
            fixture.refuse("open", "/spare/", Errno::EIO, 1);
            fixture.refuse("rename", "/containers/", Errno::ENOMEM, 1);
            let started = Rc::clone(&container);
            let start = reactor::spawn(async move { started.start().await });
            reactor::sleep(Duration::from_micros(200 * (seed % 5))).await;
            container.stop(Duration::from_secs(10)).await.expect("it is stopped");
            start.await.expect_err("its record cannot be written");
            fixture.remove_all(pods).await;
        });
    }
}

/// The exit record could not be written, so only the monitor has it.
#[test]
fn a_removal_that_is_cut_off_keeps_the_exit_code_of_a_container_that_stays_listed() {
    let mut outcomes = [0; 2];
    for cut in 0..60 {
        let fixture = Fixture::new(8);
        fixture.daemon(async |pods| {
            start_one(pods).await.expect("a container is started");
            let container = Rc::clone(&pods.containers()[0]);
            // Neither over the record nor as a new file.
            fixture.refuse("open", "/record", Errno::EIO, 1);
            fixture.refuse("create", "/.new-record", Errno::ENOSPC, 1);
            fixture.kill(Role::Main(container.id), Exit::Code(3));
            reactor::sleep(Duration::from_secs(10)).await;
            assert_eq!(exit_code(&container), Some(3));
            let removal = reactor::spawn(async move { container.remove().await });
            reactor::sleep(Duration::from_micros(20 * cut)).await;
            drop(removal);
        });
        fixture.daemon(async |pods| {
            let listed = pods.containers();
            outcomes[listed.len()] += 1;
            for container in listed {
                assert_eq!(exit_code(&container), Some(3), "cut off after {} µs", 20 * cut);
            }
            fixture.remove_all(pods).await;
        });
    }
    assert!(outcomes.iter().all(|count| *count > 0), "removed, and not removed: {outcomes:?}");
}

#[test]
fn a_stop_that_was_cut_off_leaves_no_container_that_is_listed_as_running_without_its_monitor() {
    stops_that_are_cut_off(13, async |fixture, pods, _| {
        fixture.kill_monitor();
        reactor::sleep(Duration::from_secs(40)).await;
        fixture.require(pods);
    });
}

/// One more error than the connection tolerates ends it; the end of the container has to be learned by another.
#[test]
fn a_connection_that_is_lost_after_a_stop_that_was_cut_off_is_made_again() {
    stops_that_are_cut_off(17, async |fixture, _, container| {
        fixture.refuse("receive frame", "", Errno::EIO, 21);
        fixture.kill(Role::Main(container.id), Exit::Code(3));
        reactor::sleep(Duration::from_secs(40)).await;
    });
}

/// The exit record is written while StopPodSandbox already waits for it.
#[test]
fn a_container_has_its_exit_code_although_its_monitor_could_not_be_reached() {
    let fixture = Fixture::new(12);
    let id = fixture.daemon(async |pods| start_one(pods).await.expect("a container is started"));
    fixture.refuse("connect to monitor", "", Errno::EMFILE, 1);
    fixture.daemon(async |pods| {
        fixture.freeze_monitors(300 * MS);
        pods.pod(&id).expect("it is listed").stop().await.expect("it is stopped");
        assert_eq!(exit_code(&pods.containers()[0]), Some(137));
        fixture.remove_all(pods).await;
    });
}

/// Regression (seed 84844): after one read error the exit code stayed unknown.
#[test]
fn an_exit_record_that_cannot_be_read_at_first_is_read_again() {
    let fixture = Fixture::new(4);
    let id = fixture.daemon(async |pods| start_one(pods).await.map(|_| pods.containers()[0].id));
    let id = id.expect("a container is started");
    fixture.kill(Role::Main(id), Exit::Code(3));
    fixture.wait(S);
    fixture.kill_monitor();
    fixture.wait(S);
    fixture.refuse("read", "/exits/", Errno::EIO, 1);
    fixture.daemon(async |pods| {
        let container = Rc::clone(&pods.containers()[0]);
        container.pod.stop().await.expect("it is stopped");
        assert_eq!(exit_code(&container), Some(3));
        fixture.remove_all(pods).await;
    });
    assert_eq!(fixture.refusals_left(), 0);
}

/// Regression (seed 774212): the daemon is killed at each call of a start in turn. If the main process and the monitor end before
/// the next daemon, it listed the container as created when the start was not recorded.
#[test]
fn a_container_that_has_an_exit_record_is_not_listed_as_created() {
    let mut started = 0;
    for calls in 0.. {
        let fixture = Fixture::new(19);
        let survived = fixture.daemon_that_may_be_killed(async |pods| {
            let pod = pods.run(pod_spec(0)).await.expect("a pod");
            let pod = pods.pod(&pod.to_string()).expect("it is listed");
            let container = pod.create_container(container_spec(0)).await.expect("a container");
            fixture.kill_daemon_after(calls);
            pods.container(&container.to_string()).expect("it is listed").start().await
        });
        fixture.wait(S);
        let is_main = |process: &Process| matches!(process.role, Role::Main(_)) && !process.is_dying;
        let main =
            fixture.clients.node.world.borrow().processes.values().find(|it| is_main(it)).map(|it| it.role);
        if let Some(main) = main {
            fixture.kill(main, Exit::Code(3));
            fixture.wait(S);
            fixture.kill_monitor();
            fixture.wait(S);
        }
        fixture.daemon(async |pods| {
            if main.is_some() {
                started += 1;
                assert_eq!(exit_code(&pods.containers()[0]), Some(3), "killed after {calls} calls");
            }
            fixture.remove_all(pods).await;
        });
        if survived.is_some() {
            break;
        }
    }
    assert!(started > 1);
}

/// Regression (seed 813153): a container was created while those of its pod could not be read, and two had the name.
#[test]
fn a_container_is_not_created_while_another_one_may_have_its_name() {
    let fixture = Fixture::new(20);
    let id = fixture.daemon(async |pods| start_one(pods).await.expect("a container is started"));
    fixture.refuse("list", "/containers", Errno::EMFILE, 1);
    fixture.daemon(async |pods| {
        let create = async || pods.pod(&id).expect("it is listed").create_container(container_spec(0)).await;
        let kind = |made: Result<ContainerId, Error>| made.expect_err("the name is held").kind();
        assert_eq!(kind(create().await), Kind::Unavailable);
        reactor::sleep(Duration::from_secs(40)).await;
        assert_eq!(kind(create().await), Kind::AlreadyExists);
        fixture.require(pods);
        fixture.remove_all(pods).await;
    });
    assert_eq!(fixture.refusals_left(), 0);
}

/// Regression (seed 151129): RemovePodSandbox succeeded for a pod that was being undone, and the pod was listed when undoing it failed.
#[test]
fn a_pod_that_is_being_undone_is_not_unknown() {
    let fixture = Fixture::new(5);
    fixture.daemon(async |pods| {
        let runner = Rc::clone(pods);
        let run = reactor::spawn(async move { runner.run(pod_spec(0)).await });
        reactor::sleep(Duration::from_millis(5)).await;
        drop(run);
    });
    fixture.daemon(async |pods| {
        let mut entries = disk::entries(std::path::Path::new("/sim/root/pods")).expect("a directory");
        let entry = entries.next().expect("the network is being set up").expect("an entry");
        let id = entry.name.into_string().expect("an ID");
        let kind = || pods.pod(&id).err().map(|error| error.kind());
        assert_eq!(kind(), Some(Kind::Unavailable));
        reactor::sleep(Duration::from_secs(1)).await;
        assert_eq!(kind(), Some(Kind::NotFound));
    });
}

/// The monitor is frozen while its pod is stopped, so that the exit code is unknown, and another container's start keeps the pod until
/// the monitor works again and reports the exit. Both the handler of exits and the state machine ignore a second end: the test fails if
/// neither does.
#[test]
fn an_unknown_exit_code_does_not_change_when_the_monitor_works_again() {
    let fixture = Fixture::new(3);
    fixture.daemon(async |pods| {
        let id = start_one(pods).await.expect("a container is started");
        let pod = pods.pod(&id).expect("it is listed");
        let second = pod.create_container(container_spec(1)).await.expect("a container");
        let second = pods.container(&second.to_string()).expect("it is listed");
        fixture.freeze_monitors(14 * S);
        let start = reactor::spawn(async move { second.start().await });
        let stop = reactor::spawn(async move { pod.stop().await });
        reactor::sleep(Duration::from_secs(12)).await;
        let first = pods.containers().pop().expect("it is listed");
        let ended = first.record().state.clone();
        assert_eq!(exit_code(&first), Some(255), "{ended:?}");
        let _ = start.await;
        stop.await.expect("it is stopped");
        reactor::sleep(Duration::from_secs(40)).await;
        assert_eq!(first.record().state, ended);
        fixture.require(pods);
        fixture.remove_all(pods).await;
    });
}

/// The containers of the pod share a PID namespace, so that the end of a main process does not end its child processes. The daemon
/// is killed at each call after the exit in turn, also between the commit of the exit and the kill of the remaining processes.
#[test]
fn a_daemon_that_is_killed_after_an_exit_leaves_no_child_process() {
    let mut exited_with_child = 0;
    for calls in 0.. {
        let fixture = Fixture::new(13);
        let started = RefCell::new(None);
        let survived = fixture.daemon_that_may_be_killed(async |pods| {
            let id = pods.run(pod_spec(1)).await.expect("a pod whose containers share a PID namespace");
            let pod = pods.pod(&id.to_string()).expect("it is listed");
            let id = pod.create_container(container_spec(1)).await.expect("a container");
            let container = pods.container(&id.to_string()).expect("it is listed");
            *started.borrow_mut() = Some(Rc::clone(&container));
            container.start().await.expect("it is started");
            fixture.end_main_process_before_its_child(id);
            fixture.kill_daemon_after(calls);
            reactor::sleep(Duration::from_secs(1)).await;
        });
        let is_child = |process: &Process| matches!(process.role, Role::Child(_)) && !process.is_dying;
        let has_child = fixture.clients.node.world.borrow().processes.values().any(is_child);
        let has_exited = started.take().is_some_and(|container| exit_code(&container).is_some());
        exited_with_child += u32::from(has_child && has_exited);
        fixture.daemon(async |pods| {
            reactor::sleep(Duration::from_secs(40)).await;
            fixture.require(pods);
            fixture.remove_all(pods).await;
        });
        if survived.is_some() {
            break;
        }
    }
    assert!(exited_with_child > 0);
}

pub(crate) fn exit_code(container: &Container) -> Option<i32> {
    match &container.record().state {
        State::Exited { ended, .. } => Some(ended.exit_code()),
        _ => None,
    }
}
