//! A kubelet that is killed again and again during rolling updates. Whatever it was doing, the runtime must have done
//! each operation once and completely: a container that ran is never replaced, and at the end none is left over.

use std::time::Duration;

use coracle_tests::cri::proto::{ListContainersRequest, ListPodSandboxRequest};
use coracle_tests::host::wait_within;

use crate::cluster::Cluster;
use crate::history::History;

/// Default number of kills of the kubelet; the variable `KILLS` overrides it.
const KILLS: u32 = 200;
/// Number of pods of the deployment.
const PODS: usize = 20;
/// Maximum time between the start of a kubelet and its kill, for kills during its start.
const STARTING_MS: u64 = 2000;
/// Maximum time between a kubelet's first work and its kill, for kills during its work.
const WORKING_MS: u64 = 2500;
/// Time limit for a kubelet's first work. Its cAdvisor first visits every cgroup of the machine.
const WORK_LIMIT: Duration = Duration::from_secs(180);

/// Kills the kubelet during rolling updates; panics if a container was replaced or is left over.
pub(crate) fn run() {
    let kills: u32 = std::env::var("KILLS").map_or(KILLS, |text| text.parse().expect("KILLS is a number"));
    let mut cluster = Cluster::start(&[]);
    let web = include_str!("manifests/web.yaml").replace("replicas: 3", &format!("replicas: {PODS}"));
    cluster.apply(&web);
    cluster.must(&["rollout", "status", "deployment/web", "--timeout=300s"]);
    cluster.say(&format!("a deployment of {PODS} is available"));
    let mut updates = 0;
    let mut offset = 0;
    for number in 1..=kills {
        if cluster.is_rolled_out("web") {
            updates += 1;
            cluster.must(&["set", "env", "deployment/web", &format!("GENERATION={updates}")]);
        }
        // Every second kubelet is killed while it starts, the others while they work; at moments that are spread over
        // the range and the same in each run.
        if number % 2 == 0 {
            std::thread::sleep(Duration::from_millis(u64::from(number) * 397 % STARTING_MS));
        } else {
            let works = || cluster.log_since("kubelet", offset).contains("SyncLoop ADD").then_some(());
            assert!(wait_within(WORK_LIMIT, works).is_some(), "a kubelet did nothing within {WORK_LIMIT:?}");
            std::thread::sleep(Duration::from_millis(u64::from(number) * 397 % WORKING_MS));
        }
        cluster.kill_kubelet();
        offset = cluster.log_bytes("kubelet");
        cluster.start_kubelet();
        if number % 20 == 0 {
            cluster.say(&format!("{number} kills, {updates} updates begun"));
        }
    }
    cluster.must(&["rollout", "status", "deployment/web", "--timeout=300s"]);
    let mut history = History::default();
    history.read(&cluster);
    let unstarted = history.unstarted();
    let (sandboxes, started) = (history.with_second_sandbox(), history.restarted());
    println!(
        "{kills} kills of the kubelet, {updates} rolling updates of {PODS} pods: {} pods, {} with a second sandbox, \
         {} containers started, {} pods with a second start, {unstarted} containers that the kubelet created and did \
         not start before it was killed",
        history.sandboxes.len(),
        sandboxes.len(),
        history.starts(),
        started.len(),
    );
    assert!(started.is_empty(), "containers that ran were replaced: {started:?}");
    assert!(sandboxes.is_empty(), "sandboxes were replaced: {sandboxes:?}");
    // A kubelet replaces a container that its predecessor created and did not start, and counts that as a restart.
    assert!(
        restarts(&cluster) <= u64::from(unstarted),
        "the API server counts {} restarts",
        restarts(&cluster)
    );
    assert!(updates > 0 && history.started.len() > PODS, "the updates made progress");
    nothing_is_left(&mut cluster);
    cluster.stop();
}

fn restarts(cluster: &Cluster) -> u64 {
    let pods = cluster.get(&["pods", "-l", "app=web"]).expect("the pods");
    let pods = pods["items"].as_array().cloned().unwrap_or_default();
    let statuses = pods.iter().filter_map(|pod| pod["status"]["containerStatuses"].as_array()).flatten();
    statuses.filter_map(|status| status["restartCount"].as_u64()).sum()
}

/// Every sandbox and container belongs to a pod that exists, and after the deployment is removed none is left.
fn nothing_is_left(cluster: &mut Cluster) {
    let count = |cluster: &Cluster| {
        let sandboxes =
            cluster.node.list_pod_sandbox(ListPodSandboxRequest::default()).expect("a list").items;
        let containers =
            cluster.node.list_containers(ListContainersRequest::default()).expect("a list").containers;
        (sandboxes.len(), containers.len())
    };
    // The DNS server has one of each.
    cluster.wait("only the pods of the last update are left", |cluster| {
        (count(cluster) == (PODS + 1, PODS + 1)).then_some(())
    });
    cluster.must(&["delete", "deployment/web", "--wait=true"]);
    cluster.wait("nothing of the deployment is left", |cluster| (count(cluster) == (1, 1)).then_some(()));
    println!("nothing is left over: {PODS} pods after the last update, none after their removal");
}
