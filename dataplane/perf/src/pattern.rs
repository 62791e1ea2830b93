//! What ranks put into their tensors, and what must come out: small integers that every element type holds exactly.

use crate::measured::Measured;
use half::{bf16, f16};
use harmonaize_client::{BlockContent, Bool, Complex64, Complex128, Element, F8E4M3, F8E5M2, Rank, ReduceOp};

/// After so many elements values repeat, so that what is expected is a table, not a sum an element.
const PERIOD: u64 = 61;

/// An element type's way from and to small integers.
pub(crate) trait Value: Element + Default {
    /// Whether quotients have fractions.
    const FLOAT: bool;
    /// Whether it holds integers up to 8 alone.
    const NARROW: bool = false;
    fn of(value: f64) -> Self;
    fn value(self) -> f64;
}

macro_rules! values {
    ($float:literal: $($rust:ty),*) => {$(
        impl Value for $rust {
            const FLOAT: bool = $float;
            fn of(value: f64) -> Self { value as $rust }
            fn value(self) -> f64 { self as f64 }
        }
    )*};
}
values!(false: i8, u8, i16, u16, i32, u32, i64, u64);
values!(true: f32, f64);

macro_rules! halves {
    ($($rust:ty),*) => {$(
        impl Value for $rust {
            const FLOAT: bool = true;
            fn of(value: f64) -> Self { <$rust>::from_f64(value) }
            fn value(self) -> f64 { self.to_f64() }
        }
    )*};
}
halves!(f16, bf16);

macro_rules! narrow {
    ($($rust:ty),*) => {$(
        impl Value for $rust {
            const FLOAT: bool = true;
            const NARROW: bool = true;
            fn of(value: f64) -> Self { <$rust>::from_f32(value as f32) }
            fn value(self) -> f64 { self.to_f32().into() }
        }
    )*};
}
narrow!(F8E4M3, F8E5M2);

macro_rules! complex {
    ($($rust:ty: $part:ty),*) => {$(
        impl Value for $rust {
            const FLOAT: bool = true;
            fn of(value: f64) -> Self { Self { re: value as $part, im: 0.0 } }
            fn value(self) -> f64 { if self.im == 0.0 { self.re.into() } else { f64::NAN } }
        }
    )*};
}
complex!(Complex64: f32, Complex128: f64);

impl Value for Bool {
    const FLOAT: bool = false;
    fn of(value: f64) -> Self {
        (value != 0.0).into()
    }
    fn value(self) -> f64 {
        self.get().into()
    }
}

/// What a rank's input is multiplied by for `mulsum`, as nccl-tests has it.
pub(crate) fn factor(rank: u32) -> u32 {
    1 + rank % 2
}

/// The tensors of one operation, seen from one rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pattern {
    pub(crate) measured: Measured,
    pub(crate) reduce: ReduceOp,
    pub(crate) root: u32,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    /// Elements of a block.
    pub(crate) count: u64,
}

impl Pattern {
    /// Element `at` of a rank's input. Sums stay below 128 as long as there are fewer ranks, products below 4, and so do sums of the types
    /// that hold little more.
    fn input<T: Value>(&self, rank: u32, at: u64) -> f64 {
        let mixed = (u64::from(rank) * 31 + at * 7 + 3) % PERIOD;
        let own = at % PERIOD % u64::from(self.ranks) == u64::from(rank);
        let most = 127 / u64::from(self.ranks.clamp(1, 127));
        match self.reduce {
            ReduceOp::Product if own => (1 + mixed % 3) as f64,
            ReduceOp::Product => 1.0,
            ReduceOp::Sum | ReduceOp::Average | ReduceOp::PremulSum if T::NARROW => {
                if own {
                    (1 + mixed % 3) as f64
                } else {
                    0.0
                }
            }
            ReduceOp::Sum | ReduceOp::Average => (mixed % most.clamp(2, 32)) as f64,
            ReduceOp::PremulSum => (mixed % (most / 2).clamp(2, 32)) as f64,
            ReduceOp::Min | ReduceOp::Max | ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => {
                mixed as f64
            }
        }
    }

    /// The reduction of all ranks' element `at`.
    fn reduced<T: Value>(&self, at: u64) -> T {
        let inputs = (0..self.ranks).map(|rank| self.input::<T>(rank, at));
        let bits = || (0..self.ranks).map(|rank| T::of(self.input::<T>(rank, at)).value() as u64);
        let value = match self.reduce {
            ReduceOp::Sum => inputs.sum(),
            ReduceOp::Average => inputs.sum::<f64>() / f64::from(self.ranks),
            ReduceOp::Product => inputs.product(),
            ReduceOp::Min => inputs.fold(f64::INFINITY, f64::min),
            ReduceOp::Max => inputs.fold(f64::NEG_INFINITY, f64::max),
            ReduceOp::BitAnd => bits().fold(u64::MAX, |all, bits| all & bits) as f64,
            ReduceOp::BitOr => bits().fold(0, |all, bits| all | bits) as f64,
            ReduceOp::BitXor => bits().fold(0, |all, bits| all ^ bits) as f64,
            ReduceOp::PremulSum => {
                (0..).zip(inputs).map(|(rank, input)| f64::from(factor(rank)) * input).sum()
            }
        };
        T::of(if T::FLOAT { value } else { value.trunc() })
    }

    /// This rank's input of `elements` elements.
    pub(crate) fn write<T: Value>(&self, elements: u64) -> Vec<T> {
        let table: Vec<T> = (0..PERIOD).map(|at| T::of(self.input::<T>(self.rank, at))).collect();
        table.into_iter().cycle().take(usize::try_from(elements).unwrap_or(0)).collect()
    }

    /// How many elements of a block that the collective wrote are wrong. `block` counts those of the output.
    pub(crate) fn wrong<T: Value>(&self, block: u32, found: &[T]) -> u64 {
        let content = self.measured.content(self.ranks, Rank(self.rank), block, Rank(self.root));
        let expected = |at: u64| -> T {
            match content {
                BlockContent::Unwritten => T::default(),
                BlockContent::Input(of, block) => {
                    T::of(self.input::<T>(of.0, u64::from(block) * self.count + at))
                }
                BlockContent::Reduction(block) => self.reduced(u64::from(block) * self.count + at),
            }
        };
        let table: Vec<f64> = (0..PERIOD).map(|at| expected(at).value()).collect();
        // A quotient may be a product with the reciprocal, an ulp away.
        let slack = match self.reduce {
            ReduceOp::Average if T::FLOAT => 2f64.powi(match size_of::<T>() {
                1 => -2,
                2 => -7,
                _ => -22,
            }),
            _ => 0.0,
        };
        let differs =
            |(found, expected): (&T, &f64)| (found.value() - expected).abs() > slack * expected.abs();
        found.iter().zip(table.iter().cycle()).filter(|pair| differs(*pair)).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_client::Collective;

    const RANKS: u32 = 3;

    fn pattern(collective: Collective, reduce: ReduceOp, rank: u32) -> Pattern {
        let measured = Measured::Collective(collective);
        Pattern { measured, reduce, root: 1, rank, ranks: RANKS, count: 100 }
    }

    /// What each element must be, without the table.
    fn check<T: Value + std::ops::AddAssign>(reduce: ReduceOp) {
        let sum = |at: u64| -> f64 {
            (0..RANKS).map(|rank| pattern(Collective::AllReduce, reduce, rank).input::<T>(rank, at)).sum()
        };
        let one = pattern(Collective::AllReduce, reduce, 0);
        let right: Vec<T> = (0..100).map(|at| T::of(sum(at))).collect();
        assert_eq!(one.wrong(0, &right), 0);
        let mut broken = right;
        if let Some(last) = broken.last_mut() {
            *last += T::of(1.0);
        }
        assert_eq!(one.wrong(0, &broken), 1);
    }

    #[test]
    fn sums_are_checked_in_all_types() {
        check::<i8>(ReduceOp::Sum);
        check::<u8>(ReduceOp::Sum);
        check::<i64>(ReduceOp::Sum);
        check::<f32>(ReduceOp::Sum);
        check::<f16>(ReduceOp::Sum);
        check::<bf16>(ReduceOp::Sum);
    }

    #[test]
    fn inputs_differ_by_rank_and_place() {
        let of = |rank| pattern(Collective::AllGather, ReduceOp::Sum, rank).write::<i32>(100);
        assert_ne!(of(0), of(1));
        let gathered = pattern(Collective::AllGather, ReduceOp::Sum, 2);
        for rank in 0..RANKS {
            assert_eq!(gathered.wrong(rank, &of(rank)), 0);
            assert!(gathered.wrong((rank + 1) % RANKS, &of(rank)) > 0);
        }
    }

    #[test]
    fn averages_may_be_an_ulp_off() {
        let one = pattern(Collective::AllReduce, ReduceOp::Average, 0);
        let exact: Vec<f32> = (0..100).map(|at| one.reduced(at)).collect();
        let near: Vec<f32> = exact.iter().map(|value| value * (1.0 + f32::EPSILON)).collect();
        let far: Vec<f32> = exact.iter().map(|value| value * 1.01).collect();
        assert_eq!((one.wrong(0, &exact), one.wrong(0, &near)), (0, 0));
        assert!(one.wrong(0, &far) > 50);
    }
}
