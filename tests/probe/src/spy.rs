//! What a container that may trace (CAP_SYS_PTRACE) learns of new processes in its PID namespace, and what a
//! main process may do with its namespaces.

use std::fs;
use std::time::{Duration, Instant};

use nix::sched::CloneFlags;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::act;
use crate::see::Outcome;

/// Makes the parent process the tracer, lets a signal stop this process, then exits with `code`, or sleeps if it is `forever`.
pub(crate) fn traced(code: &str) -> Outcome {
    ptrace::traceme().map_err(|errno| format!("traceme: {errno}"))?;
    kill(Pid::this(), Signal::SIGCONT).map_err(|errno| format!("kill: {errno}"))?;
    println!("it continues");
    if code == "forever" { act::sleep_forever() } else { act::number(code).map(|code| code as u8) }
}

/// Traces each new process for this time, as early as possible, and prints its properties.
pub(crate) fn seize(milliseconds: &str) -> Outcome {
    let end = Instant::now() + Duration::from_millis(act::number(milliseconds)?);
    println!("watching");
    let mut last = std::process::id() as i32;
    let mut rounds = 0_u32;
    while Instant::now() < end {
        rounds = rounds.wrapping_add(1);
        if rounds.is_multiple_of(256) {
            // Missed processes; the last word of the file is the last PID of this namespace.
            let made = fs::read_to_string("/proc/loadavg").unwrap_or_default();
            last = made.split_whitespace().last().and_then(|pid| pid.parse().ok()).unwrap_or(last).max(last);
        }
        for pid in last + 1..last + 4 {
            let traced = Pid::from_raw(pid);
            if ptrace::seize(traced, Options::empty()).is_ok() {
                let _ = ptrace::interrupt(traced); // ESRCH: it has ended
                stopped(traced);
                describe(pid);
                let _ = ptrace::detach(traced, None);
                last = pid;
            }
        }
    }
    println!("over");
    Ok(0)
}

fn stopped(traced: Pid) {
    let end = Instant::now() + Duration::from_millis(100);
    let flags = WaitPidFlag::WNOHANG | WaitPidFlag::__WALL;
    while waitpid(traced, Some(flags)) == Ok(WaitStatus::StillAlive) && Instant::now() < end {}
}

/// Prints the parts of a process's status, root, memory and descriptors that another process can see.
pub(crate) fn describe(pid: i32) {
    // It may have ended meanwhile, for instance after the wait for its stop.
    let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else { return };
    for key in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "Seccomp", "Uid"] {
        let value = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        println!(
            "{pid} {key} {}",
            value.unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
        );
    }
    for (what, path) in [("root", "root/"), ("fd", "fd")] {
        match fs::read_dir(format!("/proc/{pid}/{path}")) {
            Ok(entries) => {
                for entry in entries.flatten() {
                    let leads = fs::read_link(entry.path()).unwrap_or_default();
                    println!("{pid} {what} {} {}", entry.file_name().to_string_lossy(), leads.display());
                }
            }
            Err(error) => println!("{pid} {what} error {error}"),
        }
    }
    for kind in ["mnt", "user", "pid"] {
        let link = fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap_or_default();
        println!("{pid} ns {kind} {}", link.display());
    }
}

/// Sends a signal and prints the result.
pub(crate) fn signal(pid: &str, signal: &str) -> Outcome {
    let signal: Signal = signal.parse().map_err(|error| format!("{signal}: {error}"))?;
    println!("{:?}", kill(Pid::from_raw(act::number(pid)? as i32), signal));
    Ok(0)
}

/// Enters new namespaces, including a user namespace without mappings, and sleeps.
pub(crate) fn apart() -> Outcome {
    let flags = CloneFlags::CLONE_NEWUSER
        | CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWIPC;
    nix::sched::unshare(flags).map_err(|error| format!("unshare: {error}"))?;
    println!("apart");
    act::sleep_forever()
}
