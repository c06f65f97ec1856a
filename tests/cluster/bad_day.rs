//! A node's bad day: kubelet and coracle are killed with SIGKILL at random moments, while Kubernetes updates, evicts,
//! drains and removes pods, images are collected, containers exceed their memory, and the API server is away. The day
//! consists of rounds: an event under kills, and then a time without kills in which everything must become as Kubernetes
//! wants it. Three things are counted, and must be 0: restarts that Kubernetes did not ask for, pods that do not become
//! ready or do not end, and objects that belong to no pod. `CORACLE_SEED` repeats the choices of an earlier day.
//!
//! A deployment of 100 pods is updated without end. coracle is killed every four seconds, the kubelet every six, on average, and each
//! is away for up to 1.5 s. After each event there are no kills until everything is as Kubernetes wants it: 100 ready pods of the
//! newest generation, one sandbox and one container for each, and no cgroup, mount, network namespace, link, lease, record or monitor
//! beside them. A pod is stuck if nothing has changed for three minutes, or twelve minutes after the event. A container that a
//! kubelet has stopped may be started again: a kubelet that is killed between the stop of an evicted pod's container and its note of
//! the eviction has a successor without that note.

mod events;
mod objects;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use coracle_tests::random::Random;
use serde_json::Value;

use crate::cluster::Cluster;
use crate::history::History;
use events::Event;

/// Default length of a day; the variable `MINUTES` overrides it.
const MINUTES: u64 = 60;
/// Number of pods of the deployment; together with the others that a day has they reach the kubelet's limit of 110.
const PODS: usize = 100;
/// Time limit without any change after an event. The kubelet looks for containers of removed pods once a minute.
const SETTLE_LIMIT: Duration = Duration::from_secs(180);
/// Interval of looking at the cluster, which costs a run of kubectl.
const LOOK_AGAIN: Duration = Duration::from_secs(2);
/// Maximum time from one kill of coracle to the next one, in milliseconds.
const RUNTIME_KILL_MS: u64 = 8000;
/// Maximum time from one kill of the kubelet to the next one. Its start takes some seconds.
const KUBELET_KILL_MS: u64 = 12_000;
/// Maximum time without the killed program.
const DEAD_MS: u64 = 1500;

/// The programs that are killed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Victims {
    /// Kubelet and coracle.
    Both,
    /// Only coracle, because the event needs a kubelet that lives for a while.
    Runtime,
}

/// Numbers of the events of a day, for the report.
#[derive(Default)]
struct Counts {
    rounds: u32,
    runtime_kills: u32,
    kubelet_kills: u32,
    /// Starts of a kubelet that had ended itself.
    kubelet_starts: u32,
    updates: u32,
    drains: u32,
    away: Duration,
    images_collected: u32,
    oom_killed: u32,
    /// Pods that the kubelet ended or refused, by the reason in their status.
    failed: BTreeMap<String, u32>,
}

/// A day in progress.
struct Day {
    cluster: Cluster,
    random: Random,
    history: History,
    counts: Counts,
    /// The highest number of restarts that the API server showed for each pod.
    restarts: BTreeMap<String, u64>,
    /// Pods that did not become ready or did not end in time.
    stuck: Vec<String>,
    /// Objects that belong to no pod.
    left: Vec<String>,
    /// Anything else that was not as expected.
    wrong: Vec<String>,
}

/// Runs the day; panics if one of the counts is not 0.
pub(crate) fn run() {
    let minutes = std::env::var("MINUTES").map_or(MINUTES, |text| text.parse().expect("MINUTES is a number"));
    let random = Random::from_environment();
    let cluster = Cluster::start(&[]);
    cluster.apply(include_str!("manifests/day.yaml"));
    cluster.must(&["rollout", "status", "deployment/web", "--timeout=300s"]);
    cluster.say(&format!("a deployment of {PODS} is available"));
    let mut day = Day {
        cluster,
        random,
        history: History::default(),
        counts: Counts::default(),
        restarts: BTreeMap::new(),
        stuck: Vec::new(),
        left: Vec::new(),
        wrong: Vec::new(),
    };
    let end = Instant::now() + Duration::from_secs(minutes * 60);
    let mut events = Vec::new();
    while Instant::now() < end && day.stuck.is_empty() && day.left.is_empty() {
        if events.is_empty() {
            events = Event::ALL.to_vec();
            day.random.shuffle(&mut events);
        }
        if let Some(event) = events.pop() {
            day.round(event);
        }
    }
    if day.stuck.is_empty() {
        day.evening();
    }
    day.judge(minutes);
}

impl Day {
    /// An event under kills, and the time after it.
    fn round(&mut self, event: Event) {
        let before = (self.counts.runtime_kills, self.counts.kubelet_kills);
        self.happen(event);
        let begin = Instant::now();
        let rest = wait_while_it_changes(SETTLE_LIMIT, || self.unsettled());
        for line in rest {
            let list = if line.is_pod { &mut self.stuck } else { &mut self.left };
            list.push(format!("after {}: {}", event.name(), line.text));
        }
        self.history.read(&self.cluster);
        self.counts.rounds += 1;
        self.cluster.say(&format!(
            "{}: {} kills of coracle, {} of the kubelet; settled in {:.0} s; {} pods so far",
            event.name(),
            self.counts.runtime_kills - before.0,
            self.counts.kubelet_kills - before.1,
            begin.elapsed().as_secs_f64(),
            self.history.sandboxes.len()
        ));
    }

    /// Kills programs at random moments until `is_over` is true, for at most `limit`; returns whether it became true.
    fn kill_until(
        &mut self,
        victims: Victims,
        limit: Duration,
        mut is_over: impl FnMut(&mut Day) -> bool,
    ) -> bool {
        const STEP: Duration = Duration::from_millis(20);
        let end = Instant::now() + limit;
        let mut next_runtime = self.moment(RUNTIME_KILL_MS);
        let mut next_kubelet = self.moment(KUBELET_KILL_MS);
        let mut next_look = Instant::now() + LOOK_AGAIN;
        while Instant::now() < end {
            std::thread::sleep(STEP);
            if Instant::now() >= next_runtime {
                self.kill_runtime();
                next_runtime = self.moment(RUNTIME_KILL_MS);
            }
            if victims == Victims::Both && Instant::now() >= next_kubelet {
                self.kill_kubelet();
                next_kubelet = self.moment(KUBELET_KILL_MS);
            }
            self.revive_kubelet();
            if Instant::now() >= next_look {
                if is_over(self) {
                    return true;
                }
                next_look = Instant::now() + LOOK_AGAIN;
            }
        }
        false
    }

    fn moment(&mut self, range_ms: u64) -> Instant {
        Instant::now() + Duration::from_millis(self.random.below(range_ms))
    }

    fn kill_runtime(&mut self) {
        self.cluster.node.kill9();
        std::thread::sleep(Duration::from_millis(self.random.below(DEAD_MS)));
        self.cluster.node.launch();
        self.counts.runtime_kills += 1;
    }

    fn kill_kubelet(&mut self) {
        self.cluster.kill_kubelet();
        std::thread::sleep(Duration::from_millis(self.random.below(DEAD_MS)));
        self.cluster.start_kubelet();
        self.counts.kubelet_kills += 1;
    }

    fn revive_kubelet(&mut self) {
        self.counts.kubelet_starts += u32::from(self.cluster.revive_kubelet());
    }

    /// Pods that are not yet as Kubernetes wants them, or else objects that belong to no pod; empty at the end of each
    /// round.
    fn unsettled(&mut self) -> Vec<Line> {
        self.revive_kubelet();
        let Some(pods) = self.cluster.get(&["pods", "--all-namespaces"]) else {
            return vec![Line::pod("the API server does not answer".into())];
        };
        let pods = pods["items"].as_array().cloned().unwrap_or_default();
        self.note_restarts(&pods);
        self.remove_failed(&pods);
        let mut rest: Vec<Line> = pods.iter().filter_map(unready).map(Line::pod).collect();
        let is_web = |pod: &&Value| pod["metadata"]["labels"]["app"] == "web";
        let web = pods.iter().filter(is_web).count();
        if web != PODS || !self.cluster.is_rolled_out("web") {
            rest.push(Line::pod(format!("the update is not complete: {web} of {PODS} pods exist")));
        }
        if rest.is_empty() { self.unlisted(&pods) } else { rest }
    }

    /// Sandboxes and containers in the runtime's lists that do not belong to these pods, and objects that belong to no
    /// sandbox.
    fn unlisted(&self, pods: &[Value]) -> Vec<Line> {
        let listed = objects::listed(&self.cluster);
        let uids: BTreeSet<&str> = pods.iter().filter_map(|pod| pod["metadata"]["uid"].as_str()).collect();
        let unknown = listed.sandboxes.iter().filter(|(uid, _)| !uids.contains(uid.as_str()));
        let mut rest: Vec<Line> = unknown
            .map(|(uid, id)| Line::object(format!("sandbox {id:.13} of pod {uid}, which does not exist")))
            .collect();
        if listed.ready != pods.len() {
            rest.push(Line::object(format!("{} ready sandboxes of {} pods", listed.ready, pods.len())));
        }
        rest.extend(listed.ended.iter().cloned().map(Line::object));
        rest.extend(objects::strays(&self.cluster, &listed).into_iter().map(Line::object));
        rest
    }

    fn note_restarts(&mut self, pods: &[Value]) {
        for pod in pods.iter().filter(|pod| pod["metadata"]["namespace"] == "default") {
            let statuses = pod["status"]["containerStatuses"].as_array().into_iter().flatten();
            let count: u64 = statuses.filter_map(|status| status["restartCount"].as_u64()).sum();
            let highest = self.restarts.entry(name_of(pod)).or_default();
            *highest = count.max(*highest);
        }
    }

    /// Counts the pods that have failed by their reason, and removes them.
    fn remove_failed(&mut self, pods: &[Value]) {
        let is_failed = |pod: &&Value| {
            pod["status"]["phase"] == "Failed" && pod["metadata"]["deletionTimestamp"].is_null()
        };
        let failed: Vec<&Value> = pods.iter().filter(is_failed).collect();
        for pod in &failed {
            if pod["metadata"]["labels"]["app"] == "hog" {
                let end = &pod["status"]["containerStatuses"][0]["state"]["terminated"];
                if end["reason"] == "OOMKilled" && end["exitCode"] == 137 {
                    self.counts.oom_killed += 1;
                } else {
                    self.wrong.push(format!("{} exceeded its memory and ended with {end}", name_of(pod)));
                }
            } else {
                let reason = pod["status"]["reason"].as_str().unwrap_or("no reason").to_owned();
                *self.counts.failed.entry(reason).or_default() += 1;
            }
            let namespace = pod["metadata"]["namespace"].as_str().unwrap_or_default();
            self.cluster.kubectl(&["-n", namespace, "delete", "pod", &name_of(pod), "--wait=false"]);
        }
    }

    /// Removes everything from the cluster; the rest is named.
    fn evening(&mut self) {
        self.cluster.must(&["delete", "deployment/web", "configmap/page", "--wait=true"]);
        self.cluster.must(&["-n", "kube-system", "delete", "deployment/coredns", "--wait=true"]);
        let rest = wait_while_it_changes(SETTLE_LIMIT, || {
            let listed = objects::listed(&self.cluster);
            let mut rest: Vec<String> =
                listed.sandboxes.iter().map(|(uid, id)| format!("sandbox {id:.13} of pod {uid}")).collect();
            rest.extend(listed.containers.iter().map(|id| format!("container {id:.13}")));
            // Processes with the node's directory in their arguments are those of the cluster itself.
            let rests = self.cluster.node.rests().into_iter();
            rest.extend(rests.filter(|line| !line.starts_with("process ")));
            let folders = objects::kubelet_pods().into_iter();
            rest.extend(folders.map(|folder| format!("the kubelet's directory {folder}")));
            rest
        });
        self.left.extend(rest.into_iter().map(|line| format!("at the end: {line}")));
        self.history.read(&self.cluster);
    }

    /// Prints the report; panics if a count is not 0.
    fn judge(self, minutes: u64) {
        let Day { cluster, history, counts, mut wrong, stuck, left, restarts, .. } = self;
        counts.print(minutes, &history);
        // A kubelet that is killed between the stop of a container and its note of the eviction has a successor that knows
        // nothing of the eviction, and starts the container again.
        let stopped = stopped_by_kubelet(&cluster);
        let (asked, mut unasked): (Vec<_>, Vec<_>) = history
            .restarted()
            .into_iter()
            .map(|(name, replaced)| (name, replaced.iter().all(|id| stopped.contains(id))))
            .partition(|(_, is_asked)| *is_asked);
        let is_asked = |name: &&String| asked.iter().any(|(other, _)| other == name);
        let sandboxes: Vec<&String> =
            history.with_second_sandbox().into_iter().filter(|name| !is_asked(name)).collect();
        unasked.extend(sandboxes.into_iter().map(|name| (name, false)));
        // A kubelet replaces a container that its predecessor created and did not start, and counts that as a restart.
        let shown: u64 = restarts.values().sum();
        let explained = u64::from(history.unstarted()) + asked.len() as u64;
        if shown > explained {
            wrong.push(format!("the API server shows {shown} restarts, of which {explained} were asked for"));
        }
        println!("restarts of containers that a kubelet had stopped: {}", asked.len());
        println!("restarts that Kubernetes did not ask for: {}", unasked.len());
        println!("pods stuck: {}", stuck.len());
        println!("objects left: {}", left.len());
        let mut faults: Vec<String> = unasked
            .iter()
            .map(|(name, _)| format!("{name}: its container or sandbox was replaced"))
            .collect();
        faults.extend(stuck.into_iter().chain(left).chain(wrong));
        assert!(faults.is_empty(), "a bad day:\n{}", faults.join("\n"));
        cluster.stop();
    }
}

impl Counts {
    fn print(&self, minutes: u64, history: &History) {
        println!(
            "{minutes} minutes, {} rounds: {} kills of coracle, {} kills of the kubelet ({} ends because \
             coracle did not answer at its start), {} rolling updates of {PODS} pods, {} drains, API server away for {:.0} s, {} unused images collected, {} containers killed for their \
             memory, pods ended by the kubelet: {:?}",
            self.rounds,
            self.runtime_kills,
            self.kubelet_kills,
            self.kubelet_starts,
            self.updates,
            self.drains,
            self.away.as_secs_f64(),
            self.images_collected,
            self.oom_killed,
            self.failed,
        );
        println!(
            "{} pods ran, {} containers were started, {} were created and not started",
            history.sandboxes.len(),
            history.starts(),
            history.unstarted()
        );
    }
}

/// Beginnings of the IDs of the containers whose stop a kubelet asked for, from its log.
fn stopped_by_kubelet(cluster: &Cluster) -> BTreeSet<String> {
    /// Number of digits in the daemon's log.
    const DIGITS: usize = 13;
    let log = cluster.log("kubelet");
    let stops = log.lines().filter(|line| line.contains("\"Killing container with a grace period\""));
    let ids = stops.filter_map(|line| line.split("containerID=\"coracle://").nth(1)?.get(..DIGITS));
    ids.map(str::to_owned).collect()
}

/// A difference from the expected state of a pod or of an object of coracle.
#[derive(PartialEq)]
struct Line {
    text: String,
    /// True if the text is about a pod, false if it is about an object of coracle.
    is_pod: bool,
}

impl Line {
    fn pod(text: String) -> Line {
        Line { text, is_pod: true }
    }

    fn object(text: String) -> Line {
        Line { text, is_pod: false }
    }
}

/// Waits until `look` finds nothing; returns what it found last if that has not changed for `limit`, or after four times
/// `limit`. A busy machine is slow, and a pod is stuck when nothing happens.
fn wait_while_it_changes<T: PartialEq>(limit: Duration, mut look: impl FnMut() -> Vec<T>) -> Vec<T> {
    let latest = Instant::now() + 4 * limit;
    let mut end = Instant::now() + limit;
    let mut last = look();
    while !last.is_empty() && Instant::now() < end.min(latest) {
        std::thread::sleep(LOOK_AGAIN);
        let found = look();
        if found != last {
            end = Instant::now() + limit;
        }
        last = found;
    }
    last
}

fn name_of(pod: &Value) -> String {
    pod["metadata"]["name"].as_str().unwrap_or_default().to_owned()
}

/// Name and state of a pod that is not ready, or is being removed.
fn unready(pod: &Value) -> Option<String> {
    let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let is_ready = conditions.iter().any(|one| one["type"] == "Ready" && one["status"] == "True");
    let since = pod["metadata"]["deletionTimestamp"].as_str();
    let name = name_of(pod);
    match since {
        Some(since) => Some(format!("{name} is being removed since {since}")),
        None if is_ready => None,
        None => Some(format!(
            "{name} is {} and not ready: {} {}",
            pod["status"]["phase"].as_str().unwrap_or_default(),
            pod["status"]["reason"].as_str().unwrap_or_default(),
            pod["status"]["containerStatuses"][0]["state"]
        )),
    }
}
