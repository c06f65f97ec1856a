//! BPF programs: seccomp filters (seccomp(2), Linux 3.17), a filter of notifications (socket(7), SO_ATTACH_FILTER), and device
//! rules of cgroups (bpf(2), Linux 4.15).

use crate::arch::{AUDIT, call};
use crate::fs::TIOCSCTTY;
use crate::mark::Mark;
use crate::memory::Mapping;
use crate::sibling::CLONE_FLAGS;
use crate::{Errno, Fd, FdRef, number};

const SECCOMP_SET_MODE_FILTER: usize = 1;
/// Size of `struct sock_filter` in bytes.
const INSTRUCTION_BYTES: usize = 8;
/// Maximum number of instructions of a program (BPF_MAXINSNS).
const INSTRUCTIONS_MAX: usize = 4096;

/// A program for the kernel, `struct sock_fprog`.
#[repr(C)]
struct Program {
    length: u16,
    instructions: *const u8,
}

/// Installs `program`, a sequence of `struct sock_filter`, for this process and its descendants.
///
/// # Errors
/// EINVAL if the length is not a multiple of the instruction size or is too long; otherwise the kernel's error.
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

/// Installs a filter that allows only rt_sigsuspend, exit_group and close_range; any other call fails with EPERM.
///
/// # Errors
/// The kernel's error.
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

/// Restricts a netlink socket to messages of the type RTM_DELLINK of the family AF_UNSPEC. With AF_BRIDGE, which is another
/// message of this type, a link leaves a bridge.
pub(crate) fn receive_removed_links(socket: FdRef<'_>) -> Result<(), Errno> {
    const SOL_SOCKET: usize = 1;
    const SO_ATTACH_FILTER: usize = 26;
    const RTM_DELLINK: u16 = 17;
    // Offsets: 4 the type in `struct nlmsghdr`, 16 the family in `struct ifinfomsg` after it. A load converts from big endian,
    // and netlink has the byte order of the machine.
    let program: [Instruction; 6] = [
        (LOAD_HALF, 0, 0, 4),
        (IF_EQUAL, 0, 3, u16::from_be_bytes(RTM_DELLINK.to_ne_bytes()) as u32),
        (LOAD_BYTE, 0, 0, 16),
        (IF_EQUAL, 0, 1, 0),
        (RETURN, 0, 0, u32::MAX),
        (RETURN, 0, 0, 0),
    ];
    let mut bytes = [0; 6 * INSTRUCTION_BYTES];
    encode(&program, &mut bytes);
    let program = Program { length: 6, instructions: bytes.as_ptr() };
    let address = &raw const program as usize;
    let arguments = [socket.argument(), SOL_SOCKET, SO_ATTACH_FILTER, address, size_of::<Program>()];
    // SAFETY: the kernel reads `program`, whose size is given, and copies its 6 instructions of 8 bytes from `bytes`, before the
    // call returns; both are locals that live across the call.
    unsafe { call(number::SETSOCKOPT, arguments) }.map(drop)
}

/// One `struct sock_filter`: operation, jump distances if true and if false, operand (linux/filter.h).
type Instruction = (u16, u8, u8, u32);
const LOAD: u16 = 0x20;
const LOAD_HALF: u16 = 0x28;
const LOAD_BYTE: u16 = 0x30;
const IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;
const ALLOW: u32 = 0x7fff_0000;

/// Writes the instructions to `bytes`, which must have [`INSTRUCTION_BYTES`] for each.
fn encode(program: &[Instruction], bytes: &mut [u8]) {
    let (chunks, _) = bytes.as_chunks_mut::<INSTRUCTION_BYTES>();
    for (to, (operation, yes, no, operand)) in chunks.iter_mut().zip(program) {
        let ([a, b], [e, f, g, h]) = (operation.to_ne_bytes(), operand.to_ne_bytes());
        *to = [a, b, *yes, *no, e, f, g, h];
    }
}

/// The first members of `union bpf_attr` for BPF_PROG_LOAD; addresses have 64 bits on every architecture.
#[repr(C)]
struct Load {
    kind: u32,
    instructions: u32,
    program: u64,
    license: u64,
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
        program: instructions.as_ptr() as u64,
        license: c"".as_ptr() as u64,
    };
    // SAFETY: the kernel reads exactly the size given of `load`, the instructions of the slice borrowed above and a
    // static string, all before the call returns; it writes nothing.
    unsafe { call(number::BPF, [LOAD, &raw const load as usize, size_of::<Load>()]) }.map(Fd::from_call)
}

/// Attaches a program that [`device_program`] loaded to a cgroup2 directory, in addition to programs that are already
/// attached.
///
/// # Errors
/// The kernel's error.
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

/// Number of instructions for marked calls, before those of the filter.
const MARK_INSTRUCTIONS: usize = 22;
/// The PID with which sched_setaffinity(2) refers to its caller.
const THIS_PROCESS: u32 = 0;

/// Installs a filter like [`set_filter`], but marked calls of clone, setsid, ioctl and sched_setaffinity pass it.
pub fn set_filter_but_for(mark: Mark, program: &[u8], flags: u32) -> Result<(), Errno> {
    let ours = MARK_INSTRUCTIONS * INSTRUCTION_BYTES;
    let length = ours + program.len();
    let mut all = Mapping::anonymous(length)?;
    encode(&instructions(mark), &mut all[..ours]);
    all[ours..length].copy_from_slice(program);
    set_filter(&all[..length], flags)
}

/// The instructions that let marked calls pass, before those of the filter. Offsets are those of `struct seccomp_data`:
/// the call number at 0, the architecture at 4, arguments of 8 bytes from 16 on, on these architectures with the low
/// half first. A jump past the end leads to the filter.
fn instructions(Mark([fourth, fifth]): Mark) -> [Instruction; MARK_INSTRUCTIONS] {
    let halves = |word: u64| (word as u32, (word >> 32) as u32);
    let ((a, b), (c, d)) = (halves(fourth), halves(fifth));
    [
        (LOAD, 0, 0, 4),
        (IF_EQUAL, 0, 20, AUDIT),
        (LOAD, 0, 0, 0),
        (IF_EQUAL, 3, 0, number::CLONE as u32),
        (IF_EQUAL, 8, 0, number::SETSID as u32),
        (IF_EQUAL, 3, 0, number::IOCTL as u32),
        (IF_EQUAL, 4, 15, number::SCHED_SETAFFINITY as u32),
        (LOAD, 0, 0, 16),
        (IF_EQUAL, 4, 13, CLONE_FLAGS as u32),
        (LOAD, 0, 0, 24),
        (IF_EQUAL, 2, 11, TIOCSCTTY),
        (LOAD, 0, 0, 16),
        (IF_EQUAL, 0, 9, THIS_PROCESS),
        (LOAD, 0, 0, 40),
        (IF_EQUAL, 0, 7, a),
        (LOAD, 0, 0, 44),
        (IF_EQUAL, 0, 5, b),
        (LOAD, 0, 0, 48),
        (IF_EQUAL, 0, 3, c),
        (LOAD, 0, 0, 52),
        (IF_EQUAL, 0, 1, d),
        (RETURN, 0, 0, ALLOW),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process;
    use crate::process::{Clone, Control, Status, control};
    use crate::sched;
    use crate::sibling::{Sibling, SiblingPid, clone_sibling};

    /// A filter that refuses every call except exit_group, wait4 and madvise with EPERM, similar to `bpf::only_sleep`.
    fn filter() -> Vec<u8> {
        let program: [Instruction; 6] = [
            (LOAD, 0, 0, 0),
            (IF_EQUAL, 2, 0, number::EXIT_GROUP as u32),
            (IF_EQUAL, 1, 0, number::MADVISE as u32),
            (RETURN, 0, 0, 0x0005_0001),
            (RETURN, 0, 0, ALLOW),
            (RETURN, 0, 0, ALLOW),
        ];
        let bytes = program.iter().flat_map(|(code, yes, no, operand)| {
            code.to_ne_bytes().into_iter().chain([*yes, *no]).chain(operand.to_ne_bytes())
        });
        bytes.collect()
    }

    #[test]
    fn marked_calls_pass_and_others_do_not() {
        let program = filter();
        let sibling = SiblingPid::new().unwrap();
        let Clone::Parent { pid, .. } = process::clone(0, None).unwrap() else {
            let mark = Mark::new().unwrap();
            control(Control::NoNewPrivileges).unwrap();
            set_filter_but_for(mark, &program, 0).unwrap();
            if clone_sibling(&sibling, FdRef::STANDARD_STREAMS[0], Mark::NONE) != Err(Errno::EPERM) {
                process::exit(1);
            }
            if clone_sibling(&sibling, FdRef::STANDARD_STREAMS[0], Mark([1, 2])) != Err(Errno::EPERM) {
                process::exit(2);
            }
            match clone_sibling(&sibling, FdRef::STANDARD_STREAMS[0], mark) {
                Ok(Sibling::New) if process::new_session_marked(Mark::NONE).is_ok() => process::exit(4),
                Ok(Sibling::New) if sched::use_all_cpus(Mark::NONE).is_ok() => process::exit(6),
                Ok(Sibling::New) if sched::use_all_cpus(mark).is_err() => process::exit(7),
                Ok(Sibling::New) if process::new_session_marked(mark).is_err() => process::exit(5),
                Ok(_) => process::exit(0),
                Err(_) => process::exit(3),
            }
        };
        let end = |pid| loop {
            if let Some((_, status)) = process::reap(pid).unwrap() {
                return status;
            }
        };
        assert_eq!(end(pid), Status::Code(0));
        assert_eq!(end(sibling.get().unwrap()), Status::Code(0));
    }
}
