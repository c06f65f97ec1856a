//! Looks at a path of the node in the daemon's place, since nobody can say whether the path answers.

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use coracle_job::{Failure, FailureKind, HostAnswer, HostDevice, HostQuestion};
use coracle_sandbox::hostpath::{self, HostFile};
use coracle_sandbox::{Error, device, plan, umask};
use nix::errno::Errno;
use rustix::fs::{AtFlags, StatxFlags, statx};

use crate::failure::failure;

/// Answers, whenever the path does.
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
        HostQuestion::Log { path } => open_log(path).map(|()| HostAnswer::Log),
    }
}

fn source(path: &Path, is_made: bool) -> Result<PathBuf, Failure> {
    let place = match HostFile::open(path) {
        Err(_) if is_made => {
            make_directory(path)?;
            HostFile::open(path)
        }
        opened => opened,
    };
    let place = place.map_err(failed)?;
    // Asked, and not answered from a cache: what is mounted must work when the container's process gets there.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
    statx(&place, c"", flags, StatxFlags::BASIC_STATS)
        .map_err(|errno| crate::failure::io_failure("look at", path, &errno.into()))?;
    place.real_path().map_err(failed)
}

fn open_log(path: &Path) -> Result<(), Failure> {
    let (directory, name) = hostpath::split(path)
        .ok_or_else(|| failure(FailureKind::Invalid, format!("log {}: has no name", path.display())))?;
    let place = match HostFile::open(directory) {
        Err(error) if error.errno() == Some(Errno::ENOENT) => {
            make_directory(directory)?;
            HostFile::open(directory)
        }
        opened => opened,
    };
    let log = place.and_then(|place| place.open_log(name, path)).map_err(failed)?;
    hostpath::send_file(io::stdin().as_fd(), log.as_fd()).map_err(failed)
}

/// For everybody to read, as other runtimes make them.
fn make_directory(path: &Path) -> Result<(), Failure> {
    let _mask = umask::Public::begin();
    std::fs::create_dir_all(path).map_err(|error| crate::failure::io_failure("make directory", path, &error))
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
    failure(kind, error.to_string())
}
