//! Calls with odd arguments, and calls for pods and containers in each state.

use std::collections::HashMap;

use coracle_tests::cri::proto::{
    AttachRequest, AuthConfig, ContainerFilter, ContainerStateValue, ContainerStatusRequest, ExecRequest,
    ExecSyncRequest, ImageSpec, ImageStatusRequest, LinuxContainerResources, ListContainersRequest,
    ListPodSandboxRequest, NetworkConfig, PodSandboxFilter, PodSandboxStateValue, PodSandboxStatusRequest,
    PortForwardRequest, PullImageRequest, RemoveContainerRequest, RemoveImageRequest,
    RemovePodSandboxRequest, ReopenContainerLogRequest, RuntimeConfig, RuntimeConfigRequest,
    StartContainerRequest, StatusRequest, StopContainerRequest, StopPodSandboxRequest,
    UpdateContainerResourcesRequest, UpdateRuntimeConfigRequest, VersionRequest,
};
use coracle_tests::request::{container, create, host_pod, image_spec};

use super::{Seen, Side};

/// A call: its name, which never changes, and what it does.
type Call = (&'static str, fn(&mut Side<'_>, &mut Seen));

/// An identifier that no object has.
const UNKNOWN: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

pub(super) const ROWS: [Call; 19] = [
    ("unknown container", |side, seen| {
        for id in [UNKNOWN, "0123", "../x", "UPPER", "a\0b"] {
            calls_of_container(side, id, &format!("id {id:?}"), seen);
        }
    }),
    ("unknown pod", |side, seen| {
        for id in [UNKNOWN, "0123", "../x", "UPPER", "a\0b"] {
            calls_of_pod(side, id, &format!("id {id:?}"), seen);
        }
    }),
    ("created container", |side, seen| {
        let id = made(side, "created", &["sleep", "forever"]);
        read_calls(side, &id, "created", seen);
        stream_calls(side, &id, "created", seen);
        stop(side, &id, 0, "stop", seen);
        read_calls(side, &id, "stopped", seen);
        start(side, &id, "start after stop", seen);
        stop(side, &id, 0, "stop again", seen);
        remove(side, &id, "remove", seen);
        remove(side, &id, "remove again", seen);
    }),
    ("running container", |side, seen| {
        let id = made(side, "running", &["sleep", "forever"]);
        start(side, &id, "start", seen);
        start(side, &id, "start again", seen);
        read_calls(side, &id, "running", seen);
        stream_calls(side, &id, "running", seen);
        read_calls(side, &id[..12], "by the first 12 characters", seen);
        stop(side, &id, -1, "stop with a negative timeout", seen);
        stop(side, &id, 1, "stop again", seen);
        state(side, &id, "after stop", seen);
        start(side, &id, "start after stop", seen);
        stream_calls(side, &id, "exited", seen);
        remove(side, &id[..12], "remove by the first 12 characters", seen);
        remove(side, &id, "remove", seen);
        calls_of_container(side, &id, "removed", seen);
    }),
    ("removed while it runs", |side, seen| {
        let id = made(side, "forced", &["sleep", "forever"]);
        start(side, &id, "start", seen);
        remove(side, &id, "remove", seen);
        state(side, &id, "after removal", seen);
    }),
    ("stops", |side, seen| {
        for (name, words, timeout) in [
            ("trap, 10 seconds", &["trap", "5"] as &[&str], 10),
            ("trap, no time", &["trap", "5"], 0),
            ("stubborn, 1 second", &["stubborn"], 1),
            ("no handler, 10 seconds", &["then-sleep", "report", "status"], 1),
        ] {
            let id = made(side, "stopped", words);
            start(side, &id, name, seen);
            wait_for_output();
            stop(side, &id, timeout, name, seen);
            state(side, &id, name, seen);
            remove(side, &id, name, seen);
        }
    }),
    ("exec", |side, seen| {
        let id = made(side, "exec", &["sleep", "forever"]);
        start(side, &id, "start", seen);
        let long = "x".repeat(200_000);
        for (name, words, timeout) in [
            ("true", &["/probe", "true"] as &[&str], 10),
            ("exit 7", &["/probe", "exit", "7"], 10),
            ("killed", &["/probe", "raise", "9"], 10),
            ("no command", &[], 10),
            ("empty word", &[""], 10),
            ("missing program", &["/no/such"], 10),
            ("not in PATH", &["nosuch"], 10),
            ("without slash", &["probe", "true"], 10),
            ("directory", &["/etc"], 10),
            ("not executable", &["/plain"], 10),
            ("NUL", &["/probe", "print", "a\0b"], 10),
            ("very long", &["/probe", "true", &long], 10),
            ("timeout", &["/probe", "sleep", "forever"], 1),
            ("negative timeout", &["/probe", "true"], -1),
            ("no timeout", &["/probe", "true"], 0),
            ("huge timeout", &["/probe", "true"], i64::MAX),
            ("both outputs", &["/probe", "both"], 10),
        ] {
            let cmd = words.iter().map(|word| (*word).to_owned()).collect();
            let request = ExecSyncRequest { container_id: id.clone(), cmd, timeout };
            if let Some(answer) = seen.answer(name, side.cri.exec_sync(request)) {
                let out =
                    [answer.stdout, answer.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
                seen.value(&format!("{name}, code and output"), &(answer.exit_code, out));
            }
        }
        remove(side, &id, "remove", seen);
    }),
    ("streams", |side, seen| {
        let id = made(side, "streams", &["sleep", "forever"]);
        start(side, &id, "start", seen);
        for bits in 0..16_u8 {
            let [tty, stdin, stdout, stderr] = [1, 2, 4, 8].map(|bit| bits & bit != 0);
            let name = format!("tty={tty} stdin={stdin} stdout={stdout} stderr={stderr}");
            let cmd = vec!["/probe".to_owned(), "true".to_owned()];
            let exec = ExecRequest { container_id: id.clone(), cmd, tty, stdin, stdout, stderr };
            seen.answer(&format!("exec {name}"), side.cri.exec(exec));
            let attach = AttachRequest { container_id: id.clone(), stdin, tty, stdout, stderr };
            seen.answer(&format!("attach {name}"), side.cri.attach(attach));
        }
        let none = ExecRequest { container_id: id.clone(), stdout: true, ..Default::default() };
        seen.answer("exec without a command", side.cri.exec(none));
        for port in [vec![], vec![0], vec![-1], vec![80], vec![70_000], vec![80, 80]] {
            let name = format!("port-forward of {port:?}");
            let request = PortForwardRequest { pod_sandbox_id: side.pod_id.clone(), port };
            seen.answer(&name, side.cri.port_forward(request));
        }
        remove(side, &id, "remove", seen);
    }),
    ("update", |side, seen| {
        type Change = fn(&mut LinuxContainerResources);
        let changes: [(&str, Change); 15] = [
            ("empty", |_| ()),
            ("memory 64 MiB", |r| r.memory_limit_in_bytes = 64 << 20),
            ("memory negative", |r| r.memory_limit_in_bytes = -1),
            ("memory 1 byte", |r| r.memory_limit_in_bytes = 1),
            ("swap less than memory", |r| {
                r.memory_limit_in_bytes = 64 << 20;
                r.memory_swap_limit_in_bytes = 1 << 20;
            }),
            ("cpu_quota", |r| {
                r.cpu_quota = 50_000;
                r.cpu_period = 100_000;
            }),
            ("cpu_quota too small", |r| r.cpu_quota = 1),
            ("cpu_period too big", |r| r.cpu_period = 10_000_000),
            ("cpu_shares 2", |r| r.cpu_shares = 2),
            ("cpu_shares negative", |r| r.cpu_shares = -1),
            ("cpuset_cpus 0", |r| r.cpuset_cpus = "0".into()),
            ("cpuset_cpus missing", |r| r.cpuset_cpus = "900".into()),
            ("oom_score_adj", |r| r.oom_score_adj = 500),
            ("unified bad", |r| {
                r.unified.insert("memory.high".into(), "many".into());
            }),
            ("unified", |r| {
                r.unified.insert("memory.high".into(), "max".into());
            }),
        ];
        for when in ["created", "running"] {
            // With cgroup v1 runc refuses them, and coracle has no use for them.
            let fits = |name: &str| super::has_cgroup_v2() || !name.starts_with("unified");
            for (name, change) in changes.iter().filter(|(name, _)| fits(name)) {
                let id = made(side, "update", &["sleep", "forever"]);
                if when == "running" {
                    start(side, &id, "start", seen);
                }
                let mut linux = LinuxContainerResources::default();
                change(&mut linux);
                let request = UpdateContainerResourcesRequest {
                    container_id: id.clone(),
                    linux: Some(linux),
                    annotations: HashMap::new(),
                };
                let answer = side.cri.update_container_resources(request);
                if seen.answer(&format!("{when}: {name}"), answer).is_some() {
                    let ask = ContainerStatusRequest { container_id: id.clone(), verbose: false };
                    let status = side.cri.container_status(ask).ok().and_then(|answer| answer.status);
                    let linux = status.and_then(|status| status.resources?.linux).unwrap_or_default();
                    let values = (linux.cpu_shares, linux.cpu_quota, linux.cpu_period, linux.cpuset_cpus);
                    let values = (values, linux.memory_limit_in_bytes, linux.oom_score_adj, linux.unified);
                    seen.value(&format!("{when}: {name}, resources"), &values);
                }
                remove(side, &id, "remove", seen);
            }
        }
    }),
    ("create in a pod", |side, seen| {
        let valid = || create(&side.pod_id, &side.reporter(), &side.pod);
        let mut requests = [
            ("without a configuration", valid()),
            ("without the pod's configuration", valid()),
            ("with an unknown pod", valid()),
            ("with the pod's first 12 characters", valid()),
            ("with an empty configuration", valid()),
        ];
        requests[0].1.config = None;
        requests[1].1.sandbox_config = None;
        requests[2].1.pod_sandbox_id = UNKNOWN.into();
        requests[3].1.pod_sandbox_id.truncate(12);
        requests[4].1.config = Some(Default::default());
        for (name, request) in requests {
            if let Some(answer) = seen.answer(name, side.cri.create_container(request)) {
                start(side, &answer.container_id, &format!("{name}, start"), seen);
                remove(side, &answer.container_id, &format!("{name}, remove"), seen);
            }
        }
        let first = made(side, "twice", &["true"]);
        let again = create(&side.pod_id, &container("twice", side.image, &["true"], &side.pod), &side.pod);
        if let Some(answer) = seen.answer("the same again", side.cri.create_container(again)) {
            seen.value("the same again is the same", &(answer.container_id == first));
        }
        remove(side, &first, "remove", seen);
    }),
    ("a pod that stops", |side, seen| {
        let pod = side.new_pod("stops", host_pod);
        let id = side.cri.run_pod(&pod);
        let again = side.cri.run_pod_sandbox(coracle_tests::request::run(&pod));
        if let Some(answer) = seen.answer("run the same again", again) {
            seen.value("the same again is the same", &(answer.pod_sandbox_id == id));
        }
        let request =
            |name: &str, words: &[&str]| create(&id, &container(name, side.image, words, &pod), &pod);
        let created =
            side.cri.create_container(request("created", &["true"])).expect("a container").container_id;
        let running = side.cri.create_container(request("running", &["sleep", "forever"]));
        let running = running.expect("a container").container_id;
        start(side, &running, "start", seen);
        stop_pod(side, &id[..12], "stop by the first 12 characters", seen);
        stop_pod(side, &id, "stop", seen);
        stop_pod(side, &id, "stop again", seen);
        let ask = PodSandboxStatusRequest { pod_sandbox_id: id.clone(), verbose: true };
        let answer = seen.answer("status", side.cri.pod_sandbox_status(ask));
        seen.value("state", &answer.and_then(|answer| answer.status).map(|status| status.state));
        state(side, &created, "the created container", seen);
        state(side, &running, "the running container", seen);
        start(side, &created, "start in it", seen);
        seen.answer("create in it", side.cri.create_container(request("late", &["true"])));
        let forward = PortForwardRequest { pod_sandbox_id: id.clone(), port: vec![80] };
        seen.answer("port-forward to it", side.cri.port_forward(forward));
        remove(side, &created, "remove the created container", seen);
        let again = side.cri.run_pod_sandbox(coracle_tests::request::run(&pod));
        if let Some(answer) = seen.answer("run it again", again) {
            side.remove(&answer.pod_sandbox_id);
        }
        let gone = side.cri.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: id.clone() });
        seen.answer("remove", gone);
        state(side, &running, "the container of the removed pod", seen);
        calls_of_pod(side, &id, "removed", seen);
    }),
    ("a pod removed while it runs", |side, seen| {
        let pod = side.new_pod("forced", host_pod);
        let id = side.cri.run_pod(&pod);
        let config = container("one", side.image, &["sleep", "forever"], &pod);
        let inner = side.cri.create(&id, &config, &pod);
        start(side, &inner, "start", seen);
        let gone = side.cri.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: id.clone() });
        seen.answer("remove", gone);
        state(side, &inner, "its container", seen);
        side.remove(&id);
    }),
    ("filters of containers", |side, seen| {
        let id = made(side, "filtered", &["true"]);
        let label = |key: &str, value: &str| HashMap::from([(key.to_owned(), value.to_owned())]);
        let none = ContainerFilter::default;
        let filters = [
            ("empty", none()),
            ("id", ContainerFilter { id: id.clone(), ..none() }),
            ("id's first 12 characters", ContainerFilter { id: id[..12].into(), ..none() }),
            ("id's first character", ContainerFilter { id: id[..1].into(), ..none() }),
            ("unknown id", ContainerFilter { id: UNKNOWN.into(), ..none() }),
            ("odd id", ContainerFilter { id: "../x".into(), ..none() }),
            ("state created", ContainerFilter { state: Some(ContainerStateValue { state: 0 }), ..none() }),
            ("state running", ContainerFilter { state: Some(ContainerStateValue { state: 1 }), ..none() }),
            ("state unknown", ContainerFilter { state: Some(ContainerStateValue { state: 3 }), ..none() }),
            ("state 9", ContainerFilter { state: Some(ContainerStateValue { state: 9 }), ..none() }),
            ("pod", ContainerFilter { pod_sandbox_id: side.pod_id.clone(), ..none() }),
            (
                "pod's first 12 characters",
                ContainerFilter { pod_sandbox_id: side.pod_id[..12].into(), ..none() },
            ),
            ("unknown pod", ContainerFilter { pod_sandbox_id: UNKNOWN.into(), ..none() }),
            (
                "id and unknown pod",
                ContainerFilter { id: id.clone(), pod_sandbox_id: UNKNOWN.into(), ..none() },
            ),
            (
                "label",
                ContainerFilter {
                    label_selector: label("io.kubernetes.container.name", "filtered"),
                    ..none()
                },
            ),
            (
                "label of another value",
                ContainerFilter { label_selector: label("io.kubernetes.container.name", "x"), ..none() },
            ),
            (
                "label of no value",
                ContainerFilter { label_selector: label("io.kubernetes.container.name", ""), ..none() },
            ),
            ("label unknown", ContainerFilter { label_selector: label("unknown", ""), ..none() }),
            ("label empty", ContainerFilter { label_selector: label("", ""), ..none() }),
        ];
        for (name, filter) in filters {
            let answer = side.cri.list_containers(ListContainersRequest { filter: Some(filter) });
            let answer = seen.answer(name, answer).unwrap_or_default();
            let states: Vec<i32> = answer.containers.iter().map(|entry| entry.state).collect();
            seen.value(&format!("{name}, states"), &states);
        }
        remove(side, &id, "remove", seen);
    }),
    ("filters of pods", |side, seen| {
        let label = |key: &str, value: &str| HashMap::from([(key.to_owned(), value.to_owned())]);
        let none = PodSandboxFilter::default;
        let id = side.pod_id.clone();
        let filters = [
            ("empty", none()),
            ("id", PodSandboxFilter { id: id.clone(), ..none() }),
            ("id's first 12 characters", PodSandboxFilter { id: id[..12].into(), ..none() }),
            ("unknown id", PodSandboxFilter { id: UNKNOWN.into(), ..none() }),
            ("state ready", PodSandboxFilter { state: Some(PodSandboxStateValue { state: 0 }), ..none() }),
            (
                "state not ready",
                PodSandboxFilter { state: Some(PodSandboxStateValue { state: 1 }), ..none() },
            ),
            ("state 9", PodSandboxFilter { state: Some(PodSandboxStateValue { state: 9 }), ..none() }),
            (
                "label",
                PodSandboxFilter { label_selector: label("io.kubernetes.pod.name", "shared"), ..none() },
            ),
            (
                "label of another value",
                PodSandboxFilter { label_selector: label("io.kubernetes.pod.name", "x"), ..none() },
            ),
            ("label unknown", PodSandboxFilter { label_selector: label("unknown", ""), ..none() }),
        ];
        for (name, filter) in filters {
            let answer = side.cri.list_pod_sandbox(ListPodSandboxRequest { filter: Some(filter) });
            let answer = seen.answer(name, answer).unwrap_or_default();
            let states: Vec<i32> = answer.items.iter().map(|entry| entry.state).collect();
            seen.value(&format!("{name}, states"), &states);
        }
    }),
    ("images by name", |side, seen| {
        let name = side.image.to_owned();
        let ask = ImageStatusRequest { image: Some(image_spec(&name)), verbose: false };
        let known = side.cri.image_status(ask).ok().and_then(|answer| answer.image).unwrap_or_default();
        let digest = known.repo_digests.first().cloned().unwrap_or_default();
        let (hex, bare) = (known.id.trim_start_matches("sha256:"), digest.split('@').next_back());
        let bare = bare.unwrap_or_default().to_owned();
        let names = [
            ("its name", name.clone()),
            ("its id", known.id.clone()),
            ("its id without sha256", hex.to_owned()),
            ("its id's first 12 characters", hex[..12].to_owned()),
            ("its id's first 12 characters after sha256", format!("sha256:{}", &hex[..12])),
            ("its digest", digest.clone()),
            ("a digest alone", bare),
            ("tag and digest", digest.replacen('@', ":1@", 1)),
            ("another tag", name.replace(":1", ":2")),
            ("no tag", name.trim_end_matches(":1").to_owned()),
            ("an empty name", String::new()),
            ("upper case", "UPPER/Case".into()),
            ("blanks", "a b".into()),
            ("NUL", "a\0b".into()),
            ("an empty tag", "localhost/x:".into()),
            ("a digest of another algorithm", format!("localhost/x@md5:{}", "0".repeat(32))),
            ("a short digest", "localhost/x@sha256:00".into()),
            ("an unknown id", format!("sha256:{UNKNOWN}")),
            ("very long", "a".repeat(5000)),
            ("..", "../x".into()),
        ];
        for (what, name) in names {
            let image = Some(image_spec(&name));
            let request = ImageStatusRequest { image: image.clone(), verbose: false };
            let found = seen.answer(&format!("status of {what}"), side.cri.image_status(request));
            let found = found.and_then(|answer| answer.image);
            let found = found.map(|image| {
                (image.id, image.repo_tags, image.repo_digests, image.uid, image.username, image.pinned)
            });
            seen.value(&format!("status of {what}, found"), &found);
            if found.is_none() {
                let request = RemoveImageRequest { image };
                seen.answer(&format!("removal of {what}"), side.cri.remove_image(request));
            }
        }
        let none = ImageStatusRequest::default();
        seen.answer("status of nothing", side.cri.image_status(none));
        seen.answer("removal of nothing", side.cri.remove_image(RemoveImageRequest::default()));
    }),
    ("pulls", |side, seen| {
        let name = side.image.to_owned();
        for (what, name) in [
            ("an empty name", ""),
            ("upper case", "UPPER/Case"),
            ("blanks", "a b"),
            ("NUL", "a\0b"),
            ("a digest alone", &format!("sha256:{UNKNOWN}")),
            ("an unknown tag", &name.replace(":1", ":2")),
            ("an unknown repository", &name.replace("/probe", "/unknown")),
            ("an unknown digest", &format!("{}@sha256:{UNKNOWN}", name.trim_end_matches(":1"))),
        ] {
            let request = PullImageRequest { image: Some(image_spec(name)), ..Default::default() };
            seen.answer(what, side.cri.pull_image(request));
        }
        seen.answer("nothing", side.cri.pull_image(PullImageRequest::default()));
        let auths = [
            ("empty credentials", AuthConfig::default()),
            ("credentials that are no base64", AuthConfig { auth: "***".into(), ..Default::default() }),
            ("credentials without a colon", AuthConfig { auth: "YWJj".into(), ..Default::default() }),
            (
                "credentials of another server",
                AuthConfig {
                    username: "u".into(),
                    password: "p".into(),
                    server_address: "other.example".into(),
                    ..Default::default()
                },
            ),
            (
                "a server that is no URL",
                AuthConfig {
                    username: "u".into(),
                    password: "p".into(),
                    server_address: "://".into(),
                    ..Default::default()
                },
            ),
            ("a user alone", AuthConfig { username: "u".into(), ..Default::default() }),
            ("an identity token", AuthConfig { identity_token: "t".into(), ..Default::default() }),
            ("a registry token", AuthConfig { registry_token: "t".into(), ..Default::default() }),
        ];
        for (what, auth) in auths {
            let request =
                PullImageRequest { image: Some(image_spec(&name)), auth: Some(auth), ..Default::default() };
            if let Some(answer) = seen.answer(what, side.cri.pull_image(request)) {
                seen.fact(&format!("{what}, image"), answer.image_ref);
            }
        }
        let handler = ImageSpec { runtime_handler: "unknown".into(), ..image_spec(&name) };
        let request = PullImageRequest { image: Some(handler), ..Default::default() };
        seen.answer("an unknown handler", side.cri.pull_image(request));
    }),
    ("version", |side, seen| {
        for version in ["", "v1", "0.1.0", "v1alpha2", "nonsense"] {
            let answer = side.cri.version(VersionRequest { version: version.into() });
            let answer = seen.answer(version, answer);
            let answer = answer.map(|answer| (answer.version, answer.runtime_api_version));
            seen.value(&format!("{version:?}, versions"), &answer);
        }
    }),
    ("status", |side, seen| {
        for verbose in [false, true] {
            let answer = seen.answer("status", side.cri.status(StatusRequest { verbose }));
            let answer = answer.unwrap_or_default();
            let conditions = answer.status.unwrap_or_default().conditions;
            for wanted in ["RuntimeReady", "NetworkReady"] {
                let found = conditions.iter().find(|condition| condition.r#type == wanted);
                seen.value(wanted, &found.map(|condition| (condition.status, &condition.reason)));
            }
            let mut handlers: Vec<_> = answer
                .runtime_handlers
                .iter()
                .map(|handler| (&handler.name, &handler.features))
                .filter(|(name, _)| matches!(name.as_str(), "" | "runc"))
                .collect();
            handlers.sort_by_key(|(name, _)| (*name).clone());
            seen.value("handlers", &handlers);
            let features = answer.features.unwrap_or_default();
            let features = (features.supplemental_groups_policy, features.user_namespaces_host_network);
            seen.value("features", &features);
        }
        let config = side.cri.runtime_config(RuntimeConfigRequest::default());
        let config = seen.answer("configuration", config);
        seen.value("has a cgroup driver", &config.is_some_and(|config| config.linux.is_some()));
    }),
    ("configuration", |side, seen| {
        let network = |pod_cidr: &str| {
            let network_config = Some(NetworkConfig { pod_cidr: pod_cidr.into() });
            UpdateRuntimeConfigRequest { runtime_config: Some(RuntimeConfig { network_config }) }
        };
        let empty = UpdateRuntimeConfigRequest { runtime_config: Some(RuntimeConfig::default()) };
        for (name, request) in [
            ("nothing", UpdateRuntimeConfigRequest::default()),
            ("no network", empty),
            ("no networks", network("")),
            ("a network", network("10.0.0.0/24")),
            ("two networks", network("10.0.0.0/24,fd00::/64")),
            ("nonsense", network("nonsense")),
            ("a network without a length", network("10.0.0.0")),
        ] {
            seen.answer(name, side.cri.update_runtime_config(request));
        }
    }),
];

/// A container of the shared pod.
fn made(side: &Side<'_>, name: &str, words: &[&str]) -> String {
    side.cri.create(&side.pod_id, &container(name, side.image, words, &side.pod), &side.pod)
}

/// Gives a program time to install its signal handler.
fn wait_for_output() {
    std::thread::sleep(std::time::Duration::from_millis(300));
}

fn start(side: &Side<'_>, id: &str, name: &str, seen: &mut Seen) {
    let answer = side.cri.start_container(StartContainerRequest { container_id: id.into() });
    seen.answer(&format!("start, {name}"), answer);
}

fn stop(side: &Side<'_>, id: &str, timeout: i64, name: &str, seen: &mut Seen) {
    let answer = side.cri.stop_container(StopContainerRequest { container_id: id.into(), timeout });
    seen.answer(&format!("stop, {name}"), answer);
}

fn remove(side: &Side<'_>, id: &str, name: &str, seen: &mut Seen) {
    let answer = side.cri.remove_container(RemoveContainerRequest { container_id: id.into() });
    seen.answer(&format!("remove, {name}"), answer);
}

fn stop_pod(side: &Side<'_>, id: &str, name: &str, seen: &mut Seen) {
    let answer = side.cri.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: id.into() });
    seen.answer(&format!("stop, {name}"), answer);
}

/// State, exit code and reason.
fn state(side: &Side<'_>, id: &str, name: &str, seen: &mut Seen) {
    let ask = ContainerStatusRequest { container_id: id.into(), verbose: false };
    let answer = seen.answer(&format!("status, {name}"), side.cri.container_status(ask));
    let status = answer.and_then(|answer| answer.status);
    let values = status.map(|status| {
        let times = [status.started_at, status.finished_at].map(|time| time > 0);
        (status.state().as_str_name(), status.exit_code, status.reason, times)
    });
    seen.value(&format!("state, {name}"), &values);
}

/// Calls that change nothing.
fn read_calls(side: &Side<'_>, id: &str, name: &str, seen: &mut Seen) {
    state(side, id, name, seen);
    let ask = ContainerStatusRequest { container_id: id.into(), verbose: true };
    let answer = seen.answer(&format!("verbose status, {name}"), side.cri.container_status(ask));
    seen.value(&format!("has info, {name}"), &answer.is_some_and(|answer| !answer.info.is_empty()));
    let request = ReopenContainerLogRequest { container_id: id.into() };
    seen.answer(&format!("reopen log, {name}"), side.cri.reopen_container_log(request));
    let cmd = vec!["/probe".to_owned(), "true".to_owned()];
    let request = ExecSyncRequest { container_id: id.into(), cmd, timeout: 10 };
    seen.answer(&format!("exec sync, {name}"), side.cri.exec_sync(request));
    let request = coracle_tests::cri::proto::ContainerStatsRequest { container_id: id.into() };
    seen.answer(&format!("stats, {name}"), side.cri.container_stats(request));
}

/// Calls that answer a URL.
fn stream_calls(side: &Side<'_>, id: &str, name: &str, seen: &mut Seen) {
    let cmd = vec!["/probe".to_owned(), "true".to_owned()];
    let exec = ExecRequest { container_id: id.into(), cmd, stdout: true, ..Default::default() };
    seen.answer(&format!("exec, {name}"), side.cri.exec(exec));
    let attach = AttachRequest { container_id: id.into(), stdout: true, ..Default::default() };
    seen.answer(&format!("attach, {name}"), side.cri.attach(attach));
}

/// All calls for a container.
fn calls_of_container(side: &Side<'_>, id: &str, name: &str, seen: &mut Seen) {
    read_calls(side, id, name, seen);
    stream_calls(side, id, name, seen);
    start(side, id, name, seen);
    stop(side, id, 0, name, seen);
    let linux = Some(LinuxContainerResources { cpu_shares: 100, ..Default::default() });
    let update =
        UpdateContainerResourcesRequest { container_id: id.into(), linux, annotations: HashMap::new() };
    seen.answer(&format!("update, {name}"), side.cri.update_container_resources(update));
    remove(side, id, name, seen);
}

/// All calls for a pod.
fn calls_of_pod(side: &Side<'_>, id: &str, name: &str, seen: &mut Seen) {
    for verbose in [false, true] {
        let ask = PodSandboxStatusRequest { pod_sandbox_id: id.into(), verbose };
        seen.answer(&format!("status, {name}, verbose {verbose}"), side.cri.pod_sandbox_status(ask));
    }
    let forward = PortForwardRequest { pod_sandbox_id: id.into(), port: vec![80] };
    seen.answer(&format!("port-forward, {name}"), side.cri.port_forward(forward));
    let request = coracle_tests::cri::proto::PodSandboxStatsRequest { pod_sandbox_id: id.into() };
    seen.answer(&format!("stats, {name}"), side.cri.pod_sandbox_stats(request));
    stop_pod(side, id, name, seen);
    let removed = side.cri.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: id.into() });
    seen.answer(&format!("remove, {name}"), removed);
}
