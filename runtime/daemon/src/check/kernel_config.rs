//! Reads the configuration of the running kernel from /proc/config.gz (CONFIG_IKCONFIG_PROC): boards without
//! /lib/modules and /boot have no other source. It is a gzip member (RFC 1952) without name and comment.

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};

/// Length of the gzip header in bytes: magic, method, flags, time, operating system.
const HEAD_BYTES: usize = 10;

/// Length of the gzip trailer in bytes: CRC and size.
const TAIL_BYTES: usize = 8;

/// Maximum length in bytes of the decompressed text: five times that of current kernels.
const TEXT_BYTES_MAX: usize = 2 * 1024 * 1024;

/// The configuration of the running kernel; `None` if the kernel does not provide it.
pub(super) fn read() -> Option<String> {
    unpack(&std::fs::read("/proc/config.gz").ok()?)
}

fn unpack(packed: &[u8]) -> Option<String> {
    let (head, rest) = packed.split_at_checked(HEAD_BYTES)?;
    let (body, tail) = rest.split_at_checked(rest.len().checked_sub(TAIL_BYTES)?)?;
    let size = u32::from_le_bytes(tail.get(4..)?.try_into().ok()?) as usize;
    if !head.starts_with(&[0x1f, 0x8b, 8, 0]) || size > TEXT_BYTES_MAX {
        return None;
    }
    let mut text = vec![0; size];
    let flags = TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let (status, _, written) = decompress(&mut DecompressorOxide::new(), body, &mut text, 0, flags);
    (status == TINFLStatus::Done && written == size).then(|| String::from_utf8_lossy(&text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::unpack;
    use std::io::Write;

    #[test]
    fn a_member_is_unpacked_and_damage_is_no_text() {
        let text = "CONFIG_OVERLAY_FS=m\n".repeat(1000);
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        encoder.write_all(text.as_bytes()).unwrap();
        let packed = encoder.finish().unwrap();
        assert_eq!(unpack(&packed).as_deref(), Some(text.as_str()));
        for length in 0..packed.len() {
            assert_eq!(unpack(&packed[..length]), None, "{length} bytes");
        }
        let mut huge = packed;
        let size = huge.len() - 4;
        huge[size..].fill(0xff);
        assert_eq!(unpack(&huge), None);
    }
}
