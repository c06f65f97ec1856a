//! Spools an archive's files: reads the archive, which may be compressed, once, and writes each file to a
//! numbered file in a private directory. The names are kept in memory. The archive is parsed by a confined
//! process ([`crate::jail`]).
//!
//! Blobs of containerd's content store are not copied: the private directory has links to them, which stay when
//! containerd removes the blobs. If the content store is on another file system, they are read where they are.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use coracle_job::{Failure, FailureKind};
use coracle_manifest::{DOCUMENT_BYTES_MAX, digest_of, digest_text};
use coracle_sandbox::describe_io;
use sha2::{Digest, Sha256};

use super::archive::{Content, ENTRIES_MAX, Piece, clean, too_many};
use crate::containerd::ContentStore;
use crate::failure::{Context, io_failure};
use crate::fifo;
use crate::jail::confined;
use crate::store::{Store, open_plain};

/// Maximum length in bytes of all names and targets of links of an archive: those of [`ENTRIES_MAX`] blobs.
const NAMES_BYTES_MAX: usize = 16 << 20;
/// Maximum number of links to follow for a name; links that docker writes between equal layers need one.
const LINKS_MAX: usize = 8;

/// A file of an archive that is kept on disk while the archive is read.
#[derive(Clone, Debug)]
pub(super) struct Spooled {
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
    /// Whether the digest that names the file was verified, or none does.
    pub(super) is_verified: bool,
}

/// The type of an archive's entry.
#[derive(Debug)]
enum Found {
    File(Spooled),
    /// A link; the value is the name of its target.
    Link(String),
}

/// The spooled files of an archive or a content store; the directory is removed on drop.
pub(super) struct Spool {
    directory: PathBuf,
    /// The content store, instead of an archive.
    content: Option<ContentStore>,
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
        // The daemon adds the path.
        let file = fifo::open_to_read(archive).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Failure::new(FailureKind::NotFound, "not found"),
            _ => Failure::new(FailureKind::Internal, format!("open: {}", describe_io(&error))),
        })?;
        let total = file.metadata().map_or(0, |metadata| metadata.len());
        store.need(total, 0)?;
        let mut spool = Self { directory: store.new_spool()?, content: None, names: HashMap::new() };
        let directory = spool.directory.clone();
        let mut names_bytes = 0;
        let mut take = |piece: Piece| {
            if spool.names.len() as u64 > ENTRIES_MAX {
                return Err(too_many());
            }
            let target = if let Content::Link(target) = &piece.content { target.len() } else { 0 };
            names_bytes += piece.name.len() + target;
            if names_bytes > NAMES_BYTES_MAX {
                return Err(Failure::invalid(format!("archive: more than {NAMES_BYTES_MAX} bytes of names")));
            }
            let found = match piece.content {
                Content::File { number, bytes } => {
                    let path = directory.join(number.to_string());
                    Found::File(Spooled { path, bytes, is_verified: true })
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

    /// An empty spool, for images whose layers are there.
    pub(super) fn empty(store: &Store) -> Result<Self, Failure> {
        Ok(Self { directory: store.new_spool()?, content: None, names: HashMap::new() })
    }

    /// An empty spool, for blobs of containerd's content store.
    pub(super) fn of_content(store: &Store, content: ContentStore) -> Result<Self, Failure> {
        Ok(Self { directory: store.new_spool()?, content: Some(content), names: HashMap::new() })
    }

    /// containerd's content store.
    pub(super) fn content(&self) -> Result<&ContentStore, Failure> {
        let none = || Failure::new(FailureKind::Internal, "an archive is no content store");
        self.content.as_ref().ok_or_else(none)
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
            return Err(Failure::invalid(format!(
                "archive: {name} is longer than {DOCUMENT_BYTES_MAX} bytes"
            )));
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
        verify(digest, &digest_of(&bytes)).context(|| "archive")?;
        Ok(Some(bytes))
    }

    /// Returns a blob, which is to be verified before it is used ([`Spool::verify`]); `None` if it is missing.
    pub(super) fn blob(&self, digest: &str) -> Result<Option<Spooled>, Failure> {
        if let Some(content) = &self.content {
            return self.link(content, digest);
        }
        Ok(self.get(&blob_name(digest)?).map(|file| Spooled { is_verified: false, ..file.clone() }))
    }

    /// Verifies the digest of a blob; `pulse` receives the number of bytes that were read.
    pub(super) fn verify(
        &self,
        digest: &str,
        file: &Spooled,
        pulse: &mut dyn FnMut(u64),
    ) -> Result<(), Failure> {
        verify(digest, &digest_of_file(&file.path, pulse)?)
    }

    /// Links a blob of the content store into the directory.
    fn link(&self, content: &ContentStore, digest: &str) -> Result<Option<Spooled>, Failure> {
        let Some(bytes) = content.bytes(digest)? else { return Ok(None) };
        let (from, path) = (content.path(digest)?, self.directory.join(coracle_manifest::hex(digest)?));
        let spooled = |path| Ok(Some(Spooled { path, bytes, is_verified: false }));
        match std::fs::hard_link(&from, &path) {
            Ok(()) => spooled(path),
            // An image may have the same layer twice.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => spooled(path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if cannot_be_linked(&error) => spooled(from),
            Err(error) => Err(io_failure("link", &from, &error)),
        }
    }
}

/// Whether an error says that no further link to a file can be made in this directory: another file system, a
/// read-only one, one without links, or too many links.
fn cannot_be_linked(error: &io::Error) -> bool {
    use io::ErrorKind::{CrossesDevices, PermissionDenied, ReadOnlyFilesystem, TooManyLinks, Unsupported};
    matches!(
        error.kind(),
        CrossesDevices | PermissionDenied | ReadOnlyFilesystem | TooManyLinks | Unsupported
    )
}

/// Makes a second link to a verified file, or a copy of it, verified again, if it cannot be linked.
pub(super) fn link_or_copy(store: &Store, from: &Spooled, to: &Path, digest: &str) -> Result<(), Failure> {
    match std::fs::hard_link(&from.path, to) {
        Ok(()) => return Ok(()),
        Err(error) if cannot_be_linked(&error) => {}
        Err(error) => return Err(io_failure("link", to, &error)),
    }
    store.need(from.bytes, 0)?;
    let mut source = open_plain(&from.path)?;
    let copied = File::create_new(to).and_then(|mut copy| io::copy(&mut source, &mut copy));
    let copied = copied.map_err(|error| io_failure("copy", to, &error));
    copied.and_then(|_| verify(digest, &digest_of_file(to, &mut |_| ())?)).inspect_err(|_| {
        // A second error would hide the first one; the daemon removes such files when it starts.
        let _ = std::fs::remove_file(to);
    })
}

impl Drop for Spool {
    fn drop(&mut self) {
        // If this fails, the daemon removes it when it starts.
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// The failure for a missing file `name`.
pub(super) fn missing(name: &str) -> Failure {
    Failure::invalid(format!("archive: {name} is missing"))
}

fn blob_name(digest: &str) -> Result<String, Failure> {
    Ok(format!("blobs/sha256/{}", coracle_manifest::hex(digest)?))
}

fn verify(digest: &str, found: &str) -> Result<(), Failure> {
    match found == digest {
        true => Ok(()),
        false => Err(Failure::invalid(format!("blob {digest}: its content has digest {found}"))),
    }
}

/// The digest `sha256:HEX` of a regular file; `pulse` receives the number of bytes that were read.
pub(crate) fn digest_of_file(path: &Path, pulse: &mut dyn FnMut(u64)) -> Result<String, Failure> {
    let mut file = open_plain(path)?;
    let mut hash = Sha256::new();
    let (mut buffer, mut done) = (vec![0; 64 << 10], 0);
    loop {
        match file.read(&mut buffer).map_err(|error| io_failure("read", path, &error))? {
            0 => return Ok(digest_text(&hash.finalize())),
            count => {
                hash.update(&buffer[..count]);
                done += count as u64;
                pulse(done);
            }
        }
    }
}
