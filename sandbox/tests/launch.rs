//! Executes the plans of a pod, a container and an exec, and checks what their processes see. Needs root,
//! busybox-static and a built `coracle-pod` (see `fixture`).
#![forbid(unsafe_code)]

mod fixture;
mod verify;

use std::fs;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coracle_sandbox::capability::Capabilities;
use coracle_sandbox::identity::Identity;
use coracle_sandbox::monitor::{self, Monitor};
use coracle_sandbox::plan::{
    self, Attributes, CgroupMount, ContainerPlan, ExecPlan, Files, Limit, PodNamespaces, Process,
    ProcessPlan, Root, SandboxPlan, Scheduling, Waits,
};
use coracle_wire::{
    ContainerId, Event, Exit, FromMonitor, PidNamespace, Reply, Request, Streams, ToMonitor, VERSION,
};

const WAIT: Duration = Duration::from_secs(10);
const CONTAINER: ContainerId = ContainerId::from_bytes([7; 32]);

fn next(monitor: &Monitor) -> (FromMonitor, Vec<OwnedFd>) {
    let start = Instant::now();
    loop {
        if let Some(frame) = monitor.receive().unwrap() {
            return frame;
        }
        assert!(start.elapsed() < WAIT, "the monitor says nothing");
        std::hint::spin_loop();
    }
}

fn ask(monitor: &Monitor, request: Request, descriptors: &[BorrowedFd<'_>]) -> Reply {
    monitor.send(&ToMonitor { number: 1, request }, descriptors).unwrap();
    match next(monitor).0 {
        FromMonitor::Reply { reply, .. } => reply,
        event => panic!("{event:?}"),
    }
}

fn start_monitor(directory: &Path) -> Monitor {
    let setup = plan::sandbox(&SandboxPlan {
        shares_pids: true,
        namespaces: PodNamespaces { network: true, ipc: true, uts: true },
        shm_directory: directory.join("shm"),
        host_name: "web-0".into(),
        sysctls: vec![("kernel.msgmax".into(), "12345".into())],
        convenience_sysctls: true,
        oom_score_adj: Some(-998),
        user_namespace: None,
        label: None,
    });
    fixture::spawn(directory, None, &setup.unwrap()).unwrap()
}

fn process(script: &str) -> Process {
    Process {
        arguments: vec!["sh".into(), "-c".into(), script.into()],
        environment: vec![b"PATH=/sbin:/bin".to_vec()],
        working_directory: "/work".into(),
        identity: Identity { uid: 1000, gid: 1000, groups: vec![1000, 50_000] },
        capabilities: Capabilities { bounding: 1 << 10, ..Capabilities::default() },
        attributes: Attributes { no_new_privileges: true },
        oom_score_adj: 0,
    }
}

fn process_plan(script: &str) -> ProcessPlan {
    let limits = vec![Limit { resource: 7, soft: 512, hard: 512 }];
    ProcessPlan { process: process(script), limits, ..ProcessPlan::default() }
}

fn container_plan(directory: &Path) -> ContainerPlan {
    ContainerPlan {
        root: Root {
            layers_directory: directory.to_owned(),
            lowers: vec!["layer".into()],
            upper: directory.join("upper"),
            work: directory.join("work"),
            mountpoint: directory.join("mountpoint"),
            read_only: true,
            label: None,
        },
        cgroup_joins: vec![],
        has_cgroup_namespace: true,
        cgroup_mount: CgroupMount::None,
        mounts: vec![],
        image_volumes: vec![],
        files: Files {
            hosts: directory.join("hosts"),
            host_name: directory.join("hosts"),
            resolv_conf: directory.join("hosts"),
        },
        shm: directory.join("shm"),
        has_kcore: true,
        devices: vec![],
        scheduling: Scheduling::default(),
        masked_paths: plan::MASKED_PATHS.iter().map(|path| (*path).to_owned()).collect(),
        readonly_paths: plan::READONLY_PATHS.iter().map(|path| (*path).to_owned()).collect(),
        privileged: false,
        user_namespace: None,
        is_cgroup_mount_writable: false,
        without_mounts: Vec::new(),
        namespaces: Vec::new(),
        sysctls: Vec::new(),
        own_namespaces: PodNamespaces { network: false, ipc: false, uts: false },
    }
}

fn make_directory(name: &str) -> PathBuf {
    let directory = std::env::temp_dir().join(format!("coracle-launch-{name}-{}", std::process::id()));
    for part in ["layer/bin", "upper", "work", "mountpoint", "shm"] {
        fs::create_dir_all(directory.join(part)).unwrap();
    }
    fixture::copy_busybox(&directory.join("layer/bin/sh"));
    fs::write(directory.join("hosts"), "127.0.0.1 localhost\n").unwrap();
    directory
}

/// Removes the monitor and its directory on drop, also if the test fails.
struct CleanUp<'a>(&'a Monitor, &'a Path);

impl Drop for CleanUp<'_> {
    fn drop(&mut self) {
        let _ = self.0.signal(9);
        let _ = fs::remove_dir_all(self.1);
    }
}

#[test]
fn a_container_and_an_exec_see_what_was_planned_as_root() {
    let directory = make_directory("sees");
    let monitor = start_monitor(&directory);
    let rests = CleanUp(&monitor, &directory);
    assert_eq!(ask(&monitor, Request::Hello { version: VERSION }, &[]), Reply::Hello { version: VERSION });
    let script = "id; hostname; pwd; ulimit -n; cat /proc/sys/kernel/msgmax; ls /dev | xargs; \
                  grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status | xargs; cat /etc/hosts; \
                  echo x > /root-file; echo y > /dev/stdout; echo z > /dev/shm/file && cat /dev/shm/file; \
                  ip addr show lo | grep -c 127.0.0.1; sleep 100";
    let launch = plan::container(&container_plan(&directory), &process_plan(script), VERSION, Waits::Never)
        .unwrap()
        .bytes;
    let launch = monitor::memfd(&launch).unwrap();
    let log = directory.join("log");
    let file = OwnedFd::from(fs::File::options().append(true).create(true).open(&log).unwrap());
    let request = Request::Start {
        container: CONTAINER,
        streams: Streams { stdin: false, tty: false, log: true },
        pid: PidNamespace::New,
        has_cgroup: false,
        has_oom_counter: false,
    };
    assert_eq!(ask(&monitor, request, &[launch.as_fd(), file.as_fd()]), Reply::Started);
    let start = Instant::now();
    while !fs::read_to_string(&log).unwrap().contains(" F 1\n") {
        assert!(start.elapsed() < WAIT, "{}", fs::read_to_string(&log).unwrap());
    }
    let text = fs::read_to_string(&log).unwrap();
    for line in [
        "F uid=1000 gid=1000 groups=1000,50000",
        "F web-0",
        "F /work",
        "F 512",
        "F 12345",
        "F core fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero",
        "F CapEff: 0000000000000000 CapBnd: 0000000000000400 NoNewPrivs: 1",
        "F 127.0.0.1 localhost",
        "Read-only file system",
        "F y",
        "F z",
    ] {
        assert!(text.contains(line), "{line:?} in {text}");
    }
    exec_with_a_terminal(&monitor);
    assert_eq!(ask(&monitor, Request::Shutdown, &[]), Reply::Done);
    let start = Instant::now();
    while !monitor.is_gone() {
        assert!(start.elapsed() < WAIT, "the monitor does not end");
    }
    drop(rests);
    assert!(!directory.exists());
}

fn exec_with_a_terminal(monitor: &Monitor) {
    let script = "test -t 0 && read line && exit $line";
    let process = ProcessPlan { tty: true, ..process_plan(script) };
    let launch =
        plan::exec(&ExecPlan { cgroup_joins: vec![], process, user_namespace: None }, VERSION).unwrap();
    let launch = monitor::memfd(&launch).unwrap();
    let null = OwnedFd::from(fs::File::open("/dev/null").unwrap());
    let request = Request::Exec { exec: 1, container: CONTAINER, has_cgroup: false };
    let descriptors = [launch.as_fd(), null.as_fd(), null.as_fd(), null.as_fd()];
    monitor.send(&ToMonitor { number: 2, request }, &descriptors).unwrap();
    let (frame, mut descriptors) = next(monitor);
    assert_eq!(frame, FromMonitor::Reply { number: 2, reply: Reply::Started });
    // The pidfd and the master side of the terminal.
    assert_eq!(descriptors.len(), 2);
    assert!(monitor::pid_of(descriptors[0].as_fd()).is_some());
    // Kept open until the end, because closing it would hang up the terminal.
    let mut terminal = fs::File::from(descriptors.remove(1));
    terminal.write_all(b"5\n").unwrap();
    let ended = FromMonitor::Event(Event::ExecExited { exec: 1, exit: Exit::Code(5) });
    assert_eq!(next(monitor).0, ended);
}
