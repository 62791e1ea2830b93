//! Gaps: what is below every class has its turns where its tenant has no other operation in flight.
//!
//! Words to peers that carry nothing of an operation wait for no gap: others' operations may wait for them.

use harmonaize_core::Nanos;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// How long a tenant has nothing else in flight before that is a gap. Between two operations in a row it is shorter.
const QUIET: Duration = Duration::from_micros(500);

/// The longest that it is without a turn where there is no gap. Then it has one long action, so that it ends some day.
const PATIENCE: Duration = Duration::from_millis(20);

/// What a turn may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leave {
    /// As long as any.
    Whole,
    /// One long action.
    Action,
    /// None: it waits.
    Nothing,
}

/// How a communicator waits for gaps, all operations of which are of the class background.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gaps {
    /// Since when its tenant has nothing else in flight.
    quiet: Option<Nanos>,
    /// When it last had a turn, or began to wait for one.
    turn: Option<Nanos>,
    /// Until when it waits.
    due: Option<Nanos>,
}

impl Gaps {
    /// It could have a turn. `busy` says whether its tenant has another operation in flight.
    pub(crate) fn leave(&mut self, now: Nanos, busy: bool) -> Leave {
        let patience = self.turn.get_or_insert(now).after(PATIENCE);
        if busy {
            self.quiet = None;
        }
        let opens = (!busy).then(|| self.quiet.get_or_insert(now).after(QUIET));
        let leave = match opens {
            Some(opens) if now >= opens => Leave::Whole,
            _ if now >= patience => Leave::Action,
            _ => Leave::Nothing,
        };
        if leave == Leave::Nothing {
            self.due = opens.into_iter().chain([patience]).min();
        } else {
            (self.turn, self.due) = (Some(now), None);
        }
        leave
    }

    /// Until when it waits, if it does.
    pub(crate) fn due(&self) -> Option<Nanos> {
        self.due
    }
}

/// By tenant, how many of its communicators here have a call in flight that is not below every class. Only the engine's thread counts.
#[derive(Debug, Default)]
pub(crate) struct BusyTenants(Vec<Arc<AtomicUsize>>);

impl BusyTenants {
    /// A place in a tenant's count, of a communicator without such calls.
    pub(crate) fn place(&mut self, tenant: u32) -> BusyPlace {
        let at = tenant as usize;
        if self.0.len() <= at {
            self.0.resize_with(at + 1, Arc::default);
        }
        BusyPlace { count: self.0.get(at).map(Arc::clone).unwrap_or_default(), busy: false }
    }
}

/// A communicator's place in its tenant's count. It counts no more once that is dropped, whatever it had in flight.
#[derive(Debug, Default)]
pub(crate) struct BusyPlace {
    count: Arc<AtomicUsize>,
    busy: bool,
}

impl BusyPlace {
    /// Whether the communicator counts from now on. Cost: an addition where that changes.
    pub(crate) fn set(&mut self, busy: bool) {
        if std::mem::replace(&mut self.busy, busy) == busy {
            return;
        }
        if busy {
            self.count.fetch_add(1, Ordering::Relaxed);
        } else {
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Whether any of the tenant's counts.
    pub(crate) fn any(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }
}

impl Drop for BusyPlace {
    fn drop(&mut self) {
        self.set(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICROSECOND: u64 = 1000;

    fn at(us: u64) -> Nanos {
        Nanos(us * MICROSECOND)
    }

    #[test]
    fn a_gap_begins_once_nothing_else_was_in_flight_for_a_while() {
        let mut gaps = Gaps::default();
        assert_eq!((gaps.leave(at(0), true), gaps.due()), (Leave::Nothing, Some(at(20_000))));
        assert_eq!((gaps.leave(at(100), false), gaps.due()), (Leave::Nothing, Some(at(600))));
        assert_eq!(gaps.leave(at(599), false), Leave::Nothing);
        assert_eq!((gaps.leave(at(600), false), gaps.due()), (Leave::Whole, None));
        assert_eq!(gaps.leave(at(601), false), Leave::Whole);
        assert_eq!(gaps.leave(at(602), true), Leave::Nothing, "an operation was called");
        assert_eq!(gaps.leave(at(603), false), Leave::Nothing, "the next gap is not there yet");
    }

    #[test]
    fn a_tenant_is_busy_while_one_of_its_communicators_is() {
        let mut tenants = BusyTenants::default();
        let (waits, other) = (tenants.place(3), tenants.place(1));
        let (mut first, mut second) = (tenants.place(3), tenants.place(3));
        assert!(!waits.any(), "nothing is in flight");
        first.set(true);
        first.set(true);
        second.set(true);
        assert!(waits.any() && !other.any(), "another tenant's do not count");
        first.set(false);
        first.set(false);
        assert!(waits.any(), "the second is busy still");
        drop(second);
        assert!(!waits.any(), "one that is gone, with what it had in flight, is not busy");
    }

    #[test]
    fn operations_in_a_row_leave_no_gap() {
        let mut gaps = Gaps::default();
        let turns: Vec<(u64, Leave)> =
            (0..1000).map(|round| (round, gaps.leave(at(round * 100), round % 3 > 0))).collect();
        assert!(turns.iter().all(|(_, leave)| *leave != Leave::Whole));
        let actions: Vec<u64> =
            turns.iter().filter(|(_, leave)| *leave == Leave::Action).map(|(round, _)| round * 100).collect();
        assert_eq!(actions, [20_000, 40_000, 60_000, 80_000], "one action each time that patience ends");
    }

    #[test]
    fn patience_counts_from_the_last_turn() {
        let mut gaps = Gaps::default();
        gaps.leave(at(0), false);
        assert_eq!(gaps.leave(at(500), false), Leave::Whole);
        assert_eq!((gaps.leave(at(1000), true), gaps.due()), (Leave::Nothing, Some(at(20_500))));
        assert_eq!(gaps.leave(at(20_500), true), Leave::Action);
        assert_eq!((gaps.leave(at(20_501), true), gaps.due()), (Leave::Nothing, Some(at(40_500))));
    }
}
