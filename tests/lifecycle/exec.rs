//! ExecSync: output, codes, the deadline that kills everything, and pipes that outlive their command.

use std::time::{Duration, Instant};

use coracle_tests::cri::proto::{ExecSyncRequest, Int64Value};
use coracle_tests::host;
use coracle_tests::request::{exec, security};
use tonic::Code;

use coracle_tests::stage::Stage;

/// How many processes with this in their command line live.
fn count(needle: &str) -> usize {
    host::processes(needle).iter().filter(|process| host::is_alive(process.pid)).count()
}

#[test]
fn streams_and_codes_come_back() {
    let stage = Stage::set();
    let id = stage.run(&stage.config("one", &["sleep", "forever"]));
    let answer = stage.node.exec_sync(exec(&id, &["both"], 0)).expect("exec");
    assert_eq!(
        (answer.exit_code, answer.stdout, answer.stderr),
        (0, b"to stdout\n".into(), b"to stderr\n".into())
    );
    for code in [0, 1, 42, 255] {
        let answer = stage.node.exec_sync(exec(&id, &["exit", &code.to_string()], 10)).expect("exec");
        assert_eq!(answer.exit_code, code);
    }
    let answer = stage.node.exec_sync(exec(&id, &["raise", "SIGUSR1"], 10)).expect("exec");
    assert_eq!(answer.exit_code, 128 + 10);
    let answer = stage.node.exec_sync(exec(&id, &["lines", "2000", "1000"], 50)).expect("exec");
    assert_eq!(answer.stdout.len(), 2000 * 1001, "nothing is lost");
    stage.node.stop();
}

#[test]
fn an_exec_is_who_the_container_is() {
    let stage = Stage::set();
    let mut config = stage.config("one", &["sleep", "forever"]);
    security(&mut config).run_as_user = Some(Int64Value { value: 1000 });
    security(&mut config).supplemental_groups = vec![77];
    security(&mut config).no_new_privs = true;
    config.working_dir = "/tmp".into();
    let id = stage.run(&config);
    let answer =
        stage.node.exec_sync(exec(&id, &["see", "ids", "place", "namespaces", "fds"], 10)).expect("exec");
    let report = String::from_utf8(answer.stdout).expect("text");
    for line in
        ["ids Uid 1000 1000 1000 1000", "ids Groups 77 1000 2000 2001", "ids NoNewPrivs 1", "place cwd /tmp"]
    {
        assert!(report.lines().any(|have| have == line), "{line} in\n{report}");
    }
    let pid = stage.node.container_pid(&id);
    for kind in ["mnt", "pid", "ipc", "net"] {
        let line = format!("namespaces {kind} {}", host::namespace(pid, kind));
        assert!(report.lines().any(|have| have == line), "{line} in\n{report}");
    }
    assert_eq!(report.lines().filter(|line| line.starts_with("fds ")).count(), 3, "{report}");
    stage.node.stop();
}

#[test]
fn the_deadline_kills_the_whole_tree() {
    let stage = Stage::set();
    let id = stage.run(&stage.config("one", &["sleep", "forever"]));
    // A number no other test uses, to find the tree by.
    let seconds = format!("{}", 100_000 + std::process::id());
    let begin = Instant::now();
    let late = stage.node.exec_sync(exec(&id, &["tree", &seconds], 1)).expect_err("it sleeps");
    assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    assert_eq!(count(&format!("tree {seconds}")), 0, "the tree outlived its deadline");
    assert!(host::is_alive(stage.node.container_pid(&id)));
    stage.node.stop();
}

/// Fails where each exec leaves its cgroup behind, and where an exec gets a cgroup in which an earlier one left a process:
/// the deadline would kill that, too.
#[test]
fn an_empty_cgroup_is_used_by_the_next_exec_and_one_with_processes_is_not() {
    let stage = Stage::set();
    let id = stage.run(&stage.config("one", &["sleep", "forever"]));
    let cgroups = || {
        let below = host::cgroups_below(&stage.node.cgroup_parent());
        below.iter().filter(|path| path.to_string_lossy().contains(&format!("{id}/exec-"))).count()
    };
    for _ in 0..3 {
        stage.node.exec_sync(exec(&id, &["true"], 10)).expect("exec");
    }
    assert_eq!(cgroups(), 1, "one is kept for the next exec");
    let seconds = format!("{}", 300_000 + std::process::id());
    stage.node.exec_sync(exec(&id, &["orphan", &seconds], 20)).expect("the command itself ended");
    let late = stage.node.exec_sync(exec(&id, &["tree", "1000"], 1)).expect_err("it sleeps");
    assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
    assert_eq!(
        count(&format!("sleep {seconds}")),
        1,
        "what the first exec left running is not the second one's"
    );
    assert_eq!(cgroups(), 1, "that with the process; the cgroup of what a deadline killed is removed");
    stage.node.stop();
}

#[test]
fn a_grandchild_that_holds_the_pipe_does_not_hold_the_answer() {
    let stage = Stage::set();
    let id = stage.run(&stage.config("one", &["sleep", "forever"]));
    let begin = Instant::now();
    let answer = stage.node.exec_sync(exec(&id, &["orphan", "30"], 20)).expect("the command itself ended");
    assert_eq!((answer.exit_code, answer.stdout), (0, b"orphaned\n".into()));
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    stage.node.stop();
}

#[test]
fn a_client_that_gives_up_ends_its_exec() {
    let stage = Stage::set();
    let id = stage.run(&stage.config("one", &["sleep", "forever"]));
    let seconds = format!("{}", 200_000 + std::process::id());
    let request = exec(&id, &["sleep", &seconds], 0);
    stage.node.exec_sync_within(request, Duration::from_millis(500)).expect_err("it sleeps");
    host::wait_until("the exec ends", || count(&format!("sleep {seconds}")) == 0);
    stage.node.stop();
}

#[test]
fn what_cannot_be_run_is_an_error_and_not_a_code() {
    let stage = Stage::set();
    let id = stage.run(&stage.config("one", &["sleep", "forever"]));
    let missing = ExecSyncRequest { container_id: id.clone(), cmd: vec!["/nope".into()], timeout: 5 };
    let error = stage.node.exec_sync(missing).expect_err("there is none");
    assert!(error.message().contains("no such file") || error.message().contains("not found"), "{error}");
    let plain = ExecSyncRequest { container_id: id.clone(), cmd: vec!["/plain".into()], timeout: 5 };
    let error = stage.node.exec_sync(plain).expect_err("not executable");
    assert!(error.message().to_lowercase().contains("permission denied"), "{error}");
    let nothing = ExecSyncRequest { container_id: id, cmd: Vec::new(), timeout: 5 };
    assert_eq!(stage.node.exec_sync(nothing).expect_err("empty").code(), Code::InvalidArgument);
    let created = stage.create(&stage.config("two", &["true"]));
    stage.node.exec_sync(exec(&created, &["true"], 5)).expect_err("not running");
    stage.node.stop();
}

#[test]
fn execs_at_once_do_not_mix() {
    let stage = Stage::set();
    let id = stage.run(&stage.config("one", &["sleep", "forever"]));
    let clients: Vec<_> = (0..8).map(|_| stage.node.another()).collect();
    std::thread::scope(|scope| {
        for (index, client) in clients.into_iter().enumerate() {
            let id = &id;
            scope.spawn(move || {
                for round in 0..5 {
                    let word = format!("{index}-{round}");
                    let answer = client.exec_sync(exec(id, &["print", &word], 20)).expect("exec");
                    assert_eq!(answer.stdout, format!("{word}\n").into_bytes());
                }
            });
        }
    });
    stage.node.stop();
}

/// What is kept of each stream.
const STREAM_BYTES_MAX: usize = 7 << 20;

/// Finding 14 in docs/security.md: output of execs in flight shares one budget of 16 MiB. Before, twelve of these took the
/// daemon, which is never killed first, to 185 MiB.
#[test]
fn output_of_many_execs_shares_one_budget() {
    let stage = Stage::set();
    let id = stage.run(&stage.config("one", &["sleep", "forever"]));
    let pid = stage.node.pid();
    // The highest resident size from now on.
    std::fs::write(format!("/proc/{pid}/clear_refs"), "5").expect("root may");
    // The clients are in this process, with all that they get: on a small machine fewer have to do.
    let memory = std::fs::read_to_string("/proc/meminfo").expect("the kernel tells");
    let total = memory.lines().find_map(|line| line.strip_prefix("MemTotal:")).expect("the first line");
    let total: u64 = total.trim().trim_end_matches(" kB").parse().expect("a number of kB");
    let count = if total < 1 << 20 { 2 } else { 12 };
    let clients: Vec<_> = (0..count).map(|_| stage.node.another()).collect();
    let bytes = STREAM_BYTES_MAX.to_string();
    let slowest = std::thread::scope(|scope| {
        let execs: Vec<_> = clients
            .iter()
            .map(|client| {
                scope.spawn(|| {
                    let answer =
                        client.exec_sync_within(exec(&id, &["flood", &bytes], 0), Duration::from_secs(120));
                    let answer = answer.expect("exec");
                    assert_eq!(answer.exit_code, 7);
                    for (output, byte) in [(answer.stdout, b'1'), (answer.stderr, b'2')] {
                        assert_eq!(output.len(), STREAM_BYTES_MAX);
                        assert!(output.iter().all(|each| *each == byte));
                    }
                })
            })
            .collect();
        let mut slowest = Duration::ZERO;
        while !execs.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            let begin = Instant::now();
            let small =
                stage.node.exec_sync(exec(&id, &["print", "small"], 20)).expect("a small one is not held up");
            assert_eq!(small.stdout, b"small\n");
            slowest = slowest.max(begin.elapsed());
            std::thread::sleep(Duration::from_millis(10));
        }
        slowest
    });
    let highest = host::proc_value(pid, "status", "VmHWM").expect("a size");
    println!("highest resident size {highest} kB, slowest small exec {slowest:?}");
    // The budget, what the daemon has anyway, and twelve connections with what each call has of its own; 23.4 MB were seen.
    assert!(highest < 26 << 10, "{highest} kB");
    stage.node.stop();
}

/// What is beyond the first 7 MiB of a stream is thrown away, and the answer is OK: as in containerd and CRI-O, whose bound
/// is 16 MiB.
#[test]
fn output_beyond_the_bound_is_cut_and_logged() {
    let stage = Stage::set();
    let id = stage.run(&stage.config("one", &["sleep", "forever"]));
    let more = (STREAM_BYTES_MAX + 1).to_string();
    let answer = stage.node.exec_sync(exec(&id, &["flood", &more], 60)).expect("exec");
    assert_eq!((answer.stdout.len(), answer.stderr.len()), (STREAM_BYTES_MAX, STREAM_BYTES_MAX));
    assert_eq!(answer.exit_code, 7);
    assert!(stage.node.log().contains("exec output is cut"));
    stage.node.stop();
}
