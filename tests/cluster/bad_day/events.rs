//! The events of a bad day. Each of them begins with a rolling update, so that pods are made and ended throughout, and
//! returns with everything running again, but not yet settled.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use coracle_tests::host::wait_within;
use coracle_tests::image::Image;

use super::{Day, Victims, name_of};
use crate::cluster::{IMAGES, tools};

/// Shortest time of an event, and the range above it.
const EVENT_SECONDS: (u64, u64) = (15, 25);
/// Time limit of an event that ends by itself.
const EVENT_LIMIT: Duration = Duration::from_secs(240);
/// Maximum time of kills during a drain.
const DRAIN_KILLS: Duration = Duration::from_secs(60);
/// Number of containers that exceed their memory in one event.
const HOGS: u64 = 4;
/// Shortest time under pressure. The kubelet evicts a pod every ten seconds.
const PRESSURE: Duration = Duration::from_secs(20);
/// Number of pods that are evicted before the pressure ends.
const EVICTED: usize = 2;
/// Name of the image that no container uses.
const UNUSED: &str = "localhost/unused:1";

/// A disturbance of the cluster.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    /// A rolling update.
    Update,
    /// Containers exceed the limit of their memory.
    Memory,
    /// The node has too little of something for the kubelet, by the name of its signal: it evicts pods.
    Pressure(&'static str),
    /// The node has too little disk: the kubelet removes images that no container uses, and evicts pods.
    Disk,
    /// The node is drained, and serves again.
    Drain,
    /// The API server does not run for a while.
    ApiServer,
}

impl Event {
    /// Each event once.
    pub(super) const ALL: [Event; 7] = [
        Event::Update,
        Event::Memory,
        Event::Pressure("memory.available"),
        Event::Pressure("pid.available"),
        Event::Disk,
        Event::Drain,
        Event::ApiServer,
    ];

    /// Name for the report.
    pub(super) fn name(self) -> &'static str {
        match self {
            Event::Update => "a rolling update",
            Event::Memory => "containers over their memory",
            Event::Pressure("memory.available") => "evictions for memory",
            Event::Pressure(_) => "evictions for PIDs",
            Event::Disk => "evictions for disk, image garbage collection",
            Event::Drain => "a drain",
            Event::ApiServer => "the API server away",
        }
    }
}

impl Day {
    /// Lets an event happen under kills.
    pub(super) fn happen(&mut self, event: Event) {
        self.counts.updates += 1;
        let generation = format!("GENERATION={}", self.counts.updates);
        self.cluster.must(&["set", "env", "deployment/web", &generation]);
        match event {
            Event::Update => self.kill_for_a_while(),
            Event::Memory => self.exceed_memory(),
            Event::Pressure(signal) => self.press(signal),
            Event::Disk => self.fill_disk(),
            Event::Drain => self.drain(),
            Event::ApiServer => self.miss_apiserver(),
        }
    }

    fn kill_for_a_while(&mut self) {
        let (shortest, range) = EVENT_SECONDS;
        let time = Duration::from_secs(shortest + self.random.below(range));
        self.kill_until(Victims::Both, time, |_| false);
    }

    fn exceed_memory(&mut self) {
        let manifest = include_str!("../manifests/hog.yaml");
        let number = self.counts.updates;
        let hogs = (0..HOGS).map(|hog| manifest.replace("NAME", &format!("hog-{number}-{hog}")));
        self.cluster.apply(&hogs.collect::<String>());
        self.kill_for_a_while();
    }

    fn press(&mut self, signal: &str) {
        self.begin_pressure(signal);
        let shortest = Instant::now() + PRESSURE;
        let is_evicted = |day: &mut Day| day.evicted() >= EVICTED && Instant::now() > shortest;
        if !self.kill_until(Victims::Runtime, EVENT_LIMIT, is_evicted) {
            self.wrong.push(format!("{signal}: the kubelet evicted {} pods", self.evicted()));
        }
        self.end_pressure();
    }

    fn fill_disk(&mut self) {
        let image = Image::probe(b"no container uses this", "unused");
        if let Err(error) = self.cluster.node.try_import(&image.oci_archive(UNUSED)) {
            self.wrong.push(format!("import of {UNUSED}: {error}"));
        }
        self.begin_pressure("imagefs.available");
        let shortest = Instant::now() + PRESSURE;
        let is_collected =
            |day: &mut Day| day.evicted() > 0 && !day.has_image(UNUSED) && Instant::now() > shortest;
        if self.kill_until(Victims::Runtime, EVENT_LIMIT, is_collected) {
            self.counts.images_collected += 1;
        } else {
            let (evicted, has) = (self.evicted(), self.has_image(UNUSED));
            self.wrong.push(format!("disk: {evicted} pods evicted, unused image present: {has}"));
        }
        self.end_pressure();
        // The kubelet may have removed an image whose last container it had evicted.
        self.import_again();
    }

    fn import_again(&mut self) {
        let imported = self.cluster.import(&tools().join(IMAGES)).wait().expect("our child");
        if !imported.success() {
            self.wrong.push(format!("an import failed: {}", self.cluster.log("import")));
        }
    }

    /// Starts a kubelet whose soft eviction threshold of this signal is always exceeded. A soft threshold is not taken
    /// from what the node offers, so that the kubelet refuses no pod that runs.
    fn begin_pressure(&mut self, signal: &str) {
        self.cluster.configure_kubelet(&format!(
            "evictionSoft: {{{signal}: 1000Ti}}\nevictionSoftGracePeriod: {{{signal}: 1s}}\n\
             evictionMaxPodGracePeriod: 1\nimageMinimumGCAge: 1s\n"
        ));
        self.kill_kubelet();
    }

    fn end_pressure(&mut self) {
        self.cluster.configure_kubelet("");
        self.kill_kubelet();
    }

    /// Number of evicted pods that were not removed yet.
    fn evicted(&self) -> usize {
        let pods = self.cluster.get(&["pods"]).unwrap_or_default();
        let pods = pods["items"].as_array().into_iter().flatten();
        pods.filter(|pod| pod["status"]["reason"] == "Evicted").map(name_of).count()
    }

    fn has_image(&self, name: &str) -> bool {
        let output = self.cluster.node.image_command(&["list"]);
        let (repository, _) = name.rsplit_once(':').unwrap_or((name, ""));
        // A list that cannot be had says nothing.
        !output.status.success() || String::from_utf8_lossy(&output.stdout).contains(repository)
    }

    fn drain(&mut self) {
        let mut command = self.cluster.kubectl_command(&["drain", "node", "--force", "--ignore-daemonsets"]);
        let log = self.cluster.node.folder().join("logs/drain.log");
        let file = std::fs::File::create(&log).expect("a log");
        command.arg("--delete-emptydir-data");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
        let mut child = command.spawn().expect("kubectl runs");
        let mut status = None;
        let mut is_over = || {
            status = child.try_wait().expect("our child");
            status.is_some()
        };
        // A kubelet that lives for seconds ends few pods on a busy machine: the rest of the drain is without kills.
        if !self.kill_until(Victims::Both, DRAIN_KILLS, |_| is_over()) {
            wait_within(EVENT_LIMIT, || {
                self.revive_kubelet();
                is_over().then_some(())
            });
        }
        if status.is_none_or(|status| !status.success()) {
            let _ = child.kill();
            let _ = child.wait();
            self.wrong.push(format!("the drain ended with {status:?}: {}", end_of(&log)));
        }
        self.counts.drains += 1;
        self.cluster.must(&["uncordon", "node"]);
    }

    fn miss_apiserver(&mut self) {
        let arguments = self.cluster.kill_apiserver();
        let begin = Instant::now();
        self.kill_for_a_while();
        self.counts.away += begin.elapsed();
        self.cluster.restart_apiserver(&arguments);
    }
}

fn end_of(log: &Path) -> String {
    const LINES: usize = 10;
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with("evicting")).collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}
