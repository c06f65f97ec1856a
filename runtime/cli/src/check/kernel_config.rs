//! Reads the configuration of the running kernel from /proc/config.gz (CONFIG_IKCONFIG_PROC): boards without
//! /lib/modules and /boot have no other source.

use std::io::Read;

use flate2::read::GzDecoder;

/// Maximum length in bytes of the decompressed text: five times that of current kernels.
const TEXT_BYTES_MAX: u64 = 2 * 1024 * 1024;

/// The configuration of the running kernel; `None` if the kernel does not provide it.
pub(super) fn read() -> Option<String> {
    unpack(&std::fs::read("/proc/config.gz").ok()?)
}

fn unpack(packed: &[u8]) -> Option<String> {
    let mut text = Vec::new();
    GzDecoder::new(packed).take(TEXT_BYTES_MAX + 1).read_to_end(&mut text).ok()?;
    (text.len() as u64 <= TEXT_BYTES_MAX).then(|| String::from_utf8_lossy(&text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::unpack;
    use std::io::Write;

    #[test]
    fn a_gzip_member_is_unpacked_and_a_damaged_one_refused() {
        let text = "CONFIG_OVERLAY_FS=m\n".repeat(1000);
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        encoder.write_all(text.as_bytes()).unwrap();
        let packed = encoder.finish().unwrap();
        assert_eq!(unpack(&packed).as_deref(), Some(text.as_str()));
        for length in 0..packed.len() {
            assert_eq!(unpack(&packed[..length]), None, "{length} bytes");
        }
        let mut wrong = packed;
        let size = wrong.len() - 4;
        wrong[size..].fill(0xff);
        assert_eq!(unpack(&wrong), None);
    }
}
