//! The table of all keys: what the parser, the flags and the default file are made from, in the order of that file.
//! A new key is a field of [`Config`] and a row here; nothing else knows it.

use std::ops::RangeInclusive;

use coracle_base::log::Level;
use coracle_engine::modules::Selinux;

use super::types::{CgroupDriver, Config, DefaultNetwork, DuplicatePolicy, Restart};
use super::value::Raw;

/// One key of the configuration.
#[derive(Debug)]
pub(crate) struct Key {
    /// As in the file: `section.name`.
    pub(crate) name: &'static str,
    /// What it means, its choices and bounds.
    pub(crate) text: &'static str,
    /// Its default, in TOML.
    pub(crate) default: &'static str,
    /// Whether SIGHUP brings a new value into force; others need a restart.
    pub(crate) reloadable: bool,
    /// Its flag, if it has one.
    pub(crate) flag: Option<Flag>,
    /// Whether it takes a list, and its flag may be repeated.
    pub(crate) is_list: bool,
    /// Parses a value into its field; the error says what was expected.
    pub(super) store: fn(&mut Config, &Raw) -> Result<(), String>,
    /// Whether two configurations agree in it.
    pub(super) is_equal: fn(&Config, &Config) -> bool,
}

/// A flag of `coracle serve`.
#[derive(Debug)]
pub(crate) struct Flag {
    /// With its dashes.
    pub(crate) name: &'static str,
    /// What `--help` calls its value.
    pub(crate) value: &'static str,
}

/// Shorter would fail healthy plugins, longer would outlast the kubelet's own limit of two minutes.
const NRI_TIMEOUT_MS: RangeInclusive<u64> = 10..=120_000;

/// Shorter would fail slow links, longer would look like a hang to a kubelet.
const REGISTRY_TIMEOUT_MS: RangeInclusive<u64> = 100..=600_000;

/// Up to 16 TiB, the largest file of ext4.
const LAYER_MIB: RangeInclusive<u32> = 1..=16 << 20;

/// Up to a week; a shell that is left open for longer is forgotten.
const STREAM_TIMEOUT_MS: RangeInclusive<u64> = 0..=7 * 24 * 3_600_000;

const LEVELS: [(&str, Level); 4] =
    [("error", Level::Error), ("warn", Level::Warn), ("info", Level::Info), ("debug", Level::Debug)];

const DRIVERS: [(&str, CgroupDriver); 3] =
    [("auto", CgroupDriver::Auto), ("cgroupfs", CgroupDriver::Cgroupfs), ("systemd", CgroupDriver::Systemd)];

const SELINUX: [(&str, Selinux); 3] =
    [("auto", Selinux::Auto), ("required", Selinux::Required), ("off", Selinux::Off)];

const DEFAULT_NETWORKS: [(&str, DefaultNetwork); 2] =
    [("none", DefaultNetwork::None), ("builtin", DefaultNetwork::Builtin)];

const DUPLICATES: [(&str, DuplicatePolicy); 3] = [
    ("replace", DuplicatePolicy::Replace),
    ("allow", DuplicatePolicy::Allow),
    ("reject", DuplicatePolicy::Reject),
];

const RESTARTS: [(&str, Restart); 2] = [("never", Restart::Never), ("on-failure", Restart::OnFailure)];

/// Whether the word after a row's default says that SIGHUP is enough.
macro_rules! is_reloadable {
    (reload) => {
        true
    };
    (restart) => {
        false
    };
}

/// A row: name, default, reload or restart, flag, field, parser, text.
macro_rules! key {
    ($name:literal = $default:literal, $reload:ident, $flag:expr, $is_list:literal,
     $($field:ident).+ <- |$raw:ident| $parse:expr, $text:literal) => {
        Key {
            name: $name,
            text: $text,
            default: $default,
            reloadable: is_reloadable!($reload),
            flag: $flag,
            is_list: $is_list,
            store: |config, $raw| {
                config.$($field).+ = $parse?;
                Ok(())
            },
            is_equal: |a, b| a.$($field).+ == b.$($field).+,
        }
    };
}

const fn flag(name: &'static str, value: &'static str) -> Option<Flag> {
    Some(Flag { name, value })
}

/// Every key.
pub(crate) static KEYS: &[Key] = &[
    key!("root" = r#""/var/lib/coracle""#, restart, flag("--root", "DIR"), false,
        root <- |raw| raw.path(),
        "What survives a reboot: images, layers, records of pods."),
    key!("state" = r#""/run/coracle""#, restart, flag("--state", "DIR"), false,
        state <- |raw| raw.path(),
        "What does not survive a reboot: sockets, network namespaces, exit records. A tmpfs."),
    key!("listen" = r#""unix:///run/coracle/coracle.sock""#, restart, flag("--listen", "ENDPOINT"), false,
        listen <- |raw| raw.socket(),
        "The CRI socket, for --container-runtime-endpoint of the kubelet. At most 107 bytes."),
    key!("log_level" = r#""info""#, reload, flag("--log-level", "LEVEL"), false,
        log_level <- |raw| raw.choice(&LEVELS),
        "How much is logged: error, warn, info or debug."),
    key!("program_dir" = r#""""#, restart, None, false,
        program_dir <- |raw| raw.optional_path(),
        "Where coracle-pod and coracle-worker are. Empty: beside the running program."),
    key!("sandbox_image" = r#""""#, reload, None, false,
        sandbox_image <- |raw| raw.optional_text(),
        "An image to list as the sandbox image, pulled when absent and pinned. Empty: the built-in one; no pause image is needed."),
    key!("pinned_images" = "[]", reload, None, true,
        pinned_images <- |raw| raw.texts(),
        "Images that garbage collection leaves alone: exact names, globs ending in *, keywords between two *."),
    key!("cgroup.driver" = r#""auto""#, restart, None, false,
        cgroup.driver <- |raw| raw.choice(&DRIVERS),
        "Who makes cgroups: cgroupfs, systemd, or auto: systemd where it runs the host. The kubelet learns it from us."),
    key!("cgroup.parent" = r#""""#, restart, flag("--cgroup-parent", "NAME"), false,
        cgroup.parent <- |raw| raw.text(),
        "The cgroup above pods whose request names none. Empty: the root."),
    key!("cni.conf_dir" = r#""/etc/cni/net.d""#, restart, flag("--cni-conf-dir", "DIR"), false,
        cni.conf_dir <- |raw| raw.path(),
        "Directory of the network's configuration: the first *.conflist or *.conf in lexical order."),
    key!("cni.bin_dirs" = r#"["/opt/cni/bin", "/usr/lib/cni"]"#, restart, flag("--cni-bin-dir", "DIR"), true,
        cni.bin_dirs <- |raw| raw.paths(),
        "Where CNI plugins are looked for, in order. The flag may be given more than once."),
    key!("cni.built_in" = "true", restart, None, false,
        cni.built_in <- |raw| raw.boolean(),
        "Run bridge, ptp, host-local, portmap, bandwidth, firewall and loopback without their programs."),
    key!("network.default" = r#""none""#, restart, None, false,
        network.default <- |raw| raw.choice(&DEFAULT_NETWORKS),
        "The network of a node without any in cni.conf_dir: none, or builtin: a bridge with ports and masquerading."),
    key!("network.bridge" = r#""coracle0""#, restart, None, false,
        network.bridge <- |raw| raw.text(),
        "The bridge of the default network, at most 15 bytes."),
    key!("network.subnets" = r#"["10.86.0.0/16"]"#, restart, None, true,
        network.subnets <- |raw| raw.texts(),
        "Ranges of the default network, one or one of each family, until the kubelet says which is the node's."),
    key!("cdi.spec_dirs" = r#"["/etc/cdi", "/var/run/cdi"]"#, restart, None, true,
        cdi.spec_dirs <- |raw| raw.paths(),
        "Where CDI spec files (devices by name) are looked for; of two for one device that in a later directory counts."),
    key!("security.selinux" = r#""auto""#, restart, None, false,
        security.selinux <- |raw| raw.choice(&SELINUX),
        "SELinux labels of containers: auto where the node's policy has types for them; required: no container runs without; or off."),
    key!("registry.config" = r#""/etc/coracle/registries.yaml""#, reload, None, false,
        registry.config <- |raw| raw.path(),
        "Mirrors and credentials of registries in k3s' format. It need not exist."),
    key!("registry.certs_dir" = r#""/etc/coracle/certs.d""#, reload, None, false,
        registry.certs_dir <- |raw| raw.path(),
        "Per registry a directory HOST with hosts.toml, as containerd reads it. It need not exist."),
    key!("registry.docker_config" = r#""""#, reload, None, false,
        registry.docker_config <- |raw| raw.optional_path(),
        "A config.json of docker's with credentials of registries. Empty: none. Credential helpers are not run."),
    key!("registry.connect_timeout" = r#""30s""#, reload, None, false,
        registry.connect_timeout <- |raw| raw.duration(REGISTRY_TIMEOUT_MS),
        "How long a connection to a registry may take to be made."),
    key!("registry.tls_timeout" = r#""30s""#, reload, None, false,
        registry.tls_timeout <- |raw| raw.duration(REGISTRY_TIMEOUT_MS),
        "How long TLS on it may take to be agreed on."),
    key!("registry.first_byte_timeout" = r#""60s""#, reload, None, false,
        registry.first_byte_timeout <- |raw| raw.duration(REGISTRY_TIMEOUT_MS),
        "How long a registry may take from a request to the head of its answer."),
    key!("registry.rate_min" = "1024", reload, None, false,
        registry.rate_min <- |raw| raw.number(0..=u32::MAX),
        "Bytes a second, over rate_window, below which a download is given up and tried elsewhere or again."),
    key!("registry.rate_window" = r#""60s""#, reload, None, false,
        registry.rate_window <- |raw| raw.duration(REGISTRY_TIMEOUT_MS),
        "See rate_min; a download that is silent for so long is given up, too."),
    key!("registry.connections" = "3", reload, None, false,
        registry.connections <- |raw| raw.number(1..=16),
        "Layers of one image that are downloaded at once."),
    key!("image.import_dir" = r#""""#, reload, None, false,
        image.import_dirs <- |raw| raw.optional_paths(),
        "Where archives (.tar, .tar.gz, .tar.zst) and lists (.txt) of images are imported from and pinned: a path, or a list of paths. Empty: import below root. []: nowhere. For k3s' images: /var/lib/rancher/k3s/agent/images."),
    key!("image.keep_blobs" = "true", reload, None, false,
        image.keep_blobs <- |raw| raw.boolean(),
        "Keep compressed layers after unpacking: `coracle image export` and a full `coracle image check` need them. false saves flash."),
    key!("image.layer_mib_max" = "16384", restart, None, false,
        image.layer_mib_max <- |raw| raw.number(LAYER_MIB),
        "MiB that one layer may unpack to, and the files of an imported archive together. Whatever this says, unpacking stops while 5 % of the file system of root are free, at least 64 MiB; of less than 1280 MiB, a tenth or 64 MiB, whichever is less."),
    key!("streaming.address" = r#""127.0.0.1""#, restart, None, false,
        streaming.address <- |raw| raw.ip_address(),
        "The address that exec, attach and port-forward are served on."),
    key!("streaming.port" = "0", restart, None, false,
        streaming.port <- |raw| raw.number(0..=65535).map(|port| port as u16),
        "Its port. 0: any free one."),
    key!("streaming.tls_cert_file" = r#""""#, restart, None, false,
        streaming.certificate <- |raw| raw.optional_path(),
        "PEM file of a certificate: with it and tls_key_file the streams are served over TLS. Empty: plain."),
    key!("streaming.tls_key_file" = r#""""#, restart, None, false,
        streaming.key <- |raw| raw.optional_path(),
        "PEM file of the certificate's key."),
    key!("streaming.idle_timeout" = r#""240m""#, restart, None, false,
        streaming.idle_timeout <- |raw| raw.duration(STREAM_TIMEOUT_MS),
        "How long a session may be silent both ways. 0s: for ever."),
    key!("streaming.creation_timeout" = r#""30s""#, restart, None, false,
        streaming.creation_timeout <- |raw| raw.duration(NRI_TIMEOUT_MS),
        "How long a client may take for opening its streams, and, up to 2s, for its request."),
    key!("streaming.max_sessions" = "512", restart, None, false,
        streaming.sessions_max <- |raw| raw.number(1..=65535).map(|count| count as usize),
        "Sessions at once; a client that is one too many gets 503."),
    key!("nri.socket_path" = r#""/var/run/nri/nri.sock""#, restart, flag("--nri-socket", "PATH"), false,
        nri.socket_path <- |raw| raw.socket(),
        "Where NRI plugins connect."),
    key!("nri.plugin_path" = r#""/opt/nri/plugins""#, restart, None, false,
        nri.plugin_path <- |raw| raw.path(),
        "Directory of NRI plugins that coracle starts."),
    key!("nri.plugin_config_path" = r#""/etc/nri/conf.d""#, restart, None, false,
        nri.plugin_config_path <- |raw| raw.path(),
        "Directory of their configuration."),
    key!("nri.plugin_registration_timeout" = r#""5s""#, reload, None, false,
        nri.plugin_registration_timeout <- |raw| raw.duration(NRI_TIMEOUT_MS),
        "How long a plugin may take to register."),
    key!("nri.plugin_request_timeout" = r#""2s""#, reload, None, false,
        nri.plugin_request_timeout <- |raw| raw.duration(NRI_TIMEOUT_MS),
        "How long a plugin may take to answer Configure or an event."),
    key!("nri.plugin_sync_timeout" = r#""10s""#, reload, None, false,
        nri.plugin_sync_timeout <- |raw| raw.duration(NRI_TIMEOUT_MS),
        "How long a plugin may take for all of Synchronize."),
    key!("nri.disable_connections" = "false", restart, None, false,
        nri.disable_connections <- |raw| raw.boolean(),
        "No socket: only plugins that coracle starts."),
    key!("nri.runtime_name" = r#""coracle""#, restart, None, false,
        nri.runtime_name <- |raw| raw.text(),
        "The runtime name that plugins are told."),
    key!("nri.fail_on_plugin_timeout" = "true", reload, None, false,
        nri.fail_on_plugin_timeout <- |raw| raw.boolean(),
        "Whether a plugin's timeout fails the create or update that asked it."),
    key!("nri.duplicate_policy" = r#""replace""#, reload, None, false,
        nri.duplicate_policy <- |raw| raw.choice(&DUPLICATES),
        "What a second plugin of the same index and name does: replace, allow or reject."),
    key!("nri.restart" = r#""on-failure""#, reload, None, false,
        nri.restart <- |raw| raw.choice(&RESTARTS),
        "Whether plugins that coracle started are started again: never or on-failure."),
    key!("nri.max_inflight_per_plugin" = "1", reload, None, false,
        nri.max_inflight_per_plugin <- |raw| raw.number(1..=64).map(|count| count as usize),
        "Event calls under way at one plugin, 1 to 64."),
    key!("nri.send_shutdown" = "false", reload, None, false,
        nri.send_shutdown <- |raw| raw.boolean(),
        "Tell plugins at a clean exit."),
    key!("nri.allow_eviction" = "false", reload, None, false,
        nri.allow_eviction <- |raw| raw.boolean(),
        "Let plugins have containers evicted."),
    key!("nri.default_validator.enable" = "false", reload, None, false,
        nri.default_validator.enable <- |raw| raw.boolean(),
        "Whether NRI's built-in validator looks at what plugins change."),
    key!("nri.default_validator.reject_oci_hook_adjustment" = "false", reload, None, false,
        nri.default_validator.reject_oci_hook_adjustment <- |raw| raw.boolean(),
        "Reject OCI hooks from plugins."),
    key!("nri.default_validator.reject_runtime_default_seccomp_adjustment" = "false", reload, None, false,
        nri.default_validator.reject_runtime_default_seccomp_adjustment <- |raw| raw.boolean(),
        "Reject another seccomp policy where RuntimeDefault was asked for."),
    key!("nri.default_validator.reject_unconfined_seccomp_adjustment" = "false", reload, None, false,
        nri.default_validator.reject_unconfined_seccomp_adjustment <- |raw| raw.boolean(),
        "Reject another seccomp policy where none was asked for."),
    key!("nri.default_validator.reject_custom_seccomp_adjustment" = "false", reload, None, false,
        nri.default_validator.reject_custom_seccomp_adjustment <- |raw| raw.boolean(),
        "Reject another seccomp policy where a file was asked for."),
    key!("nri.default_validator.reject_namespace_adjustment" = "false", reload, None, false,
        nri.default_validator.reject_namespace_adjustment <- |raw| raw.boolean(),
        "Reject changes of namespaces."),
    key!("nri.default_validator.reject_sysctl_adjustment" = "false", reload, None, false,
        nri.default_validator.reject_sysctl_adjustment <- |raw| raw.boolean(),
        "Reject changes of sysctls."),
    key!("nri.default_validator.required_plugins" = "[]", reload, None, true,
        nri.default_validator.required_plugins <- |raw| raw.texts(),
        "Plugins, NAME or INDEX-NAME, without which no container is created."),
    key!("nri.default_validator.tolerate_missing_plugins_annotation" = r#""""#, reload, None, false,
        nri.default_validator.tolerate_missing_plugins_annotation <- |raw| raw.text(),
        "A pod's annotation that lets it go without them. Empty: there is none."),
    key!("metrics.address" = r#""""#, restart, flag("--metrics", "ADDR"), false,
        metrics_address <- |raw| raw.optional_address(),
        "Where Prometheus text is served: ADDRESS:PORT or unix:///PATH. Empty: nowhere."),
    key!("metrics.containerd_socket" = r#""""#, restart, None, false,
        containerd_socket <- |raw| raw.optional_socket(),
        "Where the kubelet's cAdvisor finds names for cgroups, as if we were containerd; it looks at unix:///run/containerd/containerd.sock. Empty: nowhere."),
];
