//! Seccomp filters: the system calls that a container may make, compiled to a classic BPF program that the kernel runs
//! for each call.
//!
//! ```text
//!   RuntimeDefault ─► default ─┐
//!   a Localhost file ─► json ──┴─► Profile ─► compile ─► struct sock_filter, 8 bytes each
//! ```
//! The module does no I/O: it compiles a profile to bytes. One program covers the native architecture and the 32-bit
//! ones that the kernel supports; a call of any other architecture kills the process. Within an architecture a binary
//! search finds the number, so that a call costs about ten instructions, regardless of the profile's length.

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

/// Actions of the kernel for a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Kills the process that made the call.
    KillProcess,
    /// Kills the thread that made the call.
    KillThread,
    /// Sends SIGSYS to the thread.
    Trap,
    /// The call fails with this error number.
    Errno(u16),
    /// Notifies a tracer with this value; the call fails with ENOSYS if there is none.
    Trace(u16),
    /// Allows the call and logs it in the audit log.
    Log,
    /// Allows the call.
    Allow,
}

impl Action {
    /// The action as a return value SECCOMP_RET_… with its data.
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

/// Operator for comparing an argument with a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compare {
    /// Not equal (`!=`).
    NotEqual,
    /// Less (`<`).
    Less,
    /// Less or equal (`<=`).
    LessOrEqual,
    /// Equal (`==`).
    Equal,
    /// Greater or equal (`>=`).
    GreaterOrEqual,
    /// Greater (`>`).
    Greater,
    /// Equal after masking (`argument & mask == value`).
    Masked {
        /// Mask of the compared bits.
        mask: u64,
    },
}

/// A condition on one argument, an unsigned 64-bit number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Condition {
    /// Index of the argument, 0 to 5.
    pub argument: u8,
    /// The comparison operator.
    pub compare: Compare,
    /// The value with which the argument is compared.
    pub value: u64,
}

/// A rule: the action for some calls if all conditions hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Names of calls. A name that no architecture has is ignored, as in other runtimes, because profiles are used with
    /// different kernels; [`Profile::unknown_names`] returns them.
    pub names: Vec<String>,
    /// Conditions, all of which must hold; if empty, the rule always applies.
    pub conditions: Vec<Condition>,
    /// The action if the rule applies.
    pub action: Action,
}

/// System call architectures (calling conventions).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// 64-bit x86 (x86_64).
    X86_64,
    /// 32-bit x86 (i386).
    X86,
    /// x32: 64-bit x86 with 32-bit pointers.
    X32,
    /// 64-bit ARM.
    Aarch64,
    /// 32-bit ARM with EABI.
    Arm,
    /// 64-bit RISC-V.
    Riscv64,
}

impl Architecture {
    /// All architectures that the kernel of this machine may support, the native one first.
    pub const HERE: &'static [Architecture] = if cfg!(target_arch = "aarch64") {
        &[Architecture::Aarch64, Architecture::Arm]
    } else if cfg!(target_arch = "arm") {
        &[Architecture::Arm]
    } else if cfg!(target_arch = "riscv64") {
        &[Architecture::Riscv64]
    } else {
        &[Architecture::X86_64, Architecture::X86, Architecture::X32]
    };

    /// All architectures of the table of calls.
    pub const ALL: [Architecture; 6] = [
        Architecture::X86_64,
        Architecture::X86,
        Architecture::X32,
        Architecture::Aarch64,
        Architecture::Arm,
        Architecture::Riscv64,
    ];

    /// Go's name of the architecture (GOARCH), which images and profiles use.
    pub const fn go_name(self) -> &'static str {
        match self {
            Architecture::X86_64 | Architecture::X32 => "amd64",
            Architecture::X86 => "386",
            Architecture::Aarch64 => "arm64",
            Architecture::Arm => "arm",
            Architecture::Riscv64 => "riscv64",
        }
    }

    /// The value AUDIT_ARCH_… of the architecture in the filter's input.
    fn audit(self) -> u32 {
        match self {
            Architecture::X86_64 | Architecture::X32 => 0xc000_003e,
            Architecture::X86 => 0x4000_0003,
            Architecture::Aarch64 => 0xc000_00b7,
            Architecture::Arm => 0x4000_0028,
            Architecture::Riscv64 => 0xc000_00f3,
        }
    }

    fn column(self) -> usize {
        match self {
            Architecture::X86_64 => 0,
            Architecture::X86 => 1,
            Architecture::X32 => 2,
            Architecture::Aarch64 => 3,
            Architecture::Arm => 4,
            Architecture::Riscv64 => 5,
        }
    }

    /// The number of a call in the filter's input; `None` if this architecture does not have the call.
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

/// Bit that is set in the numbers of x32, which has the same audit value as x86_64.
const X32_BIT: u32 = 0x4000_0000;
/// The first number of arm's private calls (`__ARM_NR_BASE`).
const ARM_PRIVATE: u32 = 0xf_0000;

/// The calls that a profile knows; its writer could not decide about later ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// All calls of this build.
    Build,
    /// For each architecture the calls up to the last one that a rule names; all of them if no rule names one.
    Named,
}

/// A complete seccomp profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// Action for calls without a rule, and for calls whose conditions do not hold.
    pub default: Action,
    /// Action for numbers above all that the profile knows. Usually ENOSYS: programs detect a missing call by it and
    /// fall back.
    pub unknown: Action,
    /// The calls that the profile knows.
    pub known: Known,
    /// Architectures whose calls are permitted.
    pub architectures: Vec<Architecture>,
    /// Rules in order: if a call has several rules, the first one whose conditions hold applies; rules without
    /// conditions are considered after those with conditions.
    pub rules: Vec<Rule>,
    /// Flags of the filter (SECCOMP_FILTER_FLAG_…).
    pub flags: u32,
}

impl Profile {
    /// Names in rules that are not calls of any known architecture. The rules have no effect for these names:
    /// [`Profile::default`] or [`Profile::unknown`] applies. A caller that loads a profile should log them.
    pub fn unknown_names(&self) -> impl Iterator<Item = &str> {
        let names = self.rules.iter().flat_map(|rule| rule.names.iter().map(String::as_str));
        names.filter(|name| calls::CALLS.binary_search_by_key(name, |(known, _)| known).is_err())
    }
}

/// Compiles a profile.
///
/// # Errors
/// [`Error::Invalid`] if the program is longer than the kernel's limit.
pub fn compile(profile: &Profile) -> Result<crate::plan::Seccomp, Error> {
    assemble::program(profile).map(|program| crate::plan::Seccomp { program, flags: profile.flags })
}
