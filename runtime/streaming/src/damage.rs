//! Test input for both protocols: randomly damaged and split exchanges, and the corpora of the fuzz targets.

use std::path::Path;

/// Calls `test` with twenty thousand copies of `input`, each with one to four flipped bits and split into two
/// parts at a random place. Equal seeds produce equal copies.
pub(crate) fn damaged(input: &[u8], mut seed: u64, mut test: impl FnMut(usize, &[u8], &[u8])) {
    let mut random = |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) as usize % below
    };
    for round in 0..20_000 {
        let mut damaged = input.to_vec();
        for _ in 0..=random(4) {
            let offset = random(damaged.len());
            damaged[offset] ^= 1 << random(8);
        }
        let (first, second) = damaged.split_at(random(damaged.len()));
        test(round, first, second);
    }
}

/// The corpus of a fuzz target: its seeds and the inputs that it found.
pub(crate) fn corpus(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fuzz/corpus").join(target);
    let entries = std::fs::read_dir(folder).expect("a corpus").flatten();
    entries.map(|entry| std::fs::read(entry.path()).expect("a file")).collect()
}
