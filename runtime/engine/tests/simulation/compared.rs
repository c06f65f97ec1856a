//! Histories of calls that run on both nodes. In this test the engine runs on the simulated node;
//! `tests/faults/compared.txt` holds the calls, the answers and the lists after each call, and
//! `tests/faults/compared.rs` makes the same calls to the daemon on a real kernel. A simulated node that
//! behaves differently fails one of the two tests.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::error::Error;
use coracle_base::reactor;
use coracle_engine::Pods;
use coracle_engine::state::Container as State;
use coracle_sandbox::Exit;

use crate::engine::{container_spec, pod_spec};
use crate::named::Fixture;
use crate::random::Random;
use crate::world::{Role, STATE};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/faults/compared.txt");

const HISTORIES: u64 = 24;
const STEPS: usize = 40;

/// Number of pods: p0 has its own network namespace, p1 uses the node's.
const PODS: u64 = 2;
/// Number of containers, c0 to c3; those with an even number are in p0. The programs of c2 and c3 exit by
/// themselves.
const CONTAINERS: u64 = 4;
const EXIT: Exit = Exit::Code(3);

/// The ID, before repetition, in a call for an object that was never created.
const NO_ID: &str = "00";

/// Simulated time after each call: longer than any operation takes without errors.
const SETTLING: Duration = Duration::from_secs(20);

/// The IDs of the objects of one history by their labels.
#[derive(Default)]
struct Ids(BTreeMap<String, String>);

impl Ids {
    fn of(&self, label: &str) -> String {
        self.0.get(label).cloned().unwrap_or_else(|| NO_ID.repeat(32))
    }

    /// Records the ID from a creating call for `label`; returns whether it equals the earlier one, as text.
    fn made(&mut self, label: &str, id: String) -> String {
        let before = self.0.insert(label.to_owned(), id.clone());
        if before == Some(id) { "Ok, as before" } else { "Ok, new" }.to_owned()
    }

    /// Lists pods and containers as `LABEL=STATE`.
    fn lists(&self, pods: &Rc<Pods>) -> String {
        let mut listed = BTreeMap::new();
        for pod in pods.pods() {
            let state = if pod.record().state.is_ready() { "ready" } else { "notready" };
            listed.insert(pod.id.to_string(), state.to_owned());
        }
        for container in pods.containers() {
            let id = container.id.to_string();
            let state = match &container.record().state {
                State::Creating => "creating".to_owned(),
                State::Created { .. } => "created".to_owned(),
                State::Running { .. } => "running".to_owned(),
                State::Gone => "removed".to_owned(),
                State::Exited { ended, .. } => {
                    // The exit code is asked for by ContainerStatus, which is a use of the ID.
                    let _ = pods.container(&id);
                    format!("exited:{}", ended.exit_code())
                }
            };
            listed.insert(id, state);
        }
        let known = self.0.iter().filter_map(|(label, id)| Some(format!("{label}={}", listed.remove(id)?)));
        let mut words: Vec<String> = known.collect();
        words.extend(listed.values().map(|state| format!("other={state}")));
        words.join(" ")
    }
}

/// The random calls of a history, regardless of which objects exist: clients may make calls in any order.
fn calls(random: &mut Random) -> Vec<String> {
    let verbs = [
        ("run", 6),
        ("create", 6),
        ("start", 6),
        ("stop", 2),
        ("remove", 2),
        ("stop-pod", 1),
        ("remove-pod", 3),
    ];
    let verbs = verbs.into_iter().chain([("kill-monitor", 1), ("restart", 2)]);
    let verbs: Vec<&str> = verbs.flat_map(|(verb, weight)| std::iter::repeat_n(verb, weight)).collect();
    let call = |_| match random.pick(&verbs) {
        "restart" => "restart".to_owned(),
        verb @ ("create" | "start" | "stop" | "remove") => format!("{verb} c{}", random.below(CONTAINERS)),
        verb => format!("{verb} p{}", random.below(PODS)),
    };
    (0..STEPS).map(call).collect()
}

fn answer(result: Result<(), Error>) -> String {
    match result {
        Ok(()) => "Ok".to_owned(),
        Err(error) => format!("{:?}", error.kind()),
    }
}

/// Makes one call, as the CRI service does.
async fn perform(fixture: &Fixture, pods: &Rc<Pods>, ids: &mut Ids, call: &str) -> String {
    let (verb, label) = call.split_once(' ').expect("a verb and a label");
    let number: u32 = label[1..].parse().expect("a number");
    let id = ids.of(label);
    match verb {
        "run" => match pods.run(pod_spec(2 * number)).await {
            Ok(id) => ids.made(label, id.to_string()),
            Err(error) => answer(Err(error)),
        },
        "create" => {
            let pod = ids.of(&format!("p{}", number % 2));
            let made = match pods.pod(&pod) {
                Ok(pod) => pod.create_container(container_spec(2 * number)).await,
                Err(error) => Err(error),
            };
            match made {
                Ok(id) => {
                    if number >= 2 {
                        let mut world = fixture.clients.node.world.borrow_mut();
                        world.programs.get_or_insert_default().insert(id, EXIT);
                    }
                    ids.made(label, id.to_string())
                }
                Err(error) => answer(Err(error)),
            }
        }
        "start" => match pods.container(&id) {
            Ok(container) => answer(container.start().await),
            Err(error) => answer(Err(error)),
        },
        "stop" => match pods.container(&id) {
            Ok(container) => answer(container.stop(Duration::ZERO).await),
            Err(error) => answer(crate::clients::absent(error)),
        },
        "remove" => match pods.container(&id) {
            Ok(container) => answer(container.remove().await),
            Err(error) => answer(crate::clients::absent(error)),
        },
        "stop-pod" => match pods.pod(&id) {
            Ok(pod) => answer(pod.stop().await),
            Err(error) => answer(crate::clients::absent(error)),
        },
        "remove-pod" => match pods.pod(&id) {
            Ok(pod) => answer(pod.remove().await),
            Err(error) => answer(crate::clients::absent(error)),
        },
        "kill-monitor" => {
            let mut world = fixture.clients.node.world.borrow_mut();
            let directory = format!("{STATE}/pods/{id}");
            let is_its =
                |pid: &i32| world.processes.get(pid).is_some_and(|process| process.role == Role::Monitor);
            match world.monitor_of(&directory).filter(is_its) {
                Some(pid) => {
                    world.kill(pid, Exit::Signal(9));
                    "Ok".to_owned()
                }
                None => "none".to_owned(),
            }
        }
        other => panic!("no call is named {other}"),
    }
}

fn line(call: &str, answer: &str, ids: &Ids, pods: &Rc<Pods>) -> String {
    format!("{call} -> {answer} | {}", ids.lists(pods)).trim_end().to_owned()
}

/// Runs the history of a seed; returns a line `CALL -> ANSWER | LISTS` for each call.
fn course(seed: u64) -> String {
    let fixture = Fixture::new(seed);
    fixture.clients.node.world.borrow_mut().programs = Some(BTreeMap::new());
    let mut calls = calls(&mut Random::new(seed)).into_iter();
    let (mut ids, mut lines) = (Ids::default(), vec![format!("history {seed}")]);
    let mut is_over = false;
    while !is_over {
        fixture.daemon(async |pods| {
            reactor::sleep(SETTLING).await;
            if lines.len() > 1 {
                lines.push(line("restart", "Ok", &ids, pods));
            }
            loop {
                match calls.next().as_deref() {
                    Some("restart") if lines.len() == 1 => {}
                    Some("restart") => return,
                    Some(call) => {
                        let answer = perform(&fixture, pods, &mut ids, call).await;
                        reactor::sleep(SETTLING).await;
                        lines.push(line(call, &answer, &ids, pods));
                    }
                    None => {
                        fixture.remove_all(pods).await;
                        is_over = true;
                        return;
                    }
                }
            }
        });
    }
    lines.join("\n") + "\n"
}

/// If `CORACLE_SIMULATE_WRITE=1` is set, the test writes the file instead of comparing it, for use after a change
/// of the engine or of the calls.
#[test]
fn the_simulated_node_answers_as_the_file_says() {
    let courses: Vec<String> = (1..=HISTORIES).map(course).collect();
    let text = courses.join("\n");
    if std::env::var_os("CORACLE_SIMULATE_WRITE").is_some() {
        std::fs::write(FILE, &text).expect("the file is written");
    }
    let file = std::fs::read_to_string(FILE).expect("the file is there");
    for (number, (line, expected)) in text.lines().zip(file.lines()).enumerate() {
        assert_eq!(line, expected, "line {} of {FILE}", number + 1);
    }
    assert_eq!(text.len(), file.len(), "the file is complete");
}
