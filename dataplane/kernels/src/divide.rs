//! Integer division of many lanes by one number of ranks without the CPU's divider, which no vector unit has.

use crate::element::Divisor;

/// Quotients truncated towards zero, exactly those of the CPU's divider.
pub(crate) trait Quotient {
    fn quotient(self, by: &Divisor) -> Self;
}

/// `lane / ranks` through a float that holds the lane exactly. Let the float have p bits and the lane be an integer
/// x < 2^p: if x / n is below an integer m, then by at least 1 / n, while rounding up to m would need a distance of at
/// most m / 2^(p + 1) <= x / n / 2^p < 1 / n. So rounding never reaches the next integer, and truncation is exact. A
/// divisor that the float rounds (2^24 and more in f32) exceeds every lane of 8 or 16 bits, and so does its rounded value.
macro_rules! through_float {
    ($($integer:ty, $float:ty, $field:ident, $between:ty;)*) => {$(
        impl Quotient for $integer {
            #[inline(always)]
            fn quotient(self, by: &Divisor) -> Self {
                // SAFETY: a finite number, no further from 0 than the lane, which fits.
                unsafe { (self as $float / by.$field).to_int_unchecked::<$between>() as Self }
            }
        }
    )*};
}

through_float! {
    i8, f32, single, i32;
    u8, f32, single, i32;
    i16, f32, single, i32;
    u16, f32, single, i32;
    i32, f64, double, i32;
    u32, f64, double, u32;
}

impl Quotient for u64 {
    #[inline(always)]
    fn quotient(self, by: &Divisor) -> Self {
        // Granlund and Montgomery, "Division by invariant integers using multiplication" (PLDI 1994), figure 4.1: the
        // multiplier has 65 bits, the top one implied.
        let high = ((u128::from(self) * u128::from(by.multiplier)) >> 64) as u64;
        (high + ((self - high) >> by.halve)) >> by.shift
    }
}

impl Quotient for i64 {
    #[inline(always)]
    fn quotient(self, by: &Divisor) -> Self {
        let quotient = self.unsigned_abs().quotient(by) as i64;
        if self < 0 { quotient.wrapping_neg() } else { quotient }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Lane;
    use proptest::prelude::*;

    const RANKS: &[u32] =
        &[1, 2, 3, 5, 7, 8, 10, 127, 128, 129, 255, 256, 257, 641, 65_535, (1 << 24) - 1, (1 << 24) + 1];

    #[test]
    fn every_8_bit_quotient_is_the_dividers() {
        for ranks in RANKS.iter().copied().chain(1..=300).chain([1 << 31, u32::MAX]) {
            let by = Divisor::new(ranks).unwrap();
            for lane in u8::MIN..=u8::MAX {
                assert_eq!(lane.quotient(&by), lane.divide(&by), "{lane} / {ranks}");
                let lane = lane as i8;
                assert_eq!(lane.quotient(&by), lane.divide(&by), "{lane} / {ranks}");
            }
        }
    }

    #[test]
    fn every_16_bit_quotient_is_the_dividers() {
        for ranks in RANKS.iter().copied().chain([1 << 31, u32::MAX]) {
            let by = Divisor::new(ranks).unwrap();
            for lane in u16::MIN..=u16::MAX {
                assert_eq!(lane.quotient(&by), lane.divide(&by), "{lane} / {ranks}");
                let lane = lane as i16;
                assert_eq!(lane.quotient(&by), lane.divide(&by), "{lane} / {ranks}");
            }
        }
    }

    fn check(bits: u64, ranks: u32) {
        let by = Divisor::new(ranks).unwrap();
        let (a, b) = (bits as u32, bits as i32);
        assert_eq!(a.quotient(&by), a.divide(&by), "{a} / {ranks}");
        assert_eq!(b.quotient(&by), b.divide(&by), "{b} / {ranks}");
        let (a, b) = (bits, bits as i64);
        assert_eq!(a.quotient(&by), a.divide(&by), "{a} / {ranks}");
        assert_eq!(b.quotient(&by), b.divide(&by), "{b} / {ranks}");
    }

    #[test]
    fn quotients_next_to_a_multiple_are_the_dividers() {
        for ranks in
            RANKS.iter().copied().chain(1..=300).chain([(1 << 31) - 1, 1 << 31, u32::MAX - 1, u32::MAX])
        {
            let n = u64::from(ranks);
            for top in [n, 1 << 31, 1 << 32, 1 << 53, 1 << 63, u64::MAX] {
                let multiple = top / n * n;
                for bits in [
                    multiple.wrapping_sub(1),
                    multiple,
                    multiple.wrapping_add(1),
                    top,
                    top.wrapping_sub(1),
                    0,
                    1,
                ] {
                    check(bits, ranks);
                    check(bits.wrapping_neg(), ranks);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn any_quotient_is_the_dividers(bits: u64, shift in 0..64_u32, ranks in 1..=u32::MAX, small in 0..32_u32) {
            check(bits >> shift, (ranks >> small).max(1));
        }
    }
}
