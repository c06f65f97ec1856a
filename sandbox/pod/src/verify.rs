//! Verifies a container's mounts before it runs (`Op::Verify`). Every path is resolved again inside the root, as the
//! container will resolve it, and the result is examined through its descriptor. The input is only the expected result,
//! not the plan, so that an error in the plan or in an earlier operation, a link of an image, or a volume that changes
//! meanwhile makes the start fail instead of starting a container without its masks.
//!
//! Mounts are identified by their ids (STATX_MNT_ID, Linux 5.8). Nothing is read from /proc, because it is one of the
//! mounts to be verified.

use core::ffi::CStr;

use coracle_sys::{Errno, FdRef, fs};
use coracle_wire::{Block, KernelDirectory, Mismatch};

use crate::mounts::{PROC_SUPER_MAGIC, existing};
use crate::root::{KERNEL, Root};

/// File system type of sysfs (statfs(2)).
const SYSFS_MAGIC: u64 = 0x6265_6572;
/// File system type of tmpfs (statfs(2)).
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// Flag of a read-only mount or file system (statfs(2), f_flags).
const ST_RDONLY: u64 = 1;
/// Device number of /dev/null: major, minor.
const NULL: (u32, u32) = (1, 3);
/// Maximum length of a path in the kernel, with its NUL.
const PATH_BYTES_MAX: usize = 4096;

/// The fields of `Op::Verify`.
pub(crate) struct Wanted<'a> {
    /// The expected mounts at [`KERNEL`].
    pub(crate) kernel: [KernelDirectory; KERNEL.len()],
    /// Whether the root mount must be read-only.
    pub(crate) root_read_only: bool,
    /// Container paths that must be masked.
    pub(crate) masked: Block<'a>,
    /// Container paths that must be read-only.
    pub(crate) read_only: Block<'a>,
}

/// Verifies all of `wanted`.
///
/// # Errors
/// The first [`Mismatch`], encoded as a number.
// Not inlined: its path buffer would be part of the walker's frame, and stay resident in the monitor.
#[inline(never)]
pub(crate) fn verify(root: &Root, wanted: &Wanted<'_>) -> Result<(), Errno> {
    let (masked, read_only) = (wanted.masked, wanted.read_only);
    if masked.iter().count() != masked.count as usize || read_only.iter().count() != read_only.count as usize
    {
        return Err(Errno(0));
    }
    let mut item = 0;
    for (index, expected) in wanted.kernel.into_iter().enumerate() {
        check(&mut item, || is_kernel_directory(root, index, expected))?;
    }
    check(&mut item, || Ok(!wanted.root_read_only || is_read_only(root.directory())?))?;
    for path in masked.iter() {
        check(&mut item, || is_masked(root, path, &wanted.kernel))?;
    }
    for path in read_only.iter() {
        check(&mut item, || match existing(root, path)? {
            Some(found) => is_read_only(found.borrow()),
            None => is_missing_in_the_kernel(root, path, &wanted.kernel),
        })?;
    }
    Ok(())
}

/// Verifies one item; increments the item's number, which a [`Mismatch`] contains.
fn check(item: &mut u16, is_right: impl FnOnce() -> Result<bool, Errno>) -> Result<(), Errno> {
    let errno = match is_right() {
        Ok(true) => {
            *item = item.saturating_add(1);
            return Ok(());
        }
        Ok(false) => 0,
        Err(Errno(errno)) => u16::try_from(errno).unwrap_or(0),
    };
    Err(Errno(Mismatch { item: *item, errno }.to_number()))
}

/// Whether the path refers to the mount that was created at it, without a link and without another mount on top.
fn is_kernel_directory(root: &Root, index: usize, expected: KernelDirectory) -> Result<bool, Errno> {
    let magic = match expected {
        KernelDirectory::Unchecked => return Ok(true),
        KernelDirectory::Volume => None,
        KernelDirectory::Fresh => Some([PROC_SUPER_MAGIC, SYSFS_MAGIC, TMPFS_MAGIC][index]),
    };
    let found = root.find(KERNEL[index], fs::O_PATH | fs::O_NOFOLLOW)?;
    let stat = fs::stat(found.borrow())?;
    let made = root.made()[index];
    let is_the_mount = made.mount != 0 && made.mount == stat.mount && stat.is_mount_root;
    let is_of_kind = match magic {
        Some(magic) => fs::mount_flags_and_type(found.borrow())?.1 == magic,
        None => true,
    };
    Ok(is_the_mount && is_of_kind)
}

/// Whether the path is masked, or does not exist in the kernel's file systems.
fn is_masked(root: &Root, path: &CStr, kernel: &[KernelDirectory; KERNEL.len()]) -> Result<bool, Errno> {
    match existing(root, path)? {
        Some(found) => is_mask(found.borrow()),
        None => is_missing_in_the_kernel(root, path, kernel),
    }
}

/// Whether the file is the root of a read-only mount, either the device 1:3 or an empty tmpfs.
fn is_mask(found: FdRef<'_>) -> Result<bool, Errno> {
    let stat = fs::stat(found)?;
    let (flags, magic) = fs::mount_flags_and_type(found)?;
    if !stat.is_mount_root || flags & ST_RDONLY == 0 {
        return Ok(false);
    }
    if !stat.is_directory() {
        let is_device = stat.mode & fs::S_IFMT == fs::S_IFCHR;
        return Ok(is_device && (stat.device_major, stat.device_minor) == NULL);
    }
    if magic != TMPFS_MAGIC {
        return Ok(false);
    }
    let directory = fs::open(found, c".", fs::O_RDONLY | fs::O_DIRECTORY, 0)?;
    fs::is_empty_directory(directory.borrow())
}

/// Whether a missing path is missing because the kernel does not have it: the last existing component of the path is in
/// the procfs or sysfs that was mounted, or is a mask, and is not in another mount. True for paths outside of these two
/// file systems.
fn is_missing_in_the_kernel(
    root: &Root,
    path: &CStr,
    kernel: &[KernelDirectory; KERNEL.len()],
) -> Result<bool, Errno> {
    let is_below = |directory: &CStr| {
        let rest = path.to_bytes().strip_prefix(directory.to_bytes());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
    };
    // /dev is a tmpfs and has no files of the kernel.
    let of_kernel = (0..2).find(|index| is_below(KERNEL[*index]) && kernel[*index] == KernelDirectory::Fresh);
    let Some(index) = of_kernel else { return Ok(true) };
    let mut buffer = [0; PATH_BYTES_MAX];
    let bytes = path.to_bytes_with_nul();
    buffer.get_mut(..bytes.len()).ok_or(Errno::ENAMETOOLONG)?.copy_from_slice(bytes);
    let mut end = bytes.len() - 1;
    while let Some(slash) = buffer[..end].iter().rposition(|byte| *byte == b'/').filter(|slash| *slash > 0) {
        buffer[slash] = 0;
        end = slash;
        let above = CStr::from_bytes_until_nul(&buffer).map_err(|_| Errno::EINVAL)?;
        if above == KERNEL[index] {
            // The mount itself has been verified before.
            return Ok(true);
        }
        if let Some(found) = existing(root, above)? {
            let is_the_kernels = fs::stat(found.borrow())?.device() == root.made()[index].device;
            return Ok(is_the_kernels || is_mask(found.borrow())?);
        }
    }
    Ok(false)
}

fn is_read_only(found: FdRef<'_>) -> Result<bool, Errno> {
    Ok(fs::mount_flags_and_type(found)?.0 & ST_RDONLY != 0)
}
