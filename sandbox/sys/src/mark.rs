//! Marked system calls, which pass a container's seccomp filter even if it refuses them: for a process that has set the
//! filter and still has to call clone and setsid. A marked call has 128 random bits in unused arguments, and
//! instructions before the filter compare them. Exec discards the memory with these bits, and only the node's root can
//! read filters (ptrace(2), PTRACE_SECCOMP_GET_FILTER). A process that traces the marked process before its exec can
//! read the bits from its registers; therefore they allow only the exact calls made here: this clone, which creates no
//! namespace, setsid, and TIOCSCTTY.

use crate::arch::AUDIT;
use crate::bpf::{ALLOW, IF_EQUAL, INSTRUCTION_BYTES, Instruction, LOAD, RETURN, encode, set_filter};
use crate::fs::Mapping;
use crate::sibling::CLONE_FLAGS;
use crate::{Errno, number, process};

/// The secret of marked calls, in their fourth and fifth argument.
#[derive(Clone, Copy, Debug)]
pub struct Mark([u64; 2]);

impl Mark {
    /// The value for calls that no filter restricts.
    pub const NONE: Self = Self([0; 2]);

    /// Creates a random secret. EAGAIN early during boot.
    pub fn new() -> Result<Self, Errno> {
        let mut bytes = [0; 16];
        process::random(&mut bytes)?;
        let (words, _) = bytes.as_chunks::<8>();
        Ok(Self([u64::from_ne_bytes(words[0]), u64::from_ne_bytes(words[1])]))
    }

    /// The fourth and fifth argument of a call.
    pub(crate) fn arguments(self) -> [usize; 2] {
        self.0.map(|word| word as usize)
    }
}

/// Number of instructions before the filter.
const OURS: usize = 19;
/// ioctl(2): the controlling terminal.
const TIOCSCTTY: u32 = 0x540e;

/// Installs a filter like [`crate::bpf::set_filter`], but marked calls of clone, setsid and ioctl pass it.
pub fn set_filter_but_for(mark: Mark, program: &[u8], flags: u32) -> Result<(), Errno> {
    let ours = OURS * INSTRUCTION_BYTES;
    let length = ours + program.len();
    let mut all = Mapping::anonymous(length)?;
    encode(&instructions(mark), &mut all[..ours]);
    all[ours..length].copy_from_slice(program);
    set_filter(&all[..length], flags)
}

/// The instructions before the filter. Offsets are those of `struct seccomp_data`: the call number at 0, the
/// architecture at 4, arguments of 8 bytes from 16 on, on these architectures with the low half first. A jump past the
/// end leads to the filter.
fn instructions(Mark([fourth, fifth]): Mark) -> [Instruction; OURS] {
    let halves = |word: u64| (word as u32, (word >> 32) as u32);
    let ((a, b), (c, d)) = (halves(fourth), halves(fifth));
    [
        (LOAD, 0, 0, 4),
        (IF_EQUAL, 0, 17, AUDIT),
        (LOAD, 0, 0, 0),
        (IF_EQUAL, 2, 0, number::CLONE as u32),
        (IF_EQUAL, 5, 0, number::SETSID as u32),
        (IF_EQUAL, 2, 13, number::IOCTL as u32),
        (LOAD, 0, 0, 16),
        (IF_EQUAL, 2, 11, CLONE_FLAGS as u32),
        (LOAD, 0, 0, 24),
        (IF_EQUAL, 0, 9, TIOCSCTTY),
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
    use crate::FdRef;
    use crate::process::{Clone, Control, Status, control};
    use crate::sibling::{Sibling, SiblingPid, clone_sibling};

    /// Refuses every call but exit_group, wait4 and madvise with EPERM: as `bpf::only_sleep`.
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
