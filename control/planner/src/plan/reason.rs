//! Why plans are as they are: a code for programs, and a text for operators.

use super::{CheckError, Score};
use harmonaize_abi::CommunicatorId;
use harmonaize_units::Rate;
use std::fmt;

/// Why a communicator is to run by its assignment.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum AssignmentReason {
    /// It stays as it is, and nothing better was found.
    #[default]
    Unchanged,
    /// It forms.
    Forms,
    /// It stays: another plan would gain this part of its time, too little for a change.
    TooLittleGain(f64),
    /// It changes.
    Changes {
        /// What holds it up where it runs.
        bottleneck: Bottleneck,
        /// What it changes.
        change: RingChange,
        /// The slowdown that is predicted if it stays; infinite where nothing passes.
        before: f64,
        /// The slowdown that is predicted for the change; infinite where nothing passes.
        after: f64,
    },
    /// It gives way to what matters more to its tenant, beside this.
    GivesWay(Box<Self>),
    /// A control before a restart chose it; its text.
    Recovered(String),
}

/// What holds a ring up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bottleneck {
    /// The link of this name passes nothing.
    Failed(String),
    /// The link of this name is to be avoided.
    Avoided(String),
    /// A hop has no path.
    Unreachable,
    /// Nothing does.
    Nothing,
    /// Cross traffic leaves less of a link than its rate.
    Congested {
        /// The link's name.
        link: String,
        /// What is left of it.
        available: Rate,
        /// Its rate.
        rate: Rate,
    },
    /// A link carries too much of our own traffic.
    Full {
        /// The link's name.
        link: String,
        /// What is asked of it.
        load: Rate,
        /// Its rate.
        rate: Rate,
    },
}

/// What of a ring changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingChange {
    /// Its order.
    Order,
    /// The paths of some of its connections.
    Paths {
        /// How many take another path.
        moved: usize,
        /// How many there are.
        all: usize,
    },
}

/// Why a plan changes what it does, or nothing.
#[derive(Clone, Debug, PartialEq)]
pub enum PlanReason {
    /// Nothing changes, for nothing better was found; what is predicted.
    NothingBetter(Score),
    /// Nothing changes, for what could be gained is less than a change costs; what is predicted.
    TooLittleGain(Score),
    /// Communicators change or form.
    Changes {
        /// How many change to gain.
        gain: usize,
        /// How many change because what they have cannot stay.
        forced: usize,
        /// How many form.
        form: usize,
        /// How many stay, though others would be better for them.
        stay: usize,
        /// What is predicted if everything stays as it is.
        before: Score,
        /// What is predicted for the plan.
        after: Score,
        /// The first that changes, and why.
        first: Option<(CommunicatorId, AssignmentReason)>,
    },
    /// It would not be used.
    Unusable(CheckError),
}

impl AssignmentReason {
    /// Returns a name for programs that never changes with the text.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Unchanged => "unchanged",
            Self::Forms => "forms",
            Self::TooLittleGain(_) => "too_little_gain",
            Self::Changes { bottleneck, .. } => bottleneck.code(),
            Self::GivesWay(_) => "gives_way",
            Self::Recovered(_) => "recovered",
        }
    }
}

impl fmt::Display for AssignmentReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unchanged => Ok(()),
            Self::Forms => f.write_str("it forms"),
            Self::TooLittleGain(gain) => {
                write!(f, "stays: another plan would gain {}, too little for a change", percent(*gain))
            }
            Self::Changes { bottleneck, change, before, after } => {
                let (before, after) = (times(*before), times(*after));
                write!(f, "{bottleneck}: {change}, predicted slowdown {after} instead of {before}")
            }
            Self::GivesWay(beside) => {
                let between = if **beside == Self::Unchanged { "" } else { "; " };
                write!(f, "{beside}{between}gives way to what matters more to its tenant")
            }
            Self::Recovered(text) => f.write_str(text),
        }
    }
}

impl Bottleneck {
    fn code(&self) -> &'static str {
        match self {
            Self::Failed(_) => "link_failed",
            Self::Avoided(_) => "link_avoided",
            Self::Unreachable => "unreachable",
            Self::Nothing => "no_bottleneck",
            Self::Congested { .. } => "link_congested",
            Self::Full { .. } => "link_full",
        }
    }
}

impl fmt::Display for Bottleneck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(link) => write!(f, "{link} passes nothing"),
            Self::Avoided(link) => write!(f, "{link} is to be avoided"),
            Self::Unreachable => f.write_str("a hop has no way left"),
            Self::Nothing => f.write_str("nothing holds it up"),
            Self::Congested { link, available, rate } => write!(f, "{link} has {available} of {rate} left"),
            Self::Full { link, load, rate } => write!(f, "{link} is asked for {load} and has {rate}"),
        }
    }
}

impl fmt::Display for RingChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Order => f.write_str("the ring takes another order"),
            Self::Paths { moved, all } => write!(f, "{moved} of {all} connections take another path"),
        }
    }
}

impl PlanReason {
    /// Returns a name for programs that never changes with the text.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NothingBetter(_) => "nothing_better",
            Self::TooLittleGain(_) => "too_little_gain",
            Self::Changes { .. } => "changes",
            Self::Unusable(_) => "unusable",
        }
    }
}

impl fmt::Display for PlanReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NothingBetter(after) => write!(f, "no change: nothing better was found; {after}"),
            Self::TooLittleGain(after) => {
                write!(f, "no change: what could be gained is less than a change costs; {after}")
            }
            Self::Changes { gain, forced, form, stay, before, after, first } => {
                write!(
                    f,
                    "{gain} change to gain, {forced} because they must, {form} form, {stay} stay though others would be better; {after} instead of {before}"
                )?;
                match first {
                    Some((id, reason)) => write!(f, "; communicator {:x}: {reason}", id.0),
                    None => Ok(()),
                }
            }
            Self::Unusable(error) => write!(f, "this plan would not be used: {error}"),
        }
    }
}

impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mean slowdown {}, worst {}", times(self.slowdown), times(self.worst))?;
        if self.unreachable_jobs > 0 {
            write!(f, ", {} stuck", self.unreachable_jobs)?;
        }
        Ok(())
    }
}

fn times(slowdown: f64) -> String {
    if slowdown.is_finite() { format!("{slowdown:.2}") } else { "without end".to_owned() }
}

fn percent(gain: f64) -> String {
    format!("{:.0}%", (gain * 100.0).clamp(-100.0, 99_999.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn giving_way_stands_beside_other_reasons() {
        let gives_way = |beside| AssignmentReason::GivesWay(Box::new(beside));
        let alone = gives_way(AssignmentReason::Unchanged);
        assert_eq!(alone.to_string(), "gives way to what matters more to its tenant");
        let forms = gives_way(AssignmentReason::Forms);
        assert_eq!(forms.to_string(), "it forms; gives way to what matters more to its tenant");
        assert_eq!([alone.code(), forms.code()], ["gives_way"; 2]);
    }
}
