//! Regular files, for an archive that coracle writes.

use std::io::{self, Read, Write};

use crate::header::{BLOCK_BYTES, Block};

/// Appends a file of root with mode 0644 and time 0: its header, `bytes` bytes of `content`, and padding.
///
/// # Errors
/// Errors of both sides; the name is longer than 100 bytes, or the content ends before.
pub fn append_file(archive: &mut impl Write, name: &str, bytes: u64, content: impl Read) -> io::Result<()> {
    let header = header(name, bytes);
    archive.write_all(&header.ok_or_else(|| io::Error::other(format!("{name}: the name is too long")))?)?;
    let copied = io::copy(&mut content.take(bytes), archive)?;
    if copied < bytes {
        return Err(io::Error::other(format!("{name}: {copied} bytes instead of {bytes}")));
    }
    let padding = bytes.next_multiple_of(BLOCK_BYTES as u64) - bytes;
    io::copy(&mut io::repeat(0).take(padding), archive).map(drop)
}

/// The header of a regular file of root with mode 0644 and time 0, in GNU's format, whose numbers have no limit; `None` if
/// the name is longer than 100 bytes. The content follows, filled up with zeros to a multiple of [`BLOCK_BYTES`].
pub(crate) fn header(name: &str, size: u64) -> Option<Block> {
    let mut block = [0; BLOCK_BYTES];
    block[..100].get_mut(..name.len())?.copy_from_slice(name.as_bytes());
    let mut put = |offset: usize, text: &[u8]| block[offset..offset + text.len()].copy_from_slice(text);
    put(100, b"0000644\0");
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    let octal = format!("{size:011o}\0");
    match octal.len() {
        12 => put(124, octal.as_bytes()),
        _ => {
            put(124, &[0x80, 0, 0, 0]);
            put(128, &size.to_be_bytes());
        }
    }
    put(136, b"00000000000\0");
    put(148, b"        0");
    put(257, b"ustar  \0");
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    Some(block)
}
