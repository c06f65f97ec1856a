//! Reproducible random numbers: SplitMix64 (Steele, Lea, Flood 2014). The same seed gives the same numbers on every
//! machine.

/// A random number generator.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Creates a generator with this seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// Creates a generator whose seed is `CORACLE_SEED`, or else the PID and the time of the process; prints the seed.
    pub fn from_environment() -> Random {
        let given = std::env::var("CORACLE_SEED").ok().filter(|text| !text.is_empty());
        let given = given.map(|text| text.parse().expect("CORACLE_SEED is a number"));
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let seed: u64 = given.unwrap_or_else(|| now.as_secs() << 16 ^ u64::from(std::process::id()));
        println!("CORACLE_SEED={seed}");
        Random(seed)
    }

    /// Returns a number below `end`; zero if `end` is zero.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % end.max(1)
    }

    /// Puts values in a random order (Fisher and Yates).
    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        for last in (1..values.len()).rev() {
            values.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Random;

    #[test]
    fn a_seed_gives_the_same_numbers_each_time() {
        // The first numbers of SplitMix64 with the seed 1234567.
        let mut random = Random::new(1_234_567);
        let numbers = [(); 2].map(|()| random.below(u64::MAX));
        assert_eq!(numbers, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]);
        assert_eq!(random.below(0), 0, "there is no number below zero");
    }

    #[test]
    fn a_shuffled_list_has_the_same_values() {
        let mut random = Random::new(3);
        let mut values: Vec<u32> = (0..20).collect();
        random.shuffle(&mut values);
        assert_ne!(values, (0..20).collect::<Vec<u32>>());
        values.sort_unstable();
        assert_eq!(values, (0..20).collect::<Vec<u32>>());
    }
}
