//! Copies of /etc/passwd and /etc/group of an image, which workers store for the daemon: one file with a
//! checksum, `images/users/HEX/record`. User names are resolved with it, so a byte that was changed by a disk
//! error must be detected.

use serde::{Deserialize, Serialize};

use crate::checked;

/// Name of the file in the image's directory.
pub const USERS_RECORD: &str = "record";

/// Maximum size in bytes of each of the two files: a thousand users need 60 KiB.
pub const USERS_FILE_BYTES_MAX: u64 = 1 << 20;

/// Maximum size of a record in bytes: both files, their lengths, header and checksum.
pub const USERS_RECORD_BYTES_MAX: u64 = 2 * USERS_FILE_BYTES_MAX + 64;

const MAGIC: &[u8; 4] = b"CUSR";

/// Content of /etc/passwd and /etc/group of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsersFiles {
    /// Content of `/etc/passwd`; empty if the image has none.
    pub passwd: Vec<u8>,
    /// Content of `/etc/group`; empty if the image has none.
    pub group: Vec<u8>,
}

impl UsersFiles {
    /// Encodes the record.
    ///
    /// # Errors
    /// The encoder's error, which does not occur for files in memory.
    pub fn encode(&self) -> Result<Vec<u8>, postcard::Error> {
        checked::encode(MAGIC, self)
    }

    /// Decodes a record.
    ///
    /// # Errors
    /// A description of the defect.
    pub fn decode(bytes: &[u8]) -> Result<Self, &'static str> {
        checked::decode(MAGIC, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cut_and_every_flipped_bit_is_noticed() {
        let files =
            UsersFiles { passwd: b"root:x:0:0::/:/bin/sh\n".to_vec(), group: b"root:x:0:\n".to_vec() };
        let bytes = files.encode().unwrap();
        assert_eq!(UsersFiles::decode(&bytes), Ok(files));
        for cut in 0..bytes.len() {
            assert!(UsersFiles::decode(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(UsersFiles::decode(&damaged).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn the_format_of_version_1_does_not_change() {
        let bytes = UsersFiles { passwd: b"a".to_vec(), group: Vec::new() }.encode().unwrap();
        assert_eq!(bytes[..8], *b"CUSR\x01\x01a\0");
    }

    #[test]
    fn files_of_the_maximum_size_are_read() {
        let file = vec![b'x'; USERS_FILE_BYTES_MAX as usize];
        let files = UsersFiles { passwd: file.clone(), group: file };
        assert_eq!(UsersFiles::decode(&files.encode().unwrap()), Ok(files));
    }
}
