//! `make demo`: the lifecycle of a pod with its resource usage. Uses the default network, a temporary root
//! and a generated image, downloads nothing and removes everything.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use coracle_node::cri::proto::{PodSandboxStatusRequest, StopContainerRequest, VersionRequest};
use coracle_node::host;
use coracle_node::node::{Node, Options};
use coracle_node::request::{DEFAULT_NETWORK, bridge_pod, container, create, exec, host_pod};

/// Maximum time until the daemon has dropped the pages that it does not need when idle.
const SETTLING: Duration = Duration::from_secs(15);

/// Number of pods after the first one.
const MORE: u32 = 20;

fn main() {
    let begin = Instant::now();
    let node = Node::with(Options { config: DEFAULT_NETWORK.into(), ..Options::default() });
    let version = node.version(VersionRequest::default()).expect("version");
    say(
        "daemon",
        &format!("{} {} answers after {}", version.runtime_name, version.runtime_version, ms(begin)),
    );

    let begin = Instant::now();
    let image = node.import_probe();
    say("image", &format!("{image}, made here, imported in {}", ms(begin)));

    let mut pod = bridge_pod("demo");
    pod.log_directory = node.log_directory("demo");
    let begin = Instant::now();
    let pod_id = node.run_pod(&pod);
    let took = ms(begin);
    let ask = PodSandboxStatusRequest { pod_sandbox_id: pod_id.clone(), verbose: false };
    let status = node.pod_sandbox_status(ask).expect("status").status.expect("a status");
    let address = status.network.expect("a network").ip;
    say("pod", &format!("{} is ready at {address} after {took}", &pod_id[..13]));
    let config = container("demo", &image, &["ticks", "50"], &pod);
    let id = node.create_container(create(&pod_id, &config, &pod)).expect("create").container_id;
    let start = coracle_node::cri::proto::StartContainerRequest { container_id: id.clone() };
    node.start_container(start).expect("start");
    say(
        "container",
        &format!(
            "{} runs as pid {}, {} after its pod was asked for",
            &id[..13],
            node.container_pid(&id),
            ms(begin)
        ),
    );

    host::wait_until("the container writes", || node.output(&id).lines().count() >= 3);
    let log = std::fs::read_to_string(node.container(&id).log_path).expect("the log");
    for line in log.lines().take(3) {
        say("log", line);
    }
    let begin = Instant::now();
    let answer = node.exec_sync(exec(&id, &["print", "hello from inside"], 10)).expect("exec");
    say("exec", &format!("{:?} in {}", String::from_utf8_lossy(&answer.stdout).trim(), ms(begin)));

    say_costs(&node);

    let begin = Instant::now();
    node.stop_container(StopContainerRequest { container_id: id, timeout: 0 }).expect("stop");
    node.remove_pod(&pod_id);
    say("down", &format!("container and pod are gone after {}", ms(begin)));
    node.stop();
    say("left", "no mount, no cgroup, no process, no file");
}

/// Prints the memory of the monitor and of the daemon, right after the calls and when idle, and what more pods add.
fn say_costs(node: &Node) {
    let monitors = node.monitors_pss_kib();
    let mib = |kib: u64| format!("{:.1} MB", kib as f64 * 1024.0 / 1e6);
    let daemon = host::pss_kib(node.pid());
    say(
        "cost",
        &format!("this pod's monitor {monitors} KiB, the daemon {} right after these calls", mib(daemon)),
    );
    // The code that the calls needed is mapped until the daemon has been idle for ten seconds.
    let begin = Instant::now();
    while begin.elapsed() < SETTLING && host::pss_kib(node.pid()) * 2 > daemon {
        std::thread::sleep(Duration::from_millis(500));
    }
    let idle = mib(host::pss_kib(node.pid()));
    say(
        "idle",
        &format!("the daemon {idle}: after ten seconds without a call it drops the pages of its code (PSS)"),
    );
    say_cost_of_more(node, monitors);
}

/// Runs more pods and prints what each adds to the memory of the monitors. The first one alone pays for the program.
fn say_cost_of_more(node: &Node, before_kib: u64) {
    let pods: Vec<String> =
        (0..MORE).map(|number| node.run_pod(&host_pod(&format!("more{number}")))).collect();
    let each = node.monitors_pss_kib().saturating_sub(before_kib) as f64 / f64::from(MORE);
    say(
        "more",
        &format!(
            "each of {MORE} further pods, without containers, adds {each:.0} KiB: monitors share their program"
        ),
    );
    for id in &pods {
        node.remove_pod(id);
    }
}

fn say(what: &str, text: &str) {
    println!("{what:>10}  {text}");
}

fn ms(begin: Instant) -> String {
    let took: Duration = begin.elapsed();
    format!("{:.1} ms", took.as_secs_f64() * 1000.0)
}
