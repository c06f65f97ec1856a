//! Resources that a container can exhaust: processes, descriptors, logs, output of execs, connections. Other
//! containers continue, and the daemon responds and its memory stays small. Times are not measured.

use std::net::TcpStream;
use std::time::Duration;

use coracle_tests::cri::proto::{
    AttachRequest, ContainerState, ExecRequest, KeyValue, LinuxContainerResources, RemoveContainerRequest,
    StartContainerRequest, StopContainerRequest, VersionRequest,
};
use coracle_tests::host;
use coracle_tests::node::Node;
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{bridge_pod, create, exec, host_pod};
use coracle_tests::spdy::Client;

use crate::{Rights, armed, is_ready, says, shared};

/// Maximum anonymous memory of the daemon in KiB during an attack: twice what sixteen mebibytes of buffered
/// output need, and its idle budget.
const DAEMON_KIB_MAX: u64 = 40 << 10;

/// The maximum memory of the daemon while `work` runs.
fn peak<T>(fixture: &PodFixture, work: impl FnOnce() -> T) -> (u64, T) {
    use std::sync::atomic::{AtomicBool, Ordering};
    let over = AtomicBool::new(false);
    let pid = fixture.node.pid();
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut peak = 0;
            while !over.load(Ordering::Relaxed) {
                peak = peak.max(host::anonymous_kib(pid));
                std::thread::sleep(Duration::from_millis(5));
            }
            peak
        });
        let done = work();
        over.store(true, Ordering::Relaxed);
        (watch.join().expect("the thread ends"), done)
    })
}

/// Fails without the defence: the daemon grows by the complete output of all execs: 185 MiB.
#[test]
fn finding_14_output_of_execs_does_not_fill_the_daemon() {
    const EXECS: usize = 12;
    const BYTES: usize = 14 << 20;
    /// Minimum number of bytes per stream in an answer: both together fit into a gRPC message.
    const KEPT: usize = 7 << 20;
    let fixture = PodFixture::start();
    let id = fixture.run(&armed(&fixture, "chatty", Rights::Default, &["sleep", "forever"]));
    let (peak, answers) = peak(&fixture, || {
        std::thread::scope(|scope| {
            let run = |_| {
                let client = fixture.node.another();
                let id = id.clone();
                let bytes = BYTES.to_string();
                scope.spawn(move || client.exec_sync(exec(&id, &["blast", &bytes], 50)))
            };
            let threads: Vec<_> = (0..EXECS).map(run).collect();
            // Other calls are served meanwhile.
            for _ in 0..20 {
                fixture.node.version(VersionRequest::default()).expect("the daemon answers");
            }
            threads.into_iter().map(|thread| thread.join().expect("it ends")).collect::<Vec<_>>()
        })
    });
    let whole = answers.iter().flatten().filter(|answer| answer.stdout.len() >= KEPT).count();
    assert!(whole > 0, "no exec was answered: {:?}", answers.iter().find_map(|answer| answer.as_ref().err()));
    assert!(peak < DAEMON_KIB_MAX, "the daemon had {peak} KiB");
    assert_eq!(says(&fixture, &id, &["print", "fine"]), "fine\n");
    fixture.node.stop();
}

/// Fails without the defence: six hundred silent connections block all other clients for half a minute.
#[test]
fn finding_13_silent_connections_do_not_block_clients() {
    let fixture = PodFixture::start();
    let id = fixture.run(&fixture.config("served", &["sleep", "forever"]));
    let attach = || {
        let ask = AttachRequest { container_id: id.clone(), stdout: true, ..Default::default() };
        fixture.node.attach(ask).expect("a token").url
    };
    let address = attach().trim_start_matches("http://").split('/').next().expect("an address").to_owned();
    let silent: Vec<TcpStream> = (0..600).filter_map(|_| TcpStream::connect(&address).ok()).collect();
    assert!(silent.len() > 500, "only {} connections", silent.len());
    for _ in 0..3 {
        let ask = ExecRequest {
            container_id: id.clone(),
            cmd: ["/probe", "print", "served"].map(String::from).to_vec(),
            stdout: true,
            stderr: true,
            ..Default::default()
        };
        let url = fixture.node.exec(ask).expect("a token").url;
        let mut client = Client::connect(&url, "v4.channel.k8s.io");
        let streams = client.open_stdio(&["error", "stdout", "stderr"]);
        let outcome = client.finish_session(&streams, None);
        assert_eq!(outcome.stdout, b"served\n");
    }
    drop(silent);
    fixture.node.stop();
}

/// When a container has exhausted its own resources, another one can still start, execute commands and stop.
#[test]
fn a_container_without_processes_and_descriptors_does_not_affect_others() {
    let fixture = PodFixture::on(Node::with_bridge(), shared(bridge_pod("crowded")));
    let resources = Some(LinuxContainerResources {
        memory_limit_in_bytes: 256 << 20,
        unified: [("pids.max".to_owned(), "200".to_owned())].into(),
        ..Default::default()
    });
    for (name, words) in
        [("zombies", &["attack", "zombies", "2000"][..]), ("descriptors", &["attack", "descriptors"])]
    {
        let mut config = armed(&fixture, name, Rights::Unfiltered, words);
        config.linux.as_mut().expect("set").resources.clone_from(&resources);
        // The hybrid hierarchies of v1 do not have the unified keys.
        let id = match fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod)) {
            Ok(made) => made.container_id,
            Err(_) => {
                let resources = config.linux.as_mut().and_then(|linux| linux.resources.as_mut());
                resources.expect("set").unified.clear();
                fixture.create(&config)
            }
        };
        let start = StartContainerRequest { container_id: id.clone() };
        fixture.node.start_container(start).expect("a start");
        crate::wait_for_line(&fixture, &id, &format!("saw {name}"));
    }
    let next = fixture.run(&fixture.config("next", &["sleep", "forever"]));
    assert_eq!(says(&fixture, &next, &["print", "fine"]), "fine\n");
    assert!(is_ready(&fixture));
    let (peak, ()) = peak(&fixture, || {
        let stop = StopContainerRequest { container_id: next.clone(), timeout: 0 };
        fixture.node.stop_container(stop).expect("a stop");
    });
    assert!(peak < DAEMON_KIB_MAX, "the daemon had {peak} KiB");
    fixture.node.stop();
}

/// A container that writes as fast as possible fills its log and not the daemon.
#[test]
fn a_flood_of_log_lines_does_not_reach_the_daemon() {
    let fixture = PodFixture::start();
    let flood = armed(&fixture, "flood", Rights::Default, &["lines", "200000", "100"]);
    let (peak, id) = peak(&fixture, || {
        let id = fixture.run(&flood);
        for _ in 0..20 {
            fixture.node.version(VersionRequest::default()).expect("the daemon answers");
        }
        fixture.node.exited(&id);
        id
    });
    assert!(peak < DAEMON_KIB_MAX, "the daemon had {peak} KiB");
    assert_eq!(fixture.node.container(&id).state(), ContainerState::ContainerExited);
    fixture.node.stop();
}

/// A huge environment is refused or used; after its containers were removed the daemon's memory is as before.
#[test]
fn a_huge_environment_is_freed_with_its_container() {
    let fixture = PodFixture::with(host_pod("large"));
    let before = host::anonymous_kib(fixture.node.pid());
    for number in 0..4 {
        let mut config = armed(&fixture, &format!("large{number}"), Rights::Default, &["sleep", "forever"]);
        let value = vec![b'x'; 60 << 10];
        config.envs =
            (0..30).map(|key| KeyValue { key: format!("KEY{key}"), value: value.clone() }).collect();
        let Ok(made) = fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod)) else {
            continue;
        };
        // The kernel's limit of arguments may refuse it.
        let _ =
            fixture.node.start_container(StartContainerRequest { container_id: made.container_id.clone() });
        let remove = RemoveContainerRequest { container_id: made.container_id };
        fixture.node.remove_container(remove).expect("it goes");
    }
    let now = || host::anonymous_kib(fixture.node.pid());
    let is_small = host::wait_within(host::patience(), || (now() < before + (4 << 10)).then_some(()));
    assert!(is_small.is_some(), "the daemon had {before} KiB and has {}", now());
    fixture.node.stop();
}
