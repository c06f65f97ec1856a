//! Findings of a security audit of this code, by their numbers in docs/results/0.1.0.md, from the attacker's side.
//! Each test failed before the defence existed; its doc comment says how.

use std::fs;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::PathBuf;

use coracle_tests::cri::proto::{
    ContainerConfig, ImageSpec, Mount, RemoveContainerRequest, ReopenContainerLogRequest,
    StartContainerRequest, VersionRequest,
};
use coracle_tests::host;
use coracle_tests::image::Image;
use coracle_tests::layer::{Compression, Entry, Layer};
use coracle_tests::node::{Node, Options};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{bridge_pod, create, exec, host_pod, security};
use nix::fcntl::AT_FDCWD;
use nix::libc::O_NONBLOCK;
use nix::sys::stat::{FchmodatFlags, Mode, fchmodat};
use serde_json::json;
use tonic::Code;

use crate::trace::{canaries, forbidden, is_outside_of, with};
use crate::{MASKED, Rights, armed, got, is_ready, mapped, reached_nothing, says, shared};

/// Imports the probe's image with one more layer and these volumes; returns its ID.
#[track_caller]
fn import(fixture: &PodFixture, name: &str, entries: &[Entry], volumes: &[&str]) -> String {
    let mut image = Image::probe(&fixture.node.probe(), name);
    if !entries.is_empty() {
        image = image.plus(Layer::new(entries, Compression::Gzip));
    }
    let volumes: serde_json::Map<String, serde_json::Value> =
        volumes.iter().map(|&path| (path.to_owned(), json!({}))).collect();
    let image = image.with("Volumes", volumes.into());
    fixture.node.try_import(&image.oci_archive(&format!("example.test/{name}:1"))).expect("import");
    image.id()
}

/// A container with default capabilities, the kubelet's masks and a read-only root.
fn hardened(fixture: &PodFixture, image: &str, name: &str, words: &[&str]) -> ContainerConfig {
    let mut config = armed(fixture, name, Rights::Default, words);
    config.image = Some(ImageSpec { image: image.into(), ..Default::default() });
    security(&mut config).readonly_rootfs = true;
    config
}

/// Mounts a directory of the node.
fn volume(fixture: &PodFixture, config: &mut ContainerConfig, name: &str, target: &str) -> PathBuf {
    let path = fixture.node.folder().join(name);
    fs::create_dir_all(&path).expect("a directory");
    let host_path = path.display().to_string();
    config.mounts.push(Mount { container_path: target.into(), host_path, ..Default::default() });
    path
}

/// Fails without the defence: the container starts, and `attack kernel` has some hundred lines: `GOT write
/// /proc/sys/kernel/core_pattern`, with which the node's kernel would execute a program of the container as
/// root.
#[test]
fn finding_01_an_image_volume_cannot_remove_masks() {
    let fixture = PodFixture::start();
    let paths =
        ["/proc", "/proc/sys", "/proc/../proc", "/sys", "/sys/firmware", "/dev", "/dev/shm", "/./proc/"];
    for (number, path) in paths.into_iter().enumerate() {
        let id = import(&fixture, &format!("volume{number}"), &[], &[path]);
        let config = hardened(&fixture, &id, &format!("c{number}"), &["sleep", "forever"]);
        let refused = fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod));
        let refused = refused.expect_err(path);
        assert_eq!(refused.code(), Code::InvalidArgument, "{path}: {refused}");
        assert!(refused.message().contains("volume"), "{path}: {refused}");
    }
    // The root cannot be a volume, either: one on it would be writable and hide every mount.
    for (number, path) in ["/", "/.", "//", "", "/tmp/.."].into_iter().enumerate() {
        let id = import(&fixture, &format!("root{number}"), &[], &[path]);
        let config = hardened(&fixture, &id, &format!("r{number}"), &["sleep", "forever"]);
        let made = fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod));
        let Ok(made) = made else { continue };
        let start = StartContainerRequest { container_id: made.container_id.clone() };
        if fixture.node.start_container(start).is_ok() {
            let said = says(&fixture, &made.container_id, &["write", "/planted", "x"]);
            assert!(said.contains("Read-only file system"), "{path:?}: {said}");
            let report = says(&fixture, &made.container_id, &[&["attack", "masks"], &MASKED[..]].concat());
            assert!(report.contains("held /proc/keys: masked"), "{path:?}: {report}");
            reached_nothing(&report);
        }
    }
    // Through a link: refused, or all masks exist.
    let links = [
        ("data", "/proc"),
        ("data", "proc/sys"),
        ("data", "/sys/firmware"),
        ("data", "../../proc"),
        ("data", "/dev/../proc"),
        ("a", "/data"),
    ];
    for (number, (name, target)) in links.into_iter().enumerate() {
        let mut entries = vec![Entry::symlink(name, target)];
        if target == "/data" {
            entries.push(Entry::symlink("data", "/proc"));
        }
        let id = import(&fixture, &format!("link{number}"), &entries, &[&format!("/{name}")]);
        let config = hardened(&fixture, &id, &format!("l{number}"), &["sleep", "forever"]);
        let made = fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod));
        let Ok(made) = made else { continue };
        let start = StartContainerRequest { container_id: made.container_id.clone() };
        if fixture.node.start_container(start).is_err() {
            continue;
        }
        let report = says(&fixture, &made.container_id, &["attack", "kernel"]);
        reached_nothing(&report);
        let report = says(&fixture, &made.container_id, &[&["attack", "masks"], &MASKED[..]].concat());
        assert!(report.contains("held /proc/keys: masked"), "{target}: {report}");
        reached_nothing(&report);
    }
    fixture.node.stop();
}

/// Fails without the defence: PID 1 is the monitor: `GOT root 1 coracle-pod`, `GOT capabilities 1`, `GOT fd 1 … the
/// namespace mnt:[…]`, `GOT canary`.
#[test]
fn finding_02_ptrace_of_pid_1_of_a_shared_pid_namespace_reaches_nothing_of_the_node() {
    let fixture = PodFixture::on(Node::with_bridge(), shared(bridge_pod("shared")));
    let canaries = canaries(&fixture);
    let forbidden = forbidden(&fixture, false);
    let attacker = fixture.run(&armed(&fixture, "attacker", Rights::Ptrace, &["sleep", "forever"]));
    let report = says(&fixture, &attacker, &with(&["look"], &canaries));
    assert!(report.contains("saw process 1 "), "pid 1 is there: {report}");
    reached_nothing(&report);
    is_outside_of(&report, &forbidden);
    // No process of the node is in that namespace, by any name.
    let inside = host::namespace(fixture.node.container_pid(&attacker), "pid");
    for monitor in fixture.node.monitors() {
        if host::namespace(monitor.pid, "pid") == inside {
            let capabilities = fs::read_to_string(format!("/proc/{}/status", monitor.pid)).expect("it lives");
            let line = capabilities.lines().find(|line| line.starts_with("CapPrm:")).unwrap_or("");
            assert_eq!(line.split_whitespace().nth(1), Some("0000000000000000"), "{monitor:?}");
            let open = fs::read_dir(format!("/proc/{}/fd", monitor.pid)).expect("it lives").count();
            assert_eq!(open, 0, "{monitor:?} holds descriptors");
            let root = fs::read_dir(format!("/proc/{}/root/", monitor.pid)).expect("it has one");
            assert_eq!(root.count(), 0, "{monitor:?} sees files");
        }
    }
    assert!(is_ready(&fixture));
    fixture.node.stop();
}

/// Fails without the defence: the child process of the first exec is traced before it has left the node's mount
/// namespace: `GOT capabilities 3 coracle-pod`, `GOT root 3 coracle-pod`, `GOT canary by /proc/3/root/…`.
#[test]
fn finding_03_a_process_appears_in_a_containers_pid_namespace_without_the_nodes_files_and_rights() {
    let fixture = PodFixture::on(Node::with_bridge(), bridge_pod("own"));
    let canaries = canaries(&fixture);
    let forbidden = forbidden(&fixture, false);
    let words = with(&["race", "2"], &canaries);
    let attacker = fixture.run(&armed(&fixture, "attacker", Rights::Ptrace, &words));
    crate::wait_for_line(&fixture, &attacker, "watching");
    for round in 0..40 {
        // The attacker may end before the last of them.
        let _ = fixture.node.exec_sync(exec(&attacker, &["true"], 5));
        if round % 10 == 0 && fixture.node.output(&attacker).contains("saw seized") {
            break;
        }
    }
    fixture.node.exited(&attacker);
    let report = fixture.node.output(&attacker);
    assert!(report.contains("saw process "), "nothing was seized: {report}");
    reached_nothing(&report);
    is_outside_of(&report, &forbidden);
    fixture.node.stop();
}

/// Fails without the defence: `GOT secret …/pods/…/plans/…`, `GOT setuid …/upper/tmp/…`.
#[test]
fn finding_04_a_user_of_the_node_reads_no_environment_and_runs_no_setuid_program() {
    const SECRET: &str = "hunter2-of-the-environment";
    let fixture = PodFixture::on(Node::with_bridge(), bridge_pod("secrets"));
    let mut config = armed(&fixture, "secret", Rights::Default, &["sleep", "forever"]);
    config.envs.push(coracle_tests::cri::proto::KeyValue { key: "TOKEN".into(), value: SECRET.into() });
    config.annotations.insert("secret".into(), SECRET.into());
    let id = fixture.run(&config);
    // Root in the container creates a program for another user on the node.
    let pid = fixture.node.container_pid(&id);
    let inside = PathBuf::from(format!("/proc/{pid}/root"));
    fs::copy(inside.join("probe"), inside.join("tmp/friend")).expect("a copy in the writable layer");
    let mode = Mode::from_bits_truncate(0o4755);
    fchmodat(AT_FDCWD, &inside.join("tmp/friend"), mode, FchmodatFlags::FollowSymlink).expect("its root may");
    let report = crate::files::as_nobody(&fixture, SECRET);
    reached_nothing(&report);
    // The same after a restart, and the store is unchanged.
    let fixture = crate::restarted(fixture);
    reached_nothing(&crate::files::as_nobody(&fixture, SECRET));
    fixture.node.stop();
}

/// Fails without the defence: the write goes to the writable layer: `the volume has no file`.
#[test]
fn finding_05_an_image_volume_does_not_hide_the_pods_volume_below_it() {
    let fixture = PodFixture::start();
    // The layout of postgres:18: a volume of the image above the pod's volume.
    let folders = [
        Entry::directory("var", 0o755),
        Entry::directory("var/lib", 0o755),
        Entry::directory("var/lib/postgresql", 0o755),
        Entry::directory("var/lib/postgresql/data", 0o755),
    ];
    let id = import(&fixture, "postgres", &folders, &["/var/lib/postgresql"]);
    for is_read_only in [true, false] {
        let name = format!("database{is_read_only}");
        let mut config = hardened(&fixture, &id, &name, &["sleep", "forever"]);
        security(&mut config).readonly_rootfs = is_read_only;
        let claim = volume(&fixture, &mut config, &name, "/var/lib/postgresql/data");
        fs::write(claim.join("PG_VERSION"), "18").expect("a file");
        let container = fixture.run(&config);
        let said = says(&fixture, &container, &["cat", "/var/lib/postgresql/data/PG_VERSION"]);
        assert_eq!(said, "18", "read-only root: {is_read_only}");
        let said = says(&fixture, &container, &["write", "/var/lib/postgresql/data/row", "kept"]);
        assert_eq!(said, "");
        assert_eq!(fs::read_to_string(claim.join("row")).expect("the volume has the file"), "kept");
        // The image's own volume is writable.
        assert_eq!(says(&fixture, &container, &["write", "/var/lib/postgresql/other", "x"]), "");
    }
    // Nor does one hide the files of the pod.
    let id = import(&fixture, "etc", &[], &["/etc", "/run"]);
    let mut config = hardened(&fixture, &id, "etc", &["sleep", "forever"]);
    let token = volume(&fixture, &mut config, "token", "/run/secrets/token");
    fs::write(token.join("token"), "of the service account").expect("a file");
    let container = fixture.run(&config);
    let said = says(&fixture, &container, &["cat", "/etc/resolv.conf"]);
    assert!(said.contains("nameserver 192.0.2.53"), "{said}");
    assert_eq!(says(&fixture, &container, &["cat", "/run/secrets/token/token"]), "of the service account");
    fixture.node.stop();
}

/// Fails without the defence: a container of another pod, and one in a user namespace, print `GOT key … in ring -3:
/// from-another-container` if the daemon has a session keyring, as under systemd.
#[test]
fn finding_07_each_container_has_a_session_ring_of_its_own() {
    const NAME: &str = "coracle-hostile";
    const TEXT: &str = "from-another-container";
    // Under systemd the daemon has a new keyring, which its children inherit.
    let fixture = PodFixture::on(node_with_a_ring(), host_pod("keeper"));
    let keeper = armed(&fixture, "keeper", Rights::Unfiltered, &["attack", "keys", "add", NAME, TEXT]);
    let keeper = fixture.run(&keeper);
    crate::wait_for_line(&fixture, &keeper, "saw ring ");
    let said = fixture.node.output(&keeper);
    let serials: Vec<&str> = said.split_whitespace().filter(|word| word.parse::<i64>().is_ok()).collect();
    assert_eq!(serials.len(), 2, "a ring and a key: {said}");
    // Names of a container's keyring in coracle and in other runtimes.
    let names = [keeper.clone(), format!("_ses.{keeper}"), format!("coracle-{keeper}"), "coracle".into()];
    for (name, pod) in [("other", host_pod("other")), ("mapped", mapped(host_pod("mapped")))] {
        let mut pod = pod;
        pod.log_directory = fixture.node.log_directory(name);
        let pod_id = fixture.node.run_pod(&pod);
        let mut thief =
            coracle_tests::request::container("thief", &fixture.image, &["sleep", "forever"], &pod);
        Rights::Unfiltered.give(&mut thief);
        let thief = fixture.node.run_container(&pod_id, &thief, &pod);
        let mut words = vec!["attack", "keys", "find", NAME];
        words.extend(serials.iter().copied());
        words.extend(names.iter().map(String::as_str));
        let report = says(&fixture, &thief, &words);
        assert!(report.contains("held "), "{name}: {report}");
        reached_nothing(&report);
        assert!(!report.contains(TEXT), "{name}: {report}");
    }
    // An exec of the same container shares its keyring.
    let said = says(&fixture, &keeper, &["attack", "keys", "find", NAME]);
    assert!(said.contains(&format!("GOT key {NAME} in ring -3: {TEXT}")), "{said}");
    fixture.node.stop();
}

/// Fails without the defence: `AF_ALG reached the kernel, which said EAFNOSUPPORT`, or `done` where it has it.
#[test]
fn finding_08_runtime_default_keeps_af_alg_from_the_kernel() {
    let fixture = PodFixture::start();
    for rights in [Rights::Default, Rights::Ptrace] {
        let id = fixture.run(&armed(&fixture, &format!("{rights:?}"), rights, &["sleep", "forever"]));
        let report = says(&fixture, &id, &["attack", "calls"]);
        for family in ["AF_ALG", "AF_VSOCK"] {
            assert!(report.contains(&format!("saw call {family} EPERM")), "{rights:?}: {report}");
        }
    }
    fixture.node.stop();
}

/// Fails without the defence: the daemon waits in `open(2)` for a reader, and `Version` is not answered.
#[test]
fn finding_10_a_fifo_in_the_place_of_a_log_does_not_stop_the_daemon() {
    let fixture = PodFixture::start();
    let config = fixture.config("logged", &["print", "hello"]);
    let log = PathBuf::from(&fixture.pod.log_directory).join(&config.log_path);
    fs::create_dir_all(log.parent().expect("a directory")).expect("the log's directory");
    nix::unistd::mkfifo(&log, Mode::from_bits_truncate(0o600)).expect("a FIFO");
    let id = fixture.create(&config);
    let (started, answers) = std::thread::scope(|scope| {
        let start = scope.spawn(|| {
            let request = StartContainerRequest { container_id: id.clone() };
            fixture.node.another().start_container(request)
        });
        let client = fixture.node.another();
        let mut answers = (0..20).map(|_| client.version(VersionRequest::default()).is_ok());
        let answers = answers.all(|is_answered| is_answered);
        // In any case the daemon must be able to continue.
        let unblock = fs::OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(&log);
        let started = start.join().expect("the thread ends");
        drop(unblock);
        (started, answers)
    });
    assert!(answers, "the daemon stood still");
    let refused = started.expect_err("a FIFO is no log");
    assert!(refused.message().contains(&log.display().to_string()), "{refused}");
    // The log works when the name is free.
    fs::remove_file(&log).expect("the FIFO is ours");
    let request = RemoveContainerRequest { container_id: id };
    fixture.node.remove_container(request).expect("it can be removed");
    let id = fixture.run(&fixture.config("logged", &["print", "hello"]));
    fixture.node.exited(&id);
    assert_eq!(fixture.node.output(&id), "hello\n");
    fixture.node.stop();
}

/// Finding S4: a process that can write to the directory of logs replaced a part of a log's path by a link, and root created
/// the log in any directory of the node.
#[test]
fn finding_s4_a_link_in_the_path_of_a_log_leads_nowhere() {
    let fixture = PodFixture::start();
    let secrets = fixture.node.folder().join("secrets");
    fs::create_dir_all(&secrets).expect("a directory");
    let logs = PathBuf::from(&fixture.pod.log_directory);
    fs::create_dir_all(&logs).expect("the pod's directory of logs");
    symlink(&secrets, logs.join("logged")).expect("a link");
    let mut config = fixture.config("logged", &["print", "hello"]);
    config.log_path = "logged/0.log".into();
    let start = |id: &str| fixture.node.start_container(StartContainerRequest { container_id: id.into() });
    let id = fixture.create(&config);
    let refused = start(&id).expect_err("a link leads out of the directory");
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().contains("logged is not a directory"), "{refused}");
    fs::remove_file(logs.join("logged")).expect("the link");
    config.metadata.as_mut().expect("a name").attempt += 1;
    let running = fixture.create(&fixture.config("running", &["sleep", "forever"]));
    start(&running).expect("no link");
    let id = fixture.create(&config);
    // The pod's own directory, also while a log is open.
    fs::rename(&logs, logs.with_extension("old")).expect("it is there");
    symlink(&secrets, &logs).expect("a link");
    assert_eq!(start(&id).expect_err("a link").code(), Code::InvalidArgument);
    let reopen = ReopenContainerLogRequest { container_id: running };
    let refused = fixture.node.reopen_container_log(reopen).expect_err("a link");
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert_eq!(fs::read_dir(&secrets).expect("it is there").count(), 0);
    // An administrator may have links above it.
    fs::remove_file(&logs).expect("the link");
    let all = logs.parent().expect("a directory").to_owned();
    let moved = all.with_extension("disk");
    fs::rename(&all, &moved).expect("it is there");
    symlink(&moved, &all).expect("a link");
    config.metadata.as_mut().expect("a name").attempt += 1;
    let id = fixture.run(&config);
    fixture.node.exited(&id);
    assert_eq!(fixture.node.output(&id), "hello\n");
    fs::remove_file(&all).expect("the link");
    fs::rename(&moved, &all).expect("it is there");
    fixture.node.stop();
}

/// Fails without the defence: the container starts, and a file system covers its /proc: `a container without the kernel's /dev`.
#[test]
fn finding_16_links_at_the_kernels_directories_are_refused() {
    let fixture = PodFixture::start();
    for (number, (name, target)) in
        [("dev", "/proc"), ("dev", "/tmp"), ("proc", "/tmp"), ("sys", "/proc"), ("dev", "sys")]
            .into_iter()
            .enumerate()
    {
        let id = import(&fixture, &format!("linked{number}"), &[Entry::symlink(name, target)], &[]);
        let mut config = armed(&fixture, &format!("c{number}"), Rights::Default, &["sleep", "forever"]);
        config.image = Some(ImageSpec { image: id, ..Default::default() });
        let container = fixture.create(&config);
        let request = StartContainerRequest { container_id: container };
        let refused =
            fixture.node.start_container(request).expect_err("a link is no place for the kernel's files");
        assert!(refused.message().contains(&format!("/{name}")), "{name} -> {target}: {refused}");
    }
    fixture.node.stop();
}

/// Fails without the defence: `kill -TERM 1` or a limit of descriptors ends the pod: it is NotReady.
#[test]
fn finding_18_nothing_inside_ends_a_pod_that_shares_its_pid_namespace() {
    let fixture = PodFixture::on(Node::with_bridge(), shared(bridge_pod("shared")));
    let attacker = fixture.run(&armed(&fixture, "attacker", Rights::Default, &["sleep", "forever"]));
    for attack in ["signals", "limit"] {
        let words = if attack == "limit" { vec!["attack", attack, "1"] } else { vec!["attack", attack] };
        let report = says(&fixture, &attacker, &words);
        assert!(got(&report).is_empty(), "{report}");
    }
    let said = says(&fixture, &attacker, &["print", "alive"]);
    assert_eq!(said, "alive\n");
    let next = fixture.run(&fixture.config("next", &["true"]));
    assert_eq!(fixture.node.exited(&next).exit_code, 0);
    assert!(is_ready(&fixture));
    fixture.node.stop();
}

/// Fails without the defence: all execs fail with EINVAL after the container's first process has created a user
/// namespace.
#[test]
fn finding_19_an_exec_joins_the_configured_user_namespace() {
    for (name, pod) in [("plain", host_pod("plain")), ("mapped", mapped(host_pod("mapped")))] {
        let fixture = PodFixture::with(pod);
        let container = fixture.run(&armed(&fixture, "main", Rights::Unfiltered, &["attack", "userns"]));
        host::wait_until("it is elsewhere, or may not", || {
            !fixture.node.output(&container).is_empty() || !is_running(&fixture, &container)
        });
        if !fixture.node.output(&container).contains("unshared") {
            // A kernel without unprivileged user namespaces cannot show it.
            assert!(fixture.node.output(&container).contains("unshare:"), "{name}");
            fixture.node.stop();
            continue;
        }
        let report = says(&fixture, &container, &["see", "ids"]);
        assert!(report.contains("ids Uid 0 0 0 0"), "{name}: {report}");
        fixture.node.stop();
    }
}

fn is_running(fixture: &PodFixture, container: &str) -> bool {
    use coracle_tests::cri::proto::ContainerState;
    fixture.node.container(container).state() == ContainerState::ContainerRunning
}

/// A node whose daemon has a session keyring of its own, like a unit of systemd (`KeyringMode=private`).
fn node_with_a_ring() -> Node {
    let probe = coracle_tests::node::binaries().join("probe").display().to_string();
    let wrapper = [probe.as_str(), "attack", "keys", "exec"].map(str::to_owned).to_vec();
    Node::with(Options { wrapper, ..Options::default() })
}
