//! Numbers that follow from a seed alone, the same on every machine and in every process.

/// SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014). For payloads, weights
/// and shuffles; not for secrets.
#[derive(Clone, Debug)]
pub struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    /// A stream named by a seed and any further numbers; different names give unrelated streams.
    pub fn named(seed: u64, name: &[u64]) -> Self {
        let mut stream = Self { state: seed };
        for &part in name {
            stream.state = stream.next_u64() ^ part;
        }
        // One more round, so that the last number of the name is mixed before it is used.
        stream.state = stream.next_u64();
        stream
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number in `0..bound` (0 if `bound` is 0), by multiplication; its bias is at most `bound / 2^64`.
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }

    /// A number in `0.0..1.0`, of 24 random bits, so that it is exact in an `f32`.
    pub fn unit_f32(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1 << 24) as f32
    }

    /// Puts items in a random order (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = self.below(last + 1);
            items.swap(last, other);
        }
    }
}

/// FNV-1a of 64 bits: tells two results apart, proves nothing against an adversary.
#[derive(Clone, Debug)]
pub struct Digest(u64);

impl Default for Digest {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Digest {
    /// Adds bytes; how they are cut into calls does not matter.
    pub fn update(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    /// The digest.
    pub fn value(&self) -> u64 {
        self.0
    }

    /// The digest as 16 hexadecimal digits.
    pub fn hex(&self) -> String {
        format!("{:016x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_numbers_are_the_published_ones() {
        let mut stream = SplitMix64 { state: 1_234_567 };
        let first: Vec<u64> = (0..3).map(|_| stream.next_u64()).collect();
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn distinct_names_give_distinct_streams() {
        let mut firsts: Vec<u64> = [[1, 2], [2, 1], [0, 0], [1, 1]]
            .iter()
            .map(|name| SplitMix64::named(7, name).next_u64())
            .collect();
        firsts.push(SplitMix64::named(8, &[1, 2]).next_u64());
        firsts.sort_unstable();
        firsts.dedup();
        assert_eq!(firsts.len(), 5);
    }

    #[test]
    fn shuffle_keeps_every_item() {
        let mut items: Vec<u32> = (0..1000).collect();
        SplitMix64::named(3, &[]).shuffle(&mut items);
        assert_ne!(items, (0..1000).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn digest_is_fnv_1a() {
        let mut digest = Digest::default();
        digest.update(b"foobar");
        assert_eq!(digest.hex(), "85944171f73967e8");
    }
}
