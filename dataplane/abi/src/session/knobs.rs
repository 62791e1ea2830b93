//! Knobs: what a tenant leaves to the provider from one iteration to the next, and what the provider chose.

use super::Priority;
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// Most micro-batches that a range can reach to.
pub const MAX_ACCUMULATE: u32 = 1 << 16;
/// Most samples that a range can reach to.
pub const MAX_SAMPLES: u32 = 1 << 30;

/// A bit of the id of a [`Request::Iteration`](super::Request::Iteration): the process would rather send
/// [`Request::Batch`](super::Request::Batch). An agent that reads it answers [`Answer::TakesBatches`](super::Answer::TakesBatches)
/// and asks the provider nothing. One that does not chooses, and that stands.
pub const BATCHES: u64 = 1 << 61;

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

/// By which rule a job's learning rate follows its batch. Which one suits an optimizer is the tenant's to say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LearningRate {
    /// By what the batch gains, as the noise has it: between no change and the linear rule.
    #[default]
    AdaScale,
    /// By the root of the batch.
    SquareRoot,
    /// In proportion to the batch.
    Linear,
}

/// A batch that a tenant leaves to the provider for its next iteration, and what the choice follows from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BatchKnobs {
    /// The fewest and the most samples of a step, over all ranks.
    pub samples: (u32, u32),
    /// The fewest and the most samples of a rank's micro-batch; the most by its memory.
    pub micro: (u32, u32),
    /// The samples of a step, over all ranks, that the learning rate was set for.
    pub initial: u32,
    /// How the learning rate follows the batch.
    pub rule: LearningRate,
    /// Squared norm of the true gradient. Below 0 counts as 0.
    pub square: f64,
    /// Trace of the covariance of one sample's gradient. Below 0 counts as 0.
    pub trace: f64,
    /// What a rank computes for a micro-batch beside its samples.
    pub pass: Duration,
    /// What a rank computes for each sample.
    pub sample: Duration,
    /// What a step takes beyond its computation, to exchange gradients while nothing slows the network.
    pub exchange: Duration,
}

/// The batch that the provider chose for an iteration. With [`Choice::accumulate`] and the number of ranks it is the step's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BatchChoice {
    /// Samples of a rank's micro-batch.
    pub micro: u32,
    /// What the initial batch's learning rate is multiplied by.
    pub learning_rate: f64,
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
    /// The range is empty, begins at 0, or ends beyond [`MAX_SAMPLES`].
    Samples(u32, u32),
    /// The noise is infinite or no number.
    Noise,
    /// Samples take no time.
    Sample,
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
            Self::Samples(least, most) => {
                write!(f, "{least} to {most} samples; a range within 1 to {MAX_SAMPLES} is possible")
            }
            Self::Noise => f.write_str("the noise of gradients is infinite or no number"),
            Self::Sample => f.write_str("a sample takes no time; its computation takes some"),
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

    /// What to do where the provider cannot be asked. It accumulates as little as may be, and saves a checkpoint once
    /// it is due.
    pub fn fallback(&self) -> Choice {
        let checkpoint = self.checkpoint.is_some_and(|checkpoint| checkpoint.last >= checkpoint.every);
        Choice { accumulate: self.accumulate.0, checkpoint, reason: ChoiceReason::Unknown }
    }
}

impl BatchKnobs {
    /// Whether they make sense.
    ///
    /// # Errors
    /// What does not.
    pub fn check(&self) -> Result<(), KnobsError> {
        for (least, most) in [self.samples, self.micro, (self.initial, self.initial)] {
            if least == 0 || least > most || most > MAX_SAMPLES {
                return Err(KnobsError::Samples(least, most));
            }
        }
        if !(self.square.is_finite() && self.trace.is_finite()) {
            return Err(KnobsError::Noise);
        }
        if self.sample.is_zero() { Err(KnobsError::Sample) } else { Ok(()) }
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
    fn batches_that_make_no_sense_are_named() {
        let good = BatchKnobs {
            samples: (32, MAX_SAMPLES),
            micro: (1, 64),
            initial: 32,
            rule: LearningRate::default(),
            square: -1.0,
            trace: 2.0,
            pass: Duration::ZERO,
            sample: Duration::from_nanos(1),
            exchange: Duration::ZERO,
        };
        assert_eq!(good.check(), Ok(()));
        for (least, most) in [(0, 1), (2, 1), (1, MAX_SAMPLES + 1)] {
            let range = (least, most);
            let why = Err(KnobsError::Samples(least, most));
            assert_eq!(BatchKnobs { samples: range, ..good }.check(), why);
            assert_eq!(BatchKnobs { micro: range, ..good }.check(), why);
        }
        assert_eq!(BatchKnobs { initial: 0, ..good }.check(), Err(KnobsError::Samples(0, 0)));
        assert_eq!(BatchKnobs { square: f64::NAN, ..good }.check(), Err(KnobsError::Noise));
        assert_eq!(BatchKnobs { trace: f64::INFINITY, ..good }.check(), Err(KnobsError::Noise));
        assert_eq!(BatchKnobs { sample: Duration::ZERO, ..good }.check(), Err(KnobsError::Sample));
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
