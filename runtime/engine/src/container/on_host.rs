//! What a container's request names on the node, looked at before anything else is decided: some of it may never answer, and
//! nothing may wait for that but the call itself (see `hostpath`).

use std::path::{Path, PathBuf};

use coracle_base::error::{Error, Kind};
use coracle_job::ContainerEdits;
use coracle_sandbox::hostpath::Mounts;
use coracle_sandbox::plan;

use super::devices;
use crate::spec::{self, ContainerSpec};
use crate::{Container, Pods};

/// Longest seccomp profile: the largest in use, a list of all calls with conditions, is some 60 KiB.
const PROFILE_BYTES_MAX: u64 = 1 << 20;

/// Everything of one request, those of its devices included.
pub(crate) struct OnHost {
    /// Where the source of each mount is, links followed; `None` for those of images.
    pub(crate) sources: Vec<Option<PathBuf>>,
    /// Devices with the access asked for each; a directory stands for every device in it.
    pub(crate) devices: Vec<(plan::DeviceNode, String)>,
    /// The Localhost profile.
    pub(crate) profile: Option<Vec<u8>>,
}

impl Pods {
    /// Looks at all of it. A missing source of a mount is made, a directory, as the other runtimes do (CRI 3.11).
    pub(crate) async fn look_at_host(
        &self,
        asked: &ContainerSpec,
        edits: &ContainerEdits,
    ) -> Result<OnHost, Error> {
        let spec = devices::edited(asked, edits);
        let (paths, mut mounts) = (&self.node.host.paths, Mounts::default());
        let profile = self.profile(&spec.security).await?;
        let mut devices = Vec::new();
        for device in &spec.devices {
            let path = Path::new(&device.host_path);
            let found = paths.devices(path, &device.container_path, &mut mounts).await;
            let found = found.map_err(|error| error.context("config.devices"))?;
            devices.extend(found.into_iter().map(|node| (node, device.permissions.clone())));
        }
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
        Ok(OnHost { sources, devices, profile })
    }

    async fn profile(&self, security: &spec::Security) -> Result<Option<Vec<u8>>, Error> {
        let path = security.localhost_seccomp.as_str();
        if path.is_empty() {
            return Ok(None);
        }
        let read = self.node.host.paths.read(Path::new(path), PROFILE_BYTES_MAX).await;
        read.map(Some).map_err(|error| {
            let kind = match error.kind() {
                kind @ (Kind::DeadlineExceeded | Kind::ResourceExhausted) => kind,
                _ => Kind::InvalidArgument,
            };
            error.context(format!("config.linux.security_context.seccomp: {path}")).with_kind(kind)
        })
    }

    /// Whether the sources of a container's mounts still answer: its process, which opens them, could hang. Anything else
    /// that is wrong with them it finds out itself.
    pub(crate) async fn require_answers(&self, container: &Container) -> Result<(), Error> {
        let sources: Vec<_> = {
            let record = container.record();
            let of_host = record.spec.mounts.iter().filter(|mount| mount.image.is_none());
            of_host.map(|mount| (mount.host_path.clone(), mount.container_path.clone())).collect()
        };
        let mut mounts = Mounts::default();
        for (source, target) in sources {
            match self.node.host.paths.source(Path::new(&source), false, &mut mounts).await {
                Err(error) if matches!(error.kind(), Kind::DeadlineExceeded | Kind::ResourceExhausted) => {
                    return Err(error.context(format!("mount source for {target}")));
                }
                Ok(_) | Err(_) => {}
            }
        }
        Ok(())
    }
}
