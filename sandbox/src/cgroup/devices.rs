//! Restricts the devices that a container may open or create: on v1 with lines in devices.allow, on v2 with an eBPF
//! program that the kernel runs at each open and mknod (Documentation/admin-guide/cgroup-v2.rst, "Device controller";
//! BPF_PROG_TYPE_CGROUP_DEVICE, Linux 4.15). Both are generated from one list of rules.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

use coracle_sys::bpf;
use nix::errno::Errno;

use super::resources::DeviceRule;
use crate::Error;
use crate::plan::{DeviceKind, DeviceNode};

/// A default rule: kind, major and minor (`None`: any), permissions, and the path of its default node.
type DefaultRule = (DeviceKind, Option<u32>, Option<u32>, &'static str, Option<&'static str>);

/// Devices that every container may open or create (CRI 3.13): mknod of any device, because a device node alone does
/// not permit opening it; the default nodes, with their paths; the terminal multiplexer and its slaves; /dev/net/tun,
/// whose node a pod has from a volume or makes itself, and which gives nothing without CAP_NET_ADMIN. The list is that
/// of runc 1.2.4 and later (libcontainer/specconv: `AllowedDevices`).
const DEFAULTS: [DefaultRule; 11] = [
    (DeviceKind::Character, None, None, "m", None),
    (DeviceKind::Block, None, None, "m", None),
    (DeviceKind::Character, Some(1), Some(3), "rwm", Some("/dev/null")),
    (DeviceKind::Character, Some(1), Some(5), "rwm", Some("/dev/zero")),
    (DeviceKind::Character, Some(1), Some(7), "rwm", Some("/dev/full")),
    (DeviceKind::Character, Some(1), Some(8), "rwm", Some("/dev/random")),
    (DeviceKind::Character, Some(1), Some(9), "rwm", Some("/dev/urandom")),
    (DeviceKind::Character, Some(5), Some(0), "rwm", Some("/dev/tty")),
    (DeviceKind::Character, Some(5), Some(2), "rwm", None),
    (DeviceKind::Character, Some(136), None, "rwm", None),
    (DeviceKind::Character, Some(10), Some(200), "rwm", None),
];

/// Returns the default rules followed by the requested ones. A node in `nodes` at the path of a default node replaces
/// its rule, too, as in runc: "r" for /dev/full means that it cannot be written.
pub(super) fn all(asked: &[DeviceRule], nodes: &[DeviceNode]) -> Result<Vec<DeviceRule>, Error> {
    for rule in asked {
        if rule.access.is_empty() || !rule.access.bytes().all(|byte| b"rwm".contains(&byte)) {
            return Err(Error::invalid("devices", format!("{:?} are not permissions of rwm", rule.access)));
        }
    }
    let is_replaced = |path: Option<&str>| path.is_some_and(|path| nodes.iter().any(|node| node.is_at(path)));
    let defaults = DEFAULTS.into_iter().filter(|(.., path)| !is_replaced(*path));
    let rule = |(kind, major, minor, access, _): DefaultRule| DeviceRule {
        kind,
        major,
        minor,
        access: access.to_owned(),
    };
    Ok(defaults.map(rule).chain(asked.iter().cloned()).collect())
}

/// Formats a rule as a line of devices.allow.
pub(super) fn line(rule: &DeviceRule) -> String {
    let kind = match rule.kind {
        DeviceKind::Character => 'c',
        DeviceKind::Block => 'b',
    };
    let number = |number: Option<u32>| number.map_or("*".into(), |number| number.to_string());
    format!("{kind} {}:{} {}", number(rule.major), number(rule.minor), rule.access)
}

/// Restricts the cgroup2 directory to these rules. Programs of parent cgroups also apply.
///
/// # Errors
/// [`Error::Kernel`] if the kernel does not accept such programs, or not from this process.
pub(super) fn restrict(directory: &Path, rules: &[DeviceRule]) -> Result<(), Error> {
    let kernel =
        |op, errno: coracle_sys::Errno| Error::kernel(op, directory.display(), Errno::from_raw(errno.0));
    let cgroup = File::open(directory).map_err(|error| Error::io("open", directory.display(), &error))?;
    let program =
        bpf::device_program(&program(rules)).map_err(|errno| kernel("load device rules for", errno))?;
    bpf::attach_device_program(program.borrow(), cgroup.as_fd().into())
        .map_err(|errno| kernel("attach device rules to", errno))
}

/// Number of the BPF register for the return value; the context and values read from it have other registers
/// (Documentation/bpf/standardization/instruction-set.rst).
const ANSWER: u64 = 0;
const CONTEXT: u64 = 1;
const KIND: u64 = 2;
const ACCESS: u64 = 3;
const MAJOR: u64 = 4;
const MINOR: u64 = 5;
const SPARE: u64 = 6;

/// Operation code: load 32 bits.
const LOAD_WORD: u64 = 0x61;
const COPY: u64 = 0xbc;
const SET: u64 = 0xb4;
const AND: u64 = 0x54;
const SHIFT_RIGHT: u64 = 0x74;
const JUMP_UNLESS_EQUAL: u64 = 0x56;
const JUMP_UNLESS_EQUAL_REGISTER: u64 = 0x5e;
const EXIT: u64 = 0x95;

/// Encodes a `struct bpf_insn`.
fn instruction(code: u64, destination: u64, source: u64, offset: u64, immediate: u32) -> u64 {
    code | destination << 8 | source << 12 | offset << 16 | u64::from(immediate) << 32
}

/// Compiles the rules to a program, one block of comparisons for each rule. A comparison that fails jumps to the end of
/// the block. The first matching rule allows the access; the end of the program denies it.
fn program(rules: &[DeviceRule]) -> Vec<u64> {
    // `struct bpf_cgroup_dev_ctx`: kind in the lower half of the first word, access in the upper; major; minor.
    let mut program = vec![
        instruction(LOAD_WORD, KIND, CONTEXT, 0, 0),
        instruction(COPY, ACCESS, KIND, 0, 0),
        instruction(AND, KIND, 0, 0, 0xffff),
        instruction(SHIFT_RIGHT, ACCESS, 0, 0, 16),
        instruction(LOAD_WORD, MAJOR, CONTEXT, 4, 0),
        instruction(LOAD_WORD, MINOR, CONTEXT, 8, 0),
    ];
    for rule in rules {
        program.extend(block(rule));
    }
    program.extend([instruction(SET, ANSWER, 0, 0, 0), instruction(EXIT, 0, 0, 0, 0)]);
    program
}

fn block(rule: &DeviceRule) -> Vec<u64> {
    // BPF_DEVCG_DEV_… and BPF_DEVCG_ACC_… (include/uapi/linux/bpf.h).
    let kind = match rule.kind {
        DeviceKind::Block => 1,
        DeviceKind::Character => 2,
    };
    let bits = [('m', 1), ('r', 2), ('w', 4)];
    let access = bits.iter().filter(|(letter, _)| rule.access.contains(*letter)).map(|(_, bit)| bit).sum();
    let allow = [instruction(SET, ANSWER, 0, 0, 1), instruction(EXIT, 0, 0, 0, 0)];
    let mut tests = vec![
        (JUMP_UNLESS_EQUAL, KIND, 0, kind),
        // The requested access must not contain anything that is not allowed.
        (COPY, SPARE, ACCESS, 0),
        (AND, SPARE, 0, access),
        (JUMP_UNLESS_EQUAL_REGISTER, SPARE, ACCESS, 0),
    ];
    let numbers = [(MAJOR, rule.major), (MINOR, rule.minor)];
    tests.extend(
        numbers.into_iter().filter_map(|(register, number)| Some((JUMP_UNLESS_EQUAL, register, 0, number?))),
    );
    let behind = tests.len() + allow.len();
    let mut block = Vec::with_capacity(behind);
    for (index, (code, destination, source, immediate)) in tests.into_iter().enumerate() {
        let is_jump = matches!(code, JUMP_UNLESS_EQUAL | JUMP_UNLESS_EQUAL_REGISTER);
        let offset = if is_jump { (behind - index - 1) as u64 } else { 0 };
        block.push(instruction(code, destination, source, offset, immediate));
    }
    block.extend(allow);
    block
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Interprets a program like the kernel, for the operations that [`program`] uses.
    fn allows(program: &[u64], kind: u32, access: u32, major: u32, minor: u32) -> bool {
        let context = [kind | access << 16, major, minor];
        let mut registers = [0_u32; 8];
        let mut next = 0;
        loop {
            let word = program[next];
            let (code, immediate) = (word & 0xff, (word >> 32) as u32);
            let (destination, source) = ((word >> 8 & 15) as usize, (word >> 12 & 15) as usize);
            let offset = (word >> 16 & 0xffff) as usize;
            next += 1;
            match code {
                LOAD_WORD => registers[destination] = context[offset / 4],
                COPY => registers[destination] = registers[source],
                SET => registers[destination] = immediate,
                AND => registers[destination] &= immediate,
                SHIFT_RIGHT => registers[destination] >>= immediate,
                JUMP_UNLESS_EQUAL if registers[destination] != immediate => next += offset,
                JUMP_UNLESS_EQUAL_REGISTER if registers[destination] != registers[source] => next += offset,
                JUMP_UNLESS_EQUAL | JUMP_UNLESS_EQUAL_REGISTER => {}
                EXIT => return registers[0] == 1,
                other => panic!("operation {other:#x}"),
            }
        }
    }

    #[test]
    fn a_device_program_decides_as_its_rules() {
        let asked = DeviceRule { kind: DeviceKind::Block, major: Some(8), minor: None, access: "r".into() };
        let program = program(&all(&[asked], &[]).unwrap());
        let (block, character) = (1, 2);
        let (make, read, write) = (1, 2, 4);
        for (expected, kind, access, major, minor) in [
            (true, character, read | write, 1, 3),
            (true, character, make | read | write, 136, 77),
            (true, character, make, 10, 229),
            (true, character, make | read | write, 10, 200),
            (true, block, make, 8, 0),
            (true, block, read, 8, 17),
            (false, block, read | write, 8, 17),
            (false, block, make | read, 8, 17),
            (false, block, read, 9, 0),
            (false, character, read, 8, 0),
            (false, character, read, 1, 1),
            (false, character, read, 10, 229),
        ] {
            let said = allows(&program, kind, access, major, minor);
            assert_eq!(said, expected, "kind {kind} access {access} {major}:{minor}");
        }
    }

    #[test]
    fn a_requested_node_replaces_the_rule_of_the_default_node() {
        let at = |path: &str| DeviceNode {
            path: path.into(),
            kind: DeviceKind::Character,
            major: 1,
            minor: 7,
            mode: 0o666,
            owner: (0, 0),
        };
        let asked =
            [DeviceRule { kind: DeviceKind::Character, major: Some(1), minor: Some(7), access: "r".into() }];
        let (character, read, write) = (2, 2, 4);
        for (path, may_write) in [("/dev/full", false), ("//dev/./full", false), ("/dev/other", true)] {
            let program = program(&all(&asked, &[at(path)]).unwrap());
            assert!(allows(&program, character, read, 1, 7), "{path}");
            assert_eq!(allows(&program, character, write, 1, 7), may_write, "{path}");
            assert!(allows(&program, character, write, 1, 3), "{path}");
        }
    }
}
