//! The one list of what is mounted in a container: the kernel's file systems, image volumes, the pod's volumes and files,
//! masks and read-only paths. Its order is the security argument, so nobody else sorts or appends:
//!
//! ```text
//!   MountPlan::of ──► open, open_images ──► attach ──► Uncovered::cover ──► Unverified::verify
//! ```
//! Each step takes the one before by value, and a record refuses operations that mount once the covers are in it
//! ([`Record::seal_mounts`]).
//!
//! 1. /proc, /sys and /dev come first: they must be directories of the image, and whatever a link leads there is seen to
//!    land on them and refused.
//! 2. Image volumes, parents first, are copies of the root's own mount alone: they come before everything that they could
//!    hide, a volume of the pod below them for one.
//! 3. All other mounts, parents first.
//! 4. Masks, then read-only paths: no mount comes after them that could uncover what they hide.

use coracle_wire::{KernelDirectory, Op};

use super::mounts::{self, Planned};
use super::path;
use super::record::{Record, Strings};
use super::request::{ContainerPlan, Root};
use crate::Error;

/// Where a container has the kernel's own files, in the order of `Op::Verify`.
const KERNEL: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Most volumes that an image may declare: its configuration may be large, and each is a mount of the container.
const IMAGE_VOLUMES_MAX: usize = 256;

/// The place of a mount in the order: by declaration, then by number of path components; among equals the default ones come
/// first and then those asked for, as asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Position {
    /// /proc, /sys and /dev.
    Kernel,
    /// Declared by the image.
    ImageVolume(usize),
    /// Everything else that is attached.
    Mount(usize),
    /// Masked paths.
    Mask,
    /// Read-only paths.
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

/// Everything that is mounted in a container, in order.
pub(super) struct MountPlan {
    entries: Vec<Planned>,
    root_read_only: bool,
}

/// All mounts are made, nothing is covered.
#[must_use]
pub(super) struct Uncovered {
    covers: Vec<Planned>,
    verify: Unverified,
}

/// What must have come of a plan.
#[must_use]
pub(super) struct Unverified {
    kernel: [KernelDirectory; KERNEL.len()],
    root_read_only: bool,
    masked: Vec<String>,
    read_only: Vec<String>,
}

impl MountPlan {
    /// # Errors
    /// [`Error::Invalid`] for a mount, an image volume or a path that is refused.
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
        entries.sort_by_key(Position::of);
        Ok(Self { entries, root_read_only: plan.root.read_only })
    }

    /// Whether what is mounted below one of the mounts has to come out of the container.
    pub(super) fn is_shared(&self) -> bool {
        self.entries.iter().any(Planned::is_shared)
    }

    /// While the host's files are in view: takes what comes from there.
    pub(super) fn open(&mut self, record: &mut Record) -> Result<(), Error> {
        self.entries.iter_mut().try_for_each(|planned| planned.open(record))
    }

    /// While the layers are in view: puts images together that are mounted.
    pub(super) fn open_images(&mut self, record: &mut Record, root: &Root) -> Result<(), Error> {
        self.entries.iter_mut().try_for_each(|planned| planned.open_image(record, root))
    }

    /// Makes all mounts; `after` adds what has to be made in one before the next.
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
    /// Covers what is masked or read-only; the record takes no mount after that.
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

    /// Has the process look at what it got. After everything that is made in its root, and before it enters a user
    /// namespace.
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

/// Targets of the image volumes that are mounted. Where a mount of the pod, or one of its files, is on an image volume's path
/// or above it, that is what the container has there.
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

/// Paths to cover, clean.
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
