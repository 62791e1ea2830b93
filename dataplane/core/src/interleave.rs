//! Turns: where communicators share a full link, whole operations pass one after another instead of sharing it.
//!
//! The participant that is told of it asks for the turn before it begins a large operation, and says when the turn is over. It waits
//! no longer than its patience: whoever gives turns is never needed for an operation to go on.

use crate::Nanos;
use crate::communicator::{Action, Communicator};

/// Of an operation's segments, the part that may be under way when its turn is over.
const TAIL: u64 = 8;

/// How a communicator takes turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interleaving {
    /// Longest that an operation waits for its turn.
    pub max_wait: Nanos,
    /// Operations of fewer bytes of a rank's tensor ask for none.
    pub min_bytes: u64,
    /// A turn is over once so many operations have ended in it but for an eighth of the last one's segments, at least one,
    pub operations: u32,
    /// or once none has followed the last for so long.
    pub idle_timeout: Nanos,
}

#[derive(Clone, Copy, Debug, Default)]
enum SlotState {
    #[default]
    Idle,
    /// The operation waits for a turn, which has its number.
    Waiting { turn: u64, until: Nanos, given: bool },
    /// The turn's operations, from the first to the last that has begun; since when none follows.
    Active { turn: u64, last: u64, idle: Option<Nanos> },
}

/// Whether an operation may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// It may.
    Admitted,
    /// It has to wait for its turn.
    Blocked,
    /// It has to wait for the turn of its number, which is to be asked for.
    SlotNeeded,
}

/// Where a communicator is in its turns.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct InterleaveSlot {
    config: Option<Interleaving>,
    state: SlotState,
}

impl InterleaveSlot {
    /// An operation that has not begun could begin.
    pub(crate) fn admit(&mut self, now: Nanos, operation: u64, bytes: u64) -> Admission {
        match (&mut self.state, self.config) {
            // It was let in before, and could not begin for other reasons.
            (SlotState::Active { last, .. }, _) if operation <= *last => Admission::Admitted,
            (SlotState::Active { turn, last, idle }, Some(rules)) => {
                if operation.saturating_sub(*turn) >= u64::from(rules.operations.max(1)) {
                    return Admission::Blocked;
                }
                (*last, *idle) = (operation, None);
                Admission::Admitted
            }
            (SlotState::Waiting { turn, until, given }, rules) => {
                if !*given && now < *until && rules.is_some() {
                    return Admission::Blocked;
                }
                self.state = SlotState::Active { turn: *turn, last: operation, idle: None };
                Admission::Admitted
            }
            (SlotState::Idle, Some(rules)) if bytes >= rules.min_bytes.max(1) => {
                let until = now.after(rules.max_wait);
                self.state = SlotState::Waiting { turn: operation, until, given: false };
                Admission::SlotNeeded
            }
            // A turn that is no longer needed ends with the operations that have it.
            (SlotState::Active { .. }, None) => Admission::Blocked,
            (SlotState::Idle, _) => Admission::Admitted,
        }
    }

    /// What has begun has ended, or will soon; the next operation, which has not begun, is this, and all local ranks have called it or
    /// not. A turn that is over by that.
    pub(crate) fn take_over(&mut self, now: Nanos, ended: bool, (next, called): (u64, bool)) -> Option<u64> {
        let SlotState::Active { turn, last, idle } = &mut self.state else { return None };
        if next <= *last {
            return None;
        }
        let over = self.config.is_none_or(|rules| {
            let full = next.saturating_sub(*turn) >= u64::from(rules.operations.max(1));
            *idle = idle.filter(|_| !called);
            full || ended && !called && now >= idle.get_or_insert(now).after(rules.idle_timeout)
        });
        let turn = *turn;
        over.then(|| {
            self.state = SlotState::Idle;
            turn
        })
    }

    fn poll_timeout(&self) -> Option<Nanos> {
        match (self.state, self.config) {
            (SlotState::Waiting { until, given: false, .. }, _) => Some(until),
            (SlotState::Active { idle: Some(since), .. }, Some(rules)) => {
                Some(since.after(rules.idle_timeout))
            }
            _ => None,
        }
    }
}

impl Communicator {
    /// From now on large operations wait for their turn here, and others for what this participant would send; `None`: no longer.
    pub fn set_interleaving(&mut self, rules: Option<Interleaving>) {
        self.interleave.config = rules;
    }

    /// The turn of this number is given; of any other than the one that is waited for, that is nothing.
    pub fn handle_slot_granted(&mut self, number: u64) {
        if let SlotState::Waiting { turn, given, .. } = &mut self.interleave.state {
            *given |= *turn == number;
        }
    }

    /// Until when an operation waits for its turn, or a turn lasts, or acknowledgements may be told with data; [`Communicator::poll`]
    /// then goes on.
    pub fn poll_deferral_timeout(&self) -> Option<Nanos> {
        let due =
            self.interleave.poll_timeout().into_iter().chain(self.acknowledgements.poll_timeout()).min();
        due.filter(|_| self.failure().is_none())
    }

    /// Takes note of a turn that is over.
    pub(crate) fn poll_slot_over(&mut self, now: Nanos) {
        // The next one's first segments fill the link while the last of these leave it, and the word of it takes its time.
        let last = self.cursor.checked_sub(1).and_then(|last| self.operations.get(last)?.run);
        let (open, tail) = (self.begun - self.done, last.map_or(0, |run| run.segmentation.segments / TAIL));
        if open > tail {
            return;
        }
        let called = self.operations.get(self.cursor).is_some() && self.operations.complete(self.cursor);
        if let Some(turn) = self.interleave.take_over(now, open == 0, (self.cursor, called)) {
            self.actions.push_back(Action::ReleaseSlot { slot: turn });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: Interleaving =
        Interleaving { max_wait: Nanos(100), min_bytes: 8, operations: 2, idle_timeout: Nanos(10) };

    fn turn() -> InterleaveSlot {
        InterleaveSlot { config: Some(RULES), state: SlotState::Idle }
    }

    #[test]
    fn a_turn_is_asked_for_once_and_kept_for_what_follows() {
        let mut turn = turn();
        assert_eq!(turn.admit(Nanos(0), 0, 7), Admission::Admitted, "too small to ask");
        assert_eq!(turn.admit(Nanos(0), 1, 8), Admission::SlotNeeded);
        assert_eq!(turn.admit(Nanos(99), 1, 8), Admission::Blocked);
        assert_eq!(turn.poll_timeout(), Some(Nanos(100)));
        let SlotState::Waiting { given, .. } = &mut turn.state else { panic!() };
        *given = true;
        assert_eq!(turn.admit(Nanos(99), 1, 8), Admission::Admitted);
        assert_eq!(
            turn.admit(Nanos(99), 1, 8),
            Admission::Admitted,
            "it was not begun yet, for other reasons"
        );
        assert_eq!(turn.take_over(Nanos(200), true, (1, true)), None, "it is still under way");
        assert_eq!(turn.take_over(Nanos(200), true, (2, false)), None, "another may follow");
        assert_eq!(turn.poll_timeout(), Some(Nanos(210)));
        assert_eq!(turn.admit(Nanos(205), 2, 8), Admission::Admitted);
        assert_eq!(turn.admit(Nanos(206), 3, 8), Admission::Blocked, "two are a turn");
        assert_eq!(turn.take_over(Nanos(300), true, (3, true)), Some(1));
        assert_eq!(turn.admit(Nanos(300), 3, 8), Admission::SlotNeeded);
    }

    #[test]
    fn patience_ends_and_so_does_a_turn_that_nothing_follows() {
        let mut turn = turn();
        assert_eq!(turn.admit(Nanos(0), 5, 8), Admission::SlotNeeded);
        assert_eq!(turn.admit(Nanos(100), 5, 8), Admission::Admitted, "nobody gave it");
        assert_eq!(
            (turn.take_over(Nanos(150), true, (6, false)), turn.take_over(Nanos(159), true, (6, false))),
            (None, None)
        );
        assert_eq!(turn.take_over(Nanos(999), false, (6, false)), None, "its last segments are under way");
        assert_eq!(turn.take_over(Nanos(160), true, (6, false)), Some(5));
        assert_eq!(turn.take_over(Nanos(160), true, (6, false)), None);
    }

    #[test]
    fn turns_that_are_given_up_hold_nobody() {
        let mut turn = turn();
        assert_eq!(turn.admit(Nanos(0), 5, 8), Admission::SlotNeeded);
        turn.config = None;
        assert_eq!(turn.admit(Nanos(1), 5, 8), Admission::Admitted);
        assert_eq!(
            turn.take_over(Nanos(2), true, (6, false)),
            Some(5),
            "whoever gives turns hears of its end all the same"
        );
        assert_eq!(turn.admit(Nanos(3), 6, 1 << 40), Admission::Admitted);
    }
}
