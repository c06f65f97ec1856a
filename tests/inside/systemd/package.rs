//! The Debian package on a separate machine: dpkg installs it and its scripts start the unit; an upgrade
//! keeps pods; after removal and purge the machine is unchanged.

use std::collections::BTreeSet;
use std::sync::OnceLock;

use coracle_tests::cri::proto::StatusRequest;
use coracle_tests::host::{cgroups_below, links, processes};
use coracle_tests::request::bridge_pod;

use super::*;

/// Path at which the harness puts the package.
pub(super) const PACKAGE: &str = "/opt/coracle.deb";
/// A network whose plugins store only leases, in a directory of no package.
const NETWORK: &str = r#"{ "cniVersion": "1.0.0", "name": "raft", "plugins": [{ "type": "ptp",
    "ipam": { "type": "host-local", "dataDir": "/opt/leases", "ranges": [[{ "subnet": "10.98.0.0/24" }]] } }] }"#;
/// Directories that change independently of the package: databases of dpkg and systemd, and test files.
const OF_OTHERS: [&str; 6] =
    ["/opt/", "/run/systemd/", "/run/log/", "/run/dbus/", "/var/lib/dpkg/", "/var/log/"];

/// State of the machine before the first installation.
static BEFORE: OnceLock<BTreeSet<String>> = OnceLock::new();

/// The daemon of the installed package; installs it if no earlier test did.
pub(super) fn installed() -> Cri {
    BEFORE.get_or_init(|| {
        // The system bus is started by its first client, which would otherwise be the daemon.
        systemctl(&["start", "dbus.service"]);
        machine()
    });
    if !Path::new(PROGRAM).exists() {
        dpkg("--install", PACKAGE);
    }
    Cri::new(Path::new(SOCKET))
}

fn dpkg(action: &str, what: &str) {
    let output = Command::new("dpkg").args([action, what]).output().expect("dpkg runs");
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "dpkg {action}: {}", String::from_utf8_lossy(&said));
}

/// Everything that a package could leave behind, one line each.
fn machine() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for root in ["/", "/run"] {
        let output = Command::new("/bin/busybox").args(["find", root, "-xdev"]).output().expect("find runs");
        let paths = String::from_utf8_lossy(&output.stdout).into_owned();
        let ours = |path: &&str| !OF_OTHERS.iter().any(|others| path.starts_with(others));
        found.extend(paths.lines().filter(ours).map(|path| format!("file {path}")));
    }
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("our mounts");
    found.extend(mounts.lines().filter_map(|line| Some(format!("mount {}", line.split(' ').nth(4)?))));
    found.extend(cgroups_below("").iter().map(|path| format!("cgroup {}", path.display())));
    found.extend(links("").into_iter().map(|name| format!("link {name}")));
    found.extend(processes("coracle").into_iter().map(|process| format!("process {}", process.command)));
    for list in ["list-units", "list-unit-files"] {
        let output = Command::new("systemctl").args([list, "--all", "--plain", "--no-legend"]).output();
        let lines = String::from_utf8_lossy(&output.expect("systemctl runs").stdout).into_owned();
        found.extend(
            lines.lines().filter_map(|line| Some(format!("unit {}", line.split_whitespace().next()?))),
        );
    }
    found
}

/// Asserts that the machine is as before the first installation.
#[track_caller]
fn expect_as_before() {
    let before = BEFORE.get().expect("it was installed");
    let left = || machine().difference(before).cloned().collect::<Vec<_>>();
    // systemd removes units asynchronously.
    wait_within(patience(), || left().is_empty().then_some(()));
    assert_eq!(left(), Vec::<String>::new());
}

/// Starts a pod with its own network; returns the IDs of the pod and its container.
fn start_on_the_network(cri: &Cri) -> (String, String) {
    import();
    std::fs::create_dir_all("/etc/cni/net.d").expect("a folder");
    std::fs::write("/etc/cni/net.d/raft.conflist", NETWORK).expect("a network");
    wait_until("the network is configured", || {
        let status = cri.status(StatusRequest::default()).expect("status").status.expect("a status");
        status.conditions.iter().any(|condition| condition.r#type == "NetworkReady" && condition.status)
    });
    let ids = start(cri, &bridge_pod("packed"));
    std::fs::remove_dir_all("/etc/cni").expect("it is ours");
    ids
}

#[test]
fn an_installed_package_runs_pods_and_a_purged_one_is_removed() {
    let cri = installed();
    assert_eq!(
        [property("LoadState"), property("UnitFileState"), property("ActiveState")],
        ["loaded", "enabled", "active"]
    );
    dpkg("--verify", "coracle");
    let (_, container_id) = start_on_the_network(&cri);
    let (init, daemon) = (pid(&cri, &container_id), property("MainPID"));

    dpkg("--install", PACKAGE);
    assert_ne!(property("MainPID"), daemon, "an upgrade starts the new daemon");
    assert_eq!(pid(&Cri::new(Path::new(SOCKET)), &container_id), init, "and pods run on");

    dpkg("--remove", "coracle");
    assert!(!is_alive(init), "crictl is there, so pods go first");
    assert_eq!(processes("coracle"), []);
    assert_eq!(property("ActiveState"), "inactive");
    assert!(Path::new("/var/lib/coracle/images").exists(), "images stay until the purge");

    dpkg("--purge", "coracle");
    expect_as_before();
}

/// Regression: postrm searched for network namespaces in an outdated directory, and left them mounted.
#[test]
fn a_purge_keeps_the_processes_of_existing_pods() {
    const CRICTL: &str = "/usr/bin/crictl";
    let cri = installed();
    let (pod_id, container_id) = start_on_the_network(&cri);
    let init = pid(&cri, &container_id);
    std::fs::rename(CRICTL, "/opt/crictl").expect("it is there");
    dpkg("--purge", "coracle");
    std::fs::rename("/opt/crictl", CRICTL).expect("it is ours");
    assert!(is_alive(init), "the pod was not removed");
    for id in [container_id, pod_id] {
        systemctl(&["kill", "--signal=KILL", &format!("coracle-{id}.scope")]);
    }
    expect_as_before();
}
