//! The table of all keys, in the order of the default file. The parser, the flags and the default file are generated from it. A
//! new key is a field of [`Config`] and a row in this table.

use std::ops::RangeInclusive;

use coracle_base::log::{Format, Level};
use coracle_base::settings::Selinux;
use coracle_nri::Duplicates;

use super::types::{CgroupDriver, Config, DefaultNetwork, Offline, Restart};
use super::value::Raw;

/// One configuration key.
#[derive(Debug)]
pub struct Key {
    /// Name of the key in the file: `section.name`.
    pub name: &'static str,
    /// Description of the key with its choices and bounds.
    pub text: &'static str,
    /// Default value in TOML syntax.
    pub default: &'static str,
    /// Whether SIGHUP applies a new value; other keys need a restart.
    pub reloadable: bool,
    /// The command-line flag of the key; `None` if it has none.
    pub flag: Option<Flag>,
    /// Whether the value is a list; the flag of such a key may be repeated.
    pub is_list: bool,
    /// Parses a value and stores it in its field; the error describes the expected value.
    pub(super) store: fn(&mut Config, &Raw) -> Result<(), String>,
    /// Whether two configurations have equal values of the key.
    pub(super) is_equal: fn(&Config, &Config) -> bool,
}

/// A flag of the daemon.
#[derive(Debug)]
pub struct Flag {
    /// Name of the flag including the dashes.
    pub name: &'static str,
    /// Name of the flag's value in `--help`.
    pub value: &'static str,
}

/// Permitted timeouts of NRI plugins in milliseconds: a shorter one would disconnect working plugins, a longer one would exceed
/// the kubelet's limit of two minutes.
const NRI_TIMEOUT_MS: RangeInclusive<u64> = 10..=120_000;

/// Permitted timeouts of registries in milliseconds: a shorter one would fail on slow networks, a longer one would appear to a
/// kubelet as a hang.
const REGISTRY_TIMEOUT_MS: RangeInclusive<u64> = 100..=600_000;

/// Permitted limits of a layer's size in MiB: up to 16 TiB, the maximum file size of ext4.
const LAYER_MIB: RangeInclusive<u32> = 1..=16 << 20;

/// Permitted times of an image verifier in milliseconds: a program may ask a slow registry.
const VERIFIER_TIMEOUT_MS: RangeInclusive<u64> = 100..=600_000;

/// Permitted times for the check of all layers in milliseconds: up to a year.
const CHECK_INTERVAL_MS: RangeInclusive<u64> = 0..=366 * 24 * 3_600_000;

/// Permitted timeouts of streams in milliseconds: up to a week, which is longer than any interactive session.
const STREAM_TIMEOUT_MS: RangeInclusive<u64> = 0..=7 * 24 * 3_600_000;

const LEVELS: [(&str, Level); 4] =
    [("error", Level::Error), ("warn", Level::Warn), ("info", Level::Info), ("debug", Level::Debug)];

const FORMATS: [(&str, Format); 2] = [("text", Format::Text), ("json", Format::Json)];

const DRIVERS: [(&str, CgroupDriver); 3] =
    [("auto", CgroupDriver::Auto), ("cgroupfs", CgroupDriver::Cgroupfs), ("systemd", CgroupDriver::Systemd)];

const SELINUX: [(&str, Selinux); 3] =
    [("auto", Selinux::Auto), ("required", Selinux::Required), ("off", Selinux::Off)];

const DEFAULT_NETWORKS: [(&str, DefaultNetwork); 2] =
    [("none", DefaultNetwork::None), ("builtin", DefaultNetwork::Builtin)];

const OFFLINE: [(&str, Offline); 2] = [("none", Offline::None), ("neighbours", Offline::Neighbours)];

const DUPLICATES: [(&str, Duplicates); 3] =
    [("replace", Duplicates::Replace), ("allow", Duplicates::Allow), ("reject", Duplicates::Reject)];

const RESTARTS: [(&str, Restart); 2] = [("never", Restart::Never), ("on-failure", Restart::OnFailure)];

/// Converts the last word of a row, `reload` or `restart`, into whether SIGHUP applies the key.
macro_rules! is_reloadable {
    (reload) => {
        true
    };
    (restart) => {
        false
    };
}

/// Creates a row from name, default, reload or restart, flag, field, parser, and description.
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

/// All keys of the configuration file.
pub static KEYS: &[Key] = &[
    key!("root" = r#""/var/lib/coracle""#, restart, flag("--root", "DIR"), false,
        root <- |raw| raw.path(),
        "Directory for data that survives a reboot: images, layers, records of pods."),
    key!("state" = r#""/run/coracle""#, restart, flag("--state", "DIR"), false,
        state <- |raw| raw.path(),
        "Directory for data that does not survive a reboot: sockets, network namespaces, exit records. Should be a tmpfs."),
    key!("listen" = r#""unix:///run/coracle/coracle.sock""#, restart, flag("--listen", "ENDPOINT"), false,
        listen <- |raw| raw.socket(),
        "The CRI socket, for --container-runtime-endpoint of the kubelet. At most 107 bytes."),
    key!("log_level" = r#""info""#, reload, flag("--log-level", "LEVEL"), false,
        log_level <- |raw| raw.choice(&LEVELS),
        "Log level: error, warn, info or debug."),
    key!("log_format" = r#""text""#, reload, flag("--log-format", "FORMAT"), false,
        log_format <- |raw| raw.choice(&FORMATS),
        "Form of log lines: text (key=value) or json (one object a line, all values strings)."),
    key!("program_dir" = r#""""#, restart, None, false,
        program_dir <- |raw| raw.optional_path(),
        "Directory of coracle-pod, coracle and its link coracle-worker. Empty: that of coracled."),
    key!("sandbox_image" = r#""""#, reload, None, false,
        sandbox_image <- |raw| raw.optional_text(),
        "Image to list as the sandbox image; it is pulled if absent, and pinned. Empty: the built-in one; no pause image is needed."),
    key!("pinned_images" = "[]", reload, None, true,
        pinned_images <- |raw| raw.texts(),
        "Images that garbage collection keeps: exact names, globs ending in *, keywords between two *."),
    key!("cgroup.driver" = r#""auto""#, restart, None, false,
        cgroup.driver <- |raw| raw.choice(&DRIVERS),
        "Cgroup driver: cgroupfs, systemd, or auto: systemd if it manages the host. The kubelet learns it from the runtime."),
    key!("cgroup.parent" = r#""""#, restart, flag("--cgroup-parent", "NAME"), false,
        cgroup.parent <- |raw| raw.text(),
        "Parent cgroup of pods whose request names none. Empty: /coracle with cgroupfs, system.slice with systemd."),
    key!("cni.conf_dir" = r#""/etc/cni/net.d""#, restart, flag("--cni-conf-dir", "DIR"), false,
        cni.conf_dir <- |raw| raw.path(),
        "Directory of CNI configurations: the first *.conflist or *.conf in lexical order is used."),
    key!("cni.bin_dirs" = r#"["/opt/cni/bin", "/usr/lib/cni"]"#, restart, flag("--cni-bin-dir", "DIR"), true,
        cni.bin_dirs <- |raw| raw.paths(),
        "Directories of CNI plugins, in search order. The flag may be repeated."),
    key!("cni.built_in" = "true", restart, None, false,
        cni.built_in <- |raw| raw.boolean(),
        "Run bridge, ptp, host-local, portmap, bandwidth, firewall and loopback without their programs."),
    key!("network.default" = r#""none""#, restart, None, false,
        network.default <- |raw| raw.choice(&DEFAULT_NETWORKS),
        "Network of a node without a configuration in cni.conf_dir: none, or builtin: a bridge with host ports and masquerading."),
    key!("network.bridge" = r#""coracle0""#, restart, None, false,
        network.bridge <- |raw| raw.text(),
        "Name of the default network's bridge, at most 15 bytes."),
    key!("network.subnets" = r#"["10.86.0.0/16"]"#, restart, None, true,
        network.subnets <- |raw| raw.texts(),
        "Address ranges of the default network, one or one of each family, until the kubelet announces the node's pod CIDR."),
    key!("network.check_neighbours" = "true", restart, None, false,
        network.check_neighbours <- |raw| raw.boolean(),
        "On the default network, drop what a pod sends with another MAC address than its own, and ARP and IPv6 neighbour messages for other addresses. Off for pods that bridge or move addresses (VRRP)."),
    key!("cdi.spec_dirs" = r#"["/etc/cdi", "/var/run/cdi"]"#, restart, None, true,
        cdi.spec_dirs <- |raw| raw.paths(),
        "Directories of CDI spec files (devices by name); a later directory overrides an earlier one."),
    key!("security.selinux" = r#""auto""#, restart, None, false,
        security.selinux <- |raw| raw.choice(&SELINUX),
        "SELinux labels of containers: auto: if the node's policy has types for them; required: no container runs without; or off."),
    key!("registry.config" = r#""/etc/coracle/registries.yaml""#, reload, None, false,
        registry.config <- |raw| raw.path(),
        "File with mirrors and credentials of registries in k3s' format. May be absent."),
    key!("registry.certs_dir" = r#""/etc/coracle/certs.d""#, reload, None, false,
        registry.certs_dir <- |raw| raw.path(),
        "Directory with a subdirectory HOST and its hosts.toml for each registry, in containerd's format. May be absent."),
    key!("registry.docker_config" = r#""""#, reload, None, false,
        registry.docker_config <- |raw| raw.optional_path(),
        "A config.json of docker with credentials of registries. Empty: none. Credential helpers are not executed."),
    key!("registry.default_endpoint" = "true", reload, None, false,
        registry.default_endpoint <- |raw| raw.boolean(),
        "Whether a registry that has mirrors in registries.yaml is itself asked after them."),
    key!("registry.connect_timeout" = r#""30s""#, reload, None, false,
        registry.connect_timeout <- |raw| raw.duration(REGISTRY_TIMEOUT_MS),
        "Timeout of connecting to a registry."),
    key!("registry.tls_timeout" = r#""30s""#, reload, None, false,
        registry.tls_timeout <- |raw| raw.duration(REGISTRY_TIMEOUT_MS),
        "TLS handshake timeout."),
    key!("registry.first_byte_timeout" = r#""60s""#, reload, None, false,
        registry.first_byte_timeout <- |raw| raw.duration(REGISTRY_TIMEOUT_MS),
        "Timeout from a request to the head of the registry's response."),
    key!("registry.rate_min" = "1024", reload, None, false,
        registry.rate_min <- |raw| raw.number(0..=u32::MAX),
        "Minimum rate in bytes per second over rate_window; a slower download is aborted and retried, possibly at another endpoint."),
    key!("registry.rate_window" = r#""60s""#, reload, None, false,
        registry.rate_window <- |raw| raw.duration(REGISTRY_TIMEOUT_MS),
        "Time window of rate_min; a download that receives nothing for this time is aborted too."),
    key!("registry.connections" = "3", reload, None, false,
        registry.connections <- |raw| raw.number(1..=16),
        "Number of layers of an image that are downloaded in parallel."),
    key!("mirror.listen" = r#""""#, restart, None, false,
        mirror.listen <- |raw| raw.optional_tcp_address(),
        "Address ADDRESS:PORT on which this node passes images to its neighbours, read-only. Empty: it does not."),
    key!("mirror.key_file" = r#""""#, reload, None, false,
        mirror.key_file <- |raw| raw.optional_path(),
        "File with the key that the nodes of a site share, 32 to 4096 bytes, for example of `openssl rand -hex 32`. It proves requests to and from neighbours and is never sent."),
    key!("mirror.open" = "false", restart, None, false,
        mirror.open <- |raw| raw.boolean(),
        "Serve everyone who can reach listen, without a key. Only on a network of which every node and pod may read all images."),
    key!("mirror.rate_max" = "0", reload, None, false,
        mirror.rate_max <- |raw| raw.number(0..=u32::MAX),
        "Maximum rate in bytes per second at which neighbours get data, all together, at least 65536. 0: no limit."),
    key!("mirror.neighbours" = "[]", reload, None, true,
        mirror.neighbours <- |raw| raw.neighbours(),
        "Nodes that are asked for layers before a registry: ADDRESS:PORT, or dns:NAME:PORT for all addresses of a name, at most 32 in all. This node may be among them, so that all nodes have the same list."),
    key!("mirror.offline" = r#""none""#, reload, None, false,
        mirror.offline <- |raw| raw.choice(&OFFLINE),
        "Source of manifests while their registry cannot be reached: none, or neighbours, whose image of a tag may be old, and which ask for no credentials."),
    key!("image.import_dir" = r#""""#, reload, None, false,
        image.import_dirs <- |raw| raw.optional_paths(),
        "Directories from which archives (.tar, .tar.gz, .tar.zst) and lists (.txt) of images are imported and pinned: a path or a list of paths. Empty: import below root. []: none. For k3s' images: /var/lib/rancher/k3s/agent/images."),
    key!("image.additional_stores" = "[]", restart, None, true,
        image.additional_stores <- |raw| raw.paths(),
        "Directories with images that are shipped unpacked with the system's image, made by `coracle image bundle`. They are only read; their images are pinned and used in place (docs/images.md)."),
    key!("image.keep_blobs" = "true", reload, None, false,
        image.keep_blobs <- |raw| raw.boolean(),
        "Keep compressed layers after unpacking: `coracle image export` needs them, and damaged layers are repaired from them. false saves flash."),
    key!("image.partial_pulls" = "true", reload, None, false,
        image.partial_pulls <- |raw| raw.boolean(),
        "Download only what the node does not have in other layers of a layer with a table of contents (zstd:chunked, eStargz). The compressed layer is then not kept."),
    key!("image.layer_mib_max" = "16384", restart, None, false,
        image.layer_mib_max <- |raw| raw.number(LAYER_MIB),
        "Maximum size in MiB of an unpacked layer, and of all files of an imported archive. Unpacking also stops when less than 5 % of the file system of root, at least 64 MiB and at most 2 GiB, would remain free; on one of less than 1280 MiB, a tenth or 64 MiB, whichever is less."),
    key!("image.check_interval" = r#""0s""#, reload, None, false,
        image.check_interval <- |raw| raw.duration(CHECK_INTERVAL_MS),
        "Time in which the files of each layer are read once in idle time, at most 8 MiB a second, and compared with what was unpacked: \"168h\" for a week. Damage is reported in Status and repaired from a kept blob, a registry or a neighbour. 0s: never."),
    key!("image.policy.file" = r#""""#, reload, None, false,
        image.policy.file <- |raw| raw.optional_path(),
        "Policy of signatures in the format of containers-policy.json(5), with the further types cosign and notation (docs/security.md). It and its keys are read at the start and by SIGHUP. Empty: images are not judged."),
    key!("image.policy.minimum_time" = r#""""#, reload, None, false,
        image.policy.minimum_time <- |raw| raw.day(),
        "Day YYYY-MM-DD by which certificates are judged while the clock of the node has an earlier time, as on boards without a clock. Empty: an image that needs a certificate is refused until the clock is set."),
    key!("image.policy.verifiers" = r#""""#, reload, None, false,
        image.policy.verifiers <- |raw| raw.optional_path(),
        "Directory of programs that decide, by the convention of containerd's image verifiers, whether an image may be pulled (docs/security.md). All must accept it, and the policy of `file`, too. Empty: none is asked."),
    key!("image.policy.verifier_timeout" = r#""10s""#, reload, None, false,
        image.policy.verifier_timeout <- |raw| raw.duration(VERIFIER_TIMEOUT_MS),
        "Time after which each of these programs is killed, which refuses the image."),
    key!("runtime_handlers.aliases" = r#"["runc", "crun"]"#, reload, None, true,
        runtime_handlers.aliases <- |raw| raw.texts(),
        "Handlers of RuntimeClasses that are served by this runtime, beside the one without a name. They differ in the defaults below only."),
    key!("runtime_handlers.cdi_devices" = "[]", reload, None, true,
        runtime_handlers.cdi_devices <- |raw| raw.cdi_devices(),
        "CDI devices that each container of a handler gets: \"HANDLER=VENDOR/CLASS=DEVICE\"."),
    key!("runtime_handlers.annotations" = "[]", reload, None, true,
        runtime_handlers.annotations <- |raw| raw.annotations(),
        "Annotations of the pods and containers of a handler that do not have them, for NRI plugins and hooks: \"HANDLER=NAME=VALUE\"."),
    key!("runtime_handlers.seccomp" = "[]", reload, None, true,
        runtime_handlers.seccomp <- |raw| raw.seccomp_profiles(),
        "Seccomp profile of containers of a handler that are Unconfined and not privileged: \"HANDLER=runtime/default\" or \"HANDLER=/PATH\"."),
    key!("runtime_handlers.no_new_privileges" = "[]", reload, None, true,
        runtime_handlers.no_new_privileges <- |raw| raw.texts(),
        "Handlers whose containers cannot gain privileges by executing a program, unless they are privileged."),
    key!("runtime_handlers.cgroup" = "[]", reload, None, true,
        runtime_handlers.cgroup <- |raw| raw.cgroup_files(),
        "Files of cgroup v2 of each container of a handler, unless the request has them: \"HANDLER=pids.max=200\"."),
    key!("streaming.address" = r#""127.0.0.1""#, restart, None, false,
        streaming.address <- |raw| raw.ip_address(),
        "Address on which exec, attach and port-forward are served."),
    key!("streaming.port" = "0", restart, None, false,
        streaming.port <- |raw| raw.number(0..=65535).map(|port| port as u16),
        "Port for exec, attach and port-forward. 0: any free port."),
    key!("streaming.tls_cert_file" = r#""""#, restart, None, false,
        streaming.certificate <- |raw| raw.optional_path(),
        "PEM file of a certificate: with it and tls_key_file the streams are served over TLS. Empty: no TLS."),
    key!("streaming.tls_key_file" = r#""""#, restart, None, false,
        streaming.key <- |raw| raw.optional_path(),
        "PEM file of the certificate's key."),
    key!("streaming.idle_timeout" = r#""240m""#, restart, None, false,
        streaming.idle_timeout <- |raw| raw.duration(STREAM_TIMEOUT_MS),
        "Timeout of a session without data in either direction. 0s: none."),
    key!("streaming.creation_timeout" = r#""30s""#, restart, None, false,
        streaming.creation_timeout <- |raw| raw.duration(NRI_TIMEOUT_MS),
        "Time limit for a client to open its streams, and, up to 2s, to send its request."),
    key!("streaming.max_sessions" = "512", restart, None, false,
        streaming.sessions_max <- |raw| raw.number(1..=65535).map(|count| count as usize),
        "Maximum number of concurrent sessions; further clients get 503."),
    key!("nri.socket_path" = r#""/var/run/nri/nri.sock""#, restart, flag("--nri-socket", "PATH"), false,
        nri.socket_path <- |raw| raw.socket(),
        "Socket for NRI plugins."),
    key!("nri.plugin_path" = r#""/opt/nri/plugins""#, restart, None, false,
        nri.plugin_path <- |raw| raw.path(),
        "Directory of NRI plugins that coracle starts."),
    key!("nri.plugin_config_path" = r#""/etc/nri/conf.d""#, restart, None, false,
        nri.plugin_config_path <- |raw| raw.path(),
        "Directory of the configuration of these plugins."),
    key!("nri.plugin_registration_timeout" = r#""5s""#, reload, None, false,
        nri.dispatcher.registration_timeout <- |raw| raw.duration(NRI_TIMEOUT_MS),
        "Timeout of a plugin's registration."),
    key!("nri.plugin_request_timeout" = r#""2s""#, reload, None, false,
        nri.dispatcher.request_timeout <- |raw| raw.duration(NRI_TIMEOUT_MS),
        "Timeout of a plugin's answer to Configure or an event."),
    key!("nri.plugin_sync_timeout" = r#""10s""#, reload, None, false,
        nri.dispatcher.sync_timeout <- |raw| raw.duration(NRI_TIMEOUT_MS),
        "Timeout of a plugin's Synchronize."),
    key!("nri.disable_connections" = "false", restart, None, false,
        nri.disable_connections <- |raw| raw.boolean(),
        "Create no socket: only plugins that coracle starts are used."),
    key!("nri.runtime_name" = r#""coracle""#, restart, None, false,
        nri.dispatcher.runtime_name <- |raw| raw.text(),
        "Name of the runtime that is sent to plugins."),
    key!("nri.fail_on_plugin_timeout" = "true", reload, None, false,
        nri.dispatcher.fail_on_timeout <- |raw| raw.boolean(),
        "Whether a plugin's timeout fails the creation or update."),
    key!("nri.duplicate_policy" = r#""replace""#, reload, None, false,
        nri.dispatcher.duplicates <- |raw| raw.choice(&DUPLICATES),
        "Handling of a second plugin with the same index and name: replace, allow or reject."),
    key!("nri.restart" = r#""on-failure""#, reload, None, false,
        nri.restart <- |raw| raw.choice(&RESTARTS),
        "Whether plugins that coracle has started are restarted: never or on-failure."),
    key!("nri.max_inflight_per_plugin" = "1", reload, None, false,
        nri.dispatcher.max_inflight <- |raw| raw.number(1..=64).map(|count| count as usize),
        "Maximum number of concurrent event calls of one plugin, 1 to 64."),
    key!("nri.send_shutdown" = "false", reload, None, false,
        nri.send_shutdown <- |raw| raw.boolean(),
        "Send Shutdown to plugins at a clean exit."),
    key!("nri.allow_eviction" = "false", reload, None, false,
        nri.dispatcher.allow_eviction <- |raw| raw.boolean(),
        "Allow plugins to evict containers."),
    key!("nri.default_validator.enable" = "false", reload, None, false,
        nri.dispatcher.validator.enable <- |raw| raw.boolean(),
        "Whether NRI's built-in validator checks adjustments."),
    key!("nri.default_validator.reject_oci_hook_adjustment" = "false", reload, None, false,
        nri.dispatcher.validator.reject_oci_hook_adjustment <- |raw| raw.boolean(),
        "Reject OCI hooks from plugins."),
    key!("nri.default_validator.reject_runtime_default_seccomp_adjustment" = "false", reload, None, false,
        nri.dispatcher.validator.reject_runtime_default_seccomp_adjustment <- |raw| raw.boolean(),
        "Reject a change of the seccomp policy if RuntimeDefault was requested."),
    key!("nri.default_validator.reject_unconfined_seccomp_adjustment" = "false", reload, None, false,
        nri.dispatcher.validator.reject_unconfined_seccomp_adjustment <- |raw| raw.boolean(),
        "Reject a change of the seccomp policy if none was requested."),
    key!("nri.default_validator.reject_custom_seccomp_adjustment" = "false", reload, None, false,
        nri.dispatcher.validator.reject_custom_seccomp_adjustment <- |raw| raw.boolean(),
        "Reject a change of the seccomp policy if a Localhost profile was requested."),
    key!("nri.default_validator.reject_namespace_adjustment" = "false", reload, None, false,
        nri.dispatcher.validator.reject_namespace_adjustment <- |raw| raw.boolean(),
        "Reject changes of namespaces."),
    key!("nri.default_validator.reject_sysctl_adjustment" = "false", reload, None, false,
        nri.dispatcher.validator.reject_sysctl_adjustment <- |raw| raw.boolean(),
        "Reject changes of sysctls."),
    key!("nri.default_validator.required_plugins" = "[]", reload, None, true,
        nri.dispatcher.validator.required_plugins <- |raw| raw.texts(),
        "Plugins, NAME or INDEX-NAME, without which no container is created."),
    key!("nri.default_validator.tolerate_missing_plugins_annotation" = r#""""#, reload, None, false,
        nri.dispatcher.validator.tolerate_missing_plugins_annotation <- |raw| raw.text(),
        "Pod annotation that exempts it from required plugins. Empty: no exemption."),
    key!("metrics.address" = r#""""#, restart, flag("--metrics", "ADDR"), false,
        metrics_address <- |raw| raw.optional_address(),
        "Address for Prometheus metrics: ADDRESS:PORT or unix:///PATH. Empty: disabled."),
    key!("metrics.containerd_socket" = r#""auto""#, restart, None, false,
        containerd_socket <- |raw| raw.containerd_socket(),
        "Socket on which the kubelet's cAdvisor finds pods and containers, in place of containerd. auto: unix:///run/containerd/containerd.sock, which cAdvisor expects, if the node has no containerd and state is the default. Empty: disabled."),
];
