//! The cluster used as by a person with kubectl: a Deployment behind a Service, name resolution, logs, exec, a rolling
//! update, a restart of coracle in between, removal. It checks the time of the start, and at the end that nothing
//! remains.

use std::time::Duration;

use coracle_tests::cri::proto::{ContainerState, ListContainersRequest};
use coracle_tests::host;

use crate::cluster::Cluster;

/// Time limit of the start.
const START_LIMIT: Duration = Duration::from_secs(120);

const WEB: &str = include_str!("manifests/web.yaml");

/// Uses a new cluster like a user, and stops it; panics if a step fails.
pub(crate) fn run() {
    let mut cluster = Cluster::start(&[]);
    run_on(&mut cluster);
    cluster.stop();
    println!("the cluster is stopped, and coracle left nothing");
}

/// Uses this cluster, which nothing else has used yet, like a user; panics if a step fails.
pub(crate) fn run_on(cluster: &mut Cluster) {
    let limit = format!("--timeout={}s", 120 * host::slowness());
    assert!(cluster.age() < START_LIMIT * host::slowness(), "the start took {:?}", cluster.age());
    let nodes = cluster.must(&["get", "nodes", "-o", "wide"]);
    let runtime = format!("coracle://{}", env!("CARGO_PKG_VERSION"));
    assert!(nodes.contains(&runtime), "{runtime}: {nodes}");
    describe(cluster);
    cluster.apply(WEB);
    cluster.must(&["rollout", "status", "deployment/web", &limit]);
    cluster.say("a deployment of three is available");
    cluster.apply(include_str!("manifests/client.yaml"));
    cluster.must(&["wait", "pod/client", "--for=condition=Ready", &limit]);
    // By the service's name, through DNS and kube-proxy: every pod answers with its own name.
    let names = cluster.must(&["get", "pods", "-l", "app=web", "-o", "jsonpath={.items[*].metadata.name}"]);
    for name in names.split(' ') {
        cluster.wait(&format!("{name} answers through the service"), |cluster| {
            (ask(cluster).trim() == name).then_some(())
        });
    }
    cluster.say("all of them answer through the service's name");
    let log = cluster.must(&["logs", "pod/client"]);
    assert_eq!(log.trim(), "the client runs");
    assert_eq!(starts(cluster), restart_counts(cluster), "before the daemon is killed");
    let before = running(cluster);
    cluster.node.restart();
    assert_eq!(running(cluster), before, "a killed daemon takes no container along");
    cluster.must(&["set", "env", "deployment/web", "GENERATION=2"]);
    cluster.must(&["rollout", "status", "deployment/web", &limit]);
    assert!(ask(cluster).starts_with("web-"), "the service answers after the update");
    cluster.say("the daemon was killed, and the deployment was updated");
    let before = running(cluster);
    cluster.must(&["rollout", "restart", "deployment/web"]);
    cluster.must(&["rollout", "status", "deployment/web", &limit]);
    // The old pods may still be ending.
    cluster.wait("only the DNS server and the client are from before", |cluster| {
        let kept = running(cluster).into_iter().filter(|id| before.contains(id)).count();
        (kept == 2).then_some(())
    });
    let refused = cluster.kubectl(&["exec", "client", "--", "sh", "-c", "exit 7"]);
    assert_eq!(refused.status.code(), Some(7), "exec returns the exit code");
    cluster.must(&["delete", "deployment/web", "service/web", "pod/client", "--wait=true"]);
    cluster.wait("no container of the pods is left", |cluster| {
        let pods = cluster.get(&["pods"])?;
        let none = pods["items"].as_array().is_some_and(Vec::is_empty);
        let only_dns = running(cluster).len() == 1;
        (none && only_dns).then_some(())
    });
    cluster.say("all of it is removed");
}

/// Describes the node, with the reason of its state and its runtime.
fn describe(cluster: &mut Cluster) {
    let text = cluster.must(&["describe", "node"]);
    assert!(text.contains("KubeletReady") && text.contains("coracle://"), "{text}");
    cluster.say("kubectl describe says why the node is ready, and its runtime");
}

/// One request through the service by its name, from another pod.
fn ask(cluster: &Cluster) -> String {
    // Debian's busybox ends with a segmentation fault if wget itself has a time limit.
    let command = format!("timeout {} wget -q -O - http://web.default/hostname", 2 * host::slowness());
    let output = cluster.kubectl(&["exec", "client", "--", "sh", "-c", &command]);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// IDs of the running containers, sorted.
pub(crate) fn running(cluster: &Cluster) -> Vec<String> {
    let answer = cluster.node.list_containers(ListContainersRequest::default()).expect("a list");
    let runs = answer.containers.into_iter().filter(|one| one.state() == ContainerState::ContainerRunning);
    let mut ids: Vec<String> = runs.map(|one| one.id).collect();
    ids.sort();
    ids
}

/// Sum of the attempts of the running containers: how many restarts the kubelet asked for.
fn starts(cluster: &Cluster) -> u64 {
    let answer = cluster.node.list_containers(ListContainersRequest::default()).expect("a list");
    let runs = answer.containers.iter().filter(|one| one.state() == ContainerState::ContainerRunning);
    runs.map(|one| u64::from(one.metadata.as_ref().map_or(0, |about| about.attempt))).sum()
}

/// Sum of the restart counts that the API server shows.
fn restart_counts(cluster: &Cluster) -> u64 {
    let pods = cluster.get(&["pods", "--all-namespaces"]).expect("the pods");
    let pods = pods["items"].as_array().cloned().unwrap_or_default();
    let statuses = pods.iter().filter_map(|pod| pod["status"]["containerStatuses"].as_array()).flatten();
    statuses.filter_map(|status| status["restartCount"].as_u64()).sum()
}
