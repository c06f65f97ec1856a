//! Reads tar archives as Go's archive/tar does, because scanners, registries, builders and containerd read them with it: if two
//! readers find different files in the same bytes, what was checked is not what runs.
//!
//! ```text
//! bytes ─► Reader (I/O) ─► blocks of 512 bytes ─► Parser (no I/O) ─► entries ─► Reader: the bytes of an entry
//! ```
//! | input | rule | source |
//! |---|---|---|
//! | header | sum of the bytes as unsigned or signed numbers; `ustar` with NUL: POSIX, with two blanks: GNU, and `tar` at its end: star; else v7 | Go `getFormat` |
//! | number | octal between blanks and NULs, empty: 0; base 256 if the first bit is set | Go `parseNumeric`; GNU manual "Extensions" |
//! | PAX record | ends after its decimal length; key and value are split at the first `=` and may have any other byte; no NUL in names | POSIX pax "Extended Header"; Go `parsePAXRecord` |
//! | several PAX headers of an entry | the last one counts, and of equal keys in it the last one | Go `next`, `parsePAX` |
//! | empty value | the header's value counts; an extended attribute is empty | POSIX pax; Go `mergePAX`; containerd `createTarFile` |
//! | global PAX header | checked and ignored, together with all that precedes it | Go `next`; containerd `createTarFile` |
//! | `path`, `linkpath`, `size`, `uid`, `gid`, `mtime`, `atime`, `ctime`, `SCHILY.xattr.*` | replace the header's; `LIBARCHIVE.xattr.*` and other keys are ignored | Go `mergePAX`; containerd `createTarFile` |
//! | times | with fractions; before 1970 or after 2262: 1970 | containerd `boundTime` |
//! | GNU long name or link | up to a NUL; replaces also PAX records | Go `next` |
//! | type NUL | a directory if the name ends with a slash, else a file | Go `next` |
//! | links, devices, FIFOs, directories | have no body, whatever their size | Go `isHeaderOnlyType` |
//! | sparse: old GNU, PAX 0.0, 0.1, 1.0 | pieces in order, without overlap, within the size; all stored bytes belong to a piece | GNU manual "Sparse Formats"; Go `handleSparseFile` |
//! | other `GNU.sparse.*` records | refused: the stored bytes are not the content | |
//! | end | two blocks of zeros, or the end of the input after an entry; a single block of zeros before another header is refused | Go `readHeader` |
//!
//! Names are returned as they are: what a caller does with `..` and links is its own matter. The memory is limited by
//! [`EXTENSION_BYTES_MAX`], [`MAP_BYTES_MAX`] and [`DESCRIPTION_BYTES_MAX`].
#![forbid(unsafe_code)]

mod header;
mod parser;
mod pax;
mod reader;
mod sparse;
#[cfg(test)]
mod tests;
mod write;

use std::fmt;

pub use header::{BLOCK_BYTES, Block, number};
pub use parser::{Event, Parser};
pub use pax::{Records, records};
pub use reader::Reader;
pub use write::append_file;

/// Maximum length in bytes of a PAX header, a long name or a long link, as in Go and libarchive.
pub const EXTENSION_BYTES_MAX: u64 = 1 << 20;
/// Maximum length in bytes of the map of a sparse file, as in Go.
pub const MAP_BYTES_MAX: usize = 1 << 20;
/// Maximum number of bytes before the content of one entry: headers, PAX headers, long names, the map of a sparse file.
pub const DESCRIPTION_BYTES_MAX: usize = 4 << 20;

/// The reason why an archive is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Problem(pub(crate) &'static str);

/// The description of one entry is longer than [`DESCRIPTION_BYTES_MAX`].
pub(crate) const TOO_LONG: Problem = Problem("the metadata of an entry is too long");

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// Normalises an entry's name: removes `.`, `..`, empty components and a leading `/`. The result is empty for the root directory,
/// which `..` does not leave.
pub fn clean(name: &[u8]) -> Vec<u8> {
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in name.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join(&b'/')
}

/// The type of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file, contiguous and sparse files included.
    File,
    /// Another name of an earlier entry.
    HardLink,
    /// A symbolic link.
    Symlink,
    /// A character device.
    Char,
    /// A block device.
    Block,
    /// A directory.
    Directory,
    /// A FIFO.
    Fifo,
    /// A type that POSIX does not define, with its type flag; it may have a body.
    Unknown(u8),
}

/// A time between 1970 and 2262.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time {
    /// Seconds since 1970.
    pub seconds: i64,
    /// Nanoseconds, less than a second.
    pub nanoseconds: u32,
}

/// Name without the prefix `SCHILY.xattr.`, and value of an extended attribute.
pub type Xattr = (Vec<u8>, Vec<u8>);

/// A part of a file's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Offset in the file.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

/// An entry of an archive. Its content, the pieces one after the other, follows in the archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Type of the entry.
    pub kind: Kind,
    /// The name; may be absolute, and may have any component and a slash at its end.
    pub path: Vec<u8>,
    /// The target of a link.
    pub link: Vec<u8>,
    /// Mode including the setuid, setgid and sticky bits, without the type.
    pub mode: u32,
    /// Owner. Larger numbers are truncated, and -1 is `u32::MAX`, as by the system call of other readers.
    pub uid: u32,
    /// Group, like the owner.
    pub gid: u32,
    /// Time of the last modification.
    pub mtime: Time,
    /// Time of the last access, if the archive has it.
    pub atime: Option<Time>,
    /// Time of the last change of the attributes, if the archive has it.
    pub ctime: Option<Time>,
    /// Major and minor number of a device.
    pub device: (i64, i64),
    /// Size of the file in bytes, holes included; 0 for entries without content.
    pub size: u64,
    /// Extended attributes, each name once.
    pub xattrs: Vec<Xattr>,
    /// Number of bytes of the body in the archive, without padding.
    pub(crate) stored: u64,
    /// The whole content of a file without holes.
    pub(crate) whole: [Piece; 1],
    /// The pieces of a sparse file.
    pub(crate) sparse: Option<Vec<Piece>>,
}

impl Entry {
    /// The parts of the content between the holes, in order and without overlap.
    pub fn pieces(&self) -> &[Piece] {
        self.sparse.as_deref().unwrap_or(&self.whole)
    }

    /// Whether the file may have holes: its content is shorter than its size.
    pub fn is_sparse(&self) -> bool {
        self.sparse.is_some()
    }
}
