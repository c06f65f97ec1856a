//! Tests the built program from outside: READY, signals, a second daemon, flags. Needs no privileges.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Time limit of all waits in these tests.
const LONG: Duration = Duration::from_secs(10);

/// A directory for one test; dropping it ends the processes of the test.
struct Node {
    directory: PathBuf,
    manager: UnixDatagram,
    daemon: Option<Child>,
}

impl Node {
    fn new(name: &str, config: &str) -> Node {
        let directory = std::env::temp_dir().join(format!("coracle-serve-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::write(directory.join("config.toml"), config).unwrap();
        // The monitor's program is loaded at the start; no pod is started.
        std::fs::write(directory.join("coracle-pod"), "").unwrap();
        std::fs::create_dir_all(directory.join("conf.d")).unwrap();
        let programs = format!("program_dir = {:?}\n", directory.display().to_string());
        std::fs::write(directory.join("conf.d/programs.toml"), programs).unwrap();
        let manager = UnixDatagram::bind(directory.join("notify")).unwrap();
        manager.set_read_timeout(Some(LONG)).unwrap();
        Node { directory, manager, daemon: None }
    }

    fn path(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }

    fn spawn(&self) -> Child {
        self.spawn_with("root", "state", "")
    }

    /// Starts a daemon with these directories, and sockets whose names have this prefix.
    fn spawn_with(&self, root: &str, state: &str, prefix: &str) -> Child {
        let listen = format!("unix://{}", self.path(&format!("{prefix}cri.sock")));
        Command::new(env!("CARGO_BIN_EXE_coracled"))
            .args(["--config", &self.path("config.toml"), "--root", &self.path(root)])
            .args(["--state", &self.path(state), "--listen", &listen])
            .args(["--nri-socket", &self.path(&format!("{prefix}nri.sock"))])
            .env("NOTIFY_SOCKET", self.path("notify"))
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    fn start(&mut self) {
        self.daemon = Some(self.spawn());
        assert_eq!(self.told(), "READY=1");
    }

    /// Receives the daemon's next notification to systemd.
    fn told(&self) -> String {
        let mut text = [0; 256];
        // Where a receive has a time limit, a suspension of the machine interrupts it (signal(7)).
        let count = loop {
            match self.manager.recv(&mut text) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                received => break received.expect("nothing was told in time"),
            }
        };
        String::from_utf8(text[..count].to_vec()).unwrap()
    }

    /// A second daemon with these directories, one of which is this one's, is refused with this one's PID.
    #[track_caller]
    fn refuses_another(&self, root: &str, state: &str) {
        let (code, log) = finish(self.spawn_with(root, state, "other-"));
        assert_eq!(code, Some(1), "{log}");
        let (what, path) = if root == "root" { ("root", "root") } else { ("state", "state/lock") };
        let (path, pid) = (self.path(path), self.pid());
        let expected = format!("{path}: another daemon runs on this {what} directory: process {pid}");
        assert!(log.contains(&expected), "{expected}: {log}");
    }

    /// Waits until another process has locked this file.
    #[track_caller]
    #[expect(clippy::disallowed_methods, reason = "the test waits, not the daemon")]
    fn wait_until_locked(&self, name: &str) {
        let end = Instant::now() + LONG;
        let is_locked = || {
            let file = std::fs::File::open(self.path(name));
            file.is_ok_and(|file| file.try_lock_shared().is_err())
        };
        while !is_locked() {
            assert!(Instant::now() < end, "it is not locked");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.daemon.as_ref().unwrap().id() as i32)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Waits for a program that ends by itself; returns its exit code and standard error.
fn finish(mut child: Child) -> (Option<i32>, String) {
    let start = Instant::now();
    let mut log = read_until(&mut child, |_| false);
    if start.elapsed() >= LONG {
        child.kill().unwrap();
        log.push_str("(killed by the test)");
    }
    (child.wait().unwrap().code(), log)
}

/// Reads standard error until `is_enough`, end of file, or the time limit.
fn read_until(child: &mut Child, is_enough: impl Fn(&str) -> bool) -> String {
    let end = Instant::now() + LONG;
    let stderr = child.stderr.as_mut().unwrap();
    let mut log = String::new();
    while !is_enough(&log) && Instant::now() < end {
        let left = u16::try_from(end.saturating_duration_since(Instant::now()).as_millis()).unwrap();
        let mut poll = [PollFd::new(stderr.as_fd(), PollFlags::POLLIN)];
        let ready = nix::poll::poll(&mut poll, PollTimeout::from(left));
        let mut part = [0; 4096];
        match ready.unwrap() {
            0 => break,
            _ => match stderr.read(&mut part).unwrap() {
                0 => break,
                count => log.push_str(std::str::from_utf8(&part[..count]).unwrap()),
            },
        }
    }
    log
}

fn coracled(arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_coracled"));
    finish(command.args(arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap())
}

#[test]
fn the_daemon_has_one_thread_and_ends_cleanly() {
    let mut node = Node::new("clean", "");
    node.start();
    let _client = UnixStream::connect(node.path("cri.sock")).unwrap();
    let status = std::fs::read_to_string(format!("/proc/{}/status", node.pid())).unwrap();
    assert!(status.contains("\nThreads:\t1\n"), "{status}");
    node.signal(Signal::SIGTERM);
    assert_eq!(node.told(), "STOPPING=1");
    let (code, log) = finish(node.daemon.take().unwrap());
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains("msg=stopped"), "{log}");
}

#[test]
fn a_second_daemon_leaves_the_first_ones_socket() {
    let mut node = Node::new("second", "");
    node.start();
    let (code, log) = finish(node.spawn());
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("another daemon"), "{log}");
    UnixStream::connect(node.path("cri.sock")).unwrap();
}

/// Finding F3: only the state directory was locked. A second daemon with the same root and another state served, and killed
/// the containers of the first one as unknown.
#[test]
fn a_second_daemon_on_the_same_root_or_state_is_refused_with_the_first_ones_pid() {
    let mut node = Node::new("root", "");
    node.start();
    for (root, state) in [("root", "other"), ("other", "state")] {
        node.refuses_another(root, state);
    }
    UnixStream::connect(node.path("cri.sock")).unwrap();
}

/// Removes a directory in which the daemon may create its lock again before it is removed.
fn remove_directory(path: &str) {
    let end = Instant::now() + LONG;
    while let Err(error) = std::fs::remove_dir_all(path) {
        let is_filled = error.kind() == std::io::ErrorKind::DirectoryNotEmpty;
        assert!(is_filled && Instant::now() < end, "{path}: {error}");
    }
}

/// Regression: the removed file or directory stayed locked, and a second daemon with another root served with this state, or with
/// another state on this root.
#[test]
fn a_lock_that_another_program_removes_is_taken_again() {
    let mut node = Node::new("relock", "");
    node.start();
    for name in ["state", "state/lock", "state", "root", "root"] {
        let path = node.path(name);
        match name {
            "state/lock" => std::fs::remove_file(path).unwrap(),
            _ => remove_directory(&path),
        }
        if name == "root" {
            node.wait_until_locked("root");
            node.refuses_another("root", "other");
        } else {
            node.wait_until_locked("state/lock");
            node.refuses_another("other", "state");
        }
    }
    // Of one that was faster the daemon says so.
    std::fs::create_dir(node.path("ready")).unwrap();
    let faster = std::fs::File::create(node.path("ready/lock")).unwrap();
    faster.lock().unwrap();
    let (ready, state) = (node.path("ready"), node.path("state"));
    let exchange = RenameFlags::RENAME_EXCHANGE;
    renameat2(AT_FDCWD, ready.as_str(), AT_FDCWD, state.as_str(), exchange).unwrap();
    let expected = format!("runs on this state directory: process {}", std::process::id());
    let log = read_until(node.daemon.as_mut().unwrap(), |log| log.contains(&expected));
    assert!(log.contains(&expected), "{log}");
    drop(faster);
    node.wait_until_locked("state/lock");
}

#[test]
fn a_restarted_daemon_listens_at_the_socket_of_a_killed_one() {
    let mut node = Node::new("again", "");
    node.start();
    node.signal(Signal::SIGKILL);
    node.daemon.take().unwrap().wait().unwrap();
    assert!(Path::new(&node.path("cri.sock")).exists());
    node.start();
    UnixStream::connect(node.path("cri.sock")).unwrap();
}

#[test]
fn a_reload_applies_reloadable_keys_and_refuses_mistakes() {
    let mut node = Node::new("reload", "log_level = 'warn'\n");
    node.start();
    for (config, expected) in [
        ("log_level = 'loud'\n", "config.toml:1: log_level: expected one of"),
        ("log_level = 'info'\n[streaming]\nport = 7\n", "keys=streaming.port"),
    ] {
        std::fs::write(node.path("config.toml"), config).unwrap();
        node.signal(Signal::SIGHUP);
        let log = read_until(node.daemon.as_mut().unwrap(), |log| log.contains(expected));
        assert!(log.contains(expected), "{log}");
    }
    node.signal(Signal::SIGUSR1);
    let log = read_until(node.daemon.as_mut().unwrap(), |log| log.contains("msg=\"dump of the daemon\""));
    assert!(log.contains("calls_total=0"), "{log}");
}

#[test]
fn an_invalid_configuration_is_named_and_nothing_starts() {
    let node = Node::new("wrong", "rooot = '/x'\n");
    let (code, log) = finish(node.spawn());
    assert_eq!(code, Some(2), "{log}");
    assert!(log.contains("config.toml:1: unknown key `rooot`, did you mean `root`?"), "{log}");
    let (code, log) = coracled(&["--rot", "/x"]);
    assert_eq!((code, log.as_str()), (Some(2), "coracled: unknown flag `--rot`, did you mean `--root`?\n"));
    for words in [["--help"], ["--version"]] {
        assert_eq!(coracled(&words), (Some(0), String::new()));
    }
    // Where a value is expected these are no requests: a supervisor would see a clean end.
    let (code, log) = coracled(&["--log-level", "-V"]);
    assert!(code == Some(2) && log.contains("log_level"), "{log}");
    let (code, log) = coracled(&["check"]);
    assert_eq!((code, log.contains("commands are in the program coracle")), (Some(2), true), "{log}");
}
