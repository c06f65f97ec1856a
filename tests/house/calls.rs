//! Checks the table of system calls (`sandbox/src/seccomp/calls.rs`) against other sources: a missing or
//! wrong number makes a rule of a profile ineffective, which no other test would detect.
//!
//! | source | contents |
//! |---|---|
//! | libseccomp's library, through `scmp_sys_resolver` | all six conventions, arm's private calls included; up to Linux 6.6 |
//! | the kernel's headers in Debian's packages (linux-libc-dev-…-cross) | the same, up to Linux 6.1 |
//! | the crate linux-raw-sys of the lock file, generated from the kernel's headers | the same, without arm's private calls; up to 6.17 |

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

type Numbers = BTreeMap<String, u32>;

/// One column of the table, and the corresponding names in other sources.
struct Convention {
    /// Name in libseccomp, and directory in linux-raw-sys.
    name: &'static str,
    /// The package with the kernel's headers, their folder and the file to include.
    headers: (&'static str, &'static str, &'static str),
    /// A bit that is set in every number of this convention.
    bit: u32,
}

const X32_BIT: u32 = 0x4000_0000;

const fn x86(name: &'static str, file: &'static str, bit: u32) -> Convention {
    Convention { name, headers: ("linux-libc-dev-amd64-cross", "x86_64-linux-gnu", file), bit }
}

/// In the order of the table's columns.
const CONVENTIONS: [Convention; 6] = [
    x86("x86_64", "asm/unistd_64.h", 0),
    x86("x86", "asm/unistd_32.h", 0),
    x86("x32", "asm/unistd_x32.h", X32_BIT),
    Convention {
        name: "aarch64",
        headers: ("linux-libc-dev-arm64-cross", "aarch64-linux-gnu", "asm/unistd.h"),
        bit: 0,
    },
    Convention {
        name: "arm",
        headers: ("linux-libc-dev-armhf-cross", "arm-linux-gnueabihf", "asm/unistd.h"),
        bit: 0,
    },
    Convention {
        name: "riscv64",
        headers: ("linux-libc-dev-riscv64-cross", "riscv64-linux-gnu", "asm/unistd.h"),
        bit: 0,
    },
];

/// Names in headers that are not system calls.
const NO_CALLS: [&str; 5] =
    ["arch_specific_syscall", "OABI_SYSCALL_BASE", "SYSCALL_BASE", "SYSCALL_MASK", "syscalls"];
/// Calls of x86_64 that headers for x32 name, too; the kernel's table for x32 and libseccomp's have neither
/// (arch/x86/entry/syscalls/syscall_64.tbl, column `abi`).
const NOT_X32: [&str; 2] = ["map_shadow_stack", "uretprobe"];

/// A second name that the kernel's headers have for arm's `arm_sync_file_range`, and libseccomp does not.
const SECOND_NAME: &str = "sync_file_range2";

/// coracle's table, parsed from the source: `("name", [x86_64, i386, x32, aarch64, arm, riscv64]),`.
fn ours() -> [Numbers; 6] {
    let text = fs::read_to_string(crate::root().join("sandbox/src/seccomp/calls.rs")).expect("the table");
    let mut columns = [(); 6].map(|()| Numbers::new());
    for row in text.lines().filter_map(|line| line.strip_prefix("    (\"")) {
        let (name, rest) = row.split_once("\", [").expect("a name");
        let cells: Vec<&str> = rest.trim_end_matches("]),").split(", ").collect();
        assert_eq!(cells.len(), 6, "{row}");
        for ((column, convention), cell) in columns.iter_mut().zip(&CONVENTIONS).zip(cells) {
            let number = match cell.strip_prefix("ARM + ") {
                _ if cell == "NO" => continue,
                Some(private) => 0xf_0000 + private.parse::<u32>().expect("a number"),
                None => cell.parse::<u32>().expect("a number") | convention.bit,
            };
            column.insert(name.to_owned(), number);
        }
    }
    assert!(columns.iter().all(|column| column.len() > 300), "the table is not read as it is written");
    columns
}

/// Path of a tool that tests/tools/install has unpacked.
fn tool(path: &str) -> PathBuf {
    let path = crate::root().join("target/tools").join(path);
    assert!(path.exists(), "{} is missing: run tests/tools/install calls", path.display());
    path
}

fn output(command: &mut Command) -> String {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}: run tests/tools/install calls"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
    String::from_utf8(output.stdout).expect("text")
}

/// The kernel's headers, preprocessed: aarch64's names depend on conditions, arm's numbers are sums.
fn headers(convention: &Convention) -> Numbers {
    let (package, folder, file) = convention.headers;
    let include = tool(package).join("usr").join(folder).join("include");
    let preprocess = |source: &Path, more: &[&str]| {
        let mut gcc = Command::new("gcc");
        gcc.args([
            "-E",
            "-P",
            "-nostdinc",
            "-undef",
            "-D__ARM_EABI__",
            // riscv64's headers are for 32 bits, too.
            "-D__LP64__",
            "-D__SIZEOF_POINTER__=8",
            "-D__X32_SYSCALL_BIT=0x40000000",
            "-x",
            "c",
        ])
        .args(more);
        output(gcc.arg("-isystem").arg(&include).arg(source))
    };
    let source = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("calls-{}.c", convention.name));
    fs::write(&source, format!("#include <{file}>\n")).expect("a source");
    let macros = preprocess(&source, &["-dM"]);
    let mut text = format!("#include <{file}>\n");
    for name in macros.lines().filter_map(|line| line.strip_prefix("#define __")?.split(' ').next()) {
        if let Some(call) = name.strip_prefix("NR_").or(name.strip_prefix("ARM_NR_")) {
            text += &format!("number_of {call}_ = __{name}\n");
        }
    }
    fs::write(&source, text).expect("a source");
    let numbers = preprocess(&source, &[]);
    let _ = fs::remove_file(&source);
    let lines = numbers.lines().filter_map(|line| line.strip_prefix("number_of ")?.split_once("_ = "));
    lines
        .filter_map(|(name, value)| Some((name.to_owned(), sum(value)?)))
        .filter(|(name, _)| is_call(name))
        .collect()
}

fn is_call(name: &str) -> bool {
    // `BASE` is the first of arm's private numbers, `SYSCALL_…` the first of all numbers.
    !NO_CALLS.contains(&name) && name != "BASE"
}

/// Evaluates `(0x0f0000+5)`, `((0)+5)` or `7`; `None` for anything but a sum of numbers.
fn sum(text: &str) -> Option<u32> {
    let plain: String = text.chars().filter(|letter| !"() ".contains(*letter)).collect();
    plain.split('+').try_fold(0, |sum, part| {
        let number = match part.strip_prefix("0x") {
            Some(digits) => u32::from_str_radix(digits, 16).ok()?,
            None => part.parse().ok()?,
        };
        Some(sum + number)
    })
}

/// linux-raw-sys, from cargo's source directory.
fn raw_sys(convention: &Convention) -> Numbers {
    let mut cargo = Command::new(env!("CARGO"));
    // Packages of other platforms may never have been downloaded.
    let words =
        ["metadata", "--format-version=1", "--offline", "--filter-platform=x86_64-unknown-linux-musl"];
    cargo.args(words).current_dir(crate::root());
    let metadata: Value = serde_json::from_str(&output(&mut cargo)).expect("cargo prints JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    // The newest version if there are several.
    let version = |package: &Value| -> Vec<u32> {
        let text = package["version"].as_str().expect("a version");
        text.split('.').map(|number| number.parse().unwrap_or(0)).collect()
    };
    let all = packages.iter().filter(|package| package["name"] == "linux-raw-sys");
    let package = all.max_by_key(|package| version(package)).expect("rustix uses it");
    let manifest = Path::new(package["manifest_path"].as_str().expect("a path"));
    let file = manifest.with_file_name("src").join(convention.name).join("general.rs");
    let text = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let numbers =
        text.lines().filter_map(|line| line.strip_prefix("pub const __NR_")?.split_once(": u32 = "));
    let is_ours = |name: &str| is_call(name) && !(convention.name == "x32" && NOT_X32.contains(&name));
    numbers
        .filter(|(name, _)| is_ours(name))
        .map(|(name, number)| (name.to_owned(), number.trim_end_matches(';').parse().expect("a number")))
        .collect()
}

/// libseccomp's answer for a system call.
#[derive(Debug, PartialEq, Eq)]
enum Resolved {
    /// The name is unknown: the call is newer than the library.
    Unknown,
    /// The convention does not have the call.
    Absent,
    /// On i386, a part of `socketcall` or `ipc` and a separate call since Linux 4.3; libseccomp returns the
    /// number of the former.
    Multiplexed,
    Number(u32),
}

fn libseccomp(convention: &Convention, name: &str) -> Resolved {
    let mut resolver = Command::new(tool("seccomp/usr/bin/scmp_sys_resolver"));
    let said = output(resolver.args(["-a", convention.name, name]));
    match said.trim().parse::<i32>().expect("a number") {
        -1 => Resolved::Unknown,
        // libseccomp/include/seccomp.h.in: pseudo numbers of i386's sockets and System V IPC.
        -120..=-101 | -224..=-200 if convention.name == "x86" => Resolved::Multiplexed,
        number => u32::try_from(number).map_or(Resolved::Absent, Resolved::Number),
    }
}

/// Finding 9 in docs/results/0.1.0.md. Regression: aarch64 had no number for name_to_handle_at and
/// open_by_handle_at, arm none for its private calls and `sync_file_range2`, x86_64 none for uretprobe, and
/// rules about them were ignored.
#[test]
fn the_table_has_the_kernels_numbers_with_tools() {
    let mut wrong = Vec::new();
    for (convention, ours) in CONVENTIONS.iter().zip(ours()) {
        let mut confirmed = BTreeSet::new();
        for (source, theirs) in [("headers", headers(convention)), ("linux-raw-sys", raw_sys(convention))] {
            assert!(theirs.len() > 300, "{source} of {} has {} calls", convention.name, theirs.len());
            for (name, number) in theirs {
                let our = ours.get(&name);
                if our != Some(&number) {
                    wrong.push(format!("{} {name}: ours {our:?}, {source} {number}", convention.name));
                }
                confirmed.insert(name);
            }
        }
        for name in ours.keys().filter(|name| !confirmed.contains(*name)) {
            // Only libseccomp can confirm it.
            if !matches!(libseccomp(convention, name), Resolved::Number(_)) {
                wrong.push(format!("{} {name}: in no other source", convention.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_table_has_libseccomps_numbers_with_tools() {
    let columns = ours();
    let names: BTreeSet<&String> = columns.iter().flat_map(BTreeMap::keys).collect();
    let mut wrong = Vec::new();
    let mut compared = 0;
    for (convention, ours) in CONVENTIONS.iter().zip(&columns) {
        for name in &names {
            let theirs = libseccomp(convention, name);
            let our = ours.get(*name).copied();
            let is_right = match theirs {
                Resolved::Unknown => true,
                Resolved::Multiplexed | Resolved::Absent if our.is_none() => true,
                Resolved::Multiplexed => true,
                Resolved::Absent => *name == SECOND_NAME && convention.name == "arm",
                Resolved::Number(number) => our == Some(number),
            };
            compared += usize::from(theirs != Resolved::Unknown);
            if !is_right {
                wrong.push(format!("{} {name}: ours {our:?}, theirs {theirs:?}", convention.name));
            }
        }
        // Numbers for which libseccomp has a name and coracle has none.
        for number in (0..600).chain(0xf_0000..0xf_0010).map(|number| number | convention.bit) {
            let mut resolver = Command::new(tool("seccomp/usr/bin/scmp_sys_resolver"));
            let name = output(resolver.args(["-a", convention.name, &number.to_string()]));
            let name = name.trim();
            if name != "UNKNOWN" && ours.get(name) != Some(&number) {
                wrong.push(format!("{} {name}: theirs {number}, ours {:?}", convention.name, ours.get(name)));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(compared > 2000, "{compared} answers of libseccomp");
}
