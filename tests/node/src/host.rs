//! The state of the machine: mounts, cgroups, links, processes, memory; and functions for waiting. The module
//! uses only /proc and /sys, so it does not depend on the tested code.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// Time limit for a condition that should hold at once; long, because test machines are shared.
const PATIENCE: Duration = Duration::from_secs(20);

/// The factor of time limits in a guest: `CORACLE_SLOWNESS`, its slowdown; otherwise 1.
pub fn slowness() -> u32 {
    static FACTOR: LazyLock<u32> = LazyLock::new(|| {
        let given = std::env::var("CORACLE_SLOWNESS").ok();
        given.map_or(1, |text| text.parse().expect("CORACLE_SLOWNESS is a number"))
    });
    *FACTOR
}

/// The time limit of waits: twenty seconds times [`slowness`].
pub fn patience() -> Duration {
    PATIENCE * slowness()
}

/// Whether nodes use the systemd cgroup driver, for which systemd must run this machine: `CORACLE_CGROUP_DRIVER`.
pub fn has_systemd_driver() -> bool {
    match std::env::var("CORACLE_CGROUP_DRIVER").as_deref() {
        Ok("systemd") => true,
        Ok("cgroupfs") | Err(_) => false,
        Ok(other) => panic!("CORACLE_CGROUP_DRIVER={other}: cgroupfs or systemd"),
    }
}

/// Interval of polling a condition.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Waits until `condition` returns a value; panics with `what` after [`patience`].
#[track_caller]
pub fn wait_for<T>(what: &str, condition: impl FnMut() -> Option<T>) -> T {
    let patience = patience();
    wait_within(patience, condition).unwrap_or_else(|| panic!("timeout after {patience:?}: {what}"))
}

/// Waits until `condition` returns true; panics with `what` after [`patience`].
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    wait_for(what, || condition().then_some(()));
}

/// Waits until `condition` returns a value, for at most `patience`.
pub fn wait_within<T>(patience: Duration, mut condition: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + patience;
    loop {
        if let Some(value) = condition() {
            return Some(value);
        }
        if Instant::now() > end {
            return None;
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// Repeats a system call that a suspension of the machine interrupted. The kernel restarts it itself unless the socket
/// has a time limit (signal(7)).
///
/// # Errors
/// Any other error of `call`.
pub fn uninterrupted<T>(mut call: impl FnMut() -> std::io::Result<T>) -> std::io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            outcome => return outcome,
        }
    }
}

/// Panics unless the process is root; all tests create kernel objects.
pub fn require_root() {
    assert!(
        nix::unistd::geteuid().is_root(),
        "these tests make namespaces, mounts and cgroups: run them as root"
    );
}

/// Mount points in this mount namespace whose path or source contains `needle`.
pub fn mounts(needle: &str) -> Vec<String> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    text.lines().filter(|line| line.contains(needle)).map(str::to_owned).collect()
}

/// Removes a directory into which a running daemon may write meanwhile; panics after [`patience`].
#[track_caller]
pub fn remove_while_written(directory: &Path) {
    wait_until("the directory is removed", || fs::remove_dir_all(directory).is_ok());
}

/// Mount points of the cgroup hierarchies.
pub fn cgroup_roots() -> Vec<PathBuf> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut roots: Vec<PathBuf> = text
        .lines()
        .filter_map(|line| {
            let (left, right) = line.split_once(" - ")?;
            right.starts_with("cgroup").then(|| PathBuf::from(left.split(' ').nth(4).unwrap_or("/")))
        })
        .collect();
    roots.sort();
    roots.dedup();
    roots
}

/// Directories below `parent` in every hierarchy, deepest first.
pub fn cgroups_below(parent: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for root in cgroup_roots() {
        directories(&root.join(parent.trim_start_matches('/')), &mut found);
    }
    found
}

/// Creates the cgroup that is configured as a kubelet's root, which must exist in every hierarchy.
pub fn make_kubelet_cgroups(parent: &str) {
    for root in cgroup_roots() {
        let folder = root.join(parent);
        fs::create_dir_all(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if let Ok(all) = fs::read_to_string(root.join(file))
                && folder.join(file).exists()
            {
                let _ = fs::write(folder.join(file), all); // v2 inherits
            }
        }
    }
}

/// The directory of cgroup `path` in the hierarchy that has `file`; `None` if no hierarchy has it.
pub fn cgroup_file(path: &str, file: &str) -> Option<PathBuf> {
    cgroup_roots()
        .into_iter()
        .map(|root| root.join(path.trim_start_matches('/')).join(file))
        .find(|file| file.exists())
}

/// All directories below `path`, children before parents; `path` itself is not included.
pub fn directories(path: &Path, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(path) else { return };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            directories(&entry.path(), found);
            found.push(entry.path());
        }
    }
}

/// Network links whose name is `prefix`, or begins with it and continues without a digit, and the ports of the bridge
/// with this name.
pub fn links(prefix: &str) -> Vec<String> {
    let Ok(entries) = fs::read_dir("/sys/class/net") else { return Vec::new() };
    let mut names: Vec<String> = entries
        .flatten()
        .filter(|entry| {
            let master = fs::read_link(entry.path().join("master")).unwrap_or_default();
            let master = master.file_name().map(|name| name.to_string_lossy().into_owned());
            let name = entry.file_name().to_string_lossy().into_owned();
            // Nodes are numbered: node 81 is not a part of node 8.
            let is_own = |rest: &str| !rest.starts_with(|next: char| next.is_ascii_digit());
            name.strip_prefix(prefix).is_some_and(is_own) || master.as_deref() == Some(prefix)
        })
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// A process, read from /proc.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// PID of the process in this PID namespace.
    pub pid: i32,
    /// Arguments of the process, joined by spaces.
    pub command: String,
}

/// Running processes whose command line contains `needle`; zombies have no command line.
pub fn processes(needle: &str) -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| {
            let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
            let command = fs::read(entry.path().join("cmdline")).ok()?;
            let command = String::from_utf8_lossy(&command).replace('\0', " ");
            command.contains(needle).then_some(Process { pid, command })
        })
        .collect()
}

/// Whether a process is in a cgroup below `parent`, in any hierarchy.
pub fn is_in_cgroup(pid: i32, parent: &str) -> bool {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let below = format!("{}/", parent.trim_end_matches('/'));
    text.lines().filter_map(|line| line.splitn(3, ':').nth(2)).any(|path| path.contains(&below))
}

/// The running child processes of a process.
pub fn children(pid: i32) -> Vec<i32> {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let text = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("children")).unwrap_or_default();
    let lists: Vec<String> = threads.flatten().map(text).collect();
    lists.iter().flat_map(|list| list.split_whitespace()).filter_map(|pid| pid.parse().ok()).collect()
}

/// Writes an executable script. A child process writes the file: if this process had it open for writing, a child that
/// another test starts at that moment would inherit the descriptor, and executing the script would fail (ETXTBSY).
pub fn write_program(path: &Path, script: &str) {
    let write = r#"printf %s "$1" >"$0" && chmod 755 "$0""#;
    let status = Command::new("/bin/sh").args(["-c", write]).arg(path).arg(script).status();
    assert!(status.is_ok_and(|status| status.success()), "{}", path.display());
}

/// The open descriptors of a process, each with what its link in /proc names; without those that are closed meanwhile.
pub fn open_files(pid: i32) -> Vec<(i32, PathBuf)> {
    let entries =
        fs::read_dir(format!("/proc/{pid}/fd")).unwrap_or_else(|error| panic!("process {pid}: {error}"));
    let number = |entry: &fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    entries.flatten().filter_map(|entry| Some((number(&entry)?, fs::read_link(entry.path()).ok()?))).collect()
}

/// Whether a process exists and is not a zombie.
pub fn is_alive(pid: i32) -> bool {
    let Ok(text) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    text.rsplit(')').next().is_some_and(|rest| !rest.trim_start().starts_with(['Z', 'X']))
}

/// Start time of a process in clock ticks since boot, which identifies it together with its PID.
pub fn start_time(pid: i32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    text.rsplit(')').next()?.split_whitespace().nth(19)?.parse().ok()
}

/// The value of the line `Key:` in /proc/PID/FILE, without its unit.
pub fn proc_value(pid: i32, file: &str, key: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/{file}")).ok()?;
    let line = text.lines().find(|line| line.split_once(':').is_some_and(|(name, _)| name == key))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// Policy, priority and, since Linux 6.12, slice in nanoseconds of a process, each on a line `KEY VALUE`.
pub fn scheduling(pid: i32) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/sched")).expect("CONFIG_SCHED_DEBUG");
    let is_wanted = |key: &str| ["policy", "prio", "se.slice"].contains(&key);
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    lines
        .filter(|(key, _)| is_wanted(key.trim()))
        .map(|(key, value)| format!("{} {}\n", key.trim(), value.trim()))
        .collect()
}

/// Number of CPUs on which a process may run.
pub fn processors(pid: i32) -> usize {
    processors_of(&fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives"))
}

/// Number of CPUs on which the process with this `/proc/PID/status` may run.
pub fn processors_of(status: &str) -> usize {
    let mask = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed:")).expect("a line");
    mask.chars().filter_map(|digit| digit.to_digit(16)).map(|digit| digit.count_ones() as usize).sum()
}

/// Proportional set size of a process in KiB.
pub fn pss_kib(pid: i32) -> u64 {
    proc_value(pid, "smaps_rollup", "Pss").unwrap_or(0)
}

/// Anonymous memory of a process in KiB.
pub fn anonymous_kib(pid: i32) -> u64 {
    proc_value(pid, "smaps_rollup", "Pss_Anon").unwrap_or(0)
}

/// CPU time of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuTime {
    /// CPU time of the process itself.
    pub own: Duration,
    /// CPU time of the children that it reaped.
    pub children: Duration,
}

impl CpuTime {
    /// Reads the CPU time from `/proc`, in steps of 10 ms; zero for a process that does not exist.
    pub fn of(pid: i32) -> CpuTime {
        /// Number of clock ticks per second, `sysconf(_SC_CLK_TCK)`; 100 in user space on all supported
        /// architectures.
        const TICKS_PER_SECOND: u64 = 100;
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let fields: Vec<u64> = text
            .rsplit(')')
            .next()
            .unwrap_or("")
            .split_whitespace()
            .skip(11)
            .take(4)
            .filter_map(|field| field.parse().ok())
            .collect();
        let time = |ticks: &[u64]| Duration::from_millis(ticks.iter().sum::<u64>() * 1000 / TICKS_PER_SECOND);
        let (own, children) = fields.split_at(fields.len() / 2);
        CpuTime { own: time(own), children: time(children) }
    }

    /// The difference to an earlier moment.
    pub fn since(self, before: CpuTime) -> CpuTime {
        CpuTime { own: self.own - before.own, children: self.children - before.children }
    }
}

/// CPU time of a process and the children that it reaped.
pub fn cpu_time(pid: i32) -> Duration {
    let CpuTime { own, children } = CpuTime::of(pid);
    own + children
}

/// Identity of a process's namespace, for example `net:[4026531840]`.
pub fn namespace(pid: i32, kind: &str) -> String {
    fs::read_link(format!("/proc/{pid}/ns/{kind}"))
        .map(|target| target.to_string_lossy().into_owned())
        .unwrap_or_default()
}
