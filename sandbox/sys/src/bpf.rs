//! BPF programs: seccomp filters (seccomp(2), Linux 3.17) and device rules of cgroups (bpf(2), Linux 4.15).

use crate::arch::{AUDIT, call};
use crate::{Errno, Fd, FdRef, number};

const SECCOMP_SET_MODE_FILTER: usize = 1;
/// `sizeof(struct sock_filter)`.
pub(crate) const INSTRUCTION_BYTES: usize = 8;
/// Longest program the kernel takes (BPF_MAXINSNS).
const INSTRUCTIONS_MAX: usize = 4096;

/// `struct sock_fprog`.
#[repr(C)]
struct Program {
    length: u16,
    instructions: *const u8,
}

/// Installs `program`, a sequence of `struct sock_filter`, for this process and its descendants.
///
/// # Errors
/// EINVAL if the length is not a multiple of an instruction's or is too long; otherwise the kernel's.
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

/// Installs a filter that allows only rt_sigsuspend, exit_group and close_range; any other call gives EPERM.
///
/// # Errors
/// The kernel's.
pub fn only_sleep() -> Result<(), Errno> {
    const REFUSE: u32 = 0x0005_0001;
    // Offsets of `struct seccomp_data`: 0 the call's number, 4 the architecture.
    let program: [Instruction; 8] = [
        (LOAD, 0, 0, 4),
        (IF_EQUAL, 0, 4, AUDIT),
        (LOAD, 0, 0, 0),
        (IF_EQUAL, 3, 0, number::RT_SIGSUSPEND as u32),
        (IF_EQUAL, 2, 0, number::EXIT_GROUP as u32),
        (IF_EQUAL, 1, 0, number::CLOSE_RANGE as u32),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ];
    let mut bytes = [0; 8 * INSTRUCTION_BYTES];
    encode(&program, &mut bytes);
    set_filter(&bytes, 0)
}

/// One `struct sock_filter`: operation, jumps where true and false, operand (linux/filter.h).
pub(crate) type Instruction = (u16, u8, u8, u32);
pub(crate) const LOAD: u16 = 0x20;
pub(crate) const IF_EQUAL: u16 = 0x15;
pub(crate) const RETURN: u16 = 0x06;
pub(crate) const ALLOW: u32 = 0x7fff_0000;

/// Writes the instructions to `bytes`, which has [`INSTRUCTION_BYTES`] for each.
pub(crate) fn encode(program: &[Instruction], bytes: &mut [u8]) {
    let (places, _) = bytes.as_chunks_mut::<INSTRUCTION_BYTES>();
    for (to, (operation, yes, no, operand)) in places.iter_mut().zip(program) {
        let ([a, b], [e, f, g, h]) = (operation.to_ne_bytes(), operand.to_ne_bytes());
        *to = [a, b, *yes, *no, e, f, g, h];
    }
}

/// The first members of `union bpf_attr` for BPF_PROG_LOAD.
#[repr(C)]
struct Load {
    kind: u32,
    instructions: u32,
    program: *const u64,
    license: *const u8,
}

/// `union bpf_attr` for BPF_PROG_ATTACH.
#[repr(C)]
struct Attach {
    target: u32,
    program: u32,
    kind: u32,
    flags: u32,
}

/// Loads a program of type BPF_PROG_TYPE_CGROUP_DEVICE; each instruction is a `struct bpf_insn`.
pub fn device_program(instructions: &[u64]) -> Result<Fd, Errno> {
    const LOAD: usize = 5;
    const CGROUP_DEVICE: u32 = 15;
    let load = Load {
        kind: CGROUP_DEVICE,
        instructions: u32::try_from(instructions.len()).map_err(|_| Errno::EINVAL)?,
        program: instructions.as_ptr(),
        license: c"".as_ptr().cast(),
    };
    // SAFETY: the kernel reads exactly the size given of `load`, the instructions of the slice borrowed above and a
    // static string, all before the call returns; it writes nothing.
    unsafe { call(number::BPF, [LOAD, &raw const load as usize, size_of::<Load>()]) }.map(Fd::from_call)
}

/// Attaches a program of [`device_program`] to a cgroup2 directory, in addition to programs that are already attached.
///
/// # Errors
/// The kernel's.
pub fn attach_device_program(program: FdRef<'_>, cgroup: FdRef<'_>) -> Result<(), Errno> {
    const ATTACH: usize = 8;
    const CGROUP_DEVICE: u32 = 6;
    const ALLOW_MULTI: u32 = 2;
    let attach = Attach {
        target: cgroup.number() as u32,
        program: program.number() as u32,
        kind: CGROUP_DEVICE,
        flags: ALLOW_MULTI,
    };
    // SAFETY: the kernel reads exactly the size given of `attach`, which lives across the call.
    unsafe { call(number::BPF, [ATTACH, &raw const attach as usize, size_of::<Attach>()]) }.map(drop)
}
