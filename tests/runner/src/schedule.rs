//! Runs steps: each when those before it are done and its lane has room, and reports them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::harness::{self, Program};
use crate::results::Results;
use crate::steps::{self, Lane, Step, Threads, Tier, Work};
use crate::table;

/// Directory with the output of each step.
const LOGS: &str = "target/test-logs";

/// End of a step.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) step: Step,
    pub(crate) results: Results,
    pub(crate) took: Duration,
    pub(crate) is_good: bool,
}

/// The run of a tier.
pub(crate) struct Run {
    tier: Tier,
    waiting: Vec<Step>,
    running: Vec<Step>,
    ended: Vec<Outcome>,
    /// Test programs that [`Work::BuildTests`] made.
    programs: Arc<Mutex<Vec<Program>>>,
    begin: Instant,
}

impl Lane {
    /// Number of its steps that run at once.
    fn room(self) -> usize {
        match self {
            Lane::Install | Lane::Cargo | Lane::Go | Lane::Guest => 1,
            Lane::Suite => 2,
        }
    }

    /// The time limit of a step, after which it is killed and has failed. Guests are emulated, and a job of the
    /// workflow builds everything from nothing.
    fn limit(self) -> &'static str {
        match self {
            Lane::Install | Lane::Cargo | Lane::Go | Lane::Suite => "60m",
            Lane::Guest => "4h",
        }
    }

    /// The nice value of its processes: what tests wait for in real time goes first.
    fn nice(self) -> &'static str {
        match self {
            Lane::Install | Lane::Suite => "0",
            Lane::Cargo => "5",
            Lane::Guest => "8",
            Lane::Go => "10",
        }
    }
}

impl Run {
    pub(crate) fn new(tier: Tier, parts: &[&str]) -> Run {
        let waiting = steps::of(tier, parts);
        Run {
            tier,
            waiting,
            running: Vec::new(),
            ended: Vec::new(),
            programs: Arc::default(),
            begin: Instant::now(),
        }
    }

    /// Runs everything and prints the times and the sum.
    pub(crate) fn finish(mut self) -> ExitCode {
        fs::create_dir_all(LOGS).expect("a directory for the output of steps");
        let before = self.snapshot();
        let (done, outcomes) = mpsc::channel();
        while !(self.waiting.is_empty() && self.running.is_empty()) {
            self.start_what_can(&done);
            if self.running.is_empty() {
                // The rest cannot run, because what it needs has failed.
                break;
            }
            let outcome = outcomes.recv().expect("a step that runs sends its outcome");
            self.running.retain(|step| step.name != outcome.step.name);
            self.report(&outcome);
            self.ended.push(outcome);
        }
        self.sum(before)
    }

    /// The objects of tests on this machine. `make check` leaves nothing that could be compared.
    fn snapshot(&self) -> Option<String> {
        if self.tier == Tier::Check {
            return None;
        }
        // What earlier runs left when they were interrupted.
        let _ = Command::new("tests/tools/sweep").status();
        let output = Command::new("tests/tools/snapshot").output().expect("tests/tools/snapshot");
        Some(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn start_what_can(&mut self, done: &mpsc::Sender<Outcome>) {
        let mut at = 0;
        while at < self.waiting.len() {
            let step = self.waiting[at];
            if let Some(failed) = self.failed_before(&step) {
                self.waiting.remove(at);
                println!("-- {}: not run, because {failed} failed", step.name);
                let (results, took) = (Results { failed: 1, ..Results::default() }, Duration::ZERO);
                self.ended.push(Outcome { step, results, took, is_good: false });
                at = 0;
            } else if self.can_start(&step) {
                self.waiting.remove(at);
                self.running.push(step);
                let (done, programs) = (done.clone(), Arc::clone(&self.programs));
                std::thread::spawn(move || {
                    let outcome = execute(step, &programs);
                    done.send(outcome).expect("the receiver waits for every step");
                });
            } else {
                at += 1;
            }
        }
        if self.running.is_empty() && !self.waiting.is_empty() {
            let names: Vec<_> = self.waiting.iter().map(|step| step.name).collect();
            panic!("steps that wait for each other: {names:?}");
        }
    }

    fn failed_before(&self, step: &Step) -> Option<&'static str> {
        let mut failed =
            self.ended.iter().filter(|outcome| !outcome.is_good && outcome.step.is_preparation());
        failed.find(|outcome| step.after.contains(&outcome.step.name)).map(|outcome| outcome.step.name)
    }

    fn can_start(&self, step: &Step) -> bool {
        let used = self.running.iter().filter(|other| other.lane == step.lane).count();
        let is_pending = |name: &str| {
            let mut pending = self.waiting.iter().chain(&self.running);
            pending.any(|other| other.name == name)
        };
        used < step.lane.room() && !step.after.iter().any(|name| is_pending(name))
    }

    fn report(&self, outcome: &Outcome) {
        let Outcome { step, results, took, is_good } = outcome;
        let mark = if *is_good { "ok" } else { "FAILED" };
        let tests = match results.programs {
            0 => String::new(),
            _ => format!(
                ", {} passed, {} failed, {} left out",
                results.passed, results.failed, results.left_out
            ),
        };
        let (took, at) = (took.as_secs_f64(), self.begin.elapsed().as_secs());
        println!("{:>4}:{:02}  {mark:6} {} ({took:.1} s{tests})", at / 60, at % 60, step.name);
        if !is_good {
            println!("{}", excerpt(&fs::read_to_string(log_of(step)).unwrap_or_default()));
            println!("-- the whole output of {} is in {}", step.name, log_of(step).display());
        }
    }

    fn sum(mut self, before: Option<String>) -> ExitCode {
        let order = |outcome: &Outcome| steps::STEPS.iter().position(|step| step.name == outcome.step.name);
        self.ended.sort_by_key(order);
        print!("\n{}", table::of_run(&self.ended, self.begin.elapsed()));
        let mut total = Results::default();
        for outcome in &self.ended {
            total.add(outcome.results.clone());
        }
        if self.tier == Tier::Check && !harness::is_root() {
            println!(
                "\n{} tests were left out: they need root, or what `make test` installs.",
                total.left_out
            );
        }
        if let Some(before) = before {
            let is_clean = self.is_as_before(&before);
            total.passed += u32::from(is_clean);
            total.failed += u32::from(!is_clean);
        }
        if std::env::var_os("UPDATE").is_some_and(|value| !value.is_empty()) {
            table::update(self.tier, &self.ended, self.begin.elapsed());
        }
        println!("\n{} passed, {} failed", total.passed, total.failed);
        ExitCode::from(u8::from(total.failed > 0))
    }

    fn is_as_before(&self, before: &str) -> bool {
        let output = Command::new("tests/tools/snapshot").output().expect("tests/tools/snapshot");
        let after = String::from_utf8_lossy(&output.stdout);
        if before == after {
            return true;
        }
        println!("\nThe machine is not as it was before. Before:\n{before}After:\n{after}");
        false
    }
}

/// The part of a failed step's output that says why: the failures of each test program, otherwise the end.
fn excerpt(output: &str) -> String {
    const BYTES: usize = 16 << 10;
    let mut failures = String::new();
    for program in output.split("\ntest result: ") {
        if let Some((_, text)) = program.split_once("\nfailures:\n") {
            failures += text;
        }
    }
    if !failures.is_empty() {
        return failures;
    }
    let from = output.len().saturating_sub(BYTES);
    let from = (from..output.len()).find(|at| output.is_char_boundary(*at)).unwrap_or(0);
    output[from..].to_owned()
}

fn log_of(step: &Step) -> PathBuf {
    Path::new(LOGS).join(format!("{}.log", step.name.replace(' ', "-")))
}

/// Runs a step to its end.
fn execute(step: Step, programs: &Mutex<Vec<Program>>) -> Outcome {
    let begin = Instant::now();
    let ended = match step.work {
        Work::Line(line) => run_line(&step, line),
        Work::BuildTests => build_tests(&step, programs),
        Work::Units => run_units(&step, &programs.lock().expect("no thread panics with it").clone()),
        Work::Suite { name, threads, arguments } => {
            let programs = programs.lock().expect("no thread panics with it").clone();
            run_suite(&step, &programs, name, threads, arguments)
        }
    };
    let (results, is_good) = ended.unwrap_or_else(|error| {
        let _ = fs::write(log_of(&step), format!("{}: {error}\n", step.name));
        (Results { failed: 1, ..Results::default() }, false)
    });
    Outcome { step, results, took: begin.elapsed(), is_good }
}

type Ended = io::Result<(Results, bool)>;

/// A command with the priority of its lane and the step's output. Clients that tests interrupt would ignore it if this program was
/// started in the background of a shell.
fn lower(step: &Step, command: &Command, log: &File) -> io::Result<Command> {
    let mut niced = Command::new("env");
    niced
        .args([
            "--default-signal=INT,QUIT",
            "timeout",
            "--foreground",
            "--signal=KILL",
            step.lane.limit(),
            "nice",
            "-n",
            step.lane.nice(),
        ])
        .arg(command.get_program())
        .args(command.get_args());
    if let Some(directory) = command.get_current_dir() {
        niced.current_dir(directory);
    }
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => niced.env(name, value),
            // One that the command must not have.
            None => niced.env_remove(name),
        };
    }
    niced.stdin(Stdio::null());
    harness::into_file(&mut niced, log)?;
    Ok(niced)
}

fn run_line(step: &Step, line: &str) -> Ended {
    let log = File::create(log_of(step))?;
    let mut bash = Command::new("bash");
    bash.args(["-c", line]);
    let status = lower(step, &bash, &log)?.status()?;
    let results = Results::read(&fs::read_to_string(log_of(step))?);
    let is_good = status.success() && results.failed == 0;
    // A command without results of its own is one test, unless it only prepares others.
    let is_one = results.programs == 0 && !step.is_preparation();
    let (passed, failed) = (u32::from(is_one && is_good), u32::from(!is_good && results.failed == 0));
    Ok((Results { passed: results.passed + passed, failed: results.failed + failed, ..results }, is_good))
}

fn build_tests(step: &Step, programs: &Mutex<Vec<Program>>) -> Ended {
    let log = File::create(log_of(step))?;
    let mut cargo = Command::new("cargo");
    cargo.args(harness::BUILD);
    let mut cargo = lower(step, &cargo, &log)?;
    let output = cargo.stdout(Stdio::piped()).spawn()?.wait_with_output()?;
    *programs.lock().expect("no thread panics with it") =
        Program::all(&String::from_utf8_lossy(&output.stdout));
    let is_good = output.status.success();
    Ok((Results { failed: u32::from(!is_good), ..Results::default() }, is_good))
}

/// Runs every test program that is no suite, two at a time.
fn run_units(step: &Step, programs: &[Program]) -> Ended {
    let waiting: Mutex<Vec<&Program>> =
        Mutex::new(programs.iter().filter(|program| !program.is_suite()).collect());
    let skip = harness::left_out();
    // Tests that fail leave their directories here.
    let scratch = std::env::temp_dir().join(format!("coracle-{}", std::process::id()));
    fs::create_dir_all(&scratch)?;
    let outputs = Mutex::new(BTreeMap::new());
    let one_after_the_other = || -> io::Result<()> {
        loop {
            let Some(program) = waiting.lock().expect("no thread panics with it").pop() else {
                return Ok(());
            };
            let own = log_of(step).with_extension(format!("{}.log", outputs_name(program)));
            let log = File::create(&own)?;
            let mut command = program.command(Threads::Waiting, &skip);
            let status = lower(step, command.env("TMPDIR", &scratch), &log)?.status()?;
            let text = fs::read_to_string(&own)?;
            outputs.lock().expect("no thread panics with it").insert(own, (text, status.success()));
        }
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(one_after_the_other);
        one_after_the_other().and(other.join().expect("it does not panic"))
    })?;
    fs::remove_dir_all(&scratch)?;
    let mut whole = String::new();
    let (mut results, mut is_good) = (Results::default(), true);
    for (path, (text, is_success)) in outputs.into_inner().expect("no thread panics with it") {
        let own = Results::read(&text);
        is_good &= is_success && own.failed == 0;
        // A program that died has no result.
        results.failed += u32::from(!is_success && own.failed == 0);
        results.add(own);
        whole += &format!("== {}\n{text}", path.display());
        fs::remove_file(path)?;
    }
    fs::write(log_of(step), whole)?;
    Ok((results, is_good))
}

fn outputs_name(program: &Program) -> String {
    program.path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn run_suite(step: &Step, programs: &[Program], name: &str, threads: Threads, arguments: &[&str]) -> Ended {
    let Some(program) = programs.iter().find(|program| program.name == name) else {
        return Err(io::Error::other(format!("cargo built no suite {name}")));
    };
    let log = File::create(log_of(step))?;
    let mut command = program.command(threads, &[arguments, &harness::left_out()].concat());
    steps::set_environment(&mut command);
    let status = lower(step, &command, &log)?.status()?;
    let results = Results::read(&fs::read_to_string(log_of(step))?);
    let is_good = status.success() && results.failed == 0 && results.passed > 0;
    let died = u32::from(!is_good && results.failed == 0);
    // What the words of the table leave out belongs to another step.
    let left_out = if arguments.is_empty() { results.left_out } else { 0 };
    Ok((Results { left_out, failed: results.failed + died, ..results }, is_good))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_excerpt_has_the_failures_of_all_programs() {
        let output = "test a ... ok\n\nfailures:\n\n---- b stdout ----\nno\n\nfailures:\n    b\n\ntest result: FAILED. 1 passed\n\
            test c ... ok\ntest result: ok. 1 passed\n";
        assert_eq!(excerpt(output), "\n---- b stdout ----\nno\n\nfailures:\n    b\n");
        assert_eq!(excerpt("error: no such file\n"), "error: no such file\n");
    }
}
