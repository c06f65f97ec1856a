//! The view of a process of itself and its environment, printed as lines `section key value`, or files
//! unchanged.

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;

/// The result of an action: its exit code, or an error.
pub(crate) type Outcome = Result<u8, String>;

/// Prints the requested sections, or all of them.
pub(crate) fn all(what: &[&str]) -> Outcome {
    type Section = (&'static str, fn() -> Outcome);
    const SECTIONS: [Section; 8] = [
        ("ids", || keys("ids", "/proc/self/status", &["Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp"])),
        ("caps", || keys("caps", "/proc/self/status", &["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"])),
        ("mounts", mounts),
        ("fds", descriptors),
        ("namespaces", namespaces),
        ("env", environment),
        ("place", place),
        ("limits", || cat("/proc/self/limits")),
    ];
    for (name, section) in SECTIONS {
        if what.is_empty() || what.contains(&name) {
            section()?;
        }
    }
    Ok(0)
}

/// Prints a file to standard output.
pub(crate) fn cat(path: &str) -> Outcome {
    let bytes = fs::read(path).map_err(|error| format!("read {path}: {error}"))?;
    std::io::stdout().write_all(&bytes).map_err(|error| format!("write: {error}"))?;
    Ok(0)
}

/// Prints the sorted names in a directory, one per line.
pub(crate) fn list(path: &str) -> Outcome {
    let entries = fs::read_dir(path).map_err(|error| format!("read {path}: {error}"))?;
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    for name in names {
        println!("{name}");
    }
    Ok(0)
}

/// Prints `PATH SIZE HASH` of every file below a directory in the order of their paths; the hash is FNV-1a
/// with 64 bits.
pub(crate) fn hash(path: &str) -> Outcome {
    let entries = fs::read_dir(path).map_err(|error| format!("read {path}: {error}"))?;
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        let name = path.display().to_string();
        if path.is_dir() {
            hash(&name)?;
            continue;
        }
        let bytes = fs::read(&path).map_err(|error| format!("read {name}: {error}"))?;
        let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        println!("{name} {} {:016x}", bytes.len(), bytes.iter().fold(0xcbf2_9ce4_8422_2325, step));
    }
    Ok(0)
}

/// Prints `MODE UID GID SIZE` of a path; the mode is octal, links are not followed.
pub(crate) fn stat(path: &str) -> Outcome {
    let about = fs::symlink_metadata(path).map_err(|error| format!("stat {path}: {error}"))?;
    println!("{:o} {} {} {}", about.mode(), about.uid(), about.gid(), about.size());
    Ok(0)
}

/// Prints the given `Key:` lines of a /proc file.
fn keys(section: &str, path: &str, wanted: &[&str]) -> Outcome {
    let text = fs::read_to_string(path).map_err(|error| format!("read {path}: {error}"))?;
    for line in text.lines() {
        if let Some((key, value)) = line.split_once(':')
            && wanted.contains(&key)
        {
            println!("{section} {key} {}", value.split_whitespace().collect::<Vec<_>>().join(" "));
        }
    }
    Ok(0)
}

/// Prints mount point, options, type and source of each mount in their order.
fn mounts() -> Outcome {
    let text =
        fs::read_to_string("/proc/self/mountinfo").map_err(|error| format!("read mountinfo: {error}"))?;
    for line in text.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let left: Vec<&str> = left.split(' ').collect();
        println!("mounts {} {} {} {right}", left[4], left[5], left[6..].join(","));
    }
    Ok(0)
}

/// Prints the open descriptors, except that of the directory itself.
fn descriptors() -> Outcome {
    let entries = fs::read_dir("/proc/self/fd").map_err(|error| format!("read fd: {error}"))?;
    for entry in entries.flatten() {
        if let Ok(target) = fs::read_link(entry.path())
            && !target.ends_with("fd")
        {
            println!("fds {} {}", entry.file_name().to_string_lossy(), target.display());
        }
    }
    Ok(0)
}

/// Prints the identity of each namespace.
fn namespaces() -> Outcome {
    for name in ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"] {
        if let Ok(target) = fs::read_link(format!("/proc/self/ns/{name}")) {
            println!("namespaces {name} {}", target.display());
        }
    }
    Ok(0)
}

/// Prints the unmodified environment.
fn environment() -> Outcome {
    for (key, value) in std::env::vars_os() {
        println!("env {}={}", key.to_string_lossy(), value.to_string_lossy());
    }
    Ok(0)
}

/// Prints working directory, host name, process ID, parent, and OOM score adjustment.
fn place() -> Outcome {
    let here = std::env::current_dir().map_err(|error| format!("getcwd: {error}"))?;
    let name = nix::unistd::gethostname().map_err(|error| format!("gethostname: {error}"))?;
    let score = fs::read_to_string("/proc/self/oom_score_adj").unwrap_or_default();
    println!("place cwd {}", here.display());
    println!("place hostname {}", name.to_string_lossy());
    println!("place pid {}", std::process::id());
    println!("place parent {}", std::os::unix::process::parent_id());
    println!("place oom_score_adj {}", score.trim());
    Ok(0)
}
