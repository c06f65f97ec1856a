//! The system call instruction and the call numbers; one file per architecture, all with the same interface.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "arm")]
mod arm;
#[cfg(any(target_arch = "aarch64", target_arch = "riscv64"))]
pub(crate) mod generic;
#[cfg(target_arch = "riscv64")]
mod riscv64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::{AUDIT, forget_stack, trap};
#[cfg(target_arch = "arm")]
pub(crate) use arm::{AUDIT, forget_stack, number, trap};
#[cfg(any(target_arch = "aarch64", target_arch = "riscv64"))]
pub(crate) use generic as number;
#[cfg(target_arch = "riscv64")]
pub(crate) use riscv64::{AUDIT, forget_stack, trap};
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{AUDIT, forget_stack, number, trap};

use crate::Errno;

/// Highest error number, which the kernel returns as a negative value (include/linux/err.h, MAX_ERRNO).
const ERRNO_MAX: isize = 4095;

/// Advice for madvise: the kernel drops the pages; anonymous memory reads as zero when it is used again
/// (include/uapi/asm-generic/mman-common.h).
pub(crate) const MADV_DONTNEED: usize = 4;

/// Makes a system call with up to six arguments; missing arguments are 0.
///
/// # Safety
/// All memory that the kernel reads or writes through the arguments must be valid for this access during the call.
pub(crate) unsafe fn call<const N: usize>(number: usize, arguments: [usize; N]) -> Result<usize, Errno> {
    let mut all = [0; 6];
    all[..N].copy_from_slice(&arguments);
    // SAFETY: the caller vouches for the arguments; the arch files declare every register the kernel clobbers.
    let result = unsafe { trap(number, all) };
    if (-ERRNO_MAX..0).contains(&result) { Err(Errno(-result as i32)) } else { Ok(result as usize) }
}
