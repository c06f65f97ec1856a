//! The two processes of a pull from outside: the fetcher has the network and nothing of the node, the worker
//! that writes the store has no network; and the state after either of them, or their daemon, is killed.

use std::fs;
use std::io::Read;
use std::net::UdpSocket;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use coracle_tests::fault::{Fault, Faulty};
use coracle_tests::host::{self, wait_for, wait_until};
use coracle_tests::image::Image;
use coracle_tests::node::{Node, Options, binaries};
use coracle_tests::registry::Registry;
use coracle_tests::request::pull;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::faults::{big, only, part_bytes, remove};
use crate::find;

/// Number of bytes of a blob after which its download blocks.
const HELD_AT: u64 = 600_000;

/// A registry, and a proxy that blocks the first download of a blob of 1 MB after [`HELD_AT`] bytes.
struct Fixture {
    _registry: Registry,
    proxy: Faulty,
    digest: String,
    size: u64,
}

impl Fixture {
    fn new(node: &Node) -> Fixture {
        let registry = Registry::start(node.folder());
        let (image, digest, size) = big(node, 1_000_000, 9);
        registry.push(&image, "held", "1");
        let plan = only(&digest, |before| if before == 0 { Fault::Stall(HELD_AT) } else { Fault::None });
        let proxy = Faulty::start(registry.address(), plan);
        Fixture { _registry: registry, proxy, digest, size }
    }

    fn name(&self) -> String {
        self.proxy.name("held", "1")
    }

    /// Pulls, and calls `meanwhile` with the PIDs of the worker and the fetcher when the download is blocked;
    /// returns the error's text.
    fn pull_held(&self, node: &mut Node, meanwhile: impl FnOnce(&mut Node, i32, i32)) -> String {
        let (client, name) = (node.another(), self.name());
        std::thread::scope(|scope| {
            let call = scope.spawn(move || client.pull_image(pull(&name)));
            wait_until("the part is there", || part_bytes(node, &self.digest) == HELD_AT);
            let worker = node.workers().first().expect("it pulls").pid;
            let fetcher = fetcher_of(worker).expect("its fetcher runs");
            meanwhile(node, worker, fetcher);
            let refused = call.join().expect("a client thread").expect_err("it ends in the middle");
            format!("{:?}: {}", refused.code(), refused.message())
        })
    }

    /// Asserts that the next pull resumes where the blocked one stopped and downloads nothing twice.
    fn assert_goes_on(&self, node: &Node) {
        node.pull_image(pull(&self.name())).expect("it gets through");
        assert_eq!(self.proxy.blob_bytes(&self.digest), self.size, "each byte once");
        assert!(find(node, &self.name()).is_some());
        let parts = fs::read_dir(node.root().join("images/parts")).expect("it lists").count();
        assert_eq!(parts, 0, "no part is of any more use");
    }
}

fn fetcher_of(worker: i32) -> Option<i32> {
    let fetchers = host::processes("coracle-worker fetch");
    let is_ours = |pid: &i32| host::proc_value(*pid, "status", "PPid") == Some(worker as u64);
    fetchers.into_iter().map(|process| process.pid).find(is_ours)
}

/// A line of /proc/PID/status.
fn status(pid: i32, key: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
    let line = text.lines().find_map(|line| line.strip_prefix(key)).expect("a line");
    line.trim_start_matches(':').split_whitespace().collect::<Vec<_>>().join(" ")
}

/// All paths below a directory, without following links.
fn below(directory: &Path) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory).expect("it lists").flatten() {
        paths.push(entry.path());
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            paths.extend(below(&entry.path()));
        }
    }
    paths.sort();
    paths
}

fn assert_fetcher_is_shut_in(node: &Node, pid: i32) {
    for key in ["Uid", "Gid"] {
        assert_eq!(status(pid, key), "65534 65534 65534 65534", "{key}");
    }
    assert_eq!(status(pid, "Groups"), "");
    for key in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(u64::from_str_radix(&status(pid, key), 16), Ok(0), "{key}");
    }
    assert_eq!((status(pid, "Seccomp").as_str(), status(pid, "NoNewPrivs").as_str()), ("2", "1"));
    assert_eq!(status(pid, "NSpid").split(' ').next_back(), Some("1"), "it can name no other process");
    for kind in ["pid", "mnt", "ipc", "uts", "cgroup"] {
        assert_ne!(host::namespace(pid, kind), host::namespace(node.pid(), kind), "{kind}");
    }
    assert_eq!(host::namespace(pid, "net"), host::namespace(node.pid(), "net"), "the network is its job");
    assert_eq!(fs::read(format!("/proc/{pid}/environ")).expect("its environment"), b"");
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).expect("its mounts");
    assert_eq!(mounts.lines().count(), 1, "nothing else: {mounts}");
    assert!(mounts.contains(" - tmpfs "), "{mounts}");
    for flag in ["ro", "nosuid", "nodev", "noexec"] {
        let flags = mounts.split(' ').nth(5).expect("a field");
        assert!(flags.split(',').any(|set| set == flag), "{flag}: {mounts}");
    }
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    let paths = ["etc", "etc/hosts", "etc/resolv.conf"].map(|path| root.join(path));
    assert_eq!(below(&root), paths);
    for name in ["hosts", "resolv.conf"] {
        let own = fs::read(root.join("etc").join(name)).expect("it is there");
        assert_eq!(own, fs::read(Path::new("/etc").join(name)).unwrap_or_default(), "{name}");
    }
    // Sockets, pipes, and its two files.
    let device = fs::metadata(&root).expect("its root").dev();
    for (number, target) in host::open_files(pid) {
        let target = target.display().to_string();
        let is_passing = target.starts_with("socket:") || target.starts_with("pipe:");
        let is_own =
            fs::metadata(format!("/proc/{pid}/fd/{number}")).is_ok_and(|about| about.dev() == device);
        assert!(is_passing || is_own, "{number}: {target}");
    }
}

fn assert_worker_has_no_network(node: &Node, pid: i32) {
    assert_ne!(host::namespace(pid, "net"), host::namespace(node.pid(), "net"));
    let interfaces = fs::read_to_string(format!("/proc/{pid}/net/dev")).expect("its interfaces");
    let names: Vec<&str> = interfaces.lines().skip(2).filter_map(|line| line.split(':').next()).collect();
    assert!(names.iter().all(|name| ["lo", "tunl0", "sit0", "ip6tnl0"].contains(&name.trim())), "{names:?}");
    // An active interface has IPv6 addresses, and lo a route.
    for file in ["if_inet6", "route"] {
        let text = fs::read_to_string(format!("/proc/{pid}/net/{file}")).unwrap_or_default();
        assert_eq!(text.lines().filter(|line| !line.starts_with("Iface")).count(), 0, "{file}: {text}");
    }
    assert_eq!((status(pid, "Seccomp").as_str(), status(pid, "NoNewPrivs").as_str()), ("2", "1"));
    // NET_ADMIN, NET_RAW, SYS_MODULE, SYS_PTRACE.
    let capabilities = u64::from_str_radix(&status(pid, "CapBnd"), 16).expect("a number");
    assert_eq!(capabilities & (1 << 12 | 1 << 13 | 1 << 16 | 1 << 19), 0, "{capabilities:x}");
}

/// Fails without the separation: there is no fetcher, and the worker, root with 11 capabilities, is in the node's
/// network.
#[test]
fn only_the_fetcher_has_network_access() {
    let mut node = Node::start();
    let fixture = Fixture::new(&node);
    fixture.pull_held(&mut node, |node, worker, fetcher| {
        assert_fetcher_is_shut_in(node, fetcher);
        assert_worker_has_no_network(node, worker);
        assert!(!node.log().contains("fetch:"), "{}", node.log());
        kill(Pid::from_raw(fetcher), Signal::SIGKILL).expect("it is there");
    });
    node.stop();
}

/// If any of the processes ends, only the part of the blob remains, which the next pull uses. A stopped
/// fetcher does not notice that its socket was closed, but ends with its worker: without CAP_KILL in the
/// worker the parent-death signal was not delivered, and the stopped fetcher remained.
#[test]
fn a_killed_process_of_a_pull_leaves_only_the_part() {
    for victim in ["the fetcher", "the worker", "the daemon", "the daemon, with the fetcher stopped"] {
        let mut node = Node::start();
        let fixture = Fixture::new(&node);
        let mut both = [0; 2];
        let error = fixture.pull_held(&mut node, |node, worker, fetcher| {
            both = [worker, fetcher];
            match victim {
                "the fetcher" => kill(Pid::from_raw(fetcher), Signal::SIGKILL).expect("it is there"),
                "the worker" => kill(Pid::from_raw(worker), Signal::SIGKILL).expect("it is there"),
                "the daemon" => node.kill9(),
                _ => {
                    kill(Pid::from_raw(fetcher), Signal::SIGSTOP).expect("it is there");
                    node.kill9();
                }
            }
        });
        if victim == "the fetcher" {
            let words = "the fetcher process ended: signal 9";
            assert!(error.contains("RegistryUnavailable") && error.contains(words), "{error}");
        }
        wait_until(&format!("{victim} was killed: both are gone"), || {
            !both.iter().any(|pid| host::is_alive(*pid))
        });
        assert_eq!(part_bytes(&node, &fixture.digest), HELD_AT, "{victim}");
        // The fetcher's root is mounted there, in its own mount namespace.
        let mounts = host::mounts(" /proc ");
        assert!(!mounts.iter().any(|line| line.contains(" - tmpfs ")), "{victim}: {mounts:?}");
        if victim.starts_with("the daemon") {
            node.launch();
        }
        fixture.assert_goes_on(&node);
        node.stop();
    }
}

/// A fetcher that hangs, for example because it is compromised, is ended ten seconds after the registry's
/// read timeout.
#[test]
fn a_fetcher_that_hangs_is_ended() {
    let config = "[registry]\nrate_window = \"1s\"\nrate_min = 1\n".to_owned();
    let mut node = Node::with(Options { config, ..Options::default() });
    let fixture = Fixture::new(&node);
    let mut stopped = 0;
    let error = fixture.pull_held(&mut node, |_, _, fetcher| {
        stopped = fetcher;
        kill(Pid::from_raw(fetcher), Signal::SIGSTOP).expect("it is there");
    });
    assert!(error.contains("the fetcher process did not respond for 11s"), "{error}");
    wait_until("it is gone, stopped or not", || !host::is_alive(stopped));
    fixture.assert_goes_on(&node);
    node.stop();
}

/// A fetcher without its own PID namespace, or without the privileges for its confinement, reports what is missing
/// and contacts no registry.
#[test]
fn a_fetcher_without_complete_confinement_contacts_no_registry() {
    let folder = std::env::temp_dir().join(format!("coracle-fetcher-{}", std::process::id()));
    for user in [0, 65534] {
        fs::create_dir_all(&folder).expect("a folder");
        let program = folder.join("coracle-worker");
        fs::copy(binaries().join("coracle-worker"), &program).expect("the program");
        let (mut ours, theirs) = UnixStream::pair().expect("a socket");
        let theirs = OwnedFd::from(theirs);
        // In a new mount namespace, because it takes its working directory as its root; killed, as PID 1 of a
        // PID namespace, with unshare.
        for words in [&["--mount"][..], &["--mount", "--pid", "--fork", "--kill-child"]] {
            if words.len() > 1 && user == 0 {
                continue; // that is a jail
            }
            let mut child = Command::new("unshare")
                .args(words)
                .args(["--", "setpriv", "--clear-groups"])
                .args([format!("--reuid={user}"), format!("--regid={user}")])
                .arg(&program)
                .arg("fetch")
                .current_dir(&folder)
                .stdin(theirs.try_clone().expect("a copy"))
                .stdout(Stdio::null())
                .spawn()
                .expect("unshare and setpriv of util-linux");
            let mut length = [0; 4];
            ours.read_exact(&mut length).expect("an answer");
            let mut said = vec![0; u32::from_le_bytes(length) as usize];
            ours.read_exact(&mut said).expect("an answer");
            let said = String::from_utf8_lossy(&said);
            assert!(
                said.contains("jail: ") && said.contains("no registry is contacted"),
                "user {user}: {said:?}"
            );
            assert!(child.wait().expect("it ends").success());
        }
        fs::remove_dir_all(&folder).expect("ours");
    }
}

/// A name server that knows one name, only at 127.0.0.1.
fn serve_names(address: &str, name: &'static str) {
    let socket = UdpSocket::bind(address).expect("a free address");
    std::thread::spawn(move || {
        let mut buffer = [0; 512];
        while let Ok((count, peer)) = socket.recv_from(&mut buffer) {
            let question = &buffer[..count];
            let encoded: Vec<u8> =
                name.split('.').flat_map(|label| [&[label.len() as u8], label.as_bytes()].concat()).collect();
            let is_known = question[12..].starts_with(&encoded);
            let is_a = question[12..].get(encoded.len() + 1..encoded.len() + 3) == Some(&[0, 1]);
            let mut answer = question.to_vec();
            answer[2..4].copy_from_slice(&[0x81, if is_known { 0x80 } else { 0x83 }]);
            answer[6..8].copy_from_slice(&[0, u8::from(is_known && is_a)]);
            if is_known && is_a {
                // A pointer to the name, type A, class IN, one hour, four bytes.
                answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 14, 16, 0, 4, 127, 0, 0, 1]);
            }
            let _ = socket.send_to(&answer, peer);
        }
    });
}

/// Name resolution by /etc/hosts and by a name server, where resolv.conf is a symbolic link to a file that is
/// replaced, and hosts is missing at first, between two requests of one pull.
#[test]
fn name_resolution_uses_the_current_files_of_the_node() {
    let folder = std::env::temp_dir().join(format!("coracle-names-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    // An /etc directory for the daemon.
    let etc = folder.join("etc");
    assert!(Command::new("cp").args(["-a", "/etc"]).arg(&etc).status().expect("cp").success());
    for name in ["resolv.conf", "hosts"] {
        let _ = fs::remove_file(etc.join(name));
    }
    let stub = etc.join("stub.conf");
    let server = |address: &str| {
        fs::write(etc.join("new.conf"), format!("nameserver {address}\noptions timeout:1 attempts:1\n"))
            .expect("ours");
        fs::rename(etc.join("new.conf"), &stub).expect("ours");
    };
    server("127.0.53.9");
    std::os::unix::fs::symlink("stub.conf", etc.join("resolv.conf")).expect("ours");
    let wrapper = format!("mount --bind {} /etc && exec \"$@\"", etc.display());
    let wrapper = ["unshare", "--mount", "--", "sh", "-c", &wrapper, "sh"].map(str::to_owned).into();
    let node = Node::with(Options { wrapper, ..Options::default() });
    let registry = Registry::start(node.folder());
    let image = Image::probe(&node.probe(), "named");
    registry.push(&image, "named", "1");
    serve_names("127.0.53.1:53", "boats.example");
    let port = registry.address().port();
    let name = "named.invalid/named:1".to_owned();
    let ask = |host: &str| {
        let yaml = format!("mirrors: {{named.invalid: {{endpoint: [\"http://{host}:{port}\"]}}}}\n");
        fs::write(node.folder().join("registries.yaml"), yaml).expect("the node's registries");
    };
    ask("boats.example");
    let refused = node.pull_image(pull(&name)).expect_err("no name server");
    assert!(refused.message().contains("boats.example"), "{refused}");
    server("127.0.53.1");
    node.pull_image(pull(&name)).expect("by the name server");
    remove(&node, &name);
    ask("canoes.example");
    node.pull_image(pull(&name)).expect_err("an unknown name");
    fs::write(etc.join("hosts"), "127.0.0.1 canoes.example\n").expect("ours");
    node.pull_image(pull(&name)).expect("by hosts");
    remove(&node, &name);
    // During a pull: the name is not found until the file exists.
    fs::write(etc.join("hosts"), "").expect("ours");
    let client = node.another();
    std::thread::scope(|scope| {
        let call = scope.spawn(|| client.pull_image(pull(&name)));
        wait_for("its fetcher runs", || fetcher_of(node.workers().first()?.pid));
        std::thread::sleep(Duration::from_millis(300));
        fs::write(etc.join("hosts"), "127.0.0.1 canoes.example\n").expect("ours");
        call.join().expect("a client thread").expect("the next try finds it");
    });
    node.stop();
    drop(registry);
    fs::remove_dir_all(&folder).expect("ours");
}
