//! Numbers drawn from a seed that is printed. They are for tests that do something else each time and can do
//! it again.

use std::time::SystemTime;

/// A generator (SplitMix64).
#[derive(Debug, Clone)]
pub struct Draw {
    state: u64,
}

impl Draw {
    /// The numbers of a seed.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// A number below `end`, which is not 0.
    ///
    /// # Panics
    /// Where it is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.state ^ self.state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % end
    }
}

/// The number in a variable of the environment, such as `HARMONAIZE_RUNS`; `otherwise` where there is none.
///
/// # Panics
/// Where it has something else than a number.
#[expect(clippy::expect_used, reason = "of tests: what is wrong ends them")]
pub fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).map_or(otherwise, |text| text.parse().expect("a number"))
}

/// The seed in `HARMONAIZE_SEED`, or another each time.
pub fn seed() -> u64 {
    let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    number("HARMONAIZE_SEED", clock.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_has_its_numbers() {
        let drawn = |seed| {
            let mut draw = Draw::new(seed);
            [(); 8].map(|()| draw.below(1000))
        };
        assert_eq!(drawn(7), drawn(7));
        assert!(drawn(7) != drawn(8) && drawn(7).iter().all(|number| *number < 1000));
        assert_eq!(number("HARMONAIZE_SET_BY_NOBODY", 3), 3);
    }
}
