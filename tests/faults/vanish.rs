//! Clients that disconnect during a call: the operation is completed or undone, and lists show the result.

use std::time::Duration;

use coracle_tests::cri::proto::{
    ContainerState, ListPodSandboxRequest, RemoveContainerRequest, RemovePodSandboxRequest,
    StartContainerRequest, StopContainerRequest, StopPodSandboxRequest,
};
use coracle_tests::host;
use coracle_tests::node::Node;
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{bridge_pod, container, run};

/// Times at which the client disconnects, in microseconds: before, during and after all steps of a pod.
const PATIENCE_MICROSECONDS: [u64; 12] =
    [1, 100, 500, 1000, 2000, 4000, 8000, 12_000, 20_000, 40_000, 80_000, 160_000];

#[test]
fn a_retry_returns_the_pod_of_the_first_request() {
    let node = Node::with_bridge();
    for microseconds in PATIENCE_MICROSECONDS {
        let pod = bridge_pod(&format!("gone{microseconds}"));
        let answer = node.another().abandon(run(&pod), Duration::from_micros(microseconds));
        // If the answer was received, no retry is needed.
        let id = match answer {
            Some(first) => first.expect("run").pod_sandbox_id,
            None => node.run_pod(&pod),
        };
        let pods = node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list").items;
        assert_eq!(pods.len(), 1, "{microseconds}");
        assert_eq!(pods[0].id, id, "{microseconds}");
        node.remove_pod(&id);
        host::wait_until("nothing of it is left", || node.rests().is_empty());
    }
    node.stop();
}

#[test]
fn a_pod_without_a_retry_is_listed_and_can_be_removed() {
    let node = Node::with_bridge();
    let pod = bridge_pod("forgotten");
    node.another().abandon(run(&pod), Duration::from_millis(3));
    let settled = || {
        let pods = node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list").items;
        // Created and listed, or undone.
        !pods.is_empty() || node.rests().is_empty()
    };
    host::wait_until("it is one or the other", settled);
    node.stop();
}

/// Number of starts whose client disconnects 0.2 to 6 ms after the request.
const STARTS: u64 = 50;

fn patience(number: u64) -> Duration {
    Duration::from_micros(200 + number * 5800 / STARTS)
}

/// A start continues without its client. Regression: the start was cancelled with the call, most containers
/// ran and were listed as created, StopContainer did not end them, and the retry of StartContainer killed
/// them.
#[test]
fn a_start_continues_when_its_client_disconnects() {
    let fixture = PodFixture::start();
    let node = &fixture.node;
    let mut ran = 0;
    for number in 0..STARTS {
        let config = fixture.config(&format!("gone{number}"), &["sleep", "forever"]);
        let id = fixture.create(&config);
        let request = StartContainerRequest { container_id: id.clone() };
        let asked = request.clone();
        node.another().vanish(patience(number), |mut client| async move {
            client.start_container(asked).await.map(drop)
        });
        // A retry joins the running start, or fails because the container has started.
        match node.start_container(request) {
            Ok(_) => {}
            Err(refused) => {
                assert_eq!(refused.code(), tonic::Code::FailedPrecondition, "{number}: {refused}");
                assert!(refused.message().contains("CONTAINER_RUNNING"), "{number}: {refused}");
            }
        }
        assert_eq!(node.container(&id).state(), ContainerState::ContainerRunning, "{number}");
        let pid = node.container_pid(&id);
        assert!(pid > 0 && host::is_alive(pid), "{number}: process {pid} of a running container");
        ran += 1;
        node.stop_container(StopContainerRequest { container_id: id.clone(), timeout: 0 }).expect("stop");
        assert!(!host::is_alive(pid), "{number}: StopContainer ends it");
        node.remove_container(RemoveContainerRequest { container_id: id }).expect("remove");
    }
    assert_eq!(ran, STARTS);
    fixture.node.stop();
}

/// Lists eventually show the actual state, also if the client does not retry.
#[test]
fn lists_show_the_actual_state_after_clients_disconnected() {
    let fixture = PodFixture::start();
    let node = &fixture.node;
    for number in 0..STARTS {
        let config = fixture.config(&format!("gone{number}"), &["sleep", "forever"]);
        let id = fixture.create(&config);
        let asked = StartContainerRequest { container_id: id.clone() };
        node.another().vanish(patience(number), |mut client| async move {
            client.start_container(asked).await.map(drop)
        });
        let named = format!("containers/{id}");
        let lives = || {
            let monitor = node.monitors()[0].pid;
            host::children(monitor).into_iter().any(host::is_alive)
        };
        host::wait_until(&format!("{number}: {named} is listed as it is"), || {
            let state = node.container(&id).state();
            // If the request did not arrive, it stays created.
            (state == ContainerState::ContainerRunning && lives())
                || (state == ContainerState::ContainerCreated && !lives())
        });
        // On a busy machine the request may arrive later; then the check is repeated.
        std::thread::sleep(Duration::from_millis(20));
        host::wait_until(&format!("{number}: what is listed is what is so"), || {
            (node.container(&id).state() == ContainerState::ContainerRunning) == lives()
        });
        // Stop and remove also complete without their client.
        let asked = StopContainerRequest { container_id: id.clone(), timeout: 0 };
        node.another().vanish(patience(number), |mut client| async move {
            client.stop_container(asked).await.map(drop)
        });
        let asked = RemoveContainerRequest { container_id: id.clone() };
        node.another().vanish(patience(number), |mut client| async move {
            client.remove_container(asked).await.map(drop)
        });
        node.remove_container(RemoveContainerRequest { container_id: id.clone() }).expect("the retry");
        assert!(!lives(), "{number}: nothing of it is left");
    }
    fixture.node.stop();
}

/// Stop and remove of pods also continue, and a retry completes them.
#[test]
fn removal_of_pods_continues_when_clients_disconnect() {
    let node = Node::with_bridge();
    let image = node.import_probe();
    for number in (0..STARTS).step_by(5) {
        let pod = bridge_pod(&format!("going{number}"));
        let id = node.run_pod(&pod);
        node.run_container(&id, &container("one", &image, &["sleep", "forever"], &pod), &pod);
        let asked = StopPodSandboxRequest { pod_sandbox_id: id.clone() };
        node.another().vanish(patience(number), |mut client| async move {
            client.stop_pod_sandbox(asked).await.map(drop)
        });
        let asked = RemovePodSandboxRequest { pod_sandbox_id: id.clone() };
        node.another().vanish(patience(number), |mut client| async move {
            client.remove_pod_sandbox(asked).await.map(drop)
        });
        let retry = RemovePodSandboxRequest { pod_sandbox_id: id };
        node.remove_pod_sandbox(retry).expect("the retry");
        assert!(node.monitors().is_empty(), "{number}");
        host::wait_until("nothing of it is left", || node.rests().is_empty());
    }
    node.stop();
}
