//! Tracing of all processes in this PID namespace, and access to their files: what a process that may trace
//! (with CAP_SYS_PTRACE, or with the same IDs) can reach of the node. The relevant time is between the clone
//! of a process and its exec, so PIDs of new processes are guessed and traced before they are listed.

use std::fs;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc;
use nix::sched::{CloneFlags, setns};
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::see::Outcome;

/// Enough components to leave any directory.
const UP: &str = "../../../../../../../../../../../../";

/// How long a traced process may take to stop.
const STOP_LIMIT: Duration = Duration::from_millis(200);

/// `super_block.s_magic` of overlayfs: linux/magic.h.
const OVERLAY: u64 = 0x794c_7630;

/// Prefix of a canary that is not a file but a text to be searched for in memory.
const SECRET: &str = "memory:";

/// The attacker's own properties, for comparison.
struct Own {
    root: (u64, u64),
    bounding: u64,
    canaries: Vec<String>,
    /// Texts that other processes wrote, or have in their environment.
    secrets: Vec<String>,
    /// Device numbers of the mounts of this mount namespace.
    devices: Vec<u64>,
    /// The action on a traced process.
    way: Way,
}

impl Own {
    fn new(canaries: &[&str]) -> Result<Own, String> {
        let root = identity(Path::new("/")).ok_or("no root")?;
        let bounding = mask("self", "CapBnd").ok_or("no /proc/self/status")?;
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let places = mounts.lines().filter_map(|line| line.split(' ').nth(4));
        let devices = places.filter_map(|place| Some(identity(Path::new(place))?.0)).collect();
        let (secrets, canaries): (Vec<&str>, Vec<&str>) =
            canaries.iter().partition(|canary| canary.starts_with(SECRET));
        let secrets = secrets.iter().filter_map(|secret| secret.strip_prefix(SECRET));
        Ok(Own {
            root,
            bounding,
            canaries: canaries.into_iter().map(str::to_owned).collect(),
            secrets: secrets.map(str::to_owned).collect(),
            devices,
            way: Way::Look,
        })
    }
}

/// The action on a traced process.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Examine the traced process.
    Look,
    /// Let the traced process kill its process group.
    Kill,
    /// Let the traced process create a user namespace.
    Clone,
}

/// Device and inode of a path's target.
fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|about| (about.dev(), about.ino()))
}

/// A capability mask of /proc/PID/status.
fn mask(pid: &str, key: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

/// Traces each new process for this many seconds, as early as possible, and examines it while it is stopped.
pub(crate) fn race(seconds: u64, canaries: &[&str]) -> Outcome {
    chase(seconds, &Own::new(canaries)?)
}

/// Traces each new process like [`race`], and lets it kill its process group.
pub(crate) fn kill_groups(seconds: u64) -> Outcome {
    chase(seconds, &Own { way: Way::Kill, ..Own::new(&[])? })
}

/// Traces each new process like [`race`], and lets it create a user namespace.
pub(crate) fn clone_namespaces(seconds: u64) -> Outcome {
    chase(seconds, &Own { way: Way::Clone, ..Own::new(&[])? })
}

fn chase(seconds: u64, own: &Own) -> Outcome {
    let end = Instant::now() + Duration::from_secs(seconds);
    println!("watching");
    let mut next = std::process::id() as i32 + 1;
    let mut seized = 0;
    let mut rounds = 0_u32;
    while Instant::now() < end {
        let mut last = next + 3;
        rounds = rounds.wrapping_add(1);
        if rounds.is_multiple_of(512) {
            // Missed processes; the last PID of this namespace is the end.
            let made = fs::read_to_string("/proc/loadavg").unwrap_or_default();
            let made = made.split_whitespace().last().and_then(|word| word.parse().ok()).unwrap_or(0);
            last = last.max(made + 1);
        }
        let first = next;
        for pid in first..=last {
            if ptrace::seize(Pid::from_raw(pid), Options::empty()).is_ok() {
                seized += 1;
                hold(pid, own);
                next = pid + 1;
            } else if pid < last.saturating_sub(3) {
                next = next.max(pid + 1);
            }
        }
    }
    println!("saw seized {seized}");
    Ok(0)
}

/// Stops a traced process, examines it, and lets it continue.
fn hold(pid: i32, own: &Own) {
    let traced = Pid::from_raw(pid);
    // A process may end meanwhile.
    let _ = ptrace::interrupt(traced);
    let end = Instant::now() + STOP_LIMIT;
    let mut status = WaitStatus::StillAlive;
    while status == WaitStatus::StillAlive && Instant::now() < end {
        status = waitpid(traced, Some(WaitPidFlag::WNOHANG | WaitPidFlag::__WALL))
            .unwrap_or(WaitStatus::Exited(traced, 0));
    }
    let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let comm = comm.trim();
    match own.way {
        Way::Look => inspect(pid, own),
        Way::Kill => drop(kill_group(pid, comm)),
        Way::Clone if comm.starts_with("coracle") => match inject_clone(pid) {
            Ok(answer) if answer > 0 => println!("GOT a user namespace from {pid} {comm}: {answer}"),
            Ok(answer) => {
                println!("held user namespace from {pid} {comm}: {}", Errno::from_raw(-answer as i32))
            }
            Err(errno) => println!("saw no call of {pid} {comm}: {errno}"),
        },
        Way::Clone => {}
    }
    let _ = ptrace::detach(traced, None);
}

/// Examines all existing processes, traced or not.
pub(crate) fn look(canaries: &[&str]) -> Outcome {
    let own = Own::new(canaries)?;
    for pid in others() {
        match ptrace::seize(Pid::from_raw(pid), Options::empty()) {
            Ok(()) => {
                println!("saw seized {pid}");
                hold(pid, &own);
            }
            Err(errno) => {
                println!("held ptrace {pid}: {errno}");
                inspect(pid, &own);
            }
        }
        write_memory(pid);
    }
    Ok(0)
}

/// Tries to trace a process and its descendants, in the node's PID namespace.
pub(crate) fn hunt(top: i32) -> Outcome {
    let mut hunted = 0;
    for pid in others() {
        let mut ancestor = pid;
        while ancestor > 1 && ancestor != top {
            ancestor = parent(ancestor).unwrap_or(0);
        }
        if ancestor != top {
            continue;
        }
        hunted += 1;
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words = String::from_utf8_lossy(&words).replace('\0', " ");
        let words: Vec<&str> = words.split(' ').take(3).collect();
        let words = words.join(" ");
        match ptrace::seize(Pid::from_raw(pid), Options::empty()) {
            Ok(()) => println!("GOT traced {pid} {words}"),
            Err(errno) => println!("held trace of {pid} {words}: {errno}"),
        }
        for file in ["mem", "environ", "maps"] {
            // Only processes that may trace can open these.
            if fs::File::open(format!("/proc/{pid}/{file}")).is_ok() {
                println!("GOT {file} of {pid} {words}");
            }
        }
        if fs::read_dir(format!("/proc/{pid}/root/")).is_ok() {
            println!("GOT root of {pid} {words}");
        }
    }
    println!("saw hunted {hunted}");
    Ok(0)
}

/// The parent of a process.
fn parent(pid: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(')').next()?.split_whitespace().nth(1)?.parse().ok()
}

/// Disturbs each new process of the runtime for this many seconds: `stop` sends SIGSTOP, `hold` keeps its
/// pipes open, `lie` writes to them, `kill` kills it, `nice` gives its scheduler group the lowest priority.
pub(crate) fn disturb(way: &str, seconds: u64) -> Outcome {
    let end = Instant::now() + Duration::from_secs(seconds);
    println!("watching");
    let mut next = std::process::id() as i32 + 1;
    let mut kept = Vec::new();
    let mut disturbed = 0_u32;
    while Instant::now() < end {
        let first = next;
        for pid in first..first + 4 {
            let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            if comm.is_empty() {
                continue;
            }
            next = pid + 1;
            if !comm.starts_with("coracle") {
                continue;
            }
            disturbed += 1;
            match way {
                "stop" => drop(kill(Pid::from_raw(pid), Signal::SIGSTOP)),
                "kill" => drop(kill(Pid::from_raw(pid), Signal::SIGKILL)),
                "nice" => drop(fs::write(format!("/proc/{pid}/autogroup"), "19")),
                _ => {
                    let pipes = pipes(pid);
                    for mut pipe in pipes {
                        if way == "lie" {
                            // The size of a failure message, followed by bytes that look like a wait.
                            let _ = pipe.write_all(b"\x07\x00\x05\x00\x00\x00w");
                        }
                        kept.push(pipe);
                    }
                }
            }
        }
        // PIDs that were not observed.
        let made = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let made: i32 = made.split_whitespace().last().and_then(|word| word.parse().ok()).unwrap_or(0);
        next = next.max(made - 2);
    }
    println!("saw disturbed {disturbed} kept {}", kept.len());
    Ok(0)
}

/// Copies of a process's pipes and sockets except its standard streams.
fn pipes(pid: i32) -> Vec<fs::File> {
    let Some(process) = rustix::process::Pid::from_raw(pid) else { return Vec::new() };
    let Ok(process) = pidfd_open(process, PidfdFlags::empty()) else { return Vec::new() };
    let copy = |number| pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).ok();
    (3..32).filter_map(copy).map(fs::File::from).collect()
}

/// All processes of this PID namespace except this one, by PID.
pub(super) fn others() -> Vec<i32> {
    let own = std::process::id() as i32;
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let mut pids: Vec<i32> =
        entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.retain(|&pid| pid != own);
    pids.sort_unstable();
    pids
}

/// Examines a process: its identity, capabilities, descriptors and files.
fn inspect(pid: i32, own: &Own) {
    let name = pid.to_string();
    let exe = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let comm = comm.trim();
    let get = |key| mask(&name, key).unwrap_or(0);
    let (effective, bounding) = (get("CapEff") | get("CapPrm"), get("CapBnd"));
    println!("saw process {pid} {comm} exe={} eff={effective:x} bnd={bounding:x}", exe.display());
    // Another container may have more capabilities; a process that has not executed its program may not.
    if comm.starts_with("coracle") && bounding & !own.bounding != 0 {
        println!("GOT bounding {pid} {comm}: {:x}", bounding & !own.bounding);
    }
    if comm.starts_with("coracle") && effective & !own.bounding != 0 {
        println!("GOT capabilities {pid} {comm}: {:x}", effective & !own.bounding);
    }
    for kind in ["mnt", "net", "ipc", "uts", "pid", "user", "cgroup"] {
        if let Ok(link) = fs::read_link(format!("/proc/{pid}/ns/{kind}")) {
            println!("saw namespace {pid} {comm} {}", link.display());
        }
    }
    if fs::OpenOptions::new().write(true).open(format!("/proc/{pid}/exe")).is_ok() {
        println!("GOT exe {pid} {comm} for writing");
    }
    if let Ok(bytes) = fs::read(format!("/proc/{pid}/environ"))
        && comm.starts_with("coracle")
        && !bytes.is_empty()
    {
        println!("GOT environ {pid} {comm}: {} bytes", bytes.len());
    }
    if comm.starts_with("coracle") {
        memory(pid, comm, own);
    }
    for link in ["root", "cwd"] {
        directory(pid, comm, &PathBuf::from(format!("/proc/{pid}/{link}")), link, own);
    }
    descriptors(pid, comm, own);
}

/// Determines the process group of a process. A tracer of a process that is still in a group of the runtime
/// lets it call kill(0, SIGKILL), which signals all processes of that group in any PID namespace (kill(2));
/// the test checks who survives. Returns whether this was done.
fn kill_group(pid: i32, comm: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let [_, parent, group, session, ..] = fields[..] else { return false };
    println!("saw group {pid} {comm} parent={parent} group={group} session={session}");
    // A group without a number in this namespace includes processes outside. PID 1 is not affected.
    let is_done = group == "0" && pid != 1 && comm.starts_with("coracle") && inject_kill(pid).is_ok();
    if is_done {
        println!("saw group {pid} {comm} killed");
    }
    is_done
}

/// Lets a traced process that is stopped after a system call call kill(0, SIGKILL).
#[cfg(target_arch = "x86_64")]
fn inject_kill(pid: i32) -> nix::Result<()> {
    /// The instruction `syscall`, as the low bytes of a word.
    const SYSCALL: i64 = 0x050f;
    const BYTES: u64 = 2;
    let traced = Pid::from_raw(pid);
    let mut registers = ptrace::getregs(traced)?;
    let at = registers.rip.wrapping_sub(BYTES);
    if ptrace::read(traced, at as *mut libc::c_void)? & 0xffff != SYSCALL {
        return Err(Errno::EAGAIN);
    }
    registers.rip = at;
    registers.orig_rax = u64::MAX;
    registers.rax = libc::SYS_kill as u64;
    registers.rdi = 0;
    registers.rsi = Signal::SIGKILL as u64;
    ptrace::setregs(traced, registers)
}

/// Lets a process that was traced directly after its clone create a user namespace, with all registers as at
/// the clone: its filter must not permit the runtime what RuntimeDefault refuses. Returns the result of the
/// call.
#[cfg(target_arch = "x86_64")]
fn inject_clone(pid: i32) -> nix::Result<i64> {
    const SYSCALL: i64 = 0x050f;
    const BYTES: u64 = 2;
    let traced = Pid::from_raw(pid);
    let registers = ptrace::getregs(traced)?;
    let mut changed = registers;
    changed.rip = registers.rip.wrapping_sub(BYTES);
    if ptrace::read(traced, changed.rip as *mut libc::c_void)? & 0xffff != SYSCALL {
        return Err(Errno::EAGAIN);
    }
    changed.orig_rax = u64::MAX;
    changed.rax = libc::SYS_clone as u64;
    changed.rdi = (libc::CLONE_NEWUSER | libc::SIGCHLD) as u64;
    changed.rsi = 0;
    changed.rdx = 0;
    ptrace::setregs(traced, changed)?;
    // Enters and leaves the call; the process must not continue.
    for _ in 0..2 {
        ptrace::syscall(traced, None)?;
        let stopped = waitpid(traced, Some(WaitPidFlag::__WALL))?;
        if !matches!(
            stopped,
            WaitStatus::Stopped(..) | WaitStatus::PtraceSyscall(_) | WaitStatus::PtraceEvent(..)
        ) {
            return Err(Errno::ECHILD);
        }
    }
    let answer = ptrace::getregs(traced)?.rax as i64;
    if answer > 0 {
        let _ = kill(Pid::from_raw(answer as i32), Signal::SIGKILL);
    }
    ptrace::setregs(traced, registers)?;
    Ok(answer)
}

/// Not implemented for other architectures: the order of the steps is the same.
#[cfg(not(target_arch = "x86_64"))]
fn inject_clone(_: i32) -> nix::Result<i64> {
    Err(Errno::ENOSYS)
}

/// Not implemented for other architectures; see [`inject_clone`].
#[cfg(not(target_arch = "x86_64"))]
fn inject_kill(_: i32) -> nix::Result<()> {
    Err(Errno::ENOSYS)
}

/// Searches for texts of other processes in the memory of a process.
fn memory(pid: i32, comm: &str, own: &Own) {
    /// More than the memory of a monitor and its records.
    const BYTES_MAX: u64 = 4 << 20;
    if own.secrets.is_empty() {
        return;
    }
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let Ok(file) = fs::File::open(format!("/proc/{pid}/mem")) else { return };
    let mut searched = 0;
    for line in maps.lines() {
        let Some((start, rest)) = line.split_once('-') else { continue };
        let (Ok(start), Ok(end)) =
            (u64::from_str_radix(start, 16), u64::from_str_radix(rest.split(' ').next().unwrap_or(""), 16))
        else {
            continue;
        };
        let mut bytes = vec![0; end.saturating_sub(start).min(BYTES_MAX) as usize];
        // Some parts cannot be read, such as the kernel's own.
        if file.read_at(&mut bytes, start).is_err() {
            continue;
        }
        searched += bytes.len();
        for secret in &own.secrets {
            if bytes.windows(secret.len()).any(|part| part == secret.as_bytes()) {
                println!("GOT memory {pid} {comm}: {secret:?} at {start:x}");
            }
        }
    }
    println!("saw memory {pid} {comm}: {searched} bytes");
}

/// Whether a directory belongs to a container: its root, or one with the marker of the fixture image.
fn is_of_a_container(place: &Path, own: &Own) -> bool {
    let is_own = identity(place) == Some(own.root);
    let is_image = fs::symlink_metadata(place.join("etc/marker")).is_ok();
    is_own || is_image
}

/// Examines a directory of another process.
fn directory(pid: i32, comm: &str, place: &Path, what: &str, own: &Own) {
    for canary in &own.canaries {
        for way in [place.join(canary.trim_start_matches('/')), place.join(format!("{UP}{canary}"))] {
            if let Ok(bytes) = fs::read(&way) {
                println!("GOT canary by {} {comm}: {}", way.display(), String::from_utf8_lossy(&bytes));
            }
        }
    }
    let Ok(entries) = fs::read_dir(place) else { return };
    if is_of_a_container(place, own) {
        return;
    }
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names.truncate(12);
    let kind = rustix::fs::statfs(place).map_or(0, |about| about.f_type as u64);
    println!("saw {what} {pid} {comm} kind={kind:x} entries={}", names.join(","));
    let is_known = identity(place).is_some_and(|(device, _)| own.devices.contains(&device));
    if !names.is_empty() && (kind != OVERLAY) && !is_known {
        println!("GOT {what} {pid} {comm} kind={kind:x}: {}", names.join(" "));
    }
    for name in ["proc/sys/kernel/core_pattern", "proc/sysrq-trigger", "sys/kernel/uevent_helper"] {
        if fs::OpenOptions::new().write(true).open(place.join(name)).is_ok() {
            println!("GOT {what} {pid} {comm}: {name} for writing");
        }
    }
    let made = place.join("planted");
    if fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&made).is_ok() {
        println!("GOT {what} {pid} {comm}: a file made in it");
        let _ = fs::remove_file(&made);
    }
}

/// Examines and duplicates the descriptors of another process.
fn descriptors(pid: i32, comm: &str, own: &Own) {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        let number = entry.file_name().to_string_lossy().into_owned();
        let target = fs::read_link(&path).unwrap_or_default().display().to_string();
        let Ok(about) = fs::metadata(&path) else { continue };
        let kind = about.file_type();
        println!("saw fd {pid} {comm} {number} {target}");
        if kind.is_dir() {
            directory(pid, comm, &path, &format!("fd {number}"), own);
            if !own.devices.contains(&about.dev()) && !is_of_a_container(&path, own) {
                println!("GOT fd {pid} {comm} {number}: the directory {target}");
            }
        } else if target.starts_with("mnt:[") || target.starts_with("net:[") || target.starts_with("user:[") {
            println!("GOT fd {pid} {comm} {number}: the namespace {target}");
        } else if kind.is_file() && !own.devices.contains(&about.dev()) && !target.starts_with("/memfd:") {
            println!("GOT fd {pid} {comm} {number}: the file {target}");
        } else if kind.is_block_device() {
            println!("GOT fd {pid} {comm} {number}: the device {target}");
        }
        if comm.starts_with("coracle") {
            take(pid, comm, &number, &target);
        }
    }
}

/// Duplicates a descriptor of the runtime, whose sockets and pipes no other process may use.
fn take(pid: i32, comm: &str, number: &str, target: &str) {
    let Some(process) = rustix::process::Pid::from_raw(pid) else { return };
    let Ok(process) = pidfd_open(process, PidfdFlags::empty()) else { return };
    let Ok(raw) = number.parse() else { return };
    if pidfd_getfd(&process, raw, PidfdGetfdFlags::empty()).is_ok() {
        println!("saw taken {pid} {comm} {number} {target}");
    }
}

/// Opens the memory of a process of the runtime for writing.
fn write_memory(pid: i32) {
    let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let path = format!("/proc/{pid}/mem");
    if comm.starts_with("coracle") && fs::OpenOptions::new().write(true).open(path).is_ok() {
        println!("saw memory {pid} {} for writing", comm.trim());
    }
}

/// Enters a namespace of a process, or the one to which a descriptor refers, and prints its content.
pub(crate) fn enter(pid: &str, kind: &str) -> Outcome {
    let path = if kind.starts_with("fd/") {
        format!("/proc/{pid}/{kind}")
    } else {
        format!("/proc/{pid}/ns/{kind}")
    };
    let file = fs::File::open(&path).map_err(|error| format!("open {path}: {error}"))?;
    if let Err(errno) = setns(file.as_fd(), CloneFlags::empty()) {
        println!("held enter {path}: {errno}");
        return Ok(0);
    }
    let entries = fs::read_dir("/").map_err(|error| format!("read /: {error}"))?;
    let names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    let links = fs::read_to_string("/proc/self/net/dev").unwrap_or_default();
    let links: Vec<&str> = links.lines().filter_map(|line| Some(line.split_once(':')?.0.trim())).collect();
    let host = nix::unistd::gethostname().unwrap_or_default();
    println!(
        "saw entered {path} root={} links={} hostname={}",
        names.join(","),
        links.join(","),
        host.to_string_lossy()
    );
    Ok(0)
}

/// Starts this program again for an attack that changes its own namespaces.
pub(super) fn again(words: &[&str]) {
    let output = Command::new("/proc/self/exe").args(words).output();
    match output {
        Ok(output) => {
            print!("{}", String::from_utf8_lossy(&output.stdout));
            print!("{}", String::from_utf8_lossy(&output.stderr));
        }
        Err(error) => println!("held start again: {error}"),
    }
}

/// Flags for open(2) that prevent blocking and controlling terminals.
pub(super) const CAREFUL: i32 = libc::O_NONBLOCK | libc::O_NOCTTY;
