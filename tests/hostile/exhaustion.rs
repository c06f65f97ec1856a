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
use coracle_tests::request::{bridge_pod, create, exec, host_pod};
use coracle_tests::spdy::Client;
use coracle_tests::stage::Stage;

use crate::{Rights, armed, is_ready, says, shared};

/// Maximum anonymous memory of the daemon in KiB during an attack: twice what sixteen mebibytes of buffered
/// output need, and its idle budget.
const DAEMON_KIB_MAX: u64 = 40 << 10;

/// The maximum memory of the daemon while `work` runs.
fn peak<T>(stage: &Stage, work: impl FnOnce() -> T) -> (u64, T) {
    use std::sync::atomic::{AtomicBool, Ordering};
    let over = AtomicBool::new(false);
    let pid = stage.node.pid();
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
    let stage = Stage::set();
    let id = stage.run(&armed(&stage, "chatty", Rights::Default, &["sleep", "forever"]));
    let (peak, answers) = peak(&stage, || {
        std::thread::scope(|scope| {
            let run = |_| {
                let client = stage.node.another();
                let id = id.clone();
                let bytes = BYTES.to_string();
                scope.spawn(move || client.exec_sync(exec(&id, &["blast", &bytes], 50)))
            };
            let threads: Vec<_> = (0..EXECS).map(run).collect();
            // Other calls are served meanwhile.
            for _ in 0..20 {
                stage.node.version(VersionRequest::default()).expect("the daemon answers");
            }
            threads.into_iter().map(|thread| thread.join().expect("it ends")).collect::<Vec<_>>()
        })
    });
    let whole = answers.iter().flatten().filter(|answer| answer.stdout.len() >= KEPT).count();
    assert!(whole > 0, "no exec was answered: {:?}", answers.iter().find_map(|answer| answer.as_ref().err()));
    assert!(peak < DAEMON_KIB_MAX, "the daemon had {peak} KiB");
    assert_eq!(says(&stage, &id, &["print", "fine"]), "fine\n");
    stage.node.stop();
}

/// Fails without the defence: six hundred silent connections block all other clients for half a minute.
#[test]
fn finding_13_silent_connections_do_not_block_clients() {
    let stage = Stage::set();
    let id = stage.run(&stage.config("served", &["sleep", "forever"]));
    let attach = || {
        let ask = AttachRequest { container_id: id.clone(), stdout: true, ..Default::default() };
        stage.node.attach(ask).expect("a token").url
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
        let url = stage.node.exec(ask).expect("a token").url;
        let mut client = Client::connect(&url, "v4.channel.k8s.io");
        let streams = client.open_stdio(&["error", "stdout", "stderr"]);
        let outcome = client.finish_session(&streams, None);
        assert_eq!(outcome.stdout, b"served\n");
    }
    drop(silent);
    stage.node.stop();
}

/// When a container has exhausted its own resources, another one can still start, execute commands and stop.
#[test]
fn a_container_without_processes_and_descriptors_does_not_affect_others() {
    let stage = Stage::on(Node::with_bridge(), shared(bridge_pod("crowded")));
    let resources = Some(LinuxContainerResources {
        memory_limit_in_bytes: 256 << 20,
        unified: [("pids.max".to_owned(), "200".to_owned())].into(),
        ..Default::default()
    });
    for (name, words) in
        [("zombies", &["attack", "zombies", "2000"][..]), ("descriptors", &["attack", "descriptors"])]
    {
        let mut config = armed(&stage, name, Rights::Unfiltered, words);
        config.linux.as_mut().expect("set").resources.clone_from(&resources);
        // The hybrid hierarchies of v1 do not have the unified keys.
        let id = match stage.node.create_container(create(&stage.pod_id, &config, &stage.pod)) {
            Ok(made) => made.container_id,
            Err(_) => {
                let resources = config.linux.as_mut().and_then(|linux| linux.resources.as_mut());
                resources.expect("set").unified.clear();
                stage.create(&config)
            }
        };
        let start = StartContainerRequest { container_id: id.clone() };
        stage.node.start_container(start).expect("a start");
        crate::wait_for_line(&stage, &id, &format!("saw {name}"));
    }
    let next = stage.run(&stage.config("next", &["sleep", "forever"]));
    assert_eq!(says(&stage, &next, &["print", "fine"]), "fine\n");
    assert!(is_ready(&stage));
    let (peak, ()) = peak(&stage, || {
        let stop = StopContainerRequest { container_id: next.clone(), timeout: 0 };
        stage.node.stop_container(stop).expect("a stop");
    });
    assert!(peak < DAEMON_KIB_MAX, "the daemon had {peak} KiB");
    stage.node.stop();
}

/// A container that writes as fast as possible fills its log and not the daemon.
#[test]
fn a_flood_of_log_lines_does_not_reach_the_daemon() {
    let stage = Stage::set();
    let flood = armed(&stage, "flood", Rights::Default, &["lines", "200000", "100"]);
    let (peak, id) = peak(&stage, || {
        let id = stage.run(&flood);
        for _ in 0..20 {
            stage.node.version(VersionRequest::default()).expect("the daemon answers");
        }
        stage.node.exited(&id);
        id
    });
    assert!(peak < DAEMON_KIB_MAX, "the daemon had {peak} KiB");
    assert_eq!(stage.node.container(&id).state(), ContainerState::ContainerExited);
    stage.node.stop();
}

/// A huge environment is refused or used; after its containers were removed the daemon's memory is as before.
#[test]
fn a_huge_environment_is_freed_with_its_container() {
    let stage = Stage::with(host_pod("large"));
    let before = host::anonymous_kib(stage.node.pid());
    for number in 0..4 {
        let mut config = armed(&stage, &format!("large{number}"), Rights::Default, &["sleep", "forever"]);
        let value = vec![b'x'; 60 << 10];
        config.envs =
            (0..30).map(|key| KeyValue { key: format!("KEY{key}"), value: value.clone() }).collect();
        let Ok(made) = stage.node.create_container(create(&stage.pod_id, &config, &stage.pod)) else {
            continue;
        };
        // The kernel's limit of arguments may refuse it.
        let _ = stage.node.start_container(StartContainerRequest { container_id: made.container_id.clone() });
        let remove = RemoveContainerRequest { container_id: made.container_id };
        stage.node.remove_container(remove).expect("it goes");
    }
    let now = || host::anonymous_kib(stage.node.pid());
    let is_small = host::wait_within(host::patience(), || (now() < before + (4 << 10)).then_some(()));
    assert!(is_small.is_some(), "the daemon had {before} KiB and has {}", now());
    stage.node.stop();
}
