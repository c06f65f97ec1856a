//! Evaluates a compiled filter for one call, to determine before a start whether the filter permits the calls of the
//! start itself.

use coracle_sys::fs::TIOCSCTTY;
use coracle_sys::sched::CPU_MASK_BYTES;
use coracle_sys::sibling::CLONE_FLAGS;

use super::Architecture;

/// Size of `struct sock_filter` in bytes.
const INSTRUCTION_BYTES: usize = 8;

/// Whether the filter permits the process to clone a second process, and the second process to use all CPUs and to create
/// a session with a controlling terminal.
pub(crate) fn lets_hand_over(program: &[u8]) -> bool {
    use nix::libc::{SYS_clone, SYS_ioctl, SYS_sched_setaffinity, SYS_setsid};
    let calls = [
        (SYS_clone, [CLONE_FLAGS as u64, 0]),
        (SYS_sched_setaffinity, [0, CPU_MASK_BYTES as u64]),
        (SYS_setsid, [0, 0]),
        (SYS_ioctl, [0, u64::from(TIOCSCTTY)]),
    ];
    calls.iter().all(|(number, [first, second])| {
        let mut data = [0; 64];
        data[..4].copy_from_slice(&(*number as u32).to_ne_bytes());
        data[4..8].copy_from_slice(&Architecture::HERE[0].audit().to_ne_bytes());
        data[16..24].copy_from_slice(&first.to_ne_bytes());
        data[24..32].copy_from_slice(&second.to_ne_bytes());
        passes(program, &data)
    })
}

/// Runs a classic BPF program on a `struct seccomp_data`; returns whether it permits the call. False also for
/// unsupported instructions.
fn passes(program: &[u8], data: &[u8; 64]) -> bool {
    const ACTION: u32 = 0xffff_0000;
    const ALLOW: u32 = 0x7fff_0000;
    const LOG: u32 = 0x7ffc_0000;
    let (instructions, _) = program.as_chunks::<INSTRUCTION_BYTES>();
    let (mut at, mut value) = (0_usize, 0_u32);
    // All jumps are forward, so the loop terminates.
    while let Some([a, b, yes, no, operand @ ..]) = instructions.get(at) {
        let operand = u32::from_ne_bytes(*operand);
        at += 1;
        let holds = match u16::from_ne_bytes([*a, *b]) {
            0x20 => {
                let word = data.get(operand as usize..).and_then(|rest| rest.first_chunk::<4>());
                let Some(word) = word else { return false };
                value = u32::from_ne_bytes(*word);
                continue;
            }
            0x54 => {
                value &= operand;
                continue;
            }
            0x05 => {
                at += operand as usize;
                continue;
            }
            0x06 => return matches!(operand & ACTION, ALLOW | LOG),
            0x15 => value == operand,
            0x25 => value > operand,
            0x35 => value >= operand,
            0x45 => value & operand != 0,
            _ => return false,
        };
        at += usize::from(if holds { *yes } else { *no });
    }
    false
}

#[cfg(test)]
mod tests {
    use super::super::{Action, Known, Profile, Rule, compile, runtime_default};
    use super::*;

    fn without(names: &[&str]) -> Profile {
        Profile {
            default: Action::Allow,
            unknown: Action::Errno(38),
            known: Known::Build,
            architectures: Architecture::HERE.to_vec(),
            rules: vec![Rule {
                names: names.iter().map(|name| (*name).to_owned()).collect(),
                conditions: Vec::new(),
                action: Action::Errno(1),
            }],
            flags: 0,
        }
    }

    #[test]
    fn the_default_profile_permits_the_handover_of_a_start_and_stricter_ones_do_not() {
        let lets = |profile: &Profile| lets_hand_over(&compile(profile).unwrap().program);
        assert!(lets(&runtime_default(0)));
        assert!(lets(&without(&["mount", "clone3"])));
        for call in ["clone", "setsid", "ioctl"] {
            assert!(!lets(&without(&[call])), "{call}");
        }
        assert!(!lets_hand_over(&[]));
        assert!(!lets_hand_over(&[0xff; 16]));
    }
}
