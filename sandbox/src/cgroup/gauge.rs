//! Reads statistics through descriptors that stay open: the kubelet requests the same few files of every cgroup again
//! and again, and opening and closing a file costs seven times as much as reading it
//! (docs/notes/006-kept-descriptors.md). Each file is read with one call into a borrowed buffer, without allocations.
//! Rules: CRI 2.22. Values that this kernel does not count are `None`, never zero.

use std::fs::File;
use std::os::unix::fs::FileExt;

use nix::errno::Errno;

use super::detail::parse_pressure;
use super::{CgroupPath, Cgroups, Pressure, Version};
use crate::Error;

/// Size of a read buffer in bytes: the longest file, `memory.stat` of Linux 6.18, has 3 KiB.
pub const BUFFER_BYTES: usize = 16 << 10;

/// Lowest value of a limit that means "no limit": v1 represents it as the largest number of pages in bytes (CRI 2.22).
const NO_LIMIT_BYTES: u64 = 1 << 62;

/// Index of the CPU file in the tables of files.
const CPU: usize = 0;
const USAGE: usize = 1;
const LIMIT: usize = 2;
const STAT: usize = 3;
const TASKS: usize = 4;
const SWAP: usize = 5;
const SWAP_LIMIT: usize = 6;
const PRESSURE: [usize; 3] = [7, 8, 9];

/// Controllers and their files on v1. Swap is in `memory.stat`; there is no pressure.
const V1: [(&str, &str); 5] = [
    ("cpuacct", "cpuacct.usage"),
    ("memory", "memory.usage_in_bytes"),
    ("memory", "memory.limit_in_bytes"),
    ("memory", "memory.stat"),
    ("pids", "pids.current"),
];

/// Controllers and their files on v2.
const V2: [(&str, &str); FILES] = [
    ("cpu", "cpu.stat"),
    ("memory", "memory.current"),
    ("memory", "memory.max"),
    ("memory", "memory.stat"),
    ("pids", "pids.current"),
    ("memory", "memory.swap.current"),
    ("memory", "memory.swap.max"),
    ("cpu", "cpu.pressure"),
    ("memory", "memory.pressure"),
    ("io", "io.pressure"),
];

const FILES: usize = 10;

/// Keys of `memory.stat`: anonymous memory, inactive file pages, page faults, major page faults, swap, swap limit.
const V1_STAT: [&str; 6] = [
    "total_rss",
    "total_inactive_file",
    "total_pgfault",
    "total_pgmajfault",
    "total_swap",
    "hierarchical_memsw_limit",
];
const V2_STAT: [&str; 6] = ["anon", "inactive_file", "pgfault", "pgmajfault", "", ""];

/// Resource usage of one cgroup including its descendants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time since the cgroup was created, in nanoseconds; `None`: not counted.
    pub cpu_ns: Option<u64>,
    /// Memory usage; `None` without the memory controller.
    pub memory: Option<MemoryUsage>,
    /// Swap usage; `None` if the kernel does not account swap.
    pub swap: Option<SwapUsage>,
    /// Current number of processes and threads; `None`: not counted.
    pub tasks: Option<u64>,
}

/// Memory usage of a cgroup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUsage {
    /// Memory charged to the cgroup, in bytes.
    pub usage_bytes: u64,
    /// Memory that cannot be reclaimed immediately, in bytes: usage without inactive file pages.
    pub working_set_bytes: u64,
    /// Anonymous memory in bytes.
    pub rss_bytes: u64,
    /// Number of page faults.
    pub page_faults: u64,
    /// Number of major page faults.
    pub major_page_faults: u64,
    /// Memory limit in bytes; `None`: no limit.
    pub limit_bytes: Option<u64>,
}

/// Swap usage of a cgroup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwapUsage {
    /// Swap in use, in bytes.
    pub usage_bytes: u64,
    /// Swap limit in bytes; `None`: no limit.
    pub limit_bytes: Option<u64>,
}

/// The open statistics files of one cgroup, which do not prevent its removal.
#[derive(Debug)]
pub struct Gauge {
    version: Version,
    files: [Option<File>; FILES],
}

/// One sample of a cgroup.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Resource usage of the cgroup.
    pub usage: Usage,
    /// Pressure on CPU, memory and I/O, in this order; `None` if the kernel does not count it.
    pub pressure: [Option<Pressure>; 3],
}

impl Cgroups {
    /// Opens the statistics files of a cgroup; `None` if the cgroup does not exist.
    ///
    /// # Errors
    /// [`Error::Kernel`] if a file exists and cannot be opened.
    pub fn gauge(&self, path: &CgroupPath) -> Result<Option<Gauge>, Error> {
        let version = self.version();
        let names: &[_] = match version {
            Version::V1 => &V1,
            Version::V2 => &V2,
        };
        let mut files = [const { None }; FILES];
        for ((controller, name), file) in names.iter().zip(&mut files) {
            let Some(directory) = self.limit_directory(path, controller) else { continue };
            let name = directory.join(name);
            *file = match File::open(&name) {
                Ok(file) => Some(file),
                Err(error) if is_absent(&error) => None,
                Err(error) => return Err(Error::io("open", name.display(), &error)),
            };
        }
        let is_there = files.iter().any(Option::is_some) || self.tracking_directory(path).is_dir();
        Ok(is_there.then_some(Gauge { version, files }))
    }
}

impl Gauge {
    /// Number of open descriptors.
    pub fn descriptors(&self) -> usize {
        self.files.iter().flatten().count()
    }

    /// Reads all files; `None` if the cgroup does not exist any more. `buffer` has [`BUFFER_BYTES`].
    ///
    /// # Errors
    /// [`Error::Kernel`] naming the file that could not be read.
    pub fn read(&self, buffer: &mut [u8]) -> Result<Option<Sample>, Error> {
        let names = if self.version == Version::V1 { &V1_STAT } else { &V2_STAT };
        let stat = lines(self.text(STAT, buffer)?, names);
        let cpu_ns = match self.version {
            Version::V1 => self.number(CPU, buffer)?,
            Version::V2 => {
                lines(self.text(CPU, buffer)?, &["usage_usec"])[0].map(|us| us.saturating_mul(1000))
            }
        };
        let limit = self.number(LIMIT, buffer)?.filter(|limit| *limit < NO_LIMIT_BYTES);
        let memory = self.number(USAGE, buffer)?.map(|usage| memory(usage, limit, &stat));
        let swap = match self.version {
            Version::V1 => stat[4].map(|usage_bytes| SwapUsage {
                usage_bytes,
                limit_bytes: stat[5]
                    .filter(|both| *both < NO_LIMIT_BYTES)
                    .zip(limit)
                    .map(|(both, memory)| both.saturating_sub(memory)),
            }),
            Version::V2 => {
                let limit_bytes = self.number(SWAP_LIMIT, buffer)?;
                self.number(SWAP, buffer)?.map(|usage_bytes| SwapUsage { usage_bytes, limit_bytes })
            }
        };
        let mut pressure = [None; 3];
        for (pressure, file) in pressure.iter_mut().zip(PRESSURE) {
            *pressure = parse_pressure(self.text(file, buffer)?);
        }
        let usage = Usage { cpu_ns, memory, swap, tasks: self.number(TASKS, buffer)? };
        // Files of a removed cgroup have no content.
        let is_gone = usage == Usage::default() && self.descriptors() > 0;
        Ok((!is_gone).then_some(Sample { usage, pressure }))
    }

    /// Reads a file with one number; `None` if it is missing or contains `max`.
    fn number(&self, file: usize, buffer: &mut [u8]) -> Result<Option<u64>, Error> {
        Ok(self.text(file, buffer)?.trim_ascii_end().parse().ok())
    }

    /// Reads a file as text; empty if it is missing, or if this kernel does not count its values.
    fn text<'b>(&self, file: usize, buffer: &'b mut [u8]) -> Result<&'b str, Error> {
        let Some(open) = &self.files[file] else { return Ok("") };
        // The kernel generates the whole text for the first read, so one read is complete.
        match open.read_at(buffer, 0) {
            Ok(count) => Ok(std::str::from_utf8(&buffer[..count]).unwrap_or("")),
            Err(error) if is_absent(&error) => Ok(""),
            Err(error) => {
                let name = if self.version == Version::V1 { V1[file].1 } else { V2[file].1 };
                Err(Error::io("read", name, &error))
            }
        }
    }
}

/// Whether the error means that the file does not exist, was removed since it was opened, or that the kernel does not
/// count its values (`psi=0`).
fn is_absent(error: &std::io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::ENOENT | Errno::ENODEV | Errno::EOPNOTSUPP))
}

fn memory(usage_bytes: u64, limit_bytes: Option<u64>, stat: &[Option<u64>; 6]) -> MemoryUsage {
    let [rss, inactive_file, faults, major_faults, ..] = stat.map(Option::unwrap_or_default);
    MemoryUsage {
        usage_bytes,
        working_set_bytes: usage_bytes.saturating_sub(inactive_file),
        rss_bytes: rss,
        page_faults: faults,
        major_page_faults: major_faults,
        limit_bytes,
    }
}

/// The numbers of `keys` in a text of lines `KEY NUMBER`, parsed in one pass.
pub(super) fn lines<const N: usize>(text: &str, keys: &[&str; N]) -> [Option<u64>; N] {
    let mut found = [None; N];
    for (key, number) in text.lines().filter_map(|line| line.split_once(' ')) {
        if let Some(at) = keys.iter().position(|wanted| *wanted == key) {
            found[at] = number.parse().ok();
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_whole_words_at_the_start_of_a_line() {
        let stat = "anon_thp 9\nanon 5\ninactive_file 7\ntotal_inactive_file 8\npgfault x\npgmajfault 18446744073709551616\n";
        let keys = ["anon", "inactive_file", "total_inactive_file", "pgfault", "pgmajfault", "file"];
        assert_eq!(lines(stat, &keys), [Some(5), Some(7), Some(8), None, None, None]);
    }

    #[test]
    fn the_working_set_is_never_below_zero() {
        let stat = |inactive| [Some(3), Some(inactive), None, None, None, None];
        assert_eq!(memory(5, None, &stat(7)).working_set_bytes, 0);
        assert_eq!(memory(50, None, &stat(7)).working_set_bytes, 43);
    }
}
