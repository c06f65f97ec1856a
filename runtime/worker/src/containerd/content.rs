//! containerd's content store: a directory with one file for each blob, named by its digest
//! (plugins/content/local of containerd). The files do not change; containerd only creates and removes them.
//! Nothing in the store is trusted: digests are verified, and only regular files are read.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use coracle_job::Failure;
use coracle_manifest::{DOCUMENT_BYTES_MAX, digest_of, hex};

use crate::failure::io_failure;
use crate::store::open_plain;

/// The content store below containerd's root directory.
#[derive(Clone, Debug)]
pub(crate) struct ContentStore {
    blobs: PathBuf,
}

impl ContentStore {
    /// The content store of the containerd with this root directory.
    pub(crate) fn of(root: &Path) -> Self {
        Self { blobs: root.join("io.containerd.content.v1.content/blobs/sha256") }
    }

    /// Path of a blob, whether or not it exists.
    pub(crate) fn path(&self, digest: &str) -> Result<PathBuf, Failure> {
        Ok(self.blobs.join(hex(digest)?))
    }

    /// Length of a blob in bytes; `None` if it is missing.
    ///
    /// # Errors
    /// It is not a regular file, or cannot be opened.
    pub(crate) fn bytes(&self, digest: &str) -> Result<Option<u64>, Failure> {
        let Some(file) = self.open(digest)? else { return Ok(None) };
        let about = file.metadata().map_err(|error| io_failure("stat", &self.blobs, &error))?;
        Ok(Some(about.len()))
    }

    /// Reads a manifest, index or config and verifies its digest; `None` if it is missing.
    ///
    /// # Errors
    /// Its content has another digest or is too long; it cannot be read.
    pub(crate) fn document(&self, digest: &str) -> Result<Option<Vec<u8>>, Failure> {
        let Some(file) = self.open(digest)? else { return Ok(None) };
        let mut bytes = Vec::new();
        let read = file.take(DOCUMENT_BYTES_MAX + 1).read_to_end(&mut bytes);
        read.map_err(|error| io_failure("read", &self.blobs, &error))?;
        if bytes.len() as u64 > DOCUMENT_BYTES_MAX {
            return Err(Failure::invalid(format!("blob {digest} is longer than {DOCUMENT_BYTES_MAX} bytes")));
        }
        match digest_of(&bytes) {
            found if found == digest => Ok(Some(bytes)),
            found => Err(Failure::invalid(format!("blob {digest}: its content has digest {found}"))),
        }
    }

    fn open(&self, digest: &str) -> Result<Option<File>, Failure> {
        let path = self.path(digest)?;
        match path.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            _ => open_plain(&path).map(Some),
        }
    }
}
