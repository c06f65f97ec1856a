//! Seccomp filters: which system calls a container may make, as a classic BPF program that the kernel runs before each.
//!
//! ```text
//!   RuntimeDefault ─► default ─┐
//!   a Localhost file ─► json ──┴─► Profile ─► compile ─► struct sock_filter, 8 bytes each
//! ```
//! Pure: a profile in, bytes out. One program serves the native architecture and the 32-bit ones the kernel runs beside
//! it; a call of any other kills. Within an architecture numbers are found by a binary search, so that the most usual calls
//! cost some ten instructions whatever the profile's length.

mod allowed;
mod assemble;
mod calls;
mod default;
mod evaluate;
mod json;
#[cfg(test)]
mod tests;

pub use default::runtime_default;
pub(crate) use evaluate::lets_hand_over;
pub use json::parse;

use crate::Error;

/// What the kernel does with a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ends the process.
    KillProcess,
    /// Ends the thread.
    KillThread,
    /// Sends SIGSYS.
    Trap,
    /// Answers with this errno.
    Errno(u16),
    /// Asks a tracer; ENOSYS where there is none.
    Trace(u16),
    /// Allows, and says so in the audit log.
    Log,
    /// Allows.
    Allow,
}

impl Action {
    /// SECCOMP_RET_… with its data.
    fn code(self) -> u32 {
        match self {
            Action::KillProcess => 0x8000_0000,
            Action::KillThread => 0,
            Action::Trap => 0x0003_0000,
            Action::Errno(errno) => 0x0005_0000 | u32::from(errno),
            Action::Trace(data) => 0x7ff0_0000 | u32::from(data),
            Action::Log => 0x7ffc_0000,
            Action::Allow => 0x7fff_0000,
        }
    }
}

/// How an argument is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compare {
    /// `!=`
    NotEqual,
    /// `<`
    Less,
    /// `<=`
    LessOrEqual,
    /// `==`
    Equal,
    /// `>=`
    GreaterOrEqual,
    /// `>`
    Greater,
    /// `argument & mask == value`
    Masked {
        /// The bits that count.
        mask: u64,
    },
}

/// A condition on one argument, unsigned, of 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Condition {
    /// 0 to 5.
    pub argument: u8,
    /// How.
    pub compare: Compare,
    /// With what.
    pub value: u64,
}

/// What is done with some calls, where every condition holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Names. One that no architecture knows has no effect, as in every runtime, because profiles outlive kernels;
    /// [`Profile::unknown_names`] tells which those are.
    pub names: Vec<String>,
    /// All must hold; none at all always do.
    pub conditions: Vec<Condition>,
    /// What then.
    pub action: Action,
}

/// System call conventions that one kernel may serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// 64-bit x86.
    X86_64,
    /// 32-bit x86.
    X86,
    /// 32-bit pointers on 64-bit x86.
    X32,
    /// 64-bit ARM.
    Aarch64,
    /// 32-bit ARM, EABI.
    Arm,
}

impl Architecture {
    /// Every one that this machine's kernel may serve, the native one first.
    pub const HERE: &'static [Architecture] = if cfg!(target_arch = "aarch64") {
        &[Architecture::Aarch64, Architecture::Arm]
    } else {
        &[Architecture::X86_64, Architecture::X86, Architecture::X32]
    };

    /// Every one of the table of calls, of this machine or not.
    pub const ALL: [Architecture; 5] = [
        Architecture::X86_64,
        Architecture::X86,
        Architecture::X32,
        Architecture::Aarch64,
        Architecture::Arm,
    ];

    /// AUDIT_ARCH_…, which the kernel tells a filter.
    fn audit(self) -> u32 {
        match self {
            Architecture::X86_64 | Architecture::X32 => 0xc000_003e,
            Architecture::X86 => 0x4000_0003,
            Architecture::Aarch64 => 0xc000_00b7,
            Architecture::Arm => 0x4000_0028,
        }
    }

    fn column(self) -> usize {
        match self {
            Architecture::X86_64 => 0,
            Architecture::X86 => 1,
            Architecture::X32 => 2,
            Architecture::Aarch64 => 3,
            Architecture::Arm => 4,
        }
    }

    /// The call's number, as the kernel tells it to a filter; none: this architecture does not have the call.
    pub fn number(self, name: &str) -> Option<u32> {
        let index = calls::CALLS.binary_search_by_key(&name, |(name, _)| name).ok()?;
        match calls::CALLS[index].1[self.column()] {
            calls::NO => None,
            private if private >= calls::ARM => Some(ARM_PRIVATE + u32::from(private - calls::ARM)),
            number if self == Architecture::X32 => Some(u32::from(number) | X32_BIT),
            number => Some(u32::from(number)),
        }
    }
}

/// Set in the numbers of x32, which shares x86_64's audit value.
const X32_BIT: u32 = 0x4000_0000;
/// The first number of arm's private calls (`__ARM_NR_BASE`).
const ARM_PRIVATE: u32 = 0xf_0000;

/// A whole policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// For calls that no rule is about, and for those whose conditions do not hold.
    pub default: Action,
    /// For numbers that are higher than every one this build knows: a program tests for a new call by ENOSYS, and falls back.
    pub unknown: Action,
    /// Which conventions may be used at all.
    pub architectures: Vec<Architecture>,
    /// In order: of several rules about one call the first whose conditions hold decides; those without conditions come
    /// after those with.
    pub rules: Vec<Rule>,
    /// SECCOMP_FILTER_FLAG_…
    pub flags: u32,
}

impl Profile {
    /// Names in rules that are no call of any architecture this build knows: the rules do nothing about them, and
    /// [`Profile::default`] or [`Profile::unknown`] decides. Whoever loads a profile has to say so.
    pub fn unknown_names(&self) -> impl Iterator<Item = &str> {
        let names = self.rules.iter().flat_map(|rule| rule.names.iter().map(String::as_str));
        names.filter(|name| calls::CALLS.binary_search_by_key(name, |(known, _)| known).is_err())
    }
}

/// Compiles a profile.
///
/// # Errors
/// [`Error::Invalid`] for a program that is longer than the kernel takes.
pub fn compile(profile: &Profile) -> Result<crate::plan::Seccomp, Error> {
    assemble::program(profile).map(|program| crate::plan::Seccomp { program, flags: profile.flags })
}
