//! A whole Kubernetes cluster on this tree's coracle: etcd, API server, controllers, scheduler, kubelet, kube-proxy and
//! DNS, built from their Go modules. `make cluster` keeps one running, `make cluster-test` uses one as a user does and
//! checks that nothing remains, `make test` does the same and runs some specs of the conformance suite, `make
//! cluster-restarts` kills its kubelet during rolling updates, `make cluster-bad-day` kills kubelet and coracle under
//! whatever happens to a node, `make cluster-timing` measures, `make cluster-addons` runs programs that real clusters
//! have, `make cluster-flannel` has flannel as its network, and `make conformance` and `make node-conformance` run
//! Kubernetes' own end-to-end suites. All of them run in namespaces of their own, which `tests/cluster/namespaces`
//! creates, or in a guest (`make conformance-guest`).
#![forbid(unsafe_code)]

mod addons;
mod bad_day;
mod certificates;
mod cluster;
mod conformance;
mod flannel;
mod history;
mod load;
mod node_conformance;
mod restarts;
mod runtime_unit;
mod timing;
mod usage;

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use cluster::Cluster;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if std::env::var_os("CORACLE_CLUSTER").is_none() {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("cluster/namespaces");
        let program = std::env::current_exe().expect("this program has a path");
        let error = Command::new(&script).arg(program).args(&words).exec();
        panic!("{}: {error}", script.display());
    }
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["up", ref images @ ..] => keep(images),
        ["test"] => usage::run(),
        ["sample"] => conformance::sample(),
        ["restarts"] => restarts::run(),
        ["bad-day"] => bad_day::run(),
        ["timing"] => timing::run(),
        ["addons"] => addons::run(),
        ["flannel"] => flannel::run(),
        ["conformance"] => conformance::run(),
        ["node-conformance"] => node_conformance::run(),
        ref other => panic!(
            "up, test, sample, restarts, bad-day, timing, addons, flannel, conformance or node-conformance; not {other:?}"
        ),
    }
}

/// Starts a cluster and keeps it until a signal ends this process.
fn keep(images: &[&str]) {
    let mut cluster = Cluster::start(images);
    println!("\n`make cluster-shell` is a shell with kubectl; Ctrl-C ends the cluster.");
    println!("Logs are in {}/logs.", cluster.node.folder().display());
    loop {
        // Reports a program that ended.
        cluster.wait("the cluster runs", |_| Some(()));
        std::thread::sleep(std::time::Duration::from_secs(1));
    }
}
