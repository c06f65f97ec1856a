//! Tests start, cancellation and end of workers on the real kernel; shell scripts act as workers.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_job::{Answer, Failure, FailureKind, Job, MESSAGE_BYTES_MAX, Outcome, Progress, write_message};

use super::process::LogLines;
use super::{Error, Workers};
use crate::reactor;
use crate::testdir::TestDir;

/// Writes a worker that runs `script`; `$D` is the test's directory.
fn fake(dir: &TestDir, script: &str) -> PathBuf {
    dir.script("worker", script)
}

fn workers(program: PathBuf) -> Rc<Workers> {
    Workers::new(program)
}

fn write_answers(dir: &TestDir, answers: &[Answer]) {
    let mut bytes = Vec::new();
    for answer in answers {
        write_message(&mut bytes, answer).unwrap();
    }
    std::fs::write(dir.path().join("answers"), bytes).unwrap();
}

fn job() -> Job {
    Job::RemoveTrees { paths: vec!["/nowhere".into()] }
}

/// Waits until `condition` returns true, with a time limit.
async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < end, "{what}");
        reactor::sleep(Duration::from_millis(5)).await;
    }
}

fn is_alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with('Z'))
}

fn pid_in(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

#[test]
fn a_worker_reports_progress_and_its_outcome_and_is_reaped() {
    let dir = TestDir::new("workers");
    write_answers(
        &dir,
        &[
            Answer::Progress(Progress { bytes_done: 1, bytes_total: 2, ..Progress::default() }),
            Answer::Progress(Progress { bytes_done: 2, bytes_total: 2, ..Progress::default() }),
            Answer::Done(Outcome::Removed),
        ],
    );
    reactor::run(async {
        let workers = workers(fake(&dir, "echo $$ > $D/pid; cat > $D/job; cat $D/answers; exec sleep 100"));
        let mut seen = Vec::new();
        let mut note = |progress: Progress| seen.push((progress.bytes_done, progress.bytes_total));
        let outcome = workers.run_reporting(job(), &mut note).await;
        assert!(matches!(outcome, Ok(Outcome::Removed)), "{outcome:?}");
        assert_eq!(seen, [(1, 2), (2, 2)]);
        let sent = std::fs::read(dir.path().join("job")).unwrap();
        let Some(Job::RemoveTrees { paths }) = coracle_job::read_message(&mut sent.as_slice()).unwrap()
        else {
            panic!("another job arrived")
        };
        assert_eq!(paths, [Path::new("/nowhere")]);
        let pid = pid_in(&dir.path().join("pid"));
        until("no zombie stays", || !Path::new(&format!("/proc/{pid}")).exists()).await;
    });
}

#[test]
fn dropping_the_future_kills_the_whole_group() {
    let dir = TestDir::new("workers");
    reactor::run(async {
        let program = fake(&dir, "sleep 1000 & echo $! > $D/child; echo $$ > $D/pid; cat > /dev/null; wait");
        let workers = workers(program);
        let running = reactor::spawn(async move { workers.run(job()).await.is_ok() });
        until("it starts", || !pid_in(&dir.path().join("pid")).is_empty()).await;
        let (leader, child) = (pid_in(&dir.path().join("pid")), pid_in(&dir.path().join("child")));
        assert!(is_alive(&leader) && is_alive(&child));
        drop(running);
        until("leader and child end", || !is_alive(&leader) && !is_alive(&child)).await;
        until("the leader is reaped", || !Path::new(&format!("/proc/{leader}")).exists()).await;
    });
}

#[test]
fn a_failure_is_returned_unchanged() {
    let dir = TestDir::new("workers");
    let failure = Failure { kind: FailureKind::Denied, message: "pull x: unauthorized".into() };
    write_answers(&dir, &[Answer::Failed(failure.clone())]);
    reactor::run(async {
        match workers(fake(&dir, "cat > /dev/null; cat $D/answers")).run(job()).await {
            Err(Error::Failed(got)) => assert_eq!(got, failure),
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn a_missing_or_malformed_answer_is_an_error() {
    let too_long = (MESSAGE_BYTES_MAX as u32 + 1).to_le_bytes();
    let cases: [(&str, &[u8], &str); 6] = [
        ("cat > /dev/null; cat $D/raw", b"\x04\0\0\0\xff\xff\xff\xff", "cannot be decoded"),
        ("cat > /dev/null; cat $D/raw; exec sleep 100", &too_long, "which is above the maximum"),
        ("cat > /dev/null; cat $D/raw", b"\x04\0\0\0\x01", "unexpected end"),
        ("cat > /dev/null; echo out of luck >&2; exit 3", b"", "exit status: 3: out of luck"),
        ("kill -9 $$", b"", "signal: 9"),
        ("exec > /dev/null; exec sleep 100", b"", "did not exit"),
    ];
    for (script, raw, expected) in cases {
        let dir = TestDir::new("workers");
        std::fs::write(dir.path().join("raw"), raw).unwrap();
        let error = reactor::run(async {
            let workers = workers(fake(&dir, script));
            workers.run(job()).await.expect_err(script).to_string()
        });
        assert!(error.contains(expected), "{script}: {error}");
    }
}

#[test]
fn the_error_names_a_missing_worker_program() {
    reactor::run(async {
        let error = workers("/nowhere/worker".into()).run(job()).await.unwrap_err();
        assert_eq!(error.to_string(), "start worker /nowhere/worker: no such file or directory");
    });
}

#[test]
fn a_large_job_and_a_large_log_do_not_block_each_other() {
    let dir = TestDir::new("workers");
    write_answers(&dir, &[Answer::Done(Outcome::Removed)]);
    let paths = (0..20_000).map(|number| PathBuf::from(format!("/some/long/path/{number}"))).collect();
    reactor::run(async {
        let script = "head -c 300000 /dev/zero >&2; cat > /dev/null; cat $D/answers";
        let outcome = workers(fake(&dir, script)).run(Job::RemoveTrees { paths }).await;
        assert!(outcome.is_ok(), "{outcome:?}");
    });
}

#[test]
fn concurrent_jobs_of_a_group_are_limited() {
    let dir = TestDir::new("workers");
    write_answers(&dir, &[Answer::Done(Outcome::Removed)]);
    reactor::run(async {
        // Removals run one by one: a concurrent one would find the directory.
        let workers = workers(fake(
            &dir,
            "cat > /dev/null; mkdir $D/one || exit 9; sleep 0.05; rmdir $D/one; cat $D/answers",
        ));
        let running: Vec<_> = (0..4)
            .map(|_| {
                let workers = workers.clone();
                reactor::spawn(async move { workers.run(job()).await })
            })
            .collect();
        for task in running {
            let outcome = task.await;
            assert!(outcome.is_ok(), "{outcome:?}");
        }
    });
}

#[test]
fn log_lines_are_complete_and_limited_however_they_are_split() {
    let text = format!("first\n{}\n\nlast", "x".repeat(5000));
    for step in [1, 7, 1000, text.len()] {
        let mut lines = LogLines::default();
        let mut seen = Vec::new();
        for piece in text.as_bytes().chunks(step) {
            lines.feed(piece, |line| seen.push(line.to_owned()));
        }
        assert_eq!(seen, ["first", &"x".repeat(1024), ""], "step {step}");
        assert_eq!(lines.last(), "last");
    }
    let mut out = Vec::new();
    out.write_all(b"\xff\n").unwrap();
    let mut lines = LogLines::default();
    lines.feed(&out, |line| assert_eq!(line, "\u{fffd}"));
}
