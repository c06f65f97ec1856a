//! What differs if the machine is a guest of `tests/qemu` (`make bench-guest`): programs are in one directory, this checkout is
//! not there, and some parts cannot be measured.

use std::fs;

/// Parts that no guest can measure, and why.
const ABSENT: [(&str, &str); 1] =
    [("slow-flush", "its flush of 20 ms would be shorter than on a machine, compared with the rest")];

/// Memory in MiB that a part needs: of its pods, and of the images that the client builds.
const MEMORY_MIB: [(&str, u64); 6] =
    [("crowd", 350), ("burst", 350), ("beside", 900), ("storm", 250), ("pull", 1700), ("many", 700)];

/// Whether this machine is a guest of `tests/qemu`, whose script sets this variable.
pub(crate) fn is_one() -> bool {
    std::env::var_os("CORACLE_SLOWNESS").is_some()
}

/// Whether this part can be measured here; prints the reason if it cannot.
pub(crate) fn can_run(part: &str) -> bool {
    let reason = if is_one() { reason_against(part) } else { None };
    if let Some(reason) = &reason {
        println!("the part `{part}` is left out: {reason}");
    }
    reason.is_none()
}

fn reason_against(part: &str) -> Option<String> {
    if let Some((_, reason)) = ABSENT.iter().find(|(name, _)| *name == part) {
        return Some((*reason).to_owned());
    }
    let (_, needed) = MEMORY_MIB.iter().find(|(name, _)| *name == part)?;
    let present = memory_mib();
    (present < *needed).then(|| format!("it needs {needed} MiB of memory, the guest has {present}"))
}

fn memory_mib() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").expect("/proc/meminfo");
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next());
    total.and_then(|kib| kib.parse::<u64>().ok()).expect("MemTotal in KiB") / 1024
}
