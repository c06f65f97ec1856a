//! An archive's files, spooled: one pass over a stream that may be compressed, each file into a numbered file of a
//! private directory. Names stay in memory, contents on disk. The pass runs in a jail ([`crate::jail`]).

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use coracle_job::{Failure, FailureKind};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tar::{Archive, EntryType};

use crate::failure::{failure, invalid, io_failure};
use crate::image_config::{DOCUMENT_BYTES_MAX, digest_of, digest_text};
use crate::jail::inmate;
use crate::store::{Store, open_plain};
use crate::unpack::{Budget, Metered};

/// Most entries of an archive: hundreds of images with hundreds of layers.
const ENTRIES_MAX: u64 = 100_000;
/// One read of the archive: headers and small files are taken out of a bigger piece.
const COPY_BYTES: usize = 64 << 10;
/// Longest name: PATH_MAX, as the kernel has it.
const NAME_BYTES_MAX: usize = 4096;
/// Links that docker makes between equal layers are one deep.
const LINKS_MAX: usize = 8;

/// One spooled file.
#[derive(Clone, Debug)]
pub(super) struct Spooled {
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
}

/// What an archive has under a name.
#[derive(Debug)]
enum Found {
    File(Spooled),
    /// The name it leads to.
    Link(String),
}

/// One name of an archive, as the process says that reads it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Piece {
    name: String,
    content: Content,
}

#[derive(Debug, Serialize, Deserialize)]
enum Content {
    /// A file of the directory, called by this number.
    File { number: u64, bytes: u64 },
    /// The name it leads to.
    Link(String),
}

/// The files of an archive; the directory goes with the value.
pub(super) struct Spool {
    directory: PathBuf,
    /// What each name is; of entries with one name the last counts, as when an archive is extracted.
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
        let file = File::open(archive).map_err(|error| match error.kind() {
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
        let read = inmate::spool(&directory, file, bytes_max, &mut take, &mut |done| progress(done, total));
        read.map_err(|failure| store.explain(failure))?;
        Ok(spool)
    }

    /// The file of this name, through links of the archive.
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

    /// A manifest, index or config, whole.
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

    /// A manifest, index or config of an OCI layout, whole, its digest verified.
    pub(super) fn blob_document(&self, digest: &str) -> Result<Option<Vec<u8>>, Failure> {
        let name = blob_name(digest)?;
        if self.get(&name).is_none() {
            return Ok(None);
        }
        let bytes = self.document(&name)?;
        verify(digest, &digest_of(&bytes))?;
        Ok(Some(bytes))
    }

    /// A blob of an OCI layout, its digest verified.
    pub(super) fn blob(&self, digest: &str) -> Result<Option<&Spooled>, Failure> {
        let Some(file) = self.get(&blob_name(digest)?) else { return Ok(None) };
        verify(digest, &digest_of_file(&file.path)?)?;
        Ok(Some(file))
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        // Where that fails the daemon sweeps it at its start.
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Reads an archive of images: each file into a numbered one of `directory`; `take` hears of each name. In the process that
/// is shut in there.
pub(crate) fn scatter(
    directory: &Path,
    input: impl Read,
    bytes_max: u64,
    take: &mut dyn FnMut(Piece),
) -> Result<(), Failure> {
    let broken = |error: io::Error| invalid(format!("archive: {error}"));
    let budget = Budget::default();
    let from = Metered::new(BufReader::with_capacity(COPY_BYTES, input), &budget);
    let mut archive = Archive::new(Marked { inner: from, at_end: false });
    let mut entries = archive.entries().map_err(broken)?;
    // An archive that unpacks without end must not fill the disk.
    let (mut count, mut left) = (0, bytes_max);
    while let Some(entry) = budget.next(|| entries.next()) {
        let mut entry = entry.map_err(broken)?;
        count += 1;
        if count > ENTRIES_MAX {
            return Err(too_many());
        }
        let name = name_of(&entry.path_bytes())?;
        match entry.header().entry_type() {
            EntryType::Regular | EntryType::Continuous => {
                let bytes = write(&directory.join(count.to_string()), &name, &mut entry, left)?;
                left -= bytes;
                take(Piece { name, content: Content::File { number: count, bytes } });
            }
            EntryType::Symlink | EntryType::Link => {
                let link = entry.link_name_bytes().map(|link| link.into_owned()).unwrap_or_default();
                let link = text_of(&link)?;
                let is_relative = entry.header().entry_type() == EntryType::Symlink && !link.starts_with('/');
                let parent = name.rsplit_once('/').map_or("", |(parent, _)| parent);
                let target = if is_relative { clean(&format!("{parent}/{link}")) } else { clean(&link) };
                take(Piece { name, content: Content::Link(target) });
            }
            _ => {}
        }
        io::copy(&mut entry, &mut io::sink()).map_err(broken)?;
    }
    match archive.into_inner().at_end {
        true => Err(invalid("archive: it breaks off: its end marker is missing")),
        false => Ok(()),
    }
}

/// One file of at most `left` bytes.
fn write(path: &Path, name: &str, from: &mut impl Read, left: u64) -> Result<u64, Failure> {
    let mut file = File::create_new(path).map_err(|error| io_failure("make", path, &error))?;
    let copied = io::copy(&mut from.take(left.saturating_add(1)), &mut file);
    let bytes = copied.map_err(|error| match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => io_failure("write", path, &error),
        _ => invalid(format!("archive: {name}: {error}")),
    })?;
    match bytes > left {
        true => Err(invalid(format!("archive: {name}: unpacks to more bytes than the limit"))),
        false => Ok(bytes),
    }
}

fn too_many() -> Failure {
    invalid(format!("archive: more than {ENTRIES_MAX} entries"))
}

/// `name` is not in the archive.
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

fn name_of(bytes: &[u8]) -> Result<String, Failure> {
    text_of(bytes).map(|name| clean(&name))
}

fn text_of(bytes: &[u8]) -> Result<String, Failure> {
    match bytes.len() <= NAME_BYTES_MAX {
        true => Ok(String::from_utf8_lossy(bytes).into_owned()),
        false => Err(invalid(format!("archive: a name is longer than {NAME_BYTES_MAX} bytes"))),
    }
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

/// `sha256:HEX` of a regular file.
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

/// Knows whether its end was met. The tar reader stops at the end marker and reads no further, so one that met the end
/// found no marker: the archive was cut between two entries, where nothing else shows it.
struct Marked<R> {
    inner: R,
    at_end: bool,
}

impl<R: Read> Read for Marked<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.at_end |= count == 0 && !buffer.is_empty();
        Ok(count)
    }
}
