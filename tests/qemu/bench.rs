//! `make bench-guest`: the table of `make bench` in a guest with cgroup v2 and one CPU, whose clock counts instructions.
//! Other programs on the host hardly change the ratios to the floor, and do not change counts and memory.

use std::process::Command;
use std::time::Duration;

use crate::disk::{Tree, built, packages};
use crate::guest::{Guest, Next};
use crate::reboot;
use crate::target::Arch;

/// Time limit of all parts on a machine that does other work, too.
const LIMIT: Duration = Duration::from_secs(3 * 60 * 60);
/// Memory of the guest in MiB. The client keeps the largest image of `pull` in memory twice.
const MEMORY_MIB: u32 = 2048;
/// Size of the disk: the registry, and a disk of its own for each pull. The file is sparse.
const DISK: &str = "6G";

const PREFACE: &str = "\
One CPU under emulation; a nanosecond of the guest's clock is one instruction, or one of the host if the guest waits for its disk. \
Compare ratios to the floor, bytes, flushes and memory; milliseconds are not those of a machine, and budgets in \
milliseconds do not apply.";

/// The part that this harness measures itself: from the kernel's start to a running pod.
const BOOT: &str = "boot";

/// Runs the parts of `CORACLE_BENCH_PARTS`, or all, in a guest of `CORACLE_BENCH_ARCH`, and prints the table.
#[test]
#[ignore = "measures, and takes many minutes: make bench-guest"]
fn bench_guest() {
    let given = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
    let name = given("CORACLE_BENCH_ARCH").unwrap_or_else(|| Arch::Aarch64.name().into());
    let arch = Arch::ALL.into_iter().find(|arch| arch.name() == name);
    let arch = arch.unwrap_or_else(|| panic!("ARCH={name}: x86_64 or aarch64"));
    let memory = given("CORACLE_BENCH_MEMORY").map(|text| text.parse().expect("MEMORY is a number of MiB"));
    let parts = given("CORACLE_BENCH_PARTS").unwrap_or_default();
    let parts: Vec<&str> = parts.split_whitespace().collect();
    println!("{PREFACE}\n");
    if parts.is_empty() || parts.contains(&BOOT) {
        let mut guest = reboot::guest(arch);
        guest.count_instructions();
        reboot::boot_twice(&guest, arch);
    }
    let others: Vec<&str> = parts.iter().copied().filter(|part| *part != BOOT).collect();
    if parts.is_empty() || !others.is_empty() {
        table(arch, memory.unwrap_or(MEMORY_MIB), &others);
    }
}

/// Runs these parts of the benchmarks, or all, in a guest with this much memory, and prints the table.
fn table(arch: Arch, memory_mib: u32, parts: &[&str]) {
    let mut guest = Guest::with("bench", arch, memory_mib, &["bench"], Tree::add_bench);
    guest.count_instructions();
    let enlarged = Command::new("resize2fs").arg(guest.disk()).arg(DISK).output().expect("resize2fs");
    assert!(enlarged.status.success(), "{}", String::from_utf8_lossy(&enlarged.stderr));
    println!("{} with {memory_mib} MiB:\n", arch.name());
    let drive = format!("file={},cache=unsafe", guest.disk().display());
    let words = format!("apparmor=0 CORACLE_SUITE=bench CORACLE_TESTS={}", parts.join(","));
    let report = guest.boot_on(&drive, &words, LIMIT, |line| {
        if let Some(line) = line.filter(|line| line.starts_with('|') || line.starts_with("the part `")) {
            println!("{line}");
        }
        Next::Read
    });
    assert_eq!(report.code, Some(0), "no good end\n{}", report.console);
    println!("took {:.0} s", report.took.as_secs_f64());
}

impl Tree {
    /// Adds what the benchmarks need beyond a suite: the floor, a registry, and tools for file systems.
    fn add_bench(&self) {
        self.copy(&built(self.arch(), "client").join("coracle-floor"), "opt/coracle-floor");
        let name = format!("bench-{}", self.arch().debian());
        self.copy_packages(&name);
        // Before busybox's in the search path of `suite.sh`.
        self.copy(&packages(&name).join("sbin/losetup"), "usr/sbin/losetup");
    }
}
