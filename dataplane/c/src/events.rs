//! The tenant's events.

use crate::agreement::clause_bits;
use crate::client::harmonaize_client_t;
use crate::error::{Failure, alone, call, create, free, given, result};
use crate::status::harmonaize_status_t;
use harmonaize_client::{
    CongestionLevel, Error, Event, EventCursor, EventKind, Events, Rank, StragglerCause,
};
use std::ffi::{CString, c_char};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

/// Others' traffic slows the tenant's communicators: `level`.
pub const HARMONAIZE_EVENT_CONGESTION: u32 = 1;
/// Something of the network is out of use, which slows them: `level`.
pub const HARMONAIZE_EVENT_CAPACITY: u32 = 2;
/// Ranks are lost: `ranks`, and `at_ns` until when the others are expected to regroup, 0 where that was not agreed on.
pub const HARMONAIZE_EVENT_FAILURE: u32 = 3;
/// The hosts of `ranks` will be taken away, the first at `at_ns`; of none: it is called off, or over.
pub const HARMONAIZE_EVENT_MAINTENANCE: u32 = 4;
/// Some operations of the tenant's take another way since then.
pub const HARMONAIZE_EVENT_PLAN_CHANGED: u32 = 5;
/// `waiting` processes wait to be taken in when members regroup.
pub const HARMONAIZE_EVENT_NEWCOMERS: u32 = 6;
/// Of what was agreed on, `clauses` are not kept now; none: it is kept again.
pub const HARMONAIZE_EVENT_AGREEMENT_BROKEN: u32 = 7;
/// It went on from another, and `clauses` of what was agreed on cannot be had any more.
pub const HARMONAIZE_EVENT_AGREEMENT_ENDED: u32 = 8;
/// Of the communicator these `ranks`, and no others, call late and hold its operations up; none: no rank does any more.
pub const HARMONAIZE_EVENT_COMPUTE_STRAGGLERS: u32 = 9;
/// This one of `ranks` is behind a slow link and holds the communicator's operations up; none: it does no more.
pub const HARMONAIZE_EVENT_NETWORK_STRAGGLERS: u32 = 10;
/// An event that this version has no name for.
pub const HARMONAIZE_EVENT_OTHER: u32 = 0;

/// Nothing worth reporting.
pub const HARMONAIZE_LEVEL_NONE: u32 = 0;
/// Up to half of the expected rate is lost.
pub const HARMONAIZE_LEVEL_MILD: u32 = 1;
/// More than half of the expected rate is lost.
pub const HARMONAIZE_LEVEL_SEVERE: u32 = 2;

/// A reader of the tenant's events, over all its communicators. Any thread may use it, one at a time: while one reads, others
/// are answered `HARMONAIZE_ERROR_IN_USE`. One reader of an attachment can wait at a time.
pub struct harmonaize_events_t(Mutex<Reader>);

struct Reader {
    events: Events,
    batch: Vec<Shown>,
}

/// An event, and what its pointers point to.
struct Shown {
    event: harmonaize_event_t,
    _communicator: CString,
    _ranks: Vec<u32>,
}

/// Where a reader stands in its tenant's feed of events.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct harmonaize_cursor_t {
    /// The feed.
    pub feed: u64,
    /// The next event's number.
    pub next: u64,
}

/// Something that the provider tells a tenant.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct harmonaize_event_t {
    /// Its number in the tenant's feed, from 0, without gaps.
    pub number: u64,
    /// Since when, in nanoseconds since 1970.
    pub since_ns: u64,
    /// The communicator, by its name.
    pub communicator: *const c_char,
    /// What it says: `HARMONAIZE_EVENT_...`. The fields that its comment does not name are 0 or NULL.
    pub kind: u32,
    /// How much is lost: `HARMONAIZE_LEVEL_...`.
    pub level: u32,
    /// Ranks of the communicator, ascending.
    pub ranks: *const u32,
    /// How many those are.
    pub rank_count: usize,
    /// A time in nanoseconds since 1970.
    pub at_ns: u64,
    /// How many processes wait.
    pub waiting: u32,
    /// The sum of `HARMONAIZE_CLAUSE_...`.
    pub clauses: u32,
}

impl Shown {
    fn new(event: Event) -> Self {
        let Event { number, mut communicator, kind, since_ns } = event;
        communicator.retain(|letter| letter != '\0');
        let communicator = CString::new(communicator).unwrap_or_default();
        let mut shown = harmonaize_event_t {
            number,
            since_ns,
            communicator: communicator.as_ptr(),
            kind: HARMONAIZE_EVENT_OTHER,
            level: HARMONAIZE_LEVEL_NONE,
            ranks: ptr::null(),
            rank_count: 0,
            at_ns: 0,
            waiting: 0,
            clauses: 0,
        };
        let mut concerned: Vec<Rank> = Vec::new();
        shown.kind = match kind {
            EventKind::Congestion(level) => {
                shown.level = level_code(level);
                HARMONAIZE_EVENT_CONGESTION
            }
            EventKind::Capacity(level) => {
                shown.level = level_code(level);
                HARMONAIZE_EVENT_CAPACITY
            }
            EventKind::Failure { ranks, regroup_by_ns } => {
                (concerned, shown.at_ns) = (ranks, regroup_by_ns);
                HARMONAIZE_EVENT_FAILURE
            }
            EventKind::Maintenance { ranks, at_ns } => {
                (concerned, shown.at_ns) = (ranks, at_ns);
                HARMONAIZE_EVENT_MAINTENANCE
            }
            EventKind::PlanChanged => HARMONAIZE_EVENT_PLAN_CHANGED,
            EventKind::Newcomers { waiting } => {
                shown.waiting = waiting;
                HARMONAIZE_EVENT_NEWCOMERS
            }
            EventKind::AgreementBroken { clauses } => {
                shown.clauses = clause_bits(&clauses);
                HARMONAIZE_EVENT_AGREEMENT_BROKEN
            }
            EventKind::AgreementEnded { clauses } => {
                shown.clauses = clause_bits(&clauses);
                HARMONAIZE_EVENT_AGREEMENT_ENDED
            }
            EventKind::Stragglers { cause, ranks } => {
                concerned = ranks;
                match cause {
                    StragglerCause::Compute => HARMONAIZE_EVENT_COMPUTE_STRAGGLERS,
                    StragglerCause::Network => HARMONAIZE_EVENT_NETWORK_STRAGGLERS,
                }
            }
        };
        let ranks: Vec<u32> = concerned.into_iter().map(|rank| rank.0).collect();
        if !ranks.is_empty() {
            (shown.ranks, shown.rank_count) = (ranks.as_ptr(), ranks.len());
        }
        Self { event: shown, _communicator: communicator, _ranks: ranks }
    }
}

fn level_code(level: CongestionLevel) -> u32 {
    match level {
        CongestionLevel::None => HARMONAIZE_LEVEL_NONE,
        CongestionLevel::Mild => HARMONAIZE_LEVEL_MILD,
        CongestionLevel::Severe => HARMONAIZE_LEVEL_SEVERE,
    }
}

impl harmonaize_events_t {
    /// The reader, for this thread alone.
    fn alone(&self) -> Result<MutexGuard<'_, Reader>, Failure> {
        alone(&self.0, "another thread reads these events")
    }
}

/// Makes a reader of events. It goes on from where another stood, maybe in another process; with NULL it begins with what
/// happens after its first read.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_events_create(
    client: Option<&harmonaize_client_t>,
    from: Option<&harmonaize_cursor_t>,
    events: Option<&mut MaybeUninit<Option<Box<harmonaize_events_t>>>>,
) -> harmonaize_status_t {
    create(events, || {
        let from = from.map(|from| EventCursor { feed: from.feed, next: from.next });
        let events = given(client, "client")?.0.events(from);
        Ok(harmonaize_events_t(Mutex::new(Reader { events, batch: Vec::new() })))
    })
}

/// Reads the next events: returns as soon as there are some, or without any after so long. Says how many there are, to be had by
/// `harmonaize_events_get`, and how many were missed because the reader came too late; `missed` may be NULL.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_events_read(
    events: Option<&harmonaize_events_t>,
    wait_ns: u64,
    count: Option<&mut MaybeUninit<usize>>,
    missed: Option<&mut MaybeUninit<u64>>,
) -> harmonaize_status_t {
    call(|| {
        let place = result(count)?;
        let mut reader = given(events, "reader of events")?.alone()?;
        let batch = reader.events.read(Duration::from_nanos(wait_ns))?;
        reader.batch = batch.events.into_iter().map(Shown::new).collect();
        place.write(reader.batch.len());
        if let Some(missed) = missed {
            missed.write(batch.missed);
        }
        Ok(())
    })
}

/// Gives one of the events of the last read. Its pointers are the reader's, and hold until it reads again or is freed.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_events_get(
    events: Option<&harmonaize_events_t>,
    index: usize,
    event: Option<&mut MaybeUninit<harmonaize_event_t>>,
) -> harmonaize_status_t {
    call(|| {
        let place = result(event)?;
        let reader = given(events, "reader of events")?.alone()?;
        let shown = reader.batch.get(index);
        let shown =
            shown.ok_or_else(|| Failure::argument(format!("event {index} of {}", reader.batch.len())))?;
        place.write(shown.event);
        Ok(())
    })
}

/// Says where a reader stands, so that a later one can go on there. Not before its first read has returned.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_events_cursor(
    events: Option<&harmonaize_events_t>,
    cursor: Option<&mut MaybeUninit<harmonaize_cursor_t>>,
) -> harmonaize_status_t {
    call(|| {
        let place = result(cursor)?;
        let stands = given(events, "reader of events")?.alone()?.events.cursor();
        let stands = stands
            .ok_or_else(|| Error::Events("nothing was read yet, so the reader stands nowhere".into()))?;
        place.write(harmonaize_cursor_t { feed: stands.feed, next: stands.next });
        Ok(())
    })
}

/// Frees a reader of events. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_events_free(events: Option<Box<harmonaize_events_t>>) {
    free(events);
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_client::Clause;

    fn shown(kind: EventKind) -> Shown {
        Shown::new(Event { number: 3, communicator: "run/job".to_owned(), kind, since_ns: 9 })
    }

    #[test]
    fn events_have_what_their_kind_names() {
        let lost = shown(EventKind::Failure { ranks: vec![Rank(1), Rank(4)], regroup_by_ns: 7 });
        let event = lost.event;
        assert_eq!(
            (event.kind, event.rank_count, event.at_ns, event.number),
            (HARMONAIZE_EVENT_FAILURE, 2, 7, 3)
        );
        // SAFETY: the event's owner lives.
        let ranks = unsafe { crate::error::slice(event.ranks, event.rank_count, "ranks") };
        assert_eq!(ranks.unwrap(), [1, 4]);
        // SAFETY: as above.
        assert_eq!(unsafe { std::ffi::CStr::from_ptr(event.communicator) }, c"run/job");
        let broken =
            shown(EventKind::AgreementBroken { clauses: vec![Clause::Completion, Clause::Order] }).event;
        assert_eq!((broken.clauses, broken.ranks), (1 << 1 | 1 << 8, ptr::null()));
        let slow = shown(EventKind::Congestion(CongestionLevel::Severe)).event;
        assert_eq!((slow.kind, slow.level), (HARMONAIZE_EVENT_CONGESTION, HARMONAIZE_LEVEL_SEVERE));
        let late = |cause, ranks: &[u32]| {
            let ranks = ranks.iter().copied().map(Rank).collect();
            let late = shown(EventKind::Stragglers { cause, ranks }).event;
            (late.kind, late.rank_count, late.level)
        };
        assert_eq!(late(StragglerCause::Compute, &[2, 3]), (HARMONAIZE_EVENT_COMPUTE_STRAGGLERS, 2, 0));
        assert_eq!(late(StragglerCause::Network, &[]), (HARMONAIZE_EVENT_NETWORK_STRAGGLERS, 0, 0));
    }
}
