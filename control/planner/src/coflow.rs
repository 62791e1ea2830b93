//! Coflows: the transfers of an iteration count as one, and the one with least left goes first. That is among those that wait for a
//! full link. After Chowdhury et al., "Efficient coflow scheduling with Varys" (SIGCOMM 2014). Where no size is known, by what it
//! attained so far: Chowdhury and Stoica, "Efficient coflow scheduling without prior knowledge" (Aalo, SIGCOMM 2015).
//!
//! Control orders slots by [`service_order`]. [`simulate`] holds that order against max-min fair sharing on recorded coflows.

use harmonaize_units::Nanos;
use std::cmp::Reverse;

mod ordered;
mod port;
mod simulation;
mod workload;

pub use simulation::{Sharing, simulate};
pub use workload::{Coflow, CoflowError, Transfer, Workload};

/// The first class of those whose size is not known ends with so much attained. Each further one ends with so many times as
/// much.
const FIRST_CLASS: Nanos = Nanos(10_000_000);
const NEXT_CLASS: u64 = 4;

/// By what it is decided who goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Discipline {
    /// Who came first.
    FirstComeFirstServed,
    /// Who has least left, then who came first.
    #[default]
    LeastRemaining,
}

/// What is left of a coflow, as time on the fullest link that it crosses. The link is taken to be the coflow's alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remaining {
    /// It is so much.
    Known(Nanos),
    /// Nobody knows. What it had of the link so far.
    Unknown(Nanos),
}

impl Remaining {
    /// The time by which it is ordered. Who is not known is taken for one that goes on to the end of its class.
    fn expected(self) -> Nanos {
        match self {
            Self::Known(time) => time,
            Self::Unknown(attained) => class_end(attained),
        }
    }
}

/// A coflow that wants a full link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contender {
    /// When it came.
    pub arrival: Nanos,
    /// What is left of it.
    pub remaining: Remaining,
    /// Whether it has waited for so long that nobody may overtake it any more.
    pub overdue: bool,
}

/// Returns in which order contenders are served, as indices. Who is overdue goes before all who are not, and among them who came first.
pub fn service_order(discipline: Discipline, contenders: &[Contender]) -> Vec<usize> {
    let key = |contender: &Contender| {
        let by_size = discipline == Discipline::LeastRemaining && !contender.overdue;
        let expected = if by_size { contender.remaining.expected() } else { Nanos(0) };
        (Reverse(contender.overdue), expected, contender.arrival)
    };
    let mut order: Vec<_> =
        contenders.iter().enumerate().map(|(index, contender)| (key(contender), index)).collect();
    order.sort_unstable();
    order.into_iter().map(|(_, index)| index).collect()
}

/// Returns where the class ends of who attained so much.
fn class_end(attained: Nanos) -> Nanos {
    let mut end = FIRST_CLASS;
    while end <= attained && end.0 < u64::MAX {
        end = Nanos(end.0.saturating_mul(NEXT_CLASS));
    }
    end
}

#[cfg(test)]
mod tests;
