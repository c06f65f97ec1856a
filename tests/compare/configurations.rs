//! Image configurations, manifests, indexes and archives: whether they are taken, what ImageStatus says of them, and what a
//! container of the image is, with the command of the image and with one of the request.
//!
//! `CORACLE_CASE=N` repeats the random case with this seed alone.

mod imports;
mod random;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::{
    ContainerConfig, ContainerState, ContainerStatus, ImageSpec, ImageStatusRequest, PodSandboxConfig,
    RemoveContainerRequest, RemoveImageRequest, StopContainerRequest,
};
use coracle_tests::host;
use coracle_tests::image::{ARCHITECTURE, MANIFEST, descriptor, probe_entries};
use coracle_tests::layer::{Compression, Layer, digest};
use coracle_tests::random::Random;
use coracle_tests::request::{container, fresh, host_pod, pull};
use serde_json::{Value, json};

use crate::Run;
use crate::archive::Archive;
use crate::pair::{Both, start};
use crate::report::{Report, output};
use crate::server::Server;

/// The media type of an image's configuration.
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";

/// Repository of the images.
const REPOSITORY: &str = "configurations";

/// Section of the probe's output.
const WORDS: [&str; 4] = ["report", "environment", "process", "status"];

/// Makes the document that has the tag, from the descriptor of the manifest.
type MakeIndex = Box<dyn Fn(&Server, Value) -> Value>;

/// An image: the usual one with changes.
struct Case {
    name: String,
    /// The whole document, without its layers.
    config: Value,
    /// Layers above the one with the probe.
    layers: Vec<Archive>,
    change_config: Box<dyn Fn(&mut Value)>,
    change_manifest: Box<dyn Fn(&mut Value)>,
    index: Option<MakeIndex>,
    /// The media type of the manifest's answer.
    media_type: String,
    /// Time limit of each call, if containerd does not answer: that counts as a refusal.
    limit: Option<Duration>,
}

impl Case {
    fn new(name: impl Into<String>) -> Case {
        Case {
            name: name.into(),
            config: json!({
                "architecture": ARCHITECTURE, "os": "linux", "created": "2026-01-01T00:00:00Z",
                "config": {
                    "Entrypoint": ["/probe"], "Cmd": WORDS, "Env": ["PATH=/bin", "FROM_IMAGE=yes"],
                },
            }),
            layers: Vec::new(),
            change_config: Box::new(|_| ()),
            change_manifest: Box::new(|_| ()),
            index: None,
            media_type: MANIFEST.to_owned(),
            limit: None,
        }
    }

    /// Sets a member of the `config` object.
    fn with(mut self, key: &str, value: Value) -> Case {
        self.config["config"][key] = value;
        self
    }
}

/// Facts of a side by their names.
type Facts = BTreeMap<String, String>;

/// Environment of the cases: the registry, and a pod of each side.
struct Bench {
    server: Server,
    base: Layer,
    pods: Both<(String, PodSandboxConfig)>,
}

pub(crate) fn run(run: &mut Run<'_>) {
    let bench = Bench::new(run);
    if let Ok(seed) = std::env::var("CORACLE_CASE") {
        let seed: u64 = seed.parse().expect("CORACLE_CASE is a number");
        one(run, &bench, &random::case(&mut Random::new(seed)), &format!("CORACLE_CASE={seed}"));
    } else {
        for case in table::cases() {
            one(run, &bench, &case, "");
        }
        imports::run(run, &bench.base);
        run.end_table();
        while run.goes_on() {
            let seed = run.random.below(1 << 48);
            one(run, &bench, &random::case(&mut Random::new(seed)), &format!("CORACLE_CASE={seed}"));
        }
    }
    let both = run.pair.both();
    for (cri, (pod, _)) in [(both.ours, &bench.pods.ours), (both.theirs, &bench.pods.theirs)] {
        cri.remove_pod(pod);
    }
}

impl Bench {
    fn new(run: &Run<'_>) -> Bench {
        let server = Server::start();
        let mut pods = run.pair.each(|cri| {
            let mut config = host_pod("configurations");
            config.log_directory = run.pair.log_directory(&format!("configurations-{}", fresh()));
            (cri.run_pod(&config), config)
        });
        // What a container sees of its pod is the same.
        pods.ours.1.labels.clear();
        pods.theirs.1.labels.clear();
        let base = Layer::new(&probe_entries(&run.pair.ours().probe()), Compression::Gzip);
        let bench = Bench { server, base, pods };
        // The layer with the probe is unpacked once, because this image stays.
        let kept = bench.publish(&Case::new("kept").with("Labels", json!({ "kept": "yes" })));
        let pulled = run.pair.each(|cri| cri.pull_image(pull(&kept)).map(|_| ()));
        pulled.ours.expect("coracle pulls");
        pulled.theirs.expect("containerd pulls");
        bench
    }

    /// Gives the registry the image; returns its name.
    fn publish(&self, case: &Case) -> String {
        let tag = fresh().to_string();
        let mut layers = vec![descriptor(self.base.media_type(), &self.base.blob)];
        let mut diff_ids = vec![self.base.diff_id.clone()];
        self.server.add_blob(REPOSITORY, &self.base.blob);
        for layer in &case.layers {
            let tar = layer.tar();
            let blob = layer.packing.pack(&tar);
            layers.push(descriptor(layer.packing.media_type(), &blob));
            diff_ids.push(digest(&tar));
            self.server.add_blob(REPOSITORY, &blob);
        }
        let mut config = case.config.clone();
        config["rootfs"] = json!({ "type": "layers", "diff_ids": diff_ids });
        (case.change_config)(&mut config);
        let config = config.to_string();
        self.server.add_blob(REPOSITORY, config.as_bytes());
        let mut manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST,
            "config": descriptor(CONFIG, config.as_bytes()), "layers": layers,
        });
        (case.change_manifest)(&mut manifest);
        let text = manifest.to_string();
        match &case.index {
            None => self.server.add_manifest(REPOSITORY, &tag, &case.media_type, text.as_bytes()),
            Some(index) => {
                self.server.add_manifest(REPOSITORY, "", &case.media_type, text.as_bytes());
                let index = index(&self.server, descriptor(&case.media_type, text.as_bytes()));
                let media_type = index["mediaType"].as_str().unwrap_or_default();
                self.server.add_manifest(REPOSITORY, &tag, media_type, index.to_string().as_bytes());
            }
        }
        self.server.name(REPOSITORY, &tag)
    }
}

fn one(run: &mut Run<'_>, bench: &Bench, case: &Case, input: &str) {
    run.begin_case();
    let name = bench.publish(case);
    let both = run.pair.both();
    let limited = case.limit.map(|limit| [both.ours.within(limit), both.theirs.within(limit)]);
    let [our_cri, their_cri] =
        limited.as_ref().map_or([both.ours, both.theirs], |[ours, theirs]| [ours, theirs]);
    let (our_pod, their_pod) = (&bench.pods.ours, &bench.pods.theirs);
    let mut seen = std::thread::scope(|scope| {
        let ours = scope.spawn(|| see(our_cri, &name, our_pod));
        let theirs = see(their_cri, &name, their_pod);
        Both { ours: ours.join().expect("no panic"), theirs }
    });
    bench.server.clear();
    // Errors are for the reader: their words differ.
    let mut input = format!("{input} {}", case.config);
    for (side, facts) in [("coracle", &mut seen.ours), ("containerd", &mut seen.theirs)] {
        let errors: Vec<String> = facts.keys().filter(|key| key.starts_with("error")).cloned().collect();
        for error in errors {
            let text = facts.remove(&error).unwrap_or_default();
            input.push_str(&format!("\n    {side}: {error}: {text}"));
        }
    }
    let value = |facts: &Facts, name: &str| facts.get(name).cloned().unwrap_or("(no such fact)".to_owned());
    let names: BTreeSet<&String> = seen.ours.keys().chain(seen.theirs.keys()).collect();
    for name in names.iter().filter(|name| !is_consequence(&seen, name)) {
        let (ours, theirs) = (value(&seen.ours, name), value(&seen.theirs, name));
        run.compare(&format!("{}: {name}", case.name), &ours, &theirs, &input);
    }
}

/// Whether the sides differ on the fact because only one of them took the image, or started the container.
fn is_consequence(seen: &Both<Facts>, name: &str) -> bool {
    const PULLED: &str = "pulled";
    let differs = |name: &str| seen.ours.get(name) != seen.theirs.get(name);
    let run = name.split_once(", ").map(|(way, _)| format!("{way}, run"));
    name != PULLED && differs(PULLED) || run.is_some_and(|run| run != name && differs(&run))
}

/// Pulls the image, asks for it, runs containers of it, and removes it.
fn see(cri: &Cri, name: &str, pod: &(String, PodSandboxConfig)) -> Facts {
    let mut facts = Facts::new();
    let pulled = cri.pull_image(pull(name));
    facts.insert("pulled".into(), if pulled.is_ok() { "accepted" } else { "refused" }.into());
    match pulled {
        Err(status) => drop(facts.insert("error of the pull".into(), status.message().into())),
        Ok(answer) => {
            facts.insert("image ref".into(), answer.image_ref);
            status(cri, name, &mut facts);
            for way in ["of the image", "arguments", "command"] {
                facts.extend(contained(cri, name, way, pod));
            }
        }
    }
    let image = Some(ImageSpec { image: name.into(), ..ImageSpec::default() });
    // An image that was refused is not there.
    let _ = cri.remove_image(RemoveImageRequest { image });
    facts
}

fn status(cri: &Cri, name: &str, facts: &mut Facts) {
    let image = Some(ImageSpec { image: name.into(), ..ImageSpec::default() });
    let answer = cri.image_status(ImageStatusRequest { image, verbose: false });
    let Ok(Some(image)) = answer.map(|answer| answer.image) else {
        facts.insert("status".into(), "no image".into());
        return;
    };
    let mut put = |name: &str, value: String| facts.insert(format!("status, {name}"), value);
    put("id", image.id);
    put("tags", image.repo_tags.join(" "));
    put("digests", image.repo_digests.join(" "));
    put("uid", image.uid.map_or("none".into(), |uid| uid.value.to_string()));
    put("username", image.username);
    put("pinned", image.pinned.to_string());
}

/// Runs one container; returns its exit and output, or the error.
fn contained(cri: &Cri, image: &str, way: &str, (pod_id, pod): &(String, PodSandboxConfig)) -> Facts {
    let mut facts = Facts::new();
    let words: &[&str] = if way == "of the image" { &[] } else { &WORDS };
    let mut config = container(&format!("c{}", fresh()), image, words, pod);
    if way == "command" {
        config.command = vec!["/probe".into()];
    }
    config.labels.clear();
    let mut put = |name: &str, value: String| facts.insert(format!("{way}, {name}"), value);
    match start(cri, pod_id, &config, pod) {
        Ok(id) => {
            let status = ended(cri, &id);
            put("run", "started".into());
            put("code", status.exit_code.to_string());
            put("reason", status.reason);
            put("image", status.image.unwrap_or_default().image);
            put("image ref", status.image_ref);
            put("image id", status.image_id);
            put("stop signal", format!("{:?}", status.stop_signal));
            facts.extend(printed(way, &id, &config, pod));
        }
        Err(status) => {
            put("run", "not started".into());
            facts.insert(format!("error, {way}"), status.message().into());
        }
    }
    remove_containers(cri, pod_id, way, &mut facts);
    facts
}

fn ended(cri: &Cri, id: &str) -> ContainerStatus {
    const PATIENCE_SECONDS: u64 = 30;
    let patience = Duration::from_secs(PATIENCE_SECONDS);
    let ended = host::wait_within(patience, || {
        let status = cri.container(id);
        (status.state() == ContainerState::ContainerExited).then_some(status)
    });
    ended.unwrap_or_else(|| cri.container(id))
}

/// Returns the output of the process, fact by fact if it is the probe's report.
fn printed(way: &str, id: &str, config: &ContainerConfig, pod: &PodSandboxConfig) -> Facts {
    const REPORT_FACTS_MIN: usize = 10;
    let log = PathBuf::from(&pod.log_directory).join(&config.log_path);
    let text = output(&String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()));
    let own = [(id.to_owned(), "CONTAINER")];
    let report = Report::of(&text, &own);
    if report.len() < REPORT_FACTS_MIN {
        return Facts::from([(format!("{way}, output"), text.escape_debug().to_string())]);
    }
    let empty = Report::default();
    let facts = report.beside(&empty).into_iter().filter(|(name, ..)| is_of_the_image(name));
    facts.map(|(name, value, _)| (format!("{way}, {name}"), value.to_owned())).collect()
}

/// Whether an image's configuration decides on this fact of the probe's report. The part `containers` has all others.
fn is_of_the_image(fact: &str) -> bool {
    fact.starts_with("environment ")
        || ["process directory", "status Uid", "status Gid", "status Groups"].contains(&fact)
        || fact.starts_with("status Cap")
}

/// Removes all containers of the pod; one that failed to start is seen first.
fn remove_containers(cri: &Cri, pod_id: &str, way: &str, facts: &mut Facts) {
    let filter =
        coracle_tests::cri::proto::ContainerFilter { pod_sandbox_id: pod_id.into(), ..Default::default() };
    let request = coracle_tests::cri::proto::ListContainersRequest { filter: Some(filter) };
    for found in cri.list_containers(request).expect("a list").containers {
        if facts.get(&format!("{way}, run")).is_some_and(|run| run == "not started") {
            let status = cri.container(&found.id);
            facts.insert(format!("{way}, failed"), format!("{:?} {}", status.state(), status.exit_code));
            facts.insert(format!("{way}, failed reason"), status.reason);
        }
        let container_id = found.id;
        let _ = cri.stop_container(StopContainerRequest { container_id: container_id.clone(), timeout: 0 });
        // containerd may not have noticed yet that it has ended.
        const PATIENCE: Duration = Duration::from_secs(30);
        let request = RemoveContainerRequest { container_id };
        host::wait_within(PATIENCE, || cri.remove_container(request.clone()).ok()).expect("removed");
    }
}
