//! A quick hash of keys, whose seed strangers do not know.

use std::hash::{BuildHasher, Hasher, RandomState};

/// Makes hashers of one seed.
#[derive(Debug, Clone)]
pub(super) struct FoldState(u64);

impl Default for FoldState {
    fn default() -> Self {
        Self(RandomState::new().hash_one(0))
    }
}

impl BuildHasher for FoldState {
    type Hasher = FoldHasher;

    fn build_hasher(&self) -> FoldHasher {
        FoldHasher(self.0)
    }
}

/// Folds words by a multiplication of 128 bits.
#[derive(Debug)]
pub(super) struct FoldHasher(u64);

impl FoldHasher {
    fn fold(&mut self, word: u64) {
        let product = u128::from(self.0 ^ word) * 0x9e37_79b9_7f4a_7c15;
        self.0 =
            ((product as u64) ^ (product >> 64) as u64).rotate_left(23).wrapping_add(0x517c_c1b7_2722_0a95);
    }
}

impl Hasher for FoldHasher {
    fn write(&mut self, bytes: &[u8]) {
        let mut words = bytes.chunks_exact(8);
        for word in &mut words {
            self.fold(word.try_into().map_or(0, u64::from_le_bytes));
        }
        let rest = words.remainder().iter().rev().fold(0, |rest, byte| rest << 8 | u64::from(*byte));
        if !words.remainder().is_empty() {
            self.fold(rest);
        }
    }

    fn write_u8(&mut self, number: u8) {
        self.fold(number.into());
    }

    fn write_u16(&mut self, number: u16) {
        self.fold(number.into());
    }

    fn write_u32(&mut self, number: u32) {
        self.fold(number.into());
    }

    fn write_u64(&mut self, number: u64) {
        self.fold(number);
    }

    fn write_usize(&mut self, number: usize) {
        self.fold(number as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn keys_that_are_alike_differ() {
        let quick = FoldState(7);
        let hashes: HashSet<u64> = (0..100_000_u32).map(|port| quick.hash_one([1, 2, port, 9])).collect();
        assert_eq!(hashes.len(), 100_000);
        // Tables look at the upper and the lower bits alone.
        for shift in [0, 48] {
            let parts: HashSet<u64> = hashes.iter().map(|hash| hash >> shift & 0xffff).collect();
            assert!(parts.len() > 45_000, "{}", parts.len());
        }
        assert_ne!(quick.hash_one([1_u8, 2]), quick.hash_one([2_u8, 1]));
    }
}
