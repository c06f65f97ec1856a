//! An archive's files, spooled: one pass over a stream that may be compressed, each file into a numbered file of a
//! private directory. Names stay in memory, contents on disk.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use coracle_job::{Failure, FailureKind};
use sha2::{Digest, Sha256};
use tar::{Archive, EntryType};

use crate::failure::{failure, invalid, io_failure};
use crate::image_config::{DOCUMENT_BYTES_MAX, digest_text};
use crate::store::Store;
use crate::unpack::decompress;

/// Most entries of an archive: hundreds of images with hundreds of layers.
const ENTRIES_MAX: usize = 100_000;
/// Links that docker makes between equal layers are one deep.
const LINKS_MAX: usize = 8;

/// One spooled file.
#[derive(Clone, Debug)]
pub(super) struct Spooled {
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
}

/// The files of an archive; the directory goes with the value.
pub(super) struct Spool {
    directory: PathBuf,
    files: HashMap<String, Spooled>,
    links: HashMap<String, String>,
    /// What may still be written: an archive that unpacks without end must not fill the disk.
    left: u64,
}

impl Spool {
    /// Reads the whole archive.
    pub(super) fn read(
        store: &Store,
        archive: &Path,
        bytes_max: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, Failure> {
        let file = File::open(archive).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                failure(FailureKind::NotFound, format!("open {}: not found", archive.display()))
            }
            _ => io_failure("open", archive, &error),
        })?;
        let total = file.metadata().map_or(0, |metadata| metadata.len());
        let mut spool = Self {
            directory: store.new_spool()?,
            files: HashMap::new(),
            links: HashMap::new(),
            left: bytes_max,
        };
        let counted = Counted { inner: file, done: 0, total, progress };
        let broken = |error: io::Error| invalid(format!("archive: {error}"));
        let mut entries = Archive::new(decompress(counted).map_err(broken)?);
        for entry in entries.entries().map_err(broken)? {
            let mut entry = entry.map_err(broken)?;
            if spool.files.len() + spool.links.len() >= ENTRIES_MAX {
                return Err(invalid(format!("archive: more than {ENTRIES_MAX} entries")));
            }
            let name = clean(&String::from_utf8_lossy(&entry.path_bytes()));
            match entry.header().entry_type() {
                EntryType::Regular | EntryType::Continuous => spool.file(name, &mut entry)?,
                EntryType::Symlink | EntryType::Link => {
                    let link = entry.link_name_bytes().map(|link| link.into_owned()).unwrap_or_default();
                    let link = String::from_utf8_lossy(&link).into_owned();
                    let is_relative =
                        entry.header().entry_type() == EntryType::Symlink && !link.starts_with('/');
                    let directory = name.rsplit_once('/').map_or("", |(directory, _)| directory);
                    let target =
                        if is_relative { clean(&format!("{directory}/{link}")) } else { clean(&link) };
                    spool.links.insert(name, target);
                }
                _ => {}
            }
        }
        Ok(spool)
    }

    fn file(&mut self, name: String, entry: &mut impl Read) -> Result<(), Failure> {
        let path = self.directory.join(self.files.len().to_string());
        let mut file = File::create_new(&path).map_err(|error| io_failure("make", &path, &error))?;
        let bytes =
            io::copy(&mut entry.take(self.left.saturating_add(1)), &mut file).map_err(|error| match error
                .kind()
            {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    io_failure("write", &path, &error)
                }
                _ => invalid(format!("archive: {name}: {error}")),
            })?;
        self.left = self
            .left
            .checked_sub(bytes)
            .ok_or_else(|| invalid(format!("archive: {name}: unpacks to more bytes than the limit")))?;
        self.files.insert(name, Spooled { path, bytes });
        Ok(())
    }

    /// The file of this name, through links of the archive.
    pub(super) fn get(&self, name: &str) -> Option<&Spooled> {
        let mut name = clean(name);
        for _ in 0..LINKS_MAX {
            if let Some(file) = self.files.get(&name) {
                return Some(file);
            }
            name = self.links.get(&name)?.clone();
        }
        None
    }

    /// A manifest, index or config, whole.
    pub(super) fn document(&self, name: &str) -> Result<Vec<u8>, Failure> {
        let file = self.get(name).ok_or_else(|| missing(name))?;
        if file.bytes > DOCUMENT_BYTES_MAX {
            return Err(invalid(format!("archive: {name} is longer than {DOCUMENT_BYTES_MAX} bytes")));
        }
        std::fs::read(&file.path).map_err(|error| io_failure("read", &file.path, &error))
    }

    /// A blob of an OCI layout, its digest verified.
    pub(super) fn blob(&self, digest: &str) -> Result<Option<&Spooled>, Failure> {
        let hex = crate::store::hex(digest)?;
        let Some(file) = self.get(&format!("blobs/sha256/{hex}")) else { return Ok(None) };
        let found = digest_of_file(&file.path)?;
        match found == digest {
            true => Ok(Some(file)),
            false => Err(invalid(format!("archive: blob {digest}: its content has digest {found}"))),
        }
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        // Where that fails the daemon sweeps it at its start.
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// `name` is not in the archive.
pub(super) fn missing(name: &str) -> Failure {
    invalid(format!("archive: {name} is missing"))
}

/// A name without `.`, empty parts and `..`, which leads nowhere in an archive.
fn clean(name: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in name.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

fn digest_of_file(path: &Path) -> Result<String, Failure> {
    let mut file = File::open(path).map_err(|error| io_failure("open", path, &error))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        match file.read(&mut buffer).map_err(|error| io_failure("read", path, &error))? {
            0 => return Ok(digest_text(&hash.finalize())),
            count => hash.update(&buffer[..count]),
        }
    }
}

/// Tells how much of the archive has been read.
struct Counted<'a> {
    inner: File,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl Read for Counted<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.done += count as u64;
        (self.progress)(self.done, self.total);
        Ok(count)
    }
}
