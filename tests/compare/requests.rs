//! Valid and invalid CRI messages, field by field: which are accepted, and what comes of them. Each row of a table makes one change
//! to a request like a kubelet's; random cases make up to three.
//!
//! The answer is `OK`, `not found` or another code that a kubelet acts upon, or `refused: CODE`. The words of an error are no fact.

mod calls;
mod containers;
mod pods;

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::{
    ContainerConfig, ContainerState, ContainerStatus, ContainerStatusRequest, CreateContainerRequest,
    ListContainersRequest, ListPodSandboxRequest, NamespaceMode, PodSandboxConfig, PodSandboxStatusRequest,
    RemoveContainerRequest, RemovePodSandboxRequest, StartContainerRequest, StopPodSandboxRequest,
};
use coracle_tests::request::{bridge_pod, container, create, host_pod, run as run_request, security};
use nix::sys::stat::Mode;
use tonic::{Code, Status};

use crate::Run;
use crate::report::{Report, output};

/// A row of a table: a name, which never changes, and the change that it makes to a valid request.
type Row<T> = (&'static str, fn(&mut T));

/// Stands in a request for the side's own directory with files for mounts.
const PLACES: &str = "/PLACES";

/// Outcome of a request: facts in their order, each with its value, and the words of errors for a reader.
#[derive(Default)]
struct Seen {
    facts: Vec<(String, String)>,
    words: Vec<String>,
}

impl Seen {
    fn fact(&mut self, name: &str, value: impl Into<String>) {
        self.facts.push((name.to_owned(), value.into()));
    }

    /// Adds a value in its debug representation to the canonical text.
    fn value(&mut self, name: &str, value: &impl Debug) {
        self.fact(name, format!("{value:?}"));
    }

    /// Adds the answer of a call; returns what it answered.
    fn answer<T>(&mut self, name: &str, answer: Result<T, Status>) -> Option<T> {
        self.fact(name, outcome(&answer));
        self.words.extend(answer.as_ref().err().map(|status| status.message().to_owned()));
        answer.ok()
    }
}

/// The outcome of a call, as far as a kubelet distinguishes it.
fn outcome<T>(answer: &Result<T, Status>) -> String {
    match answer {
        Ok(_) => "OK".into(),
        Err(status) => match status.code() {
            Code::NotFound => "not found".into(),
            Code::Unimplemented => "not implemented".into(),
            Code::DeadlineExceeded => "deadline exceeded".into(),
            code => format!("refused: {code:?}"),
        },
    }
}

/// One runtime with what the cases share.
struct Side<'a> {
    name: &'static str,
    cri: &'a Cri,
    image: &'a str,
    folder: PathBuf,
    pod: PodSandboxConfig,
    pod_id: String,
}

impl<'a> Side<'a> {
    fn new(name: &'static str, cri: &'a Cri, image: &'a str, folder: &Path) -> Side<'a> {
        let folder = folder.join(name);
        make_places(&folder.join("places"));
        let mut side = Side { name, cri, image, folder, pod: host_pod("shared"), pod_id: String::new() };
        side.renew();
        side
    }

    /// Replaces the shared pod.
    fn renew(&mut self) {
        if !self.pod_id.is_empty() {
            self.remove(&self.pod_id);
        }
        self.pod = self.new_pod("shared", host_pod);
        self.pod_id = self.cri.run_pod(&self.pod);
    }

    /// The configuration of a pod with a directory for logs.
    fn new_pod(&self, name: &str, kind: fn(&str) -> PodSandboxConfig) -> PodSandboxConfig {
        let logs = self.folder.join("logs");
        fs::create_dir_all(&logs).expect("a directory for logs");
        let mut pod = kind(name);
        // The same on both sides.
        let uid = format!("uid-{name}");
        pod.labels.insert("io.kubernetes.pod.uid".into(), uid.clone());
        pod.metadata.as_mut().expect("every pod has it").uid = uid;
        pod.log_directory = logs.display().to_string();
        pod
    }

    /// The configuration of a container of the shared pod that reports and exits.
    fn reporter(&self) -> ContainerConfig {
        let mut config = container("one", self.image, &["report", "status"], &self.pod);
        config.annotations = [("note".to_owned(), "value".to_owned())].into();
        config
    }

    /// A text without what is the side's own.
    fn plain(&self, text: &str) -> String {
        let places = self.folder.join("places");
        let text = text.replace(&places.display().to_string(), PLACES);
        text.replace(&self.folder.display().to_string(), "/FOLDER").replace(&self.pod_id, "POD")
    }

    /// Removes a pod, whatever its state.
    fn remove(&self, id: &str) {
        // What fails here fails again when the pair stops, which reports it.
        let _ = self.cri.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: id.into() });
        let _ = self.cri.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: id.into() });
    }

    /// Creates and starts a container, waits a moment for its end, and says what became of it.
    fn run_container(&self, mut config: ContainerConfig, seen: &mut Seen) {
        for mount in &mut config.mounts {
            let own = self.folder.join("places").display().to_string();
            mount.host_path = mount.host_path.replace(PLACES, &own);
        }
        self.run_created(create(&self.pod_id, &config, &self.pod), seen);
    }

    /// Sends the request, starts the container, and says what became of it.
    fn run_created(&self, request: CreateContainerRequest, seen: &mut Seen) {
        let id = match self.cri.create_container(request) {
            Ok(made) => made.container_id,
            Err(status) => {
                seen.answer::<()>("answer", Err(status));
                return seen.fact("refused by", "CreateContainer");
            }
        };
        let started = self.cri.start_container(StartContainerRequest { container_id: id.clone() });
        if seen.answer("answer", started).is_none() {
            seen.fact("refused by", "StartContainer");
        }
        self.describe(&id, seen);
        let removed = self.cri.remove_container(RemoveContainerRequest { container_id: id });
        seen.answer("removal", removed);
    }

    /// The status of a container after a moment.
    fn settled(&self, id: &str) -> Option<ContainerStatus> {
        const MOMENT: Duration = Duration::from_secs(5);
        let until = Instant::now() + MOMENT;
        loop {
            let ask = ContainerStatusRequest { container_id: id.into(), verbose: false };
            let status = self.cri.container_status(ask).ok()?.status?;
            if status.state() == ContainerState::ContainerExited || Instant::now() > until {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// All that status, list and log say of a container.
    fn describe(&self, id: &str, seen: &mut Seen) {
        let Some(status) = self.settled(id) else { return seen.fact("status", "no such container") };
        seen.fact("state", status.state().as_str_name());
        seen.value("exit code", &status.exit_code);
        seen.fact("reason", status.reason.clone());
        seen.value("metadata", &status.metadata);
        // containerd leaves user_specified_image empty, and no kubelet reads it here.
        seen.value("image", &status.image.as_ref().map(|image| &image.image));
        seen.fact("image reference", status.image_ref.clone());
        seen.fact("image id", status.image_id.clone());
        seen.value("labels", &sorted(&status.labels));
        seen.value("annotations", &sorted(&status.annotations));
        let mounts: Vec<_> = status.mounts.iter().map(|mount| self.plain(&format!("{mount:?}"))).collect();
        seen.fact("mounts", mounts.join("\n"));
        seen.fact("log path", self.plain(&status.log_path));
        let linux = status.resources.as_ref().and_then(|resources| resources.linux.as_ref());
        let mut linux = linux.cloned().unwrap_or_default();
        let rest = (
            std::mem::take(&mut linux.memory_swap_limit_in_bytes),
            std::mem::take(&mut linux.hugepage_limits),
        );
        seen.value("resources", &linux);
        seen.value("swap and huge pages", &rest);
        seen.value("user", &status.user);
        seen.value("stop signal", &status.stop_signal);
        let is_set = [status.created_at, status.started_at, status.finished_at].map(|time| time > 0);
        seen.value("times are set", &is_set);
        let all = self.cri.list_containers(ListContainersRequest::default()).map(|answer| answer.containers);
        let listed = all.unwrap_or_default().into_iter().find(|container| container.id == id);
        let listed = listed.map(|entry| (entry.state, entry.image.map(|image| image.image), entry.image_id));
        seen.value("list", &listed);
        let text = output(&String::from_utf8_lossy(&fs::read(&status.log_path).unwrap_or_default()));
        let own = [(id.to_owned(), "CONTAINER"), (self.pod_id.clone(), "POD")];
        // The part "containers" compares the rest, which no request changes.
        const FACTS: [&str; 5] = ["status Cap", "status Uid", "status Gid", "status Groups", "etc "];
        let report = Report::of(&text, &own);
        let facts = report.facts().filter(|(fact, _)| FACTS.iter().any(|start| fact.starts_with(start)));
        for (fact, value) in facts {
            seen.fact(&format!("process {fact}"), value);
        }
        let _ = fs::remove_file(&status.log_path);
    }

    /// Runs a pod of a changed request, and a container in it.
    fn run_pod(&mut self, kind: pods::Kind, changes: &[Row<pods::Draft>], seen: &mut Seen) {
        let pod = self.new_pod("odd", kind);
        let mut draft = run_request(&pod);
        changes.iter().for_each(|(_, change)| change(&mut draft));
        if let Some(config) = &mut draft.config {
            config.log_directory = config.log_directory.replace(PLACES, &self.folder.display().to_string());
        }
        let config = draft.config.clone().unwrap_or_default();
        let Some(answer) = seen.answer("answer", self.cri.run_pod_sandbox(draft)) else { return };
        let id = answer.pod_sandbox_id;
        self.describe_pod(&id, seen);
        let mut inner = container("one", self.image, &["report", "status", "etc"], &config);
        inner.log_path = "one/0.log".into();
        let (pod, pod_id) =
            (std::mem::replace(&mut self.pod, config), std::mem::replace(&mut self.pod_id, id));
        let mut within = Seen::default();
        self.run_container(inner, &mut within);
        let id = std::mem::replace(&mut self.pod_id, pod_id);
        self.pod = pod;
        seen.facts.extend(within.facts.into_iter().map(|(fact, value)| (format!("container {fact}"), value)));
        seen.words.extend(within.words);
        let stop = self.cri.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: id.clone() });
        seen.answer("stop", stop);
        let remove = self.cri.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: id.clone() });
        if seen.answer("removal", remove).is_none() {
            // Otherwise the next pod could not have its name.
            self.remove(&id);
        }
    }

    /// All that status and list say of a pod.
    fn describe_pod(&self, id: &str, seen: &mut Seen) {
        let ask = PodSandboxStatusRequest { pod_sandbox_id: id.into(), verbose: false };
        let answer = self.cri.pod_sandbox_status(ask);
        let Some(status) = seen.answer("status", answer).and_then(|answer| answer.status) else { return };
        seen.fact("state", status.state().as_str_name());
        seen.value("metadata", &status.metadata);
        let network = status.network.unwrap_or_default();
        seen.value("has an address", &!network.ip.is_empty());
        seen.value("more addresses", &network.additional_ips.len());
        let mut options = status.linux.and_then(|linux| linux.namespaces?.options).unwrap_or_default();
        // The node's user namespace: said or not said.
        options.userns_options.take_if(|options| options.mode() == NamespaceMode::Node);
        seen.value("namespaces", &options);
        seen.value("labels", &sorted(&status.labels));
        seen.value("annotations", &sorted(&status.annotations));
        seen.fact("handler", status.runtime_handler);
        let all = self.cri.list_pod_sandbox(ListPodSandboxRequest::default()).map(|answer| answer.items);
        let listed = all.unwrap_or_default().into_iter().find(|pod| pod.id == id);
        let listed = listed.map(|pod| (pod.state, pod.metadata, pod.runtime_handler));
        seen.value("list", &listed);
    }
}

/// A map in the order of its keys.
fn sorted(map: &std::collections::HashMap<String, String>) -> Vec<(&String, &String)> {
    let mut pairs: Vec<_> = map.iter().collect();
    pairs.sort();
    pairs
}

/// Whether the machine has cgroup v2 alone.
fn has_cgroup_v2() -> bool {
    Path::new("/sys/fs/cgroup/cgroup.controllers").exists()
}

/// Makes files of all kinds for mounts.
fn make_places(folder: &Path) {
    fs::create_dir_all(folder.join("folder")).expect("a folder");
    fs::write(folder.join("file"), "text\n").expect("a file");
    fs::write(folder.join("bad.json"), "{").expect("a file");
    symlink("file", folder.join("link")).expect("a link");
    symlink("nowhere", folder.join("dangling")).expect("a link");
    symlink("loop", folder.join("loop")).expect("a link");
    nix::unistd::mkfifo(&folder.join("fifo"), Mode::S_IRWXU).expect("a FIFO");
    drop(UnixListener::bind(folder.join("socket")).expect("a socket"));
}

pub(crate) fn run(run: &mut Run<'_>) {
    let pair = run.pair;
    let image = pair.probe();
    let folder = PathBuf::from(pair.log_directory("requests"));
    let both = pair.both();
    let mut ours = Side::new("ours", both.ours, &image, &folder);
    let mut theirs = Side::new("theirs", both.theirs, &image, &folder);
    // Changes that make a difference by themselves: with others they would only repeat it.
    let mut different = BTreeSet::new();
    for row in containers::rows() {
        compare(run, "container", &[row.0], &mut different, [&mut ours, &mut theirs], |side, seen| {
            run_changed(side, &[*row], seen);
        });
    }
    for (kind, row) in pods::rows() {
        compare(run, "pod", &[row.0], &mut different, [&mut ours, &mut theirs], |side, seen| {
            side.run_pod(kind, &[row], seen);
        });
    }
    for (name, call) in calls::ROWS {
        compare(run, "call", &[name], &mut different, [&mut ours, &mut theirs], call);
    }
    run.end_table();
    while run.goes_on() {
        random(run, &different, [&mut ours, &mut theirs]);
    }
    for side in [ours, theirs] {
        side.remove(&side.pod_id);
        let _ = fs::remove_dir_all(&side.folder);
    }
    remove_cgroups();
}

/// Removes the cgroup parents that pods of this part named, which no runtime removes.
fn remove_cgroups() {
    let root = Path::new("/sys/fs/cgroup");
    let hierarchies = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
    for hierarchy in hierarchies.chain([root.to_owned()]) {
        for place in ["compare-odd/relative", "compare-odd/absolute", "compare-odd"] {
            // Most hierarchies do not have it.
            let _ = fs::remove_dir(hierarchy.join(place));
        }
    }
}

fn run_changed(side: &Side<'_>, changes: &[Row<ContainerConfig>], seen: &mut Seen) {
    let mut config = side.reporter();
    changes.iter().for_each(|(_, change)| change(&mut config));
    side.run_container(config, seen);
}

/// One random case: two or three changes of a container, or of a pod.
fn random(run: &mut Run<'_>, different: &BTreeSet<&'static str>, sides: [&mut Side<'_>; 2]) {
    const PODS_ONE_IN: u64 = 8;
    let count = 2 + run.random.below(2);
    let mut ignored = BTreeSet::new();
    let pick = |run: &mut Run<'_>, all: usize| {
        let places: BTreeSet<usize> = (0..count).map(|_| run.random.below(all as u64) as usize).collect();
        places
    };
    if run.random.below(PODS_ONE_IN) == 0 {
        let rows: Vec<_> = pods::rows().filter(|(_, row)| !different.contains(row.0)).collect();
        let chosen: Vec<_> = pick(run, rows.len()).into_iter().map(|at| rows[at]).collect();
        let needs_network =
            chosen.iter().any(|(kind, _)| std::ptr::fn_addr_eq(*kind, bridge_pod as pods::Kind));
        let kind: pods::Kind = if needs_network { bridge_pod } else { host_pod };
        let changes: Vec<_> = chosen.into_iter().map(|(_, row)| row).collect();
        let names: Vec<_> = changes.iter().map(|(name, _)| *name).collect();
        return compare(run, "pod", &names, &mut ignored, sides, |side, seen| {
            side.run_pod(kind, &changes, seen)
        });
    }
    let rows: Vec<_> = containers::rows().filter(|row| !different.contains(row.0)).copied().collect();
    let changes: Vec<_> = pick(run, rows.len()).into_iter().map(|at| rows[at]).collect();
    let mut config = ContainerConfig::default();
    changes.iter().for_each(|(_, change)| change(&mut config));
    let has_two_users =
        security(&mut config).run_as_user.is_some() && !security(&mut config).run_as_username.is_empty();
    if has_two_users {
        // The table has it.
        return;
    }
    let names: Vec<_> = changes.iter().map(|(name, _)| *name).collect();
    compare(run, "container", &names, &mut ignored, sides, |side, seen| run_changed(side, &changes, seen));
}

/// Does the same with both sides, and compares the facts: those of the answers always, the others if both did the same.
fn compare(
    run: &mut Run<'_>,
    kind: &str,
    names: &[&'static str],
    different: &mut BTreeSet<&'static str>,
    sides: [&mut Side<'_>; 2],
    mut act: impl FnMut(&mut Side<'_>, &mut Seen),
) {
    run.begin_case();
    let [ours, theirs] = sides.map(|side| {
        let mut seen = Seen::default();
        act(side, &mut seen);
        for (_, value) in &mut seen.facts {
            *value = side.plain(value);
        }
        let words = seen.words.join("; ");
        let words = format!("{} said {:?}", side.name, shortened(&side.plain(&words)));
        (seen, words)
    });
    let input = format!("{}; {}", ours.1, theirs.1);
    let before = run.unexplained;
    let is_same = ours.0.facts.first() == theirs.0.facts.first();
    let is_refused = |seen: &Seen| seen.facts.first().is_none_or(|(_, value)| value != "OK");
    // Which of several bad values is met first is no fact.
    if names.len() > 1 && is_refused(&ours.0) && is_refused(&theirs.0) {
        return;
    }
    let mut say = |fact: &str, ours: &str, theirs: &str| {
        run.compare(&format!("{kind} {}: {fact}", names.join(" + ")), ours, theirs, &input);
    };
    let of = |seen: &Seen, fact: &str| {
        seen.facts.iter().find(|(name, _)| name == fact).map(|(_, value)| value.clone())
    };
    for (fact, value) in &ours.0.facts {
        match of(&theirs.0, fact) {
            Some(other) if is_same || fact == "answer" || kind == "call" => say(fact, value, &other),
            // After a call with another answer the facts of a row go on.
            None if is_same && kind != "call" => say(fact, value, "(no such fact)"),
            _ => {}
        }
    }
    for (fact, other) in &theirs.0.facts {
        if is_same && kind != "call" && of(&ours.0, fact).is_none() {
            say(fact, "(no such fact)", other);
        }
    }
    // Also if it is known: with others it would only repeat it.
    if run.unexplained > before || is_refused(&ours.0) != is_refused(&theirs.0) {
        different.extend(names);
    }
}

/// The beginning of a text.
fn shortened(text: &str) -> String {
    const CHARACTERS_MAX: usize = 300;
    text.chars().take(CHARACTERS_MAX).collect()
}
