//! Containers: NRI-C1 to NRI-C14, C22 to C34. What adjustments do is in `adjust`.

use std::fs;
use std::time::Duration;

use coracle_tests::cri::proto::{
    ContainerState, ContainerStatusRequest, ListContainersRequest, RemoveContainerRequest,
    StartContainerRequest, StopContainerRequest, StopPodSandboxRequest,
};
use coracle_tests::host::{self, wait_until};
use coracle_tests::node::Node;
use coracle_tests::nri::{Answer, EVENTS, Plugin, api, usual};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::{create, host_pod};
use tonic::Code;

use super::updates::{MEMORY, knob, memory, update};
use super::{PATIENCE, annotations, answers, meanwhile, node, quiet, refused, standing};

pub(super) fn fixture() -> PodFixture {
    PodFixture::on(Node::start(), host_pod("fixture"))
}

pub(super) fn stop(fixture: &PodFixture, id: &str) {
    let request = StopContainerRequest { container_id: id.into(), timeout: 0 };
    fixture.node.stop_container(request).unwrap_or_else(|error| panic!("stop: {error}"));
}

fn remove(fixture: &PodFixture, id: &str) {
    let request = RemoveContainerRequest { container_id: id.into() };
    fixture.node.remove_container(request).unwrap_or_else(|error| panic!("remove: {error}"));
}

/// Rules of docs/specs/nri.md: NRI-C3.
#[test]
fn create_event_comes_before_the_container_is_visible() {
    let fixture = fixture();
    let (handler, stands, go_on) = standing("CreateContainer");
    let plugin = Plugin::join(&fixture.node, "10", "gate", EVENTS, handler);
    let request = create(&fixture.pod_id, &fixture.config("c1", &["true"]), &fixture.pod);
    let creating = meanwhile(&fixture.node, move |cri| cri.create_container(request));
    let told = stands.recv_timeout(PATIENCE).expect("the hook is called").container();
    assert_eq!(told.state(), api::ContainerState::ContainerUnknown);
    assert_eq!(
        fixture.node.list_containers(ListContainersRequest::default()).expect("a list").containers,
        []
    );
    let ask = ContainerStatusRequest { container_id: told.id.clone(), verbose: false };
    assert_eq!(fixture.node.container_status(ask).expect_err("unseen").code(), Code::NotFound);
    go_on.send(Answer::empty()).expect("it stands");
    assert_eq!(creating.join().expect("no panic").expect("it is made").container_id, told.id);
    drop(plugin);
    fixture.node.stop();
}

/// Rules of docs/specs/nri.md: NRI-C4, NRI-C5.
#[test]
fn a_refused_container_leaves_nothing_and_can_be_created_again() {
    let fixture = fixture();
    let first = Plugin::listener(&fixture.node, "10", "first");
    let mut refusals = 1;
    let handler = answers("CreateContainer", move |_| {
        refusals -= 1;
        if refusals == 0 { Answer::error("not this one") } else { Answer::empty() }
    });
    let second = Plugin::join(&fixture.node, "20", "second", EVENTS, handler);
    let third = Plugin::listener(&fixture.node, "30", "third");
    let config = fixture.config("c1", &["true"]);
    let text = refused(fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod)));
    assert!(text.contains("NRI CreateContainer failed: plugin \"20-second\": not this one"), "{text}");
    let undone = ["CreateContainer c1", "StopContainer c1", "RemoveContainer c1"];
    assert_eq!(first.titles(), undone);
    assert_eq!(second.titles(), undone);
    assert_eq!(third.titles(), Vec::<String>::new());
    let stopped = first.last("StopContainer").container();
    assert_eq!((stopped.state(), stopped.pid), (api::ContainerState::ContainerStopped, 0));
    assert_eq!(
        fixture.node.list_containers(ListContainersRequest::default()).expect("a list").containers,
        []
    );
    fixture.create(&config);
    assert_eq!(third.titles(), ["CreateContainer c1", "PostCreateContainer c1"]);
    fixture.node.stop();
}

/// Rules of docs/specs/nri.md: NRI-C6.
#[test]
fn events_after_creation_show_the_adjusted_container() {
    let fixture = fixture();
    let handler = answers("CreateContainer", |_| {
        Answer::adjust(api::ContainerAdjustment {
            env: vec![api::KeyValue { key: "ADDED".into(), value: "1".into() }],
            mounts: vec![api::Mount {
                destination: "/added".into(),
                r#type: "tmpfs".into(),
                source: "tmpfs".into(),
                options: Vec::new(),
            }],
            linux: Some(api::LinuxContainerAdjustment {
                resources: memory("", 64 << 20, false).linux.and_then(|linux| linux.resources),
                ..Default::default()
            }),
            ..annotations(&[("added", "yes"), ("-asked", "")])
        })
    });
    let plugin = Plugin::join(&fixture.node, "10", "adjust", EVENTS, handler);
    let mut config = fixture.config("c1", &["true"]);
    config.annotations = [("asked".to_owned(), "yes".to_owned())].into();
    let id = fixture.create(&config);
    let check = |told: api::Container| {
        assert_eq!(told.annotations.get("added").map(String::as_str), Some("yes"));
        assert!(!told.annotations.contains_key("asked"));
        assert_eq!(told.annotations["io.kubernetes.cri.container-name"], "c1");
        assert!(told.env.contains(&"ADDED=1".to_owned()));
        assert!(told.mounts.iter().any(|mount| mount.destination == "/added"));
        let memory = told.linux.and_then(|linux| linux.resources).and_then(|one| one.memory).expect("memory");
        assert_eq!(memory.limit.map(|limit| limit.value), Some(64 << 20));
    };
    check(plugin.last("PostCreateContainer").container());
    assert_eq!(plugin.last("PostCreateContainer").container().state(), api::ContainerState::ContainerCreated);
    // The CRI shows the annotations of its own request.
    assert_eq!(fixture.node.container(&id).annotations, config.annotations);
    let mut node = fixture.node;
    node.restart();
    let after = Plugin::listener(&node, "10", "adjust");
    let all: api::SynchronizeRequest = after.last("Synchronize").request();
    check(all.containers[0].clone());
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-C7.
#[test]
fn the_process_waits_during_the_start_event_which_can_be_refused() {
    let fixture = fixture();
    let (handler, stands, go_on) = standing("StartContainer");
    let plugin = Plugin::join(&fixture.node, "10", "gate", EVENTS, handler);
    let id = fixture.create(&fixture.config("c1", &["print", "it", "ran"]));
    let starting = {
        let container_id = id.clone();
        meanwhile(&fixture.node, move |cri| cri.start_container(StartContainerRequest { container_id }))
    };
    let told = stands.recv_timeout(PATIENCE).expect("the hook is called").container();
    assert!(told.pid > 0);
    let command = fs::read_to_string(format!("/proc/{}/comm", told.pid)).expect("it lives");
    assert_eq!(command.trim(), "coracle-pod", "it has not become its program");
    let groups = fs::read_to_string(format!("/proc/{}/cgroup", told.pid)).expect("it lives");
    assert!(groups.contains(&id), "it is in its cgroup: {groups}");
    go_on.send(Answer::error("not today")).expect("it stands");
    let text = refused(starting.join().expect("no panic"));
    assert!(text.contains("NRI StartContainer failed: plugin \"10-gate\": not today"), "{text}");
    let status = fixture.node.container(&id);
    assert_eq!(status.state(), ContainerState::ContainerExited);
    assert_eq!(fixture.node.output(&id), "", "its program did not run");
    plugin.wait_for("StopContainer");
    let expected = ["CreateContainer c1", "PostCreateContainer c1", "StartContainer c1", "StopContainer c1"];
    assert_eq!(plugin.titles(), expected);
    assert!(!host::is_alive(told.pid as i32));
    fixture.node.stop();
}

#[test]
fn a_process_that_waits_for_a_hook_ends_with_its_daemon() {
    let fixture = fixture();
    let (handler, stands, _go_on) = standing("StartContainer");
    let plugin = Plugin::join(&fixture.node, "10", "gate", EVENTS, handler);
    let id = fixture.create(&fixture.config("c1", &["print", "it", "ran"]));
    let starting = {
        let container_id = id.clone();
        meanwhile(&fixture.node, move |cri| cri.start_container(StartContainerRequest { container_id }))
    };
    let pid = stands.recv_timeout(PATIENCE).expect("the hook is called").container().pid;
    let mut node = fixture.node;
    node.restart();
    starting.join().expect("no panic").expect_err("the daemon is gone");
    wait_until("the process is gone", || !host::is_alive(pid as i32));
    assert_eq!(node.container(&id).state(), ContainerState::ContainerExited);
    drop(plugin);
    node.stop();
}

/// Rules of docs/specs/nri.md: NRI-C8, NRI-C11.
#[test]
fn stop_container_event_after_an_exit_has_its_code() {
    let fixture = fixture();
    let plugin = Plugin::listener(&fixture.node, "10", "ear");
    let id = fixture.run(&fixture.config("c1", &["exit", "7"]));
    let told = plugin.wait_for("StopContainer").container();
    assert_eq!(told.state(), api::ContainerState::ContainerStopped);
    assert_eq!((told.exit_code, told.status_reason.as_str()), (7, "Error"));
    let status = fixture.node.container(&id);
    assert_eq!((told.started_at, told.finished_at), (status.started_at, status.finished_at));
    assert!(told.finished_at > 0 && told.pid > 0);
    fixture.node.stop();
}

/// Rules of docs/specs/nri.md: NRI-C9.
#[test]
fn stop_container_event_is_sent_once_with_concurrent_causes() {
    let fixture = fixture();
    let plugin = Plugin::listener(&fixture.node, "10", "ear");
    let id = fixture.run(&fixture.config("c1", &["trap", "0"]));
    let callers: Vec<_> = (0..4)
        .map(|number| {
            let (container_id, pod_sandbox_id) = (id.clone(), fixture.pod_id.clone());
            meanwhile(&fixture.node, move |cri| match number {
                0 => drop(cri.stop_container(StopContainerRequest { container_id, timeout: 5 })),
                1 => drop(cri.stop_container(StopContainerRequest { container_id, timeout: 0 })),
                2 => drop(cri.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id })),
                _ => drop(cri.remove_container(RemoveContainerRequest { container_id })),
            })
        })
        .collect();
    for caller in callers {
        caller.join().expect("no panic");
    }
    assert_eq!(plugin.heard("StopContainer").len(), 1);
    assert_eq!(plugin.heard("RemoveContainer").len(), 1);
    let titles = plugin.titles();
    let at = |title: &str| titles.iter().position(|one| one == title).expect("the event was sent");
    assert!(at("StopContainer c1") < at("RemoveContainer c1"));
    assert!(at("StopContainer c1") < at("StopPodSandbox fixture"));
    fixture.node.stop();
}

/// Rules of docs/specs/nri.md: NRI-C10.
#[test]
fn a_container_that_never_ran_gets_stop_and_remove_events() {
    let fixture = fixture();
    let plugin = Plugin::listener(&fixture.node, "10", "ear");
    let id = fixture.create(&fixture.config("c1", &["true"]));
    remove(&fixture, &id);
    let expected = ["CreateContainer c1", "PostCreateContainer c1", "StopContainer c1", "RemoveContainer c1"];
    assert_eq!(plugin.titles(), expected);
    fixture.node.stop();
}

fn validator(reject: &'static str) -> coracle_tests::nri::Handler {
    Box::new(move |_, heard| match heard.method.as_str() {
        "ValidateContainerAdjustment" => Answer::message(&api::ValidateContainerAdjustmentResponse {
            reject: reject != "accept",
            reason: if matches!(reject, "accept" | "reject") { String::new() } else { reject.to_owned() },
        }),
        _ => usual(heard, EVENTS | 0x2000),
    })
}

/// Rules of docs/specs/nri.md: NRI-C28, NRI-C29.
#[test]
fn validators_get_the_merged_adjustment_and_one_rejection_is_enough() {
    let fixture = fixture();
    let victim = fixture.run(&fixture.config("victim", &["sleep", "forever"]));
    let before = knob(&fixture, &victim, MEMORY);
    let id = victim.clone();
    let handler = answers("CreateContainer", move |_| {
        Answer::message(&api::CreateContainerResponse {
            adjust: Some(annotations(&[("k", "v")])),
            update: vec![memory(&id, 64 << 20, false)],
            evict: Vec::new(),
        })
    });
    let _adjuster = Plugin::join(&fixture.node, "10", "adjust", EVENTS, handler);
    let events = EVENTS | 0x2000;
    let yes = Plugin::join(&fixture.node, "20", "yes", events, validator("accept"));
    let attempt = |name: &str| {
        fixture.node.create_container(create(&fixture.pod_id, &fixture.config(name, &["true"]), &fixture.pod))
    };
    attempt("fine").unwrap_or_else(|error| panic!("create: {error}"));
    let asked: api::ValidateContainerAdjustmentRequest = yes.last("ValidateContainerAdjustment").request();
    assert!(!asked.container.expect("it").annotations.contains_key("k"), "it is the untouched container");
    assert_eq!(asked.adjust.expect("it").annotations["k"], "v");
    let owners = asked.owners.expect("owners").owners;
    assert!(
        owners.values().any(|one| one.compound.get(&1).is_some_and(|k| k.owners["k"] == "10-adjust")),
        "{owners:?}"
    );
    assert_eq!(owners[&victim].simple[&8], "10-adjust");
    let names: Vec<_> = asked.plugins.iter().map(|one| format!("{}-{}", one.index, one.name)).collect();
    assert_eq!(names, ["10-adjust", "20-yes"]);
    let set = memory(&victim, 256 << 20, false);
    assert_eq!(yes.caller().update(vec![set]).expect("an answer").0, 0);
    let _no = Plugin::join(&fixture.node, "05", "no", events, validator("too loud"));
    let _why = Plugin::join(&fixture.node, "30", "why", events, validator("reject"));
    let text = refused(attempt("loud"));
    let expected = "validator \"05-no\" rejected container adjustment, reason: too loud; \
                    validator \"30-why\" rejected container adjustment, reason: unknown rejection reason";
    assert!(text.contains(expected), "{text}");
    assert_ne!(knob(&fixture, &victim, MEMORY), before);
    assert_eq!(knob(&fixture, &victim, MEMORY), (256 << 20).to_string(), "nothing of it is applied");
    fixture.node.stop();
}

/// Rules of docs/specs/nri.md: NRI-C30.
#[test]
fn a_validator_that_times_out_or_disconnects_rejects() {
    let fixture = PodFixture::on(node("plugin_request_timeout = \"300ms\""), host_pod("fixture"));
    for (name, answer) in [("mute", (|| Answer::Silence) as fn() -> Answer), ("crash", || Answer::HangUp)] {
        let handler: coracle_tests::nri::Handler = Box::new(move |_, heard| match heard.method.as_str() {
            "ValidateContainerAdjustment" => answer(),
            _ => usual(heard, EVENTS | 0x2000),
        });
        let plugin = Plugin::join(&fixture.node, "10", name, EVENTS | 0x2000, handler);
        let text = refused(fixture.node.create_container(create(
            &fixture.pod_id,
            &fixture.config(name, &["true"]),
            &fixture.pod,
        )));
        assert!(text.contains(&format!("validator \"10-{name}\" rejected")), "{text}");
        wait_until("it is disconnected", || plugin.is_over());
    }
    fixture.create(&fixture.config("after", &["true"]));
    fixture.node.stop();
}

/// Rules of docs/specs/nri.md: NRI-C31.
#[test]
fn the_built_in_validator_rejects_what_is_configured() {
    let settings = "[nri.default_validator]\nenable = true\nreject_oci_hook_adjustment = true\n\
                    reject_namespace_adjustment = true\nreject_sysctl_adjustment = true\n\
                    reject_unconfined_seccomp_adjustment = true\nrequired_plugins = [\"10-adjust\", \"late\"]\n\
                    tolerate_missing_plugins_annotation = \"tolerate\"";
    let mut pod = host_pod("fixture");
    pod.annotations = [
        ("tolerate/container.tolerant".to_owned(), "true".to_owned()),
        ("required-plugins.noderesource.dev/container.demanding".to_owned(), "[\"absent\"]".to_owned()),
        ("required-plugins.noderesource.dev/container.confused".to_owned(), "{".to_owned()),
    ]
    .into();
    let fixture = PodFixture::on(node(settings), pod);
    let attempt = |name: &str| {
        let config = fixture.config(name, &["true"]);
        let made = fixture.node.create_container(create(&fixture.pod_id, &config, &fixture.pod));
        made.map(|made| made.container_id).map_err(|error| error.message().to_owned())
    };
    let text = attempt("plain").expect_err("plugins are missing");
    assert!(text.contains("validation error: missing required plugins: 10-adjust, late"), "{text}");
    attempt("tolerant").unwrap_or_else(|error| panic!("tolerated: {error}"));
    let handler = answers("CreateContainer", |heard| {
        let in_linux = |linux| api::ContainerAdjustment { linux: Some(linux), ..Default::default() };
        match heard.container().name.as_str() {
            "hooked" => Answer::adjust(api::ContainerAdjustment {
                hooks: Some(api::Hooks {
                    poststart: vec![api::Hook { path: "/bin/true".into(), ..Default::default() }],
                    ..Default::default()
                }),
                ..Default::default()
            }),
            "moved" => Answer::adjust(in_linux(api::LinuxContainerAdjustment {
                namespaces: vec![api::LinuxNamespace { r#type: "ipc".into(), path: String::new() }],
                ..Default::default()
            })),
            // Removing one is a change, too.
            "tuned" => Answer::adjust(in_linux(api::LinuxContainerAdjustment {
                sysctl: [("-kernel.shm_rmid_forced".to_owned(), String::new())].into(),
                ..Default::default()
            })),
            "filtered" => Answer::adjust(in_linux(api::LinuxContainerAdjustment {
                seccomp_policy: Some(api::LinuxSeccomp {
                    default_action: "SCMP_ACT_ALLOW".into(),
                    ..Default::default()
                }),
                ..Default::default()
            })),
            _ => Answer::empty(),
        }
    });
    let _adjust = Plugin::join(&fixture.node, "10", "adjust", EVENTS, handler);
    let _late = Plugin::join(&fixture.node, "77", "late", EVENTS, quiet());
    attempt("plain").unwrap_or_else(|error| panic!("all are there: {error}"));
    for (name, expected) in [
        ("hooked", "attempted restricted OCI hook adjustment"),
        ("moved", "attempted restricted namespace adjustment"),
        ("tuned", "attempted restricted sysctl adjustment"),
        ("filtered", "attempted restricted unconfined seccomp policy adjustment"),
        ("demanding", "missing required plugins: absent"),
        ("confused", "is not a list of names"),
    ] {
        let text = attempt(name).expect_err("it is restricted");
        let head =
            "validator \"00-default-validator\" rejected container adjustment, reason: validation error: ";
        assert!(text.contains(head) && text.contains(expected), "{name}: {text}");
    }
    fixture.node.stop();
}

/// Rules of docs/specs/nri.md: NRI-C33.
#[test]
fn a_plugin_gets_only_events_that_it_subscribed_to() {
    let fixture = fixture();
    // StopPodSandbox and StartContainer.
    let some = Plugin::join(&fixture.node, "10", "some", 0x0002 | 0x0020, quiet());
    let all = Plugin::join(&fixture.node, "20", "all", 0, quiet());
    let id = fixture.run(&fixture.config("c1", &["sleep", "forever"]));
    stop(&fixture, &id);
    fixture.node.remove_pod(&fixture.pod_id);
    assert_eq!(some.titles(), ["StartContainer c1", "StopPodSandbox fixture"]);
    assert_eq!(all.titles().len(), 9, "{:?}", all.titles());
    fixture.node.stop();
}

/// Rules of docs/specs/nri.md: NRI-C34.
#[test]
fn plugins_before_v0_12_get_state_changes() {
    let fixture = PodFixture::on(node("plugin_request_timeout = \"2s\""), host_pod("fixture"));
    let handler: coracle_tests::nri::Handler = Box::new(|_, heard| match heard.method.as_str() {
        "Configure" | "Synchronize" => usual(heard, EVENTS),
        "StateChange" | "CreateContainer" | "UpdateContainer" | "StopContainer" => Answer::empty(),
        _ => Answer::Refuse(12, "unimplemented"),
    });
    let plugin = Plugin::join(&fixture.node, "10", "old", EVENTS, handler);
    let id = fixture.run(&fixture.config("c1", &["sleep", "forever"]));
    update(&fixture, &id, 64 << 20).unwrap_or_else(|error| panic!("update: {error}"));
    stop(&fixture, &id);
    fixture.node.remove_pod(&fixture.pod_id);
    let heard: Vec<_> = plugin
        .all()
        .into_iter()
        .filter(|heard| !matches!(heard.method.as_str(), "Configure" | "Synchronize"))
        .map(|heard| match heard.method.as_str() {
            "StateChange" => format!("StateChange {:?}", heard.request::<api::StateChangeEvent>().event()),
            method => method.to_owned(),
        })
        .collect();
    let expected = [
        "CreateContainer",
        "PostCreateContainer", // the first one that it does not know
        "StateChange PostCreateContainer",
        "StateChange StartContainer",
        "StateChange PostStartContainer",
        "UpdateContainer",
        "StateChange PostUpdateContainer",
        "StopContainer",
        "StateChange StopPodSandbox",
        "StateChange RemoveContainer",
        "StateChange RemovePodSandbox",
    ];
    assert_eq!(heard, expected);
    let told = plugin.last("StateChange").pod();
    assert_eq!(told.name, "fixture");
    wait_until("it is logged once", || fixture.node.log().matches("built before v0.12").count() == 1);
    fixture.node.stop();
}

#[test]
fn evictions_are_done_only_where_the_operator_allows_it() {
    for (settings, is_done) in [("", false), ("allow_eviction = true", true)] {
        let fixture = PodFixture::on(node(settings), host_pod("fixture"));
        let victim = fixture.run(&fixture.config("victim", &["sleep", "forever"]));
        let id = victim.clone();
        let handler = answers("CreateContainer", move |_| {
            let evict = vec![api::ContainerEviction { container_id: id.clone(), reason: "too big".into() }];
            Answer::message(&api::CreateContainerResponse { evict, ..Default::default() })
        });
        let plugin = Plugin::join(&fixture.node, "10", "evict", EVENTS, handler);
        fixture.create(&fixture.config("other", &["true"]));
        if is_done {
            fixture.node.exited(&victim);
        } else {
            assert!(
                host::wait_within(Duration::from_millis(500), || {
                    (fixture.node.container(&victim).state() == ContainerState::ContainerExited).then_some(())
                })
                .is_none()
            );
            assert!(fixture.node.log().contains("is ignored"));
        }
        drop(plugin);
        fixture.node.stop();
    }
}
