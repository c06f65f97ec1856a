//! The daemon as its RPC handlers see it: what each of them may reach, put together once at start. Nothing is decided
//! here; a handler takes what it needs and calls one room.

use std::cell::RefCell;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::error::{Context, Error, Kind};
use coracle_base::hostpath::HostPaths;
use coracle_base::store::{self, Damage};
use coracle_base::workers::{self, Workers};
use coracle_base::{listen, log, reactor};
use coracle_engine::lifecycle::LifecycleHooks;
use coracle_engine::modules::Modules;
use coracle_engine::paths::Paths;
use coracle_engine::{Host, Kernel, Monitors, Node, Placement, PodNetworks, Pods, clock};
use coracle_images::Images;
use coracle_network::Network;
use coracle_sandbox::cgroup::{Cgroups, Driver, slice};
use coracle_sandbox::monitor::Program;
use coracle_sandbox::{capability, probe, umask};
use coracle_streaming::Streams;

use crate::config::{CgroupDriver, Config, DefaultNetwork};
use crate::control;
use crate::plugins::Plugins;
use crate::stats::Stats;

/// Everything an RPC can reach.
pub(crate) struct Daemon {
    pub(crate) pods: Rc<Pods>,
    pub(crate) images: Rc<Images>,
    pub(crate) network: Rc<Network>,
    pub(crate) streams: Rc<Streams>,
    pub(crate) stats: Rc<Stats>,
    pub(crate) plugins: Rc<Plugins>,
    /// Held while the daemon lives; the kernel lets go of it with the process.
    _lock: File,
}

/// The node's pod CIDR, as the kubelet gave it last.
const POD_CIDR: &str = "pod-cidr";
const POD_CIDR_VERSION: u8 = 1;

impl Daemon {
    /// Opens the store, finds every pod again, and is ready to serve when it returns.
    pub(crate) async fn start(config: &Config) -> Result<Rc<Self>, Error> {
        let (root, state) = (config.root.clone(), config.state.clone());
        for directory in [&root, &state] {
            prepare_directory(directory)?;
        }
        let lock = lock(&state).await?;
        // The listening socket is the last that a daemon makes, and so the last that a child of it lets go of.
        for path in [control::socket(&state), config.nri.socket_path.clone(), config.listen.clone()] {
            listen::wait_until_free(&path).await;
        }
        let cgroup_driver = cgroup_driver(config.cgroup.driver, &state)?;
        let workers = Workers::new(program(config, workers::PROGRAM));
        let options = coracle_images::Options {
            root: root.clone(),
            keep_blobs: config.image.keep_blobs,
            limits: config.image.limits(),
            registries: config.registry.for_workers(),
        };
        let images = Images::open(options, Rc::clone(&workers))?;
        images.configure(&config.pinned_images, config.sandbox_image.as_deref())?;
        images.import_from(config.import_directories());
        let network =
            Network::new(network_options(config)?, coracle_network::in_workers(Rc::clone(&workers)));
        network.start();
        let plugins = Plugins::new(&config.nri);
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
            monitors: Monitors::new(Program::load(&program(config, "coracle-pod"))?),
            network: PodNetworks { cni: Rc::clone(&network), pod_cidr: RefCell::new(load_pod_cidr(&root)) },
            images: Rc::clone(&images),
            host: Host {
                paths: HostPaths::new(Rc::clone(&workers), &root),
                workers,
                cdi_directories: config.cdi.spec_dirs.clone(),
            },
        };
        let pods = Pods::new(node, Rc::clone(&plugins) as Rc<dyn LifecycleHooks>);
        if let Err(why) = &pods.node.kernel.user_namespaces {
            log::info!("no user namespaces for pods"; reason = why);
        }
        pods.recover().await?;
        plugins.start(&pods).await?;
        let streams = Streams::start(&config.streaming, Rc::clone(&pods))?;
        let stats = Stats::new(Rc::clone(&pods), Rc::clone(&pods.node.host.workers));
        let control = control::Server::bind(&control::socket(&state), Rc::clone(&images))?;
        reactor::spawn(control.run()).detach();
        // Recovery has swept what no image needs: only now may there be more.
        images.follow_bundles();
        Ok(Rc::new(Self { pods, images, network, streams, stats, plugins, _lock: lock }))
    }

    /// Keeps the pod CIDR for this and the next daemons.
    pub(crate) fn set_pod_cidr(&self, cidr: &str) -> Result<(), Error> {
        store::commit(
            &self.pods.node.paths.root,
            POD_CIDR,
            store::Kind::PodCidr,
            POD_CIDR_VERSION,
            cidr.as_bytes(),
        )?;
        *self.pods.node.network.pod_cidr.borrow_mut() = cidr.to_owned();
        Ok(())
    }
}

/// `--root` and `--state`: 0711 at most, since sockets and other tenants' files are below.
fn prepare_directory(path: &Path) -> Result<(), Error> {
    use std::os::unix::fs::DirBuilderExt;
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true).mode(0o711);
    let _mask = umask::Public::begin();
    builder.create(path).context(|| format!("make directory {}", path.display()))
}

/// How long a lock may outlive its daemon: a child that was cloned but had not exec'ed when the daemon was killed holds
/// copies of its descriptors, until it notices and ends.
const LOCK_LIMIT: Duration = Duration::from_secs(2);

/// Before any pod is touched: a second daemon on the same state would take the first one's monitors away from it.
async fn lock(state: &Path) -> Result<File, Error> {
    let path = state.join("lock");
    let file = File::create(&path).context(|| format!("make {}", path.display()))?;
    let end = Instant::now() + LOCK_LIMIT;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if Instant::now() < end => {
                reactor::sleep(Duration::from_millis(1)).await;
            }
            Err(TryLockError::WouldBlock) => {
                let text = format!("{}: another daemon runs on this state directory", path.display());
                return Err(Error::new(Kind::FailedPrecondition, text));
            }
            Err(TryLockError::Error(error)) => {
                return Err(error).context(|| format!("lock {}", path.display()));
            }
        }
    }
}

fn load_pod_cidr(root: &Path) -> String {
    match store::load(root, POD_CIDR, store::Kind::PodCidr) {
        Ok(loaded) => String::from_utf8(loaded.body).unwrap_or_default(),
        Err(Damage::Absent) => String::new(),
        Err(damage) => {
            log::warn!("the pod CIDR cannot be read; the kubelet sends it again"; reason = damage);
            String::new()
        }
    }
}

/// A program of ours: where the configuration says, else beside this one.
pub(crate) fn program(config: &Config, name: &str) -> PathBuf {
    match &config.program_dir {
        Some(directory) => directory.join(name),
        None => {
            // After an upgrade in place the link reads `…/coracle (deleted)`; its directory is right all the same.
            let own = std::fs::read_link("/proc/self/exe").unwrap_or_else(|_| "/usr/bin/coracle".into());
            own.with_file_name(name)
        }
    }
}

/// A default network that could not be is refused here, where its keys are known, not at the first pod.
pub(crate) fn network_options(config: &Config) -> Result<coracle_network::Options, Error> {
    let default = match config.network.default {
        DefaultNetwork::None => None,
        DefaultNetwork::Builtin => {
            let default = coracle_network::DefaultNetwork {
                bridge: config.network.bridge.clone(),
                subnets: config.network.subnets.clone(),
                data_dir: config.root.join("networks"),
            };
            default.check().map_err(|why| Error::new(Kind::InvalidArgument, format!("[network]: {why}")))?;
            Some(default)
        }
    };
    let (conf_dir, bin_dirs) = (config.cni.conf_dir.clone(), config.cni.bin_dirs.clone());
    let runs_built_in = config.cni.built_in || default.is_some();
    Ok(coracle_network::Options { conf_dir, bin_dirs, runs_built_in, default })
}

fn boot_id() -> Result<String, Error> {
    let path = "/proc/sys/kernel/random/boot_id";
    let text = std::fs::read_to_string(path).context(|| format!("read {path}"));
    text.map(|text| text.trim().to_owned()).map_err(|error| error.with_kind(Kind::Internal))
}

/// Whether systemd runs this host: the documented test (sd_booted(3)).
const SYSTEMD: &str = "/run/systemd/system";
/// Where workers ask it.
const SYSTEM_BUS: &str = "/run/dbus/system_bus_socket";

/// Who makes cgroups. What `auto` has found out holds for this boot, since a kubelet asks once and its pods stay: the file
/// in the state directory goes with them.
fn cgroup_driver(wanted: CgroupDriver, state: &Path) -> Result<Driver, Error> {
    let runs_host = [SYSTEMD, SYSTEM_BUS].into_iter().all(|path| Path::new(path).exists());
    match wanted {
        CgroupDriver::Cgroupfs => Ok(Driver::Cgroupfs),
        CgroupDriver::Systemd if runs_host => Ok(Driver::Systemd),
        CgroupDriver::Systemd => {
            let text =
                format!("cgroup.driver: systemd does not run this host: no {SYSTEMD}, or no {SYSTEM_BUS}");
            Err(Error::new(Kind::FailedPrecondition, text))
        }
        CgroupDriver::Auto => {
            let path = state.join("cgroup-driver");
            let (driver, name) = match std::fs::read_to_string(&path).ok().as_deref() {
                Some("systemd") => return Ok(Driver::Systemd),
                Some("cgroupfs") => return Ok(Driver::Cgroupfs),
                Some(_) | None if runs_host => (Driver::Systemd, "systemd"),
                Some(_) | None => (Driver::Cgroupfs, "cgroupfs"),
            };
            std::fs::write(&path, name).context(|| format!("write {}", path.display()))?;
            log::info!("cgroup driver"; driver = name);
            Ok(driver)
        }
    }
}

/// Where pods go that name no cgroup parent.
fn cgroup_parent(configured: &str, driver: Driver) -> Result<String, Error> {
    match (driver, configured) {
        (Driver::Cgroupfs, "") => Ok("/coracle".to_owned()),
        (Driver::Cgroupfs, parent) => Ok(format!("/{}", parent.trim_matches('/'))),
        (Driver::Systemd, "") => Ok("/system.slice".to_owned()),
        (Driver::Systemd, parent) => {
            let slice = slice(parent).map_err(|error| Error::from(error).context("cgroup.parent"))?;
            Ok(slice.to_string())
        }
    }
}
