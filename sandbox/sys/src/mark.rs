//! Calls of ours that a container's seccomp filter lets pass though it refuses the call: for a process that has set the
//! filter and still has to clone and to lead a session. A marked call carries 128 random bits in arguments that it does not
//! use, and the filter is set behind instructions that know them. Exec drops the memory they are in, and filters can be read
//! by the node's root alone (ptrace(2), PTRACE_SECCOMP_GET_FILTER). Whoever traces the process before its exec learns them
//! all the same, from its registers; so they let nothing pass but exactly what is made here: this clone, which makes no
//! namespace, setsid, and TIOCSCTTY.

use crate::arch::AUDIT;
use crate::bpf::{ALLOW, IF_EQUAL, INSTRUCTION_BYTES, Instruction, LOAD, RETURN, encode, set_filter};
use crate::fs::Mapping;
use crate::sibling::CLONE_FLAGS;
use crate::{Errno, number, process};

/// What marked calls carry, in their fourth and fifth argument.
#[derive(Clone, Copy, Debug)]
pub struct Mark([u64; 2]);

impl Mark {
    /// Of calls that no filter has to know.
    pub const NONE: Self = Self([0; 2]);

    /// A secret one. EAGAIN early in a boot.
    pub fn new() -> Result<Self, Errno> {
        let mut bytes = [0; 16];
        process::random(&mut bytes)?;
        let (words, _) = bytes.as_chunks::<8>();
        Ok(Self([u64::from_ne_bytes(words[0]), u64::from_ne_bytes(words[1])]))
    }

    /// As arguments of a call.
    pub(crate) fn arguments(self) -> [usize; 2] {
        self.0.map(|word| word as usize)
    }
}

/// Instructions in front of the filter.
const OURS: usize = 19;
/// ioctl(2): the controlling terminal.
const TIOCSCTTY: u32 = 0x540e;

/// As [`crate::bpf::set_filter`], but marked calls of clone, setsid and ioctl pass.
pub fn set_filter_but_for(mark: Mark, program: &[u8], flags: u32) -> Result<(), Errno> {
    let ours = OURS * INSTRUCTION_BYTES;
    let length = ours + program.len();
    let mut all = Mapping::anonymous(length)?;
    encode(&instructions(mark), &mut all[..ours]);
    all[ours..length].copy_from_slice(program);
    set_filter(&all[..length], flags)
}

/// Offsets are those of `struct seccomp_data`: the number at 0, the architecture at 4, arguments of 8 bytes from 16 on, on
/// these architectures their low half first. A jump out of these leads to the filter behind them.
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
