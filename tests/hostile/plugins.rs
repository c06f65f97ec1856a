//! NRI plugins whose messages are as large, as many or as wrong as the protocol permits. The daemon answers its clients
//! meanwhile, and its memory stays below [`DAEMON_KIB_MAX`]. Other misbehaviour of plugins is in `tests/nri/robust.rs`.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coracle_tests::cri::proto::{ContainerState, VersionRequest};
use coracle_tests::host;
use coracle_tests::node::{Node, Options};
use coracle_tests::nri::{Answer, EVENTS, Plugin, api, frame, message, ttrpc};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{create, host_pod};
use prost::Message;

/// Maximum resident memory of the daemon in KiB, with its program, during an attack.
const DAEMON_KIB_MAX: u64 = 24 << 10;

/// Number of bytes of the largest message, with room for its envelope.
const LARGEST: usize = (4 << 20) - 100;

/// Ends the watch also if the work panics.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The maximum resident memory of the daemon while `work` runs, and its longest time for a simple answer.
fn watched<T>(node: &Node, work: impl FnOnce() -> T) -> (u64, Duration, T) {
    let over = AtomicBool::new(false);
    // 5: resets the peak (proc(5)).
    std::fs::write(format!("/proc/{}/clear_refs", node.pid()), "5").expect("the daemon is ours");
    let client = node.another();
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            while !over.load(Ordering::Relaxed) {
                let begun = Instant::now();
                client.version(VersionRequest::default()).expect("the daemon answers");
                longest = longest.max(begun.elapsed());
                std::thread::sleep(Duration::from_millis(5));
            }
            longest
        });
        let ends = Over(&over);
        let done = work();
        drop(ends);
        let longest = asking.join().expect("the thread ends");
        let peak = host::proc_value(node.pid(), "status", "VmHWM").expect("the daemon lives");
        (peak, longest, done)
    })
}

/// Fails if the daemon became large or slow.
#[track_caller]
fn stayed_well(what: &str, peak: u64, longest: Duration) {
    assert!(peak < DAEMON_KIB_MAX, "{what}: the daemon had {peak} KiB");
    let limit = Duration::from_secs(2) * host::slowness();
    assert!(longest < limit, "{what}: an answer took {longest:?}");
}

/// The bytes of one field that is repeated until the message has the largest length.
fn repeated(field: u8, element: &[u8]) -> Vec<u8> {
    let head = [&[field << 3 | 2, u8::try_from(element.len()).expect("short")], element].concat();
    head.repeat(LARGEST / head.len())
}

/// The bytes of a field that contains another message.
fn nested(field: u8, inner: &[u8]) -> Vec<u8> {
    let mut bytes = vec![field << 3 | 2];
    prost::encoding::encode_varint(inner.len() as u64, &mut bytes);
    bytes.extend(inner);
    bytes
}

/// Answers of CreateContainer in which each of some million elements is a few bytes long.
fn crowded() -> Vec<(&'static str, Vec<u8>)> {
    // Field 1 is the adjustment, field 2 an update, field 3 an eviction.
    vec![
        ("updates", repeated(2, &[])),
        ("evictions", repeated(3, &[])),
        ("mounts", nested(1, &repeated(3, &[]))),
        ("variables", nested(1, &repeated(4, &[]))),
        ("arguments", nested(1, &repeated(9, &[]))),
        ("annotations", nested(1, &repeated(2, &[]))),
        ("hooks", nested(1, &nested(5, &repeated(1, &[])))),
        ("devices", nested(1, &nested(6, &repeated(1, &[])))),
        ("device rules", nested(1, &nested(6, &nested(2, &repeated(7, &[]))))),
        ("system calls", nested(1, &nested(6, &nested(6, &repeated(7, &[]))))),
        ("scheduler flags", nested(1, &nested(6, &nested(10, &[8 | 24, 1].repeat(LARGEST / 2))))),
    ]
}

/// Regression: four megabytes of empty elements became a gigabyte in the daemon.
#[test]
fn a_message_of_a_million_elements_is_refused_before_it_is_decoded() {
    let fixture = PodFixture::on(Node::start(), host_pod("fixture"));
    for (what, bytes) in crowded() {
        let answer = bytes.clone();
        let handler = move |heard: &coracle_tests::nri::Heard| match heard.method.as_str() {
            "CreateContainer" => Answer::Ok(answer.clone()),
            _ => Answer::empty(),
        };
        let plugin =
            Plugin::join(&fixture.node, "10", "crowd", EVENTS, Box::new(move |_, heard| handler(heard)));
        let (peak, longest, made) = watched(&fixture.node, || {
            let config = fixture.config(&what.replace(' ', "-"), &["true"]);
            fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod))
        });
        stayed_well(what, peak, longest);
        let refused = made.expect_err(what);
        assert!(refused.message().contains("too many fields"), "{what}: {refused}");
        drop(plugin);
    }
    // The same as a request of the plugin.
    let plugin = Plugin::listener(&fixture.node, "10", "crowd");
    for (what, field) in [("updates", 1), ("evictions", 2)] {
        let (peak, longest, answer) =
            watched(&fixture.node, || plugin.caller().call("UpdateContainers", repeated(field, &[])));
        stayed_well(what, peak, longest);
        let status = answer.expect("an answer").status.expect("a refusal");
        assert!(status.message.contains("too many fields"), "{what}: {status:?}");
    }
    fixture.node.stop();
}

/// A frame with a request of the plugin that is cut off before its last byte.
fn unfinished() -> Vec<u8> {
    let request = ttrpc::Request {
        service: "nri.pkg.api.v1alpha1.Runtime".into(),
        method: "RegisterPlugin".into(),
        payload: vec![0; LARGEST],
        ..Default::default()
    };
    let mut bytes = frame(2, &message(1, 1, &request.encode_to_vec()));
    bytes.pop();
    bytes
}

/// Regression: each of 64 connections that had not registered could have four megabytes in the daemon, and each plugin too.
#[test]
fn unfinished_messages_of_many_connections_do_not_fill_the_daemon() {
    let config = "[nri]\nplugin_registration_timeout = \"3s\"\n".into();
    let node = Node::with(Options { config, ..Options::default() });
    let bytes = unfinished();
    let (peak, longest, silent) = watched(&node, || {
        let connect = |_| {
            let mut stream = UnixStream::connect(node.nri()).expect("the socket listens");
            stream.set_write_timeout(Some(Duration::from_secs(5))).expect("a timeout");
            let _ = stream.write_all(&bytes); // it may be cut off in between
            stream
        };
        (0..100).map(connect).collect::<Vec<_>>()
    });
    stayed_well("before registration", peak, longest);
    drop(silent);
    let (peak, longest, plugins) = watched(&node, || {
        let join = |number: u32| {
            let plugin = Plugin::listener(&node, "10", &format!("half{number}"));
            for connection in [1, 2] {
                let mut bytes = frame(connection, &message(101, 2, &vec![0; LARGEST]));
                bytes.pop();
                let _ = plugin.caller().write(&bytes); // as above
            }
            plugin
        };
        (0..12).map(join).collect::<Vec<_>>()
    });
    stayed_well("after registration", peak, longest);
    drop(plugins);
    // A large message of one plugin is still taken.
    let plugin = Plugin::listener(&node, "20", "good");
    let reason = "x".repeat(3 << 20);
    let evict = vec![api::ContainerEviction { container_id: "0".repeat(64), reason }];
    let request = api::UpdateContainersRequest { update: Vec::new(), evict };
    let answer = plugin.caller().call("UpdateContainers", request.encode_to_vec()).expect("an answer");
    assert!(answer.status.is_none_or(|status| status.code == 0));
    node.stop();
}

fn memory(id: &str, limit: i64) -> api::ContainerUpdate {
    let memory = api::LinuxMemory { limit: Some(api::OptionalInt64 { value: limit }), ..Default::default() };
    let resources = api::LinuxResources { memory: Some(memory), ..Default::default() };
    api::ContainerUpdate {
        container_id: id.into(),
        linux: Some(api::LinuxContainerUpdate { resources: Some(resources) }),
        ignore_failure: true,
    }
}

/// Regression: the daemon answered no call while it applied thousands of updates of one message.
#[test]
fn a_message_with_thousands_of_updates_and_evictions_does_not_stop_the_daemon() {
    let config = "[nri]\nallow_eviction = true\n".into();
    let fixture = PodFixture::on(Node::with(Options { config, ..Options::default() }), host_pod("fixture"));
    let victim = fixture.run(&fixture.config("victim", &["sleep", "forever"]));
    let plugin = Plugin::listener(&fixture.node, "10", "busy");
    let absent = "0".repeat(64);
    let one = |number: i64| match number % 10 {
        0 => memory(&absent, 64 << 20),
        _ => memory(&victim, (64 + number % 7) << 20),
    };
    let begun = Instant::now();
    let (peak, longest, answer) =
        watched(&fixture.node, || plugin.caller().update((0..2000).map(one).collect()));
    let took = begun.elapsed();
    assert_eq!(answer.expect("an answer").0, 0);
    stayed_well("updates", peak, longest);
    assert!(longest < took / 4, "an answer took {longest:?} of {took:?}");
    // Large requests at once: some are refused.
    let reason = "x".repeat(3 << 20);
    let large = api::UpdateContainersRequest {
        update: (0..60).map(|number| memory(&victim, (64 + number % 7) << 20)).collect(),
        evict: vec![api::ContainerEviction { container_id: absent.clone(), reason }],
    };
    let (peak, longest, ()) = watched(&fixture.node, || {
        for number in 0..14 {
            let request = ttrpc::Request {
                service: "nri.pkg.api.v1alpha1.Runtime".into(),
                method: "UpdateContainers".into(),
                payload: large.encode_to_vec(),
                ..Default::default()
            };
            let bytes = frame(2, &message(1001 + 2 * number, 1, &request.encode_to_vec()));
            plugin.caller().write(&bytes).expect("it reads");
        }
        fixture.create(&fixture.config("meanwhile", &["true"]));
    });
    stayed_well("large requests", peak, longest);
    drop(plugin);
    let plugin = Plugin::listener(&fixture.node, "10", "busy");
    let evict = |number: usize| api::ContainerEviction {
        container_id: if number.is_multiple_of(2) { victim.clone() } else { absent.clone() },
        reason: "everything".into(),
    };
    let request = api::UpdateContainersRequest { update: Vec::new(), evict: (0..5000).map(evict).collect() };
    let (peak, longest, answer) =
        watched(&fixture.node, || plugin.caller().call("UpdateContainers", request.encode_to_vec()));
    assert!(answer.expect("an answer").status.is_none_or(|status| status.code == 0));
    stayed_well("evictions", peak, longest);
    fixture.node.exited(&victim);
    assert_eq!(fixture.node.container(&victim).state(), ContainerState::ContainerExited);
    assert!(!plugin.is_over());
    fixture.node.stop();
}

/// Large answers without end, in answer to nothing and to each call.
#[test]
fn large_answers_without_end_fill_neither_the_daemon_nor_its_log() {
    let fixture = PodFixture::on(Node::start(), host_pod("fixture"));
    let plugin = Plugin::listener(&fixture.node, "10", "loud");
    let stray = frame(1, &message(1001, 2, &vec![0; LARGEST]));
    let (peak, longest, ()) = watched(&fixture.node, || {
        for _ in 0..30 {
            plugin.caller().write(&stray).expect("it reads");
        }
        fixture.run(&fixture.config("beside", &["sleep", "forever"]));
    });
    stayed_well("strays", peak, longest);
    assert!(!plugin.is_over());
    assert!(fixture.node.log().len() < 1 << 20, "a log of {} bytes", fixture.node.log().len());
    fixture.node.stop();
}

/// Regression: the daemon kept what a plugin had said about each container, up to four megabytes.
#[test]
fn what_plugins_say_about_containers_is_limited() {
    let fixture = PodFixture::on(Node::start(), host_pod("fixture"));
    let handler = |heard: &coracle_tests::nri::Heard| match heard.method.as_str() {
        "CreateContainer" => {
            let name = heard.container().name;
            let size = if name.starts_with("large") { 3 << 20 } else { 100 << 10 };
            let annotations = [("essay".to_owned(), "x".repeat(size))].into();
            Answer::adjust(api::ContainerAdjustment { annotations, ..Default::default() })
        }
        _ => Answer::empty(),
    };
    let _plugin =
        Plugin::join(&fixture.node, "10", "essays", EVENTS, Box::new(move |_, heard| handler(heard)));
    let (peak, longest, outcomes) = watched(&fixture.node, || {
        let tried = |number: usize| {
            let config = fixture.config(&format!("large{number}"), &["true"]);
            fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod))
        };
        (0..8).map(tried).collect::<Vec<_>>()
    });
    stayed_well("annotations", peak, longest);
    for outcome in outcomes {
        let refused = outcome.expect_err("it is too long");
        assert!(refused.message().contains("adjustment"), "{refused}");
    }
    fixture.create(&fixture.config("usual", &["true"]));
    fixture.node.stop();
}
