//! Runs compiled programs in an interpreter of the kernel's instruction set and compares the results with a direct
//! evaluation of the profile; `tests/lifecycle` tests the same programs with the kernel.

use super::*;

/// A call as the input of a filter.
#[derive(Clone, Copy, Debug)]
struct Call {
    architecture: Architecture,
    number: u32,
    arguments: [u64; 6],
}

/// Runs a program; panics if the kernel's verifier would refuse it.
fn interpret(program: &[u8], call: Call) -> u32 {
    let mut data = call.number.to_le_bytes().to_vec();
    data.extend(call.architecture.audit().to_le_bytes());
    data.extend(0_u64.to_le_bytes());
    data.extend(call.arguments.iter().flat_map(|argument| argument.to_le_bytes()));
    let instructions: Vec<&[u8]> = program.chunks(8).collect();
    let (mut at, mut accumulator) = (0_usize, 0_u32);
    loop {
        let one = instructions[at];
        let value = u32::from_ne_bytes(one[4..].try_into().unwrap());
        at += 1;
        let jump = |holds: bool| usize::from(if holds { one[2] } else { one[3] });
        match u16::from_ne_bytes([one[0], one[1]]) {
            0x20 => {
                let from = value as usize;
                assert!(from.is_multiple_of(4), "loads are of aligned words");
                accumulator = u32::from_le_bytes(data[from..from + 4].try_into().unwrap());
            }
            0x54 => accumulator &= value,
            0x05 => at += value as usize,
            0x15 => at += jump(accumulator == value),
            0x25 => at += jump(accumulator > value),
            0x35 => at += jump(accumulator >= value),
            0x06 => return value,
            other => panic!("instruction {other:#x}"),
        }
    }
}

/// Evaluates the profile directly, without compiling it.
fn evaluate(profile: &Profile, call: Call) -> Action {
    if !profile.architectures.contains(&call.architecture) {
        return Action::KillProcess;
    }
    let is_about =
        |rule: &&Rule| rule.names.iter().any(|name| call.architecture.number(name) == Some(call.number));
    let holds = |condition: &Condition| {
        let argument = call.arguments[usize::from(condition.argument)];
        let value = condition.value;
        match condition.compare {
            Compare::NotEqual => argument != value,
            Compare::Less => argument < value,
            Compare::LessOrEqual => argument <= value,
            Compare::Equal => argument == value,
            Compare::GreaterOrEqual => argument >= value,
            Compare::Greater => argument > value,
            Compare::Masked { mask } => argument & mask == value,
        }
    };
    let about: Vec<&Rule> = profile.rules.iter().filter(is_about).collect();
    let conditional =
        about.iter().find(|rule| !rule.conditions.is_empty() && rule.conditions.iter().all(holds));
    let plain = about.iter().find(|rule| rule.conditions.is_empty());
    if let Some(rule) = conditional.or(plain) {
        return rule.action;
    }
    let plain = |number: u32| if call.architecture == Architecture::X32 { number & !X32_BIT } else { number };
    let named = profile.rules.iter().flat_map(|rule| &rule.names);
    let named = named.filter_map(|name| call.architecture.number(name)).map(plain);
    let last = match profile.known {
        Known::Build => calls::LAST,
        Known::Named => named.filter(|number| *number < 0x1000).max().unwrap_or(0x1000),
    };
    let number = plain(call.number);
    let is_known = !about.is_empty() || number <= last || number >= 0x1000;
    if is_known { profile.default } else { profile.unknown }
}

fn program(profile: &Profile) -> Vec<u8> {
    compile(profile).unwrap().program
}

const ALL: [Architecture; 6] = Architecture::ALL;

/// Numbers to be tested: those in which the six architectures differ, and those around every limit.
fn numbers(architecture: Architecture) -> impl Iterator<Item = u32> {
    let bit = if architecture == Architecture::X32 { X32_BIT } else { 0 };
    (0..600).chain([0xfff, 0x1000, 0xf_0002, 0xf_0005, 0xffff]).map(move |number| number | bit)
}

#[test]
fn the_table_is_sorted_and_has_well_known_numbers() {
    assert!(calls::CALLS.is_sorted_by_key(|(name, _)| name));
    for (name, expected) in [
        ("read", [Some(0), Some(3), Some(X32_BIT), Some(63), Some(3), Some(63)]),
        ("openat", [Some(257), Some(295), Some(X32_BIT | 257), Some(56), Some(322), Some(56)]),
        ("ioctl", [Some(16), Some(54), Some(X32_BIT | 514), Some(29), Some(54), Some(29)]),
        ("open", [Some(2), Some(5), Some(X32_BIT | 2), None, Some(5), None]),
        ("fcntl64", [None, Some(221), None, None, Some(221), None]),
        ("clock_gettime64", [None, Some(403), None, None, Some(403), None]),
        ("clone3", [Some(435), Some(435), Some(X32_BIT | 435), Some(435), Some(435), Some(435)]),
        ("mseal", [Some(462), Some(462), Some(X32_BIT | 462), Some(462), Some(462), Some(462)]),
        ("name_to_handle_at", [Some(303), Some(341), Some(X32_BIT | 303), Some(264), Some(370), Some(264)]),
        ("open_by_handle_at", [Some(304), Some(342), Some(X32_BIT | 304), Some(265), Some(371), Some(265)]),
        ("uretprobe", [Some(335), None, None, None, None, None]),
        ("set_tls", [None, None, None, None, Some(0xf_0005), None]),
        ("no_such_call", [None; 6]),
    ] {
        assert_eq!(ALL.map(|architecture| architecture.number(name)), expected, "{name}");
    }
}

/// For random profiles, the program and the direct evaluation agree for every call and for arguments around the limits.
#[test]
fn programs_decide_as_the_direct_evaluation() {
    let mut seed = 5_u64;
    let mut random = move |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % below
    };
    let actions =
        [Action::Allow, Action::Errno(1), Action::Errno(38), Action::Log, Action::Trap, Action::KillThread];
    let values = [0, 1, 40, 0xffff_ffff, 0x1_0000_0000, 0x1_0000_0028, u64::MAX, 0x7e02_0000];
    for round in 0..40 {
        let condition = |random: &mut dyn FnMut(usize) -> usize| Condition {
            argument: random(6) as u8,
            compare: [
                Compare::NotEqual,
                Compare::Less,
                Compare::LessOrEqual,
                Compare::Equal,
                Compare::GreaterOrEqual,
                Compare::Greater,
                Compare::Masked { mask: values[random(values.len())] },
            ][random(7)],
            value: values[random(values.len())],
        };
        let rules = (0..random(12))
            .map(|_| Rule {
                names: (0..1 + random(15))
                    .map(|_| calls::CALLS[random(calls::CALLS.len())].0.to_owned())
                    .collect(),
                conditions: (0..random(4)).map(|_| condition(&mut random)).collect(),
                action: actions[random(actions.len())],
            })
            .collect();
        let mut architectures = MACHINES[round % MACHINES.len()].to_vec();
        architectures.truncate(1 + random(3));
        let profile = Profile {
            default: actions[random(actions.len())],
            unknown: actions[random(actions.len())],
            known: [Known::Build, Known::Named][random(2)],
            architectures,
            rules,
            flags: 0,
        };
        let program = program(&profile);
        for architecture in ALL {
            for number in numbers(architecture) {
                let arguments = [(); 6].map(|()| values[random(values.len())]);
                let call = Call { architecture, number, arguments };
                let expected = evaluate(&profile, call).code();
                assert_eq!(interpret(&program, call), expected, "round {round}: {call:?}");
            }
        }
    }
}

#[test]
fn the_default_profile_refuses_dangerous_calls() {
    let answer = |capabilities: u64, name: &str, arguments: [u64; 6]| {
        let architecture = Architecture::HERE[0];
        let number = architecture.number(name).unwrap_or_else(|| panic!("{name}"));
        interpret(&program(&runtime_default(capabilities)), Call { architecture, number, arguments })
    };
    const PLAIN: u64 = 0xa804_25fb;
    let admin = PLAIN | crate::capability::bit("CAP_SYS_ADMIN").unwrap();
    let (allow, eperm, enosys) = (Action::Allow.code(), Action::Errno(1).code(), Action::Errno(38).code());
    for (name, first, plain, with_admin) in [
        ("read", 0, allow, allow),
        ("execve", 0, allow, allow),
        ("ptrace", 0, allow, allow),
        ("chroot", 0, allow, allow),
        ("mount", 0, eperm, allow),
        ("setns", 0, eperm, allow),
        ("bpf", 0, eperm, allow),
        ("keyctl", 0, eperm, eperm),
        ("userfaultfd", 0, eperm, eperm),
        ("io_uring_setup", 0, eperm, eperm),
        ("kexec_load", 0, eperm, eperm),
        ("clock_settime", 0, eperm, eperm),
        ("clone3", 0, enosys, allow),
        ("clone", 0x0001_0f00, allow, allow),
        ("clone", 0x1000_0000, eperm, allow),
        ("unshare", 0x1000_0000, eperm, allow),
        ("socket", 2, allow, allow),
        ("socket", 38, eperm, eperm),
        ("socket", 39, allow, allow),
        ("socket", 40, eperm, eperm),
        ("socket", 0x1_0000_0002, allow, allow),
        ("socket", 0x1_0000_0026, eperm, eperm),
        ("socket", 0xffff_ffff_0000_0028, eperm, eperm),
        ("file_getattr", 0, enosys, enosys),
        ("open_by_handle_at", 0, eperm, eperm),
        ("process_madvise", 0, eperm, eperm),
        ("personality", 8, allow, allow),
        ("personality", 0x4_0000, eperm, eperm),
    ] {
        let arguments = [first, 0, 0, 0, 0, 0];
        assert_eq!(answer(PLAIN, name, arguments), plain, "{name} {first:#x}");
        assert_eq!(answer(admin, name, arguments), with_admin, "{name} {first:#x} with CAP_SYS_ADMIN");
    }
}

/// RuntimeDefault compiled on a machine with these architectures.
fn default_on(architectures: &[Architecture], capabilities: u64) -> Profile {
    Profile { architectures: architectures.to_vec(), ..runtime_default(capabilities) }
}

/// The architectures of each machine for which coracle is built.
const MACHINES: [&[Architecture]; 4] = [
    &[Architecture::X86_64, Architecture::X86, Architecture::X32],
    &[Architecture::Aarch64, Architecture::Arm],
    &[Architecture::Arm],
    &[Architecture::Riscv64],
];

#[test]
fn the_default_program_answers_as_the_profile_reads_on_every_architecture() {
    for architectures in MACHINES {
        let profile = default_on(architectures, 0);
        let program = program(&profile);
        assert!(program.len() <= 1600 * 8, "{} instructions", program.len() / 8);
        for architecture in architectures {
            for number in numbers(*architecture) {
                let call = Call { architecture: *architecture, number, arguments: [0; 6] };
                assert_eq!(interpret(&program, call), evaluate(&profile, call).code(), "{call:?}");
            }
            let next = architecture.number("mseal").unwrap() + 100;
            let call = Call { architecture: *architecture, number: next, arguments: [0; 6] };
            assert_eq!(interpret(&program, call), Action::Errno(38).code());
        }
    }
}

/// The kernel refuses longer ones (BPF_MAXINSNS).
#[test]
fn a_profile_of_more_than_4096_instructions_is_refused() {
    let mut profile = default_on(&ALL[..1], u64::MAX);
    let rule = profile.rules.iter().find(|rule| !rule.conditions.is_empty()).cloned().unwrap();
    profile.rules.extend(std::iter::repeat_n(rule, 10_000));
    let refused = compile(&profile).unwrap_err().to_string();
    assert!(refused.ends_with("instructions, the kernel takes 4096"), "{refused}");
}

/// Finding 8 in docs/results/0.1.0.md: no architecture's `socket` makes an AF_ALG or AF_VSOCK socket, also with bits that
/// the kernel ignores. Regression: AF_ALG was allowed on every architecture, and AF_VSOCK if any bit of the upper half
/// was set.
#[test]
fn af_alg_and_af_vsock_are_refused_on_every_architecture() {
    for architectures in MACHINES {
        let program = program(&default_on(architectures, u64::MAX));
        for architecture in architectures {
            let number = architecture.number("socket").unwrap();
            for (family, expected) in [
                (1, Action::Allow),
                (37, Action::Allow),
                (38, Action::Errno(1)),
                (39, Action::Allow),
                (40, Action::Errno(1)),
                (41, Action::Allow),
                (0x1_0000_0026, Action::Errno(1)),
                (0x8000_0000_0000_0028, Action::Errno(1)),
            ] {
                let call = Call { architecture: *architecture, number, arguments: [family, 3, 0, 0, 0, 0] };
                assert_eq!(interpret(&program, call), expected.code(), "{call:?}");
            }
        }
    }
}

/// Finding 9 in docs/results/0.1.0.md: 32-bit arm programs call set_tls before main. Regression: the table had none of arm's
/// private calls, RuntimeDefault returned EPERM and every such program ended; and aarch64 had no number for
/// open_by_handle_at.
#[test]
fn private_calls_of_arm_are_allowed_by_the_default_profile() {
    let plain = program(&default_on(MACHINES[1], 0));
    let search = program(&default_on(MACHINES[1], crate::capability::bit("CAP_DAC_READ_SEARCH").unwrap()));
    let (allow, eperm) = (Action::Allow.code(), Action::Errno(1).code());
    for number in 0xf_0001..=0xf_0006 {
        let call = Call { architecture: Architecture::Arm, number, arguments: [0; 6] };
        assert_eq!(interpret(&plain, call), allow, "{call:?}");
    }
    for number in [0xf_0000, 0xf_0007, 0xf000, 0xf005] {
        let call = Call { architecture: Architecture::Arm, number, arguments: [0; 6] };
        assert_eq!(interpret(&plain, call), eperm, "{call:?}");
    }
    for (number, without, with) in [(264, allow, allow), (265, eperm, allow)] {
        let call = Call { architecture: Architecture::Aarch64, number, arguments: [0; 6] };
        assert_eq!((interpret(&plain, call), interpret(&search, call)), (without, with), "{call:?}");
    }
    // A profile that denies the call by name and allows all others.
    let mut deny = parse(
        br#"{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
            {"names": ["open_by_handle_at", "set_tls"], "action": "SCMP_ACT_ERRNO"}]}"#,
        0,
        "6.1",
    )
    .unwrap();
    deny.architectures = MACHINES[1].to_vec();
    let deny = program(&deny);
    for (architecture, number) in [(Architecture::Aarch64, 265), (Architecture::Arm, 0xf_0005)] {
        assert_eq!(interpret(&deny, Call { architecture, number, arguments: [0; 6] }), eperm, "{number}");
    }
}

/// Adding a number to the table requires a decision about RuntimeDefault. Regression: a new number was allowed
/// automatically.
#[test]
fn every_call_of_the_table_is_decided_once() {
    assert!(allowed::ALLOWED.is_sorted());
    let decided: Vec<&str> = allowed::ALLOWED.iter().copied().chain(default::not_allowed()).collect();
    for (name, _) in calls::CALLS {
        let times = decided.iter().filter(|decided| *decided == name).count();
        assert_eq!(times, 1, "{name} is in {times} lists of RuntimeDefault");
    }
    let is_call = |name: &&str| calls::CALLS.iter().any(|(call, _)| call == name);
    assert_eq!(
        decided.into_iter().find(|name| !is_call(name)),
        None,
        "a name in the lists is not a system call"
    );
}

#[test]
fn names_that_no_architecture_has_are_reported() {
    let profile = parse(
        br#"{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
            {"names": ["read", "set_tls", "openat_by_name", "vm86"], "action": "SCMP_ACT_ERRNO"},
            {"name": "statx2", "action": "SCMP_ACT_ERRNO"}]}"#,
        0,
        "6.1",
    )
    .unwrap();
    assert_eq!(profile.unknown_names().collect::<Vec<_>>(), ["openat_by_name", "statx2"]);
    assert_eq!(runtime_default(u64::MAX).unknown_names().next(), None);
}

#[test]
fn profiles_are_parsed_as_by_other_runtimes() {
    let text = br#"{
        "defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 38,
        "archMap": [{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86", "SCMP_ARCH_X32"]},
                    {"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": ["SCMP_ARCH_ARM"]}],
        "flags": ["SECCOMP_FILTER_FLAG_LOG"],
        "syscalls": [
            {"names": ["read", "no_such_call"], "action": "SCMP_ACT_ALLOW"},
            {"name": "chmod", "action": "SCMP_ACT_ERRNO"},
            {"names": ["mount"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN"]}},
            {"names": ["bpf"], "action": "SCMP_ACT_ALLOW", "excludes": {"caps": ["CAP_SYS_ADMIN"]}},
            {"names": ["ptrace"], "action": "SCMP_ACT_ALLOW", "includes": {"minKernel": "4.8"}, "args": null},
            {"names": ["kcmp"], "action": "SCMP_ACT_ALLOW", "includes": {"minKernel": "99.0"}},
            {"names": ["s390_runtime_instr"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["s390x"]}},
            {"names": ["socket"], "action": "SCMP_ACT_ALLOW",
             "args": [{"index": 0, "value": 40, "valueTwo": 0, "op": "SCMP_CMP_NE"}]}
        ]}"#;
    let profile = parse(text, 0, "6.1.0-18-amd64").unwrap();
    assert_eq!((profile.default, profile.flags), (Action::Errno(38), 2));
    assert_eq!(profile.architectures, Architecture::HERE);
    let names: Vec<&str> = profile.rules.iter().map(|rule| rule.names[0].as_str()).collect();
    assert_eq!(names, ["read", "chmod", "bpf", "ptrace", "socket"]);
    let admin = crate::capability::bit("CAP_SYS_ADMIN").unwrap();
    let names: Vec<String> =
        parse(text, admin, "6.1").unwrap().rules.into_iter().map(|rule| rule.names[0].clone()).collect();
    assert_eq!(names, ["read", "chmod", "mount", "ptrace", "socket"]);
}

/// Regression: calls that are newer than a profile gave EPERM, so that glibc, which falls back from clone3 to clone at
/// ENOSYS only, could not create a thread. In runc (libcontainer/seccomp/patchbpf) each architecture has its own last call.
#[test]
fn calls_above_the_last_one_that_a_file_names_do_not_exist() {
    let file = |default: &str| {
        let text = format!(
            r#"{{"defaultAction": "{default}", "defaultErrnoRet": 1, "syscalls": [
                {{"names": ["read", "statx", "set_tls"], "action": "SCMP_ACT_ALLOW"}},
                {{"names": ["newer_than_this_build"], "action": "SCMP_ACT_ALLOW"}}]}}"#
        );
        parse(text.as_bytes(), 0, "6.1").unwrap()
    };
    let (enosys, eperm) = (Action::Errno(38).code(), Action::Errno(1).code());
    for architectures in MACHINES {
        let on = |profile: Profile| program(&Profile { architectures: architectures.to_vec(), ..profile });
        let (refuse, kill) = (on(file("SCMP_ACT_ERRNO")), on(file("SCMP_ACT_KILL_PROCESS")));
        let permissive = ["SCMP_ACT_ALLOW", "SCMP_ACT_LOG", "SCMP_ACT_TRACE"].map(|name| on(file(name)));
        for architecture in architectures {
            let last = architecture.number("statx").unwrap();
            let call = |number| Call { architecture: *architecture, number, arguments: [0; 6] };
            assert_eq!(interpret(&refuse, call(last)), Action::Allow.code());
            assert_eq!(interpret(&refuse, call(last - 1)), eperm);
            for newer in [last + 1, architecture.number("clone3").unwrap(), last + 1000] {
                assert_eq!(interpret(&refuse, call(newer)), enosys, "{architecture:?} {newer}");
                assert_eq!(interpret(&kill, call(newer)), enosys, "{architecture:?} {newer}");
                for program in &permissive {
                    assert_ne!(interpret(program, call(newer)), enosys, "{architecture:?} {newer}");
                }
            }
        }
    }
}

/// runc makes a rule of each condition; of a range one side always holds.
#[test]
fn of_several_conditions_on_one_argument_one_suffices() {
    let text = br#"{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[{"names":["personality"],"action":"SCMP_ACT_ALLOW","args":[
        {"index":0,"value":0,"op":"SCMP_CMP_EQ"},{"index":0,"value":8,"op":"SCMP_CMP_EQ"}]},
        {"names":["socket"],"action":"SCMP_ACT_ALLOW","args":[
        {"index":0,"value":1,"op":"SCMP_CMP_EQ"},{"index":1,"value":2,"op":"SCMP_CMP_EQ"}]}]}"#;
    let profile = parse(text, 0, "6.1").unwrap();
    let conditions: Vec<usize> = profile.rules.iter().map(|rule| rule.conditions.len()).collect();
    assert_eq!(conditions, [1, 1, 2]);
    assert!(profile.rules[..2].iter().all(|rule| rule.names == ["personality"]));
}

/// runc leaves them out, so that the rule with another action counts.
#[test]
fn rules_of_a_file_with_the_default_action_have_no_effect() {
    let text = br#"{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[{"names":["personality"],"action":"SCMP_ACT_ERRNO","args":[
        {"index":0,"value":0,"op":"SCMP_CMP_NE"},{"index":0,"value":8,"op":"SCMP_CMP_NE"}]},
        {"names":["personality"],"action":"SCMP_ACT_ALLOW"}]}"#;
    let architecture = Architecture::X86_64;
    let number = architecture.number("personality").unwrap();
    let profile = Profile { architectures: vec![architecture], ..parse(text, 0, "6.1").unwrap() };
    let call = Call { architecture, number, arguments: [5; 6] };
    assert_eq!(interpret(&program(&profile), call), Action::Allow.code());
}

#[test]
fn names_of_members_are_compared_without_case() {
    let text = br#"{"defaultaction":"SCMP_ACT_ALLOW","SYSCALLS":[{"Names":["chmod"],"ACTION":"SCMP_ACT_ERRNO","ErrnoRet":5,
        "Args":[{"INDEX":1,"valuetwo":7,"Op":"SCMP_CMP_MASKED_EQ"}]}]}"#;
    let profile = parse(text, 0, "6.1").unwrap();
    assert_eq!(profile.rules[0].action, Action::Errno(5));
    assert_eq!(profile.rules[0].conditions[0].value, 7);
}

#[test]
fn null_is_an_empty_list() {
    let text = |list: &str| {
        format!(
            r#"{{"defaultAction": "SCMP_ACT_ERRNO", "architectures": {list}, "archMap": {list}, "flags": {list},
                "syscalls": [{{"names": ["read"], "action": "SCMP_ACT_ALLOW", "args": {list},
                    "includes": {{"caps": {list}, "arches": {list}}}, "excludes": {{"caps": {list}}}}},
                    {{"names": {list}, "action": "SCMP_ACT_ALLOW"}}]}}"#
        )
    };
    let parsed = |list: &str| parse(text(list).as_bytes(), 0, "6.1");
    assert_eq!(parsed("null").unwrap(), parsed("[]").unwrap());
    let text = r#"{"defaultAction": "SCMP_ACT_ERRNO", "syscalls": null, "listenerPath": null}"#;
    assert_eq!(parse(text.as_bytes(), 0, "6.1").unwrap().rules, []);
    let text = r#"{"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [
        {"names": ["read"], "action": "SCMP_ACT_ALLOW", "includes": null, "excludes": null, "errnoRet": null}]}"#;
    assert_eq!(parse(text.as_bytes(), 0, "6.1").unwrap().rules.len(), 1);
}

#[test]
fn errors_of_a_profile_name_the_field() {
    for (text, expected) in [
        ("{", "damaged"),
        ("{}", "defaultAction"),
        (r#"{"defaultAction": "SCMP_ACT_DANCE"}"#, "defaultAction: \"SCMP_ACT_DANCE\" is no action"),
        (r#"{"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 5000}"#, "5000 is no errno"),
        (r#"{"defaultAction": "SCMP_ACT_ALLOW", "listenerPath": "/x"}"#, "listenerPath"),
        (r#"{"defaultAction": "SCMP_ACT_ALLOW", "flags": ["X"]}"#, "flags"),
        (r#"{"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["vax"]}"#, "architectures"),
        (
            r#"{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["x"], "action": "SCMP_ACT_NOTIFY"}]}"#,
            "syscalls[0].action",
        ),
        (
            r#"{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["x"], "action": "SCMP_ACT_ALLOW",
                "args": [{"index": 6, "value": 0, "op": "SCMP_CMP_EQ"}]}]}"#,
            "argument 6",
        ),
    ] {
        let error = parse(text.as_bytes(), 0, "6.1").unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("seccomp"), "{text}: {error}");
    }
    // Parsing any bytes terminates without a panic.
    let text =
        br#"{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["x"], "action": "SCMP_ACT_TRAP"}]}"#;
    for offset in 0..text.len() {
        for byte in [0, b'"', b'{', b'9', 0xff] {
            let mut damaged = text.to_vec();
            damaged[offset] = byte;
            let _ = parse(&damaged, 0, "6.1").map(|profile| compile(&profile));
        }
    }
}

/// Compares the decisions with those of libseccomp's programs of the same profile (`tests/seccomp/make`), for each
/// call.
#[test]
fn decisions_are_those_of_libseccomp() {
    let text = include_bytes!("../../tests/seccomp/profile.json");
    let mut profile = parse(text, 0, "6.1").unwrap();
    // ENOSYS for newer calls is an addition of runc.
    profile.unknown = profile.default;
    let machines: [(&[u8], &[Architecture]); 2] = [
        (
            include_bytes!("../../tests/seccomp/libseccomp-x86_64.bpf"),
            &[Architecture::X86_64, Architecture::X86, Architecture::X32],
        ),
        (
            include_bytes!("../../tests/seccomp/libseccomp-aarch64.bpf"),
            &[Architecture::Aarch64, Architecture::Arm],
        ),
    ];
    let low = [0, 3, 4, 5, 6, 8, 39, 40, 41, 4095, 4096, 4097, 0x1000_0000, 0xffff_ffff];
    let high = [0x1_0000_0000, 0x1_0000_0001, 0x1_0000_0005, 0x1_0000_0028, u64::MAX];
    for (theirs, architectures) in machines {
        profile.architectures = architectures.to_vec();
        let ours = program(&profile);
        let mut calls = 0;
        for architecture in ALL {
            let is_narrow = matches!(architecture, Architecture::X86 | Architecture::X32 | Architecture::Arm);
            // A 32-bit program has no arguments above 32 bits.
            let values = low.iter().chain(if is_narrow { &[][..] } else { &high });
            for number in numbers(architecture) {
                // i386 multiplexes sockets and System V IPC behind one number each; libseccomp applies a rule for
                // `connect` to that number too. coracle does not: a profile names `socketcall` itself.
                if architecture == Architecture::X86 && [102, 117].contains(&number) {
                    continue;
                }
                for (index, value) in
                    (0..3).flat_map(|index| values.clone().map(move |value| (index, *value)))
                {
                    let mut arguments = [7; 6];
                    arguments[2] = 4;
                    arguments[index] = value;
                    let call = Call { architecture, number, arguments };
                    assert_eq!(interpret(&ours, call), interpret(theirs, call), "{call:?}");
                    calls += 1;
                }
            }
        }
        assert!(calls > 50_000);
    }
}

/// Processes that read archives may signal only themselves, which abort(3) needs. Regression: tkill and tgkill were
/// allowed for any process.
#[test]
fn a_jail_lets_a_process_signal_itself_only() {
    let profile = crate::jail::only(&["read"], &[]);
    let (program, architecture) = (program(&profile), Architecture::HERE[0]);
    let verdict = |name: &str, arguments: [u64; 3]| {
        let number = architecture.number(name).unwrap();
        let [first, second, third] = arguments;
        interpret(&program, Call { architecture, number, arguments: [first, second, third, 0, 0, 0] })
    };
    let (allow, refuse) = (Action::Allow.code(), Action::Errno(1).code());
    assert_eq!(verdict("read", [0, 0, 0]), allow);
    assert_eq!(verdict("tkill", [1, 6, 0]), allow);
    assert_eq!(verdict("tgkill", [1, 1, 6]), allow);
    for (name, arguments) in [
        ("tkill", [2, 9, 0]),
        ("tkill", [1 << 32 | 1, 9, 0]),
        ("tgkill", [1, 2, 9]),
        ("tgkill", [2, 1, 9]),
        ("kill", [1, 9, 0]),
        ("kill", [u64::MAX, 9, 0]),
        ("pidfd_send_signal", [3, 9, 0]),
        ("rt_sigqueueinfo", [1, 9, 0]),
        ("clone", [0, 0, 0]),
        ("vmsplice", [1, 0, 0]),
    ] {
        assert_eq!(verdict(name, arguments), refuse, "{name}{arguments:?}");
    }
}
