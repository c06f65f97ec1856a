//! Pod networks: the host's, a bridge, built in and with Debian's CNI plugins, and misbehaving plugins.
//! `Node::stop` checks links and leases.
#![forbid(unsafe_code)]

mod builtin;
mod chained;
mod datagrams;
mod disturbers;
mod facts;
mod flannel;
mod hostile;
mod interface;
mod neighbours;
mod ports;
mod rules;
mod tables;
mod unlinked;

use std::fs;
use std::io::Read;
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use coracle_tests::cadvisor::Cadvisor;
use coracle_tests::cri::proto::{
    ListPodSandboxRequest, PodSandboxStatusRequest, PortMapping, StatusRequest, StopPodSandboxRequest,
};
use coracle_tests::host;
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::free_host_port;
use coracle_tests::request::{bridge_pod, container, exec, host_pod, run};

/// The pod's first address.
fn address(node: &Node, pod_id: &str) -> String {
    let ask = PodSandboxStatusRequest { pod_sandbox_id: pod_id.into(), verbose: false };
    let status = node.pod_sandbox_status(ask).expect("status").status.expect("a status");
    status.network.expect("a network").ip
}

fn is_ready(node: &Node) -> bool {
    let status = node.status(StatusRequest::default()).expect("status").status.expect("a status");
    status.conditions.iter().any(|condition| condition.r#type == "NetworkReady" && condition.status)
}

/// Writes a shell script as a plugin, and a network that uses it.
fn plugin(node: &Node, script: &str) {
    let path = node.plugins().join("rogue");
    host::write_program(
        &path,
        &format!("#!/bin/sh\necho $CNI_COMMAND >> {}/calls\n{script}\n", node.folder().display()),
    );
    let list = r#"{"cniVersion":"1.0.0","name":"rogue","plugins":[{"type":"rogue"}]}"#;
    fs::write(node.cni().join("10-rogue.conflist"), list).expect("a network");
    host::wait_until("the network is configured", || is_ready(node));
}

fn calls(node: &Node) -> Vec<String> {
    let text = fs::read_to_string(node.folder().join("calls")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn a_host_network_pod_needs_no_cni() {
    let node = Node::start();
    assert!(!is_ready(&node));
    let pod_id = node.run_pod(&host_pod("host"));
    assert_eq!(address(&node, &pod_id), "");
    let refused = node.run_pod_sandbox(run(&bridge_pod("bridge"))).expect_err("no network");
    assert!(refused.message().to_lowercase().contains("cni"), "{refused}");
    node.stop();
}

#[test]
fn pods_on_the_bridge_reach_each_other_and_give_their_addresses_back() {
    let node = Node::with_bridge();
    assert!(is_ready(&node));
    let image = node.import_probe();
    let (server, client) = (bridge_pod("server"), bridge_pod("client"));
    let (server_id, client_id) = (node.run_pod(&server), node.run_pod(&client));
    let (here, there) = (address(&node, &client_id), address(&node, &server_id));
    assert!(
        here.starts_with(&node.subnet()) && there.starts_with(&node.subnet()) && here != there,
        "{here} {there}"
    );
    node.run_container(&server_id, &container("serve", &image, &["serve", "8080"], &server), &server);
    let asks =
        node.run_container(&client_id, &container("ask", &image, &["sleep", "forever"], &client), &client);
    host::wait_until("the server answers", || {
        let answer = node.exec_sync(exec(&asks, &["connect", &format!("{there}:8080")], 5)).expect("exec");
        answer.stdout == b"hello from server\n"
    });
    assert!(
        node.exec_sync(exec(&asks, &["connect", "127.0.0.1:8080"], 5)).expect("exec").exit_code != 0,
        "own loopback"
    );
    assert_eq!(node.leases().len(), 2);
    node.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: server_id }).expect("stop");
    assert_eq!(node.leases().len(), 1, "a stopped pod holds no address");
    node.stop();
}

#[test]
fn a_mapped_port_answers_on_the_node() {
    let node = Node::with_bridge();
    let image = node.import_probe();
    let mut pod = bridge_pod("mapped");
    let port = free_host_port();
    pod.port_mappings =
        vec![PortMapping { container_port: 80, host_port: i32::from(port), ..Default::default() }];
    let pod_id = node.run_pod(&pod);
    node.run_container(&pod_id, &container("serve", &image, &["serve", "80"], &pod), &pod);
    let gateway = format!("{}.1:{port}", node.subnet());
    host::wait_until("the mapped port answers", || {
        let Ok(mut stream) = TcpStream::connect(&gateway) else { return false };
        let mut text = String::new();
        stream.read_to_string(&mut text).is_ok() && text == "hello from mapped\n"
    });
    node.stop();
}

#[test]
fn after_a_crash_the_teardown_still_runs() {
    let mut node = Node::with_bridge();
    let pod_id = node.run_pod(&bridge_pod("crash"));
    let before = address(&node, &pod_id);
    node.restart();
    assert_eq!(address(&node, &pod_id), before);
    // DEL gets the recorded configuration, whatever happened to the file.
    fs::remove_file(node.cni().join("10-boat.conflist")).expect("our file");
    node.remove_pod(&pod_id);
    assert!(node.leases().is_empty(), "{:?}", node.leases());
    node.stop();
}

#[test]
fn the_error_of_a_failing_plugin_is_returned_and_everything_removed() {
    let node = Node::start();
    plugin(
        &node,
        r#"[ $CNI_COMMAND = DEL ] && exit 0; echo '{"cniVersion":"1.0.0","code":100,"msg":"no berth left"}'; exit 1"#,
    );
    let refused = node.run_pod_sandbox(run(&bridge_pod("fails"))).expect_err("the plugin failed");
    assert!(refused.message().contains("rogue") && refused.message().contains("no berth left"), "{refused}");
    // Plugins must support repeated DEL; a missing DEL would leak.
    let calls = calls(&node);
    assert_eq!(calls[0], "ADD");
    assert!(
        calls.len() > 1 && calls[1..].iter().all(|call| call == "DEL"),
        "a failed ADD is followed by DEL: {calls:?}"
    );
    assert!(node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list").items.is_empty());
    assert!(node.rests().is_empty(), "{:?}", node.rests());
    node.stop();
}

#[test]
fn malformed_and_excessive_plugin_output_is_an_error() {
    let node = Node::start();
    let cases = ["echo garbage", "echo '{}'", "true", "head -c 100000000 /dev/zero", "echo '[[[[[['"];
    for script in cases {
        plugin(&node, &format!("cat >/dev/null; [ $CNI_COMMAND = DEL ] && exit 0; {script}"));
        let refused = node.run_pod_sandbox(run(&bridge_pod("garbage"))).expect_err(script);
        assert!(refused.message().contains("rogue"), "{script}: {refused}");
        assert!(node.rests().is_empty(), "{script}: {:?}", node.rests());
    }
    node.stop();
}

#[test]
fn a_hanging_plugin_does_not_block_others() {
    let node = Node::start();
    // A number that no other process uses for sleep, to find the plugin.
    let sleep = format!("sleep {}", 400_000 + std::process::id());
    plugin(&node, &format!("[ $CNI_COMMAND = DEL ] && exit 0; exec {sleep}"));
    let hanging = node.another();
    let begin = Instant::now();
    let answer = hanging.abandon(run(&bridge_pod("hangs")), Duration::from_millis(500));
    assert!(answer.is_none(), "{answer:?}");
    let quick = node.run_pod(&host_pod("quick"));
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    host::wait_until("the plugin hangs", || !host::processes(&sleep).is_empty());
    node.remove_pod(&quick);
    // The plugin is corrected; the identical retry gets the pod, or the earlier attempt was undone.
    fs::remove_file(node.cni().join("10-rogue.conflist")).expect("our file");
    for process in host::processes(&sleep) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(process.pid), nix::sys::signal::Signal::SIGKILL)
            .expect("the test's own plugin");
    }
    host::wait_until("the failed try is undone", || node.rests().is_empty());
    node.stop();
}

/// The kubelet's cAdvisor asks once, when a cgroup appears. A pod whose plugin has not answered yet must be known by then:
/// otherwise its network has no statistics for as long as the kubelet runs.
#[test]
fn a_pod_is_known_to_cadvisor_before_its_network_exists() {
    let folder = PathBuf::from(format!("/run/coracle-test-cadvisor-{}", std::process::id()));
    let socket = folder.join("containerd.sock");
    let config = format!("[metrics]\ncontainerd_socket = \"{}\"\n", socket.display());
    let node = Node::with(Options { config, ..Options::default() });
    let (id_file, gate) = (node.folder().join("id"), node.folder().join("gate"));
    let good = r#"echo '{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"/x"}],"ips":[{"address":"10.9.9.9/24","interface":0}]}'"#;
    let script = format!(
        "[ $CNI_COMMAND = DEL ] && exit 0; printf $CNI_CONTAINERID > {0}.new; mv {0}.new {0}; read line < {1}; {good}",
        id_file.display(),
        gate.display()
    );
    nix::unistd::mkfifo(&gate, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
    plugin(&node, &script);
    let client = node.another();
    let made = std::thread::scope(|scope| {
        let made = scope.spawn(move || client.run_pod(&bridge_pod("counted")));
        let id = host::wait_for("the plugin runs", || fs::read_to_string(&id_file).ok());
        let cadvisor = Cadvisor::new(&socket);
        let (labels, pid) = (cadvisor.labels(&id), cadvisor.pid(&id));
        fs::write(&gate, "go\n").expect("the plugin reads");
        let labels = labels.expect("the pod is known");
        assert_eq!(labels["io.cri-containerd.kind"], "sandbox", "{labels:?}");
        assert!(fs::exists(format!("/proc/{}/net/dev", pid.expect("a process"))).expect("procfs"));
        assert!(cadvisor.labels(&id.replace(|_: char| true, "0")).is_err(), "no other ID is known");
        let long = cadvisor.labels(&"0".repeat(4096)).expect_err("more than a request has");
        assert!(long.message().contains("the limit is: 4096 bytes"), "{long}");
        made.join().expect("the pod")
    });
    node.remove_pod(&made);
    node.stop();
    fs::remove_dir_all(folder).expect("ours");
}

#[test]
fn identical_requests_in_flight_join() {
    let node = Node::start();
    let good = r#"echo '{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"/x"}],"ips":[{"address":"10.9.9.9/24","interface":0}]}'"#;
    // Slow enough that all clients send their request while the first one runs.
    plugin(&node, &format!("[ $CNI_COMMAND = DEL ] && exit 0; sleep 2; {good}"));
    let pod = bridge_pod("chorus");
    let clients: Vec<_> = (0..8).map(|_| node.another()).collect();
    let ids: Vec<String> = std::thread::scope(|scope| {
        let ask = |client: coracle_tests::cri::Cri| {
            client.run_pod_sandbox(run(&pod)).expect("it joins").pod_sandbox_id
        };
        let calls: Vec<_> = clients.into_iter().map(|client| scope.spawn(move || ask(client))).collect();
        calls.into_iter().map(|call| call.join().expect("a client thread")).collect()
    });
    assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
    assert_eq!(calls(&node), ["ADD"], "one pod, one ADD");
    node.stop();
}

#[test]
fn a_failing_del_keeps_the_pod_listed_until_it_works() {
    let node = Node::start();
    let good = r#"echo '{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"/x"}],"ips":[{"address":"10.9.9.9/24","interface":0}]}'"#;
    let flag = node.folder().join("broken");
    fs::write(&flag, "").expect("a flag");
    plugin(
        &node,
        &format!("if [ $CNI_COMMAND = DEL ]; then [ -e {} ] && exit 1; exit 0; fi; {good}", flag.display()),
    );
    let pod_id = node.run_pod(&bridge_pod("sticky"));
    assert_eq!(address(&node, &pod_id), "10.9.9.9");
    let stop = StopPodSandboxRequest { pod_sandbox_id: pod_id.clone() };
    node.stop_pod_sandbox(stop.clone()).expect_err("DEL failed");
    assert_eq!(node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list").items.len(), 1);
    fs::remove_file(&flag).expect("our flag");
    node.stop_pod_sandbox(stop).expect("DEL works now");
    node.stop();
}
