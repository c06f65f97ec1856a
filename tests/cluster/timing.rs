//! Time from `kubectl create` until all of 1, 60 and 110 pods run, with the kubelet's own part by its metrics;
//! and what the runtime uses while 60 pods do nothing. Both print tables and what load there was; the goals of
//! docs/kubernetes.md hold on a quiet machine, so none of them fails.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use coracle_tests::host::{self, CpuTime};

use crate::cluster::Cluster;
use crate::load::{CpuTimes, KubeletTimes, LABEL, busy_percent, idle_pods};

/// Numbers of pods with the number of runs and the goal in seconds. The kubelet's limit is 110.
const CASES: [(usize, usize, f64); 3] = [(1, 9, 0.5), (60, 3, 5.0), (110, 3, 10.0)];
/// Time limit until all pods run.
const RUN_LIMIT: Duration = Duration::from_secs(180);
/// How long the load of the machine is measured before each run.
const LOAD_TIME: Duration = Duration::from_secs(3);
/// Calls of the runtime that a pod with one container needs.
const CALLS: [&str; 3] = ["run_podsandbox", "create_container", "start_container"];
/// Number of pods of the idle cluster.
const IDLE_PODS: usize = 60;
/// Time until the kubelet has settled after the start of the pods.
const SETTLE: Duration = Duration::from_secs(60);

/// One start of pods.
struct Run {
    /// From the start of `kubectl create` until the watch shows all pods as running.
    running: f64,
    /// Until `kubectl create` has ended.
    created: f64,
    kubelet: KubeletTimes,
    cpu: CpuTimes,
    busy_percent: f64,
}

/// Measures starts, or the idle cluster if `MINUTES` is set.
pub(crate) fn run() {
    let minutes = std::env::var("MINUTES").ok().filter(|text| !text.is_empty());
    let mut cluster = match std::env::var("RUNTIME").as_deref() {
        Ok("containerd") => Cluster::start_with_containerd(),
        Ok("" | "coracle") | Err(_) => Cluster::start(&[]),
        Ok(other) => panic!("RUNTIME is coracle or containerd, not {other}"),
    };
    // So that 110 pods are the kubelet's limit.
    cluster.must(&["-n", "kube-system", "scale", "deployment/coredns", "--replicas=0"]);
    cluster.must(&["-n", "kube-system", "wait", "pods", "--all", "--for=delete", "--timeout=120s"]);
    match minutes {
        Some(minutes) => idle(&mut cluster, minutes.parse().expect("MINUTES is a number")),
        None => starts(&mut cluster),
    }
    cluster.stop();
}

fn starts(cluster: &mut Cluster) {
    // The first start reads programs from the disk.
    measure(cluster, "first", 1);
    let mut rows = Vec::new();
    for (pods, runs, goal) in CASES {
        let name = format!("pods{pods}");
        let mut all: Vec<Run> =
            (0..runs).map(|run| measure(cluster, &format!("{name}-{run}"), pods)).collect();
        all.sort_by(|one, other| one.running.total_cmp(&other.running));
        let times: Vec<String> = all.iter().map(|run| format!("{:.2}", run.running)).collect();
        cluster.say(&format!("{pods} pods: {} s", times.join(", ")));
        rows.push((pods, goal, all));
    }
    println!(
        "| pods | until all run: median (best–worst) | goal | kubectl's part | kubelet: a pod's start | of it RunPodSandbox + CreateContainer + StartContainer | the kubelet's own part | CPU of the daemon per pod | load before |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for (pods, goal, all) in &rows {
        print_row(*pods, *goal, all);
    }
    println!(
        "mean times per pod in ms by the kubelet's metrics, of the run with the median; load: share of both CPUs in use before a run, highest of the runs"
    );
    println!(
        "where the CPU time of the run with the median was, in seconds, from `kubectl create` until all pods run:"
    );
    for (pods, _, all) in &rows {
        print_cpu(*pods, &all[all.len() / 2]);
    }
}

fn print_cpu(pods: usize, run: &Run) {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let named = run.cpu.programs.iter().map(|(name, time)| format!("{name} {:.2}", time.as_secs_f64()));
    println!(
        "{pods} pods: {:.2} of {:.2}: runtime {:.2}, {}, rest (kubectl, containers, others) {:.2}",
        run.cpu.machine.as_secs_f64(),
        run.running * cpus as f64,
        run.cpu.runtime.as_secs_f64(),
        named.collect::<Vec<_>>().join(", "),
        run.cpu.rest().as_secs_f64(),
    );
}

fn print_row(pods: usize, goal: f64, runs: &[Run]) {
    let median = &runs[runs.len() / 2];
    let calls = CALLS.map(|call| median.kubelet.of(call).mean_ms());
    let start = median.kubelet.pod_start.seconds * 1000.0 / pods as f64;
    let own = start - calls.iter().sum::<f64>();
    let load = runs.iter().map(|run| run.busy_percent).fold(0.0, f64::max);
    println!(
        "| {pods} | {:.2} s ({:.2}–{:.2}) | {goal} s | {:.2} s | {start:.0} ms | {:.1} + {:.1} + {:.1} ms | {own:.0} ms | {:.1} ms | {load:.0} % |",
        median.running,
        runs[0].running,
        runs[runs.len() - 1].running,
        median.created,
        calls[0],
        calls[1],
        calls[2],
        median.cpu.runtime.as_secs_f64() * 1000.0 / pods as f64,
    );
}

/// Starts pods, waits until all run, removes them.
fn measure(cluster: &mut Cluster, name: &str, pods: usize) -> Run {
    let file = cluster.node.folder().join("idle.yaml");
    std::fs::write(&file, idle_pods(name, pods)).expect("a file");
    let busy_percent = busy_percent(LOAD_TIME);
    let (mut watch, seen) = watch(cluster);
    // The watch has begun long before the first pod.
    std::thread::sleep(Duration::from_secs(1));
    let before = KubeletTimes::now(cluster);
    let cpu = CpuTimes::now(cluster);
    let begin = Instant::now();
    cluster.must(&["create", "-f", &file.display().to_string()]);
    let created = begin.elapsed().as_secs_f64();
    let mut running = std::collections::BTreeSet::new();
    while running.len() < pods {
        let left = RUN_LIMIT.saturating_sub(begin.elapsed());
        let pod = seen.recv_timeout(left).unwrap_or_else(|_| {
            panic!(
                "{} of {pods} pods run after {RUN_LIMIT:?}: {:?}",
                running.len(),
                cluster.kubectl(&["get", "pods"])
            )
        });
        running.insert(pod);
    }
    let taken = begin.elapsed().as_secs_f64();
    let cpu = CpuTimes::now(cluster).since(&cpu);
    watch.kill().expect("it is ours");
    watch.wait().expect("our child");
    // The kubelet counts a start when it has seen the pod run, and observes each pod twice.
    let kubelet = cluster.wait("the kubelet has counted all starts", |cluster| {
        let times = KubeletTimes::now(cluster).since(&before);
        (times.pod_start.count >= 2.0 * pods as f64).then_some(times)
    });
    // The kubelet removes sandboxes of deleted pods once a minute; these do nothing.
    cluster.must(&["delete", "pods", "-l", LABEL, "--wait=true", "--timeout=120s"]);
    Run { running: taken, created, kubelet, cpu, busy_percent }
}

/// A watch of the pods, and the names of those that it shows as running.
fn watch(cluster: &Cluster) -> (Child, Receiver<String>) {
    let words = ["get", "pods", "-l", LABEL, "--watch", "-o"];
    let mut command = cluster.kubectl_command(&words);
    command.arg("jsonpath={.status.phase} {.metadata.name}{\"\\n\"}");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().expect("kubectl runs");
    let output = BufReader::new(child.stdout.take().expect("a pipe"));
    let (sender, seen) = channel();
    std::thread::spawn(move || {
        for line in output.lines().map_while(Result::ok) {
            if let Some(name) = line.strip_prefix("Running ")
                && sender.send(name.to_owned()).is_err()
            {
                return;
            }
        }
    });
    (child, seen)
}

/// Measures the runtime while pods do nothing.
fn idle(cluster: &mut Cluster, minutes: u64) {
    cluster.apply(&idle_pods("idle", IDLE_PODS));
    cluster.must(&["wait", "pods", "-l", LABEL, "--for=condition=Ready", "--timeout=180s"]);
    cluster.say(&format!("{IDLE_PODS} pods run"));
    std::thread::sleep(SETTLE);
    let pid = cluster.runtime_pid();
    let before = KubeletTimes::now(cluster);
    let (begin, cpu) = (Instant::now(), CpuTime::of(pid));
    let mut sizes = Vec::new();
    let mut load = 0.0;
    for _ in 0..minutes {
        load += busy_percent(Duration::from_secs(60)) / minutes as f64;
        sizes.push(host::pss_kib(pid));
    }
    let (time, cpu) = (begin.elapsed().as_secs_f64(), CpuTime::of(pid).since(cpu));
    let calls = KubeletTimes::now(cluster).since(&before);
    sizes.sort_unstable();
    let monitors: Vec<u64> = cluster.node.pod_processes().iter().map(|one| host::pss_kib(one.pid)).collect();
    println!("{IDLE_PODS} pods that do nothing, {time:.0} s, CPUs in use: {load:.0} %");
    let percent = |cpu: Duration| cpu.as_secs_f64() * 100.0 / time;
    println!(
        "CPU of the daemon {:.3} % of a core, of its workers {:.3} %, together {:.2} s, {:.3} % (goal 0.1 %)",
        percent(cpu.own),
        percent(cpu.children),
        (cpu.own + cpu.children).as_secs_f64(),
        percent(cpu.own + cpu.children)
    );
    println!(
        "PSS of the daemon each minute: {} to {} KiB, median {} (goal 6144 KiB)",
        sizes.first().expect("at least one minute"),
        sizes.last().expect("at least one minute"),
        sizes[sizes.len() / 2]
    );
    println!("PSS of {} monitors of coracle beside it: {} KiB", monitors.len(), monitors.iter().sum::<u64>());
    println!("calls of the kubelet per minute:");
    for (name, durations) in &calls.operations {
        println!("  {name}: {:.1}, mean {:.2} ms", durations.count * 60.0 / time, durations.mean_ms());
    }
}
