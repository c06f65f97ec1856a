//! Containers: the state machine, what a status says, filters, names and retries.

use coracle_tests::cri::proto::{
    ContainerFilter, ContainerState, ContainerStateValue, ListContainersRequest, RemoveContainerRequest,
    StartContainerRequest, StopContainerRequest, StopPodSandboxRequest,
};
use coracle_tests::host;
use coracle_tests::request::create;
use tonic::Code;

use coracle_tests::stage::Stage;

fn list(stage: &Stage, filter: ContainerFilter) -> Vec<String> {
    let request = ListContainersRequest { filter: Some(filter) };
    let answer = stage.node.list_containers(request).expect("list");
    answer.containers.into_iter().map(|container| container.id).collect()
}

#[test]
fn states_follow_each_other_with_increasing_times() {
    let stage = Stage::set();
    let config = stage.config("one", &["trap", "7"]);
    let id = stage.create(&config);
    let status = stage.node.container(&id);
    assert_eq!(status.state(), ContainerState::ContainerCreated);
    assert!(status.created_at > 0 && status.started_at == 0 && status.finished_at == 0, "{status:?}");
    assert_eq!((status.reason.as_str(), status.exit_code), ("", 0));

    stage.node.start_container(StartContainerRequest { container_id: id.clone() }).expect("start");
    let status = stage.node.container(&id);
    assert_eq!(status.state(), ContainerState::ContainerRunning);
    assert!(status.started_at >= status.created_at && status.finished_at == 0);
    let again = stage.node.start_container(StartContainerRequest { container_id: id.clone() });
    assert!(again.expect_err("it runs").message().contains("RUNNING"));

    host::wait_until("the probe traps", || stage.node.output(&id).contains("trapping"));
    stage.node.stop_container(StopContainerRequest { container_id: id.clone(), timeout: 20 }).expect("stop");
    let status = stage.node.container(&id);
    assert_eq!(status.state(), ContainerState::ContainerExited);
    assert_eq!((status.exit_code, status.reason.as_str()), (7, "Error"));
    assert!(status.finished_at >= status.started_at);

    stage.node.remove_container(RemoveContainerRequest { container_id: id.clone() }).expect("remove");
    assert_eq!(list(&stage, ContainerFilter::default()), Vec::<String>::new());
    stage.node.stop();
}

#[test]
fn a_status_contains_the_request_and_the_state() {
    let stage = Stage::set();
    let mut config = stage.config("one", &["sleep", "forever"]);
    config.annotations.insert("io.kubernetes.container.hash".into(), "abc".into());
    let id = stage.run(&config);
    let status = stage.node.container(&id);
    assert_eq!(status.metadata, config.metadata);
    assert_eq!((&status.labels, &status.annotations), (&config.labels, &config.annotations));
    assert_eq!(status.log_path, format!("{}/one/0.log", stage.pod.log_directory));
    assert!(!status.image_ref.is_empty());
    assert!(status.image_id.starts_with("sha256:"), "{}", status.image_id);
    assert_eq!(status.image.expect("an image").user_specified_image, stage.image);
    let user = status.user.and_then(|user| user.linux).expect("a user");
    assert_eq!((user.uid, user.gid), (0, 0));
    assert!(host::is_alive(stage.node.container_pid(&id)));
    stage.node.stop();
}

#[test]
fn exit_codes_and_reasons() {
    let stage = Stage::set();
    let cases: [(&[&str], i32, &str); 4] = [
        (&["true"], 0, "Completed"),
        (&["exit", "3"], 3, "Error"),
        (&["exit", "255"], 255, "Error"),
        (&["cat", "/nothing"], 2, "Error"),
    ];
    for (index, (words, code, reason)) in cases.into_iter().enumerate() {
        let id = stage.run(&stage.config(&format!("c{index}"), words));
        let status = stage.node.exited(&id);
        assert_eq!((status.exit_code, status.reason.as_str()), (code, reason), "{words:?}");
        assert!(
            status.created_at <= status.started_at && status.started_at <= status.finished_at,
            "{status:?}"
        );
    }
    stage.node.stop();
}

#[test]
fn an_exit_by_signal_has_code_128_plus_its_number() {
    let stage = Stage::set();
    let id = stage.run(&stage.config("one", &["sleep", "forever"]));
    let pid = nix::unistd::Pid::from_raw(stage.node.container_pid(&id));
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("root may");
    assert_eq!(stage.node.exited(&id).exit_code, 137);
    stage.node.stop();
}

#[test]
fn unknown_ids_are_not_found_except_for_idempotent_calls() {
    let stage = Stage::set();
    let unknown = "e".repeat(64);
    let status =
        coracle_tests::cri::proto::ContainerStatusRequest { container_id: unknown.clone(), verbose: false };
    assert_eq!(stage.node.container_status(status).expect_err("unknown").code(), Code::NotFound);
    let start = StartContainerRequest { container_id: unknown.clone() };
    assert_eq!(stage.node.start_container(start).expect_err("unknown").code(), Code::NotFound);
    let exec = coracle_tests::request::exec(&unknown, &["true"], 1);
    assert_eq!(stage.node.exec_sync(exec).expect_err("unknown").code(), Code::NotFound);
    let reopen = coracle_tests::cri::proto::ReopenContainerLogRequest { container_id: unknown.clone() };
    assert_eq!(stage.node.reopen_container_log(reopen).expect_err("unknown").code(), Code::NotFound);
    stage
        .node
        .stop_container(StopContainerRequest { container_id: unknown.clone(), timeout: 1 })
        .expect("stop");
    stage.node.remove_container(RemoveContainerRequest { container_id: unknown }).expect("remove");
    stage.node.stop();
}

#[test]
fn filters_by_state_pod_label_and_prefix() {
    let stage = Stage::set();
    let mut first = stage.config("first", &["sleep", "forever"]);
    first.labels.insert("tier".into(), "front".into());
    let (first, second) = (stage.run(&first), stage.create(&stage.config("second", &["true"])));
    let state = |state: ContainerState| Some(ContainerStateValue { state: state.into() });
    let running = ContainerFilter { state: state(ContainerState::ContainerRunning), ..Default::default() };
    assert_eq!(list(&stage, running), std::slice::from_ref(&first));
    let created = ContainerFilter { state: state(ContainerState::ContainerCreated), ..Default::default() };
    assert_eq!(list(&stage, created), std::slice::from_ref(&second));
    let labelled = ContainerFilter {
        label_selector: [("tier".to_owned(), "front".to_owned())].into(),
        pod_sandbox_id: stage.pod_id.clone(),
        id: first[..13].into(),
        ..Default::default()
    };
    assert_eq!(list(&stage, labelled), [first]);
    let elsewhere = ContainerFilter { pod_sandbox_id: "0".repeat(64), ..Default::default() };
    assert_eq!(list(&stage, elsewhere), Vec::<String>::new());
    stage.node.stop();
}

#[test]
fn an_identical_create_is_a_retry_until_its_id_is_used() {
    let stage = Stage::set();
    let config = stage.config("one", &["true"]);
    let id = stage.create(&config);
    // The answer may have been lost: only a call with the ID shows that it was received.
    assert_eq!(stage.create(&config), id);
    assert_eq!(stage.node.container(&id).id, id);
    for again in [config, stage.config("one", &["exit", "1"])] {
        let refused = stage.node.create_container(create(&stage.pod_id, &again, &stage.pod));
        let refused = refused.expect_err("the name is taken");
        assert_eq!(refused.code(), Code::AlreadyExists);
        assert!(refused.message().contains(&id[..13]), "{refused}");
    }
    stage.node.stop();
}

#[test]
fn the_same_name_three_times_in_one_pod_each_after_the_removal_of_the_last() {
    let stage = Stage::set();
    for _ in 0..3 {
        let id = stage.run(&stage.config("one", &["true"]));
        stage.node.exited(&id);
        stage.node.remove_container(RemoveContainerRequest { container_id: id }).expect("remove");
    }
    stage.node.stop();
}

#[test]
fn remove_ends_a_running_container_and_can_be_repeated() {
    let stage = Stage::set();
    let id = stage.run(&stage.config("one", &["stubborn"]));
    let pid = stage.node.container_pid(&id);
    for _ in 0..2 {
        stage.node.remove_container(RemoveContainerRequest { container_id: id.clone() }).expect("remove");
    }
    assert!(!host::is_alive(pid));
    stage.node.stop();
}

#[test]
fn a_stopped_pod_has_exited_containers_and_accepts_no_new_ones() {
    let stage = Stage::set();
    let id = stage.run(&stage.config("one", &["stubborn"]));
    stage
        .node
        .stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: stage.pod_id.clone() })
        .expect("stop");
    let status = stage.node.container(&id);
    assert_eq!((status.state(), status.exit_code), (ContainerState::ContainerExited, 137));
    let config = stage.config("two", &["true"]);
    stage.node.create_container(create(&stage.pod_id, &config, &stage.pod)).expect_err("the pod is stopped");
    stage.node.stop();
}

#[test]
fn the_writable_layer_belongs_to_one_container() {
    let stage = Stage::set();
    stage.output(&["write", "/tmp/mine", "here"], |_| ());
    let second = stage.run(&stage.config("second", &["cat", "/tmp/mine"]));
    assert_ne!(stage.node.exited(&second).exit_code, 0, "a fresh root has no such file");
    stage.node.stop();
}
