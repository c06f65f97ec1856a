//! Signals, limits and scheduling of other processes, and large numbers of processes.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::errno::Errno;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::Pid;
use rustix::process::{Pid as ProcessId, Resource, Rlimit, prlimit, setpriority_process};

use super::{raw, trace, verdict};
use crate::see::Outcome;

/// Signals that end, stop or are handled by processes, the most dangerous last.
const SIGNALS: [Signal; 12] = [
    Signal::SIGCHLD,
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGALRM,
    Signal::SIGPIPE,
    Signal::SIGSTOP,
    Signal::SIGTERM,
    Signal::SIGSEGV,
    Signal::SIGKILL,
];

/// Sends every signal to PID 1 and to the runtime's processes, and limits them; prints `done` at the end.
pub(crate) fn all() -> Outcome {
    for pid in trace::others() {
        let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        if pid != 1 && !comm.starts_with("coracle") {
            continue;
        }
        limit(pid)?;
        for signal in SIGNALS {
            let sent = kill(Pid::from_raw(pid), signal);
            println!("saw signal {pid} {} {signal}: {sent:?}", comm.trim());
        }
    }
    println!("done");
    Ok(0)
}

/// Reduces the limits of a process: descriptors, memory, CPU time, stack, priority.
pub(crate) fn limit(pid: i32) -> Outcome {
    let Some(process) = ProcessId::from_raw(pid) else { return Err(format!("{pid} is no process")) };
    let zero = Rlimit { current: Some(0), maximum: Some(0) };
    for resource in [
        Resource::Nofile,
        Resource::Nproc,
        Resource::Fsize,
        Resource::Sigpending,
        Resource::Stack,
        Resource::Data,
        Resource::As,
        Resource::Cpu,
    ] {
        verdict(&format!("prlimit {resource:?} of {pid}"), prlimit(Some(process), resource, zero));
    }
    verdict(&format!("priority of {pid}"), setpriority_process(Some(process), 19));
    let mut one = CpuSet::new();
    one.set(0).map_err(|errno| format!("a set of CPUs: {errno}"))?;
    verdict(&format!("affinity of {pid}"), sched_setaffinity(Pid::from_raw(pid), &one));
    verdict(&format!("I/O class of {pid}"), raw::set_idle_io(pid));
    verdict(&format!("timer slack of {pid}"), fs::write(format!("/proc/{pid}/timerslack_ns"), "4000000000"));
    // Root may write these files of any process that it can see.
    for (file, text) in [("oom_score_adj", "1000"), ("autogroup", "19")] {
        println!("saw {file} of {pid}: {:?}", fs::write(format!("/proc/{pid}/{file}"), text));
    }
    Ok(0)
}

/// Leaves this many processes to be reaped by PID 1, one after the other.
pub(crate) fn orphans(count: u64) -> Outcome {
    for _ in 0..count {
        let child = Command::new("/proc/self/exe").args(["orphan", "0"]).stdout(Stdio::null()).spawn();
        let mut child = child.map_err(|error| format!("spawn: {error}"))?;
        child.wait().map_err(|error| format!("wait: {error}"))?;
    }
    println!("done");
    Ok(0)
}

/// Creates this many zombies and sleeps.
pub(crate) fn zombies(count: u64) -> Outcome {
    let mut made: Vec<Child> = Vec::new();
    for _ in 0..count {
        match Command::new("/proc/self/exe").arg("true").spawn() {
            Ok(child) => made.push(child),
            Err(error) => {
                println!("held zombie {}: {error}", made.len());
                break;
            }
        }
    }
    println!("saw zombies {}", made.len());
    crate::act::sleep_forever()
}

/// Creates as many processes as possible, prints their number, and sleeps.
pub(crate) fn crowd() -> Outcome {
    const ENOUGH: usize = 100_000;
    let mut made = Vec::new();
    while made.len() < ENOUGH {
        let mut command = Command::new("/proc/self/exe");
        match command.args(["sleep", "forever"]).stdout(Stdio::null()).spawn() {
            Ok(child) => made.push(child),
            Err(error) => {
                println!("saw crowd {}: {error}", made.len());
                break;
            }
        }
    }
    crate::act::sleep_forever()
}

/// Starts itself twice, then tries to start more for ever, in processes that only SIGKILL ends. The first process prints a line
/// when a start is refused.
pub(crate) fn bomb() -> Outcome {
    const GENERATION: &str = "PROBE_GENERATION";
    SigSet::all().thread_block().map_err(|error| format!("block signals: {error}"))?;
    let is_first = std::env::var_os(GENERATION).is_none();
    let mut is_said = false;
    let mut made: Vec<Child> = Vec::new();
    loop {
        let mut command = Command::new("/proc/self/exe");
        let child = command.args(["attack", "bomb"]).env(GENERATION, "later").stdout(Stdio::null()).spawn();
        match child {
            Ok(child) => made.push(child),
            Err(error) if is_first && !is_said => {
                println!("saw refused start: {error}");
                is_said = true;
            }
            Err(_) => {}
        }
        // Two at once, then about as many as end.
        if made.len() > 1 {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Opens as many descriptors as possible, prints their number, and sleeps.
pub(crate) fn descriptors() -> Outcome {
    let mut open = Vec::new();
    let error = loop {
        match fs::File::open("/dev/null") {
            Ok(file) => open.push(file),
            Err(error) => break error,
        }
    };
    println!("saw descriptors {}: {}", open.len(), Errno::from_raw(error.raw_os_error().unwrap_or(0)));
    crate::act::sleep_forever()
}
