//! The parsed and validated configuration, section by section. Only `load` creates it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use coracle_base::log::{Format, Level};
use coracle_base::settings::{Selinux, Streaming};

use super::handlers::RuntimeHandlers;

/// The complete configuration. Only [`super::load`] creates it; `Default` is an empty value, which `load` fills with the
/// table's defaults.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Config {
    /// Directory of persistent data: images, layers, records.
    pub root: PathBuf,
    /// Directory of data that does not survive a reboot: sockets, monitors' directories, exit records.
    pub state: PathBuf,
    /// Path of the CRI socket.
    pub listen: PathBuf,
    /// Minimum severity of logged lines.
    pub log_level: Level,
    /// Format of log lines.
    pub log_format: Format,
    /// The directory of `coracle-pod`, `coracle` and its link `coracle-worker`; `None`: the directory of `coracled`.
    pub program_dir: Option<PathBuf>,
    /// The sandbox image to pull and pin; `None`: the built-in image.
    pub sandbox_image: Option<String>,
    /// Names, globs and keywords of images that are protected from garbage collection.
    pub pinned_images: Vec<String>,
    /// Section `[cgroup]`.
    pub cgroup: Cgroup,
    /// Section `[cni]`.
    pub cni: Cni,
    /// Section `[network]`.
    pub network: Network,
    /// Section `[security]`.
    pub security: Security,
    /// Section `[cdi]`.
    pub cdi: Cdi,
    /// Section `[registry]`.
    pub registry: Registry,
    /// Section `[mirror]`.
    pub mirror: Mirror,
    /// Section `[image]`.
    pub image: Image,
    /// Section `[streaming]`.
    pub streaming: Streaming,
    /// Section `[runtime_handlers]`.
    pub runtime_handlers: RuntimeHandlers,
    /// Section `[nri]`.
    pub nri: Nri,
    /// Section `[metrics]`: address of the Prometheus endpoint; `None`: disabled.
    pub metrics_address: Option<Address>,
    /// Setting of the socket of the containerd API for cAdvisor.
    pub containerd_socket: ContainerdSocket,
}

/// Setting of the socket of the containerd API for cAdvisor.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ContainerdSocket {
    /// containerd's own path on a node without containerd; no socket for a daemon with another state directory than the
    /// default.
    #[default]
    Automatic,
    /// No socket is served.
    Off,
    /// The socket is at this path.
    At(PathBuf),
}

impl Config {
    /// The directories from which images are imported.
    pub fn import_directories(&self) -> Vec<PathBuf> {
        self.image.import_dirs.clone().unwrap_or_else(|| vec![self.root.join("import")])
    }

    /// The settings of registries and neighbours for workers.
    pub fn registries(&self) -> coracle_job::Registries {
        coracle_job::Registries { neighbours: self.mirror.for_workers(), ..self.registry.for_workers() }
    }
}

/// Content that nodes of a site pass to each other, section `[mirror]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mirror {
    /// The address on which this node serves its neighbours; `None`: it does not.
    pub listen: Option<SocketAddr>,
    /// File with the key that the nodes of the site share; `None`: no key is required.
    pub key_file: Option<PathBuf>,
    /// Whether every client that can reach `listen` is served, without a key.
    pub open: bool,
    /// Maximum number of bytes per second that neighbours get; 0: no limit.
    pub rate_max: u32,
    /// The nodes of the site.
    pub neighbours: Vec<String>,
    /// The source of manifests while their registry cannot be reached.
    pub offline: Offline,
}

/// The source of manifests while their registry cannot be reached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Offline {
    /// None: the pull fails.
    #[default]
    None,
    /// Neighbours, which may have an old image of a tag, and do not ask for credentials.
    Neighbours,
}

/// Minimum of `mirror.rate_max` in bytes per second: neighbours leave a node that is slower than a slow uplink.
const RATE_MIN: u32 = 64 << 10;

impl Mirror {
    /// Checks that only those who have a key are served, unless the configuration says that everyone is, and that they can be.
    ///
    /// # Errors
    /// One line that describes the mistake.
    pub fn check(&self) -> Result<(), String> {
        match (self.listen, &self.key_file, self.open) {
            // Also on the loopback interface, which pods in the host's network and users of the node reach.
            (Some(listen), None, false) => Err(format!(
                "[mirror]: listen on {listen} without key_file would give everyone who can reach it all images of this \
                 node: set key_file, or open = true if that is intended"
            )),
            (_, Some(_), true) => {
                Err("[mirror]: with open = true no key is required: remove key_file or open".to_owned())
            }
            (Some(listen), _, _) if listen.port() == 0 => {
                Err("[mirror]: listen needs a port, which the neighbours know".to_owned())
            }
            (Some(_), _, _) if (1..RATE_MIN).contains(&self.rate_max) => Err(format!(
                "[mirror]: rate_max = {} is less than {RATE_MIN} bytes per second, which one neighbour needs",
                self.rate_max
            )),
            _ => Ok(()),
        }
    }

    /// These settings in a daemon that was started with `started`: it still has that socket, and whether it is open for everyone
    /// is not changed by a reload, either.
    ///
    /// # Errors
    /// Those of [`Mirror::check`], of the result.
    pub fn reloaded(&self, started: &Mirror) -> Result<Mirror, String> {
        let reloaded = Mirror { listen: started.listen, open: started.open, ..self.clone() };
        match reloaded.check() {
            Ok(()) => Ok(reloaded),
            Err(mistake) => {
                Err(format!("{mistake} (until a restart listen and open are those of the start)"))
            }
        }
    }

    fn for_workers(&self) -> coracle_job::Neighbours {
        coracle_job::Neighbours {
            names: self.neighbours.clone(),
            key_file: self.key_file.clone(),
            port: self.listen.map(|listen| listen.port()),
            have_documents: self.offline == Offline::Neighbours,
        }
    }
}

/// Cgroup driver and parent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cgroup {
    /// The configured cgroup driver.
    pub driver: CgroupDriver,
    /// Default cgroup parent; empty: `/coracle`, or `/system.slice` with the systemd driver.
    pub parent: String,
}

/// Cgroup drivers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CgroupDriver {
    /// systemd if it is the host's init system, otherwise cgroupfs.
    #[default]
    Auto,
    /// Directories that coracle creates.
    Cgroupfs,
    /// Scopes that systemd manages.
    Systemd,
}

/// Settings that confine containers further than their requests do, section `[security]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Security {
    pub selinux: Selinux,
}

/// Settings of CNI networks, section `[cni]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cni {
    /// Directory of `*.conflist` and `*.conf` files; the first one in lexical order applies.
    pub conf_dir: PathBuf,
    /// Directories in which plugins are searched, in order.
    pub bin_dirs: Vec<PathBuf>,
    /// Whether the daemon uses its built-in plugins.
    pub built_in: bool,
}

/// The network of a node without CNI configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Network {
    /// The kind of the default network.
    pub default: DefaultNetwork,
    /// Name of the network's bridge.
    pub bridge: String,
    /// Address ranges of the default network, one per address family.
    pub subnets: Vec<String>,
    /// Whether pods of the default network can only use their own MAC address, and answer for their own addresses only.
    pub check_neighbours: bool,
}

/// The kinds of a default network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DefaultNetwork {
    /// No network: the node is not ready.
    #[default]
    None,
    /// The built-in bridge network.
    Builtin,
}

/// Settings of CDI devices, section `[cdi]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cdi {
    /// Directories of spec files, in order of increasing precedence.
    pub spec_dirs: Vec<PathBuf>,
}

/// Settings of image registries, section `[registry]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Registry {
    /// File with mirrors and credentials in k3s' format; optional.
    pub config: PathBuf,
    /// Directory with `HOST/hosts.toml` files in containerd's format; optional.
    pub certs_dir: PathBuf,
    /// File with credentials in docker's format; `None`: not used.
    pub docker_config: Option<PathBuf>,
    /// Whether a registry with mirrors is itself asked after them.
    pub default_endpoint: bool,
    /// Time limit of a TCP connection.
    pub connect_timeout: Duration,
    /// Time limit of a TLS handshake.
    pub tls_timeout: Duration,
    /// Time limit from a request to the response header.
    pub first_byte_timeout: Duration,
    /// Minimum rate in bytes per second over `rate_window`; a slower download is aborted.
    pub rate_min: u32,
    /// Time window over which `rate_min` is averaged.
    pub rate_window: Duration,
    /// Number of layers of one image that are downloaded concurrently.
    pub connections: u32,
}

impl Registry {
    /// The settings of registries for workers.
    fn for_workers(&self) -> coracle_job::Registries {
        let ms = |duration: Duration| duration.as_millis() as u64;
        coracle_job::Registries {
            config: self.config.clone(),
            certs_dir: self.certs_dir.clone(),
            docker_config: self.docker_config.clone(),
            has_default_endpoint: self.default_endpoint,
            timeouts: coracle_job::Timeouts {
                connect_ms: ms(self.connect_timeout),
                tls_ms: ms(self.tls_timeout),
                first_byte_ms: ms(self.first_byte_timeout),
                rate_bytes_min: self.rate_min.into(),
                rate_window_ms: ms(self.rate_window),
                connections: self.connections,
            },
            neighbours: coracle_job::Neighbours::default(),
        }
    }
}

/// Settings of the image store, section `[image]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Image {
    /// Import directories; `None`: `ROOT/import`.
    pub import_dirs: Option<Vec<PathBuf>>,
    /// Directories of additional stores.
    pub additional_stores: Vec<PathBuf>,
    /// Whether compressed layers are kept after unpacking, for `image export`.
    pub keep_blobs: bool,
    /// Whether pulls download only the parts of a layer that the node lacks.
    pub partial_pulls: bool,
    /// Maximum unpacked size of a layer in MiB.
    pub layer_mib_max: u32,
    /// Time in which each layer is checked once; zero: layers are not checked.
    pub check_interval: Duration,
    /// The policy of signatures.
    pub policy: ImagePolicy,
}

/// Rules for images, section `[image.policy]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImagePolicy {
    /// Path of the policy of signatures; `None`: there is none.
    pub file: Option<PathBuf>,
    /// The day `YYYY-MM-DD` by which certificates are judged if the clock has an earlier one; empty: none.
    pub minimum_time: String,
    /// Directory of programs that are asked before an image is pulled; `None`: none.
    pub verifiers: Option<PathBuf>,
    /// Time limit of each of these programs.
    pub verifier_timeout: Duration,
}

impl Image {
    /// The limits for workers.
    pub fn limits(&self) -> coracle_job::Limits {
        let layer_bytes_max = u64::from(self.layer_mib_max) << 20;
        coracle_job::Limits { layer_bytes_max, ..coracle_job::Limits::default() }
    }
}

/// Settings of NRI plugins, section `[nri]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Nri {
    /// Path of the plugins' socket.
    pub socket_path: PathBuf,
    /// Directory of plugin programs that coracle starts.
    pub plugin_path: PathBuf,
    /// Directory of the configuration files of these plugins.
    pub plugin_config_path: PathBuf,
    /// Whether there is no socket, so that only plugins that coracle starts are used.
    pub disable_connections: bool,
    /// Whether plugins that coracle started are restarted.
    pub restart: Restart,
    /// Whether plugins receive Shutdown at a clean exit.
    pub send_shutdown: bool,
    /// The settings of the dispatcher, without the runtime's version, which has no key.
    pub dispatcher: coracle_nri::Settings,
}

/// Setting: whether plugins that coracle started are restarted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Restart {
    /// Plugins are not restarted.
    Never,
    /// Plugins are restarted if they exit with an error.
    #[default]
    OnFailure,
}

/// A listening address: TCP or a unix socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// TCP address, written `ADDRESS:PORT`.
    Tcp(SocketAddr),
    /// Path of a unix socket, written `unix:///PATH`.
    Unix(PathBuf),
}
