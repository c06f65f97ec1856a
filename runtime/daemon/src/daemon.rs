//! The daemon's state for RPC handlers, created at the start.

use std::cell::{OnceCell, RefCell};
use std::path::Path;
use std::rc::Rc;

use coracle_base::error::{Context, Error, Kind, describe_io};
use coracle_base::hostpath::HostPaths;
use coracle_base::store::{self, Damage, Slots};
use coracle_base::workers::Workers;
use coracle_base::{history, listen, log};
use coracle_control::socket as control_socket;
use coracle_engine::lifecycle::LifecycleHooks;
use coracle_engine::modules::Modules;
use coracle_engine::paths::Paths;
use coracle_engine::{Host, Kernel, Monitors, Node, Placement, PodNetworks, Pods, clock};
use coracle_images::Images;
use coracle_network::Network;
use coracle_sandbox::cgroup::{Cgroups, Driver};
use coracle_sandbox::monitor::Program;
use coracle_sandbox::{capability, disk, probe, umask};
use coracle_streaming::Streams;

use crate::lock::{self, Locks};
use crate::nri_bridge::NriBridge;
use crate::reload::Reloadable;
use crate::stats::Stats;
use coracle_config::{CgroupDriver, Config};
use coracle_preflight::{cgroup_parent, network_options, program, refused_driver, systemd_runs_host};

/// The parts of the daemon that RPC handlers use.
pub(crate) struct Daemon {
    pub(crate) pods: Rc<Pods>,
    pub(crate) images: Rc<Images>,
    pub(crate) streams: Rc<Streams>,
    pub(crate) stats: Rc<Stats>,
    pub(crate) nri_bridge: Rc<NriBridge>,
    /// Parts of the configuration that a reload replaces.
    pub(crate) reloadable: Reloadable,
    /// Whether the kubelet's cAdvisor can find pods and containers; the error is the reason why not. Unset if the API for
    /// cAdvisor is disabled.
    cadvisor_served: OnceCell<Result<(), String>>,
    /// Locks of the state and the root directory, held until the process ends.
    _locks: Locks,
}

/// File name of the record of the node's pod CIDR, as last set by the kubelet.
const POD_CIDR: &str = "pod-cidr";
const POD_CIDR_VERSION: u8 = 1;

impl Daemon {
    /// Opens the store and recovers all pods; the daemon can serve requests when the function returns.
    pub(crate) async fn start(config: &Config) -> Result<Rc<Self>, Error> {
        let (root, state) = (config.root.clone(), config.state.clone());
        for directory in [&root, &state] {
            prepare_directory(directory)?;
        }
        let locks = lock::both(&root, &state).await?;
        if let Err(error) = history::open(&state) {
            log::warn!("cannot keep the history of pods for `coracle why`"; error = describe_io(&error));
        }
        // The listening sockets are created last, so that they are also the last descriptors that a remaining
        // child closes.
        for path in [control_socket(&state), config.nri.socket_path.clone(), config.listen.clone()] {
            listen::wait_until_free(&path).await;
        }
        let cgroup_driver = cgroup_driver(config.cgroup.driver, &state)?;
        let workers = Workers::new(program(config, coracle_job::WORKER));
        let images = open_images(config, &workers)?;
        let network =
            Network::new(network_options(config)?, coracle_network::in_workers(Rc::clone(&workers)));
        network.start();
        let nri_bridge = NriBridge::new(&config.nri);
        let node = Node {
            paths: Paths { root: root.clone(), state: state.clone() },
            kernel: Kernel {
                boot: boot_id()?,
                clock: clock::Clock::default(),
                capabilities: capability::bounding()?,
                user_namespaces: probe::user_namespaces(&root.join("layers")),
                modules: Modules::start(config.security.selinux),
                has_recursive_read_only: probe::has_recursive_read_only()?,
            },
            cgroups: Cgroups::probe()?,
            placement: Placement {
                driver: cgroup_driver,
                parent: cgroup_parent(&config.cgroup.parent, cgroup_driver)?,
            },
            monitors: monitors(config)?,
            network: PodNetworks { cni: network, pod_cidr: RefCell::new(load_pod_cidr(&root)) },
            images: Rc::clone(&images),
            host: Host {
                records: Slots::new(&root),
                paths: HostPaths::new(Rc::clone(&workers), &root),
                workers,
                cdi_directories: config.cdi.spec_dirs.clone(),
            },
        };
        let pods = Pods::new(node, Rc::clone(&nri_bridge) as Rc<dyn LifecycleHooks>);
        if let Err(why) = &pods.node().kernel.user_namespaces {
            log::info!("user namespaces for pods are not available"; reason = why);
        }
        pods.recover().await?;
        watch(&pods);
        nri_bridge.start(&pods).await?;
        let streams = Streams::start(&config.streaming, &pods.node().host.workers)?;
        let stats = Stats::new(Rc::clone(&pods), Rc::clone(&pods.node().host.workers));
        // Imports start only now, because recovery has removed unused images.
        images.follow_bundles();
        let reloadable = Reloadable::default();
        reloadable.runtime_handlers.borrow_mut().clone_from(&config.runtime_handlers);
        Ok(Rc::new(Self {
            pods,
            images,
            streams,
            stats,
            nri_bridge,
            reloadable,
            cadvisor_served: OnceCell::new(),
            _locks: locks,
        }))
    }

    /// The CNI configuration and its readiness.
    pub(crate) fn network(&self) -> &Network {
        &self.pods.node().network.cni
    }

    /// Stores whether the API for cAdvisor is served, for Status; called once.
    pub(crate) fn set_cadvisor_served(&self, outcome: Result<(), String>) {
        // It is decided once, at the start.
        let _ = self.cadvisor_served.set(outcome);
    }

    /// Whether the kubelet's cAdvisor can find pods and containers; the error is the reason why not. `None` if the API for
    /// cAdvisor is disabled.
    pub(crate) fn cadvisor_served(&self) -> Option<&Result<(), String>> {
        self.cadvisor_served.get()
    }

    /// Stores the pod CIDR durably.
    pub(crate) fn set_pod_cidr(&self, cidr: &str) -> Result<(), Error> {
        store::commit(
            &self.pods.node().paths.root,
            POD_CIDR,
            store::Kind::PodCidr,
            POD_CIDR_VERSION,
            cidr.as_bytes(),
        )?;
        *self.pods.node().network.pod_cidr.borrow_mut() = cidr.to_owned();
        Ok(())
    }
}

/// Creates `--root` or `--state` with mode 0711 at most, because sockets and files of containers are in these directories.
pub(crate) fn prepare_directory(path: &Path) -> Result<(), Error> {
    use std::os::unix::fs::DirBuilderExt;
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true).mode(0o711);
    let _mask = umask::Public::begin();
    disk::create_all(&builder, path).context(|| format!("make directory {}", path.display()))
}

fn load_pod_cidr(root: &Path) -> String {
    match store::load(root, POD_CIDR, store::Kind::PodCidr) {
        Ok(loaded) => String::from_utf8(loaded.body).unwrap_or_default(),
        Err(Damage::Absent) => String::new(),
        Err(damage) => {
            log::warn!("cannot read the pod CIDR, waiting for the kubelet to send it"; reason = damage);
            String::new()
        }
    }
}

/// Number of bytes that can still be written to the file system of `directory`; `None` if it is unknown.
pub(crate) fn free_bytes(directory: &Path) -> Option<u64> {
    let room = rustix::fs::statvfs(directory).ok()?;
    Some(room.f_bavail.saturating_mul(room.f_frsize))
}

/// The program of monitors, with the directories that they need beside those of the daemon.
fn monitors(config: &Config) -> Result<Monitors, Error> {
    let program = Program::load(&program(config, "coracle-pod"))?;
    Ok(Monitors::new(program, config.image.additional_stores.clone()))
}

/// Opens the image store with the configured limits, registries, pins and import directories.
fn open_images(config: &Config, workers: &Rc<Workers>) -> Result<Rc<Images>, Error> {
    let options = coracle_images::Options {
        root: config.root.clone(),
        additional_stores: config.image.additional_stores.clone(),
        keep_blobs: config.image.keep_blobs,
        partial_pulls: config.image.partial_pulls,
        limits: config.image.limits(),
        registries: config.registries(),
    };
    let images = Images::open(options, Rc::clone(workers))?;
    images.configure(&config.pinned_images, config.sandbox_image.as_deref())?;
    images.set_policy(image_policy(config));
    images.import_from(config.import_directories());
    Ok(images)
}

/// The policy of signatures.
pub(crate) fn image_policy(config: &Config) -> coracle_images::PolicyOptions {
    let policy = &config.image.policy;
    let limit_ms = policy.verifier_timeout.as_millis() as u64;
    let verifiers = policy.verifiers.clone();
    coracle_images::PolicyOptions {
        file: policy.file.clone(),
        minimum_time: policy.minimum_time.clone(),
        verifiers: verifiers.map(|directory| coracle_job::ImageVerifiers { directory, limit_ms }),
    }
}

/// Follows the networks of the recovered pods, and logs how many pods and containers of an earlier daemon this one continues.
fn watch(pods: &Rc<Pods>) {
    pods.follow_links();
    pods.follow_state_directory();
    let (known, containers) = (pods.pods(), pods.containers());
    if !known.is_empty() {
        log::info!("pods of an earlier daemon adopted"; pods = known.len(), containers = containers.len());
    }
}

fn boot_id() -> Result<String, Error> {
    let path = "/proc/sys/kernel/random/boot_id";
    let text = std::fs::read_to_string(path).context(|| format!("read {path}"));
    text.map(|text| text.trim().to_owned()).map_err(|error| error.with_kind(Kind::Internal))
}

/// The cgroup driver. The result of `auto` is kept until the next boot in a file in the state directory,
/// because the kubelet asks once and existing pods keep their cgroups.
fn cgroup_driver(wanted: CgroupDriver, state: &Path) -> Result<Driver, Error> {
    if let Some(text) = refused_driver(wanted) {
        return Err(Error::new(Kind::FailedPrecondition, text));
    }
    match wanted {
        CgroupDriver::Cgroupfs => Ok(Driver::Cgroupfs),
        CgroupDriver::Systemd => Ok(Driver::Systemd),
        CgroupDriver::Auto => {
            let path = state.join("cgroup-driver");
            let (driver, name) = match std::fs::read_to_string(&path).ok().as_deref() {
                Some("systemd") => return Ok(Driver::Systemd),
                Some("cgroupfs") => return Ok(Driver::Cgroupfs),
                Some(_) | None if systemd_runs_host() => (Driver::Systemd, "systemd"),
                Some(_) | None => (Driver::Cgroupfs, "cgroupfs"),
            };
            std::fs::write(&path, name).context(|| format!("write {}", path.display()))?;
            log::info!("cgroup driver selected"; driver = name);
            Ok(driver)
        }
    }
}
