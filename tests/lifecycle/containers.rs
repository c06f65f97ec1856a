//! Containers: the state machine, what a status says, filters, names and retries.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use coracle_tests::cri::proto::{
    ContainerConfig, ContainerFilter, ContainerState, ContainerStateValue, ContainerStatusRequest, KeyValue,
    LinuxContainerResources, ListContainersRequest, Mount, PodSandboxStatusRequest, RemoveContainerRequest,
    StartContainerRequest, StopContainerRequest, StopPodSandboxRequest, UpdatePodSandboxResourcesRequest,
};
use coracle_tests::host;
use coracle_tests::request::create;
use tonic::Code;

use coracle_tests::pod_fixture::PodFixture;

fn list(fixture: &PodFixture, filter: ContainerFilter) -> Vec<String> {
    let request = ListContainersRequest { filter: Some(filter) };
    let answer = fixture.node.list_containers(request).expect("list");
    answer.containers.into_iter().map(|container| container.id).collect()
}

#[test]
fn states_follow_each_other_with_increasing_times() {
    let fixture = PodFixture::start();
    let config = fixture.config("one", &["trap", "7"]);
    let id = fixture.create(&config);
    let status = fixture.node.container(&id);
    assert_eq!(status.state(), ContainerState::ContainerCreated);
    assert!(status.created_at > 0 && status.started_at == 0 && status.finished_at == 0, "{status:?}");
    assert_eq!((status.reason.as_str(), status.exit_code), ("", 0));

    fixture.node.start_container(StartContainerRequest { container_id: id.clone() }).expect("start");
    let status = fixture.node.container(&id);
    assert_eq!(status.state(), ContainerState::ContainerRunning);
    assert!(status.started_at >= status.created_at && status.finished_at == 0);
    let again = fixture.node.start_container(StartContainerRequest { container_id: id.clone() });
    assert!(again.expect_err("it runs").message().contains("RUNNING"));

    host::wait_until("the probe traps", || fixture.node.output(&id).contains("trapping"));
    fixture
        .node
        .stop_container(StopContainerRequest { container_id: id.clone(), timeout: 20 })
        .expect("stop");
    let status = fixture.node.container(&id);
    assert_eq!(status.state(), ContainerState::ContainerExited);
    assert_eq!((status.exit_code, status.reason.as_str()), (7, "Error"));
    assert!(status.finished_at >= status.started_at);

    fixture.node.remove_container(RemoveContainerRequest { container_id: id.clone() }).expect("remove");
    assert_eq!(list(&fixture, ContainerFilter::default()), Vec::<String>::new());
    fixture.node.stop();
}

#[test]
fn a_status_contains_the_request_and_the_state() {
    let fixture = PodFixture::start();
    let mut config = fixture.config("one", &["sleep", "forever"]);
    config.annotations.insert("io.kubernetes.container.hash".into(), "abc".into());
    let id = fixture.run(&config);
    let status = fixture.node.container(&id);
    assert_eq!(status.metadata, config.metadata);
    assert_eq!((&status.labels, &status.annotations), (&config.labels, &config.annotations));
    assert_eq!(status.log_path, format!("{}/one/0.log", fixture.pod.log_directory));
    assert!(!status.image_ref.is_empty());
    assert!(status.image_id.starts_with("sha256:"), "{}", status.image_id);
    assert_eq!(status.image.expect("an image").user_specified_image, fixture.image);
    let user = status.user.and_then(|user| user.linux).expect("a user");
    assert_eq!((user.uid, user.gid), (0, 0));
    assert!(host::is_alive(fixture.node.container_pid(&id)));
    fixture.node.stop();
}

#[test]
fn exit_codes_and_reasons_are_reported() {
    let fixture = PodFixture::start();
    let cases: [(&[&str], i32, &str); 4] = [
        (&["true"], 0, "Completed"),
        (&["exit", "3"], 3, "Error"),
        (&["exit", "255"], 255, "Error"),
        (&["cat", "/nothing"], 2, "Error"),
    ];
    for (index, (words, code, reason)) in cases.into_iter().enumerate() {
        let id = fixture.run(&fixture.config(&format!("c{index}"), words));
        let status = fixture.node.exited(&id);
        assert_eq!((status.exit_code, status.reason.as_str()), (code, reason), "{words:?}");
        assert!(
            status.created_at <= status.started_at && status.started_at <= status.finished_at,
            "{status:?}"
        );
    }
    fixture.node.stop();
}

#[test]
fn an_exit_by_signal_has_code_128_plus_its_number() {
    let fixture = PodFixture::start();
    let id = fixture.run(&fixture.config("one", &["sleep", "forever"]));
    let pid = nix::unistd::Pid::from_raw(fixture.node.container_pid(&id));
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("root may");
    assert_eq!(fixture.node.exited(&id).exit_code, 137);
    fixture.node.stop();
}

/// Tools and test suites read these fields, in containerd's format.
#[test]
fn the_verbose_info_has_the_request_and_what_applies() {
    let fixture = PodFixture::start();
    let mut config = fixture.config("told", &["sleep", "forever"]);
    config.envs = vec![KeyValue { key: "PASSWORD".into(), value: "hunter2".into() }];
    config.linux.as_mut().expect("set").resources =
        Some(LinuxContainerResources { memory_limit_in_bytes: 64 << 20, ..Default::default() });
    let id = fixture.run(&config);
    let request = ContainerStatusRequest { container_id: id, verbose: true };
    let text = fixture.node.container_status(request).expect("status").info["info"].clone();
    assert!(!text.contains("hunter2"), "values of variables may be secrets: {text}");
    let info: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(info["privileged"], false);
    assert_eq!(info["config"]["metadata"]["name"], "told");
    assert_eq!(info["config"]["args"], serde_json::json!(["sleep", "forever"]));
    assert_eq!(info["config"]["linux"]["resources"]["memory_limit_in_bytes"], 64 << 20);
    let spec = &info["runtimeSpec"];
    assert_eq!(spec["process"]["capabilities"]["bounding"][0], "CAP_CHOWN");
    assert_eq!(spec["linux"]["resources"]["memory"]["swap"], 64 << 20);

    let pod_sandbox_id = fixture.pod_id.clone();
    let limit =
        |memory_limit_in_bytes| Some(LinuxContainerResources { memory_limit_in_bytes, ..Default::default() });
    let (overhead, resources) = (limit(1 << 20), limit(1 << 30));
    let update =
        UpdatePodSandboxResourcesRequest { pod_sandbox_id: pod_sandbox_id.clone(), overhead, resources };
    fixture.node.update_pod_sandbox_resources(update).expect("update");
    let request = PodSandboxStatusRequest { pod_sandbox_id, verbose: true };
    let text = fixture.node.pod_sandbox_status(request).expect("status").info["info"].clone();
    let info: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(info["overhead"]["linux"]["memory_limit_in_bytes"], 1 << 20);
    assert_eq!(info["resources"]["linux"]["memory_limit_in_bytes"], 1 << 30);
    fixture.node.stop();
}

/// Regression: a script was reported as missing although its interpreter was; with a command without a slash the text did
/// not even name the file.
#[test]
fn a_missing_interpreter_is_not_reported_as_a_missing_program() {
    let fixture = PodFixture::start();
    let folder = fixture.node.folder().join("scripts");
    fs::create_dir(&folder).expect("a folder");
    fs::write(folder.join("script"), "#!/nowhere/sh\n").expect("a script");
    let mode = fs::Permissions::from_mode(0o755);
    fs::set_permissions(folder.join("script"), mode).expect("our file");
    let mut config = fixture.config("one", &[]);
    config.command = vec!["script".into()];
    config.envs = vec![KeyValue { key: "PATH".into(), value: "/nowhere:/scripts".into() }];
    config.mounts = vec![Mount {
        host_path: folder.display().to_string(),
        container_path: "/scripts".into(),
        ..Default::default()
    }];
    let missing = "no such file or directory: the file's interpreter or dynamic loader is missing";
    let start = |config: &ContainerConfig| {
        let id = fixture.create(config);
        fixture
            .node
            .start_container(StartContainerRequest { container_id: id.clone() })
            .expect_err("refused");
        fixture.node.container(&id).message
    };
    assert_eq!(start(&config), format!("exec: \"/scripts/script\": {missing}"));
    config.metadata = fixture.config("two", &[]).metadata;
    config.command = vec!["other".into()];
    assert_eq!(start(&config), "exec: \"other\": executable file not found in $PATH");
    config.metadata = fixture.config("three", &[]).metadata;
    config.command = Vec::new();
    config.args = vec!["sleep".into(), "forever".into()];
    let id = fixture.run(&config);
    let mut request = coracle_tests::request::exec(&id, &[], 10);
    request.cmd = vec!["script".into()];
    let refused = fixture.node.exec_sync(request).expect_err("an exec has the same text");
    assert!(refused.message().ends_with(&format!("exec: \"/scripts/script\": {missing}")), "{refused}");
    fixture.node.stop();
}

#[test]
fn unknown_ids_are_not_found_except_for_idempotent_calls() {
    let fixture = PodFixture::start();
    let unknown = "e".repeat(64);
    let status = ContainerStatusRequest { container_id: unknown.clone(), verbose: false };
    assert_eq!(fixture.node.container_status(status).expect_err("unknown").code(), Code::NotFound);
    let start = StartContainerRequest { container_id: unknown.clone() };
    assert_eq!(fixture.node.start_container(start).expect_err("unknown").code(), Code::NotFound);
    let exec = coracle_tests::request::exec(&unknown, &["true"], 1);
    assert_eq!(fixture.node.exec_sync(exec).expect_err("unknown").code(), Code::NotFound);
    let reopen = coracle_tests::cri::proto::ReopenContainerLogRequest { container_id: unknown.clone() };
    assert_eq!(fixture.node.reopen_container_log(reopen).expect_err("unknown").code(), Code::NotFound);
    fixture
        .node
        .stop_container(StopContainerRequest { container_id: unknown.clone(), timeout: 1 })
        .expect("stop");
    fixture.node.remove_container(RemoveContainerRequest { container_id: unknown }).expect("remove");
    fixture.node.stop();
}

#[test]
fn containers_are_filtered_by_state_pod_label_and_prefix() {
    let fixture = PodFixture::start();
    let mut first = fixture.config("first", &["sleep", "forever"]);
    first.labels.insert("tier".into(), "front".into());
    let (first, second) = (fixture.run(&first), fixture.create(&fixture.config("second", &["true"])));
    let state = |state: ContainerState| Some(ContainerStateValue { state: state.into() });
    let running = ContainerFilter { state: state(ContainerState::ContainerRunning), ..Default::default() };
    assert_eq!(list(&fixture, running), std::slice::from_ref(&first));
    let created = ContainerFilter { state: state(ContainerState::ContainerCreated), ..Default::default() };
    assert_eq!(list(&fixture, created), std::slice::from_ref(&second));
    let labelled = ContainerFilter {
        label_selector: [("tier".to_owned(), "front".to_owned())].into(),
        pod_sandbox_id: fixture.pod_id.clone(),
        id: first[..13].into(),
        ..Default::default()
    };
    assert_eq!(list(&fixture, labelled), [first]);
    let elsewhere = ContainerFilter { pod_sandbox_id: "0".repeat(64), ..Default::default() };
    assert_eq!(list(&fixture, elsewhere), Vec::<String>::new());
    fixture.node.stop();
}

#[test]
fn an_identical_create_is_a_retry_until_its_id_is_used() {
    let fixture = PodFixture::start();
    let config = fixture.config("one", &["true"]);
    let id = fixture.create(&config);
    // The answer may have been lost: only a call with the ID shows that it was received.
    assert_eq!(fixture.create(&config), id);
    assert_eq!(fixture.node.container(&id).id, id);
    for again in [config, fixture.config("one", &["exit", "1"])] {
        let refused = fixture.node.create_container(create(&fixture.pod_id, &again, &fixture.pod));
        let refused = refused.expect_err("the name is taken");
        assert_eq!(refused.code(), Code::AlreadyExists);
        assert!(refused.message().contains(&id[..13]), "{refused}");
    }
    fixture.node.stop();
}

#[test]
fn the_same_name_three_times_in_one_pod_each_after_the_removal_of_the_last() {
    let fixture = PodFixture::start();
    for _ in 0..3 {
        let id = fixture.run(&fixture.config("one", &["true"]));
        fixture.node.exited(&id);
        fixture.node.remove_container(RemoveContainerRequest { container_id: id }).expect("remove");
    }
    fixture.node.stop();
}

#[test]
fn remove_ends_a_running_container_and_can_be_repeated() {
    let fixture = PodFixture::start();
    let id = fixture.run(&fixture.config("one", &["stubborn"]));
    let pid = fixture.node.container_pid(&id);
    for _ in 0..2 {
        fixture.node.remove_container(RemoveContainerRequest { container_id: id.clone() }).expect("remove");
    }
    assert!(!host::is_alive(pid));
    fixture.node.stop();
}

#[test]
fn a_stopped_pod_has_exited_containers_and_accepts_no_new_ones() {
    let fixture = PodFixture::start();
    let id = fixture.run(&fixture.config("one", &["stubborn"]));
    fixture
        .node
        .stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: fixture.pod_id.clone() })
        .expect("stop");
    let status = fixture.node.container(&id);
    assert_eq!((status.state(), status.exit_code), (ContainerState::ContainerExited, 137));
    let config = fixture.config("two", &["true"]);
    fixture
        .node
        .create_container(create(&fixture.pod_id, &config, &fixture.pod))
        .expect_err("the pod is stopped");
    fixture.node.stop();
}

#[test]
fn the_writable_layer_belongs_to_one_container() {
    let fixture = PodFixture::start();
    fixture.output(&["write", "/tmp/mine", "here"], |_| ());
    let second = fixture.run(&fixture.config("second", &["cat", "/tmp/mine"]));
    assert_ne!(fixture.node.exited(&second).exit_code, 0, "a fresh root has no such file");
    fixture.node.stop();
}
