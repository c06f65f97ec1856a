//! The systemd cgroup driver: the properties of coracle's scopes, and the kernel's files after systemd has
//! written them.

use std::fs;

use coracle_tests::cri::proto::{
    LinuxContainerResources, LinuxPodSandboxConfig, UpdateContainerResourcesRequest,
};

use tonic::Code;

use super::*;

/// The cgroup parent that a kubelet with the systemd driver uses for a burstable pod.
const PARENT: &str = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podone_two.slice";
pub(super) const MIB: i64 = 1 << 20;

fn pod_in(name: &str, parent: &str) -> PodSandboxConfig {
    let mut pod = host_pod(name);
    let linux = pod.linux.take().unwrap_or_default();
    pod.linux = Some(LinuxPodSandboxConfig { cgroup_parent: parent.into(), ..linux });
    pod
}

/// A property of the scope of a container or a monitor.
pub(super) fn scope(id: &str, name: &str) -> String {
    show(&format!("coracle-{id}.scope"), name)
}

/// A file of a cgroup.
pub(super) fn file(cgroup: &str, name: &str) -> String {
    let path = format!("/sys/fs/cgroup{cgroup}/{name}");
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}")).trim().to_owned()
}

/// The cgroup of a process.
pub(super) fn cgroup_of(pid: i32) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("its cgroup");
    text.trim().rsplit(':').next().unwrap_or_default().to_owned()
}

fn resources() -> LinuxContainerResources {
    LinuxContainerResources {
        cpu_shares: 512,
        cpu_quota: 25_000,
        cpu_period: 50_000,
        memory_limit_in_bytes: 64 * MIB,
        unified: [("memory.oom.group".into(), "1".into()), ("memory.high".into(), (48 * MIB).to_string())]
            .into(),
        ..Default::default()
    }
}

#[test]
fn containers_are_scopes_in_the_slice_of_their_pod() {
    let cri = package::installed();
    import();
    let pod = pod_in("scopes", PARENT);
    let pod_id = cri.run_pod_sandbox(run(&pod)).expect("run").pod_sandbox_id;
    let mut config = container("one", IMAGE, &["sleep", "forever"], &pod);
    config.linux.as_mut().expect("linux").resources = Some(resources());
    let request = create(&pod_id, &config, &pod);
    let id = cri.create_container(request).expect("create").container_id;
    cri.start_container(StartContainerRequest { container_id: id.clone() }).expect("start");
    let cgroup = cgroup_of(pid(&cri, &id));
    assert_eq!(cgroup, format!("{PARENT}/coracle-{id}.scope"));

    let expect_limits = |when: &str, memory: i64| {
        let properties = [
            ("ActiveState", "active".to_owned()),
            ("Delegate", "yes".to_owned()),
            ("ControlGroup", cgroup.clone()),
            ("CPUWeight", file(&cgroup, "cpu.weight")),
            ("CPUQuotaPerSecUSec", "500ms".to_owned()),
            ("CPUQuotaPeriodUSec", "50ms".to_owned()),
            ("MemoryMax", memory.to_string()),
            ("MemoryHigh", (48 * MIB).to_string()),
        ];
        for (name, expected) in properties {
            assert_eq!(scope(&id, name), expected, "{when}: {name}");
        }
        let files = [
            ("cpu.max", "25000 50000".to_owned()),
            ("memory.max", memory.to_string()),
            ("memory.high", (48 * MIB).to_string()),
            ("memory.swap.max", "0".to_owned()),
        ];
        for (name, expected) in files {
            // A kernel without swap accounting has no such file.
            if fs::exists(format!("/sys/fs/cgroup{cgroup}/{name}")).unwrap_or(false) {
                assert_eq!(file(&cgroup, name), expected, "{when}: {name}");
            }
        }
    };
    expect_limits("at the start", 64 * MIB);
    assert_eq!(file(&cgroup, "memory.oom.group"), "1"); // a reload resets it in systemd before 253
    assert_ne!(file(&cgroup, "cpu.weight"), "100", "not the default");
    systemctl(&["daemon-reload"]);
    expect_limits("after a reload", 64 * MIB);

    let linux = LinuxContainerResources { memory_limit_in_bytes: 80 * MIB, ..Default::default() };
    let update = UpdateContainerResourcesRequest {
        container_id: id.clone(),
        linux: Some(linux),
        ..Default::default()
    };
    cri.update_container_resources(update).expect("update");
    wait_until("systemd has the new limit", || scope(&id, "MemoryMax") == (80 * MIB).to_string());
    systemctl(&["daemon-reload"]);
    expect_limits("after an update and a reload", 80 * MIB);

    remove(&cri, pod_id.clone());
    for id in [&id, &pod_id] {
        wait_until("systemd forgets the scope", || scope(id, "LoadState") == "not-found");
    }
    wait_until("no cgroup of it is left", || !fs::exists(format!("/sys/fs/cgroup{cgroup}")).unwrap_or(true));
}

#[test]
fn a_container_that_ends_at_once_and_one_that_is_killed_leave_no_scope() {
    let cri = package::installed();
    import();
    let pod = pod_in("short", "system.slice");
    let pod_id = cri.run_pod_sandbox(run(&pod)).expect("run").pod_sandbox_id;
    let mut ids = vec![pod_id.clone()];
    for (name, words) in [("short", ["exit", "3"]), ("long", ["sleep", "forever"])] {
        let config = container(name, IMAGE, &words, &pod);
        let container_id = cri.create_container(create(&pod_id, &config, &pod)).expect("create").container_id;
        cri.start_container(StartContainerRequest { container_id: container_id.clone() }).expect("start");
        ids.push(container_id);
    }
    let status = |id: &str| {
        let request = ContainerStatusRequest { container_id: id.into(), verbose: false };
        cri.container_status(request).expect("status").status.expect("a status")
    };
    wait_until("the short one ends", || status(&ids[1]).state() == ContainerState::ContainerExited);
    assert_eq!(status(&ids[1]).exit_code, 3);
    systemctl(&["kill", "--signal=KILL", &format!("coracle-{}.scope", ids[2])]);
    wait_until("the long one ends", || status(&ids[2]).state() == ContainerState::ContainerExited);
    assert_eq!(status(&ids[2]).exit_code, 137);
    remove(&cri, pod_id);
    for id in &ids {
        wait_until("systemd forgets the scope", || scope(id, "LoadState") == "not-found");
    }
}

/// systemd removes the cgroup of a container with its last process, before or after the monitor reads its counter of OOM
/// kills, so several containers are killed.
#[test]
fn a_container_above_its_memory_limit_is_reported_as_oom_killed() {
    let cri = package::installed();
    import();
    let pod = pod_in("hungry", PARENT);
    let pod_id = cri.run_pod_sandbox(run(&pod)).expect("run").pod_sandbox_id;
    let start = |name: &str, words: &[&str]| {
        let mut config = container(name, IMAGE, words, &pod);
        let limit = LinuxContainerResources { memory_limit_in_bytes: 16 * MIB, ..Default::default() };
        config.linux.as_mut().expect("linux").resources = Some(limit);
        let container_id = cri.create_container(create(&pod_id, &config, &pod)).expect("create").container_id;
        cri.start_container(StartContainerRequest { container_id: container_id.clone() }).expect("start");
        container_id
    };
    let end = |id: &str| {
        let status = || {
            let request = ContainerStatusRequest { container_id: id.into(), verbose: false };
            cri.container_status(request).expect("status").status.expect("a status")
        };
        wait_until("it ends", || status().state() == ContainerState::ContainerExited);
        (status().reason, status().exit_code)
    };
    let [before, beside] = ["before", "beside"].map(|name| start(name, &["sleep", "forever"]));
    for name in ["hungry1", "hungry2", "hungry3"] {
        assert_eq!(end(&start(name, &["burn", "64"])), ("OOMKilled".to_owned(), 137), "{name}");
    }
    // Killed by others, in a pod in which the kernel has killed for memory.
    let after = start("after", &["sleep", "forever"]);
    for id in [&before, &after] {
        systemctl(&["kill", "--signal=KILL", &format!("coracle-{id}.scope")]);
        assert_eq!(end(id), ("Error".to_owned(), 137), "{id}");
    }
    assert_eq!(end(&start("last", &["burn", "64"])), ("OOMKilled".to_owned(), 137));
    assert!(pid(&cri, &beside) > 0);
    remove(&cri, pod_id);
}

#[test]
fn a_cgroup_parent_that_is_not_a_slice_is_refused() {
    let cri = package::installed();
    for parent in ["/kubepods/burstable/pod1", "bad-.slice"] {
        let refused = cri.run_pod_sandbox(run(&pod_in("refused", parent))).expect_err("no slice");
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains("slice"), "{refused}");
    }
}
