//! The list of an unpacked layer: its files with their attributes and a checksum of their content. It is made when the layer is unpacked,
//! from the archive whose digest is that of the image configuration, and later shows damage of the layer on the disk. Layers of additional
//! stores have a digest of their tree instead ([`digest_of_tree`]), because a list has times.
//!
//! ```text
//! archive ─► checksums of files (Sums) ─┬─► write: list       list ─► check: the layer's files ─► Verdict
//! tree: names and attributes ───────────┘                     no list: can each file be read?
//! ```
//! A list is never made from a layer that may be damaged already: that would make the damage the truth. It ends with its own digest, and
//! is not used without it. Content is read from the disk and not from the page cache ([`Reader`]); names and attributes may come from
//! the kernel's caches, and file systems have checksums for them.
//!
//! Checksums detect what a disk does, not attackers: who can write to a layer can write its list, too.
#![forbid(unsafe_code)]

mod check;
mod digest;
mod entry;
mod read;
#[cfg(test)]
mod tests;
mod write;

pub use check::{Verdict, check};
pub use digest::{check_tree, digest_of_tree};
pub use flate2::Crc;
pub use read::{Reader, drop_pages};
pub use write::{FileError, Sum, Sums, write};
