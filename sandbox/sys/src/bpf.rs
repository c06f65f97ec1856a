//! seccomp filters (seccomp(2), Linux 3.17).

use crate::arch::call;
use crate::{Errno, number};

const SECCOMP_SET_MODE_FILTER: usize = 1;
/// `sizeof(struct sock_filter)`.
const INSTRUCTION_BYTES: usize = 8;
/// Longest program the kernel takes (BPF_MAXINSNS).
const INSTRUCTIONS_MAX: usize = 4096;

/// `struct sock_fprog`.
#[repr(C)]
struct Program {
    length: u16,
    instructions: *const u8,
}

/// Installs `program`, `struct sock_filter` back to back, for this process and what it starts. EINVAL where it is no
/// whole number of instructions or too long.
pub fn set_filter(program: &[u8], flags: u32) -> Result<(), Errno> {
    let length = program.len() / INSTRUCTION_BYTES;
    if !program.len().is_multiple_of(INSTRUCTION_BYTES) || length > INSTRUCTIONS_MAX {
        return Err(Errno::EINVAL);
    }
    let program = Program { length: length as u16, instructions: program.as_ptr() };
    let address = &raw const program as usize;
    // SAFETY: the kernel copies `length` instructions of 8 bytes, which are inside the slice borrowed above, before
    // the call returns; it copies bytes, so their alignment does not matter.
    unsafe { call(number::SECCOMP, [SECCOMP_SET_MODE_FILTER, flags as usize, address]) }.map(drop)
}
