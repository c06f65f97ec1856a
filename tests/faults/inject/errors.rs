//! One error at system calls of each operation, in the daemon, in the pod's monitor, in the processes that a monitor starts, and in
//! the programs that the daemon starts (monitors and workers): the operation fails with a text that names the cause, or succeeds;
//! everything else runs on; the client's retry succeeds; and nothing is left once the pod is gone. The call is skipped (ptrace). A
//! start of the daemon may also end with a message that names the error; the next one serves, and nothing is lost.
//!
//! Allowed beside these rules: a client whose own connection broke may see that instead of the text; a confined process that cannot
//! execute its program is reported by its end alone; a worker that cannot start a thread reports EAGAIN for any error, as musl does;
//! and a daemon that cannot find out where its program is looks for the others in `/usr/bin` and names those. Into pipes only EINTR
//! is injected. Workers that pull have fewer rules ([`super::pulls`]), those that run CNI programs are left out.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::operations::{Case, Operation, is_the_same};
use super::trace::{Fault, NO_CALL, Seen, Tracer, Whose};
use super::{Fixture, errnos, is_whole};

/// How many errors of an operation are tried where not all are.
const SAMPLE: usize = 4;
/// After this time an operation that was not answered counts as a failure. Some limits of the daemon are ten seconds.
const ANSWER_MAX: Duration = Duration::from_secs(20);
/// How much of the daemon's log a failure has.
const LOG_LINES: usize = 12;
/// After this many failures the rest of an operation is not tried.
const FAILURES_MAX: usize = 25;

/// Process in which the errors are injected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Program {
    Daemon,
    /// The programs that the daemon starts: the monitor of a new pod, and workers.
    Started,
    /// The monitor of the pod.
    Monitor,
    /// The processes of the monitor until they execute a container's program.
    Launched,
}

/// The call and the index of its error.
pub(crate) type Point = (usize, usize);

/// The result of one point.
pub(crate) struct Tried {
    pub(crate) seen: Seen,
    /// Why the operation failed; `None` if it succeeded.
    pub(crate) refused: Option<String>,
}

impl Program {
    fn trace(self, fixture: &Fixture, case: &Case, (call, error): Point) -> Tracer {
        let whose = match self {
            Program::Daemon | Program::Monitor => Whose::Own,
            Program::Started | Program::Launched => Whose::Children,
        };
        let pid = match self {
            Program::Daemon | Program::Started => fixture.node.pid(),
            Program::Monitor | Program::Launched => monitor_of(fixture, &case.pod_id),
        };
        Tracer::attach(pid, whose, call, Fault::Error(error))
    }
}

/// The monitor in the pod's cgroup.
fn monitor_of(fixture: &Fixture, pod_id: &str) -> i32 {
    let is_its = |pid: i32| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup"));
        text.is_ok_and(|text| text.contains(pod_id))
    };
    let monitors = fixture.node.monitors();
    let found = monitors.iter().find(|monitor| is_its(monitor.pid));
    found.unwrap_or_else(|| panic!("the monitor of {pod_id} is to be found: {monitors:?}")).pid
}

/// Chooses the system calls to fail from those of a run without errors.
pub(crate) type Choose<'a> = &'a dyn Fn(&Seen) -> Vec<Point>;

/// Every point of an operation, or some from the first to the last.
pub(crate) fn points(seen: &Seen) -> Vec<Point> {
    sample(points_of(seen, |_| true))
}

/// Every point at which a quota of the disk may be used up, or some of them.
pub(crate) fn points_of_quota(seen: &Seen) -> Vec<Point> {
    let calls = seen.errors.iter().enumerate();
    let points = calls
        .filter_map(|(call, (name, count))| Some((call + 1, errnos::index_of(name, *count, Errno::EDQUOT)?)));
    sample(points.collect())
}

pub(crate) fn sample(all: Vec<Point>) -> Vec<Point> {
    if is_whole() || all.len() <= SAMPLE {
        return all;
    }
    (0..SAMPLE).map(|index| all[index * all.len() / SAMPLE + all.len() / SAMPLE / 2]).collect()
}

/// Every point of the calls that are chosen.
pub(crate) fn points_of(seen: &Seen, is_chosen: impl Fn(&str) -> bool) -> Vec<Point> {
    let calls = seen.errors.iter().enumerate().filter(|(_, (name, _))| is_chosen(name));
    calls.flat_map(|(call, (_, count))| (0..*count).map(move |error| (call + 1, error))).collect()
}

/// One attempt: prepares an operation, lets one system call of it fail, and checks the result; panics with the call's name if a check
/// fails.
pub(crate) type Try<'a> = &'a dyn Fn(&mut Fixture, Point) -> Tried;

/// Tries the errors of what is named `name`; returns the failures.
pub(crate) fn try_all(name: &str, set: &dyn Fn() -> Fixture, choose: Choose, one: Try) -> Vec<String> {
    let mut fixture = set();
    let measured = one(&mut fixture, (NO_CALL, 0)).seen;
    let points = choose(&measured);
    let (mut failures, mut refused, mut tried) = (Vec::new(), 0, 0);
    for point in &points {
        if failures.len() >= FAILURES_MAX {
            break;
        }
        tried += 1;
        match catch_unwind(AssertUnwindSafe(|| one(&mut fixture, *point))) {
            Ok(tried) => refused += usize::from(tried.refused.is_some()),
            Err(cause) => {
                let text = format!("{name} {point:?}: {}", text_of(cause.as_ref()));
                println!("inject: failure: {text}");
                failures.push(text);
                fixture = set();
            }
        }
    }
    println!(
        "inject: {name}: {} calls, {tried} of {} errors, {refused} refused, {} failures",
        measured.errors.len(),
        points.len(),
        failures.len()
    );
    fixture.node.stop();
    failures
}

fn text_of(cause: &(dyn std::any::Any + Send)) -> String {
    let text = cause.downcast_ref::<String>().map(String::as_str);
    text.or(cause.downcast_ref::<&str>().copied()).unwrap_or("no text").to_owned()
}

/// Makes one call of an operation fail, and checks everything.
fn try_one(fixture: &mut Fixture, program: Program, operation: Operation, point: Point) -> Tried {
    let case = operation.prepare(fixture);
    let client = fixture.node.another();
    let tracer = program.trace(fixture, &case, point);
    let begun = Instant::now();
    let answer = catch_unwind(AssertUnwindSafe(|| operation.call(&client, &case)));
    let took = begun.elapsed();
    let seen = tracer.stop();
    let refused = checked(fixture, &seen, |fixture| {
        let answer = answer.unwrap_or_else(|cause| resume_unwind(cause));
        assert!(took < ANSWER_MAX, "answered after {took:?}");
        let refused = answer.as_ref().err().map(|error| {
            let text = error.message().to_owned();
            assert!(is_of_connection(error) || names_the_error(&seen, &text), "without its cause: {error}");
            text
        });
        assert!(coracle_tests::host::is_alive(fixture.node.pid()), "the daemon ended");
        is_the_same(fixture, "the bystander", &fixture.bystander, fixture.bystander_pid);
        operation.finish(fixture, &case, answer.is_ok());
        fixture.check("after the removal");
        refused
    });
    Tried { seen, refused }
}

/// Runs checks; if one fails, panics with the call that failed and the end of the daemon's log.
pub(crate) fn checked<T>(fixture: &mut Fixture, seen: &Seen, check: impl FnOnce(&mut Fixture) -> T) -> T {
    catch_unwind(AssertUnwindSafe(|| check(fixture))).unwrap_or_else(|cause| {
        let log = fixture.node.log();
        let lines: Vec<&str> = log.lines().collect();
        let last = lines[lines.len().saturating_sub(LOG_LINES)..].join("\n    ");
        panic!("{:?}: {}\n    {last}", seen.failed, text_of(cause.as_ref()))
    })
}

/// Whether a text has the kernel's description of the error that was injected.
pub(crate) fn names_the_error(seen: &Seen, text: &str) -> bool {
    let (_, errno) = seen.failed.as_ref().unwrap_or_else(|| panic!("it failed without an error: {text}"));
    // As musl and the daemon describe it.
    let of_musl = format!("(os error {})", *errno as i32);
    // As programs of the node describe it, but a program's loader in glibc has no descriptions of rare errors.
    let described = std::io::Error::from(*errno).to_string().replace(&of_musl, "");
    let of_loader = format!("cannot read file data: Error {}", *errno as i32);
    let says_few =
        text.contains("no file descriptors available") || text.contains("too few file descriptors");
    let is_few = *errno == Errno::EMFILE && says_few;
    text.to_lowercase().contains(&errno.desc().to_lowercase())
        || [of_musl.as_str(), described.trim_end(), &of_loader].iter().any(|words| text.contains(words))
        || is_few
}

/// Whether the client's connection ended: the error was one of its socket, and the client connects again.
pub(crate) fn is_of_connection(error: &tonic::Status) -> bool {
    std::error::Error::source(error).is_some()
}

/// Tries the operations in a program, and fails with all failures.
fn try_operations(sets: &[fn() -> Fixture], program: Program, operations: &[Operation], choose: Choose) {
    let mut failures = Vec::new();
    for operation in operations {
        for set in sets {
            let name = format!("{program:?}: {operation:?}");
            let one = |fixture: &mut Fixture, point| try_one(fixture, program, *operation, point);
            failures.extend(try_all(&name, set, choose, &one));
        }
    }
    none(&failures);
}

pub(crate) fn none(failures: &[String]) {
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

const BOTH: [fn() -> Fixture; 2] = [Fixture::on_host, Fixture::on_bridge];

#[test]
fn one_error_in_a_daemon_that_makes_a_pod() {
    try_operations(&BOTH, Program::Daemon, &[Operation::RunPodSandbox], &points);
}

#[test]
fn one_error_in_the_daemon() {
    try_operations(&BOTH, Program::Daemon, &Operation::ALL[1..], &points);
}

/// In the operations in which a monitor that runs takes part.
#[test]
fn one_error_in_the_monitor() {
    try_operations(&[Fixture::on_host], Program::Monitor, &Operation::ALL[2..], &points);
}

/// The daemon finds them by the monitor and by their roots, and the call does not succeed beside a living one. Regression: a process
/// that had left its namespaces, but not closed its files yet, counted as ended.
#[test]
fn one_error_in_the_daemon_that_stops_moved_processes() {
    try_operations(&[Fixture::on_host], Program::Daemon, &Operation::OF_MOVED[..1], &points);
}

#[test]
fn one_error_in_the_daemon_that_removes_a_pod_of_moved_processes() {
    try_operations(&[Fixture::on_host], Program::Daemon, &Operation::OF_MOVED[1..], &points);
}

#[test]
fn one_error_in_the_monitor_of_moved_processes() {
    try_operations(&[Fixture::on_host], Program::Monitor, &Operation::OF_MOVED, &points);
}

#[test]
fn one_error_in_a_process_that_becomes_a_containers() {
    let operations = [Operation::StartContainer, Operation::ExecSync];
    try_operations(&[Fixture::on_host], Program::Launched, &operations, &points);
}

#[test]
fn one_error_in_a_monitor_that_starts() {
    try_operations(&BOTH, Program::Started, &[Operation::RunPodSandbox], &points);
}

/// Regression: the monitor did not answer an exec whose end or whose report it could not read, did not reap containers if wait4 was
/// interrupted, and disconnected the daemon if sendmsg was.
#[test]
fn an_interrupted_call_of_the_monitor_is_repeated() {
    let names = ["read(", "wait4(", "sendmsg("];
    let choose = |seen: &Seen| points_of(seen, |call| names.iter().any(|name| call.starts_with(name)));
    try_operations(&[Fixture::on_host], Program::Monitor, &[Operation::ExecSync], &choose);
}

/// Regression: an exec that failed after the descriptors were arranged was reported as one that had started, with the exit code 127.
#[test]
fn an_exec_that_fails_early_is_reported() {
    let choose = |seen: &Seen| points_of(seen, |call| call.starts_with("recvmsg("));
    try_operations(&[Fixture::on_host], Program::Launched, &[Operation::ExecSync], &choose);
}

/// Regression: the text was "the pod's monitor is gone".
#[test]
fn a_monitor_that_cannot_start_says_why() {
    let names = ["read(", "epoll_create1("];
    let choose = |seen: &Seen| points_of(seen, |call| names.iter().any(|name| call.starts_with(name)));
    try_operations(&[Fixture::on_host], Program::Started, &[Operation::RunPodSandbox], &choose);
}

/// Regression: the stop signal was not sent, and the container was killed at the end of its grace.
#[test]
fn a_stop_signal_is_sent_when_memory_is_short() {
    let choose = |seen: &Seen| points_of(seen, |call| call.starts_with("sendmsg("));
    try_operations(&[Fixture::on_host], Program::Daemon, &[Operation::StopContainer], &choose);
}

#[test]
fn a_quota_that_is_used_up_is_named() {
    let operations = [Operation::RunPodSandbox, Operation::CreateContainer, Operation::StartContainer];
    try_operations(&[Fixture::on_bridge], Program::Daemon, &operations, &points_of_quota);
}
