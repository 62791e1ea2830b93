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
pub struct Turns {
    /// Longest that an operation waits for its turn.
    pub patience: Nanos,
    /// Operations of fewer bytes of a rank's tensor ask for none.
    pub least_bytes: u64,
    /// A turn is over once so many operations have ended in it but for an eighth of the last one's segments, at least one,
    pub operations: u32,
    /// or once none has followed the last for so long.
    pub pause: Nanos,
}

#[derive(Clone, Copy, Debug, Default)]
enum Stage {
    #[default]
    Out,
    /// The operation waits for a turn, which has its number.
    Waits { turn: u64, until: Nanos, given: bool },
    /// The turn's operations, from the first to the last that has begun; since when none follows.
    Has { turn: u64, last: u64, idle: Option<Nanos> },
}

/// Whether an operation may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// It may.
    Free,
    /// It has to wait for its turn.
    Waits,
    /// It has to wait for the turn of its number, which is to be asked for.
    Asks,
}

/// Where a communicator is in its turns.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Turn {
    rules: Option<Turns>,
    stage: Stage,
}

impl Turn {
    /// An operation that has not begun could begin.
    pub(crate) fn enter(&mut self, now: Nanos, operation: u64, bytes: u64) -> Entry {
        match (&mut self.stage, self.rules) {
            // It was let in before, and could not begin for other reasons.
            (Stage::Has { last, .. }, _) if operation <= *last => Entry::Free,
            (Stage::Has { turn, last, idle }, Some(rules)) => {
                if operation.saturating_sub(*turn) >= u64::from(rules.operations.max(1)) {
                    return Entry::Waits;
                }
                (*last, *idle) = (operation, None);
                Entry::Free
            }
            (Stage::Waits { turn, until, given }, rules) => {
                if !*given && now < *until && rules.is_some() {
                    return Entry::Waits;
                }
                self.stage = Stage::Has { turn: *turn, last: operation, idle: None };
                Entry::Free
            }
            (Stage::Out, Some(rules)) if bytes >= rules.least_bytes.max(1) => {
                let until = now.after(rules.patience);
                self.stage = Stage::Waits { turn: operation, until, given: false };
                Entry::Asks
            }
            // A turn that is no longer needed ends with the operations that have it.
            (Stage::Has { .. }, None) => Entry::Waits,
            (Stage::Out, _) => Entry::Free,
        }
    }

    /// What has begun has ended, or will soon; the next operation, which has not begun, is this, and all local ranks have called it or
    /// not. A turn that is over by that.
    pub(crate) fn rest(&mut self, now: Nanos, ended: bool, (next, called): (u64, bool)) -> Option<u64> {
        let Stage::Has { turn, last, idle } = &mut self.stage else { return None };
        if next <= *last {
            return None;
        }
        let over = self.rules.is_none_or(|rules| {
            let full = next.saturating_sub(*turn) >= u64::from(rules.operations.max(1));
            *idle = idle.filter(|_| !called);
            full || ended && !called && now >= idle.get_or_insert(now).after(rules.pause)
        });
        let turn = *turn;
        over.then(|| {
            self.stage = Stage::Out;
            turn
        })
    }

    fn due(&self) -> Option<Nanos> {
        match (self.stage, self.rules) {
            (Stage::Waits { until, given: false, .. }, _) => Some(until),
            (Stage::Has { idle: Some(since), .. }, Some(rules)) => Some(since.after(rules.pause)),
            _ => None,
        }
    }
}

impl Communicator {
    /// From now on large operations wait for their turn here, and others for what this participant would send; `None`: no longer.
    pub fn take_turns(&mut self, rules: Option<Turns>) {
        self.turn.rules = rules;
    }

    /// The turn of this number is given; of any other than the one that is waited for, that is nothing.
    pub fn turn_given(&mut self, number: u64) {
        if let Stage::Waits { turn, given, .. } = &mut self.turn.stage {
            *given |= *turn == number;
        }
    }

    /// When [`Communicator::poll`] has something to do because an operation has waited long enough for its turn, or a turn is over.
    pub(crate) fn turn_due(&self) -> Option<Nanos> {
        self.turn.due().filter(|_| self.failure().is_none())
    }

    /// Takes note of a turn that is over.
    pub(crate) fn end_turn(&mut self, now: Nanos) {
        // The next one's first segments fill the link while the last of these leave it, and the word of it takes its time.
        let last = self.cursor.checked_sub(1).and_then(|last| self.operations.get(last)?.run);
        let (open, tail) = (self.begun - self.done, last.map_or(0, |run| run.cut.segments / TAIL));
        if open > tail {
            return;
        }
        let called = self.operations.get(self.cursor).is_some() && self.operations.complete(self.cursor);
        if let Some(turn) = self.turn.rest(now, open == 0, (self.cursor, called)) {
            self.actions.push_back(Action::EndTurn { turn });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: Turns = Turns { patience: Nanos(100), least_bytes: 8, operations: 2, pause: Nanos(10) };

    fn turn() -> Turn {
        Turn { rules: Some(RULES), stage: Stage::Out }
    }

    #[test]
    fn a_turn_is_asked_for_once_and_kept_for_what_follows() {
        let mut turn = turn();
        assert_eq!(turn.enter(Nanos(0), 0, 7), Entry::Free, "too small to ask");
        assert_eq!(turn.enter(Nanos(0), 1, 8), Entry::Asks);
        assert_eq!(turn.enter(Nanos(99), 1, 8), Entry::Waits);
        assert_eq!(turn.due(), Some(Nanos(100)));
        let Stage::Waits { given, .. } = &mut turn.stage else { panic!() };
        *given = true;
        assert_eq!(turn.enter(Nanos(99), 1, 8), Entry::Free);
        assert_eq!(turn.enter(Nanos(99), 1, 8), Entry::Free, "it was not begun yet, for other reasons");
        assert_eq!(turn.rest(Nanos(200), true, (1, true)), None, "it is still under way");
        assert_eq!(turn.rest(Nanos(200), true, (2, false)), None, "another may follow");
        assert_eq!(turn.due(), Some(Nanos(210)));
        assert_eq!(turn.enter(Nanos(205), 2, 8), Entry::Free);
        assert_eq!(turn.enter(Nanos(206), 3, 8), Entry::Waits, "two are a turn");
        assert_eq!(turn.rest(Nanos(300), true, (3, true)), Some(1));
        assert_eq!(turn.enter(Nanos(300), 3, 8), Entry::Asks);
    }

    #[test]
    fn patience_ends_and_so_does_a_turn_that_nothing_follows() {
        let mut turn = turn();
        assert_eq!(turn.enter(Nanos(0), 5, 8), Entry::Asks);
        assert_eq!(turn.enter(Nanos(100), 5, 8), Entry::Free, "nobody gave it");
        assert_eq!(
            (turn.rest(Nanos(150), true, (6, false)), turn.rest(Nanos(159), true, (6, false))),
            (None, None)
        );
        assert_eq!(turn.rest(Nanos(999), false, (6, false)), None, "its last segments are under way");
        assert_eq!(turn.rest(Nanos(160), true, (6, false)), Some(5));
        assert_eq!(turn.rest(Nanos(160), true, (6, false)), None);
    }

    #[test]
    fn turns_that_are_given_up_hold_nobody() {
        let mut turn = turn();
        assert_eq!(turn.enter(Nanos(0), 5, 8), Entry::Asks);
        turn.rules = None;
        assert_eq!(turn.enter(Nanos(1), 5, 8), Entry::Free);
        assert_eq!(
            turn.rest(Nanos(2), true, (6, false)),
            Some(5),
            "whoever gives turns hears of its end all the same"
        );
        assert_eq!(turn.enter(Nanos(3), 6, 1 << 40), Entry::Free);
    }
}
