//! Plugins that hang, crash, flood and lie: NRI-R1 to NRI-R26. Whatever they do, pods keep starting and stopping.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use coracle_tests::cri::proto::{
    ContainerState, LinuxContainerResources, StatusRequest, StopContainerRequest,
    UpdateContainerResourcesRequest,
};
use coracle_tests::host::{self, wait_until};
use coracle_tests::node::{Node, Options};
use coracle_tests::nri::{Answer, EVENTS, Plugin, activations, api, frame, message, usual};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{create, host_pod, run};

use super::updates::memory;
use super::{PATIENCE, answers, meanwhile, node, quiet, running, standing};

/// Checks that the daemon can create and remove a pod.
#[track_caller]
fn works(node: &Node) {
    let id = node.run_pod(&host_pod("works"));
    node.remove_pod(&id);
}

fn connect(node: &Node) -> UnixStream {
    let stream = UnixStream::connect(node.nri()).expect("the socket listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

/// Whether the other side has hung up, or does so soon.
fn is_closed(stream: &mut UnixStream) -> bool {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

/// The plugins in the output of `crictl info`.
fn report(node: &Node) -> serde_json::Value {
    let status = node.status(StatusRequest { verbose: true }).expect("status");
    serde_json::from_str(&status.info["nri"]).expect("JSON")
}

/// Rules of docs/specs/nri.md: NRI-R1.
#[test]
fn a_hanging_event_delays_only_pods_that_wait_for_it() {
    let fixture = PodFixture::on(node("plugin_request_timeout = \"30s\""), host_pod("fixture"));
    let (handler, stands, go_on) = standing("RunPodSandbox");
    let hung = Plugin::join(&fixture.node, "10", "hung", 0x0001, handler);
    let other = Plugin::join(&fixture.node, "20", "other", 0x0008, quiet());
    let run = running(&fixture.node, &host_pod("waits"));
    stands.recv_timeout(PATIENCE).expect("the hook is called");
    let id = fixture.run(&fixture.config("c1", &["true"]));
    fixture.node.exited(&id);
    assert_eq!(other.titles(), ["CreateContainer c1"]);
    assert!(!run.is_finished());
    go_on.send(Answer::empty()).expect("it stands");
    run.join().expect("no panic").expect("it runs");
    drop(hung);
    fixture.node.stop();
}

/// Rules of docs/specs/nri.md: NRI-R2, NRI-R6.
#[test]
fn a_plugin_crash_during_a_call_is_detected_immediately() {
    for answer in [|| Answer::HangUp, || Answer::Half] as [fn() -> Answer; 2] {
        // Longer than the test's timeout: no call may wait for this.
        let node = node("plugin_request_timeout = \"60s\"");
        // Once before: the first pod brings what all pods share.
        works(&node);
        let before = node.descriptors();
        let plugin = Plugin::join(&node, "10", "crash", EVENTS, answers("RunPodSandbox", move |_| answer()));
        works(&node);
        wait_until("it is gone", || node.log().contains("gone: "));
        drop(plugin);
        wait_until("no descriptor is left", || node.descriptors() <= before);
        node.stop();
    }
}

/// Rules of docs/specs/nri.md: NRI-R3.
#[test]
fn a_plugin_that_does_not_read_is_disconnected_and_blocks_no_other() {
    let node = node("plugin_request_timeout = \"500ms\"");
    let plugin = Plugin::join(&node, "10", "deaf", EVENTS, quiet());
    let mut pod = host_pod("big");
    // More than a socket holds.
    pod.annotations = [("big".to_owned(), "x".repeat(1 << 20))].into();
    plugin.set_deaf(true);
    // It waits for one frame still, and takes it.
    works_or_not(&node);
    let error = node.run_pod_sandbox(run(&pod));
    plugin.set_deaf(false);
    wait_until("it is disconnected", || plugin.is_over());
    assert!(error.is_err() || node.log().contains("no answer in time"));
    works(&node);
    node.stop();
}

/// A pod that may be refused, as a plugin may not have answered.
fn works_or_not(node: &Node) {
    if let Ok(made) = node.run_pod_sandbox(run(&host_pod("maybe"))) {
        node.remove_pod(&made.pod_sandbox_id);
    }
}

/// Rules of docs/specs/nri.md: NRI-R4.
#[test]
fn random_bytes_end_only_their_connection() {
    let node = node("plugin_registration_timeout = \"1s\"");
    let before = host::anonymous_kib(node.pid());
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for round in 0..200 {
        let mut stream = connect(&node);
        let bytes: Vec<u8> = (0..512)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        let bytes = match round % 3 {
            0 => bytes,
            // A frame that claims more than there can be; a message that does.
            1 => [frame(2, &bytes)[..4].to_vec(), vec![255; 4], bytes].concat(),
            _ => frame(2, &[&[255, 255, 255, 255, 0, 0, 0, 1, 1, 0], &bytes[..]].concat()),
        };
        let _ = stream.write_all(&bytes); // it may have hung up in between
    }
    works(&node);
    assert!(
        host::anonymous_kib(node.pid()) < before + 4096,
        "{before} KiB became {}",
        host::anonymous_kib(node.pid())
    );
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-R5.
#[test]
fn limits_of_frames_and_messages_are_enforced() {
    let node = node("");
    let plugin = Plugin::listener(&node, "10", "ear");
    // A frame one byte above the limit ends the connection.
    let mut stream = connect(&node);
    stream.write_all(&[&2u32.to_be_bytes()[..], &4_194_315u32.to_be_bytes()].concat()).expect("it listens");
    assert!(is_closed(&mut stream));
    // A message above the limit is answered with status 8, and the connection lives.
    let before = host::anonymous_kib(node.pid());
    let big = vec![0; (4 << 20) + 1];
    let text = message(101, 1, &big);
    let (first, second) = text.split_at(2 << 20);
    plugin.caller().write(&frame(2, first)).expect("it reads");
    plugin.caller().write(&frame(2, second)).expect("it reads");
    works(&node);
    assert!(host::anonymous_kib(node.pid()) < before + 10 * 1024);
    let answer = plugin.caller().update(Vec::new());
    assert!(answer.is_err() || answer.is_ok_and(|answer| answer.0 == 3), "the id is below the last one");
    assert!(!plugin.is_over());
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-R7, NRI-R26.
#[test]
fn unexpected_answers_are_dropped_and_counted() {
    let node = Node::start();
    let mut turns = 0;
    let handler = answers("RunPodSandbox", move |_| {
        turns += 1;
        if turns == 1 { Answer::Thrice } else { Answer::error("no") }
    });
    let plugin = Plugin::join(&node, "10", "liar", EVENTS, handler);
    works(&node);
    node.run_pod_sandbox(run(&host_pod("no"))).expect_err("it is refused");
    let report = report(&node);
    let about = &report["plugins"][0];
    assert_eq!((about["plugin"].as_str(), about["strays"].as_u64()), (Some("10-liar"), Some(2)));
    let calls = about["calls"].as_array().expect("a list");
    let of_run = calls.iter().find(|call| call["event"] == "RunPodSandbox").expect("it was called");
    assert_eq!((of_run["ok"].as_u64(), of_run["error"].as_u64()), (Some(1), Some(1)));
    assert!(!plugin.is_over());
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-R8.
#[test]
fn three_undecodable_answers_disconnect_a_plugin() {
    let node = Node::start();
    // Nothing else, as an answer in between would be a good one.
    let plugin = Plugin::join(&node, "10", "garbage", 0x0001, answers("RunPodSandbox", |_| Answer::Garbage));
    for turn in 1..=3 {
        let error = node.run_pod_sandbox(run(&host_pod("web"))).expect_err("it answers garbage");
        assert!(error.message().contains("cannot be decoded"), "{error}");
        assert!(turn == 3 || !plugin.is_over());
    }
    wait_until("it is disconnected", || plugin.is_over());
    works(&node);
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-R10, NRI-R11.
#[test]
fn silent_connections_do_not_affect_others() {
    let node = node("plugin_registration_timeout = \"2s\"");
    let before = node.descriptors();
    let mut silent: Vec<_> = (0..1000).map(|_| connect(&node)).collect();
    let good = Plugin::listener(&node, "10", "good");
    wait_until("at most 64 of them are kept", || node.descriptors() <= before + 64 + 4);
    works(&node);
    assert_eq!(good.titles().len(), 3);
    for stream in &mut silent {
        assert!(is_closed(stream));
    }
    drop(silent);
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-R12, NRI-R13.
#[test]
fn plugin_names_are_validated_and_unique() {
    let node = Node::start();
    for (index, name, expected) in [
        ("1", "x", "invalid plugin index: \"1\""),
        ("123", "x", "invalid plugin index: \"123\""),
        ("a1", "x", "invalid plugin index: \"a1\""),
        ("", "x", "invalid plugin index: \"\""),
        ("١٢", "x", "invalid plugin index"),
        ("10", "", "invalid plugin name: \"\""),
        ("10", "a b", "invalid plugin name: \"a b\""),
        ("10", "a/b", "invalid plugin name: \"a/b\""),
    ] {
        let plugin = Plugin::connect(&node.nri(), quiet());
        let (code, text) = plugin.caller().register(index, name).expect("an answer before it hangs up");
        assert_eq!(code, 3, "{index:?} {name:?}: {text}");
        assert!(text.starts_with(expected), "{text}");
        wait_until("it hangs up", || plugin.is_over());
    }
    let plugin = Plugin::listener(&node, "10", "twice");
    assert_eq!(plugin.caller().register("11", "other").expect("an answer").0, 9);
    let response = plugin.caller().call("Reticulate", Vec::new()).expect("an answer");
    assert_eq!(response.status.map(|status| status.code), Some(12));
    works(&node);
    assert_eq!(plugin.titles().len(), 3);
    let early = Plugin::connect(&node.nri(), quiet());
    let response = early.caller().call("UpdateContainers", Vec::new()).expect("an answer");
    assert_eq!(response.status.map(|status| status.code), Some(9), "it has not registered");
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-R14.
#[test]
fn a_plugin_with_the_same_name_replaces_the_first() {
    let fixture = PodFixture::on(Node::start(), host_pod("fixture"));
    let setting = || answers("CreateContainer", |_| Answer::adjust(super::annotations(&[("k", "v")])));
    let old = Plugin::join(&fixture.node, "10", "same", EVENTS, setting());
    let new = Plugin::join(&fixture.node, "10", "same", EVENTS, setting());
    wait_until("the older one is disconnected", || old.is_over());
    // Both would have set the same annotation, and so conflict.
    fixture.create(&fixture.config("c1", &["true"]));
    assert_eq!(new.titles(), ["CreateContainer c1", "PostCreateContainer c1"]);
    assert_eq!(old.titles(), Vec::<String>::new());
    fixture.node.stop();
}

#[test]
fn duplicates_are_kept_or_refused_where_the_operator_says_so() {
    let node_allow = node("duplicate_policy = \"allow\"");
    let (one, two) =
        (Plugin::listener(&node_allow, "10", "same"), Plugin::listener(&node_allow, "10", "same"));
    works(&node_allow);
    assert_eq!((one.titles().len(), two.titles().len()), (3, 3));
    node_allow.stop();
    let node = node("duplicate_policy = \"reject\"");
    let _one = Plugin::listener(&node, "10", "same");
    let two = Plugin::connect(&node.nri(), quiet());
    assert_eq!(two.caller().register("10", "same").expect("an answer").0, 6);
    let _other = Plugin::listener(&node, "11", "same");
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-R16.
#[test]
fn a_plugin_that_is_never_synchronized_is_disconnected() {
    let node = node("plugin_sync_timeout = \"300ms\"");
    let handler = answers("Synchronize", |_| Answer::Silence);
    let plugin = Plugin::register(&node, "10", "mute", EVENTS, handler);
    wait_until("it is disconnected", || plugin.is_over());
    assert!(node.log().contains("not joined: Synchronize: no answer in time"));
    works(&node);
    assert_eq!(plugin.titles(), Vec::<String>::new());
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-R17.
#[test]
fn no_object_is_missed_or_sent_twice_during_a_slow_synchronize() {
    let fixture = PodFixture::on(Node::start(), host_pod("fixture"));
    let before = fixture.create(&fixture.config("before", &["true"]));
    let (handler, stands, go_on) = {
        let (stands, standing) = std::sync::mpsc::channel();
        let (go_on, answer) = std::sync::mpsc::channel::<()>();
        let handler: coracle_tests::nri::Handler = Box::new(move |_, heard| {
            if heard.method == "Synchronize" {
                stands.send(heard.clone()).expect("the test waits");
                answer.recv_timeout(PATIENCE).expect("an answer of the test");
            }
            usual(heard, EVENTS)
        });
        (handler, standing, go_on)
    };
    let plugin = Plugin::register(&fixture.node, "10", "slow", EVENTS, handler);
    stands.recv_timeout(PATIENCE).expect("it is synchronised");
    let request = create(&fixture.pod_id, &fixture.config("during", &["true"]), &fixture.pod);
    let during = meanwhile(&fixture.node, move |cri| cri.create_container(request));
    // Longer than a request may take, and the plugin is not disconnected for it.
    std::thread::sleep(Duration::from_secs(3));
    assert!(!during.is_finished(), "it waits for the join");
    go_on.send(()).expect("it stands");
    let during = during.join().expect("no panic").expect("it is made").container_id;
    let after = fixture.create(&fixture.config("after", &["true"]));
    let told: api::SynchronizeRequest = plugin.last("Synchronize").request();
    let synced: Vec<_> = told.containers.iter().map(|one| one.id.clone()).collect();
    let created: Vec<_> = plugin.heard("CreateContainer").iter().map(|heard| heard.container().id).collect();
    assert_eq!((synced, created), (vec![before], vec![during, after]));
    fixture.node.stop();
}

/// Rules of docs/specs/nri.md: NRI-R18.
#[test]
fn a_stop_with_a_long_grace_period_delays_neither_joins_nor_other_pods() {
    let fixture = PodFixture::on(Node::start(), host_pod("fixture"));
    let ear = Plugin::listener(&fixture.node, "10", "ear");
    let id = fixture.run(&fixture.config("c1", &["stubborn"]));
    let stopping = {
        let container_id = id.clone();
        meanwhile(&fixture.node, move |cri| {
            cri.stop_container(StopContainerRequest { container_id, timeout: 600 })
        })
    };
    wait_until("the stop has begun", || fixture.node.output(&id).contains("TERM") || !stopping.is_finished());
    let late = Plugin::listener(&fixture.node, "20", "late");
    fixture.create(&fixture.config("c2", &["true"]));
    works(&fixture.node);
    assert_eq!(late.titles().len(), 5, "{:?}", late.titles());
    assert!(ear.heard("StopContainer").is_empty());
    let request = StopContainerRequest { container_id: id.clone(), timeout: 0 };
    fixture.node.stop_container(request).expect("a shorter stop");
    stopping.join().expect("no panic").expect("it ends, too");
    assert_eq!(fixture.node.container(&id).state(), ContainerState::ContainerExited);
    fixture.node.stop();
}

/// Rules of docs/specs/nri.md: NRI-R19.
#[test]
fn concurrent_updates_from_client_and_plugin_do_not_deadlock() {
    let fixture = PodFixture::on(Node::start(), host_pod("fixture"));
    let id = fixture.run(&fixture.config("c1", &["sleep", "forever"]));
    let own = id.clone();
    let handler = answers("UpdateContainer", move |_| {
        let update = vec![memory(&own, 80 << 20, false)];
        Answer::message(&api::UpdateContainerResponse { update, evict: Vec::new() })
    });
    let plugin = Plugin::join(&fixture.node, "10", "busy", EVENTS, handler);
    let (over, flooded) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let (caller, stop, target) = (plugin.caller().clone(), Arc::clone(&over), id.clone());
    let counter = Arc::clone(&flooded);
    let flood = std::thread::spawn(move || {
        while !stop.load(Ordering::Relaxed) {
            let answer = caller.update(vec![memory(&target, 96 << 20, false)]).expect("an answer");
            assert_eq!(answer.0, 0, "{answer:?}");
            counter.fetch_add(1, Ordering::Relaxed);
        }
    });
    let (begun, mut count) = (Instant::now(), 0);
    // As many as five seconds have room for, and on the slowest machine some.
    while begun.elapsed() < Duration::from_secs(5) || count <= 10 || flooded.load(Ordering::Relaxed) <= 10 {
        assert!(begun.elapsed() < host::patience(), "{count} and {flooded:?}");
        let linux = Some(LinuxContainerResources { memory_limit_in_bytes: 64 << 20, ..Default::default() });
        let request =
            UpdateContainerResourcesRequest { container_id: id.clone(), linux, ..Default::default() };
        fixture.node.update_container_resources(request).unwrap_or_else(|error| panic!("update: {error}"));
        count += 1;
    }
    over.store(true, Ordering::Relaxed);
    flood.join().expect("no panic");
    fixture.node.stop();
}

/// Rules of docs/specs/nri.md: NRI-R21.
#[test]
fn a_library_without_chunked_synchronize_is_disconnected() {
    let node = Node::start();
    for name in ["one", "two", "three"] {
        let mut pod = host_pod(name);
        pod.annotations = [("big".to_owned(), "x".repeat(600_000))].into();
        node.run_pod(&pod);
    }
    // No `more`, and an unknown field, as an empty answer would be filled in.
    let handler = answers("Synchronize", |_| Answer::Ok(vec![0x78, 1]));
    let old = Plugin::register(&node, "10", "old", EVENTS, handler);
    let is_over = wait_for_refusal(&node, &old);
    assert!(is_over, "{}", node.log());
    let good = Plugin::listener(&node, "20", "good");
    let chunks = good.heard("Synchronize");
    assert_eq!(chunks.len(), 3, "one for each of these");
    let told: Vec<api::SynchronizeRequest> = chunks.iter().map(coracle_tests::nri::Heard::request).collect();
    assert_eq!(told.iter().map(|chunk| chunk.more).collect::<Vec<_>>(), [true, true, false]);
    assert_eq!(told.iter().map(|chunk| chunk.pods.len()).sum::<usize>(), 3);
    node.stop();
}

fn wait_for_refusal(node: &Node, plugin: &Plugin) -> bool {
    wait_until("it is disconnected", || plugin.is_over());
    node.log().contains("does not support several messages")
}

/// Rules of docs/specs/nri.md: NRI-R22.
#[test]
fn a_subscription_to_unknown_events_is_refused() {
    let node = Node::start();
    let plugin = Plugin::register(&node, "10", "future", 0x7fff_0001, quiet());
    wait_until("it is disconnected", || plugin.is_over());
    assert!(node.log().contains("invalid plugin events: 0x7fff0001"), "{}", node.log());
    works(&node);
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-R24.
#[test]
fn a_socket_on_which_another_runtime_answers_is_not_taken_over() {
    let folder = std::env::temp_dir().join(format!("coracle-nri-taken-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    let path = folder.join("nri.sock");
    let _other = UnixListener::bind(&path).expect("a socket");
    let inode = |path: &std::path::Path| {
        std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).expect("it is there"))
    };
    let before = inode(&path);
    let mut other = Node::start();
    other.terminate();
    assert!(!other.nri().exists(), "its own socket goes with it");
    let text = fs::read_to_string(other.folder().join("config.toml")).expect("a file");
    let moved = text.replace(&other.nri().display().to_string(), &path.display().to_string());
    fs::write(other.folder().join("config.toml"), &moved).expect("ours");
    other.launch();
    works(&other);
    assert!(other.log().contains("cannot create the NRI plugin socket"), "{}", other.log());
    assert_eq!(inode(&path), before);
    // With a plugin that everything needs, the daemon does not start without its socket.
    other.terminate();
    let required = format!("{moved}\n[nri.default_validator]\nrequired_plugins = [\"x\"]\n");
    fs::write(other.folder().join("config.toml"), required).expect("ours");
    other.spawn();
    wait_until("it says why", || other.log().contains("plugins are required"));
    other.kill9();
    fs::write(other.folder().join("config.toml"), text).expect("ours");
    other.launch();
    other.stop();
    fs::remove_dir_all(&folder).expect("ours");
}

/// Rules of docs/specs/nri.md: NRI-R25.
#[test]
fn closed_connections_leak_nothing() {
    let node = node("plugin_registration_timeout = \"1s\"");
    // The log has the same warning once a minute, so the plugins are counted in the report.
    let comes_and_goes = || {
        let before = activations(&node, "10", "comes");
        drop(Plugin::listener(&node, "10", "comes"));
        wait_until("it is gone", || {
            activations(&node, "10", "comes") > before
                && report(&node)["plugins"].as_array().is_some_and(Vec::is_empty)
        });
    };
    for _ in 0..3 {
        comes_and_goes();
    }
    assert_eq!(node.log().matches("gone: ").count(), 1, "{}", node.log());
    let (open, resident) = (node.descriptors(), host::anonymous_kib(node.pid()));
    for round in 0..2000 {
        let mut stream = connect(&node);
        if round % 2 == 0 {
            let _ = stream.write_all(&frame(2, b"half a mess")); // whatever becomes of it
        }
    }
    for _ in 0..20 {
        comes_and_goes();
    }
    wait_until("no descriptor is left", || node.descriptors() <= open);
    assert!(
        host::anonymous_kib(node.pid()) < resident + 2048,
        "{resident} KiB became {}",
        host::anonymous_kib(node.pid())
    );
    works(&node);
    node.stop();
}

#[test]
fn plugins_get_a_shutdown_and_are_disconnected_with_the_daemon() {
    let mut node =
        Node::with(Options { config: "[nri]\nsend_shutdown = true\n".into(), ..Options::default() });
    let plugin = Plugin::listener(&node, "10", "ear");
    node.terminate();
    wait_until("it is disconnected", || plugin.is_over());
    assert_eq!(plugin.heard("Shutdown").len(), 1);
    node.stop();
}
