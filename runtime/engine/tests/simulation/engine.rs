//! A daemon's engine on the simulated node, and the requests of its clients.
//!
//! The image store, which has one image and is only read, and the directory with the network configuration
//! are real; this module answers the jobs of worker processes.

use std::cell::{OnceCell, RefCell};
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use coracle_base::hostpath::HostPaths;
use coracle_base::reactor;
use coracle_base::settings::Selinux;
use coracle_base::store::Slots;
use coracle_base::testdir::TestDir;
use coracle_base::workers::{Error as WorkerError, Workers};
use coracle_engine::lifecycle::NoHooks;
use coracle_engine::modules::Modules;
use coracle_engine::paths::Paths;
use coracle_engine::spec::{ContainerPid, ContainerSpec, PodName, PodNamespaces, PodPid, PodSpec, Sharing};
use coracle_engine::state::transitions;
use coracle_engine::{Host, Kernel, Monitors, Node as Environment, Placement, PodNetworks, Pods, clock};
use coracle_images::{Auth, Images};
use coracle_job::{
    CniCommand, CniJob, CniOutcome, Failure, FailureKind, ImageConfig, ImageRecord, Job, Layer, Limits,
    Outcome, Registries,
};
use coracle_network::Network;
use coracle_sandbox::cgroup::{Cgroups, Driver};
use coracle_sandbox::monitor::Program;

use crate::node::Node;
use crate::world::{Attached, MS, ROOT, S, STATE, US, trace};

const IMAGE: &str = "registry.example/app:1";
/// The default cgroup parent.
pub(crate) const PARENT: &str = "/coracle";
const MOUNTS: &str = "1 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
const NETWORK: &str = r#"{"cniVersion": "1.0.0", "name": "sim", "plugins": [{"type": "sim"}]}"#;
const RESULT: &str = r#"{"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "x"}], "ips": [{"address": "10.0.0.2/24"}]}"#;

/// The parts that all histories of a thread share.
pub(crate) struct Ground {
    dir: TestDir,
}

impl Ground {
    /// Prepares the image store and the network configuration.
    pub(crate) fn new() -> Self {
        let dir = TestDir::new("simulation");
        std::fs::create_dir_all(dir.path().join("net.d")).expect("a directory");
        std::fs::write(dir.path().join("net.d/10-sim.conflist"), NETWORK).expect("a file");
        std::fs::write(dir.path().join("coracle-pod"), "").expect("a file");
        std::fs::create_dir_all(dir.path().join("layers").join("cd".repeat(32))).expect("a directory");
        let ground = Self { dir };
        reactor::run(async {
            ground.images().pull(IMAGE, Auth::default()).await.expect("the image is stored");
        });
        ground
    }

    /// Opens the image store, which is real.
    fn images(&self) -> Rc<Images> {
        let pulled: Box<coracle_base::workers::Simulated> =
            Box::new(|_| Box::pin(async { Ok(Outcome::Pulled(image(), Vec::new())) }));
        let workers = Workers::simulated(pulled);
        let options = coracle_images::Options {
            root: self.dir.path().to_owned(),
            additional_stores: Vec::new(),
            keep_blobs: false,
            partial_pulls: true,
            limits: Limits::default(),
            registries: Registries::default(),
        };
        Images::open(options, workers).expect("an image store")
    }

    /// Creates the engine of a new daemon on the node. All daemons of one history share `images`, because
    /// opening the store takes longer than most calls.
    pub(crate) fn engine(&self, node: &Rc<Node>, images: &OnceCell<Rc<Images>>) -> Rc<Pods> {
        transitions::take(); // this daemon begins with what is on disk
        let simulated = Rc::clone(node);
        let workers = Workers::simulated(Box::new(move |job| work(Rc::clone(&simulated), job)));
        let network = coracle_network::Options {
            conf_dir: self.dir.path().join("net.d"),
            bin_dirs: Vec::new(),
            runs_built_in: false,
            default: None,
        };
        let boot = node.world.borrow().boot;
        let environment = Environment {
            paths: Paths { root: ROOT.into(), state: STATE.into() },
            kernel: Kernel {
                boot: format!("boot {boot}"),
                clock: clock::Clock::default(),
                capabilities: 0,
                user_namespaces: Err("not simulated".to_owned()),
                modules: Modules::start(Selinux::Off),
                has_recursive_read_only: true,
            },
            cgroups: Cgroups::from_mountinfo(MOUNTS).expect("cgroups"),
            placement: Placement { driver: Driver::Cgroupfs, parent: PARENT.to_owned() },
            monitors: Monitors::new(
                Program::load(&self.dir.path().join("coracle-pod")).expect("a program"),
                Vec::new(),
            ),
            network: PodNetworks {
                cni: Network::new(network, coracle_network::in_workers(Rc::clone(&workers))),
                pod_cidr: RefCell::default(),
            },
            images: Rc::clone(images.get_or_init(|| self.images())),
            host: Host {
                records: Slots::new(ROOT.as_ref()),
                paths: HostPaths::new(Rc::clone(&workers), ROOT.as_ref()),
                workers,
                cdi_directories: Vec::new(),
            },
        };
        Pods::new(environment, Rc::new(NoHooks))
    }
}

fn image() -> ImageRecord {
    ImageRecord {
        id: format!("sha256:{}", "ab".repeat(32)),
        tags: vec![IMAGE.to_owned()],
        digests: Vec::new(),
        size_bytes: 1,
        layers: vec![Layer {
            diff_id: format!("sha256:{}", "cd".repeat(32)),
            chain_id: format!("sha256:{}", "cd".repeat(32)),
            name: "cd".repeat(32),
        }],
        blobs: Vec::new(),
        config: ImageConfig { command: vec!["/app".to_owned()], ..ImageConfig::default() },
    }
}

/// Executes a worker's job. A real worker is a separate process: killing the daemon does not kill it, and its
/// job may have an effect although the daemon never receives the answer.
fn work(node: Rc<Node>, job: Job) -> Pin<Box<dyn Future<Output = Result<Outcome, WorkerError>>>> {
    Box::pin(async move {
        let delay = |node: &Node| {
            let mut world = node.world.borrow_mut();
            let limit = if world.random.happens(20) { 5 * S } else { 20 * MS };
            Duration::from_nanos(100 * US + world.random.below(limit))
        };
        let pause = delay(&node);
        reactor::sleep(pause).await;
        let done = match job {
            Job::RemoveTrees { paths } => {
                let mut world = node.world.borrow_mut();
                for path in paths {
                    let _ = world.disk.remove_dir_all(path.to_str().expect("a path in UTF-8"));
                }
                Ok(Outcome::Removed)
            }
            Job::Cni(job) => attach(&node, &job),
            other => panic!("the simulation has no answer to {other:?}"),
        };
        let pause = delay(&node);
        reactor::sleep(pause).await;
        done
    })
}

/// Simulates a CNI plugin: one lease and one link for each attachment.
fn attach(node: &Node, job: &CniJob) -> Result<Outcome, WorkerError> {
    let mut world = node.world.borrow_mut();
    let failed = |message: &str| {
        Err(WorkerError::Failed(Failure {
            kind: FailureKind::Plugin,
            message: format!("plugin sim: {message}"),
        }))
    };
    let id = job.attachment.container_id.clone();
    let fails = world.faults.errors > 0 && world.random.happens(50);
    world.errors += u64::from(fails);
    trace!(world, "CNI {:?} {id:.13}{}", job.command, if fails { ": fails" } else { "" });
    match &job.command {
        CniCommand::Add { .. } if world.attached.contains_key(&id) => {
            world.broken(format!("a second ADD for pod {id:.13}"));
            failed("is attached already")
        }
        CniCommand::Add { .. } if !world.namespaces.contains(&job.attachment.netns) => {
            failed("no such network namespace")
        }
        // The worker undoes a failed ADD; if that fails, too, the lease stays.
        CniCommand::Add { .. } if fails => {
            if world.random.happens(500) {
                world.attached.insert(id, Attached { has_lease: true, has_link: false });
            }
            failed("no address is free")
        }
        CniCommand::Add { .. } => {
            world.attached.insert(id, Attached { has_lease: true, has_link: true });
            let outcome = CniOutcome {
                addresses: vec!["10.0.0.2".to_owned()],
                result: RESULT.to_owned(),
                interfaces: Vec::new(),
            };
            Ok(Outcome::Cni(outcome))
        }
        CniCommand::Del { .. } if fails => failed("its store is locked"),
        CniCommand::Del { .. } => {
            world.attached.remove(&id);
            Ok(Outcome::Cni(CniOutcome::default()))
        }
        CniCommand::Status => Ok(Outcome::Cni(CniOutcome::default())),
    }
}

/// The request for pod `number`; every third pod has the node's network, every fourth its own cgroup parent.
pub(crate) fn pod_spec(number: u32) -> PodSpec {
    PodSpec {
        name: PodName { name: format!("pod{number}"), namespace: "sim".into(), uid: "u".into(), attempt: 0 },
        hostname: "pod".to_owned(),
        log_directory: String::new(),
        dns: None,
        ports: Vec::new(),
        labels: Vec::new(),
        annotations: Vec::new(),
        runtime_handler: String::new(),
        cgroup_parent: if number % 4 == 3 { format!("/kubepods/pod{number}") } else { String::new() },
        namespaces: PodNamespaces {
            network: if number % 3 == 2 { Sharing::Node } else { Sharing::Pod },
            ipc: Sharing::Pod,
            pid: if number.is_multiple_of(2) { PodPid::Container } else { PodPid::Pod },
        },
        privileged: false,
        sysctls: Vec::new(),
        user_namespace: None,
        overhead: None,
        resources: None,
        selinux: None,
    }
}

/// The request for container `number`.
pub(crate) fn container_spec(number: u32) -> ContainerSpec {
    ContainerSpec {
        pid: if number.is_multiple_of(2) { ContainerPid::Own } else { ContainerPid::Pod },
        ..ContainerSpec::plain(&format!("ctr{number}"), IMAGE)
    }
}
