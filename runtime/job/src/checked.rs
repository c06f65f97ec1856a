//! Encoding of files that workers or commands write for the daemon, with a checksum, because a byte that a disk changed must be noticed.
//!
//! ```text
//!   0       4     5                n             n+8
//!   | magic | ver | postcard body  | checksum LE |
//! ```

use serde::Serialize;
use serde::de::DeserializeOwned;

const VERSION: u8 = 1;
const HEADER_BYTES: usize = 5;

/// Encodes a file that begins with `magic`.
///
/// # Errors
/// The encoder's error, which does not occur for values in memory.
pub(crate) fn encode(magic: &[u8; 4], value: &impl Serialize) -> Result<Vec<u8>, postcard::Error> {
    let mut bytes = [&magic[..], &[VERSION]].concat();
    bytes.extend(postcard::to_allocvec(value)?);
    let sum = checksum(&bytes);
    bytes.extend(sum.to_le_bytes());
    Ok(bytes)
}

/// Decodes a file.
///
/// # Errors
/// A description of the defect.
pub(crate) fn decode<T: DeserializeOwned>(magic: &[u8; 4], bytes: &[u8]) -> Result<T, &'static str> {
    let (whole, sum) = bytes.split_last_chunk::<8>().ok_or("it is too short")?;
    let body = whole.get(HEADER_BYTES..).ok_or("it is too short")?;
    if !whole.starts_with(magic) || whole[4] != VERSION {
        return Err("it does not start as version 1 does");
    }
    if u64::from_le_bytes(*sum) != checksum(whole) {
        return Err("its checksum does not match");
    }
    crate::decode(body).map_err(|_| "its body cannot be read")
}

/// FNV-1a checksum with 64 bits, which detects damage by disks and power cuts.
fn checksum(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::checksum;

    #[test]
    fn the_checksum_is_that_of_fnv_1a() {
        assert_eq!(checksum(b"a"), 0xaf63_dc4c_8601_ec8c, "as published");
    }
}
