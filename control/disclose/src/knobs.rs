//! What the provider chooses for an iteration, within what its tenant left to it.
//!
//! Chosen by what the tenant's own events say and by nothing finer, so that whoever asks often learns no more than who reads those.

use crate::events::Standing;
use harmonaize_abi::session::{Because, Checkpoint, Choice, Knobs, Level};
use std::time::Duration;

/// The part of the longest time between two checkpoints after which one is taken while the network is slow: that one then need not be
/// taken while it is fast.
const EARLY: u32 = 2;

/// Chooses. The knobs make sense; `now` is on the feed's clock.
///
/// Accumulation goes from the least while nothing is slow over the geometric middle to the most, so that less crosses a slow network. A
/// checkpoint is taken when it is due; when hosts are going to be taken away and the last one is from before that was told; and
/// early while the network is slow.
pub fn choose(knobs: &Knobs, standing: &Standing, now: Duration) -> Choice {
    let (least, most) = knobs.accumulate;
    let accumulate = match standing.slow {
        Level::None => least,
        Level::Mild => (u64::from(least) * u64::from(most)).isqrt() as u32,
        Level::Severe => most,
    };
    let slow = standing.slow > Level::None;
    let why = knobs.checkpoint.and_then(|Checkpoint { every, last, .. }| {
        let since = |told: Duration| now.saturating_sub(told);
        let before = |told: Duration| last > since(told);
        if last >= every {
            Some(Because::Due)
        } else if standing.maintenance.is_some_and(before) {
            Some(Because::Maintenance)
        } else {
            (slow && last >= every / EARLY).then_some(Because::Slow)
        }
    });
    let usual = if accumulate > least { Because::Slow } else { Because::Usual };
    Choice { accumulate, checkpoint: why.is_some(), because: why.unwrap_or(usual) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn knobs(last: Duration) -> Knobs {
        let checkpoint = Some(Checkpoint { every: SECOND * 60, cost: SECOND, last });
        Knobs { accumulate: (2, 32), checkpoint }
    }

    #[test]
    fn the_slower_the_more_is_accumulated() {
        let of = |slow| {
            let choice = choose(&knobs(SECOND), &Standing { slow, maintenance: None }, SECOND * 100);
            (choice.accumulate, choice.checkpoint, choice.because)
        };
        assert_eq!(of(Level::None), (2, false, Because::Usual));
        assert_eq!(of(Level::Mild), (8, false, Because::Slow));
        assert_eq!(of(Level::Severe), (32, false, Because::Slow));
        let fixed = Knobs { accumulate: (4, 4), checkpoint: None };
        let severe = Standing { slow: Level::Severe, maintenance: None };
        let expected = Choice { accumulate: 4, checkpoint: false, because: Because::Usual };
        assert_eq!(choose(&fixed, &severe, SECOND), expected);
    }

    /// A job of five minutes that saves when it is told to: what it saves when, and never later than it said.
    #[test]
    fn a_job_saves_when_it_costs_least_and_never_late() {
        // From, until, what stands.
        let slow = (100, 130, Standing { slow: Level::Severe, maintenance: None });
        let drained = (200, 220, Standing { slow: Level::None, maintenance: Some(SECOND * 200) });
        let (mut last, mut saved) = (0_u64, Vec::new());
        for second in 1..300_u64 {
            let within = |(from, until, _): &&(u64, u64, Standing)| (*from..*until).contains(&second);
            let standing = [slow, drained].iter().find(within).map(|(.., standing)| *standing);
            let standing = standing.unwrap_or_default();
            let choice = choose(&knobs(SECOND * (second - last) as u32), &standing, SECOND * second as u32);
            if choice.checkpoint {
                saved.push((second, choice.because));
                last = second;
            }
        }
        let expected = [
            (60, Because::Due),
            // Half of the minute is over, and the network is slow.
            (100, Because::Slow),
            (160, Because::Due),
            // Told at 200: once, for the next is of after that.
            (200, Because::Maintenance),
            (260, Because::Due),
        ];
        assert_eq!(saved, expected);
    }
}
