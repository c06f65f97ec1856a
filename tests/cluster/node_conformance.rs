//! The `[NodeConformance]` specs of Kubernetes' node suite (`e2e_node.test`), which is not modified. In parallel run those of
//! its own and then those that `make conformance` runs, too; the slow and the serial ones follow. The suite starts etcd, an
//! API server and a kubelet, and uses coracle's socket. What cannot pass here is listed in `node-expected.toml` with the
//! reason; a listed spec that passes is a failure, too.
//!
//! The suite and its kubelet use cgroups with fixed names below the root (`/kubepods`, `/system`). Therefore all of it runs in a
//! cgroup namespace, whose root is a cgroup of this run.
//!
//! The output is in `target/node-conformance`, or in `target/node-conformance-part` if `FOCUS` limits the specs.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use coracle_tests::ginkgo::{self, Results};
use coracle_tests::host;
use coracle_tests::node::{Node, Options};
use coracle_tests::request::DEFAULT_NETWORK;
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::cluster::tools;
use crate::conformance::{self, PART_LIMIT, Part, Suite};
use crate::runtime_unit::RuntimeUnit;

/// Name of the variable that is set in the process whose cgroup becomes the root.
const INSIDE: &str = "CORACLE_CGROUP_ROOT";
/// Mount point of all hierarchies.
const HIERARCHIES: &str = "/sys/fs/cgroup";

/// Archives of images, made by `tests/tools/install node-e2e`.
const IMAGES: [&str; 3] = ["images-cluster.tar", "images-e2e.tar", "images-node-e2e.tar"];

/// Time limit for killed processes to end.
const END_LIMIT: Duration = Duration::from_secs(60);

/// A program that may be installed on a machine without systemd as its first process.
const SYSTEMD_RUN: &str = "/usr/bin/systemd-run";

/// Settings of the suite's kubelet: those of Kubernetes' own runs of this suite, with the thresholds of disks off, which
/// depend on the machine, and cgroup v1 allowed.
const KUBELET: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\ncgroupDriver: cgroupfs\n\
    cgroupRoot: /\npodCIDR: 10.100.0.0/24\nvolumeStatsAggPeriod: 10s\nfileCheckFrequency: 10s\n\
    evictionPressureTransitionPeriod: 30s\nevictionHard: {\"memory.available\": 50Mi}\nserializeImagePulls: false\n\
    imageGCHighThresholdPercent: 100\nimageGCLowThresholdPercent: 99\nfailCgroupV1: false\nfailSwapOn: false\n";

/// Runs all parts; panics if the results differ from the list.
pub(crate) fn run() {
    if std::env::var_os(INSIDE).is_some() {
        enter_cgroup_namespace();
        run_inside();
    } else {
        run_below_own_cgroup();
    }
}

/// Runs this program again in a cgroup of its own, in every hierarchy, and removes what the suite leaves there.
fn run_below_own_cgroup() {
    let parent = format!("coracle-test-{}-0", std::env::var("CORACLE_TEST_ID").expect("set by the script"));
    host::make_kubelet_cgroups(&parent);
    let mut roots = host::cgroup_roots();
    let enter: Vec<String> =
        roots.iter().map(|root| format!("echo $$ >{}/{parent}/cgroup.procs", root.display())).collect();
    // Descriptors reach the hierarchies also after the suite's process has mounted them with other roots.
    let hierarchies: Vec<fs::File> =
        roots.iter().map(|root| fs::File::open(root).expect("a hierarchy")).collect();
    for (root, hierarchy) in roots.iter_mut().zip(&hierarchies) {
        *root = format!("/proc/self/fd/{}/{parent}", hierarchy.as_raw_fd()).into();
    }
    let status = Command::new("sh")
        .args(["-c", &format!("{} && exec \"$0\" node-conformance", enter.join(" && "))])
        .arg(std::env::current_exe().expect("this program has a path"))
        .env(INSIDE, "1")
        .status()
        .expect("sh runs");
    // The suite does not end everything that it started. The script reports a cgroup that remains.
    host::wait_within(END_LIMIT, || {
        let mut folders = Vec::new();
        roots.iter().for_each(|root| host::directories(root, &mut folders));
        for folder in folders.iter().chain(&roots) {
            let pids = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
            for pid in pids.lines().filter_map(|line| line.parse().ok()) {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL); // it may have ended
            }
            let _ = fs::remove_dir(folder); // once its processes have ended
        }
        (!roots.iter().any(|root| root.exists())).then_some(())
    });
    if !status.success() {
        std::process::exit(status.code().unwrap_or(1));
    }
}

/// Makes this process's cgroup the root of all hierarchies, and moves the process into one below it: a cgroup of v2 with
/// processes cannot have others below it that use controllers.
fn enter_cgroup_namespace() {
    unshare(CloneFlags::CLONE_NEWCGROUP).expect("a cgroup namespace");
    let mut mounts: Vec<(PathBuf, String, String)> =
        host::mounts("").iter().rev().filter_map(|line| hierarchy(line)).collect();
    // Those of the machine are below the script's /sys, and cannot be reached.
    mounts.retain(|(path, ..)| match umount2(path, MntFlags::MNT_DETACH) {
        Ok(()) => true,
        Err(Errno::EINVAL) => false,
        Err(errno) => panic!("{}: {errno}", path.display()),
    });
    for (path, kind, options) in mounts.iter().rev() {
        mount(Some("cgroup"), path, Some(kind.as_str()), MsFlags::empty(), Some(options.as_str()))
            .unwrap_or_else(|errno| panic!("{} {kind} {options}: {errno}", path.display()));
    }
    // With this program the suite starts its kubelet as a unit of systemd, which does not run here.
    if Path::new(SYSTEMD_RUN).exists() {
        mount(Some("/dev/null"), SYSTEMD_RUN, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("a mount");
    }
    let runner = "runner";
    host::make_kubelet_cgroups(runner);
    for root in host::cgroup_roots() {
        fs::write(root.join(runner).join("cgroup.procs"), std::process::id().to_string())
            .expect("its own cgroup");
    }
}

/// Mount point, type and options of a cgroup hierarchy in a line of mountinfo.
fn hierarchy(line: &str) -> Option<(PathBuf, String, String)> {
    let (left, right) = line.split_once(" - ")?;
    let path = Path::new(left.split(' ').nth(4)?);
    let mut fields = right.split(' ');
    let (kind, options) = (fields.next()?, fields.nth(1)?);
    if !kind.starts_with("cgroup") || !path.starts_with(HIERARCHIES) {
        return None;
    }
    let options: Vec<&str> = options.split(',').filter(|option| *option != "rw").collect();
    Some((path.to_owned(), kind.to_owned(), options.join(",")))
}

fn run_inside() {
    let limit = conformance::limit();
    let output =
        conformance::output(if limit.is_some() { "node-conformance-part" } else { "node-conformance" });
    let containerd = "/run/containerd/containerd.sock";
    // The handler is that of the suite's RuntimeClass.
    let config = format!(
        "{DEFAULT_NETWORK}[metrics]\ncontainerd_socket = \"{containerd}\"\n\
         [runtime_handlers]\naliases = [\"test-handler\"]\n"
    );
    let node = Node::with(Options { config, ..Options::default() });
    let registry = conformance::start_registry(&node);
    for name in IMAGES {
        let archive = tools().join(name);
        let done = node.image_command(&["import", &archive.display().to_string()]);
        assert!(done.status.success(), "{}: {}", archive.display(), String::from_utf8_lossy(&done.stderr));
        // Specs that update a container's image pull each version, and others remove all images that no container uses.
        registry.push_archive(&archive);
    }
    let (folder, socket) = (node.folder().to_owned(), node.socket());
    let directory = folder.join("suite");
    fs::create_dir(&directory).expect("a directory");
    let settings = directory.join("kubelet.yaml");
    fs::write(&settings, KUBELET).expect("a file");
    // The suite writes into the directory of its program.
    let program = directory.join("e2e_node.test");
    let built =
        fs::canonicalize(tools().join("e2e_node.test")).expect("`tests/tools/install node-e2e` builds it");
    symlink(built, &program).expect("a link");
    let (programs, environment) = kubelet_service(&directory);
    let unit = RuntimeUnit::serve(node).expect("a socket in the place of systemd's");
    let suite = Suite {
        program,
        arguments: vec![
            format!("--k8s-bin-dir={}", programs.display()),
            format!("--kubelet-config-file={}", settings.display()),
            format!("--container-runtime-endpoint=unix://{}", socket.display()),
            // How the suite finds the runtime's unit.
            "--container-runtime-process-name=coracle".into(),
            "--container-runtime-pid-file=".into(),
            "--node-name=node".into(),
            "--prepull-images=false".into(),
        ],
        environment,
        directory: &directory,
    };
    let mut results = Results::new();
    for (name, labels, processes) in [
        ("own", "NodeConformance && !Conformance && !Serial && !Slow", conformance::processes()),
        ("shared", "NodeConformance && Conformance && !Serial && !Slow", conformance::processes()),
        ("slow", "NodeConformance && !Serial && Slow", conformance::processes()),
        ("serial", "NodeConformance && Serial", 1),
    ] {
        let focus = limit.clone().unwrap_or_default();
        let part = Part { name, skip: None, labels: Some(labels), focus, processes, time_limit: PART_LIMIT };
        let found = conformance::run_part(&suite, &part, &output);
        println!("{name}: {}", ginkgo::counts(&found));
        results.extend(found);
    }
    println!("node-conformance: {}", ginkgo::counts(&results));
    println!("logs and reports are in {}", output.display());
    for line in host::mounts("/var/lib/kubelet/").iter().rev() {
        let path = line.split(' ').nth(4).unwrap_or_default();
        umount2(path, MntFlags::MNT_DETACH).expect("a volume");
    }
    drop(registry);
    unit.into_node().stop();
    ginkgo::judge(&results, &conformance::expected(include_str!("node-expected.toml")), limit.is_none());
}

/// Makes the programs by which the suite starts, stops and restarts its kubelet in a directory below `directory`. Returns it and
/// the variables that the programs need.
fn kubelet_service(directory: &Path) -> (PathBuf, Vec<(&'static str, PathBuf)>) {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (programs, state) = (directory.join("programs"), directory.join("service"));
    for directory in [&programs, &state] {
        fs::create_dir(directory).expect("a directory");
    }
    for name in ["kubelet", "sudo", "systemctl"] {
        symlink(tests.join("cluster/service"), programs.join(name)).expect("a link");
    }
    let kubelet = fs::canonicalize(tests.join("../target/tools/bin/kubelet")).expect("a kubelet");
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").expect("a path"));
    let environment = vec![("PATH", path.into()), ("CORACLE_KUBELET", kubelet), ("CORACLE_SERVICE", state)];
    (programs, environment)
}
