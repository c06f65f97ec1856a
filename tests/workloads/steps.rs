//! Runs a case with one runtime: its pods become ready, its steps are made, its pods are stopped, and nothing remains.

use std::cell::OnceCell;
use std::net::{IpAddr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use coracle_tests::cri::proto::{ContainerState, ContainerStatus, ExecSyncRequest, StopContainerRequest};
use coracle_tests::host::{self, wait_within};
use coracle_tests::http;
use serde_json::Value;

use crate::case::{Action, Case, Pod, Step};
use crate::outside::Client;
use crate::side::Side;

/// Time limit of each wait: databases and Java start slowly on a machine with other work.
const PATIENCE: Duration = Duration::from_secs(240);
/// Time that a container has after its stop signal, in seconds: below the limit of a call.
const GRACE: i64 = 50;
/// Pause between two attempts at a step.
const AGAIN: Duration = Duration::from_millis(300);

/// A case that runs with a runtime.
struct Session<'a> {
    side: &'a Side<'a>,
    case: &'a Case,
    data: PathBuf,
    client: OnceCell<Client>,
    facts: Vec<String>,
}

/// Runs a case; returns what came out of it, or nothing if it failed.
pub(crate) fn run(side: &Side<'_>, case: &Case) -> Option<Vec<String>> {
    let before = side.objects();
    let mut session =
        Session { side, case, data: side.data(&case.name), client: OnceCell::new(), facts: Vec::new() };
    let outcome = catch_unwind(AssertUnwindSafe(|| session.run()));
    if outcome.is_err() {
        session.clear();
    }
    let rests = || side.objects().difference(&before).cloned().collect::<Vec<_>>();
    let left = wait_within(PATIENCE, || rests().is_empty().then(Vec::new)).unwrap_or_else(rests);
    if !left.is_empty() {
        println!("{}: left behind:\n{}", case.name, left.join("\n"));
    }
    (outcome.is_ok() && left.is_empty()).then_some(session.facts)
}

/// Waits for a value within [`PATIENCE`], with pauses.
fn wait<T>(mut condition: impl FnMut() -> Option<T>) -> Option<T> {
    wait_within(PATIENCE * host::slowness(), || {
        condition().or_else(|| {
            std::thread::sleep(AGAIN);
            None
        })
    })
}

impl Session<'_> {
    fn run(&mut self) {
        let first: Vec<&Pod> = self.case.pods.iter().filter(|pod| !pod.is_later).collect();
        for pod in &first {
            self.apply(pod);
        }
        for pod in &first {
            self.wait_until_ready(&pod.name);
        }
        let mut running: Vec<&str> = first.iter().map(|pod| pod.name.as_str()).collect();
        for step in &self.case.steps {
            match &step.action {
                Action::Run(line) => self.command(step, line),
                Action::Get(page) => self.get(step, page),
                Action::Ask(name) => self.ask(step, name),
                Action::Restart => self.restart(step),
                Action::Start => {
                    self.apply(self.case.pod(&step.on));
                    self.wait_until_ready(&step.on);
                    running.push(&step.on);
                }
                Action::Stop => {
                    self.stop(&step.on);
                    running.retain(|pod| *pod != step.on);
                }
            }
        }
        for pod in running {
            self.stop(pod);
        }
    }

    fn apply(&self, pod: &Pod) {
        self.side.kubelet.apply(&pod.name, &pod.manifest(&self.case.image_name(), &self.data));
    }

    /// The status of the containers of a pod.
    fn statuses(&self, pod: &str) -> Vec<Value> {
        let pod = self.side.kubelet.pod(pod).unwrap_or_default();
        pod["status"]["containerStatuses"].as_array().cloned().unwrap_or_default()
    }

    fn wait_until_ready(&self, pod: &str) {
        let is_ready = || {
            let statuses = self.statuses(pod);
            (!statuses.is_empty() && statuses.iter().all(|status| status["ready"] == true)).then_some(())
        };
        wait(is_ready).unwrap_or_else(|| {
            let (states, errors) = (self.statuses(pod), self.side.kubelet.errors());
            panic!("{pod} is not ready: {states:?}\n{errors}\n{}", self.side.log_end(pod))
        });
    }

    /// The ID of the running container of a step's pod.
    fn container(&self, step: &Step) -> String {
        let named = |name: &str| {
            let containers = self.side.running(&step.on);
            containers.into_iter().find(|one| one.metadata.as_ref().is_some_and(|data| data.name == name))
        };
        wait(|| named(&step.container)).unwrap_or_else(|| panic!("{}: it does not run", step.on)).id
    }

    fn command(&self, step: &Step, line: &str) {
        let mut last = String::new();
        let done = wait(|| {
            let request = ExecSyncRequest {
                container_id: self.container(step),
                cmd: ["sh", "-c", line].map(str::to_owned).to_vec(),
                timeout: GRACE,
            };
            let answer = self.side.cri.exec_sync(request).map_err(|error| last = error.to_string()).ok()?;
            last = [answer.stdout, answer.stderr]
                .map(|text| String::from_utf8_lossy(&text).into_owned())
                .concat();
            (answer.exit_code == 0 && last.contains(&step.says)).then_some(())
        });
        self.require(done, step, line, &last);
    }

    /// Requires that a step was done; otherwise `last` is the last answer.
    fn require(&self, done: Option<()>, step: &Step, what: &str, last: &str) {
        let log = || self.side.log_end(&step.on);
        assert!(done.is_some(), "{}: {what}\nsays {last}\n instead of {}\n{}", step.on, step.says, log());
    }

    fn get(&self, step: &Step, page: &str) {
        let (port, path) = page.split_once('/').expect("a port and a path");
        let mut last = None;
        let done = wait(|| {
            let pod = self.side.kubelet.pod(&step.on)?;
            let address: IpAddr = pod["status"]["podIP"].as_str()?.parse().ok()?;
            let address = SocketAddr::new(address, port.parse().expect("a port"));
            last = http::get(address, &format!("/{path}"));
            last.as_ref().filter(|text| text.contains(&step.says)).map(|_| ())
        });
        self.require(done, step, page, &last.unwrap_or_default());
    }

    fn ask(&self, step: &Step, name: &str) {
        let client = self.client.get_or_init(|| Client::new(name));
        let mut last = None;
        let done = wait_within(PATIENCE, || {
            last = client.answer();
            (last.as_ref() == Some(&step.says)).then_some(())
        });
        assert!(done.is_some(), "{name}: the last answer is {last:?}, not {}", step.says);
    }

    /// Stops a container as `crictl stop` does.
    fn restart(&mut self, step: &Step) {
        let (container_id, begin) = (self.container(step), Instant::now());
        let request = StopContainerRequest { container_id: container_id.clone(), timeout: GRACE };
        self.side.cri.stop_container(request).unwrap_or_else(|error| panic!("stop: {error}"));
        let took = begin.elapsed();
        assert!(took < Duration::from_secs(GRACE as u64), "{}: it took {took:?} to stop", step.on);
        let status = self.side.cri.container(&container_id);
        self.check_end(&step.on, &status, step.code);
        let log = self.side.log(&step.on);
        assert!(log.contains(&step.says), "{}: its log has no {:?}:\n{log}", step.on, step.says);
        let seen = wait(|| {
            let status =
                self.statuses(&step.on).into_iter().find(|status| status["name"] == *step.container)?;
            let is_new = status["ready"] == true
                && status["containerID"].as_str()?.split_once("://")?.1 != container_id;
            is_new.then_some(status)
        });
        let seen = seen
            .unwrap_or_else(|| panic!("{} is not started again\n{}", step.on, self.side.log_end(&step.on)));
        let ended = &seen["lastState"]["terminated"];
        assert_eq!(ended["exitCode"], step.code, "{seen}");
        self.facts.push(format!("{}: {} restarts, {}", step.on, seen["restartCount"], ended["reason"]));
    }

    fn check_end(&mut self, pod: &str, status: &ContainerStatus, code: i32) {
        let name = status.metadata.as_ref().map(|data| data.name.clone()).unwrap_or_default();
        assert_eq!(status.state(), ContainerState::ContainerExited);
        let end = format!("{pod}/{name}: {} {}", status.exit_code, status.reason);
        assert_eq!(status.exit_code, code, "{end} {}\n{}", status.message, self.side.log_end(pod));
        self.facts.push(end);
    }

    /// Removes a pod's manifest and waits for its end.
    fn stop(&mut self, pod: &str) {
        let restarts =
            self.statuses(pod).iter().filter_map(|status| status["restartCount"].as_u64()).sum::<u64>();
        let log = || self.side.log_end(pod);
        assert_eq!(restarts as usize, self.case.restarts(pod), "restarts of {pod}\n{}", log());
        let containers = self.side.running(pod);
        self.side.kubelet.remove(pod);
        for container in &containers {
            let status = wait_within(PATIENCE, || {
                let status = self.side.cri.container(&container.id);
                (status.state() == ContainerState::ContainerExited).then_some(status)
            });
            let status =
                status.unwrap_or_else(|| panic!("{pod}: it does not end\n{}", self.side.log_end(pod)));
            self.check_end(pod, &status, self.case.pod(pod).code);
        }
        self.side.remove(pod);
    }

    /// Removes what a failed case left.
    fn clear(&self) {
        for pod in &self.case.pods {
            let manifest = self.side.kubelet.folder().join("static").join(format!("{}.yaml", pod.name));
            // A step may have removed it.
            let _ = std::fs::remove_file(manifest);
            let removed = catch_unwind(AssertUnwindSafe(|| self.side.remove(&pod.name)));
            if removed.is_err() {
                println!("{}: {} could not be removed", self.case.name, pod.name);
            }
        }
    }
}
