//! Settings of the dispatcher. docs/specs/nri.md has the default values of times.

use std::time::Duration;

/// Handling of a second plugin with the same index and name (NRI 2.7).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Duplicates {
    /// The second plugin replaces the first when it has joined.
    #[default]
    Replace,
    /// Both plugins stay connected.
    Allow,
    /// The second plugin is refused.
    Reject,
}

/// The built-in validator (NRI 4.7).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DefaultValidator {
    /// Whether the validator is enabled.
    pub enable: bool,
    /// Whether adjustments of OCI hooks are rejected.
    pub reject_oci_hook_adjustment: bool,
    /// Whether changes of the seccomp policy RuntimeDefault are rejected.
    pub reject_runtime_default_seccomp_adjustment: bool,
    /// Whether a seccomp policy for unconfined containers is rejected.
    pub reject_unconfined_seccomp_adjustment: bool,
    /// Whether changes of a Localhost seccomp profile are rejected.
    pub reject_custom_seccomp_adjustment: bool,
    /// Whether adjustments of namespaces are rejected.
    pub reject_namespace_adjustment: bool,
    /// Whether adjustments of sysctls are rejected.
    pub reject_sysctl_adjustment: bool,
    /// Plugins required for every pod, as `NAME` or `INDEX-NAME`, even if the validator is disabled (NRI 3.3).
    pub required_plugins: Vec<String>,
    /// Name of the pod annotation that exempts a pod from required plugins; empty: no exemption.
    pub tolerate_missing_plugins_annotation: String,
}

/// All settings of the dispatcher. `Default` is an empty value without any time, which the runtime fills.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Name of the runtime, sent to plugins.
    pub runtime_name: String,
    /// Version of the runtime, sent to plugins, for example `v1.2.3`.
    pub runtime_version: String,
    /// Time limit from the accepted connection to a complete RegisterPlugin.
    pub registration_timeout: Duration,
    /// Time limit of Configure and of every event.
    pub request_timeout: Duration,
    /// Time limit of Synchronize.
    pub sync_timeout: Duration,
    /// Whether a timeout fails a creation or update.
    pub fail_on_timeout: bool,
    /// Handling of a second plugin with the same index and name.
    pub duplicates: Duplicates,
    /// Maximum number of concurrent event calls of one plugin, at least 1.
    pub max_inflight: usize,
    /// Whether evictions requested by plugins are performed.
    pub allow_eviction: bool,
    /// The built-in validator.
    pub validator: DefaultValidator,
}
