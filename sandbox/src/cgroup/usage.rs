//! What a cgroup has used: the few files that CRI's statistics come from, and no others (a library that reads every
//! knob of a controller takes 161 system calls for it).
//! Rules: CRI section 2.22. What this kernel does not count is `None`, never zero.

use std::path::PathBuf;

use super::files::{names_gone, read};
use super::{CgroupPath, Cgroups, Version};
use crate::Error;

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

/// v1 shows "no limit" as the largest number of pages in bytes; nobody asks for as much (CRI section 2.22).
const NO_LIMIT_BYTES: u64 = 1 << 62;

impl Cgroups {
    /// Reads what the cgroup has used; `None` where it is gone.
    ///
    /// # Errors
    /// [`Error::Kernel`] where a file is there and cannot be read.
    pub fn usage(&self, path: &CgroupPath) -> Result<Option<Usage>, Error> {
        let reader = Reader { cgroups: self, path };
        let usage = match self.version() {
            Version::V1 => reader.v1()?,
            Version::V2 => reader.v2()?,
        };
        let is_gone = usage == Usage::default() && !self.tracking_directory(path).is_dir();
        Ok((!is_gone).then_some(usage))
    }
}

/// Reads the files of one cgroup.
pub(super) struct Reader<'a> {
    pub(super) cgroups: &'a Cgroups,
    pub(super) path: &'a CgroupPath,
}

impl Reader<'_> {
    fn v1(&self) -> Result<Usage, Error> {
        let usage = self.number("memory", "memory.usage_in_bytes")?;
        let stat = self.text("memory", "memory.stat")?.unwrap_or_default();
        let limit = self.number("memory", "memory.limit_in_bytes")?;
        let both = self.number("memory", "memory.memsw.usage_in_bytes")?;
        let both_limit =
            self.number("memory", "memory.memsw.limit_in_bytes")?.filter(|limit| *limit < NO_LIMIT_BYTES);
        let limit = limit.filter(|limit| *limit < NO_LIMIT_BYTES);
        let swap = usage.zip(both).map(|(usage, both)| SwapUsage {
            usage_bytes: both.saturating_sub(usage),
            limit_bytes: both_limit.zip(limit).map(|(both, memory)| both.saturating_sub(memory)),
        });
        Ok(Usage {
            cpu_ns: self.number("cpuacct", "cpuacct.usage")?,
            memory: usage.map(|usage| memory(usage, limit, &stat, "total_", "rss")),
            swap,
            tasks: self.number("pids", "pids.current")?,
        })
    }

    fn v2(&self) -> Result<Usage, Error> {
        let cpu = self.text("cpu", "cpu.stat")?.unwrap_or_default();
        let usage = self.number("memory", "memory.current")?;
        let stat = self.text("memory", "memory.stat")?.unwrap_or_default();
        let limit = self.number("memory", "memory.max")?;
        let swap_limit = self.number("memory", "memory.swap.max")?;
        let swap = self.number("memory", "memory.swap.current")?;
        Ok(Usage {
            cpu_ns: value(&cpu, "", "usage_usec").map(|microseconds| microseconds.saturating_mul(1000)),
            memory: usage.map(|usage| memory(usage, limit, &stat, "", "anon")),
            swap: swap.map(|usage_bytes| SwapUsage { usage_bytes, limit_bytes: swap_limit }),
            tasks: self.number("pids", "pids.current")?,
        })
    }

    /// A file with one number; `None` where it is missing or says `max`.
    pub(super) fn number(&self, controller: &str, file: &str) -> Result<Option<u64>, Error> {
        Ok(self.text(controller, file)?.and_then(|text| text.trim().parse().ok()))
    }

    pub(super) fn text(&self, controller: &str, file: &str) -> Result<Option<String>, Error> {
        let directory: Option<PathBuf> = self.cgroups.limit_directory(self.path, controller);
        let Some(directory) = directory else { return Ok(None) };
        match read(&directory.join(file)) {
            Ok(text) => Ok(Some(text)),
            Err(error) if names_gone(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn memory(usage_bytes: u64, limit_bytes: Option<u64>, stat: &str, prefix: &str, rss: &str) -> MemoryUsage {
    let of = |key: &str| value(stat, prefix, key).unwrap_or(0);
    MemoryUsage {
        usage_bytes,
        working_set_bytes: usage_bytes.saturating_sub(of("inactive_file")),
        rss_bytes: of(rss),
        page_faults: of("pgfault"),
        major_page_faults: of("pgmajfault"),
        limit_bytes,
    }
}

/// The number on the line `PREFIXKEY NUMBER`.
pub(super) fn value(text: &str, prefix: &str, key: &str) -> Option<u64> {
    text.lines()
        .filter_map(|line| line.strip_prefix(prefix)?.strip_prefix(key)?.strip_prefix(' '))
        .find_map(|number| number.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_whole_words_at_the_start_of_a_line() {
        let stat = "anon_thp 9\nanon 5\ninactive_file 7\ntotal_inactive_file 8\npgfault x\npgmajfault 18446744073709551616\n";
        let table = [
            ("", "anon", Some(5)),
            ("", "inactive_file", Some(7)),
            ("total_", "inactive_file", Some(8)),
            ("", "pgfault", None),
            ("", "pgmajfault", None),
            ("", "file", None),
        ];
        for (prefix, key, expected) in table {
            assert_eq!(value(stat, prefix, key), expected, "{prefix}{key}");
        }
    }

    #[test]
    fn the_working_set_is_never_below_zero() {
        assert_eq!(memory(5, None, "inactive_file 7\n", "", "anon").working_set_bytes, 0);
        assert_eq!(memory(50, None, "inactive_file 7\nanon 3\n", "", "anon").working_set_bytes, 43);
    }
}
