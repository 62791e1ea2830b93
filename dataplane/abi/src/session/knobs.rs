//! Knobs: what a tenant leaves to the provider from one iteration to the next, and what the provider chose.

use super::Priority;
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// Most micro-batches that a range can reach to.
pub const MAX_ACCUMULATE: u32 = 1 << 16;

/// When a job saves its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Checkpoint {
    /// At least once in so long.
    pub every: Duration,
    /// What saving takes.
    pub cost: Duration,
    /// How long ago it last did.
    pub last: Duration,
    /// How much it matters that little is lost: the higher, the sooner it saves early where a moment is cheap.
    pub importance: Priority,
}

/// What a tenant leaves to the provider for its next iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Knobs {
    /// The fewest and the most micro-batches of which gradients are added up locally before they are exchanged.
    pub accumulate: (u32, u32),
    /// When to save, if the provider is to choose the moment.
    pub checkpoint: Option<Checkpoint>,
}

impl Default for Knobs {
    /// Nothing.
    fn default() -> Self {
        Self { accumulate: (1, 1), checkpoint: None }
    }
}

/// Why the provider chose as it did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ChoiceReason {
    /// Nothing speaks for anything else.
    #[default]
    Usual,
    /// The network is slow now.
    Slow,
    /// Hosts will be taken away.
    Maintenance,
    /// The longest time between two checkpoints is over.
    Due,
    /// The provider cannot be asked now.
    Unknown,
}

/// What the provider chose for an iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Choice {
    /// Micro-batches, within the range.
    pub accumulate: u32,
    /// Save the state before this iteration.
    pub checkpoint: bool,
    /// Why, of whichever differs from the usual; of the checkpoint where both do.
    pub reason: ChoiceReason,
}

/// Why knobs make no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KnobsError {
    /// The range is empty, begins at 0, or ends beyond [`MAX_ACCUMULATE`].
    Accumulate(u32, u32),
    /// Saving takes as long as there is between two checkpoints, or longer.
    Checkpoint(Duration, Duration),
}

impl core::fmt::Display for KnobsError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Accumulate(least, most) => {
                write!(f, "{least} to {most} micro-batches; a range within 1 to {MAX_ACCUMULATE} is possible")
            }
            Self::Checkpoint(every, cost) => {
                write!(f, "a checkpoint each {every:?} that takes {cost:?}; it must take less")
            }
        }
    }
}

impl core::error::Error for KnobsError {}

impl Knobs {
    /// Whether they make sense.
    ///
    /// # Errors
    /// What does not.
    pub fn check(&self) -> Result<(), KnobsError> {
        let (least, most) = self.accumulate;
        if least == 0 || least > most || most > MAX_ACCUMULATE {
            return Err(KnobsError::Accumulate(least, most));
        }
        match self.checkpoint {
            Some(Checkpoint { every, cost, .. }) if cost >= every => Err(KnobsError::Checkpoint(every, cost)),
            _ => Ok(()),
        }
    }

    /// What to do where the provider cannot be asked: as little as may be, and a checkpoint once it is due.
    pub fn fallback(&self) -> Choice {
        let checkpoint = self.checkpoint.is_some_and(|checkpoint| checkpoint.last >= checkpoint.every);
        Choice { accumulate: self.accumulate.0, checkpoint, reason: ChoiceReason::Unknown }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knobs_out_of_range_are_named() {
        let of = |least, most| Knobs { accumulate: (least, most), checkpoint: None };
        assert_eq!(of(1, MAX_ACCUMULATE).check(), Ok(()));
        for (least, most) in [(0, 1), (2, 1), (1, MAX_ACCUMULATE + 1)] {
            assert_eq!(of(least, most).check(), Err(KnobsError::Accumulate(least, most)));
        }
        let (every, cost, last) = (Duration::from_secs(1), Duration::from_secs(1), Duration::ZERO);
        let importance = Priority::Normal;
        let knobs = Knobs { checkpoint: Some(Checkpoint { every, cost, last, importance }), ..of(1, 1) };
        assert_eq!(knobs.check(), Err(KnobsError::Checkpoint(every, cost)));
    }

    #[test]
    fn alone_a_checkpoint_comes_when_it_is_due() {
        let second = Duration::from_secs(1);
        let last = |last| Knobs {
            accumulate: (2, 8),
            checkpoint: Some(Checkpoint {
                every: second * 60,
                cost: second,
                last,
                importance: Priority::High,
            }),
        };
        let choice = last(second * 59).fallback();
        assert_eq!((choice.accumulate, choice.checkpoint, choice.reason), (2, false, ChoiceReason::Unknown));
        assert!(last(second * 60).fallback().checkpoint);
    }
}
