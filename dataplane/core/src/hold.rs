//! Holding the next operation back once, so that periodic jobs come to take turns on a link that they share.

use crate::Nanos;
use crate::communicator::Communicator;

/// A hold that waits for an operation, or one that holds it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Hold {
    asked: Option<Nanos>,
    until: Option<Nanos>,
}

impl Hold {
    /// Whether an operation that could begin now has to wait.
    pub(crate) fn holds(&mut self, now: Nanos) -> bool {
        if let Some(span) = self.asked.take() {
            self.until = Some(now.after(span));
        }
        self.until = self.until.filter(|until| now < *until);
        self.until.is_some()
    }
}

impl Communicator {
    /// Holds the next operation that has not begun back once: its first segment begins here `span` after it could. Others wait for
    /// what this participant would send. In place of a hold that still waits for an operation.
    pub fn hold(&mut self, span: Nanos) {
        self.hold.asked = Some(span);
    }

    /// Until when an operation is held back or waits for its turn, or a turn lasts, or acknowledgements may be told with data; [`Communicator::poll`]
    /// then goes on.
    pub fn held_until(&self) -> Option<Nanos> {
        let old = self.acknowledgements.old().filter(|_| self.failure().is_none());
        self.hold.until.into_iter().chain(self.turn_due()).chain(old).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_operation_is_held_once_from_when_it_could_begin() {
        let mut hold = Hold { asked: Some(Nanos(10)), until: None };
        assert!(hold.holds(Nanos(100)) && hold.holds(Nanos(109)));
        assert_eq!(hold.until, Some(Nanos(110)));
        assert!(!hold.holds(Nanos(110)) && !hold.holds(Nanos(111)));
        assert_eq!(hold.until, None);
        hold.asked = Some(Nanos(0));
        assert!(!hold.holds(Nanos(200)));
    }
}
