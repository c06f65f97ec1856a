//! The volumes of a container: host directories, images (KEP-4639), and volumes that the container's image
//! declares. A volume that cannot be mounted is refused here, at create, as far as this can be checked in
//! advance.

use std::path::{Path, PathBuf};

use coracle_base::error::{Error, Kind, failed};
use coracle_job::{Job, Outcome};
use coracle_sandbox::hostpath::Mounts;
use coracle_sandbox::{Propagation, plan};

use super::resolved::Resolved;
use crate::record::ImageVolumeUse;
use crate::spec::{self, ContainerSpec, MountPropagation};
use crate::{Node, Pod};

impl Pod {
    /// All requested mounts in their order. `sources` are the resolved host paths; `empty` is a directory of
    /// the container that stays empty.
    pub(crate) fn mounts(
        &self,
        spec: &ContainerSpec,
        (images, sources): (&[ImageVolumeUse], &[Option<PathBuf>]),
        empty: &Path,
    ) -> Result<Vec<plan::Mount>, Error> {
        let mut images = images.iter();
        let planned = |(mount, source): (&spec::Mount, &Option<PathBuf>)| match (&mount.image, source) {
            (None, source) => self.mount(mount, source.as_deref()),
            (Some(volume), _) => {
                let layers = images.next().into_iter().flat_map(|image| image.layers.iter().rev());
                let source = plan::Source::Image {
                    lowers: self.lowers(layers.map(String::as_str))?,
                    sub_path: volume.sub_path.clone(),
                    empty: empty.to_owned(),
                };
                Ok(plain(mount, source))
            }
        };
        spec.mounts.iter().zip(sources).map(planned).collect()
    }

    fn mount(&self, mount: &spec::Mount, real: Option<&Path>) -> Result<plan::Mount, Error> {
        let maps_owners = maps_owners(self, mount)?;
        let source = PathBuf::from(&mount.host_path);
        let propagation = match mount.propagation {
            MountPropagation::Private => Propagation::Private,
            MountPropagation::HostToContainer => Propagation::Slave,
            MountPropagation::Bidirectional => Propagation::Shared,
        };
        check_propagation(real.unwrap_or(&source), propagation)?;
        Ok(plan::Mount {
            recursive_read_only: mount.recursive_read_only,
            propagation,
            maps_owners,
            ..plain(mount, plan::Source::Host(source))
        })
    }
}

impl Node {
    /// Sets the SELinux label of the container recursively on volumes that request it.
    pub(crate) async fn relabel(&self, resolved: &Resolved) -> Result<(), Error> {
        let Some(label) = resolved.plan.root.label.clone() else { return Ok(()) };
        let mounts = &resolved.record.spec.mounts;
        let asked = mounts.iter().filter(|mount| mount.selinux_relabel && mount.image.is_none());
        let paths: Vec<_> = asked.map(|mount| PathBuf::from(&mount.host_path)).collect();
        if paths.is_empty() {
            return Ok(());
        }
        let outcome = self.host.workers.run(Job::Relabel { paths, label }).await;
        match outcome.map_err(|error| Error::from(error).context("selinux_relabel"))? {
            Outcome::Relabelled => Ok(()),
            other => Err(Error::new(Kind::Internal, format!("unexpected answer of the worker: {other:?}"))),
        }
    }

    /// The images of the container's image volumes.
    pub(crate) fn image_volumes(&self, spec: &ContainerSpec) -> Result<Vec<ImageVolumeUse>, Error> {
        let images = &self.images;
        let find = |volume: &spec::ImageVolume| {
            let image = images.record(&images.resolve(&volume.image)?.id)?;
            if image.layers.is_empty() || !images.has_path(&image, &volume.sub_path)? {
                let text = format!("image {} has no {:?}", volume.image, volume.sub_path);
                return Err(Error::new(Kind::InvalidArgument, text));
            }
            let layers = image.layers.into_iter().map(|layer| layer.name).collect();
            Ok(ImageVolumeUse { id: image.id, layers })
        };
        let wanted = spec.mounts.iter().filter_map(|mount| Some((mount, mount.image.as_ref()?)));
        let found = wanted.map(|(mount, volume)| {
            find(volume).map_err(|error| {
                error.context(format!("ImageVolumeMountFailed: config.mounts[{}]", mount.container_path))
            })
        });
        found.collect()
    }

    /// The source of a bind mount; a missing path is not created.
    ///
    /// # Errors
    /// An error of the path's file system; a requested propagation that the path's mount does not have.
    pub async fn bind_source(&self, path: &str, propagation: Propagation) -> Result<plan::Source, Error> {
        let source = PathBuf::from(path);
        if !source.is_absolute() {
            let text = format!("mount source {path:?}: is not absolute");
            return Err(Error::new(Kind::InvalidArgument, text));
        }
        let real = self.host.paths.source(&source, false, &mut Mounts::default()).await?;
        check_propagation(&real, propagation)?;
        Ok(plan::Source::Host(source))
    }
}

/// Checks that the host's mount has the requested propagation; `real` is the source without symbolic links.
fn check_propagation(real: &Path, propagation: Propagation) -> Result<(), Error> {
    if propagation != Propagation::Private {
        let path = Path::new("/proc/self/mountinfo");
        let mounts = std::fs::read_to_string(path).map_err(|error| failed("read", path, &error))?;
        plan::check_propagation(&mounts, real, propagation)?;
    }
    Ok(())
}

/// Converts a mount's options, with `source` as its source.
fn plain(mount: &spec::Mount, source: plan::Source) -> plan::Mount {
    let has = |option: &str| mount.options.iter().any(|given| given == option);
    plan::Mount {
        source,
        target: mount.container_path.clone(),
        read_only: mount.readonly,
        recursive_read_only: false,
        propagation: Propagation::Private,
        no_exec: has("noexec"),
        no_suid: has("nosuid"),
        no_dev: has("nodev"),
        maps_owners: false,
    }
}

/// Whether the mount is idmapped. Fails if the requested mappings differ from those of the pod's user
/// namespace, because no others are supported.
fn maps_owners(pod: &Pod, mount: &spec::Mount) -> Result<bool, Error> {
    if mount.uid_mappings.is_empty() && mount.gid_mappings.is_empty() {
        return Ok(false);
    }
    let record = pod.record();
    let is_the_pods = record.spec.user_namespace.as_ref().is_some_and(|namespace| {
        (&namespace.uids, &namespace.gids) == (&mount.uid_mappings, &mount.gid_mappings)
    });
    match is_the_pods {
        true => Ok(true),
        false => Err(Error::new(
            Kind::InvalidArgument,
            format!(
                "config.mounts[{}].uidMappings: are not those of the pod sandbox's user namespace",
                mount.container_path
            ),
        )),
    }
}
