//! Hints: what a tenant expects one of its communicators to do. Advice, never trusted.

use super::list::bounded;
use crate::Collective;
use alloc::vec::Vec;
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// Most operations of a sequence.
pub const MAX_SEQUENCE: usize = 64;
/// The shortest and longest periods.
pub const PERIODS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_secs(3600));
/// Bytes of the largest operation that can be expected.
pub const MAX_EXPECTED_BYTES: u64 = 1 << 44;
/// The highest priority of a task.
pub const MAX_TASK_PRIORITY: u8 = 7;

/// An operation of an iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Expected {
    /// What.
    pub collective: Collective,
    /// Of each rank's tensor; of the larger where input and output differ.
    pub bytes: u64,
    /// Whether the iteration waits for it: whether it is on its critical path, and not hidden behind computing.
    pub critical: bool,
}

/// What a tenant expects of a communicator. It improves the provider's first plans; whatever turns out otherwise is
/// forgotten, and nobody else pays for it.
///
/// ```
/// # use harmonaize_abi::session::Hints;
/// # use harmonaize_abi::Collective;
/// # use core::time::Duration;
/// let training = Hints::new()
///     .period(Duration::from_millis(50))
///     .overlapped(Collective::AllReduce, 48 << 20)
///     .expect(Collective::AllReduce, 16 << 20)
///     .task_priority(2);
/// assert!(training.check().is_ok());
/// assert!(training.period(Duration::ZERO).check().unwrap_err().to_string().contains("1ms"));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Hints {
    /// Of an iteration, if nobody else slows it: from the beginning of its operations to that of the next one's.
    pub period: Option<Duration>,
    /// The operations of an iteration, in order.
    #[serde(deserialize_with = "bounded::<MAX_SEQUENCE, _, _>")]
    pub sequence: Vec<Expected>,
    /// How much this matters among communicators of the same tenant, and of nobody else. The range is 0, the default,
    /// to [`MAX_TASK_PRIORITY`]. Those with less give way where they share a link.
    pub task_priority: u8,
}

/// Why hints make no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HintsError {
    /// The period is out of [`PERIODS`].
    Period(Duration),
    /// More operations than [`MAX_SEQUENCE`].
    Sequence(usize),
    /// This operation of the sequence, from 0, has no bytes, or more than [`MAX_EXPECTED_BYTES`]. Barriers have none.
    Bytes(usize, u64),
    /// Above [`MAX_TASK_PRIORITY`].
    TaskPriority(u8),
}

impl core::fmt::Display for HintsError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Period(period) => {
                write!(f, "a period of {period:?}; {:?} to {:?} are possible", PERIODS.0, PERIODS.1)
            }
            Self::Sequence(operations) => {
                write!(f, "a sequence of {operations} operations; at most {MAX_SEQUENCE}")
            }
            Self::Bytes(index, bytes) => write!(
                f,
                "{bytes} B for operation {index} of the sequence; 1 to {MAX_EXPECTED_BYTES} are possible, and 0 for a barrier"
            ),
            Self::TaskPriority(priority) => {
                write!(f, "a task's priority of {priority}; 0 to {MAX_TASK_PRIORITY} are possible")
            }
        }
    }
}

impl core::error::Error for HintsError {}

impl Hints {
    /// None: what was hinted at before is taken back.
    pub fn new() -> Self {
        Self::default()
    }

    /// Expects an iteration to take so long.
    #[must_use]
    pub fn period(mut self, period: Duration) -> Self {
        self.period = Some(period);
        self
    }

    /// Expects this operation next, for which the iteration waits.
    #[must_use]
    pub fn expect(mut self, collective: Collective, bytes: u64) -> Self {
        self.sequence.push(Expected { collective, bytes, critical: true });
        self
    }

    /// Expects this operation next, while the job computes.
    #[must_use]
    pub fn overlapped(mut self, collective: Collective, bytes: u64) -> Self {
        self.sequence.push(Expected { collective, bytes, critical: false });
        self
    }

    /// Matters so much beside other communicators of the same tenant.
    #[must_use]
    pub fn task_priority(mut self, priority: u8) -> Self {
        self.task_priority = priority;
        self
    }

    /// Whether they make sense.
    ///
    /// # Errors
    /// The first that does not.
    pub fn check(&self) -> Result<(), HintsError> {
        if let Some(period) = self.period.filter(|period| *period < PERIODS.0 || *period > PERIODS.1) {
            return Err(HintsError::Period(period));
        }
        if self.sequence.len() > MAX_SEQUENCE {
            return Err(HintsError::Sequence(self.sequence.len()));
        }
        for (index, Expected { collective, bytes, .. }) in self.sequence.iter().enumerate() {
            let least = u64::from(collective.has_data());
            if !(least..=MAX_EXPECTED_BYTES).contains(bytes) {
                return Err(HintsError::Bytes(index, *bytes));
            }
        }
        match self.task_priority {
            0..=MAX_TASK_PRIORITY => Ok(()),
            priority => Err(HintsError::TaskPriority(priority)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn each_value_out_of_range_is_named() {
        let reduce = |bytes| Hints::new().expect(Collective::AllReduce, bytes);
        let mut long = Hints::new();
        for _ in 0..=MAX_SEQUENCE {
            long = long.overlapped(Collective::AllReduce, 1);
        }
        let hour = PERIODS.1;
        let cases = [
            (Hints::new().period(Duration::ZERO), HintsError::Period(Duration::ZERO), "0ns"),
            (Hints::new().period(hour * 2), HintsError::Period(hour * 2), "7200s"),
            (long, HintsError::Sequence(65), "65"),
            (reduce(1).expect(Collective::AllReduce, 0), HintsError::Bytes(1, 0), "operation 1"),
            (reduce(u64::MAX), HintsError::Bytes(0, u64::MAX), "18446744073709551615"),
            (Hints::new().task_priority(8), HintsError::TaskPriority(8), "8"),
        ];
        for (hints, error, named) in cases {
            assert_eq!(hints.check(), Err(error));
            assert!(error.to_string().contains(named), "{error}");
        }
        let all = reduce(MAX_EXPECTED_BYTES).expect(Collective::Barrier, 0).period(hour).task_priority(7);
        assert_eq!((all.check(), Hints::new().check()), (Ok(()), Ok(())));
    }
}
