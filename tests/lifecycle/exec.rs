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
