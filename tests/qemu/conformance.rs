//! A Kubernetes cluster in a guest with Debian's systemd, which has cgroup v2 and a kubelet with the systemd driver. The suite
//! `tests/cluster` uses it as a user does and runs specs of Kubernetes' conformance suite. The cluster's programs are those that
//! `tests/tools/install e2e` builds for this machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::disk::workspace;
use crate::guest::Guest;
use crate::target::Arch;

/// Time limit of all specs, which take longer than the sample if the focus is wide.
const LIMIT: Duration = Duration::from_secs(6 * 3600);
/// Memory of the guest: the API server and etcd need a third of it.
const MEMORY_MIB: u32 = 4096;
/// Size of its disk: programs, archives of images, and a second copy of the images in coracle's store.
const DISK_MIB: u32 = 6144;
/// The least number of passed tests of the sample.
const SAMPLE_LEAST: usize = 45;

/// Names of a cluster's programs and archives in the directory of its version.
const FILES: [&str; 5] = ["kubernetes", "e2e.test", "bin", "images-cluster.tar", "images-e2e.tar"];

/// The newest version that `tests/tools/install e2e` has built.
fn newest_cluster(tools: &Path) -> PathBuf {
    let entries = fs::read_dir(tools).expect("target/tools").flatten().map(|entry| entry.path());
    let is_cluster = |path: &PathBuf| path.join("e2e.test").exists();
    entries.filter(is_cluster).max().expect("a cluster: tests/tools/install conformance-guest")
}

/// `CORACLE_FOCUS` limits the specs to those whose names match this expression; without it the sample of `make test` is run.
#[test]
#[ignore = "takes too long for each make test: make conformance-guest"]
fn conformance_guest() {
    const ARCH: &str = "the cluster's programs are built for this machine, and the guest is x86_64";
    assert_eq!(std::env::consts::ARCH, "x86_64", "{ARCH}");
    let focus = std::env::var("CORACLE_FOCUS").unwrap_or_default();
    let mut guest = Guest::systemd("conformance", Arch::X86_64, MEMORY_MIB, &["cluster"], |tree| {
        tree.set_disk_mib(DISK_MIB);
        tree.add_tools();
        let tools = workspace().join("target/tools");
        let cluster = newest_cluster(&tools);
        let to = tree.path("opt/target/tools/cluster-guest");
        fs::create_dir_all(&to).expect("a directory");
        for name in FILES {
            let copied = Command::new("cp").arg("-a").arg(cluster.join(name)).arg(&to).status().expect("cp");
            assert!(
                copied.success(),
                "{name} of {}: tests/tools/install conformance-guest",
                cluster.display()
            );
        }
        tree.copy(&tools.join("bin/kubelet"), "opt/target/tools/bin/kubelet");
        tree.write("opt/focus", &focus);
        tree.write_program("opt/cluster-suite", include_str!("systemd/cluster.sh"));
    });
    guest.set_processors(2);
    let report = guest.boot_printing("CORACLE_SUITE=cluster-suite", LIMIT);
    report.expect_good("a cluster under systemd");
    assert!(!focus.is_empty() || report.passed >= SAMPLE_LEAST, "{} passed", report.passed);
}
