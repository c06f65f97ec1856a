//! The parser of an archive of images, which runs in a confined process ([`crate::jail`]). It writes each
//! file of the archive to a numbered file in a directory and reports the file's name.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use coracle_job::Failure;
use coracle_sandbox::describe_io;
use serde::{Deserialize, Serialize};
use tar::{Archive, EntryType};

use crate::failure::{invalid, io_failure};
use crate::unpack::{Budget, Metered};

/// Maximum number of entries: sufficient for hundreds of images with hundreds of layers.
pub(super) const ENTRIES_MAX: u64 = 100_000;
/// Buffer size in bytes for reading the archive.
const COPY_BYTES: usize = 64 << 10;
/// Maximum length of a name in bytes: the kernel's PATH_MAX.
const NAME_BYTES_MAX: usize = 4096;
/// One entry of an archive, as the confined process reports it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Piece {
    pub(super) name: String,
    pub(super) content: Content,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Content {
    /// A regular file of `bytes` bytes, spooled to the file `number`.
    File { number: u64, bytes: u64 },
    /// A link; the value is the name of its target.
    Link(String),
}

/// Parses an archive of images in the confined process: writes each file to a numbered file of `directory`
/// and calls `take` for each entry.
pub(crate) fn scatter(
    directory: &Path,
    input: impl Read,
    bytes_max: u64,
    take: &mut dyn FnMut(Piece),
) -> Result<(), Failure> {
    let broken = |error: io::Error| invalid(format!("archive: {}", describe_io(&error)));
    let budget = Budget::default();
    let from = Metered::new(BufReader::with_capacity(COPY_BYTES, input), &budget);
    let mut archive = Archive::new(Marked { inner: from, at_end: false });
    let mut entries = archive.entries().map_err(broken)?;
    // A limit, because a decompression bomb must not fill the disk.
    let (mut count, mut left) = (0, bytes_max);
    while let Some(entry) = budget.next(|| entries.next()) {
        let mut entry = entry.map_err(|error| match (count, error.kind()) {
            // About a file of another kind the parser says which field of a header its bytes are not.
            (0, io::ErrorKind::Other) => {
                invalid("archive: it is no tar archive, plain or compressed with gzip or zstd")
            }
            _ => broken(error),
        })?;
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
        true => Err(invalid("archive: truncated, its end marker is missing")),
        false => Ok(()),
    }
}

/// Writes one file of at most `left` bytes; returns its size.
fn write(path: &Path, name: &str, from: &mut impl Read, left: u64) -> Result<u64, Failure> {
    let mut file = File::create_new(path).map_err(|error| io_failure("make", path, &error))?;
    let copied = io::copy(&mut from.take(left.saturating_add(1)), &mut file);
    let bytes = copied.map_err(|error| match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => io_failure("write", path, &error),
        _ => invalid(format!("archive: {name}: {}", describe_io(&error))),
    })?;
    match bytes > left {
        true => Err(invalid(format!("archive: {name}: unpacks to more bytes than the limit"))),
        false => Ok(bytes),
    }
}

pub(super) fn too_many() -> Failure {
    invalid(format!("archive: more than {ENTRIES_MAX} entries"))
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

/// Normalises a name: removes `.`, `..` and empty components.
pub(super) fn clean(name: &str) -> String {
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

/// A reader that records whether its input ended. The tar parser stops reading at the end marker, so an end
/// of the input means that there was no end marker: the archive was truncated between two entries, which
/// cannot be detected otherwise.
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
