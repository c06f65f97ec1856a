//! The processes that a container sees in its PID namespace: no process of the runtime except one without
//! privileges, also while containers and execs are created; and other objects that belong to one container
//! only.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use coracle_tests::cri::proto::{
    Capability, ContainerConfig, NamespaceMode, NamespaceOption, PodSandboxConfig,
};
use coracle_tests::host::{self, namespace};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{container, exec, host_pod, pod_namespaces, security, user_namespace};

/// A pod whose containers share a PID namespace.
fn shared_pod(change: impl FnOnce(&mut NamespaceOption)) -> PodSandboxConfig {
    let mut pod = host_pod("shared");
    let options = pod_namespaces(&mut pod);
    options.pid = NamespaceMode::Pod.into();
    change(options);
    pod
}

fn add_user_namespace(options: &mut NamespaceOption) {
    options.userns_options = Some(user_namespace(300_000));
}

/// Gives a container the capability to trace.
fn tracer(config: &mut ContainerConfig) {
    security(config).capabilities =
        Some(Capability { add_capabilities: vec!["SYS_PTRACE".into()], ..Default::default() });
}

fn in_shared(config: &mut ContainerConfig) {
    security(config).namespace_options.as_mut().expect("set").pid = NamespaceMode::Pod.into();
}

/// Output of the probe in the container.
#[track_caller]
fn says(fixture: &PodFixture, id: &str, words: &[&str]) -> String {
    let answer = fixture.node.exec_sync(exec(id, words, 20)).expect("exec");
    String::from_utf8_lossy(&[answer.stdout, answer.stderr].concat()).into_owned()
}

/// Finding 2 of docs/results/0.1.0.md. Regression: in a shared PID namespace PID 1 was the monitor, with all
/// capabilities, a descriptor of the host's mount namespace and the node's directories as its root; one
/// ptrace gave access to the node. Each assertion failed: CapEff was full, `fd` listed descriptors, `root`
/// the node's directories, Seccomp was 0.
#[test]
fn the_first_process_of_a_shared_pid_namespace_has_no_privileges() {
    for is_mapped in [false, true] {
        let fixture = PodFixture::with(shared_pod(|options| {
            if is_mapped {
                add_user_namespace(options);
            }
        }));
        let mut config = fixture.config("tracer", &["sleep", "forever"]);
        in_shared(&mut config);
        tracer(&mut config);
        if is_mapped {
            add_user_namespace(security(&mut config).namespace_options.as_mut().expect("set"));
        }
        let id = fixture.run(&config);
        let main = fixture.node.container_pid(&id);
        let outside = namespace(std::process::id() as i32, "pid");
        for monitor in fixture.node.monitors() {
            assert_eq!(namespace(monitor.pid, "pid"), outside, "the monitor is in the node's PID namespace");
        }
        assert_ne!(namespace(main, "pid"), outside);
        // From the node, whatever the container may see.
        let first = host::children(fixture.node.monitors()[0].pid)
            .into_iter()
            .find(|pid| {
                fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "coracle-init\n")
            })
            .expect("the first process of the namespace is a child of the monitor");
        assert_eq!(namespace(first, "pid"), namespace(main, "pid"));
        let status = fs::read_to_string(format!("/proc/{first}/status")).expect("it lives");
        for key in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert!(status.contains(&format!("{key}:\t0000000000000000")), "{key} in {status}");
        }
        for line in ["NStgid:\t", "Seccomp:\t2", "NoNewPrivs:\t1", "Uid:\t4294967294\t4294967294"] {
            assert!(status.contains(line), "{line} in {status}");
        }
        assert!(status.lines().any(|line| line.starts_with("NSpid:") && line.ends_with("\t1")), "{status}");
        let root = format!("/proc/{first}/root");
        assert_eq!(fs::read_dir(format!("/proc/{first}/fd")).expect("fds").count(), 0);
        assert_eq!(fs::read_dir(format!("{root}/")).expect("its root").count(), 0);
        fs::write(format!("{root}/x"), "").expect_err("its root is read-only");
        // And from inside.
        let said = says(&fixture, &id, &["describe", "1"]);
        assert!(said.contains("1 CapEff 0000000000000000\n"), "{said}");
        assert!(!said.lines().any(|line| line.starts_with("1 fd ") && !line.contains("error")), "{said}");
        assert!(!said.lines().any(|line| line.starts_with("1 root ") && !line.contains("error")), "{said}");
        fixture.node.stop();
    }
}

/// crictl users say it in the pod alone; the field of the container is then 0, which is POD.
#[test]
fn a_container_that_says_nothing_has_a_pid_namespace_of_its_own_where_its_pod_shares_none() {
    let fixture = PodFixture::start(); // its pod says CONTAINER
    let mut config = fixture.config("silent", &["sleep", "forever"]);
    in_shared(&mut config);
    let id = fixture.run(&config);
    let other = fixture.run(&fixture.config("other", &["sleep", "forever"]));
    let pids =
        [std::process::id() as i32, fixture.node.container_pid(&id), fixture.node.container_pid(&other)];
    let distinct: std::collections::HashSet<_> = pids.iter().map(|pid| namespace(*pid, "pid")).collect();
    assert_eq!(distinct.len(), 3);
    fixture.node.stop();
}

/// Finding 18: `kill -TERM 1`, or a limit of pid 1, ended the pod. Without the change the containers are gone after the first
/// signal.
#[test]
fn containers_cannot_end_a_shared_pid_namespace() {
    let fixture = PodFixture::with(shared_pod(|_| ()));
    let mut config = fixture.config("killer", &["sleep", "forever"]);
    in_shared(&mut config);
    let id = fixture.run(&config);
    for signal in ["SIGTERM", "SIGKILL", "SIGINT", "SIGSTOP", "SIGUSR1", "SIGCHLD", "SIGXCPU"] {
        assert_eq!(says(&fixture, &id, &["signal", "1", signal]), "Ok(())\n", "{signal}");
    }
    thread::sleep(Duration::from_millis(200));
    assert!(host::is_alive(fixture.node.container_pid(&id)), "the container lives");
    assert_eq!(says(&fixture, &id, &["print", "still"]), "still\n");
    fixture.node.stop();
}

/// The kernel ends a PID namespace with its first process; the pod is then not ready, and its containers were
/// ended by the kernel's signal.
#[test]
fn the_end_of_the_first_process_ends_the_pod() {
    let fixture = PodFixture::with(shared_pod(|_| ()));
    let mut config = fixture.config("one", &["sleep", "forever"]);
    in_shared(&mut config);
    let id = fixture.run(&config);
    let monitor = fixture.node.monitors()[0].pid;
    let first = host::children(monitor)
        .into_iter()
        .find(|pid| {
            fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "coracle-init\n")
        })
        .expect("there is one");
    let pid = nix::unistd::Pid::from_raw(first);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("killed");
    let status = fixture.node.exited(&id);
    assert_eq!(status.exit_code, 137, "{status:?}");
    host::wait_until("the monitor ends", || !host::is_alive(monitor));
    fixture.node.stop();
}

/// If a monitor is killed, its PID namespace ends, because no process would log or reap its containers.
#[test]
fn the_first_process_ends_with_its_monitor() {
    let fixture = PodFixture::with(shared_pod(|_| ()));
    let mut config = fixture.config("one", &["sleep", "forever"]);
    in_shared(&mut config);
    let id = fixture.run(&config);
    let main = fixture.node.container_pid(&id);
    let monitor = fixture.node.monitors()[0].pid;
    let first = host::children(monitor);
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(monitor), nix::sys::signal::Signal::SIGKILL)
        .expect("killed");
    host::wait_until("all of the pod ends", || {
        !host::is_alive(main) && first.iter().all(|pid| !host::is_alive(*pid))
    });
    fixture.node.stop();
}

/// The kernel reaps orphans instead of the first process: no zombie remains.
#[test]
fn orphans_in_a_shared_pid_namespace_are_reaped() {
    let fixture = PodFixture::with(shared_pod(|_| ()));
    let mut config = fixture.config("one", &["sleep", "forever"]);
    in_shared(&mut config);
    let id = fixture.run(&config);
    for _ in 0..5 {
        says(&fixture, &id, &["orphan", "0"]);
    }
    host::wait_until("only the first process and the container are left", || {
        let said = says(&fixture, &id, &["ls", "/proc"]);
        // This exec, the container, the first process.
        said.lines().filter(|name| name.parse::<i32>().is_ok()).count() == 3
    });
    fixture.node.stop();
}

/// Checks lines `PID KEY VALUE…` about traced processes against the container's own values.
fn check_seized(fixture: &PodFixture, id: &str, said: &str, what: &str) -> usize {
    let main = fixture.node.container_pid(id);
    let status = fs::read_to_string(format!("/proc/{main}/status")).expect("it lives");
    let bounding = status.lines().find_map(|line| line.strip_prefix("CapBnd:\t")).expect("a set");
    let allowed = u64::from_str_radix(bounding, 16).expect("hexadecimal");
    let root = says(fixture, id, &["ls", "/"]);
    let mut seized = 0;
    for line in said.lines() {
        let mut words = line.split(' ').skip(1);
        match (words.next(), words.next(), words.next()) {
            (Some(key @ ("CapInh" | "CapPrm" | "CapEff" | "CapBnd" | "CapAmb")), Some(set), None) => {
                seized += usize::from(key == "CapEff");
                let set = u64::from_str_radix(set, 16).expect("hexadecimal");
                assert_eq!(set & !allowed, 0, "{what}: {line}");
            }
            // `error`: the process has ended meanwhile.
            (Some("fd"), Some(number), Some(leads)) if number != "error" => {
                let number: i32 = number.parse().expect("a number");
                // The standard streams, and until exec the report, a pipe.
                assert!(number < 3 || number == 3 && leads.starts_with("pipe:"), "{what}: {line}");
            }
            (Some("root"), Some(name), _) if name != "error" => {
                assert!(root.lines().any(|own| own == name), "{what}: {line}, not in {root}");
            }
            (Some("ns"), Some("mnt"), Some(link)) => {
                assert_ne!(link, namespace(std::process::id() as i32, "mnt"), "{what}: {line}");
            }
            _ => {}
        }
    }
    seized
}

/// Finding 3. Regression: the process that becomes an exec, or a container in a target's PID namespace, was
/// in that namespace from its first instruction, before it had left the node's mount namespace, with all
/// capabilities: the first traced process had CapEff 000001fffeffffff and a root with `root`.
#[test]
fn traced_processes_in_a_pid_namespace_have_no_more_privileges_than_the_container() {
    let fixture = PodFixture::start();
    let mut config = fixture.config("tracer", &["seize", "20000"]);
    tracer(&mut config);
    let id = fixture.run(&config);
    host::wait_until("it watches", || fixture.node.output(&id).contains("watching"));
    let begin = Instant::now();
    // More than 50 if the tracer was too late for all of them.
    let has_seized = || fixture.node.output(&id).contains("CapEff");
    for count in 0.. {
        if count >= 50 && (has_seized() || begin.elapsed() > Duration::from_secs(12)) {
            break;
        }
        // An exec that was traced may end in any way.
        let _ = fixture.node.exec_sync(exec(&id, &["true"], 5));
    }
    for round in 0..3 {
        let mut debug = container(&format!("debug{round}"), &fixture.image, &["true"], &fixture.pod);
        let options = security(&mut debug).namespace_options.as_mut().expect("set");
        options.pid = NamespaceMode::Target.into();
        options.target_id = id.clone();
        fixture.run(&debug);
    }
    assert!(begin.elapsed() < Duration::from_secs(20), "the tracer watched all of it: {:?}", begin.elapsed());
    host::wait_until("it is over", || fixture.node.output(&id).contains("over"));
    let said = fixture.node.output(&id);
    // The container has ended, so the values of a second one like it are used.
    let mut config = fixture.config("like", &["sleep", "forever"]);
    tracer(&mut config);
    let like = fixture.run(&config);
    assert!(check_seized(&fixture, &like, &said, "own PID namespace") > 0, "nothing was seized: {said}");
    fixture.node.stop();
}

/// The test in a PID namespace that containers share, also while other containers start.
#[test]
fn traced_processes_in_a_shared_pid_namespace_have_no_more_privileges_than_a_container() {
    let fixture = PodFixture::with(shared_pod(|_| ()));
    let mut config = fixture.config("tracer", &["seize", "5000"]);
    in_shared(&mut config);
    tracer(&mut config);
    let id = fixture.run(&config);
    host::wait_until("it watches", || fixture.node.output(&id).contains("watching"));
    for round in 0..5 {
        let _ = fixture.node.exec_sync(exec(&id, &["true"], 5));
        let mut other = container(&format!("other{round}"), &fixture.image, &["true"], &fixture.pod);
        in_shared(&mut other);
        fixture.run(&other);
    }
    host::wait_until("it is over", || fixture.node.output(&id).contains("over"));
    let said = fixture.node.output(&id);
    let mut config = fixture.config("like", &["sleep", "forever"]);
    in_shared(&mut config);
    tracer(&mut config);
    let like = fixture.run(&config);
    assert!(check_seized(&fixture, &like, &said, "shared PID namespace") > 0, "nothing was seized: {said}");
    fixture.node.stop();
}

/// A container in a shared or a target's PID namespace has a procfs of that namespace, with masks.
#[test]
fn procfs_is_that_of_the_containers_pid_namespace() {
    let fixture = PodFixture::with(shared_pod(|_| ()));
    let mut config = fixture.config("one", &["sleep", "forever"]);
    in_shared(&mut config);
    security(&mut config).masked_paths = vec!["/proc/keys".into()];
    let one = fixture.run(&config);
    let processes = |id: &str| {
        let said = says(&fixture, id, &["ls", "/proc"]);
        said.lines().filter(|name| name.parse::<i32>().is_ok()).count()
    };
    assert_eq!(processes(&one), 3);
    assert_eq!(says(&fixture, &one, &["cat", "/proc/keys"]), "", "it is masked");
    let mut config = fixture.config("two", &["sleep", "forever"]);
    in_shared(&mut config);
    let two = fixture.run(&config);
    assert_eq!((processes(&one), processes(&two)), (4, 4));
    assert!(says(&fixture, &two, &["cat", "/proc/1/comm"]).contains("coracle-init"));
    fixture.node.stop();

    let fixture = PodFixture::start();
    let target = fixture.run(&fixture.config("target", &["sleep", "forever"]));
    let mut debug = fixture.config("debug", &["sleep", "forever"]);
    let options = security(&mut debug).namespace_options.as_mut().expect("set");
    options.pid = NamespaceMode::Target.into();
    options.target_id = target.clone();
    let debug = fixture.run(&debug);
    let said = says(&fixture, &debug, &["ls", "/proc"]);
    let pids: Vec<&str> = said.lines().filter(|name| name.parse::<i32>().is_ok()).collect();
    assert_eq!(pids.len(), 3, "target, debug and this exec: {said}");
    fixture.node.stop();
}

/// Finding 19. Regression: an exec joined the current namespaces of the main process, also those that it had
/// created itself, and failed with `invalid argument`, because a user namespace without mappings has no root.
#[test]
fn an_exec_joins_the_containers_namespaces_whatever_its_main_process_made() {
    let fixture = PodFixture::start();
    let mut config = fixture.config("apart", &["apart"]);
    security(&mut config).capabilities =
        Some(Capability { add_capabilities: vec!["SYS_ADMIN".into()], ..Default::default() });
    let id = fixture.run(&config);
    host::wait_until("it is apart", || fixture.node.output(&id).contains("apart"));
    let main = fixture.node.container_pid(&id);
    let said = says(&fixture, &id, &["see", "ids", "namespaces"]);
    assert!(said.contains("ids Uid 0 0 0 0"), "{said}");
    let me = std::process::id() as i32;
    for kind in ["user", "net"] {
        assert_ne!(namespace(main, kind), namespace(me, kind), "its main process has left {kind}");
        let line = format!("namespaces {kind} {}", namespace(me, kind));
        assert!(said.lines().any(|have| have == line), "{line} in {said}");
    }
    let mounts = said.lines().find(|line| line.starts_with("namespaces mnt ")).expect("one");
    assert!(!mounts.ends_with(&namespace(main, "mnt")), "not the one it made: {said}");
    assert!(!mounts.ends_with(&namespace(me, "mnt")), "nor the node's: {said}");
    fixture.node.stop();
}

/// The session keyring of a process in /proc/keys: the keys that it possesses.
fn keyring(fixture: &PodFixture, id: &str) -> Vec<String> {
    let said = says(fixture, id, &["cat", "/proc/keys"]);
    let mut names: Vec<String> = said
        .lines()
        .filter(|line| line.contains(" keyring "))
        .filter_map(|line| line.split(" keyring ").nth(1)?.trim().split(':').next().map(str::to_owned))
        .collect();
    names.sort();
    names
}

/// Finding 7. Regression: all containers had the session keyring of the daemon, and none had a keyring
/// `coracle-…`.
#[test]
fn each_container_has_a_session_keyring_that_its_execs_join() {
    let fixture = PodFixture::start();
    let config = |name: &str| fixture.config(name, &["sleep", "forever"]);
    let [one, two] = ["one", "two"].map(|name| fixture.run(&config(name)));
    let (first, second) = (keyring(&fixture, &one), keyring(&fixture, &two));
    let own = |names: &[String]| {
        let own: Vec<String> = names.iter().filter(|name| name.starts_with("coracle-")).cloned().collect();
        assert_eq!(own.len(), 1, "{names:?}");
        own[0].clone()
    };
    assert_ne!(own(&first), own(&second));
    assert_eq!(own(&first), own(&keyring(&fixture, &one)), "every exec joins the same");
    // Only possession grants access, and the owner may join it by its name, which is a secret.
    let said = says(&fixture, &one, &["cat", "/proc/keys"]);
    assert!(said.lines().any(|line| line.contains(" 3f080000 ") && line.contains("coracle-")), "{said}");
    fixture.node.stop();
}

/// A profile that forbids clone and setsid is applied, without no_new_privs, before the process of an exec is
/// created; the runtime's own calls are exempt, those of the container are not. Without `Op::SpareOwnCalls`
/// no exec starts: `operation not permitted`.
#[test]
fn an_exec_starts_although_its_filter_forbids_clone() {
    use coracle_tests::cri::proto::{SecurityProfile, security_profile::ProfileType};
    let fixture = PodFixture::with(shared_pod(|_| ()));
    let path = fixture.node.folder().join("no-clone.json");
    let text = r#"{
        "defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"],
        "syscalls": [{"names": ["clone", "clone3", "fork", "vfork", "setsid"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}]
    }"#;
    fs::write(&path, text).expect("a profile");
    for is_shared in [false, true] {
        let mut config = fixture.config(&format!("strict-{is_shared}"), &["sleep", "forever"]);
        if is_shared {
            in_shared(&mut config);
        } else {
            security(&mut config).namespace_options.as_mut().expect("set").pid =
                NamespaceMode::Container.into();
        }
        security(&mut config).seccomp = Some(SecurityProfile {
            profile_type: ProfileType::Localhost.into(),
            localhost_ref: path.display().to_string(),
        });
        let id = fixture.run(&config);
        assert!(says(&fixture, &id, &["see", "ids"]).contains("ids Seccomp 2"));
        let said = says(&fixture, &id, &["orphan", "0"]);
        assert!(said.contains("not permitted"), "the container itself cannot clone: {said}");
    }
    fixture.node.stop();
}
