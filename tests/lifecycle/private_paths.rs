//! Programs and working directories that only one user may reach: what a process may do between the change of its user and
//! exec is as in runc.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use coracle_tests::cri::proto::{Capability, ContainerConfig, Int64Value, Mount, StartContainerRequest};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{exec, security};
use coracle_tests::squashed_fs::SquashedFs;

const UID: i64 = 1000;

fn as_user(config: &mut ContainerConfig) {
    security(config).run_as_user = Some(Int64Value { value: UID });
}

fn mount(host: &Path, container: &str) -> Mount {
    Mount { host_path: host.display().to_string(), container_path: container.into(), ..Default::default() }
}

/// A directory of the host that only root may enter, with the probe in it.
fn private_folder(fixture: &PodFixture) -> Mount {
    let folder = fixture.node.folder().join("private");
    fs::create_dir(&folder).expect("a folder");
    fs::write(folder.join("app"), fixture.node.probe()).expect("the program");
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("ours");
    mode(&folder.join("app"), 0o755);
    mode(&folder, 0o700);
    mount(&folder, "/private")
}

/// The program is executed with the container's capabilities, so that CAP_DAC_OVERRIDE leads it into the directory; exec
/// then takes them away. Regression: permission denied, although images with their program in /root work elsewhere.
#[test]
fn a_user_may_run_a_program_in_a_directory_that_only_root_may_enter() {
    let fixture = PodFixture::start();
    let private = private_folder(&fixture);
    for (name, no_new_privs) in [("plain", false), ("no-new-privs", true)] {
        let mut config = fixture.config(name, &["sleep", "forever"]);
        config.command = vec!["/private/app".into()];
        config.mounts.push(private.clone());
        as_user(&mut config);
        security(&mut config).no_new_privs = no_new_privs;
        let id = fixture.run(&config);
        let mut request = exec(&id, &["see", "caps"], 10);
        request.cmd[0] = "/private/app".into();
        let seen = fixture.node.exec_sync(request).expect("exec");
        let seen = String::from_utf8_lossy(&seen.stdout).into_owned();
        for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
            assert!(seen.contains(&format!("caps {set} 0000000000000000")), "{name}: {seen}");
        }
        assert!(seen.contains("caps CapBnd 00000000a80425fb"), "{name}: {seen}");
    }
    let mut config = fixture.config("dropped", &["true"]);
    config.command = vec!["/private/app".into()];
    config.mounts.push(private);
    as_user(&mut config);
    security(&mut config).capabilities =
        Some(Capability { drop_capabilities: vec!["ALL".into()], ..Default::default() });
    let id = fixture.create(&config);
    let refused = fixture.node.start_container(StartContainerRequest { container_id: id });
    let refused = refused.expect_err("it has no capability to enter it");
    assert!(refused.message().contains("permission denied"), "{refused}");
    fixture.node.stop();
}

/// A working directory that root may not enter is entered as the container's user (runc: finalizeNamespace).
#[test]
fn a_user_may_work_in_a_directory_that_root_may_not_enter() {
    let fixture = PodFixture::start();
    let squashed = SquashedFs::mount(&fixture.node.folder().join("squashed"));
    let volume = mount(&fixture.node.folder().join("squashed"), "/squashed");
    let mut config = fixture.config("user", &["sleep", "forever"]);
    config.mounts.push(volume.clone());
    config.working_dir = "/squashed".into();
    as_user(&mut config);
    let id = fixture.run(&config);
    let pid = fixture.node.container_pid(&id);
    let directory = fs::read_link(format!("/proc/{pid}/cwd")).expect("it lives");
    assert_eq!(directory, Path::new("/squashed"));
    let seen = fixture.node.exec_sync(exec(&id, &["true"], 10)).expect("an exec enters it, too");
    assert_eq!(seen.exit_code, 0, "{seen:?}");

    let mut config = fixture.config("root", &["true"]);
    config.mounts.push(volume);
    config.working_dir = "/squashed".into();
    let id = fixture.create(&config);
    let refused = fixture.node.start_container(StartContainerRequest { container_id: id });
    let refused = refused.expect_err("root may not enter it");
    let text = refused.message();
    assert!(text.contains("/squashed") && text.contains("permission denied"), "{text}");
    fixture.node.remove_pod(&fixture.pod_id);
    drop(squashed);
    fixture.node.stop();
}
