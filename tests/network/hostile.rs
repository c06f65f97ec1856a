//! CNI plugins that lie: results about interfaces, namespaces and addresses of others, results as large as they may be,
//! versions that do not exist, and configuration files that change during a call. Plugins that hang, fork or print garbage are
//! in `main.rs` and `runtime/cni`.

use std::fs;
use std::time::{Duration, Instant};

use coracle_tests::cri::proto::VersionRequest;
use coracle_tests::host;
use coracle_tests::node::Node;
use coracle_tests::request::{bridge_pod, host_pod, run};

use crate::{address, calls, is_ready, plugin};

/// Maximum resident memory of the daemon in KiB, with its program.
const DAEMON_KIB_MAX: u64 = 24 << 10;

/// A result with this list of addresses, and more fields.
fn result(ips: &str, more: &str) -> String {
    format!(r#"{{"cniVersion":"1.0.0","interfaces":[{{"name":"eth0","sandbox":"/x"}}],"ips":[{ips}]{more}}}"#)
}

/// Installs a plugin that answers ADD with the content of a file.
fn answering(node: &Node, answer: &[u8]) {
    let file = node.folder().join("answer");
    fs::write(&file, answer).expect("a file");
    plugin(node, &format!("cat >/dev/null; [ $CNI_COMMAND = DEL ] && exit 0; cat {}", file.display()));
}

/// An address without a length, or with one that its family does not have, was taken.
#[test]
fn malformed_results_are_refused() {
    let node = Node::start();
    let one = |address: &str| result(&format!(r#"{{"address":"{address}","interface":0}}"#), "");
    let mut cases: Vec<(Vec<u8>, &str)> = [
        "10.9.9.9/-1",
        "10.9.9.9/33",
        "10.9.9.9/999999999999",
        "10.9.9.9/",
        "10.9.9.9/ 8",
        "10.9.9.9",
        "fd00::1/129",
        "10.9.9/24",
        "10.9.9.9/24/24",
        "host/24",
        "",
        "10.9.9.9%eth0/24",
        "/24",
        "010.9.9.9/24",
    ]
    .map(|address| (one(address).into_bytes(), "invalid address"))
    .into();
    let good = one("10.9.9.9/24");
    for version in [r#""9.0.0""#, r#""1.0""#, "1", "null", "[]", r#""../1.0.0""#, r#""""#] {
        let text = good.replacen(r#""1.0.0""#, version, 1);
        cases.push((text.into_bytes(), "cniVersion"));
    }
    cases.push(([&good.as_bytes()[..20], b"\xff\xfe\xc0\x80", &good.as_bytes()[20..]].concat(), "UTF-8"));
    cases.push((format!("{good}{good}").into_bytes(), "cannot be parsed"));
    cases.push((format!("{}1{}", "[".repeat(400_000), "]".repeat(400_000)).into_bytes(), "cannot be parsed"));
    cases.push((
        result("", &format!(r#","routes":[{}1{}]"#, "[".repeat(900), "]".repeat(900))).into_bytes(),
        "cannot be parsed",
    ));
    for (answer, expected) in cases {
        answering(&node, &answer);
        let start = String::from_utf8_lossy(&answer[..answer.len().min(160)]).into_owned();
        let refused = node.run_pod_sandbox(run(&bridge_pod("lied"))).expect_err(&start);
        assert!(refused.message().contains(expected), "{start}: {refused}");
        assert!(refused.message().len() < 2500, "{start}: an error of {} bytes", refused.message().len());
        assert!(node.rests().is_empty(), "{start}: {:?}", node.rests());
    }
    node.stop();
}

/// A result names the links and the namespace of others, and addresses of the node. Another pod keeps its link, and when the
/// pod of the lie has gone nothing of the node has.
#[test]
fn a_result_about_other_pods_does_not_change_them() {
    let node = Node::with_bridge();
    let honest = node.run_pod(&bridge_pod("honest"));
    let own = address(&node, &honest);
    fs::remove_file(node.cni().join("10-boat.conflist")).expect("our file");
    let links = host::links(&node.bridge());
    let netns = host::mounts(&honest).iter().find_map(|line| line.split(' ').nth(4).map(str::to_owned));
    let netns = netns.unwrap_or_else(|| "/proc/1/ns/net".into());
    let bridge = node.bridge();
    for (number, ip) in
        [own.as_str(), "127.0.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255", "::1", "ff02::1"]
            .into_iter()
            .enumerate()
    {
        let interfaces = [
            format!(r#"{{"name":"{bridge}"}}"#),
            r#"{"name":"lo"}"#.to_owned(),
            r#"{"name":"eth0","mac":"ff:ff:ff:ff:ff:ff","sandbox":"/proc/1/ns/net"}"#.to_owned(),
            format!(r#"{{"name":"eth0","sandbox":"{netns}"}}"#),
            r#"{"name":"../../../etc","sandbox":"../../.."}"#.to_owned(),
        ];
        let length = if ip.contains(':') { 128 } else { 32 };
        let text = format!(
            r#"{{"cniVersion":"1.0.0","interfaces":[{}],"ips":[{{"address":"{ip}/{length}","interface":3}},
            {{"address":"192.0.2.1/24","interface":-1}},{{"address":"192.0.2.2/24","interface":4}}]}}"#,
            interfaces.join(",")
        );
        answering(&node, text.as_bytes());
        // Whether such an address is taken is up to the administrator who configured the plugin.
        if let Ok(made) = node.run_pod_sandbox(run(&bridge_pod(&format!("liar{number}")))) {
            assert_eq!(address(&node, &made.pod_sandbox_id), ip);
            node.remove_pod(&made.pod_sandbox_id);
        }
        assert_eq!(host::links(&node.bridge()), links, "{ip}");
        assert_eq!(address(&node, &honest), own, "{ip}");
    }
    node.remove_pod(&honest);
    node.stop();
}

/// Results of almost one megabyte: of routes, of name servers, of addresses, of unknown fields.
#[test]
fn large_results_neither_fill_nor_stop_the_daemon() {
    let node = Node::start();
    let ip = r#"{"address":"10.9.9.9/24","interface":0}"#;
    let fill = |element: &str| vec![element; (900 << 10) / (element.len() + 1)].join(",");
    let routes = format!(r#","routes":[{}]"#, fill(r#"{"dst":"0.0.0.0/0"}"#));
    let servers = format!(r#","dns":{{"nameservers":[{}]}}"#, fill(r#""1""#));
    let unknown = format!(r#","unknown":"{}""#, "x".repeat(900 << 10));
    let numbers = format!(r#","unknown":[{}]"#, fill("1"));
    let objects = format!(r#","unknown":[{}]"#, fill("{}"));
    let cases = [
        ("routes", result(ip, &routes)),
        ("servers", result(ip, &servers)),
        ("unknown", result(ip, &unknown)),
        ("numbers", result(ip, &numbers)),
        ("objects", result(ip, &objects)),
        ("addresses", result(&fill(ip), "")),
    ];
    for (name, answer) in cases {
        answering(&node, answer.as_bytes());
        fs::write(format!("/proc/{}/clear_refs", node.pid()), "5").expect("the daemon is ours");
        let longest = std::thread::scope(|scope| {
            let client = node.another();
            let creating = scope.spawn(move || client.run_pod_sandbox(run(&bridge_pod(name))));
            let mut longest = Duration::ZERO;
            while !creating.is_finished() {
                let begun = Instant::now();
                node.version(VersionRequest::default()).expect("the daemon answers");
                longest = longest.max(begun.elapsed());
                std::thread::sleep(Duration::from_millis(5));
            }
            match creating.join().expect("the thread ends") {
                Ok(made) => node.remove_pod(&made.pod_sandbox_id),
                Err(refused) => assert!(refused.message().contains("rogue"), "{name}: {refused}"),
            }
            longest
        });
        let peak = host::proc_value(node.pid(), "status", "VmHWM").expect("the daemon lives");
        assert!(peak < DAEMON_KIB_MAX, "{name}: the daemon had {peak} KiB");
        assert!(longest < Duration::from_secs(2) * host::slowness(), "{name}: an answer took {longest:?}");
    }
    node.stop();
}

/// A plugin replaces the configuration by one of another plugin while it adds a pod, as an upgrade of a network does. DEL goes
/// to the plugin that has added the pod; the next pod has the new one.
#[test]
fn a_plugin_that_replaces_its_configuration_is_asked_to_delete_what_it_added() {
    let node = Node::start();
    let other = node.plugins().join("successor");
    host::write_program(
        &other,
        &format!(
            "#!/bin/sh\necho successor $CNI_COMMAND >> {}/calls\ncat >/dev/null\n[ $CNI_COMMAND = DEL ]\n",
            node.folder().display()
        ),
    );
    let list = node.cni().join("10-rogue.conflist");
    let good = result(r#"{"address":"10.9.9.9/24","interface":0}"#, "");
    let successor = r#"{"cniVersion":"1.0.0","name":"rogue","plugins":[{"type":"successor"}]}"#;
    plugin(
        &node,
        &format!(
            "cat >/dev/null; [ $CNI_COMMAND = ADD ] && echo '{successor}' > {}; echo '{good}'",
            list.display()
        ),
    );
    let pod_id = node.run_pod(&bridge_pod("first"));
    assert_eq!(address(&node, &pod_id), "10.9.9.9");
    host::wait_until("the successor is in force", || {
        node.run_pod_sandbox(run(&bridge_pod("second")))
            .is_err_and(|error| error.message().contains("successor"))
    });
    assert!(is_ready(&node));
    let before = calls(&node).len();
    node.remove_pod(&pod_id);
    assert_eq!(calls(&node)[before..], ["DEL"]);
    node.stop();
}

/// A plugin that ignores SIGTERM and leaves a process in another session, which keeps its output open and its group is not
/// killed with: the call ends with the plugin.
#[test]
fn a_process_that_a_plugin_leaves_delays_no_call() {
    let node = Node::start();
    let sleep = format!("sleep {}", 500_000 + std::process::id());
    let good = result(r#"{"address":"10.9.9.9/24","interface":0}"#, "");
    plugin(
        &node,
        &format!(
            "trap '' TERM HUP INT; cat >/dev/null; [ $CNI_COMMAND = ADD ] && (setsid {sleep} &); echo '{good}'"
        ),
    );
    let begun = Instant::now();
    let pod_id = node.run_pod(&bridge_pod("left"));
    let other = node.run_pod(&host_pod("other"));
    node.remove_pod(&pod_id);
    node.remove_pod(&other);
    assert!(begun.elapsed() < Duration::from_secs(20) * host::slowness(), "{:?}", begun.elapsed());
    for process in host::processes(&sleep) {
        let pid = nix::unistd::Pid::from_raw(process.pid);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("the test's own process");
    }
    node.stop();
}
