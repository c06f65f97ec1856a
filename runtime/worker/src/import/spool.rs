//! Spools an archive's files: reads the archive, which may be compressed, once, and writes each file to a
//! numbered file in a private directory. The names are kept in memory. The archive is parsed by a confined
//! process ([`crate::jail`]).

use std::collections::HashMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use coracle_job::{Failure, FailureKind};
use sha2::{Digest, Sha256};

use super::archive::{Content, ENTRIES_MAX, Piece, clean, too_many};
use crate::failure::{failure, invalid, io_failure};
use crate::fifo;
use crate::image_config::{DOCUMENT_BYTES_MAX, digest_of, digest_text};
use crate::jail::confined;
use crate::store::{Store, open_plain};

/// Maximum number of links to follow for a name; links that docker writes between equal layers need one.
const LINKS_MAX: usize = 8;

/// One spooled file.
#[derive(Clone, Debug)]
pub(super) struct Spooled {
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
}

/// The type of an archive's entry.
#[derive(Debug)]
enum Found {
    File(Spooled),
    /// A link; the value is the name of its target.
    Link(String),
}

/// The spooled files of an archive; the directory is removed on drop.
pub(super) struct Spool {
    directory: PathBuf,
    /// The entries by name. The last entry of a name is used, as when an archive is extracted.
    names: HashMap<String, Found>,
}

impl Spool {
    /// Reads the whole archive.
    pub(super) fn read(
        store: &Store,
        archive: &Path,
        bytes_max: u64,
        progress: &mut (dyn FnMut(u64, u64) + Send),
    ) -> Result<Self, Failure> {
        let file = fifo::open_to_read(archive).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                failure(FailureKind::NotFound, format!("open {}: not found", archive.display()))
            }
            _ => io_failure("open", archive, &error),
        })?;
        let total = file.metadata().map_or(0, |metadata| metadata.len());
        store.need(total, 0)?;
        let mut spool = Self { directory: store.new_spool()?, names: HashMap::new() };
        let directory = spool.directory.clone();
        let mut take = |piece: Piece| {
            if spool.names.len() as u64 > ENTRIES_MAX {
                return Err(too_many());
            }
            let found = match piece.content {
                Content::File { number, bytes } => {
                    Found::File(Spooled { path: directory.join(number.to_string()), bytes })
                }
                Content::Link(target) => Found::Link(target),
            };
            spool.names.insert(piece.name, found);
            Ok(())
        };
        let read = confined::spool(&directory, file, bytes_max, &mut take, &mut |done| progress(done, total));
        read.map_err(|failure| store.explain(failure))?;
        Ok(spool)
    }

    /// The file with this name; links in the archive are followed. `None` if it does not exist.
    pub(super) fn get(&self, name: &str) -> Option<&Spooled> {
        let mut name = clean(name);
        for _ in 0..LINKS_MAX {
            match self.names.get(&name)? {
                Found::File(file) => return Some(file),
                Found::Link(target) => name.clone_from(target),
            }
        }
        None
    }

    /// Reads a manifest, index or config.
    pub(super) fn document(&self, name: &str) -> Result<Vec<u8>, Failure> {
        let file = self.get(name).ok_or_else(|| missing(name))?;
        if file.bytes > DOCUMENT_BYTES_MAX {
            return Err(invalid(format!("archive: {name} is longer than {DOCUMENT_BYTES_MAX} bytes")));
        }
        let mut bytes = Vec::new();
        let read = open_plain(&file.path)?.take(DOCUMENT_BYTES_MAX).read_to_end(&mut bytes);
        read.map_err(|error| io_failure("read", &file.path, &error))?;
        Ok(bytes)
    }

    /// Reads a manifest, index or config of an OCI layout and verifies its digest; `None` if it is missing.
    pub(super) fn blob_document(&self, digest: &str) -> Result<Option<Vec<u8>>, Failure> {
        let name = blob_name(digest)?;
        if self.get(&name).is_none() {
            return Ok(None);
        }
        let bytes = self.document(&name)?;
        verify(digest, &digest_of(&bytes))?;
        Ok(Some(bytes))
    }

    /// Returns a blob of an OCI layout after verifying its digest; `None` if it is missing.
    pub(super) fn blob(&self, digest: &str) -> Result<Option<&Spooled>, Failure> {
        let Some(file) = self.get(&blob_name(digest)?) else { return Ok(None) };
        verify(digest, &digest_of_file(&file.path)?)?;
        Ok(Some(file))
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        // If this fails, the daemon removes it when it starts.
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// The failure for a missing file `name`.
pub(super) fn missing(name: &str) -> Failure {
    invalid(format!("archive: {name} is missing"))
}

fn blob_name(digest: &str) -> Result<String, Failure> {
    Ok(format!("blobs/sha256/{}", crate::store::hex(digest)?))
}

fn verify(digest: &str, found: &str) -> Result<(), Failure> {
    match found == digest {
        true => Ok(()),
        false => Err(invalid(format!("archive: blob {digest}: its content has digest {found}"))),
    }
}

/// The digest `sha256:HEX` of a regular file.
pub(crate) fn digest_of_file(path: &Path) -> Result<String, Failure> {
    let mut file = open_plain(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        match file.read(&mut buffer).map_err(|error| io_failure("read", path, &error))? {
            0 => return Ok(digest_text(&hash.finalize())),
            count => hash.update(&buffer[..count]),
        }
    }
}
