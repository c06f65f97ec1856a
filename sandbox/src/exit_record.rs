//! Reads exit records, which the monitor writes, possibly while no daemon is running.

use std::io::ErrorKind;
use std::path::Path;

use coracle_wire::{ContainerId, EXIT_RECORD_BYTES_MAX, ExitRecord, decode_exit};

use crate::{Error, disk};

/// Reads the exit record of a container from the pod's state directory; `None` if it does not exist.
///
/// # Errors
/// [`Error::Kernel`] if the record cannot be read, [`Error::Invalid`] if it fails verification.
pub fn exit_record(directory: &Path, container: ContainerId) -> Result<Option<ExitRecord>, Error> {
    let path = directory.join("exits").join(container.to_string());
    let longest = EXIT_RECORD_BYTES_MAX as u64 + 1; // one more than a whole one: it would not verify
    let bytes = match disk::read_up_to(&path, longest) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        read => read.map_err(|error| Error::io("read", path.display(), &error))?,
    };
    match decode_exit(&bytes) {
        Ok(record) if record.container == container => Ok(Some(record)),
        Ok(_) | Err(_) => {
            Err(Error::invalid(path.display().to_string(), "is not a whole exit record of its container"))
        }
    }
}
