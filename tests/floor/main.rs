//! The floor: the kernel's work for one pod with one container, in one process without a daemon, a protocol or
//! a plan. `make bench` runs it between coracle's pods and prints each row as a ratio to it, so that machines
//! can be compared. It uses no code of coracle.
//!
//! It makes the same kernel objects: cgroups in every hierarchy, device rules, a process that holds the namespaces, an overlay of one
//! layer, the mounts of the request, the new root, a keyring, capabilities, exec of the probe, and on a bridge veth pair, address, route
//! and nftables rule. One record is synced (two fsync; coracle syncs three records, on a bridge four, and the directories of removals).
//! Left out: gRPC and the client, exec of a monitor, logs, exit records, leases of addresses, verification of the mounts, the second
//! process of an exec, device rules on cgroup v2, and what the requests do not ask for (seccomp, masked paths, volumes).
//!
//! `coracle-floor FOLDER PROBE` creates its objects below FOLDER, reads one request per line from standard
//! input and answers each with one line; it removes everything at the end of the input.
//!
//! ```text
//!   life host|bridge    UP EXEC EXEC EXEC DOWN CPU, in nanoseconds
//!   check host|bridge   ok, or the floor ends with an error
//! ```

mod base;
mod cgroups;
mod check;
mod container;
mod netlink;
mod pod;
mod raw;

use std::fmt::Display;
use std::io::{BufRead, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

use crate::base::Base;
use crate::pod::Pod;

/// Number of execs of a measured pod.
const EXECS: usize = 3;
/// Length of the slices that coracle requests from the scheduler, in nanoseconds: without the same request the
/// floor would wait longer for a CPU on a busy machine.
const SLICE: u64 = 100_000;

/// A result with the error as text.
type Outcome<T> = Result<T, String>;

/// Whose network a pod uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Network {
    /// The network of the node.
    Host,
    /// A network namespace of the pod, connected to the bridge.
    Bridge,
}

/// An error with the operation that failed.
fn failed(what: &str, error: impl Display) -> String {
    format!("{what}: {error}")
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [folder, probe] = &words[..] else {
        eprintln!("coracle-floor FOLDER PROBE");
        return ExitCode::FAILURE;
    };
    match serve(Path::new(folder), Path::new(probe)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("floor: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(folder: &Path, probe: &Path) -> Outcome<()> {
    raw::set_slice(SLICE)?;
    let base = Base::new(folder, probe)?;
    let mut number = 0;
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|error| failed("read a request", error))?;
        let (verb, network) = line.split_once(' ').unwrap_or_default();
        let network = match network {
            "host" => Network::Host,
            "bridge" => Network::Bridge,
            _ => return Err(format!("unknown request: {line}")),
        };
        let answer = match verb {
            "life" => life(&base, network, number)?,
            "check" => check::programs(&base, network, number).map(|()| "ok".to_owned())?,
            _ => return Err(format!("unknown request: {line}")),
        };
        number += 2;
        let mut output = std::io::stdout().lock();
        let written = writeln!(output, "{answer}").and_then(|()| output.flush());
        written.map_err(|error| failed("answer", error))?;
    }
    Ok(())
}

/// Measures one pod; returns the line of numbers.
fn life(base: &Base, network: Network, number: u32) -> Outcome<String> {
    let mut clock = Clock::default();
    let mut pod = clock.time(|| Pod::up(base, network, number, &["sleep", "forever"]))?;
    check::pod(base, network, &pod)?;
    for _ in 0..EXECS {
        clock.time(|| pod.exec(&["true"]))?;
    }
    clock.time(|| pod.down())?;
    let times = clock.times.iter().chain([&clock.cpu]).map(|time| time.as_nanos().to_string());
    Ok(times.collect::<Vec<_>>().join(" "))
}

/// Adds up the time and CPU time of calls.
#[derive(Default)]
struct Clock {
    times: Vec<Duration>,
    cpu: Duration,
}

impl Clock {
    fn time<T>(&mut self, call: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
        let (cpu, begin) = (cpu_time()?, Instant::now());
        let value = call()?;
        self.times.push(begin.elapsed());
        self.cpu += cpu_time()?.saturating_sub(cpu);
        Ok(value)
    }
}

/// CPU time of this process and the children it has reaped.
fn cpu_time() -> Outcome<Duration> {
    let mut sum = Duration::ZERO;
    for who in [UsageWho::RUSAGE_SELF, UsageWho::RUSAGE_CHILDREN] {
        let usage = getrusage(who).map_err(|errno| failed("read CPU time", errno))?;
        for time in [usage.user_time(), usage.system_time()] {
            sum += Duration::from_micros(time.num_microseconds() as u64);
        }
    }
    Ok(sum)
}
