//! Reproducible random numbers: xorshift64* (Vigna 2016) with a printed seed.

/// A random number generator.
pub(crate) struct Random(u64);

impl Random {
    /// Creates a generator with this seed.
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed << 1 | 1)
    }

    /// Returns a number below `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % end
    }
}
