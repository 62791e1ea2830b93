//! What the provider chooses for an iteration, within what its tenant left to it.
//!
//! Chosen by what the tenant's own events say and by nothing finer, so that whoever asks often learns no more than who reads those.

use crate::events::{CurrentState, Maintenance};
use harmonaize_abi::CongestionLevel;
use harmonaize_abi::session::{Checkpoint, Choice, ChoiceReason, Knobs, Priority};
use std::time::Duration;

/// A checkpoint that is not due comes so many times its cost after the last one at least.
const MIN_COST_RATIO: u32 = 4;

/// How long after the last one a checkpoint is taken early, while the network is slow. So none is needed while it is fast. It is a
/// quarter, half or three quarters of the longest time, by importance, and not before it pays.
fn throttled_interval(Checkpoint { every, cost, importance, .. }: &Checkpoint) -> Duration {
    let quarters = match importance {
        Priority::High => 1,
        Priority::Normal => 2,
        Priority::Low => 3,
    };
    (*every / 4).saturating_mul(quarters).max(cost.saturating_mul(MIN_COST_RATIO))
}

/// Chooses. The knobs make sense; `now` is on the feed's clock.
///
/// Accumulation goes from the least while nothing is slow over the geometric middle to the most, so that less crosses a slow network. A
/// checkpoint is taken when it is due; when hosts are going to be taken away and the last one is from before that was told,
/// and it would be done in time; and early while the network is slow.
pub fn choose(knobs: &Knobs, standing: &CurrentState, now: Duration) -> Choice {
    let (least, most) = knobs.accumulate;
    let accumulate = match standing.slowdown {
        CongestionLevel::None => least,
        CongestionLevel::Mild => (u64::from(least) * u64::from(most)).isqrt() as u32,
        CongestionLevel::Severe => most,
    };
    let slow = standing.slowdown > CongestionLevel::None;
    let why = knobs.checkpoint.and_then(|checkpoint| {
        let Checkpoint { every, cost, last, .. } = checkpoint;
        let helps = |Maintenance { announced: told, at }| {
            let before = last > now.saturating_sub(told);
            before && (at <= told || now.saturating_add(cost) <= at)
        };
        if last >= every {
            Some(ChoiceReason::Due)
        } else if standing.maintenance.is_some_and(helps) {
            Some(ChoiceReason::Maintenance)
        } else {
            (slow && last >= throttled_interval(&checkpoint)).then_some(ChoiceReason::Slow)
        }
    });
    let usual = if accumulate > least { ChoiceReason::Slow } else { ChoiceReason::Usual };
    Choice { accumulate, checkpoint: why.is_some(), reason: why.unwrap_or(usual) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn knobs(last: Duration) -> Knobs {
        let importance = Priority::Normal;
        let checkpoint = Some(Checkpoint { every: SECOND * 60, cost: SECOND, last, importance });
        Knobs { accumulate: (2, 32), checkpoint }
    }

    /// Why there is a checkpoint at 1,000 s. Each case has what stands, what it costs in seconds, how important it is, and how long
    /// ago the last one was.
    #[test]
    fn throttled_checkpoint_depends_on_cost_and_importance() {
        use Priority::{High, Low, Normal};
        let nothing = CurrentState::default();
        let slow = CurrentState { slowdown: CongestionLevel::Mild, maintenance: None };
        let going = |told: u32, at: u32| CurrentState {
            slowdown: CongestionLevel::None,
            maintenance: Some(Maintenance { announced: SECOND * told, at: SECOND * at }),
        };
        let cases = [
            // (standing, cost, importance, last, why)
            (nothing, 1, High, 99, None),
            (nothing, 1, Low, 100, Some(ChoiceReason::Due)),
            (slow, 1, High, 24, None),
            (slow, 1, High, 25, Some(ChoiceReason::Slow)),
            (slow, 1, Normal, 49, None),
            (slow, 1, Normal, 50, Some(ChoiceReason::Slow)),
            (slow, 1, Low, 74, None),
            (slow, 1, Low, 75, Some(ChoiceReason::Slow)),
            // What costs much is not done early for little.
            (slow, 10, High, 39, None),
            (slow, 10, High, 40, Some(ChoiceReason::Slow)),
            (slow, 30, High, 99, None),
            (slow, 30, High, 100, Some(ChoiceReason::Due)),
            // A window in 20 s, told 50 s ago.
            (going(950, 1020), 20, Low, 51, Some(ChoiceReason::Maintenance)),
            (going(950, 1020), 20, Low, 49, None),
            (going(950, 1020), 21, Low, 51, None),
            // It has begun.
            (going(950, 999), 1, High, 51, None),
            // At once, as soon as jobs have gone.
            (going(950, 950), 30, High, 51, Some(ChoiceReason::Maintenance)),
        ];
        for (standing, cost, importance, last, why) in cases {
            let (every, cost, last) = (SECOND * 100, SECOND * cost, SECOND * last);
            let checkpoint = Some(Checkpoint { every, cost, last, importance });
            let choice = choose(&Knobs { accumulate: (1, 1), checkpoint }, &standing, SECOND * 1000);
            let case = format!("{standing:?} {checkpoint:?}");
            assert_eq!(choice.checkpoint.then_some(choice.reason), why, "{case}");
        }
    }

    #[test]
    fn the_slower_the_more_is_accumulated() {
        let of = |slow| {
            let choice =
                choose(&knobs(SECOND), &CurrentState { slowdown: slow, maintenance: None }, SECOND * 100);
            (choice.accumulate, choice.checkpoint, choice.reason)
        };
        assert_eq!(of(CongestionLevel::None), (2, false, ChoiceReason::Usual));
        assert_eq!(of(CongestionLevel::Mild), (8, false, ChoiceReason::Slow));
        assert_eq!(of(CongestionLevel::Severe), (32, false, ChoiceReason::Slow));
        let fixed = Knobs { accumulate: (4, 4), checkpoint: None };
        let severe = CurrentState { slowdown: CongestionLevel::Severe, maintenance: None };
        let expected = Choice { accumulate: 4, checkpoint: false, reason: ChoiceReason::Usual };
        assert_eq!(choose(&fixed, &severe, SECOND), expected);
    }

    /// A job of five minutes saves when it is asked to, and never later than it stated. The test compares what it saves when.
    #[test]
    fn checkpoints_are_cheap_and_never_late() {
        // From, until, what stands.
        let slow = (100, 130, CurrentState { slowdown: CongestionLevel::Severe, maintenance: None });
        let going = Maintenance { announced: SECOND * 200, at: SECOND * 200 };
        let drained = (200, 220, CurrentState { slowdown: CongestionLevel::None, maintenance: Some(going) });
        let (mut last, mut saved) = (0_u64, Vec::new());
        for second in 1..300_u64 {
            let within = |(from, until, _): &&(u64, u64, CurrentState)| (*from..*until).contains(&second);
            let standing = [slow, drained].iter().find(within).map(|(.., standing)| *standing);
            let standing = standing.unwrap_or_default();
            let choice = choose(&knobs(SECOND * (second - last) as u32), &standing, SECOND * second as u32);
            if choice.checkpoint {
                saved.push((second, choice.reason));
                last = second;
            }
        }
        let expected = [
            (60, ChoiceReason::Due),
            // Half of the minute is over, and the network is slow.
            (100, ChoiceReason::Slow),
            (160, ChoiceReason::Due),
            // Told at 200: once, for the next is of after that.
            (200, ChoiceReason::Maintenance),
            (260, ChoiceReason::Due),
        ];
        assert_eq!(saved, expected);
    }
}
