//! The parser of an archive of images, which runs in a confined process ([`crate::jail`]). It writes each
//! file of the archive to a numbered file in a directory and reports the file's name.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek};
use std::path::Path;

use coracle_job::Failure;
use coracle_sandbox::describe_io;
use coracle_tar::{Entry, Kind, Reader};
use serde::{Deserialize, Serialize};

use crate::failure::io_failure;

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
    let broken = |error: io::Error| Failure::invalid(format!("archive: {}", describe_io(&error)));
    let mut archive = Reader::new(BufReader::with_capacity(COPY_BYTES, input));
    // A limit, because a decompression bomb must not fill the disk.
    let (mut count, mut left) = (0, bytes_max);
    loop {
        let entry = archive.next().map_err(|error| match (archive.position(), error.kind()) {
            // About a file of another kind the parser says which field of a header its bytes are not.
            (0, io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof) => {
                Failure::invalid("archive: it is no tar archive, plain or compressed with gzip or zstd")
            }
            _ => broken(error),
        })?;
        let Some(entry) = entry else { break };
        count += 1;
        if count > ENTRIES_MAX {
            return Err(too_many());
        }
        let name = name_of(&entry.path)?;
        match entry.kind {
            Kind::File => {
                write(&directory.join(count.to_string()), &name, &entry, &mut archive, left)?;
                left -= entry.size;
                take(Piece { name, content: Content::File { number: count, bytes: entry.size } });
            }
            Kind::Symlink | Kind::HardLink => {
                let link = text_of(&entry.link)?;
                let is_relative = entry.kind == Kind::Symlink && !link.starts_with('/');
                let parent = name.rsplit_once('/').map_or("", |(parent, _)| parent);
                let target = if is_relative { clean(&format!("{parent}/{link}")) } else { clean(&link) };
                take(Piece { name, content: Content::Link(target) });
            }
            _ => {}
        }
    }
    match archive.has_end() {
        // Truncated between two entries, which cannot be detected otherwise.
        false => Err(Failure::invalid("archive: truncated, its end marker is missing")),
        true => Ok(()),
    }
}

/// Writes one file of at most `left` bytes.
fn write(
    path: &Path,
    name: &str,
    entry: &Entry,
    archive: &mut Reader<impl BufRead>,
    left: u64,
) -> Result<(), Failure> {
    if entry.size > left {
        return Err(Failure::invalid(format!("archive: {name}: unpacks to more bytes than the limit")));
    }
    let mut file = File::create_new(path).map_err(|error| io_failure("make", path, &error))?;
    let mut copy = || {
        for piece in entry.pieces() {
            if entry.is_sparse() {
                file.seek(io::SeekFrom::Start(piece.offset))?;
            }
            io::copy(&mut archive.by_ref().take(piece.length), &mut file)?;
        }
        if entry.is_sparse() { file.set_len(entry.size) } else { Ok(()) }
    };
    copy().map_err(|error| match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => io_failure("write", path, &error),
        _ => Failure::invalid(format!("archive: {name}: {}", describe_io(&error))),
    })
}

pub(super) fn too_many() -> Failure {
    Failure::invalid(format!("archive: more than {ENTRIES_MAX} entries"))
}

fn name_of(bytes: &[u8]) -> Result<String, Failure> {
    text_of(bytes).map(|name| clean(&name))
}

fn text_of(bytes: &[u8]) -> Result<String, Failure> {
    match bytes.len() <= NAME_BYTES_MAX {
        true => Ok(String::from_utf8_lossy(bytes).into_owned()),
        false => Err(Failure::invalid(format!("archive: a name is longer than {NAME_BYTES_MAX} bytes"))),
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
