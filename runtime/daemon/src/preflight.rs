//! The conditions under which the daemon starts with a configuration that has no syntax errors. `coracle serve`, a reload,
//! `coracle config check` and `coracle check` use the same functions, so that a configuration that passes one of them passes
//! all.

use std::path::Path;
use std::process::{Command, Stdio};

use coracle_base::error::describe_io;
use coracle_sandbox::cgroup::Driver;

use crate::daemon::{cgroup_parent, network_options, program};
use coracle_config::{CgroupDriver, Config};

/// The reasons why the daemon would not start with this configuration on any host, one line each; empty if there are none.
pub(crate) fn mistakes(config: &Config) -> Vec<String> {
    let driver = match config.cgroup.driver {
        CgroupDriver::Systemd => Driver::Systemd,
        CgroupDriver::Auto | CgroupDriver::Cgroupfs => Driver::Cgroupfs,
    };
    let found = [
        network_options(config).err().map(|error| error.to_string()),
        config.streaming.check().err().map(|error| error.to_string()),
        cgroup_parent(&config.cgroup.parent, driver).err().map(|error| error.to_string()),
    ];
    found.into_iter().flatten().chain(config.runtime_handlers.mistakes()).collect()
}

/// Checks the certificate and the key of the streaming server, if they are configured; the error describes the mistake. A
/// worker reads the files, as for a connection.
pub(crate) fn streaming_certificate(config: &Config) -> Result<(), String> {
    match (&config.streaming.certificate, &config.streaming.key) {
        (Some(certificate), Some(key)) => {
            ask_worker(config, "check-tls", [certificate.as_path(), key.as_path()])
        }
        _ => Ok(()),
    }
}

/// Checks the registry configuration files, hosts.toml files and the certificates that they name; the error describes the
/// mistakes.
pub(crate) fn registries(config: &Config) -> Result<(), String> {
    let files = config.registry.for_workers();
    let docker_config = files.docker_config.as_deref();
    let paths = [files.config.as_path(), files.certs_dir.as_path()].into_iter().chain(docker_config);
    ask_worker(config, "check-registries", paths)
}

/// Runs a worker that checks files; the error is its output. Blocks until the worker ends, so the daemon must not call it in
/// the event loop.
fn ask_worker<'a>(
    config: &Config,
    question: &str,
    paths: impl IntoIterator<Item = &'a Path>,
) -> Result<(), String> {
    let asked = Command::new(program(config, "coracle-worker"))
        .arg(question)
        .args(paths)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .and_then(std::process::Child::wait_with_output);
    match asked {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => match String::from_utf8_lossy(&output.stdout).trim() {
            "" => Err(format!("not checked: the worker ended with {}", output.status)),
            said => Err(said.replace('\n', "; ")),
        },
        Err(error) => Err(format!("not checked: {}", describe_io(&error))),
    }
}
