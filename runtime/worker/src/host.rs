//! Accesses a host path for the daemon, because the path's file system may not respond.

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use coracle_job::{Failure, FailureKind, HostAnswer, HostDevice, HostQuestion};
use coracle_sandbox::hostpath::{self, HostFile};
use coracle_sandbox::{Error, device, plan, umask};
use nix::errno::Errno;
use rustix::fs::{AtFlags, StatxFlags, statx};

/// Executes the operation; may block as long as the file system does not respond.
pub(crate) fn look(question: &HostQuestion) -> Result<HostAnswer, Failure> {
    match question {
        HostQuestion::Source { path, is_made } => source(path, *is_made).map(HostAnswer::Source),
        HostQuestion::Devices { path, container } => {
            let nodes = device::resolve(path, container).map_err(failed)?;
            Ok(HostAnswer::Devices(nodes.into_iter().map(device).collect()))
        }
        HostQuestion::File { path, bytes_max } => {
            hostpath::read(path, *bytes_max).map(HostAnswer::File).map_err(failed)
        }
        HostQuestion::Log { path, pod_directory } => open_log(path, pod_directory).map(|()| HostAnswer::Log),
    }
}

fn source(path: &Path, is_made: bool) -> Result<PathBuf, Failure> {
    let opened = match HostFile::open(path) {
        Err(_) if is_made => {
            make_directory(path)?;
            HostFile::open(path)
        }
        opened => opened,
    };
    let opened = opened.map_err(failed)?;
    // Not from the cache, so that the container's process can use the mount.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
    statx(&opened, c"", flags, StatxFlags::BASIC_STATS)
        .map_err(|errno| crate::failure::io_failure("stat", path, &errno.into()))?;
    opened.real_path().map_err(failed)
}

fn open_log(path: &Path, pod_directory: &Path) -> Result<(), Failure> {
    let (above, beneath, name) = hostpath::split(path, pod_directory).ok_or_else(|| {
        let text = format!("log {}: is not below {}, or has \"..\"", path.display(), pod_directory.display());
        Failure::new(FailureKind::Invalid, text)
    })?;
    let opened = match HostFile::open(above) {
        Err(error) if error.errno() == Some(Errno::ENOENT) => {
            make_directory(above)?;
            HostFile::open(above)
        }
        opened => opened,
    };
    let directory = opened.and_then(|above| above.make_beneath(beneath, path));
    let log = directory.and_then(|directory| directory.open_log(name, path)).map_err(failed)?;
    hostpath::send_file(io::stdin().as_fd(), log.as_fd()).map_err(failed)
}

/// Creates a directory with the mode that other runtimes use.
fn make_directory(path: &Path) -> Result<(), Failure> {
    let _mask = umask::Public::begin();
    coracle_sandbox::disk::create_dir_all(path)
        .map_err(|error| crate::failure::io_failure("create directory", path, &error))
}

fn device(node: plan::DeviceNode) -> HostDevice {
    let plan::DeviceNode { path, kind, major, minor, mode, .. } = node;
    HostDevice { path, is_block: kind == plan::DeviceKind::Block, major, minor, mode }
}

fn failed(error: Error) -> Failure {
    let kind = match &error {
        Error::Invalid { .. } => FailureKind::Invalid,
        Error::Kernel { errno: Errno::ENOENT, .. } => FailureKind::NotFound,
        Error::Kernel { errno: Errno::ENOSPC | Errno::EDQUOT, .. } => FailureKind::NoSpace,
        Error::Kernel { .. } | Error::Missing { .. } => FailureKind::Internal,
    };
    Failure::new(kind, error.to_string())
}
