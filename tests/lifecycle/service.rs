//! The service itself: version, conditions, configuration, unsupported RPCs, socket permissions.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use coracle_tests::cri::proto::{
    CgroupDriver, CheckpointContainerRequest, NetworkConfig, RuntimeConfig, RuntimeConfigRequest,
    StatusRequest, UpdateRuntimeConfigRequest, VersionRequest,
};
use coracle_tests::host;
use coracle_tests::node::Node;
use tonic::Code;

#[test]
fn the_version_the_status_and_the_configuration_are_reported() {
    let node = Node::start();
    let version = node.version(VersionRequest::default()).expect("version");
    assert_eq!((version.version.as_str(), version.runtime_name.as_str()), ("0.1.0", "coracle"));
    assert_eq!(version.runtime_api_version, "v1");
    let status = node.status(StatusRequest { verbose: true }).expect("status");
    let conditions = status.status.expect("a status").conditions;
    let condition =
        |kind: &str| conditions.iter().find(|condition| condition.r#type == kind).expect("present");
    assert!(condition("RuntimeReady").status);
    let network = condition("NetworkReady");
    assert_eq!((network.status, network.reason.as_str()), (false, "NetworkPluginNotReady"));
    assert!(network.message.contains(&node.cni().display().to_string()), "{}", network.message);
    let handlers: Vec<_> = status.runtime_handlers.iter().map(|handler| handler.name.as_str()).collect();
    assert_eq!(handlers, ["", "runc", "crun"], "the default aliases");
    for (key, value) in &status.info {
        let parsed: Result<serde_json::Value, _> = serde_json::from_str(value);
        assert!(parsed.is_ok(), "{key} is not JSON: {value}");
    }
    let config = node.runtime_config(RuntimeConfigRequest::default()).expect("config");
    assert_eq!(config.linux.expect("linux").cgroup_driver(), CgroupDriver::Cgroupfs);
    let network_config = Some(NetworkConfig { pod_cidr: "10.1.2.0/24".into() });
    let update = UpdateRuntimeConfigRequest { runtime_config: Some(RuntimeConfig { network_config }) };
    node.update_runtime_config(update).expect("update");
    node.stop();
}

#[test]
fn unsupported_rpcs_are_unimplemented_and_the_connection_stays_usable() {
    let node = Node::start();
    let refused = node.checkpoint_container(CheckpointContainerRequest::default()).expect_err("not built");
    assert!(
        matches!(refused.code(), Code::Unimplemented | Code::NotFound | Code::InvalidArgument),
        "{refused}"
    );
    node.version(VersionRequest::default()).expect("the connection lives");
    node.stop();
}

#[test]
fn only_owner_and_group_can_connect_to_the_socket() {
    let node = Node::start();
    let about = fs::metadata(node.socket()).expect("a socket");
    assert!(about.file_type().is_socket());
    assert_eq!(about.mode() & 0o777, 0o660);
    let parent = fs::metadata(node.socket().parent().expect("a folder")).expect("a folder");
    assert_eq!(parent.mode() & 0o777 & !0o711, 0, "{:o}", parent.mode());
    node.stop();
}

#[test]
fn sigterm_leaves_pods_running() {
    let mut node = Node::start();
    let image = node.import_probe();
    let pod = coracle_tests::request::host_pod("stays");
    let pod_id = node.run_pod(&pod);
    let config = coracle_tests::request::container("one", &image, &["sleep", "forever"], &pod);
    let id = node.run_container(&pod_id, &config, &pod);
    let pid = node.container_pid(&id);
    node.terminate();
    assert!(host::is_alive(pid));
    node.launch();
    assert_eq!(node.container_pid(&id), pid);
    node.stop();
}

#[test]
fn an_unknown_key_is_named_with_its_line() {
    let folder = std::env::temp_dir().join(format!("coracle-config-{}", std::process::id()));
    fs::write(&folder, "log_level = \"info\"\nsandbox_imag = \"x\"\n").expect("a file");
    let output = std::process::Command::new(coracle_tests::node::binaries().join("coracle"))
        .args(["config", "check", &folder.display().to_string()])
        .output()
        .expect("the program runs");
    fs::remove_file(&folder).expect("our file");
    let text =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success());
    assert!(text.contains("sandbox_imag") && text.contains('2'), "{text}");
}

/// RuntimeClasses of a cluster name handlers; a reload brings new ones.
#[test]
fn handlers_of_runtime_classes_are_names_of_this_runtime() {
    let config = "[runtime_handlers]\naliases = [\"nvidia\"]\n".to_owned();
    let node = Node::with(coracle_tests::node::Options { config, ..Default::default() });
    let pod = coracle_tests::request::host_pod("gpu");
    let mut request = coracle_tests::request::run(&pod);
    request.runtime_handler = "nvidia".into();
    let id = node.run_pod_sandbox(request.clone()).expect("an alias").pod_sandbox_id;
    let listed = node.list_pod_sandbox(Default::default()).expect("list").items;
    assert_eq!(listed[0].runtime_handler, "nvidia");
    let handlers = node.status(StatusRequest { verbose: false }).expect("status").runtime_handlers;
    let nvidia = handlers.iter().find(|handler| handler.name == "nvidia").expect("it is listed");
    let default = handlers.iter().find(|handler| handler.name.is_empty()).expect("it is there");
    assert_eq!(nvidia.features, default.features);
    node.remove_pod(&id);
    request.runtime_handler = "runc".into();
    let refused = node.run_pod_sandbox(request).expect_err("no alias here");
    assert!(refused.message().contains("[runtime_handlers]"), "{refused}");
    node.stop();
}
