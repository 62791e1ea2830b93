//! Interleave slots: where communicators share a full link, whole operations pass one after another instead of sharing it.
//!
//! The participant that has the rules requests a slot before it begins a large operation, and releases it when that is over. It waits
//! no longer than the rules allow: whoever grants slots is never needed for an operation to go on.

use harmonaize_abi::{Nanos, OperationId};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The part of an operation's segments that may be under way when its slot is over: one in so many.
pub(crate) const TAIL: u64 = 8;

/// The rules by which a communicator interleaves its operations with those of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interleaving {
    /// The longest that an operation waits for its slot.
    pub max_wait: Duration,
    /// Operations of fewer bytes of a rank's tensor request no slot.
    pub min_bytes: u64,
    /// How many operations, at least one, make a slot over. It is over once they have ended in it but for an eighth of the
    /// last one's segments.
    pub operations: u32,
    /// A slot is over once no operation has followed the last for so long.
    pub idle_timeout: Duration,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
enum SlotState {
    #[default]
    Idle,
    /// The operation waits for a slot, which has its number.
    Waiting { slot: OperationId, until: Nanos, granted: bool },
    /// Operations from the slot's number to the last that has begun pass; `idle` is since when none follows.
    Active { slot: OperationId, last: OperationId, idle: Option<Nanos> },
}

/// Whether an operation may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// It may.
    Admitted,
    /// It has to wait for its slot.
    Blocked,
    /// It has to wait for the slot of its number, which is to be requested.
    SlotNeeded,
}

/// Decides which operations may begin.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Admission {
    rules: Option<Interleaving>,
    state: SlotState,
}

impl Admission {
    /// From now on these rules hold; `None`: none do.
    pub(crate) fn set_rules(&mut self, rules: Option<Interleaving>) {
        self.rules = rules;
    }

    /// Grants a slot; nothing if another is waited for.
    pub(crate) fn grant(&mut self, number: OperationId) {
        if let SlotState::Waiting { slot, granted, .. } = &mut self.state {
            *granted |= *slot == number;
        }
    }

    /// An operation that has not begun could begin. It waits no longer than `patience` for its slot.
    pub(crate) fn admit(
        &mut self,
        now: Nanos,
        operation: OperationId,
        bytes: u64,
        patience: Duration,
    ) -> Decision {
        match (&mut self.state, self.rules) {
            // It was let in before, and could not begin for other reasons.
            (SlotState::Active { last, .. }, _) if operation <= *last => Decision::Admitted,
            (SlotState::Active { slot, last, idle }, Some(rules)) => {
                if operation.0.saturating_sub(slot.0) >= u64::from(rules.operations.max(1)) {
                    return Decision::Blocked;
                }
                (*last, *idle) = (operation, None);
                Decision::Admitted
            }
            (SlotState::Waiting { slot, until, granted }, rules) => {
                if !*granted && now < *until && rules.is_some() {
                    return Decision::Blocked;
                }
                self.state = SlotState::Active { slot: *slot, last: operation, idle: None };
                Decision::Admitted
            }
            (SlotState::Idle, Some(rules)) if bytes >= rules.min_bytes.max(1) => {
                let until = now.after(rules.max_wait.min(patience));
                self.state = SlotState::Waiting { slot: operation, until, granted: false };
                Decision::SlotNeeded
            }
            // A slot that is no longer needed ends with the operations that have it.
            (SlotState::Active { .. }, None) => Decision::Blocked,
            (SlotState::Idle, _) => Decision::Admitted,
        }
    }

    /// Returns the slot that is over, once, now that what has begun has `ended`, or will soon.
    ///
    /// `next` is the operation that begins next, and `called` whether all local ranks have called it.
    pub(crate) fn take_over(
        &mut self,
        now: Nanos,
        ended: bool,
        (next, called): (OperationId, bool),
    ) -> Option<OperationId> {
        let SlotState::Active { slot, last, idle } = &mut self.state else { return None };
        if next <= *last {
            return None;
        }
        let over = self.rules.is_none_or(|rules| {
            let full = next.0.saturating_sub(slot.0) >= u64::from(rules.operations.max(1));
            *idle = idle.filter(|_| !called);
            full || ended && !called && now >= idle.get_or_insert(now).after(rules.idle_timeout)
        });
        let slot = *slot;
        over.then(|| {
            self.state = SlotState::Idle;
            slot
        })
    }

    /// Until when an operation waits for its slot, or a slot lasts.
    pub(crate) fn poll_timeout(&self) -> Option<Nanos> {
        match (self.state, self.rules) {
            (SlotState::Waiting { until, granted: false, .. }, _) => Some(until),
            (SlotState::Active { idle: Some(since), .. }, Some(rules)) => {
                Some(since.after(rules.idle_timeout))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::MAX;

    const RULES: Interleaving = Interleaving {
        max_wait: Duration::from_nanos(100),
        min_bytes: 8,
        operations: 2,
        idle_timeout: Duration::from_nanos(10),
    };

    fn admission() -> Admission {
        Admission { rules: Some(RULES), state: SlotState::Idle }
    }

    #[test]
    fn a_slot_is_requested_once_and_kept_for_what_follows() {
        let mut admission = admission();
        assert_eq!(
            admission.admit(Nanos(0), OperationId(0), 7, LONG),
            Decision::Admitted,
            "too small to ask"
        );
        assert_eq!(admission.admit(Nanos(0), OperationId(1), 8, LONG), Decision::SlotNeeded);
        assert_eq!(admission.admit(Nanos(99), OperationId(1), 8, LONG), Decision::Blocked);
        assert_eq!(admission.poll_timeout(), Some(Nanos(100)));
        admission.grant(OperationId(1));
        assert_eq!(admission.admit(Nanos(99), OperationId(1), 8, LONG), Decision::Admitted);
        assert_eq!(
            admission.admit(Nanos(99), OperationId(1), 8, LONG),
            Decision::Admitted,
            "it was not begun yet, for other reasons"
        );
        assert_eq!(
            admission.take_over(Nanos(200), true, (OperationId(1), true)),
            None,
            "it is still under way"
        );
        assert_eq!(
            admission.take_over(Nanos(200), true, (OperationId(2), false)),
            None,
            "another may follow"
        );
        assert_eq!(admission.poll_timeout(), Some(Nanos(210)));
        assert_eq!(admission.admit(Nanos(205), OperationId(2), 8, LONG), Decision::Admitted);
        assert_eq!(admission.admit(Nanos(206), OperationId(3), 8, LONG), Decision::Blocked, "two are a slot");
        assert_eq!(admission.take_over(Nanos(300), true, (OperationId(3), true)), Some(OperationId(1)));
        assert_eq!(admission.admit(Nanos(300), OperationId(3), 8, LONG), Decision::SlotNeeded);
    }

    #[test]
    fn waiting_ends_and_so_does_an_idle_slot() {
        let mut admission = admission();
        assert_eq!(admission.admit(Nanos(0), OperationId(5), 8, LONG), Decision::SlotNeeded);
        assert_eq!(
            admission.admit(Nanos(100), OperationId(5), 8, LONG),
            Decision::Admitted,
            "nobody gave it"
        );
        assert_eq!(
            (
                admission.take_over(Nanos(150), true, (OperationId(6), false)),
                admission.take_over(Nanos(159), true, (OperationId(6), false))
            ),
            (None, None)
        );
        assert_eq!(
            admission.take_over(Nanos(999), false, (OperationId(6), false)),
            None,
            "its last segments are under way"
        );
        assert_eq!(admission.take_over(Nanos(160), true, (OperationId(6), false)), Some(OperationId(5)));
        assert_eq!(admission.take_over(Nanos(160), true, (OperationId(6), false)), None);
    }

    #[test]
    fn withdrawn_rules_block_nobody() {
        let mut admission = admission();
        assert_eq!(admission.admit(Nanos(0), OperationId(5), 8, LONG), Decision::SlotNeeded);
        admission.set_rules(None);
        assert_eq!(admission.admit(Nanos(1), OperationId(5), 8, LONG), Decision::Admitted);
        assert_eq!(
            admission.take_over(Nanos(2), true, (OperationId(6), false)),
            Some(OperationId(5)),
            "whoever grants slots hears of its end all the same"
        );
        assert_eq!(admission.admit(Nanos(3), OperationId(6), 1 << 40, LONG), Decision::Admitted);
    }
}
