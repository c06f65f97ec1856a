//! GetContainerEvents: every change, in order, with the statuses of that moment.

use coracle_tests::cri::proto::{
    ContainerEventResponse, ContainerEventType, ContainerState, PodSandboxState, RemoveContainerRequest,
    RemovePodSandboxRequest, StartContainerRequest, StopPodSandboxRequest,
};
use coracle_tests::node::Node;
use coracle_tests::request;

/// Formats an event: type, object, state of the pod, states of the containers.
fn line(event: &ContainerEventResponse, pod: &str) -> String {
    let status = event.pod_sandbox_status.as_ref().expect("the kubelet drops events without it");
    assert_eq!(status.id, pod);
    assert!(status.metadata.is_some());
    let who = if event.container_id == pod { "pod" } else { "container" };
    let what = match event.container_event_type() {
        ContainerEventType::ContainerCreatedEvent => "created",
        ContainerEventType::ContainerStartedEvent => "started",
        ContainerEventType::ContainerStoppedEvent => "stopped",
        ContainerEventType::ContainerDeletedEvent => "deleted",
    };
    let ready = if status.state() == PodSandboxState::SandboxReady { "ready" } else { "not ready" };
    let states: Vec<&str> = event
        .containers_statuses
        .iter()
        .map(|status| match status.state() {
            ContainerState::ContainerCreated => "created",
            ContainerState::ContainerRunning => "running",
            ContainerState::ContainerExited => "exited",
            ContainerState::ContainerUnknown => "unknown",
        })
        .collect();
    format!("{who} {what}: {ready} {}", states.join(" ")).trim_end().to_owned()
}

#[test]
fn the_lifecycle_causes_events_in_order() {
    let node = Node::start();
    let image = node.import_probe();
    let pod = request::host_pod("life");
    let mut pod_id = String::new();
    let events = node.events_during(8, || {
        pod_id = node.run_pod(&pod);
        let container_id = node.create(&pod_id, &request::container("life", &image, &["true"], &pod), &pod);
        node.start_container(StartContainerRequest { container_id: container_id.clone() }).expect("started");
        node.exited(&container_id);
        node.remove_container(RemoveContainerRequest { container_id }).expect("removed");
        node.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: pod_id.clone() }).expect("stopped");
        node.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: pod_id.clone() }).expect("removed");
    });
    let events = events.expect("events");
    let lines: Vec<String> = events.iter().map(|event| line(event, &pod_id)).collect();
    let expected = [
        "pod created: ready",
        "pod started: ready",
        "container created: ready created",
        "container started: ready running",
        "container stopped: ready exited",
        "container deleted: ready",
        "pod stopped: not ready",
        "pod deleted: not ready",
    ];
    assert_eq!(lines, expected);
    assert!(events.is_sorted_by(|a, b| a.created_at < b.created_at), "later is later");
    node.stop();
}

#[test]
fn a_client_that_stops_reading_events_is_disconnected_with_an_error() {
    let node = Node::start();
    // More than a client's queue and the connection's window: each event contains annotations.
    let events = node.events_during(usize::MAX, || {
        for _ in 0..40 {
            let mut pod = request::host_pod("churn");
            pod.annotations = [("big".to_owned(), "x".repeat(100_000))].into();
            let id = node.run_pod(&pod);
            node.remove_pod(&id);
        }
    });
    let error = events.expect_err("it did not keep up");
    assert_eq!(error.code(), tonic::Code::ResourceExhausted, "{error}");
    assert!(error.message().contains("list containers again"), "{error}");
    // The client lists all pods and calls again.
    let again = node.events_during(2, || {
        node.run_pod(&request::host_pod("again"));
    });
    assert_eq!(again.expect("events").len(), 2);
    node.stop();
}
