//! The operations of a pod's life as values: how each is prepared, called and repeated, and what has to be true after it.

use std::time::Duration;

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::{
    ContainerState, PodSandboxConfig, RemoveContainerRequest, RemovePodSandboxRequest, StartContainerRequest,
    StopContainerRequest, StopPodSandboxRequest,
};
use coracle_tests::host;
use coracle_tests::request::{container, create, exec, run, share_pids};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tonic::Status;

use super::{Fixture, retry};
use crate::moved::move_away;

/// How long lists may differ from the kernel's state after a failed operation: undoing it may need another try.
const SETTLING: Duration = Duration::from_secs(10);
/// Grace of a stop whose container ends at its signal.
const GRACE: i64 = 5;
const SAID: &str = "alive";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    RunPodSandbox,
    CreateContainer,
    StartContainer,
    ExecSync,
    StopContainer,
    RemoveContainer,
    StopPodSandbox,
    RemovePodSandbox,
    /// StopContainer without a grace period, after the container's processes were moved to other cgroups.
    StopMoved,
    /// RemovePodSandbox after that.
    RemoveMoved,
}

use Operation::{
    CreateContainer, ExecSync, RemoveContainer, RemoveMoved, RemovePodSandbox, RunPodSandbox, StartContainer,
    StopContainer, StopMoved, StopPodSandbox,
};

/// Objects of an operation: a pod with a container that must not notice anything, and the container of the operation.
#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) pod: PodSandboxConfig,
    /// Empty if the operation makes the pod.
    pub(crate) pod_id: String,
    /// Another container of the pod, with its pid.
    beside: Option<(String, i32)>,
    /// Empty if the operation makes the container.
    id: String,
    image: String,
    moved: Moved,
}

/// Processes that were moved out of their cgroups; no cgroup leads to what a failed test leaves of them.
#[derive(Debug, Default)]
struct Moved(Vec<i32>);

impl Drop for Moved {
    fn drop(&mut self) {
        for pid in self.0.iter().filter(|_| std::thread::panicking()) {
            let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
    }
}

impl Operation {
    pub(crate) const ALL: [Operation; 8] = [
        RunPodSandbox,
        CreateContainer,
        StartContainer,
        ExecSync,
        StopContainer,
        RemoveContainer,
        StopPodSandbox,
        RemovePodSandbox,
    ];
    pub(crate) const OF_MOVED: [Operation; 2] = [StopMoved, RemoveMoved];

    pub(crate) fn prepare(self, fixture: &mut Fixture) -> Case {
        let mut pod = fixture.fresh_pod();
        if self.is_of_moved() {
            // Otherwise the child would end with its parent.
            share_pids(&mut pod);
        }
        let (image, moved) = (fixture.image.clone(), Moved::default());
        let mut case = Case { pod, pod_id: String::new(), beside: None, id: String::new(), image, moved };
        if self == RunPodSandbox {
            return case;
        }
        let node = &fixture.node;
        case.pod_id = node.run_pod(&case.pod);
        let beside = container("beside", &case.image, &["sleep", "forever"], &case.pod);
        let beside = node.run_container(&case.pod_id, &beside, &case.pod);
        case.beside = Some((beside.clone(), node.container_pid(&beside)));
        let config = fixture.config(&case.pod, self.words());
        if self != CreateContainer {
            case.id = node.create(&case.pod_id, &config, &case.pod);
        }
        if !matches!(self, CreateContainer | StartContainer) {
            let start = StartContainerRequest { container_id: case.id.clone() };
            node.start_container(start).expect("it starts");
        }
        if self == StopContainer {
            host::wait_until("it waits for its signal", || node.output(&case.id).contains("trapping"));
        }
        if self.is_of_moved() {
            let main = node.container_pid(&case.id);
            let child = host::wait_for("its child runs", || host::children(main).first().copied());
            case.moved = Moved(vec![main, child]);
            case.moved.0.iter().for_each(|pid| move_away(*pid, true));
        }
        case
    }

    fn is_of_moved(self) -> bool {
        matches!(self, StopMoved | RemoveMoved)
    }

    fn words(self) -> &'static [&'static str] {
        match self {
            StopContainer => &["trap", "23"],
            // Its child outlives it.
            StopMoved | RemoveMoved => &["tree", "1000"],
            _ => &["sleep", "forever"],
        }
    }

    /// Makes the call of the operation.
    ///
    /// # Errors
    /// The daemon's answer.
    pub(crate) fn call(self, client: &Cri, case: &Case) -> Result<(), Status> {
        let id = || case.id.clone();
        let pod_sandbox_id = case.pod_id.clone();
        match self {
            RunPodSandbox => client.run_pod_sandbox(run(&case.pod)).map(drop),
            CreateContainer => {
                let config = container("one", &case.image, self.words(), &case.pod);
                client.create_container(create(&case.pod_id, &config, &case.pod)).map(drop)
            }
            StartContainer => client.start_container(StartContainerRequest { container_id: id() }).map(drop),
            ExecSync => {
                let answer = client.exec_sync(exec(&case.id, &["print", SAID], 20))?;
                assert_eq!(answer.exit_code, 0, "the exit code of an exec without an error");
                let said = String::from_utf8_lossy(&answer.stdout).into_owned();
                assert_eq!(said.trim_end(), SAID, "the output of an exec without an error");
                Ok(())
            }
            StopContainer | StopMoved => {
                let timeout = if self == StopMoved { 0 } else { GRACE };
                client.stop_container(StopContainerRequest { container_id: id(), timeout }).map(drop)
            }
            RemoveContainer => {
                client.remove_container(RemoveContainerRequest { container_id: id() }).map(drop)
            }
            StopPodSandbox => client.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id }).map(drop),
            RemovePodSandbox | RemoveMoved => {
                client.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id }).map(drop)
            }
        }
    }

    /// Does what a client does after a call that failed, checks what the operation promises, and removes the pod.
    pub(crate) fn finish(self, fixture: &Fixture, case: &Case, is_done: bool) {
        let node = &fixture.node;
        if is_done {
            case.has_ended();
        }
        // The processes of a container that was moved are not in its cgroup.
        if !matches!(self, RunPodSandbox | StopPodSandbox | RemovePodSandbox | StopMoved | RemoveMoved) {
            fixture.agrees(&case.pod_id);
            case.is_undisturbed(fixture);
        }
        match self {
            RunPodSandbox => return fixture.is_made_again(&case.pod, "RunPodSandbox"),
            StartContainer => self.start_again(fixture, case),
            _ if is_done => {}
            _ => retry(format!("{self:?}"), || self.call(&node.another(), case)),
        }
        case.has_ended();
        let is_pod_removed = matches!(self, RemovePodSandbox | RemoveMoved);
        let listed = if is_pod_removed { Vec::new() } else { fixture.containers(&case.pod_id) };
        let own =
            || listed.iter().filter(|(id, _)| case.beside.as_ref().is_none_or(|(other, _)| other != id));
        match self {
            CreateContainer => {
                let [(id, ContainerState::ContainerCreated)] = own().collect::<Vec<_>>()[..] else {
                    panic!("one container is to be listed as created: {listed:?}")
                };
                let start = StartContainerRequest { container_id: id.clone() };
                node.start_container(start).unwrap_or_else(|error| panic!("the start: {error}"));
            }
            RemoveContainer => assert_eq!(own().count(), 0, "{listed:?}"),
            StopContainer => {
                let status = node.container(&case.id);
                assert_eq!(status.state(), ContainerState::ContainerExited, "{status:?}");
                assert_eq!(status.exit_code, 23, "its signal did not come: {status:?}");
            }
            StopMoved => {
                let status = node.container(&case.id);
                assert_eq!(status.state(), ContainerState::ContainerExited, "{status:?}");
                assert_eq!(status.exit_code, 128 + 9, "{status:?}");
            }
            RemovePodSandbox | RemoveMoved => return,
            _ => {}
        }
        fixture.agrees(&case.pod_id);
        if self != StopPodSandbox {
            case.is_undisturbed(fixture);
        }
        node.remove_pod(&case.pod_id);
    }

    /// A container that was not started is started; one that failed is replaced, as a kubelet does.
    fn start_again(self, fixture: &Fixture, case: &Case) {
        let node = &fixture.node;
        let mut id = case.id.clone();
        let state = node.container(&id).state();
        if state == ContainerState::ContainerExited {
            node.remove_container(RemoveContainerRequest { container_id: id })
                .unwrap_or_else(|error| panic!("the failed one is not removed: {error}"));
            id = node.create(&case.pod_id, &fixture.config(&case.pod, self.words()), &case.pod);
        }
        if state != ContainerState::ContainerRunning {
            let start = StartContainerRequest { container_id: id.clone() };
            node.start_container(start).unwrap_or_else(|error| panic!("the next start: {error}"));
        }
        assert_eq!(node.container(&id).state(), ContainerState::ContainerRunning);
    }
}

impl Case {
    /// A call that ends the container's processes has succeeded.
    fn has_ended(&self) {
        let living: Vec<_> = self.moved.0.iter().filter(|pid| host::is_alive(**pid)).collect();
        assert!(living.is_empty(), "OK beside the living processes {living:?}");
    }

    /// The other container of the pod runs as before and can be used.
    fn is_undisturbed(&self, fixture: &Fixture) {
        if let Some((id, pid)) = &self.beside {
            is_the_same(fixture, "the container beside it", id, *pid);
        }
    }
}

/// A container is listed as running with this pid, and an exec in it works.
pub(crate) fn is_the_same(fixture: &Fixture, what: &str, id: &str, pid: i32) {
    let status = fixture.node.container(id);
    assert_eq!(status.state(), ContainerState::ContainerRunning, "{what}: {status:?}");
    assert_eq!(fixture.node.container_pid(id), pid, "{what}");
    assert!(host::is_alive(pid), "{what}: pid {pid} is dead");
    let answer = fixture.node.exec_sync(exec(id, &["print", SAID], 20));
    let answer = answer.unwrap_or_else(|error| panic!("{what}: exec: {error}"));
    assert_eq!(String::from_utf8_lossy(&answer.stdout).trim_end(), SAID, "{what}");
}

impl Fixture {
    /// The containers of a pod that are listed as running have processes, and the others have none.
    fn agrees(&self, pod_id: &str) {
        let mut last = String::new();
        let agrees = || {
            let cgroups = host::cgroups_below(&self.node.cgroup_parent());
            for (id, state) in self.containers(pod_id) {
                let own = cgroups.iter().filter(|path| path.to_string_lossy().contains(&id));
                let read = |path: &std::path::PathBuf| std::fs::read_to_string(path.join("cgroup.procs"));
                let is_running = own.flat_map(read).any(|text| !text.is_empty());
                if is_running != (state == ContainerState::ContainerRunning) {
                    last = format!("{id} is listed as {state:?}, and has processes: {is_running}");
                    return None;
                }
            }
            Some(())
        };
        let is_so = host::wait_within(SETTLING, agrees).is_some();
        assert!(is_so, "{last}");
    }
}
