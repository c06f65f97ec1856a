//! Runs the program `coracle-floor` (tests/floor), which sets up, uses and removes pods without coracle.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use crate::{host, node, request};

/// A running floor with its own directory, cgroups and bridge.
pub struct Floor {
    folder: PathBuf,
    process: Child,
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

/// Times of one pod.
#[derive(Debug, Clone)]
pub struct Life {
    /// Time until the container's program is executed.
    pub up: Duration,
    /// Time of each exec.
    pub execs: Vec<Duration>,
    /// Time until everything is removed.
    pub down: Duration,
    /// CPU time of all processes from the pod's start to its removal.
    pub cpu: Duration,
}

impl Floor {
    /// Starts `program`, which Cargo names in `CARGO_BIN_EXE_coracle-floor`.
    pub fn start(program: &Path) -> Floor {
        host::require_root();
        let base = node::base();
        std::fs::create_dir_all(&base).expect("a directory for nodes");
        let folder = base.join(format!("floor-{}-{}", std::process::id(), request::fresh()));
        let mut process = Command::new(program)
            .arg(&folder)
            .arg(node::binaries().join("probe"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", program.display()));
        let requests = process.stdin.take();
        let answers = BufReader::new(process.stdout.take().expect("its output is piped"));
        Floor { folder, process, requests, answers }
    }

    /// The directory of its files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Process id, which is a part of the names of its objects.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Runs one pod on this network, `host` or `bridge`; returns its times.
    pub fn life(&mut self, network: &str) -> Life {
        let answer = self.ask(&format!("life {network}"));
        let mut times: Vec<Duration> = answer
            .split_whitespace()
            .map(|word| Duration::from_nanos(word.parse().expect("a number of nanoseconds")))
            .collect();
        let (cpu, down) = (times.pop().expect("CPU time"), times.pop().expect("time of the teardown"));
        Life { up: times.remove(0), execs: times, down, cpu }
    }

    /// Runs pods whose programs print what they see. The floor compares it with what they should see and ends
    /// with an error if it differs.
    pub fn check(&mut self, network: &str) {
        assert_eq!(self.ask(&format!("check {network}")), "ok");
    }

    fn ask(&mut self, request: &str) -> String {
        let requests = self.requests.as_mut().expect("it has not been stopped");
        writeln!(requests, "{request}").expect("the floor reads requests");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("the floor answers");
        assert!(!answer.is_empty(), "the floor ended at {request:?}; its error is above");
        answer.trim().to_owned()
    }

    /// Ends the program, which removes everything.
    pub fn stop(mut self) {
        drop(self.requests.take());
        let status = self.process.wait().expect("it is our child");
        assert!(status.success(), "the floor ended with {status}");
    }
}

impl Drop for Floor {
    fn drop(&mut self) {
        // The end of its input ends it; after a failure it has ended already.
        drop(self.requests.take());
        let _ = self.process.wait();
    }
}
