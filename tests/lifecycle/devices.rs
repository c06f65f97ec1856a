//! Devices: nodes given by path, and CDI devices given by name.

use std::fs;

use coracle_tests::cri::proto::{CdiDevice, ContainerConfig, Device};
use coracle_tests::node::{Node, Options};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{create, exec, host_pod};
use tonic::Code;

fn names(config: &mut ContainerConfig, names: &[&str]) {
    config.cdi_devices = names.iter().map(|name| CdiDevice { name: (*name).into() }).collect();
}

/// A node with its own CDI directory, which contains one vendor's file.
fn with_vendor() -> PodFixture {
    let folder = std::env::temp_dir().join(format!("coracle-cdi-test-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a directory");
    fs::write(folder.join("library"), "of the vendor\n").expect("a file");
    let spec = format!(
        "cdiVersion: '0.8.0'\nkind: vendor.test/radio\ndevices:\n- name: one\n  containerEdits:\n    env: [RADIO=one, \
         OVERRIDDEN=cdi]\n    deviceNodes: [{{path: /dev/radio, hostPath: /dev/kmsg, permissions: rw}}]\n    mounts: \
         [{{hostPath: {}/library, containerPath: /usr/lib/radio, options: [ro, nosuid]}}]\n    additionalGids: [4711]\n",
        folder.display()
    );
    fs::write(folder.join("radio.yaml"), spec).expect("a file");
    fs::write(folder.join("broken.json"), "{").expect("a file");
    let config = format!("[cdi]\nspec_dirs = [{:?}]\n", folder.display().to_string());
    PodFixture::on(Node::with(Options { config, ..Options::default() }), host_pod("devices"))
}

#[test]
fn a_cdi_device_applies_its_container_edits() {
    let fixture = with_vendor();
    let mut config = fixture.config("one", &["sleep", "forever"]);
    names(&mut config, &["vendor.test/radio=one"]);
    let id = fixture.run(&config);
    let says = |words: &[&str]| {
        let answer = fixture.node.exec_sync(exec(&id, words, 10)).expect("exec");
        String::from_utf8_lossy(&[answer.stdout, answer.stderr].concat()).into_owned()
    };
    assert!(says(&["stat", "/dev/radio"]).starts_with("20"), "a character device");
    assert_eq!(says(&["cat", "/usr/lib/radio"]), "of the vendor\n");
    let seen = says(&["see", "env", "ids"]);
    for line in ["RADIO=one", "OVERRIDDEN=cdi", "4711"] {
        assert!(seen.contains(line), "no {line} in {seen}");
    }
    // The status contains only what was requested.
    assert!(fixture.node.container(&id).mounts.is_empty());
    // The older way, with an annotation.
    let mut config = fixture.config("two", &["stat", "/dev/radio"]);
    config.annotations.insert("cdi.k8s.io/plugin".into(), "vendor.test/radio=one".into());
    let id = fixture.run(&config);
    assert_eq!(fixture.node.exited(&id).exit_code, 0, "{}", fixture.node.output(&id));
    // An unknown device, or one that was removed from the file: the file is read each time.
    let mut config = fixture.config("three", &["true"]);
    names(&mut config, &["vendor.test/radio=two"]);
    let refused =
        fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod)).expect_err("absent");
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().contains("unresolvable CDI devices vendor.test/radio=two"), "{refused}");
    fixture.node.stop();
    let folder = std::env::temp_dir().join(format!("coracle-cdi-test-{}", std::process::id()));
    fs::remove_dir_all(folder).expect("it is ours");
}

#[test]
fn a_device_node_has_the_requested_permissions() {
    let fixture = PodFixture::start();
    let mut config = fixture.config("one", &["sleep", "forever"]);
    config.devices = vec![Device {
        host_path: "/dev/kmsg".into(),
        container_path: "/dev/log-of-the-kernel".into(),
        permissions: "r".into(),
    }];
    let id = fixture.run(&config);
    let about = fixture.node.exec_sync(exec(&id, &["stat", "/dev/log-of-the-kernel"], 10)).expect("exec");
    assert!(String::from_utf8_lossy(&about.stdout).starts_with("20"));
    let written =
        fixture.node.exec_sync(exec(&id, &["write", "/dev/log-of-the-kernel", "x"], 10)).expect("exec");
    assert!(String::from_utf8_lossy(&written.stderr).contains("not permitted"), "{written:?}");
    fixture.node.stop();
}
