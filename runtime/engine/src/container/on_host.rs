//! Accesses all host paths of a container's request, and the image's files of users, before any other step: a file system may
//! not respond, or a file may have to be repaired, and only this call may wait for it (see `hostpath`).

use std::path::{Path, PathBuf};

use coracle_base::error::{Error, Kind};
use coracle_job::{ContainerEdits, UsersFiles};
use coracle_sandbox::hostpath::Mounts;

use super::devices::{self, GivenDevice};
use crate::spec::{self, ContainerSpec};
use crate::{Container, Node};

/// Maximum size of a seccomp profile in bytes. The largest profiles in use, lists of all system calls with
/// conditions, have some 60 KiB.
const PROFILE_BYTES_MAX: u64 = 1 << 20;

/// The host paths of one request, including those of the request's CDI devices.
pub(crate) struct OnHost {
    /// Resolved source path of each mount, in the order of the request; `None` for image volumes.
    pub(crate) sources: Vec<Option<PathBuf>>,
    /// Requested devices and those of CDI. A requested directory is replaced by all devices in it.
    pub(crate) devices: Vec<GivenDevice>,
    /// Content of the Localhost seccomp profile; `None` if none is requested.
    pub(crate) profile: Option<Vec<u8>>,
    /// /etc/passwd and /etc/group of the image.
    pub(crate) users: UsersFiles,
}

impl Node {
    /// Accesses all host paths. A missing source of a mount is created as a directory, as in other runtimes
    /// (CRI 3.11).
    pub(crate) async fn look_at_host(
        &self,
        asked: &ContainerSpec,
        edits: &ContainerEdits,
    ) -> Result<OnHost, Error> {
        let spec = devices::edited(asked, edits);
        let (paths, mut mounts) = (&self.host.paths, Mounts::default());
        let profile = self.profile(&spec.security).await?;
        let devices = self.device_nodes(&asked.devices, edits, &mut mounts).await?;
        let mut sources = Vec::new();
        for mount in &spec.mounts {
            if mount.image.is_some() {
                sources.push(None);
                continue;
            }
            let source = paths.source(Path::new(&mount.host_path), true, &mut mounts).await;
            let title = || format!("mount source for {}", mount.container_path);
            sources.push(Some(source.map_err(|error| error.context(title()))?));
        }
        let image = self.images.resolve(&spec.image)?.id;
        Ok(OnHost { sources, devices, profile, users: self.images.users_files(&image).await? })
    }

    async fn profile(&self, security: &spec::Security) -> Result<Option<Vec<u8>>, Error> {
        let path = security.localhost_seccomp.as_str();
        if path.is_empty() {
            return Ok(None);
        }
        let read = self.host.paths.read(Path::new(path), PROFILE_BYTES_MAX).await;
        read.map(Some).map_err(|error| {
            let kind = match error.kind() {
                kind @ (Kind::DeadlineExceeded | Kind::ResourceExhausted) => kind,
                _ => Kind::InvalidArgument,
            };
            error.context(format!("config.linux.security_context.seccomp: {path}")).with_kind(kind)
        })
    }
}

impl Container {
    /// Checks that the file systems of a container's mount sources respond, because the container's process
    /// opens the sources and could block. Other errors are reported by that process.
    pub(crate) async fn require_answers(&self) -> Result<(), Error> {
        let sources: Vec<_> = {
            let record = self.record();
            let of_host = record.spec.mounts.iter().filter(|mount| mount.image.is_none());
            of_host.map(|mount| (mount.host_path.clone(), mount.container_path.clone())).collect()
        };
        let mut mounts = Mounts::default();
        for (source, target) in sources {
            match self.node().host.paths.source(Path::new(&source), false, &mut mounts).await {
                Err(error) if matches!(error.kind(), Kind::DeadlineExceeded | Kind::ResourceExhausted) => {
                    return Err(error.context(format!("mount source for {target}")));
                }
                Ok(_) | Err(_) => {}
            }
        }
        Ok(())
    }
}
