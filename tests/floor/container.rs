//! The processes inside a pod: the container's first process makes its mounts and executes the program; that of
//! an exec joins the container's namespaces. The mounts are those of coracle's `plan::mount_plan` for a request
//! without volumes, masked or read-only paths.

use std::convert::Infallible;
use std::ffi::CString;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::sys::stat::{Mode, SFlag, makedev, mknod, umask};
use nix::unistd::{Gid, chdir, dup2_stderr, dup2_stdin, dup2_stdout, execve, pivot_root, setgroups, setsid};
use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};
use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set, remove_capability_from_bounding_set,
    set_capabilities,
};

use crate::cgroups::{Cgroup, write};
use crate::raw::{join_keyring, set_slice};
use crate::{Outcome, failed};

/// The capabilities of a container without privileges.
const CAPABILITIES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::NET_BIND_SERVICE)
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::SYS_CHROOT)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::AUDIT_WRITE)
    .union(CapabilitySet::SETFCAP);
/// The last capability that rustix has: CAP_CHECKPOINT_RESTORE.
const LAST_CAPABILITY: u32 = 40;
/// Nodes in /dev: name, major and minor number.
const NODES: [(&str, u64, u64); 6] =
    [("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0)];
/// Links in /dev.
const LINKS: [(&str, &str); 5] = [
    ("/proc/self/fd", "fd"),
    ("/proc/self/fd/0", "stdin"),
    ("/proc/self/fd/1", "stdout"),
    ("/proc/self/fd/2", "stderr"),
    ("pts/ptmx", "ptmx"),
];
/// Files of the pod that are mounted in /etc.
pub(crate) const FILES: [&str; 3] = ["hosts", "hostname", "resolv.conf"];

/// A program to be executed, and its output.
#[derive(Debug)]
pub(crate) struct Program<'a> {
    /// Arguments of /probe.
    pub(crate) words: &'a [&'a str],
    /// Descriptor for standard output and standard error.
    pub(crate) output: OwnedFd,
    /// Name of the session keyring.
    pub(crate) keyring: &'a str,
}

/// The first process of a container, cloned into its cgroup and a new PID namespace.
///
/// # Errors
/// The first failure; otherwise it executes the program.
pub(crate) fn first(
    pod: &Path,
    layer: &Path,
    sandbox: impl AsFd,
    cgroup: &Cgroup,
    namespaces: CloneFlags,
    program: &Program<'_>,
) -> Outcome<Infallible> {
    begin(cgroup)?;
    setns(sandbox, namespaces | CloneFlags::CLONE_NEWNS)
        .map_err(|errno| failed("join the pod's namespaces", errno))?;
    let opened = Opened::new(pod, cgroup)?;
    let own = if cgroup.v1.is_empty() { CloneFlags::CLONE_NEWCGROUP } else { CloneFlags::empty() };
    unshare(own | CloneFlags::CLONE_NEWNS).map_err(|errno| failed("make a mount namespace", errno))?;
    change("/", MsFlags::MS_REC | MsFlags::MS_SLAVE)?;
    let root = pod.join("root");
    let [lower, upper, work] =
        [layer, &pod.join("upper"), &pod.join("work")].map(|path| path.display().to_string());
    let options = format!("lowerdir={lower},upperdir={upper},workdir={work},volatile");
    mount(Some("overlay"), &root, Some("overlay"), MsFlags::empty(), Some(options.as_str()))
        .map_err(|errno| failed("mount the overlay", errno))?;
    chdir(&root).map_err(|errno| failed("enter the root", errno))?;
    pivot_root(".", ".").map_err(|errno| failed("change the root", errno))?;
    umount2(".", MntFlags::MNT_DETACH).map_err(|errno| failed("unmount the old root", errno))?;
    chdir("/").map_err(|errno| failed("enter the root", errno))?;
    opened.attach_all()?;
    execute(program)
}

/// The process of an exec, cloned into its cgroup and the container's PID namespace.
///
/// # Errors
/// The first failure; otherwise it executes the program.
pub(crate) fn another(
    container: impl AsFd,
    cgroup: &Cgroup,
    namespaces: CloneFlags,
    program: &Program<'_>,
) -> Outcome<Infallible> {
    begin(cgroup)?;
    setns(container, namespaces | CloneFlags::CLONE_NEWNS)
        .map_err(|errno| failed("join the container's namespaces", errno))?;
    execute(program)
}

fn begin(cgroup: &Cgroup) -> Outcome<()> {
    set_pdeathsig(Signal::SIGKILL).map_err(|errno| failed("end with the parent", errno))?;
    cgroup.enter_v1()?;
    // In the root of the CPU controller the kernel would make an autogroup for the session (sched(7)).
    setsid().map_err(|errno| failed("make a session", errno))?;
    umask(Mode::empty());
    write(Path::new("/proc/self/oom_score_adj"), "0")
}

fn change(place: &str, flags: MsFlags) -> Outcome<()> {
    mount(None::<&str>, place, None::<&str>, flags, None::<&str>)
        .map_err(|errno| failed(&format!("change the mount {place}"), errno))
}

fn fresh(kind: &str, place: &str, flags: MsFlags, options: &str) -> Outcome<()> {
    make_directory(place)?;
    mount(Some(kind), place, Some(kind), flags, Some(options))
        .map_err(|errno| failed(&format!("mount {place}"), errno))
}

fn make_directory(place: &str) -> Outcome<()> {
    match nix::unistd::mkdir(place, Mode::from_bits_truncate(0o755)) {
        Ok(()) | Err(nix::errno::Errno::EEXIST) => Ok(()),
        Err(errno) => Err(failed(&format!("make {place}"), errno)),
    }
}

/// Mounts of the host, which must be opened before the root changes.
struct Opened {
    shm: OwnedFd,
    files: Vec<OwnedFd>,
    /// Name in /sys/fs/cgroup and mount.
    cgroups: Vec<(String, OwnedFd)>,
}

impl Opened {
    fn new(pod: &Path, cgroup: &Cgroup) -> Outcome<Opened> {
        let open = |path: &Path| {
            open_tree(CWD, path, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)
                .map_err(|errno| failed(&format!("open {}", path.display()), errno))
        };
        let hierarchy = |path: &Path| {
            let name = path.strip_prefix("/sys/fs/cgroup").unwrap_or(path).iter().next().unwrap_or_default();
            Ok((name.to_string_lossy().into_owned(), open(path)?))
        };
        Ok(Opened {
            shm: open(&pod.join("shm"))?,
            files: FILES.iter().map(|name| open(&pod.join(name))).collect::<Outcome<_>>()?,
            cgroups: cgroup.v1.iter().map(|path| hierarchy(path)).collect::<Outcome<_>>()?,
        })
    }

    /// Mounts everything in the new root, in the order of coracle's plan.
    fn attach_all(self) -> Outcome<()> {
        let safe = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        fresh("proc", "/proc", safe, "")?;
        fresh("tmpfs", "/dev", MsFlags::MS_NOSUID | MsFlags::MS_STRICTATIME, "mode=755,size=65536k")?;
        for (name, major, minor) in NODES {
            let mode = Mode::from_bits_truncate(0o666);
            mknod(Path::new("/dev").join(name).as_path(), SFlag::S_IFCHR, mode, makedev(major, minor))
                .map_err(|errno| failed(&format!("make /dev/{name}"), errno))?;
        }
        for (target, name) in LINKS {
            symlink(target, Path::new("/dev").join(name))
                .map_err(|error| failed(&format!("link {name}"), error))?;
        }
        fresh("sysfs", "/sys", safe | MsFlags::MS_RDONLY, "")?;
        let options = "newinstance,ptmxmode=0666,mode=0620,gid=5";
        fresh("devpts", "/dev/pts", MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC, options)?;
        make_directory("/dev/shm")?;
        attach(self.shm, "/dev/shm")?;
        fresh("mqueue", "/dev/mqueue", safe, "")?;
        for (name, file) in FILES.iter().zip(self.files) {
            let place = format!("/etc/{name}");
            fs::write(&place, "").map_err(|error| failed(&place, error))?;
            attach(file, &place)?;
        }
        if self.cgroups.is_empty() {
            return fresh("cgroup2", "/sys/fs/cgroup", safe | MsFlags::MS_RDONLY, "");
        }
        fresh("tmpfs", "/sys/fs/cgroup", safe, "mode=755")?;
        let read_only = safe | MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
        for (name, directory) in self.cgroups {
            let place = format!("/sys/fs/cgroup/{name}");
            make_directory(&place)?;
            attach(directory, &place)?;
            change(&place, read_only)?;
        }
        change("/sys/fs/cgroup", read_only)
    }
}

fn attach(source: OwnedFd, place: &str) -> Outcome<()> {
    move_mount(source, "", CWD, place, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .map_err(|errno| failed(&format!("mount {place}"), errno))
}

/// Drops privileges and executes the program.
fn execute(program: &Program<'_>) -> Outcome<Infallible> {
    chdir("/").map_err(|errno| failed("enter the root", errno))?;
    join_keyring(program.keyring)?;
    let null = fs::File::open("/dev/null").map_err(|error| failed("open /dev/null", error))?;
    let redirected = dup2_stdin(&null).and_then(|()| dup2_stdout(&program.output));
    redirected
        .and_then(|()| dup2_stderr(&program.output))
        .map_err(|errno| failed("redirect output", errno))?;
    for number in 0..=LAST_CAPABILITY {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        if !CAPABILITIES.contains(capability) {
            remove_capability_from_bounding_set(capability)
                .map_err(|errno| failed("drop a capability", errno))?;
        }
    }
    setgroups(&[Gid::from_raw(0)]).map_err(|errno| failed("set groups", errno))?;
    let sets = CapabilitySets {
        effective: CAPABILITIES,
        permitted: CAPABILITIES,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets).map_err(|errno| failed("set capabilities", errno))?;
    clear_ambient_capability_set().map_err(|errno| failed("clear ambient capabilities", errno))?;
    set_slice(0)?;
    umask(Mode::from_bits_truncate(0o022));
    let text = |text: &str| CString::new(text).map_err(|error| failed("pass an argument", error));
    let words = ["/probe"].iter().chain(program.words).map(|word| text(word)).collect::<Outcome<Vec<_>>>()?;
    let environment = [text("PATH=/usr/sbin:/usr/bin:/sbin:/bin")?, text("HOME=/root")?];
    let Err(errno) = execve(&words[0], &words, &environment);
    Err(failed("execute /probe", errno))
}
