//! An archive as `tar xzf` reads it, composed in memory: ustar headers (POSIX.1-1988, pax(1)) within gzip
//! (RFC 1952) of stored deflate blocks (RFC 1951, 3.2.4). The archive is not compressed: a compressor would
//! enlarge the program on every node for a file that is rarely created.

/// Size of a header in bytes; contents are padded to a multiple of it.
const BLOCK_BYTES: usize = 512;

/// Maximum length in bytes of a stored block of deflate.
const STORED_BYTES_MAX: usize = 0xffff;

/// Maximum length in bytes of a name in a ustar header without its prefix field.
const NAME_BYTES_MAX: usize = 100;

/// An archive to which files are added.
#[derive(Debug, Default)]
pub(super) struct Archive(Vec<u8>);

impl Archive {
    /// Adds a file with mode 0600, owned by root. A name that is too long is cut.
    pub(super) fn add(&mut self, name: &str, content: &[u8], modified_s: u64) {
        let mut header = [0; BLOCK_BYTES];
        let name = &name.as_bytes()[..name.len().min(NAME_BYTES_MAX)];
        let size = format!("{:011o}", content.len());
        let time = format!("{modified_s:011o}");
        // The checksum counts its own field as blanks.
        for (at, field) in [
            (0, name),
            (100, b"0000600"),
            (108, b"0000000"),
            (116, b"0000000"),
            (124, size.as_bytes()),
            (136, time.as_bytes()),
            (148, b"        "),
            (156, b"0"),
            (257, b"ustar\x0000"),
        ] {
            header[at..at + field.len()].copy_from_slice(field);
        }
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.0.extend_from_slice(&header);
        self.0.extend_from_slice(content);
        self.0.resize(self.0.len().next_multiple_of(BLOCK_BYTES), 0);
    }

    /// Completes the archive; returns the bytes of the gzip file.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.0.extend_from_slice(&[0; 2 * BLOCK_BYTES]);
        let mut gzip = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
        let mut blocks = self.0.chunks(STORED_BYTES_MAX).peekable();
        while let Some(block) = blocks.next() {
            let length = u16::try_from(block.len()).unwrap_or(u16::MAX);
            gzip.push(u8::from(blocks.peek().is_none()));
            gzip.extend_from_slice(&length.to_le_bytes());
            gzip.extend_from_slice(&(!length).to_le_bytes());
            gzip.extend_from_slice(block);
        }
        gzip.extend_from_slice(&crc32(&self.0).to_le_bytes());
        // Modulo 2^32, as the format says.
        gzip.extend_from_slice(&(self.0.len() as u32).to_le_bytes());
        gzip
    }
}

/// The checksum of gzip (RFC 1952, section 8).
fn crc32(bytes: &[u8]) -> u32 {
    let add = |crc: u32, byte: &u8| {
        (0..8).fold(
            crc ^ u32::from(*byte),
            |crc, _| if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 },
        )
    };
    !bytes.iter().fold(!0, add)
}

#[cfg(test)]
mod tests {
    use super::{Archive, crc32};
    use coracle_base::testdir::TestDir;
    use std::process::Command;

    #[test]
    fn the_archive_is_readable_by_tar() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        let dir = TestDir::new("archive");
        let mut archive = Archive::default();
        let long = vec![b'x'; 200_000];
        archive.add("a/empty", b"", 1);
        archive.add("a/long", &long, 1);
        archive.add(&"n".repeat(120), b"text", 1);
        std::fs::write(dir.path().join("x.tar.gz"), archive.finish()).unwrap();
        let mut child =
            Command::new("tar").args(["xzf", "x.tar.gz"]).current_dir(dir.path()).spawn().unwrap();
        assert!(child.wait().unwrap().success());
        assert_eq!(std::fs::read(dir.path().join("a/long")).unwrap(), long);
        assert_eq!(std::fs::read(dir.path().join("a/empty")).unwrap(), b"");
        assert_eq!(std::fs::read(dir.path().join("n".repeat(100))).unwrap(), b"text");
    }
}
