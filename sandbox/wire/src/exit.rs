//! The exit record: the exit code or signal of a container and the time, written by the monitor when the container
//! ends, so that it is available even if no daemon was running (CRI 7.1, RST-4).
//!
//! ```text
//!   0        4      5        6            6+n          6+n+4
//!   | "CEXR" | ver  | length | postcard   | checksum LE |
//! ```
//! The file `exits/ID` in the pod's state directory is written under a temporary name and renamed. If a record fails
//! verification, [`decode_exit`] returns [`DamagedExit`]; the caller moves the file to quarantine and shows the
//! container as `Unknown`.

use serde::{Deserialize, Serialize};

use crate::ContainerId;

/// The end of a main process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exit {
    /// The process exited with this code, 0..=255.
    Code(u8),
    /// This signal ended the process; the CRI's exit code is 128 + signal.
    Signal(u8),
}

impl Exit {
    /// The exit code in CRI responses (CRI 2.0): the code, or 128 + signal.
    pub fn code(self) -> i32 {
        match self {
            Self::Code(code) => i32::from(code),
            Self::Signal(signal) => 128 + i32::from(signal),
        }
    }
}

/// The exit record of one container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitRecord {
    /// Id of the container.
    pub container: ContainerId,
    /// Exit code or signal of the main process.
    pub exit: Exit,
    /// Whether the OOM-kill counter of the memory cgroup increased while the container was running.
    pub oom_killed: bool,
    /// Wall clock in nanoseconds since 1970, at which the monitor detected the end.
    pub finished_at_ns: i64,
    /// Number of log lines that could not be written because the disk was full, since the container started.
    pub lost_log_lines: u64,
}

/// Maximum length of an exit record in bytes: header, largest postcard encoding, checksum.
pub const EXIT_RECORD_BYTES_MAX: usize = 96;

const MAGIC: &[u8; 4] = b"CEXR";
const FORMAT: u8 = 1;
const HEADER_BYTES: usize = 6;

/// Error: the bytes are not a complete exit record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DamagedExit;

/// Encodes `record` into `buffer` and returns the used part of it.
pub fn encode_exit<'a>(record: &ExitRecord, buffer: &'a mut [u8; EXIT_RECORD_BYTES_MAX]) -> &'a [u8] {
    let body = EXIT_RECORD_BYTES_MAX - 4;
    // The largest encoding (two varints of 10 bytes, the id, three small fields) fits: see the test.
    let length =
        postcard::to_slice(record, &mut buffer[HEADER_BYTES..body]).map(|used| used.len()).unwrap_or(0);
    buffer[..4].copy_from_slice(MAGIC);
    buffer[4] = FORMAT;
    buffer[5] = length as u8;
    let end = HEADER_BYTES + length;
    let sum = checksum(&buffer[..end]);
    buffer[end..end + 4].copy_from_slice(&sum.to_le_bytes());
    &buffer[..end + 4]
}

/// Decodes an exit record.
///
/// # Errors
/// [`DamagedExit`] if the bytes are truncated, too long, changed, or not an exit record.
pub fn decode_exit(bytes: &[u8]) -> Result<ExitRecord, DamagedExit> {
    let (body, sum) = bytes.split_last_chunk::<4>().ok_or(DamagedExit)?;
    let record = body.get(HEADER_BYTES..).ok_or(DamagedExit)?;
    let is_whole = body.starts_with(MAGIC) && body[4] == FORMAT && usize::from(body[5]) == record.len();
    if !is_whole || u32::from_le_bytes(*sum) != checksum(body) {
        return Err(DamagedExit);
    }
    postcard::from_bytes(record).map_err(|_| DamagedExit)
}

/// FNV-1a with 32 bits. It detects torn writes and files of another format; the disk's own checksums detect bit rot.
fn checksum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |sum, byte| (sum ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> ExitRecord {
        ExitRecord {
            container: ContainerId::from_bytes([255; 32]),
            exit: Exit::Signal(64),
            oom_killed: true,
            finished_at_ns: i64::MIN,
            lost_log_lines: u64::MAX,
        }
    }

    #[test]
    fn the_largest_record_fits_and_is_decoded() {
        let mut buffer = [0; EXIT_RECORD_BYTES_MAX];
        let bytes = encode_exit(&record(), &mut buffer);
        assert_eq!(decode_exit(bytes), Ok(record()));
    }

    #[test]
    fn every_cut_and_every_flipped_bit_is_noticed() {
        let mut buffer = [0; EXIT_RECORD_BYTES_MAX];
        let bytes = encode_exit(&record(), &mut buffer).to_vec();
        for cut in 0..bytes.len() {
            assert_eq!(decode_exit(&bytes[..cut]), Err(DamagedExit), "cut at {cut}");
        }
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode_exit(&damaged), Err(DamagedExit), "bit {bit}");
        }
    }
}
