//! Tracing: a container that may trace finds its own pod in its PID namespace, and nothing of the node, at
//! any moment: while processes start, execs are created, probes run, containers stop, and the daemon
//! restarts.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use coracle_tests::cri::proto::{
    ContainerConfig, ContainerState, KeyValue, ListContainersRequest, NamespaceMode, StartContainerRequest,
    StopContainerRequest, VersionRequest,
};
use coracle_tests::host;
use coracle_tests::image::Image;
use coracle_tests::node::{Node, binaries};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{bridge_pod, create, exec, fresh, host_pod};

use crate::{Rights, armed, beside, got, is_ready, mapped, reached_nothing, restarted, shared};

/// Files of the node that no container may read: one among the daemon's files, which the monitor's mount
/// namespace contains, and one elsewhere.
pub(crate) fn canaries(fixture: &PodFixture) -> Vec<String> {
    let places: [PathBuf; 2] = [fixture.node.root().join("canary"), fixture.node.folder().join("canary")];
    let plant = |place: &PathBuf| {
        fs::write(place, "a secret of the node").expect("a file");
        place.display().to_string()
    };
    places.iter().map(plant).collect()
}

/// Arguments of an attack that searches for the canaries.
pub(crate) fn with<'a>(words: &[&'a str], canaries: &'a [String]) -> Vec<&'a str> {
    let mut all = vec!["attack"];
    all.extend(words);
    all.extend(canaries.iter().map(String::as_str));
    all
}

/// Names in /proc of namespaces that no process in a container's PID namespace may be in: those of the node,
/// except for those that the pod shares, and the mount namespaces of monitors.
pub(crate) fn forbidden(fixture: &PodFixture, is_on_the_host_network: bool) -> BTreeSet<String> {
    let me = std::process::id() as i32;
    let kinds: &[&str] =
        if is_on_the_host_network { &["mnt", "pid", "ipc"] } else { &["mnt", "pid", "ipc", "net", "uts"] };
    let mut names: BTreeSet<String> = kinds.iter().map(|kind| host::namespace(me, kind)).collect();
    // On v1 containers are in the node's cgroup namespace, as in other runtimes: it shows no more than their
    // cgroup mounts.
    if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        names.insert(host::namespace(me, "cgroup"));
    }
    let is_of_the_node = |pid: i32| host::namespace(pid, "pid") == host::namespace(me, "pid");
    let monitors = fixture.node.monitors().into_iter().filter(|monitor| is_of_the_node(monitor.pid));
    names.extend(monitors.map(|monitor| host::namespace(monitor.pid, "mnt")));
    names
}

/// Fails if a report shows a process in one of these namespaces.
#[track_caller]
pub(crate) fn is_outside_of(report: &str, forbidden: &BTreeSet<String>) {
    let inside: Vec<&str> = report
        .lines()
        .filter(|line| line.starts_with("saw namespace "))
        .filter(|line| line.rsplit(' ').next().is_some_and(|name| forbidden.contains(name)))
        .collect();
    assert!(inside.is_empty(), "in a namespace of the node: {inside:#?}\nthe whole report:\n{report}");
}

/// Runs a race with concurrent `storm` and returns the attacker's report.
#[track_caller]
fn race(fixture: &PodFixture, mut config: ContainerConfig, storm: impl Fn()) -> String {
    config.args.extend(canaries(fixture));
    let attacker = fixture.run(&config);
    crate::wait_for_line(fixture, &attacker, "watching");
    let is_over = || fixture.node.container(&attacker).state() == ContainerState::ContainerExited;
    while !is_over() {
        storm();
    }
    let report = fixture.node.output(&attacker);
    assert!(report.contains("saw seized "), "the attacker came to no end: {report}");
    report
}

/// Duration of a race in seconds: enough for some hundred execs.
const RACE: &str = "3";

/// Makes execs in a container, one after the other.
fn storm(fixture: &PodFixture, container: &str) {
    for _ in 0..8 {
        // A traced process may exceed the probe's timeout; the loop continues.
        let _ = fixture.node.exec_sync(exec(container, &["true"], 5));
    }
}

#[test]
fn execs_show_nothing_of_the_node_to_a_tracer_in_its_own_pid_namespace() {
    for rights in [Rights::Ptrace, Rights::AllUnfiltered] {
        let fixture = PodFixture::on(Node::with_bridge(), bridge_pod("own"));
        let config = armed(&fixture, "attacker", rights, &["attack", "race", RACE]);
        let attacker_name = "attacker";
        let forbidden = forbidden(&fixture, false);
        let report = race(&fixture, config, || {
            let list = ListContainersRequest::default();
            for found in fixture.node.list_containers(list).expect("lists").containers {
                if found.metadata.is_some_and(|about| about.name == attacker_name) {
                    storm(&fixture, &found.id);
                }
            }
        });
        assert!(!report.contains("saw seized 0"), "{rights:?}: nothing was seized: {report}");
        reached_nothing(&report);
        is_outside_of(&report, &forbidden);
        fixture.node.stop();
    }
}

#[test]
fn starts_and_stops_show_nothing_of_the_node_to_a_tracer_in_a_shared_pid_namespace() {
    for rights in [Rights::Ptrace, Rights::AllUnfiltered] {
        let fixture = PodFixture::on(Node::with_bridge(), shared(bridge_pod("shared")));
        let config = armed(&fixture, "attacker", rights, &["attack", "race", RACE]);
        let forbidden = forbidden(&fixture, false);
        let report = race(&fixture, config, || {
            let victim = fixture.config(&format!("victim{}", fresh()), &["sleep", "forever"]);
            let victim = fixture.run(&victim);
            storm(&fixture, &victim);
            let stop = StopContainerRequest { container_id: victim, timeout: 0 };
            fixture.node.stop_container(stop).expect("a stop");
        });
        assert!(!report.contains("saw seized 0"), "{rights:?}: nothing was seized: {report}");
        reached_nothing(&report);
        is_outside_of(&report, &forbidden);
        assert!(is_ready(&fixture), "{rights:?}");
        fixture.node.stop();
    }
}

#[test]
fn debug_containers_show_nothing_of_the_node_to_their_target() {
    let fixture = PodFixture::on(Node::with_bridge(), bridge_pod("target"));
    let mut config = armed(&fixture, "attacker", Rights::Ptrace, &["attack", "race", RACE]);
    config.args.extend(canaries(&fixture));
    let forbidden = forbidden(&fixture, false);
    let attacker = fixture.run(&config);
    crate::wait_for_line(&fixture, &attacker, "watching");
    let is_over = || fixture.node.container(&attacker).state() == ContainerState::ContainerExited;
    let mut debuggers = 0;
    while !is_over() {
        let mut debugger = fixture.config(&format!("debug{debuggers}"), &["true"]);
        beside(&mut debugger, &attacker);
        // The target may have ended meanwhile; then there is no namespace to join.
        let made = fixture.node.create_container(create(&fixture.pod_id, &debugger, &fixture.pod));
        let Ok(made) = made else { break };
        let start = StartContainerRequest { container_id: made.container_id };
        debuggers += u32::from(fixture.node.start_container(start).is_ok());
    }
    fixture.node.exited(&attacker);
    assert!(debuggers > 0, "no debug container ever started");
    let report = fixture.node.output(&attacker);
    assert!(!report.contains("saw seized 0"), "nothing was seized: {report}");
    reached_nothing(&report);
    is_outside_of(&report, &forbidden);
    fixture.node.stop();
}

#[test]
fn a_restart_of_the_daemon_exposes_no_process_to_a_tracer() {
    let mut fixture = PodFixture::on(Node::with_bridge(), shared(bridge_pod("restart")));
    let canaries = canaries(&fixture);
    let words = with(&["race", RACE], &canaries);
    let config = armed(&fixture, "attacker", Rights::AllUnfiltered, &words);
    let forbidden = forbidden(&fixture, false);
    let attacker = fixture.run(&config);
    let victim = fixture.run(&fixture.config("victim", &["sleep", "forever"]));
    crate::wait_for_line(&fixture, &attacker, "watching");
    for _ in 0..3 {
        storm(&fixture, &victim);
        fixture = restarted(fixture);
    }
    fixture.node.exited(&attacker);
    let report = fixture.node.output(&attacker);
    assert!(!report.contains("saw seized 0"), "nothing was seized: {report}");
    reached_nothing(&report);
    is_outside_of(&report, &forbidden);
    fixture.node.stop();
}

#[test]
fn a_fully_privileged_tracer_finds_no_privileged_process_of_coracle() {
    for (name, pod) in [
        ("shared", shared(bridge_pod("shared"))),
        ("own", bridge_pod("own")),
        ("mapped", shared(mapped(bridge_pod("mapped")))),
    ] {
        let fixture = PodFixture::on(Node::with_bridge(), pod);
        let canaries = canaries(&fixture);
        let forbidden = forbidden(&fixture, false);
        for rights in Rights::EVERY {
            let config = armed(&fixture, &format!("attacker{rights:?}"), rights, &["sleep", "forever"]);
            let attacker = fixture.run(&config);
            let report = crate::says(&fixture, &attacker, &with(&["look"], &canaries));
            let seen = report.matches("saw process ").count();
            assert!(seen > 0, "{name} {rights:?} saw no process: {report}");
            reached_nothing(&report);
            is_outside_of(&report, &forbidden);
            assert!(!report.contains("saw taken"), "{name} {rights:?} has a descriptor of coracle: {report}");
            // Namespaces are entered if files did not lead out.
            for kind in ["mnt", "net", "uts", "cgroup", "pid"] {
                let said = crate::says(&fixture, &attacker, &["attack", "enter", "1", kind]);
                assert!(got(&said).is_empty() && !said.contains(&fixture.node.bridge()), "{name}: {said}");
                let entered = said.lines().find(|line| line.starts_with("saw entered")).unwrap_or("");
                let is_a_container = entered.contains("probe");
                let is_empty = entered.contains("root= ");
                assert!(entered.is_empty() || is_a_container || is_empty, "{name} {rights:?}: {said}");
            }
        }
        assert!(is_ready(&fixture), "{name}");
        fixture.node.stop();
    }
}

/// A container in the node's PID namespace sees the runtime's processes. Without SYS_PTRACE it may trace
/// those with its own user ID and no more capabilities (ptrace(2)), unless they are not dumpable: a process
/// that dropped privileges must not become traceable by that. Without the defence: `GOT traced …
/// coracle-worker confined decompress`.
#[test]
fn a_container_in_the_nodes_pid_namespace_cannot_trace_coracle() {
    let mut pod = host_pod("node");
    let linux = pod.linux.as_mut().and_then(|linux| linux.security_context.as_mut());
    linux.and_then(|context| context.namespace_options.as_mut()).expect("set").pid =
        NamespaceMode::Node.into();
    let fixture = PodFixture::with(pod);
    let attackers = [Rights::Default, Rights::Unfiltered]
        .map(|rights| fixture.run(&armed(&fixture, &format!("{rights:?}"), rights, &["sleep", "forever"])));
    // An import that is blocked: its archive comes through a FIFO.
    let archive = Image::probe(&fixture.node.probe(), "slow").oci_archive("localhost/slow:1");
    let fifo = fixture.node.folder().join("slow.tar");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
    let mut import = Command::new(binaries().join("coracle"))
        .args(["image", "--state"])
        .arg(fixture.node.state())
        .arg("import")
        .arg(&fifo)
        .stdout(Stdio::null())
        .spawn()
        .expect("the program runs");
    let mut writer = fs::File::options().write(true).open(&fifo).expect("the import opens it");
    writer.write_all(&archive[..archive.len() / 2]).expect("half of it");
    let is_ours = |process: &host::Process| descends(process.pid, fixture.node.pid());
    host::wait_until("the archive is parsed", || {
        host::processes("confined").iter().filter(|process| is_ours(process)).count() >= 2
    });
    for attacker in &attackers {
        let report = crate::says(&fixture, attacker, &["attack", "hunt", &fixture.node.pid().to_string()]);
        // The daemon, its worker, and the two confined children.
        assert!(report.matches("coracle").count() >= 4, "{report}");
        // The container's own processes do not belong to the runtime.
        let ours: Vec<&str> = got(&report).into_iter().filter(|line| line.contains("coracle")).collect();
        assert!(ours.is_empty(), "reached: {ours:#?}\n{report}");
    }
    writer.write_all(&archive[archive.len() / 2..]).expect("the rest");
    drop(writer);
    assert!(import.wait().expect("it ends").success());
    fixture.node.stop();
}

/// Whether a process is a descendant of another.
fn descends(mut pid: i32, top: i32) -> bool {
    while pid > 1 && pid != top {
        pid = host::proc_value(pid, "status", "PPid").map_or(0, |parent| parent as i32);
    }
    pid == top
}

/// A signal to a process group reaches all its processes, whatever their PID namespaces: a new process in a
/// container's namespace is in a group without the monitor, so that kill(0, SIGKILL) by it ends one exec
/// only.
#[test]
fn a_process_that_appears_shares_no_process_group_with_the_monitor() {
    for pod in [bridge_pod("own"), shared(bridge_pod("shared"))] {
        let fixture = PodFixture::on(Node::with_bridge(), pod);
        // Before the attacker starts: one that starts at the same time may be traced like an exec.
        let neighbour = fixture.run(&fixture.config("neighbour", &["sleep", "forever"]));
        let words = ["attack", "groups", RACE];
        let attacker = fixture.run(&armed(&fixture, "attacker", Rights::Ptrace, &words));
        crate::wait_for_line(&fixture, &attacker, "watching");
        while fixture.node.container(&attacker).state() != ContainerState::ContainerExited {
            storm(&fixture, &attacker);
            assert!(is_ready(&fixture), "an exec's process ended the pod");
        }
        let report = fixture.node.output(&attacker);
        assert!(report.contains("saw group "), "nothing was seized: {report}");
        assert_eq!(fixture.node.container(&neighbour).state(), ContainerState::ContainerRunning);
        assert_eq!(crate::says(&fixture, &neighbour, &["print", "alive"]), "alive\n");
        fixture.node.stop();
    }
}

/// A process that has a container's filter but has not executed its program may make system calls that the
/// filter refuses to others. A tracer that takes control of it at that moment cannot create a user namespace.
/// Also tested with no_new_privs, with which the traced process sets the filter itself.
#[test]
fn a_process_with_a_filter_makes_no_namespaces_for_its_tracer() {
    for no_new_privs in [false, true] {
        let fixture = PodFixture::on(Node::with_bridge(), bridge_pod("own"));
        let words = ["attack", "namespaces", RACE];
        let mut config = armed(&fixture, "attacker", Rights::Ptrace, &words);
        coracle_tests::request::security(&mut config).no_new_privs = no_new_privs;
        let attacker = fixture.run(&config);
        crate::wait_for_line(&fixture, &attacker, "watching");
        while fixture.node.container(&attacker).state() != ContainerState::ContainerExited {
            storm(&fixture, &attacker);
        }
        let report = fixture.node.output(&attacker);
        assert!(
            !report.contains("saw seized 0"),
            "nothing was seized, no_new_privs {no_new_privs}: {report}"
        );
        reached_nothing(&report);
        fixture.node.stop();
    }
}

/// Actions on a process that enters a container's PID namespace - stopping, killing, holding its pipes or
/// writing to them - affect only that exec or start. The daemon responds, calls end, and everything works
/// after the attacker has ended.
#[test]
fn disturbed_execs_and_starts_end_and_do_not_block_others() {
    for way in ["stop", "hold", "lie", "kill"] {
        let fixture = PodFixture::on(Node::with_bridge(), shared(bridge_pod("disturbed")));
        let words = ["attack", "disturb", way, "4"];
        let attacker = fixture.run(&armed(&fixture, "attacker", Rights::PtraceUnfiltered, &words));
        crate::wait_for_line(&fixture, &attacker, "watching");
        std::thread::scope(|scope| {
            for _ in 0..6 {
                let (client, attacker) = (fixture.node.another(), attacker.clone());
                // Each ends: with its output, by its timeout, or refused.
                scope.spawn(move || client.exec_sync(exec(&attacker, &["true"], 1)));
            }
            let victim = fixture.create(&fixture.config("victim", &["sleep", "forever"]));
            let client = fixture.node.another();
            let request = StartContainerRequest { container_id: victim };
            scope.spawn(move || client.start_container(request));
            for _ in 0..20 {
                fixture.node.version(VersionRequest::default()).expect("the daemon answers");
            }
            fixture.node.exited(&attacker);
            for victim in containers(&fixture) {
                let stop = StopContainerRequest { container_id: victim, timeout: 0 };
                fixture.node.stop_container(stop).expect("whatever state it is in, it stops");
            }
        });
        let next = fixture.run(&fixture.config("next", &["sleep", "forever"]));
        assert_eq!(crate::says(&fixture, &next, &["print", "fine"]), "fine\n", "{way}");
        fixture.node.stop();
    }
}

/// The scheduler group of a session can be slowed down through any of its processes (`/proc/PID/autogroup`, sched(7)),
/// also by a process without capabilities. The process of an exec is not in the monitor's session at any moment.
#[test]
fn an_exec_does_not_give_a_container_the_scheduler_group_of_the_monitor() {
    let fixture = PodFixture::on(Node::with_bridge(), bridge_pod("nice"));
    let groups = || {
        let group = |pid: i32| fs::read_to_string(format!("/proc/{pid}/autogroup"));
        fixture.node.monitors().into_iter().map(|monitor| group(monitor.pid).ok()).collect::<Vec<_>>()
    };
    let attacker = fixture.run(&fixture.config("attacker", &["attack", "disturb", "nice", "3"]));
    crate::wait_for_line(&fixture, &attacker, "watching");
    let before = groups();
    while fixture.node.container(&attacker).state() != ContainerState::ContainerExited {
        storm(&fixture, &attacker);
    }
    let report = fixture.node.output(&attacker);
    assert!(!report.contains("saw disturbed 0"), "no process was seen: {report}");
    assert_eq!(groups(), before);
    fixture.node.stop();
}

/// The ids of all containers.
fn containers(fixture: &PodFixture) -> Vec<String> {
    let list = fixture.node.list_containers(ListContainersRequest::default()).expect("lists").containers;
    list.into_iter().map(|container| container.id).collect()
}

/// A process that enters a container's PID namespace is a copy of the monitor, whose memory contains lines
/// and names of all containers of the pod: the copy contains none of them.
#[test]
fn the_memory_of_a_new_process_holds_nothing_of_other_containers() {
    const LINE: &str = "half-a-line-of-a-neighbour";
    const VARIABLE: &str = "variable-of-a-neighbour";
    let fixture = PodFixture::on(Node::with_bridge(), bridge_pod("memory"));
    let mut neighbour = fixture.config("neighbour", &["sleep", "forever"]);
    neighbour.envs.push(KeyValue { key: "SECRET".into(), value: VARIABLE.into() });
    let neighbour = fixture.run(&neighbour);
    // An incomplete line stays in the monitor's memory.
    let talker = fixture.run(&fixture.config("talker", &["half", LINE]));
    let secrets = [LINE, VARIABLE, &neighbour, &talker].map(|text| format!("memory:{text}"));
    let words = with(&["race", RACE], &secrets);
    let attacker = fixture.run(&armed(&fixture, "attacker", Rights::Ptrace, &words));
    crate::wait_for_line(&fixture, &attacker, "watching");
    while fixture.node.container(&attacker).state() != ContainerState::ContainerExited {
        storm(&fixture, &attacker);
    }
    let report = fixture.node.output(&attacker);
    assert!(!report.contains("saw seized 0"), "nothing was seized: {report}");
    reached_nothing(&report);
    fixture.node.stop();
}

/// Regression: the stop of a process that its monitor traces was taken for its end, with exit code 0 or 255, and the
/// container was killed.
#[test]
fn a_process_that_makes_its_monitor_its_tracer_runs_on() {
    let fixture = PodFixture::start();
    let id = fixture.run(&fixture.config("one", &["traced", "forever"]));
    host::wait_until("it continues", || fixture.node.output(&id).contains("it continues"));
    let pid = fixture.node.container_pid(&id);
    let answer = fixture.node.exec_sync(exec(&id, &["traced", "5"], 10)).expect("exec");
    assert_eq!((answer.exit_code, answer.stdout.as_slice()), (5, b"it continues\n".as_slice()));
    assert_eq!(fixture.node.container(&id).state(), ContainerState::ContainerRunning);
    assert_eq!(fixture.node.container_pid(&id), pid);
    let ended = fixture.run(&fixture.config("two", &["traced", "6"]));
    assert_eq!(fixture.node.exited(&ended).exit_code, 6);
    fixture.node.stop();
}
