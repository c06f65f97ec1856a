//! Resources of containers that plugins change after their creation, or beside another's: NRI-C13 to C15, C22 to C27, C32.

use std::fs;

use coracle_tests::cri::proto::{
    LinuxContainerResources, StartContainerRequest, UpdateContainerResourcesRequest,
};
use coracle_tests::host;
use coracle_tests::nri::{Answer, EVENTS, Heard, Plugin, api};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request::create;

use super::containers::{fixture, stop};
use super::{answers, refused};

fn start(fixture: &PodFixture, id: &str) -> Result<(), tonic::Status> {
    fixture.node.start_container(StartContainerRequest { container_id: id.into() }).map(drop)
}

pub(super) fn update(
    fixture: &PodFixture,
    id: &str,
    memory_limit_in_bytes: i64,
) -> Result<(), tonic::Status> {
    let linux = Some(LinuxContainerResources { memory_limit_in_bytes, ..Default::default() });
    let request = UpdateContainerResourcesRequest { container_id: id.into(), linux, ..Default::default() };
    fixture.node.update_container_resources(request).map(drop)
}

/// An update of one container's memory limit.
pub(super) fn memory(id: &str, limit: i64, ignore_failure: bool) -> api::ContainerUpdate {
    let memory = api::LinuxMemory { limit: Some(api::OptionalInt64 { value: limit }), ..Default::default() };
    let resources = api::LinuxResources { memory: Some(memory), ..Default::default() };
    api::ContainerUpdate {
        container_id: id.into(),
        linux: Some(api::LinuxContainerUpdate { resources: Some(resources) }),
        ignore_failure,
    }
}

/// Content of a cgroup file, given by its names on v1 and v2.
pub(super) fn knob(fixture: &PodFixture, id: &str, names: [&str; 2]) -> String {
    let path = format!("{}/{id}", fixture.node.cgroup_parent());
    let file = names.into_iter().find_map(|name| host::cgroup_file(&path, name));
    let file = file.unwrap_or_else(|| panic!("none of {names:?} for {path}"));
    fs::read_to_string(file).expect("a knob").trim().to_owned()
}

pub(super) const MEMORY: [&str; 2] = ["memory.limit_in_bytes", "memory.max"];
const PIDS: [&str; 2] = ["pids.max", "pids.max"];

fn shown_memory(fixture: &PodFixture, id: &str) -> i64 {
    let resources = fixture.node.container(id).resources.and_then(|resources| resources.linux);
    resources.expect("resources").memory_limit_in_bytes
}

/// Rules of docs/specs/nri.md: NRI-C13, NRI-C15.
#[test]
fn a_plugins_value_overrides_that_of_the_request() {
    let fixture = fixture();
    let first = answers("UpdateContainer", |heard| {
        let id = heard.container().id;
        let update = vec![memory(&id, 96 << 20, false)];
        Answer::message(&api::UpdateContainerResponse { update, evict: Vec::new() })
    });
    let _first = Plugin::join(&fixture.node, "10", "first", EVENTS, first);
    let second = Plugin::listener(&fixture.node, "20", "second");
    let id = fixture.run(&fixture.config("c1", &["sleep", "forever"]));
    update(&fixture, &id, 64 << 20).unwrap_or_else(|error| panic!("update: {error}"));
    assert_eq!(knob(&fixture, &id, MEMORY), (96 << 20).to_string());
    assert_eq!(shown_memory(&fixture, &id), 96 << 20);
    let told: api::UpdateContainerRequest = second.last("UpdateContainer").request();
    let limit = told.linux_resources.and_then(|one| one.memory).and_then(|one| one.limit);
    assert_eq!(limit.map(|limit| limit.value), Some(96 << 20), "it sees the change of the first");
    assert_eq!(second.heard("PostUpdateContainer").len(), 1);
    fixture.node.stop();
}

/// Rules of docs/specs/nri.md: NRI-C14.
#[test]
fn a_refused_update_changes_nothing() {
    let fixture = fixture();
    let handler = answers("UpdateContainer", |_| Answer::error("it stays"));
    let plugin = Plugin::join(&fixture.node, "10", "wall", EVENTS, handler);
    let id = fixture.run(&fixture.config("c1", &["sleep", "forever"]));
    let before = knob(&fixture, &id, MEMORY);
    let text = refused(update(&fixture, &id, 64 << 20));
    assert!(text.contains("NRI UpdateContainer failed: plugin \"10-wall\": it stays"), "{text}");
    assert_eq!((knob(&fixture, &id, MEMORY), shown_memory(&fixture, &id)), (before, 0));
    assert_eq!(plugin.heard("PostUpdateContainer").len(), 0);
    fixture.node.stop();
}

/// A plugin that updates others when a container is created whose name is not `victim`.
fn updating(
    updates: impl Fn(&Heard) -> Vec<api::ContainerUpdate> + Send + 'static,
) -> coracle_tests::nri::Handler {
    answers("CreateContainer", move |heard| match heard.container().name.as_str() {
        "victim" => Answer::empty(),
        _ => Answer::message(&api::CreateContainerResponse { update: updates(heard), ..Default::default() }),
    })
}

/// Rules of docs/specs/nri.md: NRI-C22, NRI-C23, NRI-C24, NRI-C27.
#[test]
fn updates_of_other_containers_are_applied_before_the_reply_or_fail_the_call() {
    let fixture = fixture();
    let victim = fixture.run(&fixture.config("victim", &["sleep", "forever"]));
    let id = victim.clone();
    let plugin = Plugin::join(
        &fixture.node,
        "10",
        "mover",
        EVENTS,
        updating(move |heard| match heard.container().name.as_str() {
            "moves" => {
                let mut update = memory(&id, 128 << 20, false);
                let resources =
                    update.linux.as_mut().and_then(|linux| linux.resources.as_mut()).expect("set");
                resources.pids = Some(api::LinuxPids { limit: 77 });
                vec![update]
            }
            // Less than anything can run with.
            "fails" => vec![memory(&id, 1000, false)],
            "shrugs" => vec![memory(&id, 1000, true)],
            "itself" => vec![memory(&heard.container().id, 1 << 30, false)],
            _ => vec![memory(&"0".repeat(64), 1 << 30, false)],
        }),
    );
    fixture.create(&fixture.config("moves", &["true"]));
    assert_eq!(knob(&fixture, &victim, MEMORY), (128 << 20).to_string());
    assert_eq!(knob(&fixture, &victim, PIDS), "77");
    let attempt = |name: &str| {
        fixture.node.create_container(create(&fixture.pod_id, &fixture.config(name, &["true"]), &fixture.pod))
    };
    let text = refused(attempt("fails"));
    assert!(text.contains("NRI update of container") && text.contains("not enough"), "{text}");
    attempt("shrugs").unwrap_or_else(|error| panic!("create: {error}"));
    attempt("unknown").unwrap_or_else(|error| panic!("create: {error}"));
    let text = refused(attempt("itself"));
    assert!(text.contains("plugin \"10-mover\" asked update of"), "{text}");
    assert!(text.contains("during creation"), "{text}");
    assert_eq!(shown_memory(&fixture, &victim), 128 << 20);
    drop(plugin);
    fixture.node.stop();
}

/// Rules of docs/specs/nri.md: NRI-C25.
#[test]
fn unsolicited_updates_apply_to_running_and_created_containers() {
    let fixture = fixture();
    let plugin = Plugin::listener(&fixture.node, "10", "mover");
    let runs = fixture.run(&fixture.config("runs", &["sleep", "forever"]));
    let waits = fixture.create(&fixture.config("waits", &["sleep", "forever"]));
    let over = fixture.run(&fixture.config("over", &["true"]));
    fixture.node.exited(&over);
    let updates = vec![
        memory(&runs, 64 << 20, false),
        memory(&waits, 32 << 20, false),
        memory(&over, 32 << 20, false),
        memory(&"0".repeat(64), 32 << 20, false),
    ];
    let answer = plugin.caller().update(updates).expect("an answer");
    assert_eq!(answer, (0, String::new(), Vec::new()));
    assert_eq!(knob(&fixture, &runs, MEMORY), (64 << 20).to_string());
    start(&fixture, &waits).unwrap_or_else(|error| panic!("start: {error}"));
    assert_eq!(
        (knob(&fixture, &waits, MEMORY), shown_memory(&fixture, &waits)),
        ((32 << 20).to_string(), 32 << 20)
    );
    // What fails is named, and the rest is done.
    let updates =
        vec![memory(&runs, 1000, false), memory(&waits, 48 << 20, false), memory(&runs, 2000, true)];
    let (code, text, failed) = plugin.caller().update(updates).expect("an answer");
    assert_eq!((code, text), (2, format!("NRI update of some containers failed: {runs}")));
    assert_eq!(failed, [runs.as_str()]);
    assert_eq!(knob(&fixture, &waits, MEMORY), (48 << 20).to_string());
    assert!(plugin.heard("UpdateContainer").is_empty(), "no plugin is asked about these");
    fixture.node.stop();
}

/// Rules of docs/specs/nri.md: NRI-C26.
#[test]
fn an_update_during_an_event_does_not_wait_for_that_event() {
    let fixture = fixture();
    let victim = fixture.run(&fixture.config("victim", &["sleep", "forever"]));
    let id = victim.clone();
    let handler: coracle_tests::nri::Handler = Box::new(move |caller, heard| {
        if heard.method == "PostCreateContainer" {
            let answer =
                caller.update(vec![memory(&id, 64 << 20, false)]).expect("an answer inside the hook");
            assert_eq!(answer.0, 0, "{answer:?}");
        }
        Answer::empty()
    });
    let plugin = Plugin::join(&fixture.node, "10", "mover", EVENTS, handler);
    fixture.create(&fixture.config("other", &["true"]));
    assert_eq!(knob(&fixture, &victim, MEMORY), (64 << 20).to_string());
    assert!(!plugin.is_over());
    fixture.node.stop();
}

/// Rules of docs/specs/nri.md: NRI-C32.
#[test]
fn a_stop_container_answer_may_update_other_containers() {
    let fixture = fixture();
    let victim = fixture.run(&fixture.config("victim", &["sleep", "forever"]));
    let id = victim.clone();
    let handler = answers("StopContainer", move |_| {
        Answer::message(&api::StopContainerResponse {
            update: vec![memory(&id, 1000, false), memory(&id, 64 << 20, false)],
        })
    });
    let plugin = Plugin::join(&fixture.node, "10", "mover", EVENTS, handler);
    let other = fixture.run(&fixture.config("other", &["sleep", "forever"]));
    stop(&fixture, &other);
    assert_eq!(knob(&fixture, &victim, MEMORY), (64 << 20).to_string());
    assert!(fixture.node.log().contains("not enough"), "what fails is logged");
    drop(plugin);
    fixture.node.stop();
}
