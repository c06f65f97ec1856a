//! The volumes of a container: directories of the node, images (KEP-4639), and what its own image declares. Whatever
//! cannot be mounted is refused here, at create, as far as that can be known before.

use std::path::{Path, PathBuf};

use coracle_base::error::{Error, Kind};
use coracle_job::{Job, Outcome};
use coracle_sandbox::hostpath::Mounts;
use coracle_sandbox::{Propagation, plan};

use super::resolved::Resolved;
use crate::record::ImageVolumeUse;
use crate::spec::{self, ContainerSpec, MountPropagation};
use crate::{Pod, Pods};
use coracle_base::error::failed;

impl Pods {
    /// All mounts that were asked for, in their order; `sources` are where those of the host really are. `empty`: a directory
    /// of the container's that stays empty.
    pub(crate) fn mounts(
        &self,
        pod: &Pod,
        spec: &ContainerSpec,
        (images, sources): (&[ImageVolumeUse], &[Option<PathBuf>]),
        empty: &Path,
    ) -> Result<Vec<plan::Mount>, Error> {
        let mut images = images.iter();
        let planned = |(mount, source): (&spec::Mount, &Option<PathBuf>)| match (&mount.image, source) {
            (None, source) => self.mount(pod, mount, source.as_deref()),
            (Some(volume), _) => {
                let layers = images.next().into_iter().flat_map(|image| image.layers.iter().rev());
                let source = plan::Source::Image {
                    lowers: self.node.images.mount_names(layers.map(String::as_str))?,
                    sub_path: volume.sub_path.clone(),
                    empty: empty.to_owned(),
                };
                Ok(plain(mount, source))
            }
        };
        spec.mounts.iter().zip(sources).map(planned).collect()
    }

    /// Gives the volumes that ask for it the SELinux label of the container's files, with all that is in them.
    pub(crate) async fn relabel(&self, resolved: &Resolved) -> Result<(), Error> {
        let Some(label) = resolved.plan.root.label.clone() else { return Ok(()) };
        let mounts = &resolved.record.spec.mounts;
        let asked = mounts.iter().filter(|mount| mount.selinux_relabel && mount.image.is_none());
        let paths: Vec<_> = asked.map(|mount| PathBuf::from(&mount.host_path)).collect();
        if paths.is_empty() {
            return Ok(());
        }
        let outcome = self.node.host.workers.run(Job::Relabel { paths, label }, |_, _| ()).await;
        match outcome.map_err(|error| Error::from(error).context("selinux_relabel"))? {
            Outcome::Relabelled => Ok(()),
            other => Err(Error::new(Kind::Internal, format!("the worker did another job: {other:?}"))),
        }
    }

    /// The images of the container's image volumes.
    pub(crate) fn image_volumes(&self, spec: &ContainerSpec) -> Result<Vec<ImageVolumeUse>, Error> {
        let images = &self.node.images;
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

    fn mount(&self, pod: &Pod, mount: &spec::Mount, real: Option<&Path>) -> Result<plan::Mount, Error> {
        let maps_owners = maps_owners(pod, mount)?;
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

impl Pods {
    /// The source of a mount that is bound without being made.
    ///
    /// # Errors
    /// What the path's file system says; a propagation that the path's mount does not have.
    pub async fn bind_source(&self, path: &str, propagation: Propagation) -> Result<plan::Source, Error> {
        let source = PathBuf::from(path);
        if !source.is_absolute() {
            let text = format!("mount source {path:?}: is not absolute");
            return Err(Error::new(Kind::InvalidArgument, text));
        }
        let real = self.node.host.paths.source(&source, false, &mut Mounts::default()).await?;
        check_propagation(&real, propagation)?;
        Ok(plan::Source::Host(source))
    }
}

/// `real`: the source without links.
fn check_propagation(real: &Path, propagation: Propagation) -> Result<(), Error> {
    if propagation != Propagation::Private {
        let path = Path::new("/proc/self/mountinfo");
        let mounts = std::fs::read_to_string(path).map_err(|error| failed("read", path, &error))?;
        plan::check_propagation(&mounts, real, propagation)?;
    }
    Ok(())
}

/// The mount with what does not depend on its source.
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

/// Whether the mount's owners are mapped. It can only be as the pod's user namespace does: that is what the kernel takes.
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
