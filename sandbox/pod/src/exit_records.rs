//! Exit records on disk: `exits/ID` in the pod's state directory, written when a container ends, so that the daemon can
//! read them later if it was not running. A record is written under a temporary name, synced and renamed, so a reader
//! sees a complete record or none.

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
