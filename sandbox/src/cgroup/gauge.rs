//! Statistics by descriptors that stay open: the kubelet asks for the same few files of every cgroup for as long as it
//! lives, and to open and close one costs seven times what reading it does (docs/notes/006-kept-descriptors.md).
//! One read a file, into a buffer that is lent; nothing is allocated for a value.
//! Rules: CRI 2.22. What this kernel does not count is `None`, never zero.

use std::fs::File;
use std::os::unix::fs::FileExt;

use nix::errno::Errno;

use super::detail::parse_pressure;
use super::{CgroupPath, Cgroups, Pressure, Version};
use crate::Error;

/// Longest file: `memory.stat` of Linux 6.18 has 3 KiB.
pub const BUFFER_BYTES: usize = 16 << 10;

/// v1 shows "no limit" as the largest number of pages in bytes; nobody asks for as much (CRI 2.22).
const NO_LIMIT_BYTES: u64 = 1 << 62;

/// Where the files are in the tables below.
const CPU: usize = 0;
const USAGE: usize = 1;
const LIMIT: usize = 2;
const STAT: usize = 3;
const TASKS: usize = 4;
const SWAP: usize = 5;
const SWAP_LIMIT: usize = 6;
const PRESSURE: [usize; 3] = [7, 8, 9];

/// Controllers and their files on v1. Swap is in `memory.stat`, pressure nowhere.
const V1: [(&str, &str); 5] = [
    ("cpuacct", "cpuacct.usage"),
    ("memory", "memory.usage_in_bytes"),
    ("memory", "memory.limit_in_bytes"),
    ("memory", "memory.stat"),
    ("pids", "pids.current"),
];

/// The same on v2.
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

/// Lines of `memory.stat`: anonymous memory, inactive file pages, faults, those that had to read, swap, its limit.
const V1_STAT: [&str; 6] = [
    "total_rss",
    "total_inactive_file",
    "total_pgfault",
    "total_pgmajfault",
    "total_swap",
    "hierarchical_memsw_limit",
];
const V2_STAT: [&str; 6] = ["anon", "inactive_file", "pgfault", "pgmajfault", "", ""];

/// Counters and levels of one cgroup with everything below it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time since it was made, nanoseconds.
    pub cpu_ns: Option<u64>,
    /// Memory.
    pub memory: Option<MemoryUsage>,
    /// Swap, where it is accounted.
    pub swap: Option<SwapUsage>,
    /// Processes and threads now.
    pub tasks: Option<u64>,
}

/// Memory of a cgroup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUsage {
    /// All that is charged to it.
    pub usage_bytes: u64,
    /// What cannot be given back at once: usage without inactive file pages.
    pub working_set_bytes: u64,
    /// Anonymous memory.
    pub rss_bytes: u64,
    /// Page faults.
    pub page_faults: u64,
    /// Those that had to read.
    pub major_page_faults: u64,
    /// `None`: no limit.
    pub limit_bytes: Option<u64>,
}

/// Swap of a cgroup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwapUsage {
    /// In use.
    pub usage_bytes: u64,
    /// `None`: no limit.
    pub limit_bytes: Option<u64>,
}

/// The open files of one cgroup. They do not keep it from being removed.
#[derive(Debug)]
pub struct Gauge {
    version: Version,
    files: [Option<File>; FILES],
}

/// One reading.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// What it has used.
    pub usage: Usage,
    /// On CPU, memory and I/O; where the kernel counts it.
    pub pressure: [Option<Pressure>; 3],
}

impl Cgroups {
    /// Opens what there is to read of a cgroup; `None` where it is gone.
    ///
    /// # Errors
    /// [`Error::Kernel`] where a file is there and cannot be opened.
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
    /// How many descriptors it holds.
    pub fn descriptors(&self) -> usize {
        self.files.iter().flatten().count()
    }

    /// Reads all of them; `None` where the cgroup is gone. `buffer` has [`BUFFER_BYTES`].
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
        // Files of a cgroup that is gone say nothing any more.
        let is_gone = usage == Usage::default() && self.descriptors() > 0;
        Ok((!is_gone).then_some(Sample { usage, pressure }))
    }

    /// A file with one number; `None` where it is missing or says `max`.
    fn number(&self, file: usize, buffer: &mut [u8]) -> Result<Option<u64>, Error> {
        Ok(self.text(file, buffer)?.trim_ascii_end().parse().ok())
    }

    /// A file's text; empty where it is missing, or this kernel does not count what would be in it.
    fn text<'b>(&self, file: usize, buffer: &'b mut [u8]) -> Result<&'b str, Error> {
        let Some(open) = &self.files[file] else { return Ok("") };
        // The kernel makes the text in one piece, so one read has all of it.
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

/// Not there, gone meanwhile, or not counted (`psi=0`).
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

/// The numbers behind these keys, in one walk over `KEY NUMBER` lines.
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
