//! Compiles a profile to classic BPF (kernel: Documentation/networking/filter.rst, linux/seccomp.h).
//!
//! ```text
//!   struct seccomp_data: number u32, architecture u32, instruction pointer u64, arguments u64 × 6     little-endian
//!
//!   load architecture ─► native? ─► load number ─► search ─► leaf: answer, or conditions and then answers
//!                     └► 32-bit? ─► load number ─► search …
//!                     └► kill
//! ```
//! Every leaf ends with a return instruction, so there are no backward jumps and no shared branches. The tree is built
//! from its leaves up, and the distance of a jump is the length of the left branch.

use std::collections::BTreeMap;

use super::{Action, Architecture, Compare, Condition, Known, Profile, Rule, X32_BIT, calls};
use crate::Error;

/// Maximum number of instructions (BPF_MAXINSNS).
const INSTRUCTIONS_MAX: usize = 4096;

const LOAD: u16 = 0x20;
const JUMP: u16 = 0x05;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_GREATER: u16 = 0x25;
const JUMP_GREATER_OR_EQUAL: u16 = 0x35;
const AND: u16 = 0x54;
const RETURN: u16 = 0x06;

/// Offset of the call number in `seccomp_data`, in bytes.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;

/// An instruction, `struct sock_filter`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Instruction {
    code: u16,
    if_true: u8,
    if_false: u8,
    value: u32,
}

fn plain(code: u16, value: u32) -> Instruction {
    Instruction { code, if_true: 0, if_false: 0, value }
}

fn answer(action: Action) -> Vec<Instruction> {
    vec![plain(RETURN, action.code())]
}

pub(super) fn program(profile: &Profile) -> Result<Vec<u8>, Error> {
    let mut code = answer(Action::KillProcess);
    let mut audits: Vec<u32> = Vec::new();
    for audit in profile.architectures.iter().map(|architecture| architecture.audit()) {
        if !audits.contains(&audit) {
            audits.push(audit);
        }
    }
    // Built from the end: each test falls through to the next.
    for audit in audits.into_iter().rev() {
        let section = section(profile, audit);
        code = choose(plain(JUMP_EQUAL, audit), section, code);
    }
    code.insert(0, plain(LOAD, ARCHITECTURE));
    if code.len() > INSTRUCTIONS_MAX {
        let why = format!("{} instructions, the kernel takes {INSTRUCTIONS_MAX}", code.len());
        return Err(Error::invalid("seccomp", why));
    }
    Ok(code.into_iter().flat_map(encode).collect())
}

fn encode(instruction: Instruction) -> impl Iterator<Item = u8> {
    let Instruction { code, if_true, if_false, value } = instruction;
    let [a, b] = code.to_ne_bytes();
    [a, b, if_true, if_false].into_iter().chain(value.to_ne_bytes())
}

/// Emits `test`, then the branch `holds`, then the branch `does_not`.
fn choose(test: Instruction, holds: Vec<Instruction>, does_not: Vec<Instruction>) -> Vec<Instruction> {
    let mut code = Vec::with_capacity(holds.len() + does_not.len() + 2);
    match u8::try_from(holds.len()) {
        Ok(length) => code.push(Instruction { if_false: length, ..test }),
        // Conditional jumps are limited to 255 instructions, this one is not.
        Err(_) => {
            code.push(Instruction { if_true: 1, ..test });
            code.push(plain(JUMP, holds.len() as u32));
            // If the test holds, the jump is skipped and this branch follows.
        }
    }
    code.extend(holds);
    code.extend(does_not);
    code
}

/// The code for all architectures with the same audit value.
fn section(profile: &Profile, audit: u32) -> Vec<Instruction> {
    let mut leaves: BTreeMap<u32, Vec<Instruction>> = BTreeMap::new();
    let has = |wanted| profile.architectures.contains(&wanted);
    let shares_x32 = audit == Architecture::X86_64.audit();
    for architecture in profile.architectures.iter().filter(|one| one.audit() == audit) {
        for (number, rules) in by_number(profile, *architecture) {
            leaves.insert(number, leaf(profile, &rules));
        }
    }
    // Ranges from each start to the next; numbers between two calls get the default action.
    let mut ranges: Vec<(u32, Vec<Instruction>)> = Vec::new();
    let mut push = |start: u32, code: Vec<Instruction>| {
        if ranges.last().is_none_or(|(_, last)| *last != code) {
            ranges.push((start, code));
        }
    };
    push(0, answer(profile.default));
    let fill = |push: &mut dyn FnMut(u32, Vec<Instruction>), from: u32, to: u32| {
        let is_x32 = shares_x32 && from & X32_BIT != 0;
        let is_its = |one: &&Architecture| one.audit() == audit && (**one == Architecture::X32) == is_x32;
        let architecture = profile.architectures.iter().find(is_its);
        fill(push, from..to, profile, architecture.map_or(PRIVATE, |one| last_known(profile, *one)));
    };
    let mut next = 0;
    for (number, code) in leaves {
        if shares_x32 && next <= X32_BIT && number >= X32_BIT {
            fill(&mut push, next, X32_BIT);
            next = X32_BIT;
        }
        fill(&mut push, next, number);
        push(number, code);
        next = number + 1;
    }
    if shares_x32 && next <= X32_BIT {
        fill(&mut push, next, X32_BIT);
        // Numbers of an architecture that the profile does not list.
        push(
            X32_BIT,
            if has(Architecture::X32) { answer(profile.default) } else { answer(Action::KillProcess) },
        );
        if has(Architecture::X32) {
            fill(&mut push, X32_BIT, u32::MAX);
        }
    } else {
        fill(&mut push, next, u32::MAX);
    }
    let mut code = vec![plain(LOAD, NUMBER)];
    code.extend(search(&ranges));
    code
}

/// First number of private calls of an architecture (arm's set_tls is 0xf0005), which programs do not use to test for
/// new calls.
const PRIVATE: u32 = 0x1000;

/// The last number of an architecture that the profile knows, without the bit of x32.
fn last_known(profile: &Profile, architecture: Architecture) -> u32 {
    let names = profile.rules.iter().flat_map(|rule| &rule.names);
    let numbers = names.filter_map(|name| architecture.number(name)).map(|number| number & !X32_BIT);
    match profile.known {
        Known::Build => calls::LAST,
        Known::Named => numbers.filter(|number| *number < PRIVATE).max().unwrap_or(PRIVATE),
    }
}

/// Fills the range of numbers between two calls: the default action up to the last known number, ENOSYS after it.
fn fill(
    push: &mut dyn FnMut(u32, Vec<Instruction>),
    range: std::ops::Range<u32>,
    profile: &Profile,
    last: u32,
) {
    if range.is_empty() {
        return;
    }
    let base = range.start & X32_BIT;
    let mut push_at = |number: u32| {
        let is_unknown = (last + 1..PRIVATE).contains(&(number - base));
        push(number, answer(if is_unknown { profile.unknown } else { profile.default }));
    };
    push_at(range.start);
    for border in [base | (last + 1).min(PRIVATE), base | PRIVATE] {
        if range.start < border && border < range.end {
            push_at(border);
        }
    }
}

/// The rules for each call of an architecture, in order.
fn by_number(profile: &Profile, architecture: Architecture) -> BTreeMap<u32, Vec<&Rule>> {
    let mut numbers: BTreeMap<u32, Vec<&Rule>> = BTreeMap::new();
    for rule in &profile.rules {
        for number in rule.names.iter().filter_map(|name| architecture.number(name)) {
            numbers.entry(number).or_default().push(rule);
        }
    }
    numbers
}

/// The code for a call: its rules with conditions in their order, then the first rule without conditions, or the
/// default action. Of a profile from a file, rules with the default action are left out, as by runc (`matchCall` in
/// libcontainer/seccomp/seccomp_linux.go): one of them would otherwise end the search before a rule with another action.
fn leaf(profile: &Profile, rules: &[&Rule]) -> Vec<Instruction> {
    let counts = |rule: &&&Rule| profile.known == Known::Build || rule.action != profile.default;
    let (plain, conditional): (Vec<&Rule>, Vec<&Rule>) =
        rules.iter().filter(counts).partition(|rule| rule.conditions.is_empty());
    let mut code: Vec<Instruction> = conditional.into_iter().flat_map(block).collect();
    code.extend(answer(plain.first().map_or(profile.default, |rule| rule.action)));
    code
}

/// The continuation after a comparison.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    /// Continue with the next instruction.
    Next,
    /// The condition holds: continue after it.
    Holds,
    /// The condition does not hold: continue after the rule.
    Failed,
}

/// The code of a rule: its conditions, then its action; the next rule follows if a condition does not hold. There are
/// at most 12 conditions of six instructions, so that every jump is short enough.
fn block(rule: &Rule) -> Vec<Instruction> {
    let mut code: Vec<(Instruction, Then, Then, usize)> = Vec::new();
    for condition in &rule.conditions {
        let check = check(*condition);
        let end = code.len() + check.len();
        code.extend(
            check.into_iter().map(|(instruction, holds, does_not)| (instruction, holds, does_not, end)),
        );
    }
    let failed = code.len() + 1;
    let resolved = code.into_iter().enumerate().map(|(at, (instruction, holds, does_not, end))| {
        let distance = |then| match then {
            Then::Next => 0,
            Then::Holds => end - at - 1,
            Then::Failed => failed - at - 1,
        };
        Instruction { if_true: distance(holds) as u8, if_false: distance(does_not) as u8, ..instruction }
    });
    resolved.chain(answer(rule.action)).collect()
}

/// The code of a condition. Arguments have 64 bits and the BPF machine has 32, so the low half is compared only if the
/// high halves are equal.
fn check(condition: Condition) -> Vec<(Instruction, Then, Then)> {
    use Then::{Failed, Holds, Next};
    let Condition { argument, compare, value } = condition;
    let (high, low) = ((value >> 32) as u32, value as u32);
    let at = ARGUMENTS + 8 * u32::from(argument);
    let load = |from| (plain(LOAD, from), Next, Next);
    let test = |code, value, holds, does_not| (plain(code, value), holds, does_not);
    let ordered = |code, holds, does_not, greater, less| {
        vec![
            load(at + 4),
            test(JUMP_GREATER, high, greater, Next),
            test(JUMP_EQUAL, high, Next, less),
            load(at),
            test(code, low, holds, does_not),
        ]
    };
    match compare {
        Compare::Equal => vec![
            load(at + 4),
            test(JUMP_EQUAL, high, Next, Failed),
            load(at),
            test(JUMP_EQUAL, low, Next, Failed),
        ],
        Compare::NotEqual => vec![
            load(at + 4),
            test(JUMP_EQUAL, high, Next, Holds),
            load(at),
            test(JUMP_EQUAL, low, Failed, Next),
        ],
        Compare::GreaterOrEqual => ordered(JUMP_GREATER_OR_EQUAL, Next, Failed, Holds, Failed),
        Compare::Greater => ordered(JUMP_GREATER, Next, Failed, Holds, Failed),
        Compare::Less => ordered(JUMP_GREATER_OR_EQUAL, Failed, Next, Failed, Holds),
        Compare::LessOrEqual => ordered(JUMP_GREATER, Failed, Next, Failed, Holds),
        Compare::Masked { mask } => vec![
            load(at + 4),
            (plain(AND, (mask >> 32) as u32), Next, Next),
            test(JUMP_EQUAL, high, Next, Failed),
            load(at),
            (plain(AND, mask as u32), Next, Next),
            test(JUMP_EQUAL, low, Next, Failed),
        ],
    }
}

/// The code of a binary search for the last range that starts at or below the number.
fn search(ranges: &[(u32, Vec<Instruction>)]) -> Vec<Instruction> {
    match ranges {
        [] => answer(Action::KillProcess),
        [(_, code)] => code.clone(),
        _ => {
            let (below, above) = ranges.split_at(ranges.len() / 2);
            choose(plain(JUMP_GREATER_OR_EQUAL, above[0].0), search(above), search(below))
        }
    }
}
