//! All that a process in a container sees, for each kind of pod and container that a kubelet asks for: of the container's first
//! process, and of one that ExecSync starts.

use std::fs;
use std::path::{Path, PathBuf};

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::security_profile::ProfileType;
use coracle_tests::cri::proto::{
    Capability, CdiDevice, ContainerConfig, ContainerState, Device, HugepageLimit, Int64Value, KeyValue,
    LinuxContainerResources, Mount, MountPropagation, NamespaceMode, PodSandboxConfig,
    PodSandboxStatusRequest, SecurityProfile,
};
use coracle_tests::host;
use coracle_tests::request::{
    bridge_pod, container, exec, host_pod, mapped, pod_namespaces, security, share_pids,
};
use coracle_tests::vendor;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tonic::Status;

use crate::Run;
use crate::pair::{Both, start};
use crate::report::{Report, output};

/// A kind of container.
struct Kind {
    name: &'static str,
    /// Whether the answers to all system calls are compared, too.
    has_calls: bool,
    /// Whether `pod` is other than that of most kinds.
    has_own_pod: bool,
    pod: fn() -> PodSandboxConfig,
    change: fn(&mut PodSandboxConfig, &mut ContainerConfig),
}

/// Shortest form of a row.
const fn kind(name: &'static str, change: fn(&mut PodSandboxConfig, &mut ContainerConfig)) -> Kind {
    Kind { name, has_calls: false, has_own_pod: false, pod: || bridge_pod("compared"), change }
}

const fn with_calls(kind: Kind) -> Kind {
    Kind { has_calls: true, ..kind }
}

const KINDS: [Kind; 37] = [
    with_calls(kind("plain", |_, _| ())),
    with_calls(kind("RuntimeDefault", |_, config| seccomp(config, ProfileType::RuntimeDefault))),
    // All bits of the probe's arguments are set: of two conditions one holds, which suffices for one argument only.
    with_calls(kind("Localhost", |_, config| {
        let profile = r#"{"defaultAction":"SCMP_ACT_ALLOW","architectures":["SCMP_ARCH_X86_64"],"syscalls":[
            {"names":["sethostname","no_such_call"],"action":"SCMP_ACT_ERRNO","errnoRet":5},
            {"names":["getpriority"],"action":"SCMP_ACT_ERRNO","errnoRet":6,"args":[
                {"index":0,"value":18446744073709551615,"op":"SCMP_CMP_EQ"},{"index":0,"value":1,"op":"SCMP_CMP_EQ"}]},
            {"names":["sched_get_priority_max"],"action":"SCMP_ACT_ERRNO","errnoRet":7,"args":[
                {"index":0,"value":18446744073709551615,"op":"SCMP_CMP_EQ"},{"index":1,"value":1,"op":"SCMP_CMP_EQ"}]},
            {"names":["sched_get_priority_min"],"action":"SCMP_ACT_ERRNO","errnoRet":8,"args":[
                {"index":0,"value":2,"valueTwo":2,"op":"SCMP_CMP_MASKED_EQ"}]}]}"#;
        localhost(config, profile);
    })),
    with_calls(kind("Localhost, other spelling of names", |_, config| {
        let profile = r#"{"defaultaction":"SCMP_ACT_ALLOW","Architectures":null,"SYSCALLS":[
            {"Names":["sethostname"],"ACTION":"SCMP_ACT_ERRNO","ErrnoRet":5,"args":null}]}"#;
        localhost(config, profile);
    })),
    // Calls above the last one that it names do not exist (ENOSYS), others are refused.
    with_calls(kind("Localhost, few calls", |_, config| {
        localhost(
            config,
            &format!(
                r#"{{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[
            {{"names":[{FEW}],"action":"SCMP_ACT_ALLOW"}}]}}"#
            ),
        );
    })),
    kind("Unconfined", |_, config| seccomp(config, ProfileType::Unconfined)),
    kind("user 1000", |_, config| security(config).run_as_user = Some(number(1000))),
    kind("user 1000 group 3000", |_, config| {
        security(config).run_as_user = Some(number(1000));
        security(config).run_as_group = Some(number(3000));
        security(config).supplemental_groups = vec![5000, 3000, 0];
    }),
    kind("user by name", |_, config| security(config).run_as_username = "alice".into()),
    kind("unknown user 4242", |_, config| security(config).run_as_user = Some(number(4242))),
    kind("no new privileges", |_, config| {
        security(config).no_new_privs = true;
        security(config).run_as_user = Some(number(1000));
    }),
    with_calls(kind("privileged", privileged)),
    with_calls(kind("privileged RuntimeDefault", |pod, config| {
        privileged(pod, config);
        seccomp(config, ProfileType::RuntimeDefault);
    })),
    kind("privileged user 1000", |pod, config| {
        privileged(pod, config);
        security(config).run_as_user = Some(number(1000));
    }),
    Kind { pod: || host_pod("compared"), has_own_pod: true, ..kind("host network", |_, _| ()) },
    kind("host PID and IPC", |pod, config| {
        pod_namespaces(pod).pid = NamespaceMode::Node.into();
        pod_namespaces(pod).ipc = NamespaceMode::Node.into();
        security(config).namespace_options = Some(pod_namespaces(pod).clone());
    }),
    kind("shared PIDs", |pod, config| {
        share_pids(pod);
        security(config).namespace_options = Some(pod_namespaces(pod).clone());
    }),
    with_calls(kind("user namespace", user_namespace)),
    kind("user namespace, user 1000", |pod, config| {
        user_namespace(pod, config);
        security(config).run_as_user = Some(number(1000));
    }),
    kind("read-only root", |_, config| security(config).readonly_rootfs = true),
    kind("terminal", |_, config| config.tty = true),
    kind("standard input", |_, config| config.stdin = true),
    with_calls(kind("capabilities SYS_ADMIN NET_ADMIN SYS_PTRACE", |_, config| {
        seccomp(config, ProfileType::RuntimeDefault);
        capabilities(config, &["SYS_ADMIN", "NET_ADMIN", "SYS_PTRACE"], &[]);
    })),
    kind("capabilities ALL", |_, config| capabilities(config, &["ALL"], &[])),
    with_calls(kind("no capabilities", |_, config| {
        seccomp(config, ProfileType::RuntimeDefault);
        capabilities(config, &[], &["ALL"]);
    })),
    kind("one capability of user 1000", |_, config| {
        capabilities(config, &["NET_BIND_SERVICE"], &["ALL"]);
        security(config).run_as_user = Some(number(1000));
    }),
    kind("an ambient capability", |_, config| {
        security(config).capabilities =
            Some(Capability { add_ambient_capabilities: vec!["NET_RAW".into()], ..Default::default() });
        security(config).run_as_user = Some(number(1000));
    }),
    kind("limits", |_, config| {
        resources(config, |resources| {
            resources.cpu_shares = 512;
            resources.cpu_quota = 50_000;
            resources.cpu_period = 100_000;
            resources.memory_limit_in_bytes = 256 << 20;
            resources.memory_swap_limit_in_bytes = 256 << 20;
            resources.oom_score_adj = 900;
        });
    }),
    kind("processors", |_, config| {
        resources(config, |resources| {
            resources.cpuset_cpus = "0".into();
            resources.cpuset_mems = "0".into();
        });
    }),
    kind("huge pages", |_, config| {
        resources(config, |resources| {
            resources.hugepage_limits = vec![HugepageLimit { page_size: "2MB".into(), limit: 4 << 20 }];
        });
    }),
    kind("a device", |_, config| {
        let device = |path: &str, permissions: &str| Device {
            container_path: path.into(),
            host_path: "/dev/fuse".into(),
            permissions: permissions.into(),
        };
        config.devices = vec![device("/dev/fuse", "rwm"), device("/dev/other/fuse", "r")];
    }),
    kind("volumes", |_, config| {
        let volume = |place: &str| Mount {
            container_path: place.into(),
            host_path: SHARED.into(),
            ..Default::default()
        };
        let private = MountPropagation::PropagationPrivate.into();
        config.mounts = vec![
            volume("/data"),
            Mount { readonly: true, ..volume("/read-only") },
            Mount { readonly: true, recursive_read_only: true, propagation: private, ..volume("/recursive") },
            Mount { propagation: MountPropagation::PropagationHostToContainer.into(), ..volume("/slave") },
            Mount { host_path: "/etc/hosts".into(), ..volume("/etc/hosts") },
            Mount { host_path: "/dev/shm".into(), ..volume("/dev/shm") },
            volume("/new/folder/below"),
        ];
    }),
    kind("no masks", |_, config| {
        security(config).masked_paths = Vec::new();
        security(config).readonly_paths = Vec::new();
    }),
    kind("masks", |_, config| {
        security(config).masked_paths =
            ["/proc/kcore", "/proc/keys", "/sys/firmware", "/no/such/file"].map(str::to_owned).to_vec();
        security(config).readonly_paths =
            ["/proc/sys", "/proc/sysrq-trigger", "/no/such/file"].map(str::to_owned).to_vec();
    }),
    kind("sysctls", |pod, _| {
        let linux = pod.linux.as_mut().expect("a Linux pod");
        linux.sysctls = [
            ("net.ipv4.ip_unprivileged_port_start", "80"),
            ("kernel.shm_rmid_forced", "1"),
            ("net.ipv4.ping_group_range", "1 5"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
    }),
    kind("environment", |_, config| {
        let pair = |key: &str, value: &str| KeyValue { key: key.into(), value: value.into() };
        config.envs = vec![
            pair("OVERRIDDEN", "kubelet"),
            pair("EMPTY", ""),
            pair("PATH", "/only"),
            pair("HOME", "/elsewhere"),
            pair("TWICE", "1"),
            pair("TWICE", "2"),
        ];
        config.working_dir = "/new/working/folder".into();
    }),
    kind("no hostname", |pod, _| pod.hostname = String::new()),
];

/// A CDI device with a mount and hooks before pivot_root, whose links say what they found. It is given alone, because of files that
/// hooks make in a user namespace the owners differ (docs/nri.md).
const HOOKS: Kind = kind("hooks of a device", |_, config| {
    config.cdi_devices = vec![CdiDevice { name: vendor::DEVICE.into() }];
});

/// Stands for a directory with a shared mount, from which mounts may be propagated.
const SHARED: &str = "(a shared mount)";

fn number(value: i64) -> Int64Value {
    Int64Value { value }
}

fn seccomp(config: &mut ContainerConfig, kind: ProfileType) {
    security(config).seccomp =
        Some(SecurityProfile { profile_type: kind.into(), localhost_ref: String::new() });
}

/// Calls that programs of this kind need, in JSON.
const FEW: &str = r#""accept4","access","arch_prctl","bind","brk","capget","capset","chdir","chmod","chown","clock_gettime",
    "clock_nanosleep","clone","clone3","close","connect","dup","dup2","dup3","epoll_create1","epoll_ctl","epoll_pwait","epoll_wait",
    "eventfd2","execve","execveat","exit","exit_group","faccessat","faccessat2","fchdir","fchmod","fchown","fcntl","fstat","fstatfs",
    "futex","getcwd","getdents","getdents64","getegid","geteuid","getgid","getgroups","getpgid","getpgrp","getpid","getppid","getpriority",
    "getrandom","getresgid","getresuid","getrlimit","getsid","getsockopt","gettid","getuid","getxattr","ioctl","keyctl","kill","lgetxattr",
    "listxattr","llistxattr","lseek","lstat","madvise","mmap","mprotect","mremap","munmap","nanosleep","newfstatat","open","openat",
    "openat2","pipe","pipe2","poll","ppoll","prctl","pread64","prlimit64","pselect6","read","readlink","readlinkat","readv","recvfrom",
    "recvmsg","rseq","rt_sigaction","rt_sigpending","rt_sigprocmask","rt_sigreturn","rt_sigsuspend","sched_getaffinity","sched_yield",
    "select","sendmsg","sendto","set_robust_list","set_tid_address","setgid","setgroups","setpgid","setresgid","setresuid","setsid",
    "setsockopt","setuid","shutdown","sigaltstack","socket","socketpair","stat","statfs","statx","sysinfo","tgkill","tkill","umask","uname",
    "vfork","wait4","waitid","write","writev""#;

/// Gives the container this profile of seccomp. [`see`] writes it to a file, and names the file in its place.
fn localhost(config: &mut ContainerConfig, profile: &str) {
    security(config).seccomp =
        Some(SecurityProfile { profile_type: ProfileType::Localhost.into(), localhost_ref: profile.into() });
}

fn privileged(pod: &mut PodSandboxConfig, config: &mut ContainerConfig) {
    let context = pod.linux.as_mut().and_then(|linux| linux.security_context.as_mut());
    context.expect("a Linux pod").privileged = true;
    security(config).privileged = true;
}

fn user_namespace(pod: &mut PodSandboxConfig, config: &mut ContainerConfig) {
    *pod = mapped(pod.clone(), 1_000_000);
    security(config).namespace_options = Some(pod_namespaces(pod).clone());
}

fn capabilities(config: &mut ContainerConfig, add: &[&str], drop: &[&str]) {
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    security(config).capabilities = Some(Capability {
        add_capabilities: words(add),
        drop_capabilities: words(drop),
        ..Default::default()
    });
}

fn resources(config: &mut ContainerConfig, change: fn(&mut LinuxContainerResources)) {
    let linux = config.linux.as_mut().expect("a Linux container");
    change(linux.resources.get_or_insert_default());
}

/// The two reports of a container, or the error that refused it.
type Seen = Result<[Report; 2], Status>;

/// The names of the two reports.
const WAYS: [&str; 2] = ["first process", "exec"];

pub(crate) fn run(run: &mut Run<'_>) {
    let image = run.pair.probe();
    let shared = run.pair.ours().folder().join("shared");
    fs::create_dir(&shared).expect("a directory for a mount");
    mount(Some("compared"), &shared, Some("tmpfs"), MsFlags::empty(), None::<&str>).expect("a tmpfs");
    mount(None::<&str>, &shared, None::<&str>, MsFlags::MS_SHARED, None::<&str>).expect("a shared mount");
    for kind in &KINDS {
        run.begin_case();
        case(run, &image, kind.name, &[kind], &shared);
    }
    let specs = Path::new("/var/run/cdi");
    vendor::write(specs, run.pair.ours().folder(), true);
    run.begin_case();
    case(run, &image, HOOKS.name, &[&HOOKS], &shared);
    fs::remove_file(specs.join("hooks.test.yaml")).expect("it is ours");
    while run.goes_on() {
        let mut kinds: Vec<&Kind> = KINDS.iter().collect();
        run.random.shuffle(&mut kinds);
        kinds.truncate(2 + run.random.below(3) as usize);
        let name = kinds.iter().map(|kind| kind.name).collect::<Vec<_>>().join(" + ");
        run.begin_case();
        case(run, &image, &name, &kinds, &shared);
    }
    for root in host::cgroup_roots() {
        // It exists only in hierarchies that pods use.
        let _ = fs::remove_dir(root.join(cgroup()));
    }
    umount2(&shared, MntFlags::MNT_DETACH).expect("the mount is ours");
}

/// Runs and compares a container that is of all these kinds.
fn case(run: &mut Run<'_>, image: &str, name: &str, kinds: &[&Kind], shared: &Path) {
    let folder = PathBuf::from(run.pair.log_directory("containers"));
    let both = run.pair.both();
    let theirs = see(both.theirs, image, kinds, &folder.join("theirs"), shared);
    let seen = Both { ours: see(both.ours, image, kinds, &folder.join("ours"), shared), theirs };
    compare(run, name, &seen);
}

/// The cgroup of this run's pods.
fn cgroup() -> String {
    format!("coracle-compare-{}", std::process::id())
}

/// Returns whether the fact is a sysctl of one link: `sysctl net/ipv6/neigh/LINK/…`. Those of all links, of new ones and of the
/// loopback interface are there in each network namespace.
fn is_of_a_link(fact: &str) -> bool {
    let mut parts = fact.split('/');
    parts.next() == Some("sysctl net")
        && matches!(parts.nth(1), Some("conf" | "neigh"))
        && parts.next().is_some_and(|link| !matches!(link, "all" | "default" | "lo"))
}

fn compare(run: &mut Run<'_>, name: &str, seen: &Both<Seen>) {
    let (ours, theirs) = match (&seen.ours, &seen.theirs) {
        (Ok(ours), Ok(theirs)) => (ours, theirs),
        (ours, theirs) => {
            let said = |seen: &Seen| {
                seen.as_ref().map_or_else(
                    |status| format!("{:?}: {}", status.code(), status.message()),
                    |_| "ran".into(),
                )
            };
            return run.compare(name, &said(ours), &said(theirs), "");
        }
    };
    for (way, (ours, theirs)) in WAYS.iter().zip(ours.iter().zip(theirs)) {
        // A report without facts would be equal to another.
        assert!(
            ours.len() > 100 && theirs.len() > 100,
            "{}, {way}: {} and {} facts",
            name,
            ours.len(),
            theirs.len()
        );
        // Daemons, links and routes come and go on the node, of other tests too.
        let is_of_node = |fact: &str| {
            name.contains("host PID") && fact == "process names of all processes"
                || name.contains("host network")
                    && (fact.starts_with("network lines of ") || is_of_a_link(fact))
        };
        for (fact, ours, theirs) in ours.beside(theirs).into_iter().filter(|(fact, ..)| !is_of_node(fact)) {
            run.compare(&format!("{name}, {way}: {fact}"), ours, theirs, "");
        }
    }
}

/// Runs the container on one side, and returns its reports.
fn see(cri: &Cri, image: &str, kinds: &[&Kind], logs: &Path, shared: &Path) -> Seen {
    const SECTIONS: [&str; 13] = [
        "status",
        "limits",
        "environment",
        "process",
        "descriptors",
        "mounts",
        "tree",
        "etc",
        "proc",
        "sysctl",
        "cgroup",
        "network",
        "devices",
    ];
    let sections = SECTIONS.iter().copied().chain(kinds.iter().all(|kind| kind.has_calls).then_some("calls"));
    let words: Vec<&str> = ["report"].into_iter().chain(sections).collect();
    fs::create_dir_all(logs).expect("a directory for logs");
    let own = kinds.iter().find(|kind| kind.has_own_pod).unwrap_or(&kinds[0]);
    let mut pod = (own.pod)();
    pod.log_directory = logs.display().to_string();
    let uid = pod.metadata.as_ref().map(|metadata| metadata.uid.clone()).unwrap_or_default();
    if let Some(linux) = &mut pod.linux {
        linux.cgroup_parent = format!("/{}/pod{uid}", cgroup());
    }
    let mut config = container(
        "one",
        image,
        &["then-sleep"].into_iter().chain(words.iter().copied()).collect::<Vec<_>>(),
        &pod,
    );
    // A kubelet always sets one, and no default is the same for all.
    resources(&mut config, |resources| resources.oom_score_adj = 500);
    for kind in kinds {
        (kind.change)(&mut pod, &mut config);
    }
    for mount in config.mounts.iter_mut().filter(|mount| mount.host_path == SHARED) {
        mount.host_path = shared.display().to_string();
    }
    if let Some(seccomp) = &mut security(&mut config).seccomp
        && seccomp.profile_type() == ProfileType::Localhost
    {
        let file = logs.join("profile.json");
        fs::write(&file, &seccomp.localhost_ref).expect("a profile");
        seccomp.localhost_ref = file.display().to_string();
    }
    let pod_id = cri.run_pod_sandbox(coracle_tests::request::run(&pod))?.pod_sandbox_id;
    let seen = see_in(cri, &pod_id, &pod, &config, &words);
    cri.remove_pod(&pod_id);
    for root in host::cgroup_roots() {
        let _ = fs::remove_dir(root.join(cgroup()).join(format!("pod{uid}")));
    }
    let _ = fs::remove_dir_all(logs);
    seen
}

fn see_in(cri: &Cri, pod_id: &str, pod: &PodSandboxConfig, config: &ContainerConfig, words: &[&str]) -> Seen {
    const END: &str = "end of report";
    let id = start(cri, pod_id, config, pod)?;
    let log = PathBuf::from(&pod.log_directory).join(&config.log_path);
    let read = || output(&String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()));
    host::wait_until("the container reports", || {
        read().contains(END) || cri.container(&id).state() == ContainerState::ContainerExited
    });
    let first = read();
    let executed = cri.exec_sync(exec(&id, words, 60))?;
    let ask = PodSandboxStatusRequest { pod_sandbox_id: pod_id.into(), verbose: false };
    let network = cri.pod_sandbox_status(ask)?.status.and_then(|status| status.network);
    let address = network.map(|network| network.ip).unwrap_or_default();
    let uid = pod.metadata.as_ref().map(|metadata| metadata.uid.clone()).unwrap_or_default();
    let own = [(id, "CONTAINER"), (pod_id.to_owned(), "POD"), (address, "ADDRESS"), (uid, "UID")];
    assert!(first.contains(END), "{}", first.lines().last().unwrap_or_default());
    Ok([&first, &*String::from_utf8_lossy(&executed.stdout)].map(|text| Report::of(text, &own)))
}
