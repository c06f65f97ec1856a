//! `make hot-code`: which functions of the daemon run while a kubelet calls it for a node with pods. The linker puts them beside each
//! other (`targets/hot-code.ld`), because the kernel maps a program's file in blocks of sixteen pages: a block with one function
//! that is in use is in memory as a whole. The daemon is followed instruction by instruction, so no function that ran is missing.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use coracle_tests::cri::Cri;
use coracle_tests::cri::proto::VersionRequest;
use coracle_tests::node;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::{kubelet, measure};

/// Offset of the instruction pointer in `struct user` of x86_64.
const INSTRUCTION: usize = 16 * 8;
/// Number of pods of the node.
const PODS: usize = 25;
/// How long the daemon is followed: the kubelet asks for everything that it asks for at all within two minutes.
const TIME: Duration = Duration::from_secs(300);
/// How long it is followed, and how long it is left alone to catch up and to be idle, by turns.
const FOLLOWED: Duration = Duration::from_secs(60);
const ALONE: Duration = Duration::from_secs(5);
/// Time limit of the last call.
const LIMIT: Duration = Duration::from_secs(120);
/// Number of bytes that the kernel maps at once (`fault_around_bytes`).
const BLOCK: u64 = 64 << 10;
/// Length of the end of a mangled name that has the hash: `17h`, 16 digits, `E`.
const HASH: usize = 20;
/// Characters of a name that are kept: what follows are types of parameters.
const NAME_MAX: usize = 160;
/// The beginning of the linker's script.
const HEADER: &str = "/* Made by `make hot-code`: the functions of the daemon that run while a kubelet calls it, beside each other, so that few pages of
   the program's file are in memory. A function that has another name by now is placed with the others: make the list again when
   `make bench PARTS=kubelet` shows that it is out of date. */
";

/// Follows the daemon during the calls and writes the linker's list.
pub(crate) fn run() {
    let program = node::binaries().join("coracled");
    let functions = functions(&program);
    let node = measure::node("");
    let kubelet = kubelet::with_pods(&node, PODS);
    let (socket, is_done) = (node.socket(), AtomicBool::new(false));
    let addresses = std::thread::scope(|scope| {
        scope.spawn(|| {
            sleep(TIME);
            is_done.store(true, Ordering::Relaxed);
            // An instruction ends the follower's wait. The call may take long: the others are followed.
            Cri::new(&socket).within(LIMIT).version(VersionRequest::default()).expect("version");
        });
        follow(Pid::from_raw(node.pid()), &is_done)
    });
    kubelet::end(kubelet, node);
    let used = used(&functions, &addresses);
    let blocks: BTreeSet<u64> = addresses.iter().map(|address| address / BLOCK).collect();
    println!("{} functions ran, which are in {} blocks of {} KiB", used.len(), blocks.len(), BLOCK >> 10);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../targets/hot-code.ld");
    // What another run has found stays: a kubelet asks for some things each few minutes only.
    let mut all = listed(&std::fs::read_to_string(&path).unwrap_or_default());
    let new: Vec<String> = sections(&used).into_iter().filter(|name| !all.contains(name)).collect();
    println!("{} of them are new in {}", new.len(), path.display());
    all.extend(new);
    std::fs::write(&path, script(&all)).expect("the script is written");
}

/// Runs a process instruction by instruction until `is_done`, with pauses; returns their addresses.
fn follow(pid: Pid, is_done: &AtomicBool) -> BTreeSet<u64> {
    let mut addresses = HashSet::new();
    while !is_done.load(Ordering::Relaxed) {
        ptrace::seize(pid, Options::empty()).expect("the daemon can be traced");
        ptrace::interrupt(pid).expect("interrupt");
        let begin = Instant::now();
        loop {
            let signal = match waitpid(pid, None).expect("the daemon lives") {
                WaitStatus::Stopped(_, signal) if signal != Signal::SIGTRAP => Some(signal),
                WaitStatus::Stopped(..) | WaitStatus::PtraceEvent(..) => None,
                other => panic!("the daemon: {other:?}"),
            };
            if is_done.load(Ordering::Relaxed) || begin.elapsed() > FOLLOWED {
                ptrace::detach(pid, signal).expect("detach");
                break;
            }
            let address = ptrace::read_user(pid, INSTRUCTION as *mut nix::libc::c_void).expect("registers");
            addresses.insert(address as u64);
            ptrace::step(pid, signal).expect("step");
        }
        sleep(ALONE);
    }
    addresses.into_iter().collect()
}

/// The functions of a program by their addresses, with all names that each has.
fn functions(program: &Path) -> BTreeMap<u64, Vec<String>> {
    let output = Command::new("nm").args(["--defined-only", "--numeric-sort"]).arg(program).output();
    let output = output.expect("nm runs");
    let mut functions: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [address, "t" | "T" | "w" | "W", name] = words[..] else { continue };
        let begin = u64::from_str_radix(address, 16).expect("an address");
        functions.entry(begin).or_default().push(name.to_owned());
    }
    assert!(
        !functions.is_empty(),
        "{} has no symbols: build it with CARGO_PROFILE_RELEASE_STRIP=false",
        program.display()
    );
    functions
}

/// The functions in which these addresses are, in the order of the file.
fn used<'a>(
    functions: &'a BTreeMap<u64, Vec<String>>,
    addresses: &BTreeSet<u64>,
) -> BTreeMap<u64, &'a Vec<String>> {
    let function = |address: &u64| functions.range(..=*address).next_back();
    addresses.iter().filter_map(function).map(|(begin, names)| (*begin, names)).collect()
}

/// The names of the sections in which a compiler puts these functions, without what differs from build to build: the hash at the end of a
/// name, and the number of one of several functions of this name.
fn sections(functions: &BTreeMap<u64, &Vec<String>>) -> Vec<String> {
    let mut seen = BTreeSet::new();
    let names = functions.values().copied().flatten();
    let names = names.map(|name| {
        let (name, number) =
            name.rsplit_once('.').filter(|(_, end)| end.parse::<u32>().is_ok()).unwrap_or((name, ""));
        let is_hashed =
            name.len() > HASH && name.ends_with('E') && name[name.len() - HASH..].starts_with("17h");
        let end = name.len() - if is_hashed { HASH - "17h".len() } else { 0 };
        let star = if is_hashed || !number.is_empty() || end > NAME_MAX { "*" } else { "" };
        format!("{}{star}", &name[..end.min(NAME_MAX)])
    });
    names.filter(|name| seen.insert(name.clone())).collect()
}

/// The names in a linker's script that this program has written.
fn listed(script: &str) -> Vec<String> {
    let names = script.lines().filter_map(|line| line.trim().strip_prefix("*(.text.")?.split_once(' '));
    names.map(|(name, _)| name.to_owned()).collect()
}

/// The linker's script: these sections before all other code.
fn script(sections: &[String]) -> String {
    let lines: String =
        sections.iter().map(|name| format!("    *(.text.{name} .text.unlikely.{name})\n")).collect();
    format!("{HEADER}SECTIONS\n{{\n  .text.hot :\n  {{\n{lines}  }}\n}}\nINSERT BEFORE .text;\n")
}
