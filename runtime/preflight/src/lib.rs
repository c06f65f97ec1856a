//! The conditions under which the daemon starts with a configuration that has no syntax errors, judged in one place: the
//! daemon, its reloads, `coracle config check` and `coracle check` use the same functions, so that a configuration that passes
//! one of them passes all. They need to know where the programs are and who holds the daemon's locks ([`lock`]). The text about
//! the version is here because both programs print it.
#![forbid(unsafe_code)]

pub mod lock;
mod version;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use coracle_base::error::{Error, Kind, describe_io};
use coracle_config::{CgroupDriver, Config, DefaultNetwork};
use coracle_sandbox::cgroup::{Driver, slice};
pub use version::version;

/// Name of the daemon's program.
pub const DAEMON: &str = "coracled";

/// The reasons why the daemon would not start with this configuration on any host, one line each; empty if there are none.
pub fn mistakes(config: &Config) -> Vec<String> {
    let driver = match config.cgroup.driver {
        CgroupDriver::Systemd => Driver::Systemd,
        CgroupDriver::Auto | CgroupDriver::Cgroupfs => Driver::Cgroupfs,
    };
    let found = [
        network_options(config).err().map(|error| error.to_string()),
        config.streaming.check().err().map(|error| error.to_string()),
        cgroup_parent(&config.cgroup.parent, driver).err().map(|error| error.to_string()),
        config.mirror.check().err(),
    ];
    found.into_iter().flatten().chain(config.runtime_handlers.mistakes()).collect()
}

/// Checks the certificate and the key of the streaming server, if they are configured. A worker reads the files, as for a
/// connection.
///
/// # Errors
/// One line that describes the mistake.
pub fn streaming_certificate(config: &Config) -> Result<(), String> {
    match (&config.streaming.certificate, &config.streaming.key) {
        (Some(certificate), Some(key)) => {
            checked(config, "check-tls", [certificate.as_path(), key.as_path()])
        }
        _ => Ok(()),
    }
}

/// Checks the key with which the nodes of a site pass images to each other, if one is configured.
///
/// # Errors
/// One line that describes the mistake.
pub fn site_key(config: &Config) -> Result<(), String> {
    match &config.mirror.key_file {
        Some(path) => checked(config, "check-site-key", [path.as_path()]),
        None => Ok(()),
    }
}

/// Checks the policy of signatures with its keys, and the directory of verifiers, as far as they are configured.
///
/// # Errors
/// One line that describes the mistake.
pub fn image_policy(config: &Config) -> Result<(), String> {
    let policy = &config.image.policy;
    for (question, path) in
        [("check-image-policy", &policy.file), ("check-image-verifiers", &policy.verifiers)]
    {
        path.as_ref().map_or(Ok(()), |path| checked(config, question, [path.as_path()]))?;
    }
    Ok(())
}

/// Checks the registry configuration files, hosts.toml files and the certificates that they name.
///
/// # Errors
/// One line that describes the mistakes.
pub fn registries(config: &Config) -> Result<(), String> {
    let files = config.registries();
    let docker_config = files.docker_config.as_deref();
    let paths = [files.config.as_path(), files.certs_dir.as_path()].into_iter().chain(docker_config);
    checked(config, "check-registries", paths)
}

/// Runs a worker that checks files; the error is its output.
fn checked<'a>(
    config: &Config,
    question: &str,
    paths: impl IntoIterator<Item = &'a Path>,
) -> Result<(), String> {
    let mut worker = Command::new(program(config, coracle_job::WORKER));
    worker.arg(question).args(paths);
    answer_of(worker, "not checked").map(drop)
}

/// Runs a worker that answers in text; returns its output. Blocks until the worker ends, so the daemon must not call it in the
/// event loop.
///
/// # Errors
/// The output of a worker that failed; the reason after `unanswered` if it has none or was not started.
pub fn answer_of(mut worker: Command, unanswered: &str) -> Result<String, String> {
    let ended = worker
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .and_then(std::process::Child::wait_with_output);
    let output = ended.map_err(|error| format!("{unanswered}: {}", describe_io(&error)))?;
    let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    match (output.status.success(), said.is_empty()) {
        (true, _) => Ok(said),
        (false, true) => Err(format!("{unanswered}: the worker ended with {}", output.status)),
        (false, false) => Err(said.replace('\n', "; ")),
    }
}

/// Path of one of coracle's programs: in the configured directory, otherwise in that of this program.
pub fn program(config: &Config, name: &str) -> PathBuf {
    match &config.program_dir {
        Some(directory) => directory.join(name),
        None => beside(name),
    }
}

/// Path of a program in the directory of the running program.
pub fn beside(name: &str) -> PathBuf {
    // After an upgrade in place the link is `…/coracled (deleted)`; its directory is still correct.
    let own = std::fs::read_link("/proc/self/exe").unwrap_or_else(|_| "/usr/bin/coracle".into());
    own.with_file_name(name)
}

/// The options of the network crate. An invalid default network is an error already at the start, not at the first pod.
///
/// # Errors
/// `InvalidArgument`, naming what is wrong with the default network.
pub fn network_options(config: &Config) -> Result<coracle_network::Options, Error> {
    let default = match config.network.default {
        DefaultNetwork::None => None,
        DefaultNetwork::Builtin => {
            let default = coracle_network::DefaultNetwork {
                bridge: config.network.bridge.clone(),
                subnets: config.network.subnets.clone(),
                checks_neighbours: config.network.check_neighbours,
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

/// Directory that exists if systemd is the init system (sd_booted(3)).
const SYSTEMD: &str = "/run/systemd/system";
/// The system bus, which workers use.
const SYSTEM_BUS: &str = "/run/dbus/system_bus_socket";

/// Whether systemd is the init system and its D-Bus interface, which creates scopes, is available.
pub fn systemd_runs_host() -> bool {
    [SYSTEMD, SYSTEM_BUS].into_iter().all(|path| Path::new(path).exists())
}

/// The reason why the daemon does not start with this cgroup driver on this host.
pub fn refused_driver(wanted: CgroupDriver) -> Option<String> {
    let is_refused = matches!(wanted, CgroupDriver::Systemd) && !systemd_runs_host();
    is_refused
        .then(|| format!("cgroup.driver: systemd does not run this host: no {SYSTEMD}, or no {SYSTEM_BUS}"))
}

/// The cgroup parent of pods whose request has none.
///
/// # Errors
/// The configured parent is no slice, although systemd manages cgroups.
pub fn cgroup_parent(configured: &str, driver: Driver) -> Result<String, Error> {
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
