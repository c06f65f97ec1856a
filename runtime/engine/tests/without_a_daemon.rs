//! Tests the engine as a library: without lifecycle hooks, daemon, configuration and socket. Requires no
//! root: if the kernel denies an operation, the engine undoes the preceding ones, which is the subject of the
//! test.

use std::cell::RefCell;
use std::rc::Rc;

use coracle_base::error::Kind;
use coracle_base::hostpath::HostPaths;
use coracle_base::reactor;
use coracle_base::settings::Selinux;
use coracle_base::store::Slots;
use coracle_base::testdir::TestDir;
use coracle_base::workers::Workers;
use coracle_engine::lifecycle::NoHooks;
use coracle_engine::modules::Modules;
use coracle_engine::paths::Paths;
use coracle_engine::spec::{IdMapping, PodName, PodNamespaces, PodPid, PodSpec, Sharing, UserNamespace};
use coracle_engine::{Host, Kernel, Monitors, Node, Placement, PodNetworks, Pods, clock};
use coracle_images::Images;
use coracle_network::Network;
use coracle_sandbox::cgroup::{Cgroups, Driver};
use coracle_sandbox::monitor::Program;

/// Creates an engine below `dir`. Its monitor program is an empty file, which cannot be executed, and its
/// worker does nothing.
fn engine(dir: &TestDir) -> Rc<Pods> {
    let (root, state) = (dir.path().join("root"), dir.path().join("state"));
    for directory in [&root, &state] {
        std::fs::create_dir_all(directory).unwrap();
    }
    let monitor = dir.path().join("coracle-pod");
    std::fs::write(&monitor, "").unwrap();
    let workers = Workers::new(dir.script("worker", "exit 0"));
    let images = coracle_images::Options {
        root: root.clone(),
        additional_stores: Vec::new(),
        keep_blobs: false,
        partial_pulls: true,
        limits: coracle_job::Limits::default(),
        registries: coracle_job::Registries::default(),
    };
    let network = coracle_network::Options {
        conf_dir: dir.path().join("net.d"),
        bin_dirs: Vec::new(),
        runs_built_in: false,
        default: None,
    };
    let node = Node {
        paths: Paths { root: root.clone(), state },
        kernel: Kernel {
            boot: "of a test".to_owned(),
            clock: clock::Clock::default(),
            capabilities: 0,
            user_namespaces: Err("not in this test".to_owned()),
            modules: Modules::start(Selinux::Off),
            has_recursive_read_only: false,
        },
        cgroups: Cgroups::probe().unwrap(),
        placement: Placement { driver: Driver::Cgroupfs, parent: "/coracle".to_owned() },
        monitors: Monitors::new(Program::load(&monitor).unwrap(), Vec::new()),
        network: PodNetworks {
            cni: Network::new(network, coracle_network::in_workers(Rc::clone(&workers))),
            pod_cidr: RefCell::default(),
        },
        images: Images::open(images, Rc::clone(&workers)).unwrap(),
        host: Host {
            records: Slots::new(&root),
            paths: HostPaths::new(Rc::clone(&workers), &root),
            workers,
            cdi_directories: Vec::new(),
        },
    };
    Pods::new(node, Rc::new(NoHooks))
}

/// The request for a pod sandbox with the node's network and its own cgroup parent.
fn spec() -> PodSpec {
    PodSpec {
        name: PodName { name: "web".into(), namespace: "default".into(), uid: "u".into(), attempt: 0 },
        hostname: String::new(),
        log_directory: String::new(),
        dns: None,
        ports: Vec::new(),
        labels: Vec::new(),
        annotations: Vec::new(),
        runtime_handler: String::new(),
        cgroup_parent: format!("/coracle-engine-test-{}", std::process::id()),
        namespaces: PodNamespaces { network: Sharing::Node, ipc: Sharing::Pod, pid: PodPid::Container },
        privileged: false,
        sysctls: Vec::new(),
        user_namespace: None,
        overhead: None,
        resources: None,
        selinux: None,
    }
}

#[test]
fn a_node_without_records_recovers_to_empty_lists() {
    let dir = TestDir::new("engine");
    reactor::run(async {
        let pods = engine(&dir);
        pods.recover().await.unwrap();
        assert!(pods.pods().is_empty() && pods.containers().is_empty());
        assert_eq!(pods.pod("ab").err().unwrap().kind(), Kind::NotFound);
    });
}

/// The first step fails without root, the second one with root, because there is no monitor program.
/// The earlier steps are undone.
#[test]
fn a_pod_that_cannot_be_made_leaves_its_name_and_no_directory() {
    let dir = TestDir::new("engine");
    reactor::run(async {
        let pods = engine(&dir);
        pods.recover().await.unwrap();
        for _ in 0..2 {
            let error = pods.run(spec()).await.unwrap_err();
            assert!(error.to_string().contains("pod sandbox default/web (uid u, attempt 0): "), "{error}");
            assert_ne!(error.kind(), Kind::AlreadyExists, "the name is free again: {error}");
        }
        assert!(pods.pods().is_empty());
        for parent in ["root/pods", "state/pods"] {
            let left: Vec<_> = std::fs::read_dir(dir.path().join(parent)).unwrap().collect();
            assert!(left.is_empty(), "{parent}: {left:?}");
        }
        assert!(!std::path::Path::new("/sys/fs/cgroup").join(&spec().cgroup_parent[1..]).exists());
    });
}

#[test]
fn what_the_node_lacks_is_refused_before_anything_is_made() {
    let dir = TestDir::new("engine");
    reactor::run(async {
        let pods = engine(&dir);
        pods.recover().await.unwrap();
        let mapping = || vec![IdMapping { container_id: 0, host_id: 65536, length: 65536 }];
        let user_namespace = Some(UserNamespace { uids: mapping(), gids: mapping() });
        let error = pods.run(PodSpec { user_namespace, ..spec() }).await.unwrap_err();
        assert_eq!(error.kind(), Kind::FailedPrecondition);
        assert!(error.to_string().contains("user namespaces: not in this test"), "{error}");
    });
}
