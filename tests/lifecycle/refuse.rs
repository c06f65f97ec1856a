//! Invalid requests: each causes an error that names the invalid value, and leaves nothing.

use coracle_tests::cri::proto::{
    Capability, ContainerConfig, ContainerState, Int64Value, ListContainersRequest, ListPodSandboxRequest,
    Mount, PodSandboxConfig, RunPodSandboxRequest, StartContainerRequest,
};
use coracle_tests::node::Node;
use coracle_tests::request::{create, host_pod, run, security};
use tonic::Code;

use coracle_tests::pod_fixture::PodFixture;

#[test]
fn pods_without_whole_metadata_are_refused() {
    let node = Node::start();
    let nothing = node.run_pod_sandbox(RunPodSandboxRequest::default()).expect_err("no config");
    assert_eq!(nothing.code(), Code::InvalidArgument, "{nothing}");
    type Strip = fn(&mut PodSandboxConfig);
    let strip: [(&str, Strip); 4] = [
        ("metadata", |pod| pod.metadata = None),
        ("name", |pod| pod.metadata.as_mut().expect("set").name.clear()),
        ("namespace", |pod| pod.metadata.as_mut().expect("set").namespace.clear()),
        ("uid", |pod| pod.metadata.as_mut().expect("set").uid.clear()),
    ];
    for (field, strip) in strip {
        let mut pod = host_pod("bad");
        strip(&mut pod);
        let refused = node.run_pod_sandbox(run(&pod)).expect_err(field);
        assert_eq!(refused.code(), Code::InvalidArgument, "{field}: {refused}");
        assert!(refused.message().contains(field), "{field}: {refused}");
    }
    let mut request = run(&host_pod("handler"));
    request.runtime_handler = "gvisor".into();
    assert!(node.run_pod_sandbox(request).expect_err("unknown").message().contains("gvisor"));
    assert!(node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("list").items.is_empty());
    node.stop();
}

/// Compatible with containerd: it would not be the name that the pod's programs see.
#[test]
fn a_pod_on_the_nodes_network_has_no_host_name_of_its_own() {
    let node = Node::start();
    let mut pod = host_pod("named");
    pod.hostname = "somewhere-else".into();
    let refused = node.run_pod_sandbox(run(&pod)).expect_err("another name");
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().contains("config.hostname: \"somewhere-else\": "), "{refused}");
    let own = std::fs::read_to_string("/proc/sys/kernel/hostname").expect("it has one");
    pod.hostname = own.trim().into();
    node.run_pod(&pod);
    node.stop();
}

/// A profile that cannot be brought into force is not passed over.
#[test]
fn apparmor_profiles_that_are_not_loaded_are_refused() {
    use coracle_tests::cri::proto::{SecurityProfile, security_profile::ProfileType};
    let fixture = PodFixture::start();
    let mut config = fixture.config("confined", &["true"]);
    security(&mut config).apparmor = Some(SecurityProfile {
        profile_type: ProfileType::Localhost.into(),
        localhost_ref: "localhost/not-loaded".into(),
    });
    let refused =
        fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod)).expect_err("absent");
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().contains("security_context.apparmor: \"not-loaded\": "), "{refused}");
    fixture.node.stop();
}

/// If the runtime's default profile is requested by name, a kernel without AppArmor refuses it; without a
/// request the container runs without a profile. Regression: a container that requested it ran unconfined.
#[test]
fn the_default_apparmor_profile_is_refused_where_there_is_none() {
    use coracle_tests::cri::proto::{SecurityProfile, security_profile::ProfileType};
    if std::path::Path::new("/sys/kernel/security/apparmor").exists() {
        return; // tests/inside/apparmor.rs has its cases
    }
    let fixture = PodFixture::start();
    type Ask = fn(&mut ContainerConfig);
    let asks: [Ask; 2] = [
        |config| security(config).apparmor_profile = "runtime/default".into(),
        |config| {
            let profile_type = ProfileType::RuntimeDefault.into();
            security(config).apparmor = Some(SecurityProfile { profile_type, ..Default::default() });
        },
    ];
    for ask in asks {
        let mut config = fixture.config("confined", &["true"]);
        ask(&mut config);
        let refused = fixture
            .node
            .create_container(create(&fixture.pod_id, &config, &fixture.pod))
            .expect_err("absent");
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains("\"runtime/default\": this kernel has no AppArmor"), "{refused}");
    }
    fixture.output(&["true"], |_| ());
    fixture.output(&["true"], |config| security(config).apparmor_profile = "unconfined".into());
    fixture.node.stop();
}

/// Valid SELinux options are ignored if the kernel has no SELinux; invalid labels are refused. With
/// `security.selinux = "required"` no pod is created.
#[test]
fn selinux_options_without_selinux_are_ignored_unless_they_are_no_label() {
    use coracle_tests::cri::proto::SeLinuxOption;
    if std::path::Path::new("/sys/fs/selinux/enforce").exists() {
        return; // tests/inside/selinux.rs has its cases
    }
    let fixture = PodFixture::start();
    let options = |level: &str| Some(SeLinuxOption { level: level.into(), ..Default::default() });
    fixture.output(&["true"], |config| security(config).selinux_options = options("s0:c1,c2"));
    let mut config = fixture.config("quoted", &["true"]);
    security(&mut config).selinux_options = options("s0\",upperdir=/etc");
    let refused =
        fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod)).expect_err("no level");
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().contains("selinux_options.level: "), "{refused}");
    fixture.node.stop();
    let config = "[security]\nselinux = \"required\"\n".to_owned();
    let node = Node::with(coracle_tests::node::Options { config, ..Default::default() });
    let refused = node.run_pod_sandbox(run(&host_pod("labelled"))).expect_err("required");
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains("security.selinux requires labels"), "{refused}");
    node.stop();
}

#[test]
fn a_container_that_cannot_be_made_is_not_listed() {
    let fixture = PodFixture::start();
    type Spoil = fn(&mut ContainerConfig);
    let cases: [(&str, Spoil); 8] = [
        ("metadata", |config| config.metadata = None),
        ("name", |config| config.metadata.as_mut().expect("set").name.clear()),
        ("localhost/absent:1", |config| {
            config.image.as_mut().expect("set").image = "localhost/absent:1".into()
        }),
        ("nobody-here", |config| security(config).run_as_username = "nobody-here".into()),
        ("run_as_group", |config| security(config).run_as_group = Some(Int64Value { value: 5 })),
        ("FLY", |config| {
            let capabilities = Capability { add_capabilities: vec!["FLY".into()], ..Default::default() };
            security(config).capabilities = Some(capabilities);
        }),
        ("/proc/no", |config| {
            config.mounts = vec![Mount {
                container_path: "/m".into(),
                host_path: "/proc/no/such/source".into(),
                ..Default::default()
            }];
        }),
        ("log_path", |config| config.log_path = "../../escape.log".into()),
    ];
    for (what, spoil) in cases {
        let mut config = fixture.config("bad", &["true"]);
        spoil(&mut config);
        let made = fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod));
        let refused = match made {
            Err(refused) => refused,
            // An error that only the kernel can detect may be reported at start.
            Ok(made) => {
                let start = StartContainerRequest { container_id: made.container_id.clone() };
                let refused = fixture.node.start_container(start).expect_err(what);
                let remove =
                    coracle_tests::cri::proto::RemoveContainerRequest { container_id: made.container_id };
                fixture.node.remove_container(remove).expect("remove");
                refused
            }
        };
        assert!(refused.message().contains(what), "{what}: {refused}");
        let listed = fixture.node.list_containers(ListContainersRequest::default()).expect("list").containers;
        assert!(listed.is_empty(), "{what}: {listed:?}");
    }
    fixture.output(&["true"], |_| ());
    fixture.node.stop();
}

#[test]
fn a_missing_pod_is_not_found() {
    let fixture = PodFixture::start();
    let config = fixture.config("one", &["true"]);
    let refused =
        fixture.node.create_container(create(&"d".repeat(64), &config, &fixture.pod)).expect_err("no pod");
    assert_eq!(refused.code(), Code::NotFound, "{refused}");
    fixture.node.stop();
}

#[test]
fn a_missing_command_is_an_error_of_start_container() {
    let fixture = PodFixture::start();
    for (command, cause) in
        [("/nope", "no such file"), ("nope", "not found"), ("/plain", "permission denied")]
    {
        let mut config = fixture.config(&format!("c{}", coracle_tests::request::fresh()), &[]);
        config.command = vec![command.into()];
        let id = fixture.create(&config);
        let start = StartContainerRequest { container_id: id.clone() };
        let refused = fixture.node.start_container(start).expect_err(command);
        assert!(refused.message().to_lowercase().contains(cause), "{command}: {refused}");
        let status = fixture.node.container(&id);
        assert_eq!(status.state(), ContainerState::ContainerExited);
        assert_eq!((status.reason.as_str(), status.exit_code, status.started_at), ("StartError", 128, 0));
        assert!(status.finished_at > 0 && !status.message.is_empty());
    }
    fixture.node.stop();
}

#[test]
fn a_working_directory_that_is_a_file_is_an_error() {
    let fixture = PodFixture::start();
    let mut config = fixture.config("one", &["true"]);
    config.working_dir = "/plain".into();
    let made = fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod));
    let refused = made.and_then(|made| {
        fixture.node.start_container(StartContainerRequest { container_id: made.container_id })
    });
    assert!(refused.expect_err("not a directory").message().contains("/plain"));
    fixture.node.stop();
}
