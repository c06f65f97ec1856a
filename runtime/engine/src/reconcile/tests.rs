//! Tests of the decisions for every combination of answers, and the tables of docs/reliability.md.

use super::*;

/// A list of all variants and their texts in the tables; a missing variant does not compile.
macro_rules! variants {
    ($list:ident, $text:ident, $type:ty, $($variant:path => $words:literal),+ $(,)?) => {
        const $list: &[$type] = &[$($variant),+];
        fn $text(variant: $type) -> &'static str {
            match variant {
                $($variant => $words),+
            }
        }
    };
}

variants!(POD_STATES, pod_state, PodState,
    PodState::EarlierBoot => "of an earlier boot",
    PodState::Creating => "being created",
    PodState::Made => "ready, not ready",
);
variants!(CONTAINER_STATES, container_state, ContainerState,
    ContainerState::Creating => "being created",
    ContainerState::EarlierBoot => "of an earlier boot",
    ContainerState::Created => "created",
    ContainerState::Running => "running",
    ContainerState::Exited => "exited",
);
variants!(MONITOR_PROCESSES, monitor_process, MonitorProcess,
    MonitorProcess::NotAsked => "not asked",
    MonitorProcess::Unclear => "temporary error",
    MonitorProcess::Ended => "no monitor",
    MonitorProcess::Runs => "monitor runs",
);
variants!(GREETINGS, greeting, Greeting,
    Greeting::Silent => "no answer",
    Greeting::Failed => "its set-up failed",
    Greeting::Serves => "serves",
);
variants!(CGROUPS, cgroup, Cgroup,
    Cgroup::NotAsked => "not asked",
    Cgroup::Absent => "no cgroup",
    Cgroup::Exists => "a cgroup",
);
variants!(ANSWERS, answer, Answer,
    Answer::NotAsked => "not asked",
    Answer::Ended => "the monitor has exited",
    Answer::Silent => "no answer",
    Answer::NoProcess => "the container does not run",
    Answer::Process => "the container runs",
);

/// All results of reading a record.
fn records<T: Copy>(states: &[T]) -> Vec<Recorded<T>> {
    let unusable = [Recorded::Absent, Recorded::Unreadable, Recorded::Damaged];
    unusable.into_iter().chain(states.iter().copied().map(Recorded::State)).collect()
}

fn recorded<T>(record: Recorded<T>, state: fn(T) -> &'static str) -> &'static str {
    match record {
        Recorded::Absent => "none",
        Recorded::Unreadable => "cannot be read",
        Recorded::Damaged => "fails verification",
        Recorded::State(known) => state(known),
    }
}

/// The columns "the pod is" and "done" of a decision.
fn about_pod(decision: Decision<PodDecision>) -> [&'static str; 2] {
    match decision {
        Decision::LeaveAlone => [
            "unknown, in PodsRecovered",
            "nothing changes; the record is read again later, and counts as one that fails verification after ten minutes of I/O errors",
        ],
        Decision::EndAndDiscard => [
            "lost",
            "all its processes are killed through their cgroups, its network is released, its directories are removed",
        ],
        Decision::EndAndSetAside => [
            "lost",
            "all its processes are killed through their cgroups, its network is released, the directory of its record is moved to quarantine",
        ],
        Decision::Known(PodDecision::AskMonitor) => ["", "kernel and monitor are asked"],
        Decision::Known(PodDecision::NoteReboot) => {
            ["not ready", "its network is released; its containers: next table"]
        }
        Decision::Known(PodDecision::Undo) => ["not listed", "all that it has is undone"],
        Decision::Known(PodDecision::AskAboutContainers) => ["as recorded", "its containers: next table"],
        Decision::Known(PodDecision::Retry) => {
            ["as recorded, in PodsRecovered", "the monitor is asked again later; its containers: next table"]
        }
        Decision::Known(PodDecision::NoteMonitorsEnd) => {
            ["not ready", "its containers are killed through their cgroups"]
        }
    }
}

/// The columns "the container is" and "done" of a decision.
fn about_container(decision: Decision<ContainerDecision>) -> [&'static str; 2] {
    match decision {
        Decision::LeaveAlone => [
            "unknown, in PodsRecovered",
            "nothing changes; the record is read again later, and counts as one that fails verification after ten minutes of I/O errors",
        ],
        Decision::EndAndDiscard => {
            ["lost", "its processes are killed through its cgroup, its directory is removed"]
        }
        Decision::EndAndSetAside => {
            ["lost", "its processes are killed through its cgroup, its directory is moved to quarantine"]
        }
        Decision::Known(ContainerDecision::AskKernel) => ["", "the kernel is asked"],
        Decision::Known(ContainerDecision::AskMonitor) => ["", "the monitor is asked"],
        Decision::Known(ContainerDecision::Undo) => ["not listed", "all that it has is undone"],
        Decision::Known(ContainerDecision::Keep) => ["as recorded", ""],
        Decision::Known(ContainerDecision::Run) => ["running", "a stop in progress continues"],
        Decision::Known(ContainerDecision::Retry) => {
            ["as recorded, in PodsRecovered", "the monitor is asked again later"]
        }
        Decision::Known(ContainerDecision::EndWithPod) => [
            "exited; created if it never ran",
            "its processes are killed through its cgroup; its exit record is read",
        ],
        Decision::Known(ContainerDecision::RecordExit) => {
            ["exited", "its exit record is read; then as an exited container"]
        }
        Decision::Known(ContainerDecision::RecordReboot) => ["exited", "as an exited container"],
        Decision::Known(ContainerDecision::EndRemaining) => {
            ["exited", "remaining processes are killed through its cgroup"]
        }
    }
}

/// The rows of a table for one record. Answers with the same decision share a row.
fn rows<K: Copy, M: Copy, D: Copy + PartialEq>(
    record: &str,
    (kernel, kernel_text): (&[K], fn(K) -> &'static str),
    (monitor, monitor_text): (&[M], fn(M) -> &'static str),
    decide: impl Fn(K, M) -> D,
    about: fn(D) -> [&'static str; 2],
) -> String {
    let depends_on_kernel = monitor
        .iter()
        .any(|answer| kernel.iter().any(|one| decide(*one, *answer) != decide(kernel[0], *answer)));
    let mut text = String::new();
    for one in if depends_on_kernel { kernel } else { &kernel[..1] } {
        let mut groups: Vec<(D, Vec<&str>)> = Vec::new();
        for answer in monitor {
            let decision = decide(*one, *answer);
            match groups.iter_mut().find(|(known, _)| *known == decision) {
                Some((_, answers)) => answers.push(monitor_text(*answer)),
                None => groups.push((decision, vec![monitor_text(*answer)])),
            }
        }
        for (decision, answers) in groups {
            let kernel_says = if depends_on_kernel { kernel_text(*one) } else { "any" };
            let monitor_says = if answers.len() == monitor.len() { "any".into() } else { answers.join(", ") };
            let [becomes, done] = about(decision);
            // A step of the function, not a situation on a node.
            if becomes.is_empty() {
                continue;
            }
            text += &format!("| {record} | {kernel_says} | {monitor_says} | {becomes} | {done} |\n");
        }
    }
    text
}

fn tables() -> [String; 2] {
    let title = |of: &str| {
        format!("| record of the {of} | kernel | monitor | the {of} is | done |\n|---|---|---|---|---|\n")
    };
    let mut tables = [title("pod"), title("container")];
    for record in records(POD_STATES) {
        let (kernel, monitor) =
            ((MONITOR_PROCESSES, monitor_process as fn(_) -> _), (GREETINGS, greeting as fn(_) -> _));
        let decide = |process, greeting| pod(process, greeting, record);
        tables[0] += &rows(recorded(record, pod_state), kernel, monitor, decide, about_pod);
    }
    for record in records(CONTAINER_STATES) {
        let (kernel, monitor) = ((CGROUPS, cgroup as fn(_) -> _), (ANSWERS, answer as fn(_) -> _));
        let decide = |cgroup, answer| container(cgroup, answer, record);
        tables[1] += &rows(recorded(record, container_state), kernel, monitor, decide, about_container);
    }
    tables
}

#[test]
fn the_documented_tables_are_those_of_the_functions() {
    let page = include_str!("../../../../docs/reliability.md");
    for table in tables() {
        assert!(page.contains(&table), "docs/reliability.md does not contain this table:\n{table}");
    }
}

/// Calls `check` for each combination of answers about a pod.
fn each_pod(mut check: impl FnMut(MonitorProcess, Greeting, Recorded<PodState>)) {
    for process in MONITOR_PROCESSES {
        for greeting in GREETINGS {
            records(POD_STATES).into_iter().for_each(|record| check(*process, *greeting, record));
        }
    }
}

/// Calls `check` for each combination of answers about a container.
fn each_container(mut check: impl FnMut(Cgroup, Answer, Recorded<ContainerState>)) {
    for cgroup in CGROUPS {
        for answer in ANSWERS {
            records(CONTAINER_STATES).into_iter().for_each(|record| check(*cgroup, *answer, record));
        }
    }
}

fn check_record<T: Copy + PartialEq, D: PartialEq>(record: Recorded<T>, decision: &Decision<D>) {
    assert_eq!(record == Recorded::Unreadable, *decision == Decision::LeaveAlone);
    assert_eq!(record == Recorded::Damaged, *decision == Decision::EndAndSetAside);
    assert_eq!(record == Recorded::Absent, *decision == Decision::EndAndDiscard);
}

#[test]
fn only_a_record_that_was_read_and_fails_verification_is_set_aside() {
    let mut combinations = 0;
    each_pod(|process, greeting, record| {
        combinations += 1;
        let decision = pod(process, greeting, record);
        check_record(record, &decision);
    });
    assert_eq!(combinations, 4 * 3 * 6);
    each_container(|cgroup, answer, record| {
        combinations += 1;
        let decision = container(cgroup, answer, record);
        check_record(record, &decision);
    });
    assert_eq!(combinations, 4 * 3 * 6 + 3 * 5 * 8);
}

/// A source that is not asked must have no influence.
#[test]
fn a_decision_without_an_answer_does_not_depend_on_the_answer() {
    each_pod(|process, greeting, record| {
        let early = pod(MonitorProcess::NotAsked, Greeting::Silent, record);
        if early != Decision::Known(PodDecision::AskMonitor) {
            assert_eq!(early, pod(process, greeting, record), "{process:?} {greeting:?} {record:?}");
        }
    });
    each_container(|cgroup, answer, record| {
        let of_record = container(Cgroup::NotAsked, Answer::NotAsked, record);
        let (asks_kernel, asks_monitor) =
            (Decision::Known(ContainerDecision::AskKernel), Decision::Known(ContainerDecision::AskMonitor));
        if of_record != asks_kernel && of_record != asks_monitor {
            assert_eq!(of_record, container(cgroup, answer, record), "{cgroup:?} {answer:?} {record:?}");
        }
        let without_kernel = container(Cgroup::NotAsked, answer, record);
        if without_kernel != asks_kernel {
            assert_eq!(without_kernel, container(cgroup, answer, record), "{cgroup:?} {answer:?} {record:?}");
        }
        let without_monitor = container(cgroup, Answer::NotAsked, record);
        if without_monitor != asks_monitor {
            assert_eq!(
                without_monitor,
                container(cgroup, answer, record),
                "{cgroup:?} {answer:?} {record:?}"
            );
        }
    });
}

/// A container on a model of the node. Its cgroup is removed with its processes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ModelContainer {
    has_cgroup: bool,
    /// The monitor's answer when it is asked.
    answer: Answer,
    record: Recorded<ContainerState>,
}

impl ModelContainer {
    /// Kills all processes of the container through its cgroup.
    fn end(&mut self) {
        self.has_cgroup = false;
        if self.answer == Answer::Process {
            self.answer = Answer::NoProcess;
        }
    }

    fn set(&mut self, state: ContainerState) {
        self.record = Recorded::State(state);
    }

    /// Asks, decides and carries out until a decision asks nothing and changes nothing.
    fn settle(mut self) -> Self {
        let (mut cgroup, mut answer) = (Cgroup::NotAsked, Answer::NotAsked);
        for _ in 0..=DECISIONS_MAX {
            let before = (self, cgroup, answer);
            match container(cgroup, answer, self.record) {
                Decision::LeaveAlone => {}
                Decision::EndAndDiscard
                | Decision::EndAndSetAside
                | Decision::Known(ContainerDecision::Undo) => {
                    self.end();
                    self.record = Recorded::Absent;
                }
                Decision::Known(ContainerDecision::AskKernel) => {
                    cgroup = if self.has_cgroup { Cgroup::Exists } else { Cgroup::Absent };
                }
                Decision::Known(ContainerDecision::AskMonitor) => answer = self.answer,
                Decision::Known(ContainerDecision::Keep | ContainerDecision::Retry) => {}
                Decision::Known(ContainerDecision::Run) => self.set(ContainerState::Running),
                Decision::Known(ContainerDecision::EndWithPod) => {
                    self.end();
                    if self.record == Recorded::State(ContainerState::Running) {
                        self.set(ContainerState::Exited);
                    }
                }
                Decision::Known(ContainerDecision::RecordExit | ContainerDecision::RecordReboot) => {
                    self.set(ContainerState::Exited);
                }
                Decision::Known(ContainerDecision::EndRemaining) => self.end(),
            }
            if before == (self, cgroup, answer) {
                return self;
            }
        }
        panic!("not stable after {DECISIONS_MAX} decisions: {self:?}");
    }

    /// Requires that lists show what runs: a container with processes is created or running, or its record
    /// cannot be read.
    fn require_listed_or_ended(self) {
        let may_have_processes = match self.record {
            Recorded::Unreadable => true,
            Recorded::State(ContainerState::Created | ContainerState::Running) => true,
            Recorded::Absent | Recorded::Damaged => false,
            Recorded::State(
                ContainerState::Creating | ContainerState::EarlierBoot | ContainerState::Exited,
            ) => false,
        };
        assert!(may_have_processes || !self.has_cgroup, "neither listed nor ended: {self:?}");
    }
}

/// Each container on the model, except those that cannot exist: a process is in a cgroup.
fn each_model_container(mut check: impl FnMut(ModelContainer)) {
    each_container(|cgroup, answer, record| {
        let has_cgroup = cgroup == Cgroup::Exists;
        let is_real = cgroup != Cgroup::NotAsked && answer != Answer::NotAsked;
        if is_real && (has_cgroup || answer != Answer::Process) {
            check(ModelContainer { has_cgroup, answer, record });
        }
    });
}

#[test]
fn a_container_whose_process_runs_is_listed_or_ended() {
    let mut running = 0;
    each_model_container(|found| {
        let settled = found.settle();
        settled.require_listed_or_ended();
        assert_eq!(settled.settle(), settled, "it is stable");
        if found.record == Recorded::Unreadable {
            assert_eq!(settled, found, "nothing changes while the record cannot be read");
        }
        // The record can be read later, and the monitor answers later.
        each_model_container(|later| {
            let mut next = settled;
            if settled.record == Recorded::Unreadable {
                next.record = later.record;
            }
            if settled.answer == Answer::Silent && (next.has_cgroup || later.answer != Answer::Process) {
                next.answer = later.answer;
            }
            next.settle().require_listed_or_ended();
        });
        let is_started =
            matches!(found.record, Recorded::State(ContainerState::Created | ContainerState::Running));
        if is_started && found.answer == Answer::Process {
            running += 1;
            assert_eq!(settled.record, Recorded::State(ContainerState::Running));
            assert!(settled.has_cgroup, "a running container is not ended");
        }
    });
    assert_eq!(running, 2);
}

/// A pod on a model of the node.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ModelPod {
    process: MonitorProcess,
    greeting: Greeting,
    record: Recorded<PodState>,
    has_network: bool,
    /// Whether containers run that no decision about a container ends.
    has_containers: bool,
}

impl ModelPod {
    fn settle(mut self) -> Self {
        let (mut process, mut greeting) = (MonitorProcess::NotAsked, Greeting::Silent);
        loop {
            let before = (self, process, greeting);
            match pod(process, greeting, self.record) {
                Decision::EndAndDiscard | Decision::EndAndSetAside | Decision::Known(PodDecision::Undo) => {
                    self.process = MonitorProcess::Ended;
                    (self.record, self.has_network, self.has_containers) = (Recorded::Absent, false, false);
                }
                Decision::Known(PodDecision::AskMonitor) => {
                    (process, greeting) = (self.process, self.greeting);
                }
                // Its containers have the state `EarlierBoot`: they are ended.
                Decision::Known(PodDecision::NoteReboot) => {
                    (self.has_network, self.has_containers) = (false, false);
                }
                Decision::Known(PodDecision::NoteMonitorsEnd) => self.has_containers = false,
                Decision::LeaveAlone
                | Decision::Known(PodDecision::Retry | PodDecision::AskAboutContainers) => {}
            }
            if before == (self, process, greeting) {
                return self;
            }
        }
    }
}

#[test]
fn a_pod_with_running_containers_is_listed_or_unreadable() {
    each_pod(|process, greeting, record| {
        if process == MonitorProcess::NotAsked {
            return;
        }
        let found = ModelPod { process, greeting, record, has_network: true, has_containers: true };
        let settled = found.settle();
        assert_eq!(settled.settle(), settled, "it is stable");
        match settled.record {
            Recorded::Unreadable => {
                assert_eq!(settled, found, "nothing changes while the record cannot be read")
            }
            Recorded::State(PodState::Made) => {
                // Without its monitor no process would report exits.
                let is_reachable = process != MonitorProcess::Ended && greeting != Greeting::Failed;
                let may_serve = process == MonitorProcess::Unclear || is_reachable;
                assert_eq!(settled.has_containers, may_serve, "{found:?}");
            }
            Recorded::Absent | Recorded::State(PodState::EarlierBoot) => {
                assert!(!settled.has_containers && !settled.has_network, "{found:?}");
            }
            Recorded::Damaged | Recorded::State(PodState::Creating) => panic!("not stable: {settled:?}"),
        }
        // The record can be read later.
        if record == Recorded::Unreadable {
            for record in records(POD_STATES).into_iter().filter(|record| *record != Recorded::Unreadable) {
                let settled = ModelPod { record, ..settled }.settle();
                assert!(!settled.has_containers || settled.record == Recorded::State(PodState::Made));
            }
        }
    });
}
