//! Tests the cgroup driver with the real kernel. They need root and writable cgroups, and fail without them. They are
//! written for a hybrid host; with some of its mounts left out, the same host is used as one with only v1 (no cgroup2,
//! so the fallback for `cgroup.kill` is used) and as one with v2 without controllers.

use std::fs;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use coracle_sandbox::Error;
use coracle_sandbox::cgroup::{
    BUFFER_BYTES, CgroupPath, Cgroups, DeviceAccess, Entry, Limits, Resources, Version,
};
use nix::errno::Errno;

/// A parent cgroup for one test; removed on drop.
struct Scratch {
    cgroups: Cgroups,
    parent: CgroupPath,
}

impl Scratch {
    fn new(name: &str, keep: impl Fn(&str) -> bool) -> Self {
        let mountinfo = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
        let kept: Vec<&str> = mountinfo.lines().filter(|line| keep(line)).collect();
        let cgroups = Cgroups::from_mountinfo(&kept.join("\n"))
            .expect("cgroups: these tests need root on a host with them");
        let parent =
            CgroupPath::parse(&format!("/coracle-test-{name}-{}", std::process::id())).expect("path");
        Self { cgroups, parent }
    }

    fn container(&self) -> CgroupPath {
        self.parent.join("pod").and_then(|pod| pod.join("container")).expect("path")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = self.cgroups.kill(&self.parent);
        assert!(unmade(&self.cgroups, &self.parent), "left behind: {}", self.parent);
        assert!(leftovers(&self.parent).is_empty(), "{:?}", leftovers(&self.parent));
    }
}

/// Waits, with a timeout, until the cgroup can be removed.
fn unmade(cgroups: &Cgroups, path: &CgroupPath) -> bool {
    within_two_seconds(|| match cgroups.unmake(path) {
        Ok(()) => true,
        Err(error) => {
            assert_eq!(error.errno(), Some(Errno::EBUSY), "{error}");
            false
        }
    })
}

fn within_two_seconds(mut is_done: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        if is_done() {
            return true;
        }
        std::thread::yield_now();
    }
    false
}

/// All directories with this name in any hierarchy.
fn leftovers(path: &CgroupPath) -> Vec<PathBuf> {
    let mounts = fs::read_dir("/sys/fs/cgroup").expect("/sys/fs/cgroup");
    let inside = mounts.flatten().map(|mount| mount.path().join(&path.as_str()[1..]));
    inside.filter(|directory| directory.exists()).collect()
}

fn is_cgroup2(line: &str) -> bool {
    line.contains(" - cgroup2 ")
}

/// Starts a process and moves it into the cgroup from outside, through the files that a container's process would use.
fn sleeper(entry: &Entry) -> Child {
    let child = Command::new("sleep").arg("60").spawn().expect("sleep");
    join(&child, entry);
    child
}

fn join(child: &Child, entry: &Entry) {
    let mut files = entry.join_files.clone();
    files.extend(
        entry.into.iter().map(|fd| PathBuf::from(format!("/proc/self/fd/{}/cgroup.procs", fd.as_raw_fd()))),
    );
    assert!(!files.is_empty());
    for file in files {
        fs::write(&file, child.id().to_string())
            .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    }
}

/// The signal that ended the process.
fn ended_by(mut child: Child) -> Option<i32> {
    use std::os::unix::process::ExitStatusExt;
    let mut status = None;
    assert!(within_two_seconds(|| {
        status = child.try_wait().expect("wait");
        status.is_some()
    }));
    status.and_then(|status| status.signal())
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}")).trim().to_string()
}

/// The test: creates a cgroup, joins it, runs an exec, kills only the exec, kills the rest, and removes the cgroup.
fn whole_life(scratch: &Scratch) {
    let (cgroups, path) = (&scratch.cgroups, scratch.container());
    assert!(!cgroups.is_populated(&path).unwrap());
    cgroups.kill(&path).expect("killing what is not there is success");
    cgroups.unmake(&path).expect("unmaking what is not there is success");
    cgroups.make(&path).unwrap();
    cgroups.make(&path).expect("making it again changes nothing");
    let main = sleeper(&cgroups.entry(&path).unwrap());
    let exec = sleeper(&cgroups.make_exec(&path, &path.exec(7)).unwrap());
    assert!(cgroups.is_populated(&path).unwrap() && cgroups.is_populated(&path.exec(7)).unwrap());
    let error = cgroups.unmake(&path).unwrap_err();
    assert_eq!(error.errno(), Some(Errno::EBUSY), "{error}");

    // The attempt removed what it could; directories with processes remain.
    cgroups.kill(&path.exec(7)).unwrap();
    assert_eq!(ended_by(exec), Some(9));
    assert!(unmade(cgroups, &path.exec(7)));
    assert!(cgroups.is_populated(&path).unwrap(), "the container outlives its exec");

    cgroups.kill(&path).unwrap();
    assert_eq!(ended_by(main), Some(9));
    assert!(within_two_seconds(|| !cgroups.is_populated(&path).unwrap()));
    assert!(unmade(cgroups, &path));
    assert!(leftovers(&path).is_empty());
    assert!(!leftovers(&scratch.parent).is_empty(), "parents stay");
    assert!(matches!(
        cgroups.make_exec(&path, &path.exec(8)),
        Err(Error::Kernel { errno: Errno::ENOENT, .. })
    ));
}

#[test]
fn a_cgroup_is_created_used_and_removed_on_this_host_as_root() {
    let scratch = Scratch::new("life", |_| true);
    whole_life(&scratch);
    scratch.cgroups.make(&scratch.container()).unwrap();
    let entry = scratch.cgroups.entry(&scratch.container()).unwrap();
    let counter = entry.oom_counter.expect("the memory controller");
    assert!(read(&format!("/proc/self/fd/{}", counter.as_raw_fd())).contains("oom_kill 0"));
}

/// A host without cgroup2 has no `cgroup.kill`: processes are listed in the freezer hierarchy and killed one by one.
#[test]
fn a_cgroup_is_created_used_and_removed_on_v1_alone_as_root() {
    let scratch = Scratch::new("v1", |line| !is_cgroup2(line));
    assert_eq!(scratch.cgroups.version(), Version::V1);
    whole_life(&scratch);
    scratch.cgroups.make(&scratch.container()).unwrap();
    assert!(scratch.cgroups.entry(&scratch.container()).unwrap().into.is_none());
}

/// Tests cgroup v1 alone and with cgroup2. Regression: the process stayed, killed and frozen, until it was thawed.
#[test]
fn a_frozen_process_is_killed_too_as_root() {
    let is_any: fn(&str) -> bool = |_| true;
    let is_v1: fn(&str) -> bool = |line| !is_cgroup2(line);
    for (name, is_kept) in [("frozen", is_any), ("frozen-v1", is_v1)] {
        let scratch = Scratch::new(name, is_kept);
        if !scratch.cgroups.has_controller("freezer") {
            continue; // v2: `cgroup.kill` ends frozen processes.
        }
        let path = scratch.container();
        scratch.cgroups.make(&path).unwrap();
        let main = sleeper(&scratch.cgroups.entry(&path).unwrap());
        let file = format!("/sys/fs/cgroup/freezer{path}/freezer.state");
        fs::write(&file, "FROZEN").unwrap();
        assert!(within_two_seconds(|| read(&file) == "FROZEN"), "{name}");
        scratch.cgroups.kill(&path).unwrap();
        assert_eq!(ended_by(main), Some(9), "{name}");
        assert!(unmade(&scratch.cgroups, &path), "{name}");
    }
}

#[test]
fn a_cgroup_is_created_used_and_removed_on_v2_without_controllers_as_root() {
    let scratch = Scratch::new("v2", is_cgroup2);
    assert_eq!(scratch.cgroups.version(), Version::V2);
    whole_life(&scratch);
    let path = scratch.container();
    scratch.cgroups.make(&path).unwrap();
    let resources = Resources { memory_limit_bytes: 64 << 20, cpu_shares: 1024, ..Resources::default() };
    if !scratch.cgroups.has_controller("memory") {
        let warnings = scratch.cgroups.apply(&path, &resources.clone().into()).unwrap();
        let expected = [("cpu.weight", "cpu"), ("memory.max", "memory")].map(|(file, controller)| {
            format!("{file} not applied: this host has no cgroup controller {controller}")
        });
        assert_eq!(warnings, expected);
    }
    let unified = Resources { unified: vec![("memory.nope".into(), "1".into())], ..Resources::default() };
    let error = scratch.cgroups.apply(&path, &unified.into()).unwrap_err().to_string();
    assert!(error.contains("memory.nope"), "{error}");
}

#[test]
fn limits_are_applied_raised_lowered_and_removed_as_root() {
    let scratch = Scratch::new("limits", |_| true);
    if scratch.cgroups.version() == Version::V2 {
        return; // The files below are those of v1; unit tests cover the values of v2.
    }
    let path = scratch.container();
    let of_everybody = "/sys/fs/cgroup/cpuset/cgroup.clone_children";
    let before = read(of_everybody);
    scratch.cgroups.make(&path).unwrap();
    let file = |controller: &str, name: &str| read(&format!("/sys/fs/cgroup/{controller}{path}/{name}"));
    let mut resources = Resources {
        cpu_shares: 512,
        cpu_quota_us: 50_000,
        cpu_period_us: 100_000,
        memory_limit_bytes: 64 << 20,
        cpuset_cpus: "0".into(),
        unified: vec![("memory.high".into(), "1".into())],
        ..Resources::default()
    };
    let limits = Limits { pids_max: 100, ..Limits::from(resources.clone()) };
    let warnings = scratch.cgroups.apply_to_new(&path, &limits, &DeviceAccess::Only(vec![]), &[]).unwrap();
    assert_eq!(warnings, ["unified limits not applied: this host has cgroup v1"]);
    assert_eq!(file("cpu", "cpu.shares"), "512");
    assert_eq!(file("cpu", "cpu.cfs_quota_us"), "50000");
    assert_eq!(file("memory", "memory.limit_in_bytes"), (64 << 20).to_string());
    assert_eq!(file("memory", "memory.memsw.limit_in_bytes"), (64 << 20).to_string());
    assert_eq!(file("cpuset", "cpuset.cpus"), "0");
    assert_eq!(file("cpuset", "cpuset.mems"), read("/sys/fs/cgroup/cpuset/cpuset.mems"), "copied down");
    let parent = Path::new("/sys/fs/cgroup/cpuset").join(path.to_string().trim_start_matches('/'));
    let parent = parent.parent().expect("the cgroup has a parent").display().to_string();
    assert_eq!(read(&format!("{parent}/cgroup.clone_children")), "1", "the next child costs no write");
    assert_eq!(read(of_everybody), before, "the root's stays");
    let next = CgroupPath::parse(&format!("{path}-next")).unwrap();
    scratch.cgroups.make(&next).unwrap();
    for name in ["cpuset.cpus", "cpuset.mems"] {
        let (root, own) = ("/sys/fs/cgroup/cpuset", format!("/sys/fs/cgroup/cpuset{next}"));
        assert_eq!(read(&format!("{own}/{name}")), read(&format!("{root}/{name}")), "{name}");
    }
    scratch.cgroups.unmake(&next).unwrap();
    assert_eq!(file("pids", "pids.max"), "100");
    assert!(file("devices", "devices.list").lines().any(|line| line == "c 1:3 rwm"));
    assert!(!file("devices", "devices.list").contains("a *:* rwm"));

    resources.unified.clear();
    for mib in [128_i64, 32, 48] {
        (resources.memory_limit_bytes, resources.memory_swap_limit_bytes) = (mib << 20, (mib + 16) << 20);
        assert_eq!(scratch.cgroups.apply(&path, &resources.clone().into()).unwrap(), Vec::<String>::new());
        assert_eq!(file("memory", "memory.limit_in_bytes"), (mib << 20).to_string());
        assert_eq!(file("memory", "memory.memsw.limit_in_bytes"), ((mib + 16) << 20).to_string());
    }
    // The last write is refused, so the earlier ones are rolled back.
    let bad = Resources {
        cpu_shares: 700,
        memory_limit_bytes: 1 << 30,
        cpuset_cpus: "9999".into(),
        ..Resources::default()
    };
    let error = scratch.cgroups.apply(&path, &bad.into()).unwrap_err().to_string();
    assert!(error.contains("cpuset.cpus"), "{error}");
    assert_eq!(file("cpu", "cpu.shares"), "512");
    assert_eq!(file("memory", "memory.limit_in_bytes"), (48 << 20).to_string());
    // Remove the limits.
    let open = Resources { memory_limit_bytes: -1, cpu_quota_us: -1, ..Resources::default() };
    let open = Limits { pids_max: -1, ..Limits::from(open) };
    scratch.cgroups.apply(&path, &open).unwrap();
    assert_eq!(file("cpu", "cpu.cfs_quota_us"), "-1");
    assert_eq!(file("pids", "pids.max"), "max");
}

/// v1 compares the ratio of quota and period with the parent's at each write: half a CPU with half the period is
/// accepted only if the quota is written first.
#[test]
fn quota_and_period_change_together_below_a_parent_that_allows_no_more_as_root() {
    let scratch = Scratch::new("quota", |_| true);
    let path = scratch.container();
    scratch.cgroups.make(&path).unwrap();
    let half = |period| Resources { cpu_quota_us: period / 2, cpu_period_us: period, ..Resources::default() };
    scratch.cgroups.apply(&scratch.parent, &half(100_000).into()).unwrap();
    for period in [100_000, 50_000, 100_000, 20_000] {
        scratch
            .cgroups
            .apply(&path, &half(period).into())
            .unwrap_or_else(|error| panic!("{period}: {error}"));
    }
    let error = scratch.cgroups.apply(&path, &Resources { cpu_quota_us: 15_000, ..half(20_000) }.into());
    assert_eq!(error.unwrap_err().errno(), Some(Errno::EINVAL), "more than the parent has");
}

#[test]
fn usage_is_read_and_gone_with_the_cgroup_as_root() {
    let scratch = Scratch::new("usage", |_| true);
    let path = scratch.container();
    assert!(scratch.cgroups.gauge(&path).unwrap().is_none());
    scratch.cgroups.make(&path).unwrap();
    scratch
        .cgroups
        .apply(&path, &Resources { memory_limit_bytes: 64 << 20, ..Resources::default() }.into())
        .unwrap();
    let child = sleeper(&scratch.cgroups.entry(&path).unwrap());
    let gauge = scratch.cgroups.gauge(&path).unwrap().expect("it is there");
    let mut buffer = vec![0; BUFFER_BYTES];
    let usage = gauge.read(&mut buffer).unwrap().expect("it is there").usage;
    assert_eq!(usage.memory.and_then(|memory| memory.limit_bytes), Some(64 << 20));
    assert!(usage.memory.is_some_and(|memory| memory.working_set_bytes <= memory.usage_bytes));
    assert_eq!(usage.swap.and_then(|swap| swap.limit_bytes), Some(0));
    assert_eq!((usage.tasks, usage.cpu_ns.is_some()), (Some(1), true));
    scratch.cgroups.kill(&path).unwrap();
    assert_eq!(ended_by(child), Some(9));
    let end = Instant::now() + Duration::from_secs(10);
    while scratch.cgroups.unmake(&path).is_err() {
        assert!(Instant::now() < end, "the kernel removes it");
        std::thread::yield_now();
    }
    assert_eq!(gauge.read(&mut buffer).unwrap(), None, "its files are still open, and it is gone");
}

#[test]
fn an_error_of_an_unsupported_limit_names_the_file() {
    let scratch = Scratch::new("gone", |_| true);
    let resources = Resources { memory_limit_bytes: 64 << 20, ..Resources::default() };
    let error = scratch.cgroups.apply(&scratch.container(), &resources.into()).unwrap_err();
    assert!(
        matches!(&error, Error::Kernel { target, errno: Errno::ENOENT, .. } if target.contains("memory.")),
        "{error}"
    );
    assert!(Path::new("/sys/fs/cgroup").is_dir());
}

/// On v2 an eBPF program decides; processes get EPERM for other devices.
#[test]
fn devices_of_v2_are_restricted_by_a_program_as_root() {
    let scratch = Scratch::new("devices", is_cgroup2);
    let path = scratch.container();
    scratch.cgroups.make(&path).unwrap();
    let opens = |device: &str| {
        let script = format!("read go; (true < {device}) && echo yes");
        let mut shell = Command::new("sh");
        let shell = shell.args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = shell.stderr(Stdio::null()).spawn().expect("sh");
        join(&child, &scratch.cgroups.entry(&path).unwrap());
        child.stdin.take().expect("a pipe").write_all(b"go\n").expect("it waits");
        child.wait_with_output().expect("it ends").stdout == b"yes\n"
    };
    assert!(opens("/dev/zero") && opens("/dev/kmsg"), "nothing is restricted yet");
    let access = DeviceAccess::Only(Vec::new());
    let warnings = scratch.cgroups.apply_to_new(&path, &Limits::default(), &access, &[]).unwrap();
    assert!(warnings.iter().all(|warning| !warning.contains("devices")), "{warnings:?}");
    assert!(opens("/dev/zero") && !opens("/dev/kmsg"));
}
