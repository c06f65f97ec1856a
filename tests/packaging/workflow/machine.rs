//! A fresh machine per job: the script `machine` beside this file, and what a runner of GitHub Actions adds to it, which
//! is the environment, the file for variables of later steps, and the directory of the clone.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::model::Pairs;
use crate::{Folder, run, said, workspace};

/// Time for a line without its own limit: twice what the longest takes on two busy cores.
const MINUTES: u64 = 40;

pub(crate) struct Machine {
    place: PathBuf,
    base: PathBuf,
    user: &'static str,
    home: &'static str,
    /// Variables that earlier steps wrote for later ones.
    written: Pairs,
}

impl Machine {
    /// Creates a machine below `folder` for this user: `runner`, `root` or `container`, which is root in a container.
    #[track_caller]
    pub(crate) fn new(folder: &Folder, user: &'static str) -> Machine {
        let base = workspace().join("target/tools/bare");
        assert!(base.is_dir(), "{}: `tests/tools/install workflow` makes it", base.display());
        let home = if user == "runner" { "/home/runner" } else { "/root" };
        let place = folder.path().join("machine");
        let machine = Machine { place, base, user, home, written: Pairs::new() };
        let output = run(&mut machine.script("make"));
        assert!(output.status.success(), "{}", said(&output));
        machine
    }

    fn script(&self, verb: &str) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "bash"]);
        command.arg(workspace().join("tests/packaging/workflow/machine")).arg(verb);
        command.args([&self.place, &self.base]).arg(self.user);
        command
    }

    /// Path on this machine of a path on the other, which must be below the home directory.
    pub(crate) fn outside(&self, path: &str) -> PathBuf {
        self.place.join("disk").join(path.trim_start_matches('/'))
    }

    /// The directory of the clone.
    pub(crate) fn clone_path(&self) -> String {
        format!("{}/work/coracle/coracle", self.home)
    }

    /// The directory for files of a job.
    pub(crate) fn temporary(&self) -> String {
        format!("{}/work/_temp", self.home)
    }

    /// Runs a script with these variables until its end or until it prints `until`; returns its output.
    ///
    /// # Errors
    /// The script failed or reached its time limit, with the end of its output.
    pub(crate) fn run(
        &mut self,
        script: &str,
        environment: &Pairs,
        until: Option<&str>,
        minutes: u64,
    ) -> Result<String, String> {
        fs::write(self.place.join("step"), script).expect("a file");
        let minutes = if minutes == 0 { MINUTES } else { minutes };
        let mut command = self.script("run");
        command.arg(self.clone_path()).env_clear().envs(self.environment(environment));
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("setpriv");
        let result = follow(child, until, Duration::from_secs(60 * minutes));
        let file = self.outside(&format!("{}/variables", self.temporary()));
        for line in fs::read_to_string(&file).unwrap_or_default().lines() {
            let (name, value) = line.split_once('=').expect("NAME=VALUE in GITHUB_ENV");
            self.written.push((name.to_owned(), value.to_owned()));
        }
        let _ = fs::remove_file(file);
        result
    }

    fn name(&self) -> &'static str {
        if self.user == "runner" { "runner" } else { "root" }
    }

    /// Variables of a step: those of a runner, those that reach registries here, and the step's own.
    fn environment(&self, own: &Pairs) -> Pairs {
        let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        let fixed = [
            ("HOME", self.home.to_owned()),
            ("USER", self.name().to_owned()),
            ("LOGNAME", self.name().to_owned()),
            ("SHELL", "/bin/bash".to_owned()),
            ("LANG", "C.UTF-8".to_owned()),
            ("PATH", format!("{}/.cargo/bin:{path}", self.home)),
            ("CI", "true".to_owned()),
            ("GITHUB_ACTIONS", "true".to_owned()),
            ("GITHUB_ENV", format!("{}/variables", self.temporary())),
            ("GITHUB_WORKSPACE", self.clone_path()),
            ("RUNNER_TEMP", self.temporary()),
        ];
        let fixed = fixed.into_iter().map(|(name, value)| (name.to_owned(), value));
        fixed.chain(of_registries()).chain(self.written.clone()).chain(own.clone()).collect()
    }
}

/// The variables with which clients of package registries reach them: certificates, proxies, indexes.
fn of_registries() -> Pairs {
    const PARTS: [&str; 6] = ["SSL_", "CERT", "CA_BUNDLE", "PROXY", "INDEX_URL", "SUMDB"];
    let is_one = |name: &str| PARTS.iter().any(|part| name.to_uppercase().contains(part));
    std::env::vars().filter(|(name, _)| is_one(name)).collect()
}

/// Prints and collects what a process says until it ends, prints `until` or reaches its limit; it ends in each case.
fn follow(mut child: Child, until: Option<&str>, limit: Duration) -> Result<String, String> {
    let (sender, lines) = mpsc::channel();
    let output = BufReader::new(child.stdout.take().expect("a pipe"));
    let reader = std::thread::spawn(move || {
        for line in output.split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).into_owned();
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    let end = Instant::now() + limit;
    let mut text = String::new();
    let problem = loop {
        match lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                println!("    {line}");
                text += &line;
                text.push('\n');
                if until.is_some_and(|until| line.contains(until)) {
                    break None;
                }
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {
                break Some(format!("killed after {} s", limit.as_secs()));
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                let status = child.wait().expect("it is our child");
                break (!status.success()).then(|| status.to_string());
            }
        }
    };
    drop(lines);
    let _ = child.kill();
    let _ = child.wait();
    let _ = reader.join();
    problem.map_or(Ok(text.clone()), |problem| Err(format!("{problem}:\n{}", tail(&text))))
}

/// The last lines of a text.
fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(150)..].join("\n")
}

/// Copies the files of a directory.
#[track_caller]
pub(crate) fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    let output = run(Command::new("cp").arg("-a").arg("--no-preserve=ownership").arg(from.join(".")).arg(to));
    assert!(output.status.success(), "{}", said(&output));
}
