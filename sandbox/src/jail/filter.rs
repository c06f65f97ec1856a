//! The system calls of a confined process: a list of those that it may make, or of those that it may not.

use coracle_sys::bpf;
use nix::errno::Errno;

use super::refused;
use crate::Error;
use crate::seccomp::{Action, Architecture, Compare, Condition, Known, Profile, Rule, compile};

/// System calls that every confined process needs: memory, time, its open descriptors, signals, and exit.
pub const RUNTIME_CALLS: [&str; 24] = [
    "brk",
    "mmap",
    "munmap",
    "mremap",
    "mprotect",
    "madvise",
    "futex",
    "clock_gettime",
    "gettimeofday",
    "getrandom",
    "sched_yield",
    "read",
    "write",
    "readv",
    "writev",
    "lseek",
    "close",
    "poll",
    "ppoll",
    "fstat",
    "rt_sigaction",
    "rt_sigprocmask",
    "rt_sigreturn",
    "exit_group",
];

/// Allows only [`RUNTIME_CALLS`] and these system calls from now on, in the native calling convention of this machine, and those
/// of abort(3): a process that [`start`](super::start) created may signal itself, that is PID 1 of its namespace. Any other call
/// fails with EPERM.
///
/// # Errors
/// [`Error::Invalid`] for a name that is not a system call of any architecture, because a rule for it would
/// have no effect. [`Error::Kernel`] if there is no seccomp, or the process has neither CAP_SYS_ADMIN nor
/// `no_new_privs`.
pub fn allow_only(calls: &[&str]) -> Result<(), Error> {
    set(&only(calls, &[]))
}

/// System calls that are allowed only with certain arguments.
#[derive(Clone, Copy, Debug)]
pub struct AllowedWith {
    /// Names of the system calls.
    pub calls: &'static [&'static str],
    /// Conditions, all of which must hold: index of the argument from 0, mask of its bits, and their required
    /// value.
    pub arguments: &'static [(u8, u64, u64)],
}

/// Opening of files that are only read: without O_ACCMODE, O_CREAT, O_TRUNC and the bit of O_TMPFILE.
pub const OPEN_TO_READ: [AllowedWith; 2] = [
    AllowedWith { calls: &["open"], arguments: &[(1, WRITES, 0)] },
    AllowedWith { calls: &["openat"], arguments: &[(2, WRITES, 0)] },
];
/// Threads of the process, but no processes and no namespaces.
pub const THREADS: [AllowedWith; 1] =
    [AllowedWith { calls: &["clone"], arguments: &[(0, CLONE_THREAD | CLONE_NEW, CLONE_THREAD)] }];
/// Options of TCP sockets.
pub const TCP_OPTIONS: [AllowedWith; 2] = [
    AllowedWith { calls: &["setsockopt"], arguments: &[(1, INT, SOL_SOCKET)] },
    AllowedWith { calls: &["setsockopt"], arguments: &[(1, INT, IPPROTO_TCP)] },
];

/// The open flags O_ACCMODE, O_CREAT, O_TRUNC and the bit of O_TMPFILE.
const WRITES: u64 = 0o3 | 0o100 | 0o1000 | 0o20_000_000;
/// The flag CLONE_THREAD of clone(2).
const CLONE_THREAD: u64 = 0x1_0000;
/// The CLONE_NEW… flags of clone(2).
const CLONE_NEW: u64 = 0x7e02_0000;
const SOL_SOCKET: u64 = 1;
const IPPROTO_TCP: u64 = 6;
/// Mask of int arguments, of which the kernel uses 32 bits.
pub const INT: u64 = 0xffff_ffff;

/// Allows system calls like [`allow_only`], and the calls in `more` with certain arguments.
///
/// # Errors
/// Those of [`allow_only`].
pub fn allow_only_with(calls: &[&str], more: &[AllowedWith]) -> Result<(), Error> {
    set(&only(calls, more))
}

/// The seccomp profile of [`allow_only_with`].
pub(crate) fn only(calls: &[&str], more: &[AllowedWith]) -> Profile {
    const PID: u64 = 1;
    let to_itself = |argument| Condition { argument, compare: Compare::Equal, value: PID };
    // abort(3) of musl; the process has one thread, whose ID is the process ID.
    let mut rules = vec![
        rule(&RUNTIME_CALLS, Vec::new(), Action::Allow),
        rule(calls, Vec::new(), Action::Allow),
        rule(&["getpid", "gettid", "exit"], Vec::new(), Action::Allow),
        rule(&["tkill"], vec![to_itself(0)], Action::Allow),
        rule(&["tgkill"], vec![to_itself(0), to_itself(1)], Action::Allow),
    ];
    for AllowedWith { calls, arguments } in more {
        let condition = |(argument, mask, value): &(u8, u64, u64)| Condition {
            argument: *argument,
            compare: Compare::Masked { mask: *mask },
            value: *value,
        };
        rules.push(rule(calls, arguments.iter().map(condition).collect(), Action::Allow));
    }
    profile(Action::Errno(Errno::EPERM as u16), rules)
}

/// Denies these system calls from now on with EPERM, in the native calling convention of this machine.
///
/// # Errors
/// Those of [`allow_only`].
pub fn deny(calls: &[&str]) -> Result<(), Error> {
    set(&profile(Action::Allow, vec![rule(calls, Vec::new(), Action::Errno(Errno::EPERM as u16))]))
}

fn rule(calls: &[&str], conditions: Vec<Condition>, action: Action) -> Rule {
    Rule { names: names_on(Architecture::HERE[0], calls), conditions, action }
}

/// The names of these calls on an architecture.
fn names_on(architecture: Architecture, calls: &[&str]) -> Vec<String> {
    let names = calls.iter().map(|name| (*name).to_owned());
    match architecture {
        Architecture::Arm => {
            names.flat_map(|name| std::iter::once(name.clone()).chain(arm_forms(&name))).collect()
        }
        _ => names.collect(),
    }
}

/// Names under which arm has a call with 64-bit times, offsets or ids, or as musl makes it there: `mmap2` for `mmap`. They
/// have the same arguments as far as this module's callers compare them. No 64-bit architecture has these calls.
fn arm_forms(name: &str) -> Vec<String> {
    let renamed = match name {
        "lseek" => "_llseek",
        "mmap" => "mmap2",
        "newfstatat" => "fstatat64",
        "rt_sigreturn" => "sigreturn",
        _ => "",
    };
    let suffixed = ["64", "_time64", "32"].map(|suffix| format!("{name}{suffix}"));
    let is_form = |name: &String| {
        Architecture::Arm.number(name).is_some() && Architecture::Aarch64.number(name).is_none()
    };
    suffixed.into_iter().chain([renamed.to_owned()]).filter(is_form).collect()
}

fn profile(default: Action, rules: Vec<Rule>) -> Profile {
    Profile {
        default,
        unknown: Action::Errno(Errno::ENOSYS as u16),
        known: Known::Build,
        architectures: vec![Architecture::HERE[0]],
        rules,
        flags: 0,
    }
}

fn set(profile: &Profile) -> Result<(), Error> {
    if let Some(name) = profile.unknown_names().next() {
        return Err(Error::invalid("seccomp", format!("{name:?} is not a system call")));
    }
    bpf::set_filter(&compile(profile)?.program, 0).map_err(refused("set", "a seccomp filter"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_covers_the_forms_of_32_bits_and_nothing_else_on_others() {
        let names = |calls: &[&str]| names_on(Architecture::Arm, calls);
        assert_eq!(names(&["mmap", "futex"]), ["mmap", "mmap2", "futex", "futex_time64"]);
        assert_eq!(names(&["clock_settime"]), ["clock_settime", "clock_settime64"]);
        assert_eq!(names(&["setuid", "lseek"]), ["setuid", "setuid32", "lseek", "_llseek"]);
        // getdents64 and renameat2 are other calls, which 64-bit architectures have, too.
        assert_eq!(names(&["getdents", "renameat", "read"]), ["getdents", "renameat", "read"]);
        for architecture in [Architecture::X86_64, Architecture::Aarch64, Architecture::Riscv64] {
            assert_eq!(names_on(architecture, &["mmap", "futex"]), ["mmap", "futex"]);
        }
    }

    /// Regression: a rule with an unknown name was ignored, so a typing error denied nothing. The check
    /// precedes the filter, so this process is not affected.
    #[test]
    fn a_rule_for_an_unknown_system_call_is_an_error() {
        for refused in [deny(&["mount", "no_such_call"]), allow_only(&["read", "no_such_call"])] {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains("\"no_such_call\" is not a system call"), "{error}");
        }
    }
}
