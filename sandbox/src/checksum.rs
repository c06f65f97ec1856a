//! CRC-32 of IEEE 802.3 (reflected polynomial 0xEDB88320): detects damage by disks, memory and power cuts. It does
//! not protect against attackers, who cannot write below `--root` and `--state`.

/// The CRC-32 of `bytes`.
pub fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        let crc = crc ^ u32::from(*byte);
        let crc = crc >> 4 ^ NIBBLES[(crc & 15) as usize];
        crc >> 4 ^ NIBBLES[(crc & 15) as usize]
    })
}

/// Remainders of the sixteen nibbles: a table of 64 bytes instead of 1 KiB; records are small enough that the
/// speed does not matter.
const NIBBLES: [u32; 16] = {
    let mut table = [0; 16];
    let mut nibble = 0;
    while nibble < 16 {
        let mut remainder = nibble as u32;
        let mut bit = 0;
        while bit < 4 {
            remainder = remainder >> 1 ^ (0xEDB8_8320 * (remainder & 1));
            bit += 1;
        }
        table[nibble] = remainder;
        nibble += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::crc32;

    #[test]
    fn published_check_values_match() {
        assert_eq!(crc32(b""), 0);
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
        assert_eq!(crc32(b"The quick brown fox jumps over the lazy dog"), 0x414F_A339);
    }
}
