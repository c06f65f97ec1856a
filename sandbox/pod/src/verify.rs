//! What a container got, looked at before it runs (`Op::Verify`): every path is resolved again inside the root, as the
//! container will resolve it, and what is found there is told by descriptor. The plan and the operations before this one
//! make the mounts; this is told only what must have come of it, so that a mistake in either, a link of an image or a
//! volume that changes meanwhile ends the start instead of starting a container without its masks.
//!
//! Mounts are told apart by their ids (STATX_MNT_ID, Linux 5.8). Nothing is read from /proc: it is what is looked at.

use core::ffi::CStr;

use coracle_sys::{Errno, FdRef, fs};
use coracle_wire::{Block, KernelDirectory, Mismatch};

use crate::mounts::{PROC_SUPER_MAGIC, existing};
use crate::root::{KERNEL, Root};

/// sysfs (statfs(2)).
const SYSFS_MAGIC: u64 = 0x6265_6572;
/// tmpfs (statfs(2)).
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// A read-only mount or file system (statfs(2), f_flags).
const ST_RDONLY: u64 = 1;
/// /dev/null.
const NULL: (u32, u32) = (1, 3);
/// Longest path the kernel takes, with its NUL.
const PATH_BYTES_MAX: usize = 4096;

/// The fields of `Op::Verify`.
pub(crate) struct Wanted<'a> {
    /// At [`KERNEL`].
    pub(crate) kernel: [KernelDirectory; KERNEL.len()],
    /// The root mount is read-only.
    pub(crate) root_read_only: bool,
    /// Masked paths.
    pub(crate) masked: Block<'a>,
    /// Read-only paths.
    pub(crate) read_only: Block<'a>,
}

/// Checks all of it; the error is that of the first thing that is not as wanted: a [`Mismatch`] as a number.
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

/// One thing that is looked at, with its number in a [`Mismatch`].
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

/// The mount that was made there is what its name leads to: no link, and no other mount on top of it.
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

/// A mask, or nothing where the kernel has nothing.
fn is_masked(root: &Root, path: &CStr, kernel: &[KernelDirectory; KERNEL.len()]) -> Result<bool, Errno> {
    match existing(root, path)? {
        Some(found) => is_mask(found.borrow()),
        None => is_missing_in_the_kernel(root, path, kernel),
    }
}

/// A mount of its own, of the device 1:3 or of an empty tmpfs that nobody writes.
fn is_mask(found: FdRef<'_>) -> Result<bool, Errno> {
    let stat = fs::stat(found)?;
    if !stat.is_mount_root {
        return Ok(false);
    }
    if !stat.is_directory() {
        let is_device = stat.mode & fs::S_IFMT == fs::S_IFCHR;
        return Ok(is_device && (stat.device_major, stat.device_minor) == NULL);
    }
    let (flags, magic) = fs::mount_flags_and_type(found)?;
    if magic != TMPFS_MAGIC || flags & ST_RDONLY == 0 {
        return Ok(false);
    }
    let directory = fs::open(found, c".", fs::O_RDONLY | fs::O_DIRECTORY, 0)?;
    fs::is_empty_directory(directory.borrow())
}

/// Whether what is missing is missing because this kernel does not have it: the last thing there is on the way is of the
/// fresh procfs or sysfs, or a mask, and not of another mount in its place. True outside of these two file systems.
fn is_missing_in_the_kernel(
    root: &Root,
    path: &CStr,
    kernel: &[KernelDirectory; KERNEL.len()],
) -> Result<bool, Errno> {
    let is_below = |directory: &CStr| {
        let rest = path.to_bytes().strip_prefix(directory.to_bytes());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
    };
    // /dev has nothing of the kernel's own.
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
            // Looked at before all paths.
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
