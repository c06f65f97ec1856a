//! The pod sandbox contract: NRI-S1 to NRI-S38.

use std::fs;
use std::process::Command;
use std::time::Instant;

use coracle_tests::cri::proto::{
    ContainerState, LinuxContainerResources, ListContainersRequest, ListPodSandboxRequest,
    PodSandboxStatusRequest, RemovePodSandboxRequest, StopPodSandboxRequest,
    UpdatePodSandboxResourcesRequest,
};
use coracle_tests::host::{self, wait_until};
use coracle_tests::node::Node;
use coracle_tests::nri::{Answer, EVENTS, Heard, Plugin, api};
use coracle_tests::request::{bridge_pod, container, create, host_pod, run};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tonic::Code;

use super::{PATIENCE, answers, node, quiet, refused, running, standing};

fn listed(node: &Node) -> Vec<String> {
    let pods = node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list").items;
    pods.into_iter().map(|pod| pod.id).collect()
}

fn stop(node: &Node, id: &str) {
    let request = StopPodSandboxRequest { pod_sandbox_id: id.into() };
    node.stop_pod_sandbox(request).unwrap_or_else(|error| panic!("stop: {error}"));
}

fn status(node: &Node, id: &str) -> Result<(), tonic::Status> {
    let request = PodSandboxStatusRequest { pod_sandbox_id: id.into(), verbose: false };
    node.pod_sandbox_status(request).map(drop)
}

/// The path of a namespace of the pod; empty: it has none.
fn namespace(pod: &api::PodSandbox, kind: &str) -> String {
    let namespaces = pod.linux.as_ref().map(|linux| linux.namespaces.clone()).unwrap_or_default();
    namespaces.into_iter().find(|one| one.r#type == kind).map(|one| one.path).unwrap_or_default()
}

/// The IPv4 addresses of interfaces that are up in a network namespace.
fn addresses(netns: &str) -> String {
    let output = Command::new("nsenter")
        .arg(format!("--net={netns}"))
        .args(["ip", "-4", "-br", "addr", "show", "up"])
        .output();
    String::from_utf8(output.expect("nsenter runs").stdout).expect("text")
}

/// Rules of docs/specs/nri.md: NRI-S28, NRI-C1, NRI-C2.
#[test]
fn events_of_a_pod_are_delivered_in_order() {
    let node = Node::start();
    let image = node.import_probe();
    let plugin = Plugin::listener(&node, "10", "order");
    let pod = host_pod("web");
    let pod_id = node.run_pod(&pod);
    let id = node.run_container(&pod_id, &container("c1", &image, &["sleep", "60"], &pod), &pod);
    node.remove_pod(&pod_id);
    let expected = [
        "RunPodSandbox web",
        "CreateContainer c1",
        "PostCreateContainer c1",
        "StartContainer c1",
        "PostStartContainer c1",
        "StopContainer c1",
        "StopPodSandbox web",
        "RemoveContainer c1",
        "RemovePodSandbox web",
    ];
    assert_eq!(plugin.titles(), expected);
    for heard in plugin.all().iter().filter(|heard| heard.method.ends_with("Container")) {
        let told = heard.container();
        assert_eq!((told.id.as_str(), told.name.as_str()), (id.as_str(), "c1"), "{}", heard.method);
        assert_eq!(told.pod_sandbox_id, pod_id, "{}", heard.method);
    }
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-S1, NRI-S2, NRI-S3, NRI-S4, NRI-S5, NRI-S6, NRI-S7, NRI-S8, NRI-S9, NRI-S16.
#[test]
fn run_event_comes_after_setup_and_before_the_pod_is_visible() {
    let node = Node::with_bridge();
    let image = node.import_probe();
    let (handler, stands, go_on) = standing("RunPodSandbox");
    let plugin = Plugin::join(&node, "10", "gate", EVENTS, handler);
    let pod = bridge_pod("boat");
    let run = running(&node, &pod);
    let told = stands.recv_timeout(PATIENCE).expect("the hook is called").pod();
    // S2: its cgroup is there.
    let cgroup = told.linux.as_ref().expect("of Linux").cgroups_path.clone();
    assert!(host::cgroup_file(&cgroup, "cgroup.procs").is_some(), "{cgroup}");
    // S3: the network namespace can be entered, and has just these addresses.
    let seen = addresses(&namespace(&told, "network"));
    assert_eq!(told.ips.len(), 1);
    assert!(seen.contains("eth0") && seen.contains(&told.ips[0]), "{seen}");
    // S4, S5: the others, and the process that holds them.
    for kind in ["ipc", "uts"] {
        let path = namespace(&told, kind);
        let own = fs::read_link(format!("/proc/self/ns/{kind}")).expect("ours");
        assert_ne!(fs::read_link(&path).unwrap_or_else(|error| panic!("{path}: {error}")), own);
    }
    let command = fs::read_to_string(format!("/proc/{}/comm", told.pid)).expect("it runs");
    assert_eq!(command.trim(), "coracle-pod");
    // S6, S7, S8, S16: it is not visible, and nothing can be created in it.
    assert_eq!(listed(&node), Vec::<String>::new());
    assert_eq!(status(&node, &told.id).expect_err("unseen").code(), Code::NotFound);
    let begun = Instant::now();
    let refused = node.create_container(create(&told.id, &container("c", &image, &["true"], &pod), &pod));
    assert_eq!(refused.expect_err("unseen").code(), Code::NotFound);
    assert!(begun.elapsed() < PATIENCE, "it waited for the hook");
    go_on.send(Answer::empty()).expect("it stands");
    // S9, S1.
    let id = run.join().expect("no panic").expect("it runs").pod_sandbox_id;
    assert_eq!(id, told.id);
    assert_eq!(listed(&node), [id.as_str()]);
    assert_eq!(plugin.titles(), ["RunPodSandbox boat"]);
    drop(plugin);
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-S10, NRI-S11, NRI-S12, NRI-S13.
#[test]
fn a_refused_run_event_tears_the_pod_down() {
    let node = Node::with_bridge();
    let first = Plugin::listener(&node, "10", "first");
    let mut refusals = 1;
    let refusing = answers("RunPodSandbox", move |_| {
        refusals -= 1;
        if refusals == 0 { Answer::error("no room for it") } else { Answer::empty() }
    });
    let second = Plugin::join(&node, "20", "second", EVENTS, refusing);
    let third = Plugin::listener(&node, "30", "third");
    let pod = bridge_pod("boat");
    let text = refused(node.run_pod_sandbox(run(&pod)));
    assert!(text.contains("NRI RunPodSandbox failed: plugin \"20-second\": no room for it"), "{text}");
    let undone = ["RunPodSandbox boat", "StopPodSandbox boat", "RemovePodSandbox boat"];
    assert_eq!(first.titles(), undone);
    assert_eq!(second.titles(), undone);
    assert_eq!(third.titles(), Vec::<String>::new());
    assert_eq!(listed(&node), Vec::<String>::new());
    wait_until("nothing of it is left", || node.rests().is_empty()); // the kernel removes links in its own time
    let id = node.run_pod(&pod);
    assert_eq!(third.titles(), ["RunPodSandbox boat"]);
    node.remove_pod(&id);
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-S14.
#[test]
fn a_timeout_of_the_run_event_fails_the_pod_and_disconnects_the_plugin() {
    let node = node("plugin_request_timeout = \"300ms\"");
    let plugin = Plugin::join(&node, "10", "mute", EVENTS, answers("RunPodSandbox", |_| Answer::Silence));
    let other = Plugin::listener(&node, "20", "other");
    let text = refused(node.run_pod_sandbox(run(&host_pod("web"))));
    assert!(text.contains("plugin \"10-mute\": no answer within 300ms"), "{text}");
    wait_until("the plugin is disconnected", || plugin.is_over());
    assert_eq!(other.titles(), Vec::<String>::new());
    let id = node.run_pod(&host_pod("web"));
    node.remove_pod(&id);
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-S15.
#[test]
fn a_timeout_of_a_required_plugin_always_fails_the_pod() {
    let settings = "plugin_request_timeout = \"300ms\"\nfail_on_plugin_timeout = false\n\
                    [nri.default_validator]\nrequired_plugins = [\"10-needed\"]";
    let node = node(settings);
    let other = Plugin::join(&node, "20", "other", EVENTS, answers("RunPodSandbox", |_| Answer::Silence));
    let id = node.run_pod(&host_pod("web"));
    wait_until("the plugin is disconnected", || other.is_over());
    node.remove_pod(&id);
    let needed = Plugin::join(&node, "10", "needed", EVENTS, answers("RunPodSandbox", |_| Answer::Silence));
    let text = refused(node.run_pod_sandbox(run(&host_pod("web"))));
    assert!(text.contains("10-needed"), "{text}");
    wait_until("the plugin is disconnected", || needed.is_over());
    // Without it pods can still be stopped, with a warning that it is not notified.
    let id = node.run_pod(&host_pod("late"));
    node.remove_pod(&id);
    assert!(
        node.log().contains("StopPodSandbox of default/late: required plugins are not connected: 10-needed")
    );
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-S17, NRI-S18, NRI-S19, NRI-S20.
#[test]
fn stop_pod_event_comes_after_the_workload_ended_and_before_teardown() {
    let node = Node::with_bridge();
    let image = node.import_probe();
    let (handler, stands, go_on) = standing("StopPodSandbox");
    let plugin = Plugin::join(&node, "10", "gate", EVENTS, handler);
    let pod = bridge_pod("boat");
    let pod_id = node.run_pod(&pod);
    let id = node.run_container(&pod_id, &container("c1", &image, &["sleep", "60"], &pod), &pod);
    let stopping = {
        let request = StopPodSandboxRequest { pod_sandbox_id: pod_id.clone() };
        super::meanwhile(&node, move |cri| cri.stop_pod_sandbox(request))
    };
    let told = stands.recv_timeout(PATIENCE).expect("the hook is called").pod();
    assert_eq!(node.container(&id).state(), ContainerState::ContainerExited);
    assert_eq!(plugin.titles().last().map(String::as_str), Some("StopPodSandbox boat"));
    assert!(plugin.titles().contains(&"StopContainer c1".to_owned()));
    // S18, S20: network, lease, cgroup, namespaces and their holder are there.
    assert!(addresses(&namespace(&told, "network")).contains(&told.ips[0]));
    assert_eq!(node.leases(), [told.ips[0].as_str()]);
    assert!(host::is_alive(told.pid as i32));
    assert!(fs::metadata(namespace(&told, "ipc")).is_ok());
    assert!(host::cgroup_file(&told.linux.expect("of Linux").cgroups_path, "cgroup.procs").is_some());
    // S19: who asks is answered.
    status(&node, &pod_id).expect("a status");
    assert_eq!(node.list_containers(ListContainersRequest::default()).expect("a list").containers.len(), 1);
    go_on.send(Answer::empty()).expect("it stands");
    stopping.join().expect("no panic").expect("it stops");
    assert_eq!(node.leases(), Vec::<String>::new());
    assert!(!host::is_alive(told.pid as i32));
    drop(plugin);
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-S21, NRI-S22, NRI-S23.
#[test]
fn a_second_stop_sends_no_event() {
    let node = Node::start();
    let image = node.import_probe();
    let plugin = Plugin::listener(&node, "10", "ear");
    let pod = host_pod("web");
    let pod_id = node.run_pod(&pod);
    stop(&node, &pod_id);
    stop(&node, &pod_id);
    stop(&node, &"f".repeat(64));
    let refused = node.create_container(create(&pod_id, &container("c", &image, &["true"], &pod), &pod));
    assert_eq!(refused.expect_err("it is stopped").code(), Code::FailedPrecondition);
    assert_eq!(plugin.titles(), ["RunPodSandbox web", "StopPodSandbox web"]);
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-S24, NRI-S25, NRI-S26, NRI-S27.
#[test]
fn remove_pod_event_comes_after_stop_and_teardown() {
    let node = Node::with_bridge();
    let image = node.import_probe();
    let (handler, stands, go_on) = standing("RemovePodSandbox");
    let plugin = Plugin::join(&node, "10", "gate", EVENTS, handler);
    let pod = bridge_pod("boat");
    let pod_id = node.run_pod(&pod);
    node.run_container(&pod_id, &container("c1", &image, &["sleep", "60"], &pod), &pod);
    let removing = {
        let request = RemovePodSandboxRequest { pod_sandbox_id: pod_id.clone() };
        super::meanwhile(&node, move |cri| cri.remove_pod_sandbox(request))
    };
    let told = stands.recv_timeout(PATIENCE).expect("the hook is called").pod();
    let tail = ["StopContainer c1", "StopPodSandbox boat", "RemoveContainer c1", "RemovePodSandbox boat"];
    assert_eq!(plugin.titles()[5..], tail);
    assert_eq!(namespace(&told, "network"), "", "it is gone");
    assert_eq!(told.ips.len(), 1, "its address is still told");
    assert_eq!(node.list_containers(ListContainersRequest::default()).expect("a list").containers, []);
    assert_eq!(listed(&node), [pod_id.as_str()], "it is listed until the hook is done");
    go_on.send(Answer::empty()).expect("it stands");
    removing.join().expect("no panic").expect("it goes");
    assert_eq!(listed(&node), Vec::<String>::new());
    drop(plugin);
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-S29, NRI-S30, NRI-C12.
#[test]
fn a_failing_plugin_neither_blocks_teardown_nor_hides_it_from_others() {
    let node = node("plugin_request_timeout = \"300ms\"");
    let image = node.import_probe();
    let in_teardown = |answer: fn() -> Answer| {
        Box::new(move |_: &_, heard: &Heard| {
            let is_teardown = heard.method.starts_with("Stop") || heard.method.starts_with("Remove");
            if is_teardown { answer() } else { Answer::empty() }
        })
    };
    let bad = [
        Plugin::join(&node, "10", "error", EVENTS, in_teardown(|| Answer::error("no"))),
        Plugin::join(&node, "20", "mute", EVENTS, in_teardown(|| Answer::Silence)),
        Plugin::join(&node, "30", "crash", EVENTS, in_teardown(|| Answer::HangUp)),
        Plugin::join(&node, "40", "garbage", EVENTS, in_teardown(|| Answer::Garbage)),
    ];
    let last = Plugin::listener(&node, "90", "last");
    let pod = host_pod("web");
    let pod_id = node.run_pod(&pod);
    node.run_container(&pod_id, &container("c1", &image, &["sleep", "60"], &pod), &pod);
    node.remove_pod(&pod_id);
    let tail = ["StopContainer c1", "StopPodSandbox web", "RemoveContainer c1", "RemovePodSandbox web"];
    assert_eq!(last.titles()[5..], tail);
    assert_eq!(bad[0].titles()[5..], tail, "one that refuses stays");
    assert!(!bad[0].is_over() && bad[1].is_over() && bad[2].is_over());
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-S31.
#[test]
fn a_retried_stop_after_a_failed_cni_del_sends_no_second_event() {
    let node = Node::start();
    let path = node.plugins().join("flaky");
    let broken = node.folder().join("broken");
    let script = format!(
        "#!/bin/sh\nif [ \"$CNI_COMMAND\" = DEL ] && [ -e {0} ]; then\n  rm {0}\n  \
         echo '{{\"code\": 11, \"msg\": \"not now\"}}'\n  exit 1\nfi\n\
         echo '{{\"cniVersion\": \"1.0.0\", \"ips\": [{{\"address\": \"10.9.9.9/24\"}}]}}'\n",
        broken.display()
    );
    host::write_program(&path, &script);
    let list = r#"{"cniVersion":"1.0.0","name":"flaky","plugins":[{"type":"flaky"}]}"#;
    fs::write(node.cni().join("10-flaky.conflist"), list).expect("a network");
    let plugin = Plugin::listener(&node, "10", "ear");
    let pod_id = host::wait_for("a pod on the new network", || {
        node.run_pod_sandbox(run(&bridge_pod("boat"))).ok().map(|made| made.pod_sandbox_id)
    });
    fs::write(&broken, "").expect("our file");
    let request = StopPodSandboxRequest { pod_sandbox_id: pod_id.clone() };
    let error = node.stop_pod_sandbox(request).expect_err("the plugin fails");
    assert!(error.message().contains("not now"), "{error}");
    stop(&node, &pod_id);
    node.remove_pod(&pod_id);
    let heard = plugin.titles().into_iter().filter(|title| !title.starts_with("Run")).collect::<Vec<_>>();
    assert_eq!(heard, ["StopPodSandbox boat", "RemovePodSandbox boat"]);
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-S32, NRI-R23.
#[test]
fn teardown_events_are_sent_once_across_a_restart_of_the_daemon() {
    let mut node = Node::start();
    let image = node.import_probe();
    let before = Plugin::listener(&node, "10", "ear");
    let pod = host_pod("old");
    let pod_id = node.run_pod(&pod);
    let id = node.run_container(&pod_id, &container("c1", &image, &["sleep", "60"], &pod), &pod);
    let stopped = node.run_pod(&host_pod("stopped"));
    stop(&node, &stopped);
    node.restart();
    wait_until("the connection is over", || before.is_over());
    let after = Plugin::listener(&node, "10", "ear");
    let told: api::SynchronizeRequest = after.last("Synchronize").request();
    let mut names: Vec<_> = told.pods.iter().map(|pod| pod.name.as_str()).collect();
    names.sort();
    assert_eq!(names, ["old", "stopped"]);
    assert_eq!(told.containers.iter().map(|one| one.id.as_str()).collect::<Vec<_>>(), [id.as_str()]);
    assert!(told.containers[0].pid > 0 && told.containers[0].args == ["/probe", "sleep", "60"]);
    node.remove_pod(&pod_id);
    node.remove_pod(&stopped);
    let expected = [
        "StopContainer c1",
        "StopPodSandbox old",
        "RemoveContainer c1",
        "RemovePodSandbox old",
        "RemovePodSandbox stopped",
    ];
    assert_eq!(after.titles(), expected);
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-S33.
#[test]
fn a_pod_whose_monitor_died_gets_its_stop_event_at_stop_pod_sandbox() {
    let node = Node::with_bridge();
    let (handler, stands, go_on) = standing("StopPodSandbox");
    let plugin = Plugin::join(&node, "10", "gate", EVENTS, handler);
    let pod_id = node.run_pod(&bridge_pod("boat"));
    let pid = plugin.last("RunPodSandbox").pod().pid;
    kill(Pid::from_raw(pid as i32), Signal::SIGKILL).expect("it is ours");
    wait_until("the daemon notices", || node.log().contains("the pod's monitor died"));
    assert_eq!(plugin.titles(), ["RunPodSandbox boat"]);
    let stopping = {
        let request = StopPodSandboxRequest { pod_sandbox_id: pod_id };
        super::meanwhile(&node, move |cri| cri.stop_pod_sandbox(request))
    };
    let told = stands.recv_timeout(PATIENCE).expect("the hook is called").pod();
    assert!(addresses(&namespace(&told, "network")).contains(&told.ips[0]));
    go_on.send(Answer::empty()).expect("it stands");
    stopping.join().expect("no panic").expect("it stops");
    drop(plugin);
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-S34.
#[test]
fn a_pod_on_the_host_network_has_no_network_namespace_in_events() {
    let node = Node::start();
    let plugin = Plugin::listener(&node, "10", "ear");
    let pod = host_pod("web");
    let pod_id = node.run_pod(&pod);
    let told = plugin.last("RunPodSandbox").pod();
    assert_eq!((namespace(&told, "network"), told.ips.len()), (String::new(), 0));
    assert_ne!(namespace(&told, "ipc"), "");
    let metadata = pod.metadata.expect("set");
    assert_eq!(
        (told.id, told.name, told.uid, told.namespace),
        (pod_id.clone(), metadata.name, metadata.uid, metadata.namespace)
    );
    assert_eq!(told.annotations["io.kubernetes.cri.container-type"], "sandbox");
    node.remove_pod(&pod_id);
    assert_eq!(plugin.titles(), ["RunPodSandbox web", "StopPodSandbox web", "RemovePodSandbox web"]);
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-S35, NRI-S36.
#[test]
fn pod_resource_updates_are_sent_before_and_after_and_stored() {
    let mut node = Node::start();
    let image = node.import_probe();
    let mut refusals = 1;
    let handler = answers("UpdatePodSandbox", move |_| {
        refusals -= 1;
        if refusals == 0 { Answer::error("too much") } else { Answer::empty() }
    });
    let plugin = Plugin::join(&node, "10", "ear", EVENTS, handler);
    let pod = host_pod("web");
    let pod_id = node.run_pod(&pod);
    let resources = |cpu_shares, memory_limit_in_bytes| {
        Some(LinuxContainerResources { cpu_shares, memory_limit_in_bytes, ..Default::default() })
    };
    let request = UpdatePodSandboxResourcesRequest {
        pod_sandbox_id: pod_id.clone(),
        overhead: resources(0, 1 << 20),
        resources: resources(100, 1 << 30),
    };
    let text = refused(node.update_pod_sandbox_resources(request.clone()));
    assert!(text.contains("NRI UpdatePodSandbox failed: plugin \"10-ear\": too much"), "{text}");
    let asked: api::UpdatePodSandboxRequest = plugin.last("UpdatePodSandbox").request();
    let memory = |resources: Option<api::LinuxResources>| {
        resources.and_then(|one| one.memory).and_then(|one| one.limit).map(|limit| limit.value)
    };
    assert_eq!(
        (memory(asked.overhead_linux_resources), memory(asked.linux_resources)),
        (Some(1 << 20), Some(1 << 30))
    );
    let told = |heard: Heard| heard.pod().linux.and_then(|linux| memory(linux.pod_resources));
    assert_eq!(told(plugin.last("UpdatePodSandbox")), None, "what was refused is not kept");
    node.update_pod_sandbox_resources(request).unwrap_or_else(|error| panic!("update: {error}"));
    assert_eq!(told(plugin.last("PostUpdatePodSandbox")), Some(1 << 30));
    assert_eq!(plugin.heard("PostUpdatePodSandbox").len(), 1);
    node.create(&pod_id, &container("c", &image, &["true"], &pod), &pod);
    assert_eq!(told(plugin.last("CreateContainer")), Some(1 << 30));
    node.restart();
    let after = Plugin::listener(&node, "10", "ear");
    let all: api::SynchronizeRequest = after.last("Synchronize").request();
    assert_eq!(all.pods[0].linux.clone().and_then(|linux| memory(linux.pod_overhead)), Some(1 << 20));
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-S37.
#[test]
fn a_hanging_plugin_delays_teardown_only_once() {
    let node = node("plugin_request_timeout = \"300ms\"");
    let hung: Vec<_> = ["10", "20", "30"]
        .into_iter()
        .map(|index| {
            Plugin::join(&node, index, "mute", EVENTS, answers("StopPodSandbox", |_| Answer::Silence))
        })
        .collect();
    let pods = ["one", "two"].map(|name| node.run_pod(&host_pod(name)));
    for pod_id in &pods {
        node.remove_pod(pod_id);
    }
    for plugin in &hung {
        assert_eq!(plugin.heard("StopPodSandbox").len(), 1, "the second pod waits for it again");
    }
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-S38.
#[test]
fn plugins_are_called_in_the_order_of_their_indices() {
    let node = Node::start();
    // In another order than their indices.
    let plugins =
        ["50", "00", "99", "10"].map(|index| (index, Plugin::join(&node, index, "ear", EVENTS, quiet())));
    let pod_id = node.run_pod(&host_pod("web"));
    node.remove_pod(&pod_id);
    for event in ["RunPodSandbox", "StopPodSandbox", "RemovePodSandbox"] {
        let mut times: Vec<_> =
            plugins.iter().map(|(index, plugin)| (plugin.last(event).at, *index)).collect();
        times.sort();
        assert_eq!(
            times.into_iter().map(|(_, index)| index).collect::<Vec<_>>(),
            ["00", "10", "50", "99"],
            "{event}"
        );
    }
    node.stop();
}

#[test]
fn a_failure_after_plugins_accepted_is_undone_at_all_of_them() {
    // The note that it is still being made cannot be taken away: its directory is immutable from the hook on.
    let mut node = Node::start();
    let folder = node.state();
    let handler = answers("RunPodSandbox", move |heard| {
        let notes = folder.join("pods").join(heard.pod().id);
        let done = Command::new("chattr").arg("+i").arg(&notes).status().expect("chattr runs");
        assert!(done.success(), "{} cannot be made immutable", notes.display());
        Answer::empty()
    });
    let plugin = Plugin::join(&node, "10", "lock", EVENTS, handler);
    let failed = node.run_pod_sandbox(run(&host_pod("web")));
    let notes = node.state().join("pods").join(plugin.last("RunPodSandbox").pod().id);
    assert!(Command::new("chattr").arg("-i").arg(&notes).status().expect("chattr runs").success());
    failed.expect_err("it cannot become ready");
    assert_eq!(plugin.titles(), ["RunPodSandbox web", "StopPodSandbox web", "RemovePodSandbox web"]);
    // The directory could not go either: the next daemon sees to it.
    node.restart();
    node.stop();
}
