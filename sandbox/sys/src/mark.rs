//! Marked system calls, which pass a container's seccomp filter even if it refuses them: for a process that has set the
//! filter and still has to call clone, setsid and sched_setaffinity. A marked call has 128 random bits (64 on 32-bit
//! architectures) in unused arguments, and instructions before the filter compare them. Exec discards the memory with
//! these bits, and only the node's root can read filters (ptrace(2), PTRACE_SECCOMP_GET_FILTER). A process that traces
//! the marked process before its exec can read the bits from its registers; therefore marked calls pass only with
//! exactly the arguments of coracle's own calls: a clone that creates no namespace, setsid, TIOCSCTTY, and
//! sched_setaffinity of the caller.

use crate::{Errno, process};

/// The secret of marked calls, which they pass as fourth and fifth argument; each word has as many bits as an argument.
#[derive(Clone, Copy, Debug)]
pub struct Mark(pub(crate) [u64; 2]);

impl Mark {
    /// Value for a process without a filter that restricts its calls.
    pub const NONE: Self = Self([0; 2]);

    /// Creates a random secret; EAGAIN early during boot.
    pub fn new() -> Result<Self, Errno> {
        let mut bytes = [0; 16];
        process::random(&mut bytes)?;
        let (words, _) = bytes.as_chunks::<8>();
        Ok(Self(core::array::from_fn(|index| u64::from_ne_bytes(words[index]) & usize::MAX as u64)))
    }

    /// The fourth and fifth argument of a marked call.
    pub(crate) fn arguments(self) -> [usize; 2] {
        self.0.map(|word| word as usize)
    }
}
