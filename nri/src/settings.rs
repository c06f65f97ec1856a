//! What an operator can choose. Times are those of nri.md's table of defaults.

use std::time::Duration;

/// What a second live plugin of the same index and name does (NRI 2.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duplicates {
    /// It takes the place of the first once it has joined.
    Replace,
    /// Both stay.
    Allow,
    /// It is refused.
    Reject,
}

/// The built-in validator (NRI 4.7).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DefaultValidator {
    /// Whether it is there at all.
    pub enable: bool,
    /// No OCI hooks.
    pub reject_oci_hook_adjustment: bool,
    /// No other seccomp policy in place of RuntimeDefault.
    pub reject_runtime_default_seccomp_adjustment: bool,
    /// No seccomp policy in place of none.
    pub reject_unconfined_seccomp_adjustment: bool,
    /// No other seccomp policy in place of a Localhost profile.
    pub reject_custom_seccomp_adjustment: bool,
    /// No namespaces.
    pub reject_namespace_adjustment: bool,
    /// No sysctls, set or removed.
    pub reject_sysctl_adjustment: bool,
    /// `NAME` or `INDEX-NAME` each. These are required of every pod, whether the validator is enabled or not (3.3).
    pub required_plugins: Vec<String>,
    /// A pod's annotation that lets it go without them; empty: there is none.
    pub tolerate_missing_plugins_annotation: String,
}

/// Everything.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Told to plugins.
    pub runtime_name: String,
    /// Told to plugins, as `v1.2.3`.
    pub runtime_version: String,
    /// From accept to a complete RegisterPlugin.
    pub registration_timeout: Duration,
    /// Of Configure and of every event.
    pub request_timeout: Duration,
    /// Of all of Synchronize.
    pub sync_timeout: Duration,
    /// Whether a timeout in a creating or updating event fails it.
    pub fail_on_timeout: bool,
    /// What a second plugin of one name does.
    pub duplicates: Duplicates,
    /// Event calls under way at one plugin, at least 1.
    pub max_inflight: usize,
    /// Whether evictions that plugins ask for are done.
    pub allow_eviction: bool,
    /// The built-in validator.
    pub validator: DefaultValidator,
}
