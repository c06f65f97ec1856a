//! Randomly damaged texts for tests of parsers, which must end without a panic for any input.

/// Returns `count` copies of `text` with pseudo-random changes, which are equal in each call.
pub fn damaged(text: &str, count: usize) -> impl Iterator<Item = String> {
    let mut seed = 1_u64;
    std::iter::repeat_with(move || {
        let mut bytes = text.as_bytes().to_vec();
        for _ in 0..3 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let offset = (seed >> 33) as usize % bytes.len();
            bytes[offset] = (seed >> 24) as u8 & 0x7f;
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
    .take(count)
}
