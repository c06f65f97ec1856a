//! flannel as the network of a cluster: its daemon and its DaemonSet from its Go module. The DaemonSet installs the CNI
//! plugin and the configuration, and until then the node is not ready. coracle executes the plugin, which executes
//! `bridge`, and has `portmap` built in. `kube-flannel.yml` is applied with two other host paths; `bridge` and `host-local` are
//! Debian's. After kills of coracle while it attaches and detaches pods no lease, link, namespace or host port may be left.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use coracle_tests::cri::proto::{ContainerState, ListContainersRequest};
use coracle_tests::host;
use nix::sched::{CloneFlags, setns};
use serde_json::Value;

use crate::cluster::{Cluster, target};

/// The range of all pods' addresses in flannel's manifest.
const PODS: &str = "10.244.0.0/16";
/// The bridge that flannel's plugin asks for.
const BRIDGE: &str = "cni0";
/// The file that flannel's daemon writes for its plugin.
const SUBNET: &str = "/run/flannel/subnet.env";
/// Lease files of addresses, as `host-local` writes them for flannel's configuration.
const LEASES: &str = "/var/lib/cni/networks/cbr0";
/// Network namespace of a machine beside the node, at the address of the node's router.
const OUTSIDE: &str = "outside";
const ROUTER: &str = "10.88.0.254";
const NODE: &str = "10.88.0.1";
/// The port of the node in `manifests/port.yaml`.
const PORT: u16 = 8088;
/// Time limit of a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Number of requests that a client must have made while programs were replaced.
const REQUESTS: usize = 20;
/// Kills of coracle while it attaches pods, and while it detaches them.
const KILLS: usize = 5;
/// Time from one of these kills to the next, in which some of the pods make progress.
const BETWEEN_KILLS: Duration = Duration::from_millis(300);

/// Runs the cluster on flannel's network; panics if a step fails.
pub(crate) fn run() {
    let images = addons().join("images-flannel.tar");
    let mut cluster = Cluster::start_without_network(PODS, &[&images.display().to_string()]);
    make_outside();
    without_network(&mut cluster);
    install(&cluster);
    let mut cluster = cluster.serving();
    node_is_flannels(&cluster);
    cluster.apply(include_str!("manifests/web.yaml"));
    cluster.apply(include_str!("manifests/port.yaml"));
    cluster.must(&["wait", "pod/early", "pod/port", "--for=condition=Ready", "--timeout=120s"]);
    cluster.must(&["rollout", "status", "deployment/web", "--timeout=120s"]);
    pods_are_flannels(&mut cluster);
    traffic(&mut cluster);
    replacements(&mut cluster);
    without_subnet(&mut cluster);
    kill_during_work(&mut cluster);
    removal(&mut cluster);
    cluster.stop();
    println!("the cluster is stopped, and coracle left nothing");
}

/// Directory of what `tests/tools/install cluster-flannel` makes.
fn addons() -> PathBuf {
    target().join("tools/addons")
}

/// The node waits for its network and says so, and a pod that is already bound to it waits, too.
fn without_network(cluster: &mut Cluster) {
    let directory = cluster.node.cni().display().to_string();
    let message = cluster.wait("the node says that it has no network", |cluster| {
        let condition = cluster.readiness()?;
        let message = condition["message"].as_str()?.to_owned();
        (condition["status"] == "False" && message.contains("NetworkPluginNotReady")).then_some(message)
    });
    let reason = format!("cni plugin not initialized: no CNI configuration file in {directory}");
    assert!(message.contains(&reason), "{reason}: {message}");
    println!("  {message}");
    // The controller manager makes it a moment after the namespace.
    cluster.wait("pods can be created", |cluster| cluster.get(&["serviceaccount", "default"]).map(|_| ()));
    cluster.apply(include_str!("manifests/early.yaml"));
    cluster.wait("a pod waits for the network", |cluster| {
        let events = cluster.get(&["events", "--field-selector", "reason=NetworkNotReady"])?;
        let is_early = |event: &Value| event["involvedObject"]["name"] == "early";
        events["items"].as_array()?.iter().any(is_early).then_some(())
    });
    assert!(running(cluster, |_| true).is_empty(), "nothing runs without a network");
    cluster.say("the node is not ready, and a pod that tolerates that waits for the network");
}

/// Applies flannel's own manifest. Only two directories of the node are others, because `/etc` and `/opt` are those of
/// the machine on which the cluster runs.
fn install(cluster: &Cluster) {
    let path = addons().join("kube-flannel.yml");
    let mut manifest = fs::read_to_string(&path).unwrap_or_else(|error| {
        panic!("{}: {error}: `tests/tools/install cluster-flannel` makes it", path.display())
    });
    for (usual, own) in
        [("path: /etc/cni/net.d\n", cluster.node.cni()), ("path: /opt/cni/bin\n", cluster.node.plugins())]
    {
        assert_eq!(manifest.matches(&format!(" {usual}")).count(), 1, "{usual}: {manifest}");
        manifest = manifest.replace(&format!(" {usual}"), &format!(" path: {}\n", own.display()));
    }
    assert!(manifest.contains(&format!("\"Network\": \"{PODS}\"")), "{manifest}");
    cluster.apply(&manifest);
    cluster.must(&["-n", "kube-flannel", "rollout", "status", "daemonset/kube-flannel-ds", "--timeout=180s"]);
    cluster.say("flannel's DaemonSet is available");
}

/// The node became ready by what flannel's pod installed, and flannel's daemon uses the range that the node was given.
fn node_is_flannels(cluster: &Cluster) {
    let pods = cluster.get(&["-n", "kube-flannel", "pods"]).expect("a list");
    let status = &pods["items"][0]["status"];
    assert_eq!(status["podIP"], NODE, "flannel's pod has the node's network");
    let installed = status["initContainerStatuses"].as_array().and_then(|all| all.last()).expect("two");
    assert_eq!(installed["name"], "install-cni");
    let (installed, ready) = (
        installed["state"]["terminated"]["finishedAt"].as_str().expect("it ended").to_owned(),
        cluster.readiness().expect("a node")["lastTransitionTime"].as_str().expect("a time").to_owned(),
    );
    // Both in whole seconds of UTC.
    assert!(ready >= installed, "the node was ready at {ready}, before its network was at {installed}");
    let range = cluster.must(&["get", "node", "node", "-o", "jsonpath={.spec.podCIDR}"]);
    let subnet = fs::read_to_string(SUBNET).expect("flannel's daemon writes it");
    let first = range.replace(".0/24", ".1/24");
    for line in [format!("FLANNEL_NETWORK={PODS}"), format!("FLANNEL_SUBNET={first}")] {
        assert!(subnet.lines().any(|one| one == line), "{line} in {subnet}");
    }
    let link = command("ip", &["-d", "link", "show", "flannel.1"]);
    assert!(link.contains("vxlan id 1"), "{link}");
    print!("  configuration installed at {installed}, node ready at {ready}\n{subnet}");
}

/// Every pod has an address of the node's range from flannel's plugin, and the size of packets that VXLAN leaves.
fn pods_are_flannels(cluster: &mut Cluster) {
    let subnet = fs::read_to_string(SUBNET).expect("flannel's daemon writes it");
    let mtu = subnet.lines().find_map(|line| line.strip_prefix("FLANNEL_MTU=")).expect("a line").to_owned();
    let seen = cluster.must(&["exec", "early", "--", "cat", "/sys/class/net/eth0/mtu"]);
    assert_eq!(seen.trim(), mtu, "a pod's link has the size that flannel's daemon gives");
    let addresses = addresses(cluster);
    assert!(addresses.iter().all(|one| one.starts_with("10.244.0.")), "{addresses:?}");
    // The DNS server and five pods.
    objects_are_those_of(cluster, 6);
    cluster.say(&format!("the pods have addresses of flannel's range and links of {mtu} bytes"));
}

/// Pods reach each other by address and through the service's name; the port of the node leads to its pod from
/// everywhere; and pods reach the outside by the node's address.
fn traffic(cluster: &mut Cluster) {
    let names = cluster.must(&["get", "pods", "-l", "app=web", "-o", "jsonpath={.items[*].metadata.name}"]);
    for name in names.split(' ') {
        let address = address(cluster, name);
        assert_eq!(ask(cluster, &format!("http://{address}/hostname")), name, "by address");
        cluster.wait(&format!("{name} answers through the service"), |cluster| {
            (ask(cluster, "http://web.default/hostname") == name).then_some(())
        });
    }
    cluster.say("pods answer by address and through the service's name");
    let at = format!("{NODE}:{PORT}");
    assert_eq!(ask(cluster, &format!("http://{at}/hostname")), "port", "from a pod");
    assert_eq!(get(None, &at), Ok("port".into()), "from the node");
    assert_eq!(get(None, &format!("127.0.0.1:{PORT}")), Ok("port".into()), "from the node's loopback");
    assert_eq!(get(Some(OUTSIDE), &at), Ok("port".into()), "from outside");
    assert!(host_ports().contains(&PORT.to_string()), "coracle's own portmap made it: {}", host_ports());
    cluster.say("the host port leads to its pod from a pod, from the node, from 127.0.0.1 and from outside");
    let listener = inside(OUTSIDE, || TcpListener::bind((ROUTER, 80)).expect("a free port"));
    let answers = std::thread::spawn(move || {
        let (mut stream, peer) = listener.accept().expect("a client");
        let _ = stream.read(&mut [0; 1024]); // the request
        stream.write_all(b"HTTP/1.0 200 OK\r\n\r\noutside\n").expect("it listens");
        peer
    });
    assert_eq!(ask(cluster, &format!("http://{ROUTER}/")), "outside");
    let peer = answers.join().expect("the thread ends");
    assert_eq!(peer.ip().to_string(), NODE, "flannel's rules masquerade what leaves the node");
    cluster.say("pods reach the outside by the node's address");
}

/// Kills of coracle and removals of flannel's pod, alone and together: running pods notice nothing.
fn replacements(cluster: &mut Cluster) {
    let web = cluster.must(&["get", "pods", "-l", "app=web", "-o", "jsonpath={.items[0].status.podIP}"]);
    let urls = format!("http://{web}/hostname http://web.default/hostname http://{NODE}:{PORT}/hostname");
    let begin = format!("echo {urls} >/tmp/new && mv /tmp/new /tmp/urls");
    cluster.must(&["exec", "early", "--", "sh", "-c", &begin]);
    let not_flannels = |namespace: &str| namespace != "kube-flannel";
    let (containers, leased) = (running(cluster, not_flannels), leases());
    let since = cluster.readiness().expect("a node")["lastTransitionTime"].clone();
    cluster.node.restart();
    assert_eq!(running(cluster, not_flannels), containers, "after a kill of coracle");
    replace_flannel(cluster, |_| {});
    replace_flannel(cluster, |cluster| cluster.node.restart());
    assert_eq!(running(cluster, not_flannels), containers, "after removals of flannel's pod");
    assert_eq!(leases(), leased, "the same addresses");
    let answered = cluster.wait("the client has asked often enough", |cluster| {
        let answered = cluster.must(&["exec", "early", "--", "cat", "/tmp/answered"]).lines().count();
        (answered >= REQUESTS).then_some(answered)
    });
    let missed = cluster.must(&["exec", "early", "--", "cat", "/tmp/missed"]);
    assert!(missed.is_empty(), "requests without an answer:\n{missed}");
    assert_eq!(cluster.readiness().expect("a node")["lastTransitionTime"], since, "the node stayed ready");
    cluster.say(&format!(
        "coracle and flannel's pod were replaced, and none of the requests failed: {answered}"
    ));
}

/// Removes the file of flannel's daemon, as a reboot does: a new pod waits until flannel's next pod has written it.
fn without_subnet(cluster: &mut Cluster) {
    let before = leases();
    fs::remove_file(SUBNET).expect("flannel's daemon wrote it");
    cluster.must(&["scale", "deployment/web", "--replicas=4"]);
    let message = cluster.wait("a pod says what it waits for", |cluster| {
        let events = cluster.get(&["events", "--field-selector", "reason=FailedCreatePodSandBox"])?;
        // The pod `early` may have one of the time between flannel's installation and its daemon's start.
        let is_web = |event: &&Value| {
            event["involvedObject"]["name"].as_str().is_some_and(|name| name.starts_with("web-"))
        };
        let events = events["items"].as_array()?.iter().filter(is_web);
        let mut messages = events.filter_map(|event| event["message"].as_str());
        messages.find(|message| message.contains(SUBNET)).map(str::to_owned)
    });
    println!("  {message}");
    assert_eq!(leases(), before, "a failed attempt leaves no lease");
    assert!(cluster.is_node_ready(), "the configuration is there");
    replace_flannel(cluster, |_| {});
    cluster.must(&["rollout", "status", "deployment/web", "--timeout=120s"]);
    objects_are_those_of(cluster, before.len() + 1);
    cluster.say("a pod waited for the file of flannel's daemon, and runs");
}

/// coracle is killed again and again while it attaches pods and while it detaches them: none is attached twice, and
/// nothing is left.
fn kill_during_work(cluster: &mut Cluster) {
    let before = leases().len();
    for (replicas, goal) in [("12", before + 8), ("3", before - 1)] {
        let begun = leases();
        cluster.must(&["scale", "deployment/web", &format!("--replicas={replicas}")]);
        cluster.wait("coracle has begun", |_| (leases() != begun).then_some(()));
        for _ in 0..KILLS {
            cluster.node.restart();
            std::thread::sleep(BETWEEN_KILLS);
        }
        cluster.must(&["rollout", "status", "deployment/web", "--timeout=120s"]);
        objects_are_those_of(cluster, goal);
    }
    cluster.say("coracle was killed while it attached pods and while it detached them");
}

/// Waits until there is this number of pods with addresses, and a lease, a link, a network namespace and a
/// configuration for each.
#[track_caller]
fn objects_are_those_of(cluster: &mut Cluster, pods: usize) {
    cluster.wait("each pod has its objects, and there are no others", |cluster| {
        let addresses = addresses(cluster);
        let numbers = [ports(), kept(), namespaces()].map(|all| all.len());
        (addresses.len() == pods && leases() == addresses && numbers == [pods; 3]).then_some(())
    });
}

/// Removes flannel's pod, calls `meanwhile`, and waits for the next pod.
fn replace_flannel(cluster: &mut Cluster, meanwhile: impl FnOnce(&mut Cluster)) {
    let flannels = |namespace: &str| namespace == "kube-flannel";
    let before = running(cluster, flannels);
    assert_eq!(before.len(), 1, "flannel's daemon runs: {before:?}");
    cluster.must(&["-n", "kube-flannel", "delete", "pod", "-l", "app=flannel", "--wait=false"]);
    meanwhile(cluster);
    cluster.wait("flannel has another pod", |cluster| {
        let now = running(cluster, flannels);
        (now.len() == 1 && now != before).then_some(())
    });
    cluster.must(&["-n", "kube-flannel", "rollout", "status", "daemonset/kube-flannel-ds", "--timeout=180s"]);
}

/// Removes all pods: no link, lease, configuration of flannel's plugin, network namespace or host port remains.
fn removal(cluster: &mut Cluster) {
    cluster.must(&["delete", "deployment/web", "service/web", "pod/early", "pod/port", "--wait=false"]);
    cluster.node.restart();
    cluster.must(&["-n", "kube-system", "delete", "deployment/coredns", "--wait=true"]);
    cluster.must(&["-n", "kube-flannel", "delete", "daemonset/kube-flannel-ds", "--wait=true"]);
    cluster.wait("no pod is left", |cluster| {
        let pods = cluster.get(&["pods", "--all-namespaces"])?;
        let none = pods["items"].as_array().is_some_and(Vec::is_empty);
        (none && running(cluster, |_| true).is_empty()).then_some(())
    });
    let left = || [ports(), leases(), kept(), namespaces()].concat();
    let none = host::wait_within(host::patience(), || left().is_empty().then_some(()));
    assert!(none.is_some(), "objects of pods are left: {:?}", left());
    assert!(!host_ports().contains("elements"), "{}", host_ports());
    assert_eq!(get(None, &format!("{NODE}:{PORT}")), Err(std::io::ErrorKind::ConnectionRefused));
    cluster.say("all pods are removed, and no link, lease, configuration or port is left of them");
}

/// The map with the node's ports of pods, in the table of the built-in plugins.
fn host_ports() -> String {
    command("nft", &["list", "map", "ip", "coracle", "ports"])
}

/// Moves the other end of the node's link to a namespace, as a machine at the address of the node's router.
fn make_outside() {
    for words in [
        &["netns", "add", OUTSIDE][..],
        &["link", "set", "node0-peer", "netns", OUTSIDE],
        &["-n", OUTSIDE, "address", "add", &format!("{ROUTER}/24"), "dev", "node0-peer"],
        &["-n", OUTSIDE, "link", "set", "node0-peer", "up"],
    ] {
        command("ip", words);
    }
}

/// The output of a program of the machine; panics with its error.
#[track_caller]
fn command(program: &str, words: &[&str]) -> String {
    let output = Command::new(program).args(words).output().expect("the program is installed");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {}: {said}", words.join(" "));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs `work` in a network namespace, in a thread of its own.
fn inside<T: Send>(namespace: &str, work: impl FnOnce() -> T + Send) -> T {
    let enter = move || {
        let file = fs::File::open(format!("/run/netns/{namespace}")).expect("a namespace");
        setns(file, CloneFlags::CLONE_NEWNET).expect("root may enter");
        work()
    };
    std::thread::scope(|scope| scope.spawn(enter).join().expect("the thread ends"))
}

/// The content of `/hostname` of the server at this address and port, read from a namespace or from the node.
fn get(namespace: Option<&str>, at: &str) -> Result<String, std::io::ErrorKind> {
    let at: SocketAddr = at.parse().expect("an address");
    let connect = || TcpStream::connect_timeout(&at, CONNECT_LIMIT);
    let mut stream =
        namespace.map_or_else(connect, |name| inside(name, connect)).map_err(|error| error.kind())?;
    let mut text = String::new();
    stream.set_read_timeout(Some(CONNECT_LIMIT)).expect("a socket");
    stream
        .write_all(b"GET /hostname HTTP/1.0\r\n\r\n")
        .and_then(|()| stream.read_to_string(&mut text))
        .map_err(|error| error.kind())?;
    Ok(text.lines().last().unwrap_or_default().to_owned())
}

/// The content of this URL, read by the pod `early`.
fn ask(cluster: &Cluster, url: &str) -> String {
    let command = format!("timeout 5 wget -q -O - {url}");
    let output = cluster.kubectl(&["exec", "early", "--", "sh", "-c", &command]);
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn address(cluster: &Cluster, pod: &str) -> String {
    cluster.must(&["get", "pod", pod, "-o", "jsonpath={.status.podIP}"])
}

/// IDs of the running containers in the namespaces that `is_wanted` accepts.
fn running(cluster: &Cluster, is_wanted: impl Fn(&str) -> bool) -> BTreeSet<String> {
    let answer = cluster.node.list_containers(ListContainersRequest::default()).expect("a list");
    let namespace = |labels: &std::collections::HashMap<String, String>| {
        labels.get("io.kubernetes.pod.namespace").cloned().unwrap_or_default()
    };
    let runs = answer.containers.into_iter().filter(|one| one.state() == ContainerState::ContainerRunning);
    runs.filter(|one| is_wanted(&namespace(&one.labels))).map(|one| one.id).collect()
}

/// Addresses of the pods that do not have the node's network.
fn addresses(cluster: &Cluster) -> Vec<String> {
    let pods = cluster.get(&["pods", "--all-namespaces"]).expect("a list");
    let all = pods["items"].as_array().cloned().unwrap_or_default();
    let addresses = all.iter().filter_map(|pod| pod["status"]["podIP"].as_str().map(str::to_owned));
    let mut addresses: Vec<String> = addresses.filter(|address| address != NODE).collect();
    addresses.sort();
    addresses
}

/// Addresses for which there is a lease.
fn leases() -> Vec<String> {
    names(LEASES).into_iter().filter(|name| name.starts_with("10.")).collect()
}

/// Configurations that flannel's plugin keeps for its DEL.
fn kept() -> Vec<String> {
    names("/var/lib/cni/flannel")
}

/// Links of pods.
fn ports() -> Vec<String> {
    host::links(BRIDGE).into_iter().filter(|link| link != BRIDGE).collect()
}

/// Network namespaces of pods.
fn namespaces() -> Vec<String> {
    names("/run/netns").into_iter().filter(|name| name != OUTSIDE).collect()
}

/// Names in a directory, sorted.
fn names(directory: &str) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}
