//! What the configuration says, section by section, once it is parsed and checked. Made by `load` only.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use coracle_base::log::Level;

/// The daemon's whole configuration. Made by [`super::load`] only; `Default` is the empty form the table's defaults fill.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Config {
    /// What survives a reboot: images, layers, records.
    pub(crate) root: PathBuf,
    /// What does not: sockets, monitors' directories, exit records.
    pub(crate) state: PathBuf,
    /// The CRI socket.
    pub(crate) listen: PathBuf,
    /// Lines above it are not written.
    pub(crate) log_level: Level,
    /// Where `coracle-pod` and `coracle-worker` are; `None`: beside the running program.
    pub(crate) program_dir: Option<PathBuf>,
    /// The sandbox image to pull and pin; `None`: the built-in one.
    pub(crate) sandbox_image: Option<String>,
    /// Names, globs and keywords of images that garbage collection leaves.
    pub(crate) pinned_images: Vec<String>,
    /// `[cgroup]`
    pub(crate) cgroup: Cgroup,
    /// `[cni]`
    pub(crate) cni: Cni,
    /// `[network]`
    pub(crate) network: Network,
    /// `[security]`
    pub(crate) security: Security,
    /// `[cdi]`
    pub(crate) cdi: Cdi,
    /// `[registry]`
    pub(crate) registry: Registry,
    /// `[image]`
    pub(crate) image: Image,
    /// `[streaming]`
    pub(crate) streaming: coracle_streaming::Options,
    /// `[nri]`
    pub(crate) nri: Nri,
    /// `[metrics]`: where Prometheus text is served; `None`: nowhere.
    pub(crate) metrics_address: Option<Address>,
    /// Where what cAdvisor asks of containerd is served; `None`: nowhere.
    pub(crate) containerd_socket: Option<PathBuf>,
}

impl Config {
    /// Where archives and lists of images are imported from.
    pub(crate) fn import_directories(&self) -> Vec<PathBuf> {
        self.image.import_dirs.clone().unwrap_or_else(|| vec![self.root.join("import")])
    }
}

/// Where cgroups are and who makes them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Cgroup {
    /// Who makes them.
    pub(crate) driver: CgroupDriver,
    /// The cgroup above all pods that name none; empty: the root.
    pub(crate) parent: String,
}

/// Who makes cgroups.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum CgroupDriver {
    /// systemd where it runs the host, else the file system.
    #[default]
    Auto,
    /// Directories, by us.
    Cgroupfs,
    /// Scopes, by systemd.
    Systemd,
}

/// What confines containers beside what their requests say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Security {
    pub(crate) selinux: coracle_engine::modules::Selinux,
}

/// Container networks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Cni {
    /// Directory of `*.conflist` and `*.conf`; the first in lexical order is the network.
    pub(crate) conf_dir: PathBuf,
    /// Where plugins are looked for, in order.
    pub(crate) bin_dirs: Vec<PathBuf>,
    /// Whether the common plugins are run without their programs.
    pub(crate) built_in: bool,
}

/// The network of a node that has none configured.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Network {
    /// Which.
    pub(crate) default: DefaultNetwork,
    /// Its bridge.
    pub(crate) bridge: String,
    /// Its ranges.
    pub(crate) subnets: Vec<String>,
}

/// What a node without configuration has for a network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum DefaultNetwork {
    /// None: it is not ready.
    #[default]
    None,
    /// A bridge of ours.
    Builtin,
}

/// Devices by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Cdi {
    /// Where spec files are, the most important last.
    pub(crate) spec_dirs: Vec<PathBuf>,
}

/// Registries.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Registry {
    /// Mirrors and credentials in k3s' format; it need not exist.
    pub(crate) config: PathBuf,
    /// `HOST/hosts.toml` per registry, as containerd reads them; it need not exist.
    pub(crate) certs_dir: PathBuf,
    /// Credentials in docker's format.
    pub(crate) docker_config: Option<PathBuf>,
    /// For a TCP connection.
    pub(crate) connect_timeout: Duration,
    /// For TLS on it.
    pub(crate) tls_timeout: Duration,
    /// From a request to the head of its answer.
    pub(crate) first_byte_timeout: Duration,
    /// Bytes a second, over `rate_window`, below which a download is given up.
    pub(crate) rate_min: u32,
    /// See `rate_min`.
    pub(crate) rate_window: Duration,
    /// Layers of one image that are downloaded at once.
    pub(crate) connections: u32,
}

impl Registry {
    /// As workers take it.
    pub(crate) fn for_workers(&self) -> coracle_job::Registries {
        let ms = |duration: Duration| duration.as_millis() as u64;
        coracle_job::Registries {
            config: self.config.clone(),
            certs_dir: self.certs_dir.clone(),
            docker_config: self.docker_config.clone(),
            patience: coracle_job::Patience {
                connect_ms: ms(self.connect_timeout),
                tls_ms: ms(self.tls_timeout),
                first_byte_ms: ms(self.first_byte_timeout),
                rate_bytes_min: self.rate_min.into(),
                rate_window_ms: ms(self.rate_window),
                connections: self.connections,
            },
        }
    }
}

/// Images.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Image {
    /// Archives and lists found in these are imported; `None`: in `ROOT/import`.
    pub(crate) import_dirs: Option<Vec<PathBuf>>,
    /// Whether compressed layers stay after unpacking, for `image export`.
    pub(crate) keep_blobs: bool,
    /// MiB that one layer may unpack to.
    pub(crate) layer_mib_max: u32,
}

impl Image {
    /// As workers take them.
    pub(crate) fn limits(&self) -> coracle_job::Limits {
        let layer_bytes_max = u64::from(self.layer_mib_max) << 20;
        coracle_job::Limits { layer_bytes_max, ..coracle_job::Limits::default() }
    }
}

/// The NRI dispatcher.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Nri {
    /// Where plugins connect.
    pub(crate) socket_path: PathBuf,
    /// Plugins that coracle starts.
    pub(crate) plugin_path: PathBuf,
    /// Their configuration.
    pub(crate) plugin_config_path: PathBuf,
    /// From connect to RegisterPlugin.
    pub(crate) plugin_registration_timeout: Duration,
    /// Configure and every event.
    pub(crate) plugin_request_timeout: Duration,
    /// All of Synchronize.
    pub(crate) plugin_sync_timeout: Duration,
    /// No socket: only plugins that coracle starts.
    pub(crate) disable_connections: bool,
    /// The runtime's name, as plugins are told.
    pub(crate) runtime_name: String,
    /// Whether a plugin's timeout fails the CRI call.
    pub(crate) fail_on_plugin_timeout: bool,
    /// What a second plugin of one index and name does.
    pub(crate) duplicate_policy: DuplicatePolicy,
    /// Whether plugins that coracle started are started again.
    pub(crate) restart: Restart,
    /// Event calls under way at one plugin.
    pub(crate) max_inflight_per_plugin: usize,
    /// Whether plugins hear Shutdown at a clean exit.
    pub(crate) send_shutdown: bool,
    /// Whether plugins may have containers evicted.
    pub(crate) allow_eviction: bool,
    /// `[nri.default_validator]`
    pub(crate) default_validator: Validator,
}

/// What a second live plugin of the same index and name does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum DuplicatePolicy {
    /// It takes the first one's place.
    #[default]
    Replace,
    /// Both serve.
    Allow,
    /// It is turned away.
    Reject,
}

/// Whether plugins that coracle started are started again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Restart {
    /// Never.
    Never,
    /// When they end with an error.
    #[default]
    OnFailure,
}

/// NRI's built-in validator: what no plugin may change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Validator {
    /// Whether there is one.
    pub(crate) enable: bool,
    /// OCI hooks.
    pub(crate) reject_oci_hook_adjustment: bool,
    /// Seccomp of a container that asked for RuntimeDefault.
    pub(crate) reject_runtime_default_seccomp_adjustment: bool,
    /// Seccomp of a container that asked for none.
    pub(crate) reject_unconfined_seccomp_adjustment: bool,
    /// Seccomp of a container that asked for a file.
    pub(crate) reject_custom_seccomp_adjustment: bool,
    /// Namespaces.
    pub(crate) reject_namespace_adjustment: bool,
    /// Sysctls.
    pub(crate) reject_sysctl_adjustment: bool,
    /// Plugins without which no container is made.
    pub(crate) required_plugins: Vec<String>,
    /// A pod's annotation that lets it go without them; empty: there is none.
    pub(crate) tolerate_missing_plugins_annotation: String,
}

/// Where to listen: a TCP address or a unix socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    /// `ADDRESS:PORT`
    Tcp(SocketAddr),
    /// `unix:///PATH`
    Unix(PathBuf),
}
