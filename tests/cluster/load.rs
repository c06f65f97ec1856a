//! What a measurement in a cluster shares: pods that do nothing, the kubelet's metrics, how busy the machine is.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use coracle_tests::host;

use crate::cluster::Cluster;

/// A prefix of the names of the kubelet's metrics about the calls of the runtime.
const OPERATIONS: &str = "kubelet_runtime_operations_duration_seconds_";
/// The kubelet's time from its first sight of a pod until its containers run. It observes each pod twice: also when it
/// has no status of the pod yet, nearly at once (`Kubelet.SyncPod` of Kubernetes 1.36).
const POD_START: &str = "kubelet_pod_start_duration_seconds_";

/// Label of the pods.
pub(crate) const LABEL: &str = "app=idle";

/// A manifest of this many pods that do nothing, named with `prefix`.
pub(crate) fn idle_pods(prefix: &str, count: usize) -> String {
    let manifest = include_str!("manifests/idle.yaml");
    (0..count).map(|number| manifest.replace("NAME", &format!("{prefix}-{number}"))).collect()
}

/// Number and sum of measured durations.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Durations {
    /// Number of durations.
    pub(crate) count: f64,
    /// Sum of the durations in seconds.
    pub(crate) seconds: f64,
}

impl Durations {
    /// The mean in milliseconds; zero if there were none.
    pub(crate) fn mean_ms(self) -> f64 {
        if self.count > 0.0 { self.seconds * 1000.0 / self.count } else { 0.0 }
    }

    fn since(self, before: Durations) -> Durations {
        Durations { count: self.count - before.count, seconds: self.seconds - before.seconds }
    }
}

/// Durations that the kubelet measured, since its start or between two moments.
#[derive(Debug, Default)]
pub(crate) struct KubeletTimes {
    /// Calls of the runtime by the kubelet's name of the operation, like `run_podsandbox`.
    pub(crate) operations: BTreeMap<String, Durations>,
    /// From the first sight of a pod until its containers run, and for each pod a second value near zero.
    pub(crate) pod_start: Durations,
}

impl KubeletTimes {
    /// Asks the kubelet for its metrics through the API server.
    pub(crate) fn now(cluster: &Cluster) -> KubeletTimes {
        KubeletTimes::parse(&cluster.must(&["get", "--raw=/api/v1/nodes/node/proxy/metrics"]))
    }

    fn parse(text: &str) -> KubeletTimes {
        let mut times = KubeletTimes::default();
        for line in text.lines() {
            let Some((name, value)) = line.rsplit_once(' ') else { continue };
            let Ok(value) = value.parse::<f64>() else { continue };
            if let Some(rest) = name.strip_prefix(OPERATIONS) {
                let Some((kind, label)) = rest.split_once("{operation_type=\"") else { continue };
                let operation = times.operations.entry(label.trim_end_matches("\"}").to_owned());
                match kind {
                    "count" => operation.or_default().count = value,
                    "sum" => operation.or_default().seconds = value,
                    _ => {}
                }
            } else if let Some(rest) = name.strip_prefix(POD_START) {
                match rest {
                    "count" => times.pod_start.count = value,
                    "sum" => times.pod_start.seconds = value,
                    _ => {}
                }
            }
        }
        times.operations.retain(|_, durations| durations.count > 0.0);
        times
    }

    /// The difference to an earlier moment; only operations that happened since.
    pub(crate) fn since(&self, before: &KubeletTimes) -> KubeletTimes {
        let earlier = |name: &str| before.operations.get(name).copied().unwrap_or_default();
        let operations = self.operations.iter().map(|(name, now)| (name.clone(), now.since(earlier(name))));
        KubeletTimes {
            operations: operations.filter(|(_, durations)| durations.count > 0.0).collect(),
            pod_start: self.pod_start.since(before.pod_start),
        }
    }

    /// The durations of one operation.
    pub(crate) fn of(&self, operation: &str) -> Durations {
        self.operations.get(operation).copied().unwrap_or_default()
    }
}

/// CPU time of the programs of a cluster, since their start or between two moments.
#[derive(Debug)]
pub(crate) struct CpuTimes {
    /// The runtime's daemon with the children that it reaped.
    pub(crate) runtime: Duration,
    /// The measured programs except the runtime, by name.
    pub(crate) programs: Vec<(&'static str, Duration)>,
    /// Everything on the machine.
    pub(crate) machine: Duration,
}

impl CpuTimes {
    /// The CPU times until now.
    pub(crate) fn now(cluster: &Cluster) -> CpuTimes {
        let times = cluster.programs().into_iter().map(|(name, pid)| (name, host::cpu_time(pid)));
        CpuTimes {
            runtime: host::cpu_time(cluster.runtime_pid()),
            programs: times.collect(),
            // Ticks of a hundredth of a second, as in `host::cpu_time`.
            machine: Duration::from_secs_f64(cpu_ticks().0 / 100.0),
        }
    }

    /// The difference to an earlier moment at which the same programs ran.
    pub(crate) fn since(&self, before: &CpuTimes) -> CpuTimes {
        let pairs = self.programs.iter().zip(&before.programs);
        CpuTimes {
            runtime: self.runtime.saturating_sub(before.runtime),
            programs: pairs.map(|((name, now), (_, then))| (*name, now.saturating_sub(*then))).collect(),
            machine: self.machine.saturating_sub(before.machine),
        }
    }

    /// CPU time of everything else on the machine: kubectl, containers, other processes.
    pub(crate) fn rest(&self) -> Duration {
        let named: Duration = self.programs.iter().map(|(_, time)| *time).sum();
        self.machine.saturating_sub(named + self.runtime)
    }
}

/// The share of the machine's CPUs that was in use during this time, in per cent.
pub(crate) fn busy_percent(during: Duration) -> f64 {
    let (busy, all) = cpu_ticks();
    std::thread::sleep(during);
    let (busy_after, all_after) = cpu_ticks();
    (busy_after - busy) * 100.0 / (all_after - all).max(1.0)
}

/// Ticks in which a CPU worked, and all ticks, of all CPUs since boot (proc_stat(5)).
fn cpu_ticks() -> (f64, f64) {
    let text = fs::read_to_string("/proc/stat").expect("/proc/stat");
    let line = text.lines().next().unwrap_or_default();
    // user, nice, system, idle, iowait, irq, softirq, steal; guests are a part of user.
    let ticks: Vec<f64> =
        line.split_whitespace().skip(1).take(8).filter_map(|one| one.parse().ok()).collect();
    let all: f64 = ticks.iter().sum();
    let idle: f64 = ticks.iter().skip(3).take(2).sum();
    (all - idle, all)
}
