//! A real kubelet on cgroup v2 with the systemd driver, which most machines have: a unit beside coracle's, which asks coracle
//! for the driver. Its pods are static, because there is no API server.

use std::fs;
use std::net::Ipv4Addr;
use std::time::Duration;

use coracle_tests::http;
use serde_json::Value;

use super::scopes::{MIB, cgroup_of, file, scope};
use super::*;

/// Time limit of each step, of which the slowest takes twenty seconds under emulation on an idle host.
const LIMIT: Duration = Duration::from_secs(300);
const MANIFESTS: &str = "/opt/manifests";
const UNIT: &str = "/etc/systemd/system/kubelet.service";
/// The kubelet's configuration: the cgroup driver is left to coracle, and MemoryQoS, which is off by default, sets memory.high.
const CONFIG: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
    containerRuntimeEndpoint: unix:///run/coracle/coracle.sock\nstaticPodPath: /opt/manifests\n\
    address: 127.0.0.1\nreadOnlyPort: 10255\n\
    authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}\n\
    authorization: {mode: AlwaysAllow}\nfailSwapOn: false\nmakeIPTablesUtilChains: false\n\
    localStorageCapacityIsolation: false\nresolvConf: \"\"\nfileCheckFrequency: 1s\n\
    evictionHard: {memory.available: 1Mi}\nfeatureGates: {MemoryQoS: true}\nmemoryThrottlingFactor: 0.9\n";
const SERVICE: &str = "[Unit]\nAfter=coracle.service\n[Service]\n\
    ExecStart=/opt/kubelet --config=/opt/kubelet.yaml --hostname-override=node --v=2\nRestart=always\nRestartSec=1\n";

/// A static pod.
struct Pod {
    name: &'static str,
    /// Arguments of the probe.
    words: &'static str,
    /// Further lines of the container.
    container: &'static str,
}

/// A pod without requests and limits that is added after a restart, so that the kubelet has to make use of the runtime.
const fn idle(name: &'static str) -> Pod {
    Pod { name, words: "sleep, forever", container: "" }
}

const PODS: [Pod; 5] = [
    Pod {
        name: "guaranteed",
        words: "sleep, forever",
        container: "resources: {limits: {memory: 64Mi, cpu: 200m}}",
    },
    Pod {
        name: "burstable",
        words: "sleep, forever",
        container: "resources: {requests: {memory: 32Mi, cpu: 100m}, limits: {memory: 64Mi}}",
    },
    idle("besteffort"),
    Pod {
        name: "sick",
        words: "sleep, forever",
        container: "livenessProbe: {exec: {command: [/probe, stat, /tmp/none]}, periodSeconds: 10, failureThreshold: 2}",
    },
    Pod { name: "hungry", words: "burn, \"64\"", container: "resources: {limits: {memory: 16Mi}}" },
];

fn manifest(pod: &Pod) -> String {
    format!("{MANIFESTS}/{}.yaml", pod.name)
}

/// Adds a manifest, which the kubelet must not read before it is complete.
fn add(pod: &Pod) {
    let text = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {}, namespace: default}}\nspec:\n  hostNetwork: true\n  \
         terminationGracePeriodSeconds: 1\n  containers:\n  - name: main\n    image: {IMAGE}\n    \
         imagePullPolicy: Never\n    args: [{}]\n    {}\n",
        pod.name, pod.words, pod.container
    );
    fs::write("/opt/manifest", text).expect("a manifest");
    fs::rename("/opt/manifest", manifest(pod)).expect("a rename");
}

/// The answer of the kubelet's read-only port to a GET request.
fn get(path: &str) -> Option<String> {
    http::get((Ipv4Addr::LOCALHOST, 10255).into(), path)
}

/// The pod with its status in the kubelet's API.
fn described(pod: &Pod) -> Option<Value> {
    let pods: Value = serde_json::from_str(&get("/pods")?).ok()?;
    let name = format!("{}-node", pod.name);
    pods["items"].as_array()?.iter().find(|one| one["metadata"]["name"] == *name).cloned()
}

/// The kubelet's status of the container of a pod.
fn status(pod: &Pod) -> Option<Value> {
    Some(described(pod)?["status"]["containerStatuses"][0].clone()).filter(|status| !status.is_null())
}

#[track_caller]
fn wait<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    // The kubelet needs the processor, too.
    let look = || {
        condition().or_else(|| {
            std::thread::sleep(Duration::from_millis(500));
            None
        })
    };
    wait_within(LIMIT, look).unwrap_or_else(|| {
        let output = Command::new("journalctl").args(["--unit=kubelet", "--no-pager", "--lines=60"]).output();
        panic!("timeout: {what}:\n{}", String::from_utf8_lossy(&output.expect("journalctl").stdout))
    })
}

/// Waits until the container of a pod is ready; returns its ID.
fn ready(pod: &Pod) -> String {
    let status =
        wait(&format!("{} is ready", pod.name), || status(pod).filter(|status| status["ready"] == true));
    status["containerID"].as_str().expect("an ID").trim_start_matches("coracle://").to_owned()
}

/// Asserts that a container is in the slice of its pod, whose path begins with `slice`, that of the pod's class; returns its cgroup.
fn placed(cri: &Cri, pod: &Pod, id: &str, slice: &str) -> String {
    let cgroup = cgroup_of(pid(cri, id));
    let uid =
        described(pod).expect("it is known")["metadata"]["uid"].as_str().expect("a UID").replace('-', "_");
    assert_eq!(cgroup, format!("{slice}-pod{uid}.slice/coracle-{id}.scope"));
    cgroup
}

/// Asserts the limits of the pods `guaranteed` and `burstable` in the kernel's files and in systemd's properties.
fn limited(when: &str, ids: &[String; 2], cgroups: &[String; 2]) {
    let limit = (64 * MIB).to_string();
    // Request and nine tenths of the rest up to the limit, rounded down to a page (KEP-2570).
    let high = ((32 * MIB + 32 * MIB * 9 / 10) / 4096 * 4096).to_string();
    for (id, cgroup) in ids.iter().zip(cgroups) {
        assert_eq!(file(cgroup, "memory.max"), limit, "{when}: {cgroup}");
        assert_eq!(scope(id, "MemoryMax"), limit, "{when}: {cgroup}");
        assert_eq!(scope(id, "CPUWeight"), file(cgroup, "cpu.weight"), "{when}: {cgroup}");
    }
    assert_eq!(file(&cgroups[0], "cpu.max"), "20000 100000", "{when}");
    assert_eq!(file(&cgroups[1], "memory.high"), high, "{when}");
    assert_eq!(scope(&ids[1], "MemoryHigh"), high, "{when}");
}

/// The scopes of coracle's containers and monitors that systemd knows.
fn scopes() -> String {
    let words = ["list-units", "--all", "--plain", "--no-legend", "coracle-*.scope"];
    let output = Command::new("systemctl").args(words).output().expect("systemctl runs");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_kubelet_runs_pods_in_slices_and_scopes() {
    let cri = package::installed();
    import();
    fs::create_dir_all(MANIFESTS).expect("a directory");
    fs::write("/opt/kubelet.yaml", CONFIG).expect("a file");
    fs::write(UNIT, SERVICE).expect("a unit");
    PODS.iter().for_each(add);
    systemctl(&["daemon-reload"]);
    systemctl(&["start", "kubelet.service"]);

    let [guaranteed, burstable, besteffort, sick, hungry] = &PODS;
    let ids = [guaranteed, burstable].map(ready);
    let slices = ["/kubepods.slice/kubepods", "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable"];
    let cgroups = [placed(&cri, guaranteed, &ids[0], slices[0]), placed(&cri, burstable, &ids[1], slices[1])];
    let slice = "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort";
    placed(&cri, besteffort, &ready(besteffort), slice);
    limited("at the start", &ids, &cgroups);
    let before = [pid(&cri, &ids[0]), pid(&cri, &ids[1])];
    systemctl(&["daemon-reload"]);
    limited("after a reload", &ids, &cgroups);

    wait("the container whose probe fails is restarted", || {
        status(sick).filter(|status| status["restartCount"].as_u64() >= Some(1))
    });
    wait("the container above its limit is reported", || {
        let status = status(hungry)?;
        let ends = ["state", "lastState"].map(|of| status[of]["terminated"]["reason"] == "OOMKilled");
        ends.contains(&true).then_some(())
    });
    for metric in ["container_memory_working_set_bytes", "container_cpu_usage_seconds_total"] {
        let line = format!("{metric}{{container=\"main\",namespace=\"default\",pod=\"burstable-node\"}}");
        wait(metric, || get("/metrics/resource")?.contains(&line).then_some(()));
    }

    let late = [idle("after-coracle"), idle("after-kubelet")];
    for (unit, pod) in ["coracle.service", "kubelet.service"].into_iter().zip(&late) {
        systemctl(&["restart", unit]);
        add(pod);
        let id = ready(pod);
        let cri = Cri::new(Path::new(SOCKET)); // the former connection may have ended with the daemon
        placed(&cri, pod, &id, slice);
        assert_eq!([pid(&cri, &ids[0]), pid(&cri, &ids[1])], before, "{unit}");
        assert!(
            [guaranteed, burstable].iter().all(|pod| status(pod).is_some_and(|one| one["ready"] == true))
        );
        limited(unit, &ids, &cgroups);
    }

    assert!(scopes().contains(&ids[0]), "{}", scopes());
    for pod in PODS.iter().chain(&late) {
        fs::remove_file(manifest(pod)).expect("ours");
    }
    wait("no scope is left", || scopes().is_empty().then_some(()));
    for cgroup in cgroups {
        let slice = Path::new("/sys/fs/cgroup").join(cgroup.trim_start_matches('/'));
        let slice = slice.parent().expect("a slice").to_owned();
        wait("the pod's slice is gone", || (!slice.exists()).then_some(()));
    }
    systemctl(&["stop", "kubelet.service"]);
}
