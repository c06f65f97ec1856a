//! Tests a real monitor with real processes. Needs root, busybox-static and a built `coracle-pod` (see `fixture`).
#![forbid(unsafe_code)]

mod fixture;

use std::ffi::CString;
use std::fs;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coracle_sandbox::monitor::{self, ConnectError, LinkError, Monitor};
use coracle_wire::{
    Block, ContainerId, Event, Exit, Failure, FromMonitor, Op, PidNamespace, Propagation, Reply, Request,
    Streams, Text, ToMonitor, VERSION, decode_exit,
};

use fixture::record;

/// Timeout of every wait in these tests.
const WAIT: Duration = Duration::from_secs(10);
const SIGKILL: i32 = 9;

const PLAIN: Streams = Streams { stdin: false, tty: false, log: true };

/// A pod's state directory, a root file system, a log file, and the connection to the monitor. The test fails if
/// anything remains at its end.
struct Pod {
    directory: PathBuf,
    monitor: Monitor,
    number: u32,
    events: Vec<Event>,
}

fn strings(texts: &[&str]) -> Vec<u8> {
    texts.iter().flat_map(|text| text.bytes().chain([0])).collect()
}

fn block<'a>(bytes: &'a [u8]) -> Block<'a> {
    Block { count: bytes.iter().filter(|byte| **byte == 0).count() as u32, bytes }
}

fn id(byte: u8) -> ContainerId {
    ContainerId::from_bytes([byte; 32])
}

fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(start.elapsed() < WAIT, "timed out waiting for {what}");
        std::hint::spin_loop();
    }
}

fn open_log(path: &Path) -> OwnedFd {
    OwnedFd::from(fs::OpenOptions::new().append(true).create(true).open(path).unwrap())
}

impl Pod {
    fn new(name: &str, has_pid_namespace: bool) -> Self {
        Self::with_setup(name, |_| {
            let mut ops = vec![Op::RootPropagation { propagation: Propagation::Slave }];
            ops.extend(has_pid_namespace.then_some(Op::SharedPidNamespace));
            ops.extend([Op::HostName { name: b"web-0" }, Op::LoopbackUp]);
            record(&ops)
        })
    }

    fn with_setup(name: &str, setup: impl FnOnce(&Path) -> Vec<u8>) -> Self {
        assert!(is_root(), "these tests need root");
        let directory = std::env::temp_dir().join(format!("coracle-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        for part in ["root/bin", "root/proc", "root/tmp", "root/dev"] {
            fs::create_dir_all(directory.join(part)).unwrap();
        }
        fixture::copy_busybox(&directory.join("root/bin/sh"));
        let setup = setup(&directory);
        let monitor = fixture::spawn(&directory, None, &setup).unwrap();
        Self { directory, monitor, number: 0, events: Vec::new() }
    }

    fn greeted(mut self) -> Self {
        assert_eq!(self.ask(Request::Hello { version: VERSION }, &[]), Reply::Hello { version: VERSION });
        self
    }

    fn send(&mut self, request: Request, descriptors: &[BorrowedFd<'_>]) -> u32 {
        self.number += 1;
        self.monitor.send(&ToMonitor { number: self.number, request }, descriptors).unwrap();
        self.number
    }

    fn ask_for(&mut self, request: Request, descriptors: &[BorrowedFd<'_>]) -> (Reply, Vec<OwnedFd>) {
        let number = self.send(request, descriptors);
        wait_for("a reply", || match self.monitor.receive().unwrap()? {
            (FromMonitor::Reply { number: answered, reply }, descriptors) => {
                assert_eq!(answered, number);
                Some((reply, descriptors))
            }
            (FromMonitor::Event(event), _) => {
                self.events.push(event);
                None
            }
        })
    }

    fn ask(&mut self, request: Request, descriptors: &[BorrowedFd<'_>]) -> Reply {
        self.ask_for(request, descriptors).0
    }

    fn event(&mut self) -> Event {
        if !self.events.is_empty() {
            return self.events.remove(0);
        }
        wait_for("an event", || match self.monitor.receive().unwrap()? {
            (FromMonitor::Event(event), _) => Some(event),
            (reply, _) => panic!("{reply:?} unasked"),
        })
    }

    fn log_path(&self, container: ContainerId) -> PathBuf {
        self.directory.join(format!("{container:.2}.log"))
    }

    /// Lines of a log without their timestamps, whose format and order are checked.
    fn log(&self, container: ContainerId) -> Vec<String> {
        let text = fs::read_to_string(self.log_path(container)).unwrap();
        let (stamps, lines): (Vec<_>, Vec<_>) =
            text.lines().map(|line| line.split_once(' ').unwrap()).unzip();
        assert!(stamps.is_sorted() && stamps.iter().all(|stamp| stamp.len() == 30), "{text}");
        lines.into_iter().map(str::to_owned).collect()
    }

    /// A record that makes `root/` the root, executes `inside`, and runs a shell.
    fn shell_record(&self, script: &str, inside: &[Op<'_>]) -> Vec<u8> {
        let root = CString::new(format!("{}/root", self.directory.display())).unwrap();
        let (candidates, arguments) = (strings(&["/nothing/sh", "/bin/sh"]), strings(&["sh", "-c", script]));
        let environment = strings(&["PATH=/bin"]);
        let mut ops = vec![
            Op::Unshare { flags: 0x0002_0000 },
            Op::RootPropagation { propagation: Propagation::Slave },
            Op::OpenTree { slot: 0, path: Text::new(c"/dev/null"), recursive: false, from_host: false },
            Op::OpenTree { slot: 1, path: Text::new(c"/dev/null"), recursive: false, from_host: false },
            Op::OpenTree { slot: 2, path: Text::new(&root), recursive: true, from_host: true },
        ];
        // A root must be a mount: a tmpfs over the directory's parent would hide it, so the tree is bound there.
        ops.push(Op::Tmpfs { options: Text::new(c"mode=755"), target: Text::new(&root), flags: 0 });
        ops.push(Op::PivotRoot { new_root: Text::new(&root) });
        ops.push(Op::Attach {
            slot: 2,
            target: Text::new(c"/image"),
            attributes: 2,
            attributes_recursive: false,
            propagation: Propagation::Private,
            skip_missing: false,
        });
        ops.push(Op::Symlink { content: Text::new(c"/image/bin"), path: Text::new(c"/bin") });
        let nothing = strings(&[]);
        ops.push(Op::Filesystem {
            kind: Text::new(c"proc"),
            options: block(&nothing),
            attributes: 0xe,
            target: Text::new(c"/proc"),
        });
        ops.extend_from_slice(inside);
        ops.push(Op::Exec {
            candidates: block(&candidates),
            arguments: block(&arguments),
            environment: block(&environment),
        });
        record(&ops)
    }

    fn start(&mut self, container: ContainerId, script: &str, streams: Streams, inside: &[Op<'_>]) -> Reply {
        let launch = monitor::memfd(&self.shell_record(script, inside)).unwrap();
        let log = open_log(&self.log_path(container));
        let request = Request::Start {
            container,
            streams,
            pid: PidNamespace::New,
            has_cgroup: false,
            has_oom_counter: false,
        };
        let host = fs::File::open("/proc/self/ns/mnt").unwrap();
        let (reply, descriptors) = self.ask_for(request, &[launch.as_fd(), log.as_fd(), host.as_fd()]);
        assert_eq!(descriptors.len(), usize::from(reply == Reply::Started));
        reply
    }

    fn exec(&mut self, container: ContainerId, exec: u32, script: &str) -> (Reply, String) {
        let (candidates, arguments) = (strings(&["/bin/sh"]), strings(&["sh", "-c", script]));
        let environment = strings(&["PATH=/bin"]);
        let launch = record(&[Op::Exec {
            candidates: block(&candidates),
            arguments: block(&arguments),
            environment: block(&environment),
        }]);
        let launch = monitor::memfd(&launch).unwrap();
        let null = OwnedFd::from(fs::File::open("/dev/null").unwrap());
        let (mut reader, writer) = std::io::pipe().unwrap();
        let request = Request::Exec { exec, container, has_cgroup: false };
        let descriptors = [launch.as_fd(), null.as_fd(), writer.as_fd(), writer.as_fd()];
        let reply = self.ask(request, &descriptors);
        drop(writer);
        let mut output = String::new();
        reader.read_to_string(&mut output).unwrap();
        (reply, output)
    }

    /// Starts an exec without reading its output.
    fn exec_quietly(&mut self, container: ContainerId, exec: u32, script: &str) -> Reply {
        let (candidates, arguments) = (strings(&["/bin/sh"]), strings(&["sh", "-c", script]));
        let launch = record(&[Op::Exec {
            candidates: block(&candidates),
            arguments: block(&arguments),
            environment: block(&[]),
        }]);
        let launch = monitor::memfd(&launch).unwrap();
        let null = OwnedFd::from(fs::OpenOptions::new().read(true).write(true).open("/dev/null").unwrap());
        let request = Request::Exec { exec, container, has_cgroup: false };
        self.ask(request, &[launch.as_fd(), null.as_fd(), null.as_fd(), null.as_fd()])
    }

    fn exited(&mut self, container: ContainerId) -> Exit {
        let event = self.event();
        let Event::Exited(told) = event else { panic!("{event:?}") };
        assert_eq!(told.container, container);
        let path = self.directory.join(format!("exits/{container}"));
        assert_eq!(decode_exit(&fs::read(path).unwrap()), Ok(told));
        told.exit
    }

    /// Ends the monitor and checks that no process, file or mount remains.
    fn end(mut self) {
        assert_eq!(self.ask(Request::Shutdown, &[]), Reply::Done);
        wait_for("the monitor's end", || self.monitor.is_gone().then_some(()));
        assert_eq!(monitor::connect(&self.directory).unwrap_err(), ConnectError::NotThere);
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(!mounts.contains(&*self.directory.to_string_lossy()), "{mounts}");
        fs::remove_dir_all(&self.directory).unwrap();
    }
}

/// Cleans up if a test fails.
impl Drop for Pod {
    fn drop(&mut self) {
        let _ = self.monitor.signal(SIGKILL);
        let _ = fs::remove_dir_all(&self.directory);
    }
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|data| std::os::unix::fs::MetadataExt::uid(&data) == 0)
}

#[test]
fn a_container_runs_logs_and_leaves_its_exit_record_as_root() {
    let mut pod = Pod::new("runs", true).greeted();
    let script = "echo out; echo err >&2; hostname; echo pid $$; echo -n rest; exit 7";
    let hostname = Op::Symlink { content: Text::new(c"/image/bin/sh"), path: Text::new(c"/hostname") };
    assert_eq!(pod.start(id(1), script, PLAIN, &[hostname]), Reply::Started);
    assert_eq!(pod.exited(id(1)), Exit::Code(7));
    let log = pod.log(id(1));
    for line in ["stdout F out", "stderr F err", "stdout F web-0", "stdout F pid 1", "stdout P rest"] {
        assert!(log.iter().any(|found| found == line), "{line:?} in {log:?}");
    }
    assert_eq!(pod.ask(Request::Forget { container: id(1) }, &[]), Reply::Done);
    assert_eq!(fs::read_dir(pod.directory.join("exits")).unwrap().count(), 0);
    pod.end();
}

#[test]
fn a_process_inherits_nothing_of_the_monitor_as_root() {
    let mut pod = Pod::new("clean", true).greeted();
    let script = "grep -E '^(Sig(Blk|Ign)|NoNewPrivs|CapBnd)' /proc/self/status; echo /proc/self/fd/*; umask; \
                  echo x > /proc/sys/kernel/hostname; cat /proc/timer_list | wc -c; ls /proc/acpi | wc -l";
    let inside = [
        Op::ReadOnly { target: Text::new(c"/proc/sys") },
        Op::Mask { slot: 0, target: Text::new(c"/proc/timer_list") },
        Op::Mask { slot: 1, target: Text::new(c"/proc/acpi") },
        Op::ReadOnlyRoot,
        Op::BoundingSet { keep: 1 << 21 },
        Op::NoNewPrivileges,
        Op::Umask { mask: 0o027 },
    ];
    assert_eq!(pod.start(id(1), script, PLAIN, &inside), Reply::Started);
    assert_eq!(pod.exited(id(1)), Exit::Code(0));
    let log = pod.log(id(1)).join("\n");
    for line in [
        "SigBlk:\t0000000000000000",
        "SigIgn:\t0000000000000000",
        "CapBnd:\t0000000000200000",
        "NoNewPrivs:\t1",
        "stdout F 0027",
        "Read-only file system",
        "/proc/self/fd/0 /proc/self/fd/1 /proc/self/fd/2 /proc/self/fd/3",
    ] {
        assert!(log.contains(line), "{line:?} in {log}");
    }
    // Masked paths are empty.
    assert_eq!(log.lines().filter(|line| *line == "stdout F 0").count(), 2, "{log}");
    pod.end();
}

#[test]
fn failures_name_their_operation_and_leave_nothing_as_root() {
    let mut pod = Pod::new("fails", false).greeted();
    let bad = Op::WorkingDirectory { path: Text::new(c"/not/there"), create: false };
    let failed = |index, errno| Reply::Failed(Failure::Operation { index, errno });
    assert_eq!(pod.start(id(1), "true", PLAIN, &[bad]), failed(10, 2));
    let request = Request::Signal { container: id(1), signal: 0 };
    assert_eq!(pod.ask(request, &[]), Reply::Failed(Failure::Refused { errno: 3 }));
    let unsealed = OwnedFd::from(fs::File::open("/dev/null").unwrap());
    let streams = Streams { stdin: false, tty: false, log: false };
    let request = Request::Start {
        container: id(1),
        streams,
        pid: PidNamespace::New,
        has_cgroup: false,
        has_oom_counter: false,
    };
    assert_eq!(pod.ask(request, &[unsealed.as_fd()]), failed(0, 22));
    assert_eq!(pod.ask(request, &[]), Reply::Failed(Failure::Refused { errno: 22 }));
    pod.end();
}

#[test]
fn execs_see_the_container_and_end_with_their_code_as_root() {
    let mut pod = Pod::new("exec", true).greeted();
    assert_eq!(pod.start(id(1), "touch /mark; sleep 100", PLAIN, &[]), Reply::Started);
    let (reply, output) =
        pod.exec(id(1), 9, "while ! test -e /mark; do :; done; ls / | tr '\\n' ' '; kill -0 1 && exit 3");
    assert_eq!((reply, output.as_str()), (Reply::Started, "bin image mark proc "));
    assert_eq!(pod.event(), Event::ExecExited { exec: 9, exit: Exit::Code(3) });
    assert_eq!(pod.exec(id(2), 10, "true").0, Reply::Failed(Failure::Refused { errno: 3 }));
    assert_eq!(
        pod.ask(Request::Forget { container: id(1) }, &[]),
        Reply::Failed(Failure::Refused { errno: 16 })
    );
    assert_eq!(pod.ask(Request::Signal { container: id(1), signal: SIGKILL }, &[]), Reply::Done);
    assert_eq!(pod.exited(id(1)), Exit::Signal(9));
    pod.end();
}

#[test]
fn a_container_can_share_the_pid_namespace_of_another_as_root() {
    let mut pod = Pod::new("share", true).greeted();
    assert_eq!(pod.start(id(1), "sleep 100", PLAIN, &[]), Reply::Started);
    let launch = monitor::memfd(&pod.shell_record("kill -9 1; sleep 100", &[])).unwrap();
    let streams = Streams { stdin: false, tty: false, log: false };
    let start = |container, other| Request::Start {
        container,
        streams,
        pid: PidNamespace::Of(other),
        has_cgroup: false,
        has_oom_counter: false,
    };
    let refused = Reply::Failed(Failure::Refused { errno: 3 });
    let host = fs::File::open("/proc/self/ns/mnt").unwrap();
    let descriptors = [launch.as_fd(), host.as_fd()];
    assert_eq!(pod.ask(start(id(2), id(3)), &descriptors), refused);
    assert_eq!(pod.ask(start(id(2), id(1)), &descriptors), Reply::Started);
    // A later container is in the monitor's own namespace again.
    assert_eq!(pod.start(id(4), "echo pid $$", PLAIN, &[]), Reply::Started);
    assert_eq!(pod.exited(id(4)), Exit::Code(0));
    assert_eq!(pod.log(id(4)), ["stdout F pid 1"]);
    assert_eq!(pod.ask(Request::Signal { container: id(1), signal: SIGKILL }, &[]), Reply::Done);
    // The kernel first kills all others of a PID namespace; its init is reaped last.
    assert_eq!([pod.exited(id(2)), pod.exited(id(1))], [Exit::Signal(9), Exit::Signal(9)]);
    pod.end();
}

/// A filter that allows all calls except `mount_setattr`, which returns ENOSYS as on a kernel before 5.12.
fn without_mount_setattr() -> Vec<u8> {
    const MOUNT_SETATTR: u32 = 442;
    const ENOSYS: u32 = 38;
    // Load the number; jump over the next where it differs; refuse; allow.
    let program = [
        (0x20_u16, 0_u8, 0_u8, 0_u32),
        (0x15, 0, 1, MOUNT_SETATTR),
        (0x06, 0, 0, 0x0005_0000 | ENOSYS),
        (0x06, 0, 0, 0x7fff_0000),
    ];
    let bytes = program.iter().flat_map(|(code, yes, no, operand)| {
        code.to_ne_bytes().into_iter().chain([*yes, *no]).chain(operand.to_ne_bytes())
    });
    bytes.collect()
}

#[test]
fn read_only_mounts_work_before_linux_5_12_as_root() {
    let mut pod = Pod::new("old", true).greeted();
    let program = without_mount_setattr();
    let seccomp = Op::Seccomp { program: &program, flags: 0 };
    let attach = |attributes_recursive| Op::Attach {
        slot: 0,
        target: Text::new(c"/data/null"),
        attributes: 1,
        attributes_recursive,
        propagation: Propagation::Slave,
        skip_missing: false,
    };
    let inside = [seccomp, attach(false), Op::ReadOnly { target: Text::new(c"/proc/sys") }, Op::ReadOnlyRoot];
    let script = "grep -cE ' (/|/proc/sys|/data/null) [^ ]+ ro,' /proc/self/mounts; \
                  awk '$5 == \"/\" || $5 == \"/proc/sys\" || $5 == \"/data/null\" {print $5, $6}' /proc/self/mountinfo";
    assert_eq!(pod.start(id(1), script, PLAIN, &inside), Reply::Started);
    pod.exited(id(1));
    let log = pod.log(id(1)).join("\n");
    for mount in ["/ ro", "/proc/sys ro", "/data/null ro"] {
        assert!(log.contains(&format!("stdout F {mount}")), "{mount} in {log}");
    }
    let failed = Reply::Failed(Failure::Operation { index: 11, errno: 38 });
    assert_eq!(pod.start(id(2), "true", PLAIN, &[seccomp, attach(true)]), failed);
    pod.end();
}

#[test]
fn a_reconnected_daemon_is_notified_of_exits_as_root() {
    let mut pod = Pod::new("again", true).greeted();
    assert_eq!(
        pod.start(id(1), "read line; echo $line; exit 4", Streams { stdin: true, ..PLAIN }, &[]),
        Reply::Started
    );
    assert_eq!(pod.start(id(2), "sleep 100", PLAIN, &[]), Reply::Started);
    let (reply, mut descriptors) = pod.ask_for(Request::Stdin { container: id(1) }, &[]);
    assert_eq!(reply, Reply::Done);
    // The daemon disconnects, and the container ends meanwhile.
    let mut old = std::mem::replace(&mut pod.monitor, monitor::connect(&pod.directory).unwrap());
    wait_for("the old connection's end", || matches!(old.receive(), Err(LinkError::Closed)).then_some(()));
    std::io::Write::write_all(&mut fs::File::from(descriptors.remove(0)), b"late\n").unwrap();
    let path = pod.directory.join(format!("exits/{}", id(1)));
    wait_for("the exit record", || path.exists().then_some(()));
    old = monitor::connect(&pod.directory).unwrap();
    drop(std::mem::replace(&mut pod.monitor, old));
    let mut pod = pod.greeted();
    assert_eq!(pod.exited(id(1)), Exit::Code(4));
    assert_eq!(pod.log(id(1)), ["stdout F late"]);
    assert_eq!(pod.ask(Request::Signal { container: id(2), signal: 0 }, &[]), Reply::Done);
    pod.end();
}

#[test]
fn a_terminal_is_logged_and_written_to_as_root() {
    let mut pod = Pod::new("tty", true).greeted();
    let options = strings(&["newinstance", "ptmxmode=0666", "mode=0620"]);
    let devpts = Op::Filesystem {
        kind: Text::new(c"devpts"),
        options: block(&options),
        attributes: 0xa,
        target: Text::new(c"/dev/pts"),
    };
    let streams = Streams { stdin: true, tty: true, log: true };
    let script = "test -t 0 && test -t 2 && tty && test -c /dev/console && read line && echo got $line";
    assert_eq!(pod.start(id(1), script, streams, &[devpts, Op::Terminal]), Reply::Started);
    let (reply, mut descriptors) = pod.ask_for(Request::Stdin { container: id(1) }, &[]);
    assert_eq!((reply, descriptors.len()), (Reply::Done, 1));
    std::io::Write::write_all(&mut fs::File::from(descriptors.remove(0)), b"hello\n").unwrap();
    assert_eq!(pod.exited(id(1)), Exit::Code(0));
    let log = pod.log(id(1));
    assert!(
        log.contains(&"stdout F /dev/pts/0".to_owned()) && log.contains(&"stdout F got hello".to_owned()),
        "{log:?}"
    );
    pod.end();
}

#[test]
fn a_reopened_log_gets_every_later_line_as_root() {
    let mut pod = Pod::new("reopen", true).greeted();
    let script = "echo one; read line; echo two; yes 0123456789 | head -n 100000; exit 0";
    assert_eq!(pod.start(id(1), script, Streams { stdin: true, ..PLAIN }, &[]), Reply::Started);
    wait_for("the first line", || (pod.log(id(1)) == ["stdout F one"]).then_some(()));
    fs::rename(pod.log_path(id(1)), pod.directory.join("old.log")).unwrap();
    let log = open_log(&pod.log_path(id(1)));
    assert_eq!(pod.ask(Request::ReopenLog { container: id(1) }, &[log.as_fd()]), Reply::Done);
    let (_, mut descriptors) = pod.ask_for(Request::Stdin { container: id(1) }, &[]);
    std::io::Write::write_all(&mut fs::File::from(descriptors.remove(0)), b"\n").unwrap();
    assert_eq!(pod.exited(id(1)), Exit::Code(0));
    let log = pod.log(id(1));
    assert_eq!((log.len(), log[0].as_str()), (100_001, "stdout F two"));
    assert!(log[1..].iter().all(|line| line == "stdout F 0123456789"));
    pod.end();
}

#[test]
fn a_full_disk_costs_lines_and_not_the_container_as_root() {
    let mut pod = Pod::new("full", true).greeted();
    std::os::unix::fs::symlink("/dev/full", pod.log_path(id(1))).unwrap();
    assert_eq!(pod.start(id(1), "echo one; echo two; exit 5", PLAIN, &[]), Reply::Started);
    let event = pod.event();
    let Event::Exited(record) = event else { panic!("{event:?}") };
    assert_eq!((record.exit, record.lost_log_lines), (Exit::Code(5), 2));
    pod.end();
}

#[test]
fn tables_are_bounded_and_unread_events_wait_as_root() {
    let mut pod = Pod::new("many", true).greeted();
    assert_eq!(pod.start(id(1), "sleep 100", PLAIN, &[]), Reply::Started);
    let mut sleeping = (0..128).map(|exec| pod.exec_quietly(id(1), exec, "sleep 100"));
    assert!(sleeping.all(|reply| reply == Reply::Started));
    assert_eq!(pod.exec_quietly(id(1), 128, "true"), Reply::Failed(Failure::Refused { errno: 11 }));
    // The end of the namespace ends all execs: 128 events and that of the container, none of which is read meanwhile.
    assert_eq!(pod.ask(Request::Signal { container: id(1), signal: SIGKILL }, &[]), Reply::Done);
    let is_exec = |event: &Event| matches!(event, Event::ExecExited { exit: Exit::Signal(9), .. });
    assert_eq!((0..129).map(|_| pod.event()).filter(is_exec).count(), 128);
    pod.end();
}

#[test]
fn sigterm_ends_a_monitor_with_all_it_started_as_root() {
    let mut pod = Pod::new("term", false).greeted();
    let script = "trap '' TERM; sleep 100 & sleep 100";
    assert_eq!(pod.start(id(1), script, PLAIN, &[]), Reply::Started);
    pod.monitor.signal(15).unwrap();
    wait_for("the monitor's end", || pod.monitor.is_gone().then_some(()));
    let record = fs::read(pod.directory.join(format!("exits/{}", id(1)))).unwrap();
    assert_eq!(decode_exit(&record).unwrap().exit, Exit::Signal(9));
    fs::remove_dir_all(&pod.directory).unwrap();
}

#[test]
fn a_monitor_that_cannot_start_leaves_nothing_as_root() {
    let directory = std::env::temp_dir().join(format!("coracle-nothing-{}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    let started = fixture::spawn_program(Path::new("/proc/self/status"), &directory, None, &record(&[]));
    let error = started.unwrap_err().to_string();
    assert!(error.starts_with("execute monitor of ") && error.ends_with("xec format error"), "{error}");
    assert_eq!(monitor::connect(&directory).unwrap_err(), ConnectError::NotThere);
    fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn a_failed_setup_is_reported_and_ends_the_monitor_as_root() {
    let mut pod = Pod::with_setup("setup", |_| record(&[Op::LoopbackUp, Op::ReadOnlyRoot]));
    let reply = pod.ask(Request::Hello { version: VERSION }, &[]);
    assert_eq!(reply, Reply::Failed(Failure::Operation { index: 1, errno: 22 }));
    wait_for("the monitor's end", || pod.monitor.is_gone().then_some(()));
    fs::remove_dir_all(&pod.directory).unwrap();
}

#[test]
fn an_idle_monitor_is_small_as_root() {
    let mut pod = Pod::new("small", true).greeted();
    assert_eq!(pod.start(id(1), "sleep 100", PLAIN, &[]), Reply::Started);
    assert_eq!(pod.exec(id(1), 1, "true").0, Reply::Started);
    assert_eq!(pod.event(), Event::ExecExited { exec: 1, exit: Exit::Code(0) });
    wait_for("the stack is returned but for two pages", || {
        let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", pod.monitor.pid)).unwrap();
        let kib =
            rollup.lines().find_map(|line| line.strip_prefix("Anonymous:")?.strip_suffix("kB")).unwrap();
        (kib.trim().parse::<u64>().unwrap() <= 24).then_some(())
    });
    pod.end();
}
