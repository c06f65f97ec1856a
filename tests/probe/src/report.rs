//! All that a process in a container can see of what its runtime made, one fact a line: `SECTION NAME: VALUE`. For the comparison
//! of runtimes (`make compare`), which compares the values of the same names.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::stat::{Mode, SFlag, major, makedev, minor, mknod};

use crate::attack;
use crate::see::Outcome;

/// Number of the last system call that is made: that of Linux 6.18.
const CALL_MAX: u32 = 470;

/// The last address family of Linux 6.18: AF_MCTP.
const FAMILY_MAX: i32 = 45;

/// Calls with an effect on the whole node, or that return twice: `sync`, `vhangup`, `fork`, `vfork`; `socket` has facts of its own.
#[cfg(target_arch = "x86_64")]
const LEFT_OUT: [u32; 5] = [162, 153, 57, 58, 41];
#[cfg(not(target_arch = "x86_64"))]
const LEFT_OUT: [u32; 3] = [81, 58, 198];

/// Character devices: Documentation/admin-guide/devices.txt.
const CHARACTER: [(u64, u64); 33] = [
    (1, 1),
    (1, 2),
    (1, 3),
    (1, 4),
    (1, 5),
    (1, 7),
    (1, 8),
    (1, 9),
    (1, 11),
    (4, 0),
    (4, 1),
    (4, 64),
    (5, 0),
    (5, 1),
    (5, 2),
    (5, 3),
    (7, 0),
    (10, 1),
    (10, 126),
    (10, 200),
    (10, 223),
    (10, 229),
    (10, 232),
    (10, 235),
    (10, 237),
    (10, 238),
    (13, 0),
    (21, 0),
    (29, 0),
    (108, 0),
    (136, 0),
    (189, 0),
    (226, 0),
];
const BLOCK: [(u64, u64); 6] = [(1, 0), (7, 0), (8, 0), (252, 0), (253, 0), (254, 0)];

/// Prints all facts.
pub(crate) fn all(sections: &[&str]) -> Outcome {
    const SECTIONS: [(&str, fn()); 13] = [
        ("status", status),
        ("limits", limits),
        ("environment", environment),
        ("process", process),
        ("descriptors", descriptors),
        ("mounts", mounts),
        ("tree", trees),
        ("etc", etc),
        ("proc", proc),
        ("sysctl", || sysctls(Path::new("/proc/sys"))),
        ("cgroup", cgroups),
        ("network", network),
        ("devices", devices),
    ];
    for (name, section) in SECTIONS {
        if sections.is_empty() || sections.contains(&name) {
            section();
        }
    }
    if sections.is_empty() || sections.contains(&"calls") {
        calls();
    }
    Ok(0)
}

/// Makes one system call for [`calls`], and prints the answer.
pub(crate) fn call(number: &str) -> Outcome {
    let number = crate::act::number(number)?;
    let answer = attack::call(number as u32);
    println!("{}", answer.map_or_else(|errno| format!("{errno:?}"), |_| "done".to_owned()));
    Ok(0)
}

fn fact(section: &str, name: impl Display, value: impl Display) {
    let value = value.to_string().replace('\n', "\\n");
    // A reader who goes away ends the report.
    let _ = writeln!(std::io::stdout(), "{section} {name}: {value}");
}

/// The error of an operation by its number's name, or `ok`.
fn said<T>(done: std::io::Result<T>) -> String {
    match done {
        Ok(_) => "ok".to_owned(),
        Err(error) => error
            .raw_os_error()
            .map_or_else(|| error.to_string(), |code| format!("{:?}", nix::errno::Errno::from_raw(code))),
    }
}

fn read(path: impl AsRef<Path>) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    fs::OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_NONBLOCK)
        .open(path)?
        .take(65_536)
        .read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).trim_end().to_owned())
}

fn status() {
    // What the program itself or the moment decides is left out.
    const OTHERS: [&str; 24] = [
        "Name",
        "State",
        "Tgid",
        "Ngid",
        "Pid",
        "PPid",
        "TracerPid",
        "FDSize",
        "NStgid",
        "NSpid",
        "NSpgid",
        "NSsid",
        "Threads",
        "SigQ",
        "SigPnd",
        "ShdPnd",
        "voluntary_ctxt_switches",
        "nonvoluntary_ctxt_switches",
        "HugetlbPages",
        "x86_Thread_features",
        "x86_Thread_features_locked",
        "untag_mask",
        "Kthread",
        "CoreDumping",
    ];
    for line in read("/proc/self/status").unwrap_or_default().lines() {
        let Some((key, value)) = line.split_once(':') else { continue };
        // Signals 32 and 33 belong to libc, which lets no program reset them.
        if let ("SigIgn", Ok(set)) = (key, u64::from_str_radix(value.trim(), 16)) {
            fact("status", key, format!("{:016x}", set & !(3 << 31)));
            continue;
        }
        if !OTHERS.contains(&key) && !key.starts_with("Vm") && !key.starts_with("Rss") {
            fact("status", key, value.split_whitespace().collect::<Vec<_>>().join(" "));
        }
    }
}

fn limits() {
    for line in read("/proc/self/limits").unwrap_or_default().lines().skip(1) {
        let (name, values) = line.split_at(26.min(line.len()));
        fact("limits", name.trim_end(), values.split_whitespace().take(2).collect::<Vec<_>>().join(" "));
    }
}

fn environment() {
    let all: BTreeMap<_, _> = std::env::vars_os().collect();
    for (key, value) in all {
        fact("environment", key.to_string_lossy(), value.to_string_lossy());
    }
    fact("environment", "arguments", format!("{:?}", std::env::args().collect::<Vec<_>>()));
}

fn process() {
    let stat = read("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> =
        stat.rsplit_once(") ").map(|(_, rest)| rest.split(' ').collect()).unwrap_or_default();
    let field = |number: usize| fields.get(number - 3).copied().unwrap_or_default().to_owned();
    // proc(5): the numbers of the fields.
    let fields = [("tty", 7), ("priority", 18), ("nice", 19), ("real-time priority", 40), ("policy", 41)];
    for (name, number) in fields {
        fact("process", name, field(number));
    }
    fact("process", "is first of its group", field(5) == std::process::id().to_string());
    fact("process", "is first of its session", field(6) == std::process::id().to_string());
    fact(
        "process",
        "directory",
        std::env::current_dir().map_or_else(|error| error.to_string(), |path| path.display().to_string()),
    );
    let host = nix::unistd::gethostname().unwrap_or_default();
    fact("process", "hostname", host.to_string_lossy());
    let files = [
        "oom_score_adj",
        "personality",
        "coredump_filter",
        "loginuid",
        "sessionid",
        "timerslack_ns",
        "uid_map",
        "gid_map",
        "setgroups",
        "attr/current",
        "timens_offsets",
    ];
    for file in files {
        let read = read(format!("/proc/self/{file}"));
        let text = read.map(|text| text.split_whitespace().collect::<Vec<_>>().join(" "));
        fact("process", file, text.unwrap_or_else(|error| said::<()>(Err(error))));
    }
    let mut others: Vec<String> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok())
        .filter_map(|entry| read(entry.path().join("comm")).ok())
        .collect();
    others.sort();
    others.dedup();
    fact("process", "names of all processes", others.join(" "));
    fact(
        "process",
        "session keyring",
        attack::has_own_session().map_or_else(|errno| format!("{errno:?}"), |own| format!("own: {own}")),
    );
}

fn descriptors() {
    let Ok(entries) = fs::read_dir("/proc/self/fd") else { return };
    for entry in entries.flatten() {
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        if target.ends_with("fd") {
            continue;
        }
        let target = target.display().to_string();
        let kind = target.split(":[").next().unwrap_or_default();
        let mode = read(Path::new("/proc/self/fdinfo").join(entry.file_name())).unwrap_or_default();
        let flags =
            mode.lines().find_map(|line| line.strip_prefix("flags:")).unwrap_or_default().trim().to_owned();
        // Which of reading and writing is possible makes no difference there.
        let flags = if kind == "/dev/null" { "" } else { &*flags };
        fact("descriptors", entry.file_name().to_string_lossy(), format!("{kind} {flags}"));
    }
}

/// Each mount by its place, in the order of /proc/self/mountinfo if a place has several.
fn mounts() {
    let mut seen: BTreeMap<String, u32> = BTreeMap::new();
    for line in read("/proc/self/mountinfo").unwrap_or_default().lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let left: Vec<&str> = left.split(' ').collect();
        let right: Vec<&str> = right.split(' ').collect();
        let place = left[4].to_owned();
        let count = seen.entry(place.clone()).or_default();
        *count += 1;
        let name = if *count == 1 { place } else { format!("{place} ({count})") };
        // Group numbers of propagation differ from machine to machine.
        let propagation: Vec<&str> =
            left[6..].iter().map(|word| word.split(':').next().unwrap_or_default()).collect();
        let mut own: Vec<&str> = left[5].split(',').collect();
        own.sort_unstable();
        fact("mounts", &name, format!("{} {} {}", right[0], own.join(","), propagation.join(",")).trim_end());
        let mut options: Vec<&str> = right.get(2).copied().unwrap_or_default().split(',').collect();
        options.sort_unstable();
        options.retain(|option| {
            !["lowerdir", "upperdir", "workdir", "lowerdir+"]
                .contains(&option.split('=').next().unwrap_or_default())
        });
        if right[0] == "tmpfs" || right[0] == "overlay" || right[0] == "mqueue" || right[0] == "proc" {
            fact("mounts", format!("{name} of its file system"), options.join(","));
        }
        if left[3] != "/" && !["ext4", "overlay", "cgroup", "cgroup2"].contains(&right[0]) {
            fact("mounts", format!("{name} root"), left[3]);
        }
    }
}

fn about(path: &Path) -> String {
    let Ok(about) = fs::symlink_metadata(path) else { return "gone".to_owned() };
    let kind = about.file_type();
    let mut text = format!("{:o} {}:{}", about.mode(), about.uid(), about.gid());
    if kind.is_symlink() {
        let target = fs::read_link(path).unwrap_or_default();
        text = format!("{text} -> {}", target.display());
    }
    if kind.is_char_device() || kind.is_block_device() {
        text = format!("{text} {}:{}", major(about.rdev()), minor(about.rdev()));
    }
    text
}

/// Prints what is in the directories that a runtime makes.
fn trees() {
    tree(Path::new("/dev"), 3);
    tree(Path::new("/"), 1);
    tree(Path::new("/etc"), 1);
    tree(Path::new("/run"), 2);
    tree(Path::new("/proc"), 0);
    tree(Path::new("/sys"), 0);
    tree(Path::new("/sys/fs/cgroup"), 1);
}

fn tree(path: &Path, depth: u32) {
    fact("tree", path.display(), about(path));
    let is_folder = fs::symlink_metadata(path).is_ok_and(|about| about.is_dir());
    if depth == 0 || !is_folder {
        return;
    }
    let Ok(entries) = fs::read_dir(path) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if path != Path::new("/") || !["proc", "sys", "dev", "etc", "run"].contains(&name.as_str()) {
            tree(&entry.path(), depth - 1);
        }
    }
}

fn etc() {
    for file in ["hostname", "hosts", "resolv.conf", "mtab", "passwd", "group"] {
        fact("etc", file, read(Path::new("/etc").join(file)).unwrap_or_else(|error| said::<()>(Err(error))));
    }
}

/// Whether the files of /proc and the directories that a runtime hides can be opened: for reading, and for writing without writing.
fn proc() {
    // Locks that belong to an open file and to no process are seen in all namespaces, also those of other programs.
    const OF_OTHERS: &str = "/proc/locks";
    const MORE: [&str; 12] = [
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/hostname",
        "/proc/sys/vm/overcommit_memory",
        "/proc/sys/net/ipv4/ip_forward",
        "/proc/irq/default_smp_affinity",
        "/proc/bus/pci",
        "/proc/fs/ext4",
        "/sys/firmware",
        "/sys/devices/virtual/powercap",
        "/sys/kernel/mm",
        "/sys/power/state",
        "/sys/module",
    ];
    let mut paths: Vec<String> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path().display().to_string())
        .filter(|path| path[6..].parse::<u32>().is_err())
        .collect();
    paths.extend(MORE.map(str::to_owned));
    paths.sort();
    for path in paths {
        let Ok(about) = fs::metadata(&path) else {
            fact("proc", &path, "gone");
            continue;
        };
        if about.is_dir() {
            let list = fs::read_dir(&path);
            let count = list.map(|entries| if entries.count() == 0 { "empty" } else { "full" }.to_owned());
            fact("proc", &path, count.unwrap_or_else(|error| said::<()>(Err(error))));
            continue;
        }
        let way = |is_writing: bool| {
            let mut options = fs::OpenOptions::new();
            options.read(!is_writing).write(is_writing).custom_flags(nix::libc::O_NONBLOCK);
            options.open(&path)
        };
        let mut first = [0; 1];
        // kmsg and kcore: a byte is read at once, or EAGAIN.
        let length = way(false).and_then(|mut file| file.read(&mut first));
        let length = length.map_or_else(
            |error| said::<()>(Err(error)),
            |length| {
                match length {
                    _ if path == OF_OTHERS => "readable",
                    0 => "empty",
                    _ => "full",
                }
                .to_owned()
            },
        );
        // Which of several mechanisms refuses it depends on the order in which the kernel asks them.
        let written = if way(true).is_ok() { "possible" } else { "refused" };
        fact("proc", &path, format!("{length}, writing {written}"));
    }
}

/// The values that a namespace may have of its own.
fn sysctls(folder: &Path) {
    const BELOW: [&str; 8] = [
        "kernel/msg",
        "kernel/shm",
        "kernel/sem",
        "kernel/hostname",
        "kernel/domainname",
        "fs/mqueue",
        "net",
        "user",
    ];
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        let name = path.strip_prefix("/proc/sys").unwrap_or(&path).display().to_string();
        let is_wanted = BELOW.iter().any(|below| name.starts_with(below) || below.starts_with(&name));
        if !is_wanted || name.contains("random") || name.contains("nf_conntrack_count") {
            continue;
        }
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => sysctls(&path),
            _ => {
                let text = read(&path).map(|text| text.split_whitespace().collect::<Vec<_>>().join(" "));
                fact("sysctl", name, text.unwrap_or_else(|error| said::<()>(Err(error))));
            }
        }
    }
}

/// The limits of the own cgroup, as far as it is visible.
fn cgroups() {
    for line in read("/proc/self/cgroup").unwrap_or_default().lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (name, path) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        fact("cgroup", format!("path of {name}"), path);
    }
    let Ok(controllers) = fs::read_dir("/sys/fs/cgroup") else { return };
    for folder in controllers.flatten().map(|entry| entry.path()).chain(["/sys/fs/cgroup".into()]) {
        let Ok(files) = fs::read_dir(&folder) else { continue };
        for file in files.flatten() {
            let path = file.path();
            let name = path.strip_prefix("/sys/fs/cgroup").unwrap_or(&path).display().to_string();
            const MOVING: [&str; 17] = [
                "usage",
                "stat",
                "tasks",
                "cgroup.procs",
                "events",
                "pressure",
                "current",
                "peak",
                "cgroup.threads",
                "failcnt",
                "numa",
                "service",
                "kmem",
                "pagetypeinfo",
                "throttle",
                "reclaim",
                "clone_children",
            ];
            if fs::metadata(&path).is_ok_and(|about| about.is_file())
                && !MOVING.iter().any(|word| name.contains(word))
            {
                let text = read(&path).map(|text| {
                    // The order of device rules has no meaning.
                    let mut lines: Vec<String> = text
                        .lines()
                        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
                        .collect();
                    lines.sort_unstable();
                    lines.join(", ")
                });
                fact("cgroup", name, text.unwrap_or_else(|error| said::<()>(Err(error))));
            }
        }
    }
}

fn network() {
    let Ok(links) = fs::read_dir("/sys/class/net") else { return };
    // The node's other links, which come and go, are visible with its network.
    let is_own = |name: &std::ffi::OsString| *name == *"lo" || *name == *"eth0";
    for link in links.flatten().filter(|link| is_own(&link.file_name())) {
        for file in ["mtu", "flags", "type", "operstate"] {
            let name = link.file_name().to_string_lossy().into_owned();
            fact(
                "network",
                format!("{name} {file}"),
                read(link.path().join(file)).unwrap_or_else(|error| said::<()>(Err(error))),
            );
        }
    }
    let count = |path: &str| {
        read(path).map_or_else(|error| said::<()>(Err(error)), |text| text.lines().count().to_string())
    };
    for family in 0..=FAMILY_MAX {
        let made = attack::socket(family);
        fact(
            "network",
            format!("socket of family {family}"),
            made.map_or_else(|errno| format!("{errno:?}"), |()| "ok".into()),
        );
    }
    for file in ["route", "ipv6_route", "if_inet6", "igmp6"] {
        fact("network", format!("lines of {file}"), count(&format!("/proc/net/{file}")));
    }
}

/// Device nodes made in `/dev` and opened.
fn devices() {
    let character = CHARACTER.map(|number| (SFlag::S_IFCHR, number));
    let block = BLOCK.map(|number| (SFlag::S_IFBLK, number));
    for (kind, (major, minor)) in character.into_iter().chain(block) {
        let path = format!("/dev/compared-{major}-{minor}");
        let letter = if kind == SFlag::S_IFCHR { 'c' } else { 'b' };
        let made = mknod(path.as_str(), kind, Mode::from_bits_truncate(0o666), makedev(major, minor));
        if let Err(errno) = made {
            fact("devices", format!("{letter} {major}:{minor}"), format!("mknod {errno:?}"));
            continue;
        }
        let way = |is_writing: bool| {
            let mut options = fs::OpenOptions::new();
            // Neither waits for a modem nor becomes the terminal of this process.
            let flags = nix::libc::O_NONBLOCK | nix::libc::O_NOCTTY;
            said(options.read(!is_writing).write(is_writing).custom_flags(flags).open(&path))
        };
        fact(
            "devices",
            format!("{letter} {major}:{minor}"),
            format!("reading {}, writing {}", way(false), way(true)),
        );
        let _ = fs::remove_file(path);
    }
}

/// The answer to each system call with arguments that no call accepts as an address; each in a process of its own.
fn calls() {
    for number in (0..=CALL_MAX).filter(|number| !LEFT_OUT.contains(number)) {
        let child = Command::new("/proc/self/exe")
            .args(["report-call", &number.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let Ok(mut child) = child else {
            fact("calls", number, "no process");
            continue;
        };
        let begin = Instant::now();
        let ended = loop {
            match child.try_wait() {
                Ok(Some(status)) => break status.to_string(),
                Ok(None) if begin.elapsed() < Duration::from_secs(1) => {
                    std::thread::sleep(Duration::from_micros(300))
                }
                _ => {
                    let _ = child.kill();
                    let _ = child.wait();
                    break "waits".to_owned();
                }
            }
        };
        let mut text = String::new();
        if let Some(output) = &mut child.stdout {
            let _ = output.read_to_string(&mut text);
        }
        fact("calls", number, if text.is_empty() { &*ended } else { text.trim_end() });
    }
}
