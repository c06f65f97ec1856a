//! Settings of an operator. docs/specs/nri.md has the default times.

use std::time::Duration;

/// Handling of a second plugin with the same index and name (NRI 2.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duplicates {
    /// It replaces the first one when it has joined.
    Replace,
    /// Both stay connected.
    Allow,
    /// It is refused.
    Reject,
}

/// The built-in validator (NRI 4.7).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DefaultValidator {
    /// Whether it is enabled.
    pub enable: bool,
    /// Reject adjustments of OCI hooks.
    pub reject_oci_hook_adjustment: bool,
    /// Reject a change of the seccomp policy RuntimeDefault.
    pub reject_runtime_default_seccomp_adjustment: bool,
    /// Reject a seccomp policy for unconfined containers.
    pub reject_unconfined_seccomp_adjustment: bool,
    /// Reject a change of a Localhost seccomp profile.
    pub reject_custom_seccomp_adjustment: bool,
    /// Reject adjustments of namespaces.
    pub reject_namespace_adjustment: bool,
    /// Reject adjustments of sysctls.
    pub reject_sysctl_adjustment: bool,
    /// Plugins required for every pod, as `NAME` or `INDEX-NAME`, even if the validator is disabled (NRI 3.3).
    pub required_plugins: Vec<String>,
    /// Pod annotation that exempts it from required plugins; empty: no exemption.
    pub tolerate_missing_plugins_annotation: String,
}

/// All settings.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name of the runtime, sent to plugins.
    pub runtime_name: String,
    /// Version of the runtime, sent to plugins, for example `v1.2.3`.
    pub runtime_version: String,
    /// Time limit from accept to a complete RegisterPlugin.
    pub registration_timeout: Duration,
    /// Time limit of Configure and of every event.
    pub request_timeout: Duration,
    /// Time limit of Synchronize.
    pub sync_timeout: Duration,
    /// Whether a timeout fails a creation or update.
    pub fail_on_timeout: bool,
    /// Handling of a second plugin with the same name.
    pub duplicates: Duplicates,
    /// Maximum number of concurrent event calls of one plugin, at least 1.
    pub max_inflight: usize,
    /// Whether evictions requested by plugins are performed.
    pub allow_eviction: bool,
    /// The built-in validator.
    pub validator: DefaultValidator,
}
