//! Exit records on disk: `exits/ID` in the pod's state directory, written when a container ends, so that the daemon can
//! read them later if it was not running. A record is written under a temporary name, synced and renamed, so a reader
//! sees a complete record or none. The module also reads the OOM counter, which is only needed when a container ends.

use core::ffi::CStr;

use coracle_sys::{Errno, FdRef, fs};
use coracle_wire::{ContainerId, EXIT_RECORD_BYTES_MAX, ExitRecord, encode_exit};

/// Length of a path in bytes: `exits/`, 64 digits, a letter for the temporary name, and NUL.
const NAME_BYTES: usize = 6 + 64 + 1 + 1;

/// Path of an exit record relative to the state directory, with its NUL.
struct Name([u8; NAME_BYTES]);

impl Name {
    fn new(container: &ContainerId, suffix: u8) -> Self {
        let mut name = [0; NAME_BYTES];
        name[..6].copy_from_slice(b"exits/");
        name[6..70].copy_from_slice(&container.hex());
        name[70] = suffix;
        Self(name)
    }

    fn as_cstr(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).unwrap_or(c"exits")
    }
}

/// Creates the directory `exits`; called once.
pub(crate) fn prepare(state: FdRef<'_>) -> Result<(), Errno> {
    match fs::make_directory(state, c"exits", 0o700) {
        Err(Errno::EEXIST) => Ok(()),
        made => made,
    }
}

/// Writes the exit record `record`.
pub(crate) fn write(state: FdRef<'_>, record: &ExitRecord) -> Result<(), Errno> {
    let temporary = Name::new(&record.container, b'~');
    let flags = fs::O_WRONLY | fs::O_CREAT | fs::O_TRUNC;
    let file = fs::open(state, temporary.as_cstr(), flags, 0o600)?;
    let mut buffer = [0; EXIT_RECORD_BYTES_MAX];
    let bytes = encode_exit(record, &mut buffer);
    if fs::write(file.borrow(), bytes)? != bytes.len() {
        return Err(Errno::ENOSPC);
    }
    fs::sync(file.borrow())?;
    fs::rename(state, temporary.as_cstr(), Name::new(&record.container, 0).as_cstr())
}

/// Removes the record of `container`; a missing record is success.
pub(crate) fn remove(state: FdRef<'_>, container: &ContainerId) -> Result<(), Errno> {
    match fs::remove_file(state, Name::new(container, 0).as_cstr()) {
        Err(Errno::ENOENT) => Ok(()),
        removed => removed,
    }
}

/// Number of OOM kills in a memory cgroup: the line `oom_kill N` of `memory.events` (v2) or `memory.oom_control` (v1,
/// Linux 4.13). 0 if the file cannot be read, because the cgroup may already be removed.
pub(crate) fn oom_kills(counter: FdRef<'_>) -> u64 {
    let mut text = [0; 512];
    fs::read_from_start(counter, &mut text).map_or(0, |length| parse_oom_kills(&text[..length]))
}

fn parse_oom_kills(text: &[u8]) -> u64 {
    let digits =
        text.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"oom_kill ")).unwrap_or(b"");
    digits
        .iter()
        .take_while(|digit| digit.is_ascii_digit())
        .fold(0, |sum: u64, digit| sum.saturating_mul(10).saturating_add(u64::from(digit - b'0')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oom_counter_of_both_cgroup_versions() {
        let cases: [(&[u8], u64); 4] = [
            (b"low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\noom_group_kill 7\n", 3),
            (b"oom_kill_disable 1\nunder_oom 0\noom_kill 12\n", 12),
            (b"oom_kill_disable 1\n", 0),
            (b"oom_kill x", 0),
        ];
        for (text, kills) in cases {
            assert_eq!(parse_oom_kills(text), kills, "{text:?}");
        }
    }
}
