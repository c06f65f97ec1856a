//! The single list of a container's mounts: the kernel's file systems, image volumes, the pod's volumes and files,
//! masked and read-only paths. Security depends on the order of the list, so only this module sorts or extends it:
//!
//! ```text
//!   MountPlan::of ──► open, open_images ──► attach ──► Uncovered::cover ──► Unverified::verify
//! ```
//! Each stage is a type that consumes the type of the stage before, and a record refuses mount operations after the
//! masked and read-only paths ([`Record::seal_mounts`]).
//!
//! 1. /proc, /sys and /dev come first: they must be directories of the image, and a later mount that a link leads onto
//!    them is detected and refused.
//! 2. Image volumes, parents first, are clones of the root's mount without submounts: they come before all mounts that
//!    they could hide, such as a volume of the pod below them.
//! 3. All other mounts, parents first.
//! 4. Masked paths, then read-only paths: no later mount can uncover them.

use coracle_wire::{KernelDirectory, Op};

use super::mounts::{self, Planned};
use super::path;
use super::record::{Record, Strings};
use super::request::{ContainerPlan, Root};
use crate::Error;
use crate::collect;

/// Mount points of the kernel's file systems, in the order of `Op::Verify`.
const KERNEL: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Maximum number of volumes that an image may declare: its configuration may be large, and each volume is a mount.
const IMAGE_VOLUMES_MAX: usize = 256;

/// Position of a mount in the order: first by variant, then by number of path components; with equal positions default
/// mounts come first, then the requested ones in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Position {
    /// A mount at /proc, /sys or /dev.
    Kernel,
    /// A volume declared by the image; with the number of its path components.
    ImageVolume(usize),
    /// Any other mount; with the number of its path components.
    Mount(usize),
    /// A masked path.
    Mask,
    /// A read-only path.
    ReadOnly,
}

impl Position {
    fn of(planned: &Planned) -> Self {
        let depth = path::depth(&planned.target);
        match planned.what {
            mounts::What::Mask { .. } => Self::Mask,
            mounts::What::ReadOnly => Self::ReadOnly,
            mounts::What::ImageVolume => Self::ImageVolume(depth),
            _ if KERNEL.contains(&planned.target.as_str()) => Self::Kernel,
            _ => Self::Mount(depth),
        }
    }

    fn is_cover(self) -> bool {
        matches!(self, Self::Mask | Self::ReadOnly)
    }
}

/// First stage: all mounts of a container, in order.
pub(super) struct MountPlan {
    entries: Vec<Planned>,
    root_read_only: bool,
}

/// Second stage: all mounts are created, and no path is masked or read-only yet.
#[must_use]
pub(super) struct Uncovered {
    covers: Vec<Planned>,
    verify: Unverified,
}

/// Third stage: the expected result of the plan, which must be verified.
#[must_use]
pub(super) struct Unverified {
    kernel: [KernelDirectory; KERNEL.len()],
    root_read_only: bool,
    masked: Vec<String>,
    read_only: Vec<String>,
}

impl MountPlan {
    /// Sorts the mounts of a container by depth.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an invalid mount, image volume or path.
    pub(super) fn of(plan: &ContainerPlan) -> Result<Self, Error> {
        let mut entries = mounts::of(plan)?;
        let volumes = image_volumes(&plan.image_volumes, &entries)?;
        entries.extend(volumes.into_iter().map(|target| Planned::asked(target, mounts::What::ImageVolume)));
        for target in covered("masked_paths", plan, &plan.masked_paths)? {
            entries.push(Planned::asked(target, mounts::What::Mask { slot: 0 }));
        }
        for target in covered("readonly_paths", plan, &plan.readonly_paths)? {
            entries.push(Planned::asked(target, mounts::What::ReadOnly));
        }
        collect::sort_by_key(&mut entries, Position::of);
        Ok(Self { entries, root_read_only: plan.root.read_only })
    }

    /// Whether one of the mounts has bidirectional propagation.
    pub(super) fn is_shared(&self) -> bool {
        self.entries.iter().any(Planned::is_shared)
    }

    /// Whether a file system or volume is mounted at `path` or below it.
    pub(super) fn has_mount_within(&self, path: &str) -> bool {
        let mut mounts = self.entries.iter().filter(|planned| !Position::of(planned).is_cover());
        mounts.any(|planned| path::is_within(&planned.target, path))
    }

    /// Adds the operations that open the sources on the host; at this point the host's files are accessible.
    pub(super) fn open(&mut self, record: &mut Record) -> Result<(), Error> {
        self.entries.iter_mut().try_for_each(|planned| planned.open(record))
    }

    /// Adds the operations that mount the images of image mounts; at this point the layers are accessible.
    pub(super) fn open_images(&mut self, record: &mut Record, root: &Root) -> Result<(), Error> {
        self.entries.iter_mut().try_for_each(|planned| planned.open_image(record, root))
    }

    /// Adds the operations that create all mounts; `after` adds operations after each mount.
    pub(super) fn attach(
        self,
        record: &mut Record,
        mut after: impl FnMut(&mut Record, &Planned) -> Result<(), Error>,
    ) -> Result<Uncovered, Error> {
        let verify = Unverified::of(&self);
        let mut covers = self.entries;
        let first_cover = covers.partition_point(|planned| !Position::of(planned).is_cover());
        for planned in covers.drain(..first_cover) {
            planned.attach(record)?;
            after(record, &planned)?;
        }
        Ok(Uncovered { covers, verify })
    }
}

impl Uncovered {
    /// Adds the operations for masked and read-only paths; the record accepts no mount after them.
    pub(super) fn cover(self, record: &mut Record) -> Result<Unverified, Error> {
        self.covers.iter().try_for_each(|planned| planned.attach(record))?;
        record.seal_mounts();
        Ok(self.verify)
    }
}

impl Unverified {
    fn of(plan: &MountPlan) -> Self {
        let targets = |is_wanted: fn(&Planned) -> bool| -> Vec<String> {
            let wanted = plan.entries.iter().filter(|planned| is_wanted(planned));
            wanted.map(|planned| planned.target.clone()).collect()
        };
        let masked = targets(|planned| matches!(planned.what, mounts::What::Mask { .. }));
        let kernel = KERNEL.map(|directory| {
            let at =
                |planned: &&Planned| planned.target == directory && Position::of(planned) == Position::Kernel;
            match plan.entries.iter().find(at) {
                _ if masked.iter().any(|masked| masked == directory) => KernelDirectory::Unchecked,
                None => KernelDirectory::Unchecked,
                Some(planned) if planned.is_fresh_for(directory) => KernelDirectory::Fresh,
                Some(_) => KernelDirectory::Volume,
            }
        });
        let read_only = targets(|planned| {
            let is_of_kernel = KERNEL.iter().any(|directory| path::is_within(&planned.target, directory));
            matches!(planned.what, mounts::What::ReadOnly)
                || planned.is_default && is_of_kernel && planned.is_read_only()
        });
        Self { kernel, root_read_only: plan.root_read_only, masked, read_only }
    }

    /// Adds the verification. It must be after all operations that create objects in the root, and before a user
    /// namespace is entered.
    pub(super) fn verify(self, record: &mut Record) -> Result<(), Error> {
        let masked = Strings::of("masked_paths", &self.masked)?;
        let read_only = Strings::of("readonly_paths", &self.read_only)?;
        record.push(&Op::Verify {
            kernel: self.kernel,
            root_read_only: self.root_read_only,
            masked: masked.block(),
            read_only: read_only.block(),
        })
    }
}

/// Targets of the image volumes to be mounted. A mount or file of the pod on an image volume's path or above it
/// replaces the image volume.
fn image_volumes(declared: &[String], mounts: &[Planned]) -> Result<Vec<String>, Error> {
    let mut targets: Vec<String> = Vec::new();
    if declared.len() > IMAGE_VOLUMES_MAX {
        let why = format!("the image declares {}, more than {IMAGE_VOLUMES_MAX}", declared.len());
        return Err(Error::invalid("image volumes", why));
    }
    for volume in declared {
        let field = format!("image volume {volume}");
        let target = path::container(&field, volume)?;
        let kernels = KERNEL.iter().find(|directory| path::is_within(&target, directory));
        let is_mounted = |planned: &Planned| {
            path::is_within(&target, &planned.target) && (kernels.is_none() || !planned.is_default)
        };
        if target == "/" || targets.contains(&target) || mounts.iter().any(is_mounted) {
            continue;
        }
        if let Some(directory) = kernels {
            let why = format!(
                "the image declares a volume in {directory}, which must stay the kernel's own; mount a volume there, or change the image"
            );
            return Err(Error::invalid(field, why));
        }
        targets.push(target);
    }
    Ok(targets)
}

/// Validates and cleans masked or read-only paths; `field` is the name for errors.
fn covered(field: &str, plan: &ContainerPlan, paths: &[String]) -> Result<Vec<String>, Error> {
    if plan.privileged {
        return Ok(Vec::new());
    }
    paths
        .iter()
        .map(|one| match path::container(field, one)? {
            root if root == "/" => Err(Error::invalid(field, "would cover the root of the container")),
            clean => Ok(clean),
        })
        .collect()
}
