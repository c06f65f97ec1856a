//! OCI hooks that plugins inject: run at their points, with the state on stdin, in the right namespaces.

use std::fs;
use std::path::PathBuf;

use coracle_tests::cri::proto::{
    ContainerState, KeyValue, StartContainerRequest, StopContainerRequest, StopPodSandboxRequest,
};
use coracle_tests::host::wait_until;
use coracle_tests::image::Image;
use coracle_tests::node::Node;
use coracle_tests::nri::{Answer, EVENTS, Plugin, api};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{bridge_pod, host_pod, image_spec};
use serde_json::json;

use super::{answers, refused};

/// A hook that appends what it sees to a file of the host.
fn noting(folder: &std::path::Path, point: &str) -> api::Hook {
    let script = format!(
        "read -r state || true; {{ echo \"{point} $MARK $(readlink /proc/self/ns/net)\"; echo \"$state\"; }} >> {}/notes",
        folder.display()
    );
    hook(&script)
}

fn hook(script: &str) -> api::Hook {
    api::Hook {
        path: "/bin/sh".into(),
        args: ["sh", "-c", script].map(str::to_owned).into(),
        env: vec!["MARK=set".into(), "PATH=/usr/bin:/bin".into()],
        timeout: None,
    }
}

fn adjust(hooks: api::Hooks) -> Answer {
    Answer::adjust(api::ContainerAdjustment { hooks: Some(hooks), ..Default::default() })
}

/// The notes as pairs of a heading and a state.
fn notes(folder: &std::path::Path) -> Vec<(String, serde_json::Value)> {
    let text = fs::read_to_string(folder.join("notes")).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    let pair = |pair: &[&str]| (pair[0].to_owned(), serde_json::from_str(pair[1]).expect("a state is JSON"));
    lines.chunks(2).map(pair).collect()
}

#[test]
fn hooks_run_at_their_points_in_their_namespaces() {
    let node = Node::with_bridge();
    let folder: PathBuf = node.folder().to_owned();
    let at = folder.clone();
    let handler = answers("CreateContainer", move |_| {
        adjust(api::Hooks {
            prestart: vec![noting(&at, "prestart")],
            create_runtime: vec![noting(&at, "createRuntime")],
            create_container: vec![noting(&at, "createContainer")],
            start_container: Vec::new(),
            poststart: vec![noting(&at, "poststart"), hook("exit 3")],
            poststop: vec![noting(&at, "poststop")],
        })
    });
    let fixture = PodFixture::on(node, bridge_pod("boat"));
    let _plugin = Plugin::join(&fixture.node, "10", "hooks", EVENTS, handler);
    let mut config = fixture.config("c1", &["sleep", "forever"]);
    config.annotations = [("key".to_owned(), "value".to_owned())].into();
    let id = fixture.run(&config);
    let pid = fixture.node.container_pid(&id);
    let inside = fs::read_link(format!("/proc/{pid}/ns/net")).expect("it lives").display().to_string();
    let outside = fs::read_link("/proc/self/ns/net").expect("ours").display().to_string();
    let bundle = {
        let notes = notes(&folder);
        let bundle = notes[0].1["bundle"].as_str().expect("a bundle").to_owned();
        let config: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(format!("{bundle}/config.json")).expect("a file"))
                .expect("JSON");
        assert_eq!(config["process"]["args"][0], "/probe");
        bundle
    };
    fixture.node.remove_pod(&fixture.pod_id);
    let notes = notes(&folder);
    let expected = [
        ("prestart", &outside, "creating"),
        ("createRuntime", &outside, "creating"),
        ("createContainer", &inside, "creating"),
        ("poststart", &outside, "running"),
        ("poststop", &outside, "stopped"),
    ];
    assert_eq!(notes.len(), expected.len(), "{notes:?}");
    for ((heading, state), (point, namespace, status)) in notes.iter().zip(expected) {
        assert_eq!(*heading, format!("{point} set {namespace}"));
        assert_eq!(
            (state["status"].as_str(), state["id"].as_str()),
            (Some(status), Some(id.as_str())),
            "{point}"
        );
        assert_eq!(state["annotations"]["key"], "value");
        let told = state["pid"].as_i64();
        assert_eq!(told.is_some(), point != "poststop", "{point}");
        assert!(told.is_none_or(|told| told == i64::from(pid)), "{point}: {told:?}");
    }
    assert!(!fs::exists(&bundle).expect("readable"), "the bundle goes with the container");
    assert!(fixture.node.log().contains("exit status: 3"), "what fails after the start is logged");
    fixture.node.stop();
}

/// Programs of the node must not load what an image or a container names: the dynamic linker and shells do so by their environment.
#[test]
fn hooks_of_the_node_get_nothing_of_an_images_environment() {
    const NAMES: [&str; 5] = ["LD_PRELOAD", "LD_AUDIT", "LD_LIBRARY_PATH", "BASH_ENV", "ENV"];
    let fixture = PodFixture::on(Node::with_bridge(), bridge_pod("boat"));
    let folder = fixture.node.folder().to_owned();
    let at = folder.clone();
    let handler = answers("CreateContainer", move |_| {
        let noting = |point: &str| {
            let script = format!("/usr/bin/tr '\\0' '\\n' < /proc/self/environ > {}/{point}", at.display());
            vec![api::Hook { env: Vec::new(), ..hook(&script) }]
        };
        adjust(api::Hooks {
            prestart: noting("prestart"),
            create_runtime: noting("createRuntime"),
            create_container: noting("createContainer"),
            start_container: Vec::new(),
            poststart: noting("poststart"),
            poststop: noting("poststop"),
        })
    });
    let _plugin = Plugin::join(&fixture.node, "10", "hooks", EVENTS, handler);
    let environment = NAMES.map(|name| format!("{name}=/planted-of-image"));
    let image = Image::probe(&fixture.node.probe(), "planted").with("Env", json!(environment));
    fixture.node.try_import(&image.oci_archive("localhost/planted:1")).expect("an import");
    let mut config = fixture.config("c1", &["sleep", "forever"]);
    config.image = Some(image_spec(&image.id()));
    config.envs = vec![KeyValue { key: "LD_DEBUG_OUTPUT".into(), value: b"/planted-of-container".to_vec() }];
    let id = fixture.run(&config);
    let pid = fixture.node.container_pid(&id);
    let own = fs::read_to_string(format!("/proc/{pid}/environ")).expect("it lives");
    for name in NAMES {
        assert!(own.contains(&format!("{name}=/planted-of-image")), "the container has it: {own:?}");
    }
    fixture.node.remove_pod(&fixture.pod_id);
    for point in ["prestart", "createRuntime", "createContainer", "poststart", "poststop"] {
        let seen = fs::read_to_string(folder.join(point)).expect(point);
        assert!(!seen.contains("planted"), "{point}: {seen}");
    }
    fixture.node.stop();
}

#[test]
fn a_start_container_hook_is_a_program_of_the_container() {
    let fixture = PodFixture::on(Node::start(), host_pod("fixture"));
    let handler = answers("CreateContainer", |_| {
        let write = api::Hook {
            path: "/probe".into(),
            args: ["probe", "write", "/from-hook", "it was here"].map(str::to_owned).into(),
            ..Default::default()
        };
        adjust(api::Hooks { start_container: vec![write], ..Default::default() })
    });
    let _plugin = Plugin::join(&fixture.node, "10", "hooks", EVENTS, handler);
    let id = fixture.run(&fixture.config("c1", &["cat", "/from-hook"]));
    assert_eq!(fixture.node.exited(&id).exit_code, 0);
    assert_eq!(fixture.node.output(&id).trim(), "it was here");
    fixture.node.stop();
}

#[test]
fn a_hook_that_fails_or_hangs_before_the_program_fails_the_start() {
    let fixture = PodFixture::on(Node::start(), host_pod("fixture"));
    let handler = answers("CreateContainer", |heard| {
        let hook = match heard.container().name.as_str() {
            "fails" => hook("echo this is why >&2; exit 7"),
            "absent" => api::Hook { path: "/nowhere/hook".into(), ..Default::default() },
            _ => api::Hook { timeout: Some(api::OptionalInt { value: 1 }), ..hook("sleep 100 & wait") },
        };
        adjust(api::Hooks { create_runtime: vec![hook], ..Default::default() })
    });
    let plugin = Plugin::join(&fixture.node, "10", "hooks", EVENTS, handler);
    for (name, expected) in [
        ("fails", "hook /bin/sh: exit status: 7"),
        ("absent", "hook /nowhere/hook: "),
        ("hangs", "did not end within 1000 ms"),
    ] {
        let id = fixture.create(&fixture.config(name, &["print", "it", "ran"]));
        let request = StartContainerRequest { container_id: id.clone() };
        let text = refused(fixture.node.start_container(request));
        assert!(text.contains(expected), "{name}: {text}");
        assert_eq!(fixture.node.container(&id).state(), ContainerState::ContainerExited);
        assert_eq!(fixture.node.output(&id), "", "its program did not run");
    }
    assert!(fixture.node.log().contains("this is why"), "what a hook says is in the log");
    assert_eq!(plugin.heard("StartContainer").len(), 0, "plugins are asked after the hooks");
    fixture.node.stop();
}

/// A start that takes three seconds: its container, once the hook that takes them runs.
fn slow_start<'s>(fixture: &PodFixture, starts: &'s std::thread::Scope<'s, '_>) -> String {
    let id = fixture.create(&fixture.config("slow", &["sleep", "forever"]));
    let request = StartContainerRequest { container_id: id.clone() };
    let client = fixture.node.another();
    starts.spawn(move || client.start_container(request));
    let begun = fixture.node.folder().join("begun");
    wait_until("the hook runs", || begun.exists());
    id
}

/// A node with a plugin whose hook makes each start take three seconds.
fn slow_stage() -> (PodFixture, Plugin) {
    let fixture = PodFixture::on(Node::start(), host_pod("fixture"));
    let script = format!("touch {}/begun; sleep 3", fixture.node.folder().display());
    let handler = answers("CreateContainer", move |_| {
        adjust(api::Hooks { create_runtime: vec![hook(&script)], ..Default::default() })
    });
    let plugin = Plugin::join(&fixture.node, "10", "hooks", EVENTS, handler);
    (fixture, plugin)
}

/// Regression: StopContainer did not wait for the start: it answered at once and the container ran afterwards.
#[test]
fn a_stop_during_a_start_ends_the_container() {
    let (fixture, _plugin) = slow_stage();
    std::thread::scope(|starts| {
        let id = slow_start(&fixture, starts);
        let stop = StopContainerRequest { container_id: id.clone(), timeout: 0 };
        fixture.node.stop_container(stop).expect("stop");
        assert_eq!(fixture.node.container(&id).state(), ContainerState::ContainerExited);
    });
    let ids: Vec<String> = fixture
        .node
        .list_containers(Default::default())
        .expect("list")
        .containers
        .into_iter()
        .map(|container| container.id)
        .collect();
    for id in ids {
        assert_eq!(
            fixture.node.container(&id).state(),
            ContainerState::ContainerExited,
            "after the start has ended"
        );
    }
    fixture.node.stop();
}

/// Regression: StopPodSandbox did not wait for the start: the container could be listed as running in a pod whose monitor was gone, and
/// RemovePodSandbox failed for good: "does not end after SIGKILL".
#[test]
fn a_pod_that_is_stopped_during_a_start_can_be_removed() {
    let (fixture, _plugin) = slow_stage();
    std::thread::scope(|starts| {
        let id = slow_start(&fixture, starts);
        let request = StopPodSandboxRequest { pod_sandbox_id: fixture.pod_id.clone() };
        fixture.node.stop_pod_sandbox(request).expect("stop");
        assert_eq!(fixture.node.container(&id).state(), ContainerState::ContainerExited);
        fixture.node.remove_pod(&fixture.pod_id);
    });
    fixture.node.stop();
}
